"""Minimal office files and books for tests."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from urllib.parse import quote

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
SLIDES = "http://schemas.openxmlformats.org/presentationml/2006/main"
SHEETS = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
REFERENCES = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"


def make_zip(parts: dict[str, str | bytes]) -> bytes:
    """Return a zip file with these parts. Equal parts give equal bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as container:
        for name, content in parts.items():
            container.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def relationships(**targets: str) -> str:
    """Return a relationships part. targets: id="kind target"."""
    rows = (
        f'<Relationship Id="{name}" Type="{REFERENCES}/{target.split()[0]}" Target="{target.split()[1]}"/>'
        for name, target in targets.items()
    )
    return f'<Relationships xmlns="{PACKAGE}/relationships">{"".join(rows)}</Relationships>'


def make_docx(body: str, **parts: str) -> bytes:
    """Return a Word file. parts: contents of word/NAME.xml, without the root element."""
    others = {f"word/{name}.xml": f'<w:{name} xmlns:w="{WORD}">{content}</w:{name}>' for name, content in parts.items()}
    return make_zip(
        {
            "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types"/>',
            "_rels/.rels": relationships(r1="officeDocument word/document.xml"),
            "word/document.xml": f'<w:document xmlns:w="{WORD}" xmlns:r="{REFERENCES}">'
            f"<w:body>{body}</w:body></w:document>",
            **others,
        }
    )


def word_paragraph(text: str, properties: str = "") -> str:
    """Return the XML of a paragraph of a Word file."""
    return f'<w:p><w:pPr>{properties}</w:pPr><w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def make_pptx(slides: dict[str, str], order: list[str], **parts: str) -> bytes:
    """Return a presentation. slides: {part name: XML of its shapes}. order: part names in the order of the slides."""
    names = f'xmlns:a="{DRAWING}" xmlns:p="{SLIDES}" xmlns:r="{REFERENCES}"'
    ids = "".join(f'<p:sldId id="{256 + number}" r:id="{name}"/>' for number, name in enumerate(order))
    return make_zip(
        {
            "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types"/>',
            "_rels/.rels": relationships(r1="officeDocument ppt/presentation.xml"),
            "ppt/presentation.xml": f"<p:presentation {names}><p:sldIdLst>{ids}</p:sldIdLst></p:presentation>",
            "ppt/_rels/presentation.xml.rels": relationships(**{one: f"slide slides/{one}.xml" for one in slides}),
            **{
                f"ppt/slides/{name}.xml": f"<p:sld {names}><p:cSld><p:spTree>{shapes}</p:spTree></p:cSld></p:sld>"
                for name, shapes in slides.items()
            },
            **{
                name.replace("__", "/") + (".xml.rels" if "rels" in name else ".xml"): content
                for name, content in parts.items()
            },
        }
    )


def shape(*paragraphs: str, placeholder: str = "") -> str:
    """Return the XML of a shape with these paragraphs."""
    kind = f'<p:nvSpPr><p:nvPr><p:ph type="{placeholder}"/></p:nvPr></p:nvSpPr>' if placeholder else ""
    texts = "".join(f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>" for text in paragraphs)
    return f"<p:sp>{kind}<p:txBody>{texts}</p:txBody></p:sp>"


def make_odf(body: str, kind: str = "text", styles: str = "", parts: dict[str, str] | None = None) -> bytes:
    """Return an OpenDocument file. kind: text, spreadsheet or presentation. styles: XML. parts: further ones."""
    names = " ".join(
        f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
        for name in ("office", "text", "table", "draw", "presentation", "style")
    )
    inner = f"<office:body><office:{kind}>{body}</office:{kind}></office:body>"
    styles = f"<office:automatic-styles>{styles}</office:automatic-styles>" if styles else ""
    content = f"<office:document-content {names}>{styles}{inner}</office:document-content>"
    mimetype = f"application/vnd.oasis.opendocument.{kind}"
    return make_zip({"mimetype": mimetype, "content.xml": content, **(parts or {})})


def make_xlsx(
    sheets: dict[str, str], styles: str = "", shared: list[str] | None = None, merged: Sequence[str] = ()
) -> bytes:
    """Return a workbook. sheets: {sheet name: XML of its rows}. shared: shared strings. merged: ranges ("A1:A2")."""
    entries = "".join(
        f'<sheet name="{name}" sheetId="{number}" r:id="s{number}"/>' for number, name in enumerate(sheets, 1)
    )
    targets = {f"s{number}": f"worksheet worksheets/sheet{number}.xml" for number in range(1, len(sheets) + 1)}
    merges = f"<mergeCells>{''.join(f'<mergeCell ref={each!r}/>' for each in merged)}</mergeCells>" if merged else ""
    strings = "".join(f"<si><t>{text}</t></si>" for text in shared or [])
    return make_zip(
        {
            "[Content_Types].xml": f'<Types xmlns="{PACKAGE}/content-types"/>',
            "_rels/.rels": relationships(r1="officeDocument xl/workbook.xml"),
            "xl/workbook.xml": f'<workbook xmlns="{SHEETS}" xmlns:r="{REFERENCES}">'
            f"<sheets>{entries}</sheets></workbook>",
            "xl/_rels/workbook.xml.rels": relationships(**targets),
            "xl/styles.xml": f'<styleSheet xmlns="{SHEETS}">{styles}</styleSheet>',
            "xl/sharedStrings.xml": f'<sst xmlns="{SHEETS}">{strings}</sst>',
            **{
                f"xl/worksheets/sheet{number}.xml": f'<worksheet xmlns="{SHEETS}"><sheetData>{rows}'
                f"</sheetData>{merges}</worksheet>"
                for number, rows in enumerate(sheets.values(), 1)
            },
        }
    )


def make_epub(chapters: dict[str, str], spine: str, extra: dict[str, str] | None = None, items: str = "") -> bytes:
    """Return a book. chapters: {name: XHTML of the body}. spine: XML of the spine's entries. items: of the manifest."""
    manifest = "".join(f'<item id="{name}" href="{quote(name)}.xhtml"/>' for name in chapters)
    return make_zip(
        {
            "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="O/c.opf"/></rootfiles></container>',
            "O/c.opf": '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/">'
            "<metadata><dc:title>Ducks</dc:title><dc:creator>Ann</dc:creator></metadata>"
            f"<manifest>{manifest}{items}</manifest><spine>{spine}</spine></package>",
            **{f"O/{name}.xhtml": f"<html><body>{page}</body></html>" for name, page in chapters.items()},
            **(extra or {}),
        }
    )
