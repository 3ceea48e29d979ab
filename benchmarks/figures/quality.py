"""Figures of quality: 2 (over the number of chunks), 12 (over TTFT), 13 (other RAG methods), 16 (ratios), 17 (devices).

Quality is the measure of the data set's task (F1 or ROUGE-L), the loss of the gold answer, and KL(full || this) of the
first token. TTFT is the median over the questions, with KV in memory unless a device is named. Read `measure` first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from benchmarks.figures.baselines import BASELINES, measure_baselines
from benchmarks.figures.panels import Panel, Point
from benchmarks.figures.workload import (
    PAPER,
    Figure,
    Question,
    Workload,
    compared,
    label_of,
    mean,
    open_engine,
    own_default,
    questions_of,
)
from benchmarks.load import ThrottledStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.ingestion.contexts import chunk_variants
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.measures import FULL, PREFIX, REUSE, Configuration, timed_prefill
from ragblend.lab.quality.study import QualityRecord, measure_prompt, summarize
from ragblend.lab.tables import Facts
from ragblend.prompt.types import as_chunk

MEASURES = {
    "token_f1": "F1 of the answer",
    "rouge_l": "ROUGE-L of the answer",
    "gold_loss": "loss of the gold answer, nats per token",
    "first_token_kl": "KL(full || this) of the first token, nats",
    "ttft_s": "time to first token, seconds",
}
RATIOS = (0.05, 0.08, 0.11, 0.15, 0.18, 0.25)
"""Recompute ratios of figure 16; the paper's are 5 to 18 %."""

LOAD_SHARES = (0.0, 0.12, 0.5)
"""Devices of figure 17, as T_load over the time of full prefill. 0 is memory."""

Extra = Callable[[TransformersEngine, Question], Mapping[Configuration, QualityRecord]]


def measure(
    work: Workload,
    base: TransformersEngine,
    questions: Sequence[Question],
    chosen: Sequence[Configuration],
    extra: Extra | None = None,
) -> dict[Configuration, Facts]:
    """Return the means over `questions` by configuration, as `ragblend bench quality` computes them.

    `extra`: measures further configurations of a question; None: no further ones.
    """
    records: dict[Configuration, list[QualityRecord]] = {}
    for number, question in enumerate(questions):
        work.on_progress("questions", number, len(questions))
        case, prompt = question
        found, _ = measure_prompt(base, prompt, case, chosen, case.answer_tokens(None))
        for each, record in {**found, **(extra(base, question) if extra is not None else {})}.items():
            records.setdefault(each, []).append(record)
        gc.collect()  # the question's engines are reference cycles, which hold its KV
    return dict(zip(records, summarize(records, ["all"] * len(questions)), strict=True))


def quality_names(questions: Sequence[Question]) -> tuple[str, ...]:
    """Return the names of the quality measures for these questions: that of their task first."""
    return questions[0].case.task.measure, "gold_loss", "first_token_kl"


def figure_2(work: Workload) -> Facts:
    """Quality over the number of chunks, with cross-attention (full prefill, blend) and without it (full reuse)."""
    counts = sorted({2, *range(3, work.num_chunks + 1, 3), work.num_chunks})
    with open_engine(work) as base:
        questions = questions_of(work, base)
        chosen = [FULL, REUSE, PAPER, own_default(base)]
        runs: dict[int, dict[Configuration, Facts]] = {}
        for count in counts:
            fewer = [Question(case, case.prompt(prompt.chunks[:count])) for case, prompt in questions]
            runs[count] = measure(work, base, fewer, chosen)
        panels = []
        for name in quality_names(questions):
            shown = chosen if name != "first_token_kl" else chosen[1:]
            series = {label_of(each): [(n, found[each][name]) for n, found in runs.items()] for each in shown}
            panels.append(Panel("", "chunks in the prompt", MEASURES[name], series))
    kl = panels[-1].series
    reuse, paper, own = kl["reuse"], kl[label_of(PAPER)], kl[label_of(own_default(base))]
    return {
        "panels": panels,
        "findings": {
            f"KL of full reuse at {counts[-1]} chunks over {counts[0]}": reuse[-1][1] / reuse[0][1],
            f"KL of full reuse over that of the paper's rule, {counts[-1]} chunks": reuse[-1][1] / paper[-1][1],
            f"KL of the paper's rule over that of the default, {counts[-1]} chunks": paper[-1][1] / own[-1][1],
        },
    }


def over_ttft(runs: Mapping[Configuration, Facts], names: Sequence[str]) -> list[Panel]:
    """Return a panel per measure: quality (y) over TTFT (x), a point per configuration."""
    panels = []
    for name in names:
        exact = ("full", "prefix") if name == "first_token_kl" else ()
        shown = {each: run for each, run in runs.items() if each.mode not in exact}
        series = {label_of(each): [(run["ttft_s"], run[name])] for each, run in shown.items()}
        panels.append(Panel("", MEASURES["ttft_s"], MEASURES[name], series, "point"))
    return panels


def speedups(runs: Mapping[Configuration, Facts]) -> dict[str, float]:
    """Return full prefill's TTFT divided by that of each other configuration, by a name for the findings."""
    times = {label_of(each): run["ttft_s"] for each, run in runs.items()}
    return {f"TTFT of full over {label}": times["full"] / each for label, each in times.items() if label != "full"}


def figure_12(work: Workload) -> Facts:
    """Quality over TTFT: full prefill, prefix caching, full reuse, the paper's rule and ragblend's default."""
    with open_engine(work) as base:
        questions = questions_of(work, base)
        runs = measure(work, base, questions, compared(base))
        found = speedups(runs)
        name = questions[0].case.task.measure
        found |= {f"{name} of {label_of(each)}": run[name] for each, run in runs.items()}
        return {"panels": over_ttft(runs, quality_names(questions)), "findings": found}


def figure_13(work: Workload) -> Facts:
    """Quality over TTFT beside MapReduce and MapRerank, whose calls for the single chunks run side by side."""

    def extra(base: TransformersEngine, question: Question) -> Mapping[Configuration, QualityRecord]:
        return measure_baselines(base, question.prompt, question.case, BASELINES)

    with open_engine(work) as base:
        questions = questions_of(work, base)
        runs = measure(work, base, questions, [FULL, PAPER, own_default(base)], extra)
        own = runs[own_default(base)]
        name = questions[0].case.task.measure
        found = {
            f"TTFT of {label_of(each)} over the default": run["ttft_s"] / own["ttft_s"] for each, run in runs.items()
        }
        found |= {f"{name} of {label_of(each)}": run[name] for each, run in runs.items()}
        # The prompts of the other methods differ, so their distance from full prefill is no error.
        return {"panels": over_ttft(runs, quality_names(questions)[:2]), "findings": found}


def figure_16(work: Workload) -> Facts:
    """Quality and TTFT over the recompute ratio, for the paper's rule and ragblend's rule."""
    with open_engine(work) as base:
        questions = questions_of(work, base)
        own = own_default(base)
        lines = {rule: [PAPER._replace(rule=rule, ratio=ratio) for ratio in RATIOS] for rule in (PAPER.rule, own.rule)}
        runs = measure(work, base, questions, [FULL, PREFIX, REUSE, *chain(*lines.values())])
        panels = []
        for name in (*quality_names(questions), "ttft_s"):
            series: dict[str, list[Point]] = {
                each.mode: [(0.0, runs[each][name]), (RATIOS[-1], runs[each][name])]
                for each in (FULL, PREFIX, REUSE)
                if name != "first_token_kl" or each == REUSE
            }
            series |= {rule: [(each.ratio, runs[each][name]) for each in line] for rule, line in lines.items()}
            panels.append(Panel("", "recompute ratio", MEASURES[name], series))
        found = {}
        for ratio in (RATIOS[0], 0.18):
            for rule in lines:
                run = runs[PAPER._replace(rule=rule, ratio=ratio)]
                found[f"TTFT of full over {rule} {ratio:.0%}"] = runs[FULL]["ttft_s"] / run["ttft_s"]
                found[f"first-token KL of {rule} {ratio:.0%}"] = run["first_token_kl"]
        return {"panels": panels, "findings": found}


def figure_17(work: Workload) -> Facts:
    """Quality over TTFT with KV in memory and on slower devices. Prefix caching loads nothing, as in the paper."""
    with open_engine(work) as base:
        questions = questions_of(work, base)
        chosen = compared(base)
        quality = measure(work, base, questions, chosen)
        name = questions[0].case.task.measure
        times = [device_times(base, question, chosen) for question in questions]
        panels, found = [], {}
        for place, share in enumerate(LOAD_SHARES):
            device = "memory" if not share else f"a device with T_load = {share:g} of full prefill"
            ttft_s = {each: mean([taken[each][place] for taken in times]) for each in chosen}
            series = {label_of(each): [(ttft_s[each], quality[each][name])] for each in chosen}
            panels.append(Panel(device, MEASURES["ttft_s"], MEASURES[name], series, "point"))
            for each in (REUSE, PAPER, own_default(base)):
                found[f"TTFT of full over {label_of(each)}, {device}"] = ttft_s[FULL] / ttft_s[each]
        return {"panels": panels, "findings": found}


def device_times(
    base: TransformersEngine, question: Question, chosen: Sequence[Configuration]
) -> dict[Configuration, list[float]]:
    """Return the TTFT in seconds of one question from each device of LOAD_SHARES, by configuration."""
    case, prompt = question
    found: dict[Configuration, list[float]] = {}
    full_s = 0.0
    for context in dict.fromkeys(each.context for each in chosen):
        engine = with_own_store(base, system=case.system, context=context)
        for variant in chunk_variants(map(as_chunk, prompt.chunks), context):
            engine.precompute(variant)
        memory, request = engine.store, engine.request(prompt, mode="full", max_tokens=1)
        load_bytes = request.prompt.num_tokens * engine.bytes_per_token
        for each in (each for each in chosen if each.context == context):
            timed_prefill(engine, request, each)  # warm-up
            full_s = full_s or timed_prefill(engine, request, FULL)[1]
            for share in LOAD_SHARES:
                loads = share and each.mode in ("reuse", "blend")
                engine.store = ThrottledStore(memory, load_bytes / (share * full_s)) if loads else memory
                found.setdefault(each, []).append(timed_prefill(engine, request, each)[1])
            engine.store = memory
    return found


FIGURES: dict[str, Figure] = {
    "2": Figure(figure_2, {"num_chunks": 12, "num_questions": 8}),
    "12": Figure(figure_12, {"num_questions": 40}),
    "13": Figure(figure_13, {"num_questions": 24}),
    "16": Figure(figure_16, {"num_questions": 40}),
    "17": Figure(figure_17, {"num_questions": 12}),
}
