"""XML parts of Office files: parses them without entities, walks them without recursion, resolves their
relationships."""

from __future__ import annotations

import posixpath
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Set
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

MAX_XML_BYTES = 64 << 20
MAX_TAGS = 2_000_000  # an element takes 150 to 300 bytes in memory, also "<a/>"
# Billion-laughs and external-entity attacks need entities; no program writes them into these parts.
_ENTITY = re.compile(rb"<!ENTITY|<\0!\0E\0N\0T\0I\0T\0Y\0|\0<\0!\0E\0N\0T\0I\0T\0Y")


def parse_part(container: ZipContainer, name: str) -> Element:
    """Return a part's root element. Raises UnreadableDocumentError if it is missing, damaged or too large."""
    data = container.read(name)
    if len(data) > MAX_XML_BYTES or data.count(b"<") > MAX_TAGS:
        raise UnreadableDocumentError(
            f"has {len(data) >> 20} MiB and {data.count(b'<')} tags in its part {name!r}, more than the "
            f"{MAX_XML_BYTES >> 20} MiB and {MAX_TAGS} tags that are read; split it"
        )
    if _ENTITY.search(data):
        raise UnreadableDocumentError(f"declares XML entities in its part {name!r}, which are not read; save it again")
    try:
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UnreadableDocumentError(
            f"is damaged (part {name!r} is not well-formed XML: {error}); save or download it again"
        ) from error


def local_name(element: Element) -> str:
    """Return the element's name without its namespace.

    >>> local_name(ElementTree.fromstring('<w:p xmlns:w="urn:w"/>'))
    'p'
    """
    return element.tag.rpartition("}")[2]


def attribute(element: Element, name: str, default: str = "") -> str:
    """Return the value of the attribute with this local name; `default` if there is none.

    The namespace is ignored, because it differs between transitional and strict Office files.
    """
    if (value := element.get(name)) is not None:
        return value
    for key, value in element.items():
        if key.endswith(name) and key.rpartition("}")[2] == name:
            return value
    return default


def child(element: Element | None, *path: str) -> Element | None:
    """Return the descendant at a path of local names; None if there is none. At each step, the first match counts."""
    for name in path:
        if element is None:
            return None
        for below in element:
            if below.tag.endswith(name) and local_name(below) == name:
                element = below
                break
        else:
            return None
    return element


def parse_number(text: str, default: int = 0) -> int:
    """Return the whole number in an attribute's `text`; `default` for other text and for more than seven digits."""
    return int(text) if text.isdecimal() and len(text) <= 7 else default


def walk(root: Element, left_out: Set[str] = frozenset()) -> Iterator[tuple[bool, Element, str]]:
    """Yield (True, element, local name) where an element begins and (False, element, local name) where it ends.

    The elements are `root` and all below it, in document order. An element whose local name is in `left_out` is skipped
    with its content. Only its end is yielded, with the name "", because the text after it (`tail`) is not left out.
    """
    names: dict[str, str] = {}
    name = local_name(root)
    yield True, root, name
    open_elements = [(root, name, iter(root))]
    while open_elements:
        element, name, children = open_elements[-1]
        for below in children:
            name_below = names.get(below.tag) or names.setdefault(below.tag, local_name(below))
            if name_below in left_out:
                yield False, below, ""
                continue
            yield True, below, name_below
            if len(below):
                open_elements.append((below, name_below, iter(below)))
                break
            yield False, below, name_below
        else:
            open_elements.pop()
            yield False, element, name


def outermost(root: Element, *names: str, left_out: Set[str] = frozenset()) -> Iterator[Element]:
    """Yield the elements, `root` included, whose local name is in `names`. `left_out`: see `walk`.

    Elements inside a yielded element are skipped, so that no text is read twice.
    """
    num_open = 0
    for begins, element, name in walk(root, left_out):
        if name in names:
            num_open += 1 if begins else -1
            if begins and num_open == 1:
                yield element


class Relationship(NamedTuple):
    """A reference from one part of an Office file to another.

    `kind`: the last word of the reference's type, such as "slide". `target`: the name of the other part.
    """

    kind: str
    target: str


def read_relationships(container: ZipContainer, part: str) -> dict[str, Relationship]:
    """Return a part's relationships by id, without those to targets outside of the file."""
    folder, name = posixpath.split(part)
    path = posixpath.join(folder, "_rels", f"{name}.rels")
    if path not in container:
        return {}
    return {
        attribute(element, "Id"): Relationship(
            attribute(element, "Type").rpartition("/")[2], resolve_part(folder, attribute(element, "Target"))
        )
        for element in parse_part(container, path)
        if attribute(element, "TargetMode") != "External"
    }


def resolve_part(folder: str, reference: str) -> str:
    """Return the part that a reference in `folder` names.

    >>> resolve_part("ppt/slides", "../charts/chart1.xml"), resolve_part("ppt", "/ppt/slides/s%201.xml")
    ('ppt/charts/chart1.xml', 'ppt/slides/s 1.xml')
    """
    path = unquote(reference.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")


def find_main_part(container: ZipContainer, default: str) -> str:
    """Return the part that the package names as its document (ECMA-376 part 2); `default` if it names none."""
    targets = (r.target for r in read_relationships(container, "").values() if r.kind == "officeDocument")
    return next(targets, default)


def read_properties(container: ZipContainer, part: str) -> dict[str, str]:
    """Return the `title` and `author` in the file's properties, "" if unset; {} if `part` is missing or damaged."""
    if part not in container:
        return {}
    try:
        root = parse_part(container, part)
    except UnreadableDocumentError:
        return {}
    properties = {local_name(element): (element.text or "").strip() for element in root.iter()}
    return {"title": properties.get("title", ""), "author": properties.get("creator", "")}
