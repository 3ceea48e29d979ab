"""Bytes -> text: which encoding a file is in, and whether what it holds is text at all."""

from __future__ import annotations

import hashlib
import unicodedata

from ragblend.errors import UnreadableDocumentError

_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
SAMPLE_CHARS = 65536
_MAX_ODD_SHARE = 0.05  # of control, private and unassigned characters; prose has none, random bytes far more


CHANGED_REASON = "changed while it was read; run the command again"
BINARY_REASON = "is a binary file (NUL bytes); convert it to text, HTML or PDF first"


def detect_bom_encoding(data: bytes) -> str | None:
    """The encoding that the data's byte order mark names."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)


def decode(data: bytes, declared: str = "") -> str:
    """Text of `data`: by its byte order mark, else as `declared`, else UTF-8. No other encoding is guessed:
    latin-1 maps every byte to some character, so it would turn any garbage into a document."""
    marked = detect_bom_encoding(data)
    if marked is None and b"\0" in data:
        raise UnreadableDocumentError(BINARY_REASON)
    text = decode_as(data, marked or declared or "utf-8-sig")
    check_sample(text[:SAMPLE_CHARS])
    return text


def decode_as(data: bytes, encoding: str, start: int = 0) -> str:
    """The text of a file's bytes from `start` on. Raises UnreadableDocumentError, which says where they are none."""
    try:
        return data.decode(encoding)
    except (UnicodeError, LookupError) as error:
        where = f"byte {start + error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UnreadableDocumentError(
            f"is not {'UTF-8' if encoding.startswith('utf-8') else encoding} text ({where}); if it is text in another "
            "encoding, convert it: iconv -f ENCODING -t UTF-8 FILE"
        ) from error


def check_sample(sample: str) -> None:
    """Raise UnreadableDocumentError for what is no text, by how it begins."""
    num_odd = sum(
        unicodedata.category(char) in {"Cc", "Cn", "Co", "Cs"} and char not in "\t\n\r\f\x1b" for char in sample
    )
    if num_odd > _MAX_ODD_SHARE * len(sample):
        raise UnreadableDocumentError(
            f"is no text: {num_odd} of its first {len(sample)} characters are control or unassigned codes; "
            "convert it to text, HTML or PDF first"
        )


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """What a file is known by: 16 bytes."""
    return hashlib.blake2b(data, digest_size=16)
