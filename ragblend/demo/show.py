"""What `ragblend demo` does: ingest a small corpus, ask it questions in all four modes, print them side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragblend.demo.sample import Question, write_corpus
from ragblend.engine import load_engine
from ragblend.engine.report import MODES
from ragblend.engine.store import format_bytes
from ragblend.engine.transformers_engine import TransformersEngine
from ragblend.index import ChunkIndex
from ragblend.precompute import Progress, ingest, open_engine_index
from ragblend.segments import SegmentedPrompt

CHUNK_TOKENS = 24  # the corpus's paragraphs are chunks of about 17 tokens
NUM_HITS, NEIGHBOURS = 2, 1  # a paragraph and the ones beside it, so that what it refers to comes along
NUM_QUESTIONS, NUM_SHOWN = 30, 5

Echo = Callable[[str], None]


def run_demo(
    directory: Path, question: str | None = None, *, progress: Progress | None = None, echo: Echo | None = None
) -> dict[str, Any]:
    """Ingest the demo corpus under `directory` (or reuse it) and answer `question`, or the prepared ones."""
    say = echo or (lambda line: None)
    corpus = directory / "corpus"
    questions = write_corpus(corpus)
    with (
        load_engine("demo", directory / "kv", new_model=True) as engine,
        open_engine_index(directory / "index", engine, chunk_size=CHUNK_TOKENS) as index,
    ):
        report = ingest(corpus, engine, index, chunk_size=CHUNK_TOKENS, glob="*.md", progress=progress)
        say(
            f"{report.num_documents} documents, {report.num_chunks} chunks: {report.num_new_kv} prefilled now, "
            f"{report.num_known_kv} already stored; {format_bytes(report.store_bytes)} of KV\n"
        )
        if question is not None:
            rows = [ask_all_modes(engine, index, Question(question, "", "your own", ""))]
            show_answers(rows, say)
        else:
            rows = [ask_all_modes(engine, index, item) for item in _spread(questions, NUM_QUESTIONS)]
            show_answers(_telling(rows)[:NUM_SHOWN], say)
            show_totals(rows, say)
    return {"ingest": report.as_dict(), "questions": rows}


def ask_all_modes(engine: TransformersEngine, index: ChunkIndex, question: Question) -> dict[str, Any]:
    """One question over the chunks it retrieves, answered in every mode: answers, sources and reports."""
    hits = index.search(question.question, NUM_HITS, neighbours=NEIGHBOURS, order="document")
    prompt = SegmentedPrompt([hit.chunk for hit in hits], question.question)
    modes = {}
    for mode in MODES:
        answer = engine.generate(prompt, mode=mode, max_tokens=16)
        modes[mode] = {"answer": answer.text, "report": answer.report.as_dict()}
    sources = [{"source": hit.chunk.source, "text": hit.chunk.text} for hit in hits]
    return {**asdict(question), "sources": sources, "modes": modes}


def show_answers(rows: Sequence[dict[str, Any]], say: Echo) -> None:
    """A small table per question: mode, answer, right or wrong, tokens reused and recomputed, time."""
    for row in rows:
        gold = f"   (gold: {row['answer']}; {row['kind'].replace('_', ' ')})" if row["answer"] else ""
        say(f"{row['question']}{gold}")
        for number, source in enumerate(row["sources"], start=1):
            say(f"  [{number}] {source['source'].rsplit('/', 1)[-1]}: {source['text']}")
        say(f"  {'mode':<8}{'answer':<16}{'':<7}{'reused':>8}{'recomputed':>12}{'first token':>13}")
        for mode, found in row["modes"].items():
            report = found["report"]
            verdict = "" if not row["answer"] else "right" if found["answer"] == row["answer"] else "WRONG"
            say(
                f"  {mode:<8}{found['answer']:<16}{verdict:<7}{report['num_reused_tokens']:>8}"
                f"{report['num_recomputed_tokens']:>12}{report['ttft_s'] * 1e3:>10.0f} ms"
            )
        blend = row["modes"]["blend"]["report"]
        say(
            f"  blend reused {blend['num_reused_tokens']} of {blend['prompt_tokens']} prompt tokens "
            f"({blend['num_chunk_hits']}/{blend['num_chunks']} chunks from the store) and ran "
            f"{blend['charged_budget']:.0%} of full prefill's chunk work\n"
        )


def show_totals(rows: Sequence[dict[str, Any]], say: Echo) -> None:
    """How many of all questions each mode got right, and what this does not show."""
    say(f"All {len(rows)} questions (those above are the first on which the modes differ):")
    for mode in MODES:
        right = sum(row["modes"][mode]["answer"] == row["answer"] for row in rows)
        ttft_s = statistics.median(row["modes"][mode]["report"]["ttft_s"] for row in rows)
        say(f"  {mode:<8}{right:>3}/{len(rows)} right, first token after {ttft_s * 1e3:.0f} ms (median)")
    say(
        "\nThe embedded model has about 1.3 million parameters and knows only this made-up world; on other text it\n"
        "answers nonsense. Its prompts are short, so these times are mostly overhead: what reuse saves on a real\n"
        "shape is measured by `ragblend bench ttft --shape llama-200m`."
    )


def _spread(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` questions, evenly spaced over the corpus."""
    return [questions[i * len(questions) // count] for i in range(min(count, len(questions)))]


def _telling(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Questions on which the modes differ first; the others after them."""

    def differs(row: dict[str, Any]) -> bool:
        answers = {mode: found["answer"] for mode, found in row["modes"].items()}
        return bool(answers["full"] == answers["blend"] == row["answer"] != answers["reuse"])

    return sorted(rows, key=lambda row: not differs(row))
