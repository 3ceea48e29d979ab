"""Calibration: exact arithmetic on made-up outcomes, honest predictions, and the demo's corpus from end to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_command
from hypothesis import given
from hypothesis import strategies as st

from ragblend import SegmentedPrompt, load_engine
from ragblend.bench.common.plots import plot_calibration
from ragblend.cli.calibrate import facts_of, lines_of
from ragblend.demo.corpus import questions_about, sample_corpus
from ragblend.demo.show import CHUNK_TOKENS, EMBEDDER, RETRIEVAL
from ragblend.engine.fusion.rules import FALLBACK
from ragblend.engine.fusion.rules import SHALLOW as AUTO
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.tuning.calibration import (
    Calibration,
    CurvePoint,
    Fit,
    NoiseFloor,
    load_calibration,
)
from ragblend.errors import EmptyCorpusError, UsageError
from ragblend.index import ChunkIndex
from ragblend.precompute import ingest, open_engine_index
from ragblend.prompt.prompt import Chunk
from ragblend.upkeep.calibrate import (
    CalibrationRun,
    HeldOut,
    Outcomes,
    Setting,
    Target,
    calibrate,
    checked_target,
    decide,
    divergence,
    expected_shares,
    first_place,
    fit,
    fit_all,
    generate_questions,
    measure,
    monotone,
    read_questions,
    settings_for,
    split_questions,
)
from tools.demo_model.tokenizer import pieces, words

RATIOS = (0.0, 0.1, 0.2, 0.5, 1.0)
AIM = Target(0.9)


def outcomes(*chances: tuple[float, ...], num_questions: int = 200, seed: int = 0, **changes: Any) -> Outcomes:
    """Answers that agree with the given chances by setting and ratio. A question that is hard for one is for all."""
    draw = np.random.default_rng(seed).random(num_questions)
    agrees = draw < np.array(chances)[:, :, None]
    settings = (Setting(AUTO, 1), Setting(FALLBACK, 1), Setting(FALLBACK, 2))[: len(chances)]
    charged = np.broadcast_to(np.array(RATIOS)[None, :, None], agrees.shape)
    made = Outcomes(settings, RATIOS, agrees, 1.0 - agrees, charged, charged)
    return replace(made, **changes)


# -- the ratio


tables = st.integers(5, 12).flatmap(
    lambda num: st.lists(st.lists(st.booleans(), min_size=num, max_size=num), min_size=5, max_size=5)
)


@given(tables, st.floats(0.05, 1))
def test_the_ratio_is_the_smallest_that_meets_the_target_and_1_where_none_does(table: list[Any], aim: float) -> None:
    agrees = np.array(table)[None]
    made = Outcomes((Setting(AUTO, 1),), RATIOS, agrees, 1.0 - agrees, agrees * 1.0, agrees * 1.0)
    everything = np.arange(made.num_questions)
    for target in (Target(aim), Target(None, 1 - aim)):  # the same, told by what is lacking
        place = first_place(made, target, 0, everything)
        curve = monotone(agrees[0].mean(-1))
        met = curve >= aim - 1e-9 if target.kl is None else 1 - curve <= target.kl + 1e-9
        assert place == (int(np.argmax(met)) if met.any() else len(RATIOS) - 1)
        fitted = fit(made, target, [0])
        assert fitted.meets_target == bool(met.any())
        assert fitted.meets_target or fitted.ratio == 1.0


@given(tables)
def test_a_higher_target_never_takes_a_smaller_ratio(table: list[Any]) -> None:
    agrees = np.array(table)[None]
    made = Outcomes((Setting(AUTO, 1),), RATIOS, agrees, 1.0 - agrees, agrees * 1.0, agrees * 1.0)
    everything = np.arange(made.num_questions)
    places = [first_place(made, Target(aim / 10), 0, everything) for aim in range(1, 11)]
    assert places == sorted(places)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_a_monotone_curve_ascends_keeps_the_mean_and_changes_no_monotone_one(values: list[float]) -> None:
    smooth = monotone(np.array(values))
    assert (np.diff(smooth) >= -1e-12).all()
    assert smooth.mean() == pytest.approx(np.mean(values))
    assert monotone(np.sort(values)) == pytest.approx(np.sort(values))


# -- rule and layer


def test_another_rule_takes_over_only_where_it_is_certainly_cheaper() -> None:
    slow, fast = (0.3, 0.4, 0.5, 0.97, 1.0), (0.3, 0.97, 0.98, 0.99, 1.0)
    everything = np.arange(200)
    assert decide(outcomes(slow, fast), AIM, [0, 1], everything) == (1, 1)
    assert decide(outcomes(fast, slow), AIM, [0, 1], everything) == (0, 1)
    assert decide(outcomes(fast, fast), AIM, [0, 1], everything)[0] == 0
    best, *others = fit_all(outcomes(slow, fast, slow), AIM)
    assert (best.rule, best.check_layer, best.ratio) == (FALLBACK, 1, 0.1)
    assert [(other.rule, other.ratio) for other in others] == [(AUTO, 0.5)]


def test_noise_does_not_make_another_rule_the_better_one() -> None:
    chances = (0.3, 0.86, 0.9, 0.94, 1.0)
    taken = []
    for seed in range(40):
        made = outcomes(chances, chances, num_questions=60, seed=seed)
        other = outcomes(chances, num_questions=60, seed=1000 + seed).agrees[0]  # as good, other questions fail
        agrees = np.stack([made.agrees[0], other])
        taken.append(decide(replace(made, agrees=agrees), AIM, [0, 1], np.arange(60))[0])
    assert sum(taken) <= 4


def test_settings_start_with_what_is_used_uncalibrated() -> None:
    assert settings_for((AUTO, FALLBACK), (1, 2, 4), 5)[0] == Setting(AUTO, 1)
    assert set(settings_for((AUTO, FALLBACK), (1, 2, 4), 5)) == {
        Setting(rule, layer) for rule in (AUTO, FALLBACK) for layer in (1, 2)
    }
    assert settings_for(("first_k",), (1, 2, 4), 32) == (Setting("first_k", 1),)
    assert settings_for((FALLBACK, "auto"), (2, 4), 8)[0] == Setting(AUTO, 1)
    with pytest.raises(UsageError, match="magic"):
        settings_for(("magic",), (1,), 5)


# -- the prediction


def test_the_prediction_holds_on_questions_that_the_fit_has_not_seen() -> None:
    chances = (0.5, 0.85, 0.93, 0.97, 1.0)
    inside, told, true = [], [], []
    for seed in range(200):
        found = fit(outcomes(chances, num_questions=60, seed=seed), AIM, [0])
        chance = chances[RATIOS.index(found.ratio)]
        inside.append(found.low <= chance <= found.high)
        told.append(found.agreement)
        true.append(chance)
    assert np.mean(inside) >= 0.93
    # Not flattered by having chosen the ratio on the same questions.
    assert np.mean(told) <= np.mean(true) + 0.005


def test_the_prediction_never_exceeds_what_was_seen() -> None:
    for seed in range(20):
        made = outcomes((0.2, 0.6, 0.8, 0.9, 1.0), num_questions=30, seed=seed)
        found = fit(made, AIM, [0])
        seen = next(point for point in found.curve if point.ratio == found.ratio)
        assert found.agreement <= seen.agreement + 0.5 / 30
        assert found.low <= found.agreement <= found.high


def test_expected_shares_are_those_of_a_simulation() -> None:
    draws = np.random.default_rng(0)
    shares = draws.binomial(50, draws.beta(57.5, 3.5, 100_000)) / 50
    assert expected_shares(57, 60, 50) == pytest.approx(np.percentile(shares, (2.5, 97.5)), abs=0.02)


# -- questions


def test_questions_come_one_per_line_or_as_json_lines() -> None:
    assert read_questions("Who?\n\n  Where? \n") == ["Who?", "Where?"]
    assert read_questions('{"question": "Who?", "answer": "Ann"}\n{"question": "Where?"}\n') == ["Who?", "Where?"]
    with pytest.raises(UsageError, match="JSON lines"):
        read_questions('{"question": "Who?"}\nWhere?')


def test_generated_questions_hold_the_beginning_of_a_sentence_and_not_its_end() -> None:
    texts = [f"It rained. The tower number {n} was built by the river in the year {1900 + n}." for n in range(30)]
    asked = generate_questions([Chunk(text) for text in texts], 20, seed=1)
    assert len(asked) == len(set(asked)) == 20
    for question in asked:
        begun = question.split('"')[1]
        (text,) = (text for text in texts if begun in text)
        assert text.split(begun)[1].split()[-1] not in question
    assert generate_questions([Chunk("Too short.")], 20) == []


def test_the_demo_is_asked_in_its_own_forms_what_its_texts_tell() -> None:
    corpus = sample_corpus()
    asked = questions_about([record.markdown for record in corpus.records], 50, seed=1)
    assert len(set(asked)) == 50
    assert {piece for question in asked for piece in pieces(f" {question}")} <= set(words())  # each a token it knows
    few = corpus.first(6)
    some = set(questions_about([chunk for record in few.records for chunk in record.chunks], 999))
    assert some >= {question.text for question in few.questions}
    assert len(some) < len(corpus.questions)


def test_questions_to_fit_and_to_check_are_different_ones() -> None:
    texts = [f"question {n}" for n in range(40)]
    fitted, others = split_questions([*texts, *texts], 25, 10, seed=0)
    assert (len(fitted), len(others), len({*fitted, *others})) == (25, 10, 35)
    assert [len(part) for part in split_questions(texts, 60, 10, seed=0)] == [30, 10]
    assert [len(part) for part in split_questions(texts[:12], 60, 10, seed=0)] == [10, 2]
    with pytest.raises(EmptyCorpusError, match="--questions"):
        split_questions(texts[:9], 60, 0, seed=0)


@pytest.mark.parametrize("wrong", [Target(0.0), Target(1.2), Target(None, 0.0), Target(None, None), Target(0.9, 0.1)])
def test_a_target_that_cannot_be_is_refused(wrong: Target) -> None:
    with pytest.raises(UsageError, match=r"target|KL"):
        checked_target(wrong)


# -- with a model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a part of the demo's corpus, ingested."""
    home = tmp_path_factory.mktemp("calibrate")
    sample_corpus().first(6).write(home / "docs")
    with (
        load_engine("demo", home / "kv", new_model=True) as engine,
        open_engine_index(home / "index", engine, EMBEDDER, chunk_size=CHUNK_TOKENS) as index,
    ):
        ingest(home / "docs", engine, index, chunk_size=CHUNK_TOKENS, glob="*.md")
    return home


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[TransformersEngine]:
    with load_engine("demo", home / "kv", on_miss="inline") as engine:
        yield engine


@pytest.fixture(scope="module")
def index(home: Path, engine: TransformersEngine) -> Iterator[ChunkIndex]:
    with open_engine_index(home / "index", engine, create=False) as index:
        yield index


@pytest.fixture(scope="module")
def questions(home: Path) -> list[str]:
    return read_questions((home / "docs" / "questions.jsonl").read_text())


@pytest.fixture(scope="module")
def found(engine: TransformersEngine, index: ChunkIndex, questions: list[str]) -> CalibrationRun:
    """A calibration of the demo, saved, and checked on other questions."""
    return calibrate(
        engine, index, questions, target=Target(0.95), num_questions=24, num_held_out=24, rules=["auto"],
        check_layers=[1], ratios=[0.05, 0.2], **RETRIEVAL,
    )  # fmt: skip


def test_the_prediction_comes_true_on_held_out_questions_of_the_demos_corpus(found: CalibrationRun) -> None:
    held = found.held_out
    assert held is not None
    assert held.num_questions == 24
    assert held.inside
    best = found.calibration.fits[0]
    assert best.low <= held.agreement <= best.high
    assert best.meets_target
    assert 0 < best.ratio <= 0.2
    # The floor is rounding, the ends of the curve are full reuse and full prefill.
    assert found.calibration.noise_floor.agreement == 1.0
    assert found.calibration.noise_floor.kl < 1e-6
    assert best.curve[0].agreement < 0.9 < best.agreement
    assert best.curve[0].kl > 100 * best.curve[2].kl
    assert [point.charged_budget for point in best.curve] == sorted(point.charged_budget for point in best.curve)


def test_the_engine_picks_the_profile_up_by_itself(
    found: CalibrationRun, engine: TransformersEngine, home: Path, index: ChunkIndex, questions: list[str]
) -> None:
    assert load_calibration(home / "kv", engine.fingerprint, engine.default_prefix_ids) == found.calibration
    prompt = SegmentedPrompt([hit.chunk for hit in index.search(questions[0], **RETRIEVAL)], questions[0])
    for ratio in (None, "auto"):
        report = engine.generate(prompt, max_tokens=1, recompute_ratio=ratio).report
        assert (report.rule, report.recompute_ratio) == (found.calibration.rule, found.calibration.ratio)
        assert report.predicted_agreement == found.calibration.fits[0].agreement


def test_what_is_measured_is_what_a_calibrated_engine_does(
    found: CalibrationRun, engine: TransformersEngine, index: ChunkIndex, questions: list[str]
) -> None:
    prompts = [SegmentedPrompt([hit.chunk for hit in index.search(q, **RETRIEVAL)], q) for q in questions[:3]]
    best = found.calibration.fits[0]
    settings = [Setting(best.rule, best.check_layer)]
    made = measure(engine, prompts, settings, (0.0, best.ratio, 1.0), lambda stage, done, total: None)
    for number, prompt in enumerate(prompts):
        full = engine.prefill(engine.request(prompt, mode="full")).logits.double().log_softmax(-1)
        used = engine.prefill(engine.request(prompt))
        log_probs = used.logits.double().log_softmax(-1)
        assert made.kl[0, 1, number] == divergence(full, log_probs)
        assert made.agrees[0, 1, number] == bool(full.argmax() == log_probs.argmax())
        assert made.charged[0, 1, number] == used.report.charged_budget
        reuse = engine.prefill(engine.request(prompt, mode="reuse")).logits.double().log_softmax(-1)
        assert made.kl[0, 0, number] == pytest.approx(divergence(full, reuse))


def test_a_calibration_is_of_the_engines_system_text(home: Path, index: ChunkIndex, questions: list[str]) -> None:
    system = "Answer with the words of the documents."
    with load_engine("demo", home / "kv", system=system, on_miss="inline") as engine:
        one = {"num_questions": 10, "rules": ["auto"], "check_layers": [1], "ratios": [0.1]}
        made = calibrate(engine, index, questions, k=2, target=Target(0.5), **one)  # type: ignore[arg-type]
        chunks = [hit.chunk for hit in index.search(questions[0], 2)]
        report = engine.generate(SegmentedPrompt(chunks, questions[0], system), max_tokens=1).report
        assert {chunk.prefix_match for chunk in report.chunks} == {"exact"}
        assert report.predicted_agreement == made.calibration.fits[0].agreement
        assert made.calibration.prefix_ids == engine.default_prefix_ids


def test_an_engine_without_logits_or_without_a_directory_is_refused(
    engine: TransformersEngine, index: ChunkIndex, questions: list[str]
) -> None:
    with pytest.raises(UsageError, match="--backend transformers"):
        calibrate(object(), index, questions)  # type: ignore[arg-type]
    with load_engine("demo", on_miss="inline") as memory, pytest.raises(UsageError, match="store=DIR"):
        calibrate(memory, index, questions)


# -- the command line


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command in `home`: exit code, stdout, stderr."""
    monkeypatch.chdir(home)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_command(*arguments, "--index", "index", "--store", "kv")
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


FAST = ("--num-questions", "10", "--rules", "auto", "--check-layers", "1", "--ratios", "0.1")


def test_the_command_calibrates_and_ask_uses_it(run: Callable[..., Any], home: Path) -> None:
    for path in (home / "kv" / "calibrations").glob("*"):
        path.unlink()
    code, out, _ = run("ask", "Who?", "--ratio", "auto", "-k", "2", "--max-tokens", "1", "--json")
    report = json.loads(out)["report"]
    assert (code, report["recompute_ratio"], report["predicted_agreement"]) == (0, 0.15, None)
    code, out, _ = run("calibrate", *FAST, "-k", "2", "--target-kl", "5", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["schema_version"] == 1
    assert (facts["questions"], facts["num_questions"], facts["saved"]) == ("generated", 10, True)
    assert (facts["ratio"], facts["target"]) == (0.0, "KL 5")  # full reuse is that close
    assert facts["hardware"]["cpu"]
    assert str(home) not in out
    code, out, _ = run("ask", "Who?", "--ratio", "auto", "-k", "2", "--max-tokens", "1", "--json")
    report = json.loads(out)["report"]
    assert report["recompute_ratio"] == 0.0
    assert report["predicted_agreement"] == facts["predicted_agreement"]["agreement"]


def test_the_command_prints_the_curve_and_takes_a_file(run: Callable[..., Any], home: Path) -> None:
    before = list((home / "kv").glob("calibrations/*"))
    arguments = ("--questions", "docs/questions.jsonl", "--no-save", "--plot", "curve.png", *FAST)
    code, out, _ = run("calibrate", *arguments)
    assert code == 0
    assert out.startswith("10 questions (k 6, neighbours 0, order score), target agreement 0.98: ratio ")
    assert (home / "curve.png").stat().st_size > 10_000
    assert list((home / "kv").glob("calibrations/*")) == before
    assert "saved" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--target-kl", "1", "--target-agreement", "0.9"], 2, "exclude each other"),
        (["--target-agreement", "1.5"], 2, "0.98"),
        (["--rules", "magic"], 2, "magic"),
        (["--ratios", "0.1,2"], 2, "2"),
        (["--questions", "nowhere.txt"], 3, "nowhere.txt"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    run: Callable[..., Any], arguments: list[str], code: int, said: str
) -> None:
    found = run("calibrate", *arguments)
    assert found[0] == code
    assert said in found[2]


def test_a_server_is_refused_and_for_vllm_the_store_is_calibrated_here(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGBLEND_BACKEND", "http://127.0.0.1:9")
    code, _, err = run("calibrate", *FAST)
    assert code == 2
    assert "on the machine that has its store" in err
    monkeypatch.setenv("RAGBLEND_BACKEND", "vllm")
    assert run("calibrate", "--no-save", *FAST, "--ratios", "1")[0] == 0


def test_too_few_questions_are_refused(run: Callable[..., Any], home: Path) -> None:
    (home / "few.txt").write_text("Who?\nWhere?\n")
    code, _, err = run("calibrate", "--questions", "few.txt")
    assert code == 1
    assert "2 questions are too few" in err


def calibration(ratio: float = 0.1, meets: bool = True) -> CalibrationRun:
    points = (
        CurvePoint(0.0, 0.0, 0.7, 0.575, 0.801, 1.7341, 1.01, 2.53, 0.0),
        CurvePoint(0.1, 0.1801, 0.9833, 0.9114, 0.9971, 0.0302, 0.0004, 0.0868, 0.1133),
        CurvePoint(1.0, 0.8503, 1.0, 0.9398, 1.0, 2.8e-13, 1e-14, 5e-13, 0.8503),
    )
    best = Fit("cacheblend_k", 1, ratio, meets, 0.9667, 0.8864, 0.9908, points)
    floor = NoiseFloor(1.0, 2.8e-13)
    calibration = Calibration(
        "f00d", (1,), "112 tokens", 1e9, "agreement 0.98", 60, "k 2, neighbours 2", floor, (best,)
    )
    return CalibrationRun(calibration, "kv/calibrations/x.json", 300, 60.0, 50.0, HeldOut(100, 0.99, 0.0052, 0.9, 1.0))


def test_what_the_command_prints_is_stable() -> None:
    assert "\n".join(lines_of(calibration())) == GOLDEN
    assert any("only ratio 1" in line for line in lines_of(calibration(1.0)))
    assert any("no ratio meets" in line for line in lines_of(calibration(1.0, meets=False)))
    missed = replace(calibration(), held_out=HeldOut(100, 0.8, 0.0052, 0.9, 1.0))
    assert any("NOT as predicted" in line for line in lines_of(missed))


def test_the_picture_is_drawn_from_the_json(tmp_path: Path) -> None:
    facts = json.loads(json.dumps(facts_of(calibration(), "demo", None)))
    plot_calibration(facts, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


GOLDEN = """\
60 questions (k 2, neighbours 2), target agreement 0.98: ratio 0.1 by cacheblend_k at layer 1
predicted: the first token is full prefill's in 96.7% [88.6%, 99.1%]
noise floor (everything recomputed): 100.0%, KL 2.8e-13

cacheblend_k, layer 1
   ratio  charged   at 32   agreement                KL, nats
       0    0.000   0.000   70.0% [57.5%, 80.1%]     1.7 [1, 2.5]
     0.1    0.180   0.113   98.3% [91.1%, 99.7%]     0.03 [0.0004, 0.087] <
       1    0.850   0.850   100.0% [94.0%, 100.0%]   2.8e-13 [1e-14, 5e-13]

held out: of 100 other questions 99.0% agree, KL 0.0052; as predicted (90.0% to 100.0% of so many)

saved; `ragblend ask` and every engine on this store use it: kv/calibrations/x.json"""
