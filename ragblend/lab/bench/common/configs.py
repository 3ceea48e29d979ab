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
ShapeOption = Option("--shape", help="Model of random weights: llama-200m, llama-1b, ...")
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


def choose_shape(shape: str | None, model: str | None, default: str) -> str | None:
    """Return `shape`, or the default one if there is neither a shape nor a model. Raises UsageError for both."""
    if shape is not None and model is not None:
        raise UsageError("give either a shape (random weights) or a model (a checkpoint), not both")
    return default if model is None and shape is None else shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftConfig(PromptConfig):
    """Options of `bench ttft`. Either a `shape` (random weights) or a `model` (a checkpoint)."""

    shape: Annotated[str | None, ShapeOption] = None
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
        object.__setattr__(self, "shape", choose_shape(self.shape, self.model, DEFAULT_SHAPE))
        if self.tier not in TIERS:
            raise UsageError(f"tier is {self.tier!r}; choose one of {', '.join(TIERS)}")
        if self.backend == "vllm" and self.device != "cpu":
            raise UsageError(f"device is {self.device!r}; vLLM takes the device it was built for, leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig(BenchConfig):
    """Options of `bench quality`. `quality.records` lists the forms of a file of questions."""

    schema_version: ClassVar[int] = 7

    model: Annotated[str, Option("--model", help="'demo', a Hugging Face id or a local path.")] = "demo"
    data: Annotated[
        str,
        Option("--data", help="Questions: FILE, musique, nq, or demo for the sample corpus."),
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
    answer_tokens: Annotated[
        int | None,
        Option("--answer-tokens", min=1, help="Largest number of tokens of an answer. Default: 16, or LongBench's."),
    ] = None
    modes: Modes = MODES
    rules: Rules = ("auto", "cacheblend")
    ratios: Annotated[tuple[float, ...], Option("--ratios", help="Recompute ratios, comma-separated.")] = (
        0.05,
        0.15,
    )
    contexts: Annotated[
        tuple[ContextPolicy, ...],
        Option("--contexts", help="Context policies of stored chunks: none, neutral."),
    ] = ("none",)
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
