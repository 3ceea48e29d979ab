"""Small complete files of every supported format, with a few sentences and rows. Read `WHOLE` first."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from email.message import EmailMessage

from office_files import make_docx, make_epub, make_odf, make_pptx, make_xlsx, shape, word_paragraph

from ragblend.corpus.readers.types import ParsedRecord, ParsedRecords

XHTML = "http://www.w3.org/1999/xhtml"
SENTENCES = "".join(f"Paragraph {number}: the lease ends in May and rent is due monthly.\n\n" for number in range(40))


def only(records: ParsedRecords) -> ParsedRecord:
    """Return the record of a file that has one."""
    (record,) = records
    assert isinstance(record, ParsedRecord)
    return record


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


def pdf(*extra: bytes, catalog: bytes = b"", kids: bytes = b"3 0 R 5 0 R 7 0 R") -> bytes:
    """Return a PDF of three pages of text. extra: objects, numbered from 9. catalog: entries of its catalog."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R%s>>" % catalog,
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (kids.count(b"R"), kids),
    ]
    for page in range(3):
        lines = "".join(f"0 -14 Td (Page {page} line {line}: rent is due monthly) Tj " for line in range(20))
        content = f"BT /F1 12 Tf 20 380 Td {lines}ET".encode()
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 400]/Contents %d 0 R/Resources<</Font<</F1 "
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>" % (4 + 2 * page)
        )
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
    out, offsets = b"%PDF-1.4\n", []
    objects += extra
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    trailer = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (size, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (size, table, trailer)


def docx(body: str = "") -> bytes:
    return make_docx(body or "".join(map(word_paragraph, SENTENCES.split("\n\n"))))


def xlsx(far_row: str = "") -> bytes:
    rows = "".join(
        f'<row r="{row}"><c r="A{row}" t="inlineStr"><is><t>bolt {row}</t></is></c><c r="B{row}"><v>{row}</v></c></row>'
        for row in range(1, 50)
    )
    return make_xlsx({"Bolts": rows + far_row})


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


def epub(chapter: str = "", num_readings: int = 1) -> bytes:
    """Return a book of one chapter, which its spine lists `num_readings` times."""
    return make_epub({"c": chapter or f"<h1>Lease</h1><p>{SENTENCES}</p>"}, '<itemref idref="c"/>' * num_readings)


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
