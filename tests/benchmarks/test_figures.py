"""Baselines: each asks the prompts that it says, is charged and timed for all of them, and stands beside blending."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.baselines import (
    BASELINES,
    INSTRUCTION,
    SUMMARY_TOKENS,
    Asked,
    ask_baseline,
    confidence,
    map_reduce,
    map_rerank,
    reordered,
)
from benchmarks.figures import PANELS, FigureConfig, app, measure_baselines, run_figure
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.load import load_engine
from ragblend.engine.report import BlendReport
from ragblend.errors import UsageError
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.plots import plot_panel
from ragblend.lab.quality.data import build_prompt, demo_cases
from ragblend.lab.quality.measures import FULL, Answer
from ragblend.lab.quality.study import measure_prompt, run_quality, table_lines
from ragblend.lab.quality.tasks import QUESTION, QaCase
from ragblend.prompt.types import MatchedPrompt, Part, Prompt

CONFIG = QualityConfig(num_questions=28)
TOKENS = QUESTION.answer_tokens
ONE_HOP = "In which city was Otto Sutton born?"


@pytest.fixture(scope="module")
def engine():
    with load_engine("demo", dtype="float32", on_miss="inline") as found, torch.inference_mode():
        yield found


@pytest.fixture(scope="module")
def case():
    return next(case for case in demo_cases(CONFIG) if ONE_HOP in case.question)


@pytest.fixture
def prompt(engine, case):
    return build_prompt(case, engine, HashingEmbedder(), CONFIG)


@pytest.fixture(scope="module")
def result():
    return run_figure(FigureConfig(num_questions=3, rules=("cacheblend",), ratios=(0.15,), embedder="hashing"))


# -- what is asked


def test_map_rerank_answers_a_one_hop_question_from_the_chunk_that_says_it(engine, case, prompt):
    last = ask_baseline("map_rerank", engine, prompt, case, TOKENS)
    (chosen,) = (run.chunk.text for run in last.prompt.runs)
    assert last.answer.text == case.answers[0]
    assert case.answers[0] in chosen
    assert chosen != prompt.chunks[0].text  # not the first for want of a reason
    alone = {
        chunk.text: engine.generate(Prompt([chunk], case.question, case.system), mode="full", max_tokens=TOKENS)
        for chunk in prompt.chunks
    }
    assert last.answer.text == alone[chosen].text
    assert len({each.text for each in alone.values()}) > 1


def test_confidence_is_the_mean_log_probability_by_the_model_s_own_forward_pass(engine, case, prompt):
    last = ask_baseline("map_rerank", engine, prompt, case, TOKENS)
    ids, answered = last.prompt.token_ids, [*last.answer.token_ids]
    logits = engine.layers.model(torch.tensor([[*ids, *answered]])).logits[0].double().log_softmax(-1)
    expected = [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(answered)]
    assert last.answer.ended
    assert confidence(engine, last) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_map_reduce_asks_the_question_over_what_the_model_says_of_each_chunk(engine, case, prompt):
    instruction = INSTRUCTION.format(question=case.question)
    said = [
        engine.generate(Prompt([chunk], instruction), mode="full", max_tokens=SUMMARY_TOKENS).text.strip()
        for chunk in prompt.chunks
    ]
    last = ask_baseline("map_reduce", engine, prompt, case, TOKENS)
    over = Prompt([text for text in said if text], case.question)
    assert last.prompt.token_ids == engine.renderer.render(over)
    assert last.answer.text == engine.generate(over, mode="full", max_tokens=TOKENS).text


def test_reordered_prompts_over_the_same_chunks_are_the_same_prompt_and_it_is_exact(engine, case, prompt):
    chunks = list(prompt.chunks)
    assert reordered(chunks) != chunks
    assert sorted(chunk.text for chunk in reordered(chunks)) == sorted(chunk.text for chunk in chunks)
    assert reordered(chunks[::-1]) == reordered(chunks)
    assert reordered(chunks[2:]) == [chunk for chunk in reordered(chunks) if chunk in chunks[2:]]
    canonical = Prompt(reordered(chunks), case.question, case.system)
    full = measure_prompt(engine, canonical, case, [FULL], TOKENS)[0][FULL]
    (there,) = measure_baselines(engine, canonical, case, ["reorder"], TOKENS).values()
    assert (there.first_token_kl, there.answer_kl, there.agreement) == (0.0, 0.0, 1.0)
    assert there.gold_loss == full.gold_loss
    (moved,) = measure_baselines(engine, prompt, case, ["reorder"], TOKENS).values()
    assert moved.first_token_kl > 0  # of the order, as asked: full prefill of both
    assert moved.gold_loss == full.gold_loss


# -- what it costs


def test_every_prompt_that_a_baseline_prefills_is_charged(engine, case, prompt):
    def count(chunks: Sequence[Part], question: str) -> int:
        return len(engine.renderer.render(Prompt(chunks, question, case.system)))

    asked = count(prompt.chunks, case.question)
    alone = sum(count([chunk], case.question) for chunk in prompt.chunks)
    mapped = sum(count([chunk], INSTRUCTION.format(question=case.question)) for chunk in prompt.chunks)
    found = {name: ask_baseline(name, engine, prompt, case, TOKENS) for name in BASELINES}
    charged = {name: last.answer.report.charged_budget for name, last in found.items()}
    assert charged["reorder"] == 1.0
    assert charged["map_rerank"] == pytest.approx(alone / asked)
    assert charged["map_reduce"] == pytest.approx((mapped + found["map_reduce"].prompt.num_tokens) / asked)
    assert all(last.answer.report.charged_budget_32 == charged[name] for name, last in found.items())


def scripted(texts: Sequence[str]) -> tuple[list[tuple[tuple[Part, ...], str]], Any]:
    """What is asked, and an Ask that answers with `texts` in turn: 1 s to prefill, 3 s with decoding."""
    asked: list[tuple[tuple[Part, ...], str]] = []

    def ask(chunks: Sequence[Part], question: str, system: str | None, max_tokens: int) -> Asked:
        text = texts[len(asked)]
        asked.append((tuple(chunks), question))
        found = Answer(text, True, torch.zeros(1), BlendReport("full"), (0,), None, ttft_s=1.0)
        return Asked(found, MatchedPrompt([]), 3.0)

    return asked, ask


def test_the_first_token_waits_for_all_that_runs_before_it():
    case = QaCase("Who?", ("Ada",), ())
    asked, ask = scripted(["one", " ", "three", "Ada"])
    last = map_reduce(ask, ["a", "b", "c"], case, TOKENS)
    assert (last.answer.text, last.answer.ttft_s) == ("Ada", 3 * 3.0 + 1.0)
    assert asked[-1] == (("one", "three"), "Who?")  # the answer about the second chunk is blank
    asked, ask = scripted(["Bob", "Ada", "Eve"])
    last = map_rerank(ask, ["a", "b", "c"], case, TOKENS, lambda each: -len(asked) + (each.answer.text == "Ada"))
    assert (last.answer.text, last.answer.ttft_s) == ("Ada", 3 * 3.0)  # decoding, too: only then it is known
    assert asked == [((chunk,), "Who?") for chunk in "abc"]
    tied = map_rerank(scripted(["Bob", "Ada"])[1], ["a", "b"], case, TOKENS, lambda each: 0.0)
    assert tied.answer.text == "Bob"


def test_a_model_that_says_nothing_of_any_chunk_is_asked_without_one(engine, case, prompt, monkeypatch):
    monkeypatch.setattr(type(engine.renderer), "decode", lambda self, ids: "")
    (found,) = measure_baselines(engine, prompt, case, ["map_reduce"], TOKENS).values()
    assert found.first_token_kl > 0


# -- beside the others


def test_baselines_have_runs_and_lines_like_every_mode(result):
    facts = result
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["config"]["baselines"] == [*BASELINES]
    runs = {run["mode"]: run for run in facts["runs"] if run["kind"] == "all"}
    assert list(runs) == ["full", "prefix", "reuse", "blend", *BASELINES]
    for name in BASELINES:
        assert set(runs[name]) == set(runs["full"])
        assert (runs[name]["rule"], runs[name]["ratio"], runs[name]["context"]) == ("none", 1.0, "none")
        assert sum(line.startswith(name) for line in table_lines(result)) == 1


def test_what_stands_beside_them_is_what_bench_quality_finds(result):
    alone = run_quality(QualityConfig(num_questions=3, rules=("cacheblend",), ratios=(0.15,), embedder="hashing"))

    def untimed(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [run for run in runs if run["mode"] not in BASELINES]
        return [{key: value for key, value in run.items() if key != "ttft_s"} for run in kept]

    assert untimed(result["runs"]) == untimed(alone["runs"])


def test_every_mode_and_baseline_has_a_line_over_the_time_to_first_token(result):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    runs = [run for run in result["runs"] if run["kind"] == "all"]
    for panel in PANELS:
        axes = Figure().add_subplot()
        plot_panel(axes, panel, runs)
        exact = set() if panel[1] == "answer_kl" else {"full", "prefix"}
        assert set(axes.get_legend_handles_labels()[1]) == {"reuse", "cacheblend", *exact, *BASELINES}
        fast, slow = Figure().subplots(1, 2)  # a logarithmic axis, if times are far apart
        plot_panel(fast, panel, [{**run, "ttft_s": 1.0} for run in runs])
        plot_panel(slow, panel, [{**run, "ttft_s": 30.0 if run["mode"] in BASELINES else 1.0} for run in runs])
        assert (fast.get_xscale(), slow.get_xscale()) == ("linear", "log")


def test_the_command_writes_the_object_and_draws_it(tmp_path):
    pytest.importorskip("matplotlib")
    files = ["--out", str(tmp_path / "found" / "figure.json"), "--plot", str(tmp_path / "figure.png")]
    ran = CliRunner().invoke(app, ["--embedder", "hashing", "--num-questions", "2", *files])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((tmp_path / "found" / "figure.json").read_text())
    assert (facts["command"], facts["figure"]) == ("benchmarks.figures", 12)
    assert str(tmp_path) not in json.dumps(facts)
    assert [(run["mode"], run["rule"], run["ratio"]) for run in facts["runs"] if run["kind"] == "all"] == [
        ("full", "none", 1.0), ("prefix", "none", 0.0), ("reuse", "none", 0.0),
        *(("blend", rule, ratio) for rule, ratio in product(("ask", "cacheblend"), (0.05, 0.15))),
        *((name, "none", 1.0) for name in BASELINES),
    ]  # fmt: skip


def test_an_unknown_baseline_is_refused_with_the_list(monkeypatch):
    with pytest.raises(UsageError, match=r"'map_refine'; choose from map_reduce, map_rerank, reorder"):
        FigureConfig(baselines=("map_refine",))
    monkeypatch.setattr("benchmarks.figures.run_quality", lambda *_: pytest.fail("measured first"))
    for options in (["--baselines", "reorder,stuff"], ["--ratios", "2"]):
        ran = CliRunner().invoke(app, options)
        assert isinstance(ran.exception, UsageError), ran.output
