"""The loading controller: the paper's two examples, and what must hold for any machine, device and prompt."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.engine.tuning.loading_controller import (
    LEAST_READS,
    NEGLIGIBLE_S,
    SLIGHT,
    LoadableChunk,
    MachineProfile,
    ReuseDecision,
    RuleChoice,
    TierSpeed,
    decide_reuse,
    interpolate,
    largest_hidden_ratio,
    largest_x_within,
    longest_blend_s,
    machine_profile_from,
    make_monotone,
    pipelined_s,
    tier_speeds,
)
from ragblend.errors import UsageError
from ragblend.lab.plan import GB, STORAGES, PromptSpec, Storage, always, parse_storage, plan

R_STAR = 0.15
SLACK = 1 + 1e-9


def machine(**changes: Any) -> MachineProfile:
    """10 layers, 1000 bytes and 1 ms of prefill per token."""
    facts: dict[str, Any] = {
        "fingerprint": "model", "hardware": {"cpu": "any"}, "num_layers": 10, "bytes_per_token": 1000,
        "prefill_s": ((1000.0, 1.0), (2000.0, 2.0)), "bytes_per_s": {"disk": 10e6},
    }  # fmt: skip
    return MachineProfile(**{**facts, **changes})


def decide(
    profile: MachineProfile, r_star: float, num_tokens: int, num_stored: int, nbytes: int, tier: str = "disk"
) -> ReuseDecision:
    """Decide on a prompt with one stored chunk of `num_stored` tokens, by a rule without a probe."""
    chunks = [LoadableChunk(tier, num_stored, nbytes)] if num_stored else []
    return decide_reuse(profile, [RuleChoice("any", r_star)], num_tokens, 0, chunks, tier_speeds(profile, {}))


# --- the paper's examples (CacheBlend, section 5): per layer, 15 % of the tokens recomputed ---


@pytest.mark.parametrize(
    ("recompute_s", "load_s", "num_layers", "chosen"), [(0.003, 0.016, 32, "fast"), (0.007, 0.004, 80, "slow")]
)
def test_the_papers_models_get_the_cheapest_device_that_adds_no_delay(recompute_s, load_s, num_layers, chosen):
    """The device of the example is one, one eight times as fast and as dear the other: only the 7B model needs it."""
    tokens, nbytes = 4096, 100_000
    own_speed = tokens * nbytes / (load_s * num_layers)
    profile = machine(
        num_layers=num_layers, bytes_per_token=nbytes, prefill_s=((tokens, recompute_s / R_STAR * num_layers),)
    )
    devices = [Storage("slow", own_speed, 0.05), Storage("fast", 8 * own_speed, 0.4)]
    made = plan(
        always(profile), devices, PromptSpec(num_chunks=1, chunk_tokens=tokens, question_tokens=0, ratio=R_STAR)
    )
    assert made["chosen"] == chosen
    slow = next(option for option in made["options"] if option["storage"] == "slow")
    assert slow["load_s"] == pytest.approx(load_s * num_layers)
    assert slow["recompute_s"] == pytest.approx(recompute_s * num_layers)
    assert slow["gb_per_1000_chunks"] == pytest.approx(1000 * tokens * nbytes / GB)
    assert slow["usd_per_1000_chunks_month"] == pytest.approx(slow["gb_per_1000_chunks"] * 0.05)


# --- laws ---

seconds = st.floats(1e-4, 1e3)
ratios = st.floats(0, 1)
speeds = st.floats(1e3, 1e12)


@st.composite
def machines(draw: st.DrawFn) -> MachineProfile:
    tokens = draw(st.lists(st.integers(1, 50_000), min_size=1, max_size=6, unique=True))
    shares = draw(st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 1.5)), max_size=4))
    first, last = draw(st.floats(0, 0.5)), draw(st.floats(0.5, 1.5))
    return machine(
        num_layers=draw(st.integers(1, 100)),
        bytes_per_token=draw(st.integers(1, 10**7)),
        prefill_s=tuple((float(count), draw(seconds)) for count in tokens),
        shares=((0.0, first), *shares, (1.0, last)),
        bytes_per_s={"disk": draw(speeds)},
        overhead_s=draw(st.just(0.0) | st.floats(1e-4, 10.0)),
    )


@st.composite
def devices(draw: st.DrawFn) -> list[Storage]:
    count = draw(st.integers(1, 6))
    return [Storage(f"d{index}", draw(speeds), draw(st.floats(0, 10))) for index in range(count)]


@st.composite
def needs(draw: st.DrawFn) -> PromptSpec:
    return PromptSpec(draw(st.integers(1, 20)), draw(st.integers(1, 4096)), draw(st.integers(0, 200)), draw(ratios))


@given(machines(), st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)), st.tuples(ratios, ratios))
def test_more_tokens_or_a_higher_ratio_never_take_less_time(profile, tokens, pair):
    fewer, more = sorted(tokens)
    low, high = sorted(pair)
    assert profile.full_prefill_s(fewer) <= profile.full_prefill_s(more) * SLACK
    assert profile.prompt_compute_s(low, more) <= profile.prompt_compute_s(high, more) * SLACK
    assert profile.prompt_compute_s(low, fewer) <= profile.prompt_compute_s(low, more) * SLACK
    assert profile.load_s(2e9, more) <= profile.load_s(1e9, more)


@given(ratios, st.tuples(seconds, seconds), seconds, machines())
def test_the_ratio_is_never_below_r_star_and_rises_with_loading(r_star, loads, prefill_s, profile):
    fast, slow = sorted(loads)
    chosen = [largest_hidden_ratio(r_star, load_s, prefill_s, profile.shares) for load_s in (0.0, fast, slow)]
    assert r_star <= chosen[0] <= chosen[1] <= chosen[2] <= 1
    assert largest_hidden_ratio(r_star, slow, 2 * prefill_s, profile.shares) <= chosen[2]
    if chosen[2] > r_star:  # what is added hides behind loading
        assert interpolate(profile.shares, chosen[2]) * prefill_s <= slow * (1 + 1e-6)


@settings(max_examples=2000)
@given(machines(), ratios, st.integers(1, 10**5), st.floats(0, 1), st.integers(0, 10**10))
def test_a_request_gets_r_star_or_more_unless_full_prefill_is_faster(profile, r_star, num_tokens, share, nbytes):
    num_stored = int(share * num_tokens)
    found = decide(profile, r_star, num_tokens, num_stored, nbytes)
    assert r_star <= found.ratio <= 1
    at_r_star = pipelined_s(found.load_s, profile.prompt_compute_s(r_star, num_tokens, num_stored), profile.num_layers)
    assert bool(found.fallback_reason) == (num_stored > 0 and at_r_star >= longest_blend_s(found.full_s))
    if found.fallback_reason:
        assert found.ratio == 1.0
    elif found.ratio > r_star:
        raised_s = pipelined_s(found.load_s, found.compute_s, profile.num_layers)
        assert raised_s <= at_r_star * (1 + 1e-6) + 1e-9 * found.full_s, "what is added does not hide behind loading"


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[LoadableChunk], dict[str, TierSpeed]]:
    """Number of tokens, up to 5 chunks of equal length on several tiers, and the tiers' speeds."""
    count, tokens, nbytes = draw(st.integers(1, 5)), draw(st.integers(1, 2000)), draw(st.integers(1, 10**9))
    tiers = draw(st.lists(st.sampled_from(["memory", "disk", "remote"]), min_size=count, max_size=count))
    first_bytes = st.sampled_from([0.0, math.inf]) | st.floats(0, 1e9)
    tier_speed = st.builds(TierSpeed, speeds, st.floats(0, 1), first_bytes)
    fresh = draw(st.integers(1, 2000))
    chunks = [LoadableChunk(tier, tokens, nbytes) for tier in tiers]
    return count * tokens + fresh, chunks, {"disk": draw(tier_speed), "remote": draw(tier_speed)}


def predicted_s(
    profile: MachineProfile,
    rule: RuleChoice,
    num_tokens: int,
    chunks: Iterable[LoadableChunk],
    by: dict[str, TierSpeed],
) -> float:
    """The seconds of a prompt of which these chunks are loaded: first bytes, first ranges, then the pipeline."""
    known = [(chunk, by[chunk.tier]) for chunk in chunks if chunk.tier in by]
    first_s = max((speed.latency_s for _, speed in known), default=0.0)
    before_s = sum(min(chunk.nbytes, speed.range_bytes) / speed.bytes_per_s for chunk, speed in known)
    load_s = sum(max(0, chunk.nbytes - speed.range_bytes) / speed.bytes_per_s for chunk, speed in known)
    num_stored = sum(chunk.num_tokens for chunk in chunks)
    shares = profile.shares if rule.probes_before_selection else profile.no_probe_shares
    compute_s = profile.prompt_compute_s(rule.r_star, num_tokens, num_stored, shares)
    return first_s + before_s + profile.blend_s(load_s, compute_s, rule.probes_before_selection)


@settings(max_examples=2000)
@given(machines(), prompts(), st.tuples(ratios, ratios))
def test_no_decision_is_slower_than_full_prefill_or_than_all_chunks(profile, prompt, pair):
    """Where all chunks are too slow, no set of them is clearly faster than what was chosen. Another rule is taken only
    where it is faster and the preferred one waits for loading."""
    num_tokens, chunks, by = prompt
    rules = [RuleChoice("asks", pair[0], probes_before_selection=True), RuleChoice("checks", pair[1])]
    found = decide_reuse(profile, rules, num_tokens, 0, chunks, by)
    sets = [
        [chunks[at] for at in some]
        for count in range(1, len(chunks) + 1)
        for some in itertools.combinations(range(len(chunks)), count)
    ]
    full_s = profile.full_prefill_s(num_tokens)
    limit_s = longest_blend_s(full_s)
    all_s = {rule.name: predicted_s(profile, rule, num_tokens, chunks, by) for rule in rules}
    best_s = {rule.name: min(predicted_s(profile, rule, num_tokens, some, by) for some in sets) for rule in rules}
    assert found.total_s <= (full_s if found.fallback_reason else limit_s) * SLACK
    if found.fallback_reason:
        assert (found.ratio, found.used) == (1.0, ())
        assert all_s["asks"] >= limit_s / SLACK
        assert best_s["asks"] >= min(full_s, limit_s) / SLACK
        return
    if len(found.used) < len(chunks):
        assert all_s[found.rule] >= limit_s / SLACK
        # Chunks in memory are used even where blending one takes longer than computing it, if it takes some ms more.
        slack_s = NEGLIGIBLE_S if max(share for _, share in (*profile.shares, *profile.no_probe_shares)) > 1 else 0.0
        assert found.total_s <= best_s[found.rule] * (1 + 1e-6) + slack_s
    else:
        assert found.total_s <= all_s[found.rule] * (1 + 1e-6)
    if found.rule == "asks":
        assert found.total_s <= max(all_s["checks"], found.compute_s * (1 + SLIGHT)) * (1 + 1e-6)
        assert found.ratio == pytest.approx(max(pair[0], largest_hidden_ratio(pair[0], 0.0, 1.0, profile.shares)))


@given(machines(), devices(), needs())
def test_no_plan_adds_delay_where_a_device_exists_that_does_not(profile, offered, need):
    made = plan(always(profile), offered, need)
    by_name = {device.name: device for device in offered}
    good = [option for option in made["options"] if option["pays"] and not option["adds_delay"]]
    prices = [by_name[option["storage"]].usd_per_gb_month for option in made["options"]]
    assert (prices, len(prices)) == (sorted(prices), len(offered))
    assert (made["chosen"] is None) == (not good)
    if made["chosen"] is not None:
        chosen = next(option for option in made["options"] if option["storage"] == made["chosen"])
        assert chosen in good
        assert by_name[made["chosen"]].usd_per_gb_month == min(
            by_name[option["storage"]].usd_per_gb_month for option in good
        )
        assert chosen["load_s"] <= chosen["recompute_s"]


@given(machines(), needs(), st.tuples(speeds, speeds))
def test_a_faster_device_is_never_worse(profile, need, pair):
    low, high = sorted(pair)
    made = plan(always(profile), [Storage("low", low, 1), Storage("high", high, 1)], need)
    found = {option["storage"]: option for option in made["options"]}
    assert found["high"]["ttft_s"] <= found["low"]["ttft_s"] * SLACK
    assert found["high"]["adds_delay"] <= found["low"]["adds_delay"]
    assert found["high"]["hidden_ratio"] <= found["low"]["hidden_ratio"]


@given(st.just(0.0) | st.floats(1e-9, 100), st.just(0.0) | st.floats(1e-9, 100), st.integers(1, 100))
def test_a_pipeline_takes_what_a_step_by_step_simulation_takes(load_s, compute_s, layers):
    """The reader brings layers 1, 2, ..., and 0 last; the question is asked at layer 1 first; leaving waits for all."""
    order = [*range(1, layers), 0]
    loaded = dict(zip(order, itertools.accumulate([load_s / layers] * layers), strict=True))
    clock = loaded[1] if layers > 1 else 0.0
    for layer in range(layers):
        clock = (max(clock, loaded[layer]) if layer else clock) + compute_s / layers
    clock = max(clock, loaded[0])
    assert pipelined_s(load_s, compute_s, layers) == pytest.approx(clock)
    assert max(load_s, compute_s) <= clock * SLACK
    assert clock <= (load_s + compute_s) * SLACK


@given(machines(), st.integers(1, 10**5), ratios, st.integers(0, 10**10))
def test_several_ranks_read_before_they_compute_so_nothing_hides(profile, num_tokens, r_star, nbytes):
    several = replace(profile, hardware={**profile.hardware, "ranks": 2})
    found = decide(several, r_star, num_tokens, num_tokens, nbytes)
    total_s = found.load_s + several.prompt_compute_s(r_star, num_tokens)
    assert bool(found.fallback_reason) == (total_s >= longest_blend_s(found.full_s))
    assert found.fallback_reason or found.ratio == max(r_star, largest_hidden_ratio(r_star, 0.0, 1.0, several.shares))
    need = PromptSpec(1, num_tokens, 0, r_star)
    (option,) = plan(always(several), [Storage("any", 1e9, 0.1)], need)["options"]
    assert option["adds_delay"]
    assert option["ttft_s"] == pytest.approx(option["load_s"] + option["recompute_s"])
    (alone,) = plan(always(profile), [Storage("any", 1e9, 0.1)], need)["options"]
    assert alone["ttft_s"] <= option["ttft_s"] * SLACK


# --- cases ---


def test_reuse_is_refused_where_loading_takes_longer_than_full_prefill():
    """1000 tokens: prefill 1 s; 1 MB from a disk of 0.5 MB/s takes 2 s."""
    found = decide(machine(bytes_per_s={"disk": 0.5e6}), R_STAR, 1000, 1000, 1_000_000)
    assert "full prefill of 1000 tokens takes 1 s, loading 2 s" in found.fallback_reason
    assert found.ratio == 1.0


def test_a_blend_must_save_a_tenth_less_a_few_milliseconds():
    """Blending takes 0.8 ms a token and 10 or 120 ms for any prompt, prefill 1 ms a token."""
    chunk = [LoadableChunk("memory", 1000, 1)]
    slopes = {"shares": ((0.0, 0.8), (1.0, 0.8))}
    for overhead_s, is_refused in ((0.01, False), (0.12, True)):
        profile = machine(overhead_s=overhead_s, **slopes)
        found = decide_reuse(profile, [RuleChoice("any", 0.15)], 1000, 0, chunk, {})
        assert found.compute_s == pytest.approx(1.0 if is_refused else 0.81)
        assert bool(found.fallback_reason) == is_refused
    quick = machine(prefill_s=((1000.0, 0.001),), overhead_s=0.004)
    assert not decide_reuse(quick, [RuleChoice("any", 0.15)], 1000, 0, chunk, {}).fallback_reason


def test_what_is_in_memory_or_was_never_measured_counts_as_there():
    for tier in ("memory", "tape"):
        found = decide(machine(), R_STAR, 1000, 1000, 10**12, tier)
        assert (found.ratio, found.fallback_reason, found.load_s) == (R_STAR, "", 0.0)


def test_measured_reads_replace_the_profile_once_there_are_some():
    reads = ReadSpeed(range_bytes=8e6)
    by_profile = TierSpeed(10e6, range_bytes=8e6)
    assert tier_speeds(machine(), {"disk": reads, "remote": reads}) == {"disk": by_profile}
    for count in range(1, LEAST_READS + 1):
        reads.record(5_000_000, 1.0)
        reads.record_latency(0.25)
        found = tier_speeds(machine(), {"disk": reads, "remote": reads})
        assert found["remote"] == TierSpeed(5e6, 0.25, 8e6)
        assert found["disk"] == (found["remote"] if count == LEAST_READS else by_profile)


def test_only_the_chunks_that_are_worth_it_are_loaded():
    """1 ms of prefill per token. 500 tokens on the disk load in 50 ms, 500 in the remote tier in 5 s."""
    chunks = [LoadableChunk("remote", 500, 500_000), LoadableChunk("disk", 500, 500_000)]
    by = {"disk": TierSpeed(10e6), "remote": TierSpeed(0.1e6)}
    found = decide_reuse(machine(), [RuleChoice("any", R_STAR)], 1000, 0, chunks, by)
    assert (found.used, found.fallback_reason) == ((1,), "")
    assert "computing 1 of 2 stored chunks is faster than loading them" in found.describe(2)
    quick = {**by, "remote": TierSpeed(10e6)}
    assert decide_reuse(machine(), [RuleChoice("any", R_STAR)], 1000, 0, chunks, quick).used == (0, 1)
    late = {**by, "remote": TierSpeed(10e6, latency_s=2.0)}
    assert decide_reuse(machine(), [RuleChoice("any", R_STAR)], 1000, 0, chunks, late).used == (1,)


def test_a_probe_that_waits_for_loading_gives_way_to_a_rule_without():
    """Loading takes as long as the recompute of `asks`, which waits for it; behind it `checks` recomputes 40 %."""
    rules = [RuleChoice("asks", 0.5, probes_before_selection=True), RuleChoice("checks", 0.15)]
    chunks = [LoadableChunk("disk", 1000, 1_000_000)]
    slow = decide_reuse(machine(), rules, 1000, 0, chunks, {"disk": TierSpeed(2e6)})
    assert (slow.rule, slow.ratio) == ("checks", pytest.approx(0.45))
    assert decide_reuse(machine(), rules, 1000, 0, chunks, {"disk": TierSpeed(200e6)}).rule == "asks"
    assert decide_reuse(machine(), rules[:1], 1000, 0, chunks, {"disk": TierSpeed(4e6)}).rule == "asks"


def test_reads_before_the_first_layer_do_not_overlap():
    """500 of 1,000 tokens load in 0.4 s; the other half and 15 % of them are computed in 0.575 s."""
    chunks = [LoadableChunk("remote", 500, 500_000)]
    totals = [
        decide_reuse(machine(), [RuleChoice("any", R_STAR)], 1000, 0, chunks, {"remote": TierSpeed(1.25e6, 0.0, first)})
        for first in (0.0, 250_000.0, 8e6)
    ]
    layers = machine().num_layers
    expected = [pipelined_s(0.4, 0.575, layers), 0.2 + pipelined_s(0.2, 0.575, layers)]
    assert [each.total_s for each in totals[:2]] == pytest.approx(expected)
    assert totals[2].fallback_reason  # 0.4 + 0.575 s of 1.0 s saves too little


def test_fresh_tokens_hide_loading_too_so_less_is_left_to_recompute():
    """Loading takes 0.5 s, a tenth of it for layer 1: behind the rest 45 % of the tokens can be recomputed, if all are
    stored. If half are fresh, they alone take 0.5 s."""
    profile = machine(bytes_per_s={"disk": 2e6})
    assert decide(profile, R_STAR, 1000, 1000, 1_000_000).ratio == pytest.approx(0.45)
    assert decide(profile, R_STAR, 1000, 500, 1_000_000).ratio == R_STAR


def test_measured_shares_take_the_place_of_the_ratio():
    """Blending at 0 takes a tenth of full prefill, so less hides than the plain ratio says."""
    profile = machine(shares=((0.0, 0.1), (1.0, 1.1)))
    assert profile.prompt_compute_s(0.15, 1000) == pytest.approx(0.25)
    assert largest_hidden_ratio(R_STAR, 0.5, 1.0, profile.shares) == pytest.approx(0.4)


def test_the_break_even_points():
    """A chunk of 500 tokens takes 0.5 s to prefill. A prompt of two takes 1 s, blended 0.1 + 0.9 x 0.15 + 0.015 s."""
    profile = machine(bytes_per_s={})
    need = PromptSpec(num_chunks=2, chunk_tokens=500, question_tokens=0, ratio=R_STAR)
    (option,) = plan(always(profile), [Storage("ssd", 10e6, 0.1)], need)["options"]
    assert option["ttft_s"] == pytest.approx(0.15 + 0.01)
    assert option["saved_s"] == pytest.approx(0.84)
    assert option["reuses_to_repay"] == 2  # 0.5 s / 0.42 s, rounded up
    (slow,) = plan(always(profile), [Storage("tape", 0.5e6, 0.001)], need)["options"]
    assert (slow["pays"], slow["reuses_to_repay"]) == (False, None)


def test_noise_that_makes_more_seem_faster_is_levelled_out():
    profile = machine(prefill_s=((100.0, 2.0), (200.0, 1.5), (300.0, 3.0)), shares=((0.5, 0.4), (0.0, 0.1), (1.0, 0.3)))
    assert profile.prefill_s == ((100.0, 2.0), (200.0, 2.0), (300.0, 3.0))
    assert profile.shares == ((0.0, 0.1), (0.5, 0.4), (1.0, 0.4))
    assert make_monotone([(1, 2.0), (1, 1.0)]) == ((1, 2.0),)


def test_a_profile_comes_back_from_json_as_it_was():
    profile = machine()
    assert machine_profile_from(json.loads(json.dumps(profile.as_dict()))) == profile
    for change in (
        {"profile_version": 0},
        {"prefill_s": []},
        {"num_layers": None},
        {"num_layers": float("inf")},
        {"bytes_per_s": 3},
        {"shares": [1]},
    ):
        with pytest.raises(UsageError, match="measure again"):
            machine_profile_from({**profile.as_dict(), **change})


def test_storages_as_they_are_typed():
    assert parse_storage("ssd:3.5:0.08", {}) == Storage("ssd", 3.5e9, 0.08)
    assert parse_storage("ssd:3.5:0.08:2", {}) == Storage("ssd", 3.5e9, 0.08, 0.002)
    assert parse_storage("disk::0.05", {"disk": 7e8}) == Storage("disk", 7e8, 0.05)
    assert parse_storage("nvme", {}) == STORAGES["nvme"]
    assert parse_storage("redis::3", {"redis": 2e9}) == replace(STORAGES["redis"], bytes_per_s=2e9, usd_per_gb_month=3)
    for text in ("ssd", "ssd:1", "a:x:1", "a:0:1", "a:1:-1", "a:nan:1", "a:1:1:-1", "a:1:1:x", "a:1:1:1:1", "tape::1"):
        with pytest.raises(UsageError, match=r"write NAME|set it|give"):
            parse_storage(text, {"disk": 7e8})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: largest_hidden_ratio(1.1, 1, 1),
        lambda: largest_hidden_ratio(0.1, -1, 1),
        lambda: largest_hidden_ratio(0.1, 1, 0),
        lambda: machine(prefill_s=()),
        lambda: machine(prefill_s=((10.0, 0.0),)),
        lambda: machine(num_layers=0),
        lambda: machine(bytes_per_s={"disk": 0.0}),
        lambda: plan(always(machine()), [], PromptSpec()),
        lambda: plan(always(machine()), [Storage("a", 1, 1), Storage("a", 2, 2)], PromptSpec()),
        lambda: PromptSpec(num_chunks=0),
        lambda: PromptSpec(ratio=2),
        lambda: PromptSpec(question_tokens=-1),
    ],
)
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError):
        wrong()


def test_interpolation_runs_through_its_points():
    curve = ((0.0, 1.0), (2.0, 3.0), (4.0, 3.0), (6.0, 9.0))
    assert [interpolate(curve, x) for x, _ in curve] == [y for _, y in curve]
    assert [largest_x_within(curve, y) for y in (0.5, 1.0, 3.0, 9.0, 99.0)] == [0.0, 0.0, 4.0, 6.0, 6.0]
    for low, high in itertools.pairwise([index / 10 for index in range(80)]):
        assert interpolate(curve, low) <= interpolate(curve, high)


def test_a_rule_with_a_probe_hides_little_loading():
    profile = machine()
    need = PromptSpec(ratio=0.15)
    asking = replace(need, probes_before_selection=True)
    recompute_s = profile.prompt_compute_s(need.ratio, need.num_tokens, need.num_chunk_tokens)
    for share, delays in ((0.05, False), (0.5, True)):
        device = Storage("some", need.num_chunk_tokens * profile.bytes_per_token / (share * recompute_s), 0.1)
        hidden, waited = (plan(always(profile), [device], each)["options"][0] for each in (need, asking))
        assert (hidden["adds_delay"], waited["adds_delay"]) == (False, delays)
        assert waited["ttft_s"] == pytest.approx((1 + share) * recompute_s)
        assert waited["hidden_ratio"] == need.ratio
        assert plan(always(profile), [device], asking)["chosen"] == (None if delays else "some")
