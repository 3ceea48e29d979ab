"""Heading levels and list labels of a Word file's paragraphs, from its styles and lists; raised and lowered runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.notation.scripts import LOWERED, RAISED
from ragblend.corpus.readers.office_xml import attribute, child, local_name, parse_number, parse_part
from ragblend.corpus.readers.zip_container import ZipContainer

_HEADING = re.compile(r"heading ([1-9])$", re.IGNORECASE)
_MAX_BASED_ON = 12  # limit, because styles may be based on each other in a circle
_MAX_LEVELS = 9
_MAX_LABEL_CHARS = 40
_ROMAN = ((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"))
_ROMAN_UNITS = ((9, "ix"), (5, "v"), (4, "iv"), (1, "i"))
_MAX_ROMAN = 5000
_SCRIPTS = {"superscript": RAISED, "subscript": LOWERED}
_MIN_RAISED = 6  # half points; less only levels out a line


class Style(NamedTuple):
    """A style of paragraphs or runs, with the properties of the styles on which it is based."""

    heading_level: int = 0  # 0: body text
    list_id: str = ""  # "": not in a list
    list_level: int = 0  # 0: the outermost
    script: str = ""  # "superscript", "subscript", "baseline"; "": as the text around it


class ListLevel(NamedTuple):
    """A level of a list: how the labels of its paragraphs are made."""

    number_format: str  # Word's name for it, such as "lowerRoman"
    label: str  # text of the label, with %1 to %9 for the numbers of the levels
    start: int  # first number


def read_styles(container: ZipContainer, part: str) -> dict[str, Style]:
    """Return the styles of a Word file by id; none if the file has no such part."""
    root = parse_part(container, part) if part in container else ()
    elements = {attribute(one, "styleId"): one for one in root if local_name(one) == "style"}
    return {style_id: _resolve(elements, style_id) for style_id in elements}


def _resolve(elements: dict[str, Element], style_id: str) -> Style:
    level, list_id, list_level, script = 0, "", "", ""
    element = elements.get(style_id)
    for _ in range(_MAX_BASED_ON):
        if element is None:
            break
        level = level or _heading_level(element)
        numbering = child(element, "pPr", "numPr")
        list_id = list_id or value_of(child(numbering, "numId"))
        list_level = list_level or value_of(child(numbering, "ilvl"))
        script = script or _script(child(element, "rPr"))
        element = elements.get(value_of(child(element, "basedOn")))
    return Style(level, list_id, parse_number(list_level), script)


def _script(properties: Element | None) -> str:
    """Return the `Style.script` of a run's properties."""
    position = value_of(child(properties, "position"))
    if parse_number(position.removeprefix("-")) >= _MIN_RAISED:
        return "subscript" if position.startswith("-") else "superscript"
    return value_of(child(properties, "vertAlign"))


def run_script(run: Element, styles: dict[str, Style]) -> str:
    """Return the mark (`scripts.RAISED`, `scripts.LOWERED`) of a raised or lowered run; "" for other runs."""
    properties = child(run, "rPr")
    if properties is None:
        return ""
    style = styles.get(value_of(child(properties, "rStyle")), Style())
    return _SCRIPTS.get(_script(properties) or style.script, "")


def _heading_level(style: Element) -> int:
    name = value_of(child(style, "name")).lower()
    if name == "title":
        return 1
    if match := _HEADING.match(name):
        return int(match[1])
    return outline_level(child(style, "pPr"))


def outline_level(properties: Element | None) -> int:
    """Return the outline level of a paragraph's or style's properties, from 1; 0 for body text."""
    value = value_of(child(properties, "outlineLvl"))
    return int(value) + 1 if value.isdecimal() and int(value) < _MAX_LEVELS else 0


def value_of(element: Element | None) -> str:
    """Return the value of a property such as <w:numId w:val="3"/>; "" if the property is missing."""
    return "" if element is None else attribute(element, "val")


class ListLabels:
    """The labels of list paragraphs ("4.2", "b)", "-"), counted in the order of the paragraphs."""

    def __init__(self, container: ZipContainer, part: str) -> None:
        self._levels: dict[str, dict[int, ListLevel]] = {}  # by list id
        self._counters_of: dict[str, dict[int, int]] = {}  # lists of one abstract list share counters
        if part in container:
            self._read(parse_part(container, part))

    def _read(self, root: Element) -> None:
        abstract = {attribute(one, "abstractNumId"): one for one in root if local_name(one) == "abstractNum"}
        counters: dict[str, dict[int, int]] = {}
        for element in root:
            if local_name(element) != "num":
                continue
            list_id, abstract_id = attribute(element, "numId"), value_of(child(element, "abstractNumId"))
            self._levels[list_id] = _read_levels(abstract.get(abstract_id))
            restarts = any(local_name(one) == "lvlOverride" for one in element)
            self._counters_of[list_id] = {} if restarts else counters.setdefault(abstract_id, {})

    def next_label(self, list_id: str, level: int) -> str:
        """Return the label of the next paragraph of a list at this level; "" if the list has no labels."""
        levels = self._levels.get(list_id)
        if levels is None or level not in levels:
            return ""
        counters = self._counters_of[list_id]
        counters[level] = counters.get(level, levels[level].start - 1) + 1
        for deeper in range(level + 1, _MAX_LEVELS):
            counters.pop(deeper, None)
        if levels[level].number_format == "bullet":
            return "-"
        return re.sub(r"%([1-9])", lambda match: _number(levels, counters, int(match[1]) - 1), levels[level].label)


def _read_levels(abstract: Element | None) -> dict[int, ListLevel]:
    levels = {}
    for element in abstract if abstract is not None else ():
        if local_name(element) == "lvl":
            levels[parse_number(attribute(element, "ilvl"))] = ListLevel(
                value_of(child(element, "numFmt")),
                value_of(child(element, "lvlText"))[:_MAX_LABEL_CHARS],
                parse_number(value_of(child(element, "start")), 1),
            )
    return levels


def _number(levels: dict[int, ListLevel], counters: dict[int, int], level: int) -> str:
    if level not in levels:
        return ""
    number = counters.get(level, levels[level].start)
    return _FORMATS.get(levels[level].number_format, str)(number)


def _letters(number: int) -> str:
    """Return a number as letters. Word repeats letters after z: 27 is aa, 28 is bb.

    >>> _letters(2), _letters(28)
    ('b', 'bb')
    """
    return chr(ord("a") + (number - 1) % 26) * min((number - 1) // 26 + 1, _MAX_LEVELS)


def _roman(number: int) -> str:
    """Return the Roman numeral in small letters.

    >>> _roman(14)
    'xiv'
    """
    if number > _MAX_ROMAN:
        return str(number)
    numeral = ""
    for value, letters in _ROMAN + _ROMAN_UNITS:
        count, number = divmod(number, value)
        numeral += letters * count
    return numeral


_FORMATS: dict[str, Callable[[int], str]] = {
    "none": lambda number: "",
    "lowerLetter": _letters,
    "upperLetter": lambda number: _letters(number).upper(),
    "lowerRoman": _roman,
    "upperRoman": lambda number: _roman(number).upper(),
    "decimalZero": lambda number: f"{number:02}",
}
