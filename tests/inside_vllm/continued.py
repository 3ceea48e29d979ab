"""The independent CacheBlend, decoding from what it blended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from reference import Blended, Reference, Span
from torch import Tensor

from ragblend.engine.fusion.rules import RULES


class Continued(Reference):
    """`blended` a prompt, then `logprobs` of any continuation: vLLM's tokens are forced, its probabilities compared."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._alone: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}

    def alone(self, behind: list[int], ids: list[int]) -> list[tuple[Tensor, Tensor]]:
        """As in Reference, computed once, because later tokens do not change the KV of earlier ones."""
        wanted = (*behind, *ids)
        known = next((known for known in self._alone if known[: len(wanted)] == wanted), wanted)
        if known not in self._alone:
            self._alone[known] = self.compute_alone([], list(wanted))
        return [(k[len(behind) : len(wanted)], v[len(behind) : len(wanted)]) for k, v in self._alone[known]]

    def blended(
        self,
        parts: list[Span],
        ratio: float,
        rule: str,
        selected: list[int],
        question: int | None = None,
        global_layers: Sequence[int] = (),
    ) -> Blended:
        """Blend at `ratio`; `random` is given the selection, which its own tests check.

        `ask` asks in every layer: the question starts at `question`. The others measure at layer 1. Beside layers that
        see a window, those are the global ones, and the first of them.
        """
        if rule == "ask":
            read = global_layers or range(self.num_layers)
            result = self.blend(parts, {0: ratio}, rule, read=read, question=question, carry=RULES[rule].drift_gain)
        elif rule == "random":
            for part in parts:
                self.alone(part.behind, part.ids)  # whole, for the single tokens that it is then cut into
            result = self.blend(forced(parts, set(selected)), {1: 0.0})
        else:
            layer = global_layers[0] if global_layers else 1
            result = self.blend(parts, {layer: ratio}, "k" if rule == "cacheblend_k" else "v")
        return self.continue_from(result, parts)

    def continue_from(self, result: Blended, parts: list[Span]) -> Blended:
        """Decode from `result`, the blend of `parts`, in later calls of `logprobs`. Return it."""
        self._now = result
        self._logits = [result.logits]
        self._ids = [token for part in parts for token in part.ids]
        return result

    @torch.no_grad()
    def logprobs(self, step: int, answer: list[int]) -> Tensor:
        """[vocabulary] before token `step` of `answer`."""
        while len(self._logits) <= step:
            position = len(self._ids) + len(self._logits) - 1
            hidden = self.embed([answer[len(self._logits) - 1]])
            for layer in range(self.num_layers):
                q, k, v = self.project(layer, hidden)
                keys = self._now.keys[layer] = torch.cat((self._now.keys[layer], self.rope(layer, k, [position])))
                values = self._now.values[layer] = torch.cat((self._now.values[layer], v))
                queries, ids = self.rope(layer, q, [position], "query_layernorm"), self._ids + answer
                hidden = self.finish(layer, hidden, queries, ids, [position], keys, values)
            self._logits.append(self.logits(hidden))
        return self._logits[step].log_softmax(-1)


def assert_continues(output: Any, reference: Continued, tolerance: float = 1e-3) -> None:
    """The reference chooses the same token at every step, and its log-probabilities differ by at most `tolerance`."""
    answer = list(output.outputs[0].token_ids)
    for step, (token, logprobs) in enumerate(zip(answer, output.outputs[0].logprobs, strict=True)):
        truth = reference.logprobs(step, answer)
        assert token == int(truth.argmax())
        assert all(abs(entry.logprob - float(truth[other])) <= tolerance for other, entry in logprobs.items())


def forced(parts: list[Span], selected: set[int]) -> list[Span]:
    """The same prompt with the tokens at `selected` counted as text to compute, all others as stored one by one."""
    spans, position = [], 0
    for part in parts:
        if not part.stored or part.exact:
            spans.append(part)
        else:
            spans += [
                Span([token], position + offset not in selected, False, [*part.behind, *part.ids[:offset]])
                for offset, token in enumerate(part.ids)
            ]
        position += len(part.ids)
    return spans
