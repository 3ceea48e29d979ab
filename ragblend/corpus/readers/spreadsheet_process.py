"""Program of the child process that reads a spreadsheet: bytes on stdin, JSON on stdout. See `spreadsheets`.

It imports no module of ragblend, so that it starts in 30 ms.
"""

from __future__ import annotations

import datetime
import io
import json
import sys
from typing import Any

MAX_MEMORY_BYTES = 3 << 30
MAX_TEXT_CHARS = 64 << 20
MAX_CELLS = 5_000_000  # with the empty ones between others; each takes 2 to 3 µs


class TooLargeError(Exception):
    """A workbook has more cells or more text than are read."""


def main() -> None:
    """Read a workbook from stdin. Write {"sheets": [[name, lines], ...]} or {"error": class, "message": text}."""
    _limit_memory()
    try:
        answer: dict[str, Any] = {"sheets": _read_sheets(sys.stdin.buffer.read())}
    except TooLargeError as error:
        answer = {"error": "TooLarge", "message": str(error)}
    except BaseException as error:  # a panic of the Rust library is not an Exception
        answer = {"error": type(error).__name__, "message": str(error).strip()[:300]}
    json.dump(answer, sys.stdout)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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
            raise TooLargeError(f"has {num_cells} cells, more than the {MAX_CELLS} that are read")
        for row in content.iter_rows():
            if line := " | ".join(map(_cell_text, row)).rstrip(" |"):
                lines.append(line)
                num_chars += len(line)
                if num_chars > MAX_TEXT_CHARS:
                    raise TooLargeError(f"has more than {MAX_TEXT_CHARS >> 20} million characters of text")
        sheets.append((sheet.name, lines))
    return sheets


def _cell_text(value: Any) -> str:
    """Return a cell's text: whole numbers without a fraction, dates as ISO 8601."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ").removesuffix(" 00:00:00")
    return " ".join(str(value).split())


if __name__ == "__main__":
    main()
