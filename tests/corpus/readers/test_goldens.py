"""Texts and marks of files that are built here, by digest: a reader that changes them changes every index.

When a digest changes on purpose, or because a parser has a new release, raise READERS_VERSION in
ragblend/corpus/readers/formats.py, so that files that did not change are read again. The right digests are in the
assertion that fails. A new format adds a function below.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest
from pdf_files import PICTURE, line, lines, make_pdf

from ragblend.corpus.documents import read_documents
from ragblend.corpus.readers.formats import READERS_VERSION


def table_csv() -> bytes:
    return b'id,name,note,note\n1,bolt,"M8, zinc",new\n2,"nut ""hex""",,"two\nlines"\n3,a,b,c,d\n'


def statement_csv() -> bytes:
    return b"Konto;DE00\nZeitraum;Mai\n\nTag;Text;Betrag\n02.05.;Miete, Mai;-800,00\n03.05.;Lohn;2.000,00\n"


def texts_csv() -> bytes:
    return b"id\ttext\n1\tThe ferry leaves at nine.\n2\tThe mill stands by the river.\n"


def records_json() -> bytes:
    parts = [{"id": "P-1", "sizes": [1, 2], "vector": [0.5] * 99}, {"id": "P-2", "note": None}]
    return json.dumps(
        [{"text": "label", "n": 1, "parts": parts}, {"name": "Pump", "parts": parts, "ok": True}]
    ).encode()


def records_jsonl() -> bytes:
    return b'"one"\n{"content": "two", "summary": "' + b"long " * 60 + b'"}\n{"ctxs": [{"title": "T", "text": "x"}]}\n'


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


def notes_md() -> bytes:
    return b"---\ntitle: Notes\n---\n# One `x` #\r\n\r\n```\n# code\n```\n\nTwo\n---\ntext\n"


def manual_rst() -> bytes:
    return b"======\nManual\n======\n\nCare\n====\nOil it.\n\nSeals\n-----\n\n  Code\n  ----\n"


def letter_txt() -> bytes:
    return "Die Käse sind gültig für fünf Tage – prüfen Sie „Größe“ und Maß.\n".encode("cp1252")


def feed_xml() -> bytes:
    return b"<feed><entry><title>A &amp; b</title><n>1</n></entry>\n<entry><p>See <i>the</i> pump.</p></entry></feed>"


GOLDENS: dict[str, tuple[Callable[[], bytes], str]] = {
    "table.csv": (table_csv, "c145a3f661f03dd547807b4905e0719a"),
    "statement.csv": (statement_csv, "8cee22c9ebfcdec95fbeef4c42bc5ed5"),
    "texts.tsv": (texts_csv, "b0e457e82601166deb95b7f0199c1447"),
    "records.json": (records_json, "ddf7bb6d08556ab60f4f03ec14f891ee"),
    "records.jsonl": (records_jsonl, "419adb40006367c3a8f1bab31efcfb17"),
    "page.html": (page_html, "ab22cbb0614730139173d3a6a3ffeced"),
    "book.xhtml": (book_xhtml, "0f9636b91a8b8a723fbfb9139933e8f2"),
    "notes.md": (notes_md, "c4968091ff6cebe0b68442d4de18cd12"),
    "manual.rst": (manual_rst, "0a98a038aa9d0ca1001c4dce9836acd2"),
    "letter.txt": (letter_txt, "82f4e58cca9d44bac0fb49d4989b219d"),
    "feed.xml": (feed_xml, "100e6fa3cbdf05fa6bb37152a147d44a"),
    "manual.pdf": (manual_pdf, "eaafa6d944ceabb724e9735c44ecd810"),
}


def digest_of(name: str, data: bytes) -> str:
    documents = read_documents(f"/{name}", data).documents
    found = [(document.source, document.text, document.marks) for document in documents]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize("name", GOLDENS)
def test_readers_give_the_texts_that_they_gave_before(name: str) -> None:
    build, golden = GOLDENS[name]
    assert (READERS_VERSION, digest_of(name, build())) == (3, golden)
