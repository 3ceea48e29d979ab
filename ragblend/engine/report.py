"""Reports of requests: reused and recomputed tokens, durations, and the answer with its log-probabilities.

Also the agreement of answers with full prefill, which `shadow` measures. Plain values only. Does not depend on the code
that computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from ragblend.intervals import wilson_interval
from ragblend.options import ContextPolicy, Mode
from ragblend.prompt.types import MatchedPrompt, PrefixMatch


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

    `ttft_s` counts from the call: match + waiting for other prompts + first answer of remote tiers + lookup + load +
    fuse + first token.
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
    select_s: float = 0.0  # measuring candidates at the check layers, scoring and choosing them: part of fuse_s
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
    mean_deviation: float | None = None  # of the recomputed tokens' stored KV, see `check_layers.MeasuredDeviation`
    kept_at_check_layers: list[tuple[int, int]] = field(default_factory=list)  # check layer, number of tokens it kept
    predicted_agreement: float | None = None  # chance that the first token is full prefill's; None if not calibrated
    predicted_kl: float | None = None  # expected KL(full || this) of the first token, in nats; None if not calibrated
    num_damaged_entries: int = 0
    decision: str = ""  # rule, ratio and chunks that the loading controller chose, and its predicted seconds
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
        report.kept_at_check_layers = [(layer, count) for layer, count in report.kept_at_check_layers]
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


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Result of one shadow comparison: an answer against full prefill of the same request."""

    first_token_agrees: bool
    first_token_kl: float | None  # KL(full || this), nats; None if the engine returns no distributions
    answers_identical: bool | None  # token for token; None where they cannot be compared: sampled, or broken off


@dataclass(slots=True)
class ShadowCounters:
    """Counters of shadow comparisons since the engine was loaded."""

    share: float = 0.0  # share of the requests to compare
    num_requests: int = 0  # answers from fused KV ("blend", "reuse")
    num_shadowed: int = 0  # of num_requests: compared with full prefill
    num_dropped: int = 0  # sampled, but too many comparisons were waiting, or the engine was closed
    num_failed: int = 0  # sampled, but full prefill failed; the log has the error
    num_first_tokens_same: int = 0  # of num_shadowed
    num_kl: int = 0  # comparisons with the first token's distribution, summed in kl_sum
    kl_sum: float = 0.0  # nats
    num_answers: int = 0  # greedy and complete, so that whole answers can be compared
    num_answers_same: int = 0

    @property
    def first_token_agreement(self) -> float | None:
        """Return the share of comparisons in which the first tokens agree; None without comparisons."""
        return self.num_first_tokens_same / self.num_shadowed if self.num_shadowed else None

    @property
    def first_token_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval (Wilson) of `first_token_agreement`; None before the first comparison."""
        share = self.first_token_agreement
        return None if share is None else wilson_interval(share, self.num_shadowed)

    @property
    def mean_first_token_kl(self) -> float | None:
        """Return the mean KL(full || blend) of the first token, in nats; None if no distribution was available."""
        return self.kl_sum / self.num_kl if self.num_kl else None

    @property
    def answer_agreement(self) -> float | None:
        """Return the share of compared answers that equal full prefill's, token for token; None without comparisons."""
        return self.num_answers_same / self.num_answers if self.num_answers else None

    @property
    def answer_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval (Wilson) of `answer_agreement`; None before the first comparison."""
        share = self.answer_agreement
        return None if share is None else wilson_interval(share, self.num_answers)

    def summary(self) -> str:
        """Return the counters as one line of text.

        >>> ShadowCounters(0.5, 8, 4, num_first_tokens_same=4, num_kl=4, kl_sum=0.02).summary()
        'full prefill also ran for 4 of 8 answers: first token the same in 4 (100 %, 51 to 100 %), mean KL 0.005 nats'
        """
        text = f"full prefill also ran for {self.num_shadowed} of {self.num_requests} answers"
        parts = []
        if self.num_shadowed:
            parts.append(f"first token the same in {_share(self.num_first_tokens_same, self.num_shadowed)}")
        if self.mean_first_token_kl is not None:
            parts.append(f"mean KL {self.mean_first_token_kl:.2g} nats")
        if self.num_answers:
            same = _share(self.num_answers_same, self.num_answers)
            parts.append(f"of {self.num_answers} whole answers the same {same}")
        parts += [f"{self.num_dropped} left out, too many were waiting"] if self.num_dropped else []
        parts += [f"{self.num_failed} failed"] if self.num_failed else []
        return f"{text}: {', '.join(parts)}" if parts else text


def _share(count: int, total: int) -> str:
    low, high = wilson_interval(count / total, total)
    return f"{count} ({count / total:.0%}, {low * 100:.0f} to {high * 100:.0f} %)".replace("%,", " %,")
