"""Explanations against the stock model's own KV: states, deviations and answers are what they say they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_prompts import CHUNKS, PROMPT
from transformers import DynamicCache

from ragblend.engine.generation import Conversation
from ragblend.engine.transformers.layers import cache_argument_name
from ragblend.engine.tuning.loading_controller import ReuseDecision
from ragblend.errors import UsageError
from ragblend.lab.explain import STATES, Comparison, explain
from ragblend.lab.explain_page import explanation_lines, render_html
from ragblend.lab.prompt_file import name_stored_chunks
from ragblend.options import Mode
from ragblend.prompt.types import Chunk, Prompt


@pytest.fixture
def engine(tiny_engine):
    """A tiny Llama whose store holds the first and the last chunk."""
    made = tiny_engine("llama")
    for chunk in (CHUNKS[0], CHUNKS[2]):
        made.precompute(chunk)
    return made


@pytest.fixture
def explanation(engine):
    return explain(engine, PROMPT, rule="ask", recompute_ratio=0.3, max_tokens=6)


def test_explained_tokens_are_the_prompts_in_order(engine, explanation):
    matched = engine.match(PROMPT)
    assert [token.id for token in explanation.tokens] == matched.token_ids == engine.renderer.render(PROMPT)
    assert [segment.start for segment in explanation.segments] == [start for start, _, _ in matched.parts]
    text = "".join(token.text for token in explanation.tokens)
    assert all(chunk.text in text for chunk in CHUNKS)
    assert "what is that?" in text
    assert explanation.question == "what is that?"


def test_states_are_those_of_the_report(explanation):
    prefix, exact, separator, missed, _, blended, suffix = explanation.segments
    assert {token.state for token in prefix.tokens} | {token.state for token in exact.tokens} == {"exact"}
    assert {token.state for segment in (separator, missed, suffix) for token in segment.tokens} == {"computed"}
    assert {token.state for token in blended.tokens} == {"recomputed", "reused"}
    report = explanation.report
    assert sum(map(explanation.count, STATES)) == report.prompt_tokens
    assert explanation.count("recomputed") == report.num_recomputed_tokens
    assert explanation.count("exact") + explanation.count("reused") == report.num_reused_tokens
    assert [segment.chunk for segment in (exact, missed, blended)] == report.chunks
    assert (missed.read_s, missed.deviation, prefix.chunk) == (None, None, None)
    assert exact.read_s >= 0


ONE, TWO, THREE = (chunk.text for chunk in CHUNKS)
FOUR = (
    "it is that question and that answer with the other chunk in it and what is of the theory to the question of that"
)
LONG = (f"{ONE} {TWO}", f"{THREE} {FOUR}")
"""Stored chunks that stay two runs each if other words stand between their halves."""
SENT = {
    "whole": f"{LONG[0]}\n\n{LONG[1]}\n\nwhat is that?",
    "first interrupted": f"{ONE} prime prime prime {TWO}\n\n{LONG[1]}\n\nwhat is that?",
    "second interrupted": f"{LONG[0]}\n\n{THREE} prime prime prime {FOUR}\n\nwhat is that?",
    "first twice": f"{LONG[0]}\n\n{LONG[1]}\n\n{LONG[0]}\n\nwhat is that?",
    "after an instruction": f"answer with that chunk.\n\n{LONG[0]}\n\n{LONG[1]}\n\nwhat is that?",
    "at the end": f"what is that?\n\n{LONG[0]}\n\n{LONG[1]}",
    "none": "what is that?",
}


@pytest.mark.parametrize("is_warm", [False, True], ids=["first prompt", "prefix in memory"])
@pytest.mark.parametrize("form", SENT)
def test_figures_of_runs_add_up_to_their_chunks_and_to_the_report(tiny_engine, form, is_warm):
    engine = tiny_engine("llama")
    for text in LONG:
        engine.precompute(Chunk(text, source="a.txt"))
    prompt = name_stored_chunks(engine, Prompt(question=SENT[form]), None)
    if is_warm:
        engine.generate(prompt, max_tokens=1)
    else:
        engine._prefixes.clear()
    explanation = explain(engine, prompt, rule="ask", recompute_ratio=0.3, max_tokens=2)
    report, segments = explanation.report, explanation.segments
    assert [segment.start for segment in segments] == [
        sum(len(before.tokens) for before in segments[:place]) for place in range(len(segments))
    ]
    assert explanation.count("exact") + explanation.count("reused") == report.num_reused_tokens
    assert explanation.count("recomputed") == report.num_recomputed_tokens
    for number, chunk in enumerate(report.chunks, start=1):
        runs = [segment for segment in segments if segment.number == number]
        assert sum(len(run.tokens) for run in runs) == chunk.num_tokens
        assert sum(run.count("recomputed") for run in runs) == chunk.num_recomputed_tokens <= chunk.num_tokens
        assert all(run.chunk is chunk and chunk.hit and run.name.startswith('"') for run in runs)
    assert {segment.number for segment in segments} - {None} == set(range(1, report.num_chunks + 1))
    for token in explanation.tokens:
        assert token.state != "exact" or token.remaining < 1e-4
        assert token.state != "computed" or token.deviation is None or token is explanation.tokens[-1]
    if report.attention_stale is not None:
        stale = sum(token.attention for token in explanation.tokens if token.state == "reused")
        assert stale == pytest.approx(report.attention_stale, abs=1e-5)
    lines = explanation_lines(explanation)
    assert sum("part 2 of 2" in line for line in lines) == ("interrupted" in form)
    heads = lines[3].split()[4:]
    sums = dict(zip(heads, next(line for line in lines if line.startswith("all ")).split()[1:], strict=False))
    assert int(sums["tokens"]) == report.prompt_tokens
    assert all(int(sums[state]) == explanation.count(state) for state in STATES)
    assert ("Prefix" in render_html(explanation)) == bool(report.num_chunks)


def test_full_prefill_that_was_faster_reports_no_missing_chunk(engine, monkeypatch):
    decision = ReuseDecision("ask", 1.0, (), 3.0, 1.0, 1.0, 1.0, "loading takes 3 s")
    monkeypatch.setattr(engine, "_decide", lambda *_, **__: decision)
    explanation = explain(engine, PROMPT, max_tokens=2)
    assert {token.state for token in explanation.tokens} == {"computed"}
    for shown in ("\n".join(explanation_lines(explanation)), render_html(explanation)):
        assert "loading takes 3 s" in shown
        assert "0/3" not in shown
        assert 'class="miss"' not in shown
        assert "   not in the store" not in shown


def test_attention_adds_up_to_the_reports_shares(explanation):
    shares = {state: sum(t.attention for t in explanation.tokens if t.state == state) for state in STATES}
    report = explanation.report
    assert shares["exact"] + shares["computed"] == pytest.approx(report.attention_exact, abs=1e-5)
    assert shares["recomputed"] == pytest.approx(report.attention_recomputed, abs=1e-5)
    assert shares["reused"] == pytest.approx(report.attention_stale, abs=1e-5)
    assert sum(segment.attention for segment in explanation.segments) == pytest.approx(1, abs=1e-5)


def test_deviations_are_those_from_the_stock_models_kv(engine, explanation, stock_model, tiny_model):
    """The stored chunk is moved by the stock model itself: run behind the prefix, its positions shifted."""
    model, matched = stock_model("llama"), engine.match(PROMPT)
    prefix, run = matched.token_ids[: matched.num_prefix], matched.runs[2]
    full, alone = DynamicCache(), DynamicCache()
    ids = [*prefix, *run.chunk_ids]
    with torch.no_grad():
        model(torch.tensor([matched.token_ids]), **{cache_argument_name(model): full})
        # RoPE depends on distances only, so shifting prefix and chunk together changes neither values nor attention.
        shift = run.start - len(prefix)
        positions = torch.arange(len(ids))[None] + shift
        model(torch.tensor([ids]), position_ids=positions, **{cache_argument_name(model): alone})
    for place, token in enumerate(explanation.segments[5].tokens):
        per_layer = []
        for ours, theirs in zip(alone.layers, full.layers, strict=True):
            for stored, fresh in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                a, b = stored[0, :, len(prefix) + place], fresh[0, :, run.start + place]
                per_layer.append(float((b - a).norm() / b.norm()))
        assert token.deviation == pytest.approx(sum(per_layer) / len(per_layer), rel=1e-3, abs=1e-5)
    unmoved = explain(engine, PROMPT, rule="cacheblend", recompute_ratio=0.3, max_tokens=2)
    reused = [token for token in unmoved.segments[5].tokens if token.state == "reused"]
    assert [token.remaining for token in reused] == [token.deviation for token in reused] != []


def test_exact_tokens_do_not_deviate_and_recomputing_everything_leaves_nothing(engine, explanation):
    for token in explanation.tokens:
        if token.state == "exact":
            assert token.remaining < 1e-4
    repaired = [token for token in explanation.tokens if token.state == "recomputed"]
    before, after = sum(token.deviation for token in repaired), sum(token.remaining for token in repaired)
    assert after < before
    everything = explain(engine, PROMPT, recompute_ratio=1.0, max_tokens=6)
    assert max(token.remaining for token in everything.tokens) < 1e-4
    assert everything.answers_identical
    assert everything.first_token_agrees
    assert everything.first_token_kl < 1e-8
    assert {token.attention for token in everything.tokens} == {None}


def test_a_chunk_deleted_during_the_comparison_has_no_deviation(engine, monkeypatch):
    prefill = engine.prefill

    def lossy(request: Any) -> Any:
        if request.mode == "reuse":
            engine.forget(CHUNKS[2])
        return prefill(request)

    monkeypatch.setattr(engine, "prefill", lossy)
    explanation = explain(engine, PROMPT, recompute_ratio=0.3, max_tokens=2)
    lost = explanation.segments[5]
    assert lost.chunk.hit
    assert lost.deviation is None
    assert "mean deviation" not in render_html(explanation)


def test_a_prompt_that_ends_with_a_chunk_computes_its_last_token(engine):
    explanation = explain(engine, Prompt.from_text([CHUNKS[0], CHUNKS[2]]), max_tokens=2)
    assert explanation.tokens[-1].state == "computed"
    assert explanation.question == ""


@pytest.mark.parametrize("options", [{"mode": "reuse"}, {"conversation": Conversation()}])
def test_other_modes_and_conversations_are_refused(engine, options):
    with pytest.raises(UsageError, match="leave mode and conversation out"):
        explain(engine, PROMPT, **options)


def test_characters_of_several_tokens_belong_to_the_last_one(renderer):
    text = "é 東京 👍🏽 the theory"
    texts = renderer.token_texts(renderer.text_ids(text))
    assert "".join(texts) == text
    assert "" in texts
    half = renderer.text_ids("東")[:2]
    assert "".join(renderer.token_texts(half)) == "\ufffd"
    assert renderer.token_texts([1, 3]) == ["<s>", "<doc>"]
    assert renderer.token_texts([]) == []


def test_a_comparison_blends_again_without_another_full_prefill(engine, monkeypatch):
    options: dict[str, Any] = {"rule": "ask", "max_tokens": 6}
    compared = Comparison(engine, PROMPT, recompute_ratio=0.3, **options)
    modes: tuple[Mode, ...] = ("full", "prefix", "reuse", "blend")
    for mode in modes:
        text = "".join(compared.stream(mode))
        assert text == engine.generate(PROMPT, mode=mode, recompute_ratio=0.3, **options).text
    assert list(compared.agreement("full").values()) == [True, True, 0.0]
    assert compared.agreement("prefix")["first_token_kl"] < 1e-5
    assert compared.agreement("reuse")["first_token_kl"] > 1e-5
    once = explain(engine, PROMPT, recompute_ratio=0.3, **options)
    assert [token.state for token in compared.explanation().tokens] == [token.state for token in once.tokens]

    prefilled: list[str] = []
    prefill = engine._prefill
    monkeypatch.setattr(
        engine, "_prefill", lambda request, get: (prefilled.append(request.mode), prefill(request, get))[1]
    )
    for ratio in (0.0, 1.0):
        list(compared.stream("blend", ratio))
        explanation = compared.explanation()
        assert explanation.count("recomputed" if ratio == 0 else "reused") == 0
        assert explanation.report.recompute_ratio == ratio
    assert compared.agreement("blend")["first_token_kl"] < 1e-5
    assert prefilled == ["blend", "blend"]
