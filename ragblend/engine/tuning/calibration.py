"""Calibrations of rules, and the rule and ratio of a request. `ragblend calibrate` writes one per model, prefix and
chunker, ingestion one per model and prefix:

    STORE/calibrations/MODEL_AND_PREFIX-CHUNKER.json
    STORE/calibrations/MODEL_AND_PREFIX-stored-chunks.json

A calibration holds, for every rule that was measured, the ratio that met the target and the measured curve. That of
`ragblend calibrate`, which is of the user's questions, is preferred.
`resolve_tuning` returns the rule and ratio of a request; `save_calibration` writes a calibration. Depends on
files and numbers, not on models, questions or the fitting.
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
from typing import Any, Literal, NamedTuple

from ragblend.engine.fusion.rules import RULES, find_rule
from ragblend.engine.report import BlendReport
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.signed_json import decode_signed_json
from ragblend.engine.store.format.signing import KeyChoice, resolve_key
from ragblend.engine.store.metadata import CALIBRATIONS_DIR
from ragblend.engine.tuning.loading_controller import interpolate
from ragblend.errors import UsageError
from ragblend.files.reading import read_file
from ragblend.options import RATIO, RatioChoice

log = logging.getLogger(__name__)

CALIBRATION_VERSION = 1
_SETTLED_S = 2.0  # seconds; a directory that changed this recently may change again without a new modification time
_PREFIXES_KEPT = 64
_OTHER_NAME = "its file name is that of another model, prefix or chunker"


class CurvePoint(NamedTuple):
    """Measurements at one ratio, over the questions of a calibration.

    Each answer is compared with full prefill's. At ratio 1, `agreement` is 1 and `kl` is 0, except for rounding.
    """

    ratio: float
    charged_budget: float  # mean over the questions, see `fusion.plan.charged_budget`
    agreement: float  # share of answers whose first token is full prefill's
    low: float  # 95 % interval of the agreement (Wilson)
    high: float
    kl: float  # mean KL(full || this) of the first token, in nats
    charged_budget_32: float  # the same as `charged_budget`, projected to a model of 32 layers


@dataclass(frozen=True, slots=True)
class RuleFit:
    """Measured curve of one selection rule, and the ratio chosen from it (1 if no ratio meets the target).

    `chosen_by`: "agreement" of the first tokens of many questions, or their "kl" on a few prompts of stored chunks
    (`ingestion.self_calibration`), which are too few for an agreement.
    """

    rule: str
    check_layer: int  # layer at which the rule selects the tokens to recompute
    ratio: float
    meets_target: bool  # False if no ratio does, not even 1
    curve: tuple[CurvePoint, ...]  # ascending ratios, from 0 to 1
    chosen_by: Literal["agreement", "kl"] = "agreement"

    def __post_init__(self) -> None:
        ratios = [point.ratio for point in self.curve]
        if self.rule not in RULES or self.check_layer < 0:
            raise UsageError(
                f"a calibration has rule {self.rule!r} at layer {self.check_layer}, which this ragblend does not have"
            )
        if len(ratios) < 2 or ratios != sorted(set(ratios)) or ratios[0] != 0 or ratios[-1] != 1:
            raise UsageError(f"a calibration's curve has the ratios {ratios}; they must ascend from 0 to 1")
        shares = [share for point in self.curve for share in (point.agreement, point.low, point.high)]
        if not all(0 <= share <= 1 for share in (self.ratio, *shares)):
            raise UsageError("a calibration has a share that is not between 0 and 1")
        if not all(point.kl >= 0 and point.charged_budget >= 0 for point in self.curve):
            raise UsageError("a calibration has a negative KL or budget")
        if self.chosen_by not in ("agreement", "kl"):
            raise UsageError(f"a calibration's ratio was chosen by {self.chosen_by!r}, not by agreement or kl")

    @property
    def point(self) -> CurvePoint:
        """Return the measurements at the fitted ratio, `ratio`."""
        return next(point for point in self.curve if point.ratio >= self.ratio)

    def agreement_at(self, ratio: float) -> float:
        """Return the expected agreement with full prefill at `ratio`, interpolated linearly between measured ratios.

        The result never decreases as the ratio grows. Noise can make the measured agreement decrease. Each measured
        value is therefore replaced by the lowest value that was measured at this or a larger ratio.
        """
        shares = [point.agreement for point in self.curve]
        return interpolate(tuple((point.ratio, min(shares[place:])) for place, point in enumerate(self.curve)), ratio)

    def kl_at(self, ratio: float) -> float:
        """Return the expected KL(full || this) of the first token at `ratio`, in nats. It never grows with the ratio.

        Each measured value is replaced by the highest that was measured at this or a larger ratio.
        """
        values = [point.kl for point in self.curve]
        return interpolate(tuple((point.ratio, max(values[place:])) for place, point in enumerate(self.curve)), ratio)

    def predict(self, report: BlendReport, ratio: float) -> None:
        """Set the expected closeness at `ratio` in a request's report."""
        report.predicted_kl = self.kl_at(ratio)
        report.predicted_agreement = self.agreement_at(ratio) if self.chosen_by == "agreement" else None


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of one model, prefix and chunker: a RuleFit per rule, the best rule first.

    The best rule is the one with the smallest charged budget at its fitted ratio.
    """

    fingerprint: str  # of the model
    prefix_ids: tuple[int, ...]
    chunker: str
    created_s: float  # since the epoch
    target: float  # least share of first tokens that are full prefill's, with 95 % confidence
    num_questions: int
    retrieval: str  # description of how the questions' chunks were retrieved
    fits: tuple[RuleFit, ...]

    def __post_init__(self) -> None:
        if not self.fits or len({fit.rule for fit in self.fits}) != len(self.fits):
            raise UsageError("a calibration must have at least one fit, and one per rule")

    @property
    def ratio(self) -> float:
        """Return the fitted ratio of the best rule, r*."""
        return self.fits[0].ratio

    @property
    def rule(self) -> str:
        """Return the best rule."""
        return self.fits[0].rule

    @property
    def check_layer(self) -> int:
        """Return the check layer of the best rule."""
        return self.fits[0].check_layer

    def fit_of(self, rule: str) -> RuleFit | None:
        """Return the RuleFit of `rule`, or of the best rule for "auto"; None if `rule` was not measured."""
        return next((fit for fit in self.fits if rule in ("auto", fit.rule)), None)

    @property
    def is_of_stored_chunks(self) -> bool:
        """Return True if ingestion made it, on prompts of stored chunks."""
        return self.fits[0].chosen_by == "kl"

    @property
    def filename(self) -> str:
        """Return the file's name. A calibration of another model, prefix or chunker has another name."""
        if self.is_of_stored_chunks:
            return f"{_stem(self.fingerprint, self.prefix_ids)}-stored-chunks.json"
        chunker = hashlib.blake2b(self.chunker.encode(), digest_size=8).hexdigest()
        return f"{_stem(self.fingerprint, self.prefix_ids)}-{chunker}.json"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: `version`, and all fields as `calibration`."""
        body = asdict(self)
        for fit in body["fits"]:
            fit["curve"] = [point._asdict() for point in fit["curve"]]
        body = json.loads(json.dumps(body))
        return {"version": CALIBRATION_VERSION, "calibration": body}


def calibration_from_dict(facts: Mapping[str, Any]) -> Calibration:
    """Return the calibration that `as_dict` has converted to `facts`.

    Raises UsageError, and nothing else, for invalid values.
    """
    try:
        if facts["version"] != CALIBRATION_VERSION:
            raise UsageError(f"its version is {facts['version']!r}, this ragblend reads {CALIBRATION_VERSION}")
        body: Mapping[str, Any] = facts["calibration"]
        fits = tuple(
            RuleFit(**{**fit, "curve": tuple(CurvePoint(**point) for point in fit["curve"])}) for fit in body["fits"]
        )
        if not all(isinstance(body[name], str) for name in ("fingerprint", "chunker")):
            raise UsageError("it has no valid fingerprint or chunker")
        float(body["created_s"])
        ids = tuple(int(token) for token in body["prefix_ids"])
        return Calibration(**{**body, "prefix_ids": ids, "fits": fits})
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(f"it is no calibration ({type(error).__name__}: {error})") from error


def save_calibration(disk: DiskStore, calibration: Calibration) -> Path:
    """Write a calibration into the store, and return its path. An earlier one of the same name is replaced.

    Raises StoreFullError on a full disk, and StoreNotWritableError if the file cannot be written for another reason.
    """
    return disk.put_calibration(calibration.filename, calibration.as_dict())


def calibration_problem(path: Path, facts: Mapping[str, Any]) -> str:
    """Return the reason why a calibration file is invalid, or has the wrong name; "" if it is valid.

    `facts`: the JSON values in the file `path`. The result is also "" for a file that is no calibration, because
    `DiskStore.verify_metadata` checks files of all kinds with this function.
    """
    if path.parent.name != CALIBRATIONS_DIR:
        return ""
    try:
        return "" if calibration_from_dict(facts).filename == path.name else _OTHER_NAME
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
    """Return the calibration of this model and prefix in the store at `store_dir`; None if there is none.

    With `chunker` None, return the latest of all chunkers. That of stored chunks, which is of any chunker, is returned
    if there is no other. A file that is damaged, of another version, under a wrong
    name or not signed with the store's key is skipped with a warning.
    """
    calibrations: list[Calibration] = []
    key = resolve_key(store_key)
    for path in sorted((Path(store_dir) / CALIBRATIONS_DIR).glob(f"{_stem(fingerprint, prefix_ids)}-*.json")):
        try:
            calibration = calibration_from_dict(decode_signed_json(read_file(path), CALIBRATIONS_DIR, key))
            if path.name != calibration.filename:
                raise UsageError(_OTHER_NAME)
        except (OSError, ValueError) as error:  # UsageError is a ValueError
            log.warning("calibration %s is skipped: %s; make it again: ragblend calibrate", path, error)
            continue
        if calibration.is_of_stored_chunks or chunker in (None, calibration.chunker):
            calibrations.append(calibration)
    return max(calibrations, key=lambda each: (not each.is_of_stored_chunks, each.created_s), default=None)


class CalibrationCache:
    """Finds calibrations of one model in one store. A changed file is read again. Safe to share between threads.

    `root`: the store's directory, or None for a store in memory, which has no calibrations. The attribute `chunker`
    selects the calibrations of one chunker. While it is None, the latest calibration of any chunker is found.
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
        """Return the calibration for prompts that begin with `prefix_ids`; None if there is none."""
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

    def resolve_tuning(self, prefix_ids: tuple[int, ...], rule: str, recompute_ratio: RatioChoice) -> RequestTuning:
        """Return the tuning of a request with these options, whose prompt begins with `prefix_ids`.

        Rule "auto" becomes the calibration's best rule; without a calibration, the default rule. Ratio None or "auto"
        becomes the rule's calibrated ratio; the rule's own default if the rule is not calibrated. Other values are
        unchanged. Raises UsageError for an unknown rule or an invalid ratio. The first call whose ratio is "auto" and
        whose rule is not calibrated logs a warning.
        """
        default, calibration = find_rule(rule, self._num_layers), self.find(prefix_ids)
        fit = calibration.fit_of(rule) if calibration is not None else None
        name, least = (default.name, default.ratio) if fit is None else (fit.rule, fit.ratio)
        tuning = RequestTuning(name, least, fit, is_auto_rule=rule == "auto", adapts_ratio=True)
        if recompute_ratio is not None and RATIO.validate("recompute_ratio", recompute_ratio) != "auto":
            return tuning._replace(recompute_ratio=float(recompute_ratio), adapts_ratio=False)
        if fit is None and recompute_ratio == "auto" and not self._warned:
            self._warned = True
            log.warning(
                "recompute_ratio 'auto' is the default, %g: rule %r has no calibration for this model and prefix in "
                "%s. To make one: ragblend calibrate --store DIR --model MODEL",
                least,
                rule,
                self._root or "a store in memory",
            )
        return tuning


class RequestTuning(NamedTuple):
    """Rule and ratio of one request in mode "blend", as the engine uses them."""

    rule: str
    recompute_ratio: float
    fit: RuleFit | None = None  # calibration of the rule; None if the rule is not calibrated
    is_auto_rule: bool = False  # rule "auto" was requested; a rule without a probe replaces it for a long question
    adapts_ratio: bool = False  # no number was requested as ratio; an engine may raise it where that costs no time

    @property
    def check_layer(self) -> int | None:
        """Calibrated layer at which the rule selects tokens; None: the model's default."""
        return None if self.fit is None else self.fit.check_layer


def _stem(fingerprint: str, prefix_ids: Sequence[int]) -> str:
    return chunk_key(fingerprint, prefix_ids, ())
