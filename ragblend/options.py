"""Every option that is set in more than one place, named once: its type, its default, its check, its line of help.

`TierOptions` make a store, `GenerationOptions` go with a request. Settings, command line, engines, the frameworks'
models and vLLM's connector take their fields from here. Knows values, and nothing of what they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypedDict, TypeVar, get_args

from ragblend.errors import UsageError
from ragblend.redaction import redacted

T = TypeVar("T")

Mode = Literal["blend", "full", "prefix", "reuse"]
MODES: tuple[Mode, ...] = ("full", "prefix", "reuse", "blend")
RatioChoice = float | Literal["auto"] | None  # a share to recompute, or what was calibrated; None: either
KvDtype = Literal["auto", "int8", "fp8"]
ContextPolicy = Literal["none", "neighbour", "fixed", "similar"]  # what chunks are computed behind besides the prefix


class Check(NamedTuple):
    """Which values an option takes, and how to say so: "choose 1 or more"."""

    accepts: Callable[[Any], bool]
    choose: str

    def of(self, name: str, value: T) -> T:
        """`value`, which is called `name`; raises UsageError unless it may be."""
        if not self.accepts(value):
            shown = redacted(value) if isinstance(value, str) else value
            raise UsageError(f"{name} is {shown!r}; choose {self.choose}")
        return value


def one_of(*names: str) -> Check:
    """Any of some names."""
    return Check(lambda value: value in names, f"one of {', '.join(names)}")


def at_least(least: float, meaning: str = "") -> Check:
    """A number, `least` or more; `meaning` says what `least` does."""
    said = f"{least} ({meaning})" if meaning else f"{least}"
    return Check(lambda value: _is_number(value) and value >= least, f"{said} or more")


def share(low: str, high: str) -> Check:
    """A number from 0, which means `low`, to 1, which means `high`."""
    return Check(lambda value: _is_number(value) and 0 <= value <= 1, f"0 ({low}) to 1 ({high})")


def _is_structure(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and set(value) <= set(STRUCTURES)


STRUCTURES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
STRUCTURED = Check(_is_structure, f"one of {', '.join(STRUCTURES)}, as in {{'json': SCHEMA}}")
SHARE = share("full reuse", "recompute every chunk token")
RATIO = Check(lambda value: value == "auto" or SHARE.accepts(value), f"{SHARE.choose}, or 'auto'")
SHADOW = share("off", "full prefill beside every request")
CONTEXT = one_of(*get_args(ContextPolicy))


class Option(NamedTuple):
    """What a dataclass field made by `option` knows besides its type and default."""

    help: str
    check: Check | None
    flag: str  # on the command line, where that is not the field's name


def option(default: Any, help: str, check: Check | None = None, *, flag: str = "") -> Any:
    """A dataclass field. A None where that is the default is not checked."""
    return field(default=default, metadata={"option": Option(help, check, flag)})


def same_as(options: type, name: str) -> Any:
    """A field like that of another dataclass."""
    each: Field[Any] = options.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=each.default, metadata=each.metadata)


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def check_options(options: _Dataclass) -> None:
    """Raise UsageError for the first field that `option` made and that has a value it may not have."""
    for each in fields(options):
        known: Option | None = each.metadata.get("option")
        value = getattr(options, each.name)
        if known is not None and known.check is not None and not (value is None and each.default is None):
            known.check.of(each.name, value)


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The tiers of a store: memory over a directory over a shared place. Checked at birth."""

    memory_gib: float = option(2.0, "Budget of the memory tier.", at_least(0, "no memory tier"))
    disk_gib: float = option(0.0, "Budget of the disk tier; 0: no limit.", at_least(0, "no limit"))
    remote: str | None = option(None, "Shared tier: redis://HOST:6379/0, s3://BUCKET/PREFIX or an fsspec URL.")
    remote_timeout_s: float = option(
        5.0, "Longest wait for one chunk from there.", Check(lambda value: value > 0, "more than 0 seconds")
    )
    kv_dtype: KvDtype = option(
        "auto", "How new KV is stored: auto (as computed), int8 or fp8.", one_of(*get_args(KvDtype))
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def tiers(self) -> TierKeywords:
        """These options alone, as keyword arguments of `open_store`."""
        return {name: getattr(self, name) for name in TIER_NAMES}  # type: ignore[return-value]


TIER_NAMES = tuple(each.name for each in fields(TierOptions))


class TierKeywords(TypedDict, total=False):
    """Keyword arguments that are TierOptions, for type checkers."""

    memory_gib: float
    disk_gib: float
    remote: str | None
    remote_timeout_s: float
    kv_dtype: KvDtype


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to answer a prompt. Checked at birth; one stop string may stand for a list of it.

    `recompute_ratio` (blend): share of chunk tokens to recompute. "auto", and None, is what `ragblend calibrate` found
    for the store, else the default; on a machine that was profiled more where that hides behind loading, and full
    prefill where that is faster. Greedy at temperature 0; `top_p` keeps the smallest set of tokens with that mass.
    """

    mode: Mode = option("blend", "blend, full, prefix or reuse.", one_of("blend", "full", "prefix", "reuse"))
    rule: str = option("auto", "Which tokens to recompute: auto, cacheblend, ...")
    recompute_ratio: RatioChoice = option(
        None, "Share of chunk tokens to recompute, 0 to 1; auto: as calibrated.", RATIO
    )
    max_tokens: int = option(256, "Longest answer, in tokens.", at_least(1))
    temperature: float = option(0.0, "0 is greedy.", at_least(0, "greedy"))
    top_p: float = option(
        1.0, "Mass of the tokens to choose from.", Check(lambda value: 0 < value <= 1, "more than 0, at most 1")
    )
    seed: int | None = option(None, "Of the choice, where there is one.")
    stop: Sequence[str] | None = option(None, "Texts that end the answer.")
    structured_outputs: Mapping[str, Any] | None = option(None, "What the answer is held to.", STRUCTURED)

    def __post_init__(self) -> None:
        check_options(self)
        if not all(self.stops):
            raise UsageError("a stop string is empty; remove it")

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def keywords(self) -> GenerationKeywords:
        """These options alone, as keyword arguments of `generate` and `stream`."""
        return {name: getattr(self, name) for name in GENERATION_NAMES}  # type: ignore[return-value]


GENERATION_NAMES = tuple(each.name for each in fields(GenerationOptions))


class GenerationKeywords(TypedDict, total=False):
    """Keyword arguments that are GenerationOptions, for type checkers."""

    mode: Mode
    rule: str
    recompute_ratio: RatioChoice
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: Sequence[str] | None
    structured_outputs: Mapping[str, Any] | None


def is_url(backend: str) -> bool:
    """Whether a backend's name is a server's address.

    >>> is_url("http://localhost:8000"), is_url("vllm")
    (True, False)
    """
    return backend.startswith(("http://", "https://"))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
