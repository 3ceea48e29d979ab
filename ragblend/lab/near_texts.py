"""Comparison of stored texts with a prompt that contains them in another form, such as other letter case.

Compares words, so that letter case, white space and punctuation do not count. Works on strings alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

NUM_WORDS = 5
"""Words in a row that a text and a prompt must share. Shorter texts are not compared."""
LEAST_SHARE = 0.5
MAX_NEAR = 5
_EXCERPT_CHARS = 20  # on either side of a difference
_HAN_AND_KANA = "\u3040-\u30ff\u3400-\u9fff"  # written without spaces, so each character counts as a word
_WORD = re.compile(rf"[{_HAN_AND_KANA}]|[^\W_{_HAN_AND_KANA}]+")


class NearText(NamedTuple):
    """A stored `text` that has NUM_WORDS or more words in a row in common with the prompt.

    `share`: the share of the text's words that are in such common runs. `difference`: the first difference between text
    and prompt; "" if the prompt contains the text unchanged.
    """

    text: str
    share: float
    difference: str


_Word = tuple[str, int]
"""A word in lower case, and the place of its first character in the text."""


class _Candidate(NamedTuple):
    share: float
    text: str
    places: set[int]  # indices of the prompt's words that the text has
    anchor: tuple[int, int]  # characters of the text and of the prompt at which the longest shared part begins


def find_near_texts(
    texts: Iterable[str], prompt: str, is_matched: Callable[[str], bool] = lambda text: False
) -> list[NearText]:
    """Return at most MAX_NEAR texts that `prompt` contains in large part, sorted by their `share`, largest first.

    These are the texts with a `share` of LEAST_SHARE or more. If there are none, the text with the largest `share` is
    returned alone. Texts for which `is_matched` returns True are left out. A text is also left out if others match at
    least half of the prompt's words that it matches. These others are the texts before it in the result, and the texts
    that `is_matched` leaves out.
    """
    words = _words(prompt)
    place_of: dict[tuple[str, ...], int] = {}
    for place, run in enumerate(_runs(words)):
        place_of.setdefault(run, place)
    candidates: list[_Candidate] = []
    nearest: _Candidate | None = None  # of those below LEAST_SHARE
    for text in texts:
        each = _compare(text.strip(), words, place_of)
        if each is not None and each.share >= LEAST_SHARE:
            candidates.append(each)
        elif each is not None and (nearest is None or each.share > nearest.share):
            nearest = each
    if not candidates and nearest is not None:
        candidates = [nearest]
    matched = {each.text for each in candidates if is_matched(each.text)}
    near: list[NearText] = []
    covered: set[int] = set()
    for each in sorted(candidates, key=lambda each: (each.text not in matched, -each.share)):
        if len(each.places - covered) > len(each.places) / 2:
            covered |= each.places
            if each.text not in matched:
                near.append(NearText(each.text, each.share, _find_difference(each.text, prompt, *each.anchor)))
    return near[:MAX_NEAR]


def _compare(text: str, prompt_words: list[_Word], place_of: dict[tuple[str, ...], int]) -> _Candidate | None:
    """Return a text that has NUM_WORDS in a row in common with the prompt, else None."""
    words = _words(text)
    places = {start: place_of[run] for start, run in enumerate(_runs(words)) if run in place_of}
    if not places:
        return None
    shared = {start + offset for start in places for offset in range(NUM_WORDS)}
    distance = Counter(place - start for start, place in places.items()).most_common(1)[0][0]
    first = next(start for start, place in places.items() if place - start == distance)
    return _Candidate(
        len(shared) / len(words),
        text,
        {place + offset for place in places.values() for offset in range(NUM_WORDS)},
        (words[first][1], prompt_words[places[first]][1]),
    )


def _words(text: str) -> list[_Word]:
    return [(match.group().casefold(), match.start()) for match in _WORD.finditer(text)]


def _runs(words: list[_Word]) -> Iterable[tuple[str, ...]]:
    """Return every NUM_WORDS words in a row."""
    folded = [word for word, _ in words]
    return zip(*(folded[offset:] for offset in range(NUM_WORDS)), strict=False)


def _find_difference(text: str, prompt: str, start: int, place: int) -> str:
    """Return the first difference after `text[start:]` and `prompt[place:]` begin, else the last one before them."""
    if difference := _describe(text[start:], prompt[place:]):
        kind, stored, sent = difference
    elif difference := _describe(text[:start][::-1], prompt[:place][::-1]):
        kind, stored, sent = difference[0], difference[1][::-1], difference[2][::-1]
    else:
        return ""
    return f"{kind}: {sent!r} instead of {stored!r}"


def _describe(text: str, prompt: str) -> tuple[str, str, str] | None:
    """Return the kind of the first difference and excerpts of both; None if the prompt begins with the text."""
    letters = enumerate(zip(text, prompt, strict=False))
    same = next((place for place, (stored, sent) in letters if stored != sent), min(len(text), len(prompt)))
    if same == len(text):
        return None
    rest, sent_rest = text[same:], prompt[same:]
    kind = "other characters"
    if not sent_rest:
        kind = "the prompt has only a part"
    elif rest[0].casefold() == sent_rest[0].casefold():
        kind = "differs in letter case"
    elif rest[0].isspace() or sent_rest[0].isspace():
        is_same = rest.lstrip()[:1].casefold() == sent_rest.lstrip()[:1].casefold()
        kind = "differs in white space or line breaks" if is_same else kind
    begin, end = max(0, same - _EXCERPT_CHARS), same + _EXCERPT_CHARS
    return kind, text[begin:end], prompt[begin:end]
