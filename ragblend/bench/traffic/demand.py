"""What a trace asks of replicas: per request its moment, its tokens, its blocks, its chunks and its conversation.

Tokens are gone once this is read; blocks, half a byte per token, and chunks are hashes. Read `demand_of`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from ragblend.bench.traffic.curve import uses_of
from ragblend.bench.traffic.hashes import BLOCK, block_keys, namespace_seed
from ragblend.bench.traffic.passages import Passages
from ragblend.bench.traffic.reading import answered
from ragblend.bench.traffic.spool import Spool, Spooled
from ragblend.bench.traffic.tokens import Ids, Tokens


class DemandedChunk(NamedTuple):
    """A chunk of a prompt: equal keys are equal chunks of one namespace."""

    key: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Demand:
    """One request. `blocks`: a hash per whole block of the prompt and of the answer behind it, and all before it."""

    number: int
    time_s: float  # since 1970; -inf where the log has no time
    num_tokens: int
    num_output: int
    blocks: Sequence[int] = ()
    chunks: tuple[DemandedChunk, ...] = ()
    session: int = 0  # number of the request that began its conversation

    @property
    def num_prompt_blocks(self) -> int:
        """Whole blocks of the prompt."""
        return self.num_tokens // BLOCK

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of its chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)


def demand_of(spool: Spool, tokens: Tokens, output_tokens: int) -> list[Demand]:
    """The requests in order of their times. `output_tokens`: of answers that were not logged.

    Chunks are those that are marked; where no request has one, every passage that comes again, wherever it stands.
    """
    marked = any(request.chunks for request in spool.in_order())
    chunks = None if marked else _found_chunks(spool.in_order())
    sessions: dict[int, int] = {}
    demands = []
    for number, request in enumerate(spool.in_order()):
        seed = namespace_seed(request.namespace)
        answer = answered(tokens, request.answer)
        blocks = array("Q", block_keys(np.concatenate((request.ids, answer)), seed).tobytes())
        count = len(request.ids)
        demands.append(
            Demand(
                number,
                request.time_s,
                count,
                len(request.answer) or output_tokens,
                blocks,
                _marked(request.ids, request.chunks, seed) if chunks is None else tuple(chunks[number]),
                _session(sessions, blocks[: count // BLOCK], number),
            )
        )
    return demands


def _marked(ids: Ids, chunks: Iterable[tuple[int, int]], seed: int) -> tuple[DemandedChunk, ...]:
    return tuple(
        DemandedChunk(xxhash.xxh3_64_intdigest(ids[start:end].tobytes(), seed), end - start) for start, end in chunks
    )


def _found_chunks(requests: Iterable[Spooled]) -> dict[int, list[DemandedChunk]]:
    """By request: passages that stand in several requests, as `ragblend analyze` finds them, from the first use on."""
    passages = Passages()
    for number, request in enumerate(requests):
        passages.see(number, request.ids, (), 0, namespace_seed(request.namespace))
    uses = uses_of(passages)
    found: dict[int, list[DemandedChunk]] = defaultdict(list)
    for chunk, number in zip(uses.chunks.tolist(), uses.requests.tolist(), strict=True):
        found[number].append(DemandedChunk(chunk, int(uses.sizes[chunk])))
    return found


def _session(sessions: dict[int, int], prompt: Sequence[int], number: int) -> int:
    """The request that began the conversation: the one whose whole prompt this one begins with, or itself."""
    found = next((sessions[key] for key in reversed(prompt) if key in sessions), number)
    if prompt:
        sessions.setdefault(prompt[-1], found)
    return found
