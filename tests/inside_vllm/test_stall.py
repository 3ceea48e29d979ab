"""While stored KV is read, however slowly, vLLM goes on: other requests get their tokens, and what is blended waits."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ask, connector_worker, engine, ingest, random_ids, tokens
from harness import report as report_of
from slow_reads import SlowEntry, emptied

from ragblend.engine.vllm.paged import PagedKV, PagedSource

PREFIX, CHUNKS, QUESTION = random_ids(5, 1), [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
SPANS = [[5, 66], [66, 106]]
NUM_LAYERS, READ_S = 6, 0.2
PLAIN = random_ids(12, 9)


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch, damaged_at: int | None = None) -> Iterator[list[tuple[float, float]]]:
    """When each layer of each chunk was read from the worker's disk, which is slow; the first chunk may be damaged."""
    for done in connector_worker()._readers:  # of a request that left
        done.wait()
    gc.collect()  # an entry that somebody still holds is shared, and would not be read again
    disk, reads = emptied(connector_worker()._store), list[tuple[float, float]]()
    get = disk.get

    def slowly(key: str, token_ids: Any = None) -> Any:
        kv = get(key, token_ids)
        damaged = damaged_at if kv is not None and kv.header.num_tokens == len(CHUNKS[0]) else None
        return None if kv is None else SlowEntry(kv, READ_S, damaged, lambda *when: reads.append(when))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "get", slowly)
        yield reads


@contextmanager
def slow_headers(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """When each header was looked at for the scheduler, on a disk that takes a while for each."""
    disk = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.disk
    peek, looks = disk.peek, list[tuple[float, float]]()

    def slowly(key: str) -> Any:
        start_s = time.perf_counter()
        time.sleep(READ_S)
        looks.append((start_s, time.perf_counter()))
        return peek(key)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "peek", slowly)
        yield looks


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(checkpoint("llama"), tmp_path_factory.mktemp("kv"), skip_tokenizer_init=True) as made:
        for chunk in CHUNKS:
            assert ingest(made, PREFIX, chunk)["refused_reason"] == ""
        ask(made, IDS, params("ask"))  # nothing is measured cold
        yield made


def params(rule: str, mode: str = "blend") -> dict[str, Any]:
    return {"mode": mode, "rule": rule, "ratio": 0.3, "spans": SPANS}


def add(llm: Any, name: str, ids: list[int], wanted: dict[str, Any] | None, max_tokens: int) -> None:
    from vllm import SamplingParams

    given = {"kv_transfer_params": {"ragblend": wanted}} if wanted is not None else None
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=given)
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)


def stream_beside(llm: Any, ids: list[int], wanted: dict[str, Any], name: str) -> tuple[list[float], Any]:
    """When a stream got its tokens, from the moment another request came until that had ended; and its output."""
    other, running = f"stream-{name}", llm.llm_engine
    add(llm, other, PLAIN, None, max_tokens=1000)
    for _ in range(5):
        running.step()
    add(llm, name, ids, wanted, max_tokens=8)
    times_s, answer = [time.perf_counter()], None
    while answer is None:
        for output in running.step():
            if output.request_id == other:
                assert not output.finished, "the stream ended before the blend"
                times_s.append(time.perf_counter())
                time.sleep(0.002)  # a model that takes some time
            elif output.finished:
                answer = output
    running.abort_request([other])
    while running.has_unfinished_requests():
        running.step()
    return times_s, answer


def assert_went_on(times_s: list[float], reads: list[tuple[float, float]]) -> None:
    """The stream got tokens during the reads (a machine that others use may take the time of some), and never waited
    for more than a few of them."""
    alive = sum(any(start_s < moment < end_s for moment in times_s) for start_s, end_s in reads)
    assert alive >= 0.6 * len(reads), "the stream stood still while KV was read"
    assert max(later - earlier for earlier, later in itertools.pairwise(times_s)) < 4 * READ_S


@pytest.mark.parametrize("rule", ["cacheblend", "ask"])
def test_a_stream_goes_on_while_a_blend_beside_it_is_read_from_a_slow_store(llm, rule, monkeypatch):
    held = ask(llm, IDS, params(rule))
    with slow_disk(monkeypatch) as reads:
        times_s, answer = stream_beside(llm, IDS, params(rule), f"blend-{rule}")
    assert len(reads) == NUM_LAYERS * len(CHUNKS)
    assert_went_on(times_s, reads)
    found, expected = report_of(answer), report_of(held)
    assert tokens(answer) == tokens(held)
    assert found["num_recomputed_tokens"] == expected["num_recomputed_tokens"]
    assert found["num_chunk_hits"] == len(CHUNKS)
    assert found["stall_s"] > 4 * READ_S


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_a_stream_goes_on_while_chunks_are_looked_up_on_a_slow_disk(llm, mode, monkeypatch):
    held = ask(llm, IDS, params("ask", mode))
    with slow_headers(llm, monkeypatch) as looks:
        times_s, answer = stream_beside(llm, IDS, params("ask", mode), f"headers-{mode}")
    assert len(looks) >= len(CHUNKS)
    assert_went_on(times_s, looks)
    assert tokens(answer) == tokens(held)
    assert report_of(answer)["num_chunk_hits"] == len(CHUNKS)


def test_a_request_that_ends_while_it_is_looked_up_holds_nobody_up(llm, monkeypatch):
    running = llm.llm_engine
    with slow_headers(llm, monkeypatch):
        add(llm, "unsought", IDS, params("ask"), max_tokens=4)
        running.step()
        start_s = time.perf_counter()
        running.abort_request(["unsought"])
        assert tokens(ask(llm, PLAIN, max_tokens=4))
        assert time.perf_counter() - start_s < READ_S


def test_a_stream_goes_on_while_an_ingestion_beside_it_reads_what_stands_before(llm, monkeypatch):
    ids = [*IDS[:106], *random_ids(20, 77)]
    wanted = {"mode": "ingest", "context": "similar", "spans": [*SPANS, [106, 126]]}
    with slow_disk(monkeypatch) as reads:
        times_s, answer = stream_beside(llm, [*ids, 7], wanted, "ingest")
    assert len(reads) >= NUM_LAYERS * len(CHUNKS)
    assert_went_on(times_s, reads)
    assert report_of(answer)["refused_reason"] == ""


def test_damage_met_while_others_go_on_starts_the_blend_again_without_the_chunk(llm, monkeypatch):
    with slow_disk(monkeypatch, damaged_at=3) as reads:
        times_s, answer = stream_beside(llm, IDS, params("ask"), "damaged")
    assert_went_on(times_s, reads)
    assert (report_of(answer)["num_chunk_hits"], report_of(answer)["num_damaged_entries"]) == (1, 1)


def test_a_request_that_ends_while_it_is_read_holds_nobody_up(llm, monkeypatch):
    running = llm.llm_engine
    with slow_disk(monkeypatch):
        add(llm, "leaves", IDS, params("ask"), max_tokens=4)
        while not connector_worker()._jobs:
            running.step()
        for _ in range(3):
            running.step()
        start_s = time.perf_counter()
        running.abort_request(["leaves"])
        for _ in range(3):
            running.step()
        assert time.perf_counter() - start_s < READ_S
    assert connector_worker()._jobs == []
    assert tokens(ask(llm, PLAIN, max_tokens=4))


def test_an_engine_with_nothing_else_to_do_does_not_spin(llm, monkeypatch):
    running, num_steps = llm.llm_engine, 0
    with slow_disk(monkeypatch) as reads:
        add(llm, "alone", IDS, params("ask"), max_tokens=2)
        while running.has_unfinished_requests():
            running.step()
            num_steps += 1
    read_s = sum(end_s - start_s for start_s, end_s in reads)
    assert num_steps < 250 * read_s


def test_an_engine_that_only_waits_for_a_lookup_does_not_spin(llm, monkeypatch):
    running, num_steps = llm.llm_engine, 0
    with slow_headers(llm, monkeypatch) as looks:
        add(llm, "sought", IDS, params("ask"), max_tokens=1)
        while running.has_unfinished_requests():
            running.step()
            num_steps += 1
    assert num_steps < 250 * sum(end_s - start_s for start_s, end_s in looks)


@pytest.mark.parametrize("mode", ["blend", "reuse"])
def test_what_a_request_held_is_free_when_it_ends_and_not_at_the_next_garbage_collection(llm, monkeypatch, mode):
    with slow_disk(monkeypatch):
        gc.disable()
        try:
            ask(llm, IDS, {"mode": mode, "spans": SPANS})
            left = [type(each).__name__ for each in gc.get_objects() if isinstance(each, PagedKV | PagedSource)]
        finally:
            gc.enable()
    assert left == []
