"""Jobs that the connector's scheduler half sends to its workers. Imports neither vLLM nor torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ragblend.engine.report import PrefixMatch
from ragblend.engine.vllm.params import BlendParams
from ragblend.options import ContextPolicy


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Positions [start, end) of a prompt whose tokens are those of a stored chunk, or of a part of it."""

    start: int
    end: int
    key: str  # of the chunk's entry
    match: PrefixMatch
    exact: bool  # the chunk's KV was computed after precisely the tokens that precede it in the prompt
    policy: ContextPolicy = "none"  # of the entry
    nbytes: int = 0  # size of the entry's tensors; 0 for an ingestion, which does not read them
    chunk_ids: tuple[int, ...] = field(default=(), repr=False)  # of the whole chunk; the run may be a part of it
    chunk_start: int = 0  # index of the run's first token in the chunk


class BlendTurn(NamedTuple):
    """Positions [start, end) of a prompt. Their stored chunks are fused with the question after the last of them."""

    start: int
    end: int
    stored: tuple[StoredSpan, ...]  # ascending

    @property
    def fused_start(self) -> int:
        """Position of the first stored token."""
        return self.stored[0].start

    @property
    def fused_end(self) -> int:
        """Position after the last stored token."""
        return self.stored[-1].end


@dataclass(frozen=True, slots=True)
class BlendJob:
    """Work for one request: fill positions [0, end) of its blocks. Mode "ingest" also stores the only one of `spans`.

    `turns`: fused in their order. An ingestion has one, of the chunks that are stored already.
    """

    request_id: str
    params: BlendParams
    ratio: float
    token_ids: tuple[int, ...] = field(repr=False)  # of the whole prompt; vLLM's crash dumps show the repr
    spans: tuple[tuple[int, int], ...]  # positions [start, end) of its runs
    end: int  # of the context; vLLM computes the tokens after it
    turns: tuple[BlendTurn, ...]
    block_ids: tuple[int, ...]
    fingerprint: str
    fitted: tuple[str, int] | None = None  # calibrated rule and check layer
    num_resident: int = 0  # leading tokens whose blocks other requests share, so that they are never written

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids before the first chunk."""
        return self.token_ids[: self.spans[0][0]]

    @property
    def stored(self) -> tuple[StoredSpan, ...]:
        """Stored chunks of all turns."""
        return tuple(span for turn in self.turns for span in turn.stored)

    @property
    def num_tokens_to_compute(self) -> int:
        """Estimated number of tokens that most layers compute.

        Prefix and resident tokens do not count. Of the others before `end`, all without stored KV count and, in mode
        "blend", the share `ratio` of those with stored KV.
        """
        num_stored = sum(span.end - span.start for span in self.stored)
        ratio = self.ratio if self.params.mode == "blend" else 0.0
        return self.end - max(self.num_resident, self.spans[0][0]) - num_stored + math.ceil(ratio * num_stored)
