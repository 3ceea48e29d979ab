"""The demo in a folder that an earlier version left."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragblend.demo.show import CORPUS, RETRIEVAL, open_demo
from ragblend.errors import StoreMismatchError
from ragblend.index import open_index
from ragblend.prompt.types import Chunk


def old_index(folder: Path, source: Path) -> None:
    """An index of one document, whose chunks another tokenizer of the demo's model made."""
    with open_index(folder, "hashing", create=True, tokenizer="demo", tokenizer_fingerprint="old") as index:
        index.add_document(str(source), "1", [Chunk("Amber is a fossil resin.", str(source))])


def test_an_index_of_an_earlier_version_is_made_again(tmp_path):
    old_index(tmp_path, tmp_path / CORPUS / "gone.md")
    with open_demo(tmp_path) as demo:
        assert demo.report.num_documents == demo.index.num_documents > 10


def test_the_demo_retrieves_all_gold_sentences_of_nine_questions_in_ten(tmp_path):
    with open_demo(tmp_path) as demo:
        asked = [question for question in demo.corpus.questions if question.gold]
        found = 0
        for question in asked:
            texts = [hit.chunk.text for hit in demo.index.search(question.text, **RETRIEVAL)]
            found += all(any(span["text"] in text for text in texts) for span in question.gold)
    assert len(asked) > 100
    assert found / len(asked) >= 0.9


def test_an_index_with_documents_of_the_user_is_not_changed(tmp_path):
    old_index(tmp_path, tmp_path / "mine.md")
    with pytest.raises(StoreMismatchError, match="ingest again"), open_demo(tmp_path):
        pass
    with open_index(tmp_path) as index:
        assert index.num_documents == 1
