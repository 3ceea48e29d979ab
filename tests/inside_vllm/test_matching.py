"""Requests of any client: stored chunks are found in their token ids, and blended as if they had been marked."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest
from harness import (
    PREFIX,
    assert_same_answer,
    connector_scheduler,
    engine,
    ingest,
    make_known,
    random_ids,
    recorded_selections,
    report,
    tokens,
    watch_counts,
)
from harness import ask as ask_afresh

ask = partial(ask_afresh, forgets=False)
CHUNKS = [random_ids(n, n) for n in (90, 70, 110, 80)]
QUESTION, LABEL, LONG = random_ids(9, 4), random_ids(7, 6), random_ids(40, 40)
BLOCK = 32


@pytest.fixture(scope="module")
def renderer(checkpoint, tmp_path_factory):
    """What renders prompts for the tiny model."""
    return make_known(tmp_path_factory.mktemp("none"), checkpoint("llama"), [])


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Where the engine stores chunks."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def llm(checkpoint, store):
    """An engine whose store has the chunks."""
    with engine(checkpoint("llama"), store, {"mode": "blend"}) as made:
        for chunk in CHUNKS:
            assert ingest(made, PREFIX, chunk)["refused_reason"] == ""
        yield made


@pytest.fixture(autouse=True)
def forgotten(llm):
    """Clear vLLM's prefix cache before each test."""
    assert llm.reset_prefix_cache()


def plain_request(ids: list[int]) -> SimpleNamespace:
    """What vLLM's scheduler has of a request."""
    return SimpleNamespace(
        request_id="one", prompt_token_ids=ids, kv_transfer_params=None, cache_salt=None, num_output_tokens=0,
        skip_reading_prefix_cache=False, block_hashes=[], update_block_hashes=lambda: None, num_preemptions=0,
    )  # fmt: skip


def test_a_request_without_parameters_equals_the_one_with_the_servers_own(llm):
    first, second, third, _ = CHUNKS
    ids = [*PREFIX, *first, *LABEL, *second[1:], *third[:60], *QUESTION]
    plain = ask(llm, ids)
    llm.reset_prefix_cache()
    asked = ask(llm, ids, {"mode": "blend", "rule": "auto"})
    found, expected = report(plain), report(asked)
    assert (found["mode"], found["num_chunk_hits"]) == ("blend", 3)
    assert [(chunk["num_tokens"], chunk["exact"]) for chunk in found["chunks"]] == [
        (90, True),
        (69, False),
        (60, False),
    ]
    assert found["match_s"] > 0
    for name in ("rule", "recompute_ratio", "chunks", "num_reused_tokens", "num_recomputed_tokens"):
        assert found[name] == expected[name], name
    assert tokens(plain) == tokens(asked)


def test_ratio_one_is_full_prefill_also_after_cached_history(llm, renderer):
    first, second, third, fourth = CHUNKS
    turn, wish = [*PREFIX, *first, *LABEL, *second[3:], *LONG, *renderer.tail_ids], {"ratio": 1.0}
    answer = tokens(ask(llm, turn, wish))
    assert answer == tokens(ask(llm, turn, {"mode": "full"}))
    later = [*turn, *answer, *LABEL, *third, *fourth[:70], *QUESTION[::-1]]
    blended, full = ask(llm, later, wish), ask(llm, later, {"mode": "full"})
    got = report(blended)
    assert (got["mode"], got["num_chunk_hits"]) == ("blend", 4)
    assert got["num_prefix_tokens"] == len([*turn, *answer]) // BLOCK * BLOCK
    assert [chunk["exact"] for chunk in got["chunks"]] == [True, True, False, False]
    assert [chunk["num_recomputed_tokens"] for chunk in got["chunks"]] == [0, 0, len(third), 70]
    assert_same_answer(blended, full, 1e-3)


@pytest.mark.parametrize("rule", ["ask", "cacheblend"])
def test_each_turn_is_probed_by_its_own_question(llm, renderer, rule):
    first, second, third, fourth = CHUNKS
    tail, wish = renderer.tail_ids, {"rule": rule, "ratio": 0.3}
    turn = [*PREFIX, *LABEL, *first, *second, *LONG, *tail]
    with recorded_selections() as selections:
        later = [*turn, *tokens(ask(llm, turn, wish)), *LABEL, *third, *fourth, *QUESTION, *tail]
        cached = report(ask(llm, later, wish))
        llm.reset_prefix_cache()
        alone = report(ask(llm, later, wish))
    assert cached["num_prefix_tokens"] > len(turn) - BLOCK
    assert alone["num_prefix_tokens"] == len(PREFIX)  # the worker has its KV from ingestion
    counts = [round(0.3 * 160), round(0.3 * 190)]
    assert [len(each) for each in selections] == [*counts, sum(counts)]
    assert selections[0] + selections[1] == selections[2]
    assert [chunk["num_recomputed_tokens"] for chunk in cached["chunks"]][2:] == [
        chunk["num_recomputed_tokens"] for chunk in alone["chunks"]
    ][2:]
    assert alone["num_reused_tokens"] == len(PREFIX) + 350 - sum(counts)
    assert 0 < alone["charged_budget"] < 1


def test_a_question_that_quotes_a_chunk_stays_fresh(llm, renderer):
    first, second, *_ = CHUNKS
    quote = [*PREFIX, *second, *LABEL, *first[10:50]]
    got = report(ask(llm, [*quote, *renderer.tail_ids]))
    assert [chunk["num_tokens"] for chunk in got["chunks"]] == [70]
    got = report(ask(llm, [*quote, *LABEL, *renderer.tail_ids]))
    assert [chunk["num_tokens"] for chunk in got["chunks"]] == [70, 40]


def test_the_last_token_after_a_final_chunk_is_computed_by_vllm(llm):
    got = report(ask(llm, [*PREFIX, *LABEL, *CHUNKS[0]]))
    assert [(chunk["num_tokens"], chunk["hit"]) for chunk in got["chunks"]] == [(89, True)]


def test_prompts_without_stored_chunks_or_plain_ids_are_counted_and_left(llm):
    scheduler = connector_scheduler(llm.llm_engine)
    counts = watch_counts(scheduler)
    assert ask(llm, random_ids(60, 60)).kv_transfer_params is None
    assert counts.data["left_requests|no_chunks"] == 1
    ids = [*PREFIX, *CHUNKS[0], *QUESTION]
    for field, value, reason in (
        ("mm_features", [object()], "multimodal"),
        ("prompt_embeds", object(), "embeddings"),
        ("lora_request", object(), "lora"),
    ):
        request = plain_request(ids)
        setattr(request, field, value)
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert scheduler.request_finished(request, []) == (False, None)
        assert scheduler.scheduler.metrics.counts[f"left_requests|{reason}"] == 1
    assert len(counts.data["request_match_seconds"]) == 1


def test_namespaces_match_and_share_nothing(llm):
    """What another namespace has stored is neither found in a prompt nor in vLLM's prefix cache."""
    first, second, *_ = CHUNKS
    turn = [*PREFIX, *LABEL, *first, *second, *LONG]
    for name, chunk in (("a", first), ("a", second), ("b", second)):
        ingest(llm, PREFIX, chunk, name)
    for name, hits in (("a", 2), ("b", 1), ("c", 0)):
        got = report(ask(llm, turn, {"namespace": name}))
        assert (got["num_chunk_hits"], got["num_prefix_tokens"] > len([*PREFIX, *LABEL, *first])) == (hits, False)
    cached = [report(ask(llm, turn, {"namespace": name}))["num_prefix_tokens"] for name in ("a", "b")]
    assert cached == [len(turn) // BLOCK * BLOCK] * 2  # each finds its own
    llm.reset_prefix_cache()
    for name, salt in (("a", "s3cret"), ("unknown", None)):
        request = SimpleNamespace(**{**vars(plain_request(turn)), "cache_salt": salt})
        request.kv_transfer_params = {"ragblend": {"namespace": name}}
        connector = connector_scheduler(llm.llm_engine)
        connector.on_new_request(request)
        while (found := connector.get_num_new_matched_tokens(request, 0))[0] is None:
            time.sleep(0.001)  # its look-up goes on
        assert found == (0, False)
        assert connector.request_finished(request, [])[1]["ragblend"]["num_chunks"] == 0
