"""XML parts of Office files: parsed without entities, walked without recursion, with the relationships between them."""

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
MAX_TAGS = 4_000_000  # an element takes 150 to 300 bytes in memory, also "<a/>"
# Entities are what billion-laughs and external-entity attacks need; no program writes them into these parts.
_ENTITY = re.compile(rb"<!ENTITY|<\0!\0E\0N\0T\0I\0T\0Y\0|\0<\0!\0E\0N\0T\0I\0T\0Y")


def parse_part(container: ZipContainer, name: str) -> Element:
    """The root element of a part. Raises UnreadableDocumentError for a missing or damaged one, or one with entities."""
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
    """The element's name without its namespace.

    >>> local_name(ElementTree.fromstring('<w:p xmlns:w="urn:w"/>'))
    'p'
    """
    return element.tag.rpartition("}")[2]


def attribute(element: Element, name: str, default: str = "") -> str:
    """The attribute with this local name, in any namespace: transitional and strict files use different ones."""
    if (value := element.get(name)) is not None:
        return value
    return next((value for key, value in element.items() if key.rpartition("}")[2] == name), default)


def child(element: Element | None, *path: str) -> Element | None:
    """The first descendant along a path of local names; None where there is none."""
    for name in path:
        if element is None:
            return None
        element = next((below for below in element if local_name(below) == name), None)
    return element


def parse_number(text: str, default: int = 0) -> int:
    """The number that an attribute holds, of at most seven digits; `default` for anything else."""
    return int(text) if text.isdecimal() and len(text) <= 7 else default


class Step(NamedTuple):
    """One step of a walk: an element begins, or it ends. The name is the local one; "" for a left out element."""

    begins: bool
    element: Element
    name: str


def walk(root: Element, left_out: Set[str] = frozenset()) -> Iterator[Step]:
    """Steps through all elements in document order. Of those whose local name is in `left_out`, the end alone comes,
    without a name: the text after them (`tail`) belongs to the element around them."""
    yield Step(True, root, local_name(root))
    open_elements = [(root, iter(root))]
    while open_elements:
        element, children = open_elements[-1]
        below = next(children, None)
        if below is None:
            open_elements.pop()
            yield Step(False, element, local_name(element))
        elif (name := local_name(below)) in left_out:
            yield Step(False, below, "")
        else:
            yield Step(True, below, name)
            open_elements.append((below, iter(below)))


class Relationship(NamedTuple):
    """What a part refers to: the last word of the type ("slide"), and the target's name in the container."""

    kind: str
    target: str


def read_relationships(container: ZipContainer, part: str) -> dict[str, Relationship]:
    """Relationships of a part by their ids. A part without a file of them has none; links outside are left out."""
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
    """The part that a reference in `folder` names.

    >>> resolve_part("ppt/slides", "../charts/chart1.xml"), resolve_part("ppt", "/ppt/slides/s%201.xml")
    ('ppt/charts/chart1.xml', 'ppt/slides/s 1.xml')
    """
    path = unquote(reference.partition("#")[0])
    return posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")


def find_main_part(container: ZipContainer, default: str) -> str:
    """The part that the package names as its document (ECMA-376 part 2); `default` where it names none."""
    targets = (r.target for r in read_relationships(container, "").values() if r.kind == "officeDocument")
    return next(targets, default)


def read_properties(container: ZipContainer, part: str) -> dict[str, str]:
    """`title` and `author` of a file, as far as its part of properties has them. A damaged part has none."""
    if part not in container:
        return {}
    try:
        root = parse_part(container, part)
    except UnreadableDocumentError:
        return {}
    found = {
        local_name(element): (element.text or "").strip() for element in root.iter() if isinstance(element.tag, str)
    }
    properties = {"title": found.get("title", ""), "author": found.get("creator", "")}
    return {name: value for name, value in properties.items() if value}
