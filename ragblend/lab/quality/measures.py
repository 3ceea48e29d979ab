"""One prompt answered in one configuration, and its distance from full prefill: in nats, in tokens and in words.

The same answer can be scored over the KV of every mode, so modes are compared token by token.
Depends on engines and tensors, not on data sets or tables. Read `generate_answer` and `token_log_probs` first.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.generation import EngineRequest, PrefillResult
from ragblend.engine.report import BlendReport
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.options import ContextPolicy, Mode
from ragblend.prompt.types import MatchedPrompt, common_prefix_length


class Configuration(NamedTuple):
    """A mode with its options. `rule`: "none" in other modes than "blend"; `context`: the store's context policy."""

    mode: Mode
    rule: str
    ratio: float
    context: ContextPolicy = "none"


FULL = Configuration("full", "none", 1.0)
PREFIX = Configuration("prefix", "none", 0.0)
REUSE = Configuration("reuse", "none", 0.0)


class Answer(NamedTuple):
    """A greedy answer. `ended`: True if an end token ended it; `token_ids` include that token.

    `log_probs`: [vocabulary] float64, natural log of the first token's probabilities. `fused`: the KV that the answer
    was decoded from.
    """

    text: str
    ended: bool
    log_probs: Tensor
    report: BlendReport
    token_ids: tuple[int, ...]
    fused: FusedKV
    ttft_s: float = 0.0  # lookup + load + fuse + first token


def timed_prefill(
    engine: TransformersEngine, request: EngineRequest, configuration: Configuration
) -> tuple[PrefillResult, float]:
    """Return the prompt's prefill in this configuration, and the seconds it took. The chunks must be precomputed."""
    rule = "auto" if configuration.rule == "none" else configuration.rule
    start_s = perf_counter()
    tuning = RequestTuning(rule, configuration.ratio, is_auto_rule=rule == "auto")
    prefilled = engine.prefill(replace(request, mode=configuration.mode, tuning=tuning))
    return prefilled, perf_counter() - start_s


class UnfinishedAnswer(NamedTuple):
    """A prefill and the first tokens of its greedy answer. The prefill's KV has all of them but the last."""

    prefilled: PrefillResult
    ttft_s: float
    token_ids: list[int]


def generate_answer(engine: TransformersEngine, request: EngineRequest, configuration: Configuration) -> Answer:
    """Return the greedy answer of one prefill in this configuration."""
    prefilled, ttft_s = timed_prefill(engine, request, configuration)
    begun = UnfinishedAnswer(prefilled, ttft_s, [int(prefilled.logits.argmax())])
    return decode_answers(engine, request, [begun])[0]


def score_and_begin_answer(
    engine: TransformersEngine, request: EngineRequest, configuration: Configuration, full: Answer
) -> tuple[UnfinishedAnswer, Tensor]:
    """Return the beginning of the answer in this configuration, and `token_log_probs` for the tokens of `full`.

    full: full prefill's answer to the request. `token_log_probs` uses the KV of this configuration.
    """
    prefilled, ttft_s = timed_prefill(engine, request, configuration)
    scores = token_log_probs(engine, request.prompt, prefilled.fused, full.token_ids)
    # Greedy decoding returns the tokens of `full` up to the first one that is not the most likely. Their KV is already
    # written by `token_log_probs`, so only the tokens after it are decoded.
    likeliest = scores.argmax(-1).tolist()
    num_equal = common_prefix_length(likeliest, full.token_ids)
    prefilled.fused.length += min(num_equal, len(full.token_ids) - 1)
    return UnfinishedAnswer(prefilled, ttft_s, likeliest[: num_equal + 1]), scores


@torch.inference_mode()
def decode_answers(
    engine: TransformersEngine, request: EngineRequest, begun: Sequence[UnfinishedAnswer]
) -> list[Answer]:
    """Return the greedy answers that continue `begun`, decoded as one batch. Appends to their lists of tokens."""

    def unfinished() -> list[UnfinishedAnswer]:
        limit = request.options.max_tokens
        return [each for each in begun if each.token_ids[-1] not in engine.stop_ids and len(each.token_ids) < limit]

    while batch := unfinished():
        latest = [each.token_ids[-1:] for each in batch]
        logits = engine.layers.run_decode_batch(latest, [each.prefilled.fused for each in batch])
        for each, token_id in zip(batch, logits.argmax(-1).tolist(), strict=True):
            each.token_ids.append(token_id)
    answers = []
    for prefilled, ttft_s, token_ids in begun:
        ended = token_ids[-1] in engine.stop_ids
        text = engine.renderer.decode(token_ids[:-1] if ended else token_ids)
        log_probs = prefilled.logits.double().log_softmax(-1)
        answers.append(Answer(text, ended, log_probs, prefilled.report, tuple(token_ids), prefilled.fused, ttft_s))
    return answers


@torch.inference_mode()
def token_log_probs(
    engine: TransformersEngine, prompt: MatchedPrompt, fused: FusedKV, answer_ids: Sequence[int]
) -> Tensor:
    """Return the log-probabilities [A, vocabulary] float64 of the A tokens `answer_ids`, each given the earlier ones.

    prompt: the prompt whose KV is in `fused`. The model runs over the prompt's tokens after the last chunk and over all
    `answer_ids` except the last one. Writes the KV of these tokens to `fused`.
    """
    layers, start = engine.layers, prompt.runs[-1].end if prompt.runs else 0
    ids = [*prompt.token_ids[start:], *answer_ids[:-1]]
    rows = torch.arange(start, start + len(ids), device=layers.device)
    hidden = layers.embed(torch.tensor(ids, device=layers.device))
    for layer in range(layers.num_layers):
        hidden = layers.run_layer(layer, hidden, rows, fused)
    return layers.logits(hidden[prompt.num_tokens - start - 1 :]).double().log_softmax(-1)


def score_fidelity(blend: Tensor, full: Tensor) -> tuple[float, float]:
    """Compare two log-probabilities [A, vocabulary] of the same answer of A tokens.

    Return KL(full || blend) in nats, mean over the tokens, and the share of tokens whose most likely token is the same.
    """
    divergences = (full.exp() * (full - blend)).sum(-1).clamp_min(0)
    return float(divergences.mean()), float((full.argmax(-1) == blend.argmax(-1)).double().mean())


def loss(log_probs: Tensor, token_ids: Sequence[int]) -> float:
    """Return the mean loss of `token_ids` [A], in nats per token, under log-probabilities [A, vocabulary]."""
    return -float(log_probs[torch.arange(len(token_ids)), torch.tensor(token_ids)].mean())


# -- words

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text in the form in which SQuAD and LongBench compare it: lower case, no ASCII punctuation, no articles,
    single spaces.

    >>> normalize_answer("The  Beatles' (first) album.")
    'beatles first album'
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(answer: str, gold: str) -> float:
    """Return 1.0 if the normalized texts are equal (`normalize_answer`), else 0.0."""
    return float(normalize_answer(answer) == normalize_answer(gold))


def contains_answer(answer: str, gold: str) -> float:
    """Return 1.0 if the normalized text contains the normalized gold answer, else 0.0.

    It is the measure of "Lost in the Middle" (Liu et al., 2023) for NQ-open, because a model that answers in a sentence
    never matches exactly.

    >>> contains_answer("It was the Eiffel Tower, in Paris.", "Eiffel tower"), contains_answer("Eiffel", "Eiffel tower")
    (1.0, 0.0)
    """
    return float(f" {normalize_answer(gold)} " in f" {normalize_answer(answer)} ")


def answer_f1(answer: str, gold: str) -> float:
    """Return SQuAD's F1: the harmonic mean of precision and recall of the normalized texts' words. Repetitions count.

    >>> answer_f1("one red barn", "red barn"), answer_f1("", "red barn"), answer_f1("the Red", "red")
    (0.8, 0.0, 1.0)
    """
    mine, theirs = normalize_answer(answer).split(), normalize_answer(gold).split()
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs)) if shared else 0.0


def rouge_l(answer: str, gold: str) -> float:
    """Return ROUGE-L as LongBench's script computes it, with the package `rouge` 1.0.1; 0.0 for an empty text.

    It is the F-measure of the different words in the longest common subsequences of all pairs of sentences. Sentences
    end at full stops, words at white space; case and other punctuation count.

    >>> round(rouge_l("A cat sat. It ran.", "A cat ran. A dog sat."), 3)
    0.8
    """
    mine, theirs = ([words.split() or [""] for words in text.split(".") if words] for text in (answer, gold))
    if not mine or not theirs:
        return 0.0
    shared = {word for ours in theirs for other in mine for word in common_subsequence(ours, other)}
    recall, precision = (len(shared) / len(set(chain(*sentences))) for sentences in (theirs, mine))
    return 2 * precision * recall / (precision + recall + 1e-8)


def common_subsequence(ours: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return a longest common subsequence of two sequences of words, in reverse order.

    Of several, the function returns the same one as `rouge`, because ROUGE-L counts different words only.
    """
    lengths = np.zeros((len(ours) + 1, len(others) + 1), dtype=np.int64)
    for row, word in enumerate(ours, start=1):
        for column, other in enumerate(others, start=1):
            longest = max(lengths[row - 1, column], lengths[row, column - 1])
            lengths[row, column] = lengths[row - 1, column - 1] + 1 if word == other else longest
    row, column, subsequence = len(ours), len(others), list[str]()
    while row and column:
        if ours[row - 1] == others[column - 1]:
            subsequence.append(ours[row - 1])
            row, column = row - 1, column - 1
        elif lengths[row - 1, column] > lengths[row, column - 1]:
            row -= 1
        else:
            column -= 1
    return subsequence
