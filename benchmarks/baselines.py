"""Baselines that fuse no KV: map-reduce and map-rerank, as in CacheBlend's figures, and reordered chunks.

All of them use full prefill, which is exact, but their prompts differ from the original prompt. Their distance from
full prefill is computed over the KV of the last prompt that they send. It is the cost of another prompt, not a
numerical error. Read `ask_baseline` first; `benchmarks.figures` compares them with blending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.lab.quality.measures import FULL, Answer, generate_answer, loss, token_log_probs
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt.types import Chunk, MatchedPrompt, Part, Prompt

Baseline = Literal["map_reduce", "map_rerank", "reorder"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
SUMMARY_TOKENS = 48  # limit of a chunk's summary
INSTRUCTION = "Summarise in one or two sentences what the passage says that helps to answer this question: {question}"


class Asked(NamedTuple):
    """A greedy answer, and the prompt from whose KV it was decoded."""

    answer: Answer
    prompt: MatchedPrompt
    total_s: float  # prefilling and decoding


Ask = Callable[[Sequence[Part], str, str | None, int], Asked]
"""Function of chunks, question, system text and maximal answer tokens. Answers their prompt after full prefill."""


def ask_baseline(name: Baseline, engine: TransformersEngine, prompt: Prompt, case: QaCase, answer_tokens: int) -> Asked:
    """Answer `prompt`, the usual prompt of `case`, by a baseline.

    The answer's `ttft_s` includes every prompt that runs before its first token is known. Its charged budgets are the
    tokens of all prefilled prompts divided by those of `prompt`, so they exceed 1 where question and system text are
    read again for every chunk. Tokens that are decoded before the answer count in the time only.
    """
    num_prefilled = 0

    def ask(chunks: Sequence[Part], question: str, system: str | None, max_tokens: int) -> Asked:
        nonlocal num_prefilled
        request = engine.request(Prompt(chunks, question, system), mode="full", max_tokens=max_tokens)
        num_prefilled += request.prompt.num_tokens
        start_s = perf_counter()
        found = generate_answer(engine, request, FULL)
        return Asked(found, request.prompt, perf_counter() - start_s)

    chunks = prompt.chunks
    if name == "map_reduce":
        last = map_reduce(ask, chunks, case, answer_tokens)
    elif name == "map_rerank":
        last = map_rerank(ask, chunks, case, answer_tokens, lambda found: confidence(engine, found))
    else:
        last = ask(reordered(chunks), case.question, case.system, answer_tokens)
    share = num_prefilled / len(engine.renderer.render(prompt))
    report = replace(last.answer.report, charged_budget=share, charged_budget_32=share)
    return last._replace(answer=last.answer._replace(report=report))


def map_reduce(ask: Ask, chunks: Sequence[Part], case: QaCase, answer_tokens: int) -> Asked:
    """Ask the question over summaries of single chunks, each made for this question (LangChain's map-reduce chain).

    A fact that needs two chunks is in no summary. A chunk with an empty summary is left out."""
    asked = [ask([chunk], INSTRUCTION.format(question=case.question), None, SUMMARY_TOKENS) for chunk in chunks]
    summaries = [text for each in asked if (text := each.answer.text.strip())]
    last = ask(summaries, case.question, case.system, answer_tokens)
    return _after(last, sum(each.total_s for each in asked) + last.answer.ttft_s)


def map_rerank(
    ask: Ask, chunks: Sequence[Part], case: QaCase, answer_tokens: int, score: Callable[[Asked], float]
) -> Asked:
    """Ask the question over each chunk alone. Return the answer with the highest score, the first of equal ones.

    The answer is known when all of them are decoded, so its first token is as late as its last."""
    found = [ask([chunk], case.question, case.system, answer_tokens) for chunk in chunks]
    return _after(max(found, key=score), sum(each.total_s for each in found))


def confidence(engine: TransformersEngine, found: Asked) -> float:
    """Return the mean natural log-probability of the answer's tokens, its end token included.

    In LangChain's chain the model writes a score from 0 to 100 after its answer. A small model writes none, or always
    the same one; log-probabilities can be read from any model. Neither shows that an answer is right: a model that has
    learnt to say "not stated" says so of most chunks, with a high score.
    """
    token_ids = found.answer.token_ids
    return -loss(token_log_probs(engine, found.prompt, found.answer.fused, token_ids), token_ids)


def reordered(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the chunks in the order of their texts' hashes, so that prompts over the same chunks begin with the same
    ones.

    Prefix caching, which is exact, then finds longer prefixes (ContextPilot's idea). How much longer depends on the
    other prompts; a single prompt finds none, so its time is that of full prefill.
    """
    return sorted(chunks, key=lambda chunk: blake2b(chunk.text.encode(), digest_size=16).digest())


def _after(last: Asked, ttft_s: float) -> Asked:
    return last._replace(answer=last.answer._replace(ttft_s=ttft_s))
