"""Baselines that fuse no KV: map-reduce and map-rerank, as in the CacheBlend paper's figure 13.

All of them use full prefill, which is exact, but their prompts differ from the original prompt. Their distance from
full prefill is computed over the KV of the last prompt that they send. It is the cost of another prompt, not a
numerical error. Read `ask_baseline` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.measures import FULL, Answer, Configuration, generate_answer, loss, token_log_probs
from ragblend.lab.quality.study import QualityRecord, answer_in_full
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt.types import Chunk, MatchedPrompt, Prompt

Baseline = Literal["map_reduce", "map_rerank"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
SUMMARY_TOKENS = 48  # limit of a chunk's summary
INSTRUCTION = "Summarise in one or two sentences what the passage says that helps to answer this question: {question}"


class Asked(NamedTuple):
    """A greedy answer, the prompt from whose KV it was decoded, and the number of tokens of all prefilled prompts."""

    answer: Answer
    prompt: MatchedPrompt
    num_prefilled: int


def measure_baselines(
    base: TransformersEngine, prompt: Prompt, case: QaCase, names: Sequence[Baseline]
) -> Mapping[Configuration, QualityRecord]:
    """Measure `prompt`, the usual prompt of `case`, by each baseline. Their ratio is 1, because they reuse nothing."""
    engine = with_own_store(base, system=case.system, context="none")
    expected = answer_in_full(engine, prompt, case, case.answer_tokens(None))
    records = {}
    for name in names:
        last = ask_baseline(name, engine, prompt, case)
        seen = token_log_probs(engine, last.prompt, last.answer.fused, expected.full.token_ids)
        configuration = Configuration(name, "none", 1.0)  # type: ignore[arg-type]  # no mode of the engine
        records[configuration] = expected.record(engine, last.answer, seen, last.prompt)
    return records


def ask_baseline(name: Baseline, engine: TransformersEngine, prompt: Prompt, case: QaCase) -> Asked:
    """Answer `prompt`, the usual prompt of `case`, by a baseline.

    The calls for single chunks run side by side. The answer's `ttft_s` is the time until its first token is known. Its
    charged budgets are the tokens of all prefilled prompts divided by those of `prompt`, so they exceed 1 where
    question and system text are read again for every chunk. Tokens that are decoded before the answer count in the time
    only.
    """
    ask = map_reduce if name == "map_reduce" else map_rerank
    last = ask(engine, prompt.chunks, case)
    share = last.num_prefilled / len(engine.renderer.render(prompt))
    report = replace(last.answer.report, charged_budget=share, charged_budget_32=share)
    return last._replace(answer=last.answer._replace(report=report))


def map_reduce(engine: TransformersEngine, chunks: Sequence[Chunk], case: QaCase) -> Asked:
    """Ask the question over summaries of single chunks, each made for this question (LangChain's map-reduce chain).

    A fact that needs two chunks is in no summary. A chunk with an empty summary is left out."""
    instruction = INSTRUCTION.format(question=case.question)
    prompts = [Prompt([chunk], instruction) for chunk in chunks]
    start_s = perf_counter()
    summaries = engine.generate_batch(prompts, mode="full", max_tokens=SUMMARY_TOKENS)
    before_s = perf_counter() - start_s
    texts = [text for each in summaries if (text := each.text.strip())]
    last = _ask(engine, case.prompt(texts), case)
    num_prefilled = last.num_prefilled + sum(len(engine.renderer.render(each)) for each in prompts)
    return last._replace(answer=last.answer._replace(ttft_s=before_s + last.answer.ttft_s), num_prefilled=num_prefilled)


def map_rerank(engine: TransformersEngine, chunks: Sequence[Chunk], case: QaCase) -> Asked:
    """Ask the question over each chunk alone. Return the answer with the highest `confidence`, the first of equal ones.

    The answer is known when all of them are decoded, so its first token is as late as its last. The confidence comes
    with the decoded tokens, so computing it again here is not timed.
    """
    prompts = [case.prompt([chunk]) for chunk in chunks]
    start_s = perf_counter()
    engine.generate_batch(prompts, mode="full", max_tokens=case.answer_tokens(None))
    total_s = perf_counter() - start_s
    found = [_ask(engine, prompt, case) for prompt in prompts]
    best = max(found, key=lambda each: confidence(engine, each))
    return best._replace(
        answer=best.answer._replace(ttft_s=total_s), num_prefilled=sum(each.num_prefilled for each in found)
    )


def confidence(engine: TransformersEngine, found: Asked) -> float:
    """Return the mean natural log-probability of the answer's tokens, its end token included.

    In LangChain's chain the model writes a score from 0 to 100 after its answer. A small model writes none, or always
    the same one; log-probabilities can be read from any model. Neither shows that an answer is right: a model that has
    learnt to say "not stated" says so of most chunks, with a high score.
    """
    token_ids = found.answer.token_ids
    return -loss(token_log_probs(engine, found.prompt, found.answer.fused, token_ids), token_ids)


def _ask(engine: TransformersEngine, prompt: Prompt, case: QaCase) -> Asked:
    request = engine.request(prompt, mode="full", max_tokens=case.answer_tokens(None))
    return Asked(generate_answer(engine, request, FULL), request.prompt, request.prompt.num_tokens)
