"""Logs to shares: what prefix caching reuses of a team's prompts, what only stored chunks would, and what is new.

Two passes: the logs into a `Spool`, then its requests in the order of their times, each against all before it. Read
`analyze`; what is kept of the traffic meanwhile is told in `spool`, `hashes` and `passages`, 12 bytes per request here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ragblend.bench.traffic.curve import (
    Uses,
    capacities_of,
    lru_hits,
    most_hits,
    sampled,
    uses_of,
    zipf_slope,
)
from ragblend.bench.traffic.hashes import PrefixCache, namespace_seed
from ragblend.bench.traffic.logs import Broken
from ragblend.bench.traffic.passages import Passages
from ragblend.bench.traffic.reading import LogsRead, Tell, answered, logs_read
from ragblend.bench.traffic.requests import NO_MARKS, Marks
from ragblend.bench.traffic.saving import BY_THE_PAPER, Kind, Saving, Shape, saving_in_seconds, saving_in_tokens
from ragblend.bench.traffic.tokens import Ids, Tokens
from ragblend.engine.tuning.pipeline import MachineProfile

TOP = 10  # chunks that are named
SHOWN_TOKENS = 60  # of a chunk's text, with --show-texts


@dataclass(frozen=True, slots=True)
class Plan:
    """What is counted with: marks of chunks, how blending is done, the profile of a machine and its KV."""

    marks: Marks = NO_MARKS
    kind: Kind = BY_THE_PAPER
    profile: MachineProfile | None = None
    kv_bytes_per_token: int | None = None
    show_texts: bool = False


class Point(NamedTuple):
    """A store of some size, and the share of all prompt tokens that it finds."""

    tokens: float
    lru: float
    most: float


class Passage(NamedTuple):
    """A chunk that came again: its hash, its tokens, and the requests that need it from a store."""

    hash: str
    tokens: int
    requests: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found in a trace. Shares are of all prompt tokens."""

    traces: tuple[str, ...]
    num_requests: int
    num_tokens: int
    num_prefix: int
    num_elsewhere: int
    num_marked: int  # tokens of chunks whose boundaries are known
    num_first: int  # tokens, among the new ones, of chunks that come again later
    tokens_by: str
    is_estimate: bool
    order: str  # "time", "file", or "time where there is one"
    num_media: int
    num_other: int  # logged values that are no requests, or have no text
    broken: Broken
    num_chunks: int
    top: tuple[Passage, ...]
    zipf: tuple[float, float] | None
    kv_bytes_per_token: int | None
    curve: tuple[Point, ...]
    curve_share: float  # of the repeated tokens that the curve was computed on
    saving: Saving
    kept_bytes: int = field(default=0)

    def share(self, num_tokens: float) -> float:
        """Of all prompt tokens."""
        return num_tokens / self.num_tokens

    @property
    def shares(self) -> dict[str, float]:
        """Of the tokens: in a prefix seen before, seen before at another place, and new."""
        new = self.num_tokens - self.num_prefix - self.num_elsewhere
        return {
            "prefix": self.share(self.num_prefix),
            "elsewhere": self.share(self.num_elsewhere),
            "new": self.share(new),
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        per_token = self.kv_bytes_per_token
        return {
            "traces": list(self.traces),
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
            "tokens_by": self.tokens_by,
            "tokens_are_estimated": self.is_estimate,
            "order": self.order,
            "num_broken": self.broken.count,
            "broken": self.broken.places,
            "num_other": self.num_other,
            "num_media": self.num_media,
            "shares": self.shares,
            "first_use_share": self.share(self.num_first),
            "marked_share": self.share(self.num_marked),
            "num_chunks": self.num_chunks,
            "chunks": [
                {name: value for name, value in each._asdict().items() if value is not None} for each in self.top
            ],
            "zipf": None if self.zipf is None else {"slope": self.zipf[0], "r_squared": self.zipf[1]},
            "kv_bytes_per_token": per_token,
            "curve": [
                {"tokens": round(point.tokens), "bytes": None if per_token is None else round(point.tokens * per_token)}
                | {"lru": point.lru, "most": point.most}
                for point in self.curve
            ],
            "curve_share": self.curve_share,
            "saving": self.saving.as_dict(),
            "kept_bytes": self.kept_bytes,
        }


def analyze(paths: Sequence[str | Path], tokens: Tokens, plan: Plan = Plan(), tell: Tell | None = None) -> Analysis:
    """Read logs and say what blending would do for them. Raises EmptyCorpusError where there is no request in them."""
    tell = tell or (lambda stage, done, total: None)
    with logs_read(paths, tokens, plan.marks, tell) as logs:
        return _Trace(tokens).follow(logs, plan, tell)


class _Trace:
    """The second pass: requests in the order of their times."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._prefixes, self._passages = PrefixCache(), Passages()
        self._shapes = array("i"), array("i"), array("i")
        self._num_marked = 0

    def follow(self, logs: LogsRead, plan: Plan, tell: Tell) -> Analysis:
        """Every request, then the sums."""
        spool = logs.spool
        for index, request in enumerate(spool.in_order()):
            seed, answer = namespace_seed(request.namespace), answered(self._tokens, request.answer)
            self._see(index, request.ids, request.chunks, answer, seed)
            tell("analyse", index + 1, len(spool))
        uses = uses_of(self._passages)
        tokens, prefix, elsewhere = (int(np.frombuffer(each, np.int32).sum()) for each in self._shapes)
        orders = {0: "file", len(spool): "time"}
        curve, curve_share = _curve(uses, tokens, elsewhere)
        passages = merged(uses, self._passages.starts)
        return Analysis(
            traces=logs.traces,
            num_requests=len(spool),
            num_tokens=tokens,
            num_prefix=prefix,
            num_elsewhere=elsewhere,
            num_marked=self._num_marked,
            num_first=int(uses.sizes.sum()),
            tokens_by=self._tokens.name,
            is_estimate=self._tokens.is_estimate,
            order=orders.get(spool.num_timed, "time where there is one"),
            num_media=spool.num_media,
            num_other=logs.num_other,
            broken=logs.broken,
            num_chunks=len(passages),
            top=self._top(passages, plan.show_texts),
            zipf=zipf_slope(np.array([count for _, _, count in passages], np.int64)),
            kv_bytes_per_token=plan.kv_bytes_per_token,
            curve=curve,
            curve_share=curve_share,
            saving=self._saving(plan),
            kept_bytes=self._prefixes.nbytes + self._passages.nbytes,
        )

    def _see(self, index: int, ids: Ids, chunks: Sequence[tuple[int, int]], answer: Ids, seed: int) -> None:
        prefix = self._prefixes.see(ids, answer, seed)
        elsewhere = self._passages.see(index, ids, chunks, prefix, seed)
        for values, value in zip(self._shapes, (len(ids), prefix, elsewhere), strict=True):
            values.append(value)
        self._num_marked += sum(end - start for start, end in chunks)

    def _saving(self, plan: Plan) -> Saving:
        shapes = map(Shape, *self._shapes)
        if plan.profile is not None:
            return saving_in_seconds(shapes, plan.kind, plan.profile)
        return saving_in_tokens(shapes, plan.kind)

    def _top(self, passages: Sequence[tuple[int, int, int]], show_texts: bool) -> tuple[Passage, ...]:
        """The chunks that most requests need."""
        ordered = sorted(passages, key=lambda each: (-each[2], each[0]))
        return tuple(self._passage(start, end, count, show_texts) for start, end, count in ordered[:TOP])

    def _passage(self, start: int, end: int, count: int, show_text: bool) -> Passage:
        ids = self._passages.ids(start, end)
        text = self._tokens.text(ids[:SHOWN_TOKENS].tolist()) if show_text else None
        return Passage(xxhash.xxh3_64_hexdigest(ids.tobytes()), end - start, count, text)


def merged(uses: Uses, begins: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, end, requests) of chunks; neighbours that the same requests need are one, unless one `begins` there."""
    found: list[tuple[int, int, int]] = []
    marks = np.zeros(len(uses.sizes), np.uint64)  # of the set of requests
    np.add.at(marks, uses.chunks, (uses.requests.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    apart = np.isin(uses.starts, np.asarray(begins, np.int64)).tolist()
    last = None
    columns = (uses.starts.tolist(), uses.sizes.tolist(), uses.counts.tolist(), marks.tolist(), apart)
    for start, size, count, mark, begins_here in zip(*columns, strict=True):
        if found and not begins_here and found[-1][1] == start and (count, mark) == last:
            found[-1] = (found[-1][0], start + size, count)
        else:
            found.append((start, start + size, count))
        last = (count, mark)
    return found


def _curve(uses: Uses, num_tokens: int, num_elsewhere: int) -> tuple[tuple[Point, ...], float]:
    """Hits over the size of a store, and the share of the repeated tokens that it rests on.

    In shares of all prompt tokens; a store with room for everything finds `num_elsewhere` of them.
    """
    some, share = sampled(uses)
    total = int(some.sizes.sum())
    if not total:
        return (), 1.0
    grid = capacities_of(total)
    most = [most_hits(some, capacity) for capacity in grid]
    scale = num_elsewhere / num_tokens / max(1, most[-1])
    found = zip(grid, lru_hits(some, grid), most, strict=True)
    return tuple(Point(size / share, lru * scale, best * scale) for size, lru, best in found), share
