"""Text of charts and SmartArt in Word and PowerPoint files."""

from __future__ import annotations

import datetime
import re
from collections.abc import Set
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import table_row
from ragblend.corpus.readers.notation.equations import read_equation
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.office_xml import (
    Relationship,
    attribute,
    child,
    local_name,
    outermost,
    parse_number,
    parse_part,
    walk,
)
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

DRAWING_REFERENCES = frozenset({"chart", "relIds"})
"""Elements that refer to a chart or SmartArt."""

_LEFT_OUT = frozenset({"Fallback", "oMathPara", "oMath"})
_DATE_CODE = re.compile(r"yy|d[-/. ]m|m[-/. ]d", re.IGNORECASE)


def read_drawing(container: ZipContainer, relationships: dict[str, Relationship], reference: Element) -> str:
    """Return the text of the chart or SmartArt that an element refers to; "" if its part is missing or damaged.

    Removes the relationship of the chart or SmartArt from `relationships`, so that each text is read once.
    """
    part = relationships.pop(attribute(reference, "dm" if local_name(reference) == "relIds" else "id"), None)
    if part is None:
        return ""
    try:
        root = parse_part(container, part.target)
    except UnreadableDocumentError:
        return ""
    return _chart_text(root) if part.kind == "chart" else paragraph_lines(root)


def drawing_text(element: Element) -> str:
    """Return the text inside an element of DrawingML, with its line breaks and equations."""
    texts: list[str] = []
    for begins, below, name in walk(element, _LEFT_OUT):
        if name == "r" and (mark := _script(below)):
            texts.append(mark if begins else END)
        elif not name and local_name(below) != "Fallback":
            texts.append(read_equation(below))
        elif begins and name in ("t", "br"):
            texts.append("\n" if name == "br" else below.text or "")
    return write_scripts("".join(texts))


def _script(run: Element) -> str:
    """Return the mark of a raised or lowered run; "" for other runs. `baseline`: per mille of the font's size."""
    properties = child(run, "rPr")
    baseline = attribute(properties, "baseline") if properties is not None else ""
    if not parse_number(baseline.removeprefix("-").removesuffix("%")):
        return ""
    return LOWERED if baseline.startswith("-") else RAISED


def paragraph_lines(root: Element, left_out: Set[str] = frozenset()) -> str:
    """Return the paragraphs of DrawingML below `root`, each as a line. `left_out`: see `office_xml.walk`."""
    texts = (drawing_text(element).strip() for element in outermost(root, "p", left_out=left_out))
    return "\n".join(text for text in texts if text)


def _chart_text(root: Element) -> str:
    """Return the titles of a chart and its axes, then a table with a row per category and a column per series."""
    titles = [paragraph_lines(element) for element in outermost(root, "title")]
    series = list(outermost(root, "ser"))
    names = [" ".join(_points(child(one, "tx")).values()) for one in series]
    categories: dict[int, str] = {}
    for one in series:
        categories = categories or _points(child(one, "cat")) or _points(child(one, "xVal"))
    values = [_points(child(one, "val")) or _points(child(one, "yVal")) for one in series]
    numbers = sorted(set(categories).union(*values))
    rows = [[categories.get(number, ""), *(column.get(number, "") for column in values)] for number in numbers]
    lines = [title for title in titles if title] + [table_row(row) for row in [["", *names], *rows]]
    return "\n".join(line for line in lines if line)


def _points(data: Element | None) -> dict[int, str]:
    """Return the cached values of a chart's reference by their numbers; of several levels of categories, the first."""
    points: dict[int, str] = {}
    format_code = ""
    for element in data.iter() if data is not None else ():
        if local_name(element) == "formatCode":
            format_code = element.text or ""
        elif local_name(element) == "pt":
            value = child(element, "v")
            number = attribute(element, "idx", "0")
            if value is not None and value.text and number.isdecimal():
                points.setdefault(int(number), _value_text(value.text, format_code))
        elif local_name(element) == "v" and not points and element.text:
            points[0] = element.text  # a name that the chart itself holds, instead of a cell
    return points


def _value_text(value: str, format_code: str) -> str:
    """Return a chart's value as it is displayed: dates are stored as days since 1899-12-30, decimals with binary
    rounding errors.

    >>> _value_text("37261.0", "m/d/yyyy"), _value_text("4.4000000000000004", "General"), _value_text("May", "")
    ('2002-01-05', '4.4', 'May')
    """
    try:
        number = float(value)
        if _DATE_CODE.search(format_code):
            return (datetime.date(1899, 12, 30) + datetime.timedelta(int(number))).isoformat()
    except (ValueError, OverflowError):
        return value
    return f"{number:.15g}"
