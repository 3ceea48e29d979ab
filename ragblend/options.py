"""Options that are set in more than one place, each defined once: type, default, validation and help.

`TierOptions` are for a store, `ModelOptions` and `LoadOptions` for loading, `GenerationOptions` for a request, with
`SelectionOptions`, which vLLM's connector reads as well.
`config.Settings` declares those that only commands have. Settings, command line, engines, the frameworks' models and
vLLM's connector take defaults, limits and help from here by `copy_option` and `default_of`. `option_keywords` is
generated from these classes, for type checkers. Depends on values only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.option_fields import (
    Validator,
    at_least,
    between_zero_and_one,
    check_options,
    int_at_least,
    int_between,
    is_number,
    is_sequence,
    one_of,
    option,
    reject_unknown_names,
)

T = TypeVar("T")

Mode = Literal["blend", "full", "prefix", "reuse"]
MODES: tuple[Mode, ...] = ("full", "prefix", "reuse", "blend")
RatioChoice = float | Literal["auto"] | None  # share to recompute; "auto" or None: the calibrated or default ratio
KvDtype = Literal["auto", "int8", "fp8"]
DiskBudget = float | Literal["auto"]  # GiB, 0 for no limit; "auto": half of the disk space that other files leave
ContextPolicy = Literal["none", "neutral"]  # text between the prefix and a chunk when its KV is computed
Deviation = Literal["k", "v", "kv"]  # KV whose distance from fresh KV a rule measures at its check layers

TRUE_OR_FALSE = Validator(lambda value: type(value) is bool, "True or False")
TEXT = Validator(lambda value: isinstance(value, str), "a text")
TEXTS = Validator(
    lambda value: isinstance(value, str) or (is_sequence(value) and all(isinstance(each, str) for each in value)),
    "a text or a list of texts",
)
TOOLS = Validator(
    lambda value: is_sequence(value) and all(isinstance(each, Mapping) for each in value), "a list of dictionaries"
)
SECONDS = Validator(
    lambda value: is_number(value) and 0 <= value < math.inf, "a number of seconds, 0 or more, or leave it out"
)
BACKEND = Validator(
    lambda value: value in ("transformers", "vllm") or (isinstance(value, str) and is_server_url(value)),
    "transformers, vllm or a server's http://HOST:PORT",
)
RETRIES = int_at_least(0, "none")
SEED = int_between(-(2**63), 2**63 - 1)  # the range of PyTorch and vLLM
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
STRUCTURED = Validator(
    lambda value: isinstance(value, Mapping) and len(value) == 1 and set(value) <= set(STRUCTURES),
    f"one of {', '.join(STRUCTURES)}, as in {{'json': SCHEMA}}",
)
BUDGET = Validator(
    lambda value: value == "auto" or (is_number(value) and 0 <= value < math.inf),
    "0 (no limit) or more GiB, or 'auto' (as much as it leaves free)",
)
SHARE = between_zero_and_one("full reuse", "recompute every chunk token")
RATIO = Validator(lambda value: value == "auto" or SHARE.accepts(value), f"{SHARE.expected}, or 'auto'")
SHADOW = between_zero_and_one("off", "full prefill of every request, too")
PENALTY = Validator(lambda value: is_number(value) and -2 <= value <= 2, "a number from -2 to 2; 0 changes nothing")
BIAS = Validator(
    lambda value: isinstance(value, Mapping) and all(_is_bias(*each) for each in value.items()),
    "a dictionary of token ids to numbers from -100 (never) to 100 (always)",
)
CONTEXT = one_of(*get_args(ContextPolicy))
CHECK_LAYERS = Validator(
    lambda value: (
        is_sequence(value)
        and len(value) > 0
        and all(type(each) is int and each >= 0 for each in value)
        and all(before < after for before, after in pairwise(value))
    ),
    "numbers of layers, ascending, as in [1, 8, 16]",
)
RATIOS = Validator(
    lambda value: (
        is_sequence(value)
        and len(value) > 0
        and all(map(SHARE.accepts, value))
        and all(before >= after for before, after in pairwise(value))
    ),
    "a share from 0 to 1 for each check layer, none above the one before it, as in [0.2, 0.15, 0.1]",
)
THRESHOLDS = Validator(
    lambda value: (
        is_sequence(value) and len(value) > 0 and all(is_number(each) and 0 <= each < math.inf for each in value)
    ),
    "a number of 0 (recompute every chunk token) or more for each check layer, as in [0.3]",
)
MAX_TOP_LOGPROBS = 20  # as with OpenAI and vLLM


@reject_unknown_names
@dataclass(frozen=True, slots=True)
class TierOptions:
    """Tiers of a store (memory, a directory, a shared remote tier) and its catalogue, validated by the constructor."""

    memory_gib: float = option(2.0, "Budget of the memory tier, in GiB.", at_least(0, "no memory tier"))
    disk_gib: DiskBudget = option(
        "auto", "Budget of the disk tier, in GiB; auto: until it holds as much as it leaves free; 0: no limit.", BUDGET
    )
    kv_dir: str | None = option(
        None, "Directory of the stored KV, on a faster disk for example. Default: kv in the store's folder."
    )
    remote: str | None = option(
        None, "Shared tier: redis://HOST:6379/0, s3://BUCKET/PREFIX, gs://, az:// or file:///DIR."
    )
    remote_timeout_s: float = option(
        5.0,
        "Longest wait for one chunk of the remote tier, in seconds.",
        Validator(lambda value: is_number(value) and value > 0, "more than 0 seconds"),
    )
    catalog: str | None = option(
        None,
        "Catalogue of the store: postgresql://USER:PASSWORD@HOST/DATABASE; else catalog.sqlite in the store's folder.",
        Validator(
            lambda value: isinstance(value, str) and value.startswith(("postgresql://", "postgres://")),
            "postgresql://USER:PASSWORD@HOST/DATABASE, or leave it out",
        ),
    )
    kv_dtype: KvDtype = option(
        "auto", "Dtype of newly stored KV: auto (as computed), int8 or fp8.", one_of(*get_args(KvDtype))
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_dir is not None:
            object.__setattr__(self, "kv_dir", str(expand_user_path(self.kv_dir, "kv_dir").absolute()))

    @property
    def tiers(self) -> dict[str, Any]:
        """Return the fields of TierOptions as keyword arguments of `open_store`."""
        return {name: getattr(self, name) for name in TIER_NAMES}


TIER_NAMES = tuple(each.name for each in fields(TierOptions))


@reject_unknown_names
@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options for finding and loading a model, under transformers' names. Validated by the constructor.

    `device` names one device. `device_map` is the argument of transformers: "auto", a device, or a dictionary. A map
    with several devices is rejected, because the KV of all layers is on one device. `attn_implementation`: attention of
    the model's own forward pass, which is used in mode "full", in shadow comparisons and in the self-check. Blending
    computes scattered tokens, and therefore uses ragblend's own attention. `model_kwargs` are passed to
    `from_pretrained`: quantization_config, token, and fields of config.json, which are part of the model's fingerprint.
    """

    dtype: str = option(
        "auto", "auto, float32, bfloat16 or float16.", one_of("auto", "float32", "bfloat16", "float16")
    )  # auto: the checkpoint's, float32 on CPU
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    device_map: str | int | Mapping[str, Any] | None = None
    attn_implementation: str | None = None
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face repo.")
    cache_dir: str | None = option(None, "Directory for downloads of Hugging Face repos.")
    local_files_only: bool = option(False, "Do not download.")
    trust_remote_code: bool = option(False, "Run code of the model's repo.", flag="--trust-remote-code")
    adapter: str | None = option(None, "LoRA adapter of the model: a directory or a Hugging Face id.")
    model_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.device_map is not None and self.device != "auto":
            raise UsageError(
                f"device is {self.device!r} and device_map {self.device_map!r}, but both set the device; remove one"
            )

    @classmethod
    def from_keywords(cls, **keywords: Any) -> ModelOptions:
        """Return options from arguments in the forms of transformers and LangChain.

        `torch_dtype` is another name of `dtype`. The dtype may be a torch.dtype, the device a torch.device or a number,
        and `model_kwargs` may contain any of these options. Raises UsageError for an option with two values.
        """
        kwargs = dict(keywords.pop("model_kwargs", None) or {})
        inside = {name: kwargs.pop(name) for name in (*MODEL_NAMES, "torch_dtype") if name in kwargs}
        values: dict[str, Any] = {"model_kwargs": kwargs or None}
        for name, value in [*keywords.items(), *inside.items()]:
            option_name = "dtype" if name == "torch_dtype" else name
            if value is None or (option_name in ("dtype", "device") and value == "auto"):
                continue
            value = _plain(option_name, value)
            if values.get(option_name, value) != value:
                raise UsageError(
                    f"{option_name} is given twice, as {values[option_name]!r} and as {value!r}; remove one of them"
                )
            values[option_name] = value
        return cls(**values)

    @property
    def non_defaults(self) -> dict[str, Any]:
        """Return the options that differ from the default, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def _plain(name: str, value: Any) -> Any:
    """Return the name of a torch.dtype, torch.device, GPU number or path."""
    if name == "device" and isinstance(value, int):
        return "cpu" if value < 0 else f"cuda:{value}"  # as in transformers' pipelines
    if name == "dtype":
        return str(value).removeprefix("torch.")
    is_plain = isinstance(value, str | int | Mapping)
    return value if is_plain or name == "model_kwargs" else str(value)


MODEL_NAMES = tuple(each.name for each in fields(ModelOptions))
FLEXIBLE_NAMES = ("dtype", "torch_dtype", "device", "cache_dir", "adapter")
"""Arguments of `ModelOptions.from_keywords` that may also be objects of torch, numbers or paths."""


@reject_unknown_names
@dataclass(frozen=True, slots=True)
class LoadOptions(TierOptions):
    """Arguments of `load_engine`, which explains them. Model, store, backend and ModelOptions are not among them."""

    system: str | None = option(None, "System text before all chunks. Default: the store's.")
    namespace: str = option(
        "", "Tenant whose KV is used. Tenants share no KV. Give each tenant a separate store.", TEXT
    )
    on_miss: str = option(
        "store",
        "Missing chunks of a prompt: store (precompute them in the background) or inline (in the prompt only).",
        one_of("store", "inline"),
    )
    shadow: float = option(
        0.0, "Share of requests, 0 to 1, that are compared with full prefill after the answer.", SHADOW
    )
    context: ContextPolicy | None = option(
        None,
        "Context policy: none, or neutral (prefill also after a neutral text). Default: the store's, or none.",
        CONTEXT,
    )
    auto_profile: bool | None = option(
        None, "Measure the machine once, for up to 3 s, so that no blend is slower than full prefill.", TRUE_OR_FALSE
    )
    new_model: bool = False
    max_num_seqs: int | None = None
    vllm_options: Mapping[str, Any] | None = None
    api_key: str | None = None
    read_timeout_s: float | None = option(None, "Longest wait for bytes of a server's answer, in seconds.", SECONDS)
    max_retries: int | None = option(None, "Retries of a request to a server.", RETRIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions:
    """Options of mode "blend", validated. All but `blend_min_tokens` need a `cacheblend` rule: it measures deviations.

    `check_layers`: layers, ascending, at which the rule measures how far stored KV is from fresh KV, and keeps some of
    the tokens that the check layer before kept. None: the rule's. `recompute_ratios`: share of the chunk tokens that
    each check layer keeps, in place of `recompute_ratio`. `deviation_thresholds`: instead of a share, each check layer
    keeps the tokens whose relative deviation, |stored - fresh| / |fresh|, is at least this. Of both, one number is
    for every check layer. `deviation`: "v" measures values, "k" keys, "kv" both. None: the rule's.
    `blend_min_tokens`: a prompt with fewer tokens that have KV is prefilled in full. None and 0: no prompt is.
    """

    check_layers: Sequence[int] | None = option(
        None, "Layers at which a cacheblend rule selects tokens, ascending. Default: the rule's.", CHECK_LAYERS
    )
    recompute_ratios: Sequence[float] | None = option(
        None, "Share of chunk tokens to keep at each check layer, instead of one ratio.", RATIOS
    )
    deviation: Deviation | None = option(
        None, "KV that a cacheblend rule compares: k, v or kv. Default: the rule's.", one_of(*get_args(Deviation))
    )
    deviation_thresholds: Sequence[float] | None = option(
        None, "Least relative deviation of recomputed tokens at each check layer, instead of a ratio.", THRESHOLDS
    )
    blend_min_tokens: int | None = option(
        None, "Prompts with fewer tokens that have stored KV are prefilled in full.", int_at_least(0, "none are")
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("check_layers", "recompute_ratios", "deviation_thresholds"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(value))
        if self.recompute_ratios is not None and self.deviation_thresholds is not None:
            raise UsageError(
                f"recompute_ratios are {self.recompute_ratios} and deviation_thresholds {self.deviation_thresholds}, "
                "but a check layer selects by one of them; remove the other"
            )
        for name in ("recompute_ratios", "deviation_thresholds"):
            values = getattr(self, name)
            if values is not None and self.check_layers is not None and len(values) not in (1, len(self.check_layers)):
                raise UsageError(
                    f"{name} has {len(values)} numbers for the {len(self.check_layers)} check_layers "
                    f"{self.check_layers}; pass one for each, or one for all"
                )

    @property
    def selection(self) -> dict[str, Any]:
        """Return the fields of SelectionOptions that are set, by name."""
        return {name: value for name in SELECTION_NAMES if (value := getattr(self, name)) is not None}

    @property
    def least_ratio(self) -> float | None:
        """Return the share of the chunk tokens that every layer recomputes at least; None if `recompute_ratio` sets it.

        With thresholds, the share is known beforehand only if it is 1, because all thresholds are 0; else this is 0.
        """
        if self.deviation_thresholds is not None:
            return 0.0 if any(self.deviation_thresholds) else 1.0
        return None if self.recompute_ratios is None else float(self.recompute_ratios[-1])

    def refusal(self, num_stored: int) -> str:
        """Return why a prompt in which `num_stored` tokens have stored KV is not blended; "" if it is."""
        if not 0 < num_stored < (self.blend_min_tokens or 0):
            return ""
        return f"{num_stored} tokens have stored KV, fewer than blend_min_tokens, {self.blend_min_tokens}"


SELECTION_NAMES = tuple(each.name for each in fields(SelectionOptions))


@reject_unknown_names
@dataclass(frozen=True, slots=True)
class GenerationOptions(SelectionOptions):
    """Options of one answer, with SelectionOptions. Validated. `stop` is a list of stop strings, or one string.

    `recompute_ratio`: share of the chunk tokens that mode "blend" recomputes. "auto" means the store's
    calibrated ratio or, without one, the rule's default. None means the ratio that a server was started with, else
    "auto". Unless a ratio is given as a number, the machine's profile decides: the ratio is raised as far as
    recomputing takes no longer than loading, and full prefill runs where it is faster. A number is always blended.

    `refine_ratio`: share of the chunk tokens that mode "blend" recomputes after the answer's first token, over the KV
    that the first token came from (refinement). It has an effect if it is above the ratio of the first token, and if
    there is a moment in which the engine has no other request. The rest of the answer is then closer to full prefill.
    None means the ratio that a server was started with, else 0.

    Temperature 0 is greedy. `top_p` keeps the smallest set of tokens with that total probability. Penalties and bias
    also apply to greedy answers. `logprobs` are the model's own, before penalties, bias and temperature.
    """

    mode: Mode = option("blend", "blend, full, prefix or reuse.", one_of("blend", "full", "prefix", "reuse"))
    rule: str = option("auto", "Rule that selects the tokens to recompute: auto, ask, cacheblend, ...", TEXT)
    recompute_ratio: RatioChoice = option(
        None, "Share of chunk tokens to recompute, 0 to 1; auto: as calibrated.", RATIO, flag="--ratio"
    )
    refine_ratio: float | None = option(
        None,
        "Share of chunk tokens to recompute after the first token, in idle time; 0: none.",
        between_zero_and_one("no refinement", "recompute every chunk token"),
    )
    max_tokens: int = option(256, "Longest answer, in tokens.", int_at_least(1))
    temperature: float = option(
        0.0,
        "Sampling temperature; 0 is greedy.",
        Validator(lambda value: is_number(value) and 0 <= value < math.inf, "0 (greedy) or more"),
    )
    top_p: float = option(
        1.0,
        "Probability mass of the tokens to choose from.",
        Validator(lambda value: is_number(value) and 0 < value <= 1, "more than 0, at most 1"),
    )
    seed: int | None = option(None, "Random seed for sampling.", SEED)
    stop: Sequence[str] | None = option(None, "Texts that end the answer.", TEXTS)
    structured_outputs: Mapping[str, Any] | None = option(None, "Schema or grammar of the answer.", STRUCTURED)
    top_k: int | None = option(None, "Most tokens to choose from; 0: all.", int_at_least(0, "all"))
    min_p: float | None = option(
        None,
        "Least probability of a token, as a share of the likeliest token's.",
        between_zero_and_one("any", "the likeliest alone"),
    )
    repetition_penalty: float | None = option(
        None,
        "Above 1: tokens of prompt and answer become less likely.",
        Validator(lambda value: is_number(value) and 0 < value < math.inf, "more than 0; 1 changes nothing"),
    )
    presence_penalty: float | None = option(None, "Subtracted from the logits of the answer's tokens.", PENALTY)
    frequency_penalty: float | None = option(
        None, "Subtracted from the logits of the answer's tokens, once per occurrence.", PENALTY
    )
    logit_bias: Mapping[int, float] | None = option(None, "Added to the logits of token ids.", BIAS)
    logprobs: bool = option(False, "Return the log-probability of each token of the answer.", TRUE_OR_FALSE)
    top_logprobs: int | None = option(
        None, "Number of likeliest tokens whose log-probabilities are returned, too.", int_between(0, MAX_TOP_LOGPROBS)
    )

    def __post_init__(self) -> None:
        SelectionOptions.__post_init__(self)
        if self.recompute_ratios is not None or self.deviation_thresholds is not None:
            name = "deviation_thresholds" if self.recompute_ratios is None else "recompute_ratios"
            if self.recompute_ratio not in (None, "auto", self.least_ratio):
                raise UsageError(
                    f"recompute_ratio is {self.recompute_ratio}, but {name} sets what check layers keep; remove one"
                )
            object.__setattr__(self, "recompute_ratio", self.least_ratio)
        if self.top_logprobs and not self.logprobs:
            raise UsageError(f"top_logprobs is {self.top_logprobs}, but logprobs is off; pass logprobs=True, too")
        if not all(self.stop_strings):
            raise UsageError("a stop string is empty; remove it")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the fields of GenerationOptions as keyword arguments of `generate` and `stream`."""
        return {name: getattr(self, name) for name in GENERATION_NAMES}


GENERATION_NAMES = tuple(each.name for each in fields(GenerationOptions))


def is_server_url(backend: str) -> bool:
    """Return True if a backend's name is a server's address.

    >>> is_server_url("http://localhost:8000"), is_server_url("vllm")
    (True, False)
    """
    return backend.startswith(("http://", "https://"))


def _is_bias(token: object, bias: object) -> bool:
    is_id = type(token) is int or (isinstance(token, str) and token.isdecimal())  # JSON has strings for keys
    return is_id and is_number(bias) and -100 <= bias <= 100  # type: ignore[operator]
