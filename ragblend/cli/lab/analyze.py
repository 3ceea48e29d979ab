"""`ragblend analyze`: read request logs and print what prefix caching and blending would save. Sends nothing to other
machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import join_names, plural, print_result, progress_bars
from ragblend.config import Settings
from ragblend.errors import UsageError

if TYPE_CHECKING:
    from ragblend.lab.traffic.tokens import Tokenizer

SCHEMA_VERSION = 1


@with_settings("")
def analyze(
    settings: Settings,
    logs: Annotated[
        list[str],
        typer.Argument(
            help="Files of JSON lines, or - for stdin. A line is the body of an OpenAI request: messages or a prompt."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Count tokens and KV bytes with this model. Default: tokens are estimated from the characters.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="FILE", help="Times of a machine, written by `ragblend profile --json`."),
    ] = None,
    recompute_ratio: Annotated[
        float | None,
        typer.Option("--ratio", help="Share of the stored tokens that blending recomputes. Default: the rule's."),
    ] = None,
    show_texts: Annotated[
        bool,
        typer.Option("--show-texts", help="Print the first words of the most repeated chunks. Default: only hashes."),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Read logged requests and print what prefix caching and blending would save.

    A line looks like {"messages": [{"role": "user", "content": "Who signed?"}]} or {"prompt": "Who signed?"}. Lines are
    in the order in which the requests were sent. If a log has the bodies in a field: jq -c .body log.jsonl
    """
    from ragblend.lab.traffic.analysis import analyze as run
    from ragblend.lab.traffic.cost_model import blending_verdict, precompute_hint

    tokenizer = _choose_tokenizer(model, settings)
    blend = _blend_options(settings, model, profile, recompute_ratio)
    with progress_bars() as progress:
        facts = run(logs, tokenizer, **blend, show_texts=show_texts, progress=progress)
    facts |= {
        "schema_version": SCHEMA_VERSION,
        "ratio": blend["ratio"],
        "verdict": blending_verdict(facts),
        "hint": precompute_hint(facts["first_use_share"]),
    }
    print_result(
        facts, "\n".join([*analysis_lines(facts), "", *filter(None, (facts["hint"], facts["verdict"]))]), json_
    )


def _choose_tokenizer(model: str | None, settings: Settings) -> Tokenizer:
    from ragblend.lab.traffic.tokens import EstimatingTokenizer, ModelTokenizer

    if model is None:
        return EstimatingTokenizer()
    from ragblend.engine.transformers.model import load_tokenizer

    tokenizer, _ = load_tokenizer(model, settings.model_options)
    return ModelTokenizer(tokenizer, Path(model).name)


def _blend_options(settings: Settings, model: str | None, profile: str | None, ratio: float | None) -> dict[str, Any]:
    """Return the keyword arguments of `analyze` about the rule, the machine and the model."""
    from ragblend.engine.fusion.rules import find_rule
    from ragblend.lab.model_sizes import read_model_sizes
    from ragblend.lab.plan import read_profile

    if ratio is not None and not 0 <= ratio <= 1:
        raise UsageError(f"--ratio is {ratio}; choose 0 (full reuse) to 1 (full prefill)")
    measured = read_profile(profile) if profile is not None else None
    rule = find_rule("auto", measured.num_layers) if measured is not None else find_rule("auto")
    nbytes = measured.bytes_per_token if measured is not None else None
    if measured is None and model is not None:
        nbytes = read_model_sizes(model, settings.model_options).stored_bytes_per_token()
    return {
        "ratio": rule.ratio if ratio is None else ratio,
        "probes_first": rule.probes_before_selection,
        "profile": measured,
        "kv_bytes_per_token": nbytes,
    }


# -- printing


def analysis_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines to print for an analysis. `facts`: the JSON object of the analysis."""
    estimated = facts["tokens_are_estimated"]
    by = "estimated from the characters; --model counts them" if estimated else f"by {facts['tokens_by']}"
    lines = [
        f"{plural(facts['num_requests'], 'request')} of {plural(len(facts['traces']), 'file')}, "
        f"{facts['num_tokens']} prompt tokens ({by})",
    ]
    if facts["num_skipped"]:
        lines.append(f"{facts['num_skipped']} lines have no request: {join_names(facts['skipped'])}")
    if facts["num_media"]:
        lines.append(f"{facts['num_media']} images, files or sounds; their tokens are not counted")
    shares = facts["shares"]
    return [
        *lines,
        "",
        f"{shares['prefix']:>6.1%} of the tokens repeat the start of an earlier prompt: prefix caching reuses them",
        f"{shares['elsewhere']:>6.1%} repeat text from elsewhere in earlier prompts: only stored chunks reuse them",
        f"{shares['new']:>6.1%} are new",
        *_chunk_lines(facts),
        *_curve_lines(facts),
        *_saving_lines(facts),
    ]


def _chunk_lines(facts: Mapping[str, Any]) -> list[str]:
    chunks = facts["chunks"]
    if not chunks:
        return []
    title = f"{plural(facts['num_chunks'], 'chunk')} of text repeated"
    if len(chunks) < facts["num_chunks"]:
        title += f", the {len(chunks)} in most requests"
    title += ":" if "text" in chunks[0] else " (--show-texts prints how each begins):"
    lines = ["", title, f"  {'hash':<18}{'tokens':>7}{'requests':>10}"]
    for each in chunks:
        text = "" if "text" not in each else f"  {' '.join(each['text'].split())}"
        lines.append(f"  {each['hash']:<18}{each['tokens']:>7}{each['requests']:>10}{text}")
    return lines


def _curve_lines(facts: Mapping[str, Any]) -> list[str]:
    if not facts["curve"]:
        return []
    from ragblend.engine.store.tiered import format_bytes

    lines = ["", "Share of all prompt tokens that a store of this size would serve:"]
    for point in facts["curve"]:
        size = f"{point['tokens']} tokens" if point["bytes"] is None else format_bytes(point["bytes"])
        lines.append(f"  {size:<16}{point['lru']:>8.1%}")
    return lines


def _saving_lines(analysis: Mapping[str, Any]) -> list[str]:
    facts = analysis["saving"]
    seconds = facts["unit"] == "seconds"
    title, unit = ("time to first token", " s") if seconds else ("tokens computed", "")
    names = {"full": "full prefill", "prefix": "prefix caching", "blend": "blending"}
    if "ratio" in analysis:
        names["blend"] += f", {analysis['ratio']:.0%} recomputed"
    lines = ["", f"  {'mean per request':<26}{title:>20}{'prompts in the same time':>26}"]
    for mode, name in names.items():
        faster = facts.get(f"{mode}_throughput", 1.0)
        lines.append(f"  {name:<26}{f'{facts[mode]:.4g}{unit}':>20}{f'{faster:.2f}x':>26}")
    if not seconds:
        lines.append("  in seconds: ragblend profile --model MODEL --json > machine.json, then --profile machine.json")
    return lines
