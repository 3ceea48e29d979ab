"""The paper's figures: each measures what it varies, its runs are those of `bench quality`, its picture shows them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.figures import FIGURES, app, facts_of, run_figure
from ragblend.bench.common.configs import BASELINES, QualityConfig
from ragblend.bench.common.plots import Panel, plot_panel
from ragblend.bench.quality.study import run_quality
from ragblend.errors import UsageError

LEVELS = ["full", "prefix", "reuse"]


def untimed(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in run.items() if key != "ttft_s"} for run in runs]


def called(number: int, tmp_path: Path, *options: str) -> Result:
    files = ["--out", str(tmp_path / "found" / "figure.json"), "--plot", str(tmp_path / "figure.png")]
    return CliRunner().invoke(app, [str(number), "--embedder", "hashing", *options, *files])


def drawn(number: int, tmp_path: Path, *options: str) -> dict[str, Any]:
    """What the command wrote, of all questions."""
    pytest.importorskip("matplotlib")
    ran = called(number, tmp_path, *options)
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    facts: dict[str, Any] = json.loads((tmp_path / "found" / "figure.json").read_text())
    assert (facts["command"], facts["figure"]) == ("benchmarks.figures", number)
    assert facts["hardware"]["torch"]
    assert str(tmp_path) not in json.dumps(facts)
    facts["runs"] = [run for run in facts["runs"] if run["kind"] == "all"]
    assert sum(line.startswith(("full", "map_rerank")) for line in ran.output.splitlines()) == sum(
        run["mode"] in ("full", "map_rerank") for run in facts["runs"]
    )
    return facts


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Three questions over passages long enough to be cut into chunks of several lengths."""
    passages = [f"{name} Oster lives in Dublin, by the {name} bridge. " * 12 for name in ("Mara", "Ada", "Ida")]
    asked = [
        {"question": f"Where does {name} live?", "answers": ["Dublin"], "passages": passages}
        for name in ("Mara", "Ada", "Ida")
    ]
    (tmp_path / "mine.json").write_text(json.dumps(asked))
    return tmp_path / "mine.json"


def test_quality_over_ttft_has_both_rules_and_every_baseline(tmp_path: Path) -> None:
    facts = drawn(12, tmp_path, "--questions", "2")
    assert [(run["mode"], run["rule"], run["ratio"]) for run in facts["runs"]] == [
        ("full", "none", 1.0), ("prefix", "none", 0.0), ("reuse", "none", 0.0),
        *(("blend", rule, ratio) for rule, ratio in product(("ask", "cacheblend"), (0.05, 0.15))),
        *((name, "none", 1.0) for name in BASELINES),
    ]  # fmt: skip
    assert {panel.place for panel in FIGURES[12].panels} == {"ttft_s"}


def test_ratios_are_lines_and_what_has_none_is_a_level(tmp_path: Path) -> None:
    facts = drawn(15, tmp_path, "--questions", "1", "--ratios", "0.5,0.02", "--rules", "cacheblend")
    blends = [run for run in facts["runs"] if run["mode"] == "blend"]
    assert [run["ratio"] for run in blends] == [0.5, 0.02]
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plot_panel(axes, Panel("ratio", "ttft_s", ""), facts["runs"])
    lines = {line.get_label(): line for line in axes.get_lines()}
    for name in LEVELS:
        (level,) = {run["ttft_s"] for run in facts["runs"] if run["mode"] == name}
        assert [*lines[name].get_ydata()] == [level, level]
    (bars,) = axes.containers
    assert [*bars[0].get_xdata()] == [0.02, 0.5]
    assert [*bars[0].get_ydata()] == [blends[1]["ttft_s"], blends[0]["ttft_s"]]


def test_chunk_lengths_are_measured_one_after_the_other(tmp_path: Path, own: Path) -> None:
    facts = drawn(
        16, tmp_path, "--data", str(own), "--part", "all", "--chunks", "3", "--chunk-tokens", "40,20", "--rules",
        "random", "--ratios", "0.1,0.3",
    )  # fmt: skip
    assert (facts["config"]["chunk_tokens"], facts["num_questions"]) == ([40, 20], [3, 3])
    per_length = {length: [run for run in facts["runs"] if run["chunk_tokens"] == length] for length in (40, 20)}
    longer, shorter = ({run["prompt_tokens"] for run in per_length[length]} for length in (40, 20))
    assert min(longer) - max(shorter) > 3 * 20 / 2
    assert [len(runs) for runs in per_length.values()] == [5, 5]
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plot_panel(axes, Panel("chunk_tokens", "first_token_kl", ""), facts["runs"])
    lines = {bars.get_label(): bars[0] for bars in axes.containers}
    assert set(lines) == {"reuse", "random 10%", "random 30%"}  # a line per ratio; full prefill is no distance
    assert all([*line.get_xdata()] == [20, 40] for line in lines.values())


def test_a_point_of_a_figure_is_a_run_of_bench_quality() -> None:
    config = QualityConfig(num_questions=2, rules=("cacheblend",), ratios=(0.15,), modes=("blend",), embedder="hashing")
    results = run_figure(17, config, [6, 4])
    facts = facts_of(17, results)
    made = ("num_chunks", "chunk_tokens", "prompt_tokens")
    for count in (4, 6):
        alone = run_quality(replace(config, num_chunks=count)).as_dict()
        here = [run for run in facts["runs"] if run["num_chunks"] == count]
        assert {run["prompt_tokens"] for run in here} == {alone["prompt_tokens"]}
        own = [{name: value for name, value in run.items() if name not in made} for run in here]
        assert untimed(own) == untimed(alone["runs"])


@pytest.mark.parametrize(
    ("number", "options", "says"),
    [
        (16, ("--data", "demo"), "lookup"),
        (16, ("--data", "lookup", "--chunk-tokens", ""), "no chunk_tokens"),
        (17, ("--chunks", "4,0"), "num_chunks is 0"),
        (17, ("--chunks", "4.5"), "whole numbers"),
        (12, ("--baselines", "map_refine"), "map_refine"),
        (15, ("--ratios", "2"), "2.0"),
        (14, ("--rules", "best"), "best"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_run(
    number: int, options: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for place in ("quality.study.run_quality", "throughput.run_throughput"):
        monkeypatch.setattr(f"ragblend.bench.{place}", lambda *_: pytest.fail("measured first"))
    ran = CliRunner().invoke(app, [str(number), *options, "--plot", str(tmp_path / "x.png")])
    assert isinstance(ran.exception, UsageError)
    assert says in str(ran.exception)
    assert not (tmp_path / "x.png").exists()
