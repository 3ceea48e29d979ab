"""How close is an answer from fused KV to full prefill's, on a real language model and real questions?

    make real-model
    python -m benchmarks.closeness --model models/smollm2 --out data/results/closeness.json

Each question retrieves six chunks of at most 256 tokens from its ten passages, as `ragblend ask` does (MiniLM, best
first). The prompt, about 1,600 tokens, is prefilled in full, and fused in every configuration: KL(full || fused) of the
first token, and of the tokens of full prefill's greedy answer read one after the other, in nats. A hash decides which
questions may choose rules (`--part selection`) and which are reported. Nothing is sampled: a run repeats to the bit on
one machine. Read `measure` first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from ragblend import SegmentedPrompt, load_engine
from ragblend.bench.common.hardware import hardware_card
from ragblend.bench.quality.measures import distance, read
from ragblend.bench.quality.runs import FULL, REUSE, Configuration, answer, kl, request_for
from ragblend.chunker import split
from ragblend.cli.support import err, print_json, quiet_libraries, split_names, split_numbers, use_threads
from ragblend.corpus.documents import Document
from ragblend.corpus.embedders import MiniLMEmbedder
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.report import BlendReport
from ragblend.engine.store.tiered import MemoryStore
from ragblend.intervals import mean_interval

QUESTIONS = Path("data/questions/musique_100.json")
SYSTEM = "You will read several passages and then answer a question about them. Answer with a few words only."
NUM_CHUNKS, CHUNK_TOKENS, ANSWER_TOKENS = 6, 256, 16
SELECTION_TENTHS = 3  # of the questions may choose
RULES = "ask,cacheblend,cacheblend_k,repair,first_k,random"
BASE = Configuration("blend", "cacheblend", 0.15)  # what the others are compared with, question by question


class Far(NamedTuple):
    """One question in one configuration."""

    first_token_kl: float
    answer_kl: float
    agreement: float  # share of the answer's tokens whose most likely token is full prefill's
    charged_budget_32: float


class Case(NamedTuple):
    """A question, and the passages that it is asked over."""

    question: str
    passages: tuple[str, ...]


def part_of(question: str) -> str:
    """Whether a question may choose, or is reported: by a hash of its text."""
    digit = blake2b(question.encode(), digest_size=8).digest()[0] % 10
    return "selection" if digit < SELECTION_TENTHS else "reported"


def read_cases(path: Path, part: str) -> list[Case]:
    """The cases of a file that are of this part, in the file's order."""
    records = json.loads(path.read_text())
    cases = [Case(record["question"], tuple(each["text"] for each in record["ctxs"])) for record in records]
    return [case for case in cases if part_of(case.question) == part]


def retrieved(case: Case, engine: TransformersEngine, embedder: MiniLMEmbedder) -> list[str]:
    """The chunks of a case that are nearest to its question, the nearest first."""
    chunks = [
        chunk.text
        for number, text in enumerate(case.passages)
        for chunk in split(Document(text, str(number)), engine.segmenter.count_tokens, CHUNK_TOKENS)
    ]
    nearness = embedder.embed(chunks) @ embedder.embed([case.question])[0]
    return [chunks[place] for place in np.argsort(-nearness)[:NUM_CHUNKS]]


def measure(
    base: TransformersEngine, prompt: SegmentedPrompt, chosen: Sequence[Configuration]
) -> dict[Configuration, Far]:
    """Full prefill of one prompt, and how far every configuration is from it. Chunks are stored for it alone."""
    engine = TransformersEngine(
        base.layers,
        base.segmenter,
        MemoryStore(1 << 33),
        name=base.name,
        fingerprint=base.fingerprint,
        system=SYSTEM,
        on_miss="inline",
        check=False,
    )
    request = request_for(engine, prompt)
    request = replace(request, options=replace(request.options, max_tokens=ANSWER_TOKENS))
    for chunk in prompt.chunks:
        engine.precompute(chunk)
    full = answer(engine, request, FULL)
    expected = read(engine, request.prompt, full.fused, full.token_ids)
    found: dict[Configuration, Far] = {}
    for each in chosen:
        rule = each.rule if each.mode == "blend" else "auto"
        fused = engine.prefill(replace(request, mode=each.mode, rule=rule, ratio=each.ratio))
        reading = read(engine, request.prompt, fused.fused, full.token_ids)
        far = distance(request.prompt, fused.fused, reading, full.fused, expected)
        report: BlendReport = fused.report
        divergence = kl(full.log_probs, fused.logits.double().log_softmax(-1))
        found[each] = Far(divergence, far.kl, far.agreement, report.charged_budget_32)
    return found


def summarise(records: Sequence[dict[Configuration, Far]]) -> list[dict[str, Any]]:
    """Means over the questions with their 95 % intervals, and the mean difference from `BASE` with its own."""
    runs = []
    for each in records[0]:
        table = np.array([record[each] for record in records])
        run: dict[str, Any] = {"mode": each.mode, "rule": each.rule, "ratio": each.ratio, "num_questions": len(table)}
        for column, name in enumerate(Far._fields):
            run[name] = float(table[:, column].mean())
        for column, name in enumerate(Far._fields[:2]):
            run[f"{name}_low"], run[f"{name}_high"] = mean_interval(table[:, column])
            if BASE in records[0]:
                less = table[:, column] - np.array([record[BASE][column] for record in records])
                run[f"{name}_over_base"] = [float(less.mean()), *mean_interval(less)]
        runs.append(run)
    return runs


def table_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A line per configuration."""
    lines = [f"{'':<22}{'first-token KL':>24}{'answer KL':>24}{'agreement':>11}{'charged':>9}"]
    for run in runs:
        name = f"{run['rule']} {run['ratio']:.0%}" if run["mode"] == "blend" else str(run["mode"])
        cells = [f"{run[f'{kind}_kl']:.3f} [{run[f'{kind}_kl_low']:.3f}, {run[f'{kind}_kl_high']:.3f}]"
                 for kind in ("first_token", "answer")]  # fmt: skip
        lines.append(f"{name:<22}{cells[0]:>24}{cells[1]:>24}{run['agreement']:>11.3f}{run['charged_budget_32']:>9.3f}")
    return lines


def main(
    model: Annotated[str, typer.Option(help="A Hugging Face id or a folder.")],
    questions: Annotated[Path, typer.Option(help="JSON: question, answers, ctxs with text.")] = QUESTIONS,
    part: Annotated[str, typer.Option(help="reported; selection, to choose by.")] = "reported",
    number: Annotated[int, typer.Option(help="Most questions.")] = 40,
    rules: Annotated[str, typer.Option(help="Comma-separated.")] = RULES,
    ratios: Annotated[str, typer.Option(help="Comma-separated shares.")] = "0.05,0.15",
    threads: int = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file; without it, one line on stdout.")] = None,
) -> None:
    """Distance from full prefill by rule and ratio. Progress and table on stderr."""
    use_threads(threads)
    quiet_libraries()
    tell: Callable[[str], None] = lambda line: err.print(line, markup=False, highlight=False)  # noqa: E731
    chosen = [
        REUSE,
        *(Configuration("blend", rule, ratio) for rule in split_names(rules) for ratio in split_numbers(ratios)),
    ]
    cases, embedder = read_cases(questions, part)[:number], MiniLMEmbedder()
    records, start_s = [], time.perf_counter()
    with load_engine(model, dtype="float32", on_miss="inline") as engine, torch.inference_mode():
        for count, case in enumerate(cases, start=1):
            records.append(
                measure(engine, SegmentedPrompt(retrieved(case, engine, embedder), case.question, SYSTEM), chosen)
            )
            tell(f"question {count} of {len(cases)}, {time.perf_counter() - start_s:.0f} s")
        facts: dict[str, Any] = {
            "schema_version": 1,
            "command": "benchmarks.closeness",
            "hardware": hardware_card(engine.layers.device),
            "config": {
                "questions": questions.name, "part": part, "num_chunks": NUM_CHUNKS, "chunk_tokens": CHUNK_TOKENS,
                "answer_tokens": ANSWER_TOKENS, "order": "score", "base": BASE._asdict(), "threads": threads,
            },
            "model": Path(engine.name).name,  # where it lies says nothing elsewhere
            "fingerprint": engine.fingerprint,
            "num_layers": engine.layers.num_layers,
            "runs": summarise(records),
        }  # fmt: skip
    for line in table_lines(facts["runs"]):
        tell(line)
    if out is None:
        print_json(facts)
    else:
        out.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    typer.run(main)
