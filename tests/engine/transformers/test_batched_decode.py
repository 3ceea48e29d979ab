"""Batched decode steps equal the steps of each prompt alone, on every family, windowed ones included."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_models import VOCABULARY
from torch import nn

from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.transformers.batched_decode import FEW_ROWS, FewRowsCpuMatmul
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.prompt.types import Prompt

LENGTHS = (3, 17, 50, 51, 64, 90, 120, 7)  # of prompts; the windows are of 50 to 56 tokens
TEXTS = ("the theory of the other chunk is in the answer", "question the chunk with that theory", "and the question")


def prefilled(layers: TransformersLayers, ids: torch.Tensor) -> FusedKV:
    """The KV of a prompt, by the model's own forward, with no room for more."""
    _, kv = layers.full_prefill(ids)
    return FusedKV(list(kv), len(ids))


@torch.inference_mode()
def alone(layers: TransformersLayers, ids: Sequence[int], fused: FusedKV) -> torch.Tensor:
    """The logits behind `ids`, which go behind `fused`."""
    rows = torch.arange(fused.length, fused.length + len(ids))
    hidden = layers.embed(torch.tensor(list(ids)))
    for layer in range(layers.num_layers):
        hidden = layers.run_layer(layer, hidden, rows, fused)
    fused.length += len(ids)
    return layers.logits(hidden[-1:])[0]


@pytest.mark.slow
@torch.inference_mode()
def test_batched_answers_have_the_logits_and_kv_of_separate_ones(family, tiny_layers):
    layers, draw = tiny_layers(family), torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in LENGTHS]
    ours, theirs = ([prefilled(layers, ids) for ids in prompts] for _ in range(2))
    for step in range(3):
        # One token each, but for one prompt that gets some at once: what a grammar forces.
        ids = [[5 + step + number] * (4 if number == step else 1) for number in range(len(prompts))]
        found = layers.run_decode_batch(ids, ours)
        expected = torch.stack([alone(layers, *each) for each in zip(ids, theirs, strict=True)])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    for mine, own in zip(ours, theirs, strict=True):
        for layer in range(layers.num_layers):
            torch.testing.assert_close(
                mine.keys(layer)[:, : mine.length], own.keys(layer)[:, : own.length], atol=2e-5, rtol=2e-5
            )


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "gemma4",
        "gpt_oss",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma2", "qwen3_moe", "phi3")),
    ],
)
def test_answers_in_a_batch_are_those_of_one_after_another(family, tiny_engine):
    engine = tiny_engine(family)
    prompts = [Prompt(TEXTS[: 1 + number % 3], f"what is {number}?") for number in range(9)]
    expected = [engine.generate(prompt, max_tokens=12) for prompt in prompts]
    found = engine.generate_batch(prompts, max_tokens=12)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.text for each in found] == [each.text for each in expected]


def test_half_precision_is_as_near_to_exact_in_a_batch_as_alone(tiny_model):
    exact, layers = TransformersLayers(tiny_model("llama")), TransformersLayers(tiny_model("llama").bfloat16())
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in LENGTHS]
    ids = [[number + 5] for number in range(len(prompts))]
    with torch.inference_mode():
        wanted, single = (
            torch.stack([alone(model, one, prefilled(model, each)) for one, each in zip(ids, prompts, strict=True)])
            for model in (exact, layers)
        )
        joined = layers.run_decode_batch(ids, [prefilled(layers, each) for each in prompts])
    assert (joined - wanted).square().mean() <= 1.2 * (single - wanted).square().mean()


# --- its parts ---


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS.start, 8, FEW_ROWS.stop])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_times_a_matrix_are_what_they_were(num_rows, bias):
    linear, rows = nn.Linear(40, 30, bias=bias), torch.randn(1, num_rows, 40)
    with torch.inference_mode():
        expected = linear(rows)
        with FewRowsCpuMatmul():
            found = linear(rows)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
