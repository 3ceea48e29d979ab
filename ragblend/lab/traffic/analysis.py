"""Shares of logged prompts' tokens: reused by prefix caching, reused by stored chunks only, and new.

Requests are read in the order of the log, each compared with all before it. Read `analyze`; the parts are `logs`,
`tokens`, `passages` (repeated tokens), `curve` (hits over a store's size) and `cost_model`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ragblend.engine.fusion.rules import DEFAULT_RATIO
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.errors import EmptyCorpusError
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.traffic.cost_model import mean_work_by_mode
from ragblend.lab.traffic.curve import ChunkUses, count_chunk_uses, lru_hit_tokens, merge_adjacent_chunks
from ragblend.lab.traffic.logs import Piece, RequestLog
from ragblend.lab.traffic.passages import LEAST, PrefixCache, RepeatedPassages
from ragblend.lab.traffic.tokens import Ids, Tokenizer

TOP = 10  # number of listed chunks
NUM_STORES = 8  # points of the curve: capacity for all repeated tokens, half of them, a quarter, ...
SHOWN_TOKENS = 60  # tokens of a chunk that --show-texts prints
CACHED_TEXTS = 1 << 16  # texts whose token ids are cached, because conversations repeat theirs in every request


def analyze(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    ratio: float = DEFAULT_RATIO,
    probes_first: bool = False,
    profile: MachineProfile | None = None,
    kv_bytes_per_token: int | None = None,
    show_texts: bool = False,
    progress: Progress = ignore_progress,
) -> dict[str, Any]:
    """Analyze the request logs `paths`; return a JSON object. Each "share" in it is a share of all prompt tokens.

    `tokenizer`: converts text to token ids. `ratio`, `probes_first`, `profile`: arguments of `mean_work_by_mode`.
    `kv_bytes_per_token`: bytes of the model's KV per token; with it, sizes of stores are also in bytes. `show_texts`:
    include the first words of each listed chunk. Raises EmptyCorpusError for logs without a request, and the errors of
    `RequestLog`.
    """
    log = RequestLog(paths)

    @lru_cache(CACHED_TEXTS)
    def ids_of(piece: Piece) -> Ids:
        return tokenizer.ids(piece) if isinstance(piece, str) else np.asarray(piece, np.int32)

    prefixes, passages = PrefixCache(), RepeatedPassages()
    counts = array("i"), array("i"), array("i")  # of each request: tokens, in its prefix, elsewhere
    num_media = 0
    for index, request in enumerate(log):
        ids = np.concatenate([ids_of(piece) for piece in request.pieces])
        prefix = prefixes.count_cached_and_add(ids, request.namespace)
        elsewhere = passages.count_reusable_and_add(index, ids, prefix, request.namespace)
        for column, value in zip(counts, (len(ids), prefix, elsewhere), strict=True):
            column.append(value)
        num_media += request.num_media
        progress("analyze", index + 1, None)
    num_tokens, num_prefix, num_elsewhere = map(sum, counts)
    if not num_tokens:
        raise EmptyCorpusError(
            f"no request in {', '.join(log.files[:3])}: {log.num_skipped} lines hold none. A line is the JSON body of "
            "an OpenAI request; docs/performance.md has the commands that convert other logs"
        )
    uses = count_chunk_uses(passages)
    chunks = [each for each in merge_adjacent_chunks(uses, passages.starts) if each[1] - each[0] >= LEAST]
    return {
        "traces": log.files,
        "num_requests": len(counts[0]),
        "num_tokens": num_tokens,
        "tokens_by": tokenizer.name,
        "tokens_are_estimated": tokenizer.is_estimate,
        "num_skipped": log.num_skipped,
        "skipped": log.skipped,
        "num_media": num_media,
        "shares": {
            "prefix": num_prefix / num_tokens,
            "elsewhere": num_elsewhere / num_tokens,
            "new": (num_tokens - num_prefix - num_elsewhere) / num_tokens,
        },
        "first_use_share": int(uses.sizes.sum()) / num_tokens,  # new tokens of chunks that are repeated later
        "num_chunks": len(chunks),
        "chunks": _top(chunks, passages, tokenizer if show_texts else None),
        "kv_bytes_per_token": kv_bytes_per_token,
        "curve": _curve(uses, num_tokens, num_elsewhere, kv_bytes_per_token),
        "saving": mean_work_by_mode(zip(*counts, strict=True), ratio, probes_first, profile),
    }


def _top(
    chunks: Sequence[tuple[int, int, int]], passages: RepeatedPassages, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Return the chunks that most requests need from a store; with a `tokenizer`, also their first words."""
    rows = []
    for start, end, count in sorted(chunks, key=lambda each: (-each[2], each[0]))[:TOP]:
        ids = passages.ids(start, end)
        text = {} if tokenizer is None else {"text": tokenizer.text(ids[:SHOWN_TOKENS].tolist())}
        digest = xxhash.xxh3_64_hexdigest(ids.tobytes())
        rows.append({"hash": digest, "tokens": end - start, "requests": count, **text})
    return rows


def _curve(uses: ChunkUses, num_tokens: int, num_elsewhere: int, bytes_per_token: int | None) -> list[dict[str, Any]]:
    """Return the shares of all tokens that stores of several sizes find. The largest finds `num_elsewhere` tokens."""
    total = int(uses.sizes.sum())
    if not total:
        return []
    # A prompt with a chunk twice counts as one use, so the uses have fewer tokens than were found elsewhere.
    scale = num_elsewhere / num_tokens / max(1, lru_hit_tokens(uses, total))
    points = []
    for capacity in (total / 2**power for power in range(NUM_STORES - 1, -1, -1)):
        nbytes = None if bytes_per_token is None else round(capacity * bytes_per_token)
        points.append({"tokens": round(capacity), "bytes": nbytes, "lru": lru_hit_tokens(uses, capacity) * scale})
    return points
