"""Predictions for GPUs count what is computed and read, and the table in the docs has them and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, make_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hardware_model import LLAMA_8B, main, row
from ragblend.engine.fusion.attention import attend_rows
from ragblend.lab.hardware import kv_reads_by_tile
from ragblend.lab.model_sizes import ModelSizes

ROOT = Path(__file__).parents[2]
positions = st.sets(st.integers(0, 700), min_size=1, max_size=300).map(sorted)


@given(rows=positions)
def test_what_is_read_together_is_what_the_kernel_is_given(rows):
    read: list[int] = []
    kernel = nn.functional.scaled_dot_product_attention

    def counting(query: Tensor, key: Tensor, *others: Tensor, **options: object) -> Tensor:
        read.append(key.shape[2])
        return kernel(query, key, *others, **options)

    states, kv = torch.zeros(1, 4, len(rows), 8), torch.zeros(1, 2, 701, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", counting)
        attend_rows(states, kv, kv, torch.tensor(rows), None)
    assert sum(read) == kv_reads_by_tile(rows)


def test_the_operations_are_those_that_torch_counts():
    model_class, changes = FAMILIES["llama"]
    tiny = make_model(model_class, **changes).model
    layer, attention = tiny.layers[0], tiny.layers[0].self_attn
    weights = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
    model = ModelSizes(6, weights, 4 * attention.head_dim, 6 * 2 * 2 * attention.head_dim, 6 * 2)
    hidden, rows = torch.zeros(1, 50, 64), torch.arange(50)[None]
    attention.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        layer(hidden, position_embeddings=tiny.rotary_emb(hidden, rows))
    assert counter.get_total_flops() == model.linear_flops(50) + model.attention_flops(50 * 50)  # unmasked


def test_llama_8b_has_its_weights():
    embeddings = 2 * 128_256 * 4096
    assert LLAMA_8B.layers * LLAMA_8B.layer_weights + embeddings == pytest.approx(8.03e9, rel=0.001)


def result(name: str) -> Any:
    return json.loads((ROOT / "data/results" / name).read_text())


def test_the_results_are_those_of_the_command(tmp_path, capsys):
    main("4096,16384,32768", 32, tmp_path / "again.json")
    kept = result("hardware-model.json")
    assert kept == json.loads((tmp_path / "again.json").read_text())
    assert capsys.readouterr().out.count("\n") == 2 + len(kept["lines"])


def test_the_docs_table_is_the_results():
    """Its rows are what was measured on an H100, in transformers and in vLLM, and the predictions."""
    runs = result("gpu-h100.json")["parts"]["ttft"]["found"]
    expected = []
    for tokens in dict.fromkeys(run["tokens"] for run in runs):
        times = [run["ttft_s"] for run in runs if run["tokens"] == tokens and run["mode"] != "prefix"]
        expected.append(row("H100, measured", tokens, *times))
    in_vllm = result("gpu-vllm-h100.json")
    times = [run["ttft_s"] for run in in_vllm["runs"] if run["mode"] != "prefix"]
    expected.append(row("1B in vLLM, H100, measured", in_vllm["prompt_tokens"], *times))
    for line in result("hardware-model.json")["lines"]:
        gpu, tokens, *times = line.values()
        expected.append(row(f"{gpu}, predicted", tokens, *times))
    page = (ROOT / "docs/performance.md").read_text()
    assert re.findall(r"^\|.*(?:measured|predicted) \|.*$", page, re.MULTILINE) == expected
