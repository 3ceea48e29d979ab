"""HTML and XHTML: the visible text without menus. Read `parse_html` first."""

from __future__ import annotations

import re
from collections.abc import Callable

from selectolax.lexbor import LexborHTMLParser, LexborNode

from ragblend.corpus.readers.blocks import collapse_whitespace
from ragblend.corpus.readers.encodings import decode_text
from ragblend.corpus.readers.html_blocks import PageWriter
from ragblend.corpus.readers.html_markup import simplify_markup
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords

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


def read_html(data: bytes) -> ParsedRecords:
    """Read one page as one document."""
    yield decode_html(data)


def decode_html(data: bytes) -> ParsedRecord:
    """Return the text and title of a page's bytes. Raises UnreadableDocumentError if they are not text."""
    declared = _CHARSET.search(data[:4096])
    decoded = decode_text(data, declared[1].decode() if declared else "")
    return parse_html(decoded.text)._replace(notes=decoded.notes)


def parse_html(markup: str) -> ParsedRecord:
    """Return the text and title of a page, or of a part of one. Menus are left out, unless there is no other text.

    >>> parse_html("<title>T</title><nav>Home</nav><h1>A</h1><p>b<br>c</p><ul><li>d</ul>").text
    '# A\\n\\nb\\nc\\n\\n- d'
    """
    tree = LexborHTMLParser(simplify_markup(markup))
    title = next((node.text() for node in tree.css("title") if node.parent is None or node.parent.tag != "svg"), "")
    root = tree.body or tree.root
    if root is None:
        return ParsedRecord("", "", {})
    title = collapse_whitespace(title)
    without_menus = _write(root, title, shows_menus=False)
    return without_menus if without_menus.text else _write(root, title, shows_menus=True)


def _visibility(root: LexborNode, shows_menus: bool) -> Callable[[LexborNode, str, bool], bool]:
    """Return a function that is True for an element that itself is visible text; it does not consider its ancestors.

    The function takes the element, its tag, and whether it is in an article.
    """
    selector = _HIDDEN if shows_menus else f'{_HIDDEN}, [role="navigation"]'
    hidden = {node.mem_id for node in root.css(selector)}
    # pandoc writes the text's title, author and date there.
    headers = {node.mem_id for node in root.css("header#title-block-header")}

    def is_shown(node: LexborNode, tag: str, is_in_article: bool) -> bool:
        if tag not in _NOT_ALWAYS_SHOWN and not hidden:
            return True
        if tag in _INVISIBLE or node.mem_id in hidden:
            return False
        if shows_menus or tag not in _MENUS:
            return True
        return tag in _HEADER_FOOTER and (is_in_article or node.mem_id in headers)

    return is_shown


def _write(root: LexborNode, title: str, shows_menus: bool) -> ParsedRecord:
    """Write the content of `root`. Does not recurse, because elements may be nested deeply."""
    writer, is_shown = PageWriter(), _visibility(root, shows_menus)
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
        elif is_shown(node, tag, num_articles > 0):
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
    return writer.build(title)
