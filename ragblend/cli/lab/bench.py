"""`ragblend bench ttft | quality`: parse the options, run one benchmark, print.

Options are the fields of the benchmark's configuration (`bench.common.configs`). A command imports its benchmark when
it runs, because importing torch is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer

from ragblend.cli.groups import SectionedHelpGroup
from ragblend.cli.options import JsonOption, PlotOption, json_object, split_names, split_numbers
from ragblend.cli.printing import print_json, print_line, print_notice, progress_bars
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.lab.bench.common.configs import BenchConfig, QualityConfig, TtftConfig, get_typer_options

if TYPE_CHECKING:
    from ragblend.lab.bench.common.output import Benchmark

bench_app = typer.Typer(
    help="Compare modes by measuring them in one process.",
    cls=SectionedHelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)


def typer_parameters_of(config: type[BenchConfig]) -> list[Parameter]:
    """Return one keyword parameter for typer per field of `config`."""
    parameters: list[Parameter] = []
    defaults: dict[str, Any] = {each.name: each.default for each in fields(config)}
    for name, (kind, option) in get_typer_options(config).items():
        default = defaults[name] if defaults[name] is not MISSING else None
        if _is_list(kind) or get_origin(kind) is Mapping:
            kind = str | None
            default = None if default is None else ",".join(f"{value}" for value in default)
        parameters.append(_parameter(name, Annotated[kind, option], default))
    return parameters


C = TypeVar("C", bound=BenchConfig)


def config_from(config: type[C], values: Mapping[str, Any]) -> C:
    """Return an instance of the class `config`. `values`: the options of the command line, by field name."""
    flags = {}
    for name, (kind, _) in get_typer_options(config).items():
        value = values[name]
        if _is_list(kind) and value is not None:
            value = tuple(split_numbers(value) if "float" in str(kind) else split_names(value))
        elif get_origin(kind) is Mapping:
            value = json_object(value, f"--{name.replace('_', '-')}")
        flags[name] = value
    return config(**flags)


def _is_list(kind: Any) -> bool:
    return any(get_origin(each) is tuple for each in (kind, *get_args(kind)))


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def make_benchmark_command(
    config: type[BenchConfig], find_benchmark: Callable[[], Benchmark], *, draws: bool = True
) -> Callable[..., None]:
    """Return the function of a command that runs a benchmark with the options of `config`, for typer.

    `draws`: True adds the option --plot.
    """

    def command(*, json_: bool, plot: str | None = None, **values: Any) -> None:
        set_num_threads(values["threads"])
        quiet_libraries()
        benchmark = find_benchmark()
        lines: list[str] = []
        with progress_bars() as progress:
            facts = benchmark.run(config_from(config, values), plot=plot, echo=lines.append, on_progress=progress)
        for line in lines:
            (print_notice if json_ else print_line)(line)
        if json_:
            print_json(facts)

    parameters = [*typer_parameters_of(config), *[_parameter("plot", PlotOption, None)] * draws]
    parameters.append(_parameter("json_", JsonOption, False))
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {}
    return command


def _ttft() -> Benchmark:
    from ragblend.lab.bench.ttft import BENCHMARK

    return BENCHMARK


def _quality() -> Benchmark:
    from ragblend.lab.quality.study import BENCHMARK

    return BENCHMARK


bench_app.command(
    "ttft",
    help="Measure time to first token in the four modes: medians of lookup + load + fusion + first token after a "
    "warm-up.",
)(make_benchmark_command(TtftConfig, _ttft))
bench_app.command(
    "quality",
    help="""Measure, on your model and questions, how close answers from fused KV are to full prefill's, and how good.

    Questions come from a file ({question, answers, passages} in JSON or JSONL, or 2WikiMQA, MuSiQue, SAMSum or
    MultiNews in LongBench's form or the raw one), from the checkout's data/questions (musique, nq), or from the sample
    corpus (demo).
    """,
)(make_benchmark_command(QualityConfig, _quality))
