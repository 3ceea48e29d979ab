"""The sample corpus as it is shipped: every gold span is at its offsets, and parts of it are corpora."""

import json

from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.demo.corpus import sample_corpus
from ragblend.demo.show import CHUNK_TOKENS
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.prompt.render import Renderer


def test_every_gold_span_is_in_its_record_and_in_the_chunks_named():
    corpus = sample_corpus()
    texts = {record.filename: record.markdown for record in corpus.records}
    chunks = [chunk for record in corpus.records for chunk in record.chunks]
    assert len(corpus.records) > 10
    assert len(corpus.questions) > 200
    for question in corpus.questions:
        gold = corpus.gold_chunks(question)
        assert bool(gold) == bool(question.gold)
        for span in question.gold:
            assert texts[span["source"]][span["start"] : span["end"]] == span["text"]
            assert any(span["text"] in chunks[number] for number in gold)
        if question.kind not in ("comparison", "not_stated"):
            assert question.answer in question.gold[-1]["text"]


def test_the_first_records_are_a_complete_corpus(tmp_path):
    few = sample_corpus().first_records(4)
    few.write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert len(lines) > 12
    assert len(list(tmp_path.glob("*.md"))) == 4
    assert all((tmp_path / span["source"]).exists() for line in lines for span in line["gold"])


def test_the_demo_cuts_records_into_their_paragraphs():
    count = Renderer(load_tokenizer("demo")[0]).count_tokens
    for record in sample_corpus().records:
        cut = split(Document(record.markdown, record.filename), count, CHUNK_TOKENS)
        assert tuple(chunk.text for chunk in cut) == record.chunks
