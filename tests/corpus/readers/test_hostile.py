"""Damaged and hostile files of every kind: each gives a text or a named error, and none takes long.

A case is a whole file of a kind and one change to it, drawn from a seed that is in the test's name.
"""

from __future__ import annotations

import io
import random
import resource
import unicodedata
import zipfile
from collections.abc import Callable
from time import process_time

import pytest
from document_files import WHOLE, epub, pdf
from office_files import make_docx, make_odf

from ragblend.corpus.documents import read_documents
from ragblend.errors import NotADocumentError, UnreadableDocumentError

S_PER_MB, MIN_S = 10.0, 2.0
"""CPU seconds that a file may take: per MB of it, and at least."""


def flip(data: bytes, draw: random.Random) -> bytes:
    """Replace up to twenty bytes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 20)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def truncate(data: bytes, draw: random.Random) -> bytes:
    """Leave the first part."""
    return data[: draw.randrange(1, len(data))]


def cut_out(data: bytes, draw: random.Random) -> bytes:
    """Leave out a part in the middle."""
    start, stop = sorted(draw.sample(range(len(data)), 2))
    return data[:start] + data[stop:]


def repeat(data: bytes, draw: random.Random) -> bytes:
    """Repeat a part many times, up to 200 kB."""
    start, stop = sorted(draw.sample(range(len(data) + 1), 2))
    return data[:start] + data[start:stop] * min(200_000 // (stop - start), 1000) + data[stop:]


def insert(data: bytes, draw: random.Random) -> bytes:
    """Put random bytes in the middle."""
    at = draw.randrange(len(data))
    return data[:at] + draw.randbytes(draw.randint(1, 3000)) + data[at:]


def other_kind(data: bytes, draw: random.Random) -> bytes:
    """Another kind's file under this kind's name."""
    return WHOLE[draw.choice(sorted(WHOLE))]


def join(data: bytes, draw: random.Random) -> bytes:
    """The beginning of this file and the end of one of another kind."""
    other = WHOLE[draw.choice(sorted(WHOLE))]
    return data[: draw.randrange(len(data))] + other[draw.randrange(len(other)) :]


def bomb(data: bytes, name: str, size_mib: int) -> bytes:
    """Return the zip archive `data` with a further member whose decompressed size is `size_mib`."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w") as member:
        for _ in range(size_mib):
            member.write(b"a" * (1 << 20))
    return buffer.getvalue()


CHANGES = (flip, truncate, cut_out, repeat, insert, other_kind, join)
CASES = [(kind, change, seed) for kind in WHOLE for change in CHANGES for seed in range(2)]


def marked(case: tuple[str, Callable[[bytes, random.Random], bytes], int]) -> object:
    """The case with its name; all are slow but one change of each kind, another one from kind to kind."""
    kind, change, seed = case
    is_fast = seed == 0 and CHANGES.index(change) == list(WHOLE).index(kind) % len(CHANGES)
    marks = [] if is_fast else [pytest.mark.slow]
    return pytest.param(*case, id=f"{kind}-{change.__name__}-{seed}", marks=marks)


def read(kind: str, data: bytes) -> str:
    """The text of a file, or "" where it was refused with a named error. Fails where it took too long or is garbage."""
    start_s = cpu_s()
    try:
        text = "\n\n".join(document.text for document in read_documents(f"file.{kind}", data).documents)
        assert text.strip(), "a document without text"
    except (NotADocumentError, UnreadableDocumentError):
        text = ""
    assert cpu_s() - start_s <= max(MIN_S, S_PER_MB * len(data) / 1e6)
    assert num_garbage(text) <= 0.05 * len(text), f"garbage was taken for text: {text[:200]!r}"
    return text


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def num_garbage(text: str) -> int:
    """Characters that no text holds: control, private and unassigned ones."""
    return sum(unicodedata.category(char) in ("Cc", "Co", "Cn", "Cs") for char in text if char not in "\n\t\f")


@pytest.mark.parametrize("kind", WHOLE)
def test_the_whole_file_of_each_kind_is_read(kind):
    assert any(word in read(kind, WHOLE[kind]) for word in ("rent", "Ouagadougou", "bolt"))


@pytest.mark.parametrize(("kind", "change", "seed"), [marked(case) for case in CASES])
def test_a_damaged_file_gives_a_text_or_a_named_error(kind, change, seed):
    read(kind, change(WHOLE[kind], random.Random(f"{kind} {change.__name__} {seed}")))


@pytest.mark.parametrize("kind", [*WHOLE, "doc", "xls", "log", "parquet"])
def test_random_bytes_are_no_text(kind):
    assert read(kind, random.Random(kind).randbytes(20_000)) == ""


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "html-one-line": ("html", lambda: b"<p>" + b"word" * 400_000),
    "xhtml-self-closed": ("xhtml", lambda: b'<?xml version="1.0"?><html><body>' + b"<a " * 300_000 + b"the end"),
    "txt-one-line": ("txt", lambda: b"word" * 500_000),
    "txt-blanks": ("txt", lambda: b" " * 1_000_000 + b"the end"),
    "txt-line-breaks": ("txt", lambda: b"\r" * 1_000_000 + b"the end"),
    "md-fences": ("md", lambda: b"```\n" * 200_000),
    "csv-open-quote": ("csv", lambda: b'a,b\n"' + b"x,y\n" * 200_000),
    "csv-many-columns": ("csv", lambda: b",".join(b"c%d" % at for at in range(20_000)) + b"\n" + b"1," * 20_000),
    "json-nested-records": ("json", lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "json-long-number": ("json", lambda: b'[{"text": "rent", "n": ' + b"9" * 100_000 + b"}]"),
    "jsonl-nested": ("jsonl", lambda: b'{"text": ' + b"[" * 100_000 + b"\n" + b'{"text": "rent"}\n'),
    "jsonl-one-line": ("jsonl", lambda: b'{"text": "' + b"word " * 300_000 + b'"}'),
    "docx-bomb": ("docx", lambda: bomb(WHOLE["docx"], "word/footnotes.xml", 300)),
    "xlsx-bomb": ("xlsx", lambda: bomb(WHOLE["xlsx"], "xl/sharedStrings.xml", 300)),
    "docx-wide-cell": (
        "docx",
        lambda: make_docx(
            '<w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val="2000000000"/></w:tcPr><w:p><w:r><w:t>rent</w:t></w:r></w:p>'
            "</w:tc></w:tr></w:tbl>"
        ),
    ),
    "odt-nested": ("odt", lambda: make_odf("<text:p>" * 50_000 + "the end" + "</text:p>" * 50_000)),
    "odt-spaces": ("odt", lambda: make_odf('<text:p>a<text:s text:c="2000000000"/>b</text:p>')),
    "ods-repeated": (
        "ods",
        lambda: make_odf(
            '<table:table table:name="T"><table:table-row table:number-rows-repeated="1048576">'
            '<table:table-cell office:value-type="string" table:number-columns-repeated="16384"><text:p>a</text:p>'
            "</table:table-cell></table:table-row></table:table>",
            "spreadsheet",
        ),
    ),
    "epub-one-part-often": ("epub", lambda: epub(num_readings=100_000)),
    "rtf-nested": ("rtf", lambda: rb"{\rtf1 " + b"{" * 200_000 + b"the end"),
    "rtf-binary": ("rtf", lambda: rb"{\rtf1 the end \bin2000000000 " + b"a" * 1000 + b"}"),
    "eml-parts": (
        "eml",
        lambda: b"Subject: a\nContent-Type: multipart/mixed; boundary=b\n\n"
        + b"--b\nContent-Type: multipart/mixed; boundary=b\n\n" * 3_000 + b"--b\n\nthe end\n",
    ),
    "eml-headers": ("eml", lambda: b"Subject: the end\n" + b"X-A: b\n" * 100_000 + b"\ntext\n"),
    "eml-nested-messages": ("eml", lambda: b"Content-Type: message/rfc822\n\n" * 5_000 + b"Subject: a\n\nthe end\n"),
    "mbox-empty-messages": ("mbox", lambda: b"From a\n\n" * 20_000),
    "pdf-page-loop": ("pdf", lambda: pdf().replace(b"Kids[5 0 R 7 0 R", b"Kids[2 0 R 2 0 R")),
    "pdf-one-page-often": ("pdf", lambda: pdf(kids="5 0 R " * 20_000)),
    "pdf-form-loop": (
        "pdf",
        lambda: pdf(
            annotations=["<</FT/Tx/T(a)/V(rent)/Kids[4 0 R 4 0 R]/Parent 4 0 R/Subtype/Widget/Rect[0 0 9 9]>>"]
        ),
    ),
    "pdf-nested": ("pdf", lambda: b"%PDF-1.4\n1 0 obj\n" + b"[" * 100_000 + b"\nendobj\ntrailer<</Root 1 0 R>>\n%%EOF"),
    "zip-as-text": ("txt", lambda: WHOLE["docx"]),
    "picture-as-html": ("html", lambda: b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(50_000)),
}  # fmt: skip
"""Files made to take time, memory or the stack. Tests of single readers have more of them."""
FAST_HOSTILE = ("html-one-line", "json-nested-records", "docx-wide-cell", "pdf-page-loop", "txt-blanks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST_HOSTILE else [pytest.mark.slow]) for name in HOSTILE]
)
def test_a_hostile_file_gives_a_text_or_a_named_error(name):
    kind, make = HOSTILE[name]
    read(kind, make())
