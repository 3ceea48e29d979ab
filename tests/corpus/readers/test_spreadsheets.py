"""Spreadsheets: cells as searchable text, and files that would end the process or fill its memory."""

from __future__ import annotations

import os
import sys

import pytest
from document_files import only
from office_files import make_odf, make_xlsx, make_zip

from ragblend.corpus.readers import child, spreadsheets
from ragblend.corpus.readers.opendocument import read_ods
from ragblend.corpus.readers.spreadsheets import read_spreadsheet
from ragblend.corpus.readers.types import Mark, ParsedRecord
from ragblend.errors import UnreadableDocumentError

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


def read(data: bytes) -> ParsedRecord:
    return only(read_spreadsheet(data))


def cells(*values: str, row: int = 1) -> str:
    """A row of a sheet: numbers as they are, other values as texts."""
    found = (
        f'<c r="{chr(65 + column)}{row}"><v>{value}</v></c>'
        if value.replace(".", "").isdigit()
        else f'<c r="{chr(65 + column)}{row}" t="inlineStr"><is><t>{value}</t></is></c>'
        for column, value in enumerate(values)
        if value
    )
    return f'<row r="{row}">{"".join(found)}</row>'


def test_sheets_are_headings_and_rows_are_lines():
    rows = cells("Bolt", "Torque", "Note") + cells("M8", "40", "", row=2) + cells("M\n9", "4.5", "x", row=5)
    record = read(make_xlsx({"Sizes": rows, "Empty": "", "More": cells("y")}))
    assert record.text == "# Sizes\n\nBolt | Torque | Note\nM8 | 40\nM 9 | 4.5 | x\n\n# Empty\n\n# More\n\ny"
    assert [mark.value for mark in record.marks] == ["Sizes", "Empty", "More"]
    assert record.marks[2] == Mark(record.text.index("# More"), "heading", "More", 1)


def test_dates_are_iso_and_errors_and_booleans_are_kept():
    styles = '<cellXfs><xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="22"/></cellXfs>'
    row = (
        '<row r="1"><c r="A1" s="1"><v>46000</v></c><c r="B1" s="2"><v>46000.5</v></c>'
        '<c r="C1" t="b"><v>1</v></c><c r="D1" t="s"><v>0</v></c></row>'
    )
    record = read(make_xlsx({"S": row}, styles, ["shared &amp; text"]))
    assert record.text == "# S\n\n2025-12-09 | 2025-12-09 12:00:00 | True | shared & text"


def test_opendocument_spreadsheets_are_read():
    cell = '<table:table-cell office:value-type="{}"{}><text:p>{}</text:p></table:table-cell>'
    row = cell.format("string", "", "M8") + cell.format("date", ' office:date-value="2026-05-01T00:00:00"', "1.5.26")
    empty = '<table:table-cell table:number-columns-repeated="16384"/>'
    rows = f"<table:table-row>{row}{empty}</table:table-row><table:table-row>{empty}</table:table-row>"
    body = f'<table:table table:name="Tabelle">{rows}</table:table><table:table table:name="B"/>'
    (record,) = read_ods(make_odf(body, "spreadsheet"))
    assert record.text == "# Tabelle\n\nM8 | 2026-05-01\n\n# B"
    assert [mark.value for mark in record.marks] == ["Tabelle", "B"]
    (record,) = read_ods(make_odf('<table:table table:name="A"/>', "spreadsheet"))
    assert record.text == ""


def test_a_workbook_without_cells_has_no_text():
    assert read(make_xlsx({"Sheet1": "", "Sheet2": ""})).text == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_xlsx({"S": cells("x")})[:-300], "damaged"),
        (make_zip({"a": "b"}), "damaged or no spreadsheet"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "password"),
        (OLE + "WordDocument".encode("utf-16-le"), "Word file of the format before 2007"),
        (OLE + b"\0" * 600, "OLE file"),
        (b"\x01\x02\x03", "is no spreadsheet"),
        (b'<?xml?><Workbook xmlns="urn:schemas-microsoft-com:office:spreadsheet">', "convert-to xlsx"),
    ],
)
def test_damaged_and_other_files_are_named(data, message):
    with pytest.raises(UnreadableDocumentError, match=message):
        read(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"<table><tr><td>M8<td>40</table>", "M8 | 40"), (b"name\tsize\nbolt\tM8\n", "name: bolt; size: M8")],
)
def test_html_and_csv_that_are_called_xls_are_read(data, text):
    assert read(data).text == text


def test_two_distant_cells_of_a_sheet_do_not_end_the_process():
    far = cells("1") + '<row r="1048576"><c r="XFD1048576"><v>2</v></c></row>'
    with pytest.raises(UnreadableDocumentError, match=r"reading it (crashed|took too much memory)|cells, more than"):
        read(make_xlsx({"S": far}))


@pytest.mark.slow  # 4 GiB
def test_a_long_text_in_every_cell_does_not_fill_memory():
    cell = '<c t="s"><v>0</v></c>'
    rows = f"<row>{cell * 100}</row>" * 40
    with pytest.raises(UnreadableDocumentError, match=r"reading it (crashed|took too much memory)|million characters"):
        read(make_xlsx({"S": rows}, shared=["x" * 1_000_000]))


def test_without_calamine_the_install_line_is_named(tmp_path, monkeypatch):
    (tmp_path / "python_calamine.py").write_text("raise ImportError('not there')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])))
    with pytest.raises(UnreadableDocumentError, match=r"pip install 'ragblend\[documents\]'"):
        read(make_xlsx({"S": cells("x")}))


def test_a_reading_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(child, "_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(spreadsheets, "MAX_CHILD_SECONDS", 0.5)
    with pytest.raises(UnreadableDocumentError, match=r"took longer than [01] s; delete empty rows"):
        read(make_xlsx({"S": cells("x")}))
    assert "python_calamine" not in sys.modules
