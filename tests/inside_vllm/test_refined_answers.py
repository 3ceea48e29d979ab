"""Refined answers of whole engines: a server's setting, and the transformers engine's tokens."""

from __future__ import annotations

import pytest
from harness import PREFIX, SMALL, ask, engine, ingest, report
from test_blend import CHUNKS, plain_prompt

from ragblend import Prompt, load_engine


def test_a_servers_refine_ratio_is_that_of_requests_that_name_none(checkpoint, tmp_path):
    options = {"async_scheduling": False, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    with engine(checkpoint("llama"), tmp_path, {"mode": "blend", "refine_ratio": 0.5}, **options) as served:
        for chunk in CHUNKS:
            assert ingest(served, PREFIX, chunk)["refused_reason"] == ""
        sent = (None, {"ratio": 0.1}, {"refine_ratio": 0.0})
        reports = [report(ask(served, plain_prompt().ids, params)) for params in sent]
    assert [each["refined_after"] for each in reports] == [1, 1, None]
    assert reports[0]["num_refined_tokens"] > reports[0]["num_recomputed_tokens"]


TEXTS = [
    "the theory of the first chunk answers the question",
    "another chunk, and the theory of that question",
    "third",
]


@pytest.fixture(scope="module")
def both(checkpoint, tmp_path_factory):
    """vLLM in this process as an engine, and the transformers engine over the same store."""
    store, path = tmp_path_factory.mktemp("both"), str(checkpoint("llama"))
    options = SMALL | {"async_scheduling": False}
    with load_engine(path, store, backend="vllm", vllm_options=options, on_miss="inline") as vllm:
        for text in TEXTS:
            vllm.precompute(text)
        with load_engine(path, store, on_miss="inline") as transformers:
            yield vllm, transformers


@pytest.mark.parametrize("refine_ratio", [0.3, 0.6, 1.0])
def test_answers_are_those_of_the_transformers_engine_token_by_token(both, refine_ratio):
    prompt, options = Prompt(TEXTS, "what is that theory?"), {"rule": "ask", "recompute_ratio": 0.1, "max_tokens": 24}
    ours, theirs = (each.generate(prompt, refine_ratio=refine_ratio, **options) for each in both)
    assert ours.token_ids == theirs.token_ids
    assert ours.token_ids != both[0].generate(prompt, **options).token_ids
    assert ours.report.num_refined_tokens == theirs.report.num_refined_tokens > 0
    assert (ours.report.refined_after, theirs.report.refined_after) == (1, 1)
