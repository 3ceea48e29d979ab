"""Causes of the distance between a blended answer and full prefill, per question, on selection questions.

    python -m benchmarks.causes --model models/smollm2 --data musique --questions 12 --out causes.json

For each question and each context of the stored chunks, it measures KL(full || this) of the first token and of full
prefill's answer, in nats, in these variants:

- `recompute`: a rule recomputes tokens. `ask` is the default rule. `oracle` selects by the question's attention in full
  prefill, `oracle_last` by that of the prompt's last token alone; `sinks` recomputes the first tokens of each chunk.
- `restore`: stale KV is replaced by full prefill's, without any recompute: of all tokens in some layers, keys or values
  alone, or in all layers of the tokens that a rule selects. It shows the best that a selection could reach.

It also measures how far the stored KV is from full prefill's, how much of it drift correction removes, and how much of
the answer's attention the recomputed tokens have. A run that is interrupted goes on with the same command. Read
`measure_question` first.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.results import ModelOption, OutOption, write_result
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.corpus.embedders import Embedder, default_embedder
from ragblend.engine.fusion.attention import ProbeQueries, attend_with_weights
from ragblend.engine.fusion.plan import FusedKV, first_token_kl
from ragblend.engine.fusion.rules import RULES, RuleInputs, SelectionRule
from ragblend.engine.generation import EngineRequest
from ragblend.engine.load import load_engine
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.errors import UsageError
from ragblend.ingestion.contexts import chunk_variants
from ragblend.intervals import mean_interval
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import score_fidelity, token_log_probs
from ragblend.lab.quality.study import FullPrefillReference, answer_in_full
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt.render import NEUTRAL_TEXT
from ragblend.prompt.types import Prompt, as_chunk

BUDGETS = (0.05, 0.15, 0.3)
FURTHER_BUDGETS = (0.025, 0.1, 0.2, 0.5)  # of chunks stored alone
CONTEXTS = ("none", "neutral", "unrelated", "neutral short")
NUM_PARTS = 4  # parts of the depth, in which layers are restored


class Row(NamedTuple):
    """Closeness of one variant to full prefill on one question."""

    context: str
    kind: str  # recompute or restore
    variant: str
    ratio: float
    first_token_kl: float
    answer_kl: float
    agreement: float


class QuestionStudy:
    """One question, with full prefill's answer and KV, over chunks stored in one context."""

    def __init__(self, engine: TransformersEngine, expected: FullPrefillReference, context: str) -> None:
        self.engine, self.expected, self.context = engine, expected, context
        self.full = expected.full.fused
        self.prompt = expected.request.prompt
        self.starts = torch.tensor([run.start for run in self.prompt.runs])
        self.is_chunk = torch.zeros(self.prompt.num_tokens, dtype=torch.bool)
        for run in self.prompt.runs:
            self.is_chunk[run.start : run.end] = True
        self.num_chunk_tokens = int(self.is_chunk.sum())

    def recompute(self, rule: SelectionRule, ratio: float) -> tuple[Row, FusedKV, Tensor]:
        """Blend with `rule`. Return the row, the KV, and the positions of the recomputed tokens."""
        RULES["study"] = rule
        request: EngineRequest = replace(self.expected.request, mode="blend", tuning=RequestTuning("study", ratio))
        prefilled = self.engine.prefill(request)
        row = self.score("recompute", rule.name, ratio, prefilled.fused, prefilled.logits)
        recomputed = prefilled.recomputed
        assert recomputed is not None
        return row, prefilled.fused, recomputed

    def reuse(self) -> tuple[Row, FusedKV]:
        """Reuse all stored KV. Return the row, and the KV."""
        prefilled = self.engine.prefill(replace(self.expected.request, mode="reuse"))
        return self.score("recompute", "reuse", 0.0, prefilled.fused, prefilled.logits), prefilled.fused

    def restore(
        self,
        name: str,
        ratio: float,
        stale: FusedKV,
        layers: Sequence[int],
        rows: Tensor,
        parts: Sequence[int] = (0, 1),
    ) -> Row:
        """Replace rows of `stale` by full prefill's in some layers; `parts`: 0 for keys, 1 for values."""
        changed = copy_kv(stale, self.engine, self.prompt.num_tokens)
        for layer in layers:
            for part in parts:
                mine, theirs = (each.keys(layer) if part == 0 else each.values(layer) for each in (changed, self.full))
                mine[:, rows] = theirs[:, rows]
        return self.score("restore", name, ratio, changed, None)

    def score(self, kind: str, name: str, ratio: float, fused: FusedKV, logits: Tensor | None) -> Row:
        """Return the row of a variant whose KV is in `fused`. `logits`: None computes the first token's."""
        full = self.expected.full
        scores = token_log_probs(self.engine, self.prompt, fused, full.token_ids)
        answer_kl, agreement = score_fidelity(scores, self.expected.reading)
        first = first_token_kl(full.log_probs, scores[0] if logits is None else logits)
        return Row(self.context, kind, name, ratio, first, answer_kl, agreement)


def copy_kv(source: FusedKV, engine: TransformersEngine, num_tokens: int) -> FusedKV:
    """Return a copy of the first `num_tokens` rows of `source`."""
    copied = FusedKV.allocate(engine.layers.kv_shapes, num_tokens + 64, engine.layers.like)
    copied.copy_front(source, num_tokens)
    return copied


def full_attention(engine: TransformersEngine, prompt: Any, full: FusedKV) -> tuple[Tensor, Tensor]:
    """Return the attention [L, T] of the question's tokens, and of the last token, over full prefill's KV."""
    layers, start = engine.layers, prompt.runs[-1].end
    rows = torch.arange(start, prompt.num_tokens)
    hidden = layers.embed(torch.tensor(prompt.token_ids[start:]))
    masses: list[tuple[Tensor, Tensor]] = []

    def hook(queries: ProbeQueries, keys: Tensor, values: Tensor | None) -> Tensor | None:
        assert values is not None
        output, mass = attend_with_weights(queries, keys, values, len(rows))
        last = attend_with_weights(queries.slice_rows(slice(-1, None)), keys, values, 1)[1]
        masses.append((mass, last))
        return output

    for layer in range(layers.num_layers):
        hidden = layers.run_probe_layer(layer, hidden, rows, full, hook)
    question, last = zip(*masses, strict=True)
    return torch.stack(question), torch.stack(last)


def attention_rule(name: str, attention: Tensor, base: SelectionRule) -> SelectionRule:
    """Return a rule that scores tokens by `attention` [T], and chunks' edges first, with `base`'s drift correction."""

    def score(inputs: RuleInputs) -> Tensor:
        assert inputs.is_edge is not None
        return attention[inputs.positions] + inputs.is_edge

    return replace(base, name=name, score=score)


def without_drift(rule: SelectionRule, name: str) -> SelectionRule:
    """Return `rule` as `name`, without drift correction."""
    return replace(rule, name=name, drift_gain=0.0, drift_gain_in_context=0.0)


def first_tokens_rule(name: str, count: int, starts: Tensor, then: Callable[[RuleInputs], Tensor]) -> SelectionRule:
    """Return a rule that recomputes the first `count` tokens of each chunk, then those that `then` scores highest."""

    def score(inputs: RuleInputs) -> Tensor:
        offset = (inputs.positions[:, None] - starts).masked_fill_(inputs.positions[:, None] < starts, 1 << 30)
        return then(inputs) + (offset.min(1).values < count)

    return replace(RULES["ask"], name=name, score=score)


def measure_context(study: QuestionStudy) -> list[Row]:
    """Return the rows that compare contexts: full reuse, the default rule, and CacheBlend's."""
    rows = [study.reuse()[0]]
    rows += [study.recompute(RULES["ask"], ratio)[0] for ratio in (0.05, 0.15)]
    rows.append(study.recompute(replace(RULES["ask"], name="ask without drift", drift_gain_in_context=0.0), 0.05)[0])
    return [*rows, study.recompute(RULES["cacheblend"], 0.15)[0]]


def measure_question(study: QuestionStudy, attention: Tensor, last: Tensor) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of one question in one context, and facts about its KV and attention.

    `attention`, `last`: [L, T], see `full_attention`.
    """
    engine, ask = study.engine, RULES["ask"]
    num_layers, every = engine.layers.num_layers, range(engine.layers.num_layers)
    probed = ask.probe_layers(num_layers, engine.layers.global_layers)
    seen, answer_seen = attention[list(probed)].mean(0), last.mean(0)
    row, stale = study.reuse()
    rows = [row]
    oracle = attention_rule("oracle", seen, ask)
    blended: dict[str, tuple[FusedKV, Tensor]] = {}

    def add(rule: SelectionRule, ratio: float) -> None:
        row, fused, recomputed = study.recompute(rule, ratio)
        rows.append(row)
        blended[f"{rule.name} {ratio}"] = fused, recomputed

    for ratio in BUDGETS if study.context != "none" else sorted(BUDGETS + FURTHER_BUDGETS):
        add(ask, ratio)
    for ratio in BUDGETS:
        add(without_drift(ask, "ask without drift"), ratio)
        add(oracle, ratio)
    add(without_drift(oracle, "oracle without drift"), 0.05)
    add(without_drift(oracle, "oracle without drift"), 0.15)
    add(attention_rule("oracle_last", answer_seen, ask), 0.05)
    for ratio in (0.05, 0.15):
        add(RULES["cacheblend"], ratio)
    for gain in (0.4, 1.2):
        add(replace(ask, name=f"ask gain {gain}", drift_gain=gain, drift_gain_in_context=gain), 0.05)
    for count in (4, 8):
        add(first_tokens_rule(f"ask first {count}", count, study.starts, ask.score), 0.05)
    sinks = first_tokens_rule("sinks", 4, study.starts, lambda inputs: torch.zeros(len(inputs.positions)))
    add(without_drift(sinks, "sinks"), 4 * len(study.starts) / study.num_chunk_tokens)
    if study.context == "none":
        add(ask, 1.0)  # the noise of the arithmetic

    chunk_rows = study.is_chunk.nonzero().flatten()
    for part in range(NUM_PARTS):
        layers = [layer for layer in every if layer * NUM_PARTS // num_layers == part]
        rows.append(study.restore(f"layers {part + 1} of {NUM_PARTS}", 1.0, stale, layers, chunk_rows))
    rows.append(study.restore("keys", 1.0, stale, every, chunk_rows, (0,)))
    rows.append(study.restore("values", 1.0, stale, every, chunk_rows, (1,)))
    for ratio in BUDGETS:
        best = (seen * study.is_chunk).topk(math.ceil(ratio * study.num_chunk_tokens)).indices
        rows.append(study.restore("oracle", ratio, stale, every, best))
        name = f"ask {ratio}"
        rows.append(study.restore("selected by ask", ratio, stale, every, blended[name][1]))
        # What the recomputed tokens still lack, because they attend to stale ones: the kept tokens stay as blended.
        rows.append(study.restore("recomputed by ask", ratio, blended[name][0], every, blended[name][1]))
        kept = study.is_chunk.clone()
        kept[blended[name][1]] = False
        rows.append(study.restore("kept by ask", ratio, blended[name][0], every, kept.nonzero().flatten()))
    facts = {
        "context": study.context,
        "coverage": {
            name: {
                "question": attention_share(seen, recomputed, study.is_chunk),
                "answer": attention_share(answer_seen, recomputed, study.is_chunk),
            }
            for name, (_, recomputed) in blended.items()
            if name in ("ask 0.05", "ask 0.15", "ask 0.3", "oracle 0.05", "oracle_last 0.05", "cacheblend 0.15")
        },
        "deviation": {
            name: deviation(fused, study.full, chunk_rows)
            for name, fused in (
                ("reuse", stale),
                ("ask 0.05", blended["ask 0.05"][0]),
                ("ask without drift 0.05", blended["ask without drift 0.05"][0]),
            )
        },
    }
    return rows, facts


def attention_share(attention: Tensor, rows: Tensor, is_chunk: Tensor) -> float:
    """Return the share of the attention [T] on chunk tokens that the tokens `rows` have."""
    return float(attention[rows].sum() / (attention * is_chunk).sum())


def deviation(fused: FusedKV, full: FusedKV, rows: Tensor) -> dict[str, list[float]]:
    """Return, per layer, the relative L2 distance of keys and values of `rows` from full prefill's."""

    def relative(one: Tensor, other: Tensor) -> float:
        return float((one - other).float().norm() / other.float().norm())

    found: dict[str, list[float]] = {"keys": [], "values": []}
    for layer in range(fused.num_layers):
        mine, theirs = (LayerKV(each.keys(layer)[:, rows], each.values(layer)[:, rows]) for each in (fused, full))
        found["keys"].append(round(relative(mine.keys, theirs.keys), 4))
        found["values"].append(round(relative(mine.values, theirs.values), 4))
    return found


def engine_with_context(
    base: TransformersEngine, system: str | None, context: str, prompt: Prompt, other: Prompt
) -> TransformersEngine:
    """Return an engine that has stored the prompt's chunks in one of CONTEXTS.

    "neutral short": only the first paragraph of the neutral text precedes each chunk. "unrelated": two chunks of the
    prompt `other` precede it.
    """
    engine = with_own_store(base, system=system, context="none" if context == "none" else "neutral")
    before = {
        "neutral short": [NEUTRAL_TEXT.partition("\n\n")[0]],
        "unrelated": [as_chunk(chunk).text for chunk in other.chunks[:2]],
    }
    if context in before:
        parts = (engine.renderer.chunk_ids(text) + engine.renderer.separator_ids for text in before[context])
        engine.neutral_ids = tuple(token for part in parts for token in part)
    for variant in chunk_variants(map(as_chunk, prompt.chunks), engine.context):
        engine.precompute(variant)
    return engine


def study_questions(
    base: TransformersEngine,
    embedder: Embedder,
    config: QualityConfig,
    cases: Sequence[QaCase],
    known: set[str],
    only_contexts: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the result of each case that is not in `known`, the questions already measured."""
    prompts = [build_prompt(case, base, embedder, config) for case in cases]
    for number, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
        if case.question in known:
            continue
        other = prompts[(number + 1) % len(prompts)]
        engine = with_own_store(base, system=case.system, context="none")
        expected = answer_in_full(engine, prompt, case, case.answer_tokens(config.answer_tokens))
        rows, facts = list[Row](), list[dict[str, Any]]()
        for context in CONTEXTS if only_contexts else CONTEXTS[:3]:
            engine = engine_with_context(base, case.system, context, prompt, other)
            study = QuestionStudy(engine, expected, context)
            if only_contexts:
                rows += measure_context(study)
            else:
                attention = full_attention(engine, expected.request.prompt, expected.full.fused)
                found, fact = measure_question(study, *attention)
                rows += found
                facts.append(fact)
            del engine, study
            gc.collect()
        yield {
            "question": case.question,
            "prompt_tokens": expected.request.prompt.num_tokens,
            "rows": [each._asdict() for each in rows],
            "facts": facts,
        }


def summarize(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean of each variant over the questions, with 95 % intervals of the first token's KL.

    `less_default` and `less_alone` are the paired differences [mean, low, high] of both KLs from `ask` at 5 % in the
    same context, and from the same variant over chunks stored alone.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for question in questions:
        for row in question["rows"]:
            ratio = row["ratio"] if row["variant"] != "sinks" else 0.0  # depends on the chunks' lengths
            groups.setdefault((row["context"], row["kind"], row["variant"], ratio), []).append(row)
    found = []
    for (context, kind, variant, ratio), rows in groups.items():
        means = {name: mean(row[name] for row in rows) for name in ("first_token_kl", "answer_kl", "agreement")}
        interval = mean_interval([row["first_token_kl"] for row in rows])
        run = {"context": context, "kind": kind, "variant": variant, "ratio": ratio, **means, "interval": interval}
        bases = {"less_default": (context, "recompute", "ask", 0.05), "less_alone": ("none", kind, variant, ratio)}
        for name, base in bases.items():
            if base in groups and base != (context, kind, variant, ratio):
                run[name] = _paired_differences(rows, groups[base])
        found.append(run)
    return found


def _paired_differences(rows: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of the differences between rows of the same questions, and its interval, of both KLs."""
    differences = {
        name: [row[name] - other[name] for row, other in zip(rows, base, strict=True)]
        for name in ("first_token_kl", "answer_kl")
    }
    return {name: [mean(values), *mean_interval(values)] for name, values in differences.items()}


def main(
    model: ModelOption,
    out: OutOption = None,
    data: Annotated[str, typer.Option("--data", help="musique or nq.")] = "musique",
    questions: Annotated[int, typer.Option("--questions", help="Selection questions, at most.")] = 12,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
    only_contexts: Annotated[
        bool, typer.Option("--only-contexts", help="Compare contexts only, four of them.")
    ] = False,
) -> None:
    """Measure the causes, print a line per variant, and write the result as JSON after each question."""
    quiet_libraries()
    set_num_threads(threads)
    config = QualityConfig(model=model, data=data, part="selection", num_questions=questions, dtype=dtype)
    done: list[dict[str, Any]] = []
    if out is not None and out.exists():
        done = json.loads(out.read_text(encoding="utf-8"))["questions"]
    with load_engine(model, dtype=dtype, on_miss="inline") as base, torch.inference_mode():
        if not isinstance(base, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        cases = load_cases(config)
        known = {each["question"] for each in done}
        for found in study_questions(base, default_embedder(), config, cases, known, only_contexts):
            done.append(found)
            print_line(f"{len(done)} of {len(cases)} questions")
            if out is not None:
                write_result(_result(model, data, dtype, done), out)
    for each in summarize(done):
        print_line(
            f"{each['context']:<9} {each['kind']:<9} {each['variant']:<22} {each['ratio']:<6.3g} first "
            f"{each['first_token_kl']:.4f} ({each['interval'][0]:.4f} to {each['interval'][1]:.4f}) answer "
            f"{each['answer_kl']:.4f}"
        )
    if out is None:
        write_result(_result(model, data, dtype, done), out)


def _result(model: str, data: str, dtype: str, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "model": Path(model).name,
        "data": data,
        "dtype": dtype,
        "num_questions": len(questions),
        "runs": summarize(questions),
        "questions": list(questions),
    }


if __name__ == "__main__":
    typer.run(main)
