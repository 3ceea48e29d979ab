"""The default ratio is measured on stored chunks once, is that of the measured curve, and yields to the user's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragblend import load_engine
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.fusion.rules import ASK_RATIO
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.calibration import load_calibration, save_calibration
from ragblend.ingestion import self_calibration
from ragblend.ingestion.report import ignore_progress
from ragblend.ingestion.self_calibration import NUM_PROMPTS, RATIOS, calibrate_on_chunks, make_prompts
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk, Prompt

TEXTS = [
    f"Report {number} of the harbour office begins here. The crane number {number * 7} lifted {number} boxes of tea. "
    f"Its driver had the name Ada{number} and went home at {number % 12} in the evening."
    for number in range(12)
]


@pytest.fixture
def engine(deep_model, tmp_path):
    with load_engine(deep_model, tmp_path / "kv", context="none") as opened:
        yield opened


@pytest.fixture
def always_due(monkeypatch):
    monkeypatch.setattr(self_calibration, "MAX_COST", 1e6)


def calibration_of(engine):
    disk = engine.store.find_tier(DiskStore)
    return load_calibration(disk.root, engine.fingerprint, engine.default_prefix_ids)


def test_the_curve_is_the_mean_kl_to_full_prefill(engine):
    precompute_documents(TEXTS, engine)
    prompts = make_prompts([Chunk(text) for text in TEXTS], engine.system)
    fit = calibrate_on_chunks(prompts, engine, ignore_progress).fits[0]
    for point in fit.curve[:-1]:
        distances = []
        for prompt in prompts:
            full = engine.prefill(engine.request(prompt, mode="full", max_tokens=1)).logits
            options = {"mode": "blend", "rule": "ask", "recompute_ratio": point.ratio, "max_tokens": 1}
            distances.append(first_token_kl(full, engine.prefill(engine.request(prompt, **options)).logits))
        assert point.kl == pytest.approx(sum(distances) / len(prompts), rel=1e-3, abs=1e-9)
    assert [point.ratio for point in fit.curve] == [0.0, *RATIOS, 1.0]


@pytest.mark.parametrize("place", range(len(RATIOS)))
def test_the_smallest_ratio_near_enough_is_chosen(engine, monkeypatch, place):
    precompute_documents(TEXTS, engine)
    prompts = make_prompts([Chunk(text) for text in TEXTS], engine.system)
    curve = calibrate_on_chunks(prompts, engine, ignore_progress).fits[0]
    monkeypatch.setattr(self_calibration, "MAX_KL", curve.kl_at(RATIOS[place]))
    fit = calibrate_on_chunks(prompts, engine, ignore_progress).fits[0]
    assert fit.meets_target
    assert fit.kl_at(fit.ratio) <= curve.kl_at(RATIOS[place])
    assert all(curve.kl_at(ratio) > curve.kl_at(RATIOS[place]) for ratio in RATIOS if ratio < fit.ratio)
    monkeypatch.setattr(self_calibration, "MAX_KL", -1.0)
    fit = calibrate_on_chunks(prompts, engine, ignore_progress).fits[0]
    assert (fit.ratio, fit.meets_target) == (RATIOS[-1], False)


def test_an_ingestion_sets_the_default_ratio_once(engine, always_due, monkeypatch):
    monkeypatch.setattr(self_calibration, "MAX_KL", -1.0)
    precompute_documents(TEXTS, engine)
    prompt = Prompt(TEXTS[:3], "Who drove crane number 7?", engine.system)
    report = engine.generate(prompt, max_tokens=1).report
    fit = calibration_of(engine).fits[0]
    assert report.recompute_ratio == fit.ratio == RATIOS[-1]
    assert (report.predicted_kl, report.predicted_agreement) == (fit.kl_at(fit.ratio), None)
    asked = engine.generate(prompt, max_tokens=1, recompute_ratio=0.15).report
    assert (asked.recompute_ratio, asked.predicted_kl) == (0.15, fit.kl_at(0.15))
    monkeypatch.setattr(self_calibration, "calibrate_on_chunks", None)
    precompute_documents(["One more text, which no question is about. It has two sentences that are long."], engine)


def test_a_calibration_of_questions_is_preferred(engine, always_due):
    precompute_documents(TEXTS, engine)
    made = calibration_of(engine)
    fit = replace(made.fits[0], ratio=0.3, chosen_by="agreement")
    own = replace(made, chunker="112 tokens", created_s=made.created_s - 100, fits=(fit,))
    save_calibration(engine.store.find_tier(DiskStore), own)
    assert calibration_of(engine) == own
    assert len(list((engine.store.find_tier(DiskStore).root / "calibrations").iterdir())) == 2


def test_a_small_store_is_not_measured(engine, monkeypatch):
    monkeypatch.setattr(self_calibration, "calibrate_on_chunks", None)
    precompute_documents(TEXTS, engine)
    prompt = Prompt(TEXTS[:3], "Who drove crane number 7?", engine.system)
    assert engine.generate(prompt, max_tokens=1).report.recompute_ratio == ASK_RATIO


def test_prompts_beyond_the_context_length_fail_no_ingestion(engine, always_due, caplog):
    words = " ".join(f"word{number}" for number in range(250))
    report = precompute_documents([f"Report {number} has {words}." for number in range(10)], engine)
    assert (report.num_new_kv, report.failures, calibration_of(engine)) == (10, [], None)
    assert "the default ratio was not measured" in caplog.text


def test_a_shallow_model_is_not_measured(tmp_path, always_due, monkeypatch):
    monkeypatch.setattr(self_calibration, "calibrate_on_chunks", None)
    with load_engine("demo", tmp_path / "kv") as engine:
        precompute_documents(TEXTS, engine)


def test_prompts_need_chunks_with_sentences():
    chunks = [Chunk(text) for text in TEXTS]
    prompts = make_prompts(chunks, None)
    assert [prompt.messages for prompt in prompts] == [prompt.messages for prompt in make_prompts(chunks, None)]
    assert len(prompts) == NUM_PROMPTS
    assert not make_prompts([Chunk("Too short."), Chunk("Also. Too. Short.")], None)
    assert len(make_prompts(chunks[:6], None)) == 3
