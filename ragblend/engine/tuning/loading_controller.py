"""Loading controller: the ratio whose recompute hides behind loading, and the fallback to a faster full prefill.

After CacheBlend, section 5.1: T_recompute(r) comes from measured prefill times, T_load from bytes and a tier's
throughput. Read `decide_reuse` first. Pure arithmetic on seconds, bytes and tokens; does not depend on models, stores
or frameworks. `ragblend profile` measures a MachineProfile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ragblend.errors import UsageError

PROFILE_VERSION = 1
"""Version of a stored MachineProfile; a profile of another version must be measured again."""

Curve = tuple[tuple[float, float], ...]
"""Measured points (x, y), both ascending; straight lines between them."""

LINEAR: Curve = ((0.0, 0.0), (1.0, 1.0))
"""The paper's assumption: recomputing a share of the tokens takes that share of the full prefill's time."""


# -- measurements


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Measured prefill times of one model on one machine, and read speeds of its tiers.

    `prefill_s`: (tokens, seconds of full prefill). `shares`: (ratio, share), where share is the time to blend from
    memory at that ratio, divided by the time of full prefill. `bytes_per_s`: read speed of each tier, checksums
    included. Both curves are made monotone, because noise can make a longer prompt or a higher ratio seem faster.
    """

    fingerprint: str  # of the model, dtype included
    hardware: Mapping[str, Any]
    num_layers: int
    bytes_per_token: int  # of stored KV, all layers
    prefill_s: Curve
    shares: Curve = LINEAR
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [number for point in (*self.prefill_s, *self.shares) for number in point]
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

    def full_prefill_s(self, num_tokens: float) -> float:
        """Return the seconds of full prefill, extrapolated beyond the longest measured prompt."""
        return interpolate(((0.0, 0.0), *self.prefill_s), num_tokens)

    def prompt_compute_s(self, ratio: float, num_tokens: float, num_stored: float | None = None) -> float:
        """Return the seconds to compute a prompt of `num_tokens` tokens, without loading.

        `num_stored` of the tokens have stored KV (None: all). The share `ratio` of these is recomputed. Tokens without
        stored KV are all computed.
        """
        stored = 1.0 if num_stored is None else min(1.0, num_stored / max(1.0, num_tokens))
        return self.full_prefill_s(num_tokens) * (interpolate(self.shares, ratio) * stored + 1.0 - stored)

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


class ReuseDecision(NamedTuple):
    """The decision on one request: the ratio at which stored KV is reused, and the estimated seconds."""

    ratio: float  # 1 for full prefill
    fallback_reason: str  # why full prefill is faster; "" if stored KV is reused
    load_s: float  # loading the stored KV
    recompute_s: float  # computing the prompt at `ratio`
    full_s: float  # full prefill of the prompt


def decide_reuse(
    profile: MachineProfile,
    r_star: float,
    num_tokens: int,
    num_stored: int,
    load_bytes: Mapping[str, int],
    probes_before_selection: bool = False,
) -> ReuseDecision:
    """Decide whether a prompt of `num_tokens` tokens reuses stored KV, and at what ratio, or is prefilled in full.

    `num_stored`: number of its tokens that have stored KV. `r_star`: the least ratio that is close enough to full
    prefill. `load_bytes`: bytes to read, by the tier's name. Loading from a tier of unknown speed counts as 0 s.
    """
    speeds = profile.bytes_per_s
    load_s = sum(nbytes / speeds[tier] for tier, nbytes in load_bytes.items() if tier in speeds)
    full_s = profile.full_prefill_s(num_tokens)
    least_s = profile.blend_s(load_s, profile.prompt_compute_s(r_star, num_tokens, num_stored), probes_before_selection)
    if num_stored and least_s >= full_s:
        refused = (
            f"full prefill of {num_tokens} tokens takes {full_s:.3g} s, loading {load_s:.3g} s and blending "
            f"{least_s:.3g} s in all"
        )
        return ReuseDecision(1.0, refused, load_s, full_s, full_s)
    # Fresh tokens are computed in any case; the rest of the loading time can hide recompute of stored tokens.
    share = num_stored / max(1, num_tokens)
    hidden_s = max(0.0, profile.hidden_compute_s(load_s, probes_before_selection) - full_s * (1.0 - share))
    ratio = largest_hidden_ratio(r_star, hidden_s, full_s * share, profile.shares) if share else r_star
    return ReuseDecision(ratio, "", load_s, profile.prompt_compute_s(ratio, num_tokens, num_stored), full_s)


def check_speed(name: str, bytes_per_s: float) -> None:
    """Raise UsageError unless `bytes_per_s` is finite and above 0. `name`: the tier or storage."""
    if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise UsageError(f"the speed of {name} is {bytes_per_s} bytes per second; set it above 0")
