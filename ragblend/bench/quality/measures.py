"""How far one prompt's fused KV is from its full prefill: over a given answer, inside the layers, and in words.

The question and an answer are read over both KVs, so that any two modes can be compared token by token, whatever they
would have answered themselves. Knows engines' layers and tensors; nothing of questions' kinds, rules or tables.
Read `read` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.prompt.prompt import TokenizedPrompt


class Reading(NamedTuple):
    """A question and an answer, read over one prompt's fused KV."""

    log_probs: Tensor  # [A, vocabulary] float64, natural logarithm: what is predicted where the answer has a token
    attention: tuple[Tensor, ...]  # per layer [Q, hidden size]: attention's output for the question's Q tokens


class Distance(NamedTuple):
    """How far a fused KV is from full prefill's. `kl` is KL(full || this) in nats, mean over the answer's tokens."""

    kl: float
    agreement: float  # share of the answer's tokens whose most likely token is the same
    kv_deviation: tuple[float, ...]  # per layer: ||KV - KV of full|| / ||KV of full||, chunk tokens, Frobenius norm
    attention_deviation: tuple[float, ...]  # per layer, the same of the question's attention output


@torch.inference_mode()
def read(engine: TransformersEngine, prompt: TokenizedPrompt, fused: FusedKV, answer_ids: Sequence[int]) -> Reading:
    """Run the tokens after the last chunk, and `answer_ids` but the last, over `fused`, which keeps their rows.

    Over the KV that a blend left, the question's rows come out as they did there: they always run through all layers.
    """
    layers, start = engine.layers, _context(prompt)[1]
    ids = [*prompt.token_ids[start:], *answer_ids[:-1]]
    rows = torch.arange(start, start + len(ids), device=layers.device)
    num_question = prompt.num_tokens - start
    hidden = layers.embed(torch.tensor(ids, device=layers.device))
    attention: list[Tensor] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        attention.append(output[0][0, :num_question])

    hooks = [block.self_attn.register_forward_hook(keep) for block in layers.model.model.layers]
    try:
        for layer in range(layers.num_layers):
            hidden = layers.run_layer(layer, hidden, rows, fused)
    finally:
        for hook in hooks:
            hook.remove()
    return Reading(layers.logits(hidden[num_question - 1 :]).double().log_softmax(-1), tuple(attention))


def distance(prompt: TokenizedPrompt, fused: FusedKV, found: Reading, full_kv: FusedKV, full: Reading) -> Distance:
    """What `found`, read over `fused`, differs from `full` in, read over `full_kv`: the same prompt and answer."""
    start, end = _context(prompt)
    divergences = (full.log_probs.exp() * (full.log_probs - found.log_probs)).sum(-1).clamp_min(0)
    agrees = full.log_probs.argmax(-1) == found.log_probs.argmax(-1)
    num_layers = len(full.attention)
    return Distance(
        float(divergences.mean()),
        float(agrees.double().mean()),
        tuple(
            _relative(_rows(fused, layer, start, end), _rows(full_kv, layer, start, end)) for layer in range(num_layers)
        ),
        tuple(_relative(mine, theirs) for mine, theirs in zip(found.attention, full.attention, strict=True)),
    )


def _context(prompt: TokenizedPrompt) -> tuple[int, int]:
    """From the first chunk's first token to behind the last chunk's last."""
    return prompt.chunk_segments[0].start, prompt.chunk_segments[-1].end


def _rows(fused: FusedKV, layer: int, start: int, end: int) -> Tensor:
    return torch.cat((fused.keys(layer)[:, start:end], fused.values(layer)[:, start:end]), dim=-1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, in float32."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


# -- words


def token_f1(found: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words, as SQuAD counts it: case ignored, repeats counted.

    >>> token_f1("the red house", "red house"), token_f1("", "red house"), token_f1("Red", "red")
    (0.8, 0.0, 1.0)
    """
    mine, theirs = found.lower().split(), gold.lower().split()
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs)) if shared else 0.0


def rouge_l(found: str, gold: str) -> float | None:
    """ROUGE-L F-measure; None where `rouge-score` is not installed."""
    scorer = _rouge_scorer()
    return None if scorer is None else float(scorer.score(gold, found)["rougeL"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        return None
    return RougeScorer(["rougeL"])
