"""Options as dataclass fields: validators, help texts, and errors for unknown names; validation of texts.

Depends on values only. `options` defines the options of the package with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from ragblend.errors import UsageError
from ragblend.redaction import redact_url

T = TypeVar("T")

_SHOWN_CHARS = 200  # longest value in a message


class Validator(NamedTuple):
    """Test of an option's values, and a description of the valid values for error messages, such as "1 or more"."""

    accepts: Callable[[Any], bool]
    expected: str

    def validate(self, name: str, value: T) -> T:
        """Return `value`. Raises UsageError with the option's `name` unless the value is valid."""
        if not self.accepts(value):
            text = repr(redact_url(value) if isinstance(value, str) else value)
            text = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
            raise UsageError(f"{name} is {text}; choose {self.expected}")
        return value


def one_of(*names: str) -> Validator:
    """Return a validator that accepts only the values `names`."""
    return Validator(lambda value: value in names, f"one of {', '.join(names)}")


def at_least(least: float, meaning: str = "") -> Validator:
    """Return a validator that accepts numbers of at least `least`.

    `meaning`: effect of the value `least`, for the error message, such as "no limit".
    """
    low = f"{least} ({meaning})" if meaning else f"{least}"
    return Validator(lambda value: is_number(value) and value >= least, f"{low} or more")


def int_at_least(least: int, meaning: str = "") -> Validator:
    """Return a validator that accepts whole numbers of at least `least`. `meaning` as in `at_least`."""
    low = f"{least} ({meaning})" if meaning else f"{least}"
    return Validator(lambda value: type(value) is int and value >= least, f"a whole number, {low} or more")


def int_between(least: int, most: int) -> Validator:
    """Return a validator that accepts whole numbers from `least` to `most`, both included."""
    return Validator(lambda value: type(value) is int and least <= value <= most, f"a whole number, {least} to {most}")


def between_zero_and_one(zero_meaning: str, one_meaning: str) -> Validator:
    """Return a validator that accepts numbers from 0 to 1.

    `zero_meaning` and `one_meaning`: effects of the values 0 and 1, for the error message.
    """
    return Validator(lambda value: is_number(value) and 0 <= value <= 1, f"0 ({zero_meaning}) to 1 ({one_meaning})")


def is_sequence(value: object) -> bool:
    """Return True for a list, a tuple or another sequence; False for a string and for bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def is_number(value: object) -> bool:
    """Return True for a real number that is no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


class OptionSpec(NamedTuple):
    """Description and validation of an option: metadata of a dataclass field made by `option`."""

    help: str
    check: Validator | None
    flag: str  # flag on the command line; "": made from the field's name


def option(default: Any, help: str, check: Validator | None = None, *, flag: str = "") -> Any:
    """Return a dataclass field for an option, with an OptionSpec as its metadata.

    `help`: description on the command line. `check`: test of values; None accepts all. The default is not validated, so
    None may mean "not given". `flag`: see OptionSpec.
    """
    return field(default=default, metadata={"option": OptionSpec(help, check, flag)})


def copy_option(options: type, name: str) -> Any:
    """Return a field with the default and metadata of another dataclass's field."""
    each: Field[Any] = options.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=each.default, metadata=each.metadata)


def default_of(options: type, name: str) -> Any:
    """Return the default of another dataclass's field, for a parameter or pydantic field that sets the same option."""
    return options.__dataclass_fields__[name].default  # type: ignore[attr-defined]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def check_options(options: _Dataclass) -> None:
    """Raise UsageError for the first field made by `option` that has an invalid value. Defaults are not validated."""
    for each in fields(options):
        spec: OptionSpec | None = each.metadata.get("option")
        value = getattr(options, each.name)
        if spec is not None and spec.check is not None and value is not each.default:
            spec.check.validate(each.name, value)


def reject_unknown_names(options: type[T]) -> type[T]:
    """Make the constructor of the dataclass `options` raise UsageError for an unknown name. Return the dataclass."""
    made: Any = options
    construct, names = made.__init__, made.__dataclass_fields__

    @wraps(construct)
    def checked(self: T, *values: Any, **keywords: Any) -> None:
        try:
            construct(self, *values, **keywords)
        except TypeError:
            unknown = next((name for name in keywords if name not in names), None)
            if unknown is None:
                raise
            near, choices = nearest_name_hint(unknown, names), ", ".join(sorted(names))
            raise UsageError(f"there is no option {unknown!r}{near}; choose from {choices}") from None

    made.__init__ = checked
    return options


def nearest_name_hint(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or "" if none is similar.

    >>> nearest_name_hint("max_token", ["max_tokens", "seed"]), nearest_name_hint("k", ["seed"])
    ("; the nearest is 'max_tokens'", '')
    """
    matches = get_close_matches(name, names, 1)
    return f"; the nearest is {matches[0]!r}" if matches else ""


def replace_aliases(options: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return `options` with each name in `aliases` replaced by the option's own name.

    Raises UsageError for an option that has two different values under two names.

    >>> replace_aliases({"max_new_tokens": 5, "seed": 1}, {"max_new_tokens": "max_tokens"})
    {'seed': 1, 'max_tokens': 5}
    """
    renamed = dict(options)
    for alias, name in aliases.items():
        value = renamed.pop(alias, None)
        if value is not None and renamed.get(name) not in (None, value):
            raise UsageError(f"{name} is {renamed[name]!r}, but {alias} is {value!r}; remove one of them")
        if value is not None:
            renamed[name] = value
    return renamed


def is_unicode(text: str) -> bool:
    """Return True if `text` has no lone surrogate. Text with one cannot be tokenized, stored or sent.

    >>> is_unicode("a"), is_unicode("\\ud83d")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_unicode(text: str, what: str) -> None:
    """Raise UsageError if `text` has a lone surrogate, half of a character. `what` names `text` in the error message.

    >>> check_unicode("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "the question")
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code, around = ord(text[error.start]), text[max(0, error.start - 20) : error.start + 20]
        raise UsageError(
            f"{what} holds a lone surrogate, U+{code:04X} at character {error.start} ({around!r}): bytes that were "
            'decoded as another encoding, or half of an emoji. Decode it again, or replace it: text.encode("utf-8", '
            '"replace").decode()'
        ) from None
