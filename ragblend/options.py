"""Every option that is set in more than one place, named once: its type, its default, its check, its line of help.

`TierOptions` make a store, `GenerationOptions` go with a request. Settings, command line, engines, the frameworks'
models and vLLM's connector take their fields from here. Knows values, and nothing of what they are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypedDict, TypeVar, get_args

from ragblend.errors import UsageError
from ragblend.files.places import user_path
from ragblend.redaction import redact

T = TypeVar("T")

Mode = Literal["blend", "full", "prefix", "reuse"]
MODES: tuple[Mode, ...] = ("full", "prefix", "reuse", "blend")
RatioChoice = float | Literal["auto"] | None  # a share to recompute, or what was calibrated; None: either
KvDtype = Literal["auto", "int8", "fp8"]
DiskBudget = float | Literal["auto"]  # GiB, 0 for no limit, or as much as it leaves free
ContextPolicy = Literal["none", "similar"]  # what chunks are computed behind besides the prefix


_SHOWN_CHARS = 200  # of a value in a message


class Validator(NamedTuple):
    """Which values an option takes, and how to say so: "choose 1 or more"."""

    accepts: Callable[[Any], bool]
    expected: str

    def validate(self, name: str, value: T) -> T:
        """`value`, which is called `name`; raises UsageError unless it may be."""
        if not self.accepts(value):
            shown = repr(redact(value) if isinstance(value, str) else value)
            shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
            raise UsageError(f"{name} is {shown}; choose {self.expected}")
        return value


def one_of(*names: str) -> Validator:
    """Any of some names."""
    return Validator(lambda value: value in names, f"one of {', '.join(names)}")


def at_least(least: float, meaning: str = "") -> Validator:
    """A number, `least` or more; `meaning` says what `least` does."""
    said = f"{least} ({meaning})" if meaning else f"{least}"
    return Validator(lambda value: _is_number(value) and value >= least, f"{said} or more")


def int_at_least(least: int, meaning: str = "") -> Validator:
    """A whole number, `least` or more."""
    said = f"{least} ({meaning})" if meaning else f"{least}"
    return Validator(lambda value: type(value) is int and value >= least, f"a whole number, {said} or more")


def int_between(least: int, most: int) -> Validator:
    """A whole number from `least` to `most`, both included."""
    return Validator(lambda value: type(value) is int and least <= value <= most, f"a whole number, {least} to {most}")


def between_zero_and_one(low: str, high: str) -> Validator:
    """A number from 0, which means `low`, to 1, which means `high`."""
    return Validator(lambda value: _is_number(value) and 0 <= value <= 1, f"0 ({low}) to 1 ({high})")


def is_list(value: object) -> bool:
    """True for a list, a tuple or another sequence; False for one text, which would be read character by character."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_structure(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and set(value) <= set(STRUCTURES)


TRUE_OR_FALSE = Validator(lambda value: type(value) is bool, "True or False")
TEXT = Validator(lambda value: isinstance(value, str), "a text")
TEXTS = Validator(
    lambda value: isinstance(value, str) or (is_list(value) and all(isinstance(each, str) for each in value)),
    "a text or a list of texts",
)
TOOLS = Validator(
    lambda value: is_list(value) and all(isinstance(each, Mapping) for each in value), "a list of dictionaries"
)
SECONDS = Validator(
    lambda value: _is_number(value) and 0 <= value < math.inf, "a number of seconds, 0 or more, or leave it out"
)
RETRIES = int_at_least(0, "none")
SEED = int_between(-(2**63), 2**63 - 1)  # what PyTorch and vLLM take
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
STRUCTURED = Validator(_is_structure, f"one of {', '.join(STRUCTURES)}, as in {{'json': SCHEMA}}")
BUDGET = Validator(
    lambda value: value == "auto" or (_is_number(value) and 0 <= value < math.inf),
    "0 (no limit) or more GiB, or 'auto' (as much as it leaves free)",
)
SHARE = between_zero_and_one("full reuse", "recompute every chunk token")
RATIO = Validator(lambda value: value == "auto" or SHARE.accepts(value), f"{SHARE.expected}, or 'auto'")
SHADOW = between_zero_and_one("off", "full prefill beside every request")
PENALTY = Validator(lambda value: _is_number(value) and -2 <= value <= 2, "a number from -2 to 2; 0 changes nothing")
BIAS = Validator(
    lambda value: isinstance(value, Mapping) and all(_is_bias(*each) for each in value.items()),
    "a dictionary of token ids to numbers from -100 (never) to 100 (always)",
)
CONTEXT = one_of(*get_args(ContextPolicy))
MAX_TOP_LOGPROBS = 20  # as with OpenAI and vLLM


class OptionSpec(NamedTuple):
    """What a dataclass field made by `option` knows besides its type and default."""

    help: str
    check: Validator | None
    flag: str  # on the command line, where that is not the field's name


def option(default: Any, help: str, check: Validator | None = None, *, flag: str = "") -> Any:
    """A dataclass field. A None where that is the default is not checked."""
    return field(default=default, metadata={"option": OptionSpec(help, check, flag)})


def copy_option(options: type, name: str) -> Any:
    """A field like that of another dataclass."""
    each: Field[Any] = options.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=each.default, metadata=each.metadata)


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def check_options(options: _Dataclass) -> None:
    """Raise UsageError for the first field that `option` made and that has a value it may not have."""
    for each in fields(options):
        known: OptionSpec | None = each.metadata.get("option")
        value = getattr(options, each.name)
        if known is not None and known.check is not None and not (value is None and each.default is None):
            known.check.validate(each.name, value)


def known_names_only(options: type[T]) -> type[T]:
    """Return the dataclass `options`, whose constructor raises UsageError for an unknown name, with the nearest one."""
    made: Any = options
    construct, known = made.__init__, made.__dataclass_fields__

    @wraps(construct)
    def checked(self: T, *values: Any, **given: Any) -> None:
        try:
            construct(self, *values, **given)
        except TypeError:
            unknown = next((name for name in given if name not in known), None)
            if unknown is None:
                raise
            near, choices = nearest(unknown, known), ", ".join(sorted(known))
            raise UsageError(f"there is no option {unknown!r}{near}; choose from {choices}") from None

    made.__init__ = checked
    return options


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or "" if none is similar.

    >>> nearest("max_token", ["max_tokens", "seed"]), nearest("k", ["seed"])
    ("; the nearest is 'max_tokens'", '')
    """
    found = get_close_matches(name, known, 1)
    return f"; the nearest is {found[0]!r}" if found else ""


@known_names_only
@dataclass(frozen=True, slots=True)
class TierOptions:
    """The tiers of a store: memory over a directory over a shared place. Checked at birth."""

    memory_gib: float = option(2.0, "Budget of the memory tier.", at_least(0, "no memory tier"))
    disk_gib: DiskBudget = option(
        "auto", "Budget of the disk tier; auto: it grows until it holds as much as it leaves free; 0: no limit.", BUDGET
    )
    kv_dir: str | None = option(
        None, "Directory of the stored KV, on a faster disk for example; else kv in the store's folder."
    )
    remote: str | None = option(
        None, "Shared tier: redis://HOST:6379/0, s3://BUCKET/PREFIX, gs://, az:// or file:///DIR."
    )
    remote_timeout_s: float = option(
        5.0,
        "Longest wait for one chunk of the remote tier.",
        Validator(lambda value: _is_number(value) and value > 0, "more than 0 seconds"),
    )
    kv_dtype: KvDtype = option(
        "auto", "How new KV is stored: auto (as computed), int8 or fp8.", one_of(*get_args(KvDtype))
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_dir is not None:
            object.__setattr__(self, "kv_dir", str(user_path(self.kv_dir, "kv_dir").absolute()))

    @property
    def tiers(self) -> TierKeywords:
        """These options alone, as keyword arguments of `open_store`."""
        return {name: getattr(self, name) for name in TIER_NAMES}  # type: ignore[return-value]


TIER_NAMES = tuple(each.name for each in fields(TierOptions))


class TierKeywords(TypedDict, total=False):
    """Keyword arguments that are TierOptions, for type checkers."""

    memory_gib: float
    disk_gib: DiskBudget
    kv_dir: str | None
    remote: str | None
    remote_timeout_s: float
    kv_dtype: KvDtype


@known_names_only
@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is found and loaded, by the names that transformers has for it. Checked at birth; `validate` reads
    more.

    `device` is one place, `device_map` what transformers decides that place by ("auto", a device, or a dictionary that
    names one): the layers are run one at a time over KV on one device, so a map that splits them is refused.
    `attn_implementation` is for the model's own forward: mode "full", shadow and the check at loading. Blending brings
    its own attention, because no other lets rows that are not neighbours see what is before them and nothing else.
    `model_kwargs` go to `from_pretrained`: quantization_config, token, and fields of config.json, which count as the
    model's identity.
    """

    dtype: str = option(
        "auto", "auto, float32, bfloat16 or float16.", one_of("auto", "float32", "bfloat16", "float16")
    )  # auto: the checkpoint's, float32 on CPU
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    device_map: str | int | Mapping[str, Any] | None = None
    attn_implementation: str | None = None
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face repo.")
    cache_dir: str | None = option(None, "Where downloads of Hugging Face repos are kept.")
    local_files_only: bool = option(False, "Download nothing.")
    trust_remote_code: bool = option(False, "Run code of the model's repo.", flag="--trust-remote-code")
    adapter: str | None = option(None, "A LoRA adapter on the model: a directory or a Hugging Face id.")
    model_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.device_map is not None and self.device != "auto":
            raise UsageError(
                f"device is {self.device!r} and device_map {self.device_map!r}; give one of them, both choose the place"
            )

    @classmethod
    def from_keywords(cls, **given: Any) -> ModelOptions:
        """Options as people write them: `torch_dtype` for `dtype`, a torch.dtype, torch.device or device number, and
        any of them inside `model_kwargs`. Raises UsageError where one is said twice."""
        kwargs = dict(given.pop("model_kwargs", None) or {})
        inside = {name: kwargs.pop(name) for name in (*MODEL_NAMES, "torch_dtype") if name in kwargs}
        said: dict[str, Any] = {"model_kwargs": kwargs or None}
        for name, value in [*given.items(), *inside.items()]:
            known = "dtype" if name == "torch_dtype" else name
            if value is None or (known in ("dtype", "device") and value == "auto"):
                continue
            value = _plain(known, value)
            if said.get(known, value) != value:
                raise UsageError(f"{known} is both {said[known]!r} and {value!r}; say it once")
            said[known] = value
        return cls(**said)

    @property
    def non_defaults(self) -> dict[str, Any]:
        """Those that are not the default."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def _plain(name: str, value: Any) -> Any:
    """A torch.dtype, torch.device, number of a GPU or path as the text that names it."""
    if name == "device" and isinstance(value, int):
        return "cpu" if value < 0 else f"cuda:{value}"  # as in transformers' pipelines
    if name == "dtype":
        return str(value).removeprefix("torch.")
    is_plain = isinstance(value, str | int | Mapping)
    return value if is_plain or name == "model_kwargs" else str(value)


MODEL_NAMES = tuple(each.name for each in fields(ModelOptions))


class ModelKeywords(TypedDict, total=False):
    """Keyword arguments that are ModelOptions, as people write them (see `ModelOptions.validate`), for type
    checkers."""

    dtype: Any
    torch_dtype: Any
    device: Any
    device_map: Any
    attn_implementation: str | None
    revision: str | None
    cache_dir: Any
    local_files_only: bool
    trust_remote_code: bool
    adapter: Any
    model_kwargs: Mapping[str, Any] | None


class LoadKeywords(TierKeywords, ModelKeywords, total=False):
    """Keyword arguments that are LoadOptions or ModelOptions, for type checkers."""

    system: str | None
    namespace: str
    on_miss: str
    shadow: float
    context: ContextPolicy | None
    new_model: bool
    max_num_seqs: int | None
    vllm_options: Mapping[str, Any] | None
    api_key: str | None
    timeout: float | None
    max_retries: int | None


@known_names_only
@dataclass(frozen=True, slots=True)
class LoadOptions(TierOptions):
    """Arguments of `load_engine` besides model, store, backend and ModelOptions."""

    system: str | None = None
    namespace: str = ""
    on_miss: str = "store"
    shadow: float = 0.0
    context: ContextPolicy | None = None
    new_model: bool = False
    max_num_seqs: int | None = None
    vllm_options: Mapping[str, Any] | None = None
    api_key: str | None = None
    timeout: float | None = None
    max_retries: int | None = None


@known_names_only
@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to answer a prompt. Checked at birth; one stop string may stand for a list of it.

    `recompute_ratio` (blend): share of chunk tokens to recompute. "auto", and None, is what `ragblend calibrate` found
    for the store, else the default; on a machine that was profiled more where that hides behind loading, and full
    prefill where that is faster. Greedy at temperature 0; `top_p` keeps the smallest set of tokens with that mass.
    Penalties and bias change what greedy choice sees, too; `logprobs` are the model's own, before any of them.
    """

    mode: Mode = option("blend", "blend, full, prefix or reuse.", one_of("blend", "full", "prefix", "reuse"))
    rule: str = option("auto", "Which tokens to recompute: auto, cacheblend, ...", TEXT)
    recompute_ratio: RatioChoice = option(
        None, "Share of chunk tokens to recompute, 0 to 1; auto: as calibrated.", RATIO
    )
    max_tokens: int = option(256, "Longest answer, in tokens.", int_at_least(1))
    temperature: float = option(
        0.0,
        "0 is greedy.",
        Validator(lambda value: _is_number(value) and 0 <= value < math.inf, "0 (greedy) or more"),
    )
    top_p: float = option(
        1.0,
        "Mass of the tokens to choose from.",
        Validator(lambda value: _is_number(value) and 0 < value <= 1, "more than 0, at most 1"),
    )
    seed: int | None = option(None, "Of the choice, where there is one.", SEED)
    stop: Sequence[str] | None = option(None, "Texts that end the answer.", TEXTS)
    structured_outputs: Mapping[str, Any] | None = option(None, "What the answer is held to.", STRUCTURED)
    top_k: int | None = option(None, "Most tokens to choose from; 0: all.", int_at_least(0, "all"))
    min_p: float | None = option(
        None,
        "Least probability of a token, as a share of the likeliest one's.",
        between_zero_and_one("any", "the likeliest alone"),
    )
    repetition_penalty: float | None = option(
        None,
        "Above 1: tokens of prompt and answer become less likely.",
        Validator(lambda value: _is_number(value) and 0 < value < math.inf, "more than 0; 1 changes nothing"),
    )
    presence_penalty: float | None = option(None, "Taken from the logit of what the answer has.", PENALTY)
    frequency_penalty: float | None = option(None, "The same, as often as the answer has it.", PENALTY)
    logit_bias: Mapping[int, float] | None = option(None, "Added to the logits of token ids.", BIAS)
    logprobs: bool = option(False, "Give the log-probability of each token of the answer.", TRUE_OR_FALSE)
    top_logprobs: int | None = option(
        None, "With it, that of this many likeliest tokens.", int_between(0, MAX_TOP_LOGPROBS)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_logprobs and not self.logprobs:
            raise UsageError(f"top_logprobs is {self.top_logprobs} and logprobs is off; give logprobs=True too")
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
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: bool
    top_logprobs: int | None


def is_url(backend: str) -> bool:
    """Whether a backend's name is a server's address.

    >>> is_url("http://localhost:8000"), is_url("vllm")
    (True, False)
    """
    return backend.startswith(("http://", "https://"))


def _is_bias(token: object, bias: object) -> bool:
    is_id = type(token) is int or (isinstance(token, str) and token.isdecimal())  # JSON has strings for keys
    return is_id and _is_number(bias) and -100 <= bias <= 100  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
