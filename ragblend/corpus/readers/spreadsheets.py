"""Excel workbooks (.xlsx, .xls): each sheet is a heading, each row a line of cells.

calamine (Rust) parses in a child process, because it aborts the process if a sheet does not fit in memory; two cells at
opposite ends of a sheet of 2 KB are enough.
"""

from __future__ import annotations

from ragblend.corpus.readers.blocks import TextBlocks
from ragblend.corpus.readers.child import run_in_child
from ragblend.corpus.readers.html import read_html
from ragblend.corpus.readers.rejected import OLE_MAGIC, ZIP_MAGIC
from ragblend.corpus.readers.sheets import LARGE
from ragblend.corpus.readers.tables import read_csv
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.corpus.readers.zip_container import ZipContainer
from ragblend.errors import UnreadableDocumentError

MAX_CHILD_SECONDS = 300
MAX_MEMORY_BYTES = 3 << 30


def read_spreadsheet(data: bytes) -> ParsedRecords:
    """Read one workbook as one document. Hidden sheets are included, and formulas give their results.

    Raises UnreadableDocumentError if `data` is no workbook, or is damaged, encrypted or too large, and if
    python-calamine is not installed.
    """
    if data.startswith(ZIP_MAGIC):
        ZipContainer(data, "spreadsheet").check_declared_size()
    elif not data.startswith(OLE_MAGIC):
        yield from _read_other(data)
        return
    sheets, rejected = run_in_child(
        "ragblend.corpus.readers.sheets:read_sheets",
        limit_s=MAX_CHILD_SECONDS,
        memory_bytes=MAX_MEMORY_BYTES,
        fix=LARGE,
        input=data,
    )
    if rejected:
        raise UnreadableDocumentError(rejected)
    blocks = TextBlocks()
    for name, lines in sheets:
        blocks.add_heading(name, 1)
        blocks.add("\n".join(lines))
    record = blocks.build()
    has_cells = len(record.text.split("\n")) > len(record.marks) * 2 - 1
    yield record if has_cells else record._replace(text="")


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
