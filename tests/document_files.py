"""Small complete files of every supported format, with a few sentences and rows. Read `WHOLE` first."""

from __future__ import annotations

import json
from email.message import EmailMessage
from typing import Any

from office_files import make_docx, make_epub, make_odf, make_pptx, make_xlsx, shape, word_paragraph
from pdf_files import lines, make_pdf

from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords

SENTENCES = "".join(f"Paragraph {number}: the lease ends in May and rent is due monthly.\n\n" for number in range(40))
PARAGRAPHS = SENTENCES.split("\n\n")


def only(records: ParsedRecords) -> ParsedRecord:
    """Return the record of a file that has one."""
    (record,) = records
    assert isinstance(record, ParsedRecord)
    return record


def pdf(**others: Any) -> bytes:
    """Return a PDF of three pages of text. others: further arguments of `make_pdf`."""
    texts = ([f"Page {page} line {line}: rent is due monthly" for line in range(20)] for page in range(3))
    return make_pdf(*(lines(*text) for text in texts), **others)


def epub(num_readings: int = 1) -> bytes:
    """Return a book of one chapter, which its spine lists `num_readings` times."""
    return make_epub({"c": f"<h1>Lease</h1><p>{SENTENCES}</p>"}, '<itemref idref="c"/>' * num_readings)


def _xlsx() -> bytes:
    rows = "".join(
        f'<row r="{row}"><c r="A{row}" t="inlineStr"><is><t>bolt {row}</t></is></c><c r="B{row}"><v>{row}</v></c></row>'
        for row in range(1, 50)
    )
    return make_xlsx({"Bolts": rows})


def _mail() -> bytes:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = "Lease", "a@example.com", "b@example.com"
    message.set_content(SENTENCES)
    message.add_alternative(f"<p>{SENTENCES}</p>", subtype="html")
    message.set_boundary("boundary")  # else it is random
    return message.as_bytes()


def _notebook() -> bytes:
    cells = [{"cell_type": "markdown", "metadata": {}, "source": text} for text in PARAGRAPHS]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}).encode()


_HTML_TABLE = "".join(f"<tr><td>Bolt {number}</td><td>{number} Nm</td></tr>" for number in range(30))
_PAGE = f"<head><title>Pump</title></head><body><h1>Pump</h1><table>{_HTML_TABLE}</table><p>{SENTENCES}</p>".encode()
_ODF_TEXT = "".join(f"<text:p>{text}</text:p>" for text in PARAGRAPHS)
_ODF_TABLE = (
    "<table:table table:name='T'><table:table-row><table:table-cell office:value-type='string'>"
    f"{_ODF_TEXT}</table:table-cell></table:table-row></table:table>"
)
_ODF_SLIDE = f"<draw:page><draw:frame><draw:text-box>{_ODF_TEXT}</draw:text-box></draw:frame></draw:page>"
_CSV = b"id,name,torque\n" + b"".join(b'%d,"bolt, hex",%d Nm\n' % (row, row) for row in range(60))
_CITIES = [{"country": "Burkina Faso", "city": {"name": "Ouagadougou", "rank": at}} for at in range(40)]
_XML = b'<?xml version="1.0"?>'
WHOLE: dict[str, bytes] = {
    "html": b"<html>" + _PAGE,
    "xhtml": _XML + b'<html xmlns="http://www.w3.org/1999/xhtml">' + _PAGE + b"</body></html>",
    "pdf": pdf(),
    "docx": make_docx("".join(map(word_paragraph, PARAGRAPHS))),
    "pptx": make_pptx({"slide1": shape(SENTENCES)}, ["slide1"]),
    "xlsx": _xlsx(),
    "odt": make_odf(_ODF_TEXT, "text"),
    "ods": make_odf(_ODF_TABLE, "spreadsheet"),
    "odp": make_odf(_ODF_SLIDE, "presentation"),
    "epub": epub(),
    "rtf": rb"{\rtf1\ansi " + SENTENCES.replace("\n\n", r"\par ").encode() + b"}",
    "ipynb": _notebook(),
    "eml": _mail(),
    "mbox": b"".join(b"From a@example.com Thu Jan  1 00:00:00 2026\n" + _mail() + b"\n" for _ in range(3)),
    "csv": _CSV,
    "tsv": _CSV.replace(b",", b"\t"),
    "json": json.dumps(_CITIES).encode(),
    "jsonl": b"".join(b'{"text": "Record %d: rent is due."}\n' % at for at in range(60)),
    "txt": SENTENCES.encode(),
    "md": b"# Lease\n\n```\ncode\n```\n\n" + SENTENCES.encode(),
    "xml": _XML + b"<a>" + SENTENCES.encode() + b"</a>",
    "yaml": b"lease:\n  ends: May\n" + b"".join(b"  rent_%d: due\n" % at for at in range(40)),
}
"""{file name extension: a file of this format}."""
