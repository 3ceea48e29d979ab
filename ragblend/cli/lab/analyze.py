"""`ragblend analyze`: read logs, say what prefix caching and blending would do for them. Nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import print_notice, print_result, progress_bars
from ragblend.config import Settings
from ragblend.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.tuning.loading_controller import MachineProfile
    from ragblend.lab.traffic.analysis import AnalysisConfig
    from ragblend.lab.traffic.tokens import Tokens

TIER = "disk"


@with_settings("store backend dtype device trust_remote_code")
def analyze(
    settings: Settings,
    trace: Annotated[list[str], typer.Argument(help="OpenAI bodies, a line each: files, folders, or - for stdin.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="Its tokenizer and KV; a local folder. Without it tokens are estimated."),
    ] = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option("--kv-bytes-per-token", help="Instead of what the model's config says.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Times: a file of `ragblend profile --json`; else the model's in the store.",
        ),
    ] = None,
    rule: Annotated[str, typer.Option("--rule", help="What blending recomputes by.")] = "auto",
    ratio: Annotated[
        float | None, typer.Option("--ratio", help="The share that it recomputes; without it the rule's.")
    ] = None,
    show_texts: Annotated[
        bool, typer.Option("--show-texts", help="Print how the top chunks begin; else only hashes.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw shares, chunks and the store's hits, FILE.png.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Tell from logged requests what prefix caching and blending would save, and how large a store that takes."""
    from ragblend.lab.bench.common.plots import check_plot

    place = check_plot(plot)
    for name, value in (("--kv-bytes-per-token", kv_bytes_per_token), ("--ratio", ratio)):
        if value is not None and value < 0:
            raise UsageError(f"{name} is {value}; give 0 or more")
    from ragblend.lab.traffic.analysis import analyze as run
    from ragblend.lab.traffic.cost_model import hint, verdict

    named = model or (settings.model if settings.model != Settings().model else None)
    tokens = _tokens_of(named, settings, show_texts)
    measured = _profile_of(profile, named, settings)
    config = _config(settings, named, kv_bytes_per_token, rule, ratio, measured)
    with progress_bars() as progress:
        facts = run(trace, tokens, config._replace(show_texts=show_texts), progress)
    facts |= {"ratio": config.blend.ratio, "verdict": verdict(facts), "hint": hint(facts["first_use_share"])}
    if place is not None:
        from ragblend.lab.traffic.plot import plot_analysis

        plot_analysis(facts, place)
        print_notice(f"plot in {place}")
    print_result(facts, "\n".join([*lines_of(facts), "", *filter(None, (facts["hint"], facts["verdict"]))]), json_)


def _tokens_of(named: str | None, settings: Settings, show_texts: bool) -> Tokens:
    """Those of the model of that name; estimated without one."""
    from ragblend.lab.traffic.tokens import Estimate, ModelTokens

    if named is None:
        return Estimate(keep_texts=show_texts)
    from ragblend.engine.transformers.model import load_tokenizer
    from ragblend.options import ModelOptions

    tokenizer, _ = load_tokenizer(named, ModelOptions(trust_remote_code=settings.trust_remote_code))
    return ModelTokens(tokenizer, Path(named).name)


def _profile_of(path: str | None, named: str | None, settings: Settings) -> MachineProfile | None:
    """The machine profile in a file, or else in the store; None where there is none."""
    from ragblend.lab.traffic.models import profile_in_store, read_profile

    if path is not None:
        return read_profile(path)
    return profile_in_store(settings) if named is not None and not settings.is_served else None


def _config(
    settings: Settings,
    named: str | None,
    kv_bytes: int | None,
    rule: str,
    ratio: float | None,
    measured: MachineProfile | None,
) -> AnalysisConfig:
    """What is counted with; a model's own numbers where none are given."""
    from ragblend.engine.fusion.rules import find_rule
    from ragblend.lab.traffic.analysis import AnalysisConfig
    from ragblend.lab.traffic.cost_model import BlendSettings
    from ragblend.lab.traffic.models import kv_bytes_per_token as of_model

    if kv_bytes is None:
        kv_bytes = measured.bytes_per_token if measured else of_model(named, settings) if named else None
    known = find_rule(rule) if measured is None else find_rule(rule, measured.num_layers)
    least = known.ratio if ratio is None else ratio
    if least > 1:
        raise UsageError(f"ratio is {least}; choose 0 to 1")
    speed = measured.bytes_per_s.get(TIER) if measured else None
    blend = BlendSettings(least, known.probes_before_selection, speed)
    return AnalysisConfig(blend, measured, kv_bytes)


# -- printing


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """What was found, for people."""
    from ragblend.cli.printing import count_of, join_names

    estimated = found["tokens_are_estimated"]
    by = "estimated from the characters; --model counts them" if estimated else f"by {found['tokens_by']}"
    lines = [
        f"{found['num_requests']} requests of {count_of(found['traces'], 'file')}, {found['num_tokens']} prompt tokens "
        f"({by}), in order of {found['order']}",
    ]
    if found["num_broken"]:
        lines.append(f"{found['num_broken']} broken: {join_names(found['broken'])}")
    if found["num_other"]:
        lines.append(f"{found['num_other']} logged values are no requests with text")
    if found["num_media"]:
        lines.append(f"{found['num_media']} images, files or sounds, whose tokens are not counted")
    shares = found["shares"]
    lines += [
        "",
        f"{shares['prefix']:>6.1%} repeat as a prefix: prefix caching reuses them",
        f"{shares['elsewhere']:>6.1%} repeat elsewhere: only stored chunks reuse them",
        f"{shares['new']:>6.1%} are new",
        *_chunk_lines(found),
        *_curve_lines(found),
        *_saving_lines(found),
    ]
    return lines


def _chunk_lines(found: Mapping[str, Any]) -> list[str]:
    if not found["chunks"]:
        return []
    zipf = ""
    if found["zipf"] is not None:
        zipf = f"; Zipf slope {found['zipf']['slope']:.2f} (R2 {found['zipf']['r_squared']:.2f})"
    lines = ["", f"{found['num_chunks']} chunks come again{zipf}", f"  {'chunk':<18}{'tokens':>7}{'requests':>10}"]
    for each in found["chunks"]:
        text = "" if "text" not in each else f"  {' '.join(each['text'].split())}"
        lines.append(f"  {each['hash']:<18}{each['tokens']:>7}{each['requests']:>10}{text}")
    return lines


def _curve_lines(found: Mapping[str, Any]) -> list[str]:
    if not found["curve"]:
        return []
    from ragblend.engine.store.tiered import format_bytes

    lines = ["", f"  {'store of':<12}{'LRU finds':>10}{'at most':>9}   of all prompt tokens"]
    for point in found["curve"]:
        size = f"{point['tokens']} tok" if point["bytes"] is None else format_bytes(point["bytes"])
        lines.append(f"  {size:<12}{point['lru']:>10.1%}{point['most']:>9.1%}")
    if found["curve_share"] < 1:
        lines.append(
            f"  an estimate from chunks with {found['curve_share']:.0%} of the repeated tokens, chosen by hash"
        )
    if found["kv_bytes_per_token"] is None:
        lines.append("  in bytes: --model, or --kv-bytes-per-token")
    return lines


def _saving_lines(found: Mapping[str, Any]) -> list[str]:
    facts = found["saving"]
    seconds = facts["unit"] == "seconds"
    name, unit = ("TTFT", " s") if seconds else ("tokens computed", "")
    lines = ["", f"  {'mean per request':<18}{name:>16}{'prompts in the same time':>26}"]
    for mode in ("full", "prefix", "blend"):
        faster = facts.get(f"{mode}_throughput", 1.0)
        lines.append(f"  {mode:<18}{f'{facts[mode]:.4g}{unit}':>16}{f'{faster:.2f}x':>26}")
    if not seconds:
        lines.append("  in seconds: measure this machine first, ragblend profile --model MODEL, then --model here")
    return lines
