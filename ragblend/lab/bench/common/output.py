"""Output of the benchmarks: a hardware card and a table as text, the JSON object, and a picture that is drawn
from it."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.engine.report import BlendReport
from ragblend.ingestion.sync import Progress, ignore_progress
from ragblend.lab.bench.common.configs import BenchConfig, PromptConfig
from ragblend.lab.bench.common.hardware import hardware_lines
from ragblend.lab.plots import check_plot

Echo = Callable[[str], None]
Facts = dict[str, Any]
"""A JSON object: the result of a benchmark, or one of its runs."""


def result_facts(config: BenchConfig, model: str, hardware: Mapping[str, Any], **measured: Any) -> Facts:
    """Return the JSON object of a benchmark: its configuration, the model, the hardware card, and what was measured."""
    facts = {
        "schema_version": config.schema_version,
        "command": f"bench {config.command}",
        "hardware": hardware,
        "config": config.as_dict(),
        "model": Path(model).name,  # without its folder, which is of this machine
        **({"prompt_tokens": config.prompt_tokens} if isinstance(config, PromptConfig) else {}),
        **measured,
    }
    plain: Facts = json.loads(json.dumps(facts))
    return plain


class Benchmark(NamedTuple):
    """A benchmark: the function that measures a configuration, the table of its result, and its picture, if any."""

    measure: Callable[[Any, Progress], Facts]
    table: Callable[[Facts], list[str]]
    draw: Callable[[Mapping[str, Any], Path], None] | None = None

    def run(
        self,
        config: BenchConfig,
        *,
        echo: Echo,
        plot: str | Path | None = None,
        on_progress: Progress = ignore_progress,
    ) -> Facts:
        """Run `config`. Write card and table to `echo` and a picture to `plot`; return the JSON object."""
        path = check_plot(plot)
        facts = self.measure(config, on_progress)
        for line in (*hardware_lines(facts["hardware"]), "", *self.table(facts)):
            echo(line)
        if path is not None and self.draw is not None:
            self.draw(facts, path)
            echo(f"plot in {path}")
        return facts


Column = tuple[str, str, str | Callable[[Facts], Any]]
"""A column of a table: its title, its format, where ">8.2fx" appends an x, and a key or a function of a run."""


def format_table(columns: Sequence[Column], runs: Iterable[Facts]) -> list[str]:
    """Return a line of titles, then one line per run, with "-" for None."""
    lines = ["".join(_cell(title, re.findall(r"^.\d+", form)[0]) for title, form, _ in columns)]
    for run in runs:
        lines.append("".join(_cell(value(run) if callable(value) else run[value], form) for _, form, value in columns))
    return lines


def _cell(value: Any, form: str) -> str:
    """Return a value as text.

    >>> _cell(2.5, ">8.2fx"), _cell(None, ">4.1f")
    ('   2.50x', '   -')
    """
    width, kind, suffix = re.findall(r"([<>]\d+)(.*?)(x?)$", form)[0]
    text = "-" if value is None else f"{value:{kind}}{suffix}"
    return f"{text:{width}}"


def median_fields(reports: Sequence[BlendReport], *names: str) -> Facts:
    """Return the median of each field in `names` over the `reports`, by name."""
    return {name: float(statistics.median(getattr(report, name) for report in reports)) for name in names}
