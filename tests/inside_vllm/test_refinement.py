"""When vLLM's requests are refined, and what that changes: one request that is alone, its own blocks, nothing else."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import (
    PREFIX,
    add,
    ask,
    assert_same_answer,
    connector_scheduler,
    connector_worker,
    engine,
    ingest,
    make_known,
    random_ids,
    report,
    tokens,
    watch_counts,
)
from refined import assert_full_prefill_follows, kv_in_blocks, recorded_refinements
from test_blend import CHUNKS, TOLERANCE, patchy_prompt

from ragblend.engine.vllm.worker_side import worker as vllm_worker

STEPS = 8
QUESTION, OTHER, PLAIN = random_ids(40, 4), random_ids(41, 5), random_ids(12, 9)


def refining(refine_ratio: float = 1.0, ratio: float = 0.1) -> dict[str, Any]:
    """Parameters of a request that is refined."""
    return {"mode": "blend", "rule": "ask", "ratio": ratio, "refine_ratio": refine_ratio}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def llm(checkpoint, store):
    """An engine that schedules a step once it knows the token of the one before, with the chunks stored."""
    with engine(checkpoint("llama"), store, async_scheduling=False) as made:
        for chunk in CHUNKS:
            assert ingest(made, PREFIX, chunk)["refused_reason"] == ""
        yield made


@pytest.fixture(scope="module")
def turn(checkpoint, llm, store) -> list[int]:
    """A turn of a conversation: its chunks, its question, and what the chat template writes after it."""
    tail = make_known(store, checkpoint("llama"), []).tail_ids
    return [*PREFIX, *(token for chunk in CHUNKS for token in chunk), *QUESTION, *tail]


def run(llm: Any, until: Any = None) -> dict[str, Any]:
    """Step until no request is left, or `until()`. Return the finished outputs by request id."""
    finished = {}
    while llm.llm_engine.has_unfinished_requests() and not (until is not None and until()):
        for output in llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def test_an_answer_is_refined_after_its_first_token(llm, turn):
    counts = watch_counts(connector_scheduler(llm.llm_engine))
    plain, answer = ask(llm, turn, refining(0.0)), ask(llm, turn, refining())
    assert (report(answer)["refined_after"], report(plain)["refined_after"]) == (1, None)
    assert report(answer)["refine_s"] > 0
    assert tokens(answer)[0] == tokens(plain)[0]
    assert_full_prefill_follows(llm, turn, answer, TOLERANCE)
    assert report(answer)["num_recomputed_tokens"] == report(plain)["num_recomputed_tokens"]
    assert counts.data["refined_tokens"] == report(answer)["num_refined_tokens"] > 0


@pytest.mark.parametrize("refine_ratio", [0.0, 0.1])
def test_without_a_higher_ratio_nothing_is_kept_and_nothing_runs(llm, turn, refine_ratio):
    with recorded_refinements() as refinements:
        add(llm, f"off {refine_ratio}", turn, refining(refine_ratio))
        run(llm, until=lambda: bool(scheduler_of(llm).running))
        assert connector_worker()._fused == {}
        run(llm)
    assert refinements == []


def test_answers_of_one_and_two_tokens_are_not_refined(llm, turn):
    assert [report(ask(llm, turn, refining(), count))["refined_after"] for count in (1, 2, 3)] == [None, None, 1]
    assert connector_worker()._fused == {} or run(llm) == {}


def test_a_request_is_refined_once_it_is_alone(llm, turn):
    llm.reset_prefix_cache()
    add(llm, "other", PLAIN, None, max_tokens=5)
    add(llm, "asked", turn, refining(), max_tokens=12)
    with recorded_refinements() as refinements:
        outputs = run(llm)
    after = report(outputs["asked"])["refined_after"]
    assert [len(refinements), after > 1] == [1, True]
    assert len(refinements[0].job.answer_ids) == after
    assert tokens(outputs["other"]) == tokens(ask(llm, PLAIN, max_tokens=5))
    found = tokens(outputs["asked"])
    assert found[after:] == tokens(ask(llm, [*turn, *found[:after]], max_tokens=12 - after))


def test_no_request_is_refined_beside_others_whose_answers_stay_the_same(llm, turn):
    requests = {"asked": (turn, refining()), "plain": (PLAIN, None), "fork": ([*turn, 7], refining())}

    def answers(refine_ratio: float) -> dict[str, list[int]]:
        llm.reset_prefix_cache()
        for name, (ids, params) in requests.items():
            add(llm, f"{name} {refine_ratio}", ids, params and refining(refine_ratio))
        with recorded_refinements() as refinements:
            outputs = run(llm)
        assert refinements == []
        return {name: tokens(outputs[f"{name} {refine_ratio}"]) for name in requests}

    assert answers(1.0) == answers(0.0)


def test_blocks_with_another_reader_are_not_written(llm, turn):
    """Of the request's own blocks, those before the chunks may be shared; the others have one reader, or stay."""
    llm.reset_prefix_cache()
    add(llm, "shared", turn, refining(), max_tokens=STEPS)
    run(llm, until=lambda: bool(scheduler_of(llm).running))
    manager = scheduler_of(llm).kv_cache_manager
    (request,) = scheduler_of(llm).running
    blocks = list(manager.get_blocks(request.request_id).blocks[0])
    manager.block_pool.touch(blocks[3:4])
    with recorded_refinements() as refinements:
        for _ in range(3):
            llm.llm_engine.step()
        assert refinements == []
        manager.block_pool.free_blocks(blocks[3:4])
        outputs = run(llm)
    assert report(outputs["shared"])["refined_after"] == len(refinements[0].job.answer_ids) >= 3


def test_a_refinement_writes_to_its_own_stale_blocks_alone(llm, turn, monkeypatch):
    layers = connector_worker().layers
    everything = range(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    refine, written = vllm_worker.refine, []

    def comparing(*args: Any) -> Any:
        before = kv_in_blocks(layers, everything, len(everything) * layers.block_size)
        result = refine(*args)
        after = kv_in_blocks(layers, everything, len(everything) * layers.block_size)
        changed = set()
        for mine, theirs in zip(before, after, strict=True):
            rows = (mine.values != theirs.values).any(-1).any(0).nonzero()[:, 0]
            changed.update((rows // layers.block_size).tolist())
        written.append((changed, args[3].block_ids, args[2].placements))
        return result

    monkeypatch.setattr(vllm_worker, "refine", comparing)
    for prompt in (turn, patchy_prompt().ids):
        ask(llm, prompt, refining(0.3))
    for changed, block_ids, placements in written:
        first = next(each.start for each in placements if not each.exact) // layers.block_size
        assert changed
        assert changed <= set(block_ids[first:])


def test_the_next_turn_finds_the_refined_blocks(llm, turn):
    answer = ask(llm, turn, refining(), max_tokens=40)
    second = [*turn, *tokens(answer), *OTHER]
    found = ask(llm, second, refining(), forgets=False)
    assert report(found)["num_prefix_tokens"] >= len(turn)
    assert report(found)["refined_after"] is None  # vLLM had all of its chunks
    assert_same_answer(found, ask(llm, second), TOLERANCE)


def test_the_next_turn_is_refined_with_its_own_chunks(llm, turn):
    answer = ask(llm, turn, refining(), max_tokens=40)
    second = [*turn, *tokens(answer), *CHUNKS[1], *CHUNKS[2], *OTHER]
    found = ask(llm, second, refining(), forgets=False)
    assert report(found)["num_prefix_tokens"] >= len(turn)
    assert 0 < report(found)["num_refined_tokens"] <= len(CHUNKS[1]) + len(CHUNKS[2])
    assert_full_prefill_follows(llm, second, found, TOLERANCE)


def test_prompts_with_another_refine_ratio_do_not_find_the_refined_blocks(llm, turn):
    ask(llm, turn, refining(), max_tokens=40)
    for other in (refining(0.0), refining(0.5)):
        assert report(ask(llm, turn, other, forgets=False))["num_prefix_tokens"] <= len(PREFIX)
    assert report(ask(llm, turn, refining(), forgets=False))["num_prefix_tokens"] > len(PREFIX)


@pytest.mark.parametrize("is_evicted", [True, False])
def test_a_preempted_request_goes_on_from_refined_kv(llm, turn, is_evicted):
    """If its blocks are evicted it is blended and refined again, else it finds the refined ones."""
    llm.reset_prefix_cache()
    name = f"preempted {is_evicted}"
    add(llm, name, turn, refining(), max_tokens=12)
    with recorded_refinements() as refinements:
        run(llm, until=lambda: bool(refinements))
        scheduler = scheduler_of(llm)
        scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        if is_evicted:
            assert scheduler.kv_cache_manager.reset_prefix_cache()
        output = run(llm)[name]
    assert len(refinements) == 1 + is_evicted
    after, found = report(output)["refined_after"], tokens(output)
    assert after == len(refinements[-1].job.answer_ids)
    assert found[after:] == tokens(ask(llm, [*turn, *found[:after]], max_tokens=12 - after))


def test_an_aborted_request_leaves_nothing_of_its_plan(llm, turn):
    llm.reset_prefix_cache()
    add(llm, "aborted", turn, refining())
    run(llm, until=lambda: bool(scheduler_of(llm).running))
    assert len(connector_worker()._fused) == 1
    llm.llm_engine.abort_request(["aborted"])
    ask(llm, PLAIN)
    assert connector_worker()._fused == {}


def test_a_failing_refinement_leaves_the_answer_as_it_is(llm, turn, monkeypatch):
    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(vllm_worker, "refine", failing)
    assert_same_answer(ask(llm, turn, refining()), ask(llm, turn, refining(0.0)), 0.0)


def test_a_refinement_takes_at_most_one_slice(llm, turn, monkeypatch):
    chunk_tokens = sum(map(len, CHUNKS))
    worker = connector_worker()
    counts = []
    for slice_tokens in (1000, 180, 50):
        monkeypatch.setattr(worker, "_slice", slice_tokens * worker.layers.num_layers)
        counts.append(report(ask(llm, turn, refining()))["num_refined_tokens"])
    assert counts[0] == chunk_tokens - len(CHUNKS[0])  # the first one is exact
    assert counts[0] > counts[1] > counts[2] == 0
