"""Excel workbooks (.xlsx, .xls): each sheet is a heading, each row a line of cells.

calamine (Rust) parses in a child process, because it aborts the process if a sheet does not fit in memory; two cells at
opposite ends of a sheet of 2 KB are enough.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ragblend.corpus.readers.blocks import TextBlocks
from ragblend.corpus.readers.html import read_html
from ragblend.corpus.readers.rejected import OLE_MAGIC, ZIP_MAGIC, describe_ole
from ragblend.corpus.readers.tables import read_csv
from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords
from ragblend.corpus.readers.zip_container import ZipContainer, check_unpacked_size
from ragblend.errors import UnreadableDocumentError

MAX_CHILD_SECONDS = 300
_PROGRAM = Path(__file__).with_name("spreadsheet_process.py")
_LARGE = "delete empty rows and columns that have a format, or save its sheets as CSV"


def read_spreadsheet(data: bytes) -> ParsedRecords:
    """Read one workbook as one document, with hidden sheets. Formulas give their results.

    Raises UnreadableDocumentError for other, damaged, encrypted and too large files, and without python-calamine.
    """
    if data.startswith(ZIP_MAGIC):
        check_unpacked_size(ZipContainer(data, "spreadsheet"))
    elif not data.startswith(OLE_MAGIC):
        yield from _read_other(data)
        return
    blocks = TextBlocks()
    for name, lines in _run_calamine(data):
        blocks.add_heading(name, 1)
        blocks.add("\n".join(lines))
    text, marks = blocks.build()
    yield ParsedRecord("", text if len(text.split("\n")) > len(marks) * 2 - 1 else "", {}, marks)


def _read_other(data: bytes) -> ParsedRecords:
    """Read HTML or CSV in a file called .xls, as many programs write it."""
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"urn:schemas-microsoft-com:office:spreadsheet" in data[:4096]:
        raise UnreadableDocumentError(
            "is an XML spreadsheet of 2003, which is not read; convert it: soffice --headless --convert-to xlsx FILE"
        )
    if head.startswith((b"<html", b"<!doctype html", b"<table", b"<meta", b"<head")):
        yield from read_html(data)
    elif b"\t" in data[:4096] or b";" in data[:4096] or b"," in data[:4096]:
        yield from read_csv(data)
    else:
        raise UnreadableDocumentError("is no spreadsheet: it does not begin as Excel files do")


def _run_calamine(data: bytes) -> list[tuple[str, list[str]]]:
    """Return the names of a workbook's sheets with the lines of their rows. Runs the child process."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)],
            input=data,
            capture_output=True,
            timeout=MAX_CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreadableDocumentError(f"took more than {MAX_CHILD_SECONDS} s to read; {_LARGE}") from error
    try:
        answer = json.loads(child.stdout)
    except ValueError as error:
        raise UnreadableDocumentError(
            f"does not fit in memory, or is damaged (the reading process ended with code {child.returncode}); {_LARGE}"
        ) from error
    if "sheets" in answer:
        return [(name, lines) for name, lines in answer["sheets"]]
    raise UnreadableDocumentError(_describe_failure(data, answer))


def _describe_failure(data: bytes, answer: dict[str, str]) -> str:
    if answer["error"] == "ImportError":
        return "is a spreadsheet, and those need python-calamine: pip install 'ragblend[documents]'"
    if answer["error"] == "TooLarge":
        return f"{answer['message']}; {_LARGE}"
    if answer["error"] == "PasswordError":
        return "is a spreadsheet with a password; save it without one"
    if data.startswith(OLE_MAGIC) and "Workbook".encode("utf-16-le") not in data:
        return describe_ole(data, "spreadsheet")
    return f"is damaged or no spreadsheet ({answer['message']}); save or download it again"
