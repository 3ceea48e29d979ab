"""Fit recompute to a corpus: how close to full prefill each ratio comes, and which ratio meets a target.

Questions retrieve their chunks as `ask` does. Each prompt is prefilled in full, and blended by every rule, check layer
and ratio of the grid; what counts is the first token: whether it is full prefill's, and KL(full || blend). No answers
or labels are needed. `fit_all` makes a calibration of that, which the engine picks up by itself
(`engine.tuning.calibration`).

Read `calibrate` first, then `decide`. Knows the transformers engine and the index; prints nothing.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import kl_div

from ragblend.engine.api import Engine
from ragblend.engine.fusion.rules import CHECK_LAYER, FALLBACK, check_ratio, find_rule
from ragblend.engine.generation import Request
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.report import BlendReport
from ragblend.engine.store.tiered import disk_tier
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, Fit, NoiseFloor, keep_calibration
from ragblend.errors import EmptyCorpusError, UsageError
from ragblend.index import ChunkIndex
from ragblend.intervals import mean_interval, wilson_interval
from ragblend.precompute import Progress
from ragblend.prompt.prompt import Chunk, SegmentedPrompt

RULES = ("auto", FALLBACK)  # those worth measuring; more with --rules
CHECK_LAYERS = (1, 2, 4)  # as far as they lie in the first half of the model
RATIOS = (0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # beside 0 and 1, which are always measured
NUM_QUESTIONS = 60
TARGET_AGREEMENT = 0.98
NUM_FOLDS = 5
NUM_RESAMPLES = 400
MIN_QUESTIONS = 10

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Target(NamedTuple):
    """What the ratio has to meet: a share of first tokens, or a mean KL in nats. Exactly one is set."""

    agreement: float | None = TARGET_AGREEMENT
    kl: float | None = None

    def __str__(self) -> str:
        return f"agreement {self.agreement:g}" if self.kl is None else f"KL {self.kl:g}"


class Setting(NamedTuple):
    """A rule and the layer at which it is read."""

    rule: str
    check_layer: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What was measured: arrays [S settings, R ratios, Q questions]. The first setting is what is used uncalibrated.

    Ratios ascend from 0 (full reuse) to 1 (everything recomputed), where all settings are alike.
    """

    settings: tuple[Setting, ...]
    ratios: tuple[float, ...]
    agrees: Bools
    kl: Floats
    charged: Floats
    charged_32: Floats

    @property
    def num_questions(self) -> int:
        """Questions that were asked."""
        return int(self.kl.shape[-1])


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The engine with its new calibration on questions that no fit has seen.

    `low`, `high`: the agreements, on so many questions, that the prediction allows with 95 %; `inside`: as predicted.
    """

    num_questions: int
    agreement: float
    kl: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Whether what was predicted came true."""
        return self.low <= self.agreement <= self.high


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """A calibration, where it was saved (None: nowhere), what it took, and the check on other questions."""

    calibration: Calibration
    path: str | None
    num_prefills: int
    elapsed_s: float
    cpu_s: float
    held_out: HeldOut | None = None


def calibrate(
    engine: Engine,
    index: ChunkIndex,
    questions: Sequence[str],
    *,
    k: int = 6,
    neighbours: int = 0,
    order: Any = "score",
    target: Target | None = None,
    num_questions: int = NUM_QUESTIONS,
    num_held_out: int = 0,
    rules: Sequence[str] = RULES,
    check_layers: Sequence[int] = CHECK_LAYERS,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
    save: bool = True,
    progress: Progress | None = None,
) -> CalibrationRun:
    """Measure the grid on `num_questions` of `questions`, fit, and save the calibration in the engine's store.

    Prompts have the engine's system text. `num_held_out` other questions are then answered with that calibration.
    Raises EmptyCorpusError where there are too few questions, UsageError for an engine that shows no logits (vLLM), and
    for a store without a directory.
    """
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    aim = checked_target(target or Target())
    fitter = checked_engine(engine)
    disk = disk_tier(engine.store) if save else None
    if save and disk is None:
        raise UsageError("the engine's store has no directory to keep a calibration in; load it with store=DIR")
    fitted, others = split_questions(questions, num_questions, num_held_out, seed)
    grid = (0.0, *sorted({check_ratio(ratio) for ratio in ratios} - {0.0, 1.0}), 1.0)
    settings = settings_for(rules, check_layers, fitter.layers.num_layers)
    tell = progress or (lambda stage, done, total: None)

    def prompts(texts: Sequence[str]) -> list[SegmentedPrompt]:
        hits = (index.search(text, k, neighbours=neighbours, order=order) for text in texts)
        return [
            SegmentedPrompt([hit.chunk for hit in found], text, fitter.system)
            for found, text in zip(hits, texts, strict=True)
        ]

    outcomes = measure(fitter, prompts(fitted), settings, grid, tell)
    calibration = Calibration(
        fitter.fingerprint,
        fitter.default_prefix_ids,
        index.manifest.chunker,
        time.time(),
        str(aim),
        outcomes.num_questions,
        f"k {k}, neighbours {neighbours}, order {order}",
        NoiseFloor(float(outcomes.agrees[0, -1].mean()), float(outcomes.kl[0, -1].mean())),
        fit_all(outcomes, aim),
    )
    path = str(keep_calibration(disk, calibration)) if disk is not None else None
    held_out = check(fitter, prompts(others), calibration, tell) if others else None
    num_prefills = outcomes.num_questions * (3 + len(settings) * (len(grid) - 2)) + 2 * len(others)
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return CalibrationRun(calibration, path, num_prefills, elapsed_s, cpu_s, held_out)


# -- questions


def read_questions(text: str) -> list[str]:
    """Questions of a file: one per line, or JSON objects per line with a "question"."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].startswith("{"):
        return lines
    try:
        return [str(json.loads(line)["question"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'the file looks like JSON lines, but not each line is {{"question": "..."}}: {error!r}'
        ) from error


def generate_questions(chunks: Sequence[Chunk], count: int, seed: int = 0) -> list[str]:
    """Questions that need no labels: sentences of the corpus whose end is left out, any chunks, in random order.

    The first token of an answer then hangs on what the retrieved chunks say. They are easier than questions over
    several chunks: give your own where you have them.
    """
    draw = random.Random(seed)
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
    questions: Sequence[str], num_questions: int, num_held_out: int, seed: int
) -> tuple[list[str], list[str]]:
    """Those to fit on and, at most `num_held_out`, others to check with; drawn at random, each once."""
    distinct = list(dict.fromkeys(question.strip() for question in questions if question.strip()))
    if len(distinct) < MIN_QUESTIONS:
        raise EmptyCorpusError(
            f"{len(distinct)} questions are too few to calibrate with; give {MIN_QUESTIONS} or more, better 50 to 100: "
            "--questions FILE, one per line"
        )
    drawn = random.Random(seed).sample(distinct, len(distinct))
    num_fitted = max(MIN_QUESTIONS, min(num_questions, len(drawn) - num_held_out))
    return drawn[:num_fitted], drawn[num_fitted:][:num_held_out]


# -- measuring


def settings_for(rules: Sequence[str], check_layers: Sequence[int], num_layers: int) -> tuple[Setting, ...]:
    """Rules by check layer, the uncalibrated default first. A rule that reads no deviation has no check layer."""
    standard = find_rule("auto", num_layers).name
    names = dict.fromkeys(find_rule(rule, num_layers).name for rule in rules)
    found = [Setting(standard, CHECK_LAYER)] if standard in names else []
    for name in names:
        layers = [layer for layer in check_layers if 0 < layer <= num_layers // 2] or [CHECK_LAYER]
        needed = layers if find_rule(name).needs_deviation else [CHECK_LAYER]
        found += [Setting(name, layer) for layer in needed]
    return tuple(dict.fromkeys(found))


def measure(
    engine: TransformersEngine,
    prompts: Sequence[SegmentedPrompt],
    settings: Sequence[Setting],
    ratios: Sequence[float],
    tell: Progress,
) -> Outcomes:
    """Every prompt in full and at every point of the grid, through the very path that a calibrated engine takes."""
    shape = (len(settings), len(ratios), len(prompts))
    agrees, kl = np.zeros(shape, bool), np.zeros(shape)
    charged, charged_32 = np.zeros(shape), np.zeros(shape)
    for number, prompt in enumerate(prompts):
        tell("measure", number, len(prompts))
        request, full = _in_full(engine, prompt)
        for place, ratio in enumerate(ratios):
            for row, setting in enumerate(settings):
                if row and ratio in (0.0, 1.0):  # all alike
                    for array in (agrees, kl, charged, charged_32):
                        array[row, place, number] = array[0, place, number]
                    continue
                log_probs, report = _blended(engine, request, _trial(setting), ratio)
                agrees[row, place, number] = bool(log_probs.argmax() == full.argmax())
                kl[row, place, number] = divergence(full, log_probs)
                charged[row, place, number] = report.charged_budget
                charged_32[row, place, number] = report.charged_budget_32
    tell("measure", len(prompts), len(prompts))
    return Outcomes(tuple(settings), tuple(ratios), agrees, kl, charged, charged_32)


def check(
    engine: TransformersEngine, prompts: Sequence[SegmentedPrompt], calibration: Calibration, tell: Progress
) -> HeldOut:
    """What `calibration` is worth on other questions: first tokens by its best fit against full prefill's."""
    fit, agrees, divergences = calibration.fits[0], [], []
    for number, prompt in enumerate(prompts):
        tell("check", number, len(prompts))
        request, full = _in_full(engine, prompt)
        log_probs, _ = _blended(engine, request, fit, fit.ratio)
        agrees.append(bool(log_probs.argmax() == full.argmax()))
        divergences.append(divergence(full, log_probs))
    tell("check", len(prompts), len(prompts))
    allowed = expected_shares(round(fit.agreement * calibration.num_questions), calibration.num_questions, len(prompts))
    return HeldOut(len(prompts), float(np.mean(agrees)), float(np.mean(divergences)), *allowed)


def _in_full(engine: TransformersEngine, prompt: SegmentedPrompt) -> tuple[Request, Tensor]:
    """The prompt as a request, its chunks stored, and full prefill's first-token log probabilities [V] float64."""
    for chunk in prompt.chunks:
        engine.precompute(chunk)
    request = engine.request(prompt, mode="full", max_tokens=1)
    return request, engine.prefill(request).logits.double().log_softmax(-1)


def _blended(engine: TransformersEngine, request: Request, fit: Fit, ratio: float) -> tuple[Tensor, BlendReport]:
    """The same of a blend, as `fit` makes the engine run it."""
    found = engine.prefill(replace(request, mode="blend", rule="auto", ratio=ratio, fit=fit))
    return found.logits.double().log_softmax(-1), found.report


def divergence(log_p: Tensor, log_q: Tensor) -> float:
    """KL(p || q) in nats of log probabilities [V]; never below 0 by rounding."""
    return max(0.0, float(kl_div(log_q, log_p, reduction="sum", log_target=True)))


def _trial(setting: Setting) -> Fit:
    """A setting as the engine takes it, before anything is known of it."""
    nothing = (0.0,) * 8
    curve = (CurvePoint(0.0, *nothing), CurvePoint(1.0, *nothing))
    return Fit(setting.rule, setting.check_layer, 0.0, False, 0.0, 0.0, 0.0, curve)


# -- fitting: arithmetic on outcomes


def fit_all(outcomes: Outcomes, target: Target) -> tuple[Fit, ...]:
    """A fit per rule; the best of all first."""
    best = fit(outcomes, target, range(len(outcomes.settings)))
    others = [rule for rule in dict.fromkeys(setting.rule for setting in outcomes.settings) if rule != best.rule]
    return (best, *(fit(outcomes, target, _settings_of(outcomes, rule)) for rule in others))


def fit(outcomes: Outcomes, target: Target, among: Sequence[int]) -> Fit:
    """The setting of `among`, its ratio and curve, and what to expect of them: decided on all questions, predicted by
    deciding again without each fifth of them and looking at that fifth."""
    everything = np.arange(outcomes.num_questions)
    row, place = decide(outcomes, target, among, everything)
    unseen = np.zeros(outcomes.num_questions, bool)
    for fold in np.array_split(everything, NUM_FOLDS):
        there, at = decide(outcomes, target, among, np.setdiff1d(everything, fold))
        unseen[fold] = outcomes.agrees[there, at, fold]
    smooth = monotone(outcomes.agrees[row].mean(-1))
    # Where the folds were more careful than the whole, they say nothing about what the whole decided.
    num_right = min(int(unseen.sum()), round(float(smooth[place]) * outcomes.num_questions))
    share = num_right / outcomes.num_questions
    low, high = wilson_interval(share, outcomes.num_questions)
    setting = outcomes.settings[row]
    met = bool(_meets(outcomes, target, row, everything)[place])
    return Fit(*setting, outcomes.ratios[place], met, share, low, high, _curve(outcomes, row, smooth))


def decide(outcomes: Outcomes, target: Target, among: Sequence[int], questions: NDArray[np.int64]) -> tuple[int, int]:
    """Setting and ratio, as places in `outcomes`, that meet the target for the least compute on these questions.

    The first setting of `among` is the standard: another takes its place only where the saving is certain, that is
    where its 95 % interval (paired bootstrap over the questions) lies above zero.
    """
    standard = among[0]
    place = first_place(outcomes, target, standard, questions)
    if len(among) == 1:
        return standard, place
    draws = np.random.default_rng(0).choice(questions, (NUM_RESAMPLES, len(questions)))
    costs = {row: np.array([_cost(outcomes, target, row, draw) for draw in draws]) for row in among}
    certain = [row for row in among[1:] if np.percentile(costs[standard] - costs[row], 2.5) > 0]
    best = min(certain, key=lambda row: _cost(outcomes, target, row, questions), default=standard)
    return best, first_place(outcomes, target, best, questions)


def first_place(outcomes: Outcomes, target: Target, row: int, questions: NDArray[np.int64]) -> int:
    """The smallest ratio that meets the target, as a place in `outcomes.ratios`; the last, 1.0, where none does."""
    places = np.flatnonzero(_meets(outcomes, target, row, questions))
    return int(places[0]) if len(places) else len(outcomes.ratios) - 1


def _meets(outcomes: Outcomes, target: Target, row: int, questions: NDArray[np.int64]) -> Bools:
    """[R]: whether each ratio meets the target, by curves that are monotone in the ratio."""
    slack = 1e-9  # of sums in another order
    if target.kl is not None:
        met: Bools = -monotone(-outcomes.kl[row][:, questions].mean(-1)) <= target.kl + slack
    else:
        assert target.agreement is not None
        met = monotone(outcomes.agrees[row][:, questions].mean(-1)) >= target.agreement - slack
    return met


def _cost(outcomes: Outcomes, target: Target, row: int, questions: NDArray[np.int64]) -> float:
    """Charged budget that meeting the target takes."""
    place = first_place(outcomes, target, row, questions)
    return float(outcomes.charged[row, place, questions].mean())


def _curve(outcomes: Outcomes, row: int, smooth: Floats) -> tuple[CurvePoint, ...]:
    points = []
    for place, ratio in enumerate(outcomes.ratios):
        agrees, kl = outcomes.agrees[row, place], outcomes.kl[row, place]
        low, high = wilson_interval(float(agrees.mean()), outcomes.num_questions)
        share = float(smooth[place])
        charged, charged_32 = (float(a[row, place].mean()) for a in (outcomes.charged, outcomes.charged_32))
        kl_low, kl_high = mean_interval(kl)
        point = CurvePoint(
            ratio, charged, share, min(low, share), max(high, share), float(kl.mean()), kl_low, kl_high, charged_32
        )
        points.append(point)
    return tuple(points)


def monotone(values: Floats) -> Floats:
    """The ascending values [R] nearest to `values` in squares (isotonic regression): noise must not order ratios.

    >>> monotone(np.array([0.5, 0.9, 0.8, 1.0])).round(3).tolist()
    [0.5, 0.85, 0.85, 1.0]
    """
    from scipy.optimize import isotonic_regression

    found: Floats = isotonic_regression(values).x
    return found


def expected_shares(count: int, total: int, others: int) -> tuple[float, float]:
    """Between which shares of `others` more trials 95 % fall, after `count` of `total` (beta-binomial, prior 1/2, 1/2).

    Wider than the interval of the share itself: a few other questions scatter, too.

    >>> expected_shares(59, 60, 100)
    (0.91, 1.0)
    """
    from scipy.stats import betabinom

    predicted = betabinom(others, count + 0.5, total - count + 0.5)
    return float(predicted.ppf(0.025)) / others, float(predicted.ppf(0.975)) / others


def _settings_of(outcomes: Outcomes, rule: str) -> list[int]:
    return [row for row, setting in enumerate(outcomes.settings) if setting.rule == rule]


# -- checks at the door


def checked_engine(engine: Engine) -> TransformersEngine:
    """The engine, if it shows the distributions that a calibration compares."""
    if not isinstance(engine, TransformersEngine):
        raise UsageError(
            "calibrate compares first-token distributions, which vLLM does not show. Calibrate with --backend "
            "transformers on the store that vLLM serves from: the calibration is for both"
        )
    return engine


def checked_target(target: Target) -> Target:
    """The target, if it sets exactly one goal in its range."""
    if (target.agreement is None) == (target.kl is None):
        raise UsageError("give one target: an agreement (0 to 1) or a KL in nats")
    if target.agreement is not None and not 0 < target.agreement <= 1:
        raise UsageError(f"target agreement is {target.agreement}; choose more than 0, at most 1, for example 0.98")
    if target.kl is not None and not target.kl > 0:
        raise UsageError(f"target KL is {target.kl}; choose more than 0 nats, for example 0.01")
    return target
