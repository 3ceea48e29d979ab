"""CSV and TSV, with any of the delimiters of spreadsheets and databases. Read `parse_table` first."""

from __future__ import annotations

import csv
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from ragblend.corpus.readers.blocks import collapse_whitespace
from ragblend.corpus.readers.encodings import decode_text, unify_line_breaks
from ragblend.corpus.readers.fields import TEXT_FIELDS, add_notes_to_first
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords
from ragblend.errors import UnreadableDocumentError

Row = list[str]

_SAMPLE_CHARS = 1 << 17  # beginning of the text, searched for delimiter and header
_ROWS_AT_A_TIME = 512
_MAX_LINES_ABOVE_HEADER = 10
_DELIMITERS = ",;\t|"
_NO_DELIMITER = "\x1f"  # the csv module requires one
_DELIMITER_LINE = re.compile(r'"?sep=(\t|[^\w\s"\'])"?[;,]*\n', re.IGNORECASE)  # written by Excel
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NUMBER = re.compile(r"[-+(]?[$€£]? ?\d[\d.,' ]*[%)]?")
_OTHER_DELIMITERS = {  # except commas inside of a number or before a space
    mark: re.compile(
        "[" + _DELIMITERS.replace(mark, "").replace(",", "") + "]" + ("" if mark == "," else r"|,(?![\d ])")
    )
    for mark in _DELIMITERS
}
_LIMIT_LOCK = threading.Lock()


class Table(NamedTuple):
    """A table: the lines above its header, its column names, and its rows from top to bottom.

    `delimiter` is "" for a file of one column. Blank rows are left out. A row may have more or fewer values than there
    are names; names are unique, except "".
    """

    delimiter: str
    preamble: list[str]
    names: list[str]
    rows: Iterator[Row]


def read_csv(data: bytes, text_field: str = "") -> ParsedRecords:
    """Read a CSV file as one document per row if it has a text column, else as one document.

    The text column is the column called `text_field`. If `text_field` is "", the text column is the first one called
    text, content or page_content. A file without a text column becomes one document with a paragraph per row,
    `name: value; name: value`, so that every chunk has the names of its values.
    """
    decoded = decode_text(data)
    table = parse_table(decoded.text, text_field)
    column = _find_text_column(table.names, text_field)
    return add_notes_to_first(_read_rows(table) if column is None else _read_texts(table, column), decoded.notes)


def _read_rows(table: Table) -> ParsedRecords:
    """Yield one document of all rows."""
    has_wide, paragraphs = False, ["\n".join(table.preamble)] if table.preamble else []
    for row in table.rows:
        has_wide = has_wide or len(row) > len(table.names) > 0
        paragraphs.append("; ".join(_describe_values(table.names, row)))
    notes = ("some rows have more values than the header has names; these have no name",) if has_wide else ()
    yield ParsedRecord("", "\n\n".join(paragraphs), {}, notes=notes)


def _find_text_column(names: Row, text_field: str) -> int | None:
    if text_field:
        column = next((at for at, name in enumerate(names) if name.casefold() == text_field.casefold()), None)
        if column is None:
            raise UnreadableDocumentError(
                f"has no column {text_field!r}, but {', '.join(names[:12]) or 'one without a name'}; name another "
                "(`text_field`)"
            )
        return column
    # Only in lower case: "Text" is a column of bank statements, whose amounts belong to the text.
    return next((at for at, name in enumerate(names) if name in TEXT_FIELDS), None)


def _read_texts(table: Table, column: int) -> ParsedRecords:
    """Yield the documents of a table with a column of texts; the other columns are metadata."""
    above = {"preamble": "\n".join(table.preamble)} if table.preamble else {}
    for number, row in enumerate(table.rows):
        notes: tuple[str, ...] = ()
        if (num_more := len(row) - len(table.names)) > 0:
            text = table.delimiter.join(row[column : column + num_more + 1])
            row = [*row[:column], text, *row[column + num_more + 1 :]]
            notes = ("some rows have more values than the header has names; they are read as part of the text",)
        names = enumerate(table.names[: len(row)])
        others = {name: row[at].strip() for at, name in names if name and at != column}
        yield ParsedRecord(f"#{number}", row[column] if column < len(row) else "", {**above, **others}, notes=notes)


def _describe_values(names: Row, row: Row) -> Iterator[str]:
    """Yield `name: value` of each value that is not empty; values without a name alone."""
    for name, value in zip(chain(names, [""] * (len(row) - len(names))), row, strict=False):
        if value := _without_blank_lines(value.strip()):
            yield f"{name}: {value}" if name else value


def _without_blank_lines(value: str) -> str:
    if "\n" not in value:
        return value
    return "\n".join(line.rstrip() for line in value.split("\n") if line.strip())


def _without_blank_end(row: Row, width: int) -> Row:
    """Return `row` without empty values after the last column, which trailing delimiters make."""
    while len(row) > width and not row[-1].strip():
        row.pop()
    return row


def parse_table(text: str, text_field: str = "") -> Table:
    """Return the table in `text`; finds its delimiter and its header in time linear in the text.

    A first line `sep=;` names the delimiter. Without this line, the delimiter is the one that splits most of the first
    rows into the same number of values. Lines above the header, such as an account's name and period, are the preamble.
    If the first row has numbers where the rows below have numbers, it is data, and no column has a name.
    """
    text_names = {*TEXT_FIELDS, text_field} - {""}
    text = unify_line_breaks(text.removeprefix("\ufeff"))
    if match := _DELIMITER_LINE.match(text):
        text, delimiter = text[match.end() :], match[1]
    else:
        delimiter = _find_delimiter(text, text_names)
    sample = _parse_sample(text, delimiter)
    num_above = _count_rows_above_header(text, sample)
    rows = (row for row in _parse_rows(text, delimiter) if any(map(str.strip, row)))
    preamble = ["; ".join(filter(None, map(str.strip, row))) for row in islice(rows, num_above)]
    below = sample[num_above:]
    names = _make_names(next(rows)) if below and _is_header(below, text_names) else []
    trimmed = (_without_blank_end(row, len(names)) for row in rows)
    return Table(delimiter.strip(_NO_DELIMITER), preamble, names, trimmed)


def _parse_rows(text: str, delimiter: str) -> Iterator[Row]:
    """Yield rows of values. A quoted value may have line breaks; quotes inside of a value belong to it."""
    lines = (match[0] for match in _LINE.finditer(text))
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=delimiter != "\t")
    while rows := _next_rows(reader):
        yield from rows


def _next_rows(reader: Iterator[Row]) -> list[Row]:
    # The csv module's limit of a value's length, 128 KiB, is a setting of the process. It is raised under a lock and
    # restored at once.
    with _LIMIT_LOCK:
        limit = csv.field_size_limit(sys.maxsize >> 32)
        try:
            return list(islice(reader, _ROWS_AT_A_TIME))
        finally:
            csv.field_size_limit(limit)


def _parse_sample(text: str, delimiter: str) -> list[Row]:
    """Return the rows at a text's beginning that are not blank, without the last one if the sample's end may cut it."""
    sample = text[:_SAMPLE_CHARS]
    rows = [row for row in _parse_rows(sample, delimiter) if any(map(str.strip, row))]
    return rows[:-1] if len(sample) < len(text) and len(rows) > 2 else rows


def _find_delimiter(text: str, single_names: Iterable[str]) -> str:
    """Return the delimiter of a table's text; `_NO_DELIMITER` for one column."""
    first = text.lstrip().partition("\n")[0].strip().strip('"')
    if first in single_names:
        return _NO_DELIMITER
    scores = {mark: _score_delimiter(text, mark) for mark in _DELIMITERS if mark in text[:_SAMPLE_CHARS]}
    best = max(scores, key=scores.__getitem__, default=_NO_DELIMITER)
    return best if scores.get(best) else _NO_DELIMITER


def _score_delimiter(text: str, delimiter: str) -> float:
    """Return how well a delimiter divides a text: 0 not at all, up to 1 for many columns, equally many in every row."""
    rows = _parse_sample(text, delimiter)
    width, share = _find_width(rows)
    if width < 2:
        return 0.0
    sample = text[:_SAMPLE_CHARS]
    prose = sample.count(f"{delimiter} ") / sample.count(delimiter)  # ", " is a comma of the language
    if share < 0.45 or (share < 0.95 and prose > 0.5):
        return 0.0
    values = [value for row in rows for value in row]
    mixed = sum(_OTHER_DELIMITERS[delimiter].search(value) is not None for value in values) / len(values)
    score = share * (1 - 1 / width) * (1 - 0.9 * prose) * (1 - mixed)
    header = rows[_first_full_row(rows, width)]
    has_numbers = any(_NUMBER.fullmatch(value.strip()) for value in header)
    return score / 2 if header is not rows[0] and has_numbers else score


def _find_width(rows: list[Row]) -> tuple[int, float]:
    """Return the number of values that most rows have, and the share of these rows.

    If rows end early, each at another column, it is the number of names in the header, with half the share.
    """
    if not rows:
        return 0, 0.0
    widths, first = Counter(map(len, rows)), rows[0]
    width = max(widths, key=lambda width: (widths[width], width))
    share = widths[width] / len(rows)
    names = {name.strip() for name in first if 0 < len(name.strip()) <= 40 and not _NUMBER.fullmatch(name.strip())}
    if share < 0.5 and len(names) == len(first) > 2:
        return len(first), sum(2 <= len(row) <= len(first) for row in rows) / len(rows) / 2
    return width, share


def _num_filled(row: Row) -> int:
    return sum(bool(value.strip()) for value in row)


def _first_full_row(rows: list[Row], width: int) -> int:
    """Return the index of the first row with all columns, of which one may lack a name."""
    least = min(width, max(2, width - 1))
    return next((at for at, row in enumerate(rows) if len(row) >= width and _num_filled(row) >= least), 0)


def _count_rows_above_header(text: str, sample: list[Row]) -> int:
    """Return the number of rows above the header, at most 10; 0 if no header is found."""
    width, _ = _find_width(sample)
    if width < 2:
        return 0
    num_above = _first_full_row(sample, width)
    after_gap = _count_rows_above_gap(text)
    if 0 < after_gap < len(sample):
        is_full = [_num_filled(row) == len(row) == width for row in sample[: after_gap + 1]]
        num_above = after_gap if is_full[-1] and not any(is_full[:-1]) else num_above
    return num_above if num_above <= _MAX_LINES_ABOVE_HEADER else 0


def _count_rows_above_gap(text: str) -> int:
    """Return the number of lines above the last blank line among the first ones; 0 without a blank line."""
    first = text[: 400 * _MAX_LINES_ABOVE_HEADER].split("\n")[:_MAX_LINES_ABOVE_HEADER]
    is_filled = [bool(line.strip(f" {_DELIMITERS}")) for line in first]
    gaps = [at for at in range(1, len(is_filled)) if not is_filled[at] and any(is_filled[at + 1 :])]
    return sum(is_filled[: gaps[-1]]) if gaps else 0


def _is_header(rows: list[Row], text_names: Iterable[str]) -> bool:
    """Return True if the first row has the names of columns."""
    first, below = rows[0], rows[1:]
    if len(first) < 2 or not below:
        return any(value.strip() in text_names for value in first)
    numeric = [at for at, value in enumerate(first) if _NUMBER.fullmatch(value.strip())]
    if not numeric:
        return True
    columns = [[row[at].strip() for row in below if at < len(row) and row[at].strip()] for at in range(len(first))]
    filled = [at for at, values in enumerate(columns) if values]
    usual = [
        at for at in filled if sum(bool(_NUMBER.fullmatch(value)) for value in columns[at]) > 0.9 * len(columns[at])
    ]
    if not set(numeric) & set(usual) or not set(usual) <= set(numeric):
        return True
    numbers = [first[at].strip() for at in numeric]
    return all(re.fullmatch(r"(19|20)\d\d", number) for number in numbers) or _are_counted(numbers)


def _are_counted(values: Row) -> bool:
    """Return True for consecutive whole numbers, such as days of a month.

    >>> _are_counted(["1", "2", "3"]), _are_counted(["1"]), _are_counted(["1", "5"])
    (True, False, False)
    """
    if len(values) < 2 or not all(value.isdecimal() and len(value) < 10 for value in values):
        return False
    return all(int(value) == int(values[0]) + at for at, value in enumerate(values))


def _make_names(header: Row) -> Row:
    """Return the columns' names; of equal ones all but the first get a number.

    >>> _make_names(["Key", "Comment", "Comment", ""])
    ['Key', 'Comment', 'Comment 2', '']
    """
    names: Row = []
    header = [collapse_whitespace(name) for name in header]
    taken, seen = set(header), Counter[str]()
    for name in header:
        seen[name] += 1
        if name and seen[name] > 1:
            while f"{name} {seen[name]}" in taken:
                seen[name] += 1
            taken.add(f"{name} {seen[name]}")
        names.append(name if seen[name] == 1 or not name else f"{name} {seen[name]}")
    return names
