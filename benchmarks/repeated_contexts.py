"""Whether the fused KV of a context is worth storing: how often contexts repeat, what it saves.

    python -m benchmarks.repeated_contexts --model MODEL --out FILE

First, real questions retrieve their chunks from the passages of all questions of their data set, one question after
another, and every list of chunks is remembered: how often has a question the chunks of an earlier one, in this order?
Then prompts of two questions over the same chunks are compared: the second question over KV that was fused for the
first one, and blended itself. The rule `cacheblend` does not look at the question, so both are the same; `ask` selects
by the question. KL in nats of the second question's first token. Read `main` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.results import ModelOption, OutOption, write_both
from ragblend.chunker import split
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.corpus.documents import Document
from ragblend.corpus.embedders import Embedder, default_embedder, embed_question, load_embedder
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.generation import Conversation
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.lab.bench.common.configs import NAMED_DATASETS, QualityConfig
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.tasks import SYSTEM, QaCase
from ragblend.prompt.types import Prompt, as_chunk

RULES = ("cacheblend", "ask")
RATIO = 0.15


def retrieved_contexts(
    cases: Sequence[QaCase], engine: TransformersEngine, embedder: Embedder, config: QualityConfig
) -> list[tuple[int, ...]]:
    """Return the numbers of the chunks that each question retrieves from the passages of all, the nearest first."""
    passages = dict.fromkeys(text for case in cases for text in case.passages)
    count = engine.renderer.count_tokens
    chunks = [
        chunk.text
        for number, text in enumerate(passages)
        for chunk in split(Document(text, str(number)), count, config.chunk_tokens)
    ]
    vectors = embedder.embed(chunks)
    nearness = (vectors @ embed_question(embedder, case.question) for case in cases)
    return [tuple(int(place) for place in (-each).argsort()[: config.num_chunks]) for each in nearness]


def hit_rates(contexts: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Return the shares of contexts of which an earlier one had the same chunks, as stores could find them.

    `chunk`: share of the chunks that an earlier context had, which chunk KV serves at any position. `first_2`, ...: the
    same first chunks in the same order, which stored fused KV could serve. `whole`: all of them. `any_order`: the same
    set of chunks. All contexts before a question count, so these are the rates of a store without a limit.
    """
    known: set[Any] = set()
    hits: dict[str, list[bool]] = {}
    for context in contexts:
        keys: dict[str, Any] = {f"first_{count}": context[:count] for count in range(2, len(context))}
        keys |= {"whole": context, "any_order": frozenset(context)}
        for name, key in keys.items():
            hits.setdefault(name, []).append(key in known)
        hits.setdefault("chunk", []).extend(chunk in known for chunk in context)
        known |= {*keys.values(), *context}
    return {name: round(float(np.mean(found)), 4) for name, found in hits.items()}


def compare_reuse(prompt: Prompt, question: str, base: TransformersEngine) -> dict[str, dict[str, float]]:
    """Return, by rule, measures of `question` over the chunks of `prompt`, whose own question came before.

    `kl_blended`: KL(full || blended for this question). `kl_reused`: KL(full || over the KV fused for the first one).
    `logits_apart`: the largest difference of both blends' logits. `charged_budget`: what blending again costs.
    """
    engine = with_own_store(base, system=SYSTEM, context="none")
    for chunk in map(as_chunk, prompt.chunks):
        engine.precompute(chunk)
    second = Prompt(prompt.chunks, question, SYSTEM)
    full = engine.prefill(engine.request(second, mode="full")).logits
    found = {}
    for rule in RULES:
        options: dict[str, Any] = {"rule": rule, "recompute_ratio": RATIO}
        request = engine.request(prompt, **options)
        first = engine.prefill(request)
        conversation = Conversation(list(request.prompt.token_ids), first.fused, first.num_exact)
        reused = engine.prefill(engine.request(second, conversation=conversation, **options))
        blended = engine.prefill(engine.request(second, **options))
        found[rule] = {
            "kl_blended": first_token_kl(full, blended.logits),
            "kl_reused": first_token_kl(full, reused.logits),
            "logits_apart": float((blended.logits - reused.logits).abs().max()),
            "charged_budget": blended.report.charged_budget,
        }
    return found


def main(
    model: ModelOption = "demo",
    out: OutOption = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts of two questions to compare.")] = 20,
    num_chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks of each prompt.")] = 6,
    embedder_name: Annotated[str, typer.Option("--embedder", help="minilm or hashing.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
) -> None:
    """Count repeated contexts, compare reused with blended KV, and write both as JSON."""
    quiet_libraries()
    set_num_threads(threads)
    rates: dict[str, Any] = {}
    with load_engine(model, on_miss="inline") as base, torch.inference_mode():
        if not isinstance(base, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        embedder = default_embedder() if embedder_name == "auto" else load_embedder(embedder_name)
        for data in NAMED_DATASETS:
            config = QualityConfig(model=model, data=data, part="all", num_questions=400, num_chunks=num_chunks)
            contexts = retrieved_contexts(load_cases(config), base, embedder, config)
            rates[data] = {"num_questions": len(contexts), **hit_rates(contexts)}
            print_line(f"{data}: {rates[data]}")
        config = QualityConfig(model=model, data="musique", part="selection", num_chunks=num_chunks)
        cases = load_cases(config)[: prompts + 1]
        compared = [
            compare_reuse(build_prompt(case, base, embedder, config), other.question, base)
            for case, other in pairwise(cases)
        ]
        name = base.name
    closeness = {
        rule: {measure: float(np.mean([each[rule][measure] for each in compared])) for measure in compared[0][rule]}
        for rule in RULES
    }
    for rule in RULES:
        closeness[rule]["logits_apart"] = max(each[rule]["logits_apart"] for each in compared)
    facts = {"model": name, "embedder": embedder.name, "num_chunks": num_chunks, "ratio": RATIO, "hit_rates": rates}
    write_both({**facts, "num_prompts": len(compared), "closeness": closeness}, out)


if __name__ == "__main__":
    typer.run(main)
