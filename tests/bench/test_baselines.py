"""bench quality --baselines: each asks the prompts that it says, and is charged and timed for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ragblend.bench.common.configs import BASELINES, QualityConfig
from ragblend.bench.common.plots import QUALITY_PANELS, plot_panel, plot_quality
from ragblend.bench.quality.baselines import (
    INSTRUCTION,
    SUMMARY_TOKENS,
    Asked,
    ask_baseline,
    confidence,
    map_reduce,
    map_rerank,
    reordered,
)
from ragblend.bench.quality.cases import Case
from ragblend.bench.quality.data import demo_cases, prompt_of
from ragblend.bench.quality.measures import FULL, Answer
from ragblend.bench.quality.study import Configuration, QualityResult, measure, run_quality, table_lines
from ragblend.cli.app import app
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.load import load_engine
from ragblend.engine.report import BlendReport
from ragblend.errors import UsageError
from ragblend.prompt.prompt import Part, SegmentedPrompt, TokenizedPrompt

CONFIG = QualityConfig(num_questions=28)
TOKENS = CONFIG.answer_tokens
ONE_HOP = "In which city was Otto Sutton born?"


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    with load_engine("demo", dtype="float32", on_miss="inline") as found, torch.inference_mode():
        assert isinstance(found, TransformersEngine)
        yield found


@pytest.fixture(scope="module")
def case() -> Case:
    return next(case for case in demo_cases(CONFIG) if ONE_HOP in case.question)


@pytest.fixture
def prompt(engine: TransformersEngine, case: Case) -> SegmentedPrompt:
    return prompt_of(case, engine, HashingEmbedder(), CONFIG)


@pytest.fixture(scope="module")
def result() -> QualityResult:
    return run_quality(
        QualityConfig(num_questions=3, rules=("cacheblend",), ratios=(0.15,), embedder="hashing", baselines=BASELINES)
    )


def texts_of(prompt: TokenizedPrompt) -> list[str]:
    return [segment.chunk.text for segment in prompt.chunk_segments if segment.chunk is not None]


# -- what is asked


def test_map_rerank_answers_a_one_hop_question_from_the_chunk_that_says_it(
    engine: TransformersEngine, case: Case, prompt: SegmentedPrompt
) -> None:
    last = ask_baseline("map_rerank", engine, prompt, case, TOKENS)
    (chosen,) = texts_of(last.prompt)
    assert last.answer.text == case.answers[0]
    assert case.answers[0] in chosen
    assert chosen != prompt.chunks[0].text  # not the first for want of a reason
    alone = {
        chunk.text: engine.generate(
            SegmentedPrompt([chunk], case.question, case.system), mode="full", max_tokens=TOKENS
        )
        for chunk in prompt.chunks
    }
    assert last.answer.text == alone[chosen].text
    assert len({each.text for each in alone.values()}) > 1


def test_confidence_is_the_mean_log_probability_by_the_model_s_own_forward_pass(
    engine: TransformersEngine, case: Case, prompt: SegmentedPrompt
) -> None:
    last = ask_baseline("map_rerank", engine, prompt, case, TOKENS)
    ids, answered = last.prompt.token_ids, [*last.answer.token_ids]
    logits = engine.layers.model(torch.tensor([[*ids, *answered]])).logits[0].double().log_softmax(-1)
    expected = [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(answered)]
    assert last.answer.ended
    assert confidence(engine, last) == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_map_reduce_asks_the_question_over_what_the_model_says_of_each_chunk(
    engine: TransformersEngine, case: Case, prompt: SegmentedPrompt
) -> None:
    instruction = INSTRUCTION.format(question=case.question)
    said = [
        engine.generate(SegmentedPrompt([chunk], instruction), mode="full", max_tokens=SUMMARY_TOKENS).text.strip()
        for chunk in prompt.chunks
    ]
    last = ask_baseline("map_reduce", engine, prompt, case, TOKENS)
    assert texts_of(last.prompt) == [text for text in said if text]
    over = engine.generate(SegmentedPrompt(texts_of(last.prompt), case.question), mode="full", max_tokens=TOKENS)
    assert last.answer.text == over.text


def test_reordered_prompts_over_the_same_chunks_are_the_same_prompt_and_it_is_exact(
    engine: TransformersEngine, case: Case, prompt: SegmentedPrompt
) -> None:
    chunks = list(prompt.chunks)
    assert reordered(chunks) != chunks
    assert sorted(chunk.text for chunk in reordered(chunks)) == sorted(chunk.text for chunk in chunks)
    assert reordered(chunks[::-1]) == reordered(chunks)
    assert reordered(chunks[2:]) == [chunk for chunk in reordered(chunks) if chunk in chunks[2:]]
    canonical = SegmentedPrompt(reordered(chunks), case.question, case.system)
    reorder = Configuration("reorder", "none", 1.0)
    there, _ = measure(engine, canonical, case, [FULL, reorder], TOKENS, {})
    assert (there[reorder].first_token_kl, there[reorder].answer_kl, there[reorder].agreement) == (0.0, 0.0, 1.0)
    assert there[reorder].gold_loss == there[FULL].gold_loss
    moved, _ = measure(engine, prompt, case, [FULL, reorder], TOKENS, {})
    assert moved[reorder].first_token_kl > 0  # of the order, as asked: full prefill of both
    assert moved[reorder].gold_loss == there[FULL].gold_loss


# -- what it costs


def test_every_prompt_that_a_baseline_prefills_is_charged(
    engine: TransformersEngine, case: Case, prompt: SegmentedPrompt
) -> None:
    def count(chunks: Sequence[Part], question: str) -> int:
        return engine.segmenter.tokenize(SegmentedPrompt(chunks, question, case.system)).num_tokens

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
        found = Answer(text, True, torch.zeros(1), BlendReport("full"), (0,), None, ttft_s=1.0)  # type: ignore[arg-type]
        return Asked(found, TokenizedPrompt(()), 3.0)

    return asked, ask


def test_the_first_token_waits_for_all_that_runs_before_it() -> None:
    case = Case("Who?", ("Ada",), ())
    asked, ask = scripted(["one", " ", "three", "Ada"])
    last = map_reduce(ask, ["a", "b", "c"], case, TOKENS)
    assert (last.answer.text, last.answer.ttft_s) == ("Ada", 3 * 3.0 + 1.0)
    assert asked[-1] == (("one", "three"), "Who?")  # of a chunk that nothing is said of, nothing is asked
    asked, ask = scripted(["Bob", "Ada", "Eve"])
    last = map_rerank(ask, ["a", "b", "c"], case, TOKENS, lambda each: -len(asked) + (each.answer.text == "Ada"))
    assert (last.answer.text, last.answer.ttft_s) == ("Ada", 3 * 3.0)  # decoding, too: only then it is known
    assert asked == [((chunk,), "Who?") for chunk in "abc"]
    tied = map_rerank(scripted(["Bob", "Ada"])[1], ["a", "b"], case, TOKENS, lambda each: 0.0)
    assert tied.answer.text == "Bob"


def test_a_model_that_says_nothing_of_any_chunk_is_asked_without_one(
    engine: TransformersEngine, case: Case, prompt: SegmentedPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.segmenter), "decode", lambda self, ids: "")
    reduced = Configuration("map_reduce", "none", 1.0)
    found, _ = measure(engine, prompt, case, [FULL, reduced], TOKENS, {})
    assert found[reduced].first_token_kl > 0


# -- beside the others


def test_baselines_have_runs_and_lines_like_every_mode(result: QualityResult) -> None:
    facts = result.as_dict()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["config"]["baselines"] == [*BASELINES]
    runs = {run["mode"]: run for run in facts["runs"] if run["kind"] == "all"}
    assert list(runs) == ["full", "prefix", "reuse", "blend", *BASELINES]
    for name in BASELINES:
        assert set(runs[name]) == set(runs["full"])
        assert (runs[name]["rule"], runs[name]["ratio"], runs[name]["context"]) == ("none", 1.0, "none")
        assert sum(line.startswith(name) for line in table_lines(result)) == 1


def test_baselines_are_drawn_over_the_time_to_first_token_only(result: QualityResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    runs = [run for run in result.as_dict()["runs"] if run["kind"] == "all"]
    for panel in QUALITY_PANELS:
        axes = Figure().add_subplot()
        plot_panel(axes, panel, runs)
        labels = set(axes.get_legend_handles_labels()[1])
        others = {"full", "prefix", *BASELINES} if panel.place == "ttft_s" else set()
        assert labels == {"reuse", "cacheblend", *others}
        if panel.place == "ttft_s":  # times far apart are told apart only so
            fast, slow = Figure().subplots(1, 2)
            plot_panel(fast, panel, [{**run, "ttft_s": 1.0} for run in runs])
            plot_panel(slow, panel, [{**run, "ttft_s": 30.0 if run["mode"] in BASELINES else 1.0} for run in runs])
            assert (fast.get_xscale(), slow.get_xscale()) == ("linear", "log")
    plot_quality(result.as_dict(), tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_baseline_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"'map_refine'; choose from map_reduce, map_rerank, reorder"):
        QualityConfig(baselines=("map_refine",))  # type: ignore[arg-type]
    monkeypatch.setattr("ragblend.bench.quality.study.run_quality", lambda *_: pytest.fail("measured first"))
    ran = CliRunner().invoke(app, ["bench", "quality", "--baselines", "reorder,stuff"])
    assert ran.exit_code != 0
    assert isinstance(ran.exception, UsageError) or "stuff" in ran.output
