"""Cleans the text of PDF pages as PDFium extracts it: ligatures, accents, hyphens at line ends.

Works on strings, in time linear in their lengths. Does not depend on a PDF library.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

_MAX_ODD_SHARE = 0.05  # of visible characters
_MAX_FEW_ODD = 2  # a picture's label of ten letters may hold one symbol
_MAX_GLYPH_NAME_SHARE = 0.3  # a page about fonts may name some
_ODD = frozenset({"Cc", "Cn", "Co", "Cs"})  # categories of Unicode
_LONE = re.compile(r"(?<![^ \n\t])[^ \n\t](?![^ \n\t])")
_GLYPH_NAMES = re.compile(r"/[gG]\d{1,5}\b|\(cid:\d{1,6}\)")
_CONTROLS = frozenset(map(chr, [*range(32), *range(0x7F, 0xA0)])) - {"\t", "\n"} | set("\u200b\u2060\ufeff\ufffe\uffff")
_MANY_LINE_BREAKS = re.compile(r"\n{3,}")

# A look-behind for the word before: a group would be tried from each of its letters.
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-\u2010\xad]\n(?=[^\W\d_])")
_WORD = re.compile(r"[^\W\d_]++")
_COMPOUND = re.compile(r"[^\W\d_]-[^\W\d_]")
_PUNCTUATION = ".,;:!?()[]{}\"'“”‘’„«»"
_MAX_WORD = 40
_CONJUNCTIONS = frozenset({"and", "or", "und", "oder", "bzw"})  # "Ein- und Ausgabe" keeps its hyphen

# Code points of Adobe's glyph list from before Unicode had these glyphs. Small capitals become small letters.
_ADOBE = {
    **{0xF700 + code: chr(code) for code in (*b"!$&?", *b"0123456789", *range(0x61, 0x7B), *range(0xE0, 0xF7), 0xF8)},
    **{0xF700 + code: chr(code) for code in range(0xF9, 0x100)},
    **dict(zip(range(0xF8E5, 0xF8EB), "‾⏐⎯®©™", strict=True)),
    **dict(zip(range(0xF8EB, 0xF8FF), "⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪⎮⎞⎟⎠⎤⎥⎦⎫⎬⎭", strict=True)),
    **dict(zip(range(0xF884, 0xF88A), "\u0e31\u0e34\u0e35\u0e36\u0e37\u0e47", strict=True)),
    **{0xF88A + at: chr(0x0E48 + at // 3) for at in range(15)},
    0xF899: "\u0e4d",
    0xF6BE: "ȷ",
}
_CHARACTERS = {
    # Questions are written without ligatures, and tokenizers cut words at them.
    **{ligature: unicodedata.normalize("NFKC", ligature) for ligature in "ﬀﬁﬂﬃﬄﬅﬆ"},
    **{chr(code): char for code, char in _ADOBE.items()},
    **dict.fromkeys("\uf06c\uf06e\uf076\uf0a7\uf0a8\uf0b7\uf0d8\uf0fc", "•"),  # of the fonts Symbol and Wingdings
}

_ACCENTS = dict(
    zip("¨´`ˆ˜ˇ˘˝˚¸˛˙", "\u0308\u0301\u0300\u0302\u0303\u030c\u0306\u030b\u030a\u0327\u0328\u0307", strict=True)
)
_VOWELS = "aeiouyAEIOUYıȷ"


def normalize_characters(text: str) -> str:
    """Return a page's text with "\\n" line breaks. Ligatures and known private-use characters become ordinary ones."""
    text = text.replace("\r\n", "\n").replace("\ufffe", "\xad\n")  # PDFium's mark of a hyphen at a line's end
    for char in _CHARACTERS.keys() & set(text):
        text = text.replace(char, _CHARACTERS[char])
    return text


def find_odd(text: str) -> set[str]:
    """Return the characters of a normalized text that are no letters: control, private and unassigned ones, U+FFFD."""
    return {char for char in set(text) if char == "\ufffd" or unicodedata.category(char) in _ODD} - set("\n\t")


def mark_lost(text: str) -> tuple[str, int]:
    """Return a page's text without odd characters (see `find_odd`), and their number.

    The font does not say which letters they are. U+FFFD replaces those beside a letter or digit, so that no word
    looks whole that is not.

    >>> mark_lost("The Federal O\\x03ce \\x01"), mark_lost("1st")
    (('The Federal O\ufffdce ', 2), ('1st', 0))
    """
    odd = "".join(find_odd(text))
    if not odd:
        return text, 0
    num_lost = sum(map(text.count, odd))
    odd = re.escape(odd)
    text = re.sub(rf"(?<=\w)[{odd}]|[{odd}](?=\w)", "\ufffd", text)
    return re.sub(f"(?!\ufffd)[{odd}]", "", text), num_lost


def is_garbage(text: str) -> bool:
    """Return True if over 5 % of `text` is control, private or unassigned characters, or over 30 % is glyph names.

    Up to two control, private or unassigned characters are accepted. A single one between white space does not count,
    because it is a bracket of a formula or a note of music.

    >>> is_garbage("The pump leaks."), is_garbage("\\x01\\x02\\x03 pump"), is_garbage("/g145/g144/g3 (cid:12)")
    (False, True, True)
    """
    num_visible = len(text) - sum(map(text.count, " \n\t"))
    if odd := find_odd(text):
        num_lone = sum(char in odd for char in _LONE.findall(text))
        if sum(map(text.count, odd)) - num_lone > max(_MAX_FEW_ODD, _MAX_ODD_SHARE * num_visible):
            return True
    num_in_names = sum(map(len, _GLYPH_NAMES.findall(text))) if "/g" in text or "/G" in text or "(cid:" in text else 0
    return num_in_names > _MAX_GLYPH_NAME_SHARE * num_visible


def remove_controls(text: str) -> str:
    """Return `text` without control characters, white space at both ends of lines, and repeated blank lines."""
    text = text.replace("\f", "\n")
    for char in _CONTROLS & set(text):
        text = text.replace(char, "")
    text = "\n".join(map(str.strip, text.split("\n"))).strip()
    return _MANY_LINE_BREAKS.sub("\n\n", text) if "\n\n\n" in text else text


def join_hyphens(pages: Sequence[str]) -> list[str]:
    """Join the words that a hyphen divides at a line's end. Return the changed `pages`.

    Before a capital letter, the hyphen and the line break stay. In two cases only the hyphen stays, unless the document
    also has the joined word: before a conjunction ("Ein- und Ausgabe"), and in a compound that the document also has
    within a line.

    >>> join_hyphens(["hyphen-\\nated, post-\\noffice\\nthe post-office", "Anglo-\\nSaxon"])
    ['hyphenated, post-office\\nthe post-office', 'Anglo-\\nSaxon']
    """
    if not any(_HYPHEN.search(page) for page in pages):
        return [page.replace("\xad\n", "-\n").replace("\xad", "") for page in pages]
    tokens = set[str]().union(*(page.lower().split() for page in pages))
    words = {token.strip(_PUNCTUATION) for token in tokens}
    compounds = set[str]()
    for token in filter(_COMPOUND.search, tokens):
        parts = _WORD.findall(token)
        compounds.update(f"{left}-{right}" for left, right in pairwise(parts))

    def join(match: re.Match[str]) -> str:
        text, start, end = match.string, match.start(), match.end()
        right = _WORD.match(text, end, end + _MAX_WORD)
        assert right is not None
        left = text[max(0, start - _MAX_WORD) : start]
        left = left[_start_of_last_word(left) :].lower()
        is_word, next_word = left + right[0].lower() in words, right[0]
        if not next_word[0].islower():
            return "-\n"
        if next_word in _CONJUNCTIONS and not is_word:
            return "- "
        return "-" if f"{left}-{next_word}" in compounds and not is_word else ""

    return [_HYPHEN.sub(join, page).replace("\xad\n", "-\n").replace("\xad", "") for page in pages]


def _start_of_last_word(text: str) -> int:
    at = len(text)
    while at and text[at - 1].isalpha():
        at -= 1
    return at


def compose_accents(pages: Sequence[str]) -> list[str]:
    """Return `pages` with separate accents joined to the letters after them ("Tank¨onyv" becomes "Tankönyv").

    TeX's older fonts separate them. An accent stays separate if the document has at least as many letters with it ("ö")
    as separate marks of it ("¨"). The document's fonts then have such letters, and the marks are quotation marks or
    apostrophes.
    """
    letters = set[str]().union(*pages)
    candidates = [accent for accent in _ACCENTS if accent in letters]
    if not candidates:
        return list(pages)
    text = "\n".join(pages)
    num_own = Counter[str]()  # letters with each accent, by accent
    for letter in letters:
        if len(parts := unicodedata.normalize("NFD", letter)) > 1:
            num_own[parts[-1]] += text.count(letter)
    accents = "".join(accent for accent in candidates if text.count(accent) > num_own[_ACCENTS[accent]])
    if not accents:
        return list(pages)
    are_written = any(accent in accents for accent in "´¨")  # a document with "ˆ" and "˜" alone is about formulas

    def compose(match: re.Match[str]) -> str:
        text, at, accent, letter = match.string, match.start(), match[0][0], match[0][1]
        is_in_word = at > 0 and text[at - 1].isalpha()
        if (
            (accent in "´`ˆ" and letter not in _VOWELS)
            or (accent in "`ˆ˜" and not is_in_word)
            or (accent in "ˆ˜" and not are_written)
        ):
            return match[0]
        written = unicodedata.normalize("NFC", {"ı": "i", "ȷ": "j"}.get(letter, letter) + _ACCENTS[accent])
        return written if len(written) == 1 else match[0]

    pattern = re.compile(f"[{accents}][^\\W\\d_]")
    return [pattern.sub(compose, page) for page in pages]
