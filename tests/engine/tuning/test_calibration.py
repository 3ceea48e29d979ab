"""Calibrations: a calibration survives the disk whole or not at all, and decides what a request left open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_prompts import CHUNKS, PROMPT

from ragblend.engine.fusion.rules import DEFAULT_RATIO, NO_PROBE_RULE, RULES
from ragblend.engine.fusion.rules import DEFAULT_RULE as AUTO
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.signed_json import encode_signed_json
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.calibration import (
    CALIBRATIONS_DIR,
    Calibration,
    CalibrationCache,
    CurvePoint,
    RequestTuning,
    RuleFit,
    calibration_from_dict,
    calibration_problem,
    load_calibration,
    save_calibration,
)
from ragblend.errors import StoreFullError, StoreNotWritableError, UsageError
from ragblend.prompt.types import Prompt


def curve(*shares: tuple[float, float]) -> tuple[CurvePoint, ...]:
    """Points of (ratio, agreement)."""
    return tuple(CurvePoint(r, r / 2, a, max(0, a - 0.1), min(1, a + 0.1), 1 - a, r / 3) for r, a in shares)


BEST = RuleFit(AUTO, 1, 0.1, True, curve((0, 0.5), (0.05, 0.9), (0.1, 0.96), (0.5, 0.98), (1, 1.0)))
OTHER = RuleFit(NO_PROBE_RULE, 2, 0.5, True, curve((0, 0.5), (0.5, 0.92), (1, 1.0)))
CALIBRATION = Calibration("f00d", (1, 2, 3), "112 tokens", 1e9, 0.85, 60, "k 2", (BEST, OTHER))


def save(root: Path, calibration: Calibration = CALIBRATION) -> Path:
    return save_calibration(DiskStore(root, fsync=False), calibration)


# -- on the disk


def test_a_calibration_comes_back_as_it_was_saved(tmp_path):
    save(tmp_path)
    assert load_calibration(tmp_path, "f00d", (1, 2, 3)) == CALIBRATION
    assert load_calibration(tmp_path, "f00d", (1, 2, 3), "112 tokens") == CALIBRATION
    assert (CALIBRATION.ratio, CALIBRATION.rule, CALIBRATION.check_layer) == (BEST.ratio, BEST.rule, BEST.check_layer)
    assert BEST.point == BEST.curve[2]


def test_the_file_format_is_stable(tmp_path):
    path = save(tmp_path, replace(CALIBRATION, fits=(replace(BEST, rule="cacheblend"),)))
    assert (
        path.relative_to(tmp_path).as_posix() == "calibrations/9757a0f6c41fe5ed1dc67ebae2222f66-0210730fb21886ab.json"
    )
    note = json.loads(path.read_text())
    assert note["version"] == 1
    assert note["xxh3_128"] == "500256dc751efbd3cb91aeb7f9081533"
    assert set(note["calibration"]["fits"][0]["curve"][0]) == set(CurvePoint._fields)


def test_another_model_prefix_or_chunker_finds_nothing(tmp_path):
    save(tmp_path)
    assert load_calibration(tmp_path, "beef", (1, 2, 3)) is None
    assert load_calibration(tmp_path, "f00d", (1, 2)) is None
    assert load_calibration(tmp_path, "f00d", (1, 2, 3), "512 tokens") is None
    assert load_calibration(tmp_path / "nowhere", "f00d", (1, 2, 3)) is None


def test_of_several_chunkers_the_requested_or_the_latest_is_loaded(tmp_path):
    later = replace(CALIBRATION, chunker="512 tokens", created_s=2e9)
    for calibration in (later, CALIBRATION):
        save(tmp_path, calibration)
    assert load_calibration(tmp_path, "f00d", (1, 2, 3)) == later
    assert load_calibration(tmp_path, "f00d", (1, 2, 3), "112 tokens") == CALIBRATION


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of CALIBRATION. A test may overwrite it."""
    return save(tmp_path_factory.mktemp("kv"))


@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_nothing_or_what_it_was(saved, place, byte, cut):
    data = encode_signed_json(CALIBRATION.as_dict(), CALIBRATIONS_DIR)
    at = int(place * len(data))
    damaged = data[:at] if cut else data[:at] + bytes([byte]) + data[at + 1 :]
    saved.write_bytes(damaged)
    found = load_calibration(saved.parents[1], "f00d", (1, 2, 3))
    assert found == (CALIBRATION if damaged == data else None)


@pytest.mark.parametrize("change", [{"created_s": 10**400}, {"prefix_ids": [float("inf")]}, {"fits": 3}])
def test_values_that_are_no_calibrations_are_a_usage_error(change):
    facts = json.loads(json.dumps(CALIBRATION.as_dict()))
    with pytest.raises(UsageError, match="it is no calibration"):
        calibration_from_dict({**facts, "calibration": {**facts["calibration"], **change}})


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_a_file_of_any_bytes_is_skipped(saved, data):
    saved.write_bytes(data)
    assert load_calibration(saved.parents[1], "f00d", (1, 2, 3)) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda note: note.update(version=1),
        lambda note: note["calibration"].update(num_questions=61),  # the checksum is another
        lambda note: note.pop("calibration"),
    ],
)
def test_a_file_that_cannot_be_used_is_skipped_with_a_warning(spoil, tmp_path, caplog):
    path = save(tmp_path)
    note = json.loads(path.read_text())
    spoil(note)
    path.write_text(json.dumps(note))
    assert load_calibration(tmp_path, "f00d", (1, 2, 3)) is None
    assert "ragblend calibrate" in caplog.text


def test_a_file_under_another_models_name_is_not_used(tmp_path, caplog):
    saved = save(tmp_path)
    renamed = saved.with_name(replace(CALIBRATION, fingerprint="beef").filename)
    saved.rename(renamed)
    assert load_calibration(tmp_path, "beef", (1, 2, 3)) is None
    assert "another model" in caplog.text


@pytest.mark.parametrize(("number", "error"), [(28, StoreFullError), (30, StoreNotWritableError)])
def test_a_write_that_fails_leaves_the_old_calibration(number, error, tmp_path, monkeypatch):
    save(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(number, "it fails")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(error):
        save_calibration(DiskStore(tmp_path), replace(CALIBRATION, num_questions=99))
    assert load_calibration(tmp_path, "f00d", (1, 2, 3)) == CALIBRATION
    assert [path.name for path in (tmp_path / CALIBRATIONS_DIR).iterdir()] == [CALIBRATION.filename]


def test_verify_and_gc_leave_calibrations_alone(tmp_path):
    save(tmp_path)
    disk = DiskStore(tmp_path, fsync=False)
    assert list(disk.verify()) == []
    disk.gc(max_bytes=0)
    assert load_calibration(tmp_path, "f00d", (1, 2, 3)) == CALIBRATION


@pytest.mark.parametrize(
    "wrong",
    [
        {"curve": curve((0, 0.5))},
        {"curve": curve((0, 0.5), (0.5, 0.6))},
        {"curve": curve((0, 0.5), (0.5, 0.6), (0.5, 0.7), (1, 1.0))},
        {"curve": curve((0, 0.5), (1, float("nan")))},
        {"ratio": 1.5},
        {"curve": curve((0, 0.5), (1, 1.5))},
        {"rule": "magic"},
        {"check_layer": -1},
    ],
)
def test_a_fit_that_cannot_be_is_refused(wrong):
    with pytest.raises(UsageError):
        replace(BEST, **wrong)


# -- predictions


shares = st.floats(0, 1)


@given(st.lists(shares, min_size=2, max_size=8), st.data())
def test_predicted_agreement_never_falls_with_the_ratio(raw, data):
    ratios = [place / (len(raw) - 1) for place in range(len(raw))]
    fit = RuleFit(AUTO, 1, data.draw(st.sampled_from(ratios)), True, curve(*zip(ratios, raw, strict=True)))
    first, second = sorted((data.draw(shares), data.draw(shares)))
    assert 0 <= fit.agreement_at(first) <= fit.agreement_at(second) + 1e-12 <= 1 + 2e-12
    for place, ratio in enumerate(ratios):  # what every larger ratio reached
        assert fit.agreement_at(ratio) == pytest.approx(min(raw[place:]))


def test_between_two_measured_ratios_the_prediction_lies_on_a_straight_line():
    assert BEST.agreement_at(0.3) == pytest.approx(0.97)
    assert BEST.agreement_at(0.025) == pytest.approx(0.7)
    assert BEST.agreement_at(0.1) == pytest.approx(0.96)
    dented = replace(BEST, curve=curve((0, 0.5), (0.1, 0.98), (0.5, 0.9), (1, 1.0)))
    assert [dented.agreement_at(ratio) for ratio in (0.1, 0.3, 0.5)] == pytest.approx([0.9, 0.9, 0.9])


def test_a_calibration_with_an_unknown_rule_is_skipped(tmp_path, caplog):
    facts, path = CALIBRATION.as_dict(), save(tmp_path)
    facts["calibration"]["fits"][0]["rule"] = "mine"
    path.write_bytes(encode_signed_json(facts, CALIBRATIONS_DIR))
    calibrations = CalibrationCache(tmp_path, "f00d", 5)
    for _ in range(3):
        assert load_calibration(tmp_path, "f00d", (1, 2, 3)) is None
        assert calibrations.resolve_tuning((1, 2, 3), "auto", None)[:2] == (AUTO, DEFAULT_RATIO)
        assert calibrations.resolve_tuning((1, 2, 3), NO_PROBE_RULE, None).fit is None
    for line in caplog.messages:
        assert path.name in line
        assert "rule 'mine' at layer 1, which this ragblend does not have; make it again: ragblend calibrate" in line
    (problem,) = DiskStore(tmp_path).verify_metadata(calibration_problem)
    assert problem.key.endswith(path.name)
    assert "which this ragblend does not have" in problem.reason
    save(tmp_path)  # made again, it has the same name
    assert load_calibration(tmp_path, "f00d", (1, 2, 3)) == CALIBRATION


# -- choosing


def tuned(calibration: Calibration | None, num_layers: int, rule: str = "auto", ratio: Any = None) -> RequestTuning:
    """Return the rule and ratio of a request, whose prefix has this calibration."""
    calibrations = CalibrationCache(None, "f00d", num_layers)
    calibrations.find = lambda prefix_ids: calibration
    return calibrations.resolve_tuning((), rule, ratio)


def test_requested_options_count_and_the_others_are_calibrated():
    assert tuned(CALIBRATION, 5)[:3] == (AUTO, 0.1, BEST)
    assert tuned(CALIBRATION, 5, ratio="auto")[:3] == (AUTO, 0.1, BEST)
    assert tuned(CALIBRATION, 5, ratio=0.3)[:3] == (AUTO, 0.3, BEST)
    assert tuned(CALIBRATION, 5, NO_PROBE_RULE)[:3] == (NO_PROBE_RULE, 0.5, OTHER)
    assert tuned(CALIBRATION, 5, "random")[:3] == ("random", DEFAULT_RATIO, None)
    assert tuned(None, 5)[:3] == (AUTO, DEFAULT_RATIO, None)
    assert tuned(None, 30, ratio="auto")[:2] == ("ask", RULES["ask"].ratio)
    assert [tuned(CALIBRATION, 5, ratio=ratio).adapts_ratio for ratio in (None, "auto", 0.1)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("ratio", [1.5, -0.1, "much", float("nan")])
def test_a_ratio_that_cannot_be_is_refused(ratio):
    with pytest.raises(UsageError, match=str(ratio)):
        tuned(CALIBRATION, 5, ratio=ratio)


def test_calibrations_are_found_when_they_appear_and_missed_once(tmp_path, caplog):
    calibrations = CalibrationCache(tmp_path, "f00d", 5)
    assert calibrations.resolve_tuning((1, 2, 3), "auto", None).fit is None
    assert not caplog.records, "it was not asked for"
    for _ in range(3):
        assert calibrations.resolve_tuning((1, 2, 3), "auto", "auto").recompute_ratio == DEFAULT_RATIO
        assert calibrations.resolve_tuning((1, 2, 3), "auto", None).recompute_ratio == DEFAULT_RATIO
    assert caplog.text.count("ragblend calibrate") == 1
    save(tmp_path)
    assert calibrations.resolve_tuning((1, 2, 3), "auto", "auto").recompute_ratio == 0.1
    save(tmp_path, replace(CALIBRATION, fits=(replace(BEST, ratio=0.5), OTHER)))
    assert calibrations.resolve_tuning((1, 2, 3), "auto", "auto").recompute_ratio == 0.5
    (tmp_path / CALIBRATIONS_DIR / CALIBRATION.filename).unlink()
    assert calibrations.find((1, 2, 3)) is None


# -- the engine


@pytest.fixture
def engine(tiny_engine, tmp_path):
    """A tiny model whose store on the disk holds CHUNKS."""
    made = tiny_engine("llama", store=DiskStore(tmp_path, fsync=False))
    list(made.precompute_all(CHUNKS))
    return made


def calibrated(engine: TransformersEngine, *fits: RuleFit) -> None:
    prefix_ids = engine.match(PROMPT).prefix_ids
    save(
        engine.store.find_tier(DiskStore).root,
        replace(CALIBRATION, fingerprint=engine.fingerprint, prefix_ids=prefix_ids, fits=fits),
    )


def test_the_engine_answers_by_the_calibration_and_reports_the_predicted_agreement(engine):
    before = engine.generate(PROMPT, max_tokens=1).report
    assert (before.recompute_ratio, before.predicted_agreement) == (DEFAULT_RATIO, None)
    calibrated(engine, replace(OTHER, ratio=0.5, check_layer=1))
    for ratio in (None, "auto"):
        report = engine.generate(PROMPT, max_tokens=1, recompute_ratio=ratio).report
        assert (report.rule, report.recompute_ratio, report.predicted_agreement) == (NO_PROBE_RULE, 0.5, 0.92)
    asked = engine.generate(PROMPT, max_tokens=1, recompute_ratio=0.75).report
    assert (asked.rule, asked.recompute_ratio) == (NO_PROBE_RULE, 0.75)
    assert asked.predicted_agreement == pytest.approx(0.96)
    assert engine.generate(PROMPT, max_tokens=1, mode="reuse").report.predicted_agreement == 0.5
    for options in ({"mode": "full"}, {"mode": "prefix"}, {"rule": "random"}):
        report = engine.generate(PROMPT, max_tokens=1, **options).report
        assert report.predicted_agreement is None  # exact, or nothing that was measured
        assert report.recompute_ratio != 0.5


def test_a_fitted_check_layer_is_the_one_that_is_read(engine):
    calibrated(engine, replace(OTHER, ratio=0.2, check_layer=3))
    report = engine.generate(PROMPT, max_tokens=1).report
    total, kept = sum(chunk.num_tokens for chunk in report.chunks), report.num_recomputed_tokens
    candidates = total - report.chunks[0].num_tokens
    projected = (total + candidates) * engine.layers.kv_share  # at layer 0, which is not read, and at the check
    spent = 3 * candidates + 3 * kept + projected
    assert (report.rule, report.charged_budget) == (NO_PROBE_RULE, pytest.approx(spent / (6 * total)))


def test_another_prefix_is_not_what_was_calibrated(engine):
    calibrated(engine, OTHER)
    report = engine.generate(Prompt(CHUNKS, "what?", "a system text"), max_tokens=1).report
    assert (report.recompute_ratio, report.predicted_agreement) == (DEFAULT_RATIO, None)
