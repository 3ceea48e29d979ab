"""Many requests at once, preemption, chunked prefill, prefix caching, aborts, failing stores: never a wrong token."""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import (
    PREFIX,
    add,
    ask,
    ask_all,
    assert_same_answer,
    connector_worker,
    engine,
    free_blocks,
    ingest,
    make_known,
    random_ids,
    recorded_selections,
    report,
    tokens,
)

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.vllm.worker_side.paged import PagedKV

STORED = [random_ids(30 + 7 * index, 100 + index) for index in range(6)]
UNSTORED = [random_ids(40, 200 + index) for index in range(2)]


def prompt_of(chunks: list[list[int]], question: int) -> list[int]:
    return [*PREFIX, *(token for chunk in chunks for token in chunk), *random_ids(6, 300 + question)]


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory):
    """A store with the six chunks, to be copied."""
    path = tmp_path_factory.mktemp("kv")
    with engine(checkpoint("llama"), path, skip_tokenizer_init=True) as llm:
        for chunk in STORED:
            ingest(llm, PREFIX, chunk)
        make_known(path, checkpoint("llama"), UNSTORED)
        assert len(list(DiskStore(path).keys())) == 6
    return path


def random_requests(count: int, seed: int) -> list[tuple[list[int], dict[str, Any] | None]]:
    """A third plain; random subsets and orders; some chunks never stored."""
    dice = random.Random(seed)
    requests = []
    for index in range(count):
        chunks = dice.sample(STORED + UNSTORED, dice.randint(1, 5))
        ids = prompt_of(chunks, dice.randrange(4))
        params = {
            "mode": dice.choice(["blend", "blend", "blend", "reuse"]),
            "rule": dice.choice(["auto", "ask", "cacheblend_k", "cacheblend", "random"]),
            "ratio": dice.choice([0.05, 0.15, 0.5]),
        }
        requests.append((ids, None if index % 3 == 0 else params))
    return requests


def assert_same_as_one_by_one(llm: Any, requests: list[Any], max_tokens: int = 6) -> None:
    free = free_blocks(llm)
    together = ask_all(llm, requests, max_tokens, None)
    assert free_blocks(llm) == free
    for (ids, params), output in zip(requests, together, strict=True):
        if params is not None and report(output)["mode"] == "prefix":
            # vLLM's prefix cache had the beginning of the prompt, from a plain request. vLLM then computed the rest.
            params = {"mode": "full"}
        assert tokens(ask(llm, ids, params, max_tokens, None)) == tokens(output)


def test_a_hundred_mixed_requests_equal_their_one_by_one_runs(store, checkpoint):
    with engine(checkpoint("llama"), store, max_num_seqs=8, skip_tokenizer_init=True) as llm:
        connector_worker()._pass_rows = 300
        assert_same_as_one_by_one(llm, random_requests(100, 0))


def test_requests_that_arrive_together_share_passes_and_choose_what_they_choose_alone(store, checkpoint):
    requests = [request for request in random_requests(30, 4) if request[1] is not None]
    with engine(checkpoint("llama"), store, skip_tokenizer_init=True) as llm:
        connector_worker()._pass_rows = 300
        layers = connector_worker().layers
        run_layer_together, sizes = layers.run_layer_together, []
        layers.run_layer_together = lambda runs: sizes.append(len(runs)) or run_layer_together(runs)
        with recorded_selections() as together:
            outputs = ask_all(llm, requests, 6)
        assert max(sizes) > 2
        sizes.clear()
        with recorded_selections() as alone:
            for request, output in zip(requests, outputs, strict=True):
                again = ask(llm, *request, 6)
                assert report(again)["num_recomputed_tokens"] == report(output)["num_recomputed_tokens"]
                assert_same_answer(output, again, 1e-4)
        assert set(sizes) == {1}
    assert sorted(together) == sorted(alone)


def test_a_server_may_leave_requests_to_vllm_unless_they_ask(checkpoint, tmp_path):
    ids = prompt_of(STORED[:1], 0)
    with engine(checkpoint("llama"), tmp_path) as llm:
        ingest(llm, PREFIX, STORED[0])
        assert ask(llm, ids).kv_transfer_params is None
        assert report(ask(llm, ids, {"ratio": 0.2}))["mode"] == "prefix"
        assert report(ask(llm, ids, {"mode": "blend"}))["num_chunk_hits"] == 1
    with engine(checkpoint("llama"), tmp_path, skip_tokenizer_init=True) as llm:
        assert report(ask(llm, ids, {"mode": "blend"}))["num_chunk_hits"] == 1


def test_preempted_requests_are_blended_again(store, checkpoint):
    requests = random_requests(24, 1)
    options = {"max_num_seqs": 8, "kv_cache_memory_bytes": 28 * 32 * 6 * 2 * 2 * 32 * 4, "max_model_len": 512}
    with engine(checkpoint("llama"), store, skip_tokenizer_init=True, **options) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []

        def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = counting
        assert_same_as_one_by_one(llm, requests, max_tokens=60)
        assert preempted


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 256, "max_num_seqs": 8}, id="chunked", marks=pytest.mark.v2_runner),
        pytest.param({"extra": {"slice_tokens": 1, "memory_gib": 0}}, id="smallest slices"),
        pytest.param({"async_scheduling": False}, id="sync scheduling"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix caching"),
    ],
)
def test_settings_do_not_change_answers(options, store, checkpoint, answers):
    with engine(checkpoint("llama"), store, skip_tokenizer_init=True, **options) as llm:
        found = ask_all(llm, random_requests(12, 2), 6, None)
    assert [tokens(output) for output in found] == answers


@pytest.fixture(scope="module")
def answers(store, checkpoint):
    """What the default settings answer, one by one."""
    with engine(checkpoint("llama"), store, skip_tokenizer_init=True) as llm:
        return [tokens(ask(llm, *request, 6, None)) for request in random_requests(12, 2)]


@pytest.fixture
def serving(store, checkpoint, tmp_path):
    """An engine over a copy of the store that a test may break; nothing is kept in memory."""
    shutil.copytree(store, tmp_path / "kv")
    with engine(checkpoint("llama"), tmp_path / "kv", {"memory_gib": 0}, skip_tokenizer_init=True) as llm:
        yield llm, tmp_path / "kv"


def entries(store: Path) -> list[Path]:
    return sorted(store.glob("kv/??/*.safetensors"))


def damage(store: Path, chunk: list[int]) -> None:
    """Change the last layer of a stored chunk, which is read after the others were fused."""
    headers = {path: DiskStore(store).header(path.stem) for path in entries(store)}
    (path,) = (path for path, header in headers.items() if header is not None and header.token_ids == tuple(chunk))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_plain_request_is_never_changed_by_a_blended_one(serving):
    llm, _ = serving
    ids = prompt_of(STORED[:4], 0)
    params = {"mode": "reuse"}
    blended = ask(llm, ids, params)
    plain = ask(llm, ids, forgets=False)
    assert plain.num_cached_tokens == 0
    assert tokens(plain) != tokens(blended)
    assert tokens(ask(llm, ids, {"mode": "full"}, forgets=False)) == tokens(plain)
    prefix = ask(llm, ids, {"mode": "prefix"}, forgets=False)
    assert tokens(prefix) == tokens(plain)
    assert prefix.num_cached_tokens >= 128  # vLLM's own exact cache still works
    assert tokens(ask(llm, ids, params)) == tokens(blended)


def test_a_damaged_file_is_a_miss(serving):
    llm, store = serving
    ids = prompt_of(STORED[:4], 0)
    damage(store, STORED[1])
    damaged = ask(llm, ids, {"mode": "blend", "ratio": 0.15})
    assert report(damaged)["num_damaged_entries"] == 1
    assert [chunk["prefix_match"] for chunk in report(damaged)["chunks"]] == ["exact", None, "exact", "exact"]
    again = ask(llm, ids, {"mode": "blend", "ratio": 0.15})
    assert tokens(again) == tokens(damaged)
    assert report(again)["num_damaged_entries"] == 0  # quarantined, so that it is a plain miss now
    assert tokens(ask(llm, ids, {"mode": "blend", "ratio": 1.0})) == tokens(ask(llm, ids))


def test_a_damaged_file_starts_only_its_own_requests_again(serving):
    llm, store = serving
    prompts = [prompt_of(chunks, 1) for chunks in (STORED[:3], STORED[3:], STORED[1:4])]
    asked = [(ids, {"mode": "blend", "ratio": 0.1}) for ids in prompts]
    untouched = tokens(ask(llm, *asked[1]))
    damage(store, STORED[1])
    together = ask_all(llm, asked)
    reports = [report(output) for output in together]
    # The first or the third reads the file; the other one may start when the file is already quarantined.
    num_damaged = [each["num_damaged_entries"] for each in reports]
    assert num_damaged[1] == 0
    assert num_damaged[0] + num_damaged[2] >= 1
    assert [each["num_chunk_hits"] for each in reports] == [2, len(STORED) - 3, 2]
    assert tokens(together[1]) == untouched
    assert [tokens(ask(llm, *each)) for each in asked] == [tokens(output) for output in together]


def test_a_foreign_file_under_the_right_name_is_a_miss(serving):
    llm, store = serving
    first, second = entries(store)[:2]
    shutil.copy(first, second)
    ids = prompt_of(STORED, 0)
    assert report(ask(llm, ids, {"mode": "reuse"}))["num_chunk_hits"] == 5
    assert tokens(ask(llm, ids, {"mode": "blend", "ratio": 1.0})) == tokens(ask(llm, ids))


@pytest.mark.parametrize("how", ["removed", "unreadable"])
def test_the_store_pulled_away_while_serving(how, serving):
    llm, store = serving
    ids = prompt_of(STORED[:4], 0)
    plain, free = tokens(ask(llm, ids)), free_blocks(llm)
    worker = connector_worker()
    run_slice, pulled = worker.run_slice, []

    def pulling(*args: Any) -> Any:
        if worker._jobs and not pulled:  # found by the scheduler, gone before the worker reads
            pulled.append(shutil.rmtree(store))
            if how == "unreadable":  # no longer a directory, also for root
                store.write_bytes(b"")
        return run_slice(*args)

    worker.run_slice = pulling
    output = ask(llm, ids, {"mode": "reuse"})
    assert pulled
    assert tokens(output) == plain
    assert report(output)["num_chunk_hits"] == 0
    assert free_blocks(llm) == free
    others = random_requests(8, 4)
    found = [tokens(answer) for answer in ask_all(llm, others, 6, None)]
    assert found == [tokens(ask(llm, other, None, 6, None)) for other, _ in others]  # full computes, all of them
    ingested = {"mode": "ingest", "span": [len(PREFIX), len(PREFIX) + 20]}
    lost = report(ask(llm, [*PREFIX, *random_ids(20, 77), 7], ingested, max_tokens=1))
    assert (how == "removed") == (lost["refused_reason"] == "")  # a directory is made again, a file stays
    assert how == "removed" or "not stored" in lost["refused_reason"]
    assert free_blocks(llm) == free


def test_a_failing_blend_is_computed_by_vllm(serving):
    llm, _ = serving
    ids = prompt_of(STORED[:4], 0)
    plain, free = tokens(ask(llm, ids)), free_blocks(llm)
    worker = connector_worker()
    worker._lookup = lambda *args: 1 / 0
    output = ask(llm, ids, {"mode": "reuse"})
    assert tokens(output) == plain
    assert "ZeroDivisionError" in report(output)["refused_reason"]
    assert free_blocks(llm) == free


def test_vllm_computes_every_request_of_a_failed_pass(serving):
    llm, _ = serving
    prompts = [prompt_of(STORED[:4], question) for question in range(3)]
    plain, free = [tokens(ask(llm, ids)) for ids in prompts], free_blocks(llm)
    layers = connector_worker().layers
    layers.run_layer_together = lambda runs: [layers.run_layer(*run) for run in runs] if len(runs) == 1 else 1 / 0
    asked = [(ids, {"mode": "blend", "ratio": 0.1}) for ids in prompts]
    outputs = ask_all(llm, asked)
    # A job whose KV was read late, as on a busy machine, has a separate pass, which does not fail.
    failed = [place for place, output in enumerate(outputs) if report(output)["refused_reason"]]
    assert len(failed) >= 2
    for place in failed:
        assert tokens(outputs[place]) == plain[place]
        assert "ZeroDivisionError" in report(outputs[place])["refused_reason"]
    assert report(ask(llm, *asked[0]))["refused_reason"] == ""
    assert free_blocks(llm) == free
    assert not connector_worker()._pass


def test_malformed_parameters_are_answered_by_ordinary_prefill(serving):
    llm, _ = serving
    ids = prompt_of(STORED[:3], 0)
    plain = tokens(ask(llm, ids))
    # No object, a value that `parse_params` rejects (its tests have the others), no rule, and a span beyond the prompt.
    malformed: list[Any] = [7, {"mode": "guess"}, {"rule": "magic"}, {"mode": "ingest", "span": [3, 900]}]
    for params in malformed:
        output = ask(llm, ids, params)
        assert tokens(output) == plain
        assert report(output)["refused_reason"]


def test_aborted_requests_leak_no_block(store, checkpoint):
    with engine(checkpoint("llama"), store, {"slice_tokens": 1}, skip_tokenizer_init=True) as llm:
        connector_worker()._pass_rows = 300
        core, free, scratch = llm.llm_engine, free_blocks(llm), []
        for steps in (0, 1, 2, 5, 20):
            for index, (ids, params) in enumerate(random_requests(6, 3)):
                add(llm, f"{steps}-{index}", ids, params, 50)
            for _ in range(steps):
                core.step()
            scratch.append(len(alive(PagedKV)))
            core.abort_request([f"{steps}-{index}" for index in range(6)])
            while core.has_unfinished_requests():
                core.step()
        ids = prompt_of(STORED[:4], 0)
        assert tokens(ask(llm, ids, {"mode": "blend", "ratio": 1.0})) == tokens(ask(llm, ids))
        assert free_blocks(llm) == free
        assert not connector_worker()._jobs
        assert any(scratch)
        assert not alive(PagedKV)  # what a question was asked over goes with its request


def alive(kind: type) -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is kind]


def test_a_blend_is_cut_into_slices(store, checkpoint):
    with engine(checkpoint("llama"), store, {"slice_tokens": 20}, skip_tokenizer_init=True) as llm:
        worker = connector_worker()
        run_slice, left = worker.run_slice, []

        def counting(*args: Any) -> Any:
            finished = run_slice(*args)
            left.append(len(worker._jobs))
            return finished

        worker.run_slice = counting
        ids = prompt_of(STORED, 0)
        ask(llm, ids, {"mode": "blend", "ratio": 0.5})
        assert sum(left) >= 3  # steps after which the blend was not done yet
