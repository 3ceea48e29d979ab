"""Reference texts of files, by programs that share no code with the readers, and word differences of two texts.

A reference whose program is not installed is skipped. Does not depend on ragblend. Read `compare_words` and
`reference_texts` first.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

# Scripts without spaces between words: each character is a word.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
# Some programs join words that are hyphenated at a line's end, so hyphens inside words are removed before comparing.
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-\u2010](?:[ \t\r]*\n\s*)?(?=[^\W\d_])")

_PANDOC = ("pandoc", "-t", "plain", "--wrap=none")
_COMMANDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    ".pdf": (
        ("pdftotext", "-q", "-enc", "UTF-8", "{}", "-"),
        ("mutool", "draw", "-q", "-F", "txt", "-o", "-", "{}"),
    ),
    **dict.fromkeys(
        (".html", ".htm", ".xhtml"),
        (("lynx", "-dump", "-nolist", "-force_html", "-width=1000", "-display_charset=utf-8", "{}"),),
    ),
    **{f".{name}": ((*_PANDOC, "-f", name, "{}"),) for name in ("docx", "odt", "epub", "rtf")},
    ".xls": (("xls2csv", "-d", "utf-8", "{}"),),
}
TOOLS = tuple(sorted({command[0] for commands in _COMMANDS.values() for command in commands} | {"lxml"}))


TEXT_CELLS = "text cells"
WORDS_ONLY = frozenset({TEXT_CELLS, "xls2csv"})
"""References for workbooks. Only words of letters are compared: programs format numbers and dates differently."""


class WordDifference(NamedTuple):
    """Difference from a reference, as a share of its words in percent. `reference`: name of its program."""

    missing_percent: float
    extra_percent: float
    reference: str
    missing: tuple[str, ...] = ()  # the 12 most frequent words; `extra` likewise
    extra: tuple[str, ...] = ()


def missing_tools() -> list[str]:
    """Return the names of the references that are not installed."""
    return [name for name in TOOLS if not shutil.which(name) and not (name == "lxml" and _has_lxml())]


def count_words(text: str) -> Counter[str]:
    """Count the words of a text after NFKC normalisation and case folding. Words consist of letters and digits."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    return Counter(_WORD.findall(_HYPHEN.sub("", text).casefold()))


def compare_words(text: str, references: Mapping[str, str]) -> WordDifference | None:
    """Return the difference from the reference nearest to `text`; None if no reference contains a word."""
    differences = (_difference(text, each, name) for name, each in references.items())
    return min((each for each in differences if each is not None), default=None,
               key=lambda found: found.missing_percent + found.extra_percent)  # fmt: skip


def _difference(text: str, reference: str, name: str) -> WordDifference | None:
    got, wanted = count_words(text), count_words(reference)
    if name in WORDS_ONLY:
        got, wanted = (Counter({word: n for word, n in words.items() if word.isalpha()}) for words in (got, wanted))
    missing, extra, total = wanted - got, got - wanted, wanted.total()
    if not total:
        return None
    samples = (tuple(word for word, _ in words.most_common(12)) for words in (missing, extra))
    return WordDifference(100 * missing.total() / total, 100 * extra.total() / total, name, *samples)


def reference_texts(path: Path) -> dict[str, str]:
    """Return {program: text of the file}, for each installed program that reads the file's format."""
    suffix = path.suffix.lower()
    texts = {}
    for command in _COMMANDS.get(suffix, ()):
        if (text := _run(command, path)) is not None:
            texts[command[0]] = text
    walk = _WALKS.get(suffix)
    if walk in (html_text, _epub_text):
        if _has_lxml() and (walk is html_text or not texts):  # unlike `_epub_text`, pandoc keeps the order of a book
            texts["lxml"] = walk(path.read_bytes())
    elif walk is not None:
        texts[TEXT_CELLS if suffix in (".xlsx", ".ods") else "own walk"] = walk(path.read_bytes())
    return texts


def _run(command: tuple[str, ...], path: Path) -> str | None:
    """Return the standard output of a program; None if it is not installed or fails on the file."""
    if not shutil.which(command[0]):
        return None
    charset = ("-assume_charset=utf-8",) if command[0] == "lynx" and _is_utf8(path.read_bytes()) else ()
    filled = [command[0], *charset, *(part.replace("{}", str(path)) for part in command[1:])]
    try:
        ran = subprocess.run(filled, capture_output=True, timeout=120, check=True, stdin=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError):
        return None
    return ran.stdout.decode("utf-8", "replace")


def _has_lxml() -> bool:
    return importlib.util.find_spec("lxml") is not None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_LEFT_OUT = frozenset({"script", "style", "noscript", "template", "svg", "title", "nav", "aside", "iframe", "object"})
_FURNITURE = frozenset({"header", "footer"})  # outside of articles
_ARTICLES = frozenset({"article", "section", "main"})
_INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "ins"}
    | {"kbd", "mark", "nobr", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u"}
    | {"var", "wbr"}
)


def html_text(data: bytes) -> str:
    """Return the text of a page without its menus, read by lxml, with a space around each block element."""
    lxml_html = importlib.import_module("lxml.html")
    parser = lxml_html.HTMLParser(encoding="utf-8" if _is_utf8(data) else None, huge_tree=True)
    root = lxml_html.document_fromstring(data, parser=parser)
    return "".join(_html_parts(root))


def _html_parts(root: Any) -> Iterator[str]:
    stack: list[tuple[Any, bool, bool]] = [(root, False, False)]  # (element, at its end, in an article)
    while stack:
        node, at_end, in_article = stack.pop()
        tag = node.tag if isinstance(node.tag, str) else ""
        gap = "" if tag in _INLINE else " "
        if at_end:
            yield gap
            yield node.tail or ""
        elif not tag or _is_menu(node, tag, in_article):
            yield " " if tag else ""
            yield node.tail or ""
        else:
            yield f"{gap}{node.get('alt') or ''}{gap}" if tag == "img" else gap
            yield node.text or ""
            stack.append((node, True, in_article))
            inside = in_article or tag in _ARTICLES
            stack.extend((child, False, inside) for child in reversed(node))


def _is_menu(node: Any, tag: str, in_article: bool) -> bool:
    return (
        tag in _LEFT_OUT
        or (tag in _FURNITURE and not in_article)
        or node.get("role") == "navigation"
        or node.get("hidden") is not None
    )


def _plain_text(data: bytes) -> str:
    return data.decode("utf-8-sig", "replace")


def _notebook_text(data: bytes) -> str:
    return "\n".join("".join(cell["source"]) for cell in json.loads(data)["cells"])


def _csv_text(data: bytes) -> str:
    text = _plain_text(data)
    delimiter = max(",;\t|", key=text.splitlines()[0].count)
    return "\n".join(" ".join(row) for row in csv.reader(io.StringIO(text), delimiter=delimiter))


def _json_text(data: bytes) -> str:
    values, stack = [], [json.loads(data)]
    while stack:
        value = stack.pop()
        if isinstance(value, dict | list):
            stack.extend(value.values() if isinstance(value, dict) else value)
        elif value is not None:
            values.append(str(value))
    return "\n".join(values)


def _xml_members(data: bytes, pattern: str) -> Iterator[ElementTree.Element]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in sorted(name for name in archive.namelist() if re.fullmatch(pattern, name)):
            yield ElementTree.fromstring(archive.read(name))


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _slides_text(data: bytes) -> str:
    paragraphs = []
    for root in _xml_members(data, r"ppt/(slides|notesSlides)/\w+\d+\.xml"):
        for paragraph in (each for each in root.iter() if _local(each) == "p"):
            parts = (" " if _local(part) == "br" else part.text or "" for part in paragraph.iter())
            paragraphs.append("".join(parts))
    return "\n".join(paragraphs)


def _sheets_text(data: bytes) -> str:
    """Return the text cells of a workbook, one per line. Cells with numbers are skipped."""
    shared = [
        "".join(part.text or "" for part in item.iter() if _local(part) == "t")
        for root in _xml_members(data, r"xl/sharedStrings\.xml")
        for item in root
    ]
    texts = []
    for root in _xml_members(data, r"xl/worksheets/\w+\.xml"):
        for cell in (each for each in root.iter() if _local(each) == "c"):
            values = [part.text or "" for part in cell.iter() if _local(part) in ("v", "t")]
            if cell.get("t") == "s":
                texts += [shared[int(value)] for value in values]
            elif cell.get("t") in ("inlineStr", "str"):
                texts += values
    return "\n".join(texts)


def _epub_text(data: bytes) -> str:
    """Return the text of a book's pages without its table of contents; "" if it has no META-INF/container.xml."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        pages = [name for name in names if re.search(r"(?<!nav)(?<!toc)\.x?html?$", name)]
        return "\n".join(html_text(archive.read(name)) for name in pages) if "META-INF/container.xml" in names else ""


def _paragraph_parts(paragraph: ElementTree.Element) -> Iterator[str]:
    for part in paragraph.iter():
        yield " " if _local(part) in ("s", "tab", "line-break") else ""
        yield part.text or ""
        yield part.tail or "" if part is not paragraph else ""


def _opendocument_text(data: bytes) -> str:
    texts = []
    for root in _xml_members(data, r"content\.xml"):
        for paragraph in (each for each in root.iter() if _local(each) in ("p", "h")):
            texts.append("".join(_paragraph_parts(paragraph)))
    return "\n".join(texts)


_WALKS: Mapping[str, Callable[[bytes], str]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), html_text),
    **dict.fromkeys((".txt", ".md", ".rst"), _plain_text),
    **dict.fromkeys((".csv", ".tsv"), _csv_text),
    **dict.fromkeys((".odt", ".ods", ".odp"), _opendocument_text),
    ".epub": _epub_text,
    ".ipynb": _notebook_text,
    ".json": _json_text,
    ".pptx": _slides_text,
    ".xlsx": _sheets_text,
}
"""Parsers for formats without a suitable program in Debian. They extract the words and nothing else."""
