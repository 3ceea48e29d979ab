"""PDF files for tests, with optional bookmarks, labels, annotations, form fields and password."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

HELVETICA = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
PICTURE = "300 0 0 400 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID x EI"
_PADDING = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")


def line(text: str, x: int = 20, y: int = 350) -> str:
    """Return the operators that print `text`, whose parentheses and backslashes must be escaped."""
    return f"BT /F1 12 Tf {x} {y} Td ({text}) Tj ET"


def lines(*texts: str) -> str:
    """Return the operators that print lines below each other."""
    return "BT /F1 12 Tf 20 350 Td " + " 0 -14 Td ".join(f"({text}) Tj" for text in texts) + " ET"


def make_pdf(
    *pages: str,
    annotations: Sequence[str] = (),
    bookmarks: Sequence[tuple[str, int]] = (),
    title: str = "",
    catalog: str = "",
    font: str = HELVETICA,
    password: str | None = None,
    kids: str = "",
) -> bytes:
    """Return a PDF. pages: the content stream of each page of 300 by 400 points.

    annotations: dictionaries of page 1; widgets are form fields. bookmarks: (title, page from 0). catalog: entries of
    the catalog, such as page labels. password: encrypts with 40-bit RC4; "": encrypted, but opens without a password;
    None: not encrypted. kids: references of the page tree, instead of one to each page.
    """
    objects: dict[int, bytes] = {}

    def add(content: str | bytes) -> int:
        objects[len(objects) + 1] = content.encode("latin-1") if isinstance(content, str) else content
        return len(objects)

    add(""), add("")  # catalog and page tree, which are written last
    font_id = add(font)
    annotation_ids = [add(each) for each in annotations]
    page_ids = []
    for content in pages:
        data = content.encode("latin-1")
        stream = add(b"<</Length %d>>stream\n%s\nendstream" % (len(data), data))
        notes = "" if page_ids else f"/Annots[{_references(annotation_ids)}]"
        page_ids.append(
            add(
                f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 400]/Resources<</Font<</F1 {font_id} 0 R>>>>"
                f"/Contents {stream} 0 R{notes}>>"
            )
        )
    if bookmarks:
        catalog += f"/Outlines {_add_bookmarks(add, objects, bookmarks, page_ids)} 0 R"
    if any("/Widget" in each for each in annotations):
        catalog += f"/AcroForm<</Fields[{_references(annotation_ids)}]/DA(/F1 12 Tf)>>"
    objects[1] = f"<</Type/Catalog/Pages 2 0 R{catalog}>>".encode("latin-1")
    kids = kids or _references(page_ids)
    objects[2] = f"<</Type/Pages/Count {kids.count('R')}/Kids[{kids}]>>".encode()
    trailer = f"/Info {add(f'<</Title({title})>>')} 0 R" if title else ""
    return write_objects(objects, trailer) if password is None else _encrypt(objects, trailer, password)


def write_objects(objects: Mapping[int, bytes], trailer: str = "") -> bytes:
    """Return a PDF of objects that are numbered from 1 without gaps. Object 1 is the catalog."""
    body, offsets = bytearray(b"%PDF-1.4\n"), []
    for number in range(1, len(objects) + 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, objects[number])
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start = len(body)
    size = len(objects) + 1
    body += b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R%s>>\n" % (
        size,
        table,
        size,
        trailer.encode(),
    )
    return bytes(body + b"startxref\n%d\n%%%%EOF" % start)


def _references(numbers: Sequence[int]) -> str:
    return " ".join(f"{number} 0 R" for number in numbers)


def _add_bookmarks(add, objects: dict[int, bytes], bookmarks: Sequence[tuple[str, int]], page_ids: list[int]) -> int:
    root = add("")
    first = root + 1
    for at, (title, page) in enumerate(bookmarks):
        following = f"/Next {first + at + 1} 0 R" if at + 1 < len(bookmarks) else ""
        add(f"<</Title({title})/Parent {root} 0 R/Dest[{page_ids[page]} 0 R/Fit]{following}>>")
    objects[root] = f"<</Type/Outlines/First {first} 0 R/Last {first + len(bookmarks) - 1} 0 R>>".encode()
    return root


def _encrypt(objects: dict[int, bytes], trailer: str, password: str) -> bytes:
    """Return a PDF encrypted with 40-bit RC4 (PDF 32000-1, 7.6.3). Only streams are encrypted, no strings."""
    identifier, permissions = b"0123456789abcdef", (-4 & 0xFFFFFFFF).to_bytes(4, "little")
    owner = _rc4(hashlib.md5((b"owner" + _PADDING)[:32]).digest()[:5], (password.encode() + _PADDING)[:32])
    key = hashlib.md5((password.encode() + _PADDING)[:32] + owner + permissions + identifier).digest()[:5]
    encrypted = {}
    for number, content in objects.items():
        head, mark, rest = content.partition(b">>stream\n")
        if mark:
            salt = hashlib.md5(key + number.to_bytes(3, "little") + b"\0\0").digest()[:10]
            rest = _rc4(salt, rest.removesuffix(b"\nendstream")) + b"\nendstream"
        encrypted[number] = head + mark + rest
    user = _rc4(key, _PADDING)
    return write_objects(
        encrypted,
        f"{trailer}/ID[<{identifier.hex()}><{identifier.hex()}>]"
        f"/Encrypt<</Filter/Standard/V 1/R 2/O<{owner.hex()}>/U<{user.hex()}>/P -4>>",
    )


def _rc4(key: bytes, data: bytes) -> bytes:
    state, j = list(range(256)), 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(out)
