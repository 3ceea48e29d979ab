"""What prompts cost to prefill in each mode, and whether blending pays: in seconds by a machine profile, or in tokens.

The arithmetic of `ragblend plan`, over logged prompts: prefix caching computes what follows the cached prefix; blending
computes of that only what is not stored, and a share of what is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ragblend.engine.tuning.loading_controller import MachineProfile

WORTH, MARGINAL = 0.10, 0.03
"""Share of prefix caching's work that blending saves: worth it from the first on, not worth it below the second."""
FEW = 100  # requests; below, the verdict says that they are few


class BlendSettings(NamedTuple):
    """The recompute ratio, whether the rule probes before it selects, and the store's bytes per second."""

    ratio: float
    asks_first: bool = False
    bytes_per_s: float | None = None


BY_THE_PAPER = BlendSettings(0.15)
"""CacheBlend's own ratio, KV in memory."""


class PromptTokenCounts(NamedTuple):
    """Tokens of one prompt: all, in the cached prefix, and stored behind it."""

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


def mean_saving(
    prompts: Iterable[PromptTokenCounts], settings: BlendSettings, profile: MachineProfile | None
) -> Saving:
    """The mean work of prompts. In tokens each counts the same: that attention costs more in a long prompt is left out.

    In seconds it is the time to first token on an idle machine, which is also the prefill work of a busy one.
    """
    found, count = Saving("tokens" if profile is None else "seconds"), 0
    for prompt in prompts:
        full, prefix, blend = _tokens(prompt, settings) if profile is None else _seconds(prompt, settings, profile)
        count += 1
        found.full += full
        found.prefix += prefix
        found.blend += min(blend, prefix)  # the engine prefills where that is faster
        found.num_slower += blend > prefix
    for name in ("full", "prefix", "blend"):
        setattr(found, name, getattr(found, name) / max(1, count))
    return found


def _tokens(prompt: PromptTokenCounts, settings: BlendSettings) -> tuple[float, float, float]:
    behind = prompt.tokens - prompt.prefix
    return prompt.tokens, behind, behind - prompt.elsewhere * (1 - settings.ratio)


def _seconds(prompt: PromptTokenCounts, settings: BlendSettings, profile: MachineProfile) -> tuple[float, float, float]:
    full_s, cached_s = profile.full_s(prompt.tokens), profile.full_s(prompt.prefix)
    if not prompt.elsewhere:
        return full_s, full_s - cached_s, full_s - cached_s
    load_s = profile.load_s(settings.bytes_per_s, prompt.elsewhere) if settings.bytes_per_s else 0.0
    compute_s = max(0.0, profile.recompute_s(settings.ratio, prompt.tokens, prompt.elsewhere) - cached_s)
    return full_s, full_s - cached_s, profile.blend_s(load_s, compute_s, settings.asks_first)


def verdict(saving: Saving, shares: Mapping[str, float], num_requests: int) -> str:
    """One line: does blending pay, and why not where it does not. `shares`: of the tokens, prefix, elsewhere, new."""
    of = "of the prefill time" if saving.unit == "seconds" else "of the prefill work"
    line = (
        f"blending would save {saving.blend_saves:.1%} {of}, prefix caching alone {saving.prefix_saves:.1%}; "
        f"of what that leaves, {saving.beyond:.1%}"
    )
    few = f" (of {num_requests} requests only: log more)" if num_requests < FEW else ""
    if saving.beyond >= WORTH:
        return f"{line}: worth it{few}"
    judged = "hardly worth it" if saving.beyond >= MARGINAL else "not worth it"
    return f"{line}: {judged}, because {_reason(saving, shares, num_requests)}{few}"


def _reason(saving: Saving, shares: Mapping[str, float], num_requests: int) -> str:
    if saving.num_slower > num_requests / 2:
        return f"for {saving.num_slower} of {num_requests} requests the KV loads slower than it is computed"
    behind = shares["elsewhere"] + shares["new"]
    if shares["prefix"] > 0.5 and behind < 0.35:
        return f"{shares['prefix']:.0%} of the tokens repeat at the front of a prompt, where prefix caching finds them"
    return f"of what is not a known prefix, {shares['new'] / behind if behind else 0:.0%} is new text"


def hint(first_use_share: float) -> str | None:
    """What documents that are ingested ahead would add; None where that is little."""
    if first_use_share < MARGINAL:
        return None
    return (
        f"{first_use_share:.1%} of the tokens are the first use of what comes again: ingested ahead, they need no "
        "prefill either"
    )
