"""`ragblend calibrate`: parse the options, measure, print the curve. JSON or text on stdout, progress on stderr."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import JsonOption, split_names, split_numbers, with_settings
from ragblend.cli.printing import print_result, progress_bars
from ragblend.cli.session import open_engine, open_settings_index
from ragblend.config import Settings
from ragblend.errors import EmptyCorpusError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text
from ragblend.redaction import redact_url

if TYPE_CHECKING:
    from ragblend.engine.tuning.calibration import CurvePoint, RuleFit
    from ragblend.index import ChunkIndex
    from ragblend.lab.calibrate import CalibrationRun


@with_settings(
    "model store k",
    demo="Use the demo's documents. Needs no other setting.",
)
def calibrate(
    settings: Settings,
    questions: Annotated[
        str | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="File with one question per line. Default: questions are generated from the chunks.",
        ),
    ] = None,
    num_questions: Annotated[int, typer.Option("--num-questions", help="Number of questions to fit on.")] = 60,
    held_out: Annotated[int, typer.Option("--num-held-out", help="Number of other questions that check the fit.")] = 0,
    target: Annotated[
        float,
        typer.Option("--target", help="Share of first tokens that must equal full prefill's, with 95 % confidence."),
    ] = 0.9,
    rules: Annotated[str | None, typer.Option("--rules", help="Rules to compare, comma-separated.")] = None,
    ratios: Annotated[str | None, typer.Option("--ratios", help="Ratios to measure in addition to 0 and 1.")] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Save the calibration in the store.")] = True,
    json_: JsonOption = False,
) -> None:
    """Measure each recompute ratio on your documents: closeness and time.

    Both are compared with full prefill's. Finds the smallest ratio at which the share --target of first tokens is full
    prefill's; engines on this store then use it, unless --no-save is given.

    Set the other settings of `ragblend ask` through RAGBLEND_NAME or in ragblend.toml, to the values that the ingestion
    used.
    """
    if settings.is_served:
        raise UsageError(
            f"{redact_url(settings.backend)} exposes no distributions to compare; calibrate on the machine that has "
            "its store, with --store: the server reads the calibration from there"
        )
    settings = replace(settings, backend="transformers")  # vLLM also uses the calibration
    from ragblend.lab import calibrate as fitting

    fitting.check_target(target, num_questions)
    grid: dict[str, Any] = {}
    if rules is not None:
        grid["rules"] = split_names(rules)
    if ratios is not None:
        grid["ratios"] = split_numbers(ratios)
    with open_engine(settings) as engine, open_settings_index(settings, engine) as opened, progress_bars() as progress:
        asked = _questions(questions, opened, engine.name, num_questions + held_out)
        run = fitting.calibrate(
            engine,
            opened,
            asked,
            k=settings.k,
            neighbours=settings.neighbours,
            order=settings.order,
            target=target,
            num_questions=num_questions,
            num_held_out=held_out,
            save=save,
            progress=progress,
            **grid,
        )
    facts = calibration_facts(run, engine.name, questions)
    print_result(facts, "\n".join(calibration_lines(run)), json_)


def _questions(named: str | None, index: ChunkIndex, model: str, count: int) -> list[str]:
    """Return the questions of file `named`, or `count` generated ones; in the embedded model's forms for that model."""
    from ragblend.lab.calibrate import generate_questions, read_questions

    if named is not None:
        path, fix = (
            expand_user_path(named, "--questions"),
            "write one question per line there, or leave --questions out",
        )
        questions = read_questions(read_text(path, "--questions", fix))
        if not questions:
            raise UsageError(f"--questions: {path} holds no question; {fix}")
        return questions
    if not index.num_chunks:
        raise EmptyCorpusError("the index is empty; add documents: ragblend ingest DOCS")
    chunks = list(index.chunks())
    if model == "demo":
        from ragblend.demo.corpus import pick_questions_about

        return pick_questions_about((chunk.text for chunk in chunks), count)
    return generate_questions(chunks, count)


# -- printing


def calibration_facts(run: CalibrationRun, model: str, questions: str | None) -> dict[str, Any]:
    """Return the calibration as JSON values, with a description of the machine."""
    from ragblend.lab.bench.common.hardware import hardware_card

    calibration, held_out = run.calibration, run.held_out
    body = calibration.as_dict()["calibration"]
    del body["prefix_ids"], body["created_s"]
    for fit in body["fits"]:
        for point in fit["curve"]:
            point["ttft_s"] = run.ttft_s[fit["rule"], point["ratio"]]
    return {
        "command": shlex.join(["ragblend", *sys.argv[1:]]),
        "hardware": hardware_card(),
        "model": model,
        "questions": "generated" if questions is None else Path(questions).name,
        "ratio": calibration.ratio,
        "rule": calibration.rule,
        "check_layer": calibration.check_layer,
        "meets_target": calibration.fits[0].meets_target,
        "predicted_agreement": {
            name: getattr(calibration.fits[0].point, name) for name in ("agreement", "low", "high")
        },
        "held_out": None
        if held_out is None
        else {
            "num_questions": run.num_held_out,
            **{name: getattr(held_out, name) for name in ("agreement", "low", "high", "kl")},
            "is_kept": not run.is_target_refuted,
        },
        "prompt_tokens": run.prompt_tokens,
        "full_s": run.full_s,
        "num_prefills": run.num_prefills,
        "elapsed_s": round(run.elapsed_s, 1),
        "cpu_s": round(run.cpu_s, 1),
        "saved": run.path is not None,
        **body,
    }


def calibration_lines(run: CalibrationRun) -> list[str]:
    """Return the lines for a calibration: the chosen ratio, the curve of each rule and the check on other questions."""
    calibration, best = run.calibration, run.calibration.fits[0]
    lines = [
        f"{calibration.num_questions} questions ({calibration.retrieval}), target {calibration.target:g}: "
        f"ratio {best.ratio:g} by {best.rule}",
        f"the first token is full prefill's in {_share(best.point)}",
        f"with all tokens recomputed (rounding only): {best.curve[-1].agreement:.1%}, KL {best.curve[-1].kl:.2g}",
        f"full prefill of {run.prompt_tokens:.0f} tokens takes {run.full_s:.3g} s",
    ]
    if not best.meets_target:
        lines.append("no ratio meets the target, not even 1: rounding alone is beyond it. Lower --target")
    elif best.ratio == 1:
        lines.append("only ratio 1, full prefill's work, meets the target. Lower it, ask more, or measure more --rules")
    for fit in calibration.fits:
        lines += ["", *_table(fit, run)]
    lines += [
        "",
        "<: the fitted ratio; charged: share of full prefill's work on chunk tokens; at 32: with 32 layers; "
        "TTFT: median seconds to the first token, KV in memory",
    ]
    if run.held_out is not None:
        held_out = run.held_out
        verdict = "BELOW the target" if run.is_target_refuted else "the target is met"
        lines += [
            "",
            f"held out: of {run.num_held_out} other questions {_share(held_out)} agree, KL {held_out.kl:.2g}; "
            f"{verdict}",
        ]
    if run.path is not None:
        lines += ["", f"saved; `ragblend ask` and every engine on this store use it: {run.path}"]
    return lines


def _table(fit: RuleFit, run: CalibrationRun) -> list[str]:
    rows = [
        fit.rule,
        f"  {'ratio':>6} {'charged':>8} {'at 32':>7}   {'agreement':<24} {'KL, nats':<10}{'TTFT s':>7}{'speedup':>9}",
    ]
    for point in fit.curve:
        mark = " <" if point.ratio == fit.ratio else ""
        ttft_s = run.ttft_s[fit.rule, point.ratio]
        rows.append(
            f"  {point.ratio:>6g} {point.charged_budget:>8.3f} {point.charged_budget_32:>7.3f}   "
            f"{_share(point):<24} {point.kl:<10.2g}{ttft_s:>7.3g}{run.full_s / ttft_s:>8.1f}x{mark}"
        )
    return rows


def _share(point: CurvePoint) -> str:
    return f"{point.agreement:.1%} [{point.low:.1%}, {point.high:.1%}]"
