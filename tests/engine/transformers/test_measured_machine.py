"""Engines that measure their machine: when, how often, and what is kept. No test depends on the measured times."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers import measure
from ragblend.engine.transformers.measure import measure_engine
from ragblend.engine.tuning.brief_profile import CHUNK_TOKENS, profiles_itself
from ragblend.engine.tuning.machine import machine_facts, read_machine_profile

CHUNKS = ["George Keller lives in Kinport. " * 8, "Julia Bishop works for Synon. " * 8]
PROMPT = Prompt(CHUNKS, "Where does George Keller live?")


def kept_profile(store: Path, engine):
    return read_machine_profile(store, engine.fingerprint, machine_facts())


@pytest.fixture
def measured(tmp_path):
    """An engine that measures, over a folder with PROMPT's chunks."""
    with load_engine("demo", tmp_path, on_miss="inline", auto_profile=True) as engine:
        for chunk in CHUNKS:
            engine.precompute(chunk)
        yield engine


def test_only_a_request_that_its_profile_may_decide_measures(measured, tmp_path):
    measured.generate(PROMPT, recompute_ratio=0.15, max_tokens=1)
    for mode in ("full", "prefix", "reuse"):
        measured.generate(PROMPT, mode=mode, max_tokens=1)
    measured.generate(Prompt([], "Where does George Keller live?"), max_tokens=1)
    assert measured.machine is None
    assert kept_profile(tmp_path, measured) is None
    entries = set(measured.store.keys())
    report = measured.generate(PROMPT, max_tokens=1).report
    assert report.decision or report.refused_reason
    found = kept_profile(tmp_path, measured)
    assert found == measured.machine
    assert found.bytes_per_s["disk"] > 0
    assert set(measured.store.keys()) == entries, "the chunks that were timed are not stored"


def test_a_kept_profile_is_used_and_nothing_is_measured_again(measured, tmp_path, monkeypatch):
    measured.generate(PROMPT, max_tokens=1)
    monkeypatch.setattr(measure, "measure_briefly", None)  # a call would fail
    with load_engine("demo", tmp_path, on_miss="inline", auto_profile=True) as later:
        assert later.machine == measured.machine
        assert later.measure_machine is None


def test_requests_that_come_meanwhile_wait_for_one_measurement(measured, monkeypatch):
    calls, begun, go_on = [], threading.Event(), threading.Event()
    measure_machine = measured.measure_machine

    def slowly(engine):
        calls.append(1)
        begun.set()
        go_on.wait(60)
        return measure_machine(engine)

    measured.measure_machine = slowly
    reports = []
    threads = [
        threading.Thread(target=lambda: reports.append(measured.generate(PROMPT, max_tokens=1).report))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    begun.wait(60)
    assert reports == []
    go_on.set()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert all(report.decision or report.refused_reason for report in reports)


def test_a_measurement_that_fails_does_not_fail_the_request(measured, monkeypatch, caplog):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(measure, "measure_briefly", fail)
    report = measured.generate(PROMPT, max_tokens=1).report
    assert (report.mode, report.num_chunk_hits, report.decision) == ("blend", 2, "")
    assert "was not measured" in caplog.text
    assert measured.measure_machine is None


def test_a_slow_machine_prefills_in_full_and_then_blends_from_memory(measured):
    """The profile has a disk that takes 1000 s for a token, and 1 s of prefill for a token."""
    full = measured.prefill(measured.request(PROMPT, mode="full"))
    nbytes = measured.bytes_per_token
    profile = measure_engine(measured)
    measured.machine = replace(profile, prefill_s=((1.0, 1.0), (2.0, 2.0)), bytes_per_s={"disk": nbytes / 1000})
    measured.measure_machine = None
    for key in measured.store.keys():  # noqa: SIM118
        measured.store.tiers[0].delete(key)
    found = measured.prefill(measured.request(PROMPT))
    assert torch.equal(found.logits, full.logits)
    assert "full prefill of" in found.report.refused_reason


def test_off_means_that_nothing_is_measured(tmp_path):
    with load_engine("demo", tmp_path, auto_profile=False) as engine:
        assert engine.measure_machine is None
        engine.precompute(CHUNKS[0])
        engine.generate(PROMPT, max_tokens=1)
    assert DiskStore(tmp_path).folder == tmp_path
    assert not (tmp_path / "machines").exists()


def test_a_store_in_memory_keeps_the_profile_in_its_engine():
    with load_engine("demo", on_miss="inline", auto_profile=True) as engine:
        engine.precompute(CHUNKS[0])
        engine.generate(PROMPT, max_tokens=1)
        assert engine.machine is not None
        assert engine.machine.bytes_per_s == {}


def test_the_demo_is_measured_only_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("RAGBLEND_AUTO_PROFILE")
    assert profiles_itself(None)
    assert profiles_itself(True, is_demo=True)
    with load_engine("demo", tmp_path) as engine:
        assert engine.measure_machine is None


def test_a_blend_that_is_timed_recomputes_the_chunk(measured, monkeypatch):
    """The KV of a chunk directly after the prefix is exact, so that recomputing it would seem to take no time."""
    prefill, counts = type(measured).prefill, list[int]()

    def recording(engine, request):
        done = prefill(engine, request)
        counts.append(done.report.num_recomputed_tokens)
        return done

    monkeypatch.setattr(type(measured), "prefill", recording)
    with measure._subject(measured) as subject:
        timed = measure._TimedEngine(subject)
        timed.store_chunks(1)
        timed.blend_s(1, "cacheblend", 1.0)
    assert counts == [CHUNK_TOKENS]
