"""Position at which a full chunk is cut: the last of the strongest gaps in its second half.

Works on characters, graphemes and the ends of words. Does not depend on tokens. Read `find_best_cut` first.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import regex

from ragblend.corpus.layout import Layout, find_row_ends_between

# Words, and the runs between sentence marks of scripts that put no space after a sentence.
_WORD = re.compile(r"[^\s。！？]+[。！？]*|[。！？]+")
_NO_BLANK = re.compile(r"\S")
# A grapheme is what readers take for one character: a letter with its marks, an emoji of several characters.
_GRAPHEME = regex.compile(r"\X")
_REST_OF_GRAPHEME = regex.compile(r"[\p{GCB=Extend}\p{GCB=SpacingMark}\p{GCB=ZWJ}]")  # never begins a grapheme
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’)\]»]*$")
_ABBREVIATION = re.compile(r"^\W*(?:\w|mr|mrs|ms|dr|st|prof|jr|sr|no|vs|fig|e\.g|i\.e|cf|al)\.$", re.IGNORECASE)

# Share of a chunk. After one inserted row, more than a tenth of the chunks changed in 1 of 360 tables; with .5 in 1 of
# 40, and in every second table whose rows take half a chunk.
_ROWS_FROM = 0.4
_MIN_CHUNKS = 3  # size of a table that is cut by its rows' content, which gives a quarter more chunks

# Strengths of gaps, weakest first. A cut at one of the first four separates what belongs together.
_IN_ROW, _AFTER_HEADING, _AT_CODE_LINE, _AT_CODE_PARAGRAPH, _AT_WORD, _AT_LINE, _AT_SENTENCE, _AT_PARAGRAPH = range(8)


def find_word_ends(text: str) -> array[int]:
    """Return the end offset of each word. No word ends inside a grapheme, except before or after whitespace."""
    ends = (match.end() for match in _WORD.finditer(text))
    # One number per word: a text of short words would otherwise take many times its size in memory.
    return array("I" if len(text) < 1 << 32 else "Q", (end for end in ends if not _REST_OF_GRAPHEME.match(text, end)))


def find_grapheme_ends(text: str, start: int, end: int) -> list[int]:
    """Return the ends of the graphemes that lie in `text[start:end]`. A grapheme begins at `start`."""
    # The character at `end` decides whether the last grapheme ends there. Later ones have no influence.
    ends = [match.end() for match in _GRAPHEME.finditer(text, start, min(end + 1, len(text)))]
    return ends[: bisect_right(ends, end)]


def start_of_word(text: str, ends: Sequence[int], index: int) -> int:
    """Return the offset at which word `index` begins; `len(text)` after the last word. `ends`: ends of the words."""
    match = _NO_BLANK.search(text, ends[index - 1] if index else 0)
    return match.start() if match else len(text)


def _strength(text: str, start: int, end: int, after: int, layout: Layout) -> int:
    """Return the strength of the gap between a word [start, end) and the next word at `after`; stronger is better."""
    gap = text[end:after]
    num_breaks = gap.count("\n")
    if layout.headings and layout.headings.find(end):
        return _AFTER_HEADING if num_breaks else _IN_ROW
    if layout.code and (code := layout.code.find(end)) is not None and end < code[1]:
        return _AT_CODE_PARAGRAPH if num_breaks > 1 else _AT_CODE_LINE if num_breaks else _IN_ROW
    if num_breaks > 1 or "\f" in gap:
        return _AT_PARAGRAPH
    if layout.tables and layout.tables.find(end) is not None:
        return _IN_ROW if not num_breaks else _AFTER_HEADING if layout.table_headers.find(end) else _AT_LINE
    word = text[max(start, end - 16) : end]
    if _SENTENCE_END.search(word) and not _ABBREVIATION.match(word):
        return _AT_SENTENCE
    return _AT_LINE if num_breaks else _AT_WORD


def find_best_cut(text: str, ends: Sequence[int], first: int, last: int, start: int, layout: Layout) -> int:
    """Find the end of the chunk that begins at offset `start`. Return the index in `ends` of the chunk's last word.

    `ends`: the end offset of each word. The words `first` to `last` fit into the chunk.

    - In general the chunk ends at the strongest gap between words in its second half (see `_strength`). If several gaps
      are equally strong, the chunk ends at the last of them.
    - Gaps after a heading, inside a code block or inside a table row are weak. If the second half has only weak gaps,
      the chunk ends at the end of a line, sentence or paragraph in its second quarter, if there is one. A code block
      that is larger than the chunk is cut in any case.
    - A chunk of uniform rows of records ends in its last three fifths, before the row with the lowest hash. An inserted
      row therefore changes few chunks.
    """
    size = ends[last] - start
    middle = bisect_right(ends, start + size // 2, first, last)
    table = layout.tables.find(ends[last])
    is_short = table is not None and table[1] - table[0] < _MIN_CHUNKS * size
    may_be_rows = not is_short and not layout.code.overlaps(ends[middle], ends[last])
    if may_be_rows and (rows := find_row_ends_between(text, start, start + round(_ROWS_FROM * size), ends[last])):
        return bisect_left(ends, min(rows, key=lambda row: (row.rank, -row.offset)).offset, first, last)
    best, strength = _strongest_gap(text, ends, middle, last, layout)
    if strength < _AT_WORD and middle > first:
        code = layout.code.find(ends[best])
        if code is None or code[1] - code[0] <= size:  # a larger code block is cut in any case
            earlier = bisect_right(ends, start + size // 4, first, middle)
            other, other_strength = _strongest_gap(text, ends, earlier, middle - 1, layout)
            if other_strength >= _AT_LINE:
                return other
    return best


def _strongest_gap(text: str, ends: Sequence[int], first: int, last: int, layout: Layout) -> tuple[int, int]:
    """Return the last of the strongest gaps after the words `first` to `last`, and its strength, or (`last`, -1)."""
    best, strongest = last, -1
    word, word_start = first, start_of_word(text, ends, first)
    while word <= last:
        after = start_of_word(text, ends, word + 1)
        strength = _strength(text, word_start, ends[word], after, layout)
        if strength >= strongest:
            best, strongest = word, strength
        word, word_start = word + 1, after
    return best, strongest
