"""Texts and marks of files that are built here, by digest: a reader that changes them changes every index.

When a digest changes on purpose, or because a parser has a new release, raise READERS_VERSION in
ragblend/corpus/readers/formats.py, so that files that did not change are read again. The right digests are in the
assertion that fails. A new format adds a file below.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from office_files import make_docx, make_epub, make_odf, make_pptx, make_xlsx, shape, word_paragraph
from pdf_files import PICTURE, line, lines, make_pdf

from ragblend.corpus.documents import read_documents, reader_version
from ragblend.corpus.readers.formats import READERS_VERSION

TABLE_CSV = b'id,name,note,note\n1,bolt,"M8, zinc",new\n2,"nut ""hex""",,"two\nlines"\n3,a,b,c,d\n'
STATEMENT_CSV = b"Konto;DE00\nZeitraum;Mai\n\nTag;Text;Betrag\n02.05.;Miete, Mai;-800,00\n03.05.;Lohn;2.000,00\n"
TEXTS_CSV = b"id\ttext\n1\tThe ferry leaves at nine.\n2\tThe mill stands by the river.\n"
RECORDS_JSONL = (
    b'"one"\n{"content": "two", "summary": "' + b"long " * 60 + b'"}\n{"ctxs": [{"title": "T", "text": "x"}]}\n'
)
NOTES_MD = b"---\ntitle: Notes\n---\n# One `x` #\r\n\r\n```\n# code\n```\n\nTwo\n---\ntext\n"
MANUAL_RST = b"======\nManual\n======\n\nCare\n====\nOil it.\n\nSeals\n-----\n\n  Code\n  ----\n"
LETTER_TXT = "Die Käse sind gültig für fünf Tage – prüfen Sie „Größe“ und Maß.\n".encode("cp1252")
FEED_XML = b"<feed><entry><title>A &amp; b</title><n>1</n></entry>\n<entry><p>See <i>the</i> pump.</p></entry></feed>"
DUCKS_EPUB = make_epub({"a": "<p>two</p>", "b": "<h1>One</h1>"}, '<itemref idref="b"/><itemref idref="a"/>')
BOX_MBOX = b"From a 10:00\nSubject: one\n\ntext\n\nFrom b 11:00\nSubject: two\n\n>From me\n"
ODF_TABLE = (
    "<table:table table:name='T'><table:table-row><table:table-cell><text:p>M8</text:p></table:table-cell>"
    "<table:table-cell office:date-value='2026-05-01'><text:p>1.5.</text:p></table:table-cell>"
    "</table:table-row></table:table>"
)


def records_json() -> bytes:
    parts = [{"id": "P-1", "sizes": [1, 2], "vector": [0.5] * 99}, {"id": "P-2", "note": None}]
    return json.dumps(
        [{"text": "label", "n": 1, "parts": parts}, {"name": "Pump", "parts": parts, "ok": True}]
    ).encode()


def manual_pdf() -> bytes:
    note = "<</Type/Annot/Subtype/FreeText/Contents(Checked in May)/DA(/F1 12 Tf)/Rect[20 200 200 220]>>"
    field = "<</Type/Annot/Subtype/Widget/FT/Tx/T(tenant)/V(Alice)/DA(/F1 12 Tf)/Rect[100 340 200 360]>>"
    return make_pdf(
        lines("1 Care of", "the pump", "The \\256rst hyphen-", "ated word."),
        PICTURE,
        f"{line('Repair')} {line('off the page', 900)}",
        annotations=[note, field],
        bookmarks=[("Care of the pump", 0), ("Repair", 2)],
        title="Guide",
        catalog="/PageLabels<</Nums[0<</S/r>>]>>",
    )


def page_html() -> bytes:
    table = "<table><tr><th>Bolt<th>Torque<tr><td>M8<td><ul><li>40<li>Nm</ul></table>"
    items = "<ol><li>one<ul><li>in</ul><li><p>two<p>more</ol><dl><dt>--dry<dd>Shows it.</dl>"
    return (
        '<meta charset="iso-8859-1"><title>The Pump</title><nav>Home</nav><main><header><h1>Pump</h1></header>'
        f"<p>Caf\xe9<br>\x93now\x94 &amp; un<b>bold</b>ly{table}<h3>Care</h3>{items}<pre>seal --list\n  --all</pre>tail"
        "<img alt='the seal'></main><footer>2026</footer>"
    ).encode("latin-1")


def book_xhtml() -> bytes:
    head = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title/><script src="a.js"/></head>'
    return f'{head}<body><a id="p1"/><h2>Eins</h2><p>Größe</p></body></html>'.encode()


def lease_docx() -> bytes:
    heading = '<w:style w:styleId="H"><w:name w:val="heading 2"/></w:style>'
    levels = '<w:lvl w:ilvl="0"><w:numFmt w:val="upperRoman"/><w:lvlText w:val="%1."/></w:lvl>'
    lists = f'<w:abstractNum w:abstractNumId="0">{levels}</w:abstractNum>'
    lists += '<w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    item = word_paragraph("Rent", '<w:pStyle w:val="H"/><w:numPr><w:numId w:val="1"/></w:numPr>')
    note = f'<w:footnote w:id="1">{word_paragraph("Monthly.")}</w:footnote>'
    row = f"<w:tr><w:tc>{word_paragraph('M8')}</w:tc><w:tc>{word_paragraph('40')}{word_paragraph('Nm')}</w:tc></w:tr>"
    body = f'{item}{item}<w:p><w:r><w:t>Due</w:t><w:footnoteReference w:id="1"/></w:r></w:p><w:tbl>{row}</w:tbl>'
    return make_docx(body, styles=heading, numbering=lists, footnotes=note)


def talk_pptx() -> bytes:
    cells = "".join(f"<a:tc><a:p><a:r><a:t>{text}</a:t></a:r></a:p></a:tc>" for text in ("M8", "40"))
    table = f"<p:graphicFrame><a:tbl><a:tr>{cells}</a:tr></a:tbl></p:graphicFrame>"
    return make_pptx({"a": table, "b": shape("one", "two") + shape("Care", placeholder="title")}, ["b", "a"])


def lease_odt() -> bytes:
    items = "<text:list><text:list-item><text:p>a<text:s text:c='3'/>b</text:p></text:list-item></text:list>"
    note = "<text:note><text:note-body><text:p>Monthly.</text:p></text:note-body></text:note>"
    return make_odf(f"<text:h text:outline-level='1'>Rent</text:h><text:p>Due{note}</text:p>{items}{ODF_TABLE}")


def prices_xlsx() -> bytes:
    row = '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="C1"><v>40</v></c><c r="D1" s="1"><v>46000</v></c></row>'
    return make_xlsx({"Prices": row, "Other": ""}, '<cellXfs><xf/><xf numFmtId="14"/></cellXfs>', ["M8"])


def letter_rtf() -> bytes:
    table = r"\intbl a\cell b\cell\row\pard"
    return rf"{{\rtf1\ansicpg1251\outlinelevel0 \'cf\par\pard x{{\footnote note}}\par{table} end\par}}".encode()


def plot_ipynb() -> bytes:
    output = {"output_type": "stream", "name": "stdout", "text": ["1\n"]}
    cells = [
        {"cell_type": "markdown", "source": "# One\ntext"},
        {"cell_type": "code", "source": "x", "outputs": [output]},
    ]
    return json.dumps({"cells": cells}).encode()


def lease_eml() -> bytes:
    head = b"Subject: =?utf-8?B?S8Okc2U=?=\nFrom: a@example.com\nContent-Type: multipart/mixed; boundary=b\n\n"
    text = b"--b\nContent-Type: text/plain; charset=latin-1\n\nL\xe4nge\n"
    inner = b"--b\nContent-Type: message/rfc822\n\nSubject: in\n\nx"
    return head + text + inner + b"\n--b\nContent-Type: application/pdf; name=a.pdf\n\nx\n--b--\n"


GOLDENS: dict[str, tuple[bytes, str]] = {
    "table.csv": (TABLE_CSV, "c145a3f661f03dd547807b4905e0719a"),
    "statement.csv": (STATEMENT_CSV, "8cee22c9ebfcdec95fbeef4c42bc5ed5"),
    "texts.tsv": (TEXTS_CSV, "b0e457e82601166deb95b7f0199c1447"),
    "records.json": (records_json(), "ddf7bb6d08556ab60f4f03ec14f891ee"),
    "records.jsonl": (RECORDS_JSONL, "419adb40006367c3a8f1bab31efcfb17"),
    "page.html": (page_html(), "ab22cbb0614730139173d3a6a3ffeced"),
    "book.xhtml": (book_xhtml(), "0f9636b91a8b8a723fbfb9139933e8f2"),
    "notes.md": (NOTES_MD, "c4968091ff6cebe0b68442d4de18cd12"),
    "manual.rst": (MANUAL_RST, "0a98a038aa9d0ca1001c4dce9836acd2"),
    "letter.txt": (LETTER_TXT, "82f4e58cca9d44bac0fb49d4989b219d"),
    "feed.xml": (FEED_XML, "100e6fa3cbdf05fa6bb37152a147d44a"),
    "manual.pdf": (manual_pdf(), "eaafa6d944ceabb724e9735c44ecd810"),
    "lease.docx": (lease_docx(), "18813885355d21e731d090790a2503cc"),
    "talk.pptx": (talk_pptx(), "634ad8658429658d397c6c8720ac6116"),
    "lease.odt": (lease_odt(), "536e421254ad70c8a28ecfc2baa4efb2"),
    "prices.ods": (make_odf(ODF_TABLE, "spreadsheet"), "db6c9788030f58a572c3d8520987d95f"),
    "prices.xlsx": (prices_xlsx(), "7ca607227ca82ca36d0b3307b13ed979"),
    "letter.rtf": (letter_rtf(), "d4c4c7e2170121a0c9f8d63ea106c94e"),
    "ducks.epub": (DUCKS_EPUB, "0c9b545e73c384c70514aba8a77e211f"),
    "plot.ipynb": (plot_ipynb(), "05f482bafc6906c7e052eb6577d69e0c"),
    "lease.eml": (lease_eml(), "c90c34fdabd2f881fff7e9bff3757b89"),
    "box.mbox": (BOX_MBOX, "7816a368e3955b85e473b11e784f1640"),
}


def digest_of(name: str, data: bytes) -> str:
    documents = read_documents(f"/{name}", data).documents
    found = [(document.source, document.text, document.marks) for document in documents]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize("name", GOLDENS)
def test_readers_give_the_texts_that_they_gave_before(name):
    data, golden = GOLDENS[name]
    assert (READERS_VERSION, digest_of(name, data)) == (1, golden)


def test_a_release_of_a_parser_reads_no_file_again():
    names = ("/a.html", "/a.pdf", "/a.docx", "/a.txt")
    assert {reader_version(name) for name in names} == {str(READERS_VERSION)}
