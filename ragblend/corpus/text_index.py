"""Known texts by how they begin: which of them start at a place of a longer text. Knows strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

ANCHOR_CHARS = 24
"""Texts are looked up by their first characters."""


class TextIndex:
    """Known texts by their first characters; says which begin at a place of a longer text. Not safe between threads.

    A place costs a look-up and, where texts share their first characters, a binary search among those.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._by_anchor: dict[str, _SameAnchor] = {}
        self._short: dict[int, set[str]] = {}  # by length
        self._num_texts = 0
        for text in texts:
            self.add(text)

    def __len__(self) -> int:
        return self._num_texts

    def __contains__(self, text: str) -> bool:
        group = self._by_anchor.get(text[:ANCHOR_CHARS])
        return text in (group.texts if group else self._short.get(len(text), ()))

    def add(self, text: str) -> None:
        """Know a stripped, non-empty text; twice is once."""
        if text in self:
            return
        self._num_texts += 1
        if len(text) < ANCHOR_CHARS:
            self._short.setdefault(len(text), set()).add(text)
        else:
            group = self._by_anchor.setdefault(text[:ANCHOR_CHARS], _SameAnchor())
            group.texts.add(text)
            group.is_ordered = False

    def discard(self, text: str) -> None:
        """Forget a text, if it is known."""
        if text not in self:
            return
        self._num_texts -= 1
        if len(text) < ANCHOR_CHARS:
            self._short[len(text)].remove(text)
        else:
            group = self._by_anchor[text[:ANCHOR_CHARS]]
            group.texts.remove(text)
            if not group.texts:
                del self._by_anchor[text[:ANCHOR_CHARS]]

    def starting_at(self, text: str, place: int) -> Iterator[str]:
        """The known texts that begin at `place` of `text`, the longest first.

        >>> index = TextIndex(["The first chunk is here, long enough.", "The first chunk is here,", "The"])
        >>> list(index.starting_at("> The first chunk is here, you see?", 2))
        ['The first chunk is here,', 'The']
        """
        group = self._by_anchor.get(text[place : place + ANCHOR_CHARS])
        if group is not None:
            yield from group.starting_at(text, place)
        for length in sorted(self._short, reverse=True):
            candidate = text[place : place + length]
            if candidate in self._short[length]:
                yield candidate


class _SameAnchor:
    """Texts that begin alike. Put in order at the first search after one was added, each with the longest other that it
    begins with; one that was removed stays in that order until then, and is passed over."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.is_ordered = False

    def starting_at(self, text: str, place: int) -> Iterator[str]:
        if not self.is_ordered:
            self._put_in_order()
        # Whatever `text` begins with at `place` is the text sorted just before it, or one that that begins with.
        following = bisect_right(self._sorted, text[place : place + self._longest])
        known = self._sorted[following - 1] if following else None
        while known is not None:
            if known in self.texts and text.startswith(known, place):
                yield known
            known = self._begins_with[known]

    def _put_in_order(self) -> None:
        self._sorted = sorted(self.texts)
        self._longest = max(map(len, self._sorted))
        self._begins_with: dict[str, str | None] = {}
        open_texts: list[str] = []
        for text in self._sorted:
            while open_texts and not text.startswith(open_texts[-1]):
                open_texts.pop()
            self._begins_with[text] = open_texts[-1] if open_texts else None
            open_texts.append(text)
        self.is_ordered = True
