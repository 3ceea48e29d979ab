"""Decoding: the next token from logits, its text, and stop strings.

Depends on tensors, strings and a Renderer, not on models or KV.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from ragblend.engine.report import TokenLogprob
from ragblend.errors import UsageError
from ragblend.options import GenerationOptions
from ragblend.prompt.render import Renderer


class Sampler:
    """Sampler of one answer. It has its own random state, so requests do not influence each other.

    Bias, repetition penalty and the filters top-k, top-p and min-p are transformers' logits processors. A repetition
    penalty counts the tokens of the prompt, `prompt_ids`, and of the answer. Presence and frequency penalties, for
    which transformers has no processor, count the answer's tokens alone, as in OpenAI and vLLM. With
    `options.logprobs`, the list `logprobs` has one item per token of the answer.
    """

    def __init__(self, options: GenerationOptions, prompt_ids: Sequence[int] = ()) -> None:
        self._options = options
        settings = (
            options.top_k,
            options.min_p,
            options.repetition_penalty,
            options.presence_penalty,
            options.frequency_penalty,
            options.logit_bias,
        )
        self._is_plain = settings == (None,) * len(settings)  # temperature and top-p alone need no processors
        self._ids, self._num_prompt_ids = list(prompt_ids), len(prompt_ids)
        if not self._is_plain:
            self._penalties, self._filters = _make_processors(options)
        self.logprobs: list[TokenLogprob] | None = [] if options.logprobs else None
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def sample(self, logits: Tensor) -> int:
        """Return the id of the next token, chosen from `logits` [vocabulary]. Raises UsageError for a bias on an
        unknown token id."""
        scores = logits if self._is_plain else self._apply_penalties(logits)
        if self._options.temperature == 0:
            token = int(scores.argmax())
        else:
            scaled = scores.float().cpu() / self._options.temperature
            if not self._is_plain:
                scaled = self._filters(torch.tensor([self._ids]), scaled[None])[0]
            ordered, ids = scaled.softmax(dim=-1).sort(descending=True)
            # A token stays while the mass before it is below top_p, so the first always stays.
            ordered[ordered.cumsum(dim=-1) - ordered >= (self._options.top_p if self._is_plain else 1.0)] = 0
            token = int(ids[torch.multinomial(ordered, 1, generator=self._generator)])
        if not self._is_plain:
            self._ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(_logprobs(logits, token, self._options.top_logprobs or 0))
        return token

    def record_forced(self, tokens: Sequence[int]) -> None:
        """Append `tokens`, which a grammar forces, to the answer. They are not sampled, so their probability is 1."""
        self._ids += tokens
        if self.logprobs is not None:
            is_shown = bool(self._options.top_logprobs)
            self.logprobs += [TokenLogprob(token, 0.0, [(token, 0.0)] if is_shown else []) for token in tokens]

    def _apply_penalties(self, logits: Tensor) -> Tensor:
        scores = logits.float()[None]
        try:
            scores = self._penalties(torch.tensor([self._ids], device=scores.device), scores)[0]
        except ValueError as error:
            raise UsageError(f"logit_bias cannot be used: {error}") from error
        presence, frequency = self._options.presence_penalty or 0.0, self._options.frequency_penalty or 0.0
        answer = self._ids[self._num_prompt_ids :]
        if answer and (presence or frequency):
            counts = torch.bincount(torch.tensor(answer, device=scores.device), minlength=len(scores)).to(scores.dtype)
            scores = scores - presence * (counts > 0) - frequency * counts
        penalised: Tensor = scores
        return penalised


def _make_processors(options: GenerationOptions) -> tuple[Any, Any]:
    """Return transformers' processors for bias and repetition penalty, and those that set filtered logits to -inf."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    penalties, filters = LogitsProcessorList(), LogitsProcessorList()
    bias = {(int(token),): float(value) for token, value in (options.logit_bias or {}).items() if value}
    if bias:
        penalties.append(SequenceBiasLogitsProcessor(bias))
    if options.repetition_penalty is not None:
        penalties.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.top_k:
        filters.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        filters.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        filters.append(MinPLogitsWarper(options.min_p))
    return penalties, filters


def _logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return the log-probabilities of the chosen token and of the `num_top` likeliest tokens.

    `logits` [vocabulary] are the model's own, without penalties; tokens of probability 0 are left out.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    likeliest = zip(ids.tolist(), values.tolist(), strict=True)
    top = [(other, value) for other, value in likeliest if value > -math.inf]
    return TokenLogprob(token, float(logprobs[token]), top)


class AnswerText:
    """Text of one answer, token by token. It ends before the first stop string.

    Text is held back while its bytes do not make a character, and while it may be the beginning of a stop string.
    """

    def __init__(self, renderer: Renderer, stop: Sequence[str] = ()) -> None:
        self._renderer = renderer
        self._stop = tuple(stop)
        self._steps = DecodeStream(skip_special_tokens=True)
        self._shown_ids: list[int] = []  # ids of the text decoded last
        self._new_ids: list[int] = []  # ids after them, whose text is not decoded yet
        self._has_begun = False
        self._held = ""  # decoded text that may be the beginning of a stop string
        self.stopped = False  # True once a stop string has ended the text

    def push(self, token_id: int) -> str:
        """Return the new text that can be shown after `token_id`; "" if there is none yet, and after a stop string."""
        if self.stopped:
            return ""
        self._new_ids.append(token_id)
        try:
            text = self._steps.step(self._renderer.backend, token_id) or ""
        # tokenizers raises a plain Exception when new bytes change an earlier character (as a random model's do).
        except Exception:
            self._steps = DecodeStream(skip_special_tokens=True)
            text = self._decode_new_ids()
        return self._cut(text)

    def flush(self) -> str:
        """Return the text that is still held back at the end of the answer. An unfinished character becomes U+FFFD."""
        text = self._cut(self._decode_new_ids()) if self._new_ids and not self.stopped else ""
        rest, self._held = text + self._held, ""
        return rest

    def _decode_new_ids(self) -> str:
        before, whole = (self._renderer.plain_text(ids) for ids in (self._shown_ids, self._shown_ids + self._new_ids))
        return whole[len(before) :]

    def _cut(self, text: str) -> str:
        """Return the part of the held text and `text` that can be shown, without the template's lead of an answer."""
        if not text:
            return ""
        self._shown_ids, self._new_ids = self._new_ids, []
        text = text if self._has_begun else text.removeprefix(self._renderer.whitespace_before_answer)
        self._has_begun = True
        text_before_stop, self._held, self.stopped = cut_at_stop(self._held + text, self._stop)
        return text_before_stop


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str, bool]:
    """Return the text before the first stop string, the text to hold back, and True if there is a stop string.

    If there is none, the end of the text that may be the beginning of a stop string is held back. Among several stop
    strings, the one that ends first counts, so the result does not depend on how the answer is divided into pieces.

    >>> cut_at_stop("one E", ["END"]), cut_at_stop("EN two END three", ["END"])
    (('one ', 'E', False), ('EN two ', '', True))
    """
    stops = [(place + len(each), place) for each in stop if (place := text.find(each)) >= 0]
    if stops:
        return text[: min(stops)[1]], "", True
    longest = min(max(map(len, stop), default=0) - 1, len(text))
    ends = (text[-size:] for size in range(longest, 0, -1))
    partial_stop = next((end for end in ends if any(each.startswith(end) for each in stop)), "")
    return text[: len(text) - len(partial_stop)], partial_stop, False
