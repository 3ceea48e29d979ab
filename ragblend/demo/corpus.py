"""The sample corpus: a made-up company's records as Markdown files, and questions with gold answers and gold spans.

The files are in `records/`. The generator is at commit 19c4dfd: `python -m tools.demo_model.corpus`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.files.output import write_output

RECORDS = Path(__file__).parent / "records"
QUESTIONS_FILE = "questions.jsonl"
REFERENCE_KINDS = ("cross_ref", "two_hop_ref")
"""Kinds of questions that need an earlier chunk, which full reuse answers wrong."""


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """One document. Its title and first paragraph are one chunk; each other paragraph is a chunk."""

    filename: str
    markdown: str

    @property
    def chunks(self) -> tuple[str, ...]:
        """The file's chunks for a chunk size of one paragraph."""
        title, *paragraphs = self.markdown.strip().split("\n\n")
        return (f"{title}\n\n{paragraphs[0]}", *paragraphs[1:])


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `gold`: source, text, start and end of each sentence that answers it; offsets are in characters."""

    kind: str  # for example "cross_ref", see REFERENCE_KINDS
    text: str
    answer: str
    gold: tuple[dict[str, Any], ...]
    line: str  # the question's line in QUESTIONS_FILE


@dataclass(frozen=True, slots=True)
class Corpus:
    """Records and questions about them."""

    records: tuple[DemoDocument, ...]
    questions: tuple[Question, ...]

    def first_records(self, num_records: int) -> Corpus:
        """Return a corpus of the first `num_records` records, with the questions that they answer."""
        records = self.records[:num_records]
        text = "\n".join(record.markdown for record in records)
        return Corpus(records, tuple(asked for asked in self.questions if asked.gold and _contains_answer(text, asked)))

    def gold_chunks(self, question: Question) -> tuple[int, ...]:
        """Return the numbers of the chunks that answer `question`. The chunks of all records are numbered in order."""
        numbers, number = set(), 0
        for record in self.records:
            for chunk in record.chunks:
                start = record.markdown.index(chunk)
                for span in question.gold:
                    if span["source"] == record.filename and start <= span["start"] < start + len(chunk):
                        numbers.add(number)
                number += 1
        return tuple(sorted(numbers))

    def write(self, out: Path) -> None:
        """Write every record and the questions. Other files in `out` are kept."""
        for record in self.records:
            write_output(out / record.filename, record.markdown.encode(), "--dir DIR")
        lines = "".join(f"{question.line}\n" for question in self.questions)
        write_output(out / QUESTIONS_FILE, lines.encode(), "--dir DIR")


def sample_corpus() -> Corpus:
    """Return the sample corpus that is part of the package."""
    records = tuple(DemoDocument(path.name, path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.md")))
    lines = (RECORDS / QUESTIONS_FILE).read_text(encoding="utf-8").splitlines()
    return Corpus(records, tuple(_question(line) for line in lines))


def pick_questions_about(texts: Iterable[str], count: int, seed: int = 0) -> list[str]:
    """Return at most `count` questions of the sample corpus that `texts` answer, in random order.

    `ragblend calibrate` uses them for the embedded model, which cannot answer other questions.
    """
    text = "\n".join(texts)
    answerable = [question.text for question in sample_corpus().questions if _contains_answer(text, question)]
    return random.Random(seed).sample(answerable, min(count, len(answerable)))


def _question(line: str) -> Question:
    facts = json.loads(line)
    return Question(facts["kind"], facts["question"], facts["answer"], tuple(facts["gold"]), line)


def _contains_answer(text: str, question: Question) -> bool:
    return all(span["text"] in text for span in question.gold)
