"""Configurations of the benchmarks: frozen values, checked when they are made, with their command-line options.

A field is annotated with its option, if it has one; a tuple is written comma-separated, a mapping as JSON. A field
without an option is set from Python alone. Importing this loads no torch, because `ragblend bench --help` reads it.
Read `BenchConfig` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from typer import Option

from ragblend.errors import UsageError
from ragblend.files.places import user_path
from ragblend.options import CONTEXT, MODES, ContextPolicy, Mode

DEFAULT_SHAPE = "llama-200m"
DEFAULT_RATIO = 0.15  # CacheBlend's, as in `engine.fusion.rules`
BACKENDS = ("transformers", "vllm")
TIERS = ("memory", "disk")
PREFIX_TOKENS = 16  # a short system text; synthetic chunks are precomputed behind it

Chunks = Annotated[int, Option("--num-chunks", min=1, help="Per prompt.")]
ChunkTokens = Annotated[int, Option("--chunk-tokens", min=1)]
Ratio = Annotated[float, Option("--ratio", help="Share of chunk tokens that blend recomputes.")]
Modes = Annotated[tuple[Mode, ...], Option("--modes", help="Comma-separated: full, prefix, reuse, blend.")]
Rules = Annotated[tuple[str, ...], Option("--rules", help="Comma-separated: auto, ask, cacheblend, ...")]
Model = Annotated[str | None, Option("--model", help="'demo', a Hugging Face id or a local path.")]
Shape = Annotated[str, Option("--shape", help="Random weights: llama-200m, llama-1b, ...")]
ShapeOrModel = Annotated[str | None, Option("--shape", help="Random weights: llama-200m, llama-1b, ...")]
Backend = Annotated[str, Option("--backend", help="transformers, or vllm in this process.")]
VllmOptions = Annotated[
    Mapping[str, Any],
    Option("--vllm-options", help="vLLM's own engine arguments, as JSON: '{\"enforce_eager\": false}'."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What all benchmarks are asked. Raises UsageError for what cannot be measured, before anything is built."""

    schema_version: ClassVar[int] = 1  # of the JSON object

    dtype: Annotated[str, Option("--dtype", help="float32, bfloat16 or float16.")] = "float32"
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads; default is torch's choice.")] = None

    def __post_init__(self) -> None:
        from ragblend.engine.fusion.rules import find_rule, validate_ratio
        from ragblend.engine.store.kv import dtype_name
        from ragblend.lab.bench.common.shapes import find_dtype, find_shape

        for name, (_, option) in get_options(type(self)).items():
            low, value = option.min, getattr(self, name)
            if low is not None and value is not None and value < low:
                raise UsageError(f"{name} is {value}; choose {low} or more")
        checks: dict[str, Callable[[Any], object]] = {"shape": find_shape, "ratio": validate_ratio, "rule": find_rule}
        for name, check in checks.items():
            if getattr(self, name, None) is not None:
                check(getattr(self, name))
        if (modes := getattr(self, "modes", None)) is not None:
            check_modes(modes, getattr(self, "rules", ()))
        backend = getattr(self, "backend", "vllm")
        if backend not in BACKENDS:
            raise UsageError(f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
        if backend != "vllm" and getattr(self, "vllm_options", {}):
            raise UsageError("options for vLLM need --backend vllm")
        object.__setattr__(self, "dtype", dtype_name(find_dtype(self.dtype)))  # bf16 is bfloat16
        self.validate()

    def validate(self) -> None:
        """Raise UsageError for values that one benchmark rejects."""

    @property
    def command(self) -> str:
        """The benchmark's name: quality of QualityConfig."""
        return type(self).__name__.removesuffix("Config").lower()

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON values, without the store's place, which says nothing elsewhere."""
        facts = {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        facts.pop("store", None)
        return facts


def get_options(config: type[BenchConfig]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the typer option of each field that has one."""
    hints = get_type_hints(config, include_extras=True)
    return {
        each.name: get_args(hints[each.name]) for each in fields(config) if get_origin(hints[each.name]) is Annotated
    }


def check_modes(modes: Sequence[str], rules: Sequence[str]) -> None:
    """Raise UsageError for a mode or a rule that does not exist, and when there is nothing to run."""
    from ragblend.engine.fusion.rules import find_rule

    if not modes:
        raise UsageError(f"no mode given; choose from {', '.join(MODES)}")
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"mode is {mode!r}; choose from {', '.join(MODES)}")
    if "blend" in modes and not rules:
        raise UsageError("mode blend needs a rule; choose auto or one of those in `ragblend bench ttft --help`")
    for rule in rules:
        find_rule(rule)


class ModeAndRule(NamedTuple):
    """One line of a table. `rule` is "none" except for blend."""

    mode: Mode
    rule: str


def expand_cases(modes: Sequence[Mode], rules: Sequence[str]) -> tuple[ModeAndRule, ...]:
    """Every mode once, blend once per rule."""
    cases: list[ModeAndRule] = []
    for mode in modes:
        cases += [ModeAndRule(mode, rule) for rule in (rules if mode == "blend" else ["none"])]
    return tuple(dict.fromkeys(cases))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig(BenchConfig):
    """Benchmarks that ask synthetic prompts: chunks of numbers, and a question."""

    num_chunks: Chunks = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: int = 32
    ratio: Ratio = DEFAULT_RATIO
    vllm_options: VllmOptions = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of every prompt."""
        return PREFIX_TOKENS + self.num_chunks * self.chunk_tokens + self.question_tokens


def _apply_default_shape(config: TtftConfig | ThroughputConfig, default: str) -> None:
    """Either a shape or a model; the default shape where neither is given."""
    if config.shape is not None and config.model is not None:
        raise UsageError("give either a shape (random weights) or a model (a checkpoint), not both")
    if config.shape is None and config.model is None:
        object.__setattr__(config, "shape", default)


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftConfig(PromptConfig):
    """`bench ttft`. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: ShapeOrModel = None
    model: Model = None
    modes: Modes = MODES
    rules: Rules = ("cacheblend",)  # one blend run each
    repeats: Annotated[int, Option("--repeats", min=1, help="Timed runs per mode and prompt.")] = 5
    num_prompts: Annotated[int, Option("--questions", min=1, help="Prompts, chunks shuffled.")] = 1
    tier: Annotated[str, Option("--tier", help="memory or disk, in a folder of TMPDIR.")] = "memory"
    device: Annotated[str, Option("--device")] = "cpu"
    backend: Backend = "transformers"

    def validate(self) -> None:
        """Raise UsageError for an unknown tier, and for a device with vLLM."""
        _apply_default_shape(self, DEFAULT_SHAPE)
        if self.tier not in TIERS:
            raise UsageError(f"tier is {self.tier!r}; choose one of {', '.join(TIERS)}")
        if self.backend == "vllm" and self.device != "cpu":
            raise UsageError(f"device is {self.device!r}; vLLM takes the device it was built for, leave it out")

    @property
    def cases(self) -> tuple[ModeAndRule, ...]:
        """What is run."""
        return expand_cases(self.modes, self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(PromptConfig):
    """`bench throughput`. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: Annotated[
        str | None, Option("--shape", help="Random weights: llama-50m (the default), llama-200m, llama-1b, ...")
    ] = None
    model: Model = None
    num_chunks: Chunks = 4
    chunk_tokens: ChunkTokens = 128
    pool: int = 24  # stored chunks that prompts draw from
    output_tokens: int = 8
    num_requests: Annotated[int, Option("--requests", min=1, help="Per rate and mode.")] = 16
    rates: Annotated[
        tuple[float, ...] | None,
        Option("--rates", help="Requests per second, comma-separated; chosen from full prefill's."),
    ] = None
    bound_s: Annotated[
        float | None, Option("--max-mean-ttft-s", help="Mean TTFT to keep, seconds; twice an idle full prefill's.")
    ] = None
    modes: Modes = ("full", "prefix", "blend")
    rules: Rules = ("cacheblend",)
    memory_gib: float = 2.0  # of the memory tier

    def validate(self) -> None:
        """Raise UsageError for more chunks than are stored, and for rates or a bound that are not above 0."""
        _apply_default_shape(self, "llama-50m")
        if self.pool < self.num_chunks:
            raise UsageError(
                f"num_chunks is {self.num_chunks}, but only {self.pool} chunks are stored; choose {self.pool} or less"
            )
        if self.rates is not None and (not self.rates or min(self.rates) <= 0):
            raise UsageError("rates must be above 0 requests per second; leave them out to have them chosen")
        if self.bound_s is not None and self.bound_s <= 0:
            raise UsageError(f"the bound is {self.bound_s} s; choose more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(PromptConfig):
    """`bench load`: prompts of `num_chunks` chunks out of a store `store_factor` times the memory budget."""

    shape: Shape = DEFAULT_SHAPE
    rule: Annotated[str, Option("--rule", help="auto, ask, cacheblend, ...")] = "auto"
    slowdowns: Annotated[
        tuple[float, ...],
        Option("--slowdowns", help="Throttled readers: T_load over T_recompute, comma-separated."),
    ] = (0.5, 0.8, 1.0, 2.0)
    store: Annotated[
        str | None, Option("--store", metavar="DIR", help="Folder on the disk that is measured; one in TMPDIR.")
    ] = None
    store_factor: int = 10
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1
    repeats: Annotated[int, Option("--repeats", min=1, help="Prompts, each of other chunks.")] = 5
    backend: Backend = "transformers"

    def validate(self) -> None:
        """Raise UsageError for a reader without speed."""
        if self.store is not None:
            object.__setattr__(self, "store", str(user_path(self.store, "store")))
        if any(slowdown <= 0 for slowdown in self.slowdowns):
            raise UsageError(f"slowdowns are {self.slowdowns}; choose more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig(BenchConfig):
    """`bench ingest`: `num_chunks` chunks, prefilled and ingested in turns, in each of the `contexts` and, whatever
    they are, in none; and `num_known` known ones."""

    shape: Shape = DEFAULT_SHAPE
    num_chunks: Annotated[int, Option("--num-chunks", min=1)] = 8
    chunk_tokens: ChunkTokens = 512
    repeats: Annotated[int, Option("--repeats", min=1, help="Rounds of both, alternating.")] = 3
    contexts: Annotated[tuple[ContextPolicy, ...], Option("--contexts", help="Comma-separated: none, similar.")] = (
        "none",
    )
    num_known: Annotated[int, Option("--num-known-chunks", min=0, help="Of the second part; 0 for none.")] = 10_000
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1

    def validate(self) -> None:
        """Raise UsageError for a context that does not exist."""
        for policy in self.contexts:
            CONTEXT.validate("context", policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig(BenchConfig):
    """`bench quality`. What `data` may be: see `quality.data`."""

    schema_version: ClassVar[int] = 6

    model: Annotated[str, Option("--model", help="'demo', a Hugging Face id or a local path.")] = "demo"
    data: Annotated[
        str,
        Option("--data", help="FILE.json[l] of questions, or musique, nq; demo: the sample corpus."),
    ] = "demo"
    part: Annotated[str, Option("--split", help="reported; selection, to choose by; all.")] = "reported"
    num_questions: Annotated[int, Option("--questions", min=1, help="At most.")] = 40
    num_chunks: Chunks = 6
    chunk_tokens: Annotated[int, Option("--chunk-tokens", min=1, help="At most.")] = 256
    answer_tokens: int = 16  # of an answer at most
    modes: Modes = MODES
    rules: Rules = ("auto", "cacheblend")
    ratios: Annotated[tuple[float, ...], Option("--ratios", "--ratio", help="Comma-separated shares.")] = (
        0.05,
        DEFAULT_RATIO,
    )
    contexts: Annotated[
        tuple[ContextPolicy, ...],
        Option("--contexts", "--context", help="That chunks are stored in, comma-separated: none, similar."),
    ] = ("none",)
    embedder: Annotated[
        str | None, Option("--embedder", help="That finds a question's chunks: minilm, hashing, an id or a path.")
    ] = None
    device: Annotated[str, Option("--device")] = "auto"
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1

    def validate(self) -> None:
        """Raise UsageError for an unknown part or context, and for a ratio that is no share."""
        from ragblend.engine.fusion.rules import validate_ratio

        if not self.contexts:
            raise UsageError("no context given; choose from none, similar")
        for context in self.contexts:
            CONTEXT.validate("context", context)
        if self.part not in PARTS:
            raise UsageError(f"part is {self.part!r}; choose one of {', '.join(PARTS)}")
        for ratio in self.ratios:
            validate_ratio(ratio)

    def as_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON values, without places."""
        return BenchConfig.as_dict(self) | {"model": Path(self.model).name, "data": Path(self.data).name}


PARTS = ("selection", "reported", "all")
"""Questions to choose rules by, questions to report, and both."""
