"""Tables with cells that span rows and columns, in every format: each row says what it is about, columns keep their
places."""

from __future__ import annotations

from time import process_time

import pytest
from document_files import only
from office_files import make_docx, make_epub, make_odf, make_pptx, make_xlsx, word_paragraph

from ragblend.corpus.documents import read_documents
from ragblend.corpus.readers.blocks import TableCell, table_lines
from ragblend.corpus.readers.html import parse_html, read_html

TEXT = """Region | Country | Sales
EU | Germany | 10
EU | France | 20
US |  | 30
Total |  | 60
 | | 90""".replace(" | | ", " |  | ")
"""EU spans two rows, Total two columns; the cells without text are empty."""


def html_table() -> bytes:
    return (
        b"<table><thead><tr><th>Region<th>Country<th>Sales<tbody><tr><td rowspan=2>EU<td>Germany<td>10"
        b"<tr><td>France<td>20<tr><td>US<td><td>30<tr><td colspan='2'>Total<td>60<tr><td><td><td>90</table>"
    )


def docx_table() -> bytes:
    def cell(text: str, properties: str = "") -> str:
        return f"<w:tc><w:tcPr>{properties}</w:tcPr>{word_paragraph(text)}</w:tc>"

    rows = [
        cell("Region") + cell("Country") + cell("Sales"),
        cell("EU", '<w:vMerge w:val="restart"/>') + cell("Germany") + cell("10"),
        cell("", "<w:vMerge/>") + cell("France") + cell("20"),
        cell("US") + cell("") + cell("30"),
        cell("Total", '<w:gridSpan w:val="2"/>') + cell("60"),
        '<w:trPr><w:gridBefore w:val="2"/></w:trPr>' + cell("90"),
    ]
    return make_docx(f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>")


def odf_table(kind: str) -> bytes:
    def cell(text: str, attributes: str = "", name: str = "table-cell") -> str:
        return f"<table:{name} {attributes}><text:p>{text}</text:p></table:{name}>"

    rows = [
        cell("Region") + cell("Country") + cell("Sales"),
        cell("EU", 'table:number-rows-spanned="2"') + cell("Germany") + cell("10"),
        cell("", "", "covered-table-cell") + cell("France") + cell("20"),
        cell("US") + cell("") + cell("30"),
        cell("Total", 'table:number-columns-spanned="2"') + "<table:covered-table-cell/>" + cell("60"),
        '<table:table-cell table:number-columns-repeated="2"/>' + cell("90"),
    ]
    table = "".join(f"<table:table-row>{row}</table:table-row>" for row in rows)
    table = f"<table:table table:name='T'>{table}</table:table>"
    return make_odf(f"<draw:page>{table}</draw:page>" if kind == "presentation" else table, kind)


def pptx_table() -> bytes:
    def cell(text: str, attributes: str = "") -> str:
        return f"<a:tc {attributes}><a:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:txBody></a:tc>"

    rows = [
        cell("Region") + cell("Country") + cell("Sales"),
        cell("EU", 'rowSpan="2"') + cell("Germany") + cell("10"),
        cell("", 'vMerge="1"') + cell("France") + cell("20"),
        cell("US") + cell("") + cell("30"),
        cell("Total", 'gridSpan="2"') + cell("", 'hMerge="1"') + cell("60"),
        cell("") + cell("") + cell("90"),
    ]
    table = "".join(f"<a:tr>{row}</a:tr>" for row in rows)
    return make_pptx({"s": f"<p:graphicFrame><a:tbl>{table}</a:tbl></p:graphicFrame>"}, ["s"])


def rtf_table() -> bytes:
    three, two = r"\cellx2000\cellx3000", r"\cellx2010\cellx3000"
    return (
        rf"{{\rtf1\trowd\cellx1000{three}\intbl Region\cell Country\cell Sales\cell\row"
        rf"\trowd\clvmgf\cellx1000{three}\intbl EU\cell Germany\cell 10\cell\row"
        rf"\trowd\clvmrg\cellx1000{three}\intbl\cell France\cell 20\cell\row"
        rf"\trowd\cellx1000{three}\intbl US\cell\cell 30\cell\row"
        rf"\trowd{two}\intbl Total\cell 60\cell\row\trowd\trleft2000\cellx3000\intbl 90\cell\row\pard}}"
    ).encode()


def xlsx_table() -> bytes:
    rows = ["Region Country Sales", "EU Germany 10", "- France 20", "US - 30", "Total - 60", "- - 90"]
    cells = (
        "".join(
            f'<c r="{column}{at}" t="str"><v>{text}</v></c>'
            for column, text in zip("BCD", row.split(), strict=True)
            if text != "-"
        )
        for at, row in enumerate(rows, 3)
    )
    xml = "".join(f'<row r="{at}">{row}</row>' for at, row in enumerate(cells, 3))
    return make_xlsx({"T": xml}, merged=["B4:B5", "B7:C7"])


TABLES = {
    "html": html_table(),
    "epub": make_epub({"c": html_table().decode()}, '<itemref idref="c"/>'),
    "eml": b"Subject: Sales\nContent-Type: text/html\n\n" + html_table(),
    "docx": docx_table(),
    "odt": odf_table("text"),
    "odp": odf_table("presentation"),
    "ods": odf_table("spreadsheet"),
    "pptx": pptx_table(),
    "rtf": rtf_table(),
    "xlsx": xlsx_table(),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_spanned_cell_is_in_each_row_and_columns_keep_their_places(kind):
    (document,) = read_documents(f"/a.{kind}", TABLES[kind]).documents
    lines = [line for line in document.text.split("\n") if " | " in line]
    assert "\n".join(lines) == TEXT


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("<tr><th colspan=2>2024<th rowspan=2>All<tr><th>Q1<th>Q2<tr><td>1", "2024 |  | All\nQ1 | Q2 | All\n\n1"),
        ("<tr><td rowspan=2 colspan=2>a<td>b<tr><td>c", "a |  | b\na |  | c"),
        ("<tr><td>a<td rowspan=0>b<tr><td>c<tr><td>d<tbody><tr><td>e<td>f", "a | b\nc | b\nd | b\ne | f"),
        ("<tr><td>a<td>b<td rowspan=2>c<tr><td>d", "a | b | c\nd |  | c"),  # a row that ends early
        ("<tr><td ROWSPAN='2'>a<td rowspan=2>b<tr><tr><td>c<td>d", "a | b\nc | d"),  # a row that holds nothing
        ("<tr><td colspan=3>Section<tr><td>a<td>b<td>c", "Section\n\na | b | c"),
        ("<tr><td rowspan=2><h2>A</h2>long<td>b<tr><td>c", "## A\n\nlong\n\nb\n\nc"),  # it lays out the page
        ("<tr><td rowspan=x colspan=-1>a<td>b<tr><td>c<td>d", "a | b\nc | d"),
    ],
)
def test_spans_of_html(rows, text):
    assert parse_html(f"<table>{rows}</table>").text == text


def test_a_merge_without_a_first_cell_keeps_its_text():
    assert table_lines([[TableCell(["a"], is_covered=True), TableCell(["b"])]]) == "a | b"


@pytest.mark.parametrize(
    "rows",
    [
        "<tr><td rowspan=65534>" + "label " * 300 + "<tr><td>x" * 20_000,
        "<tr>" + "<td rowspan=1000>a label" * 1000 + "<tr><td>x" * 1000,
        "<tr>" + "<td>" * 10_000 + "<td rowspan=65534>a" + "<tr><td>x" * 5000,
        "<tr><td colspan=1000000><td>x" * 5000,
    ],
    ids=["rows", "both", "empty", "columns"],
)
def test_spans_do_not_multiply_the_text(rows):
    start = process_time()
    assert len(only(read_html(rows.join(("<table>", "</table>")).encode())).text) < 30 * len(rows)
    assert process_time() - start < 2
