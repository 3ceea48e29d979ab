"""The loading controller under vLLM: the transformers engine's decisions.

The profiles are made up, so that each test knows what must follow; `test_profiling.py` shows that they are measured.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from harness import SMALL, connector_scheduler, connector_worker, machine, recorded_selections
from servers import wait_until
from slow_reads import emptied

from ragblend import Prompt, load_engine
from ragblend.engine.fusion.rules import DEFAULT_RATIO
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, RuleFit, save_calibration
from ragblend.engine.tuning.machine import machine_facts, vllm_machine_facts, write_profile
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.precompute import precompute_documents

CHUNKS = [f"{name} Keller lives in Kinport. Julia Bishop works for Synon. " * 4 for name in ("George", "Tom", "Ben")]
PROMPT = Prompt(CHUNKS, "Where does George Keller live?")
FAST, HIDING, SLOW = 1e-6, 0.8, 20.0  # seconds of loading per second of prefill


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """vLLM and the transformers engine over one store with profiles that make full prefill the faster way."""
    store = tmp_path_factory.mktemp("loading") / "kv"
    with load_engine("demo", store, on_miss="inline") as first:
        precompute_documents(CHUNKS, first)
        for hardware in (machine_facts(), vllm_machine_facts(None)):
            write_profile(store, machine(find_checkpoint("demo"), SLOW, hardware))
    with (
        load_engine("demo", store, on_miss="inline") as reference,
        load_engine("demo", store, backend="vllm", vllm_options=SMALL, on_miss="inline") as ours,
    ):
        yield ours, reference


@pytest.fixture(autouse=True)
def nothing_in_memory(request):
    if "engines" in request.fixturenames:
        forget_memory(*request.getfixturevalue("engines"))


def forget_memory(ours: Any, reference: Any) -> None:
    for store in (connector_worker()._store, reference.store):
        wait_until(lambda store=store: not store._prefetching, 60, "what was refused before is in memory")
        emptied(store)
        for tier in store.tiers:
            tier.read_speed = ReadSpeed()  # else the measured reads take the place of the profile's
    reference._paces.clear()
    assert ours.generate(PROMPT, mode="full", max_tokens=1).report.refused_reason == ""
    assert ours.reset_prefix_cache()  # or what it has of the prompt would be left to it


def connector(engine: Any) -> Any:
    """The scheduler's half."""
    return connector_scheduler(engine._loop._engine)


def set_load_share(ours: Any, reference: Any, share: float) -> None:
    """How slow the disk is, in both engines' profiles."""
    for each in (connector(ours).scheduler.loading, reference):
        each.machine = machine(find_checkpoint("demo"), share, dict(each.machine.hardware))


def test_reuse_slower_than_full_prefill_is_left_to_vllm(engines, caplog):
    ours, reference = engines
    store, found = connector_worker()._store, []
    with caplog.at_level(logging.WARNING), recorded_selections() as blended:
        for _ in range(2):
            found.append(ours.generate(PROMPT, max_tokens=8))
            memory = store.find_tier(MemoryStore)
            wait_until(lambda memory=memory: len(list(memory.keys())) >= 3, 60, "later requests find them in memory")
            emptied(store)
            ours.generate(PROMPT, mode="full", max_tokens=1)  # the workers report their memory at an engine step
    full = ours.generate(PROMPT, mode="full", max_tokens=8)
    theirs = reference.generate(PROMPT, max_tokens=8).report
    assert theirs.refused_reason
    for answer in found:
        assert answer.report.refused_reason == theirs.refused_reason
        assert answer.token_ids == full.token_ids
        assert (answer.report.mode, answer.report.num_chunks, answer.report.num_chunk_hits) == ("prefix", 3, 0)
    first, second = (answer.report for answer in found)
    assert (first.charged_budget, first.num_reused_tokens) == (1.0, 0)
    assert second.num_reused_tokens == second.num_prefix_tokens > 0  # an ordinary prefill: vLLM's own cache has it
    assert blended == []
    assert caplog.text.count("stored KV is not used") == 2  # once by either engine
    assert "prefilled in full" not in caplog.text


def test_a_request_that_names_its_ratio_is_not_refused(engines):
    ours, _ = engines
    ours_ratio = connector(ours).scheduler.config
    assert ours.generate(PROMPT, recompute_ratio=0.15, max_tokens=1).report.num_chunk_hits == 3
    assert ours.generate(PROMPT, mode="reuse", max_tokens=1).report.num_chunk_hits == 3
    forget_memory(*engines)
    try:
        connector(ours).scheduler.config = replace(
            ours_ratio, ratio=0.3
        )  # as `serve --ratio` sets it: for those that name none
        assert ours.generate(PROMPT, max_tokens=1).report.recompute_ratio == 0.3
        forget_memory(*engines)
        assert ours.generate(PROMPT, recompute_ratio="auto", max_tokens=1).report.refused_reason
    finally:
        connector(ours).scheduler.config = ours_ratio


@pytest.mark.parametrize("load_share", [0.3, 0.5, HIDING])
def test_the_ratio_rises_until_loading_hides_it_as_in_transformers(engines, load_share):
    ours, reference = engines
    set_load_share(ours, reference, load_share)
    found, theirs = (each.generate(PROMPT, rule="cacheblend", max_tokens=4).report for each in engines)
    assert found.recompute_ratio == pytest.approx(theirs.recompute_ratio, rel=1e-12)
    assert found.num_recomputed_tokens == theirs.num_recomputed_tokens
    assert found.num_chunk_hits == 3
    assert found.recompute_ratio > DEFAULT_RATIO or load_share < 0.5
    assert ours.reset_prefix_cache()
    # Blending from the disk moved them up: from memory nothing hides, and the least ratio stays.
    options: dict[str, Any] = {"rule": "cacheblend", "recompute_ratio": "auto", "max_tokens": 1}
    again = [each.generate(PROMPT, **options).report.recompute_ratio for each in engines]
    assert again == [DEFAULT_RATIO, DEFAULT_RATIO]


def test_prefetch_brings_chunks_into_the_workers_memory(engines):
    ours, _ = engines
    memory = connector_worker()._store.find_tier(MemoryStore)
    assert list(memory.keys()) == []
    ours.prefetch(CHUNKS)
    wait_until(lambda: len(list(memory.keys())) >= len(CHUNKS), 60, "they are in memory")
    set_load_share(*engines, SLOW)
    ours.generate(PROMPT, mode="full", max_tokens=1)  # the workers report their memory at an engine step
    assert ours.generate(PROMPT, max_tokens=1).report.num_chunk_hits == 3, "nothing has to be loaded"


def test_a_calibrated_ratio_is_the_least_one(engines):
    ours, reference = engines
    points = tuple(CurvePoint(ratio, ratio, ratio, ratio, ratio, 0.1, ratio) for ratio in (0.0, 1.0))
    fit = RuleFit("cacheblend_k", 1, 0.25, True, points)
    facts = (ours.fingerprint, ours.default_prefix_ids, "any", 1e9, 0.25, 60, "k 3")
    disk = connector(ours).scheduler.disk
    path = save_calibration(disk, Calibration(*facts, (fit,)))
    try:
        for share in (FAST, HIDING):
            forget_memory(*engines)
            set_load_share(ours, reference, share)
            found, theirs = (each.generate(PROMPT, max_tokens=1).report for each in engines)
            assert found.recompute_ratio == pytest.approx(theirs.recompute_ratio)
            assert found.predicted_agreement == pytest.approx(found.recompute_ratio)
            assert (found.recompute_ratio == 0.25) == (share == FAST)
    finally:
        path.unlink()
