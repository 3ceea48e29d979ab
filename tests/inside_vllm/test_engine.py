"""vLLM in this process as an engine, on the embedded model: the same answers as the transformers engine, one store."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from demo_texts import QUESTION, A, B, C
from harness import SMALL, recorded_selections

from ragblend import Prompt, load_engine
from ragblend.config import Settings
from ragblend.engine.fusion.rules import DEFAULT_RATIO, RULES
from ragblend.engine.shadow import Shadow
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.calibration import Calibration, CurvePoint, RuleFit, save_calibration
from ragblend.errors import EngineClosedError, PromptTooLongError, RagblendError, UsageError
from ragblend.operations.doctor import run_vllm_diagnostics
from ragblend.options import MODES
from ragblend.precompute import precompute_documents

MISSING = "Tom Ashby works for Synon. He was born in Wesstad."
PROMPT = Prompt([A, B, C], QUESTION)
# Labels before chunks, whose first token one of them changes, and a chunk without its first fifth.
LABELLED = f"[1] {B}\n\n[2] {A.partition(' ')[2]}\n\n({C})\n\n{QUESTION}"
PROMPTS = {
    "all": PROMPT,
    "hole": Prompt([C, MISSING, A, B], QUESTION),
    "behind": Prompt([B, C, A, MISSING], QUESTION),
    "labelled": Prompt.from_messages([("user", LABELLED)]),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("engine") / "kv"


@pytest.fixture(scope="module")
def engine(store):
    with load_engine("demo", store, backend="vllm", vllm_options=SMALL, on_miss="inline") as engine:
        precompute_documents([A, B, C], engine)
        engine.add_known_chunks([MISSING])  # and not stored
        yield engine


@pytest.fixture(scope="module")
def reference(store, engine):
    with load_engine("demo", store, on_miss="inline") as reference:
        yield reference


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_answers_as_the_transformers_engine_does(engine, reference, mode):
    ours, theirs = (each.generate(PROMPT, mode=mode, max_tokens=8) for each in (engine, reference))
    assert (ours.text, ours.token_ids, ours.finish_reason) == (theirs.text, theirs.token_ids, theirs.finish_reason)
    assert ours.text == "Kinport"
    if mode == "full":
        assert ours.report.recompute_ratio == theirs.report.recompute_ratio == 1.0
    if mode in ("blend", "reuse"):
        assert ours.report.num_chunk_hits == theirs.report.num_chunk_hits == 3
        assert ours.report.rule == theirs.report.rule
        assert ours.report.num_recomputed_tokens == theirs.report.num_recomputed_tokens
    if mode == "blend":
        ours, theirs = (each.generate(PROMPT, rule="cacheblend", max_tokens=1) for each in (engine, reference))
        assert ours.report.mean_deviation == pytest.approx(theirs.report.mean_deviation, rel=1e-3)


def test_full_prefill_beside_a_request_finds_what_asking_for_it_finds(engine, monkeypatch):
    monkeypatch.setattr(engine, "_shadow", Shadow(1.0))
    for ratio in (0.0, 1.0):
        answer = engine.generate(PROMPT, rule="cacheblend_k", recompute_ratio=ratio, max_tokens=8)
        engine.flush_shadow()
        full = engine.generate(PROMPT, mode="full", max_tokens=8)
        found = answer.report.shadow
        assert found.first_token_agrees == (answer.token_ids[:1] == full.token_ids[:1])
        assert found.answers_identical == (answer.token_ids == full.token_ids)
    assert (engine.shadow.num_requests, engine.shadow.num_shadowed) == (2, 2)
    assert engine.shadow.num_answers_same >= 1  # ratio 1.0 is full prefill


@pytest.mark.parametrize("rule", ["auto", *RULES])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_every_rule_chooses_the_tokens_that_the_transformers_engine_chooses(engine, reference, rule, prompt):
    for ratio in (0.05, 0.15, 0.5):
        with recorded_selections() as selections:
            ours = engine.generate(prompt, rule=rule, recompute_ratio=ratio, max_tokens=4)
        theirs = reference.prefill(reference.request(prompt, rule=rule, recompute_ratio=ratio))
        assert ours.report.num_chunk_hits == 3
        assert selections == [sorted(theirs.recomputed.tolist())]
        assert (ours.report.rule, ours.report.probe_s > 0) == (theirs.report.rule, theirs.report.probe_s > 0)
        for name in ("attention_exact", "attention_recomputed", "attention_stale", "mean_deviation"):
            seen, expected = getattr(ours.report, name), getattr(theirs.report, name)
            assert seen == (expected if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-5)), name


def test_threads_share_the_batch_and_get_their_own_answers(engine):
    prompts = [Prompt(list(chunks), QUESTION) for chunks in ((A, B), (B, A), (C, A, B), (A,), (B, C, A))] * 3
    alone = [engine.generate(prompt, max_tokens=8).token_ids for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: engine.generate(prompt, max_tokens=8).token_ids, prompts))
    assert together == alone


def test_a_closed_stream_is_aborted_and_the_next_answer_is_right(engine):
    stream = engine.stream(PROMPT, max_tokens=500, temperature=2.0, seed=1)
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert engine.generate(PROMPT, max_tokens=8).text == "Kinport"
    assert not engine._loop._answers


def test_a_forgotten_chunk_is_not_found_until_it_is_precomputed_again(engine):
    assert engine.forget(B)
    assert not engine.is_stored(B)
    answer = engine.generate(PROMPT, max_tokens=8)
    assert (answer.text, answer.report.num_chunk_hits) == ("Kinport", 2)
    assert answer.report.num_chunks == 2  # it is known no more
    assert engine.precompute(B) > 0
    assert engine.precompute(B) == 0


def test_a_calibration_decides_what_the_request_leaves_open(engine, store):
    before = engine.generate(PROMPT, max_tokens=1).report
    assert (before.recompute_ratio, before.predicted_agreement) == (DEFAULT_RATIO, None)
    point = CurvePoint(0.0, 0.0, 0.5, 0.4, 0.6, 1.0, 0.0)
    points = (
        point,
        point._replace(ratio=0.5, agreement=0.9, high=1.0),
        point._replace(ratio=1.0, agreement=1.0, high=1.0),
    )
    fit = RuleFit("cacheblend_k", 2, 0.5, True, points)
    facts = (engine.fingerprint, engine.default_prefix_ids, "112 tokens", 1e9, 0.8, 60, "k 3")
    path = save_calibration(DiskStore(store), Calibration(*facts, (fit,)))
    for ratio in (None, "auto"):
        report = engine.generate(PROMPT, recompute_ratio=ratio, max_tokens=1).report
        assert (report.rule, report.recompute_ratio, report.predicted_agreement) == ("cacheblend_k", 0.5, 0.9)
        # Layer 2 was read, so more tokens ran that far than with the usual layer 1.
        usual = engine.generate(PROMPT, rule="cacheblend", recompute_ratio=0.5, max_tokens=1).report
        assert report.charged_budget > usual.charged_budget
        assert usual.predicted_agreement is None
    asked = engine.generate(PROMPT, recompute_ratio=0.75, max_tokens=1).report
    assert (asked.recompute_ratio, asked.predicted_agreement) == (0.75, pytest.approx(0.95))
    assert engine.generate(PROMPT, mode="reuse", max_tokens=1).report.predicted_agreement == 0.5
    assert engine.generate(PROMPT, mode="full", max_tokens=1).report.predicted_agreement is None
    path.unlink()
    assert engine.generate(PROMPT, recompute_ratio="auto", max_tokens=1).report.recompute_ratio == DEFAULT_RATIO


def test_stop_strings_and_limits(engine):
    stopped, whole = (engine.generate(PROMPT, max_tokens=8, stop=stop) for stop in (["port"], None))
    assert stopped.text == "Kin"
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "charged_budget"):
        assert getattr(stopped.report, name) == getattr(whole.report, name) > 0, name
    answer = engine.generate(PROMPT, max_tokens=1)
    assert len(answer.token_ids) == 1
    with pytest.raises(PromptTooLongError, match="1024"):
        engine.generate(Prompt([A] * 200, QUESTION))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"vllm_options": {"model": "x"}}, "model"),
        ({"vllm_options": {"no_such_option": 1}}, "no_such_option"),
        ({"device": "cuda:1"}, "cuda:1"),
        ({"store": object()}, "a folder"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(arguments, named):
    with pytest.raises(UsageError, match=named):
        load_engine("demo", backend="vllm", **arguments)


def test_a_plugin_that_is_kept_out_is_told_before_vllm_starts(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    with pytest.raises(RagblendError, match="VLLM_PLUGINS=others,ragblend"):
        load_engine("demo", backend="vllm")
    checks = {check.name: check for check in run_vllm_diagnostics(Settings(model="demo", backend="vllm"))}
    assert not checks["vllm plugin"].ok
    assert "unset it" in checks["vllm plugin"].fix
    assert checks["vllm"].ok
    assert checks["vllm model"].ok


def test_doctor_names_a_store_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    checks = {
        check.name: check for check in run_vllm_diagnostics(Settings(model="demo", backend="vllm", store=str(tmp_path)))
    }
    assert not checks["vllm store"].ok
    assert "cannot write" in checks["vllm store"].finding


def test_zz_a_closed_engine_says_so(tmp_path, engine):
    engine.close()
    with pytest.raises(EngineClosedError, match="load it again"):
        engine.generate(PROMPT, max_tokens=1)


def test_zz_streams_end_quietly_when_their_engine_is_closed(checkpoint, tmp_path):
    """A random model's, which does not know when to stop: half read, read by another thread, and not begun."""
    engine = load_engine(str(checkpoint("llama")), tmp_path, backend="vllm", vllm_options=SMALL)
    half, running, unread = (engine.stream(PROMPT, max_tokens=800) for _ in range(3))
    next(half)
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.extend(running), daemon=True)
    thread.start()
    while thread.is_alive() and len(running.result.token_ids) < 5:
        time.sleep(0.001)
    engine.close()
    thread.join(30)
    assert not thread.is_alive()
    for stream in (half, unread):
        list(stream)
    assert [stream.result.finish_reason for stream in (half, running, unread)] == ["cancelled"] * 3
    assert running.result.text == "".join(ended) != ""
