"""A profile at the speed of recent requests."""

from __future__ import annotations

import pytest

from ragblend.engine.tuning import paces as paces_module
from ragblend.engine.tuning.loading_controller import LEAST_READS, MachineProfile
from ragblend.engine.tuning.paces import KEPT_S, Paces

PROFILE = MachineProfile("f", {}, 4, 1, ((100.0, 1.0), (200.0, 2.0)), shares=((0.0, 0.2), (1.0, 1.0)), overhead_s=0.1)


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, in seconds."""
    now = [0.0]
    monkeypatch.setattr(paces_module, "monotonic", lambda: now[0])
    return now


def test_blends_and_full_prefills_are_corrected_apart(clock):
    paces = Paces()
    for number in range(LEAST_READS):
        assert paces.current(PROFILE) == PROFILE, number
        paces.record_full(PROFILE, 200, 4.0)
        paces.record_blend(PROFILE.prompt_compute_s(0.0, 200), 1.5)
    found = paces.current(PROFILE)
    assert found.full_prefill_s(200) == pytest.approx(4.0)
    assert found.prompt_compute_s(0.0, 200) == pytest.approx(1.5)


def test_blends_are_compared_with_the_corrected_profile(clock):
    paces = Paces()
    for _ in range(4 * LEAST_READS):
        paces.record_blend(paces.current(PROFILE).prompt_compute_s(0.0, 100), 0.9)
    assert paces.current(PROFILE).prompt_compute_s(0.0, 100) == pytest.approx(0.9)


def test_what_is_old_or_shorter_than_any_measured_prompt_does_not_count(clock):
    paces = Paces()
    for _ in range(LEAST_READS):
        paces.record_full(PROFILE, 99, 50.0)
        paces.record_blend(0.1, 50.0)
    assert paces.current(PROFILE).prefill_s == PROFILE.prefill_s
    assert paces.current(PROFILE).overhead_s > PROFILE.overhead_s
    clock[0] = KEPT_S + 1
    assert paces.current(PROFILE) == PROFILE
