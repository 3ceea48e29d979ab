"""Tables of `bench quality` for people. Knows results and their rows; nothing of how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragblend.bench.quality_runs import FULL, REUSE, Configuration, Row, total_row
from ragblend.engine.selection import DEFAULT_RATIO, find_rule

if TYPE_CHECKING:
    from ragblend.bench.quality import LengthResult, QualityResult
    from ragblend.bench.retrieval_quality import CorpusResult


def stories_table(result: QualityResult) -> list[str]:
    """The result for people: kinds, then configurations, then lengths."""
    full = total_row(result.rows, "full")
    config = result.config
    lines = [
        f"{result.name} float32, {full.num_questions} questions over {config.num_chunks} chunks, "
        f"{full.context_tokens:.0f} context tokens; exact match with Wilson's 95 % interval",
        "",
        *kind_lines(result.rows),
        "",
        *configuration_lines(result.rows),
        "",
        ratio_one_line(result),
    ]
    return [*lines, "", *length_lines(result.lengths)] if result.lengths else lines


def kind_lines(rows: Sequence[Row]) -> list[str]:
    """Exact match by kind of question: full prefill, full reuse, and blend at the default rule and ratio."""
    auto = Configuration("blend", find_rule("auto").name, DEFAULT_RATIO)
    names = {FULL: "full", REUSE: "reuse", auto: f"auto {DEFAULT_RATIO:.0%}"}
    shown: dict[str, dict[str, Row]] = {name: {} for name in names.values()}
    for row in rows:
        if (name := names.get(_configuration(row))) is not None:
            shown[name][row.kind] = row
    lines = [f"{'kind':<15}{'num':>5}{'guess':>7}" + "".join(f"{name:>22}" for name in shown if shown[name])]
    for kind, row in shown["full"].items():
        cells = "".join(f"{_share(found[kind]):>22}" for found in shown.values() if kind in found)
        lines.append(f"{kind:<15}{row.num_questions:>5}{row.guess:>7.3f}{cells}")
    return lines


def configuration_lines(rows: Sequence[Row]) -> list[str]:
    """One line per configuration: all questions, then those that need an earlier chunk."""
    references = {_configuration(row): row for row in rows if row.kind == "references"}
    lines = [
        f"{'mode':<7}{'rule':<19}{'prefix':<7}{'ratio':>6}{'charged':>8}{'at 32':>7}{'num':>6}{'guess':>7}{'all':>22}"
        f"{'guess':>7}{'references':>22}{'KL':>8}{'top-1':>7}{'r>w':>5}{'w>r':>5}"
    ]
    for row in rows:
        if row.kind != "all":
            continue
        other = references.get(_configuration(row))
        refers = f"{other.guess:>7.3f}{_share(other):>22}" if other else f"{'-':>7}{'-':>22}"
        lines.append(
            f"{row.mode:<7}{row.rule:<19}{'on' if row.prefix_precompute else 'off':<7}{row.ratio:>6.3g}"
            f"{row.charged_budget:>8.3f}{row.charged_budget_32:>7.3f}{row.num_questions:>6}{row.guess:>7.3f}"
            f"{_share(row):>22}{refers}{row.first_token_kl:>8.4f}{row.top1_agreement:>7.3f}"
            f"{row.right_to_wrong:>5}{row.wrong_to_right:>5}"
        )
    return lines


def length_lines(lengths: Sequence[LengthResult]) -> list[str]:
    """One line per length of context and configuration, all questions."""
    lines = [
        f"{'tokens':>6}{'chunks':>7}{'num':>5}{'guess':>7}  {'mode':<7}{'rule':<15}{'ratio':>6}{'exact match':>22}"
        f"{'KL':>8}{'top-1':>7}  breaks"
    ]
    for length in lengths:
        for row in (row for row in length.rows if row.kind == "all"):
            lines.append(
                f"{row.context_tokens:>6.0f}{length.num_chunks:>7}{row.num_questions:>5}{row.guess:>7.3f}  "
                f"{row.mode:<7}{row.rule:<15}{row.ratio:>6.3g}{_share(row):>22}{row.first_token_kl:>8.4f}"
                f"{row.top1_agreement:>7.3f}  {length.breaks if row.mode == 'full' else ''}".rstrip()
            )
    lines.append(
        "breaks: model = full prefill below that of the first length; blend = the best rule below full prefill"
    )
    return lines


def ratio_one_line(result: QualityResult) -> str:
    """Whether recomputing everything gave full prefill's answers."""
    if not result.num_checked:
        return "ratio 1.0 against full prefill: not checked, 1.0 is not among the ratios"
    verdict = f"{result.num_different} DIFFER" if result.num_different else "all the same"
    return f"ratio 1.0 against full prefill: {result.num_checked} answers, {verdict}"


def corpus_table(result: CorpusResult) -> list[str]:
    """The result for people: recall, answers, losses."""
    config = result.config
    lines = [
        f"{result.name} float32, {config.corpus}: {result.num_chunks} chunks, embedder {result.embedder}; prompts hold "
        f"{config.k} hits and {config.neighbours} neighbour(s) on either side",
        "",
        f"{'k':>3}{'neighbours':>11}{'chunks':>8}{'recall, all gold':>23}{'any gold':>10}{'num':>5}",
    ]
    for found in result.recall:
        share = f"{found.all_gold:.3f} [{found.all_gold_low:.3f}, {found.all_gold_high:.3f}]"
        lines.append(
            f"{found.k:>3}{found.neighbours:>11}{found.num_chunks:>8.1f}{share:>23}{found.any_gold:>10.3f}"
            f"{found.num_questions:>5}"
        )
    lines += ["", f"{'chunks':<11}{'mode':<7}{'rule':<15}{'ratio':>6}{'charged':>8}{'num':>5}{'guess':>7}"
              f"{'exact match':>22}{'KL':>8}{'top-1':>7}{'r>w':>5}{'w>r':>5}"]  # fmt: skip
    for row in (row for row in result.rows if row.kind == "all"):
        lines.append(
            f"{row.context:<11}{row.mode:<7}{row.rule:<15}{row.ratio:>6.3g}{row.charged_budget:>8.3f}"
            f"{row.num_questions:>5}{row.guess:>7.3f}{_share(row):>22}{row.first_token_kl:>8.4f}{row.top1_agreement:>7.3f}"
            f"{row.right_to_wrong:>5}{row.wrong_to_right:>5}"
        )
    guesses = {row.kind: row.guess for row in result.rows}
    lines += ["", f"{'kind':<15}{'num':>5}{'guess':>7}{'oracle full':>13}{'retrieved full':>16}{'blend':>7}"
              f"{'lost by retrieval':>19}{'by fusing':>11}"]  # fmt: skip
    for loss in result.losses:
        lines.append(
            f"{loss.kind:<15}{loss.num_questions:>5}{guesses[loss.kind]:>7.3f}{loss.oracle_full:>13.3f}"
            f"{loss.retrieved_full:>16.3f}{loss.retrieved_blend:>7.3f}{loss.retrieval_loss:>19.3f}"
            f"{loss.fusion_loss:>11.3f}"
        )
    return [*lines, *result.notes]


def _configuration(row: Row) -> Configuration:
    return Configuration(row.mode, row.rule, row.ratio, row.prefix_precompute)


def _share(row: Row) -> str:
    return f"{row.exact_match:.3f} [{row.exact_match_low:.3f}, {row.exact_match_high:.3f}]"
