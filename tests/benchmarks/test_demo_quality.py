"""Quality: the engine reads the declared format, measures are what they are called, budgets are met, rows add up,
recall is recall."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.demo_quality.__main__ import app
from benchmarks.demo_quality.cases import item_of, make_items, part_of, reorder
from benchmarks.demo_quality.deviations import distance, read
from benchmarks.demo_quality.pairs import differences
from benchmarks.demo_quality.plot import plot_quality
from benchmarks.demo_quality.retrieval import (
    CorpusConfig,
    CorpusQuestion,
    CorpusResult,
    Span,
    covered,
    guess_rates,
    losses,
    oracle_chunks,
    read_questions,
    recall,
    run_corpus,
)
from benchmarks.demo_quality.runs import (
    FULL,
    MULTI_HOP_KINDS,
    NOISE,
    REUSE,
    STORY_LAYERS,
    Configuration,
    Engines,
    Item,
    Record,
    answer,
    configurations,
    request_for,
    rows_of,
    run_item,
)
from benchmarks.demo_quality.study import (
    NOWHERE,
    LengthResult,
    QualityConfig,
    QualityResult,
    bench_quality,
    find_break,
    run_quality,
)
from benchmarks.demo_quality.tables import corpus_table, length_lines, stories_table
from ragblend.bench.quality.budget import Costs, charge, costs_of, floor_of, ratio_for
from ragblend.bench.quality.measures import kl, rouge_l, token_f1
from ragblend.engine.fusion.rules import RULES, find_rule
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.load import load_engine
from ragblend.errors import CorruptError, NotFoundError, UsageError
from ragblend.prompt.prompt import Chunk
from tools.demo_model.cases import Setting, make_cases
from tools.demo_model.evaluate import full_logits, reuse_logits
from tools.demo_model.model import load_shipped
from tools.demo_model.questions import KINDS
from tools.demo_model.tokenizer import build_tokenizer

WEIGHTS = Path(__file__).parents[2] / "ragblend" / "demo" / "weights"
CORPUS = Path(__file__).parents[2] / "ragblend" / "demo" / "records"
SMALL = QualityConfig(
    num_questions=14,
    num_multi_hop=0,
    part="any",
    num_chunks=4,
    context_tokens=100,
    rules=("cacheblend", "auto", "first_k"),
    controls=("random",),
    ratios=(0.0, 0.15, 1.0),
    budgets=(0.02, 0.2),
    off_share=0.5,
    control_share=0.5,
    noise_share=0.5,
    order_share=0.5,
    lengths=False,
)
ROW_KEYS = {
    "mode", "rule", "ratio", "prefix_precompute", "budget", "dtype", "kind", "num_questions", "exact_match",
    "exact_match_low", "exact_match_high", "guess", "first_token_kl", "top1_agreement", "answer_kl", "answer_kl_low",
    "answer_kl_high", "answer_agreement", "token_f1", "rouge_l", "kv_deviation", "attention_deviation",
    "right_to_wrong", "wrong_to_right", "charged_budget", "charged_budget_32", "context_tokens", "num_chunks",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    with load_engine("demo", dtype="float32", on_miss="inline") as engine:
        yield engine


@pytest.fixture(scope="module")
def items(engine: TransformersEngine) -> list[Item]:
    return make_items(engine, Setting(4, 120), num_questions=7, system_share=0.0, seed=3)


@pytest.fixture(scope="module")
def result() -> QualityResult:
    return run_quality(SMALL)


@pytest.fixture(scope="module")
def corpus_result() -> CorpusResult:
    return run_corpus(CorpusConfig(CORPUS, num_questions=8, embedder="hashing"))


def behind_prefix(engine: TransformersEngine, item: Item) -> TransformersEngine:
    return Engines(engine).behind(request_for(engine, item.prompt).prompt.prefix_ids)


# -- cases and answers


@pytest.mark.parametrize("system", [False, True])
def test_the_engine_reads_the_ids_of_the_declared_format(engine: TransformersEngine, system: bool) -> None:
    for case in make_cases(build_tokenizer(), 1, Setting(5, 160, system), seed=11):
        tokenized = request_for(engine, item_of(case).prompt).prompt
        assert [list(segment.token_ids) for segment in tokenized.segments] == [*case.segments, case.suffix]
        assert list(tokenized.prefix_ids) == case.segments[0]


def test_questions_are_equally_many_of_every_kind_and_a_share_has_a_system_text(engine: TransformersEngine) -> None:
    made = make_items(engine, Setting(4, 120), num_questions=28, system_share=0.25, seed=0)
    assert {kind: sum(item.kind == kind for item in made) for kind in KINDS} == dict.fromkeys(KINDS, 4)
    assert sum(len(item.prompt.messages) == 2 for item in made) == 7
    assert make_items(engine, Setting(4, 120), num_questions=28, system_share=0.25, seed=0) == made


def test_an_answer_is_what_the_engine_generates(engine: TransformersEngine, items: list[Item]) -> None:
    for item in items[:3]:
        stored = behind_prefix(engine, item)
        for chunk in item.prompt.chunks:
            stored.precompute(chunk)
        for mode, rule, ratio in (("full", "none", 1.0), ("reuse", "none", 0.0), ("blend", "cacheblend_k", 0.15)):
            found = answer(stored, request_for(stored, item.prompt), Configuration(mode, rule, ratio))  # type: ignore[arg-type]
            rule = "auto" if rule == "none" else rule
            made = stored.generate(item.prompt, mode=mode, rule=rule, recompute_ratio=ratio, max_tokens=16)
            assert (found.text, found.ended) == (made.text, made.finish_reason == "stop")
            assert found.report.charged_budget == made.report.charged_budget


def test_first_tokens_agree_with_the_trainers_own_forward(engine: TransformersEngine) -> None:
    model = load_shipped(WEIGHTS)
    for case in make_cases(build_tokenizer(), 1, Setting(4, 120, True), seed=5, kinds=KINDS[:3]):
        item = item_of(case)
        stored = behind_prefix(engine, item)
        records, full = run_item(stored, item, [REUSE])
        full_log_probs = full_logits(model, case)[0].double().log_softmax(-1)
        torch.testing.assert_close(full.log_probs, full_log_probs, atol=1e-3, rtol=0)
        reuse_log_probs = reuse_logits(model, case)[0].double().log_softmax(-1)
        # torch's kl_div(q, p) is KL(p || q)
        expected = torch.nn.functional.kl_div(reuse_log_probs, full_log_probs, reduction="sum", log_target=True)
        assert records[REUSE].first_token_kl == pytest.approx(float(expected), abs=1e-3)


def test_kl_is_torchs_and_zero_of_a_distribution_with_itself() -> None:
    p, q = (torch.randn(50, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    assert kl(log_p, log_q) == pytest.approx(float(expected))
    assert kl(log_p, log_q) != pytest.approx(kl(log_q, log_p))
    assert kl(log_p, log_p) == 0.0


def test_ratio_one_is_full_prefill_and_ratio_zero_is_reuse(engine: TransformersEngine, items: list[Item]) -> None:
    rules = ["cacheblend", "cacheblend_k", "cacheblend_gradual", "first_k", "random"]
    zeros = [Configuration("blend", rule, 0.0) for rule in rules]
    ones = [Configuration("blend", rule, 1.0) for rule in rules]
    for item in items[:3]:
        records, full = run_item(behind_prefix(engine, item), item, [FULL, REUSE, *zeros, *ones])
        assert all(records[zero] == records[REUSE] for zero in zeros)
        assert all(records[one].text == full.text and records[one].same_as_full for one in ones)
        assert max(records[one].first_token_kl for one in ones) < 1e-6
        assert records[FULL].first_token_kl == 0.0


def test_kv_computed_without_the_prefix_is_another_configuration(engine: TransformersEngine) -> None:
    (case,) = make_cases(build_tokenizer(), 1, Setting(4, 120, True), seed=5, kinds=KINDS[:1])
    item, engines = item_of(case), Engines(engine)
    request = request_for(engine, item.prompt)
    found = {}
    for prefix_ids in (request.prompt.prefix_ids, ()):
        stored = engines.behind(prefix_ids)
        run_item(stored, item, [REUSE])
        found[prefix_ids] = answer(stored, request, REUSE)
    exact, alone = found.values()
    assert {chunk.prefix_match for chunk in exact.report.chunks} == {"exact"}
    assert {chunk.prefix_match for chunk in alone.report.chunks} == {"approximate"}
    assert [chunk.exact for chunk in exact.report.chunks] == [True, False, False, False]
    assert not any(chunk.exact for chunk in alone.report.chunks)
    assert exact.report.num_reused_tokens == alone.report.num_reused_tokens == request.prompt.chunk_segments[-1].end
    assert not torch.equal(exact.log_probs, alone.log_probs)


def test_a_context_beyond_the_models_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(UsageError, match="--context-tokens"):
        make_items(engine, Setting(4, engine.context_length), num_questions=7, system_share=0.0, seed=0)


def test_configurations_run_reuse_once_and_name_what_auto_stands_for() -> None:
    auto = find_rule("auto", STORY_LAYERS).name
    found = configurations(["auto", "random", auto], [0.0, 0.5, 0.5], [0.1])
    halves = [Configuration("blend", rule, 0.5) for rule in (auto, "random")]
    assert found == [
        FULL,
        REUSE,
        *halves,
        *(Configuration("blend", rule, 0.0, budget=0.1) for rule in (auto, "random")),
    ]


def test_a_question_is_to_report_or_to_select_by_and_its_answer_in_one_part_only(engine: TransformersEngine) -> None:
    reported, selection = (
        make_items(engine, Setting(4, 120), 14, 0.0, 0, num_multi_hop=6, part=part)  # type: ignore[arg-type]
        for part in ("reported", "selection")
    )
    for made in (reported, selection):
        counts = {kind: sum(item.kind == kind for item in made) for kind in KINDS}
        assert counts == {kind: 2 + 2 * (kind in MULTI_HOP_KINDS) for kind in KINDS}
    cases = make_cases(build_tokenizer(), 20, Setting(4, 120), seed=1, kinds=("cross_ref",))
    parts = [part_of(case.question) for case in cases]
    assert set(parts) == {"reported", "selection"}
    assert parts.count("reported") > parts.count("selection")
    twins = {(case.question.subject.key, case.question.answer): part for case, part in zip(cases, parts, strict=True)}
    assert all(twins[c.question.subject.key, c.question.answer] == part_of(c.question) for c in cases)


def test_another_order_keeps_runs_whole_and_the_answer_too(engine: TransformersEngine) -> None:
    cases = make_cases(build_tokenizer(), 4, Setting(6, 160), seed=9, kinds=("cross_ref", "two_hop_ref"))
    model, kept = load_shipped(WEIGHTS), 0
    for case in cases:
        texts = reorder(case)
        assert texts is not None
        assert texts != case.texts
        assert sorted(texts) == sorted(case.texts)
        for before, opens, text in zip(case.texts, case.opens_run[1:], case.texts[1:], strict=False):
            if not opens:
                assert texts.index(text) == texts.index(before) + 1
        item = item_of(case)
        assert item.reordered is not None
        answers = [answer(engine, request_for(engine, p), FULL).text for p in (item.prompt, item.reordered)]
        kept += answers[0] == answers[1]
        assert answers[0] == item.answer or not is_right(model, case)
    assert kept >= len(cases) - 1


def is_right(model: Any, case: Any) -> bool:
    return bool(full_logits(model, case).argmax(-1).tolist() == case.answer)


# -- distances over the whole answer


def test_an_answer_read_over_full_kv_is_predicted_as_the_models_own_forward_does(engine: TransformersEngine) -> None:
    model = load_shipped(WEIGHTS)
    for case in make_cases(build_tokenizer(), 1, Setting(4, 120), seed=5):
        request = request_for(engine, item_of(case).prompt)
        found = answer(engine, request, FULL)
        seen = read(engine, request.prompt, found.fused, case.answer)
        torch.testing.assert_close(seen.log_probs, full_logits(model, case).double().log_softmax(-1), atol=1e-3, rtol=0)
        assert seen.log_probs.argmax(-1).tolist() == list(found.token_ids) or list(found.token_ids) != case.answer


def test_distances_are_none_of_full_prefill_and_those_of_reuse_are_computed_by_hand(
    engine: TransformersEngine, items: list[Item]
) -> None:
    item = next(item for item in items if item.kind == "two_hop_ref")
    stored = behind_prefix(engine, item)
    records, full = run_item(stored, item, [FULL, REUSE, Configuration("blend", "cacheblend", 1.0)])
    exact, reuse, blend = records.values()
    layers = range(engine.layers.num_layers)
    assert exact.kv_deviation == exact.attention_deviation == tuple(0.0 for _ in layers)
    assert max(*blend.kv_deviation, *blend.attention_deviation, blend.answer_kl) < 1e-5
    request = request_for(stored, item.prompt)
    fused = answer(stored, request, REUSE).fused
    start, end = request.prompt.chunk_segments[0].start, request.prompt.chunk_segments[-1].end
    for layer, deviation in enumerate(reuse.kv_deviation):
        squares = [
            [(a[:, start:end] - b[:, start:end]).square().sum() for a, b in zip(mine, theirs, strict=True)]
            for mine, theirs in (
                ((fused.keys(layer), fused.values(layer)), (full.fused.keys(layer), full.fused.values(layer))),
                ((full.fused.keys(layer), full.fused.values(layer)), (torch.zeros(()).expand(1, end, 1),) * 2),
            )
        ]
        assert deviation == pytest.approx(float((sum(squares[0]) / sum(squares[1])).sqrt()), rel=1e-4, abs=1e-6)
    # Stored layer-0 KV is exact; from layer 1 on reuse is off, and so is what the question attends to.
    assert reuse.kv_deviation[0] < 1e-5 < min(reuse.kv_deviation[1:])
    assert reuse.attention_deviation[0] < 1e-5 < min(reuse.attention_deviation[1:])


def test_the_first_token_of_the_answer_read_is_the_first_token_answered(
    engine: TransformersEngine, items: list[Item]
) -> None:
    for item in items:
        stored = behind_prefix(engine, item)
        _, full = run_item(stored, item, [])
        request = request_for(stored, item.prompt)
        for configuration in (REUSE, Configuration("blend", "auto", 0.1)):
            found = answer(stored, request, configuration)
            seen = read(stored, request.prompt, found.fused, full.token_ids)
            torch.testing.assert_close(seen.log_probs[0], found.log_probs, atol=1e-4, rtol=0)
            far = distance(request.prompt, found.fused, seen, full.fused, seen)
            assert (far.kl, far.agreement) == (0.0, 1.0)


def test_what_is_told_of_an_answer_does_not_depend_on_the_shortcut(
    engine: TransformersEngine, items: list[Item]
) -> None:
    for item in items:
        stored = behind_prefix(engine, item)
        chosen = [REUSE, Configuration("blend", "random", 0.3), Configuration("blend", "auto", 0.15)]
        records, _ = run_item(stored, item, chosen)
        for configuration in chosen:
            assert records[configuration].text == answer(stored, request_for(stored, item.prompt), configuration).text


def test_token_f1_and_rouge_agree_where_they_must() -> None:
    assert token_f1("not stated", "not stated") == 1.0
    assert token_f1("blue", "not stated") == 0.0
    assert token_f1("a b b", "b b c") == pytest.approx(2 / 3)
    pytest.importorskip("rouge_score")
    assert rouge_l("not stated", "not stated") == 1.0
    assert rouge_l("b a", "a b") == pytest.approx(0.5)  # in order only, unlike F1
    assert token_f1("b a", "a b") == 1.0


# -- budgets


@pytest.mark.parametrize("rule", sorted(RULES))
def test_charges_are_those_that_the_engine_reports(engine: TransformersEngine, items: list[Item], rule: str) -> None:
    for item in items[:3]:
        for stored in (behind_prefix(engine, item), Engines(engine).behind(())):
            for chunk in item.prompt.chunks:
                stored.precompute(chunk)
            request = request_for(stored, item.prompt)
            for ratio in (0.01, 0.1, 0.5, 0.9, 1.0):
                reported = answer(stored, request, Configuration("blend", rule, ratio)).report.charged_budget_32
                assert charge(RULES[rule], ratio, costs_of(stored, request.prompt)) == pytest.approx(reported)


def test_a_budget_is_met_within_half_a_token(engine: TransformersEngine, items: list[Item]) -> None:
    for item in items[:3]:
        stored = behind_prefix(engine, item)
        for chunk in item.prompt.chunks:
            stored.precompute(chunk)
        request = request_for(stored, item.prompt)
        costs = costs_of(stored, request.prompt)
        for rule in ("auto", "cacheblend", "first_k"):
            found = answer(stored, request, Configuration("blend", rule, 0.0, budget=0.2)).report
            assert abs(found.charged_budget_32 - 0.2) <= 0.5 / costs.num_chunk_tokens
            assert found.recompute_ratio == ratio_for(find_rule(rule, costs.num_layers), 0.2, costs) > 0


def test_a_rules_floor_is_its_check_and_its_probe() -> None:
    costs = Costs(num_chunk_tokens=1000, num_candidates=1000, num_fresh=30, num_layers=5, kv_share=0.1)
    assert floor_of(RULES["first_k"], costs) == pytest.approx(1 / 1000)
    # Every token in layer 0, its K and V at layer 1, then one token in 31 layers.
    assert floor_of(RULES["cacheblend"], costs) == pytest.approx((1000 + 100 + 31) / 32_000)
    # Twelve candidates for the one token, and the question at layer 1.
    assert floor_of(RULES["repair"], costs) == pytest.approx((12 + 1.2 + 30 + 31) / 32_000)
    assert charge(RULES["repair"], 0.1, costs) == pytest.approx((600 + 60 + 30 + 31 * 100) / 32_000)


# -- records to rows


def record(kind: str, exact: bool, full_exact: bool, first_token_kl: float = 0.0, guess: float = 0.5) -> Record:
    return Record(kind, guess, "", exact, full_exact, exact == full_exact, first_token_kl, True, 0.2, 0.1, 100, 4)


def test_rows_are_means_and_counts_of_their_records() -> None:
    records = [
        record("cross_ref", False, True, 2.0, guess=0.1),
        record("two_hop_ref", True, True, 1.0, guess=0.2),
        record("one_hop", True, False, 0.0, guess=0.3),
    ]
    rows = {row.kind: row for row in rows_of(REUSE, records)}
    assert list(rows) == ["all", "multi_hop", "references", "one_hop", "cross_ref", "two_hop_ref"]
    total = rows["all"]
    assert (total.num_questions, total.exact_match, total.first_token_kl) == (3, pytest.approx(2 / 3), 1.0)
    assert (total.right_to_wrong, total.wrong_to_right) == (1, 1)
    assert (rows["references"].num_questions, rows["references"].exact_match) == (2, 0.5)
    assert rows["references"].guess == pytest.approx(0.15)
    assert rows["one_hop"].wrong_to_right == 1
    assert total.exact_match_low < total.exact_match < total.exact_match_high
    assert total.first_token_kl_low <= 1.0 <= total.first_token_kl_high


def test_differences_are_paired_and_at_equal_terms() -> None:
    auto, other = (Configuration("blend", rule, 0.1) for rule in ("repair", "random"))
    wide = Configuration("blend", "random", 0.2)
    budget, of_few = auto._replace(ratio=0.0, budget=0.1), other._replace(ratio=0.0, budget=0.1)
    noisy = [record("cross_ref", n % 2 == 0, True, float(n % 7)) for n in range(200)]
    better = [record("cross_ref", n % 2 == 0 or n % 5 == 0, True, n % 7 + 0.5) for n in range(200)]
    records = {auto: better, other: noisy, wide: noisy, budget: better, of_few: noisy[:50]}
    found = differences(records, "repair", ["random"])
    assert {(d.ratio, d.baseline_ratio, d.budget) for d in found} == {(0.1, 0.1, None), (0.1, 0.2, None)}
    exact = next(d for d in found if (d.group, d.measure) == ("references", "exact"))
    assert exact.mean == pytest.approx(0.1)
    assert 0.05 < exact.low < 0.1 < exact.high < 0.15
    kl_difference = next(d for d in found if (d.group, d.measure) == ("all", "first_token_kl"))
    # The questions differ by up to 6, the rules always by the same half.
    assert (kl_difference.mean, kl_difference.low, kl_difference.high) == (0.5, 0.5, 0.5)
    assert kl_difference.excludes_zero
    same = differences({auto: noisy, other: noisy}, "repair", ["random"])[0]
    assert (same.mean, same.low, same.high, same.excludes_zero) == (0.0, 0.0, 0.0, False)


def test_a_break_is_an_interval_clear_of_the_other() -> None:
    def rows(full: int, blend: int, num: int = 100) -> list[Any]:
        blended = Configuration("blend", "random", 0.15)
        return [
            *rows_of(FULL, [record("one_hop", n < full, n < full) for n in range(num)]),
            *rows_of(blended, [record("one_hop", n < blend, n < full) for n in range(num)]),
        ]

    good = rows(95, 94)
    assert find_break(good, good) == ""
    assert find_break(rows(50, 50), good) == "model"
    assert find_break(rows(95, 50), good) == "blend"
    assert find_break(rows(60, 10), good) == "model, blend"
    lines = length_lines([LengthResult(256, 4, tuple(good), ""), LengthResult(1024, 4, tuple(rows(50, 50)), "model")])
    assert [line.endswith("  model") for line in lines[1:-1]] == [False, False, True, False]


# -- a whole run


def test_rows_per_kind_add_up(result: QualityResult) -> None:
    by_configuration: dict[Any, dict[str, Any]] = {}
    for row in result.rows:
        key = (
            row.mode,
            row.rule,
            row.ratio if row.budget is None else 0.0,
            row.prefix_precompute,
            row.budget,
            row.dtype,
        )
        by_configuration.setdefault(key, {})[row.kind] = row
    # Full and reuse; three rules at two ratios, and at the budgets they meet (0.02 only first_k can); the control;
    # bfloat16; without the prefix no full and no budgets.
    assert len(by_configuration) == 2 + 3 * 2 + 4 + (2 + 2) + 1 + (1 + 3 * 2)
    for configuration, rows in by_configuration.items():
        total, kinds = rows["all"], [rows[kind] for kind in KINDS]
        few = not configuration[3] or configuration[1] == "random" or configuration[5] == NOISE.dtype
        assert total.num_questions == sum(row.num_questions for row in kinds) == (7 if few else 14)
        for name in ("exact_match", "first_token_kl", "answer_kl", "token_f1", "top1_agreement", "guess"):
            mean = sum(getattr(row, name) * row.num_questions for row in kinds) / total.num_questions
            assert getattr(total, name) == pytest.approx(mean)
        for name in ("right_to_wrong", "wrong_to_right"):
            assert getattr(total, name) == sum(getattr(row, name) for row in kinds)
        refers = rows["references"]
        assert refers.num_questions == rows["cross_ref"].num_questions + rows["two_hop_ref"].num_questions


def test_lengths_are_measured_from_short_to_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.demo_quality.study.LENGTHS", ((100, 4), (256, 8)))
    monkeypatch.setattr("benchmarks.demo_quality.study.LENGTH_SHARE", {100: 1.0, 256: 0.5})
    small = replace(SMALL, controls=(), budgets=(), noise_share=0.0, order_share=0.0)
    config = replace(small, num_questions=7, rules=("first_k",), ratios=(0.15,), lengths=True, length_questions=14)
    told: list[tuple[str, int, int | None]] = []
    found = run_quality(config, lambda *step: told.append(step))
    short, long = found.as_dict()["lengths"]
    assert [(length["context_tokens"], length["num_chunks"]) for length in (short, long)] == [(100, 4), (256, 8)]
    assert [length["runs"][0]["num_questions"] for length in (short, long)] == [14, 7]
    modes = [(run["mode"], run["rule"], run["ratio"]) for run in long["runs"] if run["kind"] == "all"]
    assert modes[:2] == [("full", "none", 1.0), ("reuse", "none", 0.0)]
    auto = find_rule("auto", STORY_LAYERS).name
    assert {("blend", rule, 0.15) for rule in ("cacheblend", "cacheblend_k", auto)} == set(modes[2:])
    assert ("curve", 7, 7) in told
    assert ("lengths", 2, 2) in told


def test_ratio_one_is_checked_for_every_question_and_rule(result: QualityResult) -> None:
    assert (result.num_checked, result.num_different) == (3 * (14 + 7) + 7, 0)
    assert "ratio 1.0 against full prefill: 70 answers, all the same" in stories_table(result)
    unchecked = replace(result, num_checked=0)
    assert any("not checked" in line for line in stories_table(unchecked))
    assert any("2 DIFFER" in line for line in stories_table(replace(result, num_different=2)))


def test_a_budget_below_a_rules_floor_is_told_and_not_run(result: QualityResult) -> None:
    assert {(unmet.rule, unmet.budget) for unmet in result.unmet} == {("cacheblend", 0.02), ("repair", 0.02)}
    assert all(unmet.floor > unmet.budget for unmet in result.unmet)
    for row in result.rows:
        assert row.budget is None or row.rule not in ("cacheblend", "repair") or row.budget == 0.2
        assert row.budget is None or row.charged_budget_32 == pytest.approx(row.budget, abs=0.006)
    assert sum("n/a" in line for line in stories_table(result)) == 2


def test_the_noise_floor_is_below_what_reuse_does(result: QualityResult) -> None:
    totals = {(row.mode, row.dtype): row for row in result.rows if row.kind == "all" and row.prefix_precompute}
    noise, reuse = totals["full", "bfloat16"], totals["reuse", "float32"]
    assert 0 < noise.answer_kl < 0.05 < reuse.answer_kl
    assert 0 < noise.kv_deviation[1] < 0.02 < reuse.kv_deviation[1]


def test_two_orders_of_the_chunks_are_compared_answer_by_answer(result: QualityResult) -> None:
    assert [order.rule for order in result.orders] == ["none", "none", "repair", "cacheblend", "cacheblend_k"]
    for order in result.orders:
        assert 1 <= order.num_questions <= 3  # half of the two per kind over several chunks
        assert order.same_answer_low <= order.same_answer <= order.same_answer_high


def test_the_same_seed_gives_the_same_rows() -> None:
    small = replace(SMALL, num_questions=7, rules=("random",), controls=(), ratios=(0.15,), noise_share=0.0)
    assert run_quality(small).rows == run_quality(small).rows
    assert run_quality(small).rows != run_quality(replace(small, seed=1)).rows


def test_the_json_object_has_the_documented_keys(result: QualityResult) -> None:
    facts = result.as_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["schema_version"], facts["seed"], facts["auto"]) == (2, 0, find_rule("auto", STORY_LAYERS).name)
    assert facts["command"].startswith(
        "python -m benchmarks.demo_quality --model demo --num-questions 14 --multi-hop 0 --part any "
    )
    assert {"group", "measure", "rule", "baseline", "mean", "low", "high", "excludes_zero"} <= set(facts["paired"][0])
    assert len(facts["fingerprint"]) >= 16
    assert facts["hardware"]["torch"]
    assert all(set(run) >= ROW_KEYS for run in facts["runs"])
    full = next(run for run in facts["runs"] if run["mode"] == "full" and run["kind"] == "all")
    assert (full["charged_budget"], full["first_token_kl"], full["top1_agreement"]) == (1.0, 0.0, 1.0)
    reuse = next(run for run in facts["runs"] if run["mode"] == "reuse" and run["kind"] == "all")
    assert (reuse["ratio"], reuse["rule"], reuse["charged_budget"], reuse["charged_budget_32"]) == (0.0, "none", 0, 0)


def test_the_command_in_the_result_parses_to_the_same_measurement(
    result: QualityResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[QualityConfig] = []

    def stop(config: QualityConfig, progress: Any) -> QualityResult:
        asked.append(config)
        return result

    monkeypatch.setattr("benchmarks.demo_quality.study.run_quality", stop)
    words = [*SMALL.command_line.split()[3:], "--out", "-", "--plot", "-"]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    assert asked == [SMALL]
    assert json.loads(ran.stdout.splitlines()[-1])["runs"] == result.as_dict()["runs"]


def test_files_are_written_where_asked(result: QualityResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.demo_quality.study.run_quality", lambda config, progress: result)
    assert CliRunner().invoke(app, []).exit_code == 0
    assert json.loads((tmp_path / "data/results/quality.json").read_text()) == result.as_dict()
    assert (tmp_path / "docs/quality.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_reference_questions_is_drawn(result: QualityResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts = result.as_dict()
    facts["runs"] = [run for run in facts["runs"] if run["kind"] in ("all", "one_hop")]
    plot_quality(facts, tmp_path / "few" / "plot.png")
    assert (tmp_path / "few" / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "changes",
    [{"num_questions": 0}, {"context_tokens": 50}, {"num_chunks": 3}, {"off_share": 1.5}, {"rules": ()},
     {"rules": ("best",)}, {"controls": ("best",)}, {"ratios": (2.0,)}, {"system_share": -0.1}, {"budgets": (0.0,)},
     {"num_multi_hop": -1}, {"part": "best"}],
)  # fmt: skip
def test_bad_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(SMALL, **changes)


# -- end to end


A, B, C = Chunk("a" * 10, "/x/one.md", 0), Chunk("b" * 10, "/x/one.md", 10), Chunk("c" * 10, "/x/two.md", 0)


def test_a_span_is_covered_by_the_chunks_that_hold_all_of_it() -> None:
    assert covered(Span("one.md", 2, 10), [A])
    assert not covered(Span("one.md", 2, 11), [A])
    assert covered(Span("one.md", 2, 18), [C, B, A])
    assert not covered(Span("one.md", 2, 18), [B])
    assert not covered(Span("two.md", 2, 5), [A, B])
    assert not covered(Span("ne.md", 2, 5), [A, B])


def test_recall_counts_questions_whose_gold_was_found() -> None:
    both = CorpusQuestion("?", "x", "two_hop_cross", (Span("one.md", 0, 5), Span("two.md", 0, 5)))
    one = CorpusQuestion("?", "x", "one_hop", (Span("one.md", 12, 15),))
    found: list[Sequence[Chunk]] = [[A, B], [B], [A], [C, A]]
    measured = recall([both, one, one, both], found, k=2, neighbours=0)
    assert (measured.all_gold, measured.any_gold, measured.num_questions) == (0.5, 0.75, 4)
    assert (measured.k, measured.neighbours, measured.num_chunks) == (2, 0, 1.5)
    assert measured.all_gold_low < 0.5 < measured.all_gold_high


def test_the_oracle_gets_the_gold_and_others_up_to_the_same_count() -> None:
    import random

    chunks = [Chunk(f"{place}" * 10, f"/x/{place // 3}.md", place % 3 * 10) for place in range(9)]
    question = CorpusQuestion("?", "x", "one_hop", (Span("1.md", 12, 15), Span("2.md", 0, 3)))
    given = oracle_chunks(question, chunks, 5, random.Random(1))
    assert given is not None
    assert given == oracle_chunks(question, chunks, 5, random.Random(1))
    assert len(set(given)) == 5
    assert {chunks[4], chunks[6]} <= set(given)
    for source in {chunk.source for chunk in given}:
        starts = [chunk.start for chunk in given if chunk.source == source]
        assert starts == sorted(starts)
    assert len(oracle_chunks(question, chunks, 1, random.Random(1)) or ()) == 2  # gold is never left out
    assert oracle_chunks(replace(question, gold=()), chunks, 5, random.Random(1)) is None


def test_guess_rates_are_those_of_the_most_frequent_answer() -> None:
    asked = [CorpusQuestion("?", answer, "one_hop", ()) for answer in ("x", "y", "x", "z")]
    assert guess_rates([*asked, CorpusQuestion("?", "n", "not_stated", ())]) == {"one_hop": 0.5, "not_stated": 1.0}


def test_losses_are_differences_of_exact_match() -> None:
    blend = Configuration("blend", "random", 0.15)
    shares = {("oracle", FULL): 9, ("retrieved", FULL): 7, ("retrieved", REUSE): 2, ("retrieved", blend): 6}
    rows = [
        row
        for (context, configuration), right in shares.items()
        for row in rows_of(configuration, [record("one_hop", n < right, n < 7) for n in range(10)], context)
    ]
    total = losses(rows)[0]
    assert (total.kind, total.num_questions) == ("all", 10)
    assert (total.oracle_full, total.retrieved_full, total.retrieved_blend) == (0.9, 0.7, 0.6)
    assert (total.retrieval_loss, total.fusion_loss) == (pytest.approx(0.2), pytest.approx(0.1))


def test_a_corpus_is_measured_end_to_end(corpus_result: CorpusResult) -> None:
    facts = corpus_result.as_dict()
    assert json.loads(json.dumps(facts)) == facts
    totals = {(row.context, row.mode): row for row in corpus_result.rows if row.kind == "all"}
    assert list(totals) == [("oracle", "full"), ("retrieved", "full"), ("retrieved", "reuse"), ("retrieved", "blend")]
    assert {row.num_questions for row in totals.values()} == {8}
    assert totals["retrieved", "blend"].ratio == 0.15
    assert totals["retrieved", "reuse"].charged_budget == 0 < totals["retrieved", "blend"].charged_budget < 1
    assert totals["oracle", "full"].num_chunks == pytest.approx(totals["retrieved", "full"].num_chunks)
    by_depth = {(found.k, found.neighbours): found for found in corpus_result.recall}
    assert list(by_depth) == [(k, around) for around in (0, 1) for k in (1, 2, 3, 4, 6)]
    for around in (0, 1):
        shares = [by_depth[k, around].all_gold for k in (1, 2, 3, 4, 6)]
        assert shares == sorted(shares)
    assert all(by_depth[k, 0].num_chunks == k for k in (1, 2, 4, 6))
    assert any("recall, all gold" in line for line in corpus_table(corpus_result))


def test_every_gold_span_of_the_sample_corpus_lies_in_one_chunk(tmp_path: Path) -> None:
    from ragblend.precompute import ingest, open_engine_index

    with (
        load_engine("demo", tmp_path / "kv", on_miss="inline") as engine,
        open_engine_index(tmp_path / "index", engine, "hashing", 112) as index,
    ):
        ingest(CORPUS, engine, index, chunk_size=112, glob="*.md", precompute=False)
        chunks = list(index.chunks())
    spans = [span for question in read_questions(CORPUS / "questions.jsonl") for span in question.gold]
    assert spans
    assert all(any(covered(span, [chunk]) for chunk in chunks) for span in spans)


def test_a_corpus_run_is_deterministic(corpus_result: CorpusResult) -> None:
    again = run_corpus(corpus_result.config)
    assert (again.rows, again.recall, again.losses) == (corpus_result.rows, corpus_result.recall, corpus_result.losses)


def test_a_corpus_without_questions_or_with_bad_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"questions\.jsonl"):
        CorpusConfig(tmp_path)
    (tmp_path / "questions.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(CorruptError, match="line 1"):
        read_questions(tmp_path / "questions.jsonl")


def test_a_corpus_has_no_curve_to_plot(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--plot"):
        bench_quality({}, {"corpus": CORPUS}, NOWHERE, tmp_path / "x.png", lambda line: None, None)
