"""`python -m benchmarks.demo_quality`: parse, measure, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragblend.cli.options import JsonOption, flag, split_names, split_numbers
from ragblend.cli.printing import err, out, print_json, progress_bars
from ragblend.cli.session import one_thread, quiet_libraries

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    model: Annotated[str | None, flag("model")] = None,
    num_questions: Annotated[
        int | None,
        typer.Option("--num-questions", "--questions", help="Equally many of each kind, 210; with --corpus 200."),
    ] = None,
    multi_hop: Annotated[
        int | None, typer.Option("--multi-hop", help="So many more whose evidence stands in several chunks, 1500.")
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", help="reported; selection, to choose rules by; any.", show_default=False)
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", help="Chunks per context.")] = 6,
    context_tokens: Annotated[int, typer.Option("--context-tokens", help="Prefix and chunks, about.")] = 256,
    rules: Annotated[str | None, typer.Option("--rules", help="Comma-separated: auto, cacheblend, ...")] = None,
    controls: Annotated[
        str | None, typer.Option("--controls", help="Rules that get a share of the questions: random, ...")
    ] = None,
    ratios: Annotated[str | None, typer.Option("--ratios", help="Comma-separated shares, 0 to 1.")] = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", "--budget", help="Charged budgets in a model of 32 layers, comma-separated shares."),
    ] = None,
    system_share: Annotated[float | None, typer.Option("--system-share", help="Stories with a system text.")] = None,
    off_share: Annotated[
        float | None, typer.Option("--off-share", help="Questions also answered from KV computed without the prefix.")
    ] = None,
    control_share: Annotated[
        float | None, typer.Option("--control-share", help="Questions that --controls get, and ratio 1.0.")
    ] = None,
    noise_share: Annotated[float | None, typer.Option("--noise-share", help="Questions prefilled in bfloat16.")] = None,
    order_share: Annotated[
        float | None, typer.Option("--order-share", help="Questions over several chunks asked in two chunk orders.")
    ] = None,
    lengths: Annotated[
        bool, typer.Option("--lengths/--no-lengths", help="Also contexts of 256 to 4096 tokens.")
    ] = False,
    length_questions: Annotated[int, typer.Option("--length-questions", help="In the shortest of them.")] = 210,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", help="Measure this corpus end to end instead, retrieval included.")
    ] = None,
    k: Annotated[int | None, flag("k")] = None,
    neighbours: Annotated[int | None, flag("neighbours")] = None,
    chunk_size: Annotated[int, typer.Option("--chunk-size", help="Most tokens per chunk of the corpus.")] = 112,
    context: Annotated[str | None, flag("context")] = None,
    embedder: Annotated[str | None, flag("embedder")] = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="JSON file, data/results/quality[-corpus].json; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture, docs/quality.png with matplotlib; - for none.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json_: JsonOption = False,
) -> None:
    """Quality against full prefill by rule, ratio and budget, on held-out stories; or of a corpus, end to end."""
    one_thread()
    quiet_libraries()
    from benchmarks.demo_quality.study import bench_quality as run

    stories = {
        "model": model,
        "num_questions": num_questions,
        "num_multi_hop": multi_hop,
        "part": part,
        "num_chunks": chunks,
        "context_tokens": context_tokens,
        "rules": _names(rules),
        "controls": _names(controls),
        "ratios": _numbers(ratios),
        "budgets": _numbers(budgets),
        "system_share": system_share,
        "off_share": off_share,
        "control_share": control_share,
        "noise_share": noise_share,
        "order_share": order_share,
        "lengths": lengths,
        "length_questions": length_questions,
        "seed": seed,
    }
    end_to_end = {
        "corpus": corpus,
        "k": k,
        "neighbours": neighbours,
        "chunk_size": chunk_size,
        "context": context,
        "embedder": embedder,
    }
    print_facts = json_ or out_ == Path("-")
    with progress_bars() as progress:
        facts = run(
            stories,
            end_to_end,
            out=out_,
            plot=plot,
            echo=lambda line: (err if print_facts else out).print(line, markup=False),
            progress=progress,
        )
    if print_facts:
        print_json(facts)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(split_names(text))


def _numbers(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(split_numbers(text))


if __name__ == "__main__":
    app()
