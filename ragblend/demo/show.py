"""`ragblend demo`: ingests the sample corpus, answers questions in all four modes, and prints the answers.

The corpus is part of the package; a copy is written to the demo's store.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.demo.corpus import REFERENCE_KINDS, Corpus, Question, sample_corpus
from ragblend.engine.load import load_engine
from ragblend.engine.store.tiered import format_bytes
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import StoreMismatchError
from ragblend.files.places import expand_user_path
from ragblend.index import ChunkIndex, SearchHit, open_index
from ragblend.ingestion.documents import remove_indexed_documents
from ragblend.ingestion.report import IngestReport, Progress
from ragblend.options import MODES
from ragblend.precompute import ingest, open_engine_index
from ragblend.prompt.types import Prompt

DEMO_DIRECTORY = Path("ragblend-data/demo")
CORPUS = "corpus"  # the records' folder
CHUNK_TOKENS = 112  # fits a title and one paragraph of 64 to 96 tokens, not two
RETRIEVAL: dict[str, Any] = {"k": 2, "neighbours": 2, "order": "document"}
"""Paragraphs with those around them, in reading order, so that the prompt contains what "the company" refers to: all
gold sentences of 90 % of the questions (`tests/demo/test_show.py`)."""
EMBEDDER = "hashing"  # by words, because a sentence encoder does not distinguish made-up names
NUM_QUESTIONS, NUM_SHOWN = 30, 4
EXAMPLE_KINDS = (*REFERENCE_KINDS, "comparison")
MAX_ANSWER_TOKENS = 16

Echo = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Demo:
    """An engine and an index that hold the sample corpus."""

    engine: TransformersEngine
    index: ChunkIndex
    corpus: Corpus
    report: IngestReport


@contextmanager
def open_demo(directory: str | Path, progress: Progress | None = None) -> Iterator[Demo]:
    """Write the sample corpus to the folder `corpus` in `directory`, ingest it into the store `directory`, and yield
    the Demo. The engine and index are open until the context ends."""
    directory, corpus = expand_user_path(directory, "--dir"), sample_corpus()
    corpus.write(directory / CORPUS)
    files = [directory / CORPUS / record.filename for record in corpus.records]
    with (
        load_engine("demo", directory, new_model=True) as engine,
        _open_index(directory, engine) as index,
    ):
        report = ingest(files, engine, index, chunk_size=CHUNK_TOKENS, progress=progress)
        _remove_outdated_documents(files, engine, index)
        yield Demo(engine, index, corpus, report)


def _open_index(path: Path, engine: TransformersEngine) -> ChunkIndex:
    """Return the index of the sample corpus, a new one if an earlier version of the demo's model made it.

    Raises StoreMismatchError if such an index also has other documents.
    """
    try:
        return open_engine_index(path, engine, EMBEDDER, chunk_size=CHUNK_TOKENS)
    except StoreMismatchError:
        with open_index(path) as old:
            if any(Path(source).parent.name != CORPUS for source in old.sources()):
                raise
            old.clear()
        return open_engine_index(path, engine, EMBEDDER, chunk_size=CHUNK_TOKENS)


def prepare_demo(progress: Progress | None = None) -> dict[str, Any]:
    """Ingest the sample corpus in DEMO_DIRECTORY. Return `store` and the retrieval options for commands."""
    with open_demo(DEMO_DIRECTORY, progress):
        pass
    return {"store": str(DEMO_DIRECTORY), **RETRIEVAL}


def run_demo(
    directory: str | Path, question: str | None = None, *, progress: Progress | None = None, echo: Echo | None = None
) -> dict[str, Any]:
    """Ingest the sample corpus under `directory`, or reuse it, and answer `question` in every mode.

    None for `question` answers some questions of the corpus. `echo` gets each line of text for the user; None: no text.
    Return the results as JSON values: the ingestion's report, the questions (see `ask_all_modes`), and totals.
    """
    say = echo or (lambda line: None)
    with open_demo(directory, progress) as demo:
        report = demo.report
        say(
            f"{report.num_documents} documents, {report.num_chunks} chunks: {report.num_new_kv} prefilled now, "
            f"{report.num_known_kv} already stored; {format_bytes(report.store_bytes or 0)} of KV\n"
        )
        if question is not None:
            rows = [ask_all_modes(demo, question)]
            show_answers(rows, say)
        else:
            rows = [_ask_prepared(demo, item) for item in pick_evenly(demo.corpus.questions, NUM_QUESTIONS)]
            show_answers(_sort_by_mode_difference(rows)[:NUM_SHOWN], say)
            show_totals(rows, say)
    return {"ingest": report.as_dict(), "questions": rows, "totals": summarize_modes(rows)}


def ask_all_modes(demo: Demo, question: str) -> dict[str, Any]:
    """Retrieve chunks for a question and answer it from them in every mode. Return sources, answers and reports."""
    hits = demo.index.search(question, **RETRIEVAL)
    prompt = Prompt([hit.chunk for hit in hits], question)
    # Not timed: loads the chunks' KV into the memory tier for every mode.
    demo.engine.generate(prompt, mode="reuse", max_tokens=1)
    modes = {}
    for mode in MODES:
        answer = demo.engine.generate(prompt, mode=mode, max_tokens=MAX_ANSWER_TOKENS)
        modes[mode] = {"answer": answer.text, "report": answer.report.as_dict()}
    return {"question": question, "answer": "", "kind": "", "gold": [], "sources": _sources(hits), "modes": modes}


def example_questions() -> list[Question]:
    """Return example questions: two that full reuse answers wrong, and one that it answers right."""
    prepared = pick_evenly(sample_corpus().questions, NUM_QUESTIONS)
    return [next(question for question in prepared if question.kind == kind) for kind in EXAMPLE_KINDS]


def pick_evenly(questions: Sequence[Question], count: int) -> list[Question]:
    """Return `count` questions, evenly spaced; every kind is included, because the corpus is ordered by kind."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def summarize_modes(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each mode the number of right answers, the number of questions, and the median TTFT in seconds.

    `rows`: results of `ask_all_modes`. Rows without a known answer count for the TTFT alone. The numbers of right
    answers and of questions are also given for the questions of REFERENCE_KINDS alone.
    """
    prepared = [row for row in rows if row["answer"]]
    references = [row for row in prepared if row["kind"] in REFERENCE_KINDS]
    return {
        mode: {
            "num_right": sum(_is_right(row, mode) for row in prepared),
            "num_questions": len(prepared),
            "num_right_references": sum(_is_right(row, mode) for row in references),
            "num_references": len(references),
            "ttft_s": statistics.median(row["modes"][mode]["report"]["ttft_s"] for row in rows),
        }
        for mode in MODES
    }


# -- printing


def show_answers(rows: Sequence[dict[str, Any]], echo: Echo) -> None:
    """Print each question with its sources and a table of the modes: answer, verdict, token counts, time."""
    for row in rows:
        gold = f"   (gold: {row['answer']}; {row['kind'].replace('_', ' ')})" if row["answer"] else ""
        echo(f"{row['question']}{gold}")
        for line in _source_lines(row):
            echo(f"  {line}")
        echo(f"  {'mode':<8}{'answer':<16}{'':<7}{'reused':>8}{'recomputed':>12}{'first token':>13}")
        for mode, answer in row["modes"].items():
            report = answer["report"]
            verdict = "" if not row["answer"] else "right" if _is_right(row, mode) else "WRONG"
            echo(
                f"  {mode:<8}{answer['answer']:<16}{verdict:<7}{report['num_reused_tokens']:>8}"
                f"{report['num_recomputed_tokens']:>12}{report['ttft_s'] * 1e3:>10.0f} ms"
            )
        blend = row["modes"]["blend"]["report"]
        echo(
            f"  blend reused {blend['num_reused_tokens']} of {blend['prompt_tokens']} prompt tokens "
            f"({blend['num_chunk_hits']}/{blend['num_chunks']} chunks from the store) and ran "
            f"{blend['charged_budget']:.0%} of full prefill's chunk work\n"
        )


def show_totals(rows: Sequence[dict[str, Any]], echo: Echo) -> None:
    """Print how many questions each mode answered right, and the limits of this comparison."""
    echo(f"All {len(rows)} questions; those above come first among those on which the modes differ.")
    echo(f"  {'mode':<8}{'right':>8}{'references':>13}{'first token':>14}")
    for mode, total in summarize_modes(rows).items():
        right = f"{total['num_right']}/{total['num_questions']}"
        references = f"{total['num_right_references']}/{total['num_references']}"
        echo(f"  {mode:<8}{right:>8}{references:>13}{total['ttft_s'] * 1e3:>11.0f} ms")
    echo(
        '\nReferences: the paragraph with the answer says only "the company" or "she", and an earlier one says who.\n'
        "No mode can answer if retrieval misses the chunk. First token: median, KV in memory, one request at a time.\n"
        "The embedded model has about 1.3 million parameters and was trained on this made-up world only; elsewhere\n"
        "it answers nonsense. It is so small that its times are mostly overhead. For the savings on a real shape:\n"
        "`ragblend bench ttft --shape llama-200m`. For more questions: `ragblend chat --demo`."
    )


def _source_lines(row: dict[str, Any]) -> list[str]:
    """Return the gold sentences with their chunks, and the retrieved files; without gold sentences, every chunk."""
    sources = row["sources"]
    if not row["gold"]:
        return [f"[{number}] {_name(s)}: {_shorten(s['text'])}" for number, s in enumerate(sources, start=1)]
    lines = []
    for span in row["gold"]:
        places = [number for number, source in enumerate(sources, start=1) if _contains_span(source, span)]
        lines.append(f"{f'[{places[0]}]' if places else 'not retrieved,'} {span['source']}: ... {span['text']} ...")
    files = ", ".join(dict.fromkeys(_name(source) for source in sources))
    return [*lines, f"from {len(sources)} retrieved chunks of {files}"]


def _contains_span(source: dict[str, Any], span: dict[str, Any]) -> bool:
    same_file = _name(source) == span["source"]
    return same_file and bool(source["start"] <= span["start"] and span["end"] <= source["end"])


def _name(source: dict[str, Any]) -> str:
    return Path(source["source"]).name


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


# -- questions


def _ask_prepared(demo: Demo, question: Question) -> dict[str, Any]:
    """Answer a question of the corpus in every mode; add its gold answer, kind and gold spans."""
    row = ask_all_modes(demo, question.text)
    return {**row, "answer": question.answer, "kind": question.kind, "gold": list(question.gold)}


def _sources(hits: Sequence[SearchHit]) -> list[dict[str, Any]]:
    chunks = [hit.chunk for hit in hits]
    return [{"source": c.source, "start": c.start, "end": c.end, "text": c.text} for c in chunks]


def _is_right(row: dict[str, Any], mode: str) -> bool:
    return bool(row["modes"][mode]["answer"] == row["answer"])


def _sort_by_mode_difference(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, first those that full prefill and blend answer right and full reuse answers wrong."""

    def differs(row: dict[str, Any]) -> bool:
        return _is_right(row, "full") and _is_right(row, "blend") and not _is_right(row, "reuse")

    return sorted(rows, key=lambda row: not differs(row))


def _remove_outdated_documents(files: Sequence[Path], engine: TransformersEngine, index: ChunkIndex) -> None:
    """Remove records of an earlier version, or from another working folder; keep other documents."""
    here = {file.resolve() for file in files}
    for source in index.sources():
        path = Path(source).resolve()
        if path.parent.name == CORPUS and path not in here:
            remove_indexed_documents([source], engine, index)
