"""Train the demo model from nothing: `python -m tools.demo_model.train --out runs/demo`.

One process, resumable: it saves its state every two minutes of work and goes on from it. Stages follow the order in
which the skill is learnable (lists of pairs, short stories, longer ones, two hops, far positions, long contexts); a
stage ends when its share of the time is used or its accuracy is reached. Progress goes to log.jsonl; at the end the
model is written to model/, its scores to results.json and the curve to curve.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from tools.demo_model.card import plot_curve
from tools.demo_model.cases import Setting, make_cases
from tools.demo_model.evaluate import measure, score
from tools.demo_model.export import export
from tools.demo_model.model import (
    DemoModel,
    ModelConfig,
    copy_attention,
    load_shipped,
    mimetic_init,
    num_parameters,
    order_words,
    rope,
)
from tools.demo_model.optim import Muon
from tools.demo_model.rows import COMPARE, GAP, REPEAT, SINGLE, STOP, TEXT, TWO_HOP, Batch, RowMaker, RowPlan
from tools.demo_model.tokenizer import build_tokenizer, encode
from tools.demo_model.vocab import YEARS

LOSS_WEIGHTS = {TEXT: 0.05, SINGLE: 1.0, STOP: 0.1, REPEAT: 0.5, TWO_HOP: 1.0, COMPARE: 1.0, GAP: 1.0}
NAMES = {SINGLE: "single", TWO_HOP: "two_hop", COMPARE: "comparison", GAP: "not_stated", REPEAT: "repeat"}
MIDDLE_LOSS = 0.5  # the state after layer 1 at a two-hop question's name decodes to the entity between the hops
MATRIX_LR, EMBEDDING_LR = 0.005, 2e-3
WARM_STEPS, COOL_SHARE = 30, 0.65


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows to train on (with weights), its share of the time, and the accuracy that ends it sooner."""

    name: str
    rows: tuple[tuple[RowPlan, float], ...]
    share: float
    promote: float = 2.0
    copy_layers: bool = False  # before the stage: layers 2 and 3 attend as layers 0 and 1
    order_years: bool = False  # before the stage: a direction of the embedding says how late a year is


STAGES = (
    Stage("pairs", ((RowPlan(64, induction=0.35, pairs=0.33, easy=True), 1.0),), 0.12, promote=0.9),
    Stage("short", ((RowPlan(96), 1.0),), 0.05, promote=0.85),
    Stage("stories", ((RowPlan(256), 1.0),), 0.1, promote=0.9),
    Stage("hops", ((RowPlan(256, one_hops=0.5), 1.0),), 0.15, copy_layers=True),
    Stage("dates", ((RowPlan(256, far=0.3, one_hops=0.5, dates=0.5), 1.0),), 0.15, order_years=True),
    Stage("far", ((RowPlan(384, far=0.4, one_hops=0.5, dates=0.15), 0.4),
                  (RowPlan(512, far=0.3, one_hops=0.4, dates=0.1), 0.6)), 0.13),
    Stage("long", ((RowPlan(256, far=0.3, one_hops=0.5, dates=0.3), 0.1),
                   (RowPlan(384, far=0.3, one_hops=0.4, dates=0.12), 0.35),
                   (RowPlan(512, far=0.3, one_hops=0.4, dates=0.08), 0.35),
                   (RowPlan(1024, far=0.2, one_hops=0.4, dates=0.05), 0.18),
                   (RowPlan(4352, one_hops=0.4, dates=0.05), 0.02)), 0.33),
)  # fmt: skip


def stage_ends(first: int) -> list[float]:
    """Progress at which each stage ends when training begins at stage `first`."""
    total = sum(stage.share for stage in STAGES[first:])
    done = [sum(stage.share for stage in STAGES[first : last + 1]) for last in range(len(STAGES))]
    return [share / total for share in done]


class Trainer:
    """Model, optimisers and place in the curriculum; everything needed to go on is in its checkpoint."""

    def __init__(self, out: Path, seed: int, minutes: float, tokens_per_step: int, compiled: bool) -> None:
        self.out, self.minutes, self.tokens_per_step = out, minutes, tokens_per_step
        torch.manual_seed(seed)
        self.tokenizer: Tokenizer = build_tokenizer()
        self.config = ModelConfig(vocab_size=-(-self.tokenizer.get_vocab_size() // 64) * 64)
        self.model = DemoModel(self.config)
        mimetic_init(self.model)
        self.maker = RowMaker(self.tokenizer, seed)
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "emb" not in name]
        self.others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or "emb" in name]
        self.muon = Muon(matrices, MATRIX_LR)
        self.adam = torch.optim.AdamW(self.others, lr=EMBEDDING_LR, betas=(0.9, 0.98), weight_decay=0.0)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.first_stage = self.stage = self.step = self.num_tokens = self.warm_from = 0
        self.spent_s = 0.0
        self.recent: list[dict[str, float]] = []

    def save(self) -> None:
        """Write the checkpoint in one move."""
        state = {
            "model": self.model.state_dict(), "config": asdict(self.config), "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(), "rng": self.maker.rng.getstate(), "torch_rng": torch.get_rng_state(),
            "place": [self.first_stage, self.stage, self.step, self.num_tokens, self.warm_from, self.spent_s],
        }  # fmt: skip
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def load(self) -> None:
        """Go on from the checkpoint."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.maker.rng.setstate(state["rng"])
        torch.set_rng_state(state["torch_rng"])
        place = state["place"]
        self.first_stage, self.stage, self.step, self.num_tokens, self.warm_from, self.spent_s = place

    def warm_start(self, weights: Path, stage: str) -> None:
        """Take the weights of an earlier training (a checkpoint file, or an exported directory), begin at `stage`."""
        if weights.is_dir():
            self.model.load_state_dict(load_shipped(weights).state_dict())
        else:
            self.model.load_state_dict(torch.load(weights, weights_only=True)["model"])
        self.first_stage = [candidate.name for candidate in STAGES].index(stage)
        self.enter(self.first_stage)

    @property
    def progress(self) -> float:
        """Share of the time that is used."""
        return self.spent_s / 60 / self.minutes

    def run(self) -> None:
        """Train to the end of the last stage."""
        saved_s = logged_s = self.spent_s
        while self.stage < len(STAGES) and self.progress < 1:
            begun = time.process_time()
            plans = STAGES[self.stage].rows
            plan = random.Random(self.step).choices([p for p, _ in plans], [w for _, w in plans])[0]
            self.recent.append(self.train_step(plan))
            self.spent_s += time.process_time() - begun
            if self.spent_s - logged_s > 30:
                self.log()
                logged_s = self.spent_s
            if self.spent_s - saved_s > 120:
                self.save()
                saved_s = self.spent_s
            self.advance()
        self.save()

    def finish(self) -> None:
        """Export the model, measure it and draw the curve."""
        export(self.model.eval(), self.out / "model")
        results = measure(self.model, self.tokenizer, per_kind=60)
        (self.out / "results.json").write_text(json.dumps(results) + "\n")
        with contextlib.suppress(ImportError):
            plot_curve(self.out / "log.jsonl", self.out / "curve.png")

    def advance(self) -> None:
        """Enter the next stage when this one's time is up or its accuracy is reached."""
        stage, window = STAGES[self.stage], self.recent[-50:]
        single = sum(record.get("single", 0.0) for record in window) / len(window)
        until = stage_ends(self.first_stage)[self.stage]
        if self.progress < until and not (len(self.recent) >= 50 and single > stage.promote):
            return
        self.log()
        if self.stage + 1 == len(STAGES):
            self.stage += 1
            return
        self.enter(self.stage + 1)

    def enter(self, stage: int) -> None:
        """Begin a stage, with what it changes in the model."""
        self.stage, self.recent, self.warm_from = stage, [], self.step
        if STAGES[stage].copy_layers:
            copy_attention(self.model, 0, 2, 0.7)
            copy_attention(self.model, 1, 3, 0.7)
        if STAGES[stage].order_years:
            order_words(self.model, [encode(self.tokenizer, year)[0] for year in YEARS])

    def rate(self) -> float:
        """Factor of the learning rates: a short rise at each stage, a linear fall at the end."""
        rise = min(1.0, (self.step - self.warm_from + 1) / WARM_STEPS)
        return rise * min(1.0, max(0.02, (1 - self.progress) / COOL_SHARE))

    def train_step(self, plan: RowPlan) -> dict[str, float]:
        """One step; accuracy per loss group, and the losses."""
        self.model.train()
        per_step = self.tokens_per_step if plan.length < 256 else self.tokens_per_step * 4 // 3
        batch = self.maker.batch(plan, max(2, per_step // plan.length))
        loss, record = self.losses(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = EMBEDDING_LR * self.rate()
        self.muon.step(self.rate())
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += batch.positions.numel()
        return record

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The weighted loss of a batch, and what to log of it."""
        cos, sin = rope(self.config, batch.positions)
        hidden, middle = self.forward(batch.ids[:, :-1].contiguous(), cos, sin)
        targets, groups = batch.ids[:, 1:].reshape(-1), batch.groups[:, 1:].reshape(-1)
        chosen = groups.nonzero()[:, 0]
        targets, groups = targets[chosen], groups[chosen]
        logits = self.model.logits(hidden.reshape(-1, self.config.hidden_size)[chosen])
        errors = F.cross_entropy(logits, targets, reduction="none")
        right = logits.detach().argmax(-1) == targets
        loss, record = torch.zeros(()), {}
        for group, weight in LOSS_WEIGHTS.items():
            mine = groups == group
            if mine.any():
                loss = loss + weight * errors[mine].mean()
                if group in NAMES:
                    record[NAMES[group]] = right[mine].float().mean().item()
        record["loss"] = loss.item()
        if len(batch.middle_index):
            states = middle.reshape(-1, self.config.hidden_size)[batch.middle_index]
            logits = self.model.logits(states)
            loss = loss + MIDDLE_LOSS * F.cross_entropy(logits, batch.middle_target)
            record["middle"] = (logits.argmax(-1) == batch.middle_target).float().mean().item()
        return loss, record

    def log(self) -> None:
        """Append a line to log.jsonl and print it; every fifth line has a small held-out evaluation."""
        record: dict[str, Any] = {
            "stage": STAGES[self.stage].name, "step": self.step, "cpu_minutes": round(self.spent_s / 60, 2),
            "num_tokens": self.num_tokens, "rate": round(self.rate(), 3),
        }  # fmt: skip
        for name in ("loss", *NAMES.values(), "middle"):
            values = [entry[name] for entry in self.recent[-25:] if name in entry]
            if values:
                record[name] = round(sum(values) / len(values), 3)
        lines = self.out / "log.jsonl"
        count = len(lines.read_text().splitlines()) if lines.exists() else 0
        if count % 10 == 9:
            cases = make_cases(self.tokenizer, 12, Setting(6, 200), seed=99)
            table = score(self.model, cases)
            record["held_out"] = {kind: [row["full"], row["reuse"], row["guess"]] for kind, row in table.items()}
        with lines.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="directory of checkpoint, log and results")
    parser.add_argument("--minutes", type=float, default=180.0, help="CPU minutes to train for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=3072)
    parser.add_argument("--init", type=Path, help="weights to begin from instead of nothing")
    parser.add_argument("--stage", default="far", help="stage to begin at with --init")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options.out, options.seed, options.minutes, options.tokens_per_step, not options.no_compile)
    if (options.out / "checkpoint.pt").exists():
        trainer.load()
    elif options.init:
        trainer.warm_start(options.init, options.stage)
    print(f"{num_parameters(trainer.model):,} parameters", file=sys.stderr)
    trainer.run()
    trainer.finish()


if __name__ == "__main__":
    main()
