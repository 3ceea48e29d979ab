"""Chunks of requests in vLLM's waiting queue are read from the disk while it is idle."""

from __future__ import annotations

from typing import Any

from harness import PREFIX, ask, connector_worker, engine, ingest, random_ids, report, tokens

QUESTION = random_ids(6, 300)
STORED = [random_ids(40, 100 + index) for index in range(2)]


def blending() -> tuple[list[int], dict[str, Any]]:
    return [*PREFIX, *STORED[0], *STORED[1], *QUESTION], {"mode": "blend", "rule": "cacheblend_k"}


def test_chunks_of_a_request_that_waits_for_its_turn_are_read_meanwhile(checkpoint, tmp_path, monkeypatch):
    from vllm import SamplingParams

    monkeypatch.setattr("ragblend.engine.vllm.scheduler.PATIENCE_S", 60.0)  # its chunks are known before it waits
    with engine(checkpoint("llama"), tmp_path, max_num_seqs=1, skip_tokenizer_init=True) as llm:
        for chunk in STORED:
            ingest(llm, PREFIX, chunk)
        at_once = tokens(ask(llm, *blending()))
        memory, disk = connector_worker()._store.tiers
        for key in list(memory.keys()):
            memory.delete(key)
        llm.reset_prefix_cache()  # it keeps what was blended
        core, done = llm.llm_engine, {}
        ids, params = blending()
        long = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        core.add_request("long", {"prompt_token_ids": random_ids(8, 9)}, long)
        core.step()  # it has the only place there is
        short = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, extra_args={"kv_transfer_params": {"ragblend": params}}
        )
        core.add_request("waiting", {"prompt_token_ids": ids}, short)
        while len(list(memory.keys())) < 2:
            assert not any(output.finished for output in core.step())
        hits = disk.counters.num_hits
        core.abort_request(["long"])
        while "waiting" not in done:
            done.update({output.request_id: output for output in core.step() if output.finished})
        assert tokens(done["waiting"]) == at_once
        assert report(done["waiting"])["num_chunk_hits"] == 2
        assert disk.counters.num_hits == hits
