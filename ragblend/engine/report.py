"""What a request reused, recomputed and cost: the facts a user sees beside every answer.

Plain values only. Knows nothing about how they came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from ragblend.engine.agreement import ShadowReport
from ragblend.options import ContextPolicy
from ragblend.options import Mode as Mode
from ragblend.options import RatioChoice as RatioChoice
from ragblend.prompt.match import MatchedPrompt

PrefixMatch = Literal["exact", "approximate"]


@dataclass(slots=True)
class ChunkReport:
    """One chunk of the prompt. `prefix_match` is None for a miss; `exact` means its KV is what full prefill computes.

    `kv_dtype`: how its KV is stored, "int8", "fp8" or the dtype it was computed in; None where none was used. A chunk
    in eight bits is not exact even behind its own prefix, but below ratio 1 it is not recomputed there either.
    """

    source: str
    num_tokens: int
    hit: bool
    prefix_match: PrefixMatch | None = None
    exact: bool = False
    num_recomputed_tokens: int = 0
    context: ContextPolicy = "none"  # its ingestion context: what its KV was computed behind besides the prefix
    kv_dtype: str | None = None


@dataclass(slots=True)
class BlendReport:
    """One request. Durations in seconds; `ttft_s` = match + lookup + load + fuse + first token."""

    mode: Mode
    rule: str = "none"
    recompute_ratio: float = 0.0
    ttft_s: float = 0.0
    match_s: float = 0.0  # rendering the prompt and finding chunks in its ids
    lookup_s: float = 0.0
    load_s: float = 0.0  # reading and placing stored KV, overlapped with fusing where it comes from disk
    stall_s: float = 0.0  # the part of load_s that fusing had to wait for
    fuse_s: float = 0.0
    probe_s: float = 0.0  # until the rule knew the question's attention: part of fuse_s, and of stall_s while loading
    select_s: float = 0.0  # measuring candidates at the check, scoring and choosing them: part of fuse_s
    decode_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_chunks: int = 0
    num_chunk_hits: int = 0
    num_reused_tokens: int = 0  # prompt tokens whose stored KV was used as it is
    num_recomputed_tokens: int = 0  # chunk tokens whose stored KV was replaced
    num_prefix_tokens: int = 0  # prompt tokens at the front whose KV was at hand exactly (prefix, earlier turns)
    charged_budget: float = 0.0
    charged_budget_32: float = 0.0
    # How close to full prefill the KV was, as the rule saw it while choosing; see `fidelity`. None: it did not look.
    attention_exact: float | None = None  # share of the question's attention on tokens whose KV needs no recompute,
    attention_recomputed: float | None = None  # on recomputed ones,
    attention_stale: float | None = None  # and on those whose stored KV never saw the chunks before; they sum to 1
    mean_deviation: float | None = None  # of the recomputed tokens' stored KV, see `fuse.relative_deviation`
    predicted_agreement: float | None = None  # chance that the first token is full prefill's, where calibrated
    num_damaged_entries: int = 0
    refused_reason: str = ""  # why nothing was reused although it could have been: full prefill was faster,
    failed: bool = False  # or this: something went wrong
    shadow: ShadowReport | None = None  # filled in once full prefill has run beside the request, if it was to
    chunks: list[ChunkReport] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> BlendReport:
        """The report that `as_dict` gave, maybe of another version: fields that this one does not know are left out."""
        report = cls(**_known(cls, values))
        report.chunks = [ChunkReport(**_known(ChunkReport, chunk)) for chunk in values.get("chunks", ())]
        if shadow := values.get("shadow"):
            report.shadow = ShadowReport(**_known(ShadowReport, shadow))
        return report

    def summary(self) -> str:
        """One line for people: what was reused and what it cost."""
        share = f"{self.num_reused_tokens} of {self.prompt_tokens} prompt tokens reused"
        hits = f"{self.num_chunk_hits}/{self.num_chunks} chunks from the store"
        text = f"{hits}, {share}, {self.num_recomputed_tokens} recomputed, first token after {self.ttft_s * 1e3:.0f} ms"
        if self.attention_stale is not None:
            text += f"; {self.attention_stale:.0%} of the question's attention on stale tokens"
        return text


def chunk_reports(prompt: MatchedPrompt) -> list[ChunkReport]:
    """Return a report, a miss so far, for each chunk of which runs were found in the prompt."""
    runs = prompt.runs
    return [
        ChunkReport(runs[parts[0]].source, sum(runs[part].num_tokens for part in parts), hit=False)
        for parts in prompt.chunks
    ]


def join_runs(report: BlendReport, prompt: MatchedPrompt) -> None:
    """Make of the reports on the runs of a prompt, in their order, one for each chunk that they are parts of."""
    joined = []
    for parts in prompt.chunks:
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
    """What the model thought of one token of an answer, before penalties, bias and temperature.

    In an answer that is held to a form, of the tokens that may come there; one that had to come is certain.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # ids and log-probabilities of the likeliest tokens there, the likeliest first


@dataclass(slots=True)
class Generation:
    """An answer and the facts about it. `finish_reason` is "length" when `max_tokens` or the context ended it.

    `logprobs` is per token of `token_ids`, where it was asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    report: BlendReport
    logprobs: list[TokenLogprob] | None = None
