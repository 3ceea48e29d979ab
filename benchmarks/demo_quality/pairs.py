"""Two configurations on the same questions: the difference of their means, with a paired bootstrap interval.

Questions differ far more from one another than rules do, so rules are compared question by question. Knows records;
nothing of how they came about. Read `differences` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.demo_quality.runs import Configuration, Record, kinds_of
from ragblend.intervals import mean_interval

GROUPS = ("all", "multi_hop", "references")
MEASURES = ("exact", "first_token_kl", "answer_kl")
NUM_RESAMPLES = 10_000

Records = Mapping[Configuration, Sequence[Record]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of `rule` minus mean of `baseline`, 95 % interval; for `exact` more is better, for KL less.

    Either `ratio` and `baseline_ratio` are given, or the 32-layer `budget` that both meet."""

    group: str
    measure: str
    rule: str
    baseline: str
    ratio: float | None
    baseline_ratio: float | None
    budget: float | None
    num_questions: int
    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether chance is an unlikely explanation."""
        return self.low > 0 or self.high < 0

    def as_dict(self) -> dict[str, Any]:
        """The difference as plain JSON values."""
        return asdict(self) | {"excludes_zero": self.excludes_zero}


def differences(records: Records, rule: str, baselines: Sequence[str]) -> list[Difference]:
    """`rule` minus each of `baselines` at equal ratio and at equal budget; and below a ratio, against the baselines
    there: does it need less for the same?"""
    found: list[Difference] = []
    for mine, theirs in _pairs(records, rule, baselines):
        for group in GROUPS:
            for measure in MEASURES:
                # Both lists are in the order of the questions; one that was asked of a share only is left out.
                values = [
                    getattr(a, measure) - getattr(b, measure)
                    for a, b in zip(records[mine], records[theirs], strict=True)
                    if group in kinds_of(a.kind)
                ]
                if values:
                    found.append(_difference(group, measure, mine, theirs, values))
    return found


def _pairs(records: Records, rule: str, baselines: Sequence[str]) -> Iterator[tuple[Configuration, Configuration]]:
    blends = [c for c in records if c.mode == "blend" and c.prefix_precompute and c.ratio < 1]
    for mine in (c for c in blends if c.rule == rule):
        for theirs in (c for c in blends if c.rule in baselines):
            same = mine.budget == theirs.budget and len(records[mine]) == len(records[theirs])
            if same and (mine.budget is not None or mine.ratio <= theirs.ratio):
                yield mine, theirs


def _difference(
    group: str, measure: str, mine: Configuration, theirs: Configuration, values: Sequence[float]
) -> Difference:
    low, high = mean_interval(values, num_resamples=NUM_RESAMPLES)
    at_ratio = mine.budget is None
    return Difference(
        group=group,
        measure=measure,
        rule=mine.rule,
        baseline=theirs.rule,
        ratio=mine.ratio if at_ratio else None,
        baseline_ratio=theirs.ratio if at_ratio else None,
        budget=mine.budget,
        num_questions=len(values),
        mean=fmean(values),
        low=low,
        high=high,
    )
