"""What is found in prompts by engines with other options: less memory, another mode for requests that name none."""

from __future__ import annotations

from harness import PREFIX, ask, ask_all, engine, free_blocks, ingest, random_ids, report, tokens

CHUNKS = [random_ids(n, n) for n in (90, 70, 110, 80)]
QUESTION, LABEL = random_ids(9, 4), random_ids(7, 6)


def test_a_server_may_leave_requests_to_vllm_unless_they_ask(checkpoint, tmp_path):
    ids = [*PREFIX, *LABEL, *CHUNKS[0], *QUESTION]
    with engine(checkpoint("llama"), tmp_path) as llm:
        ingest(llm, PREFIX, CHUNKS[0])
        assert ask(llm, ids).kv_transfer_params is None
        assert report(ask(llm, ids, {"ratio": 0.2}))["mode"] == "prefix"
        assert report(ask(llm, ids, {"mode": "blend"}))["num_chunk_hits"] == 1
    with engine(checkpoint("llama"), tmp_path, skip_tokenizer_init=True) as llm:
        assert report(ask(llm, ids, {"mode": "blend"}))["num_chunk_hits"] == 1


def test_conversations_over_little_memory_end_as_they_end_alone(checkpoint, tmp_path):
    """Preempted requests are matched and blended again, beside others of their conversation."""
    options = {"max_num_seqs": 8, "kv_cache_memory_bytes": 28 * 32 * 6 * 2 * 2 * 32 * 4, "max_model_len": 512}
    with engine(checkpoint("llama"), tmp_path, {"mode": "blend"}, **options) as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        turns = [
            [*PREFIX, *CHUNKS[place % 4], *LABEL, *CHUNKS[place // 4], *random_ids(9, place)] for place in range(8)
        ]
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []
        scheduler._preempt_request = lambda request, *more, **options: (
            preempted.append(request) or preempt(request, *more, **options)
        )
        free = free_blocks(llm)
        together = ask_all(llm, [(ids, None) for ids in turns], 60, None)
        assert preempted
        assert free_blocks(llm) == free
        assert [report(answer)["num_chunk_hits"] for answer in together] == [2] * 8
        for ids, answer in zip(turns, together, strict=True):
            assert tokens(ask(llm, ids, None, 60, None)) == tokens(answer)
