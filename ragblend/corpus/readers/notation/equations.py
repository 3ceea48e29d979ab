"""Equations of MathML and of Office (OMML) as one line of text that keeps their structure.

A fraction is (a)/(b), a root sqrt(x) or root(3)(x), scripts are x_i^2, a matrix is [a, b; c, d], an accent hat(x). The
TeX that a program put beside an equation replaces it. Read `read_equation` first.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

from ragblend.corpus.readers.blocks import collapse_whitespace
from ragblend.corpus.readers.notation.scripts import LOWERED, RAISED, attach, is_parenthesized
from ragblend.corpus.readers.office_xml import attribute, child, walk

_MAX_DEPTH = 100  # deeper parts are read without structure, because each level copies its text
_TOKENS = frozenset({"mi", "mn", "mo", "mtext", "ms", "ci", "cn", "csymbol", "t"})
_LEFT_OUT_NAMES = (
    "annotation-xml mphantom del moveFrom rPr ctrlPr fPr radPr dPr naryPr accPr barPr mPr eqArrPr funcPr groupChrPr "
    "limLowPr limUppPr phantPr sPrePr sSubPr sSubSupPr sSupPr boxPr borderBoxPr argPr oMathParaPr"
)
_LEFT_OUT = frozenset(_LEFT_OUT_NAMES.split())
_INVISIBLE = {0x2061: "", 0x2062: "", 0x2063: ",", 0x2064: " ", 0xAD: "", 0x200B: ""}  # of functions, products, lists
_STYLED = re.compile("[\U0001d400-\U0001d7ff]+")  # letters of the alphabets for formulas
_DISPLAY_STYLE = re.compile(r"\{\\(?:display|text)style\s+(.*)\}", re.DOTALL)
_ATOM = re.compile(r"[^\W\d_]+|\d+(?:[.,]\d+)?|[^\w\s]|[^\W\d_]+_(?:[^\W_]+|\([^()]*\))")
_ACCENTS = {
    **dict.fromkeys("\u0302^ˆ", "hat"),
    **dict.fromkeys("\u0303~˜", "tilde"),
    **dict.fromkeys("\u0304\u0305¯‾-−―", "bar"),
    **dict.fromkeys("\u0307˙.", "dot"),
    **dict.fromkeys("\u0308¨", "ddot"),
    **dict.fromkeys("\u20d7→⃗⇀", "vec"),
    **dict.fromkeys("\u030cˇ", "check"),
    **dict.fromkeys("\u0306˘", "breve"),
}
_NUM_PARTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2, "munderover": 3}
_BRACES = frozenset("⏞⏟⏠⏡⎴⎵")  # above and below a term


class _Part(NamedTuple):
    """The text of an element inside an equation, and the element's name."""

    name: str
    text: str


_Parts = Sequence[_Part]


def read_equation(root: Element) -> str:
    """Return the equation at `root`, an element `math` or `oMath`, as text. Takes no recursion, at any depth."""
    open_parts: list[list[_Part]] = [[]]
    num_deeper = 0  # open elements that have no list
    for begins, element, name in walk(root, _LEFT_OUT):
        if begins:
            if len(open_parts) > _MAX_DEPTH:
                num_deeper += 1
            else:
                open_parts.append([])
        elif name:
            parts: list[_Part] = []
            if num_deeper:
                num_deeper -= 1
            else:
                parts = open_parts.pop()
            open_parts[-1].append(_Part(name, _write(element, name, parts)))
    return _join(open_parts[0])


def _write(element: Element, name: str, parts: _Parts) -> str:
    if name in _TOKENS:
        return _clean("".join(element.itertext()))
    if name == "annotation":
        is_tex = "tex" in attribute(element, "encoding").lower()
        return _tex("".join(element.itertext())) if is_tex else ""
    if name in _NUM_PARTS and len(parts) != _NUM_PARTS[name]:
        return _join(parts)
    return _WRITERS.get(name, _join_parts)(element, parts)


def _clean(text: str) -> str:
    text = _STYLED.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return collapse_whitespace(text.translate(_INVISIBLE))


def _tex(text: str) -> str:
    text = collapse_whitespace(text)
    wrapped = _DISPLAY_STYLE.fullmatch(text)
    return (wrapped[1] if wrapped else text).strip()


# --- joining ---


def _join(parts: _Parts) -> str:
    """Return texts beside each other, with a space where two of them would read as one name or number."""
    joined: list[str] = []
    for part in parts:
        if part.text:
            if joined and _are_divided(joined[-1], part.text):
                joined.append(" ")
            joined.append(part.text)
    return "".join(joined)


def _are_divided(left: str, right: str) -> bool:
    """Return True if a space is needed between two texts.

    >>> _are_divided("2", "x"), _are_divided("a", "b"), _are_divided("sin", "x"), _are_divided("x", "2")
    (False, False, True, True)
    """
    last, first = left[-1], right[0]
    if not first.isalnum():
        return False
    if last == ")":
        return True
    if not last.isalnum():
        return False
    if first.isalpha() and last.isdigit():
        return (len(right) > 1 and right[:2].isalpha()) or not left[0].isalnum()
    return not (first.isalpha() and last.isalpha() and len(left) == 1 and not right[1:2].isalpha())


def _join_parts(element: Element, parts: _Parts) -> str:
    return _join(parts)


def _text_at(parts: _Parts, at: int) -> str:
    return parts[at].text if at < len(parts) else ""


def _named(parts: _Parts, name: str) -> str:
    return _join([part for part in parts if part.name == name])


# --- forms ---


def _fraction(top: str, bottom: str, has_line: bool = True) -> str:
    return f"({top})/({bottom})" if has_line else f"{top} choose {bottom}"


def _root(inside: str, degree: str) -> str:
    return f"root({degree})({inside})" if degree else f"sqrt({inside})"


def _scripts(base: str, lower: str, upper: str) -> str:
    """Return a base with its scripts. A base of several terms is in parentheses.

    >>> _scripts("x", "i", "2"), _scripts("a+b", "", "2"), _scripts("∑", "i=1", "n"), _scripts("f", "", "′")
    ('x_i^2', '(a+b)^2', '∑_(i=1)^n', 'f′')
    """
    if base and not _ATOM.fullmatch(base) and not is_parenthesized(base):
        base = f"({base})"
    if lower:
        base = attach(base, LOWERED, lower)
    if upper and not upper.strip("′″‴'"):
        return base + upper
    return attach(base, RAISED, upper) if upper else base


def _limits(base: str, lower: str, upper: str) -> str:
    """Return a base with what is below and above it: an accent, a brace, or limits."""
    if base and upper in _ACCENTS and not lower:
        return f"{_ACCENTS[upper]}({base})"
    if base and _ACCENTS.get(lower) == "bar" and not upper:
        return f"underbar({base})"
    return _scripts(base, "" if lower in _BRACES else lower, "" if upper in _BRACES else upper)


def _matrix(rows: Sequence[str]) -> str:
    return f"[{'; '.join(rows)}]"


def _operand(text: str) -> str:
    """Return the argument of a function, in parentheses if it has several terms."""
    return text if _ATOM.fullmatch(text) or text.startswith("(") else f"({text})"


# --- MathML ---


def _math_multiscripts(element: Element, parts: _Parts) -> str:
    base, lowers, uppers = _text_at(parts, 0), ["", ""], ["", ""]  # after the base, before it
    side = number = 0
    for part in parts[1:]:
        if part.name == "mprescripts":
            side, number = 1, 0
            continue
        (uppers if number % 2 else lowers)[side] += part.text
        number += 1
    before = _scripts("", lowers[1], uppers[1])
    return before + _scripts(base, lowers[0], uppers[0])


def _math_fenced(element: Element, parts: _Parts) -> str:
    marks = attribute(element, "separators", ",").split() or [""]
    texts = [part.text + marks[min(at, len(marks) - 1)] for at, part in enumerate(parts[:-1])]
    texts += [part.text for part in parts[-1:]]
    return f"{attribute(element, 'open', '(')}{''.join(texts)}{attribute(element, 'close', ')')}"


def _math_fraction(element: Element, parts: _Parts) -> str:
    has_line = re.fullmatch(r"0(?:\.0*)?[a-z%]*", attribute(element, "linethickness", "1")) is None
    return _fraction(_text_at(parts, 0), _text_at(parts, 1), has_line)


def _math_semantics(element: Element, parts: _Parts) -> str:
    return next((part.text for part in parts[1:] if part.name == "annotation" and part.text), _text_at(parts, 0))


# --- Office ---


def _property(element: Element, properties: str, name: str, default: str) -> str:
    element_property = child(element, properties, name)
    return default if element_property is None else attribute(element_property, "val")


def _office_delimited(element: Element, parts: _Parts) -> str:
    left, mark, right = (
        _property(element, "dPr", name, default)
        for name, default in (("begChr", "("), ("sepChr", "|"), ("endChr", ")"))
    )
    return left + mark.join(part.text for part in parts) + right


def _office_operator(element: Element, parts: _Parts) -> str:
    sign = _property(element, "naryPr", "chr", "∫")
    return f"{_scripts(sign, _named(parts, 'sub'), _named(parts, 'sup'))} {_named(parts, 'e')}".strip()


def _office_accent(element: Element, parts: _Parts) -> str:
    return _limits(_named(parts, "e"), "", _property(element, "accPr", "chr", "\u0302"))


def _office_bar(element: Element, parts: _Parts) -> str:
    is_above = _property(element, "barPr", "pos", "bot") == "top"
    return f"{'bar' if is_above else 'underbar'}({_named(parts, 'e')})"


def _office_fraction(element: Element, parts: _Parts) -> str:
    has_line = _property(element, "fPr", "type", "bar") != "noBar"
    return _fraction(_named(parts, "num"), _named(parts, "den"), has_line)


def _office_function(element: Element, parts: _Parts) -> str:
    return _join([_Part("", _named(parts, "fName")), _Part("", _operand(_named(parts, "e")))])


_WRITERS: dict[str, Callable[[Element, _Parts], str]] = {
    "mfrac": _math_fraction,
    "msqrt": lambda element, parts: _root(_join(parts), ""),
    "mroot": lambda element, parts: _root(_text_at(parts, 0), _text_at(parts, 1)),
    "msub": lambda element, parts: _scripts(_text_at(parts, 0), _text_at(parts, 1), ""),
    "msup": lambda element, parts: _scripts(_text_at(parts, 0), "", _text_at(parts, 1)),
    "msubsup": lambda element, parts: _scripts(*(_text_at(parts, at) for at in range(3))),
    "munder": lambda element, parts: _limits(_text_at(parts, 0), _text_at(parts, 1), ""),
    "mover": lambda element, parts: _limits(_text_at(parts, 0), "", _text_at(parts, 1)),
    "munderover": lambda element, parts: _limits(*(_text_at(parts, at) for at in range(3))),
    "mmultiscripts": _math_multiscripts,
    "mfenced": _math_fenced,
    "mtable": lambda element, parts: _matrix([part.text for part in parts]),
    "mtr": lambda element, parts: ", ".join(part.text for part in parts),
    "mlabeledtr": lambda element, parts: ", ".join(part.text for part in parts),
    "semantics": _math_semantics,
    "maction": lambda element, parts: _text_at(parts, 0),
    "f": _office_fraction,
    "rad": lambda element, parts: _root(_named(parts, "e"), _named(parts, "deg")),
    "sSub": lambda element, parts: _scripts(_named(parts, "e"), _named(parts, "sub"), ""),
    "sSup": lambda element, parts: _scripts(_named(parts, "e"), "", _named(parts, "sup")),
    "sSubSup": lambda element, parts: _scripts(*(_named(parts, name) for name in ("e", "sub", "sup"))),
    "sPre": lambda element, parts: _scripts("", _named(parts, "sub"), _named(parts, "sup")) + _named(parts, "e"),
    "nary": _office_operator,
    "d": _office_delimited,
    "m": lambda element, parts: _matrix([part.text for part in parts]),
    "mr": lambda element, parts: ", ".join(part.text for part in parts),
    "eqArr": lambda element, parts: "; ".join(part.text for part in parts),
    "func": _office_function,
    "acc": _office_accent,
    "bar": _office_bar,
    "limLow": lambda element, parts: _limits(_named(parts, "e"), _named(parts, "lim"), ""),
    "limUpp": lambda element, parts: _limits(_named(parts, "e"), "", _named(parts, "lim")),
    "oMathPara": lambda element, parts: "\n".join(part.text for part in parts),
}
