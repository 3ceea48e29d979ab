"""HTML and XHTML: the visible text without menus. Read `parse_html` first."""

from __future__ import annotations

import re
from typing import NamedTuple

from selectolax.lexbor import LexborHTMLParser, LexborNode

from ragblend.corpus.readers.encodings import decode_text
from ragblend.corpus.readers.html_blocks import PageWriter
from ragblend.corpus.readers.html_markup import simplify_markup
from ragblend.corpus.readers.types import Mark, ParsedRecord, ParsedRecords

_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)
_INVISIBLE = frozenset(
    {
        *("script", "style", "noscript", "template", "svg", "head", "title", "iframe", "object", "audio"),
        *("video", "canvas", "datalist", "annotation", "annotation-xml", "-comment", "-doctype"),
    }
)
_HEADER_FOOTER = frozenset({"header", "footer"})  # inside an article or a section, they are text
_MENUS = frozenset({"nav", "aside", *_HEADER_FOOTER})
_NOT_ALWAYS_SHOWN = _INVISIBLE | _MENUS
_ARTICLES = frozenset({"article", "section", "main"})
_HIDDEN = '[hidden]:not([hidden="until-found"]), a.headerlink'


class HtmlText(NamedTuple):
    """The text of a page, in blocks with a blank line between two; its title; its headings' marks."""

    text: str
    title: str
    marks: tuple[Mark, ...]


def read_html(data: bytes) -> ParsedRecords:
    """Read one page as one document."""
    declared = _CHARSET.search(data[:4096])
    decoded = decode_text(data, declared[1].decode() if declared else "")
    page = parse_html(decoded.text)
    yield ParsedRecord("", page.text, {"title": page.title} if page.title else {}, page.marks, decoded.notes)


def parse_html(markup: str) -> HtmlText:
    """Return the text of a page or of a part of one, without its menus; with them if there is no other text.

    >>> parse_html("<title>T</title><nav>Home</nav><h1>A</h1><p>b<br>c</p><ul><li>d</ul>").text
    '# A\\n\\nb\\nc\\n\\n- d'
    """
    tree = LexborHTMLParser(simplify_markup(markup))
    title = next((node.text() for node in tree.css("title") if node.parent is None or node.parent.tag != "svg"), "")
    root = tree.body or tree.root
    if root is None:
        return HtmlText("", "", ())
    text, marks = _write(root, _Visibility(root, shows_menus=False))
    if not text:
        text, marks = _write(root, _Visibility(root, shows_menus=True))
    return HtmlText(text, " ".join(title.split()), marks)


class _Visibility:
    """Decides which elements of a page are read."""

    def __init__(self, root: LexborNode, shows_menus: bool) -> None:
        hidden = _HIDDEN if shows_menus else f'{_HIDDEN}, [role="navigation"]'
        self._hidden = {node.mem_id for node in root.css(hidden)}
        # pandoc writes the text's title, author and date there.
        self._headers = {node.mem_id for node in root.css("header#title-block-header")}
        self._shows_menus = shows_menus

    def shows(self, node: LexborNode, tag: str, is_in_article: bool) -> bool:
        """Return True if the element `node` itself is visible text; its ancestors are not considered."""
        if tag not in _NOT_ALWAYS_SHOWN and not self._hidden:
            return True
        if tag in _INVISIBLE or node.mem_id in self._hidden:
            return False
        if self._shows_menus or tag not in _MENUS:
            return True
        return tag in _HEADER_FOOTER and (is_in_article or node.mem_id in self._headers)


def _write(root: LexborNode, visibility: _Visibility) -> tuple[str, tuple[Mark, ...]]:
    """Write the content of `root`. Does not recurse, because elements may be nested deeply."""
    writer = PageWriter()
    ancestors: list[tuple[LexborNode, str]] = []
    num_articles = 0  # among the ancestors
    node = root.first_child
    while node is not None:
        tag = node.tag or "-comment"
        child = None
        if tag == "-text":
            writer.add_text(node.text_content or "")
        elif tag == "img":
            writer.add_text(f" {node.attributes.get('alt') or ''} ")
        elif visibility.shows(node, tag, num_articles > 0):
            writer.open(tag)
            child = node.first_child
            if child is None:
                writer.close(tag)
        if child is not None:
            num_articles += tag in _ARTICLES
            ancestors.append((node, tag))
            node = child
            continue
        following = node.next
        while following is None and ancestors:
            node, tag = ancestors.pop()
            num_articles -= tag in _ARTICLES
            writer.close(tag)
            following = node.next
        node = following
    return writer.build()
