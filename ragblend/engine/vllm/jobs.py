"""Jobs that the connector's scheduler half sends to its workers. Does not import vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ragblend.engine.report import BlendReport
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.vllm.params import BlendParams
from ragblend.prompt.types import ChunkRun


class BlendTurn(NamedTuple):
    """Positions [start, end) of a prompt. Their stored chunks are fused with the question after the last of them."""

    start: int
    end: int
    runs: tuple[ChunkRun, ...]  # ascending

    @property
    def stored(self) -> tuple[ChunkRun, ...]:
        """Runs whose chunk has a stored variant."""
        return tuple(run for run in self.runs if run.variant is not None)

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
    """Work for one request: fill positions [0, end) of its blocks. Mode "ingest" also stores the only one of `runs`.

    `turns`: fused in their order. An ingestion has one, of the chunks that are stored already.
    """

    request_id: str
    params: BlendParams
    tuning: RequestTuning
    token_ids: tuple[int, ...] = field(repr=False)  # of the whole prompt; vLLM's crash dumps show the repr
    runs: tuple[ChunkRun, ...]  # of the whole prompt
    end: int  # of the context; vLLM computes the tokens after it
    turns: tuple[BlendTurn, ...]
    block_ids: tuple[int, ...]
    fingerprint: str
    num_resident: int = 0  # leading tokens whose blocks other requests share, so that they are never written

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids before the first chunk."""
        return self.token_ids[: self.runs[0].start]

    @property
    def stored(self) -> tuple[ChunkRun, ...]:
        """Stored runs of all turns."""
        return tuple(run for turn in self.turns for run in turn.stored)

    @property
    def recompute_ratio(self) -> float:
        """Share of the stored tokens that is recomputed: the tuning's in mode "blend", else 0."""
        return self.tuning.recompute_ratio if self.params.mode == "blend" else 0.0

    @property
    def num_tokens_to_compute(self) -> int:
        """Estimated number of tokens that most layers compute.

        Prefix and resident tokens do not count. Of the others before `end`, all without stored KV count and, in mode
        "blend", the share `recompute_ratio` of those with stored KV.
        """
        num_stored = sum(run.num_tokens for run in self.stored)
        num_recomputed = math.ceil(self.recompute_ratio * num_stored)
        return self.end - max(self.num_resident, self.runs[0].start) - num_stored + num_recomputed


@dataclass(frozen=True, slots=True)
class RefineJob:
    """Refinement of a running request: its chunk tokens are recomputed up to the share `ratio`, between two steps.

    The KV of the first `num_computed` tokens of prompt and answer is in its blocks. `answer_ids`: the answer's tokens
    that the scheduler knows; the KV of the last one may not be computed yet.
    """

    request_id: str
    ratio: float
    answer_ids: tuple[int, ...] = field(repr=False)
    num_computed: int
    block_ids: tuple[int, ...]


class Refined(NamedTuple):
    """Result of a refinement: recomputed chunk tokens, the number of the answer's tokens before it, and seconds."""

    num_tokens: int
    num_answered: int
    seconds: float

    def write_to(self, report: BlendReport) -> None:
        """Record the refinement in its request's report."""
        report.num_refined_tokens, report.refined_after, report.refine_s = self
