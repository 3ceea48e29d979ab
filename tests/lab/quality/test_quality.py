"""bench quality: data are read as they are written, and measures are what they say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ragblend
from ragblend.cli.app import app
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.load import load_engine
from ragblend.errors import CorruptError, NotFoundError
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.engines import with_own_store
from ragblend.lab.plots import QUALITY_PANELS, plot_panel
from ragblend.lab.quality.data import (
    QaCase,
    build_prompt,
    demo_cases,
    find_data,
    get_dataset_split,
    read_cases,
)
from ragblend.lab.quality.measures import decode_answers, generate_answer, loss, score_and_begin_answer
from ragblend.lab.quality.study import Configuration as Asked
from ragblend.lab.quality.study import QualityRecord, run_label, run_quality, summarize, table_lines

QUESTIONS = Path(__file__).parents[3] / "data" / "questions"
RUN_KEYS = {
    "mode", "rule", "ratio", "context", "kind", "num_questions", "first_token_kl", "first_token_kl_low",
    "first_token_kl_high", "answer_kl", "agreement", "gold_loss", "gold_loss_low", "token_f1", "exact_match",
    "contains_answer", "rouge_l", "charged_budget", "charged_budget_32", "ttft_s", "recovered_gold_loss",
    "recovered_token_f1",
}  # fmt: skip


@pytest.fixture(scope="module")
def result():
    config = QualityConfig(num_questions=28, rules=("auto", "cacheblend"), ratios=(0.1, 0.15, 1.0))
    found = run_quality(config)
    assert found["config"]["contexts"] == ["none"], "what a store of so shallow a model has"
    return found


@pytest.fixture(scope="module")
def engine():
    return load_engine("demo", dtype="float32", on_miss="inline")


def totals(result: dict[str, Any]) -> dict[tuple[str, str, float], dict[str, Any]]:
    return {(run["mode"], run["rule"], run["ratio"]): run for run in result["runs"] if run["kind"] == "all"}


# -- data


def test_a_file_of_questions_is_read_as_an_array_or_as_lines(tmp_path):
    records = [
        {"question": "Who?", "answers": ["Ada", "A. Lovelace"], "passages": ["one", {"text": "two"}]},
        {"question": "Where?", "answer": "Rome", "ctxs": [{"title": "", "text": "three"}], "kind": "place"},
    ]
    (tmp_path / "array.json").write_text(json.dumps(records))
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    found = read_cases(tmp_path / "array.json")
    assert found == read_cases(tmp_path / "lines.jsonl")
    assert (found[0].answers, found[0].passages) == (("Ada", "A. Lovelace"), ("one", "two"))
    assert (found[1].answers, found[1].passages, found[1].kind) == (("Rome",), ("three",), "place")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "neither"),
        ('{"question": "?"}', "record 1"),
        ('{"question": "?", "answers": [], "passages": ["x"]}', "record 1"),
        ('{"question": "?", "answers": ["x"], "passages": [3]}', "record 1"),
    ],
)
def test_a_malformed_file_is_refused_with_the_record_and_the_expected_form(tmp_path, text, says):
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(CorruptError, match=says):
        read_cases(tmp_path / "bad.jsonl")


def test_named_sets_are_in_the_checkout_and_errors_name_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_data("musique") == QUESTIONS / "musique_100.json"
    monkeypatch.setattr(ragblend, "__file__", str(tmp_path / "site-packages" / "ragblend" / "__init__.py"))
    with pytest.raises(NotFoundError, match=r"checkout.*--data PATH/musique_100\.json"):
        find_data("musique")
    with pytest.raises(NotFoundError, match="musique, nq, demo"):
        read_cases(find_data("nowhere.json"))


def test_distractors_have_no_answer_and_are_equal_at_every_call():
    cases = read_cases(QUESTIONS / "nq_open_400.json")
    assert cases[:20] == read_cases(QUESTIONS / "nq_open_400.json")[:20]
    holding = 0
    for case in cases:
        assert len(case.passages) == 10
        holding += sum(any(a.lower() in p.lower() for a in case.answers) for p in case.passages) <= 1
    assert holding == len(cases)
    places = [next(i for i, p in enumerate(case.passages) if any(a in p for a in case.answers)) for case in cases[:9]]
    assert len(set(places)) > 3  # not always the first


def test_a_question_is_in_one_part_by_its_text_alone():
    cases = read_cases(QUESTIONS / "musique_100.json")
    selection = [case.question for case in cases if get_dataset_split(case.question) == "selection"]
    assert (len(cases), len(selection)) == (100, 31)
    assert get_dataset_split("When did it open?") in ("selection", "reported")


def test_the_chunks_of_a_prompt_are_those_nearest_to_the_question(engine):
    passages = ("Cats sleep all day.", "The bridge was opened in 1932 by the king.", "Bread is made of flour.")
    config = QualityConfig(num_chunks=2)
    case = QaCase("When was the bridge opened?", ("1932",), passages, order="score")
    chosen = build_prompt(case, engine, HashingEmbedder(), config).chunks
    assert next(getattr(chunk, "text", chunk) for chunk in chosen) == passages[1]
    in_order = build_prompt(case._replace(order="given"), engine, HashingEmbedder(), config).chunks
    assert [getattr(chunk, "text", chunk) for chunk in in_order] == [*passages[:2]]


# -- measures


def test_the_loss_is_the_cross_entropy_of_the_answer():
    logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)).double()
    ids = [3, 0, 10, 7]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids))
    assert loss(logits.log_softmax(-1), ids) == pytest.approx(float(expected))


def test_a_decoded_answer_is_what_the_engine_generates(engine):
    config = QualityConfig(num_questions=4)
    for case in demo_cases(config):
        prompt = build_prompt(case, engine, HashingEmbedder(), config)
        stored = with_own_store(engine, system=case.system, context="none")
        for chunk in prompt.chunks:
            stored.precompute(chunk)
        request = stored.request(prompt, mode="full", max_tokens=16)
        full = generate_answer(stored, request, Asked("full", "none", 1.0))
        compared = (Asked("reuse", "none", 0.0), Asked("blend", "cacheblend", 0.15))
        begun = [score_and_begin_answer(stored, request, each, full) for each in compared]
        together = decode_answers(stored, request, [answer for answer, _ in begun])
        for each, found, (_, scores) in zip(compared, together, begun, strict=True):
            plain = generate_answer(stored, request, each)
            rule = "auto" if each.rule == "none" else each.rule
            made = stored.generate(prompt, mode=each.mode, rule=rule, recompute_ratio=each.ratio, max_tokens=16)
            assert (plain.text, plain.ended) == (made.text, made.finish_reason == "stop")
            assert (found.text, found.token_ids) == (plain.text, plain.token_ids)
            torch.testing.assert_close(scores[0], plain.log_probs, atol=1e-4, rtol=0)


def record(**changes: float) -> QualityRecord:
    return QualityRecord(**{**dict.fromkeys(QualityRecord._fields, 0.5), **changes})


def test_answers_are_compared_with_full_prefill_question_by_question():
    records = {
        Asked("full", "none", 1.0): [record(token_f1=1.0), record(token_f1=0.25)],
        Asked("blend", "ask", 0.05): [record(), record()],
    }
    assert [run.get("token_f1_over_full", [None])[0] for run in summarize(records, ["", ""])] == [None, -0.125]


def test_unknown_values_are_omitted_and_only_an_existing_gap_is_recovered():
    full, reuse = Asked("full", "none", 1.0), Asked("reuse", "none", 0.0)
    blend, other = Asked("blend", "cacheblend", 0.15), Asked("blend", "random", 0.15)
    records = {
        full: [record(gold_loss=1.0, rouge_l=math.nan) for _ in range(4)],
        reuse: [record(gold_loss=3.0 + n / 10, rouge_l=math.nan) for n in range(4)],
        blend: [record(gold_loss=2.0, rouge_l=math.nan) for _ in range(4)],
        other: [record(gold_loss=2.0 + n / 10, rouge_l=math.nan) for n in range(4)],
    }
    runs = {run["rule"]: run for run in summarize(records, ["a", "b", "a", "b"]) if run["kind"] == "all"}
    assert runs["cacheblend"]["recovered_gold_loss"] == pytest.approx(1.15 / 2.15)
    assert runs["cacheblend"]["recovered_token_f1"] is None
    assert runs["cacheblend"]["rouge_l"] is None
    assert runs["random"]["gold_loss_over_base"][0] == pytest.approx(0.15)
    assert runs["random"]["gold_loss_over_equal"]["cacheblend"][0] == pytest.approx(0.15)
    assert list(runs["random"]["gold_loss_over_equal"]) == ["cacheblend"]
    assert "gold_loss_over_equal" not in runs["cacheblend"]
    assert json.loads(json.dumps(summarize(records, [""] * 4), allow_nan=False))
    assert summarize({blend: records[blend]}, [""] * 4)[0]["recovered_gold_loss"] is None
    backwards = {full: records[reuse], reuse: records[full], blend: records[blend]}  # reuse does better than full
    assert {run["recovered_gold_loss"] for run in summarize(backwards, [""] * 4)} == {None}


# -- a whole run


def test_full_prefill_has_no_distance_and_blend_less_than_reuse(result):
    runs = totals(result)
    assert runs["full", "none", 1.0]["first_token_kl"] == runs["full", "none", 1.0]["answer_kl"] == 0.0
    assert runs["prefix", "none", 0.0]["answer_kl"] < 1e-6
    assert runs["blend", "cacheblend", 1.0]["answer_kl"] < 1e-6
    reuse, blend = runs["reuse", "none", 0.0], runs["blend", "cacheblend", 0.15]
    assert blend["first_token_kl"] < reuse["first_token_kl"] / 2
    assert blend["answer_kl"] < reuse["answer_kl"] / 2
    assert runs["full", "none", 1.0]["gold_loss"] < blend["gold_loss"] < reuse["gold_loss"]
    assert 0.5 < blend["recovered_gold_loss"] <= 1.1
    assert reuse["charged_budget_32"] == 0 < blend["charged_budget_32"] < 0.2
    assert all(run["ttft_s"] > 0 for run in runs.values())


def test_the_default_rule_is_at_least_the_papers_at_equal_ratios(result):
    runs = totals(result)
    auto = next(key[1] for key in runs if key[0] == "blend" and key[1] != "cacheblend")
    for ratio in (0.1, 0.15):
        mine, paper = runs["blend", auto, ratio], runs["blend", "cacheblend", ratio]
        assert mine["exact_match"] >= paper["exact_match"]
        assert mine["first_token_kl"] <= paper["first_token_kl"]


def test_the_json_object_has_the_documented_keys_and_a_run_per_kind(result):
    facts = result
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert (facts["schema_version"], facts["command"], facts["model"]) == (7, "bench quality", "demo")
    assert (facts["config"]["data"], facts["config"]["part"]) == ("demo", "reported")
    assert all(set(run) >= RUN_KEYS for run in facts["runs"])
    kinds = list(dict.fromkeys(run["kind"] for run in facts["runs"]))
    assert kinds[0] == "all"
    assert len(kinds) == 8
    one = [run for run in facts["runs"] if (run["mode"], run["kind"]) == ("full", "all")]
    assert [run["num_questions"] for run in one] == [28]
    parts = [run["num_questions"] for run in facts["runs"] if run["mode"] == "full" and run["kind"] != "all"]
    assert sum(parts) == 28
    lines = table_lines(result)
    named = ("full", "prefix", "reuse", "cacheblend", "ask")
    assert sum(line.startswith(named) for line in lines) == len(totals(result))


def test_own_files_are_used_whole_and_other_data_by_their_split():
    parts = {data: QualityConfig(data=data).part for data in ("mine.jsonl", "demo", "musique", "nq")}
    assert parts == {"mine.jsonl": "all", "demo": "reported", "musique": "reported", "nq": "reported"}
    assert QualityConfig(data="mine.jsonl", part="selection").part == "selection"


def test_distances_are_drawn_over_the_charge_and_full_prefill_over_time(result):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    runs = [run for run in result["runs"] if run["kind"] == "all"]
    rules = {run["rule"] for run in runs if run["mode"] == "blend"}
    for panel in QUALITY_PANELS:
        axes = Figure().add_subplot()
        plot_panel(axes, panel, runs)
        exact = {"full", "prefix"} if panel[0] == "ttft_s" else set()
        assert set(axes.get_legend_handles_labels()[1]) == {"reuse", *rules, *exact}


def test_any_model_judges_a_file_of_ones_own_from_the_command_line(tmp_path):
    pytest.importorskip("matplotlib")
    passage = "Mara Oster lives in Dublin. " * 8
    asked = [
        {"question": f"Where does {name} live?", "answers": ["Dublin"], "passages": [passage, f"{name} lives."]}
        for name in ("Mara", "Ada", "Lea")  # the last one is in the selection part
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, asked)))
    sizes = "--num-chunks 3 --chunk-tokens 20 --rules random --ratios 0.1 --modes reuse,blend"
    files = ["--data", str(tmp_path / "mine.jsonl"), "--plot", str(tmp_path / "p.png")]
    ran = CliRunner().invoke(app, ["bench", "quality", *sizes.split(), *files, "--embedder", "hashing", "--json"])
    assert ran.exit_code == 0, ran.output
    facts = json.loads(ran.stdout.splitlines()[-1])
    assert str(tmp_path) not in json.dumps(facts)
    assert [(run["mode"], run["rule"], run["ratio"]) for run in facts["runs"]] == [
        ("full", "none", 1.0), ("reuse", "none", 0.0), ("blend", "random", 0.1)
    ]  # fmt: skip
    assert {run["num_questions"] for run in facts["runs"]} == {3}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_contexts_of_stored_chunks_are_compared_with_the_papers_chunks():
    config = QualityConfig(
        data="demo",
        num_questions=2,
        modes=("reuse", "blend"),
        rules=("cacheblend",),
        ratios=(0.15,),
        embedder="hashing",
        contexts=("none", "neutral"),
    )
    result = run_quality(config)
    runs = {run_label(run): run for run in result["runs"] if run["kind"] == "all"}
    assert list(runs) == [
        "full",
        *(f"{what}{behind}" for behind in ("", ", neutral") for what in ("reuse", "cacheblend 15.0%")),
    ]
    assert runs["full"]["first_token_kl"] == 0.0
    assert len({run["first_token_kl"] for label, run in runs.items() if label.startswith("reuse")}) == 2
    assert runs["cacheblend 15.0%"]["first_token_kl_over_base"] == [0.0, 0.0, 0.0]  # the paper's, chunks and all
    less = runs["reuse, neutral"]["answer_kl"] - runs["cacheblend 15.0%"]["answer_kl"]
    assert runs["reuse, neutral"]["answer_kl_over_base"][0] == pytest.approx(less)
    alone = run_quality(replace(config, contexts=("neutral",)))
    again = {run_label(run): run for run in alone["runs"] if run["kind"] == "all"}
    assert list(again) == ["full", "reuse, neutral", "cacheblend 15.0%, neutral"]
    assert again["reuse, neutral"]["first_token_kl"] == runs["reuse, neutral"]["first_token_kl"]
