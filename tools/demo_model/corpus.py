"""The sample corpus: a company's internal records as Markdown files, and questions with gold answers and gold spans.

`python -m tools.demo_model.corpus --out ragblend/demo/records` writes it. Every document has one subject, a title and
four to six paragraphs of 64 to 96 tokens; paragraphs come in pairs, and the second of a pair goes on about what the
first named ("The company makes lamps. She lives in Oston."), so that a chunk's meaning often stands in its neighbour.
All names, pairs and question phrasings are of the held-out split: training never saw them.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.demo_model.questions import KINDS, Question, all_questions
from tools.demo_model.stories import Fact, Plan, Story, Teller
from tools.demo_model.tokenizer import pieces
from tools.demo_model.world import FILLERS, SUBJECTS, Entity, Relation

SEED = 2026
MIN_TOKENS, MAX_TOKENS = 64, 96
SUBJECTS_OF_RECORDS = ("person",) * 2 + ("project",) * 4 + ("event",) * 3 + ("company",) * 7
RELATIONS_IN_USE = (
    "work", "home", "born", "role", "study", "base", "make", "found", "river", "land", "client", "site", "start",
    "place", "topic", "date",
)  # fmt: skip
"""Few relations, so that several values of one type compete in every retrieved context."""

WEIGHTS = {"company": {"person": 0.8, "company": 0.2}, "project": {"person": 0.6, "company": 0.4},
           "event": {"person": 0.8, "event": 0.2}, "person": {"person": 0.5, "company": 0.5}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """One document: its file name and paragraphs. The first paragraph stands below the title."""

    filename: str
    title: str
    paragraphs: tuple[str, ...]

    @property
    def markdown(self) -> str:
        """The file's text."""
        return "\n\n".join(self.chunks) + "\n"

    @property
    def chunks(self) -> tuple[str, ...]:
        """One text per paragraph, the title above the first: what a chunk size for one paragraph cuts the file into."""
        return (f"# {self.title}\n\n{self.paragraphs[0]}", *self.paragraphs[1:])


@dataclass(frozen=True, slots=True)
class Corpus:
    """Records and questions about them; `story` holds the same facts, one chunk per paragraph."""

    records: tuple[Record, ...]
    questions: tuple[Question, ...]
    story: Story

    def gold(self, question: Question) -> list[dict[str, Any]]:
        """Where the answer stands: source, sentence and its offsets in the file; first what names the subject."""
        spans = []
        for fact in question.facts:
            if fact.subject.name.lower() not in fact.sentence.lower():
                spans.append(self._span(fact.named_in, _naming_sentence(self.story, fact)))
            spans.append(self._span(fact.chunk, fact.sentence))
        return [span for index, span in enumerate(spans) if span not in spans[:index]]

    def first(self, num_records: int) -> Corpus:
        """The first records alone, with the questions that they answer and that ask about a name in them."""
        records = self.records[:num_records]
        num_chunks = sum(len(record.paragraphs) for record in records)
        text = " ".join(record.markdown for record in records).lower()
        questions = tuple(
            question
            for question in self.questions
            if question.subject.name.lower() in text and all(chunk < num_chunks for chunk in question.gold_chunks)
        )
        return Corpus(records, questions, self.story)

    def _span(self, chunk: int, sentence: str) -> dict[str, Any]:
        """Where `sentence` stands: in the paragraph that is `chunk`, or in the title above it."""
        record, number = [(record, n) for record in self.records for n, _ in enumerate(record.paragraphs)][chunk]
        paragraph = record.markdown.index(record.paragraphs[number])
        start = record.markdown.index(sentence, paragraph if sentence in record.paragraphs[number] else 0)
        return {"source": record.filename, "text": sentence, "start": start, "end": start + len(sentence)}


class _Recorder(Teller):
    """Tells about one document's subject and the people and places around it."""

    def __init__(self, rng: random.Random) -> None:
        allowed = {kind: [r for r in of if r.name in RELATIONS_IN_USE] for kind, of in SUBJECTS.items()}
        super().__init__(rng, Plan(allowed=allowed, plain=0.9, compound=0.12, inside=0.35, new=0.3, chain=0.9), "test")
        self.cast: list[Entity] = []
        self.focus: Entity | None = None  # what the present pair of paragraphs is about

    def record(self, kind: str, first_chunk: int) -> Record | None:
        """A document about a new subject, or None when the split has no name left."""
        self.plan = replace(self.plan, weights={kind: 1.0}, new=1.0)
        subject = super().some_entity()
        if subject is None:
            return None
        self.plan = replace(self.plan, weights=WEIGHTS[kind])
        self.cast, self.recent = [subject], {kind: (subject, first_chunk)}
        paragraphs = []
        for number in range(self.rng.choice((4, 4, 6))):
            refers = number % 2 == 1
            self.plan = replace(self.plan, cross=0.9 if refers else 0.0, inside=0.35 if refers else 0.0)
            if not refers:
                self.focus = subject if number == 0 else self.newcomer()
            paragraphs.append(self.paragraph(first_chunk + number))
            if refers:
                self.recent = {}
        told = {fact.chunk for fact in self.facts}
        if not told.issuperset(range(first_chunk, first_chunk + len(paragraphs))):  # nothing left to say somewhere
            self.facts = [fact for fact in self.facts if fact.chunk < first_chunk]
            return None
        title = subject.opening_name
        return Record(title.removeprefix("The ").lower().replace(" ", "-") + ".md", title, tuple(paragraphs))

    def paragraph(self, index: int) -> str:
        """Facts and fillers, 64 to 96 tokens."""
        sentences: list[str] = []
        while (count := len(pieces(" " + " ".join(sentences)))) < MIN_TOKENS:
            more: list[str] = []
            for _ in range(8 if count < MIN_TOKENS * 0.8 and self.rng.random() < 0.85 else 0):
                more = more or self.statement(index)
            sentences += more or [self.rng.choice([f for f in FILLERS if f not in sentences])]
        assert count <= MAX_TOKENS
        return " ".join(sentences)

    def newcomer(self) -> Entity | None:
        """Someone or something that the corpus has not named yet."""
        entity = super().some_entity()
        if entity is not None:
            self.cast.append(entity)
        return entity

    def some_entity(self) -> Entity | None:
        """What the paragraph is about first, then what it has named, then a newcomer."""
        if self.focus is not None and self.open_relations(self.focus) and self.rng.random() < 0.7:
            return self.focus
        others = [entity for entity in self.cast if self.open_relations(entity) and entity != self.focus]
        return self.rng.choice(others) if others and self.rng.random() < 0.9 else self.newcomer()

    def value(self, subject: Entity, relation: Relation) -> Entity | None:
        """As in any story; what it names joins the cast."""
        value = super().value(subject, relation)
        if value is not None and value.kind in SUBJECTS and value not in self.cast:
            self.cast.append(value)
        return value


def build_corpus(seed: int = SEED, per_kind: int = 32) -> Corpus:
    """The corpus of a seed: the same on every machine."""
    rng = random.Random(seed)
    recorder = _Recorder(rng)
    records: list[Record] = []
    for kind in SUBJECTS_OF_RECORDS:
        record = recorder.record(kind, sum(len(done.paragraphs) for done in records))
        if record is not None:
            records.append(record)
    chunks = [text for record in records for text in record.paragraphs]
    opens = [number == 0 for record in records for number, _ in enumerate(record.paragraphs)]
    story = Story(chunks, recorder.facts, recorder.plan.allowed, opens)
    asked = [
        q
        for q in all_questions(rng, story, "test", num_comparisons=40)
        if q.competing and _is_near(q, opens) and _is_topic(q, records)
    ]
    chosen: list[Question] = []
    for kind in KINDS:
        options = [question for question in asked if question.kind == kind]
        chosen += rng.sample(options, min(per_kind, len(options)))
    return Corpus(tuple(records), tuple(chosen), story)


def _is_near(question: Question, opens: list[bool]) -> bool:
    """Whether the gold paragraphs of a two-hop question stand in one document, at most two apart."""
    if len(question.gold_chunks) < 2 or question.kind == "comparison":
        return True
    first, last = question.gold_chunks[0], question.gold_chunks[-1]
    return last - first <= 2 and not any(opens[first + 1 : last + 1])


def _is_topic(question: Question, records: list[Record]) -> bool:
    """Whether the records around the answer name what is asked about more than once, so that a search can find it."""
    if question.kind == "not_stated":
        return True
    homes = [
        (record.title if number == 0 else "", text)
        for record in records
        for number, text in enumerate(record.paragraphs)
    ]
    asked = {fact.subject for fact in question.facts} if question.kind == "comparison" else {question.subject}
    gold = " ".join(part for chunk in question.gold_chunks for part in homes[chunk])
    return all(gold.lower().count(entity.name.lower()) > 1 for entity in asked)


def _naming_sentence(story: Story, fact: Fact) -> str:
    """The last sentence before the fact, in the chunk that names its subject, that has the name; else the title."""
    names = (fact.subject.name, fact.subject.opening_name)
    told = [other.sentence for other in story.facts if other.chunk == fact.named_in]
    if fact.named_in == fact.chunk:
        told = told[: told.index(fact.sentence)]
    return next((text for text in reversed(told) if any(name in text for name in names)), names[1])


def write_corpus(corpus: Corpus, out: Path) -> None:
    """Write every record and questions.jsonl; whatever else is in `out` stays."""
    out.mkdir(parents=True, exist_ok=True)
    for record in corpus.records:
        (out / record.filename).write_text(record.markdown, encoding="utf-8")
    lines = []
    for number, question in enumerate(corpus.questions):
        gold = corpus.gold(question)
        sources = sorted({span["source"] for span in gold})
        line = {"id": f"q{number:03d}", "question": question.text, "answer": question.answer, "kind": question.kind}
        lines.append(json.dumps({**line, "sources": sources, "gold": gold}))
    (out / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Write the corpus."""
    parser = argparse.ArgumentParser(description="Write the sample corpus and its questions.")
    parser.add_argument("--out", type=Path, default=Path("ragblend/demo/records"))
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    corpus = build_corpus(options.seed)
    write_corpus(corpus, options.out)
    print(f"{len(corpus.records)} records, {len(corpus.story.chunks)} paragraphs, {len(corpus.questions)} questions")


if __name__ == "__main__":
    main()
