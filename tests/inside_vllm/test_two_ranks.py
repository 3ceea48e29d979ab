"""Tensor parallelism through `load_engine`: engines in this process whose ranks are processes that come and go."""

import multiprocessing
import threading

import pytest
from demo_texts import QUESTION, A, B
from harness import SMALL

from ragblend import Prompt, load_engine
from ragblend.precompute import precompute_documents

TEXTS = [A, B]
ASKED = Prompt(TEXTS, QUESTION)
OPTIONS = SMALL | {"tensor_parallel_size": 2}


@pytest.mark.timeout(1200)  # each rank imports vLLM
def test_an_engine_of_two_ranks_ends_without_traces(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    answers = []
    for num_new in (2, 0):  # the second engine finds on the disk what the first one stored
        before = set(threading.enumerate())
        with load_engine("demo", tmp_path, backend="vllm", vllm_options=OPTIONS, on_miss="inline") as engine:
            assert precompute_documents(TEXTS, engine).num_new_kv == num_new
            answers.append(engine.generate(ASKED, rule="cacheblend_k", max_tokens=8))
            assert len(multiprocessing.active_children()) == 2
        assert multiprocessing.active_children() == []
        assert {thread.name for thread in set(threading.enumerate()) - before} <= {"MultiprocWorkerMonitor"}
    with load_engine("demo", tmp_path, on_miss="inline") as alone:
        answers.append(alone.generate(ASKED, rule="cacheblend_k", max_tokens=8))
    assert [answer.token_ids for answer in answers] == [answers[-1].token_ids] * 3
    assert [answer.report.num_chunk_hits for answer in answers] == [2, 2, 2]
    assert len({answer.report.num_recomputed_tokens for answer in answers}) == 1
