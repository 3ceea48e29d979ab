"""Closeness of answers from fused KV to full prefill's, and their quality, on a transformers model and real questions.

Each question becomes the prompt that `ragblend ask` would send. It is prefilled in full and fused in every
configuration, with its own chunks in a memory store. Measures: KL(full || this) of the first token and of full
prefill's greedy answer, token by token; the loss of the gold answer; F1, exact match and ROUGE-L of the greedy answer;
and the time to first token. Nothing is sampled, so all results but times are bit for bit reproducible on one machine.
Read `run_quality` and `measure_prompt` first.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragblend.corpus.embedders import default_embedder, load_embedder
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.generation import EngineRequest
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.intervals import mean_interval
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.bench.common.output import Benchmark, result_facts
from ragblend.lab.engines import with_own_store
from ragblend.lab.plots import plot_quality
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import (
    FULL,
    PREFIX,
    REUSE,
    Answer,
    Configuration,
    answer_f1,
    contains_answer,
    decode_answers,
    exact_match,
    generate_answer,
    loss,
    rouge_l,
    score_and_begin_answer,
    score_fidelity,
    token_log_probs,
)
from ragblend.lab.quality.tasks import QaCase
from ragblend.lab.tables import Column, Facts, format_table
from ragblend.prompt.types import MatchedPrompt, Prompt, as_chunk

BASE = Configuration("blend", "cacheblend", 0.15)
"""The configuration that the others are compared with, question by question: the paper's rule at the paper's ratio,
over chunks stored without context, or with the first context policy that is run."""

PAPER_RULES = ("cacheblend", "cacheblend_k")
"""Rules that a run is also compared with at its own ratio and context policy: CacheBlend's and LMCache's."""

MIN_SHOWN = 5  # questions of a kind from which the table has a block for it


class QualityRecord(NamedTuple):
    """Measures of one question in one configuration, KL and loss in nats. NaN: the measure is not defined."""

    first_token_kl: float  # KL(full || this)
    answer_kl: float  # the same, mean over the tokens of full prefill's answer
    agreement: float  # share of those tokens for which this configuration has the same most likely token
    gold_loss: float  # per token of the first gold answer
    token_f1: float  # of the greedy answer with the best gold answer, normalized as SQuAD does
    exact_match: float
    contains_answer: float  # 1.0 if the greedy answer contains a gold one, else 0.0
    rouge_l: float  # as LongBench computes it
    charged_budget: float
    charged_budget_32: float  # projected to a model with 32 layers
    ttft_s: float


MEASURES = ("first_token_kl", "answer_kl", "gold_loss", "token_f1", "contains_answer")
"""Measures with intervals and with comparisons question by question."""

RECOVERED = {"gold_loss": 1.0, "token_f1": -1.0}
"""Measures whose loss by full reuse blending may recover, with the sign that makes them a loss."""


def configurations(config: QualityConfig, num_layers: int) -> list[Configuration]:
    """Return the configurations in which every question is answered: full prefill, then those of `config`."""
    names = list(dict.fromkeys(find_rule(rule, num_layers).name for rule in config.rules))
    chosen = [each for each in (PREFIX, REUSE) if each.mode in config.modes]
    if "blend" in config.modes:
        chosen += [Configuration("blend", name, ratio) for name in names for ratio in config.ratios]
    stored = [each._replace(context=name) for name in config.contexts for each in chosen]
    return list(dict.fromkeys([FULL, *stored]))


ExtraMeasures = Callable[[TransformersEngine, Prompt, QaCase], Mapping[Configuration, QualityRecord]]


def run_quality(
    config: QualityConfig, on_progress: Progress = ignore_progress, extra_measures: ExtraMeasures | None = None
) -> Facts:
    """Run the study that `config` describes, and return its JSON object.

    `extra_measures`: called for each prompt, returns records of further configurations; None: no further ones.
    """
    opened = load_engine(config.model, dtype=config.dtype, device=config.device, on_miss="inline")
    with opened as base, torch.inference_mode():
        assert isinstance(base, TransformersEngine)
        embedder = load_embedder(config.embedder) if config.embedder else default_embedder()
        cases = load_cases(config)
        chosen = configurations(config, base.layers.num_layers)
        records: dict[Configuration, list[QualityRecord]] = {each: [] for each in chosen}
        lengths = []
        for number, case in enumerate(cases):
            on_progress("questions", number, len(cases))
            prompt = build_prompt(case, base, embedder, config)
            measured, num_tokens = measure_prompt(base, prompt, case, chosen, case.answer_tokens(config.answer_tokens))
            lengths.append(num_tokens)
            for each, record in {**measured, **(extra_measures(base, prompt, case) if extra_measures else {})}.items():
                records.setdefault(each, []).append(record)
            gc.collect()  # the question's engines are reference cycles, which hold gigabytes of KV
        return result_facts(
            config,
            base.name,
            hardware_card(base.layers.device),
            fingerprint=base.fingerprint,
            num_layers=base.layers.num_layers,
            embedder=embedder.name,
            num_questions=len(cases),
            prompt_tokens=float(np.mean(lengths)),
            base=BASE._asdict(),
            runs=summarize(records, [case.kind for case in cases]),
        )


def measure_prompt(
    base: TransformersEngine,
    prompt: Prompt,
    case: QaCase,
    chosen: Sequence[Configuration],
    answer_tokens: int,
) -> tuple[dict[Configuration, QualityRecord], int]:
    """Return the record of `prompt` in each configuration, and the number of the prompt's tokens."""
    engine = with_own_store(base, system=case.system, context="none")
    expected = answer_in_full(engine, prompt, case, answer_tokens)
    request, full = expected.request, expected.full
    records = {FULL: expected.record(engine, full, expected.reading, request.prompt)}
    for context in dict.fromkeys(each.context for each in chosen if each != FULL):
        engine = with_own_store(base, system=case.system, context=context)
        for variant in chunk_variants(map(as_chunk, prompt.chunks), context):
            engine.precompute(variant)
        compared = [each for each in chosen if each != FULL and each.context == context]
        begun = [score_and_begin_answer(engine, request, each, full) for each in compared]
        answers = decode_answers(engine, request, [answer for answer, _ in begun])
        for each, answer, (_, scores) in zip(compared, answers, begun, strict=True):
            records[each] = expected.record(engine, answer, scores, request.prompt)
    return records, request.prompt.num_tokens


class FullPrefillReference(NamedTuple):
    """Full prefill's answer to one prompt. The answers of the other configurations are compared with it."""

    case: QaCase
    request: EngineRequest
    full: Answer
    reading: Tensor  # `token_log_probs` of that answer over its own KV
    gold_ids: Sequence[int]  # token ids of the first gold answer

    def record(
        self, engine: TransformersEngine, answer: Answer, scores: Tensor, prompt: MatchedPrompt
    ) -> QualityRecord:
        """Return the measures of `answer`, a configuration's answer to `prompt`.

        `scores`: the result of `token_log_probs` for the KV of `answer` and the tokens of full prefill's answer.
        """
        answer_kl, agreement = score_fidelity(scores, self.reading)
        text = self.case.task.scored_text(answer.text)
        f1, match, contains, overlap = (
            max(measure(text, gold) for gold in self.case.answers)
            for measure in (answer_f1, exact_match, contains_answer, rouge_l)
        )
        return QualityRecord(
            first_token_kl(self.full.log_probs, answer.log_probs),
            answer_kl,
            agreement,
            _gold_loss(engine, answer, prompt, self.gold_ids),
            f1,
            match,
            contains,
            overlap,
            answer.report.charged_budget,
            answer.report.charged_budget_32,
            answer.ttft_s,
        )


def answer_in_full(
    engine: TransformersEngine, prompt: Prompt, case: QaCase, answer_tokens: int
) -> FullPrefillReference:
    """Return the answer to `prompt` by full prefill, with its scores."""
    # A seed for each prompt, for rules that draw tokens at random.
    seed = zlib.crc32(repr(prompt.messages).encode())
    request = engine.request(prompt, mode="full", max_tokens=answer_tokens, seed=seed)
    full = generate_answer(engine, request, FULL)
    reading = token_log_probs(engine, request.prompt, full.fused, full.token_ids)
    # A gold answer is tokenized with or without a leading space; the one that full prefill finds more likely counts.
    spellings = [engine.renderer.text_ids(blank + case.answers[0])[:answer_tokens] for blank in ("", " ")]
    gold_ids = min(spellings, key=lambda gold_ids: _gold_loss(engine, full, request.prompt, gold_ids))
    return FullPrefillReference(case, request, full, reading, gold_ids)


def _gold_loss(engine: TransformersEngine, answer: Answer, asked: MatchedPrompt, gold_ids: Sequence[int]) -> float:
    return loss(token_log_probs(engine, asked, answer.fused, gold_ids), gold_ids)


# -- means


def summarize(records: dict[Configuration, list[QualityRecord]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return means, intervals and paired differences, in one dictionary per kind of question and configuration.

    The kind "all" comes first. `kinds`: the kind of each question, in the order of the records.
    """
    groups = {"all": list(range(len(kinds)))}
    if len(set(kinds)) > 1:
        groups |= {kind: [place for place, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}
    runs = []
    for kind, places in groups.items():
        tables = {
            each: dict(zip(QualityRecord._fields, np.array(rows)[places].T, strict=True))
            for each, rows in records.items()
        }
        runs += [_run(each, kind, tables) for each in tables]
    return runs


Table = dict[str, NDArray[np.float64]]
"""The measures of one configuration by name: [Q], one number per question."""


def _run(configuration: Configuration, kind: str, tables: Mapping[Configuration, Table]) -> dict[str, Any]:
    table, base, reuse = tables[configuration], _in_first_context(tables, BASE), _in_first_context(tables, REUSE)
    equals = {rule: configuration._replace(rule=rule) for rule in PAPER_RULES if configuration.mode == "blend"}
    equal = {rule: tables[each] for rule, each in equals.items() if each in tables and each != configuration}
    run: dict[str, Any] = {**configuration._asdict(), "kind": kind, "num_questions": len(table["ttft_s"])}
    for name, values in table.items():
        run[name] = None if np.isnan(values).all() else float(np.nanmean(values))
    run["ttft_s"] = float(np.median(table["ttft_s"]))  # the first one warms up
    for name in MEASURES:
        if run[name] is not None:
            run[f"{name}_low"], run[f"{name}_high"] = mean_interval(_drop_nan(table[name]))
            if base is not None:
                run[f"{name}_over_base"] = _difference(table[name], base[name])
            if equal:
                run[f"{name}_over_equal"] = {rule: _difference(table[name], each[name]) for rule, each in equal.items()}
    if FULL in tables and configuration != FULL:
        run["token_f1_over_full"] = _difference(table["token_f1"], tables[FULL]["token_f1"])
    for name, sign in RECOVERED.items():
        run[f"recovered_{name}"] = None
        if FULL in tables and reuse is not None:
            losses = (sign * each[name] for each in (tables[FULL], reuse, table))
            run[f"recovered_{name}"] = compute_gap_recovered(*losses)
    return run


def _difference(values: NDArray[np.float64], others: NDArray[np.float64]) -> list[float]:
    """Return the mean of the paired differences between two measurements, and its 95 % interval."""
    less = _drop_nan(values - others)
    return [float(less.mean()), *mean_interval(less)]


def _in_first_context(tables: Mapping[Configuration, Table], configuration: Configuration) -> Table | None:
    """Return the table of `configuration` with the first context policy that was run; None if it was not run."""
    return next((table for each, table in tables.items() if each._replace(context="none") == configuration), None)


def compute_gap_recovered(
    full: NDArray[np.float64], reuse: NDArray[np.float64], blend: NDArray[np.float64]
) -> float | None:
    """Return the share of the gap between full reuse and full prefill that a configuration closes (PGR).

    full, reuse, blend: the losses [number of questions] of full prefill, full reuse and the configuration. The gap is
    `reuse - full`. Returns None unless the 95 % interval of the mean gap is above 0.

    >>> full, reuse = np.full(9, 1.0), np.full(9, 3.0)
    >>> compute_gap_recovered(full, reuse, np.full(9, 1.5)), compute_gap_recovered(full, full, full)
    (0.75, None)
    >>> compute_gap_recovered(reuse, full, full)
    """
    if not len(gap := _drop_nan(reuse - full)):
        return None
    return float(_drop_nan(reuse - blend).mean() / gap.mean()) if mean_interval(gap)[0] > 0 else None


def _drop_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]


# -- people


def table_lines(facts: Facts) -> list[str]:
    """Return the table: a line per configuration and kind of question."""
    config = facts["config"]
    lines = [
        f"{facts['model']} {config['dtype']}, {config['data']}, {config['part']} part, {facts['num_questions']} "
        f"questions, {facts['prompt_tokens']:.0f} tokens in {config['num_chunks']} chunks; KL and loss in nats with "
        "95 % intervals"
    ]
    runs = [run for run in facts["runs"] if run["kind"] == "all" or run["num_questions"] >= MIN_SHOWN]
    for kind in dict.fromkeys(run["kind"] for run in runs):
        columns: tuple[Column, ...] = (
            (kind, "<32", run_label), ("charged", ">8.3f", "charged_budget_32"),
            ("first-token KL", ">22", partial(_with_interval, "first_token_kl")),
            ("answer KL", ">22", partial(_with_interval, "answer_kl")),
            ("agree", ">7.3f", "agreement"), ("gold loss", ">10.3f", "gold_loss"), ("F1", ">7.3f", "token_f1"),
            ("exact", ">7.3f", "exact_match"), ("answer", ">7.3f", "contains_answer"), ("ROUGE", ">7.3f", "rouge_l"),
            ("recovered", ">10.0%", "recovered_gold_loss"), ("TTFT s", ">8.3f", "ttft_s"),
        )  # fmt: skip
        lines += ["", *format_table(columns, (run for run in runs if run["kind"] == kind))]
    return [
        *lines,
        "",
        "charged: share of full prefill's work on chunk tokens, with 32 layers; agree: share of answer tokens that are "
        "full prefill's; answer: the gold answer is in it; recovered: of the gold loss that reuse adds",
    ]


def _with_interval(name: str, run: Facts) -> str:
    return f"{run[name]:.3f} [{run[f'{name}_low']:.3f}, {run[f'{name}_high']:.3f}]"


def run_label(run: dict[str, Any]) -> str:
    """Return the label of a run's configuration."""
    behind = f", {run['context']}" if run["context"] != "none" else ""
    if run["mode"] != "blend":
        return f"{run['mode']}{behind}"
    return f"{run['rule']} {run['ratio']:.1%}{behind}"


BENCHMARK = Benchmark(run_quality, table_lines, plot_quality)
