"""The default ratio for a model and its stored chunks: measured after an ingestion, without questions of users.

Models differ by ten times in their distance from full prefill at one ratio, so no constant serves them all. A few
prompts of stored chunks are prefilled in full and blended at several ratios, with questions that need two chunks. The
smallest ratio whose first token is near enough becomes the default of this model, prefix and store, as a calibration
(`engine.tuning.calibration`). `ragblend calibrate` replaces it by one of the user's questions.
Read `calibrate_on_chunks` first. Depends on engines and chunks.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from ragblend.engine.api import Engine, MeasurableEngine
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.fusion.rules import DEEP_MODEL_LAYERS, find_rule
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, RequestTuning, RuleFit, save_calibration
from ragblend.errors import RagblendError
from ragblend.ingestion.prefill import num_chunk_tokens
from ragblend.ingestion.report import Progress
from ragblend.intervals import wilson_interval
from ragblend.prompt.types import Chunk, Prompt

logger = logging.getLogger(__name__)

NUM_PROMPTS = 6
CHUNKS_PER_PROMPT = 4
RATIOS = (0.05, 0.15, 0.3, 0.5)
# Nats of the first token, mean over the prompts. Real questions that need several of six chunks are two to four times
# as far, so it stands for about 0.1 on these. Chosen on the selection part of MuSiQue with SmolLM2-135M and
# Qwen2.5-Coder-1.5B (`python -m benchmarks.self_calibration`, data/results/self-calibration-*.json), over chunks stored
# alone.
MAX_KL = 0.04

MAX_COST = 0.4  # of the tokens that the store has prefilled; below it, a small store waits until it is larger
_QUOTED_WORDS = 6  # of a sentence; with most tokenizers too few to be matched as a part of a stored chunk


class Expectation(NamedTuple):
    """The default ratio that was chosen, and the expected KL of the first token at it and at the rule's own ratio."""

    ratio: float
    kl: float
    rule_ratio: float
    rule_kl: float

    def __str__(self) -> str:
        """Return one line of text that says what was chosen and measured."""
        return (
            f"the default recompute ratio is {self.ratio:g}: measured on {NUM_PROMPTS} prompts of these chunks, the "
            f"first token's KL to full prefill is {self.kl:.2g} nats, and {self.rule_kl:.2g} at {self.rule_ratio:g}; "
            "`ragblend calibrate` measures your questions"
        )


def calibrate_if_due(chunks: Sequence[Chunk], engine: Engine, progress: Progress) -> Expectation | None:
    """Choose and save the default ratio on stored chunks, if the store has no calibration yet and it costs little.

    The engine must be a deep model in this process (`DEEP_MODEL_LAYERS`), with a store on disk. The measurement must
    cost at most MAX_COST of what the store's chunks have cost, and `chunks` must give NUM_PROMPTS prompts, so one
    document per call measures nothing. Returns None if nothing was measured. A failure is logged and does not fail the
    ingestion, whose chunks are stored.
    """
    disk = engine.store.find_tier(DiskStore)
    if disk is None or not isinstance(engine, MeasurableEngine) or engine.num_layers < DEEP_MODEL_LAYERS:
        return None
    if engine.calibrations is None or engine.calibrations.find(engine.default_prefix_ids) is not None:
        return None
    prompts = make_prompts(chunks, engine.system)
    num_tokens = sum(num_chunk_tokens(chunk, engine) for prompt in prompts for chunk in prompt.chunks)
    cost = num_tokens * (1 + sum(RATIOS))
    if len(prompts) < NUM_PROMPTS or cost > MAX_COST * disk.nbytes() / engine.bytes_per_token:
        return None
    try:
        calibration = calibrate_on_chunks(prompts, engine, progress)
        save_calibration(disk, calibration)
    except RagblendError as error:  # prompts longer than the model's context length, a full disk
        logger.warning("the default ratio was not measured: %s", error)
        return None
    fit = calibration.fits[0]
    default_ratio = find_rule("auto", engine.num_layers).ratio
    return Expectation(fit.ratio, fit.kl_at(fit.ratio), default_ratio, fit.kl_at(default_ratio))


def make_prompts(chunks: Sequence[Chunk], system: str | None) -> list[Prompt]:
    """Return NUM_PROMPTS prompts of chunks that follow each other in `chunks`; fewer if the chunks are too few.

    Neighbours are mostly parts of one document, so each attends to the others, as chunks that one question retrieves
    do. Each question needs two of the chunks.
    """
    texts = [chunk for chunk in chunks if chunk.context != "neutral" and _sentences(chunk.text)]
    starts = range(len(texts) - CHUNKS_PER_PROMPT + 1)
    draw = random.Random(0)
    return [
        Prompt(group, ask_about_two(group, number, draw), system)
        for number, start in enumerate(sorted(draw.sample(starts, min(NUM_PROMPTS, len(starts)))))
        if (group := texts[start : start + CHUNKS_PER_PROMPT])
    ]


def ask_about_two(chunks: Sequence[Chunk], number: int, draw: random.Random) -> str:
    """Return a question that needs two of `chunks`; questions with even and odd `number` have different forms."""
    first = draw.randrange(len(chunks) - 1)
    one, other = (_beginning(chunk.text, draw) for chunk in (chunks[first], draw.choice(chunks[first + 1 :])))
    if number % 2:
        return f'With which words does the text begin that comes right after the one with the sentence "{one} ..."?'
    return f'What do these two statements of the texts have in common: "{one} ..." and "{other} ..."?'


def _beginning(text: str, draw: random.Random) -> str:
    return " ".join(draw.choice(_sentences(text))[:_QUOTED_WORDS])


def _sentences(text: str) -> list[list[str]]:
    sentences = (sentence.split() for sentence in re.split(r"(?<=[.!?。！？])\s+", text))
    return [words for words in sentences if len(words) >= _QUOTED_WORDS]


def calibrate_on_chunks(prompts: Sequence[Prompt], engine: MeasurableEngine, progress: Progress) -> Calibration:
    """Return the calibration of the default rule: the smallest ratio of RATIOS whose mean KL is at most MAX_KL.

    All larger ratios must meet MAX_KL, too. If none does, the largest of RATIOS is chosen.
    """
    rule = find_rule("auto", engine.num_layers)
    samples: dict[float, list[tuple[float, bool, float, float]]] = {ratio: [] for ratio in (0.0, *RATIOS)}
    for number, prompt in enumerate(prompts):
        progress("measure", number, len(prompts))
        request = engine.request(prompt, mode="full", max_tokens=1)
        full = engine.prefill(request).logits
        for ratio, measured in samples.items():
            blend = engine.prefill(replace(request, mode="blend", tuning=RequestTuning(rule.name, ratio)))
            agrees = bool(blend.logits.argmax() == full.argmax())
            budgets = blend.report.charged_budget, blend.report.charged_budget_32
            measured.append((first_token_kl(full, blend.logits), agrees, *budgets))
    progress("measure", len(prompts), len(prompts))
    curve = tuple(_point(ratio, measured) for ratio, measured in samples.items())
    curve += (CurvePoint(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0),)  # exact
    fit = RuleFit(rule.name, 0, 1.0, False, curve, "kl")
    chosen = next((ratio for ratio in RATIOS if fit.kl_at(ratio) <= MAX_KL), RATIOS[-1])
    fit = replace(fit, ratio=chosen, meets_target=fit.kl_at(chosen) <= MAX_KL)
    retrieval = f"{CHUNKS_PER_PROMPT} stored chunks that follow each other"
    prefix = engine.default_prefix_ids
    return Calibration(engine.fingerprint, prefix, "", time.time(), 0.0, len(prompts), retrieval, (fit,))


def _point(ratio: float, samples: Sequence[tuple[float, bool, float, float]]) -> CurvePoint:
    kl, agreement, charged, charged_32 = (fmean(column) for column in zip(*samples, strict=True))
    return CurvePoint(ratio, charged, agreement, *wilson_interval(agreement, len(samples)), kl, charged_32)
