"""The same answers from two tensor-parallel ranks, and with torch.compile. Each brings processes or a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from continued import Continued
from harness import ask, engine, ingest, random_ids, report, tokens
from reference import Span

from ragblend.engine.disk import DiskStore

PREFIX, CHUNKS, QUESTION = random_ids(5, 1), [random_ids(n, n) for n in (61, 40, 75)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *CHUNKS[2], *QUESTION]
SPANS = [[5, 66], [66, 106], [106, 181]]


def assert_exact(llm: Any, stock: Callable[[str], Any]) -> None:
    """Ingest, then compare with vLLM's own prefill and with the independent CacheBlend."""
    for chunk in CHUNKS:
        assert ingest(llm, PREFIX, chunk)["refused_reason"] is None
    whole = ask(llm, IDS, {"mode": "blend", "ratio": 1.0, "spans": SPANS})
    assert report(whole)["num_chunk_hits"] == 3
    assert tokens(whole) == tokens(ask(llm, IDS))
    parts = [Span(PREFIX), *(Span(chunk, True, chunk is CHUNKS[0], PREFIX) for chunk in CHUNKS), Span(QUESTION)]
    reference = Continued(stock("llama"))
    for rule, ratio in (("cacheblend", 0.0), ("cacheblend", 0.15), ("cacheblend_k", 0.15), ("cacheblend", 0.5)):
        output = ask(llm, IDS, {"mode": "blend", "rule": rule, "ratio": ratio, "spans": SPANS})
        reference.blended(parts, ratio, rule, [])
        answer = tokens(output)
        for step, logprobs in enumerate(output.outputs[0].logprobs):
            truth = reference.logprobs(step, answer)
            for token, entry in logprobs.items():
                assert entry.logprob == pytest.approx(float(truth[token]), abs=1e-3)


def test_two_tensor_parallel_ranks(checkpoint: Callable[[str], Path], stock, tmp_path):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "skip_tokenizer_init": True}
    with engine(checkpoint("llama"), tmp_path / "two", **options) as llm:
        assert_exact(llm, stock)
    with engine(checkpoint("llama"), tmp_path / "one", skip_tokenizer_init=True) as llm:
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
    two, one = DiskStore(tmp_path / "two"), DiskStore(tmp_path / "one")
    assert sorted(two.keys()) == sorted(one.keys())
    for key in two.keys():  # noqa: SIM118 (a store is not a dict)
        for layer in range(6):
            for mine, other in zip(two.get(key).layer(layer), one.get(key).layer(layer), strict=True):
                assert mine.shape == other.shape
                assert (mine - other).abs().max() <= 1e-5 * other.abs().max()  # float32: rounding alone


def test_torch_compile(checkpoint: Callable[[str], Path], stock, tmp_path):
    with engine(checkpoint("llama"), tmp_path, enforce_eager=False, skip_tokenizer_init=True) as llm:
        assert_exact(llm, stock)
