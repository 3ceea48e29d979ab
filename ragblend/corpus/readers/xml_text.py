"""XML of unknown formats: its text without markup.

Tags are removed one by one, so that damaged files can be read. Only character references are resolved, and no other
file is opened.
"""

from __future__ import annotations

import html
import re

from ragblend.corpus.readers.html import read_math
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.text import decode_document
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords

_DECLARED = re.compile(rb"""<\?xml[^>]*?encoding\s*=\s*["']([\w:.-]+)""")
_CDATA = re.compile(r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)", re.DOTALL)
_TAG = re.compile(
    r"""<!--.*?(?:-->|\Z) | <\?.*?(?:\?>|\Z) | <![A-Z][^<>\[]*+(?:\[.*?(?:\]\s*>|\Z)|>)
    | </?[\w:] [^<>"']*+ (?:"[^"<]*+"[^<>"']*+ | '[^'<]*+'[^<>"']*+)*+ >""",
    re.DOTALL | re.VERBOSE,
)
# Of JATS, DocBook, TEI and DITA
_SHIFTED = re.compile(r"<(/?)(?:\w+:)?su(?:(b)|(?:p|per))(?:script)?(?:\s[^<>]*)?(?<!/)>")
_MATH = re.compile(r"<(?P<end>/?)(?P<prefix>(?:\w+:)?)math(?:\s[^<>]*)?>")
_REFERENCE = re.compile(r"&(?:#\d{1,7}|#x[0-9a-fA-F]{1,6}|[A-Za-z]\w{0,31});")


def read_xml(data: bytes) -> ParsedRecords:
    """Read an XML file as one document. If its elements hold no text, the markup itself is the text.

    Raises NotADocumentError for bytes that are not text.
    """
    declared = _DECLARED.match(data[:200].lstrip())
    decoded = decode_document(data, declared[1].decode() if declared else "")
    yield ParsedRecord("", strip_markup(decoded.text) or decoded.text, {}, notes=decoded.notes)


def strip_markup(markup: str) -> str:
    """Return the text of `markup`. Each block element is on a separate line; elements inside of a sentence stay on its
    line.

    >>> strip_markup("<a><b>one <i>two</i> three</b><b>four &amp; &x;</b></a>")
    'one two three\\nfour & &x;'
    """
    markup = _CDATA.sub(lambda match: html.escape(match[1]), markup)
    markup = _SHIFTED.sub(lambda match: END if match[1] else LOWERED if match[2] else RAISED, _write_equations(markup))
    pieces: list[str] = []
    num_tags, has_space, has_break = 0, False, False  # since the last text
    for number, segment in enumerate(_TAG.split(markup)):
        num_tags += number > 0
        words = segment.strip()
        blanks = segment[: len(segment) - len(segment.lstrip())]
        has_space |= bool(blanks)
        has_break |= "\n" in blanks
        if words:
            pieces += (_separator(num_tags, has_space, has_break), words)
            blanks = segment[len(segment.rstrip()) :]
            num_tags, has_space, has_break = 0, bool(blanks), "\n" in blanks
    text = _REFERENCE.sub(lambda match: html.unescape(match[0]), "".join(pieces))
    return "\n".join(write_scripts(line.strip()) for line in text.split("\n")).strip()


def _write_equations(markup: str) -> str:
    """Return `markup` with the text of each equation in place of its elements."""
    pieces, offset = list[str](), 0
    begin: re.Match[str] | None = None
    for tag in _MATH.finditer(markup):
        if not tag["end"]:
            begin = tag
        elif begin is not None:
            equation = re.sub(rf"(</?){begin['prefix']}", r"\1", markup[begin.start() : tag.start()])
            pieces += (markup[offset : begin.start()], html.escape(read_math(equation)))
            begin, offset = None, tag.end()
    return "".join([*pieces, markup[offset:]])


def _separator(num_tags: int, has_space: bool, has_break: bool) -> str:
    """Return the white space between two texts. One tag is inside of a sentence; two end and begin an element."""
    if num_tags <= 1 and not has_break:
        return " " if has_space else ""
    return "\n" if num_tags <= 2 else "\n\n"
