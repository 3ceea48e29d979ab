"""The figures of the CacheBlend paper (Yao et al., EuroSys 2025) on your model: a command and a plot each.

    python -m benchmarks.figures 12 --model MODEL --data musique --questions 40 --out FILE.json --plot FILE.png
    python -m benchmarks.figures 14 --model MODEL --out FILE.json --plot FILE.png     # where vLLM is installed
    python -m benchmarks.figures 15 --model MODEL --data musique --ratios 0.02,0.05,0.15,0.5 ...
    python -m benchmarks.figures 16 --model MODEL --data musique --chunk-tokens 128,256,512 ...
    python -m benchmarks.figures 17 --model MODEL --data musique --chunks 3,6,9 ...

12 quality over time to first token, 14 throughput, 15 recompute ratio, 16 chunk length, 17 number of chunks. Each is
`ragblend bench quality`, 14 `ragblend bench throughput`, over what the figure varies, and takes the options of that.
Read `run_figure` first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.bench.common.configs import BASELINES, BenchConfig, QualityConfig, ThroughputConfig, hints_of
from ragblend.bench.common.output import Echo, Tell, check_plot, on_terminal, present
from ragblend.bench.common.plots import Panel, plot_quality
from ragblend.cli.bench import PlotOption, config_from, options_of
from ragblend.cli.options import split_counts
from ragblend.cli.printing import out as stdout
from ragblend.cli.session import quiet_libraries, use_threads
from ragblend.errors import UsageError

if TYPE_CHECKING:
    from ragblend.bench.quality.study import QualityResult

FIRST_TOKEN_KL, ANSWER_KL = "KL(full || this) of the first token, nats", "KL(full || this) over the answer, nats"
GOLD_LOSS, TTFT = "loss of the gold answer, nats per token", "time to first token, seconds"
F1, ROUGE = "F1 of the greedy answer", "ROUGE-L of the greedy answer"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure shows: a benchmark with defaults of its own, over the values of one of its options."""

    help: str
    config: type[BenchConfig]
    defaults: Mapping[str, Any]
    panels: tuple[Panel, ...] = ()
    varied: str = ""  # the option that has several values where a run of the benchmark has one; "" where none has
    values: tuple[int, ...] = ()


def _over(place: str) -> tuple[Panel, ...]:
    return (
        Panel(place, "first_token_kl", FIRST_TOKEN_KL),
        Panel(place, "token_f1", F1),
        Panel(place, "gold_loss", GOLD_LOSS),
        Panel(place, "ttft_s", TTFT),
    )


RULES = ("ask", "cacheblend")
FIGURES: Mapping[int, Figure] = {
    12: Figure(
        "Quality over time to first token: modes, rules and all baselines.",
        QualityConfig,
        {"rules": RULES, "baselines": BASELINES, "ratios": (0.05, 0.15)},
        (
            Panel("ttft_s", "token_f1", F1),
            Panel("ttft_s", "rouge_l", ROUGE),
            Panel("ttft_s", "gold_loss", GOLD_LOSS),
            Panel("ttft_s", "answer_kl", ANSWER_KL),
        ),
    ),
    14: Figure(
        "Throughput: mean time to first token over the requests served per second, in vLLM; chunks are synthetic.",
        ThroughputConfig,
        {"rules": RULES},
    ),
    15: Figure(
        "Quality and time to first token over recompute ratios.",
        QualityConfig,
        {"rules": RULES, "ratios": (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)},
        _over("ratio"),
    ),
    16: Figure(
        "Quality and time to first token over chunk lengths, as many chunks of each.",
        QualityConfig,
        {"rules": RULES, "ratios": (0.15,)},
        _over("chunk_tokens"),
        "chunk_tokens",
        (64, 128, 256, 512),
    ),
    17: Figure(
        "Quality and time to first token over numbers of chunks.",
        QualityConfig,
        {"rules": RULES, "ratios": (0.15,)},
        _over("num_chunks"),
        "num_chunks",
        (2, 4, 6, 9, 12),
    ),
}


def run_figure(
    number: int, config: QualityConfig, values: Sequence[int] = (), progress: Tell | None = None
) -> list[QualityResult]:
    """Measure `config` at every value of what the figure varies, all checked before the first is run."""
    from ragblend.bench.quality.study import run_quality

    tell, varied = progress or (lambda line: None), FIGURES[number].varied
    if varied and not values:
        raise UsageError(f"no {varied} is given; choose one or more, such as {_listed(FIGURES[number].values)}")
    if varied == "chunk_tokens" and config.data == "demo":
        raise UsageError(
            "the sample corpus' paragraphs are as long as they are; choose --data lookup, musique or a file"
        )
    change: Any = replace  # of a field whose name is not known before
    points = [change(config, **{varied: value}) for value in values] if varied else [config]
    results = []
    for place, point in enumerate(points, start=1):
        if varied:
            tell(f"point {place} of {len(points)}: {varied} {getattr(point, varied)}")
        results.append(run_quality(point, progress))
    return results


def facts_of(number: int, results: Sequence[QualityResult]) -> dict[str, Any]:
    """The JSON object: that of `bench quality`, whose runs say what their prompts were made of."""
    every, varied = [result.as_dict() for result in results], FIGURES[number].varied
    runs = [
        {name: facts["config"][name] for name in ("num_chunks", "chunk_tokens")}
        | {"prompt_tokens": facts["prompt_tokens"], **run}
        for facts in every
        for run in facts["runs"]
    ]
    facts = every[0] | {"command": "benchmarks.figures", "figure": number, "runs": runs}
    if varied:
        facts["config"] = facts["config"] | {varied: [each["config"][varied] for each in every]}
        facts |= {name: [each[name] for each in every] for name in ("prompt_tokens", "num_questions")}
    return facts


def bench_figure(
    number: int, config: BenchConfig, values: Sequence[int], plot: Path | None, out: Path | None, echo: Echo
) -> dict[str, Any]:
    """Card and tables to `echo`, a picture to `plot`, the JSON object to `out`; returns it."""
    check_plot(plot)
    if isinstance(config, ThroughputConfig):
        from ragblend.bench.throughput import bench_throughput

        facts = bench_throughput(config, plot=plot, echo=echo) | {"command": "benchmarks.figures", "figure": number}
    else:
        from ragblend.bench.quality.study import table_lines

        assert isinstance(config, QualityConfig)
        results = run_figure(number, config, values, on_terminal())
        lines = [line for result in results for line in (*table_lines(result), "")]
        facts = present(
            facts_of(number, results),
            lines,
            echo,
            plot,
            lambda facts, path: plot_quality(facts, path, FIGURES[number].panels),
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


app = typer.Typer(
    help="The figures of the CacheBlend paper on your model.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)
OutOption = Annotated[Path | None, typer.Option("--out", help="Write the JSON object, FILE.json.")]


def _command(number: int, figure: Figure) -> Callable[..., None]:
    """The figure's command: the benchmark's options with the figure's defaults, `--out` and `--plot`."""

    def command(*, plot: Path | None, out: Path | None, **given: Any) -> None:
        use_threads(given["threads"])
        quiet_libraries()
        values = split_counts(given[figure.varied]) if figure.varied else []
        if figure.varied:
            given[figure.varied] = (values or figure.values)[0]
        config = config_from(figure.config, {"budgets": "", **given})
        bench_figure(number, config, values, plot, out, lambda line: stdout.print(line, markup=False))

    parameters = [_parameter(figure, each) for each in options_of(figure.config) if each.name != "budgets"]
    files = {"out": OutOption, "plot": PlotOption}
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in files.items()
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {}
    return command


def _parameter(figure: Figure, option: Parameter) -> Parameter:
    if option.name == figure.varied:
        several = copy(hints_of(figure.config)[option.name].__metadata__[0])
        several.min, several.help = None, "Comma-separated: a point each."
        return option.replace(default=_listed(figure.values), annotation=Annotated[str, several])
    if option.name in figure.defaults:
        return option.replace(default=_listed(figure.defaults[option.name]))
    return option


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


for _number, _figure in FIGURES.items():
    app.command(str(_number), help=_figure.help)(_command(_number, _figure))


if __name__ == "__main__":
    app()
