"""Letters of a PDF's glyphs from the names that its fonts give them, where PDFium finds none.

PDFium knows Adobe's list of names, but not ligatures such as "f_f_i", and no names in fonts of type 3. `name_glyphs`
writes the letters into the file, as the table that PDF calls ToUnicode; PDFium then reads it as any other.
"""

from __future__ import annotations

import io
import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pypdf import PdfWriter

_MAX_CODE, _MAX_CHAR, _MAX_ROWS = 0xFF, 0x10FFFF, 100  # rows: of one section of a table
_MAX_BYTES = 64 << 20  # pypdf needs about a second for 4 MB
_NAMES_OF_SIGNS = (
    "space exclam quotedbl numbersign dollar percent ampersand quotesingle parenleft parenright asterisk plus comma "
    "hyphen period slash zero one two three four five six seven eight nine colon semicolon less equal greater question "
    "at bracketleft backslash bracketright underscore braceleft bar braceright endash emdash quoteleft quoteright "
    "quotedblleft quotedblright quotedblbase guillemotleft guillemotright bullet ellipsis germandbls ae AE oe OE "
    "oslash Oslash dotlessi lslash Lslash Euro section degree"
)
_SIGNS = " !\"#$%&'()*+,-./0123456789:;<=>?@[\\]_{|}–—‘’“”„«»•…ßæÆœŒøØıłŁ€§°"
_NAMES = {
    **dict(zip(_NAMES_OF_SIGNS.split(), _SIGNS, strict=True)),
    **{ligature: ligature for ligature in ("ff", "fi", "fl", "ffi", "ffl")},
}
_ACCENTS = {
    **{"grave": "\u0300", "acute": "\u0301", "circumflex": "\u0302", "tilde": "\u0303", "dieresis": "\u0308"},
    **{"ring": "\u030a", "caron": "\u030c", "cedilla": "\u0327", "ogonek": "\u0328", "breve": "\u0306"},
    **{"macron": "\u0304", "hungarumlaut": "\u030b", "dotaccent": "\u0307"},
}
_ACCENTED = re.compile(f"([A-Za-z])({'|'.join(_ACCENTS)})")
_CODE = re.compile("uni((?:[0-9A-F]{4})+)|u([0-9A-F]{4,6})")
_NO_LETTER = re.compile(rb"<(?:00[01][0-9A-F]|E[0-9A-F]{3}|F[0-8][0-9A-F]{2}|FFFD)>", re.IGNORECASE)


def name_glyphs(data: bytes) -> bytes | None:
    """Return the PDF with a table of letters for each font that names its glyphs and has no such table.

    None if there is no such font, or the file is encrypted, larger than 64 MiB or not readable by pypdf.
    """
    from pypdf import PdfReader, PdfWriter

    log = logging.getLogger("pypdf")
    level = log.level
    log.setLevel(logging.CRITICAL)  # PDFium has read the file, which may be damaged
    try:
        reader = PdfReader(io.BytesIO(data))
        if len(data) > _MAX_BYTES or reader.is_encrypted:
            return None
        writer = PdfWriter(io.BytesIO(data), incremental=True)
        size: Any = reader.trailer["/Size"]
        if not sum([_add_table(writer, number) for number in range(1, size)]):
            return None
        changed = io.BytesIO()
        writer.write(changed)
        return changed.getvalue()
    except Exception:  # pypdf raises many kinds for a damaged file
        return None
    finally:
        log.setLevel(level)


def _add_table(writer: PdfWriter, number: int) -> bool:
    """Add the table of letters to the object `number` if it is a font that needs one. Return True if it was added."""
    from pypdf.generic import DecodedStreamObject, NameObject

    try:
        font: Any = writer.get_object(number)
    except (ValueError, IndexError):  # a number that no object has
        return False
    encoding = _entry(font, "/Encoding") if _entry(font, "/Type") == "/Font" else None
    differences = _entry(encoding, "/Differences")
    table = _entry(font, "/ToUnicode")
    if differences is None or (table is not None and not _NO_LETTER.search(table.get_data())):
        return False
    letters = _find_letters(differences)
    if not letters:
        return False
    stream = DecodedStreamObject()
    stream.set_data(_write_table(letters))
    font[NameObject("/ToUnicode")] = writer._add_object(stream)
    return True


def _entry(dictionary: Any, name: str) -> Any:
    """Return the object at a name in a dictionary of a PDF; None if it is no dictionary or lacks the name."""
    from pypdf.generic import DictionaryObject

    value = dictionary.get(name) if isinstance(dictionary, DictionaryObject) else None
    return value.get_object() if value is not None else None


def _find_letters(differences: Sequence[Any]) -> dict[int, str]:
    """Return the letters of the codes in an encoding: numbers, each followed by the names from that code on."""
    letters: dict[int, str] = {}
    code = 0
    for entry in differences:
        if isinstance(entry, int):
            code = int(entry)
            continue
        letter = decode_name(str(entry).removeprefix("/"))
        if letter and 0 <= code <= _MAX_CODE:
            letters[code] = letter
        code += 1
    return letters


def decode_name(name: str) -> str:
    """Return the letters of a glyph's name by the rules of Adobe's glyph list; "" for an unknown name.

    >>> decode_name("f_f_i"), decode_name("T_h.liga"), decode_name("uni00660069"), decode_name("eacute")
    ('ffi', 'Th', 'fi', 'é')
    """
    letters = [_decode_component(each) for each in name.partition(".")[0].split("_")]
    return "".join(letters) if all(letters) else ""


def _decode_component(name: str) -> str:
    if len(name) == 1 and name.isalpha():
        return name
    if name in _NAMES:
        return _NAMES[name]
    if accented := _ACCENTED.fullmatch(name):
        return unicodedata.normalize("NFC", accented[1] + _ACCENTS[accented[2]])
    if code := _CODE.fullmatch(name):
        if code[1]:
            return unicodedata.normalize("NFKC", bytes.fromhex(code[1]).decode("utf-16-be", "ignore"))
        return unicodedata.normalize("NFKC", chr(min(int(code[2], 16), _MAX_CHAR)))
    return ""


def _write_table(letters: Mapping[int, str]) -> bytes:
    """Return a ToUnicode table (PDF 32000-1, 9.10.3) of single-byte codes."""
    rows = [f"<{code:02X}> <{text.encode('utf-16-be').hex().upper()}>" for code, text in letters.items()]
    parts = [rows[at : at + _MAX_ROWS] for at in range(0, len(rows), _MAX_ROWS)]
    body = "\n".join(f"{len(part)} beginbfchar\n" + "\n".join(part) + "\nendbfchar" for part in parts)
    return (
        "/CIDInit /ProcSet findresource begin\n12 dict begin\nbegincmap\n/CMapName /Letters def\n/CMapType 2 def\n"
        f"1 begincodespacerange\n<00> <FF>\nendcodespacerange\n{body}\nendcmap\nend\nend"
    ).encode()
