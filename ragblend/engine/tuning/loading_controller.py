"""Loading controller: which stored chunks of a prompt are loaded, by which rule and at which ratio they are blended.

After CacheBlend, section 5.1: T_recompute(r) comes from measured prefill times, T_load from bytes and a tier's measured
speed. Read `decide_reuse` first. Pure arithmetic on seconds, bytes and tokens; does not depend on models, stores
or frameworks. `brief_profile` and `ragblend profile` measure a MachineProfile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

from ragblend.engine.store.read_speed import ReadSpeed
from ragblend.errors import UsageError

PROFILE_VERSION = 3
"""Version of a stored MachineProfile; a profile of another version must be measured again."""

Curve = tuple[tuple[float, float], ...]
"""Measured points (x, y), both ascending; straight lines between them."""

LINEAR: Curve = ((0.0, 0.0), (1.0, 1.0))
"""The paper's assumption: recomputing a share of the tokens takes that share of the full prefill's time."""

SLIGHT = 0.1
"""Share of T_recompute from which loading counts as a delay if recompute does not hide it (docs/performance.md), and
share of full prefill that a blend must save, because a prediction of less is within its error."""

LEAST_READS = 3
"""Measured reads of a tier from which their median replaces the profile's speed."""

NEGLIGIBLE_S = 0.005
"""Seconds that no user notices. For them, no request takes full prefill instead of a blend."""


# -- measurements


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Measured prefill times of one model on one machine, and read speeds of its tiers.

    `prefill_s`: (tokens, seconds of full prefill). `overhead_s`: the seconds that a blend takes for a prompt of any
    length. `shares`: (ratio, share), where share is the other time to blend from memory at that ratio, divided by the
    time of full prefill. `no_probe_shares`: the same for a rule without a query probe; the default is `shares`.
    `bytes_per_s`: read speed of each tier, checksums included. Curves are made monotone, because noise can make a
    longer prompt or a higher ratio seem faster.
    """

    fingerprint: str  # of the model, dtype included
    hardware: Mapping[str, Any]
    num_layers: int
    bytes_per_token: int  # of stored KV, all layers
    prefill_s: Curve
    shares: Curve = LINEAR
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    no_probe_shares: Curve = ()
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "no_probe_shares", self.no_probe_shares or self.shares)
        points = (*self.prefill_s, *self.shares, *self.no_probe_shares)
        numbers = [self.overhead_s, *(number for point in points for number in point)]
        if not all(map(math.isfinite, numbers)) or not self.prefill_s or min(map(min, self.prefill_s)) <= 0:
            raise UsageError(f"prefill times {self.prefill_s} must be above 0; measure again: ragblend profile")
        if self.num_layers < 1 or self.bytes_per_token < 1:
            raise UsageError(
                f"a machine profile has {self.num_layers} layers and {self.bytes_per_token} bytes per token; both must "
                "be above 0. Measure again: ragblend profile"
            )
        for name, speed in self.bytes_per_s.items():
            check_speed(name, speed)
        object.__setattr__(self, "prefill_s", make_monotone(self.prefill_s))
        object.__setattr__(self, "shares", make_monotone(self.shares))
        object.__setattr__(self, "no_probe_shares", make_monotone(self.no_probe_shares))

    def full_prefill_s(self, num_tokens: float) -> float:
        """Return the seconds of full prefill, extrapolated beyond the longest measured prompt."""
        return interpolate(((0.0, 0.0), *self.prefill_s), num_tokens)

    def prompt_compute_s(
        self, ratio: float, num_tokens: float, num_stored: float | None = None, shares: Curve | None = None
    ) -> float:
        """Return the seconds to compute a prompt of `num_tokens` tokens, without loading.

        `num_stored` of the tokens have stored KV (None: all). The share `ratio` of these is recomputed. Tokens without
        stored KV are all computed. `shares`: the rule's curve; None is `shares` of the profile.
        """
        stored = 1.0 if num_stored is None else min(1.0, num_stored / max(1.0, num_tokens))
        share = interpolate(self.shares if shares is None else shares, ratio)
        overhead_s = self.overhead_s if stored else 0.0
        return overhead_s + self.full_prefill_s(num_tokens) * (share * stored + 1.0 - stored)

    def load_s(self, bytes_per_s: float, num_tokens: float) -> float:
        """Return T_load: the seconds to read the KV of `num_tokens` tokens at `bytes_per_s`."""
        return num_tokens * self.bytes_per_token / bytes_per_s

    @property
    def overlaps(self) -> bool:
        """Return True if layers are loaded while others are computed.

        It is False for vLLM on several ranks, whose workers read all layers first.
        """
        return int(self.hardware.get("ranks") or 1) == 1

    def blend_s(self, load_s: float, compute_s: float, probes_before_selection: bool = False) -> float:
        """Return the total seconds of a prompt that takes `load_s` to load and `compute_s` to compute.

        Loading and computing overlap if `overlaps` is True and `probes_before_selection` is False. A rule that probes
        before the selection waits for most layers before it recomputes.
        """
        hides = self.overlaps and not probes_before_selection
        return pipelined_s(load_s, compute_s, self.num_layers) if hides else load_s + compute_s

    def hidden_compute_s(self, load_s: float, probes_before_selection: bool = False) -> float:
        """Return the most seconds of computing that fit into `load_s` seconds of loading without extra time."""
        return (
            load_s - exposed_load_s(load_s, self.num_layers) if self.overlaps and not probes_before_selection else 0.0
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values, its version first."""
        return {"profile_version": PROFILE_VERSION, **asdict(self)}


def machine_profile_from(facts: Mapping[str, Any]) -> MachineProfile:
    """Return the profile in `facts`, a result of `as_dict`. Raises UsageError for another version or invalid values."""
    if facts.get("profile_version") != PROFILE_VERSION:
        raise UsageError(
            f"the machine profile has version {facts.get('profile_version')!r}, this ragblend reads {PROFILE_VERSION}; "
            "measure again: ragblend profile"
        )
    try:
        return MachineProfile(
            fingerprint=str(facts["fingerprint"]),
            hardware=dict(facts["hardware"]),
            num_layers=int(facts["num_layers"]),
            bytes_per_token=int(facts["bytes_per_token"]),
            prefill_s=tuple((float(x), float(y)) for x, y in facts["prefill_s"]),
            shares=tuple((float(x), float(y)) for x, y in facts["shares"]),
            bytes_per_s={str(name): float(speed) for name, speed in facts["bytes_per_s"].items()},
            no_probe_shares=tuple((float(x), float(y)) for x, y in facts["no_probe_shares"]),
            overhead_s=float(facts["overhead_s"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(f"the machine profile is invalid ({error!r}); measure again: ragblend profile") from error


def make_monotone(points: Iterable[tuple[float, float]]) -> Curve:
    """Return the points in order of x, with the highest y of each x.

    A y below an earlier one is raised to the highest earlier y.

    >>> make_monotone([(2, 5.0), (1, 3.0), (3, 4.0)])
    ((1, 3.0), (2, 5.0), (3, 5.0))
    """
    highest = dict(sorted(points))  # the last of an x is its highest
    return tuple(zip(highest, accumulate(highest.values(), max), strict=True))


def interpolate(curve: Curve, x: float) -> float:
    """Return the curve's y at `x`: constant before the first point, extrapolated linearly after the last.

    >>> [interpolate(((0.0, 0.0), (10.0, 1.0), (20.0, 3.0)), x) for x in (5, 15, 30)]
    [0.5, 2.0, 5.0]
    """
    if x <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(curve) if x <= pair[1][0]), curve[-2:])
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def largest_x_within(curve: Curve, y: float) -> float:
    """Return the largest x at which the curve is not above `y`; its first x if the curve is always above.

    >>> largest_x_within(LINEAR, 0.4), largest_x_within(LINEAR, 7)
    (0.4, 1.0)
    >>> largest_x_within(((0.0, 0.1), (0.5, 0.6), (1.0, 1.1)), 0.05)
    0.0
    """
    if y >= curve[-1][1]:
        return curve[-1][0]
    for (x0, y0), (x1, y1) in reversed(list(pairwise(curve))):
        if y0 <= y:
            return x0 + (x1 - x0) * ((y - y0) / (y1 - y0))
    return curve[0][0]


# -- one request


def largest_hidden_ratio(r_star: float, load_s: float, prefill_s: float, shares: Curve = LINEAR) -> float:
    """Return the largest ratio whose recompute takes no longer than loading, but at least `r_star`.

    `r_star`: the least ratio that is close enough to full prefill. `load_s` and `prefill_s`: seconds of loading and of
    full prefill, both of one layer or both of all layers. `shares`: as in MachineProfile. The paper's examples are
    Llama-7B (recompute 3 ms per layer at 15 %, load 16 ms) and Llama-70B (7 ms, 4 ms):

    >>> models = ((0.016, 0.003), (0.004, 0.007))
    >>> [largest_hidden_ratio(0.15, load_s, recompute_s / 0.15) for load_s, recompute_s in models]
    [0.8, 0.15]
    """
    if not 0 <= r_star <= 1:
        raise UsageError(f"r_star is {r_star}; choose 0 to 1")
    if load_s < 0 or prefill_s <= 0:
        raise UsageError(f"load_s is {load_s} and prefill_s {prefill_s}; they must be at least 0 and above 0")
    return min(1.0, max(r_star, largest_x_within(shares, load_s / prefill_s)))


def pipelined_s(load_s: float, compute_s: float, num_layers: int) -> float:
    """Return the seconds of loading and computing `num_layers` equal layers, each loaded while others are computed.

    Computing begins once one layer is loaded (`exposed_load_s`). Layer 0 is loaded last, and no computing waits for it.
    The result is therefore the longer of two times: all loading, or the first load and then all computing.

    >>> pipelined_s(4.0, 8.0, num_layers=4), pipelined_s(8.0, 4.0, num_layers=4)
    (9.0, 8.0)
    """
    return max(load_s, compute_s + exposed_load_s(load_s, num_layers))


def exposed_load_s(load_s: float, num_layers: int) -> float:
    """Return the seconds before computing can begin: the time of loading one layer.

    Engines load layer 1 first, and the query probe needs it before any recompute. Layer 0 depends on the token ids
    alone, so it is computed, and its load comes last. With one layer, computing therefore waits for no load.

    >>> exposed_load_s(8.0, num_layers=4), exposed_load_s(8.0, num_layers=1)
    (2.0, 0.0)
    """
    return load_s / num_layers if num_layers > 1 else 0.0


class TierSpeed(NamedTuple):
    """How fast a request's chunks are read from a tier: bytes per second of all of them, and seconds until the first.

    `range_bytes`: bytes of a chunk that are read before any of its layers can be used; the rest is read while layers
    are computed. Infinite: chunks are read whole before anything is computed.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    range_bytes: float = 0.0


def tier_speeds(profile: MachineProfile, measured: Mapping[str, ReadSpeed]) -> dict[str, TierSpeed]:
    """Return the speeds of tiers by name: the running medians of `measured`, and the profile's.

    The profile's speed of a tier is used until LEAST_READS reads were measured.
    """
    speeds = {name: TierSpeed(bytes_per_s) for name, bytes_per_s in profile.bytes_per_s.items()}
    for name, reads in measured.items():
        if (bytes_per_s := reads.bytes_per_s) is not None and (name not in speeds or reads.num_reads >= LEAST_READS):
            speeds[name] = TierSpeed(bytes_per_s, reads.latency_s)
        if name in speeds:
            speeds[name] = speeds[name]._replace(range_bytes=reads.range_bytes)
    return speeds


class RuleChoice(NamedTuple):
    """A rule by which a prompt can be blended. `r_star`: its least ratio that is close enough to full prefill."""

    name: str
    r_star: float
    probes_before_selection: bool = False


class LoadableChunk(NamedTuple):
    """A stored chunk of a prompt: the name of the tier that has it, its tokens in the prompt, and its bytes to read."""

    tier: str
    num_tokens: int
    nbytes: int


class ReuseDecision(NamedTuple):
    """The decision on one request, and the estimated seconds."""

    rule: str
    ratio: float  # 1 for full prefill
    used: tuple[int, ...]  # indices of the chunks whose stored KV is used, ascending; the others are computed
    load_s: float  # loading the stored KV of `used`
    compute_s: float  # computing the prompt at `ratio`
    total_s: float  # both, as far as they do not overlap
    full_s: float  # full prefill of the prompt
    fallback_reason: str = ""  # why full prefill is faster; "" if stored KV is used

    def describe(self, num_chunks: int) -> str:
        """Return the decision as a sentence for a report. `num_chunks`: the number of stored chunks of the prompt."""
        if self.fallback_reason:
            return self.fallback_reason
        left = num_chunks - len(self.used)
        return (
            f"{self.rule} at {self.ratio:.3g} is predicted to take {self.total_s:.3g} s (loading {self.load_s:.3g} s, "
            f"computing {self.compute_s:.3g} s), full prefill {self.full_s:.3g} s"
            + (f"; computing {left} of {num_chunks} stored chunks is faster than loading them" if left else "")
        )


def decide_reuse(
    profile: MachineProfile,
    rules: Sequence[RuleChoice],
    num_tokens: int,
    num_resident: int,
    chunks: Sequence[LoadableChunk],
    speeds: Mapping[str, TierSpeed],
) -> ReuseDecision:
    """Decide which stored chunks of a prompt are loaded, by which rule and at which ratio, or choose full prefill.

    The prompt has `num_tokens` tokens. The KV of the first `num_resident` is in memory. Loading from a tier without a
    speed counts as 0 s. If the prompt would be slower with all chunks than by full prefill, only those are used that
    make it clearly faster; the others are computed. Full prefill is chosen if a blend takes longer than
    `longest_blend_s`.

    `rules`: the first is the preferred one. Another is chosen where the preferred one would wait for loading, because
    of its query probe, and the other is faster. The ratio of a rule without a probe is the largest whose recompute
    hides behind loading, at least its `r_star`.
    """
    full_s = profile.full_prefill_s(num_tokens)
    best, *others = (_fastest(profile, rule, num_tokens, num_resident, chunks, speeds) for rule in rules)
    for other in others:
        if best.total_s > (1 + SLIGHT) * best.compute_s and other.total_s < best.total_s:
            best = other
    if chunks and best.total_s >= longest_blend_s(full_s):
        reason = (
            f"full prefill of {num_tokens} tokens takes {full_s:.3g} s, loading {best.load_s:.3g} s and blending "
            f"{best.total_s:.3g} s in all"
        )
        return ReuseDecision(best.rule, 1.0, (), best.load_s, full_s, full_s, full_s, reason)
    return best


def longest_blend_s(full_s: float) -> float:
    """Return the seconds from which a blend is not worth it, if full prefill takes `full_s`.

    A blend must save the share SLIGHT, less NEGLIGIBLE_S:

    >>> [round(longest_blend_s(full_s), 4) for full_s in (0.004, 0.05, 1.0)]
    [0.0086, 0.05, 0.905]
    """
    return (1.0 - SLIGHT) * full_s + NEGLIGIBLE_S


def _fastest(
    profile: MachineProfile,
    rule: RuleChoice,
    num_tokens: int,
    num_resident: int,
    chunks: Sequence[LoadableChunk],
    speeds: Mapping[str, TierSpeed],
) -> ReuseDecision:
    """Return the fastest decision by one rule. It uses no chunk only if there is none."""
    shares = profile.shares if rule.probes_before_selection else profile.no_probe_shares
    full_s = profile.full_prefill_s(num_tokens)

    def decide_for(used: Sequence[int], raises_ratio: bool, /) -> ReuseDecision:
        first_s = before_s = load_s = 0.0  # until the first byte; of reads that nothing overlaps; of other reads
        for chunk in (chunks[at] for at in used if chunks[at].tier in speeds):
            speed = speeds[chunk.tier]
            first_s = max(first_s, speed.latency_s)
            num_first = min(chunk.nbytes, speed.range_bytes)
            before_s += num_first / speed.bytes_per_s
            load_s += (chunk.nbytes - num_first) / speed.bytes_per_s
        num_stored, ratio = num_resident + sum(chunks[at].num_tokens for at in used), rule.r_star
        share = min(1.0, num_stored / max(1, num_tokens))
        if raises_ratio and share:
            # Fresh tokens are computed in any case; the rest of the loading time can hide recompute of stored tokens.
            hidden_s = profile.hidden_compute_s(load_s, rule.probes_before_selection) - profile.overhead_s
            hidden_s -= full_s * (1.0 - share)
            ratio = largest_hidden_ratio(rule.r_star, max(0.0, hidden_s), full_s * share, shares)
        compute_s = profile.prompt_compute_s(ratio, num_tokens, num_stored, shares)
        waited_s = first_s + before_s
        total_s = waited_s + profile.blend_s(load_s, compute_s, rule.probes_before_selection)
        return ReuseDecision(rule.name, ratio, tuple(used), waited_s + load_s, compute_s, total_s, full_s)

    *some, everything = (decide_for(used, False) for used in _sets_to_compare(chunks, speeds) if used or not chunks)
    best = min(some, key=lambda each: each.total_s, default=everything)
    # Predictions are not exact, so chunks are computed only where waiting for all would not be worth it.
    limit_s = longest_blend_s(full_s)
    pays = everything.total_s < limit_s or best.total_s >= limit_s
    return decide_for(everything.used if pays else best.used, True)


def _sets_to_compare(chunks: Sequence[LoadableChunk], speeds: Mapping[str, TierSpeed]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of chunks of which the fastest is loaded, as ascending indices; the set of all chunks last.

    Chunks of tiers without a speed, such as memory, are in all of them. Of every other tier, the chunks with the fewest
    bytes per token come first: each number of them, or NUM_COUNTS numbers if the tier has more.
    """
    free = [at for at, chunk in enumerate(chunks) if chunk.tier not in speeds]
    prefixes: list[list[list[int]]] = []
    for tier in speeds:
        indices = [at for at, chunk in enumerate(chunks) if chunk.tier == tier]
        indices.sort(key=lambda at: chunks[at].nbytes / max(1, chunks[at].num_tokens))
        steps = min(len(indices), NUM_COUNTS)
        prefixes.append([indices[: round(len(indices) * step / max(1, steps))] for step in range(steps + 1)])
    for some in product(*prefixes):
        yield tuple(sorted(chain(free, *some)))


NUM_COUNTS = 16
"""Most numbers of chunks of one tier that are compared, so that a decision takes a millisecond for any prompt."""


def check_speed(name: str, bytes_per_s: float) -> None:
    """Raise UsageError unless `bytes_per_s` is finite and above 0. `name`: the tier or storage."""
    if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise UsageError(f"the speed of {name} is {bytes_per_s} bytes per second; set it above 0")
