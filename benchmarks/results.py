"""Helpers of the benchmarks: common options, lists of numbers, and results as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ragblend.cli.lab.bench import make_benchmark_command
from ragblend.cli.options import split_numbers
from ragblend.cli.printing import print_json
from ragblend.errors import UsageError
from ragblend.lab.bench.common.configs import BenchConfig
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.bench.common.output import Benchmark

SCHEMA_VERSION = 1

ModelOption = Annotated[str, typer.Option("--model", help="A folder or a Hugging Face id.")]
ServerPython = Annotated[
    str, typer.Option("--server-python", help="Interpreter of an environment with vLLM and ragblend.")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="JSON file of the result. Default: stdout.")]


def write_result(result: Mapping[str, Any], out: Path | None, device: torch.device | str = "cpu") -> None:
    """Write `result` as JSON to the file `out`, or to stdout if `out` is None.

    Adds the schema version, and this machine's hardware card if `result` has none.
    """
    body = {"schema_version": SCHEMA_VERSION, "hardware": result.get("hardware") or hardware_card(device), **result}
    if out is None:
        print_json(body)
    else:
        out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_both(result: Mapping[str, Any], out: Path | None) -> None:
    """Write `result` as JSON to stdout, and to the file `out` if it is given."""
    if out is not None:
        write_result(result, out)
    write_result(result, None)


def split_counts(text: str) -> list[int]:
    """Return the whole numbers in a comma-separated option. Raises UsageError for other texts."""
    numbers = split_numbers(text)
    if any(number % 1 for number in numbers):
        raise UsageError(f"{text!r} is not a list of whole numbers; write them like 3,6,9")
    return [int(number) for number in numbers]


def run_benchmark(config: type[BenchConfig], benchmark: Benchmark) -> None:
    """Run a benchmark with the options of the command line, which are the fields of `config`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(make_benchmark_command(config, lambda: benchmark, draws=benchmark.draw is not None))
    app()
