"""Baselines of the CacheBlend paper's figure 13: each asks the prompts that it says, side by side, and is charged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from benchmarks.figures.baselines import (
    BASELINES,
    INSTRUCTION,
    SUMMARY_TOKENS,
    ask_baseline,
    confidence,
    measure_baselines,
)
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.load import load_engine
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.quality.data import build_prompt, demo_cases
from ragblend.lab.quality.tasks import QUESTION
from ragblend.prompt.types import Part, Prompt

CONFIG = QualityConfig(num_questions=28)
TOKENS = QUESTION.answer_tokens
ONE_HOP = "In which city was Otto Sutton born?"


@pytest.fixture(scope="module")
def engine():
    with load_engine("demo", dtype="float32", on_miss="inline") as found, torch.inference_mode():
        yield found


@pytest.fixture(scope="module")
def case():
    return next(case for case in demo_cases(CONFIG) if ONE_HOP in case.question)


@pytest.fixture
def prompt(engine, case):
    return build_prompt(case, engine, HashingEmbedder(), CONFIG)


# -- what is asked


def test_map_rerank_answers_from_the_chunk_that_has_the_fact(engine, case, prompt):
    last = ask_baseline("map_rerank", engine, prompt, case)
    (chosen,) = (run.chunk.text for run in last.prompt.runs)
    assert last.answer.text == case.answers[0]
    assert case.answers[0] in chosen
    assert chosen != prompt.chunks[0].text  # not the first for want of a reason
    alone = {
        chunk.text: engine.generate(Prompt([chunk], case.question, case.system), mode="full", max_tokens=TOKENS)
        for chunk in prompt.chunks
    }
    assert last.answer.text == alone[chosen].text
    assert len({each.text for each in alone.values()}) > 1


def test_confidence_is_the_mean_log_probability_of_the_model_itself(engine, case, prompt):
    last = ask_baseline("map_rerank", engine, prompt, case)
    ids, answered = last.prompt.token_ids, [*last.answer.token_ids]
    logits = engine.layers.model(torch.tensor([[*ids, *answered]])).logits[0].double().log_softmax(-1)
    expected = [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(answered)]
    assert last.answer.ended
    assert confidence(engine, last) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_map_reduce_asks_the_question_over_the_answers_per_chunk(engine, case, prompt):
    instruction = INSTRUCTION.format(question=case.question)
    said = [
        engine.generate(Prompt([chunk], instruction), mode="full", max_tokens=SUMMARY_TOKENS).text.strip()
        for chunk in prompt.chunks
    ]
    last = ask_baseline("map_reduce", engine, prompt, case)
    over = Prompt([text for text in said if text], case.question)
    assert last.prompt.token_ids == engine.renderer.render(over)
    assert last.answer.text == engine.generate(over, mode="full", max_tokens=TOKENS).text


# -- what it costs


def test_every_prompt_that_a_baseline_prefills_is_charged(engine, case, prompt):
    def count(chunks: Sequence[Part], question: str) -> int:
        return len(engine.renderer.render(Prompt(chunks, question, case.system)))

    asked = count(prompt.chunks, case.question)
    alone = sum(count([chunk], case.question) for chunk in prompt.chunks)
    mapped = sum(count([chunk], INSTRUCTION.format(question=case.question)) for chunk in prompt.chunks)
    found = {name: ask_baseline(name, engine, prompt, case) for name in BASELINES}
    charged = {name: last.answer.report.charged_budget for name, last in found.items()}
    assert charged["map_rerank"] == pytest.approx(alone / asked)
    assert charged["map_reduce"] == pytest.approx((mapped + found["map_reduce"].prompt.num_tokens) / asked)
    assert all(last.answer.report.charged_budget_32 == charged[name] for name, last in found.items())


@pytest.mark.parametrize("name", BASELINES)
def test_the_calls_for_single_chunks_are_one_batch(engine, case, prompt, monkeypatch, name):
    batches = []
    generate = type(engine).generate_batch

    def spy(self, prompts, **options):
        batches.append(len(prompts))
        return generate(self, prompts, **options)

    monkeypatch.setattr(type(engine), "generate_batch", spy)
    ask_baseline(name, engine, prompt, case)
    assert batches == [len(prompt.chunks)]


def test_a_model_that_says_nothing_of_any_chunk_is_asked_without_one(engine, case, prompt, monkeypatch):
    monkeypatch.setattr(type(engine.renderer), "decode", lambda self, ids: "")
    (found,) = measure_baselines(engine, prompt, case, ["map_reduce"]).values()
    assert found.first_token_kl > 0
