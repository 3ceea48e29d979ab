"""Output of the benchmarks: a hardware card and a table as text, the JSON object, and a picture that is drawn
from it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.engine.report import BlendReport
from ragblend.ingestion.sync import Progress, ignore_progress
from ragblend.lab.bench.common.configs import BenchConfig, PromptConfig
from ragblend.lab.bench.common.hardware import hardware_lines
from ragblend.lab.plots import check_plot

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of a benchmark, its configuration and its machine. `as_dict` includes the fields of subclasses."""

    config: Any  # a BenchConfig
    name: str  # the model's
    hardware: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object that the command line prints."""
        config: BenchConfig = self.config
        own = [each.name for each in fields(self)][len(fields(BenchResult)) :]
        facts = {
            "schema_version": config.schema_version,
            "command": f"bench {config.command}",
            "hardware": self.hardware,
            "config": config.as_dict(),
            "model": Path(self.name).name,  # without its folder, which is of this machine
            **({"prompt_tokens": config.prompt_tokens} if isinstance(config, PromptConfig) else {}),
            **{name: getattr(self, name) for name in own},
        }
        plain: dict[str, Any] = json.loads(json.dumps(facts, default=asdict))
        return plain


class Benchmark(NamedTuple):
    """A benchmark: the function that measures a configuration, the table of its result, and its picture, if any."""

    measure: Callable[[Any, Progress], BenchResult]
    table: Callable[[Any], list[str]]
    draw: Callable[[Mapping[str, Any], Path], None] | None = None

    def run(
        self,
        config: BenchConfig,
        *,
        echo: Echo,
        plot: str | Path | None = None,
        on_progress: Progress = ignore_progress,
    ) -> dict[str, Any]:
        """Run `config`. Print hardware card and table by `echo`, write a picture to `plot`, return the JSON object."""
        path = check_plot(plot)
        result = self.measure(config, on_progress)
        facts = result.as_dict()
        for line in (*hardware_lines(facts["hardware"]), "", *self.table(result)):
            echo(line)
        if path is not None and self.draw is not None:
            self.draw(facts, path)
            echo(f"plot in {path}")
        return facts


class Column(NamedTuple):
    """A column of a table. `value`: name of a run's attribute, or a function of the run. `spec`: Python format of the
    value; a final "x", as in ">8.2fx", appends an x to the number."""

    title: str
    spec: str
    value: str | Callable[[Any], Any]

    def head(self) -> str:
        """Return the title, as wide as the values."""
        return f"{self.title:{self.spec[0]}{self._width}}"

    def cell(self, run: object) -> str:
        """Return the run's value as text; "-" for None."""
        value = self.value(run) if callable(self.value) else getattr(run, self.value)
        text = "-" if value is None else f"{value:{self.spec[0]}{self.spec[len(self._width) + 1 :].removesuffix('x')}}"
        text += "x" if value is not None and self.spec.endswith("x") else ""
        return f"{text:{self.spec[0]}{self._width}}"

    @property
    def _width(self) -> str:
        return self.spec[1:].partition(".")[0].rstrip("x")


def format_table(columns: Sequence[Column], runs: Iterable[object]) -> list[str]:
    """Return a line of titles, then one line per run."""
    titles = "".join(column.head() for column in columns)
    return [titles, *("".join(column.cell(run) for column in columns) for run in runs)]


def median_fields(reports: Sequence[BlendReport], *names: str) -> dict[str, Any]:
    """Return the median of each field in `names` over the `reports`, by name."""
    return {name: float(statistics.median(getattr(report, name) for report in reports)) for name in names}
