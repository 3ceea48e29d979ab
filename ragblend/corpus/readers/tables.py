"""CSV and TSV."""

from __future__ import annotations

import csv
import io
import sys

from ragblend.corpus.readers.encodings import decode
from ragblend.corpus.readers.records import TEXT_FIELDS
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords, UnreadableRecord
from ragblend.errors import UnreadableDocumentError


def read_csv(data: bytes) -> ParsedRecords:
    """One document per row when a column is called text, content or page_content; else one, a paragraph per row."""
    text = decode(data)
    header = text.partition("\n")[0]
    delimiter = max(",;\t|\x1f", key=lambda mark: (header.count(mark), mark == "\x1f"))  # \x1f: a single column
    limit = csv.field_size_limit(sys.maxsize >> 32)  # 128 KiB otherwise: less than a document may have
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restkey="", restval=""))
    except csv.Error as error:
        raise UnreadableDocumentError(f"is not CSV ({error}); repair it or rename it to .txt") from error
    finally:
        csv.field_size_limit(limit)
    wide = {number for number, row in enumerate(rows) if isinstance(row.get(""), list)}
    column = next((name for name in (rows[0] if rows else ()) if name.strip().lower() in TEXT_FIELDS), None)
    message = f"has more fields than the header; quote the {delimiter!r} in its text"
    if column is None:
        if wide:
            raise UnreadableDocumentError(f"row {min(wide) + 1} {message}")
        lines = ("; ".join(f"{name}: {value}" for name, value in row.items() if value) for row in rows)
        yield ParsedRecord("", "\n\n".join(lines), {})
        return
    for number, row in enumerate(rows):
        if number in wide:
            yield UnreadableRecord(f"#{number}", f"row {number + 1} {message}")
            continue
        others = {name: value for name, value in row.items() if name and name != column}
        yield ParsedRecord(f"#{number}", row[column], others)
