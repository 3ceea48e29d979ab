"""Seeded requests whose prompts vLLM computes in several steps, on a CPU: each keeps its tokens, and vLLM runs on."""

from __future__ import annotations

from typing import Any

import pytest
from harness import engine, random_ids, tokens

pytestmark = pytest.mark.timeout(600)
PROMPTS = [random_ids(length, length) for length in (300, 50, 120)]


def sampled(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Answers to prompts that are given at once, each with its own seed."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=1.0, seed=len(ids), max_tokens=6, ignore_eos=True) for ids in prompts]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [tokens(output) for output in outputs]


def test_a_seed_gives_the_same_tokens_however_the_prompt_is_divided(checkpoint, tmp_path):
    options = {"max_num_seqs": 4, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    with engine(checkpoint("llama"), tmp_path / "kv", max_num_batched_tokens=1024, **options) as llm:
        expected = [sampled(llm, [prompt])[0] for prompt in PROMPTS]
    with engine(checkpoint("llama"), tmp_path / "kv", max_num_batched_tokens=64, **options) as llm:
        assert sampled(llm, PROMPTS[:1]) == expected[:1]
        assert sampled(llm, PROMPTS) == expected
