"""One question answered in many configurations, each compared with full prefill of the same prompt; then the means.

item -> answers -> records -> rows. A record is one question in one configuration, a row the mean of many; what a
benchmark wants to know more is a field of both. Knows the engine and prompts, not where questions come from.
Read `compare` first.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ragblend.demo.evaluate import interval
from ragblend.demo.questions import KINDS, REFERENCE_KINDS
from ragblend.engine.fusor import FusedKV
from ragblend.engine.generation import Request
from ragblend.engine.report import BlendReport, Mode
from ragblend.engine.selection import find_rule
from ragblend.engine.store import MemoryStore
from ragblend.engine.transformers_engine import TransformersEngine
from ragblend.segments import SegmentedPrompt

MAX_ANSWER_TOKENS = 16
NUM_RESAMPLES = 1000  # of the bootstrap
_STORE_BYTES = 512 << 20  # questions come story by story, so a few stories' KV is enough


class Item(NamedTuple):
    """One question over its context. `guess` is the chance of a blind guess among the values of the right type."""

    prompt: SegmentedPrompt
    answer: str
    kind: str
    guess: float


class Configuration(NamedTuple):
    """How to answer. `rule` is "none" except for blend; `prefix_precompute` is False where chunks' KV was computed
    behind nothing at all instead of behind the prompt's prefix."""

    mode: Mode
    rule: str
    ratio: float
    prefix_precompute: bool = True


FULL = Configuration("full", "none", 1.0)
REUSE = Configuration("reuse", "none", 0.0)


def configurations(rules: Sequence[str], ratios: Sequence[float]) -> list[Configuration]:
    """Full prefill, full reuse, and blend by rule and ratio. A ratio of 0 is full reuse for every rule: run once."""
    names = list(dict.fromkeys(find_rule(rule).name for rule in rules))  # "auto" goes by the name of what it stands for
    blends = [Configuration("blend", name, ratio) for name in names for ratio in dict.fromkeys(ratios) if ratio > 0]
    return [FULL, REUSE, *blends]


class Answer(NamedTuple):
    """A greedy answer. `log_probs` [vocabulary] float64, natural logarithm, of its first token; `ended`: by itself."""

    text: str
    ended: bool
    log_probs: Tensor
    report: BlendReport


@dataclass(frozen=True, slots=True)
class Record:
    """One question in one configuration. `first_token_kl` is KL(full || this) in nats."""

    kind: str
    guess: float
    text: str
    exact: bool
    full_exact: bool
    same_as_full: bool  # the answer's text
    first_token_kl: float
    top1_agrees: bool
    charged_budget: float
    charged_budget_32: float
    context_tokens: int  # prefix and chunks
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the questions of one kind: shares with Wilson's 95 % interval, KL in nats with a bootstrap one.

    `right_to_wrong` and `wrong_to_right` count questions against full prefill of the same prompt. `context` says
    whose chunks the prompts held."""

    mode: Mode
    rule: str
    ratio: float
    prefix_precompute: bool
    kind: str
    num_questions: int
    exact_match: float
    exact_match_low: float
    exact_match_high: float
    guess: float
    first_token_kl: float
    first_token_kl_low: float
    first_token_kl_high: float
    top1_agreement: float
    right_to_wrong: int
    wrong_to_right: int
    charged_budget: float
    charged_budget_32: float
    context_tokens: float
    num_chunks: float
    context: str = "story"

    def as_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)


# -- engines and answers


class Engines:
    """Engines over one model that differ only in what chunks are precomputed behind; a memory store each."""

    def __init__(self, base: TransformersEngine) -> None:
        self.base = base
        self._behind: dict[tuple[int, ...], TransformersEngine] = {}

    def behind(self, prefix_ids: tuple[int, ...]) -> TransformersEngine:
        """The engine whose chunks are precomputed behind `prefix_ids`; () is every chunk by itself.

        Stores are not shared: an engine would find the other's KV behind the prompt's own prefix and take that."""
        if prefix_ids not in self._behind:
            base = self.base
            engine = TransformersEngine(
                base.layers,
                base.segmenter,
                MemoryStore(_STORE_BYTES),
                name=base.name,
                fingerprint=base.fingerprint,
                on_miss="inline",
                check=False,
            )
            engine.default_prefix_ids = prefix_ids
            self._behind[prefix_ids] = engine
        return self._behind[prefix_ids]


def request_for(engine: TransformersEngine, prompt: SegmentedPrompt) -> Request:
    """The prompt, tokenized once for all configurations. Rule `random` draws anew for every prompt."""
    seed = zlib.crc32(repr(prompt.messages).encode())
    return engine.request(prompt, mode="full", max_tokens=MAX_ANSWER_TOKENS, seed=seed)


def answer(engine: TransformersEngine, request: Request, configuration: Configuration) -> Answer:
    """One prefill and the few greedy steps of the answer. Chunks that blend or reuse shall find must be stored."""
    rule = "auto" if configuration.rule == "none" else configuration.rule
    prefilled = engine.prefill(replace(request, mode=configuration.mode, rule=rule, ratio=configuration.ratio))
    log_probs = prefilled.logits.double().log_softmax(-1)
    token_ids, ended = _decode(engine, prefilled.logits, prefilled.fused, request.max_tokens)
    return Answer(engine.segmenter.decode(token_ids), ended, log_probs, prefilled.report)


def _decode(engine: TransformersEngine, logits: Tensor, fused: FusedKV, max_tokens: int) -> tuple[list[int], bool]:
    """Greedy ids from the first `logits` on, and whether the model ended the answer itself."""
    ends, token_ids = engine.stop_ids(), list[int]()
    while (token := int(logits.argmax())) not in ends:
        token_ids.append(token)
        if len(token_ids) == max_tokens:
            return token_ids, False
        logits = engine.decode_step(token, fused)
    return token_ids, True


def compare(item: Item, request: Request, found: Answer, full: Answer) -> Record:
    """What `found` got right, and how far it is from full prefill's answer to the same prompt."""
    return Record(
        kind=item.kind,
        guess=item.guess,
        text=found.text,
        exact=is_exact(found, item),
        full_exact=is_exact(full, item),
        same_as_full=(found.text, found.ended) == (full.text, full.ended),
        first_token_kl=kl(full.log_probs, found.log_probs),
        top1_agrees=bool(full.log_probs.argmax() == found.log_probs.argmax()),
        charged_budget=found.report.charged_budget,
        charged_budget_32=found.report.charged_budget_32,
        context_tokens=request.prompt.chunk_segments[-1].end,
        num_chunks=len(request.prompt.chunk_segments),
    )


def is_exact(found: Answer, item: Item) -> bool:
    """Whether the answer is the gold text, to the letter, and stops there."""
    return found.ended and found.text == item.answer


def kl(log_p: Tensor, log_q: Tensor) -> float:
    """KL(p || q) in nats of log probabilities [V]; never below 0 by rounding.

    >>> halves, quarters = Tensor([0.5, 0.5]).log(), Tensor([0.25, 0.75]).log()
    >>> round(kl(halves, quarters), 4), kl(halves, halves)
    (0.1438, 0.0)
    """
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))


def run_item(
    engine: TransformersEngine, item: Item, chosen: Sequence[Configuration], full: Answer | None = None
) -> tuple[dict[Configuration, Record], Answer]:
    """A record per configuration, and full prefill's answer, which is computed here unless given."""
    request = request_for(engine, item.prompt)
    for chunk in item.prompt.chunks:
        engine.precompute(chunk)
    full = full or answer(engine, request, FULL)
    records = {}
    for configuration in chosen:
        found = full if configuration.mode == "full" else answer(engine, request, configuration)
        records[configuration] = compare(item, request, found, full)
    return records, full


# -- aggregation


def kinds_of(kind: str) -> tuple[str, ...]:
    """The rows that a question of `kind` counts in.

    >>> kinds_of("cross_ref"), kinds_of("one_hop")
    (('all', 'references', 'cross_ref'), ('all', 'one_hop'))
    """
    return ("all", "references", kind) if kind in REFERENCE_KINDS else ("all", kind)


def rows_of(configuration: Configuration, records: Iterable[Record], context: str = "story") -> list[Row]:
    """A row for all questions, one for those that need an earlier chunk, one per kind."""
    groups: dict[str, list[Record]] = {kind: [] for kind in ("all", "references", *KINDS)}
    for record in records:
        for kind in kinds_of(record.kind):
            groups.setdefault(kind, []).append(record)
    return [_row(configuration, kind, group, context) for kind, group in groups.items() if group]


def _row(configuration: Configuration, kind: str, records: Sequence[Record], context: str) -> Row:
    exact_match = fmean(record.exact for record in records)
    low, high = interval(exact_match, len(records))
    divergences = [record.first_token_kl for record in records]
    kl_low, kl_high = mean_interval(divergences)
    return Row(
        **configuration._asdict(),
        kind=kind,
        num_questions=len(records),
        exact_match=exact_match,
        exact_match_low=max(0.0, low),
        exact_match_high=min(1.0, high),
        guess=fmean(record.guess for record in records),
        first_token_kl=fmean(divergences),
        first_token_kl_low=kl_low,
        first_token_kl_high=kl_high,
        top1_agreement=fmean(record.top1_agrees for record in records),
        right_to_wrong=sum(record.full_exact and not record.exact for record in records),
        wrong_to_right=sum(record.exact and not record.full_exact for record in records),
        charged_budget=fmean(record.charged_budget for record in records),
        charged_budget_32=fmean(record.charged_budget_32 for record in records),
        context_tokens=fmean(record.context_tokens for record in records),
        num_chunks=fmean(record.num_chunks for record in records),
        context=context,
    )


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean: percentiles over resamples of the questions.

    >>> mean_interval([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    drawn = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def total_row(rows: Sequence[Row], mode: str) -> Row:
    """The first row of `mode` over all questions."""
    return next(row for row in rows if row.mode == mode and row.kind == "all")
