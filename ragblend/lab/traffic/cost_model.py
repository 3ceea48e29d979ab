"""What prompts cost to prefill in each mode, and whether blending pays: in seconds by a machine profile, or in tokens.

The arithmetic of `ragblend plan`, over logged prompts: prefix caching computes what follows the cached prefix; blending
computes of that only what is not stored, and a share of what is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ragblend.engine.tuning.loading_controller import MachineProfile

WORTH, MARGINAL = 0.10, 0.03
"""Share of prefix caching's work that blending saves: worth it from the first on, not worth it below the second."""
FEW = 100  # requests; below, the verdict says that they are few


class BlendSettings(NamedTuple):
    """How blending is done. By default CacheBlend's own ratio, KV in memory."""

    ratio: float = 0.15
    asks_first: bool = False  # the rule probes before it selects
    bytes_per_s: float | None = None  # of the store


class PromptTokenCounts(NamedTuple):
    """Tokens of one prompt: all, in the cached prefix, and stored behind it."""

    tokens: int
    prefix: int
    elsewhere: int


def mean_saving(
    prompts: Iterable[PromptTokenCounts], settings: BlendSettings, profile: MachineProfile | None
) -> dict[str, Any]:
    """The mean work of prompts by mode, as in the JSON: "tokens" computed, or "seconds" to the first token.

    In tokens each counts the same: that attention costs more in a long prompt is left out. Seconds are those of an idle
    machine, which is also the prefill work of a busy one.
    """
    full = prefix = blend = 0.0
    count = num_slower = 0
    for prompt in prompts:
        work = _tokens(prompt, settings) if profile is None else _seconds(prompt, settings, profile)
        count += 1
        full += work[0]
        prefix += work[1]
        blend += min(work[1:])  # the engine prefills where that is faster
        num_slower += work[2] > work[1]
    full, prefix, blend = (total / max(1, count) for total in (full, prefix, blend))
    return {
        "unit": "tokens" if profile is None else "seconds",
        "full": full,
        "prefix": prefix,
        "blend": blend,
        "prefix_saves": 1 - prefix / full if full else 0.0,  # share of full prefill
        "blend_saves": 1 - blend / full if full else 0.0,  # prefix caching included
        "blend_saves_beyond_prefix": 1 - blend / prefix if prefix else 0.0,  # share of what prefix caching leaves
        "prefix_throughput": full / prefix if prefix else 1.0,  # times as many prompts in the same time
        "blend_throughput": full / blend if blend else 1.0,
        "num_slower": num_slower,  # requests whose KV loads slower than it computes
    }


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


def verdict(facts: Mapping[str, Any]) -> str:
    """One line on an analysis: does blending pay, and why not where it does not."""
    saving, num_requests = facts["saving"], facts["num_requests"]
    beyond = saving["blend_saves_beyond_prefix"]
    line = (
        f"blending would save {saving['blend_saves']:.1%} of the prefill "
        f"{'time' if saving['unit'] == 'seconds' else 'work'}, prefix caching alone {saving['prefix_saves']:.1%}; "
        f"of what that leaves, {beyond:.1%}"
    )
    few = f" (of {num_requests} requests only: log more)" if num_requests < FEW else ""
    if beyond >= WORTH:
        return f"{line}: worth it{few}"
    judged = "hardly worth it" if beyond >= MARGINAL else "not worth it"
    return f"{line}: {judged}, because {_reason(facts['shares'], saving['num_slower'], num_requests)}{few}"


def _reason(shares: Mapping[str, float], num_slower: int, num_requests: int) -> str:
    if num_slower > num_requests / 2:
        return f"for {num_slower} of {num_requests} requests the KV loads slower than it is computed"
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
