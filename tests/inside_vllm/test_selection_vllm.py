"""Inside vLLM, every form of selection by deviation selects what the independent CacheBlend selects."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness import PREFIX, ask, ingest, random_ids, recorded_selections, report, tokens
from reference import Reference, Span
from selection_cases import FORMS, random_case
from test_blend import engine_of

NUM_BLENDS = {"llama": 200, "llama together": 30}  # by kind, as in test_blend
CHUNKS = [random_ids(10 + number, 300 + number) for number in range(9)]


SERVERS = {"rule": "cacheblend", "check_layers": [1, 3], "recompute_ratios": [0.5, 0.2]}  # for requests that set none


@pytest.fixture(scope="module", params=NUM_BLENDS)
def kind(request):
    """Whether scattered rows attend together, as on a GPU."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(kind, checkpoint, tmp_path_factory):
    """An engine of a tiny Llama that has the chunks stored."""
    store = tmp_path_factory.mktemp("kv")
    with (
        pytest.MonkeyPatch.context() as patch,
        engine_of(kind, checkpoint("llama"), store, patch, extra=SERVERS, skip_tokenizer_init=True) as llm,
    ):
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        yield llm


def random_prompt(chance: random.Random) -> tuple[list[int], list[Span]]:
    """Ids and spans: the prefix, two or three stored chunks, in some prompts a label between them, and a question."""
    pieces = chance.sample(CHUNKS, chance.randint(2, 3))
    spans = [Span(PREFIX), *(Span(chunk, True, chunk is pieces[0], PREFIX) for chunk in pieces)]
    if chance.random() < 0.4:
        spans.insert(2, Span(random_ids(chance.randint(1, 5), chance.randrange(10**6))))
    spans.append(Span(random_ids(chance.randint(3, 8), chance.randrange(10**6))))
    return [token for span in spans for token in span.ids], spans


def params_of(case: Any) -> dict[str, Any]:
    return {"mode": "blend", "rule": case.rule, "ratio": case.ratio, **case.options}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
def test_random_selections_equal_those_of_the_independent_cacheblend(form, kind, served, stock):
    reference, chance, differing = Reference(stock("llama")), random.Random(form), []
    for number in range(NUM_BLENDS[kind]):
        case, (ids, spans) = random_case(form, chance), random_prompt(chance)
        with recorded_selections() as selections:
            output = ask(served, ids, params_of(case), 1)
        expected = reference.blend(spans, **case.reference)
        if selections != [expected.selected]:
            differing.append((number, case))
            continue
        found = report(output)
        kept = [count for _, count in found["kept_at_check_layers"]]
        assert kept == sorted(kept, reverse=True)
        assert kept[-1:] in ([], [found["num_recomputed_tokens"]])
        truth = expected.logits.log_softmax(-1)
        (logprobs,) = output.outputs[0].logprobs
        assert all(abs(entry.logprob - float(truth[token])) <= 1e-3 for token, entry in logprobs.items())
    assert differing == []


@pytest.mark.parametrize(
    "options", [{"rule": "cacheblend_gradual", "ratio": 1.0}, {"rule": "cacheblend", "deviation_thresholds": [0]}]
)
def test_ratio_one_and_threshold_zero_give_vllms_own_tokens(options, served):
    ids, _ = random_prompt(random.Random(3))
    blended = ask(served, ids, {"mode": "blend", **options})
    assert report(blended)["refused_reason"] == ""
    assert report(blended)["num_chunk_hits"] >= 2
    assert tokens(blended) == tokens(ask(served, ids))


def test_a_prompt_with_few_stored_tokens_is_left_to_vllm(served):
    ids, spans = random_prompt(random.Random(4))
    num_stored = sum(len(span.ids) for span in spans if span.stored)
    refused = ask(served, ids, {"mode": "blend", "blend_min_tokens": num_stored + 1})
    assert report(refused)["refused_reason"].startswith(f"{num_stored} tokens have stored KV, fewer than")
    assert tokens(refused) == tokens(ask(served, ids))
    blended = report(ask(served, ids, {"mode": "blend", "blend_min_tokens": num_stored}))
    assert blended["refused_reason"] == ""
    assert blended["num_recomputed_tokens"] > 0


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"check_layers": [1, 6], "rule": "cacheblend"}, "check layer 6 does not exist"),
        ({"check_layers": [1], "rule": "ask"}, "rule 'ask' measures no deviation"),
        ({"recompute_ratios": [0.1, 0.2], "rule": "cacheblend"}, "none above the one before it"),
    ],
)
def test_options_that_cannot_be_followed_are_answered_with_the_reason(params, reason, served):
    ids, _ = random_prompt(random.Random(5))
    found = ask(served, ids, {"mode": "blend", **params})
    assert reason in report(found)["refused_reason"]


def test_a_servers_selection_is_for_requests_that_set_none(served):
    ids, _ = random_prompt(random.Random(6))
    by_server, own = (
        report(ask(served, ids, {"mode": "blend", **params})) for params in ({}, {"rule": "cacheblend", "ratio": 0.3})
    )
    assert [layer for layer, _ in by_server["kept_at_check_layers"]] == [1, 3]
    assert by_server["recompute_ratio"] == 0.32  # the mean of layers 1 to 5
    assert [layer for layer, _ in own["kept_at_check_layers"]] == [1]
