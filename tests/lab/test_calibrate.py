"""Calibration: exact arithmetic on made-up outcomes, honest predictions, and the demo's corpus from end to end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import CommandRunner
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from tokenizers import Tokenizer

from ragblend import Prompt, load_engine
from ragblend.cli.lab.calibrate import calibration_lines
from ragblend.demo import WEIGHTS
from ragblend.demo.corpus import pick_questions_about, sample_corpus
from ragblend.demo.show import CHUNK_TOKENS, EMBEDDER, RETRIEVAL
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.fusion.rules import DEFAULT_RULE as AUTO
from ragblend.engine.fusion.rules import NO_PROBE_RULE
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.calibration import (
    Calibration,
    CurvePoint,
    RuleFit,
    load_calibration,
    save_calibration,
)
from ragblend.errors import UsageError
from ragblend.lab.calibrate import (
    CalibrationRun,
    calibrate,
    fit_all,
    fit_ratio,
    generate_questions,
    measure_curves,
    min_questions,
    read_questions,
    split_questions,
    summarize_ratio,
    unique_rule_names,
)
from ragblend.precompute import ingest, open_engine_index
from ragblend.prompt.types import Chunk

RATIOS = (0.0, 0.1, 0.2, 0.5, 1.0)


def curve(*right: int, of: int = 60, costs: float = 1.0) -> tuple[CurvePoint, ...]:
    """A curve with `right` questions right at each of RATIOS; a ratio costs `costs` times itself."""
    return tuple(
        summarize_ratio(ratio, [(n < count, 0.0, costs * ratio, ratio) for n in range(of)])
        for ratio, count in zip(RATIOS, right, strict=True)
    )


def lower(count: int, num: int) -> float:
    """Return Wilson's lower bound, as scipy computes it."""
    return float(binomtest(count, num).proportion_ci(method="wilson").low)


# -- the ratio

counts = st.lists(st.integers(0, 60), min_size=5, max_size=5)


@given(counts, st.floats(0.01, 0.99))
def test_the_ratio_is_the_smallest_above_which_all_meet_the_target(right, aim):
    found = fit_ratio(AUTO, curve(*right), aim)
    met = [all(lower(count, 60) >= aim for count in right[place:]) for place in range(5)]
    assert found.meets_target == any(met)
    assert found.ratio == (RATIOS[met.index(True)] if any(met) else 1.0)


@given(st.floats(0.01, 0.995))
def test_the_least_number_of_questions_is_enough_with_full_agreement(target):
    num = min_questions(target)
    assert lower(num, num) >= target - 1e-5
    assert num == 1 or lower(num - 1, num - 1) < target + 1e-5


# -- the target


def test_the_fitted_ratio_meets_the_target():
    """Over many draws of 60 questions a ratio that does not deserve it is seldom taken."""
    chances, draws = np.array((0.5, 0.7, 0.88, 0.96, 1.0)), np.random.default_rng(0)
    broken = 0
    for right in draws.binomial(60, chances, (200, 2, 5)):  # the best of two rules, neither better than the other
        found = fit_all({AUTO: curve(*map(int, right[0])), NO_PROBE_RULE: curve(*map(int, right[1]))}, 0.9)[0]
        broken += found.meets_target and chances[RATIOS.index(found.ratio)] < 0.9
    assert broken <= 200 * 0.05


# -- rules


def test_another_rule_takes_over_only_where_it_is_cheaper():
    slow, fast = (20, 30, 40, 59, 60), (20, 59, 60, 60, 60)
    cheap = fit_all({AUTO: curve(*slow), NO_PROBE_RULE: curve(*fast)}, 0.9)
    assert [(found.rule, found.ratio) for found in cheap] == [(NO_PROBE_RULE, 0.1), (AUTO, 0.5)]
    assert fit_all({AUTO: curve(*fast), NO_PROBE_RULE: curve(*fast)}, 0.9)[0].rule == AUTO
    dear = fit_all({AUTO: curve(*slow), NO_PROBE_RULE: curve(*fast, costs=6)}, 0.9)  # a smaller ratio, but more compute
    assert [(found.rule, found.ratio) for found in dear] == [(AUTO, 0.5), (NO_PROBE_RULE, 0.1)]


def test_rules_start_with_the_one_that_is_used_uncalibrated():
    assert unique_rule_names((NO_PROBE_RULE, "auto", AUTO), 8) == (AUTO, NO_PROBE_RULE)
    with pytest.raises(UsageError, match="magic"):
        unique_rule_names(("magic",), 5)


# -- questions


def test_questions_come_one_per_line_or_as_json_lines():
    assert read_questions("Who?\n\n  Where? \n") == ["Who?", "Where?"]
    assert read_questions('{"question": "Who?", "answer": "Ann"}\n{"question": "Where?"}\n') == ["Who?", "Where?"]
    with pytest.raises(UsageError, match="JSON lines"):
        read_questions('{"question": "Who?"}\nWhere?')


def test_generated_questions_hold_the_beginning_of_a_sentence_and_not_its_end():
    texts = [f"It rained. The tower number {n} was built by the river in the year {1900 + n}." for n in range(30)]
    asked = generate_questions([Chunk(text) for text in texts], 20)
    assert len(asked) == len(set(asked)) == 20
    for question in asked:
        begun = question.split('"')[1]
        (text,) = (text for text in texts if begun in text)
        assert text.split(begun)[1].split()[-1] not in question
    assert generate_questions([Chunk("Too short.")], 20) == []


def test_questions_of_the_demo_have_its_forms_and_ask_about_its_texts():
    corpus = sample_corpus()
    asked = pick_questions_about([record.markdown for record in corpus.records], 50, seed=1)
    assert len(set(asked)) == 50
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    for question in asked:
        words = tokenizer.pre_tokenizer.pre_tokenize_str(f" {question}")
        assert len(tokenizer.encode(f" {question}").ids) == len(words)  # each is one token
    few = corpus.first_records(6)
    some = set(pick_questions_about([chunk for record in few.records for chunk in record.chunks], 999))
    assert some >= {question.text for question in few.questions}
    assert len(some) < len(corpus.questions)


def test_questions_to_fit_and_to_check_are_different_ones():
    texts = [f"question {n}" for n in range(60)]
    fitted, others = split_questions([*texts, *texts], 40, 10, 0.9)
    assert (len(fitted), len(others), len({*fitted, *others})) == (40, 10, 50)
    assert [len(part) for part in split_questions(texts, 60, 10, 0.9)] == [50, 10]
    assert [len(part) for part in split_questions(texts[:37], 60, 10, 0.9)] == [35, 2]  # the fit goes first
    with pytest.raises(UsageError, match=r"34 questions.*--questions"):
        split_questions([*texts[:34], *texts[:34]], 60, 0, 0.9)


# -- with a model


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a part of the demo's corpus, ingested."""
    home = tmp_path_factory.mktemp("calibrate")
    sample_corpus().first_records(6).write(home / "docs")
    with (
        load_engine("demo", home / "kv", new_model=True) as engine,
        open_engine_index(home / "kv", engine, EMBEDDER, chunk_size=CHUNK_TOKENS) as index,
    ):
        ingest(home / "docs", engine, index, chunk_size=CHUNK_TOKENS, glob="*.md")
    return home


@pytest.fixture(scope="module")
def engine(home):
    with load_engine("demo", home / "kv", on_miss="inline") as engine:
        yield engine


@pytest.fixture(scope="module")
def index(home, engine):
    with open_engine_index(home / "kv", engine, create=False) as index:
        yield index


@pytest.fixture(scope="module")
def questions(home):
    return read_questions((home / "docs" / "questions.jsonl").read_text())


@pytest.fixture(scope="module")
def found(engine, index, questions):
    """A calibration of the demo, saved, and checked on other questions."""
    return calibrate(
        engine, index, questions, target=0.8, num_questions=24, num_held_out=24, rules=["auto"],
        ratios=[0.05, 0.2], **RETRIEVAL,
    )  # fmt: skip


def test_the_prediction_holds_on_held_out_questions_of_the_demos_corpus(found):
    held = found.held_out
    assert found.num_held_out == 24
    assert not found.is_target_refuted
    best = found.calibration.fits[0]
    assert held.agreement >= found.calibration.target
    assert best.meets_target
    assert 0 < best.ratio <= 0.2
    # The last point is rounding; the ends of the curve are full reuse and full prefill.
    reuse, *_, everything = best.curve
    assert everything.agreement == 1.0
    assert everything.kl < 1e-6
    assert reuse.low < found.calibration.target <= best.point.low
    assert reuse.kl > 100 * best.curve[2].kl
    assert [point.charged_budget for point in best.curve] == sorted(point.charged_budget for point in best.curve)


def test_what_is_measured_is_what_a_calibrated_engine_does(found, engine, index, questions):
    prompts = [Prompt([hit.chunk for hit in index.search(q, **RETRIEVAL)], q) for q in questions[:3]]
    best = found.calibration.fits[0]
    for prompt in prompts:
        measured = measure_curves(engine, [prompt], [best.rule], (0.0, best.ratio, 1.0), lambda *_: None)
        (made,) = measured.curves.values()
        full = engine.prefill(engine.request(prompt, mode="full")).logits
        used = engine.prefill(engine.request(prompt))
        assert made[1].kl == first_token_kl(full, used.logits)
        assert made[1].agreement == (full.argmax() == used.logits.argmax())
        assert made[1].charged_budget == used.report.charged_budget
        reuse = engine.prefill(engine.request(prompt, mode="reuse")).logits
        assert made[0].kl == pytest.approx(first_token_kl(full, reuse))


def test_every_ratio_is_timed_beside_full_prefill_with_kv_in_memory(found, home, index, questions, monkeypatch):
    rule = found.calibration.rule
    assert set(found.ttft_s) == {(rule, ratio) for ratio in (0.0, 0.05, 0.2, 1.0)}
    assert min(found.full_s, *found.ttft_s.values()) > 0
    happened = []
    get = DiskStore.get
    monkeypatch.setattr(DiskStore, "get", lambda *arguments: happened.append("read") or get(*arguments))
    with load_engine("demo", home / "kv", on_miss="inline") as engine:
        prefill = engine.prefill
        monkeypatch.setattr(
            engine, "prefill", lambda request: happened.append(request.tuning.recompute_ratio) or prefill(request)
        )
        prompt = Prompt([hit.chunk for hit in index.search(questions[0], **RETRIEVAL)], questions[0])
        length = measure_curves(engine, [prompt], [rule], (0.0, 0.2, 1.0), lambda *_: None).prompt_tokens
        assert length == len(engine.renderer.render(prompt))
    blends = happened[happened.index(0.0) :]
    assert blends[-3:] == [0.0, 0.2, 1.0]
    assert set(blends[1:-3]) == {"read"}, "the blend before them, which is not timed, reads the disk"


def test_a_calibration_is_of_the_engines_system_text(home, index, questions):
    system = "Answer with the words of the documents."
    with load_engine("demo", home / "kv", system=system, on_miss="inline") as engine:
        one = {"num_questions": 10, "rules": ["auto"], "ratios": [0.1]}
        made = calibrate(engine, index, questions, k=2, target=0.5, **one)
        chunks = [hit.chunk for hit in index.search(questions[0], 2)]
        report = engine.generate(Prompt(chunks, questions[0], system), max_tokens=1).report
        assert {chunk.prefix_match for chunk in report.chunks} == {"exact"}
        assert report.predicted_agreement == made.calibration.fits[0].agreement_at(report.recompute_ratio)
        assert made.calibration.prefix_ids == engine.default_prefix_ids


def test_an_engine_without_logits_or_without_a_directory_is_refused(engine, index, questions):
    with pytest.raises(UsageError, match="--backend transformers"):
        calibrate(object(), index, questions)
    with load_engine("demo", on_miss="inline") as memory, pytest.raises(UsageError, match="store=DIR"):
        calibrate(memory, index, questions)


# -- the command line


@pytest.fixture
def changed_home(home, tmp_path):
    """A copy of `home`, for a test that calibrates again."""
    return Path(shutil.copytree(home, tmp_path / "home"))


@pytest.fixture
def run(changed_home, monkeypatch, capsys):
    """Run a command over the store in `changed_home`: exit code, stdout, stderr."""
    monkeypatch.chdir(changed_home)
    command = CommandRunner(capsys)
    return lambda *arguments: command(*arguments, "--store", "kv")


FAST = ("--num-questions", "10", "--target", "0.7", "--rules", "auto", "--ratios", "0.1")


def test_the_command_calibrates_and_ask_uses_it(run, changed_home):
    for path in (changed_home / "kv" / "calibrations").glob("*"):
        path.unlink()
    code, out, _ = run("ask", "Who?", "--ratio", "auto", "-k", "2", "--max-tokens", "1", "--json")
    report = json.loads(out)["report"]
    assert (code, report["recompute_ratio"], report["predicted_agreement"]) == (0, 0.15, None)
    code, out, _ = run("calibrate", *FAST, "-k", "2", "--target", "0.05", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["schema_version"] == 1
    assert (facts["questions"], facts["num_questions"], facts["saved"]) == ("generated", 10, True)
    assert (facts["ratio"], facts["target"]) == (0.0, 0.05)  # full reuse is that close
    assert facts["hardware"]["cpu"]
    assert facts["full_s"] > 0
    assert all(point["ttft_s"] > 0 for fit in facts["fits"] for point in fit["curve"])
    assert str(changed_home) not in out
    code, out, _ = run("ask", "Who?", "--ratio", "auto", "-k", "2", "--max-tokens", "1", "--json")
    report = json.loads(out)["report"]
    assert report["recompute_ratio"] == 0.0
    assert 0 < report["predicted_agreement"] <= facts["predicted_agreement"]["agreement"]
    with load_engine("demo", changed_home / "kv", on_miss="inline") as engine:
        ours = load_calibration(changed_home / "kv", engine.fingerprint, engine.default_prefix_ids)
    later = replace(
        ours, chunker="of another index", created_s=ours.created_s + 9, fits=(replace(ours.fits[0], ratio=1.0),)
    )
    path = save_calibration(DiskStore(changed_home / "kv"), later)
    code, out, _ = run("ask", "Who?", "-k", "2", "--max-tokens", "1", "--json")
    assert json.loads(out)["report"]["recompute_ratio"] == 0.0  # that of the index that is asked
    path.write_bytes(path.read_bytes()[:-9])
    code, out, err = run("verify", "--repair")
    assert "create it again: ragblend calibrate" in out + err
    assert not path.exists()


def test_the_command_prints_the_curve_and_takes_a_file(run, changed_home):
    before = list((changed_home / "kv").glob("calibrations/*"))
    arguments = ("--questions", "docs/questions.jsonl", "--no-save", *FAST)
    code, out, _ = run("calibrate", *arguments)
    assert code == 0
    assert out.startswith("10 questions (k 6, neighbours 0, order score), target 0.7: ratio ")
    assert list((changed_home / "kv").glob("calibrations/*")) == before
    assert "saved" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--target", "1.5"], 2, "0.9"),
        (["--target", "0.98"], 2, "0.98 needs 189"),
        (["--rules", "magic"], 2, "magic"),
        (["--ratios", "0.1,2"], 2, "2"),
        (["--questions", "nowhere.txt"], 3, "nowhere.txt"),
        (["--questions", "few.txt"], 2, "2 questions are too few"),
    ],
)
def test_wrong_arguments_are_refused_by_name(run, changed_home, arguments, code, said):
    (changed_home / "few.txt").write_text("Who?\nWhere?\n")
    found = run("calibrate", *arguments)
    assert found[0] == code
    assert said in found[2]


def test_a_server_is_refused_and_for_vllm_the_store_is_calibrated_here(run, monkeypatch):
    monkeypatch.setenv("RAGBLEND_BACKEND", "http://127.0.0.1:9")
    code, _, err = run("calibrate", *FAST)
    assert code == 2
    assert "on the machine that has its store" in err
    monkeypatch.setenv("RAGBLEND_BACKEND", "vllm")
    assert run("calibrate", "--no-save", *FAST, "--ratios", "1")[0] == 0


def calibration(ratio: float = 0.1, meets: bool = True) -> CalibrationRun:
    points = (
        CurvePoint(0.0, 0.0, 0.7, 0.575, 0.801, 1.7341, 0.0),
        CurvePoint(0.1, 0.1801, 0.9833, 0.9114, 0.9971, 0.0302, 0.1133),
        CurvePoint(1.0, 0.8503, 1.0, 0.9398, 1.0, 2.8e-13, 0.8503),
    )
    fits = (RuleFit("cacheblend_k", 1, ratio, meets, points),)
    calibration = Calibration("f00d", (1,), "112 tokens", 1e9, 0.9, 60, "k 2, neighbours 2", fits)
    held_out = CurvePoint(0.1, 0.18, 0.99, 0.9455, 0.9982, 0.0052, 0.1133)
    times = {("cacheblend_k", 0.0): 0.05, ("cacheblend_k", 0.1): 0.25, ("cacheblend_k", 1.0): 2.12}
    return CalibrationRun(calibration, "kv/calibrations/x.json", 2.0, times, 812.4, 300, 60.0, 50.0, held_out, 100)


def test_what_the_command_prints_is_stable():
    assert "\n".join(calibration_lines(calibration())) == GOLDEN
    assert any("only ratio 1" in line for line in calibration_lines(calibration(1.0)))
    assert any("no ratio meets" in line for line in calibration_lines(calibration(1.0, meets=False)))
    missed = replace(calibration(), held_out=CurvePoint(0.1, 0.18, 0.8, 0.711, 0.867, 0.0052, 0.1133))
    assert any("BELOW the target" in line for line in calibration_lines(missed))


GOLDEN = """\
60 questions (k 2, neighbours 2), target 0.9: ratio 0.1 by cacheblend_k
the first token is full prefill's in 98.3% [91.1%, 99.7%]
with all tokens recomputed (rounding only): 100.0%, KL 2.8e-13
full prefill of 812 tokens takes 2 s

cacheblend_k
   ratio  charged   at 32   agreement                KL, nats   TTFT s  speedup
       0    0.000   0.000   70.0% [57.5%, 80.1%]     1.7          0.05    40.0x
     0.1    0.180   0.113   98.3% [91.1%, 99.7%]     0.03         0.25     8.0x <
       1    0.850   0.850   100.0% [94.0%, 100.0%]   2.8e-13      2.12     0.9x

<: the fitted ratio; charged: share of full prefill's work on chunk tokens; at 32: with 32 layers; \
TTFT: median seconds to the first token, KV in memory

held out: of 100 other questions 99.0% [94.5%, 99.8%] agree, KL 0.0052; the target is met

saved; `ragblend ask` and every engine on this store use it: kv/calibrations/x.json"""
