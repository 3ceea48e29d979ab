"""Configurations of the benchmarks: frozen values with their command-line options, validated on creation.

A field whose annotation contains a typer Option is an option of the command line: tuples are comma-separated, mappings
are JSON. Other fields are set only from Python. Importing this module does not load torch, because `ragblend bench
--help` imports it. Read `BenchConfig` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

from typer import Option

from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.options import CONTEXT, MODES, ContextPolicy, Mode

DEFAULT_SHAPE = "llama-200m"
BACKENDS = ("transformers", "vllm")
TIERS = ("memory", "disk")
PREFIX_TOKENS = 16  # of the system text, after which synthetic chunks are precomputed

Chunks = Annotated[int, Option("--num-chunks", min=1, help="Chunks of each prompt.")]
ChunkTokens = Annotated[int, Option("--chunk-tokens", min=1, help="Tokens of each chunk.")]
Ratio = Annotated[float | None, Option("--ratio", help="Share of chunk tokens to recompute. Default: the rule's.")]
Modes = Annotated[tuple[Mode, ...], Option("--modes", help="Modes, comma-separated: full, prefix, reuse, blend.")]
Rules = Annotated[tuple[str, ...], Option("--rules", help="Rules, comma-separated: auto, ask, cacheblend, ...")]
Model = Annotated[str | None, Option("--model", help="'demo', a Hugging Face id or a local path.")]
_SHAPE = Option("--shape", help="Model of random weights: llama-200m, llama-1b, ...")
Backend = Annotated[str, Option("--backend", help="Engine: transformers, or vllm in this process.")]
VllmOptions = Annotated[
    Mapping[str, Any],
    Option("--vllm-options", help="vLLM's own engine arguments, as JSON: '{\"enforce_eager\": false}'."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The options of all benchmarks. Raises UsageError for values that cannot be measured."""

    schema_version: ClassVar[int] = 1  # of the JSON object

    dtype: Annotated[str, Option("--dtype", help="Dtype of the model: float32, bfloat16 or float16.")] = "float32"
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads. Default: torch's choice.")] = None

    def __post_init__(self) -> None:
        from ragblend.engine.fusion.rules import find_rule, validate_ratio
        from ragblend.lab.bench.common.shapes import find_dtype, find_shape

        for name, (_, option) in get_typer_options(type(self)).items():
            low, value = option.min, getattr(self, name)
            if low is not None and value is not None and value < low:
                raise UsageError(f"{name} is {value}; choose {low} or more")
        checks: dict[str, Callable[[Any], object]] = {
            "shape": find_shape, "ratio": validate_ratio, "rule": find_rule, "dtype": find_dtype,
        }  # fmt: skip
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
        self.resolve_options()

    def resolve_options(self) -> None:
        """Set defaults that depend on other options. Raise UsageError for values that this benchmark rejects."""

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values, without the store's path, which is valid on this machine only."""
        facts = {name: [*value] if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        facts.pop("store", None)
        return facts


def get_typer_options(config: type[BenchConfig]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the typer Option of each field that is an option, by field name."""
    hints = get_type_hints(config, include_extras=True)
    return {
        each.name: get_args(hints[each.name]) for each in fields(config) if get_origin(hints[each.name]) is Annotated
    }


def check_modes(modes: Sequence[str], rules: Sequence[str]) -> None:
    """Raise UsageError for an unknown mode or rule, for no modes, and for the mode "blend" without rules."""
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
    """A case to measure: a mode, and the rule that selects tokens in mode "blend". `rule` is "none" in other modes."""

    mode: Mode
    rule: str


def expand_cases(modes: Sequence[Mode], rules: Sequence[str]) -> tuple[ModeAndRule, ...]:
    """Return a case for each mode; for the mode "blend", a case for each rule."""
    cases: list[ModeAndRule] = []
    for mode in modes:
        cases += [ModeAndRule(mode, rule) for rule in (rules if mode == "blend" else ["none"])]
    return tuple(dict.fromkeys(cases))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig(BenchConfig):
    """Options of benchmarks with synthetic prompts: chunks of numbers and a question."""

    num_chunks: Chunks = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: int = 32
    ratio: Ratio = None
    vllm_options: VllmOptions = field(default_factory=dict)

    @property
    def prompt_shape(self) -> tuple[int, int, int]:
        """Number of chunks, tokens of a chunk and tokens of the question: the first arguments of `make_prompts`."""
        return self.num_chunks, self.chunk_tokens, self.question_tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return PREFIX_TOKENS + self.num_chunks * self.chunk_tokens + self.question_tokens


def _apply_default_shape(config: TtftConfig | ThroughputConfig, default: str) -> None:
    """Set the default shape if neither a shape nor a model is given. Raises UsageError for both."""
    if config.shape is not None and config.model is not None:
        raise UsageError("give either a shape (random weights) or a model (a checkpoint), not both")
    if config.shape is None and config.model is None:
        object.__setattr__(config, "shape", default)


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftConfig(PromptConfig):
    """Options of `bench ttft`. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: Annotated[str | None, _SHAPE] = None
    model: Model = None
    modes: Modes = MODES
    rules: Rules = ("auto",)  # one blend run each
    repeats: Annotated[int, Option("--repeats", min=1, help="Timed requests per mode and prompt.")] = 5
    num_prompts: Annotated[int, Option("--num-prompts", min=1, help="Prompts, each in another chunk order.")] = 1
    tier: Annotated[str, Option("--tier", help="Tier of the KV: memory, or disk (in TMPDIR).")] = "memory"
    device: Annotated[str, Option("--device", help="cpu, cuda or auto.")] = "cpu"
    backend: Backend = "transformers"

    def resolve_options(self) -> None:
        """Set the default shape. Raise UsageError for an unknown tier.

        With vLLM, raise UsageError for a `device` other than "cpu", because vLLM chooses the device itself.
        """
        _apply_default_shape(self, DEFAULT_SHAPE)
        if self.tier not in TIERS:
            raise UsageError(f"tier is {self.tier!r}; choose one of {', '.join(TIERS)}")
        if self.backend == "vllm" and self.device != "cpu":
            raise UsageError(f"device is {self.device!r}; vLLM takes the device it was built for, leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig(PromptConfig):
    """Options of `bench throughput`. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: Annotated[
        str | None,
        Option("--shape", help="Model of random weights: llama-50m (default), llama-200m, llama-1b, ..."),
    ] = None
    model: Model = None
    num_chunks: Chunks = 4
    chunk_tokens: ChunkTokens = 128
    pool: int = 24  # stored chunks that prompts draw from
    output_tokens: int = 8
    num_requests: Annotated[int, Option("--num-requests", min=1, help="Requests per rate and mode.")] = 16
    rates: Annotated[
        tuple[float, ...] | None,
        Option("--rates", help="Requests per second, comma-separated. Default: multiples of full prefill's."),
    ] = None
    bound_s: Annotated[
        float | None,
        Option("--max-mean-ttft-s", help="Largest mean TTFT, seconds. Default: twice full prefill's when idle."),
    ] = None
    modes: Modes = ("full", "prefix", "blend")
    rules: Rules = ("auto",)
    memory_gib: float = 2.0  # of the memory tier

    def resolve_options(self) -> None:
        """Set the default shape. Raise UsageError if `num_chunks` exceeds `pool`, or a rate or bound is 0 or less."""
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
    """Options of `bench load`. The memory tier holds the chunks of one prompt.

    The store holds the chunks of `store_factor` prompts or more.
    """

    shape: Annotated[str, _SHAPE] = DEFAULT_SHAPE
    rule: Annotated[str, Option("--rule", help="Rule: auto, ask, cacheblend, ...")] = "auto"
    slowdowns: Annotated[
        tuple[float, ...],
        Option("--slowdowns", help="Speeds of throttled readers, as T_load over T_recompute, comma-separated."),
    ] = (0.5, 0.8, 1.0, 2.0)
    store: Annotated[
        str | None, Option("--store", metavar="DIR", help="Folder on the disk to measure. Default: one in TMPDIR.")
    ] = None
    store_factor: int = 10
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1
    repeats: Annotated[int, Option("--repeats", min=1, help="Number of prompts, each with other chunks.")] = 5
    backend: Backend = "transformers"

    def resolve_options(self) -> None:
        """Set `ratio` to the rule's default if it is None. Raise UsageError unless all slowdowns are above 0."""
        from ragblend.engine.fusion.rules import find_rule
        from ragblend.lab.bench.common.shapes import find_shape

        if self.ratio is None:
            object.__setattr__(self, "ratio", find_rule(self.rule, find_shape(self.shape).num_layers).ratio)
        if self.store is not None:
            object.__setattr__(self, "store", str(expand_user_path(self.store, "store")))
        if any(slowdown <= 0 for slowdown in self.slowdowns):
            raise UsageError(f"slowdowns are {self.slowdowns}; choose more than 0")

    @property
    def blend_ratio(self) -> float:
        """The recompute ratio: `ratio`, else the rule's default."""
        assert self.ratio is not None  # set by `resolve_options`
        return self.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestConfig(BenchConfig):
    """Options of `bench ingest`. Each round prefills `num_chunks` chunks, then ingests them once per context policy:
    "none", and the others in `contexts`."""

    schema_version: ClassVar[int] = 2

    shape: Annotated[str, _SHAPE] = DEFAULT_SHAPE
    num_chunks: Annotated[int, Option("--num-chunks", min=1, help="Chunks of each round.")] = 8
    chunk_tokens: ChunkTokens = 512
    repeats: Annotated[int, Option("--repeats", min=1, help="Rounds of prefill and ingestion in turns.")] = 3
    contexts: Annotated[tuple[ContextPolicy, ...], Option("--contexts", help="Context policies: none, similar.")] = (
        "none",
    )
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1

    def resolve_options(self) -> None:
        """Raise UsageError for an unknown context policy."""
        for policy in self.contexts:
            CONTEXT.validate("context", policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig(BenchConfig):
    """Options of `bench quality`. See `quality.data` for the values of `data`."""

    schema_version: ClassVar[int] = 6

    model: Annotated[str, Option("--model", help="'demo', a Hugging Face id or a local path.")] = "demo"
    data: Annotated[
        str,
        Option("--data", help="Questions: FILE.json[l], musique, nq, or demo for the sample corpus."),
    ] = "demo"
    part: Annotated[
        str | None,
        Option(
            "--split", help="Questions: reported, selection or all. Default: all of a FILE, reported of the others."
        ),
    ] = None
    num_questions: Annotated[int, Option("--num-questions", min=1, help="Largest number of questions.")] = 40
    num_chunks: Chunks = 6
    chunk_tokens: Annotated[int, Option("--chunk-tokens", min=1, help="Largest number of tokens of a chunk.")] = 256
    answer_tokens: int = 16  # the most of an answer
    modes: Modes = MODES
    rules: Rules = ("auto", "cacheblend")
    ratios: Annotated[tuple[float, ...], Option("--ratios", help="Recompute ratios, comma-separated.")] = (
        0.05,
        0.15,
    )
    contexts: Annotated[
        tuple[ContextPolicy, ...],
        Option("--contexts", help="Context policies of stored chunks: none, similar. Default: that of a new store."),
    ] = ()
    embedder: Annotated[
        str | None, Option("--embedder", help="Embedder for retrieval: minilm, hashing, a Hugging Face id or a path.")
    ] = None
    device: Annotated[str, Option("--device", help="cpu, cuda or auto.")] = "auto"
    threads: Annotated[int | None, Option("--threads", min=1, help="CPU threads.")] = 1

    def resolve_options(self) -> None:
        """Set the default `part` of the questions. Raise UsageError for an unknown part, an unknown context policy, or
        a ratio outside 0 to 1.
        """
        from ragblend.engine.fusion.rules import validate_ratio

        for context in self.contexts:
            CONTEXT.validate("context", context)
        if self.part is None:
            object.__setattr__(self, "part", "reported" if self.data in ("demo", *NAMED_DATASETS) else "all")
        if self.part not in PARTS:
            raise UsageError(f"part is {self.part!r}; choose one of {', '.join(PARTS)}")
        for ratio in self.ratios:
            validate_ratio(ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values. Of the paths of model and data, only the last part is included."""
        return BenchConfig.as_dict(self) | {"model": Path(self.model).name, "data": Path(self.data).name}


PARTS = ("selection", "reported", "all")
"""Questions for choosing rules, questions for reporting results, and both."""

NAMED_DATASETS = {"musique": "musique_100.json", "nq": "nq_open_400.json"}
"""Data sets in the checkout's data/questions, which are not part of the wheel."""
