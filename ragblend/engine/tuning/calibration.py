"""What `ragblend calibrate` found for one model, prefix and chunker, and what follows from it for a request.

    STORE/calibrations/MODEL_AND_PREFIX-CHUNKER.json

A calibration holds, for every rule that was measured, the ratio that met the target and the curve it was read from.
`resolve_request_tuning` turns what a request asks for into a rule and a ratio; that is all an engine needs. `keep`
writes one. Knows files and numbers; nothing about models, questions or how to fit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.engine.fusion.rules import RULES, find_rule
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.metadata import CALIBRATIONS_DIR
from ragblend.engine.store.signed_json import decode_signed_json
from ragblend.engine.store.signing import KeyChoice, StoreKey, resolve_key
from ragblend.engine.tuning.loading_controller import interpolate
from ragblend.errors import UsageError
from ragblend.files.reading import read_file
from ragblend.options import RATIO, RatioChoice

log = logging.getLogger(__name__)

CALIBRATION_VERSION = 2
_SETTLED_S = 2.0  # a directory that changed this lately may change again within one tick of its clock
_PREFIXES_KEPT = 64


class CurvePoint(NamedTuple):
    """One ratio, as measured over the questions of a calibration.

    `agreement`: share of answers whose first token is full prefill's; `low`, `high`: its 95 % interval (Wilson). `kl`:
    mean KL(full || this) of the first token, nats. At ratio 1 both tell what rounding alone does.
    """

    ratio: float
    charged_budget: float
    agreement: float
    low: float
    high: float
    kl: float
    charged_budget_32: float


@dataclass(frozen=True, slots=True)
class RuleFit:
    """One rule, read at one check layer: what was measured of it, and the ratio that meets the target."""

    rule: str
    check_layer: int
    ratio: float
    meets_target: bool  # False: not even ratio 1 did
    curve: tuple[CurvePoint, ...]  # ascending ratios, from 0 to 1

    def __post_init__(self) -> None:
        ratios = [point.ratio for point in self.curve]
        if self.rule not in RULES or self.check_layer < 0:
            raise UsageError(
                f"a calibration has rule {self.rule!r} at layer {self.check_layer}; there is no such rule here"
            )
        if len(ratios) < 2 or ratios != sorted(set(ratios)) or ratios[0] != 0 or ratios[-1] != 1:
            raise UsageError(f"a calibration's curve has the ratios {ratios}; they must ascend from 0 to 1")
        shares = [share for point in self.curve for share in (point.agreement, point.low, point.high)]
        if not all(0 <= share <= 1 for share in (self.ratio, *shares)):
            raise UsageError("a calibration has a share that is not between 0 and 1")
        if not all(point.kl >= 0 and point.charged_budget >= 0 for point in self.curve):
            raise UsageError("a calibration has a negative KL or budget")

    @property
    def rule_and_layer(self) -> tuple[str, int]:
        """Rule and check layer, as `rules.settle` takes them."""
        return self.rule, self.check_layer

    @property
    def point(self) -> CurvePoint:
        """What was measured at the fitted ratio."""
        return next(point for point in self.curve if point.ratio >= self.ratio)

    def agreement_at(self, ratio: float) -> float:
        """Agreement to expect at `ratio`, between measured ratios on a straight line.

        It never falls with the ratio: of a ratio is expected what it and every larger one reached.
        """
        shares = [point.agreement for point in self.curve]
        return interpolate(tuple((point.ratio, min(shares[place:])) for place, point in enumerate(self.curve)), ratio)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration: what it was made for, and a fit per rule, the best first."""

    fingerprint: str  # of the model
    prefix_ids: tuple[int, ...]
    chunker: str
    created_s: float  # since the epoch
    target: float  # share of first tokens that are full prefill's, promised with 95 % confidence
    num_questions: int
    retrieval: str  # for people: how the questions got their chunks
    fits: tuple[RuleFit, ...]

    def __post_init__(self) -> None:
        if not self.fits or len({fit.rule for fit in self.fits}) != len(self.fits):
            raise UsageError("a calibration needs one fit per rule, and one at least")

    @property
    def ratio(self) -> float:
        """The best fit's ratio: r*."""
        return self.fits[0].ratio

    @property
    def rule(self) -> str:
        """The best fit's rule."""
        return self.fits[0].rule

    @property
    def check_layer(self) -> int:
        """The layer at which the best fit's rule is read."""
        return self.fits[0].check_layer

    def fit_of(self, rule: str) -> RuleFit | None:
        """The fit of `rule`; of "auto" the best one."""
        return next((fit for fit in self.fits if rule in ("auto", fit.rule)), None)

    @property
    def filename(self) -> str:
        """Where it is kept: equal exactly when model, prefix and chunker are."""
        chunker = hashlib.blake2b(self.chunker.encode(), digest_size=8).hexdigest()
        return f"{_stem(self.fingerprint, self.prefix_ids)}-{chunker}.json"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: `version`, and the rest as `calibration`."""
        body = asdict(self)
        for fit in body["fits"]:
            fit["curve"] = [point._asdict() for point in fit["curve"]]
        body = json.loads(json.dumps(body))
        return {"version": CALIBRATION_VERSION, "calibration": body}


def parse_calibration(data: bytes, store_key: StoreKey | None = None) -> Calibration:
    """The calibration in a file, signed where there is a key. Raises UsageError, and nothing else, for any `data`."""
    try:
        note = decode_signed_json(data, CALIBRATIONS_DIR, store_key)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return calibration_from_dict(note)


def calibration_from_dict(note: Mapping[str, Any]) -> Calibration:
    """The calibration that `as_dict` gave. Raises UsageError, and nothing else."""
    try:
        if note["version"] != CALIBRATION_VERSION:
            raise UsageError(f"its version is {note['version']!r}, this ragblend reads {CALIBRATION_VERSION}")
        body: Mapping[str, Any] = note["calibration"]
        fits = tuple(
            RuleFit(**{**fit, "curve": tuple(CurvePoint(**point) for point in fit["curve"])}) for fit in body["fits"]
        )
        if not all(isinstance(body[name], str) for name in ("fingerprint", "chunker")):
            raise UsageError("it does not say what it was made for")
        float(body["created_s"])
        ids = tuple(int(token) for token in body["prefix_ids"])
        return Calibration(**{**body, "prefix_ids": ids, "fits": fits})
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(f"it is no calibration ({type(error).__name__}: {error})") from error


def save_calibration(disk: DiskStore, calibration: Calibration) -> Path:
    """Write it into the store, in place of the one for the same model, prefix and chunker. Raises what `put` raises."""
    return disk.put_calibration(calibration.filename, calibration.as_dict())


def calibration_error(path: Path, note: Mapping[str, Any]) -> str:
    """What is wrong with a calibration's file at `path` that holds `note`; "" for nothing, or for another kind of file.

    For `DiskStore.verify_notes`.
    """
    if path.parent.name != CALIBRATIONS_DIR:
        return ""
    try:
        return "" if calibration_from_dict(note).filename == path.name else "it was made for something else"
    except UsageError as error:
        return str(error)


def load_calibration(
    store_dir: str | Path,
    fingerprint: str,
    prefix_ids: Sequence[int],
    chunker: str | None = None,
    *,
    store_key: KeyChoice = "auto",
) -> Calibration | None:
    """The calibration of this model and prefix in the store at `store_dir`; None where there is none.

    `chunker` None takes the latest. A file that is damaged, of another version, of something else or not signed with
    the store's key is skipped with a warning.
    """
    found: list[Calibration] = []
    key = resolve_key(store_key)
    for path in sorted((Path(store_dir) / CALIBRATIONS_DIR).glob(f"{_stem(fingerprint, prefix_ids)}-*.json")):
        try:
            calibration = parse_calibration(read_file(path), key)
            if path.name != calibration.filename:
                raise UsageError("it was made for something else")
        except (OSError, UsageError) as error:
            log.warning("calibration %s is skipped: %s; make it again: ragblend calibrate", path, error)
            continue
        if chunker in (None, calibration.chunker):
            found.append(calibration)
    return max(found, key=lambda calibration: calibration.created_s, default=None)


class CalibrationCache:
    """The calibrations of one model in one store, read again when they change. Safe to share between threads.

    root: the store's directory; None finds nothing. `chunker` may be set later: whoever knows the index knows it.
    """

    def __init__(self, root: Path | None, fingerprint: str, num_layers: int, store_key: KeyChoice = "auto") -> None:
        self.chunker: str | None = None
        self._root = root
        self._store_key = store_key
        self._fingerprint = fingerprint
        self._num_layers = num_layers
        self._known: dict[tuple[tuple[int, ...], str | None], Calibration | None] = {}
        self._stamp_ns = -1
        self._warned = False
        self._lock = threading.Lock()

    def find(self, prefix_ids: tuple[int, ...]) -> Calibration | None:
        """The calibration for prompts that begin with `prefix_ids`."""
        if self._root is None:
            return None
        key = (prefix_ids, self.chunker)
        with self._lock:
            try:
                stamp_ns = (self._root / CALIBRATIONS_DIR).stat().st_mtime_ns
            except OSError:
                stamp_ns = 0
            if stamp_ns != self._stamp_ns or time.time() - stamp_ns / 1e9 < _SETTLED_S:
                self._known.clear()
                self._stamp_ns = stamp_ns
            if key not in self._known:
                if len(self._known) >= _PREFIXES_KEPT:
                    self._known.clear()
                self._known[key] = (
                    load_calibration(self._root, self._fingerprint, *key, store_key=self._store_key)
                    if stamp_ns
                    else None
                )
            return self._known[key]

    def resolve_request_tuning(
        self,
        prefix_ids: tuple[int, ...],
        rule: str,
        ratio: RatioChoice,
    ) -> RequestTuning:
        """`resolve_request_tuning`, with the calibration for the prefix. An "auto" that finds none is told in the log,
        once."""
        choice = resolve_request_tuning(self.find(prefix_ids), self._num_layers, rule, ratio)
        if choice.fit is None and ratio == "auto" and not self._warned:
            self._warned = True
            log.warning(
                "ratio 'auto' is %g: nothing is calibrated for rule %r with this model and prefix in %s. "
                "Calibrate: ragblend calibrate --store DIR --model MODEL",
                choice.ratio,
                rule,
                self._root or "a store in memory",
            )
        return choice


class RequestTuning(NamedTuple):
    """How to answer one request. `fit` is what was measured of that rule; None: nothing was.

    `is_auto_ratio`: the caller left the ratio open, so it may be raised where recompute costs no time.
    """

    rule: str
    ratio: float
    fit: RuleFit | None
    is_auto_ratio: bool


def resolve_request_tuning(
    calibration: Calibration | None,
    num_layers: int,
    rule: str = "auto",
    ratio: RatioChoice = None,
) -> RequestTuning:
    """Return rule and ratio of a request that asks for `rule` and `ratio`.

    What is asked for counts. An "auto" rule is the calibration's best, or `rules`'s default; a ratio of None or "auto"
    is what was fitted, or the rule's default. Raises UsageError for a rule or a ratio that does not exist.
    """
    known = find_rule(rule, num_layers)
    fit = calibration.fit_of(rule) if calibration is not None else None
    name, least = (known.name, known.ratio) if fit is None else (fit.rule, fit.ratio)
    if ratio is None or RATIO.validate("recompute_ratio", ratio) == "auto":
        return RequestTuning(name, least, fit, is_auto_ratio=True)
    return RequestTuning(name, float(ratio), fit, is_auto_ratio=False)


def _stem(fingerprint: str, prefix_ids: Sequence[int]) -> str:
    return chunk_key(fingerprint, prefix_ids, ())
