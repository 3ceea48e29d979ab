"""The cells of Excel workbooks as text, by calamine (Rust). Runs in a child process, see `spreadsheets`."""

from __future__ import annotations

import datetime
import io
from typing import Any

from ragblend.corpus.readers.blocks import table_row
from ragblend.corpus.readers.rejected import OLE_MAGIC, describe_ole
from ragblend.errors import UnreadableDocumentError

MAX_TEXT_CHARS = 64 << 20
MAX_CELLS = 5_000_000  # with the empty ones between others; each takes 2 to 3 µs
LARGE = "delete empty rows and columns that have a format, or save its sheets as CSV"


def read_sheets(data: bytes) -> list[tuple[str, list[str]]]:
    """Return a workbook's sheets as pairs: the sheet's name, and a line of text per row.

    Raises UnreadableDocumentError if `data` is no workbook, or is damaged, encrypted or too large, and if
    python-calamine is not installed.
    """
    try:
        return _read_sheets(data)
    except (UnreadableDocumentError, MemoryError):
        raise
    except BaseException as error:  # a panic of the Rust library is not an Exception
        raise UnreadableDocumentError(_describe_failure(data, error)) from error


def _read_sheets(data: bytes) -> list[tuple[str, list[str]]]:
    from python_calamine import CalamineWorkbook, SheetTypeEnum

    workbook = CalamineWorkbook.from_object(io.BytesIO(data))
    sheets = []
    num_chars = num_cells = 0
    for sheet in workbook.sheets_metadata:
        if sheet.typ is not SheetTypeEnum.WorkSheet:
            continue  # a chart sheet or a macro sheet
        lines = []
        content = workbook.get_sheet_by_name(sheet.name)
        num_cells += content.height * content.width
        if num_cells > MAX_CELLS:
            raise UnreadableDocumentError(f"has {num_cells} cells, more than the {MAX_CELLS} that are read; {LARGE}")
        for row in content.iter_rows():
            if line := table_row([_cell_text(value) for value in row]):
                lines.append(line)
                num_chars += len(line)
                if num_chars > MAX_TEXT_CHARS:
                    raise UnreadableDocumentError(
                        f"has more than {MAX_TEXT_CHARS >> 20} million characters of text; {LARGE}"
                    )
        sheets.append((sheet.name, lines))
    return sheets


def _describe_failure(data: bytes, error: BaseException) -> str:
    if isinstance(error, ImportError):
        return "is a spreadsheet, and those need python-calamine: pip install 'ragblend[documents]'"
    if type(error).__name__ == "PasswordError":
        return "is a spreadsheet with a password; save it without one"
    if data.startswith(OLE_MAGIC) and "Workbook".encode("utf-16-le") not in data:
        return describe_ole(data, "spreadsheet")
    return f"is damaged or no spreadsheet ({str(error).strip()[:300]}); save or download it again"


def _cell_text(value: Any) -> str:
    """Return a cell's text: whole numbers without a fraction, dates as ISO 8601."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return str(value)
