"""The estimate for GPUs counts what is computed and read, and the table in the docs has its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, make_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hardware_model import LLAMA_8B, Line, estimate, kv_reads_by_run, main
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
    assert sum(read) == kv_reads_by_tile(rows) <= kv_reads_by_run(rows)


@given(rows=positions)
def test_a_run_reads_all_before_it_for_itself(rows):
    starts = [row for row in rows if row - 1 not in rows]
    assert kv_reads_by_run(rows) >= sum(start + 1 for start in starts)
    if len(starts) == len(rows):
        assert kv_reads_by_run(rows) == sum(rows) + len(rows)


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


def test_the_results_are_those_of_the_command(tmp_path, capsys):
    main("1024,3072,8192,32768,131072", 0.05, 32, 0.6, tmp_path / "again.json")
    kept = json.loads((ROOT / "data/results/hardware-model.json").read_text())
    again = json.loads((tmp_path / "again.json").read_text())
    assert kept == again
    assert capsys.readouterr().out.count("\n") == 1 + len(kept["lines"])


def test_the_docs_table_is_the_results():
    lines = [Line(**line) for line in json.loads((ROOT / "data/results/hardware-model.json").read_text())["lines"]]
    page = (ROOT / "docs/vllm.md").read_text()
    expected = set()
    for line in lines:
        by_runs, together = line.full_s / line.by_runs_s, line.full_s / line.together_s
        expected.add(f"| {line.gpu} | {line.tokens:,} | {line.full_s:.3g} s | {by_runs:.1f}x | {together:.1f}x |")
    shown = set(re.findall(r"^\| [AH]100 \|(?: [^|]+ \|){4}", page, re.MULTILINE))
    assert len(shown) == 6
    assert shown <= expected


def test_reading_by_runs_loses_sooner_or_later_and_together_does_not():
    for gpu in ("A100", "H100"):
        long = estimate(gpu, 131_072, 0.05, 32, 0.6)
        assert long.by_runs_s > long.full_s > long.together_s
