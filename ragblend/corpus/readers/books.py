"""Books (.epub): the chapters in reading order, each read by the HTML reader.

Left out: chapters that the book marks as not linear, and pictures. A chapter without a heading gets its title in the
table of contents as heading.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import TextBlocks, collapse_whitespace
from ragblend.corpus.readers.html import decode_html
from ragblend.corpus.readers.office_xml import attribute, child, local_name, outermost, parse_part, resolve_part
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# The HTML reader leaves these out; in a book they hold footnotes and titles of chapters.
_FURNITURE = re.compile(rb"<(/?)(?:aside|header|footer)\b", re.IGNORECASE)


def read_epub(data: bytes) -> ParsedRecords:
    """Read one book as one document. Raises UnreadableDocumentError if it is no EPUB, damaged or protected."""
    container = ZipContainer(data, "EPUB book")
    package_part = _find_package(container)
    package = parse_part(container, package_part)
    folder = posixpath.dirname(package_part)
    items = {attribute(one, "id"): one for one in package.iter() if local_name(one) == "item"}
    chapters = list(_find_chapters(package, items, folder))
    _check_protection(container, chapters)
    titles = _read_titles(container, items, folder)
    blocks = TextBlocks()
    notes = []
    for part in chapters:
        try:
            _add_chapter(blocks, container.read(part), titles.get(part, ""))
        except UnreadableDocumentError as error:
            notes.append(f"chapter {part!r} is left out: the file {error}")
    if chapters and len(notes) == len(chapters):
        raise UnreadableDocumentError(f"has no readable chapter; {notes[0]}")
    yield blocks.build(_read_metadata(package), notes)


def _find_package(container: ZipContainer) -> str:
    for element in parse_part(container, _CONTAINER).iter():
        if local_name(element) == "rootfile":
            return resolve_part("", attribute(element, "full-path"))
    raise UnreadableDocumentError(f"names no package in {_CONTAINER}: it is damaged; save or download it again")


def _find_chapters(package: Element, items: dict[str, Element], folder: str) -> Iterator[str]:
    """Yield the parts of the chapters in reading order, each once."""
    seen = set()
    spine = child(package, "spine")
    for reference in spine if spine is not None else ():
        item = items.get(attribute(reference, "idref"))
        if item is None or attribute(reference, "linear") == "no" or "svg" in attribute(item, "media-type"):
            continue
        part = resolve_part(folder, attribute(item, "href"))
        if part not in seen:
            seen.add(part)
            yield part


def _check_protection(container: ZipContainer, chapters: list[str]) -> None:
    """Raise UnreadableDocumentError if a chapter is encrypted. Encrypted fonts are common and are not read."""
    if _ENCRYPTION not in container:
        return
    encrypted = {
        resolve_part("", attribute(element, "URI"))
        for element in parse_part(container, _ENCRYPTION).iter()
        if local_name(element) == "CipherReference"
    }
    if encrypted.intersection(chapters):
        raise UnreadableDocumentError("is a book with copy protection (DRM), which cannot be read; get one without")


def _add_chapter(blocks: TextBlocks, page: bytes, title: str) -> None:
    chapter = decode_html(_FURNITURE.sub(rb"<\1div", page))
    if title and chapter.text.strip() and not chapter.marks:
        blocks.mark_heading(title, 1)
    blocks.add_text(chapter.text, chapter.marks)


def _read_titles(container: ZipContainer, items: dict[str, Element], folder: str) -> dict[str, str]:
    """Return the chapters' titles by their parts, from the table of contents (EPUB 3's, else EPUB 2's)."""
    contents = [one for one in items.values() if "nav" in attribute(one, "properties").split()]
    contents += [one for one in items.values() if attribute(one, "media-type") == "application/x-dtbncx+xml"]
    for item in contents:
        part = resolve_part(folder, attribute(item, "href"))
        try:
            titles = dict(reversed(list(_contents_entries(parse_part(container, part), posixpath.dirname(part)))))
        except UnreadableDocumentError:
            continue
        if titles:
            return titles
    return {}


def _contents_entries(root: Element, folder: str) -> Iterator[tuple[str, str]]:
    """Yield (part, title) of the entries of a table of contents."""
    title = ""
    for element in outermost(root, "navLabel", "content", "a"):
        name = local_name(element)
        if name == "navLabel":
            title = collapse_whitespace("".join(element.itertext()))
        elif name == "content" and attribute(element, "src"):
            yield resolve_part(folder, attribute(element, "src")), title
        elif name == "a" and attribute(element, "href"):
            yield resolve_part(folder, attribute(element, "href")), collapse_whitespace("".join(element.itertext()))


def _read_metadata(package: Element) -> dict[str, str]:
    properties: dict[str, str] = {}
    metadata = child(package, "metadata")
    for element in metadata if metadata is not None else ():
        name = {"title": "title", "creator": "author", "language": "language"}.get(local_name(element))
        if name and element.text and element.text.strip():
            properties.setdefault(name, collapse_whitespace(element.text))
    return properties
