"""Training: resumes where it stopped, learns, and exports what it trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.demo_model.rows import MAX_POSITIONS, RowMaker, RowPlan
from tools.demo_model.tokenizer import build_tokenizer
from tools.demo_model.train import STAGES, Trainer, stage_ends

EASY = RowPlan(64, induction=0.35, pairs=0.33, easy=True)


def trainer(out: Path) -> Trainer:
    return Trainer(out, seed=0, minutes=10, tokens_per_step=256, compiled=False)


def test_a_resumed_training_takes_the_same_step(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.train_step(EASY)
    first.save()
    expected = first.train_step(EASY)
    second = trainer(tmp_path)
    second.load()
    assert second.step == 1
    assert second.train_step(EASY) == pytest.approx(expected)


def test_the_loss_falls(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    batch = run.maker.batch(EASY, 4)
    run.maker.batch = lambda plan, num_rows: batch
    losses = [run.train_step(EASY)["loss"] for _ in range(25)]
    assert losses[-1] < 0.8 * losses[0]


def test_stages_end_in_order_at_the_end_of_the_time() -> None:
    for first in range(len(STAGES)):
        ends = stage_ends(first)[first:]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("plan", [plan for stage in STAGES for plan, _ in stage.rows])
def test_rows_fit_and_positions_rise(plan: RowPlan) -> None:
    torch.manual_seed(0)
    batch = RowMaker(build_tokenizer(), seed=1).batch(plan, 4)
    assert batch.ids.shape == batch.groups.shape == (4, plan.length + 1)
    assert (batch.positions.diff(dim=1) >= 1).all()
    assert batch.positions.max() < max(MAX_POSITIONS, plan.length) + 200
