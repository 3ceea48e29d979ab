"""One line: does blending pay for this traffic, and why or why not."""

from __future__ import annotations

from ragblend.bench.traffic.analysis import Analysis
from ragblend.bench.traffic.saving import MARGINAL, WORTH, Saving

FEW = 100
"""Requests below which nothing much can be said."""


def verdict(found: Analysis) -> str:
    """The judgement on a trace."""
    saving = found.saving
    of = "of the prefill time" if saving.unit == "seconds" else "of the prefill work"
    both = (
        f"blending would save {saving.blend_saves:.1%} {of}, prefix caching alone {saving.prefix_saves:.1%}; "
        f"of what that leaves, {saving.beyond:.1%}"
    )
    few = f" (of {found.num_requests} requests only: log more)" if found.num_requests < FEW else ""
    if saving.beyond >= WORTH:
        return f"{both}: worth it{few}"
    if saving.beyond >= MARGINAL:
        return f"{both}: hardly worth it, because {reason(found, saving)}{few}"
    return f"{both}: not worth it, because {reason(found, saving)}{few}"


def reason(found: Analysis, saving: Saving) -> str:
    """Why blending saves little."""
    shares = found.shares
    if saving.num_slower > found.num_requests / 2:
        return f"for {saving.num_slower} of {found.num_requests} requests the KV loads slower than it is computed"
    behind = shares["elsewhere"] + shares["new"]
    if shares["prefix"] > 0.5 and behind < 0.35:
        return f"{shares['prefix']:.0%} of the tokens repeat at the front of a prompt, where prefix caching finds them"
    return f"of what is not a known prefix, {shares['new'] / behind if behind else 0:.0%} is new text"


def hint(found: Analysis) -> str | None:
    """What documents that are ingested ahead would add; None where that is little."""
    ahead = found.share(found.num_first)
    if ahead < MARGINAL:
        return None
    return (
        f"{ahead:.1%} of the tokens are the first use of what comes again: ingested ahead, they need no prefill either"
    )
