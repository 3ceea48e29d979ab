"""The CacheBlend paper's figures (Yao et al., EuroSys 2025) on your model.

    python -m benchmarks.figures 12 --model MODEL --data musique --out FILE.json --plot FILE.png

Each takes a minute, 15b one and a half, on one CPU core with its defaults: the embedded model for figures of quality
and attention, random weights for figures of time. Figure 14 needs an environment with vLLM, and takes eight minutes.
`docs/paper.md` compares the paper's figures with these.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from benchmarks.figures import attention, quality, times
from benchmarks.figures.panels import draw_figure, table_lines
from benchmarks.figures.workload import Workload
from benchmarks.results import OutOption, write_result
from ragblend.cli.options import PlotOption
from ragblend.cli.printing import print_line, progress_bars
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.errors import UsageError
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.bench.common.hardware import hardware_card
from ragblend.lab.plots import check_plot
from ragblend.lab.tables import Facts

FIGURES = quality.FIGURES | attention.FIGURES | times.FIGURES
NAMES = sorted(FIGURES, key=lambda name: (int(name.rstrip("abc")), name))


def measure_figure(name: str, on_progress: Progress = ignore_progress, **options: Any) -> Facts:
    """Return the JSON object of figure `name`. `options`: fields of Workload; the figure sets those that are None.

    Raises UsageError for an unknown figure.
    """
    if name not in FIGURES:
        raise UsageError(f"figure is {name!r}; choose from {', '.join(NAMES)}")
    figure = FIGURES[name]
    given = {field: value for field, value in options.items() if value is not None}
    model = given.pop("model", None if name in times.FIGURES else "demo")
    work = Workload(model=model, on_progress=on_progress, **{**figure.defaults, **given})
    start_s = perf_counter()
    found = figure.measure(work)
    summary = (figure.measure.__doc__ or "").partition("\n")[0].rstrip(".")
    model_name = found.get("model") or Path(model or times.SHAPE).name
    questions = (
        ""
        if name in times.FIGURES
        else f", {work.num_questions} question{'s' * (work.num_questions > 1)} of {Path(work.data).name}"
    )
    return {
        "command": "benchmarks.figures",
        "figure": name,
        "title": f"Figure {name}. {summary}; {model_name}{questions}",
        "hardware": hardware_card(),
        "config": work.as_dict() | {"model": model_name},
        **found,
        "panels": [panel.as_dict() for panel in found["panels"]],
        "seconds": round(perf_counter() - start_s, 1),
    }


def main(
    name: Annotated[str, typer.Argument(help=f"Figure of the paper: {', '.join(NAMES)}.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="A folder or a Hugging Face id. Default: demo, or random weights for times."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Questions, as for `ragblend bench quality`. Default: demo.")
    ] = None,
    num_questions: Annotated[int | None, typer.Option("--num-questions", min=1, help="Number of questions.")] = None,
    num_chunks: Annotated[int | None, typer.Option("--num-chunks", min=2, help="Chunks of each prompt.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option("--chunk-tokens", min=1, help="Tokens of a chunk.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 1,
    out: OutOption = None,
    plot: PlotOption = None,
) -> None:
    """Measure a figure. Print its points and findings, draw it, and write its JSON object."""
    path = check_plot(plot)
    set_num_threads(threads)
    quiet_libraries()
    sizes = {"num_questions": num_questions, "num_chunks": num_chunks, "chunk_tokens": chunk_tokens}
    with progress_bars() as progress:
        facts = measure_figure(name, progress, model=model, data=data, dtype=dtype, threads=threads, **sizes)
    for line in table_lines(facts):
        print_line(line)
    if path is not None:
        draw_figure(facts, path)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(facts, out)


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(main)


if __name__ == "__main__":
    app()
