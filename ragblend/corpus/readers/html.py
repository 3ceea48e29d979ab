"""HTML and XHTML: the visible text without menus, equations as text. Read `parse_html` first."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree.ElementTree import Element, SubElement

from selectolax.lexbor import LexborHTMLParser, LexborNode

from ragblend.corpus.readers.blocks import ALL_ROWS, collapse_whitespace
from ragblend.corpus.readers.encodings import decode_text
from ragblend.corpus.readers.html_blocks import PageWriter
from ragblend.corpus.readers.html_markup import TEX_SCRIPT, simplify_markup
from ragblend.corpus.readers.notation.equations import read_equation
from ragblend.corpus.readers.office_xml import parse_number
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
_CELLS = frozenset({"td", "th"})
_ARTICLES = frozenset({"article", "section", "main"})
# KaTeX repeats an equation's parts for the eye.
_HIDDEN = '[hidden]:not([hidden="until-found"]), a.headerlink, .katex-mathml + .katex-html'
_TYPESET = ".MathJax, .MathJax_Display, .MathJax_Preview, .MathJax_SVG, .MathJax_CHTML"  # of the TeX beside it
_SHIFTED = re.compile(r"vertical-align:\s*su(b|per)")


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
    hidden = f"{_HIDDEN}, {_TYPESET}" if TEX_SCRIPT in markup else _HIDDEN
    without_menus = _write(root, title, f'{hidden}, [role="navigation"]', shows_menus=False)
    return without_menus if without_menus.text else _write(root, title, hidden, shows_menus=True)


def read_math(markup: str) -> str:
    """Return the text of an equation's markup, an element `math` of XML or HTML; "" if there is none."""
    node = LexborHTMLParser(markup).css_first("math")
    return read_equation(_to_element(node)) if node is not None else ""


def _visibility(root: LexborNode, selector: str, shows_menus: bool) -> Callable[[LexborNode, str, bool], bool]:
    """Return a function that is True for an element that itself is visible text; it does not consider its ancestors.

    The function takes the element, its tag, and whether it is in an article. `selector`: of elements that are hidden.
    """
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


def _write(root: LexborNode, title: str, hidden: str, shows_menus: bool) -> ParsedRecord:
    """Write the content of `root` without the elements of the selector `hidden`. Does not recurse, because elements may
    be nested deeply.
    """
    writer, is_shown = PageWriter(), _visibility(root, hidden, shows_menus)
    shifted = _find_shifted(root)
    ancestors: list[tuple[LexborNode, str]] = []
    num_articles = 0  # among the ancestors
    node = root.first_child
    while node is not None:
        tag = node.tag or "-comment"
        if tag == "span" and node.mem_id in shifted:
            tag = shifted[node.mem_id]
        child = None
        if tag == "-text":
            writer.add_text(node.text_content or "")
        elif tag == "img":
            writer.add_text(f" {node.attributes.get('alt') or ''} ")
        elif tag.rpartition(":")[2] == "math":
            block = "div" if node.attributes.get("display") == "block" else "math"
            writer.open(block)
            writer.add_text(read_equation(_to_element(node)))
            writer.close(block)
        elif is_shown(node, tag, num_articles > 0):
            if tag in _CELLS:
                writer.open(tag, *_spans(node))
            else:
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


def _find_shifted(root: LexborNode) -> dict[int, str]:
    """Return "sup" or "sub" for the elements that their style raises or lowers."""
    matches = ((node, _SHIFTED.search(node.attributes.get("style") or "")) for node in root.css("span[style]"))
    return {node.mem_id: "sup" if shift[1] == "per" else "sub" for node, shift in matches if shift}


def _spans(cell: LexborNode) -> tuple[int, int]:
    """Return the numbers of columns and rows that a table's cell spans. Zero rows are all of its group of rows."""
    attributes = cell.attributes
    if not attributes:
        return 1, 1
    columns, rows = (parse_number((attributes.get(name) or "").strip(), 1) for name in ("colspan", "rowspan"))
    return columns, rows or ALL_ROWS


def _to_element(node: LexborNode) -> Element:
    """Return an equation's element as the parser of XML gives it. Does not recurse."""
    root = Element(_local_tag(node))
    waiting = [(node, root)]
    while waiting:
        parent, element = waiting.pop()
        below = parent.first_child
        while below is not None:
            if below.tag == "-text":
                _append_text(element, below.text_content or "")
            elif not str(below.tag).startswith("-"):
                child = SubElement(element, _local_tag(below))
                child.attrib.update((name, value or "") for name, value in below.attributes.items())
                waiting.append((below, child))
            below = below.next
    return root


def _local_tag(node: LexborNode) -> str:
    return str(node.tag).rpartition(":")[2]


def _append_text(element: Element, text: str) -> None:
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text
