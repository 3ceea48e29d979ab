"""Formats that are not read: recognised by name or first bytes, with the command that converts them."""

from __future__ import annotations

from pathlib import PurePath

from ragblend.corpus.readers.encodings import BINARY_REASON, is_binary
from ragblend.corpus.readers.types import ParsedRecords
from ragblend.errors import NotADocumentError, UnreadableDocumentError

OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
ZIP_MAGIC = b"PK\x03\x04"


def _soffice(name: str, target: str) -> str:
    return f"is {name}, which is not read; convert it: soffice --headless --convert-to {target} FILE"


_OLD_WORD = _soffice("a Word file of the format before 2007", "docx")
_OLD_POWERPOINT = _soffice("a PowerPoint file of the format before 2007", "pptx")
_KINDLE = "is a Kindle book, which is not read; convert it: ebook-convert FILE FILE.epub (Calibre)"
_OUTLOOK = (
    "is an Outlook message (.msg), which is not read; save it as .eml, or convert it: msgconvert FILE "
    "(Debian package libemail-outlook-message-perl)"
)

CONVERTIBLE: dict[str, str] = {
    **dict.fromkeys((".ppt", ".pps"), _OLD_POWERPOINT),
    ".msg": _OUTLOOK,
    ".pst": "is an Outlook mailbox, which is not read; convert it to mbox: readpst FILE",
    ".pages": "is a Pages document, which is not read; export it from Pages as Word or PDF",
    ".numbers": "is a Numbers document, which is not read; export it from Numbers as Excel or CSV",
    ".xlsb": _soffice("a binary Excel workbook (.xlsb)", "xlsx"),
    ".wpd": _soffice("a WordPerfect document", "docx"),
    ".wps": _soffice("a Works document", "docx"),
    ".sxw": _soffice("a document of OpenOffice 1", "odt"),
    **dict.fromkeys((".vsd", ".vsdx"), _soffice("a Visio drawing", "pdf")),
    ".pub": _soffice("a Publisher document", "pdf"),
    **dict.fromkeys((".mobi", ".azw", ".azw3"), _KINDLE),
    ".ps": "is a PostScript file, which is not read; convert it: ps2pdf FILE",
    ".djvu": "is a DjVu document, which is not read; take its text: djvutxt FILE FILE.txt",
}
"""Documents whose format is not read, by the ending of their names."""

_ARCHIVE = "is an archive; unpack it and add the folder"
_PICTURE = "is a picture; if it shows text, run OCR on it: tesseract FILE FILE"
_SOUND = "is a sound or video file; add its transcript"
_PROGRAM = "is a program or data of one"
_OTHER_ENDINGS = {
    _ARCHIVE: "zip tar gz tgz bz2 tbz2 xz txz zst 7z rar jar war whl deb rpm iso dmg cab lz4 lzma",
    _PICTURE: "png jpg jpeg gif bmp tif tiff webp heic heif avif ico psd svg svgz eps",
    _SOUND: "mp3 mp4 m4a m4v wav ogg oga ogv opus flac aac wma avi mov mkv webm wmv mpg mpeg 3gp",
    _PROGRAM: "exe dll so dylib pyc pyd wasm sqlite sqlite3 ttf otf woff woff2",
}
_PASSED_OVER = {f".{ending}": reason for reason, endings in _OTHER_ENDINGS.items() for ending in endings.split()}

_DOCUMENT_PARTS = (b"[Content_Types].xml", b"mimetypeapplication/")


def not_a_document_reason(name: str, head: bytes, has_reader: bool) -> str:
    """Return the reason why the file `name` is not a document; "" if it may be one.

    `head`: the first bytes of the file. `has_reader`: True if there is a reader for the ending of `name`. Such a file
    is a document, unless it is a lock file of Office.

    >>> not_a_document_reason("a.gif", b"", False), not_a_document_reason("a", b"GIF89a\\0", False)[:16]
    ('is a picture; if it shows text, run OCR on it: tesseract FILE FILE', 'is a binary file')
    """
    if name.startswith("~$"):
        return "is the lock file of a document that is open in Office"
    if has_reader:
        return ""
    suffix = PurePath(name).suffix.lower()
    if suffix in _PASSED_OVER:
        return _PASSED_OVER[suffix]
    if head.startswith(OLE_MAGIC):
        return describe_ole(head, "document")
    if not is_binary(head):
        return ""
    if head.startswith(ZIP_MAGIC) and any(name in head for name in _DOCUMENT_PARTS):
        return "is an Office file or a book; give it the ending of its format: .docx, .pptx, .xlsx, .odt, .epub"
    return BINARY_REASON


def describe_ole(data: bytes, kind: str) -> str:
    """Return the reason why the OLE file `data` cannot be read: it is encrypted or in an old format.

    `kind`: the name of the expected format for the message, such as "Word file".
    """

    def has_stream(name: str) -> bool:
        return name.encode("utf-16-le") in data

    if has_stream("EncryptedPackage"):
        return f"is a {kind} with a password; save it without one"
    if has_stream("WordDocument"):
        return _OLD_WORD
    if has_stream("PowerPoint Document"):
        return _OLD_POWERPOINT
    if has_stream("Workbook") or has_stream("Book"):
        return _soffice("an Excel file of the format before 2007", "xlsx")
    if has_stream("__substg1.0_") or has_stream("__properties_version1.0"):
        return _OUTLOOK
    return _soffice("an OLE file, as Office wrote before 2007", "pdf")


def raise_unreadable(reason: str, data: bytes) -> ParsedRecords:
    """Raise UnreadableDocumentError(reason); `data` is not read.

    `partial(raise_unreadable, reason)` is used as the reader of an unsupported format.
    """
    raise UnreadableDocumentError(reason)


def read_keynote(data: bytes) -> ParsedRecords:
    """Raise UnreadableDocumentError for a Keynote document. The message names formats to export it to.

    Raises NotADocumentError for other files called `.key`, such as private keys.
    """
    if data.startswith(ZIP_MAGIC):
        raise UnreadableDocumentError(
            "is a Keynote presentation, which is not read; export it from Keynote as PowerPoint or PDF"
        )
    raise NotADocumentError("is called .key and is no Keynote presentation; rename it to .txt if it is text")
