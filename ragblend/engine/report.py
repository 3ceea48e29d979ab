"""Reports of requests: reused and recomputed tokens, durations, and the answer with its log-probabilities.

Plain values only. Does not depend on the code that computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from ragblend.engine.agreement import ShadowReport
from ragblend.options import ContextPolicy, Mode
from ragblend.prompt.types import MatchedPrompt

PrefixMatch = Literal["exact", "approximate"]


@dataclass(slots=True)
class ChunkReport:
    """Report on one chunk of the prompt.

    `prefix_match`: "exact" if the prompt begins with the prefix after which the KV was computed, else "approximate";
    None for a miss. `kv_dtype`: "int8", "fp8" or the dtype of the computation; None if no stored KV was used. `exact`:
    True if the KV equals that of full prefill. A chunk stored in eight bits is never exact, because it is rounded.
    If it directly follows its prefix, its tokens are recomputed at ratio 1 only.
    """

    source: str
    num_tokens: int
    hit: bool
    prefix_match: PrefixMatch | None = None
    exact: bool = False
    num_recomputed_tokens: int = 0
    context: ContextPolicy = "none"  # ingestion context: text between prefix and chunk when its KV was computed
    kv_dtype: str | None = None


@dataclass(slots=True)
class BlendReport:
    """Report of one request. Durations in seconds.

    `ttft_s` = match + fetch from remote tiers + lookup + load + fuse + first token.
    """

    mode: Mode
    rule: str = "none"
    recompute_ratio: float = 0.0
    ttft_s: float = 0.0
    match_s: float = 0.0  # rendering the prompt and finding chunks in its ids
    lookup_s: float = 0.0
    load_s: float = 0.0  # reading and placing stored KV, overlapped with fusing if it is read from disk
    stall_s: float = 0.0  # the part of load_s that fusing had to wait for
    fuse_s: float = 0.0
    probe_s: float = 0.0  # query probe: part of fuse_s, and of stall_s while it waits for layers
    select_s: float = 0.0  # measuring candidates at the check layer, scoring and choosing them: part of fuse_s
    decode_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_chunks: int = 0
    num_chunk_hits: int = 0
    num_reused_tokens: int = 0  # prompt tokens not computed for this prompt: stored KV used unchanged, and the prefix
    num_recomputed_tokens: int = 0  # chunk tokens whose stored KV was replaced
    num_refined_tokens: int = 0  # chunk tokens recomputed after the first token (refinement), in addition
    refined_after: int | None = None  # number of the answer's tokens before the refinement; None: not refined
    refine_s: float = 0.0  # part of decode_s
    num_prefix_tokens: int = 0  # prompt tokens at the front whose exact KV was in memory (earlier prompts and turns)
    charged_budget: float = 0.0
    charged_budget_32: float = 0.0
    # Measurements of the rule, see `fusion.plan`; None if the rule does not make them. The three shares sum to 1.
    attention_exact: float | None = None  # share of the question's attention on tokens whose KV needs no recompute
    attention_recomputed: float | None = None  # the same on recomputed tokens
    attention_stale: float | None = None  # the same on kept tokens, computed without the chunks before them
    mean_deviation: float | None = None  # of the recomputed tokens' stored KV, see `fuse.relative_deviation`
    predicted_agreement: float | None = None  # chance that the first token is full prefill's; None if not calibrated
    num_damaged_entries: int = 0
    refused_reason: str = ""  # reason for full prefill although chunks are stored: it was faster, or reuse failed
    failed: bool = False  # reuse failed with an error, which is `refused_reason`
    shadow: ShadowReport | None = None  # shadow comparison, set once it has run; None if the request was not sampled
    chunks: list[ChunkReport] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlendReport:
        """Return the report whose `as_dict` gave `values`, in this or another version. Unknown names are ignored."""
        report = cls(**_known(cls, values))
        report.chunks = [ChunkReport(**_known(ChunkReport, chunk)) for chunk in values.get("chunks", ())]
        if shadow := values.get("shadow"):
            report.shadow = ShadowReport(**_known(ShadowReport, shadow))
        return report

    def summary(self) -> str:
        """Return one line of text: stored chunks, reused and recomputed tokens, milliseconds to the first token.

        If stored chunks were not used, the line says why instead of counting them.
        """
        facts = [f"{self.num_chunk_hits}/{self.num_chunks} chunks from the store"]
        if self.mode == "full" or self.refused_reason:
            facts = [f"stored KV not used: {self.refused_reason}" if self.refused_reason else "full prefill"]
        elif not self.num_chunks:
            facts = ["no stored chunk found in the prompt"]
        facts.append(f"{self.num_reused_tokens} of {self.prompt_tokens} prompt tokens reused")
        if self.mode == "blend":
            facts.append(f"{self.num_recomputed_tokens} recomputed")
        if self.refined_after is not None:
            facts.append(f"{self.num_refined_tokens} more after token {self.refined_after} of the answer")
        return f"{', '.join(facts)}, first token after {self.ttft_s * 1e3:.0f} ms"


def merge_runs_by_chunk(report: BlendReport, prompt: MatchedPrompt) -> None:
    """Replace the reports of runs (parts of chunks) in `report.chunks` by one report per chunk, with summed counts."""
    joined = []
    for parts in prompt.runs_by_chunk:
        runs = [report.chunks[part] for part in parts]
        first = next((run for run in runs if run.hit), runs[0])
        joined.append(
            replace(
                first,
                source=prompt.runs[parts[0]].source,
                num_tokens=sum(prompt.runs[part].num_tokens for part in parts),
                exact=all(run.exact for run in runs),
                num_recomputed_tokens=sum(run.num_recomputed_tokens for run in runs),
            )
        )
    report.chunks = joined
    report.num_chunks, report.num_chunk_hits = len(joined), sum(chunk.hit for chunk in joined)


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


FinishReason = Literal["stop", "length", "cancelled"]


class TokenLogprob(NamedTuple):
    """Log-probability of one token of an answer, before penalties, bias and temperature.

    With structured outputs, it is relative to the tokens that the grammar allows; a forced token has probability 1.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # ids and log-probabilities of the likeliest tokens, in descending order


@dataclass(slots=True)
class Generation:
    """Answer with its report. `finish_reason` is "length" if `max_tokens` or the context length ended it.

    `logprobs` has one item per token of `token_ids`; None if not requested.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    report: BlendReport
    logprobs: list[TokenLogprob] | None = None
