"""Full prefill beside live requests: the counts against answers computed directly, and never in an answer's way."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import pytest
import torch
from tiny_prompts import CHUNKS

from ragblend.engine.generation import Conversation
from ragblend.engine.report import BlendReport, ShadowCounters, ShadowReport
from ragblend.engine.shadow import MAX_WAITING, Shadow
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(120)

QUESTIONS = ["what is that?", "the answer?", "is the theory in the chunk?", "who?", "what the other chunk is?", "that?"]
MAX_TOKENS = 5


def prompts() -> list[Prompt]:
    """Every question over the chunks in another order."""
    return [Prompt(CHUNKS[n % 3 :] + CHUNKS[: n % 3], question) for n, question in enumerate(QUESTIONS)]


@pytest.fixture
def shadowed(tiny_engine):
    """`shadowed(share)`: a tiny Llama whose store holds CHUNKS."""

    def build(share: float = 1.0) -> TransformersEngine:
        engine = tiny_engine("llama", shadow=share)
        list(engine.precompute_all(CHUNKS))
        return engine

    return build


@torch.no_grad()
def by_the_stock_model(model: Any, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """Its greedy answer up to the end token, and the first token's log probabilities."""
    logits = model(torch.tensor([ids])).logits[0, -1]
    answer = model.generate(torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False, num_beams=1)
    return [token for token in answer[0, len(ids) :].tolist() if token != 2], logits.double().log_softmax(-1)


def test_the_counts_are_those_of_answers_computed_directly(shadowed, stock_model):
    engine, model = shadowed(), stock_model("llama")
    plain = shadowed(0.0)
    agree = same = 0
    divergences = []
    for number, prompt in enumerate(prompts()):
        ratio = (0.05, 0.8)[number % 2]
        answer = engine.generate(prompt, recompute_ratio=ratio, max_tokens=MAX_TOKENS)
        engine.flush_shadow()
        expected, log_p = by_the_stock_model(model, engine.renderer.render(prompt))
        prefilled = plain.prefill(plain.request(prompt, recompute_ratio=ratio))
        log_q = prefilled.logits.double().log_softmax(-1)
        found = answer.report.shadow
        assert found.first_token_agrees == (int(log_q.argmax()) == int(log_p.argmax()))
        assert found.answers_identical == (answer.token_ids == expected)
        assert found.first_token_kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()), rel=1e-3, abs=1e-7)
        agree += found.first_token_agrees
        same += found.answers_identical
        divergences.append(found.first_token_kl)
    counters = engine.shadow
    assert (counters.num_requests, counters.num_shadowed, counters.num_answers) == (6, 6, 6)
    assert (counters.num_first_tokens_same, counters.num_answers_same) == (agree, same)
    assert counters.mean_first_token_kl == pytest.approx(sum(divergences) / 6)
    assert 0 < same < 6  # else a count that is always yes, or always no, would pass
    low, high = counters.answer_interval
    assert 0 <= low < same / 6 < high <= 1


def test_the_share_is_drawn_at_random(shadowed):
    draws = random.Random(7)
    expected = [draws.random() < 0.4 for _ in range(6)]
    assert 0 < sum(expected) < 6
    engine = shadowed(0.4)
    engine._shadow._random.seed(7)
    found = []
    for prompt in prompts():
        answer = engine.generate(prompt, max_tokens=1)
        engine.flush_shadow()
        found.append(answer.report.shadow is not None)
    assert found == expected
    assert (engine.shadow.num_requests, engine.shadow.num_shadowed) == (6, sum(expected))


@pytest.mark.parametrize(
    ("share", "mode", "counted"), [(0.0, "blend", 0), (1.0, "full", 0), (1.0, "prefix", 0), (1.0, "reuse", 1)]
)
def test_only_answers_from_fused_kv_are_shadowed_and_only_with_a_share(shadowed, share, mode, counted):
    engine = shadowed(share)
    report = engine.generate(prompts()[0], mode=mode, max_tokens=2).report
    engine.flush_shadow()
    assert (engine.shadow.num_requests, engine.shadow.num_shadowed) == (counted, counted)
    assert (report.shadow is not None) == bool(counted)


def test_sampled_and_cancelled_answers_are_compared_in_their_first_token_only(shadowed):
    engine = shadowed()
    sampled = engine.generate(prompts()[0], temperature=1.0, seed=3, max_tokens=6).report
    stream = engine.stream(prompts()[1], max_tokens=30)
    next(stream)
    stream.close()
    engine.flush_shadow()
    for report in (sampled, stream.result.report):
        assert report.shadow.first_token_kl >= 0
        assert report.shadow.answers_identical is None
    assert (engine.shadow.num_shadowed, engine.shadow.num_answers, engine.shadow.answer_agreement) == (2, 0, None)


def test_full_prefill_ends_at_the_first_token_that_differs(shadowed, monkeypatch):
    engine = shadowed()
    steps: list[int] = []
    decode = engine.loop._decode
    monkeypatch.setattr(engine.loop, "_decode", lambda asked: steps.append(len(asked)) or decode(asked))
    shares = []
    for prompt in prompts():
        steps.clear()
        answer = engine.generate(prompt, recompute_ratio=0.0, max_tokens=40)
        engine.flush_shadow()
        if answer.report.shadow.answers_identical is False and len(answer.token_ids) == 40:
            shares.append((len(steps) - 39) / 39)
    assert shares
    assert 0 <= min(shares) < 0.5


def test_a_conversation_is_compared_with_full_prefill_of_all_its_turns(shadowed, stock_model):
    engine, conversation = shadowed(), Conversation()
    first = Prompt(CHUNKS[:2], "what is that?")
    answer = engine.generate(first, conversation=conversation, recompute_ratio=0.05, max_tokens=MAX_TOKENS)
    turns = [*first.messages, ("assistant", answer.text), ("user", [CHUNKS[2], "the answer?"])]
    second = Prompt.from_messages(turns)
    blended = engine.generate(second, conversation=conversation, recompute_ratio=0.05, max_tokens=1)
    engine.flush_shadow()
    report = blended.report
    assert report.num_prefix_tokens > len(engine.default_prefix_ids)
    expected, log_p = by_the_stock_model(stock_model("llama"), engine.renderer.render(second))
    assert report.shadow.answers_identical == (blended.token_ids == expected[:1])
    assert report.shadow.first_token_agrees == (blended.token_ids[0] == int(log_p.argmax()))


def test_an_answer_does_not_wait_for_its_shadow(shadowed, monkeypatch):
    engine, gate = shadowed(), threading.Event()
    full_prefill = engine.layers.full_prefill

    def held(ids: torch.Tensor) -> Any:
        assert gate.wait(60)
        return full_prefill(ids)

    monkeypatch.setattr(engine.layers, "full_prefill", held)
    report = engine.generate(prompts()[0], max_tokens=3).report  # would hang here
    assert (report.shadow, engine.shadow.num_shadowed) == (None, 0)
    gate.set()
    engine.flush_shadow()
    assert report.shadow is not None


def test_a_shadow_that_fails_is_counted_and_logged_and_changes_no_answer(shadowed, monkeypatch, caplog):
    engine = shadowed()

    def fails(ids: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine.layers, "full_prefill", fails)
    with caplog.at_level(logging.WARNING):
        answer = engine.generate(prompts()[0], max_tokens=3)
        engine.flush_shadow()
    assert answer.token_ids
    assert answer.report.shadow is None
    assert (engine.shadow.num_failed, engine.shadow.num_shadowed) == (1, 0)
    assert "no room" in caplog.text
    assert "1 failed" in engine.shadow.summary()


# --- the queue ---


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def found_after(gate: threading.Event) -> ShadowReport:
    assert gate.wait(60)
    return ShadowReport(True, 0.5, None)


def test_beyond_a_few_waiting_ones_requests_are_left_out_and_counted(gate):
    shadow = Shadow(1.0)
    reports = [BlendReport("blend", "ask", 0.15) for _ in range(MAX_WAITING + 3)]
    for report in reports:
        shadow.sample(lambda: found_after(gate), report)
    gate.set()
    shadow.flush()
    counters = shadow.counters
    assert (counters.num_requests, counters.num_shadowed, counters.num_dropped) == (MAX_WAITING + 3, MAX_WAITING, 3)
    assert [report.shadow is not None for report in reports] == [True] * MAX_WAITING + [False] * 3
    assert "3 left out" in counters.summary()
    shadow.close()


def test_closing_drops_what_waits_and_finishes_what_runs(gate):
    shadow, started = Shadow(1.0), threading.Event()

    def compare() -> ShadowReport:
        started.set()
        return found_after(gate)

    reports = [BlendReport("blend", "ask", 0.15) for _ in range(3)]
    for report in reports:
        shadow.sample(compare, report)
    assert started.wait(60)
    closing = threading.Thread(target=shadow.close)
    closing.start()
    gate.set()
    closing.join(60)
    assert not closing.is_alive()
    assert reports[0].shadow is not None
    assert reports[2].shadow is None
    shadow.sample(compare, BlendReport("blend", "ask", 0.15))  # an answer that ended after the engine did
    assert shadow.counters.num_dropped == 1
    shadow.flush()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(UsageError, match="choose 0"):
        Shadow(share)


def test_counters_without_a_request_have_no_rates():
    counters = ShadowCounters(0.1)
    assert counters.first_token_agreement is counters.first_token_interval is counters.mean_first_token_kl is None
    assert counters.answer_agreement is counters.answer_interval is None
    assert counters.summary() == "full prefill also ran for 0 of 0 answers"
