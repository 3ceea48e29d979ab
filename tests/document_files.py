"""A small whole file of each kind that is read, made of a few sentences and rows. Read `WHOLE` first."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from email.message import EmailMessage

SENTENCES = "".join(f"Paragraph {number}: the lease ends in May and rent is due monthly.\n\n" for number in range(40))


def zipped(**members: str) -> bytes:
    """A zip archive; "__" in a name stands for a slash and "_DOT_" for a full stop."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/").replace("_DOT_", "."), text)
    return buffer.getvalue()


def bomb(data: bytes, name: str, size_mib: int) -> bytes:
    """The zip archive `data` with a further member that unpacks to `size_mib`."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        for _ in range(size_mib):
            member.write(b"a" * (1 << 20))
    return buffer.getvalue()


def html() -> bytes:
    rows = "".join(f"<tr><td>Bolt {number}</td><td>{number} Nm</td></tr>" for number in range(30))
    return f"<html><head><title>Pump</title></head><body><h1>Pump</h1><table>{rows}</table><p>{SENTENCES}</p>".encode()


def pdf(*extra: bytes, catalog: bytes = b"", kids: bytes = b"3 0 R 5 0 R 7 0 R") -> bytes:
    """Three pages of text. `extra` objects are numbered from 9; `catalog` is put into the catalogue."""
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


def packed_stream(size_mib: int) -> bytes:
    """A compressed content stream of that size, which shows a character again and again."""
    data = zlib.compress(b"BT /F1 12 Tf 20 380 Td " + b"(a) Tj " * (size_mib * (1 << 20) // 7) + b"ET")
    return b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream" % (len(data), data)


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
SLIDE = "http://schemas.openxmlformats.org/presentationml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
XHTML = "http://www.w3.org/1999/xhtml"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"


def office(main: str, **members: str) -> bytes:
    """An Office file whose main part is `main`."""
    relation = f'<Relationship Id="r1" Type="{RELATIONS}/officeDocument" Target="{main}"/>'
    types = (
        '<Default Extension="xml" ContentType="application/xml"/>'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    )
    return zipped(
        _DOT_rels="",
        **{
            "[Content_Types]_DOT_xml": f'<Types xmlns="{PACKAGE}/content-types">{types}</Types>',
            "_rels/_DOT_rels": f'<Relationships xmlns="{PACKAGE}/relationships">{relation}</Relationships>',
        },
        **members,
    )


def docx(body: str = "") -> bytes:
    body = body or "".join(f"<w:p><w:r><w:t>{line}</w:t></w:r></w:p>" for line in SENTENCES.split("\n\n"))
    return office(
        "word/document.xml",
        word__document_DOT_xml=f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
    )


def pptx() -> bytes:
    text = f"<a:p><a:r><a:t>{SENTENCES}</a:t></a:r></a:p>"
    shape = f"<p:sp><p:nvSpPr><p:nvPr/></p:nvSpPr><p:txBody>{text}</p:txBody></p:sp>"
    slide = f'<p:sld xmlns:p="{SLIDE}" xmlns:a="{DRAWING}"><p:cSld><p:spTree>{shape}</p:spTree></p:cSld></p:sld>'
    ids = f'<p:sldIdLst xmlns:r="{RELATIONS}"><p:sldId id="256" r:id="r1"/></p:sldIdLst>'
    relation = f'<Relationship Id="r1" Type="{RELATIONS}/slide" Target="slides/slide1.xml"/>'
    return office(
        "ppt/presentation.xml",
        ppt__presentation_DOT_xml=f'<p:presentation xmlns:p="{SLIDE}">{ids}</p:presentation>',
        ppt___rels__presentation_DOT_xml_DOT_rels=(
            f'<Relationships xmlns="{PACKAGE}/relationships">{relation}</Relationships>'
        ),
        ppt__slides__slide1_DOT_xml=slide,
    )


def xlsx(far_row: str = "") -> bytes:
    cells = "".join(
        f'<row r="{row}"><c r="A{row}" t="inlineStr"><is><t>bolt {row}</t></is></c><c r="B{row}"><v>{row}</v></c></row>'
        for row in range(1, 50)
    )
    cells += far_row
    relation = f'<Relationship Id="r1" Type="{RELATIONS}/worksheet" Target="worksheets/sheet1.xml"/>'
    sheets = f'<sheets xmlns:r="{RELATIONS}"><sheet name="Bolts" sheetId="1" r:id="r1"/></sheets>'
    return office(
        "xl/workbook.xml",
        xl__workbook_DOT_xml=f'<workbook xmlns="{SHEET}">{sheets}</workbook>',
        xl___rels__workbook_DOT_xml_DOT_rels=(
            f'<Relationships xmlns="{PACKAGE}/relationships">{relation}</Relationships>'
        ),
        xl__worksheets__sheet1_DOT_xml=f'<worksheet xmlns="{SHEET}"><sheetData>{cells}</sheetData></worksheet>',
    )


def opendocument(kind: str, body: str = "") -> bytes:
    """An OpenDocument file of a kind: text, spreadsheet or presentation."""
    names = "urn:oasis:names:tc:opendocument:xmlns"
    lines = "".join(f"<text:p>{line}</text:p>" for line in SENTENCES.split("\n\n"))
    table = "<table:table table:name='T'><table:table-row><table:table-cell office:value-type='string'>{}"
    bodies = {
        "text": lines,
        "spreadsheet": table.format(lines) + "</table:table-cell></table:table-row></table:table>",
        "presentation": f"<draw:page><draw:frame><draw:text-box>{lines}</draw:text-box></draw:frame></draw:page>",
    }
    prefixes = " ".join(f'xmlns:{name}="{names}:{name}:1.0"' for name in ("office", "text", "table"))
    media_type = f"application/vnd.oasis.opendocument.{kind}"
    entry = f'<m:file-entry m:full-path="/" m:media-type="{media_type}"/>'
    return zipped(
        mimetype=media_type,
        **{"META-INF/manifest_DOT_xml": f'<m:manifest xmlns:m="{names}:manifest:1.0">{entry}</m:manifest>'},
        content_DOT_xml=(
            f'<office:document-content {prefixes} xmlns:draw="{names}:drawing:1.0"><office:body>'
            f"<office:{kind}>{body or bodies[kind]}</office:{kind}></office:body></office:document-content>"
        ),
    )


def epub(chapter: str = "", num_readings: int = 1) -> bytes:
    """A book of one chapter, which its spine names `num_readings` times."""
    chapter = chapter or f"<h1>Lease</h1><p>{SENTENCES}</p>"
    container, spine = "urn:oasis:names:tc:opendocument:xmlns:container", '<itemref idref="c"/>' * num_readings
    return zipped(
        mimetype="application/epub+zip",
        **{
            "META-INF/container_DOT_xml": (
                f'<container xmlns="{container}"><rootfiles><rootfile full-path="b.opf"/></rootfiles></container>'
            )
        },
        b_DOT_opf=(
            '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="c" href="c.xhtml" '
            f'media-type="application/xhtml+xml"/></manifest><spine>{spine}</spine></package>'
        ),
        c_DOT_xhtml=f'<html xmlns="{XHTML}"><body>{chapter}</body></html>',
    )


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
    "pptx": pptx,
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
"""A file of each kind that can be read."""
