"""Files that are not read: each is named by what it is, with the command that helps."""

import random

import pytest

from ragblend.corpus.documents import open_source, read_documents
from ragblend.corpus.readers.rejected import CONVERTIBLE
from ragblend.errors import NotADocumentError, UnreadableDocumentError

OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


@pytest.mark.parametrize("suffix", CONVERTIBLE)
def test_formats_that_can_be_converted_name_how(suffix):
    with pytest.raises(UnreadableDocumentError, match=r"convert it|export it|djvutxt"):
        read_documents(f"/a{suffix}", OLE + b"\0" * 600)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.zip", b"PK\x03\x04rest", "archive"),
        ("a.tar.gz", b"\x1f\x8b", "archive"),
        ("a.PNG", b"\x89PNG", "picture"),
        ("a.svg", b"<svg><text>x</text></svg>", "picture"),
        ("a.mp3", b"ID3", "sound"),
        ("a", b"\x7fELF\0\0", "binary file"),
        ("a", b"PK\x03\x04\0\0[Content_Types].xml", "give it the ending"),
        ("a.dat", b"\0\1\2\3", "binary file"),
        ("a.text", random.Random(3).randbytes(4000).replace(b"\0", b"\1"), "is not text in UTF-8 or in another"),
        ("a", OLE + b"\0" + "WordDocument".encode("utf-16-le"), "Word file of the format before 2007"),
        ("~$report.docx", b"\x05Ann\0", "lock file"),
        ("server.key", b"-----BEGIN PRIVATE KEY-----", "no Keynote presentation"),
    ],
)
def test_files_that_are_no_documents_are_passed_over_with_a_reason(name, data, reason, tmp_path):
    with pytest.raises(NotADocumentError, match=reason):
        read_documents(f"/{name}", data)
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(NotADocumentError, match=reason):
        open_source(str(path)).read()


def test_a_keynote_presentation_names_how_to_export_it():
    with pytest.raises(UnreadableDocumentError, match="export it from Keynote"):
        read_documents("/a.key", b"PK\x03\x04\0\0")


def test_a_text_that_begins_like_a_picture_is_read():
    (document,) = read_documents("/a.note", b"GIF89a is a format of pictures.").documents
    assert document.text == "GIF89a is a format of pictures."
