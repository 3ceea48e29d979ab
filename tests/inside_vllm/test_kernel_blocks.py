"""An attention kernel whose blocks are smaller than those of vLLM's cache manager."""

from harness import PREFIX, ask, engine, ingest, random_ids, report, tokens
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 75)], random_ids(9, 4)


def test_blocks_that_the_kernel_splits_are_read_as_its_own(checkpoint, tmp_path, monkeypatch):
    sizes = staticmethod(lambda kv_cache_spec=None: [32])
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)
    ids = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
    with engine(checkpoint("llama"), tmp_path, block_size=64, skip_tokenizer_init=True) as llm:  # passes its self-check
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        first = [*ids[:66], *QUESTION]  # its chunk stands where it was computed
        for asked, params, hits in ((ids, {"mode": "blend", "ratio": 1.0}, 2), (first, {"mode": "reuse"}, 1)):
            blended = ask(llm, asked, params)
            assert report(blended)["num_chunk_hits"] == hits
            assert tokens(blended) == tokens(ask(llm, asked))
