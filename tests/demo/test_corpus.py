"""The sample corpus: held-out, deterministic, and every gold span stands where it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ragblend.demo.corpus import MAX_TOKENS, MIN_TOKENS, Corpus, build_corpus, write_corpus
from ragblend.demo.questions import KINDS
from ragblend.demo.tokenizer import pieces
from ragblend.demo.world import is_held_out, name_is_held_out

COMMITTED = Path(__file__).parents[2] / "data" / "demo-corpus"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus()


@pytest.fixture(scope="module")
def lines(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(corpus, directory)
    return [json.loads(line) for line in (directory / "questions.jsonl").read_text().splitlines()]


def test_the_corpus_is_pinned(corpus: Corpus) -> None:
    text = "\f".join(record.filename + record.markdown for record in corpus.records)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN


def test_the_committed_files_are_the_generated_ones(corpus: Corpus) -> None:
    assert {path.name: path.read_text() for path in COMMITTED.glob("*.md")} == {
        record.filename: record.markdown for record in corpus.records
    }


def test_size_and_kinds(corpus: Corpus) -> None:
    assert 10 <= len(corpus.records) <= 20
    assert len(corpus.questions) >= 200
    assert {question.kind for question in corpus.questions} == set(KINDS)


def test_a_paragraph_is_one_chunk_long(corpus: Corpus) -> None:
    sizes = [len(pieces(" " + text)) for record in corpus.records for text in record.paragraphs]
    assert min(sizes) >= MIN_TOKENS
    assert max(sizes) <= MAX_TOKENS


def test_training_never_saw_its_names_and_pairs(corpus: Corpus) -> None:
    facts = corpus.story.facts
    assert all(is_held_out(fact.subject.key, fact.value.key) for fact in facts)
    people = {fact.subject for fact in facts if fact.subject.kind in ("person", "event")}
    assert people
    assert all(map(name_is_held_out, people))


def test_gold_spans_stand_in_the_files(corpus: Corpus, lines: list[dict]) -> None:
    texts = {record.filename: record.markdown for record in corpus.records}
    spans = [span for line in lines for span in line["gold"]]
    assert len(spans) > 200
    assert all(texts[span["source"]][span["start"] : span["end"]] == span["text"] for span in spans)


def test_answers_stand_in_the_last_gold_span(lines: list[dict]) -> None:
    for line in lines:
        if line["kind"] not in ("comparison", "not_stated"):
            assert line["answer"] in line["gold"][-1]["text"]
            assert line["sources"]


GOLDEN = "70fbf615598e3b89"
