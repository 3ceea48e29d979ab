"""Where `split` cuts: graphemes, code and rows stay whole, headings stay with their text, a row more changes little."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from itertools import accumulate, chain
from random import Random

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.corpus.readers.types import Mark
from ragblend.prompt.types import Chunk


def count_words(text: str) -> int:
    return len(text.split())


def cut(text: str, max_tokens: int, marks: tuple[Mark, ...] = ()) -> list[Chunk]:
    return split(Document(text, marks=marks), count_words, max_tokens)


def texts_of(text: str, max_tokens: int, marks: tuple[Mark, ...] = ()) -> list[str]:
    return [chunk.text for chunk in cut(text, max_tokens, marks)]


# --- graphemes ---

# Written out, so that what a grapheme is does not come from the library that the chunker asks.
GRAPHEMES = {
    "Thai": ["ป", "ร", "ะ", "น้ำ", "ที่", "ชื่", "กำ"],
    "Devanagari": ["हि", "न्दी", "श्री", "क्ष", "त्रि", "क", "भा"],
    "Hangul jamo": ["\u1112\u1161\u11ab", "\u1100\u116e\u11a8", "\u110b\u1165"],
    "emoji": ["👨\u200d👩\u200d👧\u200d👦", "👩🏽\u200d🚀", "🏳\ufe0f\u200d🌈", "1\ufe0f\u20e3"],
    "flags": ["🇩🇪", "🇫🇷", "🇮🇹"],
    "combining marks": ["a\u0301", "o\u0302\u0323", "x", "。\ufe00"],
}


def count_bytes(text: str) -> int:
    return len(text.encode())


def count_characters(text: str) -> int:
    return len(text)


def count_demo_tokens(text: str) -> int:
    return len(_demo_tokenizer().encode(text, add_special_tokens=False).ids)


@cache
def _demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(files("ragblend") / "demo" / "weights" / "tokenizer.json"))


@pytest.mark.parametrize("count", [count_bytes, count_characters, count_demo_tokens])
@pytest.mark.parametrize("kind", GRAPHEMES)
@pytest.mark.parametrize("max_tokens", [32, 47])
def test_a_text_without_spaces_is_cut_between_graphemes(kind, count, max_tokens):
    graphemes = GRAPHEMES[kind] * 30
    chunks = split(Document("".join(graphemes)), count, max_tokens)
    assert len(chunks) > 2
    assert {chunk.end for chunk in chunks} <= set(accumulate(map(len, graphemes)))
    assert all(count(chunk.text) <= max_tokens for chunk in chunks)


def test_a_grapheme_that_alone_exceeds_the_budget_is_cut():
    family = GRAPHEMES["emoji"][0]
    assert [chunk.text for chunk in split(Document(f"ab{family}c"), count_bytes, 16)] == [
        "ab", family[:4], f"{family[4:]}c"
    ]  # fmt: skip


PIECES = [*chain.from_iterable(GRAPHEMES.values()), "\u0301", "\u200d", "\u0600", "。", " ", "\n"]


@given(text=st.lists(st.sampled_from(PIECES)).map("".join), max_tokens=st.integers(25, 60))
def test_a_chunk_ends_with_a_grapheme_or_before_whitespace(text, max_tokens):
    ends = {match.end() for match in regex.finditer(r"\X", text)}
    longest = max(map(count_bytes, regex.findall(r"\X", text)), default=0)
    for chunk in split(Document(text), count_bytes, max(max_tokens, longest)):
        assert chunk.end in ends or text[chunk.end].isspace()


# --- headings ---

INTRO, BODY = "one two three four.", "Thirty days a year are paid."


def test_a_chunk_does_not_end_on_the_heading_of_the_next():
    heading = "## Leave\n\n### Days"
    assert texts_of(f"{INTRO}\n\n{heading}\n\n{BODY}", 8) == [INTRO, f"{heading}\n\nThirty days a year", "are paid."]


@pytest.mark.parametrize("heading", ["Leave of absence", "Leave\n====="])
def test_a_marked_heading_is_one_without_any_sign_in_the_text(heading):
    text = f"{INTRO}\n\n{heading}\n\n{BODY}"
    mark = Mark(text.index("Leave"), "heading", "Leave", 2)
    size = len(f"{INTRO} {heading}".split())
    assert texts_of(text, size)[0] == f"{INTRO}\n\n{heading}"
    assert texts_of(text, size, (mark,))[0] == INTRO


def test_a_heading_in_the_first_half_may_move_to_the_next_chunk():
    heading = "## a heading of a few more words"
    assert texts_of(f"{INTRO}\n\n{heading}\n\n{'word ' * 40}", 12)[0] == INTRO


def test_comment_lines_of_source_code_are_no_headings():
    code = "# one two three\n# four five six\n# seven eight\nx = 1"
    assert texts_of(code, 9) == ["# one two three\n# four five six", "# seven eight\nx = 1"]


# --- code ---


@pytest.mark.parametrize("fence", ["```", "~~~~"])
@pytest.mark.parametrize("num_before", range(1, 8))
def test_a_code_block_that_fits_is_not_cut(fence, num_before):
    code = f"{fence}python\n" + "\n\n".join(f"x = {n}." for n in range(5)) + f"\n{fence}"
    around = "\n\n".join(["The code is here."] * num_before)
    chunks = texts_of(f"{around}\n\n{code}\n\n{around}", 24)
    assert num_before * 4 < 6 or any(code in chunk for chunk in chunks)  # a quarter full is too little


def test_a_code_block_larger_than_a_chunk_is_cut_at_blank_lines():
    blocks = [f"{name} of_it():\n    a = 1.\n    return a" for name in "abcdefghij"]
    chunks = texts_of("```\n" + "\n\n".join(blocks) + "\n```", 20)
    assert len(chunks) > 3
    assert "\n\n".join(chunks) == "```\n" + "\n\n".join(blocks) + "\n```"


# --- tables ---

ROWS = [f"Wood duck {n}. | Ponds and lakes. Swamps. | {n} eggs" for n in range(40)]


def test_rows_stay_whole_and_a_table_that_goes_on_repeats_its_header():
    text = "Ducks.\n\nName | Home | Eggs\n" + "\n".join(ROWS) + "\n\nThe end of it."
    first, *others = cut(text, 60)
    assert first.text.startswith("Ducks.\n\nName | Home | Eggs\nWood duck 0.")
    assert "verbatim" not in first.metadata
    for chunk in others:
        assert chunk.text == f"Name | Home | Eggs\n{text[chunk.start : chunk.end]}"
        assert (chunk.metadata["verbatim"], chunk.metadata["num_tokens"]) == (False, count_words(chunk.text))
        assert count_words(chunk.text) <= 60
        assert set(chunk.text.split("\n")) <= {"Name | Home | Eggs", *ROWS, "", "The end of it."}


def test_a_markdown_table_repeats_the_rule_below_its_header():
    header = "| Name | 2026 |\n| --- | :---: |"
    for chunk in cut("\n".join([header, *(f"| {n} | {n} |" for n in range(60))]), 60)[1:]:
        assert chunk.text.startswith(f"{header}\n| ")


@pytest.mark.parametrize(
    "first_row",
    [
        "2026-03-01 08:00:00 | INFO | started it",  # a log has no header
        "duck 1 | Ponds | 1 eggs",  # like the rows below
        "Name " + "of each duck " * 6 + "| Home | Eggs",  # more than a quarter of the budget
    ],
)
def test_a_row_that_is_no_header_or_too_long_is_not_repeated(first_row):
    text = "\n".join([first_row, *(f"duck {n} | Ponds | {n} eggs" for n in range(30))])
    chunks = cut(text, 30)
    assert len(chunks) > 5
    assert all(chunk.text == text[chunk.start : chunk.end] for chunk in chunks)


def test_each_part_of_a_row_longer_than_a_chunk_has_the_header():
    chunks = texts_of("Name | Home\nDuck | " + "pond " * 50, 20)
    assert chunks[0].startswith("Name | Home\nDuck | pond")
    assert all(chunk.startswith("Name | Home\npond") for chunk in chunks[1:])
    assert sum(chunk.count("pond") for chunk in chunks) == 50


def test_text_behind_a_table_has_no_header():
    text = "Name | Home\nDuck | Pond\n\n" + "word " * 60
    assert all("Name" not in chunk for chunk in texts_of(text, 20)[1:])


# --- rows that are put in ---


def make_rows(kind: str, count: int) -> list[str]:
    rng = Random(kind)
    words = ["oak", "elm", "ash", "fir", "yew", "box", "bay", "fig", "ivy", "nut", "oat", "pea", "rye", "sow"]
    form = {
        "csv": "id: {n}; name: {a} {b}; note: {c}.",
        "cells": "{n} | {a} | {c}. {b}",
        "log": "2026-03-01T10:{m:02d}:{s:02d}Z {a} {c}.",
        "json": "[{n}].name: {a}\n[{n}].note: {c}",
    }[kind]
    rows = []
    for n in range(count):
        a, b, *c = rng.choices(words, k=rng.randint(4, 14))
        rows.append(form.format(n=n, m=n // 60 % 60, s=n % 60, a=a, b=b, c=" ".join(c)))
    return rows


@pytest.mark.parametrize("place", ["top", "middle"])
@pytest.mark.parametrize(
    ("kind", "separator", "header"),
    [("csv", "\n\n", ""), ("cells", "\n", "Number | Tree | Note\n"), ("log", "\n", ""), ("json", "\n\n", "")],
)
def test_a_row_more_changes_a_tenth_of_the_chunks_at_most(kind, separator, header, place):
    *rows, extra = make_rows(kind, 901)
    at = 0 if place == "top" else 450
    longer = [*rows[:at], extra, *rows[at:]]
    before, after = (texts_of(header + separator.join(each), 150) for each in (rows, longer))
    assert len(before) > 60
    assert len(set(after) - set(before)) <= 0.1 * len(after)
    assert {row for chunk in after for row in chunk.split(separator)} >= set(longer)  # no row is cut


def test_equal_rows_are_cut_as_late_as_the_budget_allows():
    assert [chunk.count("a: b") for chunk in texts_of("a: b\n\n" * 100, 20)] == [10] * 10


def test_paragraphs_of_prose_are_cut_at_the_last_that_fits():
    starts = ["The", "A", "In", "When", "It", "But", "As", "For", "Each", "No", "One", "Some"]
    paragraphs = [f"{start} {'word ' * 5}end." for start in starts]
    assert texts_of("\n\n".join(paragraphs), 28) == ["\n\n".join(paragraphs[n : n + 4]) for n in (0, 4, 8)]
