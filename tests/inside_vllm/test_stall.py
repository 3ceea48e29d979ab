"""While stored KV is read, however slowly, vLLM goes on: other requests get their tokens, and what is blended waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import PREFIX, add, ask, connector_scheduler, connector_worker, engine, ingest, random_ids, tokens
from harness import report as report_of
from slow_reads import SlowEntry, emptied, replaced_reads

from ragblend.engine.store.format.kv import ChunkKV
from ragblend.engine.vllm.worker_side.paged import PagedKV, PagedLayerLoader

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
NUM_LAYERS, LONG_S = 6, 30.0
PLAIN = random_ids(12, 9)


class Slow:
    """How long each read of a disk takes: until `allow` is called after its begin, or `free`. No time is measured."""

    def __init__(self) -> None:
        self.num_reads = self.num_unanswered = 0
        self._changed, self._num_allowed, self._is_free = threading.Condition(), 0, False

    def wait(self) -> None:
        """Wait for permission to read, at most LONG_S."""
        with self._changed:
            begun = self._num_allowed
            answered = self._changed.wait_for(lambda: self._is_free or self._num_allowed > begun, LONG_S)
            self.num_reads += 1
            self.num_unanswered += not answered

    def allow(self) -> None:
        """Let the reads end that are under way."""
        with self._changed:
            self._num_allowed += 1
            self._changed.notify_all()

    def free(self) -> None:
        """Let all reads end, and those to come."""
        with self._changed:
            self._is_free = True
            self._changed.notify_all()


@contextmanager
def slow_disk(damaged_at: int | None = None) -> Iterator[Slow]:
    """Each layer of each chunk is read slowly from the worker's disk; the first chunk may be damaged."""
    for done in connector_worker()._readers:  # of a request that left
        done.wait()
    disk, slow = emptied(connector_worker()._store), Slow()

    def slow_entry(kv: ChunkKV) -> ChunkKV:
        return SlowEntry(kv, slow.wait, damaged_at if kv.header.num_tokens == len(CHUNKS[0]) else None)

    with replaced_reads(disk, slow_entry):
        try:
            yield slow
        finally:
            slow.free()


@contextmanager
def slow_headers(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """The scheduler looks slowly at each header."""
    disk, slow = connector_scheduler(llm.llm_engine).scheduler.disk, Slow()
    peek = disk.peek

    def slowly(key: str) -> Any:
        slow.wait()
        return peek(key)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "peek", slowly)
        try:
            yield slow
        finally:
            slow.free()


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    with engine(checkpoint("llama"), tmp_path_factory.mktemp("kv"), skip_tokenizer_init=True) as made:
        for chunk in CHUNKS:
            assert ingest(made, PREFIX, chunk)["refused_reason"] == ""
        ask(made, IDS, params("ask"))  # nothing is measured cold
        yield made


def params(rule: str, mode: str = "blend") -> dict[str, Any]:
    return {"mode": mode, "rule": rule, "ratio": 0.3}


@pytest.fixture(autouse=True)
def nothing_cached(llm):
    """Clear vLLM's prefix cache, which keeps what an earlier blend of the prompt left."""
    llm.reset_prefix_cache()


def stream_beside(llm: Any, ids: list[int], wanted: dict[str, Any], name: str, slow: Slow) -> Any:
    """The output of a request beside which a stream gets tokens; each lets the reads end that are under way."""
    other, running = f"stream-{name}", llm.llm_engine
    llm.reset_prefix_cache()
    add(llm, other, PLAIN, None, max_tokens=1000)
    for _ in range(5):
        running.step()
    add(llm, name, ids, wanted, max_tokens=8)
    answer = None
    while answer is None:
        for output in running.step():
            if output.request_id == other:
                assert not output.finished, "the stream ended before the blend"
                slow.allow()
            elif output.finished:
                answer = output
    running.abort_request([other])
    while running.has_unfinished_requests():
        running.step()
    assert slow.num_unanswered == 0, "the stream stood still while KV was read"
    return answer


@pytest.mark.parametrize("rule", ["cacheblend", "ask"])
def test_a_stream_continues_while_a_blend_reads_a_slow_store(llm, rule):
    held = ask(llm, IDS, params(rule))
    with slow_disk() as slow:
        answer = stream_beside(llm, IDS, params(rule), f"blend-{rule}", slow)
    assert slow.num_reads == NUM_LAYERS * len(CHUNKS)
    found, expected = report_of(answer), report_of(held)
    assert tokens(answer) == tokens(held)
    assert found["num_recomputed_tokens"] == expected["num_recomputed_tokens"]
    assert found["num_chunk_hits"] == len(CHUNKS)
    assert found["stall_s"] > expected["stall_s"]


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_a_stream_continues_while_chunks_are_looked_up_on_slow_disks(llm, mode, monkeypatch):
    held = ask(llm, IDS, params("ask", mode))
    with slow_headers(llm, monkeypatch) as slow:
        answer = stream_beside(llm, IDS, params("ask", mode), f"headers-{mode}", slow)
    assert slow.num_reads >= len(CHUNKS)
    assert tokens(answer) == tokens(held)
    assert report_of(answer)["num_chunk_hits"] == len(CHUNKS)


def test_a_request_that_ends_while_it_is_looked_up_holds_nobody_up(llm, monkeypatch):
    running = llm.llm_engine
    with slow_headers(llm, monkeypatch) as slow:
        add(llm, "unsought", IDS, params("ask"), max_tokens=4)
        running.step()
        running.abort_request(["unsought"])
        assert tokens(ask(llm, PLAIN, max_tokens=4))
        assert slow.num_reads == 0


def test_damage_during_other_requests_restarts_the_blend_without_the_chunk(llm):
    with slow_disk(damaged_at=3) as slow:
        answer = stream_beside(llm, IDS, params("ask"), "damaged", slow)
    assert (report_of(answer)["num_chunk_hits"], report_of(answer)["num_damaged_entries"]) == (1, 1)


def test_a_request_that_ends_while_it_is_read_holds_nobody_up(llm):
    running = llm.llm_engine
    with slow_disk() as slow:
        add(llm, "leaves", IDS, params("ask"), max_tokens=4)
        while not connector_worker()._jobs:
            running.step()
        for _ in range(3):
            running.step()
        running.abort_request(["leaves"])
        for _ in range(3):
            running.step()
        assert slow.num_reads == 0
    assert connector_worker()._jobs == []
    assert tokens(ask(llm, PLAIN, max_tokens=4))


@pytest.mark.parametrize("slow_part", ["layers", "headers"])
def test_an_engine_that_only_waits_does_not_spin(llm, slow_part, monkeypatch):
    running, num_steps = llm.llm_engine, 0
    with slow_disk() if slow_part == "layers" else slow_headers(llm, monkeypatch) as slow:
        add(llm, slow_part, IDS, params("ask"), max_tokens=1)
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < 0.5:
            running.step()
            num_steps += 1
        waited_s = time.perf_counter() - start_s
        assert slow.num_reads == 0
        slow.free()
        while running.has_unfinished_requests():
            running.step()
    assert num_steps < 250 * waited_s


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_a_requests_memory_is_free_when_it_ends(llm, mode):
    with slow_disk() as slow:
        slow.free()
        gc.disable()
        try:
            ask(llm, IDS, {"mode": mode})
            left = [type(each).__name__ for each in gc.get_objects() if isinstance(each, PagedKV | PagedLayerLoader)]
        finally:
            gc.enable()
    assert left == []
