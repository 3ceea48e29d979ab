"""Agreement of answers from fused KV with full prefill: one comparison's result, the counters, and their intervals.

Plain values only; `shadow` runs the comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragblend.intervals import wilson_interval


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Result of one shadow comparison: an answer against full prefill of the same request."""

    first_token_agrees: bool
    first_token_kl: float | None  # KL(full || this), nats; None if the engine returns no distributions
    answers_identical: bool | None  # token for token; None where they cannot be compared: sampled, or broken off


@dataclass(slots=True)
class ShadowCounters:
    """Counters of shadow comparisons since the engine was loaded."""

    share: float = 0.0  # share of the requests to compare
    num_requests: int = 0  # answers from fused KV ("blend", "reuse")
    num_shadowed: int = 0  # of num_requests: compared with full prefill
    num_dropped: int = 0  # sampled, but too many comparisons were waiting, or the engine was closed
    num_failed: int = 0  # sampled, but full prefill failed; the log has the error
    num_first_tokens_same: int = 0  # of num_shadowed
    num_kl: int = 0  # comparisons with the first token's distribution, summed in kl_sum
    kl_sum: float = 0.0  # nats
    num_answers: int = 0  # greedy and complete, so that whole answers can be compared
    num_answers_same: int = 0

    @property
    def first_token_agreement(self) -> float | None:
        """Return the share of comparisons in which the first tokens agree; None without comparisons."""
        return self.num_first_tokens_same / self.num_shadowed if self.num_shadowed else None

    @property
    def first_token_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval (Wilson) of `first_token_agreement`; None before the first comparison."""
        share = self.first_token_agreement
        return None if share is None else wilson_interval(share, self.num_shadowed)

    @property
    def mean_first_token_kl(self) -> float | None:
        """Return the mean KL(full || blend) of the first token, in nats; None if no distribution was available."""
        return self.kl_sum / self.num_kl if self.num_kl else None

    @property
    def answer_agreement(self) -> float | None:
        """Return the share of compared answers that equal full prefill's, token for token; None without comparisons."""
        return self.num_answers_same / self.num_answers if self.num_answers else None

    @property
    def answer_interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval (Wilson) of `answer_agreement`; None before the first comparison."""
        share = self.answer_agreement
        return None if share is None else wilson_interval(share, self.num_answers)

    def summary(self) -> str:
        """Return the counters as one line of text.

        >>> ShadowCounters(0.5, 8, 4, num_first_tokens_same=4, num_kl=4, kl_sum=0.02).summary()
        'full prefill also ran for 4 of 8 answers: first token the same in 4 (100 %, 51 to 100 %), mean KL 0.005 nats'
        """
        text = f"full prefill also ran for {self.num_shadowed} of {self.num_requests} answers"
        parts = []
        if self.num_shadowed:
            parts.append(f"first token the same in {_share(self.num_first_tokens_same, self.num_shadowed)}")
        if self.mean_first_token_kl is not None:
            parts.append(f"mean KL {self.mean_first_token_kl:.2g} nats")
        if self.num_answers:
            same = _share(self.num_answers_same, self.num_answers)
            parts.append(f"of {self.num_answers} whole answers the same {same}")
        parts += [f"{self.num_dropped} left out, too many were waiting"] if self.num_dropped else []
        parts += [f"{self.num_failed} failed"] if self.num_failed else []
        return f"{text}: {', '.join(parts)}" if parts else text


def _share(count: int, total: int) -> str:
    low, high = wilson_interval(count / total, total)
    return f"{count} ({count / total:.0%}, {low * 100:.0f} to {high * 100:.0f} %)".replace("%,", " %,")
