"""The visible text and the title of an HTML page, in time that grows with the page whatever it holds.

For when trafilatura is missing, finds nothing, or would take too long. The standard library's parser reads the rest of
a page anew at every tag that does not end; here a mark that was not found once is not looked for again. Knows strings.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

_HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "title"})
_RAW = frozenset({"script", "style"})  # in these, nothing but their own end is a tag
_INLINE = re.compile(  # every other element begins a block
    "a|abbr|b|bdi|bdo|big|cite|code|data|dfn|em|font|i|ins|kbd|label|mark|q|s|samp|small|span|strong|sub|sup"
    "|time|tt|u|var|wbr"
)
_TAG = re.compile(r"<(/?)([a-zA-Z][^\t\n\r\f />\x00]*)")
# What follows a tag's name, up to its end; a ">" in the quotes of an attribute is none. Nothing is tried twice.
_ATTRIBUTES = re.compile(r"""(?>[^>=]+|=\s*+(?>"[^"]*"|'[^']*')?)*+>""")
_RAW_END = {name: re.compile(rf"</{name}\s*+>", re.IGNORECASE) for name in _RAW}
# Blanks to be made one space. One that is a space already is not matched: `sub` holds a piece for every match.
_WIDE, _WIDE_IN_LINE = re.compile(r"\s{2,}|[^\S ]"), re.compile(r"[^\S\n]{2,}|[^\S\n ]")
_MAX_UNENDED = 16  # tags without an end that are looked at with their quotes; each may read all of the page


class Page(NamedTuple):
    """What a reader sees: one blank line between blocks."""

    text: str
    title: str


class _Tag(NamedTuple):
    name: str  # in small letters
    opens: bool
    closes: bool


def read_page(page: str) -> Page:
    """The text and the title of `page`; text that only looks like a tag stays text.

    >>> read_page("<title>T</title><p>1 < 2<br>so <b>be</b> it<script>x</script>")
    Page(text='1 < 2\\nso be it', title='T')
    """
    open_hidden: list[str] = []  # hidden elements we are inside of
    first_open: dict[str, int] = {}  # where each stands there first
    pieces: list[str] = []
    title: list[str] = []
    for item in _tokenize(page):
        if isinstance(item, str):
            if not open_hidden:
                pieces.append(_WIDE.sub(" ", item))
            elif open_hidden == ["title"]:
                title.append(item)
            continue
        if item.opens:
            if item.name in _HIDDEN:
                first_open.setdefault(item.name, len(open_hidden))
                open_hidden.append(item.name)
            elif item.name in {"td", "th"}:
                pieces.append(" ")
            elif not _INLINE.fullmatch(item.name):
                pieces.append("\n" if item.name in {"br", "tr", "li"} else "\n\n")
        if item.closes:
            if item.name in first_open:
                place = first_open[item.name]
                del open_hidden[place:]
                first_open = {name: first for name, first in first_open.items() if first < place}
            elif not _INLINE.fullmatch(item.name) and item.name not in {"td", "th", "tr", "li"}:
                pieces.append("\n\n")
    text = _WIDE_IN_LINE.sub(" ", "".join(pieces))
    text = re.sub(r" \n ?|\n ", "\n", re.sub(r"\s*\n\s*\n\s*", "\n\n", text)).strip()
    return Page(text, " ".join("".join(title).split()))


def _tokenize(page: str) -> Iterator[str | _Tag]:
    """The texts and tags of a page in order; comments and declarations are left out."""
    marks = _MarkerScanner(page)
    place = text_start = 0
    while (place := page.find("<", place)) >= 0 and marks.end_of_marker(">", place) >= 0:
        found = _TAG.match(page, place)
        if found is None:
            end = _end_of_declaration(page, place, marks)
        elif found[1]:
            end = marks.end_of_marker(">", found.end())
        else:
            end = marks.end_of_tag(found.end())
        if end < 0:  # it has no end: it is text
            place += 1
            continue
        if place > text_start:
            yield _unescape(page[text_start:place])
        place = text_start = end
        if found is None:
            continue
        name, is_end = found[2].lower(), bool(found[1])
        alone = not is_end and page[end - 2] == "/"
        yield _Tag(name, opens=not is_end, closes=is_end or alone)
        if name in _RAW and not is_end and not alone:
            closing = _RAW_END[name].search(page, end)
            if closing is None:
                return  # all that follows is a script
            place = text_start = closing.end()
            yield _Tag(name, opens=False, closes=True)
    if text_start < len(page):
        yield _unescape(page[text_start:])


def _end_of_declaration(page: str, place: int, marks: _MarkerScanner) -> int:
    """Where a comment, a declaration or an instruction that begins at `place` ends; -1 for text."""
    if page.startswith("<!--", place):
        return marks.end_of_marker("-->", place + 4)
    if page.startswith("<![CDATA[", place):
        return marks.end_of_marker("]]>", place + 9)
    return marks.end_of_marker(">", place + 1) if page.startswith(("<!", "<?", "</"), place) else -1


class _MarkerScanner:
    """Finds the next of some marks in a page, asked from its beginning to its end."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._next: dict[str, int] = {}  # by mark: where it stood next when it was looked for, or the page's end
        self._num_unended = 0

    def end_of_marker(self, mark: str, place: int) -> int:
        """Where the first `mark` from `place` on ends; -1 when there is none."""
        known = self._next.get(mark, -1)
        if known < place:
            known = self._page.find(mark, place)
            self._next[mark] = known if known >= 0 else len(self._page)
        return known + len(mark) if 0 <= known < len(self._page) else -1

    def end_of_tag(self, place: int) -> int:
        """Where the tag whose name ends at `place` ends, its attributes' quotes heeded; -1 when nowhere."""
        if self._num_unended < _MAX_UNENDED:
            found = _ATTRIBUTES.match(self._page, place)
            if found is not None:
                return found.end()
            self._num_unended += 1
        return self.end_of_marker(">", place)


def _unescape(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character reference of thousands of digits
        return text
