"""The study of a model that reads: tasks hold their answers, full recompute is full prefill, and a run goes on."""

from __future__ import annotations

import json

import pytest

from benchmarks import quality_1_5b
from benchmarks.quality_1_5b import FULL, RECALL_TASKS, main, recall_case
from ragblend import load_engine
from ragblend.engine.fusion.rules import RULES
from ragblend.lab.quality.measures import Configuration


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_a_recall_task_holds_its_answer_in_several_passages(task):
    with load_engine("demo") as engine:
        case = recall_case(task, 2000, 3, engine)
        assert case == recall_case(task, 2000, 3, engine)
        assert case != recall_case(task, 2000, 4, engine)
        assert 2000 <= sum(map(engine.renderer.count_tokens, case.passages)) < 2600
    parts = case.answers[0].split(", ")
    holders = {number for part in parts for number, text in enumerate(case.passages) if part in text}
    assert len(holders) == {"values": 4, "keys": 1, "tracking": 5}[task]
    assert len(parts) == {"values": 4, "keys": 1, "tracking": 5}[task]


def test_the_study_goes_on_where_it_stopped(tmp_path, monkeypatch):
    chosen = [FULL, Configuration("blend", "epic", 0.15), Configuration("blend", "prophetkv", 1.0)]
    monkeypatch.setattr(quality_1_5b, "study_configurations", lambda: chosen)
    for name in ("epic", "prophetkv"):  # which the study adds, removed after the test
        monkeypatch.setitem(RULES, name, RULES["random"])
    out = tmp_path / "study.json"
    run = {"model": "demo", "out": out, "plot": None, "tasks": "nq,keys", "tokens": "1000", "dtype": "float32"}
    main(**run, questions=1, threads=1)
    before = json.loads(out.read_text())
    assert [each["task"] for each in before["questions"]] == ["nq", "keys 1000"]
    rows = {each["rule"]: each for each in before["questions"][0]["rows"]}
    assert rows["prophetkv"]["first_token_kl"] == pytest.approx(0, abs=1e-4)
    assert rows["epic"]["first_token_kl"] > 1e-4
    chosen.append(Configuration("blend", "ask", 1.0))
    main(**run, questions=1, threads=1)
    after = json.loads(out.read_text())
    for old, new in zip(before["questions"], after["questions"], strict=True):
        *same, added = new["rows"]
        assert (same, added["rule"]) == (old["rows"], "ask")
    assert {each["rule"] for each in after["runs"]} == {"none", "epic", "prophetkv", "ask"}
    monkeypatch.setattr(quality_1_5b, "measure_prompt", None)  # no question is measured twice
    main(**run, questions=1, threads=1)
    assert json.loads(out.read_text())["questions"] == after["questions"]
