"""Cost of prompts in each mode, in seconds by a machine profile or in tokens, and whether blending pays.

The arithmetic is that of `ragblend plan`. Prefix caching computes the tokens after the cached prefix. Of these tokens,
blending computes all that are not stored, and the recompute ratio's share of the stored tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ragblend.engine.tuning.loading_controller import MachineProfile

WORTH, MARGINAL = 0.10, 0.03
"""Shares of prefix caching's work that blending must save: to be worth it, and to be hardly worth it."""
FEW = 100  # number of requests below which the verdict adds a warning


TokenCounts = tuple[int, int, int]
"""Token counts of one prompt: all tokens, those in the cached prefix, and stored ones after it."""


def mean_work_by_mode(
    prompts: Iterable[TokenCounts], ratio: float, probes_first: bool = False, profile: MachineProfile | None = None
) -> dict[str, Any]:
    """Return the mean work of a prompt with full prefill, with prefix caching and with blending at `ratio`.

    Without a `profile`, the work is the number of computed tokens. With a `profile`, it is the seconds to the first
    token on an idle machine, with KV read at the speed of the profile's disk. `probes_first`: the rule runs a query
    probe before it selects tokens, so less of the loading overlaps with computing. In the result, "full", "prefix" and
    "blend" are the means. If blending a prompt would be slower than prefix caching, "blend" counts the work of prefix
    caching for this prompt.
    """
    full = prefix = blend = 0.0
    count = num_slower = 0
    for prompt in prompts:
        work = _tokens(prompt, ratio) if profile is None else _seconds(prompt, ratio, probes_first, profile)
        count += 1
        full += work[0]
        prefix += work[1]
        blend += min(work[1:])  # the engine falls back to prefill if that is faster
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
        "num_slower": num_slower,  # requests for which loading the KV is slower than computing it
    }


def _tokens(prompt: TokenCounts, ratio: float) -> tuple[float, float, float]:
    num_tokens, num_prefix, num_elsewhere = prompt
    rest = num_tokens - num_prefix
    return num_tokens, rest, rest - num_elsewhere * (1 - ratio)


def _seconds(
    prompt: TokenCounts, ratio: float, probes_first: bool, profile: MachineProfile
) -> tuple[float, float, float]:
    num_tokens, num_prefix, num_elsewhere = prompt
    full_s, cached_s = profile.full_prefill_s(num_tokens), profile.full_prefill_s(num_prefix)
    if not num_elsewhere:
        return full_s, full_s - cached_s, full_s - cached_s
    bytes_per_s = profile.bytes_per_s.get("disk")
    load_s = profile.load_s(bytes_per_s, num_elsewhere) if bytes_per_s else 0.0
    compute_s = max(0.0, profile.prompt_compute_s(ratio, num_tokens, num_elsewhere) - cached_s)
    return full_s, full_s - cached_s, profile.blend_s(load_s, compute_s, probes_first)


def blending_verdict(facts: Mapping[str, Any]) -> str:
    """Return one line for the result of `analyze`: whether blending pays, and the reason if it does not."""
    saving, num_requests = facts["saving"], facts["num_requests"]
    beyond = saving["blend_saves_beyond_prefix"]
    judged = "worth it" if beyond >= WORTH else "hardly worth it" if beyond >= MARGINAL else "not worth it"
    line = (
        f"blending is {judged}: it would save {saving['blend_saves']:.1%} of the prefill "
        f"{'time' if saving['unit'] == 'seconds' else 'work'}, prefix caching alone {saving['prefix_saves']:.1%}"
    )
    if beyond < WORTH:
        line += f", because {_reason(facts['shares'], saving['num_slower'], num_requests)}"
    return line + (f" (only {num_requests} requests: log more)" if num_requests < FEW else "")


def _reason(shares: Mapping[str, float], num_slower: int, num_requests: int) -> str:
    if num_slower > num_requests / 2:
        return f"for {num_slower} of {num_requests} requests the KV loads slower than it is computed"
    rest = shares["elsewhere"] + shares["new"]
    if shares["prefix"] > 0.5 and rest < 0.35:
        return f"{shares['prefix']:.0%} of the tokens repeat at the front of a prompt, where prefix caching finds them"
    return f"of the tokens after the cached prefixes, {shares['new'] / rest if rest else 0:.0%} are new"


def precompute_hint(first_use_share: float) -> str | None:
    """Return one line of advice to ingest documents before requests; None if that saves little.

    `first_use_share`: share of all tokens that belong to the first occurrence of a chunk that occurs again later.
    """
    if first_use_share < MARGINAL:
        return None
    return (
        f"{first_use_share:.1%} of the tokens are the first use of a chunk that is repeated: with documents ingested "
        "ahead, they need no prefill either"
    )
