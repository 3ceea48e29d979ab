"""Headings in plain text: those of Markdown, and titles that a line of marks underlines (reStructuredText, READMEs).

Each function takes time linear in the text, whose line breaks must be "\\n".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragblend.corpus.readers.types import Mark

_FRONT_MATTER = re.compile(r"---[ \t]*\n")
_FRONT_MATTER_END = re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE)
_FRONT_MATTER_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]|$)")
_NO_PARAGRAPH = re.compile(r"[ \t]*(?:$|[-*+>|#]|\d{1,9}[.)] |<!--)| {4}|\t")  # a line that cannot be underlined
_LINK = re.compile(r"!?\[([^\[\]]{1,500})\](?:\([^()]{0,2000}\)|\[[^\[\]]{0,500}\])?")
_HEADING_ID = re.compile(r"\{[^{}]{0,200}\}$")
_ADORNMENT_LINE = re.compile(r"^([=\-~^\"'`#*+.:_<>])\1{2,}[ \t]*$", re.MULTILINE)
_TABLE_HEADER = re.compile(r"  |\t| \| ")
_MAX_HEADING_CHARS = 300


def find_markdown_headings(text: str) -> Iterator[Mark]:
    """Yield the marks of Markdown's headings outside of code fences and front matter.

    >>> [(mark.value, mark.level) for mark in find_markdown_headings("# A `b`\\n```\\n# c\\n```\\nD\\n---\\n")]
    [('A b', 1), ('D', 2)]
    """
    fence = ""  # the open fence
    above = ""  # the line above if it begins a paragraph; underlined, it is a heading
    begins = True  # this line would begin a paragraph
    offset = _end_of_front_matter(text)
    for line in text[offset:].split("\n"):
        opening, atx = _FENCE.match(line), _ATX.match(line)
        words = line.strip()
        if fence:
            if opening and opening[1].startswith(fence) and not line[opening.end() :].strip():
                fence = ""
        elif opening:
            fence, above, begins = opening[1], "", True
        elif atx:
            if value := _clean_value(_strip_closing_marks(line[atx.end() :].strip())):
                yield Mark(offset, "heading", value, len(atx[1]))
            above, begins = "", True
        elif above and words and words[0] in "=-" and not words.strip(words[0]):
            if value := _clean_value(above):
                yield Mark(offset - len(above) - 1, "heading", value, 1 if words[0] == "=" else 2)
            above, begins = "", True
        else:
            above = line if begins and not _NO_PARAGRAPH.match(line) else ""
            begins = not words.strip("-=*_ ")  # blank, or a rule
        offset += len(line) + 1


def _strip_closing_marks(words: str) -> str:
    """Return `words` without the marks that may close a heading, as in "# A #"; the mark of "# C#" is kept."""
    stripped = words.rstrip("#")
    return stripped.rstrip() if not stripped or stripped[-1].isspace() else words


def find_front_matter_title(text: str) -> str:
    """Return the title in a file's front matter (YAML between lines of ---); "" if it has none."""
    end = _end_of_front_matter(text)
    title = _FRONT_MATTER_TITLE.search(text, 0, end)
    return title[1].strip().strip("\"'").strip() if title else ""


def _end_of_front_matter(text: str) -> int:
    start = _FRONT_MATTER.match(text)
    end = _FRONT_MATTER_END.search(text, start.end()) if start else None
    return min(end.end() + 1, len(text)) if end else 0


def find_underlined_headings(text: str) -> Iterator[Mark]:
    """Yield, in order, the marks of titles that are underlined over their whole length with one repeated character.

    As in reStructuredText, the underline's style gives the level: the first style is level 1, the next new one level 2.

    >>> [(mark.value, mark.level) for mark in find_underlined_headings("A\\n====\\n\\nB\\n---\\ntext\\n\\nC\\n===\\n")]
    [('A', 1), ('B', 2), ('C', 1)]
    """
    styles: dict[tuple[str, bool], int] = {}
    for underline in _ADORNMENT_LINE.finditer(text):
        start = text.rfind("\n", 0, max(underline.start() - 1, 0)) + 1
        title = text[start : max(underline.start() - 1, start)]
        before = text[text.rfind("\n", 0, max(start - 1, 0)) + 1 : max(start - 1, 0)].rstrip()
        marks = underline[0].rstrip()
        if _is_title(title, marks, before):
            level = styles.setdefault((marks[0], before == marks), len(styles) + 1)
            yield Mark(start, "heading", title.strip().replace("`", ""), min(level, 6))


def _is_title(line: str, marks: str, before: str) -> bool:
    """Return True for a line that `marks` underline, below a blank line or below the same marks."""
    words = line.strip()
    if not words or len(words) > len(marks) or not (before == marks or (not before and not line[0].isspace())):
        return False
    if _ADORNMENT_LINE.fullmatch(words) or _TABLE_HEADER.search(words):
        return False
    return any(map(str.isalnum, words))


def _clean_value(words: str) -> str:
    """Return a heading's words without links, emphasis, code marks and an id in braces."""
    words = _HEADING_ID.sub("", words[:_MAX_HEADING_CHARS].strip())
    words = _LINK.sub(r"\1", words)
    return " ".join(words.replace("`", "").replace("**", "").replace("__", "").split()).strip("* ")
