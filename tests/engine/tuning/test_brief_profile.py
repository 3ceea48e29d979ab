"""The brief measurement on machines whose times follow formulas, on a clock that only their work moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.engine.fusion.rules import NO_PROBE_RULE, find_rule
from ragblend.engine.store.format.kv import KVSpec
from ragblend.engine.tuning import brief_profile
from ragblend.engine.tuning.brief_profile import MEASURE_S, measure_briefly, profiles_itself
from ragblend.engine.tuning.loading_controller import (
    LINEAR,
    LoadableChunk,
    MachineProfile,
    RuleChoice,
    decide_reuse,
    longest_blend_s,
)

SPEC = KVSpec("float32", ((2, 16, 16),) * 32)
RULE = find_rule("auto", 32)


@dataclass
class FormulaModel:
    """A model whose full prefill of n tokens takes at least `least_s`, and `token_s` for each token. A blend takes
    `overhead_s` and its share of that."""

    least_s: float
    token_s: float
    overhead_s: float
    share: float
    longest_tokens: int = 1 << 20
    now_s: float = 0.0
    calls: list[str] = field(default_factory=list)

    def num_tokens(self, num_chunks: int) -> int:
        return 128 * num_chunks + 32

    def full_s(self, num_tokens: int) -> float:
        return max(self.least_s, self.token_s * num_tokens)

    def blended_s(self, num_tokens: int, ratio: float = RULE.ratio) -> float:
        return self.overhead_s + (self.share + (1 - self.share) * ratio) * self.full_s(num_tokens)

    def full_prefill_s(self, num_chunks: int) -> float:
        return self._take("full", self.full_s(self.num_tokens(num_chunks)))

    def store_chunks(self, num_chunks: int) -> None:
        self._take("store", self.full_s(self.num_tokens(num_chunks)))

    def blend_s(self, num_chunks: int, rule: str, ratio: float) -> float:
        assert rule in (RULE.name, NO_PROBE_RULE)
        return self._take("blend", self.blended_s(self.num_tokens(num_chunks), ratio))

    def agrees(self, is_true: bool) -> bool:
        return is_true

    def _take(self, what: str, seconds: float) -> float:
        self.calls.append(what)
        self.now_s += seconds
        return seconds


def measure(model: FormulaModel) -> MachineProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(brief_profile, "perf_counter", lambda: model.now_s)
        found = measure_briefly(model, fingerprint="f", hardware={}, spec=SPEC, kv_dtype="auto")
    assert found is not None
    return found


models = st.builds(
    FormulaModel,
    least_s=st.floats(1e-4, 0.05),
    token_s=st.floats(1e-6, 5e-3),
    overhead_s=st.floats(1e-4, 1.0),
    share=st.floats(0.0, 0.5),
)


@settings(max_examples=500)
@given(models)
def test_measuring_never_takes_more_than_three_seconds(model):
    measure(model)
    assert model.now_s <= MEASURE_S


@settings(max_examples=500)
@given(models, st.integers(200, 4000))
def test_no_decision_is_slower_than_full_prefill_by_more_than_agreed(model, num_tokens):
    """Blends of the share `ratio` from memory. Between the lengths that are measured, the formulas are straight lines
    but for one corner, whose error is below that of the clock of a real machine."""
    profile = measure(model)
    if profile.shares == LINEAR:  # too slow to be blended in the time
        return
    chunk = LoadableChunk("memory", num_tokens, 1)
    rule = RuleChoice(RULE.name, RULE.ratio, probes_before_selection=True)
    found = decide_reuse(profile, [rule], num_tokens, 0, [chunk], {})
    full_s, blended_s = model.full_s(num_tokens), model.blended_s(num_tokens)
    if not found.fallback_reason:
        assert blended_s <= longest_blend_s(full_s) + 0.1 * full_s
    elif len(profile.prefill_s) > 2 and model.full_s(160) > model.least_s:  # blends of two lengths, beyond the corner
        assert blended_s >= longest_blend_s(full_s) * 0.9


def test_a_model_too_slow_to_blend_gets_the_papers_assumption():
    """Prefill takes 10 ms a token: of the prompts with chunks, none can be blended in 3 seconds."""
    model = FormulaModel(0.0, 0.01, 0.1, 0.1)
    found = measure(model)
    assert "blend" not in model.calls
    assert (found.shares, found.overhead_s) == (LINEAR, pytest.approx(0.32))
    assert found.prefill_s == ((32, pytest.approx(0.32)),)


def test_blends_of_one_length_get_the_papers_assumption():
    """Prefill takes 1 ms a token: only one prompt with chunks, of 160 tokens, can be blended in 3 seconds."""
    model = FormulaModel(0.0, 0.001, 0.05, 0.1)
    found = measure(model)
    assert [tokens for tokens, _ in found.prefill_s] == [32, 160]
    assert (found.shares, found.no_probe_shares) == (LINEAR, LINEAR)
    assert found.overhead_s == pytest.approx(model.blended_s(160))


def test_a_context_without_room_for_a_question_is_not_measured():
    model = FormulaModel(0.001, 1e-5, 0.001, 0.1, longest_tokens=16)
    assert measure_briefly(model, fingerprint="f", hardware={}, spec=SPEC, kv_dtype="auto") is None
    assert model.calls == []


def test_the_disk_is_read_and_nothing_stays_on_it(tmp_path):
    model = FormulaModel(0.001, 1e-6, 0.001, 0.1)
    found = measure_briefly(model, fingerprint="f", hardware={}, spec=SPEC, kv_dtype="int8", disk_dir=tmp_path)
    assert math.isfinite(found.bytes_per_s["disk"])
    assert found.bytes_per_token == SPEC.bytes_per_token("int8")
    assert list(tmp_path.iterdir()) == []


def test_the_option_decides_over_the_environment(monkeypatch):
    monkeypatch.setenv("RAGBLEND_AUTO_PROFILE", "0")
    assert [profiles_itself(each) for each in (None, True, False)] == [False, True, False]
    monkeypatch.delenv("RAGBLEND_AUTO_PROFILE")
    assert profiles_itself(None)
