"""Texts of any shape: work grows with the text, errors name the limits, and ordinary text is read as before.

The tests count what is looked at (characters counted, searched, copied, held), so that none depends on the clock.
"""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragblend.chunker import Document, split
from ragblend.corpus.documents import open_source, read_documents
from ragblend.corpus.folder_scan import scan_folders
from ragblend.corpus.loaders import FileReader
from ragblend.demo import WEIGHTS
from ragblend.errors import UnreadableDocumentError
from ragblend.index import open_index
from ragblend.ingestion.sync import ChunkerConfig, sync_index
from ragblend.prompt.render import Renderer

ROOT = Path(__file__).parents[1]


def by_four(text: str) -> int:
    """Like a tokenizer without merges: four characters a token."""
    return (len(text) + 3) // 4


# --- cutting ---


@pytest.mark.parametrize(
    ("text", "max_tokens", "times"),
    [
        ("a" * 200_000, 512, 4),
        ("data:;base64," + "QUJD" * 50_000, 512, 4),
        ("今日は天気が" * 30_000, 512, 4),
        ("。" * 200_000, 512, 4),
        (("see the picture: " + "x" * 30_000 + " and the next one ") * 20, 128, 6),
        ("The quick brown fox jumps over the lazy dog, again and again. " * 3000, 128, 6),
    ],
)
def test_any_text_is_counted_a_few_times_and_not_once_per_chunk(text, max_tokens, times):
    looked_at = 0

    def count(piece: str) -> int:
        nonlocal looked_at
        looked_at += len(piece)
        return by_four(piece)

    chunks = split(Document(text), count, max_tokens)
    assert "".join(chunk.text for chunk in chunks).replace(" ", "") == text.replace(" ", "")
    assert looked_at < times * len(text)


def test_short_words_cost_a_few_bytes_each_and_not_sixty():
    text = "a b " * 60_000
    tracemalloc.start()
    try:
        split(Document(text), by_four, 512)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 9 * len(text)  # the chunks are two of them


def demo_renderer() -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(WEIGHTS))


@pytest.mark.parametrize(
    ("max_tokens", "num_chunks", "digest"),
    [(48, 277, "d41209dfe4f21a10585d42896a185ad4"), (512, 27, "872450e0dfa36a368cda5d31ba866b3b")],
)
def test_chunk_edges_and_ids_of_this_repositorys_texts_are_unchanged(max_tokens, num_chunks, digest):
    """The keys of existing stores are made of them."""
    renderer, found, count = demo_renderer(), hashlib.sha256(), 0
    for path in [*sorted((ROOT / "ragblend" / "demo" / "records").glob("*.md")), ROOT / "LICENSE"]:
        for chunk in split(Document(path.read_text()), renderer.count_tokens, max_tokens):
            found.update(repr((path.name, chunk.start, chunk.end, renderer.chunk_ids(chunk.text))).encode())
            count += 1
    assert (count, found.hexdigest()[:32]) == (num_chunks, digest)


# --- limits ---


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.html", "a.log"])
def test_a_file_beyond_the_limit_is_named_with_the_setting(name, tmp_path):
    path = tmp_path / name
    path.write_text('{"text": "The ferry leaves at nine."}\n' * 40_000)
    with pytest.raises(UnreadableDocumentError, match=r"1\.4 MiB, more than the setting max_file_mib allows \(1\)"):
        open_source(str(path), 1)
    with pytest.raises(UnreadableDocumentError, match="`max_file_mib=2`"):
        open_source(str(path), 1)
    assert open_source(str(path), 2).digest == open_source(str(path), 0).digest


def test_ingestion_goes_on_behind_a_file_that_is_too_large(tmp_path):
    (tmp_path / "large.txt").write_text("word " * 300_000)
    (tmp_path / "small.txt").write_text("The mill stands by the river.")
    with open_index(tmp_path / "index", "hashing", create=True, tokenizer="t") as index:
        cut = ChunkerConfig(lambda document: split(document, by_four), "v")
        followed = sync_index(
            index,
            scan_folders([tmp_path], excluded=[tmp_path / "index"]),
            cut,
            lambda *_: None,
            reader=FileReader(max_file_mib=1),
        )
    assert [Path(source).name for source in followed.sources] == ["small.txt"]
    assert ["max_file_mib" in failure.reason for failure in followed.report.failures] == [True]


# --- JSON lines, one at a time ---


def _lines(path: Path, num_lines: int) -> Path:
    with path.open("w") as file:
        for number in range(num_lines):
            file.write(json.dumps({"text": f"Record {number}. " + "The mill stands by the river. " * 30}) + "\n")
    return path


def _peak_of_reading(path: Path) -> int:
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_source(str(path)).read().documents) > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_reading_json_lines_does_not_grow_with_the_file(tmp_path):
    small, large = _lines(tmp_path / "small.jsonl", 4000), _lines(tmp_path / "large.jsonl", 12_000)
    assert _peak_of_reading(large) < 1.2 * _peak_of_reading(small)


def test_documents_of_json_lines_are_indexed_as_they_come(tmp_path, monkeypatch):
    path, most = _lines(tmp_path / "a.jsonl", 400), 0
    with open_index(tmp_path / "index", "hashing", create=True, tokenizer="t") as index:
        embed = index.embed

        def counted(texts: Any, *known: Any) -> Any:
            nonlocal most
            most = max(most, len(texts))
            return embed(texts, *known)

        monkeypatch.setattr(index, "embed", counted)
        cut = ChunkerConfig(lambda document: split(document, by_four), "v")
        followed = sync_index(index, scan_folders([path]), cut, lambda *_: None)
        assert (len(followed.sources), index.num_documents) == (400, 400)
        assert most <= 80
        assert sync_index(index, scan_folders([path]), cut, lambda *_: None).report.num_unchanged == 400


_JSON_LINES = st.lists(
    st.sampled_from(
        ['"a"', '{"text": "b", "n": 1}', "", "  ", "{", '{"x": 1}', '{"ctxs": ["c", "d"]}', '"\\ud800"', "é\r"]
    ),
    max_size=12,
)


@given(lines=_JSON_LINES, mark=st.sampled_from(["", "\ufeff"]), ended=st.booleans())
def test_streamed_json_lines_are_read_as_those_in_memory(lines, mark, ended, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes((mark + "\n".join(lines) + "\n" * ended).encode())

    def outcome(read: Callable[[], Any]) -> Any:
        try:
            contents = read()
            return list(contents.documents), contents.failure, contents.unread
        except UnreadableDocumentError as error:
            return type(error), str(error)

    assert outcome(lambda: open_source(str(path)).read()) == outcome(
        lambda: read_documents(str(path), path.read_bytes())
    )


@pytest.mark.parametrize("data", [b'"a"\n\0\n', b'"' + b"\x01" * 900 + b'"\n', b'"\xc3'])
def test_json_lines_that_are_no_text_are_refused_before_the_first_document(data, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(UnreadableDocumentError) as plain:
        read_documents(str(path), data)
    with pytest.raises(UnreadableDocumentError) as streamed:
        next(iter(open_source(str(path)).read().documents))
    assert str(streamed.value) == str(plain.value)


def test_json_lines_that_change_while_they_are_read_are_an_error(tmp_path):
    path = _lines(tmp_path / "a.jsonl", 3)
    opened = open_source(str(path))
    _lines(path, 2)
    with pytest.raises(UnreadableDocumentError, match="changed while it was read"):
        list(opened.read().documents)
