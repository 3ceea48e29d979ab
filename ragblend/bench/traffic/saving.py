"""What a trace's prompts would take to prefill, by mode: from a machine profile in seconds, without one in tokens.

The same arithmetic as `ragblend plan`, over the prompts that there were instead of one kind of prompt: prefix caching
computes what lies behind the prefix, blending of that only what no store has, and a share of what it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ragblend.engine.tuning.pipeline import MachineProfile

WORTH, MARGINAL = 0.10, 0.03
"""Share of prefix caching's work that blending saves: from the first on it is worth it, below the second it is not."""


class Kind(NamedTuple):
    """How blending is done: the ratio, whether the rule asks first, and the bytes per second of the store."""

    ratio: float
    asks_first: bool = False
    bytes_per_s: float | None = None


BY_THE_PAPER = Kind(0.15)
"""CacheBlend's own ratio, KV in memory."""


class Shape(NamedTuple):
    """Tokens of one prompt: all, in the prefix, and elsewhere in a store."""

    tokens: int
    prefix: int
    elsewhere: int


@dataclass(slots=True)
class Saving:
    """Mean work per request by mode, "tokens" computed or "seconds" to the first token."""

    unit: str
    full: float = 0.0
    prefix: float = 0.0
    blend: float = 0.0
    num_slower: int = 0  # requests whose KV loads slower than it computes: they are prefilled behind their prefix

    @property
    def prefix_saves(self) -> float:
        """Share of full prefill that prefix caching saves."""
        return 1 - self.prefix / self.full if self.full else 0.0

    @property
    def blend_saves(self) -> float:
        """Share of full prefill that blending saves, prefix caching included."""
        return 1 - self.blend / self.full if self.full else 0.0

    @property
    def beyond(self) -> float:
        """Share of what prefix caching leaves that blending saves."""
        return 1 - self.blend / self.prefix if self.prefix else 0.0

    def as_dict(self) -> dict[str, float | str]:
        """Plain JSON values. `throughput`: how many times as many prompts prefill in the same time as in full."""
        return {
            "unit": self.unit,
            "full": self.full,
            "prefix": self.prefix,
            "blend": self.blend,
            "prefix_saves": self.prefix_saves,
            "blend_saves": self.blend_saves,
            "blend_saves_beyond_prefix": self.beyond,
            "prefix_throughput": self.full / self.prefix if self.prefix else 1.0,
            "blend_throughput": self.full / self.blend if self.blend else 1.0,
            "num_slower": self.num_slower,
        }


def saving_in_tokens(shapes: Iterable[Shape], kind: Kind) -> Saving:
    """Tokens that are computed, each counted the same: what a long prompt's attention costs more is left out."""
    return _mean("tokens", ((s.tokens, s.tokens - s.prefix, _computed(s, kind)) for s in shapes))


def _computed(shape: Shape, kind: Kind) -> float:
    return shape.tokens - shape.prefix - shape.elsewhere * (1 - kind.ratio)


def saving_in_seconds(shapes: Iterable[Shape], kind: Kind, profile: MachineProfile) -> Saving:
    """Time to first token on an idle machine; the same seconds are the prefill that a busy one has to do."""
    return _mean("seconds", (_seconds(shape, kind, profile) for shape in shapes))


def _seconds(shape: Shape, kind: Kind, profile: MachineProfile) -> tuple[float, float, float]:
    full_s, cached_s = profile.full_s(shape.tokens), profile.full_s(shape.prefix)
    if not shape.elsewhere:
        return full_s, full_s - cached_s, full_s - cached_s
    load_s = profile.load_s(kind.bytes_per_s, shape.elsewhere) if kind.bytes_per_s else 0.0
    compute_s = max(0.0, profile.recompute_s(kind.ratio, shape.tokens, shape.elsewhere) - cached_s)
    return full_s, full_s - cached_s, profile.blend_s(load_s, compute_s, kind.asks_first)


def _mean(unit: str, work: Iterable[tuple[float, float, float]]) -> Saving:
    found, count = Saving(unit), 0
    for full, prefix, blend in work:
        count += 1
        found.full += full
        found.prefix += prefix
        found.blend += min(blend, prefix)  # the engine prefills where that is faster
        found.num_slower += blend > prefix
    for name in ("full", "prefix", "blend"):
        setattr(found, name, getattr(found, name) / max(1, count))
    return found
