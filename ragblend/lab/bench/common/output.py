"""What every benchmark does with its result: card and table for people, a picture from its JSON object."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ragblend.engine.report import BlendReport
from ragblend.lab.bench.common.configs import BenchConfig, PromptConfig
from ragblend.lab.bench.common.hardware import card_lines
from ragblend.lab.plots import check_plot

Draw = Callable[[Mapping[str, Any], Path], None]
Echo = Callable[[str], None]
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything that a benchmark found, and what it was run on. What a subclass adds is in the JSON object, too."""

    config: Any  # a BenchConfig
    name: str  # of the model
    hardware: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of the command line."""
        config: BenchConfig = self.config
        own = [each.name for each in fields(self)][len(fields(BenchResult)) :]
        facts = {
            "schema_version": config.schema_version,
            "command": f"bench {config.command}",
            "hardware": self.hardware,
            "config": config.as_dict(),
            "model": Path(self.name).name,  # where it lies says nothing elsewhere
            **({"prompt_tokens": config.prompt_tokens} if isinstance(config, PromptConfig) else {}),
            **{name: getattr(self, name) for name in own},
        }
        plain: dict[str, Any] = json.loads(json.dumps(facts, default=asdict))
        return plain


C = TypeVar("C", bound=BenchConfig)
R = TypeVar("R", bound=BenchResult)


def run_benchmark(
    config: C,
    run: Callable[[C, ProgressCallback | None], R],
    table: Callable[[R], list[str]],
    echo: Echo,
    plot: str | Path | None = None,
    draw: Draw | None = None,
) -> dict[str, Any]:
    """Run `config`; card and table to `echo`, a picture to `plot`; returns the JSON object."""
    place = check_plot(plot)
    result = run(config, make_terminal_progress())
    return report_result(result.as_dict(), table(result), echo, place, draw)


class Column(NamedTuple):
    """A column of a table: a run's attribute, or what is made of the run, written by `spec`; ">8.2fx" ends in an x."""

    title: str
    spec: str
    value: str | Callable[[Any], Any]

    def head(self) -> str:
        """Return the title, as wide as the values."""
        return f"{self.title:{self.spec[0]}{self._width}}"

    def cell(self, run: object) -> str:
        """Return the run's value; "-" for None."""
        value = self.value(run) if callable(self.value) else getattr(run, self.value)
        text = "-" if value is None else f"{value:{self.spec[0]}{self.spec[len(self._width) + 1 :].removesuffix('x')}}"
        text += "x" if value is not None and self.spec.endswith("x") else ""
        return f"{text:{self.spec[0]}{self._width}}"

    @property
    def _width(self) -> str:
        return self.spec[1:].partition(".")[0].rstrip("x")


def format_table(columns: Sequence[Column], runs: Iterable[object]) -> list[str]:
    """Return a line of titles, then one per run."""
    titles = "".join(column.head() for column in columns)
    return [titles, *("".join(column.cell(run) for column in columns) for run in runs)]


def medians(reports: Sequence[BlendReport], *names: str) -> dict[str, Any]:
    """Return the reports' medians of these fields."""
    return {name: float(statistics.median(getattr(report, name) for report in reports)) for name in names}


def make_terminal_progress() -> ProgressCallback | None:
    """Where progress goes: stderr, if somebody looks at it."""
    return _print_progress if sys.stderr.isatty() else None


def report_result(
    facts: dict[str, Any], table: Sequence[str], echo: Echo, plot: Path | None = None, draw: Draw | None = None
) -> dict[str, Any]:
    """Card and table to `echo`, the picture of `facts` to `plot`; returns `facts`."""
    for line in (*card_lines(facts["hardware"]), "", *table):
        echo(line)
    if plot is not None and draw is not None:
        draw(facts, plot)
        echo(f"plot in {plot}")
    return facts


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
