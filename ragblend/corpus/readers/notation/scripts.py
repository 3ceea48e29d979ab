"""Raised and lowered text on one line: powers, indices, footnote marks, ordinals.

A reader puts RAISED or LOWERED before such text and END after it, and passes each paragraph through `write_scripts`,
which alone decides what is written. No number grows by another's digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

RAISED, LOWERED, END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Marks around raised or lowered text. Unicode keeps these codes for use inside of programs."""

_MARK = re.compile(f"([{RAISED}{LOWERED}{END}])")
_ISOTOPE = re.compile(rf"(?:{LOWERED}\d+{END})?[^\W\d_]{{1,2}}(?![^\W\d_])")
_FRACTION = re.compile(rf"(\d?){RAISED}\s*(\d{{1,4}})\s*{END}\s*[/\u2044]\s*{LOWERED}\s*(\d{{1,4}})\s*{END}")
_SIGNS = "-+\u2212\u2013\u00b1"
_NUM_BEFORE, _NUM_PIECES, _NUM_AFTER = 200, 20, 24  # characters (and texts) around a part that its form depends on
_MAX_SCRIPT = 40  # a longer text is small print and no index
_MAX_NESTED = 20

_ATOM = re.compile(rf"[{_SIGNS}]?(?:[^\W_]+|\d+[.,]\d+)|\d*[{_SIGNS}]|[*∗†‡§¶#]+|[^\w\s({{\[]")
_WORD = re.compile(r"[^\W\d_]+\Z")
_SHOWN_RAISED = frozenset("®©™℠°ºª′″‴'\"’”.,;:…")  # they stand high, or are ordinary punctuation
_TRADEMARKS = {"TM": "™", "(TM)": "™", "SM": "℠", "(SM)": "℠", "(R)": "®", "(C)": "©"}
_ENGLISH_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_ORDINAL_NAMES = (  # French, Spanish, Italian, Portuguese; after a number
    "e er ers es re res ère ères ere eres ème èmes eme emes ième ièmes ieme iemes nde ndes do ro to mo vo no os as ta "
    "ma bis ter"
)
_ORDINALS = frozenset(_ORDINAL_NAMES.split())
_COUNTED = re.compile(r"\d[.)]?\Z|\b[IVXLCDM]+\Z")
_ABBREVIATIONS = frozenset(
    {"Mme", "Mmes", "Mlle", "Mlles", "Mgr", "Mgrs", "Mrs", "Cie", "Vve", "Ste", "Stes", "Dre", "Dres", "Nos", "nos"}
)
_TITLES = frozenset({"Mr", "Dr", "St", "Pr", "Me", "Mc", "Jr", "Sr"})  # an abbreviation if it stands before a name
_NAME = re.compile(r"\.?\s?[^\W\d_a-z]")

_FOOTNOTE = r"(?:\d{1,3}|[*∗†‡§¶#]{1,3}|[a-h])"
_FOOTNOTES = re.compile(rf"\(?({_FOOTNOTE}(?:\s*[,;–-]\s*{_FOOTNOTE})*)\)?")
_SENTENCE_END = re.compile(r"(?:[.,;:!?…%]|[^\W\d_]{2})[\"'”’»]\Z|[.,;:!?…%”»]\Z")
_MIN_WORD = 3  # letters; shorter names before a raised number are variables, chemical symbols and units
_POWER_NAMES = (  # longer ones
    "sin cos tan cot sec csc log exp det max min lim sup inf arg ker dim sinh cosh tanh coth arcsin arccos arctan rank "
    "mol mmol kmol nmol rad bar psi cal kcal lbs mile miles meter meters metre metres inch inches foot feet yard yards "
    "acre second seconds hour hours day days year years pixel pixels"
)
_RAISED_TO_POWERS = frozenset(_POWER_NAMES.split())


def write_scripts(text: str) -> str:
    """Return a paragraph with its raised and lowered parts on the line, without marks.

    Powers and indices follow "^" and "_", in parentheses where they need them. Footnote marks are in brackets,
    ordinals and abbreviations are plain text. Takes time linear in the text's length.

    >>> write_scripts(f"10{RAISED}23{END} H{LOWERED}2{END}O, e{RAISED}x + 1{END}, due{RAISED}1{END}, 1{RAISED}st{END}")
    '10^23 H_2O, e^(x + 1), due[1], 1st'
    """
    if not _MARK.search(text):
        return text
    text = _FRACTION.sub(
        lambda match: f"{match[1]} {match[2]}/{match[3]}" if match[1] else f"{match[2]}/{match[3]}", text
    )
    open_parts: list[tuple[str, list[str]]] = [("", [])]  # (its mark, its texts) of the paragraph and each open part
    for mark, words, ahead in _tokens(text):
        if mark == END:
            if len(open_parts) > 1:
                kind, texts = open_parts.pop()
                _append(open_parts[-1][1], kind, "".join(texts), ahead)
        elif mark and len(open_parts) <= _MAX_NESTED:
            open_parts.append((mark, []))
        if words:
            open_parts[-1][1].append(words)
    while len(open_parts) > 1:  # a part that its paragraph ends
        kind, texts = open_parts.pop()
        _append(open_parts[-1][1], kind, "".join(texts), "")
    return "".join(open_parts[0][1])


def _tokens(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (mark, the text after it up to the next mark, the beginning of all that follows the mark).

    Parts of one kind that follow each other directly are one part: programs divide words at spelling errors.
    """
    pieces = ["", *_MARK.split(text)]
    offset, at = 0, 0
    kinds: list[str] = []
    while at < len(pieces):
        mark, words = pieces[at], pieces[at + 1]
        offset += len(mark)
        at += 2
        if mark == END and kinds:
            if not words and at < len(pieces) and pieces[at] == kinds[-1]:
                offset += 1
                mark, words = "", pieces[at + 1]
                at += 2
            else:
                kinds.pop()
        elif mark and mark != END:
            kinds.append(mark)
        yield mark, words, text[offset : offset + _NUM_AFTER]
        offset += len(words)


def _append(texts: list[str], kind: str, script: str, after: str) -> None:
    """Append a raised or lowered `script` to the `texts` before it."""
    before = ""
    for piece in reversed(texts[-_NUM_PIECES:]):
        before = piece[-_NUM_BEFORE:] + before
        if len(before) >= _NUM_BEFORE:
            break
    words = script.strip()
    end = script[len(script.rstrip()) :]
    if not words:
        texts.append(script)
        return
    plain = len(words) > _MAX_SCRIPT or (kind == RAISED and _is_plain(before, words, after))
    if plain or (written := _write(kind, before, words, end + after)) is None:
        texts.append(script)
    else:
        texts.append(written + end)


def _is_plain(before: str, words: str, after: str) -> bool:
    """Return True for raised text that is read as if it were not raised: ordinals, abbreviations, high signs."""
    if re.fullmatch(r"\[.*\]", words) or _SHOWN_RAISED.issuperset(words):
        return True
    if words in _ENGLISH_ORDINALS:
        return before[-1:].isalnum()
    if words in _ORDINALS and _COUNTED.search(before):
        return True
    base = _WORD.search(before)
    name = base[0] + words if base else ""
    return name in _ABBREVIATIONS or (name in _TITLES and _NAME.match(after) is not None)


def _write(kind: str, before: str, words: str, after: str) -> str | None:
    """Return raised or lowered text as it follows `before`; None if it stands alone and is text like any other."""
    if kind == RAISED and words in _TRADEMARKS:
        return _TRADEMARKS[words]
    if kind == RAISED and words == "o" and re.search(r"[\dNn]\Z", before):
        return "º"
    if words.startswith("[") and _FOOTNOTES.fullmatch(bare := words.replace("[", "").replace("]", "")):
        return f"[{bare}]"  # only some of them are links
    is_alone = not before or before[-1].isspace()
    marks = _FOOTNOTES.fullmatch(words) if kind == RAISED else None
    if is_alone and words.isdecimal() and _ISOTOPE.match(after):
        return attach("", kind, words, after)
    if marks and is_alone and not after.startswith(("/", "\u2044")):
        return f"[{marks[1]}]{' ' if after[:1].isalnum() else ''}"
    if is_alone:
        return None
    if marks and _refers(before):
        return f"[{marks[1]}]"
    return attach("", kind, words, after)


def _refers(before: str) -> bool:
    """Return True if a raised number after this text is a footnote's mark and no power."""
    if before.endswith(")"):
        inside = before[before.rfind("(") :]
        return re.search(r"[^\W\d_]{4}", inside) is not None
    if _SENTENCE_END.search(before):
        return True
    word = _WORD.search(before)
    if word is None or before[word.start() - 1 : word.start()] in ("_", "^"):
        return False
    last = before[-1]
    is_ideograph = not last.islower() and not last.isupper()
    return is_ideograph or (len(word[0]) >= _MIN_WORD and word[0].lower() not in _RAISED_TO_POWERS)


def attach(base: str, kind: str, script: str, after: str = "") -> str:
    """Return `base` with a raised or lowered `script`. `after`: the text that follows without a space.

    >>> attach("x", RAISED, "2"), attach("x", LOWERED, "i, j"), attach("log", LOWERED, "10", "2")
    ('x^2', 'x_(i, j)', 'log_(10)')
    """
    last, following = script[-1:], after[:1]
    grows = following.isalnum() and (
        (last.isalnum() and not (last.isdigit() and following.isalpha())) or (last in _SIGNS and following.isdigit())
    )
    grows = grows or (last.isdigit() and re.match(r"[.,]\d", after) is not None)
    is_atom = _ATOM.fullmatch(script) is not None and not grows
    sign = "^" if kind == RAISED else "_"
    return f"{base}{sign}{script if is_atom or is_parenthesized(script) else f'({script})'}"


def is_parenthesized(text: str) -> bool:
    """Return True if one pair of parentheses is around the whole text.

    >>> is_parenthesized("(a+b)"), is_parenthesized("(a)/(b)")
    (True, False)
    """
    if not (text.startswith("(") and text.endswith(")")):
        return False
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0 and at < len(text) - 1:
            return False
    return depth == 0
