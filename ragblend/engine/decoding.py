"""From logits to tokens to text: choosing the next token, its text, and knowing where to stop.

Knows tensors, strings and a Renderer. Knows nothing about models or KV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from ragblend.errors import UsageError
from ragblend.options import GenerationOptions
from ragblend.prompt.render import Renderer


class LogitsProcessors:
    """Penalties, bias and limits of the choice, by transformers' own logits processors, over one answer's tokens.

    Presence and frequency count the answer alone, as OpenAI and vLLM do; transformers has no processor for them.
    """

    def __init__(self, options: GenerationOptions, prompt_ids: Sequence[int]) -> None:
        from transformers.generation.logits_process import (
            LogitsProcessorList,
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            SequenceBiasLogitsProcessor,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._options = options
        self._ids = list(prompt_ids)
        self._num_prompt_ids = len(self._ids)
        self._processors, self._limits = LogitsProcessorList(), LogitsProcessorList()
        bias = {(int(token),): float(value) for token, value in (options.logit_bias or {}).items() if value}
        if bias:
            self._processors.append(SequenceBiasLogitsProcessor(bias))
        if options.repetition_penalty is not None:
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
        if options.top_k:
            self._limits.append(TopKLogitsWarper(options.top_k))
        if options.top_p < 1:
            self._limits.append(TopPLogitsWarper(options.top_p))
        if options.min_p:
            self._limits.append(MinPLogitsWarper(options.min_p))

    def apply_penalties(self, logits: Tensor) -> Tensor:
        """`logits` [vocabulary] with bias and penalties. Raises UsageError for a bias on a token that is none."""
        scores = logits.float()[None]
        try:
            scores = self._processors(torch.tensor([self._ids], device=scores.device), scores)[0]
        except ValueError as error:
            raise UsageError(f"logit_bias cannot be used: {error}") from error
        presence, frequency = self._options.presence_penalty or 0.0, self._options.frequency_penalty or 0.0
        answer = self._ids[self._num_prompt_ids :]
        if answer and (presence or frequency):
            counts = torch.bincount(torch.tensor(answer, device=scores.device), minlength=len(scores)).to(scores.dtype)
            scores = scores - presence * (counts > 0) - frequency * counts
        penalised: Tensor = scores
        return penalised

    def filter_logits(self, scaled: Tensor) -> Tensor:
        """`scaled` [vocabulary], divided by the temperature, without what may not be chosen."""
        limited: Tensor = self._limits(torch.tensor([self._ids]), scaled[None])[0]
        return limited

    def push(self, token: int) -> None:
        """Note what was chosen."""
        self._ids.append(token)


_PLAIN = (None,) * 6


class Sampler:
    """Chooses one token per call; keeps its own random state, so requests do not disturb each other.

    `prompt_ids` are what a repetition penalty looks at, besides the answer. `logprobs` has, where it was asked for, per
    token its id, its log-probability and those of the likeliest ones.
    """

    def __init__(self, options: GenerationOptions, prompt_ids: Sequence[int] = ()) -> None:
        self._options = options
        settings = (
            options.top_k, options.min_p, options.repetition_penalty, options.presence_penalty,
            options.frequency_penalty, options.logit_bias,
        )  # fmt: skip
        self._shape = LogitsProcessors(options, prompt_ids) if settings != _PLAIN else None
        self.logprobs: list[tuple[int, float, list[tuple[int, float]]]] | None = [] if options.logprobs else None
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def sample(self, logits: Tensor) -> int:
        """A token id from `logits` [vocabulary]."""
        shape = self._shape
        scores = logits if shape is None else shape.apply_penalties(logits)
        if self._options.temperature == 0:
            token = int(scores.argmax())
        else:
            scaled = scores.float().cpu() / self._options.temperature
            scaled = scaled if shape is None else shape.filter_logits(scaled)
            ordered, ids = scaled.softmax(dim=-1).sort(descending=True)
            # A token stays while the mass before it is below top_p, so the first always stays.
            ordered[ordered.cumsum(dim=-1) - ordered >= (self._options.top_p if shape is None else 1.0)] = 0
            token = int(ids[torch.multinomial(ordered, 1, generator=self._generator)])
        if shape is not None:
            shape.push(token)
        if self.logprobs is not None:
            self.logprobs.append(_logprobs(logits, token, self._options.top_logprobs or 0))
        return token

    def record_forced(self, tokens: Sequence[int]) -> None:
        """Note `tokens` that nothing chose, because nothing else could come: their probability is 1."""
        for token in tokens:
            if self._shape is not None:
                self._shape.push(token)
            if self.logprobs is not None:
                self.logprobs.append((token, 0.0, [(token, 0.0)] if self._options.top_logprobs else []))


def _logprobs(logits: Tensor, token: int, num_top: int) -> tuple[int, float, list[tuple[int, float]]]:
    """Of the chosen token, and of the `num_top` likeliest that may come, by the model's own `logits` [vocabulary]."""
    found = logits.float().log_softmax(dim=-1)
    values, ids = found.topk(min(num_top, len(found)))
    likeliest = zip(ids.tolist(), values.tolist(), strict=True)
    return token, float(found[token]), [(other, value) for other, value in likeliest if value > -math.inf]


class TextStream:
    """Turns an answer's ids into text as they come, and holds back bytes that do not yet make a character."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._steps = DecodeStream(skip_special_tokens=True)
        self._last: list[int] = []  # the ids of the last text given out
        self._held: list[int] = []  # those behind them
        self._begun = False

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        self._held.append(token_id)
        try:
            text = self._steps.step(self._renderer.backend, token_id) or ""
        # tokenizers has no class for it: bytes that a random model made undo an earlier character.
        except Exception:
            self._steps = DecodeStream(skip_special_tokens=True)
            text = self._held_text()
        return self._shown(text)

    def flush(self) -> str:
        """Return what is still held back at the end of the answer: an unfinished character, shown as U+FFFD."""
        return self._shown(self._held_text()) if self._held else ""

    def _held_text(self) -> str:
        known, whole = (self._renderer.plain_text(ids) for ids in (self._last, self._last + self._held))
        return whole[len(known) :]

    def _shown(self, text: str) -> str:
        """Return `text`, without the whitespace that the template writes before an answer."""
        if not text:
            return ""
        self._last, self._held = self._held, []
        text = text if self._begun else text.removeprefix(self._renderer.answer_lead)
        self._begun = True
        return text


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
        longest = min(max((len(stop) for stop in self._stop), default=0) - 1, len(self._held))
        # The longest end of the held text that begins some stop string.
        ends = (self._held[-size:] for size in range(longest, 0, -1))
        keep = next((end for end in ends if any(stop.startswith(end) for stop in self._stop)), "")
        shown, self._held = self._held[: len(self._held) - len(keep)], keep
        return shown

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held
