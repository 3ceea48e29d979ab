"""Small complete files of every supported format, with a few sentences and rows. Read `WHOLE` first."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from email.message import EmailMessage
from typing import Any

from office_files import make_docx, make_epub, make_odf, make_pptx, make_xlsx, shape, word_paragraph
from pdf_files import lines, make_pdf

XHTML = "http://www.w3.org/1999/xhtml"
SENTENCES = "".join(f"Paragraph {number}: the lease ends in May and rent is due monthly.\n\n" for number in range(40))


def bomb(data: bytes, name: str, size_mib: int) -> bytes:
    """Return the zip archive `data` with a further member whose decompressed size is `size_mib`."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        for _ in range(size_mib):
            member.write(b"a" * (1 << 20))
    return buffer.getvalue()


def html() -> bytes:
    rows = "".join(f"<tr><td>Bolt {number}</td><td>{number} Nm</td></tr>" for number in range(30))
    return f"<html><head><title>Pump</title></head><body><h1>Pump</h1><table>{rows}</table><p>{SENTENCES}</p>".encode()


def pdf(**others: Any) -> bytes:
    """Return a PDF of three pages of text. others: further arguments of `make_pdf`."""
    texts = ([f"Page {page} line {line}: rent is due monthly" for line in range(20)] for page in range(3))
    return make_pdf(*(lines(*text) for text in texts), **others)


def docx(body: str = "") -> bytes:
    return make_docx(body or "".join(map(word_paragraph, SENTENCES.split("\n\n"))))


def xlsx() -> bytes:
    rows = "".join(
        f'<row r="{row}"><c r="A{row}" t="inlineStr"><is><t>bolt {row}</t></is></c><c r="B{row}"><v>{row}</v></c></row>'
        for row in range(1, 50)
    )
    return make_xlsx({"Bolts": rows})


def opendocument(kind: str, body: str = "") -> bytes:
    """Return an OpenDocument file. kind: text, spreadsheet or presentation."""
    lines = "".join(f"<text:p>{line}</text:p>" for line in SENTENCES.split("\n\n"))
    table = "<table:table table:name='T'><table:table-row><table:table-cell office:value-type='string'>{}"
    bodies = {
        "text": lines,
        "spreadsheet": table.format(lines) + "</table:table-cell></table:table-row></table:table>",
        "presentation": f"<draw:page><draw:frame><draw:text-box>{lines}</draw:text-box></draw:frame></draw:page>",
    }
    return make_odf(body or bodies[kind], kind)


def epub(num_readings: int = 1) -> bytes:
    """Return a book of one chapter, which its spine lists `num_readings` times."""
    return make_epub({"c": f"<h1>Lease</h1><p>{SENTENCES}</p>"}, '<itemref idref="c"/>' * num_readings)


def mail() -> bytes:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = "Lease", "a@example.com", "b@example.com"
    message.set_content(SENTENCES)
    message.add_alternative(f"<p>{SENTENCES}</p>", subtype="html")
    return message.as_bytes()


def notebook() -> bytes:
    cells = [{"cell_type": "markdown", "metadata": {}, "source": line} for line in SENTENCES.split("\n\n")]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}).encode()


def csv() -> bytes:
    return b"id,name,torque\n" + b"".join(b'%d,"bolt, hex",%d Nm\n' % (row, row) for row in range(60))


def json_list() -> bytes:
    return json.dumps(
        [{"country": "Burkina Faso", "city": {"name": "Ouagadougou", "rank": at}} for at in range(40)]
    ).encode()


WHOLE: dict[str, Callable[[], bytes]] = {
    "html": html,
    "xhtml": lambda: b'<?xml version="1.0"?><html xmlns="%s">' % XHTML.encode() + html()[6:] + b"</body></html>",
    "pdf": pdf,
    "docx": docx,
    "pptx": lambda: make_pptx({"slide1": shape(SENTENCES)}, ["slide1"]),
    "xlsx": xlsx,
    "odt": lambda: opendocument("text"),
    "ods": lambda: opendocument("spreadsheet"),
    "odp": lambda: opendocument("presentation"),
    "epub": epub,
    "rtf": lambda: rb"{\rtf1\ansi " + SENTENCES.replace("\n\n", r"\par ").encode() + b"}",
    "ipynb": notebook,
    "eml": mail,
    "mbox": lambda: b"".join(b"From a@example.com Thu Jan  1 00:00:00 2026\n" + mail() + b"\n" for _ in range(3)),
    "csv": csv,
    "tsv": lambda: csv().replace(b",", b"\t"),
    "json": json_list,
    "jsonl": lambda: b"".join(b'{"text": "Record %d: rent is due."}\n' % at for at in range(60)),
    "txt": SENTENCES.encode,
    "md": lambda: b"# Lease\n\n```\ncode\n```\n\n" + SENTENCES.encode(),
    "xml": lambda: b'<?xml version="1.0"?><a>' + SENTENCES.encode() + b"</a>",
    "yaml": lambda: b"lease:\n  ends: May\n" + b"".join(b"  rent_%d: due\n" % at for at in range(40)),
}
"""{file name extension: function that returns a file of this format}."""
