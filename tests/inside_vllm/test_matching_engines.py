"""What is found in prompts by engines with other options: less memory, another mode for requests that name none."""

from harness import PREFIX, ask, engine, ingest, random_ids, report

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
