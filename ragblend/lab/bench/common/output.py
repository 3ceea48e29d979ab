"""Output of the benchmarks: a hardware card and a table as text, the JSON object, and a picture that is drawn
from it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.engine.report import BlendReport
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import BenchConfig, PromptConfig
from ragblend.lab.bench.common.hardware import hardware_lines
from ragblend.lab.plots import check_plot
from ragblend.lab.tables import Facts

Echo = Callable[[str], None]


def result_facts(config: BenchConfig, model: str, hardware: Mapping[str, Any], **measured: Any) -> Facts:
    """Return the JSON object of a benchmark: its configuration, the model, the hardware card, and what was measured."""
    facts = {
        "schema_version": config.schema_version,
        "command": f"bench {type(config).__name__.removesuffix('Config').lower()}",
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
        """Run `config`. Print hardware card and table by `echo`, write a picture to `plot`, return the JSON object."""
        path = check_plot(plot)
        facts = self.measure(config, on_progress)
        for line in (*hardware_lines(facts["hardware"]), "", *self.table(facts)):
            echo(line)
        if path is not None and self.draw is not None:
            self.draw(facts, path)
            echo(f"plot in {path}")
        return facts


def median_fields(reports: Sequence[BlendReport], *names: str) -> Facts:
    """Return the median of each field in `names` over the `reports`, by name."""
    return {name: float(statistics.median(getattr(report, name) for report in reports)) for name in names}
