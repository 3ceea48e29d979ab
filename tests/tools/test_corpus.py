"""The sample corpus: held-out, deterministic, and every gold span stands where it says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ragblend.chunker import Document, split
from ragblend.demo.show import CHUNK_TOKENS
from tools.demo_model.corpus import MAX_TOKENS, MIN_TOKENS, Corpus, build_corpus, write_corpus
from tools.demo_model.questions import KINDS
from tools.demo_model.tokenizer import pieces
from tools.demo_model.world import is_held_out, name_is_held_out

COMMITTED = Path(__file__).parents[2] / "ragblend" / "demo" / "records"


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


def test_the_committed_files_are_the_generated_ones(corpus: Corpus, tmp_path: Path) -> None:
    write_corpus(corpus, tmp_path)
    assert {path.name: path.read_text() for path in COMMITTED.iterdir()} == {
        path.name: path.read_text() for path in tmp_path.iterdir()
    }


def test_the_first_records_are_a_corpus_of_their_own(corpus: Corpus, tmp_path: Path) -> None:
    few = corpus.first(4)
    write_corpus(few, tmp_path)
    assert [record.filename for record in few.records] == [record.filename for record in corpus.records[:4]]
    lines = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert len(lines) > 12
    assert {line["kind"] for line in lines} >= {"one_hop", "cross_ref", "two_hop_ref"}
    assert all((tmp_path / span["source"]).exists() for line in lines for span in line["gold"])


def test_size_and_kinds(corpus: Corpus) -> None:
    assert 10 <= len(corpus.records) <= 20
    assert len(corpus.questions) >= 200
    assert {question.kind for question in corpus.questions} == set(KINDS)


def test_a_paragraph_is_one_chunk_long(corpus: Corpus) -> None:
    sizes = [len(pieces(" " + text)) for record in corpus.records for text in record.paragraphs]
    assert min(sizes) >= MIN_TOKENS
    assert max(sizes) <= MAX_TOKENS


def test_the_demo_cuts_records_into_their_paragraphs(corpus: Corpus) -> None:
    def count(text: str) -> int:
        return len(pieces(" " + " ".join(text.split())))

    for record in corpus.records:
        cut = split(Document(record.markdown, record.filename), count, CHUNK_TOKENS)
        assert tuple(chunk.text for chunk in cut) == record.chunks


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


def test_what_names_the_subject_stands_before_the_answer(corpus: Corpus) -> None:
    for question in corpus.questions:
        if question.kind == "cross_ref" or (question.kind == "one_hop" and len(corpus.gold(question)) == 2):
            naming, answer = corpus.gold(question)
            assert naming["source"] == answer["source"]
            assert naming["end"] <= answer["start"]
            assert question.subject.name.lower() in naming["text"].lower()


def test_answers_stand_in_the_last_gold_span(lines: list[dict]) -> None:
    for line in lines:
        if line["kind"] not in ("comparison", "not_stated"):
            assert line["answer"] in line["gold"][-1]["text"]
            assert line["sources"]


GOLDEN = "70fbf615598e3b89"
