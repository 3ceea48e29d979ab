"""Decodes files: finds the encoding of a file's bytes, and rejects files that are not text.

Read `decode_text` first.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import unicodedata
from typing import NamedTuple

from ragblend.corpus.readers.charsets import find_codec, rank_charsets
from ragblend.errors import UnreadableDocumentError

_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
SAMPLE_CHARS = 65536
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_MAX_ODD_SHARE = 0.05  # largest share of control, private and unassigned characters; prose has none

BINARY_REASON = "is a binary file (NUL bytes); convert it to text, HTML or PDF first"


def _detect_bom_encoding(data: bytes) -> str | None:
    """Return the encoding of the data's byte order mark; None if it has none."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)


class TextWithNotes(NamedTuple):
    """A text, with sentences about its encoding: that it was guessed, or that some bytes could not be decoded."""

    text: str
    notes: tuple[str, ...] = ()


def decode_text(data: bytes, declared: str = "") -> TextWithNotes:
    """Return the text of `data` in the first encoding that fits.

    The encodings are, in this order: that of the byte order mark; UTF-16, if there are NUL bytes; the charset
    `declared` ("" for none); UTF-8; the likeliest charset. Single-byte charsets decode any bytes, so a guess is
    accepted only if it gives almost no control characters. Raises UnreadableDocumentError for bytes that are not text.
    """
    if marked := _detect_bom_encoding(data):
        return _decode_marked(data, marked)
    if b"\0" in data:
        return _decode_utf16(data)
    codec = "" if data.startswith(codecs.BOM_UTF8) else find_codec(declared)
    decoded = _decode_known(data, codec) or _decode_guessed(data)
    check_is_text(decoded.text[:SAMPLE_CHARS])
    return decoded


def _decode_marked(data: bytes, encoding: str) -> TextWithNotes:
    """Return the text of a file with a byte order mark; a character that the end of the file cuts becomes U+FFFD."""
    text = data.decode(encoding, "replace")
    num_bad = text.count("\ufffd")
    if num_bad > len(text) / 1000 + 1 or _is_odd(text):
        raise UnreadableDocumentError(
            f"begins with the byte order mark of {encoding} and is no such text; if it is text in another encoding, "
            "convert it: iconv -f ENCODING -t UTF-8 FILE"
        )
    return TextWithNotes(text, (_broken_note(num_bad, encoding),) if num_bad else ())


def is_binary(head: bytes) -> bool:
    """Return True if a file that begins with `head` holds NUL bytes and is neither UTF-16 nor UTF-32."""
    return b"\0" in head and not _detect_bom_encoding(head) and not _detect_utf16(head)


def _detect_utf16(data: bytes) -> str:
    """Return the encoding of UTF-16 without a mark; "" for other bytes.

    The high bytes of a text have few different values, and NUL for each Latin letter, space and line break.
    """
    even, odd = data[::2].count(0), data[1::2].count(0)
    high = data[::2] if even > odd else data[1::2]
    if min(even, odd) > max(even, odd) / 10 or max(even, odd) < len(high) / 20:
        return ""
    if len(set(high)) > max(3, len(high) // 10):
        return ""
    return "utf-16-be" if even > odd else "utf-16-le"


def _decode_utf16(data: bytes) -> TextWithNotes:
    encoding = _detect_utf16(data)
    if not encoding:
        raise UnreadableDocumentError(BINARY_REASON)
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise UnreadableDocumentError(BINARY_REASON) from error
    if _is_odd(text):
        raise UnreadableDocumentError(BINARY_REASON)
    return TextWithNotes(text, (_guess_note(encoding),))


def _decode_known(data: bytes, declared: str) -> TextWithNotes | None:
    """Return the text as declared or as UTF-8, with U+FFFD for a few broken bytes; None if it is neither."""
    if b"\x1b$" in data and not declared:  # ISO-2022, whose bytes are also valid ASCII
        declared = "iso2022_jp_2"
    encodings = [declared, "utf-8-sig"] if declared else ["utf-8-sig"]
    if declared == "cp1252":
        # Editors declare it in pages that are UTF-8. Only tiny files are UTF-8 by chance.
        encodings.reverse()
    for encoding in encodings:
        try:
            return TextWithNotes(data.decode(encoding))
        except UnicodeDecodeError:
            continue
    for encoding in encodings:
        text = data.decode(encoding, "replace")
        num_bad = text.count("\ufffd")
        if num_bad * 20 <= len(text) - num_bad - len(text.encode("ascii", "ignore")):
            return TextWithNotes(text, (_broken_note(num_bad, encoding),))
    return None


def _decode_guessed(data: bytes) -> TextWithNotes:
    for encoding in rank_charsets(data):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if not _is_odd(text):
            return TextWithNotes(text, (_guess_note(encoding),))
    raise UnreadableDocumentError(
        "is not text in UTF-8 or in another encoding that can be detected; if it is text, convert it: "
        "iconv -f ENCODING -t UTF-8 FILE"
    )


def _is_odd(text: str) -> bool:
    """Return True if more characters are control, private or unassigned ones than in any prose."""
    sample = text[:SAMPLE_CHARS]
    return len(_CONTROL.findall(text)) > len(text) / 1000 or _count_odd(sample) > len(sample) / 1000


def _broken_note(num_bad: int, encoding: str) -> str:
    places = "1 place is" if num_bad == 1 else f"{num_bad} places are"
    return f"{places} not {_name(encoding)} and read as \ufffd"


def _guess_note(encoding: str) -> str:
    return f"read as {_name(encoding)} (guessed); convert the file to UTF-8 if letters are wrong"


def _name(codec: str) -> str:
    """Return the codec's name outside of Python."""
    name = re.sub("^cp(?=12|87)", "windows-", codec).replace("_", "-").replace("iso8859", "iso-8859")
    return {
        "utf-8": "UTF-8",
        "utf-8-sig": "UTF-8",
        "euc-jis-2004": "euc-jp",
        "big5hkscs": "big5",
        "cp932": "shift-jis",
    }.get(name, name)


def check_is_text(sample: str) -> None:
    """Raise UnreadableDocumentError if a text's beginning shows that it is not text."""
    num_odd = _count_odd(sample)
    if num_odd > _MAX_ODD_SHARE * len(sample):
        raise UnreadableDocumentError(
            f"is no text: {num_odd} of its first {len(sample)} characters are control or unassigned codes; "
            "convert it to text, HTML or PDF first"
        )


def _count_odd(sample: str) -> int:
    """Return the number of control, unassigned and private characters; each distinct one is looked up once."""
    kinds = {"Cc", "Cn", "Co", "Cs"}
    odd = {char for char in set(sample) if unicodedata.category(char) in kinds and char not in "\t\n\r\f\x1b"}
    return sum(char in odd for char in sample) if odd else 0


def unify_line_breaks(text: str) -> str:
    """Return `text` with "\\n" for every line break of "\\r\\n" or "\\r"."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def new_file_hash(data: bytes = b"") -> hashlib.blake2b:
    """Return a hash object of `data` that can be updated. Its digest of 16 bytes identifies a file's contents."""
    return hashlib.blake2b(data, digest_size=16)
