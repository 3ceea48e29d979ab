"""How fast a machine computes at the moment, compared with its profile: running medians of an engine's requests.

Numbers only; does not depend on engines or models.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from time import monotonic

from ragblend.engine.store.read_speed import READS_KEPT
from ragblend.engine.tuning.loading_controller import LEAST_READS, Curve, MachineProfile

KEPT_S = 300.0
"""Age at which a request's time is forgotten, so that a machine that was busy is tried again."""


class Paces:
    """Seconds of recent requests over the seconds that a profile predicts: of full prefills, and of blends.

    Both are kept apart, so that a profile whose prediction of either is wrong is corrected by a few requests.
    """

    def __init__(self) -> None:
        self._full = deque[tuple[float, float]](maxlen=READS_KEPT)  # (when, factor)
        self._blend = deque[tuple[float, float]](maxlen=READS_KEPT)

    def record_full(self, profile: MachineProfile, num_tokens: int, seconds: float) -> None:
        """Record a full prefill. Prompts that are shorter than those of the profile are ignored."""
        if num_tokens >= profile.prefill_s[0][0]:
            self._full.append((monotonic(), seconds / profile.full_prefill_s(num_tokens)))

    def record_blend(self, predicted_s: float, seconds: float) -> None:
        """Record a blend. `predicted_s`: computing the prompt, by a profile of `current`."""
        self._blend.append((monotonic(), seconds / predicted_s * _recent_median(self._blend)))

    def current(self, profile: MachineProfile) -> MachineProfile:
        """Return the profile at the current paces."""
        full, blend = _recent_median(self._full), _recent_median(self._blend)

        def at_pace(shares: Curve) -> Curve:
            return tuple((ratio, blend / full * share) for ratio, share in shares)

        return replace(
            profile,
            prefill_s=tuple((num_tokens, full * seconds) for num_tokens, seconds in profile.prefill_s),
            overhead_s=blend * profile.overhead_s,
            shares=at_pace(profile.shares),
            no_probe_shares=at_pace(profile.no_probe_shares),
        )

    def clear(self) -> None:
        """Forget all requests."""
        self._full.clear()
        self._blend.clear()


def _recent_median(factors: deque[tuple[float, float]]) -> float:
    """Return the median of the recent factors; 1 for fewer than LEAST_READS."""
    since_s = monotonic() - KEPT_S
    recent = [factor for when_s, factor in factors if when_s >= since_s]
    return median(recent) if len(recent) >= LEAST_READS else 1.0
