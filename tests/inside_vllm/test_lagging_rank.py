"""Two ranks of which one reads its KV slowly, or alone meets damage: they place the same layers in the same step.

A rank that went on alone would leave the other waiting in an all-reduce, or add numbers of different rows.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import PREFIX, ask, ask_all, engine, ingest, random_ids, report, tokens

pytestmark = pytest.mark.timeout(900)  # each rank imports vLLM

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
PLAIN = random_ids(12, 9)
READ_S = 0.1


def params(rule: str, mode: str = "blend") -> dict[str, Any]:
    return {"mode": mode, "rule": rule, "ratio": 0.3}


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    options = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "worker_extension_cls": "slow_reads.LagExtension",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with engine(checkpoint("llama"), tmp_path_factory.mktemp("kv"), **options) as made:
            for chunk in CHUNKS:
                assert ingest(made, PREFIX, chunk)["refused_reason"] == ""
            yield made


def first_logprobs(output: Any) -> dict[int, float]:
    return {id: each.logprob for id, each in output.outputs[0].logprobs[0].items()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rule", ["cacheblend", "ask"])
def test_one_slow_rank_changes_nothing_and_another_request_ends_meanwhile(llm, rule, rank):
    assert sorted(llm.collective_rpc("lag", args=(-1, 0.0))) == [0, 1]
    even, plain = ask_all(llm, [(IDS, params(rule)), (PLAIN, None)])
    llm.collective_rpc("lag", args=(rank, READ_S))
    lagging, beside = ask_all(llm, [(IDS, params(rule)), (PLAIN, None)])
    assert (tokens(lagging), tokens(beside)) == (tokens(even), tokens(plain))
    assert first_logprobs(lagging) == pytest.approx(first_logprobs(even), abs=1e-4)
    found, expected = report(lagging), report(even)
    assert found["num_recomputed_tokens"] == expected["num_recomputed_tokens"]
    assert (found["num_chunk_hits"], expected["num_chunk_hits"]) == (2, 2)
    assert found["stall_s"] > 2 * READ_S, "the slow rank was not slow, or the other did not wait for it"


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_one_rank_meets_is_a_miss_on_all(llm, rank):
    llm.collective_rpc("lag", args=(rank, READ_S / 4, len(CHUNKS[0]), 3))
    damaged = ask(llm, IDS, params("cacheblend"))
    assert (report(damaged)["num_chunk_hits"], report(damaged)["num_damaged_entries"]) == (1, 1)
    llm.collective_rpc("lag", args=(-1, 0.0))
    assert tokens(ask(llm, PLAIN, max_tokens=4))
