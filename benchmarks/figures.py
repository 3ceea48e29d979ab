"""The CacheBlend paper's figure 12 (Yao et al., EuroSys 2025) on your model: quality over time to first token.

    python -m benchmarks.figures --model MODEL --data musique --num-questions 40 --out FILE.json --plot FILE.png

`ragblend bench quality` with its options, and the baselines of `benchmarks.baselines`, which fuse no KV. Read
`run_figure` first.
"""

# No `from __future__ import annotations`: `typer_parameters_of` reads FigureConfig's annotations when this file runs.

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from benchmarks.baselines import BASELINES, Baseline, ask_baseline
from benchmarks.results import write_result
from ragblend.cli.lab.bench import config_from, typer_parameters_of
from ragblend.cli.options import PlotOption
from ragblend.cli.printing import print_line, progress_bars
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.bench.common.output import Benchmark, Echo
from ragblend.lab.engines import with_own_store
from ragblend.lab.plots import Panel, plot_quality
from ragblend.lab.quality.measures import Configuration, token_log_probs
from ragblend.lab.quality.study import (
    QualityRecord,
    answer_in_full,
    run_quality,
    table_lines,
)
from ragblend.lab.quality.tasks import QaCase
from ragblend.lab.tables import Facts
from ragblend.prompt.types import Prompt

PANELS: tuple[Panel, ...] = (
    ("ttft_s", "token_f1", "F1 of the greedy answer"),
    ("ttft_s", "rouge_l", "ROUGE-L of the greedy answer"),
    ("ttft_s", "gold_loss", "loss of the gold answer, nats per token"),
    ("ttft_s", "answer_kl", "KL(full || this) over the answer, nats"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureConfig(QualityConfig):
    """The options of `bench quality`, and the baselines."""

    rules: Annotated[tuple[str, ...], Option("--rules", help="Comma-separated.")] = ("ask", "cacheblend")
    baselines: Annotated[
        tuple[Baseline, ...],
        Option("--baselines", help="Baselines without KV fusion, comma-separated: map_reduce, map_rerank, reorder."),
    ] = BASELINES

    def resolve_options(self) -> None:
        """Set the defaults of `bench quality`. Reject unknown baselines, and values that `bench quality` rejects."""
        QualityConfig.resolve_options(self)
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise UsageError(f"baseline is {baseline!r}; choose from {', '.join(BASELINES)}")


def run_figure(config: FigureConfig, on_progress: Progress = ignore_progress) -> Facts:
    """Return the JSON object of `bench quality` with one more run for each baseline."""

    def measure_extra(base: TransformersEngine, prompt: Prompt, case: QaCase) -> dict[Configuration, QualityRecord]:
        return measure_baselines(base, prompt, case, config.baselines, case.answer_tokens(config.answer_tokens))

    return run_quality(config, on_progress, measure_extra)


def measure_baselines(
    base: TransformersEngine, prompt: Prompt, case: QaCase, names: Sequence[Baseline], answer_tokens: int
) -> dict[Configuration, QualityRecord]:
    """Measure one prompt by each baseline. Their ratio is 1, because they prefill all of their prompts' tokens."""
    engine = with_own_store(base, system=case.system, context="none")
    expected = answer_in_full(engine, prompt, case, answer_tokens)
    records = {}
    for name in names:
        last = ask_baseline(name, engine, prompt, case, answer_tokens)
        seen = token_log_probs(engine, last.prompt, last.answer.fused, expected.full.token_ids)
        configuration = Configuration(name, "none", 1.0)  # type: ignore[arg-type]  # no mode of the engine
        records[configuration] = expected.record(engine, last.answer, seen, last.prompt)
    return records


def bench_figure(config: FigureConfig, plot: Path | None, out: Path | None, echo: Echo) -> dict[str, Any]:
    """Print hardware card and table with `echo`, draw `plot`, write `out`; return the JSON object."""
    with progress_bars() as progress:
        benchmark = Benchmark(run_figure, table_lines, lambda facts, path: plot_quality(facts, path, PANELS))
        facts = benchmark.run(config, echo=echo, plot=plot, on_progress=progress)
    facts |= {"command": "benchmarks.figures", "figure": 12}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(facts, out)
    return facts


def _figure(*, plot: Path | None, out: Path | None, **given: Any) -> None:
    set_num_threads(given["threads"])
    quiet_libraries()
    bench_figure(config_from(FigureConfig, given), plot, out, print_line)


OutOption = Annotated[Path | None, typer.Option("--out", help="Write the JSON object, FILE.json.")]
_FILES = {"out": OutOption, "plot": PlotOption}
_figure.__signature__ = Signature(  # type: ignore[attr-defined]  # what typer reads
    [
        *typer_parameters_of(FigureConfig),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in _FILES.items()),
    ]
)
_figure.__annotations__ = {}

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command(help="The CacheBlend paper's figure 12 on your model: quality over time to first token.")(_figure)


if __name__ == "__main__":
    app()
