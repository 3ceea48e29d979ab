"""From logits to tokens to text: choosing the next token, and knowing where to stop.

Knows tensors and strings. Knows nothing about models, KV or tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragblend.options import GenerationOptions


class Sampler:
    """Chooses one token per call; keeps its own random state, so requests do not disturb each other."""

    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def choose(self, logits: Tensor) -> int:
        """A token id from `logits` [vocabulary]."""
        if self._options.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits.float().cpu() / self._options.temperature).softmax(dim=-1)
        ordered, ids = probabilities.sort(descending=True)
        # A token stays while the mass before it is below top_p, so the first always stays.
        ordered[ordered.cumsum(dim=-1) - ordered >= self._options.top_p] = 0
        return int(ids[torch.multinomial(ordered, 1, generator=self._generator)])


class StopScanner:
    """Passes text through until a stop string appears; holds back what could still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown. After a stop string everything is swallowed.

        >>> scanner = StopScanner(["END"])
        >>> [scanner.push(piece) for piece in ("one E", "N two ", "END three")], scanner.stopped
        (['one ', 'EN two ', ''], True)
        """
        if self.stopped:
            return ""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            # The one complete first, so that the answer does not depend on how the text was cut into pieces.
            self.stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = self._longest_start()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stop):
                return size
        return 0
