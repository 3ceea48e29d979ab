"""Prepares HTML for parsing: removes what does not affect a page's text, and what makes parsing slow.

Without scripts, comments and most attributes a page is a third as long. Works on strings; only `_limit_depth` parses.
Read `simplify_markup` first.
"""

from __future__ import annotations

import html
import re

from selectolax.lexbor import LexborHTMLParser

_VOID = frozenset(
    {
        *("area", "base", "basefont", "bgsound", "br", "col", "embed", "frame", "hr", "img", "input"),
        *("keygen", "link", "meta", "param", "source", "track", "wbr"),
    }
)
# The parser reopens unclosed ones in every later block: 200 of them and 5,000 paragraphs of one letter (42 KB) give
# a million elements.
_FORMATTING = "b|big|code|em|font|i|nobr|s|small|strike|strong|tt|u"
_INLINE = f"{_FORMATTING}|a|abbr|acronym|bdi|bdo|cite|data|del|dfn|ins|kbd|label|mark|q|samp|span|time|var|wbr"
_INLINE_NAMES = frozenset(_INLINE.split("|"))
_INLINE_TAG = re.compile(rf"</?(?:{_INLINE}|{_INLINE.upper()})\s*>")  # a third of the time of IGNORECASE
_MARKED_INLINE = re.compile(r"""h(?:idden[\s"'=/>]|eaderlink)|katex-html|MathJax|vertical-align:\s*su(?:b|per)""")
_TAG_NAME = re.compile(r"<([a-zA-Z]+)\s[^<>]*\Z")
_HEADER_LINK = re.compile(r"""<a\s[^<>]*headerlink[^<>]*>[^<]*</a>""")
_XHTML = "http://www.w3.org/1999/xhtml"
_MAX_ATTRIBUTES_CHARS = 2000  # the parser compares each attribute of a tag with all others
_ALT = re.compile(r"""(?<![\w-])alt\s*=\s*("[^"]*"|'[^']*'|[^\s"'>]+)""", re.IGNORECASE)

TEX_SCRIPT = "math/tex"
"""In the type of a script that holds an equation for MathJax."""
_CDATA_MARKS = re.compile(r"%\s*<!\[CDATA\[|%\]\]>")
_EQUATION_PICTURE = "mwe-math-fallback"  # MediaWiki shows it in place of the equation before it
_WITH_ATTRIBUTES = frozenset({"td", "th", "math", "annotation", "mfrac", "mfenced"})
_NOTE_MARK = re.compile(
    r"(?P<tags><(?:sup|a)(?=[\s>])[^<>]*+>\s*+(?:<(?:sup|a|span)(?=[\s>])[^<>]*+>\s*+)?+)(?P<mark>[^\s<>\[\]]{1,8})"
    r"(?=\s*+</(?:sup|a|span)\b)",
    re.IGNORECASE,
)
_IS_NOTE = re.compile(r"footnote-?ref|noteref|<sup\s[^<>]*(?:foot|end)note")

_ATTRIBUTES = r"""(?:
    [^>"']*+(?:(?<==)"[^"]*+"[^>"']*+)*+(?=>)                              # the usual ones, for speed
  | (?>[^>=]++ | =\s*+(?>"[^"]*+(?:"|\Z) | '[^']*+(?:'|\Z))?)*+            # a quote only counts after an =
)"""
_MARKUP = r"""<(?:
    (?P<raw>(?i:script|style|iframe|noembed|noframes|xmp|title|textarea)) (?=[\s/>]) {attributes} {alone} (?:>|\Z)
        (?P<inside>[^<]*+(?:<(?!/(?i:(?P=raw))[\s/>])[^<]*+)*+) (?:</[^>]*+(?:>|\Z)|\Z)
  | (?P<name>[a-zA-Z][^\s/<>]*+) (?P<attributes>[\s/]{attributes}) (?:>|\Z)
  | (?P<end>/?) (?P<formatting>(?i:{formatting})) (?=[\s>])
  | !\[CDATA\[ (?P<cdata>.*?) (?:\]\]>|\Z)
  | !-- (?: -?> | .*? (?:--!?>|\Z))
  | [!?] [^>]*+ (?:>|\Z)
)"""


def _compile(alone: str) -> re.Pattern[str]:
    pattern = _MARKUP.replace("{attributes}", _ATTRIBUTES).replace("{alone}", alone)
    return re.compile(pattern.replace("{formatting}", _FORMATTING), re.DOTALL | re.VERBOSE)


_HTML, _XML = _compile(""), _compile("(?<!/)")


def simplify_markup(page: str) -> str:
    """Return shorter markup that has the same text and blocks as `page`. Takes time linear in the page's length.

    Scripts, comments and most attributes are removed. Self-closed tags of XHTML get an end tag. In a page that is
    nested too deeply, line breaks replace most elements; paragraphs, headings and pictures stay.

    >>> simplify_markup('<p class="x">a <B>b</B><script>"<p>"</script><!-- c --><img src="d" alt="e">')
    '<p>a b<img alt="e">'
    """
    is_xhtml = page.lstrip("\ufeff \t\r\n").startswith("<?xml") or _XHTML in page[:1000]
    if "headerlink" in page:
        page = _HEADER_LINK.sub("", page)
    if "<su" in page or "<SU" in page or "noteref" in page or "footnote-ref" in page:
        page = _NOTE_MARK.sub(_write_note_mark, page)
    # Inline elements affect the text only if some are hidden, raised or lowered.
    keeps_inline = _has_marked_inline(page)

    def rewrite(token: re.Match[str]) -> str:
        kind = token.lastgroup
        if kind == "attributes":
            return _rewrite_tag(token["name"].lower(), token["attributes"], is_xhtml, keeps_inline)
        if kind == "formatting":
            return f"<{token['end']}span"
        if kind == "inside":
            tag = token[0][: token.start("inside") - token.start()]
            return _rewrite_raw(token["raw"].lower(), tag, token["inside"])
        return html.escape(token["cdata"]) if kind == "cdata" else ""

    markup = (_XML if is_xhtml else _HTML).sub(rewrite, page)
    return _limit_depth(markup if keeps_inline else _INLINE_TAG.sub("", markup))


def _write_note_mark(link: re.Match[str]) -> str:
    """Return a raised link to a place in a page, or an element that is called a footnote's mark, with brackets."""
    tags = link["tags"].lower()
    is_raised_link = "<sup" in tags and "#" in tags
    return f"{link['tags']}[{link['mark']}]" if is_raised_link or _IS_NOTE.search(tags) else link[0]


def _has_marked_inline(page: str) -> bool:
    """Return True if an inline element has an attribute that hides, raises or lowers it, or a word like one."""
    for match in _MARKED_INLINE.finditer(page):
        start = page.rfind("<", max(0, match.start() - _MAX_ATTRIBUTES_CHARS), match.start())
        tag = _TAG_NAME.match(page[start : match.start() + 1]) if start >= 0 else None
        if tag and tag[1].lower() in _INLINE_NAMES:
            return True
    return False


def _rewrite_tag(name: str, attributes: str, is_xhtml: bool, keeps_inline: bool) -> str:
    if name == "img":
        alt = None if _EQUATION_PICTURE in attributes else _ALT.search(attributes)
        return f"<img alt={alt[1].replace('<', '&lt;')}>" if alt else ""
    if name in _INLINE_NAMES:
        if not keeps_inline:
            return ""
        name = "span" if name != "a" else name
    ends = attributes.endswith("/") and name not in _VOID
    is_closed = is_xhtml and ends
    if len(attributes) > _MAX_ATTRIBUTES_CHARS or not _is_wanted(name, attributes):
        attributes = "/" if ends and not is_closed else ""  # it ends an element of an equation or a drawing
    elif is_closed:
        attributes = attributes[:-1]
    return f"<{name}{attributes}></{name}>" if is_closed else f"<{name}{attributes}>"


def _is_wanted(name: str, attributes: str) -> bool:
    """Return True for attributes that html.py evaluates. Written out for speed, because it is called at every tag."""
    if name in _WITH_ATTRIBUTES:
        return True
    return (
        "hidden" in attributes
        or "vertical-align" in attributes
        or "katex-" in attributes
        or "MathJax" in attributes
        or "navigation" in attributes
        or "headerlink" in attributes
        or "title-block-header" in attributes
    )


def _rewrite_raw(name: str, tag: str, inside: str) -> str:
    """Return the replacement of an element whose content is not markup. `tag`: with its attributes."""
    if name == "script" and TEX_SCRIPT in tag:
        tex = html.escape(_CDATA_MARKS.sub("", inside))
        return f"<div>{tex}</div>" if "display" in tag else tex
    if name in {"title", "textarea"}:
        return f"<{name}>{inside.replace('<', '&lt;')}</{name}>"
    return f"<pre>{html.escape(inside)}</pre>" if name == "xmp" else ""


# --- depth ---

# At most tags the parser searches all open elements: 50,000 nested <div> take ten seconds.
_MAX_DEPTH = 1000
_TAGS_AT_A_TIME = 2000
_TAG_BEGINNING = re.compile(r"</?[a-zA-Z][^\s/>]*(?:/(?=>))?")  # with the slash that ends an element of a drawing
_STRUCTURE = re.compile(r"</?(?!(?:p|h[1-6]|br|hr|img|title|textarea|html|head|body)[\s/>])[a-zA-Z][^\s/>]*")


def _limit_depth(markup: str) -> str:
    """Return `markup`, without structure if more than `_MAX_DEPTH` of its elements are open at once."""
    if markup.count("<") <= _MAX_DEPTH:
        return markup
    tags = _TAG_BEGINNING.findall(markup)
    open_tags: list[str] = []
    for start in range(0, len(tags), _TAGS_AT_A_TIME):
        piece = ">".join([*open_tags, *tags[start : start + _TAGS_AT_A_TIME], "<!----"])
        open_tags = _find_open_tags(LexborHTMLParser(f"{piece}>"))
        if len(open_tags) > _MAX_DEPTH:
            return _STRUCTURE.sub("<br", markup)
    return markup


def _find_open_tags(tree: LexborHTMLParser) -> list[str]:
    """Return the elements that are open at the final comment."""
    open_tags: list[str] = []
    node = tree.body.last_child if tree.body else None
    while node is not None and not str(node.tag).startswith("-"):
        open_tags.append(f"<{node.tag}")
        node = node.last_child
    return open_tags
