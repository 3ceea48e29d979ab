"""What was tried to find the default rule: candidates on the selection set, each against one of them (`--base`).

`effect_40` scores by effect alone, over the 40 % most attended tokens at any ratio; so do the others unless they say
otherwise. `effect_60` was the default rule `repair` until it looked at the attention too. In the first three files they
go by their older names, `repair_40` and `repair`.

    python -m benchmarks.selection_experiments --out data/results/selection-experiments.json
    python -m benchmarks.selection_experiments --only candidates_60,candidates_100 --questions 750 --seed 910007 \
        --budgets 0.05,0.1,0.15,0.2 --out data/results/selection-candidates.json
    python -m benchmarks.selection_experiments --only effect_60,candidates_15,candidates_30 --questions 90 \
        --seed 920003 --budgets 0.025,0.0375 --out data/results/selection-small-budgets.json
    python -m benchmarks.selection_experiments --base effect_60 --only repair --questions 450 --seed 950003 \
        --budgets 0.05,0.1,0.15 --out data/results/selection-attention.json

The questions share no pair of subject and answer with those that `benchmarks.demo_quality` reports (`--part selection`
there). A candidate takes the default's place if its paired interval excludes 0 for the better at ratios and at budgets,
and nowhere for the worse.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.demo_quality.cases import make_items
from benchmarks.demo_quality.pairs import GROUPS, differences
from benchmarks.demo_quality.runs import Configuration, Engines, Record, configurations, rows_of
from benchmarks.demo_quality.study import Asked, run_items
from ragblend.bench.common.hardware import hardware_card
from ragblend.cli.options import split_names, split_numbers
from ragblend.cli.session import one_thread, quiet_libraries
from ragblend.engine.fusion.plan import FusedKV, FusePlan
from ragblend.engine.fusion.rules import RULES, Check, Evidence, Rule, repair
from ragblend.engine.hf import blend as transformers_engine
from ragblend.engine.load import load_engine
from tools.demo_model.cases import Setting

RATIOS = (0.05, 0.10, 0.15)


def share(scores: Tensor) -> Tensor:
    """Scores as shares of their sum."""
    return scores / scores.sum().clamp_min(1e-20)


def effect(evidence: Evidence) -> Tensor:
    """What `repair` was before it looked at the attention too: effect alone."""
    assert evidence.effect is not None
    return evidence.effect


def rank(scores: Tensor) -> Tensor:
    """0 for the lowest score, nearly 1 for the highest."""
    return scores.argsort().argsort().float() / len(scores)


def spans(width: int, decay: float) -> Callable[[Evidence], Tensor]:
    """Neighbours inherit a token's score: spans instead of isolated tokens."""

    def score(evidence: Evidence) -> Tensor:
        assert evidence.effect is not None
        distance = (evidence.positions[:, None] - evidence.positions).abs()
        chunk = evidence.positions - evidence.offsets
        near = (distance <= width) & (chunk[:, None] == chunk)
        return (evidence.effect * decay**distance * near).amax(1)

    return score


def forced(chosen: Callable[[Evidence], Tensor]) -> Callable[[Evidence], Tensor]:
    """Some tokens first, whatever the question says; then by effect."""
    return lambda evidence: share(effect(evidence)) + chosen(evidence)


def last_of_chunk(evidence: Evidence) -> Tensor:
    """Tail tokens: the last candidate of every chunk."""
    ends = torch.ones_like(evidence.offsets, dtype=torch.bool)
    chunk = evidence.positions - evidence.offsets
    ends[:-1] = chunk[1:] != chunk[:-1]
    return ends


class ReadInTheMiddle(Rule):
    """A rule that reads the question in the demo model's middle layers (of 0 .. 4), wherever the checks are."""

    def probe_layers(
        self, checks: Sequence[Check], num_layers: int, global_layers: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Layers 1, 2 and 3."""
        return (1, 2, 3)


def attention(evidence: Evidence) -> Tensor:
    """What the question attends to (ProphetKV, InfoFlow): relevance without drift."""
    assert evidence.attention is not None
    return evidence.attention


def weighted(deviation: Callable[[Evidence], Any]) -> Callable[[Evidence], Tensor]:
    """A deviation times the question's attention."""
    return lambda evidence: deviation(evidence) * evidence.attention


def both(evidence: Evidence) -> Tensor:
    """K and V deviation, each over its mean."""
    assert evidence.key_deviation is not None
    assert evidence.value_deviation is not None
    keys, values = evidence.key_deviation, evidence.value_deviation
    return keys / keys.mean() + values / values.mean()


def drift_aware(weight: float) -> Callable[[Evidence], Tensor]:
    """Ranks of attention and of effect."""
    return lambda e: (1 - weight) * rank(e.attention) + weight * rank(e.effect)  # type: ignore[arg-type]


def hedged(weight: float) -> Callable[[Evidence], Tensor]:
    """Effect, and K deviation for what the question did not show."""
    return lambda e: share(e.effect) + weight * share(e.key_deviation)  # type: ignore[arg-type]


def asking(name: str, score: Callable[[Evidence], Tensor], candidate_share: float = 0.4, **more: Any) -> Rule:
    """A rule that asks as `repair` does."""
    return Rule(name, score, True, needs_attention=True, candidate_share=candidate_share, skips_separators=True, **more)


CANDIDATES = (
    asking("effect_40", effect),
    asking("effect_60", effect, 0.6, candidates_per_token=12),
    RULES["repair"],
    asking("repair_80", repair, 0.8, candidates_per_token=12),
    asking("candidates_15", effect, 0.15),
    asking("candidates_20", effect, 0.2),
    asking("candidates_30", effect, 0.3),
    asking("candidates_60", effect, 0.6),
    asking("candidates_100", effect, 1.0),
    asking("spans_1", spans(1, 0.5)),
    asking("spans_2", spans(2, 0.5)),
    asking("first_1", forced(lambda e: e.offsets == 1), 1.0),  # offset 0 is the separator
    asking("last_1", forced(last_of_chunk), 1.0),
    asking("v_attention", weighted(lambda e: e.value_deviation)),
    asking("kv_attention", weighted(both)),
    asking("drift_aware_50", drift_aware(0.5)),
    asking("drift_aware_80", drift_aware(0.8)),
    asking("hedged_10", hedged(0.1)),
    asking("hedged_10_all", hedged(0.1), 1.0),
    asking("repair_gradual", effect, 1.0, gradual=True),  # checks again at every layer, the question read there too
    asking("attention_k", weighted(lambda e: e.key_deviation)),
    ReadInTheMiddle("attention", attention, False, needs_attention=True, skips_separators=True),
)
SHIFTS = (0.5, 1.0)  # of the mean by which a chunk's recomputed values moved


@contextlib.contextmanager
def value_shift(weight: float) -> Iterator[None]:
    """Move the values of tokens that are not recomputed by `weight` times the mean move of their chunk's others."""
    fuse, write = transformers_engine.fuse, FusedKV.write
    chunks: dict[int, list[tuple[int, int]]] = {}  # of the prompt that is being fused

    def noting(model: Any, plan: FusePlan, fused: Any, layers: Any) -> Any:
        chunks[id(fused)] = [(placement.start, placement.end) for placement in plan.placements if not placement.exact]
        try:
            return fuse(model, plan, fused, layers)
        finally:
            chunks.clear()

    def shifting(self: FusedKV, layer: int, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        for start, end in chunks.get(id(self), ()) if isinstance(rows, Tensor) else ():
            inside = (rows >= start) & (rows < end)
            if 0 < int(inside.sum()) < end - start:
                move = (values[:, inside] - self.values(layer)[:, rows[inside]]).mean(1, keepdim=True)
                stale = torch.ones(end - start, dtype=torch.bool)
                stale[rows[inside] - start] = False
                self.values(layer)[:, start:end][:, stale] += weight * move
        write(self, layer, rows, keys, values)

    transformers_engine.fuse, FusedKV.write = noting, shifting  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        transformers_engine.fuse, FusedKV.write = fuse, write  # type: ignore[method-assign]


def escalate(base: str, records: dict[Configuration, list[Record]]) -> list[dict[str, Any]]:
    """Verify and escalate: recompute `first`, then `second`; go on to 15 % only where the answer changed on the way.
    Both blocks are kept, so what is charged is the last one's bill and a probe for each step before it."""
    of = {c.ratio: found for c, found in records.items() if c.rule == base and c.budget is None}
    found = []
    for first, second in ((0.025, 0.05), (0.05, 0.10)):
        steps = list(zip(of[first], of[second], of[0.15], strict=True))
        ends = [c if a.text != b.text else b for a, b, c in steps]
        kl, exact = fmean(r.first_token_kl for r in ends), fmean(r.exact for r in ends)
        charged = fmean(r.charged_budget_32 for r in ends)
        share = fmean(a.text != b.text for a, b, _ in steps)
        facts = {"first": first, "second": second, "escalated": share, "charged_budget_32_at_least": charged}
        found.append({**facts, "exact_match": exact, "first_token_kl": kl})
    return found


def main() -> None:
    """Run them all and write one JSON object."""
    parser = argparse.ArgumentParser(description="Candidate rules against one of them, on the selection set.")
    parser.add_argument("--base", default="effect_40", help="what the others are compared with")
    parser.add_argument("--questions", type=int, default=300, help="of those whose evidence stands in several chunks")
    parser.add_argument("--seed", type=int, default=900_001)
    parser.add_argument("--budgets", default="0.05,0.1", help="charged at 32 layers, comma-separated")
    parser.add_argument("--only", default="", help="candidates by name, comma-separated; all, shifts and escalation")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    one_thread()
    quiet_libraries()
    only = split_names(options.only)
    RULES.update({rule.name: rule for rule in CANDIDATES})
    base = options.base
    names = [base, *(rule.name for rule in CANDIDATES if rule.name != base and (not only or rule.name in only))]
    with load_engine("demo", dtype="float32", on_miss="inline") as engine:
        items = make_items(engine, Setting(6, 256), 7, 0.5, options.seed, options.questions, "selection")
        engines = Engines(engine)
        chosen = configurations(names, RATIOS, split_numbers(options.budgets))
        if not only:
            chosen.append(Configuration("blend", base, 0.025))
        records = run_items(engines, items, [Asked(chosen, 1.0)], tell)
        for weight in () if only else SHIFTS:
            with value_shift(weight):
                shifted = run_items(engines, items, [Asked(configurations([base], RATIOS), 1.0)], tell)
            name = f"value_shift_{weight:g}"
            records |= {c._replace(rule=name): found for c, found in shifted.items() if c.mode == "blend"}
            names.append(name)
        facts = {
            "command": shlex.join(["python", "-m", "benchmarks.selection_experiments", *sys.argv[1:]]),
            "hardware": hardware_card(engine.layers.device),
            "model": engine.name,
            "runs": [row.as_dict() for c, found in records.items() for row in rows_of(c, found) if row.kind in GROUPS],
            "paired": [
                found.as_dict()
                for name in names[1:]
                for found in differences(records, name, [base])
                if found.ratio == found.baseline_ratio
            ],
            "escalate": [] if only else escalate(base, records),
        }
    for found in facts["paired"]:
        if found["group"] == "references" and found["measure"] != "answer_kl":
            print({key: value for key, value in found.items() if key not in ("group", "baseline_ratio")})
    options.out.write_text(json.dumps(facts) + "\n")


def tell(stage: str, done: int, total: int | None) -> None:
    """Progress, now and then."""
    if done % 20 == 0:
        print(f"{stage} {done} of {total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
