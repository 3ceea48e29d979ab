"""The same answers from two tensor-parallel ranks, and with torch.compile. Each brings processes or a compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from continued import Continued, assert_continues
from harness import (
    ask,
    ask_all,
    connector_scheduler,
    engine,
    free_blocks,
    ingest,
    machine,
    make_known,
    random_ids,
    recorded_selections,
    report,
    tokens,
)
from reference import Span
from refined import assert_full_prefill_follows
from selection_cases import FORMS, random_case
from test_blend import CHUNKS, PREFIX, QUESTION, blend_params, labelled_prompt

from ragblend.engine.fusion.rules import DEFAULT_RATIO, DEFAULT_RULE, NO_PROBE_RULE
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.machine import vllm_machine_facts, write_profile
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.engine.vllm.scheduler_side.loading import MemoryTierDelta
from ragblend.options import ModelOptions

IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *CHUNKS[2], *QUESTION]


def assert_exact(llm: Any, stock: Callable[[str], Any]) -> None:
    """Ingest, then compare with vLLM's own prefill and with the independent CacheBlend."""
    for chunk in CHUNKS:
        assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
    whole = ask(llm, IDS, {"mode": "blend", "ratio": 1.0})
    assert report(whole)["num_chunk_hits"] == 3
    assert tokens(whole) == tokens(ask(llm, IDS))
    parts = [Span(PREFIX), *(Span(chunk, True, chunk is CHUNKS[0], PREFIX) for chunk in CHUNKS), Span(QUESTION)]
    reference = Continued(stock("llama"))
    cases = [(rule, ratio) for ratio in (0.0, 0.05, 0.15, 0.5) for rule in ("cacheblend", "cacheblend_k", "ask")]
    params = [{"mode": "blend", "rule": rule, "ratio": ratio} for rule, ratio in cases]
    # All at once, so that those with few tokens to recompute share passes.
    for (rule, ratio), output in zip(cases, ask_all(llm, [(IDS, each) for each in params]), strict=True):
        expected = reference.blended(parts, ratio, rule, [])
        assert report(output)["num_recomputed_tokens"] == len(expected.selected)
        assert_continues(output, reference)
    for form in FORMS:  # ranks have different heads, and must keep the same tokens at every check layer
        case = random_case(form, random.Random(form))
        output = ask(llm, IDS, {"mode": "blend", "rule": case.rule, "ratio": case.ratio, **case.options})
        expected = reference.continue_from(reference.blend(parts, **case.reference), parts)
        assert report(output)["num_recomputed_tokens"] == len(expected.selected)
        assert_continues(output, reference)
    labelled = labelled_prompt()
    output = ask(llm, labelled.ids, blend_params(0.15))
    assert report(output)["num_chunk_hits"] == 3
    reference.blended(labelled.parts, 0.15, "cacheblend", [])
    assert_continues(output, reference)


def assert_refined(llm: Any) -> None:
    """Compare the tokens after a refinement with full prefill's."""
    refined = ask(llm, IDS, blend_params(0.1, "ask") | {"refine_ratio": 1.0})
    assert_full_prefill_follows(llm, IDS, refined, 1e-3)


def test_two_tensor_parallel_ranks(checkpoint, stock, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = find_checkpoint(str(checkpoint("llama")), ModelOptions(dtype="float32"))
    write_profile(tmp_path / "two", machine(found, 2.0, vllm_machine_facts(None, 2)))
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "skip_tokenizer_init": True}
    with engine(checkpoint("llama"), tmp_path / "two", **options) as llm:
        assert_exact(llm, stock)
        assert_refined(llm)
        # The disk is too slow for reuse from there; the ranks, in other processes, report their memory.
        blended = report(ask(llm, IDS, {"mode": "blend"}))
        assert (blended["num_chunk_hits"], blended["refused_reason"]) == (3, "")
        assert blended["recompute_ratio"] == DEFAULT_RATIO
        loading = connector_scheduler(llm.llm_engine).scheduler.loading
        loading.apply_delta(MemoryTierDelta(removed=tuple(DiskStore(tmp_path / "two").keys())))
        refused = ask(llm, IDS, {"mode": "blend"})
        assert "full prefill of 190 tokens" in report(refused)["refused_reason"]
        assert tokens(refused) == tokens(ask(llm, IDS))
    with engine(checkpoint("llama"), tmp_path / "one", skip_tokenizer_init=True) as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
    two, one = DiskStore(tmp_path / "two"), DiskStore(tmp_path / "one")
    assert sorted(two.keys()) == sorted(one.keys())
    for key in two.keys():  # noqa: SIM118 (a store is not a dict)
        for layer in range(6):
            for mine, other in zip(two.get(key).layer(layer), one.get(key).layer(layer), strict=True):
                assert mine.shape == other.shape
                assert (mine - other).abs().max() <= 1e-5 * other.abs().max()  # float32: rounding alone


def test_torch_compile(checkpoint, stock, tmp_path):
    with engine(checkpoint("llama"), tmp_path, enforce_eager=False, skip_tokenizer_init=True) as llm:
        assert_exact(llm, stock)
        assert_refined(llm)


@pytest.mark.parametrize("scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
def test_a_long_question_in_chunks_of_a_prefill(scheduling, caching, checkpoint, stock, tmp_path):
    """What is asked ahead is longer than a batch, so it is cut, and vLLM computes it in several steps afterwards."""
    options = {"max_num_batched_tokens": 256, "async_scheduling": scheduling, "enable_prefix_caching": caching}
    unstored = random_ids(290, 9)
    ids = [*IDS[:-9], *unstored, *QUESTION]
    parts = [Span(PREFIX), *(Span(chunk, True, chunk is CHUNKS[0], PREFIX) for chunk in CHUNKS)]
    parts += [Span(unstored), Span(QUESTION)]
    reference = Continued(stock("llama"))
    with engine(checkpoint("llama"), tmp_path, {"slice_tokens": 30}, skip_tokenizer_init=True, **options) as llm:
        assert_exact(llm, stock)
        make_known(tmp_path, checkpoint("llama"), [unstored])
        free = free_blocks(llm)
        with recorded_selections() as selections:
            output = ask(llm, ids, {"mode": "blend", "rule": "ask", "ratio": 0.15})
        assert selections == [reference.blended(parts, 0.15, "ask", [], 471).selected]
        assert_continues(output, reference)
        # Asking costs more here than it brings, so the default falls back to the rule that needs no question.
        assert report(ask(llm, ids, {"mode": "blend", "ratio": 0.15}))["rule"] == NO_PROBE_RULE
        assert report(ask(llm, IDS, {"mode": "blend", "ratio": 0.15}))["rule"] == DEFAULT_RULE
        assert free_blocks(llm) == free
