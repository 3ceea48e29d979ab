"""Logs to shares: what prefix caching reuses of the prompts, what only stored chunks would, and what is new.

Requests are read in the order of their times, each compared with all before it. Read `analyze`; the parts are `reader`
(logs to token ids), `prefix_cache`, `passages` (repeated text), `curve` (hits over a store's size) and `cost_model`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.lab.traffic.cost_model import BY_THE_PAPER, BlendSettings, PromptTokenCounts, Saving, mean_saving
from ragblend.lab.traffic.curve import Uses, capacities_of, lru_hits, most_hits, sampled, uses_of, zipf_slope
from ragblend.lab.traffic.passages import Passages
from ragblend.lab.traffic.prefix_cache import PrefixCache, namespace_seed
from ragblend.lab.traffic.reader import Progress, RequestFile, read_requests
from ragblend.lab.traffic.requests import NO_MARKERS, ChunkMarkers
from ragblend.lab.traffic.tokens import Tokens

TOP = 10  # chunks that are listed
SHOWN_TOKENS = 60  # of a chunk's text, with --show-texts


@dataclass(frozen=True, slots=True)
class AnalysisConfig:
    """What is counted with: marks of chunks, how blending is done, the profile of a machine and its KV."""

    markers: ChunkMarkers = NO_MARKERS
    blend: BlendSettings = BY_THE_PAPER
    profile: MachineProfile | None = None
    kv_bytes_per_token: int | None = None
    show_texts: bool = False


@dataclass(frozen=True, slots=True)
class HitCurvePoint:
    """A store of some size, and the share of all prompt tokens that it finds: by LRU, and by any policy at most."""

    tokens: int
    bytes: int | None
    lru: float
    most: float


@dataclass(frozen=True, slots=True)
class RepeatedPassage:
    """A chunk that came again: its hash, its tokens, and the requests that need it from a store."""

    hash: str
    tokens: int
    requests: int
    text: str | None


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found, named as in the JSON. Shares are of all prompt tokens."""

    traces: tuple[str, ...]  # the files
    num_requests: int
    num_tokens: int
    tokens_by: str
    tokens_are_estimated: bool
    order: str  # "time", "file", or "time where there is one"
    num_broken: int
    broken: list[str]
    num_other: int  # logged values that are no requests, or have no text
    num_media: int
    shares: dict[str, float]  # in a prefix seen before, seen before at another place ("elsewhere"), and "new"
    first_use_share: float  # of new tokens of chunks that come again later
    marked_share: float  # of tokens of chunks whose boundaries are known
    num_chunks: int
    chunks: tuple[RepeatedPassage, ...]
    zipf: dict[str, float] | None
    kv_bytes_per_token: int | None
    curve: tuple[HitCurvePoint, ...]
    curve_share: float  # of the repeated tokens that the curve was computed on
    saving: Saving
    kept_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        facts = asdict(self) | {"saving": self.saving.as_dict()}
        for chunk in facts["chunks"]:
            if chunk["text"] is None:
                del chunk["text"]
        return facts


def analyze(
    paths: Sequence[str | Path],
    tokens: Tokens,
    config: AnalysisConfig = AnalysisConfig(),
    progress: Progress | None = None,
) -> Analysis:
    """Read logs and compute what blending would save. Raises EmptyCorpusError where there is no request in them."""
    with read_requests(paths, tokens, config.markers, progress) as requests:
        return _analyze(requests, tokens, config, progress)


def _analyze(requests: RequestFile, tokens: Tokens, config: AnalysisConfig, progress: Progress | None) -> Analysis:
    prefixes, passages, num_marked = PrefixCache(), Passages(), 0
    counts = array("i"), array("i"), array("i")  # of each request: tokens, in its prefix, elsewhere
    for index, request in enumerate(requests.in_order()):
        seed = namespace_seed(request.namespace)
        prefix = prefixes.see(request.ids, request.answer, seed)
        elsewhere = passages.see(index, request.ids, request.chunks, prefix, seed)
        for column, value in zip(counts, (len(request.ids), prefix, elsewhere), strict=True):
            column.append(value)
        num_marked += sum(end - start for start, end in request.chunks)
        if progress is not None:
            progress("analyse", index + 1, len(requests))
    num_tokens, num_prefix, num_elsewhere = map(sum, counts)
    uses = uses_of(passages)
    chunks = merged(uses, passages.starts)
    zipf = zipf_slope(np.array([count for _, _, count in chunks], np.int64))
    curve, curve_share = _curve(uses, num_tokens, num_elsewhere, config.kv_bytes_per_token)
    return Analysis(
        traces=requests.files,
        num_requests=len(requests),
        num_tokens=num_tokens,
        tokens_by=tokens.name,
        tokens_are_estimated=tokens.is_estimate,
        order={0: "file", len(requests): "time"}.get(requests.num_timed, "time where there is one"),
        num_broken=requests.errors.count,
        broken=requests.errors.places,
        num_other=requests.num_other,
        num_media=requests.num_media,
        shares={
            "prefix": num_prefix / num_tokens,
            "elsewhere": num_elsewhere / num_tokens,
            "new": (num_tokens - num_prefix - num_elsewhere) / num_tokens,
        },
        first_use_share=int(uses.sizes.sum()) / num_tokens,
        marked_share=num_marked / num_tokens,
        num_chunks=len(chunks),
        chunks=_top(chunks, passages, tokens if config.show_texts else None),
        zipf=None if zipf is None else {"slope": zipf[0], "r_squared": zipf[1]},
        kv_bytes_per_token=config.kv_bytes_per_token,
        curve=curve,
        curve_share=curve_share,
        saving=mean_saving(map(PromptTokenCounts, *counts), config.blend, config.profile),
        kept_bytes=prefixes.nbytes + passages.nbytes,
    )


def _top(
    chunks: Sequence[tuple[int, int, int]], passages: Passages, tokens: Tokens | None
) -> tuple[RepeatedPassage, ...]:
    """The chunks that most requests need; with `tokens`, how they begin."""
    found = []
    for start, end, count in sorted(chunks, key=lambda each: (-each[2], each[0]))[:TOP]:
        ids = passages.ids(start, end)
        text = None if tokens is None else tokens.text(ids[:SHOWN_TOKENS].tolist())
        found.append(RepeatedPassage(xxhash.xxh3_64_hexdigest(ids.tobytes()), end - start, count, text))
    return tuple(found)


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


def _curve(
    uses: Uses, num_tokens: int, num_elsewhere: int, bytes_per_token: int | None
) -> tuple[tuple[HitCurvePoint, ...], float]:
    """Hits over the size of a store, and the share of the repeated tokens that they are computed from.

    A store with room for everything finds `num_elsewhere` of `num_tokens`.
    """
    some, share = sampled(uses)
    total = int(some.sizes.sum())
    if not total:
        return (), 1.0
    scale = num_elsewhere / num_tokens / max(1, most_hits(some, total))
    points = []
    for capacity in capacities_of(total):
        size = capacity / share
        nbytes = None if bytes_per_token is None else round(size * bytes_per_token)
        lru, most = lru_hits(some, capacity) * scale, most_hits(some, capacity) * scale
        points.append(HitCurvePoint(round(size), nbytes, lru, most))
    return tuple(points), share
