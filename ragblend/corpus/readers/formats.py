"""The reader of each file, by the suffix of its name. To add a format, add its module and an entry here.

`try_reading_in_child` tries a reader in a child process, for a file from someone else.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import IO, BinaryIO

from ragblend.corpus.readers.books import read_epub
from ragblend.corpus.readers.child import run_in_child
from ragblend.corpus.readers.html import read_html
from ragblend.corpus.readers.mail import read_mail, read_mbox
from ragblend.corpus.readers.notebook import read_notebook
from ragblend.corpus.readers.opendocument import read_odp, read_ods, read_odt
from ragblend.corpus.readers.pdf import read_pdf
from ragblend.corpus.readers.records import read_json, stream_jsonl, stream_parquet
from ragblend.corpus.readers.rejected import CONVERTIBLE, raise_unreadable, read_keynote
from ragblend.corpus.readers.rtf import read_rtf
from ragblend.corpus.readers.slides import read_pptx
from ragblend.corpus.readers.spreadsheets import read_spreadsheet
from ragblend.corpus.readers.tables import read_csv
from ragblend.corpus.readers.text import read_code, read_markdown, read_restructured_text
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.corpus.readers.word import read_docx, read_mislabeled_doc
from ragblend.corpus.readers.xml_text import read_xml

READERS_VERSION = 1
"""Raise it when a reader returns another text for the same bytes; ingestion then reads unchanged files again."""

PARQUET_SUFFIX = ".parquet"
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".mdx", ".rst", ".adoc", ".asciidoc", ".org", ".tex"})

STREAMING_READERS: dict[str, Callable[[BinaryIO, str], ParsedRecords]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), stream_jsonl),
    PARQUET_SUFFIX: stream_parquet,
}
"""Readers of records that read an open file some records at a time. Arguments: the file, the text field."""


def _read_in_memory(
    stream: Callable[[BinaryIO, str], ParsedRecords], data: bytes, text_field: str = ""
) -> ParsedRecords:
    """Read the bytes of a file with one of STREAMING_READERS."""
    return stream(io.BytesIO(data), text_field)


RECORD_READERS: dict[str, Callable[..., ParsedRecords]] = {
    **dict.fromkeys((".csv", ".tsv"), read_csv),
    ".json": read_json,
    **{suffix: partial(_read_in_memory, stream) for suffix, stream in STREAMING_READERS.items()},
}
"""Readers of records. `text_field=`: the field that holds their text; "" lets the reader choose."""

READERS: dict[str, Callable[[bytes], ParsedRecords]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    ".pdf": read_pdf,
    **dict.fromkeys((".docx", ".docm"), read_docx),
    ".doc": read_mislabeled_doc,
    **dict.fromkeys((".pptx", ".pptm", ".ppsx"), read_pptx),
    **dict.fromkeys((".xlsx", ".xlsm", ".xls"), read_spreadsheet),
    ".odt": read_odt,
    ".odp": read_odp,
    ".ods": read_ods,
    ".rtf": read_rtf,
    ".epub": read_epub,
    ".ipynb": read_notebook,
    ".eml": read_mail,
    ".mbox": read_mbox,
    **{suffix: partial(raise_unreadable, reason) for suffix, reason in CONVERTIBLE.items()},
    ".key": read_keynote,
    **RECORD_READERS,
}
TEXT_READERS: dict[str, Callable[[bytes], ParsedRecords]] = {
    **dict.fromkeys((".md", ".markdown", ".mdx"), read_markdown),
    **dict.fromkeys((".txt", ".text", ".rst"), read_restructured_text),
    **dict.fromkeys((".xml", ".rss", ".atom", ".dbk", ".docbook", ".dita", ".xsd", ".xsl", ".xslt"), read_xml),
    **dict.fromkeys((".js", ".mjs", ".cjs", ".css", ".map"), read_code),
}
"""Readers of text; a file without text is skipped. `read_text` reads all other files."""

_MIN_TIME_S, _TIME_PER_MB_S = 30.0, 10.0
_MIN_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 32  # address space in bytes; libraries reserve more than they use


def try_reading_in_child(file: IO[bytes], num_bytes: int, suffix: str) -> None:
    """Raise UnreadableDocumentError if reading `file` crashes, takes too long or needs too much memory.

    A child process reads the file with the reader of the `suffix` (".pdf"). Time limit: 10 s per MB, at least 30 s.
    Memory limit: 4 GiB plus 32 times the file's size `num_bytes`. A file that the reader rejects raises no error. Plain
    text is not examined. `file` must have a descriptor. It is read from its beginning, and its position changes.
    """
    if suffix.lower() not in READERS:
        return
    descriptor = file.fileno()  # first, because it moves a spooled file to the disk
    file.flush()
    file.seek(0)
    run_in_child(
        f"{__name__}:read_all",
        suffix.lower(),
        limit_s=max(_MIN_TIME_S, _TIME_PER_MB_S * num_bytes / 1e6),
        memory_bytes=_MIN_MEMORY + _MEMORY_PER_BYTE * num_bytes,
        fix="split it, or save it again with the program that made it, or as text",
        stdin=descriptor,
    )


def read_all(data: bytes, suffix: str) -> None:
    """Read all records of a file with the reader of the `suffix`, and keep none. Raises the errors of the reader."""
    deque(READERS[suffix](data), maxlen=0)
