"""The cells of Excel workbooks as text, by calamine (Rust). Runs in a child process, see `spreadsheets`."""

from __future__ import annotations

import datetime
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ragblend.corpus.readers.blocks import RowPlacer, TableCell, table_row
from ragblend.corpus.readers.notation.scripts import END, LOWERED, RAISED, write_scripts
from ragblend.corpus.readers.rejected import OLE_MAGIC, ZIP_MAGIC, describe_ole
from ragblend.errors import UnreadableDocumentError

if TYPE_CHECKING:
    from python_calamine import CalamineSheet

MAX_TEXT_CHARS = 64 << 20
MAX_CELLS = 5_000_000  # with the empty ones between others; each takes 2 to 3 µs
_TEXT_PARTS = ("xl/sharedstrings", "xl/worksheets/")
_RUN = rb"(?:(?!<(?:\w+:)?r>).)*?"  # the rest of a run
_SHIFTED = re.compile(  # a run that is raised or lowered
    rb"""(vertAlign\s+val=["'](?:super|(sub))script["']""" + _RUN + rb"<(?:\w+:)?t(?:\s[^<>]*)?>)([^<]*)", re.DOTALL
)
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

    workbook = CalamineWorkbook.from_object(io.BytesIO(_mark_scripts(data)))
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
        for row in _rows(content):
            if line := table_row(row):
                lines.append(line)
                num_chars += len(line)
                if num_chars > MAX_TEXT_CHARS:
                    raise UnreadableDocumentError(
                        f"has more than {MAX_TEXT_CHARS >> 20} million characters of text; {LARGE}"
                    )
        sheets.append((sheet.name, lines))
    return sheets


def _mark_scripts(data: bytes) -> bytes:
    """Return a workbook with marks around raised and lowered text, of which calamine reads no formats."""
    if not data.startswith(ZIP_MAGIC):
        return data
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as workbook:
            names = [name for name in workbook.namelist() if name.lower().startswith(_TEXT_PARTS)]
            marked = {
                name: _SHIFTED.sub(_mark_run, part) for name in names if b"vertAlign" in (part := workbook.read(name))
            }
            if not marked:
                return data
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as changed:
                for name in workbook.namelist():
                    changed.writestr(name, marked.get(name) or workbook.read(name))
        return file.getvalue()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        return data  # calamine names the damage


def _mark_run(run: re.Match[bytes]) -> bytes:
    return run[1] + (LOWERED if run[2] else RAISED).encode() + run[3] + END.encode()


def _rows(sheet: CalamineSheet) -> Iterator[list[str]]:
    """Yield the texts of a sheet's rows; a merged cell is repeated in each row that it spans."""
    first_column = sheet.start[1] if sheet.start else 0  # of the rows that calamine yields; they begin at row 0
    merged = {
        (top, left - first_column): bottom - top + 1
        for (top, left), (bottom, _) in sheet.merged_cell_ranges or ()
        if bottom > top
    }
    covered = {column for _, column in merged}
    placer = RowPlacer()
    for number, values in enumerate(sheet.iter_rows()):
        texts = [_cell_text(value) for value in values]
        if not merged:
            yield texts
            continue
        yield placer.place(
            TableCell([text], rows=merged.get((number, column), 1), is_covered=not text and column in covered)
            for column, text in enumerate(texts)
        )


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
    return write_scripts(str(value))
