"""Logs to shares: what prefix caching reuses of the prompts, what only stored chunks would, and what is new.

Requests are read in the order of their times, each compared with all before it. Read `analyze`; the parts are `logs`
(to token ids), `passages` (what comes again), `curve` (hits over a store's size) and `cost_model`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.lab.traffic.cost_model import BlendSettings, PromptTokenCounts, mean_saving
from ragblend.lab.traffic.curve import Uses, lru_hits, merged, most_hits, sampled, uses_of, zipf_slope
from ragblend.lab.traffic.logs import Progress, read_requests
from ragblend.lab.traffic.passages import ENTRY_BYTES, Passages, PrefixCache
from ragblend.lab.traffic.tokens import Tokens

TOP = 10  # chunks that are listed
NUM_STORES = 8  # of the curve: for all that repeats, half of it, a quarter, ...
SHOWN_TOKENS = 60  # of a chunk's text, with --show-texts


class AnalysisConfig(NamedTuple):
    """What is counted with: how blending is done, the profile of a machine and its KV."""

    blend: BlendSettings = BlendSettings()
    profile: MachineProfile | None = None
    kv_bytes_per_token: int | None = None
    show_texts: bool = False


BY_THE_PAPER = AnalysisConfig()
"""Counts in tokens, with CacheBlend's own ratio."""


def analyze(
    paths: Sequence[str | Path],
    tokens: Tokens,
    config: AnalysisConfig = BY_THE_PAPER,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read logs and compute what blending would save: the JSON object. Shares are of all prompt tokens.

    Raises EmptyCorpusError where there is no request in the logs.
    """
    requests = read_requests(paths, tokens, progress)
    prefixes, passages = PrefixCache(), Passages()
    counts = array("i"), array("i"), array("i")  # of each request: tokens, in its prefix, elsewhere
    for index, request in enumerate(requests.in_order()):
        prefix = prefixes.see(request.ids, request.answer, request.seed)
        elsewhere = passages.see(index, request.ids, prefix, request.seed)
        for column, value in zip(counts, (len(request.ids), prefix, elsewhere), strict=True):
            column.append(value)
        if progress is not None:
            progress("analyse", index + 1, len(requests))
    num_tokens, num_prefix, num_elsewhere = map(sum, counts)
    uses = uses_of(passages)
    chunks = merged(uses, passages.starts)
    zipf = zipf_slope(np.array([count for _, _, count in chunks], np.int64))
    curve, curve_share = _curve(uses, num_tokens, num_elsewhere, config.kv_bytes_per_token)
    return {
        "traces": requests.files,
        "num_requests": len(requests),
        "num_tokens": num_tokens,
        "tokens_by": tokens.name,
        "tokens_are_estimated": tokens.is_estimate,
        "order": {0: "file", len(requests): "time"}.get(requests.num_timed, "time where there is one"),
        "num_broken": requests.num_broken,
        "broken": requests.broken,
        "num_other": requests.num_other,
        "num_media": requests.num_media,
        "shares": {
            "prefix": num_prefix / num_tokens,
            "elsewhere": num_elsewhere / num_tokens,
            "new": (num_tokens - num_prefix - num_elsewhere) / num_tokens,
        },
        "first_use_share": int(uses.sizes.sum()) / num_tokens,  # new tokens of chunks that come again later
        "num_chunks": len(chunks),
        "chunks": _top(chunks, passages, tokens if config.show_texts else None),
        "zipf": None if zipf is None else {"slope": zipf[0], "r_squared": zipf[1]},
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "curve": curve,
        "curve_share": curve_share,  # of the repeated tokens, those that the curve was computed on
        "saving": mean_saving(map(PromptTokenCounts, *counts), config.blend, config.profile),
        "kept_bytes": ENTRY_BYTES * len(prefixes) + passages.nbytes,
    }


def _top(chunks: Sequence[tuple[int, int, int]], passages: Passages, tokens: Tokens | None) -> list[dict[str, Any]]:
    """The chunks that most requests need from a store; with `tokens`, how they begin."""
    found = []
    for start, end, count in sorted(chunks, key=lambda each: (-each[2], each[0]))[:TOP]:
        ids = passages.ids(start, end)
        text = {} if tokens is None else {"text": tokens.text(ids[:SHOWN_TOKENS].tolist())}
        digest = xxhash.xxh3_64_hexdigest(ids.tobytes())
        found.append({"hash": digest, "tokens": end - start, "requests": count, **text})
    return found


def _curve(
    uses: Uses, num_tokens: int, num_elsewhere: int, bytes_per_token: int | None
) -> tuple[list[dict[str, Any]], float]:
    """Shares that stores of several sizes find, by LRU and by any policy at most; and the share of the repeated tokens
    that they are computed from. A store with room for everything finds `num_elsewhere` of `num_tokens`.
    """
    some, share = sampled(uses)
    total = int(some.sizes.sum())
    if not total:
        return [], 1.0
    scale = num_elsewhere / num_tokens / max(1, most_hits(some, total))
    points = []
    for capacity in (total / 2**power for power in range(NUM_STORES - 1, -1, -1)):
        size = capacity / share
        nbytes = None if bytes_per_token is None else round(size * bytes_per_token)
        lru, most = lru_hits(some, capacity) * scale, most_hits(some, capacity) * scale
        points.append({"tokens": round(size), "bytes": nbytes, "lru": lru, "most": most})
    return points, share
