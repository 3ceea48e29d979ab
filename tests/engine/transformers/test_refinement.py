"""Refinement: the first token is the blend's, later ones come from refined KV, and nothing else waits or changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chat_templates import SPECIALS, TEMPLATES
from tiny_models import FAMILIES
from tiny_prompts import CHUNKS, PROMPT

from ragblend.engine import loop
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.generation import Conversation, PrefillResult
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(120)


def holding_chunks(engine: TransformersEngine) -> TransformersEngine:
    list(engine.precompute_all(CHUNKS))
    return engine


@pytest.fixture
def engine(tiny_engine):
    """A tiny Llama whose store holds CHUNKS."""
    return holding_chunks(tiny_engine("llama"))


@pytest.fixture
def chat_engine(tiny_engine, make_tokenizer):
    return holding_chunks(tiny_engine("llama", renderer=Renderer(make_tokenizer(TEMPLATES["chatml"].text, SPECIALS))))


@pytest.fixture
def one_layer_slices(monkeypatch):
    """Let every slice of a refinement be one layer."""
    monkeypatch.setattr(loop, "REFINE_SLICE_S", 0.0)


def prefilled(engine: TransformersEngine, refine_ratio: float, **options: Any) -> PrefillResult:
    return engine.prefill(engine.request(PROMPT, **{"recompute_ratio": 0.1, "refine_ratio": refine_ratio, **options}))


def refined_logits(result: PrefillResult, answer_ids: Sequence[int]) -> torch.Tensor:
    """Run the refinement of `result` to its end."""
    assert result.refine is not None
    steps = result.refine(result, answer_ids)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def stock_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[*ids]])).logits[0, -1].float()


def copied(fused: FusedKV) -> list[torch.Tensor]:
    return [
        each[:, : fused.length].clone()
        for layer in range(fused.num_layers)
        for each in (fused.keys(layer), fused.values(layer))
    ]


# --- what is computed ---


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_equals_full_prefill_from_the_second_token_on(family, tiny_engine, stock_model):
    engine, model = holding_chunks(tiny_engine(family)), stock_model(family)
    result = prefilled(engine, 1.0)
    ids = engine.renderer.render(PROMPT)
    assert (result.logits - stock_logits(model, ids)).abs().max() > 1e-3  # the first token is the blend's
    answer = [int(result.logits.argmax())]
    logits = refined_logits(result, answer)
    for _ in range(3):
        torch.testing.assert_close(logits, stock_logits(model, [*ids, *answer]), atol=1e-4, rtol=0)
        answer.append(int(logits.argmax()))
        logits = engine.decode_step(answer[-1:], result.fused)
    assert result.num_exact == len(ids)


@pytest.mark.parametrize("num_before", [1, 4])
def test_tokens_decoded_before_a_refinement_at_ratio_one_become_exact(num_before, engine, stock_model):
    result = prefilled(engine, 1.0)
    ids, answer = engine.renderer.render(PROMPT), [int(result.logits.argmax())]
    while len(answer) < num_before:
        answer.append(int(engine.decode_step(answer[-1:], result.fused).argmax()))
    logits = refined_logits(result, answer)
    torch.testing.assert_close(logits, stock_logits(stock_model("llama"), [*ids, *answer]), atol=1e-4, rtol=0)
    whole = engine.prefill(engine.request(PROMPT, mode="full")).fused
    for found, expected in zip(copied(result.fused), copied(whole), strict=True):
        torch.testing.assert_close(found[:, : len(ids)], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["ask", "cacheblend", "random"])
def test_a_refinement_recomputes_its_share_and_only_stale_tokens(rule, engine):
    result = prefilled(engine, 0.5, rule=rule)
    before = copied(result.fused)
    runs = engine.match(PROMPT).runs
    refined_logits(result, [5])
    report = result.report
    assert report.num_refined_tokens == -(-sum(run.num_tokens for run in runs) // 2)
    assert report.num_recomputed_tokens < report.num_refined_tokens
    assert report.refined_after == 1
    pairs = zip(before, copied(result.fused), strict=True)
    changed = torch.stack([(old - new[:, : old.shape[1]]).abs().amax((0, 2)) for old, new in pairs])
    is_changed = changed.amax(0) > 0
    assert not is_changed[: runs[1].start].any()  # the prefix, and the chunk that directly follows it
    assert is_changed[runs[1].start :].any()


def test_a_refinement_brings_the_kv_closer_to_full_prefill(engine):
    full = copied(engine.prefill(engine.request(PROMPT, mode="full")).fused)

    def distance(result: PrefillResult) -> float:
        pairs = zip(copied(result.fused), full, strict=True)
        return sum(float((each[:, : expected.shape[1]] - expected).square().sum()) for each, expected in pairs)

    results = [prefilled(engine, ratio) for ratio in (0.3, 0.6, 1.0)]
    first = distance(results[0])
    for result in results:
        refined_logits(result, [5])
    distances = [first, *map(distance, results)]
    assert distances == sorted(distances, reverse=True)
    assert distances[1] < 0.9 * first


@pytest.mark.parametrize(
    "options", [{"refine_ratio": 0.1}, {"refine_ratio": 0.0}, {"mode": "full"}, {"mode": "reuse"}, {"mode": "prefix"}]
)
def test_there_is_no_refinement_without_a_higher_ratio_in_mode_blend(options, engine):
    assert prefilled(engine, **{"refine_ratio": 0.5, **options}).refine is None


def test_a_prompt_whose_chunks_are_exact_is_not_refined(engine):
    request = engine.request(Prompt(CHUNKS[:1], "what is that?"), recompute_ratio=0.1, refine_ratio=0.5)
    assert engine.prefill(request).refine is None


# --- answers ---


def test_an_answer_is_refined_after_its_first_token(engine, stock_model):
    plain = engine.generate(PROMPT, recompute_ratio=0.1, max_tokens=8)
    found = engine.generate(PROMPT, recompute_ratio=0.1, refine_ratio=1.0, max_tokens=8)
    assert found.token_ids[0] == plain.token_ids[0]
    ids = [*engine.renderer.render(PROMPT), found.token_ids[0]]
    answer = stock_model("llama").generate(torch.tensor([ids]), max_new_tokens=7, do_sample=False, num_beams=1)
    assert found.token_ids[1:] == answer[0, len(ids) :].tolist()
    report = found.report
    assert (report.refined_after, report.num_recomputed_tokens) == (1, plain.report.num_recomputed_tokens)
    assert report.num_refined_tokens > 0
    assert 0 < report.refine_s <= report.decode_s
    assert f"{report.num_refined_tokens} more after token 1 of the answer" in report.summary()
    assert (plain.report.refined_after, plain.report.num_refined_tokens, plain.report.refine_s) == (None, 0, 0.0)


def test_an_answer_of_one_token_is_not_refined(engine):
    report = engine.generate(PROMPT, recompute_ratio=0.1, refine_ratio=1.0, max_tokens=1).report
    assert (report.refined_after, report.num_refined_tokens) == (None, 0)


def test_forced_tokens_of_a_grammar_are_refined_with_the_sampled_one(engine):
    options: dict[str, Any] = {"structured_outputs": {"choice": ["the answer", "the theory"]}, "recompute_ratio": 0.1}
    found = engine.generate(PROMPT, **options, refine_ratio=1.0)
    assert found.text in ("the answer", "the theory")
    assert found.report.completion_tokens == len(found.token_ids)


def test_answers_together_are_not_refined_until_one_is_left(engine, one_layer_slices):
    short, long = (engine.stream(PROMPT, recompute_ratio=0.1, refine_ratio=0.5, max_tokens=count) for count in (4, 12))
    assert engine.run_to_end([short, long]) == [None, None]
    assert short.result.report.refined_after is None
    assert long.result.report.refined_after == 4
    assert long.result.report.num_refined_tokens > 0


def test_other_answers_are_decoded_between_the_layers_of_a_refinement(engine, one_layer_slices, monkeypatch):
    """A request that comes during a refinement is prefilled after its next layer, and decoded after each later one."""
    expected = engine.generate(PROMPT, max_tokens=12, mode="full").token_ids
    events: list[str] = []
    other = engine.stream(PROMPT, max_tokens=12, mode="full")
    run_layer, decode = engine.layers.run_layer, engine.loop._decode

    def noted_layer(layer: int, *args: Any) -> torch.Tensor:
        if refining:
            events.append("layer")
            if len(events) == 1:
                other.start()
        return run_layer(layer, *args)

    refining = False
    stream = engine.stream(PROMPT, recompute_ratio=0.1, refine_ratio=0.5, rule="random", max_tokens=6)
    refine = type(engine)._refine

    def noted_refine(*args: Any) -> Any:
        nonlocal refining
        refining = True
        logits = yield from refine(*args)
        refining = False
        return logits

    monkeypatch.setattr(type(engine), "_refine", noted_refine)
    monkeypatch.setattr(engine.layers, "run_layer", noted_layer)
    monkeypatch.setattr(engine.loop, "_decode", lambda steps: events.append("decode") or decode(steps))
    assert engine.run_to_end([stream]) == [None]
    assert other.wait() is None
    assert other.result.token_ids == expected
    assert stream.result.report.refined_after == 1
    first = events.index("decode")
    assert first <= 2, "the request waited for more than a layer"
    assert events.count("layer") > 3
    assert "layer layer" not in " ".join(events[first : first + 10])  # while the other answer is decoded


def test_a_stream_that_is_closed_during_its_refinement_ends(engine, one_layer_slices):
    stream = engine.stream(PROMPT, recompute_ratio=0.1, refine_ratio=1.0, max_tokens=300)
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert engine.generate(PROMPT, max_tokens=2).token_ids


def test_an_answer_whose_refinement_fails_is_decoded_all_the_same(engine, monkeypatch, caplog):
    expected = engine.generate(PROMPT, recompute_ratio=0.1, max_tokens=6).token_ids

    def failing(*_: Any) -> Any:
        raise RuntimeError("no memory for it")
        yield

    monkeypatch.setattr(type(engine), "_refine", failing)
    found = engine.generate(PROMPT, recompute_ratio=0.1, refine_ratio=0.5, max_tokens=6)
    assert found.token_ids == expected
    assert found.report.refined_after is None
    assert "no memory for it" in caplog.text


# --- what others use ---


def test_a_refinement_writes_to_no_shared_prefix_and_no_stored_chunk(engine):
    engine.generate(PROMPT, max_tokens=1)
    prefixes = {ids: copied(kv) for ids, kv in engine._prefixes._kv.items()}
    stored = [engine.store.get(engine.key(chunk)) for chunk in CHUNKS]
    layers = [[each.clone() for layer in range(6) for each in kv.layer(layer)] for kv in stored]
    engine.generate(PROMPT, recompute_ratio=0.1, refine_ratio=1.0, max_tokens=4)
    for ids, kv in engine._prefixes._kv.items():
        assert all(map(torch.equal, copied(kv), prefixes[ids]))
    for kv, before in zip(stored, layers, strict=True):
        assert all(map(torch.equal, (each for layer in range(6) for each in kv.layer(layer)), before))


def turns(*answers: str) -> Prompt:
    messages: list[tuple[str, Any]] = [("user", [CHUNKS[0], CHUNKS[1], "what is that?"])]
    for answer in answers:
        messages += [("assistant", answer), ("user", [CHUNKS[2], "and the other?"])]
    return Prompt.from_messages(messages)


def test_the_next_turn_of_a_conversation_finds_refined_kv(chat_engine, stock_model):
    conversation = Conversation()
    first = chat_engine.generate(
        turns(), recompute_ratio=0.1, refine_ratio=1.0, max_tokens=4, conversation=conversation
    )
    assert first.report.refined_after == 1
    assert conversation.num_exact == conversation.fused.length
    second = turns(first.text)
    found = chat_engine.prefill(chat_engine.request(second, recompute_ratio=1.0, conversation=conversation))
    assert found.report.num_prefix_tokens >= first.report.prompt_tokens
    expected = stock_logits(stock_model("llama"), chat_engine.renderer.render(second))
    torch.testing.assert_close(found.logits, expected, atol=1e-4, rtol=0)


def test_the_refinement_of_one_fork_changes_no_other(chat_engine):
    conversation = Conversation()
    options: dict[str, Any] = {"recompute_ratio": 0.1, "max_tokens": 4}
    first = chat_engine.generate(turns(), conversation=conversation, **options)
    before, fork = copied(conversation.fused), copy.copy(conversation)
    plain = chat_engine.generate(turns(first.text), conversation=copy.copy(conversation), **options)
    refined = chat_engine.generate(turns(first.text), conversation=fork, refine_ratio=1.0, **options)
    assert refined.report.num_refined_tokens > 0
    assert all(map(torch.equal, copied(conversation.fused), before))
    again = chat_engine.generate(turns(first.text), conversation=copy.copy(conversation), **options)
    assert again.token_ids == plain.token_ids
