"""Charsets: the codec of a declared label, and the likely charsets of undeclared bytes."""

from __future__ import annotations

import codecs
import re

# Labels of the WHATWG Encoding Standard whose codec differs from Python's, or that Python lacks.
# Pages declare ISO-8859-1 and use the quotes of windows-1252; GB2312 and GBK are subsets of GB18030.
_CODECS_BY_LABEL = {
    label: codec
    for codec, labels in {
        "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8 utf8 utf-8 "
        "utf-16 utf-16le utf-16be unicode ucs-2 iso-10646-ucs-2 csunicode unicodefeff unicodefffe utf-32 utf-7",
        "cp1252": "ascii us-ascii ansi_x3.4-1968 iso-8859-1 iso8859-1 iso_8859-1 iso88591 latin1 latin-1 l1 cp819 "
        "ibm819 x-cp1252 iso-ir-100 csisolatin1 iso_8859-1:1987",
        "cp1254": "iso-8859-9 iso8859-9 iso_8859-9 iso88599 latin5 l5 x-cp1254 iso-ir-148 csisolatin5",
        "cp874": "tis-620 iso-8859-11 iso8859-11 iso885911 dos-874 windows-874",
        "gb18030": "gb2312 gb_2312 gb_2312-80 gbk x-gbk chinese csgb2312 iso-ir-58 cp936 ms936",
        "big5hkscs": "big5 big5-hkscs cn-big5 csbig5 x-x-big5",
        "cp949": "euc-kr ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 korean cseuckr iso-ir-149 windows-949",
        "cp932": "shift_jis shift-jis sjis x-sjis csshiftjis windows-31j",
        "euc_jp": "x-euc-jp cseucpkdfmtjapanese",
        "mac_roman": "mac csmacintosh x-mac-roman",
        "mac_cyrillic": "x-mac-cyrillic x-mac-ukrainian",
        "koi8-u": "koi8-ru",
        "koi8-r": "koi koi8",
        "iso8859-8": "iso-8859-8-i iso-8859-8-e logical visual csiso88598i csiso88598e",
    }.items()
    for label in labels.split()
}
_CHARSET_FAMILIES = ("cp", "iso8859", "iso2022", "koi8", "mac", "gb", "hz", "kz1048", "euc", "shift", "johab")
_LATIN = ("cp1252", "cp1250", "iso8859-2", "cp1254", "cp1257", "cp850", "mac-roman")
_OTHER_SCRIPTS = (
    *("cp1251", "koi8-r", "koi8-u", "cp866", "iso8859-5", "cp1253", "iso8859-7"),
    *("cp1255", "iso8859-8", "cp1256", "iso8859-6", "cp874"),
)
_MULTIBYTE = ("cp932", "euc_jis_2004", "gb18030", "big5hkscs", "cp949")
_SAMPLE_BYTES = 32768
# The detector gives sentences in scripts other than Latin .10 to .37, and random bytes above 0x7f at most .04.
_MIN_SCORE, _FEW_BYTES = 0.06, 64
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
_CAPITAL_IN_WORD = re.compile("[A-Za-z][\u00c0-\u00d6\u00d8-\u00de\u0160\u017d\u0152\u0178][a-z]")


def find_codec(label: str) -> str:
    """Return the Python codec for a declared charset; "" if `label` is the name of no charset.

    >>> find_codec("GB2312"), find_codec("iso-8859-1"), find_codec("windows-1251"), find_codec("rot13")
    ('gb18030', 'cp1252', 'cp1251', '')
    """
    label = label.strip().lower()
    if label in _CODECS_BY_LABEL:
        return _CODECS_BY_LABEL[label]
    try:
        name = codecs.lookup(label).name
    except (LookupError, ValueError):
        return ""
    # A file must not choose Python's codecs that are not charsets (hex, rot13, unicode-escape, idna).
    return name if name.startswith(_CHARSET_FAMILIES) else ""


def rank_charsets(data: bytes) -> list[str]:
    """Return the names of the Python codecs that `data` may be encoded with, likeliest first.

    `data` is not UTF-8. Only a sample of it is examined.

    >>> rank_charsets("Die Größe ist gültig für 5 €".encode("cp1252"))[0]
    'cp1252'
    """
    import chardet

    sample = _take_sample(data)
    guesses = chardet.detect_all(
        sample, True, compat_names=False, include_encodings=[*_LATIN, *_OTHER_SCRIPTS, *_MULTIBYTE]
    )
    scores = {one["encoding"]: one["confidence"] for one in guesses if one["encoding"]}
    ranked = [name for name in scores if name in {*_LATIN, *_OTHER_SCRIPTS, *_MULTIBYTE}]
    if not ranked or ranked[0] in _MULTIBYTE:
        return ranked
    # In Latin text, letters without accents surround one with an accent; in other scripts whole words are above 0x7f.
    # The detector's scores alone mistake French for Cyrillic.
    runs = _HIGH_RUN.findall(sample)
    num_high = sum(map(len, runs))
    is_latin = num_high < 2.5 * len(runs)
    if not is_latin and num_high > _FEW_BYTES and scores[ranked[0]] < _MIN_SCORE:
        return []  # the bytes are not letters of any script
    ranked = sorted(ranked, key=lambda name: name not in _MULTIBYTE and (name in _LATIN) is not is_latin)
    if is_latin and _reads_as_windows_1252(sample, scores, ranked[0]):
        best = "cp1252"
    else:  # charsets of one language may have equal scores; the wrong one gives symbols inside of words
        close = [name for name in ranked if scores[name] > 0.95 * scores[ranked[0]]]
        best = max(close, key=lambda name: sum(map(str.isalpha, sample.decode(name, "replace"))))
    return [best, *(name for name in ranked if name != best)]


def _take_sample(data: bytes) -> bytes:
    """Return whole lines, from the first with a byte above 0x7f on."""
    first = _HIGH_RUN.search(data)
    start = data.rfind(b"\n", 0, first.start()) + 1 if first else 0
    start = max(start, first.start() - _SAMPLE_BYTES // 2) if first else 0
    sample = data[start : start + _SAMPLE_BYTES]
    end = sample.rfind(b"\n")
    return sample[: end + 1] if len(sample) == _SAMPLE_BYTES and end > _SAMPLE_BYTES // 2 else sample


def _reads_as_windows_1252(sample: bytes, scores: dict[str, float], best: str) -> bool:
    """Return True if windows-1252, by far the most frequent charset, is about as likely as `best` and plausible."""
    if 2 * scores.get("cp1252", 0.0) < scores[best]:
        return False
    return not _CAPITAL_IN_WORD.search(sample.decode("cp1252", "replace"))
