"""The CacheBlend paper's figures: their deviations are those of the model's own attention, and each can be drawn."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.figures import times
from benchmarks.figures.__main__ import FIGURES, NAMES, app, measure_figure
from benchmarks.figures.attention import FORWARD_TOKENS, Study, attention_matrices
from benchmarks.figures.panels import draw_figure, table_lines
from benchmarks.figures.workload import PAPER, Workload, compared, label_of, open_engine, questions_of
from ragblend.errors import UsageError
from ragblend.lab.quality.measures import FULL, REUSE
from ragblend.lab.quality.study import run_quality
from ragblend.lab.tables import Facts

SMALL = {"num_questions": 2, "num_chunks": 4, "chunk_tokens": 64}


@cache
def measured(name: str) -> Facts:
    """Figure `name` on the embedded model, with two questions or small prompts."""
    return measure_figure(name, model="demo", **SMALL)


@pytest.fixture(scope="module")
def study():
    work = Workload(model="demo", **SMALL)
    with open_engine(work) as base:
        yield Study(base, questions_of(work, base)[0])


def series(facts: Facts, panel: int = 0) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = facts["panels"][panel]["series"]
    return found


# -- deviations


def test_forward_attention_is_the_model_s_own_eager_attention(study):
    model = study.base.layers.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        seen = model(torch.tensor([study.prompt.token_ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    expected = torch.stack([layer[0].mean(0)[-FORWARD_TOKENS:] for layer in seen])
    torch.testing.assert_close(study.forward_attention(study.full), expected, atol=1e-5, rtol=0)


def test_full_prefill_deviates_by_nothing_and_so_does_restoring_every_token(study):
    assert study.attention_deviation(study.full) < 1e-5
    scores = study.kv_deviation(study.stale)
    assert study.attention_deviation(study.restored(scores, 1.0)) < 1e-3  # separators between chunks stay
    assert study.kv_deviation(study.prefill(FULL)).max() < 1e-4
    assert scores[0].max() < 1e-4  # keys and values of layer 0 depend on the token alone
    assert study.attention_deviation(study.prefill(REUSE)) > 0.05


def test_full_reuse_has_no_attention_between_chunks(study):
    full, reuse = attention_matrices(study)
    torch.testing.assert_close(full.sum(dim=1), torch.ones(len(full)), atol=1e-3, rtol=0)
    torch.testing.assert_close(reuse.sum(dim=1), torch.ones(len(full)), atol=1e-3, rtol=0)
    chunks = range(1, len(full) - 1)
    assert all(float(reuse[row, column]) == 0 for row in chunks for column in chunks if row != column)
    assert all(float(full[row, 1:row].sum()) > 0.01 for row in chunks if row > 1)
    torch.testing.assert_close(full[1], reuse[1], atol=1e-3, rtol=0)  # the first chunk is exact


def test_known_deviation_restores_more_attention_than_random_tokens():
    lines = series(measured("6"))
    known, chance = dict(lines["highest KV deviation, known"]), dict(lines["random tokens"])
    assert list(known.values()) == sorted(known.values(), reverse=True)
    assert known[0.0] == chance[0.0] == dict(lines["cacheblend"])[0.0]
    assert known[0.15] < chance[0.15]


def test_the_distribution_of_deviations_covers_all_tokens():
    facts = measured("7")
    for points in series(facts).values():
        assert [y for _, y in points] == pytest.approx([n / 20 for n in range(21)], abs=1e-4)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    for points in series(facts, 1).values():
        assert points[-1] == [1.0, 1.0]
        assert all(y >= x for x, y in points)  # the highest come first


def test_rank_correlations_are_between_neighbouring_layers():
    (points,) = series(measured("8")).values()
    assert [layer for layer, _ in points] == [1, 2, 3]  # of 5 layers, without the exact first one
    assert all(0.3 < value <= 1 for _, value in points)


# -- quality


def test_quality_over_ttft_is_what_bench_quality_finds():
    work = Workload(model="demo", **SMALL)
    facts = measured("12")
    with open_engine(work) as base:
        labels = [label_of(each) for each in compared(base)]
    assert list(series(facts)) == labels
    runs = run_quality(work.config)["runs"]
    alone = {(run["mode"], run["rule"], run["ratio"]): run for run in runs if run["kind"] == "all"}
    for panel, name in enumerate(("token_f1", "gold_loss")):
        found = {label: points[0][1] for label, points in series(facts, panel).items()}
        assert found["reuse"] == pytest.approx(alone["reuse", "none", 0.0][name], rel=1e-4)
        assert found[label_of(PAPER)] == pytest.approx(alone[PAPER[:3]][name], rel=1e-4)


def test_figures_of_quality_have_the_papers_axes():
    counts = [x for x, _ in series(measured("2"))["full"]]
    assert counts == [2, 3, 4]
    assert {"map_reduce", "map_rerank", "full"} < set(series(measured("13")))
    ratios = [x for x, _ in series(measured("16"))["cacheblend"]]
    assert (ratios[0], ratios[-2]) == (0.05, 0.18)
    devices = measured("17")["panels"]
    assert [panel["title"].startswith(("memory", "a device")) for panel in devices] == [True] * 3
    assert all({"full", "prefix", "reuse"} < set(panel["series"]) for panel in devices)


# -- times


def test_figures_of_time_have_every_mode(monkeypatch):
    monkeypatch.setattr(times, "CHUNK_COUNTS", (2, 3))
    monkeypatch.setattr(times, "CHUNK_LENGTHS", (16, 32))
    monkeypatch.setattr(times, "BATCHES", (1, 2))
    for name, sizes in {"15a": [2, 3], "15b": [16, 32], "15c": [1, 2]}.items():
        facts = measure_figure(name, model="demo", **SMALL)
        assert set(series(facts)) == {"full", "prefix", "reuse", "cacheblend 15%", "default"}
        assert all([x for x, _ in points] == sizes for points in series(facts).values())
        assert all(y > 0 for points in series(facts).values() for _, y in points)


def test_loading_is_compared_with_recompute_over_ratio_and_device():
    facts = measured("10")
    assert list(series(facts)) == ["recompute (KV in memory)", "loading alone", "both, overlapped", "full"]
    assert [x for x, _ in series(facts, 1)["overlapped"]] == list(times.LOADS)


# -- the command


def test_the_command_has_every_figure_of_measurements_in_the_paper():
    assert NAMES == ["2", "4", "6", "7", "8", "10", "12", "13", "14", "15a", "15b", "15c", "16", "17"]
    assert set(NAMES) == set(FIGURES)
    with pytest.raises(UsageError, match=r"'3'; choose from 2, 4, 6"):
        measure_figure("3")


def test_the_page_of_the_paper_has_a_row_for_each_figure():
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+[abc]?), ", page, re.MULTILINE) == NAMES


def test_the_command_prints_writes_and_draws_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--out", str(tmp_path / "found" / "8.json"), "--plot", str(tmp_path / "8.png")]
    ran = CliRunner().invoke(app, ["8", "--num-questions", "1", "--num-chunks", "4", *files])
    assert ran.exit_code == 0, ran.output
    facts = json.loads((tmp_path / "found" / "8.json").read_text())
    assert (facts["command"], facts["figure"], facts["config"]["num_questions"]) == ("benchmarks.figures", "8", 1)
    assert facts["hardware"]["cpu"]
    assert facts["seconds"] > 0
    assert "mean correlation" in ran.stdout
    assert (tmp_path / "8.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["2", "4", "10", "13"])
def test_every_form_of_panel_is_drawn(tmp_path, name):
    pytest.importorskip("matplotlib")
    facts = json.loads(json.dumps(measured(name), allow_nan=False))
    draw_figure(facts, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert len(table_lines(facts)) > len(facts["panels"])
