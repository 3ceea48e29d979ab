"""Options of selection by deviation, as a caller of the engine or of a framework's model passes them."""

from __future__ import annotations

import json

import pytest
from chat_templates import SPECIALS, TEMPLATES
from tiny_prompts import CHUNKS, PROMPT

from ragblend.engine.report import BlendReport
from ragblend.errors import UsageError
from ragblend.llm import ChatBlend
from ragblend.prompt.render import Renderer


@pytest.fixture
def engine(tiny_engine):
    """A tiny Llama of 6 layers whose store has CHUNKS."""
    made = tiny_engine("llama")
    list(made.precompute_all(CHUNKS))
    return made


def num_chunk_tokens(report: BlendReport) -> int:
    return sum(chunk.num_tokens for chunk in report.chunks)


def test_the_report_says_how_many_tokens_each_check_layer_kept(engine):
    report = engine.generate(PROMPT, rule="cacheblend_gradual", recompute_ratio=0.3, max_tokens=1).report
    kept = [count for _, count in report.kept_at_check_layers]
    assert [layer for layer, _ in report.kept_at_check_layers] == [1, 2, 3, 4, 5]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == report.num_recomputed_tokens
    assert report.recompute_ratio == 0.3
    assert report.rule == "cacheblend_gradual"
    assert BlendReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report


def test_the_reported_ratio_is_the_mean_share_or_what_thresholds_gave(engine):
    shares = {"check_layers": [1, 3], "recompute_ratios": [0.4, 0.2]}
    by_share = engine.generate(PROMPT, rule="cacheblend", max_tokens=1, **shares).report
    assert by_share.recompute_ratio == pytest.approx(0.28)  # .4 in two of five layers, .2 in three
    by_threshold = engine.generate(PROMPT, rule="cacheblend_k", max_tokens=1, deviation_thresholds=[0.9]).report
    assert 0 < by_threshold.num_recomputed_tokens < num_chunk_tokens(by_threshold)
    expected = by_threshold.num_recomputed_tokens / num_chunk_tokens(by_threshold)
    assert by_threshold.recompute_ratio == pytest.approx(expected)


@pytest.mark.parametrize("options", [{"recompute_ratios": [1.0]}, {"deviation_thresholds": [0.0]}])
def test_ratios_of_one_and_thresholds_of_zero_answer_like_full_prefill(options, engine):
    full = engine.generate(PROMPT, mode="full", max_tokens=8)
    blended = engine.generate(PROMPT, rule="cacheblend_gradual", max_tokens=8, **options)
    assert blended.token_ids == full.token_ids
    assert blended.report.recompute_ratio == 1.0


def test_fewer_stored_tokens_than_the_least_number_are_prefilled_in_full(engine):
    stored = num_chunk_tokens(engine.generate(PROMPT, max_tokens=1).report)
    refused = engine.generate(PROMPT, blend_min_tokens=stored + 1, max_tokens=8)
    assert refused.report.refused_reason.startswith(f"{stored} tokens have stored KV, fewer than blend_min_tokens")
    assert refused.token_ids == engine.generate(PROMPT, mode="full", max_tokens=8).token_ids
    assert engine.generate(PROMPT, blend_min_tokens=stored, max_tokens=1).report.refused_reason == ""
    assert engine.generate(PROMPT, mode="reuse", blend_min_tokens=stored + 1, max_tokens=1).report.refused_reason == ""


def test_chunks_of_a_refused_prompt_are_still_stored_for_the_next_one(tiny_engine):
    engine = tiny_engine("llama", on_miss="store")
    list(engine.precompute_all(CHUNKS[:1]))
    first = engine.generate(PROMPT, blend_min_tokens=40, max_tokens=1).report
    engine.wait_for_precompute()
    second = engine.generate(PROMPT, blend_min_tokens=40, max_tokens=1).report
    assert first.refused_reason
    assert (second.refused_reason, second.num_chunk_hits) == ("", len(CHUNKS))


def test_a_rule_without_deviation_rejects_options_for_check_layers(engine):
    with pytest.raises(UsageError, match=r"rule 'ask' measures no deviation.*choose one of cacheblend"):
        engine.generate(PROMPT, check_layers=[1, 3], max_tokens=1)


def test_a_frameworks_call_passes_the_options_on(tiny_engine, make_tokenizer):
    engine = tiny_engine("llama", renderer=Renderer(make_tokenizer(TEMPLATES["chatml"].text, SPECIALS)))
    list(engine.precompute_all(CHUNKS))
    model = ChatBlend(engine=engine, rule="cacheblend", call_options={"check_layers": [1, 4], "deviation": "kv"})
    message = "\n".join(chunk.text for chunk in CHUNKS) + "\nwhat is that?"
    report = model.invoke(message, max_tokens=1).response_metadata["ragblend"]
    assert [layer for layer, _ in report["kept_at_check_layers"]] == [1, 4]
