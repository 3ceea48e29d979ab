"""`benchmarks.adaptive`: what it chooses, and as a reader runs it, on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.adaptive import GRID, WAYS, Seen, choices, compare

COMMAND = (sys.executable, "-m", "benchmarks.adaptive", "--model", "demo", "--data", "demo", "--questions", "3")


def made(seed: int, num_questions: int = 20) -> list[Seen]:
    draw = np.random.default_rng(seed)
    falling = -np.sort(-draw.random((num_questions, 2, len(GRID))), axis=-1)
    return [
        Seen(first.tolist(), [*first], stale.tolist(), [float("inf"), *draw.random(len(GRID) - 1)])
        for first, stale in falling
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spent", [0.025, 0.07, 0.15])
def test_every_way_spends_what_it_is_given(way: str, spent: float) -> None:
    mixed = choices(way, spent, made(1))
    assert np.allclose(mixed.sum(1), 1)
    assert (mixed >= -1e-9).all()
    assert (mixed @ np.array(GRID)).mean() == pytest.approx(spent)


def test_who_knows_the_outcome_is_never_worse_for_the_first_token() -> None:
    for seed in range(5):
        runs = {(run["way"], run["mean_ratio"]): run["first_token_kl"] for run in compare(made(seed))}
        for (way, spent), found in runs.items():
            assert runs["oracle", spent] <= found + 1e-9, way


def test_it_runs_as_it_says(tmp_path: Path) -> None:
    out = tmp_path / "adaptive.json"
    done = subprocess.run([*COMMAND, "--contexts", "none", "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    assert len(facts["questions"]) == 3
    assert {run["way"] for run in facts["runs"]} == set(WAYS)
