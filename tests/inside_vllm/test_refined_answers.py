"""Refined answers of whole engines: a server's setting, and the transformers engine's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from harness import PREFIX, SMALL, ask, engine, ingest, report
from refined import assert_full_prefill_follows
from test_blend import CHUNKS, TOLERANCE, plain_prompt

from ragblend import Prompt, load_engine


def test_a_servers_refine_ratio_is_that_of_requests_that_name_none(checkpoint, tmp_path):
    ids, options = plain_prompt().ids, {"async_scheduling": False, "enable_prefix_caching": False}
    with engine(checkpoint("llama"), tmp_path, {"mode": "blend", "refine_ratio": 1.0}, **options) as served:
        for chunk in CHUNKS:
            assert ingest(served, PREFIX, chunk)["refused_reason"] == ""
        answers = [ask(served, ids, params) for params in (None, {"ratio": 0.1}, {"refine_ratio": 0.0})]
        assert_full_prefill_follows(served, ids, answers[1], TOLERANCE)
    assert [report(each)["refined_after"] for each in answers] == [1, 1, None]


@pytest.mark.v2_runner
def test_asynchronous_scheduling_refines_after_the_second_token(checkpoint, tmp_path, monkeypatch):
    """The scheduler knows a token one step later. On a CPU vLLM itself always schedules synchronously."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def asynchronous(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(asynchronous))
    ids = plain_prompt().ids
    with engine(checkpoint("llama"), tmp_path) as served:
        for chunk in CHUNKS:
            assert ingest(served, PREFIX, chunk)["refused_reason"] == ""
        answer = ask(served, ids, {"mode": "blend", "rule": "ask", "ratio": 0.1, "refine_ratio": 1.0})
        assert_full_prefill_follows(served, ids, answer, TOLERANCE)
    assert report(answer)["refined_after"] == 2


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
