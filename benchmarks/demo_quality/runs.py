"""One question answered in many configurations, each compared with full prefill of the same prompt; then the means.

item -> answers -> records -> rows. A record is one question in one configuration, a row the mean of many; what a
benchmark wants to know more is a field of both. Knows the engine and prompts, not where questions come from.
Read `compare` first.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.demo_quality.deviations import Distance, Reading, distance, read
from ragblend.bench.quality import measures
from ragblend.bench.quality.measures import Answer, decoded, kl, prefill, rouge_l, token_f1
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.generation import Request
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.report import Mode
from ragblend.engine.store.tiered import MemoryStore
from ragblend.intervals import mean_interval, wilson_interval
from ragblend.prompt.prompt import SegmentedPrompt
from tools.demo_model.questions import KINDS, REFERENCE_KINDS

MAX_ANSWER_TOKENS = 32
MULTI_HOP_KINDS = ("cross_ref", "two_hop_cross", "two_hop_ref")
"""The kinds whose evidence stands in several chunks."""
_STORE_BYTES = 512 << 20  # questions come story by story, so a few stories' KV is enough


class Item(NamedTuple):
    """One question over its context. `guess` is the chance of a blind guess among the values of the right type.

    `reordered`: the same question over the same chunks in another order that means the same, where there is one."""

    prompt: SegmentedPrompt
    answer: str
    kind: str
    guess: float
    reordered: SegmentedPrompt | None = None


class Configuration(NamedTuple):
    """How to answer. `rule` is "none" except for blend; `prefix_precompute` is False where chunks' KV was computed
    behind nothing at all instead of behind the prompt's prefix.

    With a `budget`, each prompt gets the ratio whose `charged_budget_32` is nearest to it, and `ratio` is 0."""

    mode: Mode
    rule: str
    ratio: float
    prefix_precompute: bool = True
    budget: float | None = None
    dtype: str = "float32"

    @property
    def asked(self) -> measures.Configuration:
        """What one engine is asked for it."""
        return measures.Configuration(self.mode, self.rule, self.ratio, self.budget)


STORY_LAYERS = 5  # of the embedded model, which the stories are told for

FULL = Configuration("full", "none", 1.0)
REUSE = Configuration("reuse", "none", 0.0)
NOISE = FULL._replace(dtype="bfloat16")
"""Full prefill in another dtype: a distance as small as this one's is rounding."""


def configurations(rules: Sequence[str], ratios: Sequence[float], budgets: Sequence[float] = ()) -> list[Configuration]:
    """Full prefill, full reuse, and blend by rule and ratio or budget. Ratio 0 is full reuse, for every rule."""
    # "auto" goes by the name of what it stands for.
    names = list(dict.fromkeys(find_rule(rule, STORY_LAYERS).name for rule in rules))
    blends = [Configuration("blend", name, ratio) for name in names for ratio in dict.fromkeys(ratios) if ratio > 0]
    equal = [Configuration("blend", name, 0.0, budget=budget) for name in names for budget in dict.fromkeys(budgets)]
    return [FULL, REUSE, *blends, *equal]


@dataclass(frozen=True, slots=True)
class Record:
    """One question in one configuration. `first_token_kl` is KL(full || this) in nats; `answer_kl` is its mean over
    the tokens of full prefill's answer, each read after those before it. See `deviations.Distance` for the rest.
    """

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
    ratio: float = 0.0
    answer_kl: float = 0.0
    answer_agreement: float = 1.0
    token_f1: float = 0.0
    rouge_l: float | None = None
    kv_deviation: tuple[float, ...] = ()
    attention_deviation: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the questions of one kind: shares with Wilson's 95 % interval, KL in nats with a bootstrap one.

    `right_to_wrong` and `wrong_to_right` count questions against full prefill of the same prompt. `context` says
    whose chunks the prompts held. `rouge_l` is None without the extra `bench`; deviations are per layer."""

    mode: Mode
    rule: str
    ratio: float
    prefix_precompute: bool
    budget: float | None
    dtype: str
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
    answer_kl: float
    answer_kl_low: float
    answer_kl_high: float
    answer_agreement: float
    token_f1: float
    rouge_l: float | None
    kv_deviation: tuple[float, ...]
    attention_deviation: tuple[float, ...]
    right_to_wrong: int
    wrong_to_right: int
    charged_budget: float
    charged_budget_32: float
    context_tokens: float
    num_chunks: float
    context: str = "story"

    def as_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        deviations = {"kv_deviation": [*self.kv_deviation], "attention_deviation": [*self.attention_deviation]}
        return asdict(self) | deviations


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
    return measures.answer(engine, request, configuration.asked)


def compare(item: Item, request: Request, found: Answer, full: Answer, far: Distance | None = None) -> Record:
    """What `found` got right, and how far it is from full prefill's answer to the same prompt, read over both KVs."""
    distances = {} if far is None else far._asdict()
    return Record(
        **{_RECORDED[name]: value for name, value in distances.items()},
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
        ratio=found.report.recompute_ratio,
        token_f1=token_f1(found.text, item.answer),
        rouge_l=rouge_l(found.text, item.answer),
    )


_RECORDED = {
    "kl": "answer_kl",
    "agreement": "answer_agreement",
    "kv_deviation": "kv_deviation",
    "attention_deviation": "attention_deviation",
}
"""A record's name for each distance."""


def is_exact(found: Answer, item: Item) -> bool:
    """Whether the answer is the gold text, to the letter, and stops there."""
    return found.ended and found.text == item.answer


def run_item(
    engine: TransformersEngine, item: Item, chosen: Sequence[Configuration], full: Answer | None = None
) -> tuple[dict[Configuration, Record], Answer]:
    """A record per configuration, and full prefill's answer, which is computed here unless given."""
    request = request_for(engine, item.prompt)
    for chunk in item.prompt.chunks:
        engine.precompute(chunk)
    full = full or answer(engine, request, FULL)
    expected = read(engine, request.prompt, full.fused, full.token_ids)
    records = {}
    for configuration in chosen:
        if configuration.mode == "full":
            records[configuration] = _measure(item, request, full, expected, full, expected)
        else:
            found, seen = _answer_and_reading(engine, request, configuration, full)
            records[configuration] = _measure(item, request, found, seen, full, expected)
    return records, full


def run_noise(base: TransformersEngine, other: TransformersEngine, item: Item, full: Answer) -> Record:
    """Full prefill by `other`, the same model in another dtype, against `base`'s."""
    request = request_for(other, item.prompt)
    found, seen = _answer_and_reading(other, request, FULL, full)
    return _measure(item, request, found, seen, full, read(base, request.prompt, full.fused, full.token_ids))


def _answer_and_reading(
    engine: TransformersEngine, request: Request, configuration: Configuration, full: Answer
) -> tuple[Answer, Reading]:
    """What the configuration answers, and full prefill's answer read over its KV."""
    prefilled, ttft_s = prefill(engine, request, configuration.asked)
    seen = read(engine, request.prompt, prefilled.fused, full.token_ids)
    # Where every token of that answer is the most likely one, greedy decoding would give just it.
    if seen.log_probs.argmax(-1).tolist() != [*full.token_ids]:
        return decoded(engine, request, prefilled, ttft_s), seen
    log_probs = prefilled.logits.double().log_softmax(-1)
    return full._replace(log_probs=log_probs, report=prefilled.report, fused=prefilled.fused), seen


def _measure(item: Item, request: Request, found: Answer, seen: Reading, full: Answer, expected: Reading) -> Record:
    return compare(item, request, found, full, distance(request.prompt, found.fused, seen, full.fused, expected))


# -- aggregation


def kinds_of(kind: str) -> tuple[str, ...]:
    """The rows that a question of `kind` counts in.

    >>> kinds_of("cross_ref"), kinds_of("two_hop_cross"), kinds_of("one_hop")
    (('all', 'multi_hop', 'references', 'cross_ref'), ('all', 'multi_hop', 'two_hop_cross'), ('all', 'one_hop'))
    """
    groups = (("multi_hop", MULTI_HOP_KINDS), ("references", REFERENCE_KINDS))
    return ("all", *(group for group, kinds in groups if kind in kinds), kind)


def rows_of(configuration: Configuration, records: Iterable[Record], context: str = "story") -> list[Row]:
    """A row for all questions, one for those over several chunks, one for those that need an earlier chunk for the
    words of a later one, one per kind."""
    groups: dict[str, list[Record]] = {kind: [] for kind in ("all", "multi_hop", "references", *KINDS)}
    for record in records:
        for kind in kinds_of(record.kind):
            groups.setdefault(kind, []).append(record)
    return [_row(configuration, kind, group, context) for kind, group in groups.items() if group]


def _row(configuration: Configuration, kind: str, records: Sequence[Record], context: str) -> Row:
    exact_match = fmean(record.exact for record in records)
    low, high = wilson_interval(exact_match, len(records))
    divergences = [record.first_token_kl for record in records]
    kl_low, kl_high = mean_interval(divergences)
    answer_divergences = [record.answer_kl for record in records]
    answer_kl_low, answer_kl_high = mean_interval(answer_divergences)
    overlaps = [record.rouge_l for record in records if record.rouge_l is not None]
    ratio = configuration.ratio if configuration.budget is None else fmean(record.ratio for record in records)
    return Row(
        **configuration._replace(ratio=ratio)._asdict(),
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
        answer_kl=fmean(answer_divergences),
        answer_kl_low=answer_kl_low,
        answer_kl_high=answer_kl_high,
        answer_agreement=fmean(record.answer_agreement for record in records),
        token_f1=fmean(record.token_f1 for record in records),
        rouge_l=fmean(overlaps) if overlaps else None,
        kv_deviation=_by_layer([record.kv_deviation for record in records]),
        attention_deviation=_by_layer([record.attention_deviation for record in records]),
        right_to_wrong=sum(record.full_exact and not record.exact for record in records),
        wrong_to_right=sum(record.exact and not record.full_exact for record in records),
        charged_budget=fmean(record.charged_budget for record in records),
        charged_budget_32=fmean(record.charged_budget_32 for record in records),
        context_tokens=fmean(record.context_tokens for record in records),
        num_chunks=fmean(record.num_chunks for record in records),
        context=context,
    )


def _by_layer(values: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Means over the questions, layer by layer."""
    return tuple(fmean(layer) for layer in zip(*values, strict=True))


def total_row(rows: Sequence[Row], mode: str) -> Row:
    """The first row of `mode` over all questions."""
    return next(row for row in rows if row.mode == mode and row.kind == "all")
