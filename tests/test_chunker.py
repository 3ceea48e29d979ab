"""Reading files and cutting them: nothing is lost, no chunk exceeds its budget, bad files are named."""

from __future__ import annotations

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragblend.chunker import Document, adapt_splitter, get_splitter_version, split
from ragblend.errors import UsageError


def count_words(text: str) -> int:
    return len(text.split())


def count_bytes(text: str) -> int:
    return len(text.encode())


def count_pieces(text: str) -> int:
    """Like a subword tokenizer: words in pieces of four characters, marks alone."""
    return sum(-(-len(word) // 4) for word in re.findall(r"\w+|[^\w\s]", text))


def assert_lossless(document, chunks):
    cursor = 0
    for chunk in chunks:
        text = document.text[chunk.start : chunk.end]
        if chunk.metadata.get("verbatim", True):
            assert text == chunk.text
        else:  # a table that goes on: its header row is repeated
            header = chunk.text.removesuffix(text)
            assert header.endswith("\n")
            assert header.strip() in document.text[:cursor]
        assert chunk.text == chunk.text.strip() != ""
        assert document.text[cursor : chunk.start].strip() == ""
        cursor = chunk.end
    assert document.text[cursor:].strip() == ""


# --- splitting ---

PROSE = st.lists(
    st.sampled_from(
        ["cat", "a", "Extraordinarily", "3.14", "dr.", "end.", "why?", "\n", "\n\n", "\t", "日本語。", "née", "🙂",
         "\n# Head\n", "\n```\n", "\n~~~", "|", "\nrow |", "\n|--|--|\n", "\nName | Home\n", "\nkey: value", "---"]
    ),
    max_size=80,
).map(" ".join)  # fmt: skip


@given(text=st.one_of(st.text(max_size=300), PROSE), max_tokens=st.integers(4, 40))
@pytest.mark.parametrize("count", [count_bytes, count_pieces])
def test_split_loses_nothing_and_respects_the_budget(count, text, max_tokens):
    document = Document(text, "doc.txt", {"title": "T"})
    chunks = split(document, count, max_tokens)
    assert_lossless(document, chunks)
    for chunk in chunks:
        assert count(chunk.text) <= max_tokens
        facts = {name: value for name, value in chunk.metadata.items() if name != "verbatim"}
        assert (chunk.source, facts) == ("doc.txt", {"title": "T", "num_tokens": count(chunk.text)})


@given(text=PROSE, max_tokens=st.integers(1, 9), salt=st.integers(0, 99))
def test_budget_holds_for_a_counter_that_is_not_monotone(text, max_tokens, salt):
    def count(piece: str) -> int:  # a longer text may have fewer tokens; one character always fits
        return 1 if len(piece) == 1 else max(1, len(piece) // 3 + (len(piece) * 7 + salt) % 5 - 2)

    document = Document(text)
    chunks = split(document, count, max_tokens)
    assert_lossless(document, chunks)
    assert all(count(chunk.text) <= max_tokens for chunk in chunks)


@given(num_words=st.integers(1, 400), max_tokens=st.integers(2, 64))
def test_chunks_are_at_least_half_full(num_words, max_tokens):
    chunks = split(Document("word " * num_words), count_words, max_tokens)
    assert all(count_words(chunk.text) >= max_tokens // 2 for chunk in chunks[:-1])


def test_cuts_prefer_paragraphs_then_sentences_then_lines_then_words():
    def texts(text: str, max_tokens: int) -> list[str]:
        return [chunk.text for chunk in split(Document(text), count_words, max_tokens)]

    assert texts("a b c d.\n\ne f. g h i j", 6) == ["a b c d.", "e f. g h i j"]
    assert texts("a b cat. d e f g h", 5) == ["a b cat.", "d e f g h"]
    assert texts("a b c\nd e f g h", 5) == ["a b c", "d e f g h"]
    assert texts("a b c d e f g", 5) == ["a b c d e", "f g"]
    assert texts("So says Dr. Who in York", 4) == ["So says Dr. Who", "in York"]
    without_spaces = split(Document("一二三四。五六七八。九十"), len, 8)
    assert [chunk.text for chunk in without_spaces] == ["一二三四。", "五六七八。九十"]


def test_a_character_that_exceeds_the_budget_is_refused_with_its_name():
    with pytest.raises(UsageError, match="chunk size is 3 tokens, but '🙂'"):
        split(Document("a 🙂", "smile.txt"), count_bytes, 3)
    with pytest.raises(UsageError, match="choose 1 or more"):
        split(Document("a"), count_words, 0)


# --- other people's splitters ---


def test_langchain_splitters_plug_in():
    splitters = pytest.importorskip("langchain_text_splitters")
    document = Document("alpha beta. " * 60 + "\n\n" + "gamma delta. " * 60, "doc.md", {"title": "T"})
    chunks = adapt_splitter(splitters.RecursiveCharacterTextSplitter(chunk_size=200, chunk_overlap=0))(document)
    assert_lossless(document, chunks)
    assert chunks[0].source == "doc.md"
    assert chunks[0].metadata == {"title": "T"}
    overlapping = splitters.RecursiveCharacterTextSplitter(chunk_size=200, chunk_overlap=40, add_start_index=True)
    for chunk in adapt_splitter(overlapping)(document):
        assert document.text[chunk.start : chunk.end] == chunk.text
    by_header = adapt_splitter(splitters.MarkdownHeaderTextSplitter([("#", "part")]))(
        Document("# One\n\nfirst\n\nsecond")
    )
    assert [chunk.metadata["part"] for chunk in by_header] == ["One"]


def test_llamaindex_parsers_plug_in():
    parsers = pytest.importorskip("llama_index.core.node_parser")
    document = Document("Alpha is beta. Gamma is delta. " * 40, "doc.txt", {"title": "T"})
    for parser in (
        parsers.TokenTextSplitter(chunk_size=40, chunk_overlap=0, tokenizer=str.split),
        parsers.SentenceSplitter(chunk_size=40, chunk_overlap=0, tokenizer=str.split),
        parsers.MarkdownNodeParser(),
        parsers.SentenceWindowNodeParser.from_defaults(sentence_splitter=lambda text: re.findall(r"[^.]+\.", text)),
    ):
        chunks = adapt_splitter(parser)(document)
        assert_lossless(document, chunks)
        assert all(chunk.source == "doc.txt" and chunk.metadata["title"] == "T" for chunk in chunks)


def test_a_splitter_with_other_settings_is_another_one():
    splitters = pytest.importorskip("langchain_text_splitters")
    make = partial(splitters.CharacterTextSplitter, separator="\n\n", chunk_overlap=0)
    one, other, same = (get_splitter_version(adapt_splitter(make(chunk_size=size))) for size in (30, 60, 30))
    assert one == same != other
    assert "CharacterTextSplitter" in one


def test_a_piece_the_splitter_rewrote_is_marked_not_verbatim():
    class Shouting:
        def split_text(self, text: str) -> list[str]:
            return [text[:5], text[5:].upper()]

    first, second = adapt_splitter(Shouting())(Document("hello world", "a"))
    assert (first.start, first.end, "verbatim" in first.metadata) == (0, 5, False)
    assert (second.text, second.start, second.end, second.metadata["verbatim"]) == ("WORLD", 1, 1, False)


def test_our_own_split_is_a_splitter_and_a_stranger_is_refused():
    ours = adapt_splitter(partial(split, count_tokens=count_words, chunk_size=2))
    assert [chunk.text for chunk in ours(Document("a b c"))] == ["a b", "c"]
    with pytest.raises(UsageError, match="int is no splitter"):
        adapt_splitter(7)


def test_equal_content_has_equal_hash_and_metadata_counts():
    assert Document("x", "a").content_hash == Document("x", "b").content_hash
    assert Document("x", "a", {"t": 1}).content_hash != Document("x", "a").content_hash
