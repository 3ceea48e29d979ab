"""What each recompute ratio costs on a corpus, and the smallest ratio that meets a target.

Questions retrieve their chunks as `ask` does. Each prompt is prefilled in full, and blended by every rule at every
ratio, and timed. Two measures compare the first tokens: their agreement, and KL(full || blend). No answers or labels
are needed.
A ratio meets the target if the lower end of the 95 % interval of its agreement is not below the target. The fitted
ratio is the smallest ratio that meets the target together with all larger measured ratios. The engine loads the
calibration from its store (`engine.tuning.calibration`).

Read `calibrate` first, then `fit_ratio`. Depends on the transformers engine and the index.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.config import Settings
from ragblend.engine.api import Engine
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.fusion.rules import CHECK_LAYER, NO_PROBE_RULE, default_check_layer, find_rule, validate_ratio
from ragblend.engine.generation import EngineRequest
from ragblend.engine.report import BlendReport
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, RequestTuning, RuleFit, save_calibration
from ragblend.errors import UsageError
from ragblend.index import ChunkIndex
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.intervals import wilson_interval
from ragblend.option_fields import default_of
from ragblend.prompt.types import Chunk, Prompt

RULES = ("auto", NO_PROBE_RULE)  # the default rules to measure
RATIOS = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # in addition to 0 and 1, which are always measured
NUM_QUESTIONS = 60
TARGET = 0.9
Z_SQUARED = 3.8415  # squared normal quantile of a 95 % interval

Curve = tuple[CurvePoint, ...]


CalibrationSample = tuple[bool, float, float, float]
"""One question with one rule at one ratio, compared with full prefill: whether the first tokens agree, KL(full ||
blend) of the first token, the charged budget, and the charged budget with 32 layers."""


TtftTimes = Mapping[tuple[str, float], float]
"""Median seconds to the first token, by rule and ratio. The prompts' KV is in the memory tier, if that can hold it."""


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A calibration, the path of its file (None: not saved), its cost, and the result on held-out questions.

    `full_s`: median seconds to the first token by full prefill of the same prompts, of `prompt_tokens` tokens on
    average. `ttft_s`: the same by blending.
    """

    calibration: Calibration
    path: str | None
    full_s: float
    ttft_s: TtftTimes
    prompt_tokens: float
    num_prefills: int
    elapsed_s: float
    cpu_s: float
    held_out: CurvePoint | None = None  # at the fitted ratio, on questions that the calibration was not fitted on
    num_held_out: int = 0

    @property
    def is_target_refuted(self) -> bool:
        """True if the agreement on held-out questions is below the target with 95 % confidence."""
        return self.held_out is not None and self.held_out.high < self.calibration.target


def calibrate(
    engine: Engine,
    index: ChunkIndex,
    questions: Sequence[str],
    *,
    k: int = default_of(Settings, "k"),
    neighbours: int = default_of(Settings, "neighbours"),
    order: Any = default_of(Settings, "order"),
    target: float = TARGET,
    num_questions: int = NUM_QUESTIONS,
    num_held_out: int = 0,
    rules: Sequence[str] = RULES,
    ratios: Sequence[float] = RATIOS,
    save: bool = True,
    progress: Progress = ignore_progress,
) -> CalibrationRun:
    """Measure quality and time of `rules` at `ratios` on `num_questions` of `questions`; fit a ratio per rule.

    `target`: agreement to reach, between 0 and 1. `num_held_out`: number of further questions, on which the fitted
    ratio is evaluated. `save`: save the calibration in the engine's store. `k`, `neighbours` and `order`: arguments of
    `index.search`. Prompts have the engine's system text. Raises UsageError for too few questions, for an engine that
    is not a TransformersEngine, and if `save` is True and the store has no directory.
    """
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    check_target(target, num_questions)
    if not isinstance(engine, TransformersEngine):
        raise UsageError(
            "calibrate compares first-token distributions, which vLLM does not show. Calibrate with --backend "
            "transformers on the store that vLLM serves from: the calibration is for both"
        )
    disk = engine.store.find_tier(DiskStore) if save else None
    if save and disk is None:
        raise UsageError("the engine's store has no directory to keep a calibration in; load it with store=DIR")
    fitted, others = split_questions(questions, num_questions, num_held_out, target)
    grid = (0.0, *sorted({validate_ratio(ratio) for ratio in ratios} - {0.0, 1.0}), 1.0)
    names = unique_rule_names(rules, engine.layers.num_layers)

    def prompts(texts: Sequence[str]) -> list[Prompt]:
        hits = (index.search(text, k, neighbours=neighbours, order=order) for text in texts)
        return [
            Prompt([hit.chunk for hit in chunk_hits], text, engine.system)
            for chunk_hits, text in zip(hits, texts, strict=True)
        ]

    measured = measure_curves(engine, prompts(fitted), names, grid, progress)
    calibration = Calibration(
        engine.fingerprint,
        engine.default_prefix_ids,
        index.manifest.chunker,
        time.time(),
        target,
        len(fitted),
        f"k {k}, neighbours {neighbours}, order {order}",
        fit_all(measured.curves, target, default_check_layer(engine.layers.global_layers)),
    )
    path = str(save_calibration(disk, calibration)) if disk is not None else None
    held_out = evaluate_held_out(engine, prompts(others), calibration, progress) if others else None
    num_prefills = len(fitted) * (4 + len(names) * (len(grid) - 2)) + 2 * len(others)
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    times = (measured.full_s, measured.ttft_s, measured.prompt_tokens)
    return CalibrationRun(calibration, path, *times, num_prefills, elapsed_s, cpu_s, held_out, len(others))


# -- questions


def read_questions(text: str) -> list[str]:
    """Return the questions in a text: its lines, or the "question" of the JSON object on each line.

    Raises UsageError if the first line begins with "{" and a line is not a JSON object with a "question".
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].startswith("{"):
        return lines
    try:
        return [str(json.loads(line)["question"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'the file looks like JSON lines, but not each line is {{"question": "..."}}: {error!r}'
        ) from error


def generate_questions(chunks: Sequence[Chunk], count: int) -> list[str]:
    """Return questions without known answers: each quotes the beginning of a sentence from a random chunk, and asks for
    the rest.

    The first token of an answer then depends on the retrieved chunks. These questions are easier than questions over
    several chunks, so real questions are better.
    """
    draw = random.Random(0)
    asked = []
    for chunk in draw.sample(list(chunks), len(chunks)):
        words = [sentence.split() for sentence in re.split(r"(?<=[.!?。！？])\s+", chunk.text)]
        long = [sentence for sentence in words if 6 <= len(sentence) <= 60]
        if long:
            sentence = draw.choice(long)
            asked.append(
                f'How does this sentence of the documents go on: "{" ".join(sentence[: -len(sentence) // 3])}"?'
            )
    return asked[:count]


def split_questions(
    questions: Sequence[str], num_questions: int, num_held_out: int, target: float
) -> tuple[list[str], list[str]]:
    """Return distinct random questions to fit on, and at most `num_held_out` others. Raises UsageError for too few."""
    distinct = list(dict.fromkeys(question.strip() for question in questions if question.strip()))
    check_target(target, len(distinct))
    drawn = random.Random(0).sample(distinct, len(distinct))
    num_fitted = max(min_questions(target), min(num_questions, len(drawn) - num_held_out))
    return drawn[:num_fitted], drawn[num_fitted:][:num_held_out]


def min_questions(target: float) -> int:
    """Return the smallest number of questions that establish the agreement `target` if all of them agree.

    If n of n questions agree, the lower end of Wilson's 95 % interval is n / (n + 3.84).

    >>> min_questions(0.9), min_questions(0.98)
    (35, 189)
    """
    return math.ceil(Z_SQUARED * target / (1 - target))


def check_target(target: float, num_questions: int) -> None:
    """Raise UsageError for a target that `num_questions` questions cannot establish, before anything is measured."""
    if not 0 < target < 1:
        raise UsageError(f"target is {target}; choose a share above 0 and below 1, such as {TARGET}")
    if num_questions < min_questions(target):
        highest_target = num_questions / (num_questions + Z_SQUARED)
        raise UsageError(
            f"{num_questions} questions are too few: they can establish an agreement of at most {highest_target:.2f}, "
            f"but {target:g} needs {min_questions(target)}; raise --num-questions, give more (--questions FILE, one "
            "per line), or lower --target"
        )


# -- measuring


def unique_rule_names(rules: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Return the distinct names of `rules`. If the default rule is among them, it is the first."""
    standard = find_rule("auto", num_layers).name
    names = dict.fromkeys(find_rule(rule, num_layers).name for rule in rules)
    return tuple(sorted(names, key=lambda name: name != standard))


class MeasuredCurves(NamedTuple):
    """The curve of each rule by the rule's name, median seconds to the first token, and mean tokens of a prompt."""

    curves: dict[str, Curve]
    full_s: float
    ttft_s: TtftTimes
    prompt_tokens: float


def measure_curves(
    engine: TransformersEngine,
    prompts: Sequence[Prompt],
    rules: Sequence[str],
    ratios: Sequence[float],
    on_progress: Progress,
) -> MeasuredCurves:
    """Return the curve of each rule, the agreement with full prefill at each ratio, and the times.

    Each blend uses a RuleFit of the rule, as it would after a calibration. Full prefill and all blends of a prompt
    follow each other, so a machine that gets slower affects all of them. One blend that is not timed comes before them
    and brings the prompt's KV into the memory tier."""
    trials: dict[tuple[str, float], list[CalibrationSample]] = {(rule, ratio): [] for rule in rules for ratio in ratios}
    times_s: dict[tuple[str, float], list[float]] = {key: [] for key in trials}
    full_times_s, lengths = list[float](), list[int]()
    check_layer = default_check_layer(engine.layers.global_layers)
    unmeasured = tuple(CurvePoint(ratio, *(0.0,) * 6) for ratio in (0.0, 1.0))
    fits = {rule: RuleFit(rule, check_layer, 0.0, False, unmeasured) for rule in rules}
    for number, prompt in enumerate(prompts):
        on_progress("measure", number, len(prompts))
        request, full = _run_full_prefill(engine, prompt)
        _run_blend(engine, request, fits[rules[0]], 0.0, full.logits)
        full_times_s.append(full.ttft_s)
        lengths.append(request.prompt.num_tokens)
        for ratio in ratios:
            trial: tuple[CalibrationSample, float] | None = None
            for rule in rules:
                if trial is None or 0 < ratio < 1:  # at 0 and 1 all rules recompute the same tokens
                    trial = _run_blend(engine, request, fits[rule], ratio, full.logits)
                trials[rule, ratio].append(trial[0])
                times_s[rule, ratio].append(trial[1])
    on_progress("measure", len(prompts), len(prompts))
    return MeasuredCurves(
        {rule: tuple(summarize_ratio(ratio, trials[rule, ratio]) for ratio in ratios) for rule in rules},
        median(full_times_s),
        {key: median(taken) for key, taken in times_s.items()},
        fmean(lengths),
    )


def summarize_ratio(ratio: float, trials: Sequence[CalibrationSample]) -> CurvePoint:
    """Return the point of the curve for one ratio of one rule."""
    agrees, kl, charged, charged_32 = (fmean(column) for column in zip(*trials, strict=True))
    return CurvePoint(ratio, charged, agrees, *wilson_interval(agrees, len(trials)), kl, charged_32)


def evaluate_held_out(
    engine: TransformersEngine, prompts: Sequence[Prompt], calibration: Calibration, on_progress: Progress
) -> CurvePoint:
    """Return how well the calibration's best fit agrees with full prefill on `prompts`.

    The calibration must not have been fitted on `prompts`.
    """
    fit, trials = calibration.fits[0], []
    for number, prompt in enumerate(prompts):
        on_progress("check", number, len(prompts))
        request, full = _run_full_prefill(engine, prompt)
        trials.append(_run_blend(engine, request, fit, fit.ratio, full.logits)[0])
    on_progress("check", len(prompts), len(prompts))
    return summarize_ratio(fit.ratio, trials)


class _TimedPrefill(NamedTuple):
    logits: Tensor  # [V], of the first token
    report: BlendReport
    ttft_s: float


def _time_prefill(engine: TransformersEngine, request: EngineRequest) -> _TimedPrefill:
    """Prefill a request. The time contains matching, as the report's does."""
    start_s = time.perf_counter()
    prefilled = engine.prefill(request)
    if prefilled.logits.device.type == "cuda":
        torch.cuda.synchronize(prefilled.logits.device)
    return _TimedPrefill(prefilled.logits, prefilled.report, time.perf_counter() - start_s + request.prompt.match_s)


def _run_full_prefill(engine: TransformersEngine, prompt: Prompt) -> tuple[EngineRequest, _TimedPrefill]:
    """Precompute the prompt's chunks; return the prompt as a request, and its full prefill."""
    for chunk in prompt.chunks:
        engine.precompute(chunk)
    request = engine.request(prompt, mode="full", max_tokens=1)
    return request, _time_prefill(engine, request)


def _run_blend(
    engine: TransformersEngine, request: EngineRequest, fit: RuleFit, ratio: float, full: Tensor
) -> tuple[CalibrationSample, float]:
    """Blend a request as the engine does with `fit`. Return the comparison with full prefill's logits `full` [V], and
    the seconds to the first token."""
    tuning = RequestTuning(fit.rule, ratio, fit, is_auto_rule=True)
    blended = _time_prefill(engine, replace(request, mode="blend", tuning=tuning))
    agrees = bool(blended.logits.argmax() == full.argmax())
    sample = (
        agrees,
        first_token_kl(full, blended.logits),
        blended.report.charged_budget,
        blended.report.charged_budget_32,
    )
    return sample, blended.ttft_s


# -- fitting: arithmetic on what was measured


def fit_ratio(rule: str, curve: Curve, target: float, check_layer: int = CHECK_LAYER) -> RuleFit:
    """Return the fit of `rule`: the smallest measured ratio that meets `target`, as all larger ones do.

    A ratio meets the target if the lower end of the 95 % interval of its agreement is at least `target`. If no ratio
    does, the fit is the largest ratio. check_layer: the layer at which the rule selects tokens.
    """
    meets = [min(point.low for point in curve[place:]) >= target for place in range(len(curve))]
    place = meets.index(True) if True in meets else len(curve) - 1
    return RuleFit(rule, check_layer, curve[place].ratio, meets[place], curve)


def fit_all(curves: Mapping[str, Curve], target: float, check_layer: int = CHECK_LAYER) -> tuple[RuleFit, ...]:
    """Return a fit per rule, the smallest charged budget first. Rules with equal budgets keep the order of `curves`."""
    fits = [fit_ratio(rule, curve, target, check_layer) for rule, curve in curves.items()]
    return tuple(sorted(fits, key=lambda each: each.point.charged_budget))
