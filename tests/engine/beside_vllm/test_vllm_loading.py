"""Loading decisions of vLLM's scheduler, without vLLM: the workers' memory, and the ratio."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_support import make_kv

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.tuning.loading_controller import (
    LoadableChunk,
    MachineProfile,
    RuleChoice,
    decide_reuse,
    tier_speeds,
)
from ragblend.engine.tuning.machine import machine_facts, vllm_machine_facts
from ragblend.engine.vllm.scheduler_side.loading import LoadingController, MemoryTierDelta, MemoryTierTracker
from ragblend.prompt.types import ChunkRun, Variant

KVS = [make_kv(seed, tokens=20) for seed in range(6)]
KEYS = [kv.header.key for kv in KVS]
NBYTES = KVS[0].nbytes
MACHINE = MachineProfile("tiny", {}, 30, NBYTES // 20, ((1000.0, 1.0),), bytes_per_s={"disk": NBYTES / 20 * 1000 / 0.6})


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    disk = DiskStore(tmp_path_factory.mktemp("kv"), fsync=False)
    for kv in KVS:
        disk.put(kv)
    return disk


def runs(count: int) -> tuple[ChunkRun, ...]:
    variants = [Variant(key, "approximate", exact=False, nbytes=NBYTES) for key in KEYS]
    return tuple(ChunkRun((), 0, 5 + 20 * at, 25 + 20 * at, variant=variants[at]) for at in range(count))


def test_a_profile_of_vllm_is_another_than_one_of_transformers(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    one = vllm_machine_facts(None)
    assert one["threads"] == "3"
    assert (
        len({str(facts) for facts in (one, machine_facts(), vllm_machine_facts(None, 2), vllm_machine_facts("a GPU"))})
        == 4
    )
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert vllm_machine_facts(None)["threads"] == "0-3"
    assert vllm_machine_facts("a GPU") == {**one, "gpu": "a GPU", "threads": None}


def test_the_worker_tells_what_came_and_what_went_and_only_then(disk):
    memory = MemoryStore(2 * NBYTES)
    watch = MemoryTierTracker(TieredStore(memory, disk))
    assert watch.take_delta() is None
    for kv in KVS[:3]:  # the third pushes out the first
        memory.put(kv)
    change = watch.take_delta()
    assert (set(change.added), change.removed) == (set(KEYS[1:3]), ())
    assert watch.take_delta() is None
    memory.delete(KEYS[1])
    memory.put(KVS[3])
    assert watch.take_delta() == ((KEYS[3],), (KEYS[1],))
    assert MemoryTierTracker(TieredStore(disk)).take_delta() is None


@given(st.lists(st.tuples(st.sampled_from(["put", "delete"]), st.integers(0, 5)), max_size=30), st.integers(0, 3))
def test_what_is_told_adds_up_to_what_is_there(steps, every):
    memory = MemoryStore(3 * NBYTES)
    watch, loading = MemoryTierTracker(TieredStore(memory)), LoadingController(MACHINE)
    for number, (what, index) in enumerate(steps):
        memory.put(KVS[index]) if what == "put" else memory.delete(KEYS[index])
        if number % (every + 1) == 0 and (change := watch.take_delta()) is not None:
            loading.apply_delta(change)
    loading.apply_delta(watch.take_delta() or MemoryTierDelta())
    assert {key for key in KEYS if key in loading._held} == set(memory.keys())


@pytest.mark.parametrize("in_memory", [0, 1, 3])
def test_only_what_is_not_in_memory_has_to_be_loaded(in_memory):
    loading = LoadingController(MACHINE)
    loading.apply_delta(MemoryTierDelta(tuple(KEYS[:in_memory])))
    tuning = RequestTuning("cacheblend", 0.15, adapts_ratio=True)
    found = loading.decide([tuning], 75, 5, loading.stored_chunks(runs(3)))
    chunks = [LoadableChunk("memory" if at < in_memory else "disk", 20, NBYTES) for at in range(3)]
    assert found == decide_reuse(MACHINE, [RuleChoice("cacheblend", 0.15)], 75, 5, chunks, tier_speeds(MACHINE, {}))
    assert found.load_s == pytest.approx((3 - in_memory) * 20 * 0.6e-3)
    assert (found.ratio > 0.15) == (in_memory < 3)


def test_chunks_too_slow_to_load_are_read_into_memory_once():
    slow = replace(MACHINE, bytes_per_s={"disk": NBYTES / 1000})
    loading = LoadingController(slow)
    loading.apply_delta(MemoryTierDelta(tuple(KEYS[:1])))
    tuning = RequestTuning("cacheblend", 0.15, adapts_ratio=True)
    found = loading.decide([tuning], 75, 5, loading.stored_chunks(runs(3)))
    loading.prefetch_unused(runs(3), found)
    assert loading.take_prefetches() == KEYS[1:3]
    assert loading.take_prefetches() == []
    fast = LoadingController(MACHINE)
    fast.prefetch_unused(runs(3), fast.decide([tuning], 75, 5, fast.stored_chunks(runs(3))))
    assert fast.take_prefetches() == []
