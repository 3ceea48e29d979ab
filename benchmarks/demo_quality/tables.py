"""Tables of the study for people. Knows results and their rows; nothing of how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.demo_quality.pairs import Difference
from benchmarks.demo_quality.runs import FULL, REUSE, STORY_LAYERS, Configuration, Row, total_row
from ragblend.engine.fusion.rules import DEFAULT_RATIO, find_rule

if TYPE_CHECKING:
    from benchmarks.demo_quality.retrieval import CorpusResult
    from benchmarks.demo_quality.study import LengthResult, OrderResult, QualityResult, Unmet


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
        *unmet_lines(result.unmet),
        "",
        *distance_lines(result.rows),
        "",
        ratio_one_line(result),
    ]
    for more in (paired_lines(result.paired), order_lines(result.orders), length_lines(result.lengths)):
        lines += ["", *more] if more else []
    return lines


def kind_lines(rows: Sequence[Row]) -> list[str]:
    """Exact match by kind of question: full prefill, full reuse, and blend at the default rule and ratio."""
    auto = Configuration("blend", find_rule("auto", STORY_LAYERS).name, DEFAULT_RATIO)
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
    lines = [
        f"{'mode':<7}{'rule':<19}{'prefix':<7}{'budget':>7}{'ratio':>7}{'charged':>8}{'at 32':>7}{'num':>6}{'guess':>7}"
        f"{'all':>22}{'guess':>7}{'references':>22}{'KL':>8}{'top-1':>7}{'r>w':>5}{'w>r':>5}"
    ]
    for row, other in _with_group(rows, "references"):
        refers = f"{other.guess:>7.3f}{_share(other):>22}" if other else f"{'-':>7}{'-':>22}"
        budget = "-" if row.budget is None else f"{row.budget:.3g}"
        lines.append(
            f"{row.mode:<7}{_name(row):<19}{'on' if row.prefix_precompute else 'off':<7}{budget:>7}{row.ratio:>7.3g}"
            f"{row.charged_budget:>8.3f}{row.charged_budget_32:>7.3f}{row.num_questions:>6}{row.guess:>7.3f}"
            f"{_share(row):>22}{refers}{row.first_token_kl:>8.4f}{row.top1_agreement:>7.3f}"
            f"{row.right_to_wrong:>5}{row.wrong_to_right:>5}"
        )
    return lines


def unmet_lines(unmet: Sequence[Unmet]) -> list[str]:
    """The budgets that no row shows."""
    return [
        f"blend  {found.rule:<19}on     {found.budget:>7.3g}    n/a: one recomputed token is charged {found.floor:.3f}"
        for found in unmet
    ]


def distance_lines(rows: Sequence[Row]) -> list[str]:
    """One line per configuration: over full prefill's whole answer, in words, and inside the layers, all questions."""
    lines = [
        f"{'mode':<7}{'rule':<19}{'prefix':<7}{'budget':>7}{'ratio':>7}{'answer KL':>26}{'agree':>7}{'F1':>7}"
        f"{'ROUGE':>7}  KV deviation by layer / of the question's attention output"
    ]
    for row in (row for row in rows if row.kind == "all"):
        budget = "-" if row.budget is None else f"{row.budget:.3g}"
        interval = f"{row.answer_kl:.4f} [{row.answer_kl_low:.4f}, {row.answer_kl_high:.4f}]"
        rouge = "-" if row.rouge_l is None else f"{row.rouge_l:.3f}"
        layers = " / ".join(
            " ".join(f"{layer:.3f}" for layer in found) for found in (row.kv_deviation, row.attention_deviation)
        )
        lines.append(
            f"{row.mode:<7}{_name(row):<19}{'on' if row.prefix_precompute else 'off':<7}{budget:>7}{row.ratio:>7.3g}"
            f"{interval:>26}{row.answer_agreement:>7.3f}{row.token_f1:>7.3f}{rouge:>7}  {layers}"
        )
    return lines


def paired_lines(paired: Sequence[Difference]) -> list[str]:
    """One line per comparison at equal ratio or equal budget, and of a small ratio with the default one."""
    shown = [
        found
        for found in paired
        if found.measure != "answer_kl" and found.baseline_ratio in (None, found.ratio, DEFAULT_RATIO)
    ]
    if not shown:
        return []
    lines = [
        f"{'rule - baseline, question by question':<40}{'at':<22}{'group':<12}{'measure':<16}{'num':>5}{'mean':>9}"
    ]
    for found in shown:
        at = f"budget {found.budget:g}" if found.budget is not None else f"ratio {found.ratio:g}"
        at += f" - {found.baseline_ratio:g}" if found.ratio != found.baseline_ratio else ""
        lines.append(
            f"{f'{found.rule} - {found.baseline}':<40}{at:<22}{found.group:<12}{found.measure:<16}"
            f"{found.num_questions:>5}{found.mean:>+9.4f} [{found.low:+.4f}, {found.high:+.4f}]"
            f"{'' if found.excludes_zero else '  0 is inside'}"
        )
    return lines


def order_lines(orders: Sequence[OrderResult]) -> list[str]:
    """One line per configuration: what another order of the chunks does to the answers."""
    if not orders:
        return []
    lines = [f"{'chunks in two orders':<33}{'num':>5}{'same answer':>22}{'exact match in each':>22}"]
    for found in orders:
        same = f"{found.same_answer:.3f} [{found.same_answer_low:.3f}, {found.same_answer_high:.3f}]"
        lines.append(
            f"{found.mode:<7}{found.rule:<19}{found.ratio:>7.3g}{found.num_questions:>5}{same:>22}"
            f"{found.exact_match:>15.3f}{found.exact_match_reordered:>7.3f}"
        )
    return lines


def _with_group(rows: Sequence[Row], group: str) -> list[tuple[Row, Row | None]]:
    """Every row over all questions, and the row of `group` of the same configuration: it follows, before the next."""
    found: list[tuple[Row, Row | None]] = []
    for row in rows:
        if row.kind == "all":
            found.append((row, None))
        elif row.kind == group:
            found[-1] = (found[-1][0], row)
    return found


def _name(row: Row) -> str:
    return row.rule if row.dtype == FULL.dtype else row.dtype


def length_lines(lengths: Sequence[LengthResult]) -> list[str]:
    """One line per length of context and configuration, all questions."""
    if not lengths:
        return []
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
    return Configuration(row.mode, row.rule, row.ratio, row.prefix_precompute, row.budget, row.dtype)


def _share(row: Row) -> str:
    return f"{row.exact_match:.3f} [{row.exact_match_low:.3f}, {row.exact_match_high:.3f}]"
