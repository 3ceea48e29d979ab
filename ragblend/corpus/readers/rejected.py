"""Formats that are not read: what they are, by name or by first bytes, and the command that converts them."""

from __future__ import annotations

from ragblend.corpus.readers.types import ParsedRecords
from ragblend.errors import NotADocumentError, UnreadableDocumentError

OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
ZIP_MAGIC = b"PK\x03\x04"


def _soffice(name: str, target: str) -> str:
    return f"is {name}, which is not read; convert it: soffice --headless --convert-to {target} FILE"


_OLD_WORD = _soffice("a Word file of the format before 2007", "docx")
_OLD_POWERPOINT = _soffice("a PowerPoint file of the format before 2007", "pptx")
_OUTLOOK = (
    "is an Outlook message (.msg), which is not read; save it as .eml, or convert it: msgconvert FILE "
    "(Debian package libemail-outlook-message-perl)"
)

CONVERTIBLE: dict[str, str] = {
    ".ppt": _OLD_POWERPOINT,
    ".pps": _OLD_POWERPOINT,
    ".msg": _OUTLOOK,
    ".pst": "is an Outlook mailbox, which is not read; convert it to mbox: readpst FILE",
    ".pages": "is a Pages document, which is not read; export it from Pages as Word or PDF",
    ".numbers": "is a Numbers document, which is not read; export it from Numbers as Excel or CSV",
    ".xlsb": _soffice("a binary Excel workbook (.xlsb)", "xlsx"),
    ".wpd": _soffice("a WordPerfect document", "docx"),
    ".wps": _soffice("a Works document", "docx"),
    ".sxw": _soffice("a document of OpenOffice 1", "odt"),
    ".vsd": _soffice("a Visio drawing", "pdf"),
    ".vsdx": _soffice("a Visio drawing", "pdf"),
    ".pub": _soffice("a Publisher document", "pdf"),
    ".mobi": "is a Kindle book, which is not read; convert it: ebook-convert FILE FILE.epub (Calibre)",
    ".azw": "is a Kindle book, which is not read; convert it: ebook-convert FILE FILE.epub (Calibre)",
    ".azw3": "is a Kindle book, which is not read; convert it: ebook-convert FILE FILE.epub (Calibre)",
    ".djvu": "is a DjVu document, which is not read; take its text: djvutxt FILE FILE.txt",
}
"""Documents whose format is not read, by the ending of their names."""

_ARCHIVE = "is an archive; unpack it and add the folder"
_PICTURE = "is a picture; if it shows text, run OCR on it: tesseract FILE FILE"
_SOUND = "is a sound or video file; add its transcript"
_PROGRAM = "is a program or data of one"
_OTHER_BINARY = {
    _ARCHIVE: "zip tar gz tgz bz2 tbz2 xz txz zst 7z rar jar war whl deb rpm iso dmg cab lz4 lzma",
    _PICTURE: "png jpg jpeg gif bmp tif tiff webp heic heif avif ico psd svg svgz eps ai raw cr2 nef",
    _SOUND: "mp3 mp4 m4a m4v wav ogg oga ogv opus flac aac wma avi mov mkv webm wmv mpg mpeg 3gp mid",
    _PROGRAM: "exe dll so dylib o a class pyc pyd wasm bin dat db sqlite sqlite3 ttf otf woff woff2",
}
PASSED_OVER: dict[str, str] = {
    f".{ending}": why for why, endings in _OTHER_BINARY.items() for ending in endings.split()
}
"""Files that are no documents, by the ending of their names."""

_MAGIC = (
    (ZIP_MAGIC, _ARCHIVE),
    (b"\x1f\x8b", _ARCHIVE),
    (b"BZh", _ARCHIVE),
    (b"\xfd7zXZ\0", _ARCHIVE),
    (b"7z\xbc\xaf\x27\x1c", _ARCHIVE),
    (b"Rar!\x1a\x07", _ARCHIVE),
    (b"\x28\xb5\x2f\xfd", _ARCHIVE),
    (b"\x89PNG\r\n\x1a\n", _PICTURE),
    (b"\xff\xd8\xff", _PICTURE),
    (b"GIF8", _PICTURE),
    (b"II*\0", _PICTURE),
    (b"MM\0*", _PICTURE),
    (b"OggS", _SOUND),
    (b"ID3", _SOUND),
    (b"fLaC", _SOUND),
    (b"\x1aE\xdf\xa3", _SOUND),
    (b"\x7fELF", _PROGRAM),
    (b"SQLite format 3\0", _PROGRAM),
)


def describe_binary(head: bytes) -> str:
    """Why a file whose name has no known ending is passed over, by its first bytes; "" for other bytes.

    >>> describe_binary(b"GIF89a\\0")
    'is a picture; if it shows text, run OCR on it: tesseract FILE FILE'
    """
    if head.startswith(OLE_MAGIC):
        return describe_ole(head, "document")
    return next((reason for magic, reason in _MAGIC if head.startswith(magic)), "")


def describe_ole(data: bytes, kind: str) -> str:
    """What is wrong with an OLE file where a `kind` ("Word file") is expected: encrypted, or of an old format."""

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
    return f"is an OLE file (Office before 2007), not a {kind}; convert it: soffice --headless --convert-to pdf FILE"


def reject(reason: str, data: bytes) -> ParsedRecords:
    """Raise UnreadableDocumentError(reason). With its reason bound, the reader of a format that is not read."""
    raise UnreadableDocumentError(reason)


def read_keynote(data: bytes) -> ParsedRecords:
    """Reject a Keynote document, and pass over what else is called `.key`: private keys are no documents."""
    if data.startswith(ZIP_MAGIC):
        raise UnreadableDocumentError(
            "is a Keynote presentation, which is not read; export it from Keynote as PowerPoint or PDF"
        )
    raise NotADocumentError("is called .key and is no Keynote presentation; rename it to .txt if it is text")
