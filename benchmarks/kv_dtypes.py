"""KV stored as computed beside KV in eight bits, and what four would do: bytes, TTFT from disk, and rounding.

Three subjects. Questions over held-out stories for the demo model, where right and wrong mean something but heads are
small; prompts of random tokens for a real shape with random weights, where heads are not but answers mean nothing; and
one such prompt from disk, for times. The yardstick of rounding is the bf16 noise floor: how far full prefill in
bfloat16 is from full prefill in float32.
Read `bench_dtypes` first; `kv_dtypes_answers` measures rounding, `int4` has the four bits.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.demo_quality.cases import make_items
from benchmarks.demo_quality.runs import MAX_ANSWER_TOKENS, REUSE, Configuration, Item
from benchmarks.int4 import GROUPS
from benchmarks.kv_dtypes_answers import (
    AUTO,
    STORE_BYTES,
    AnswersRun,
    Subject,
    file_bytes,
    measure_answers,
    over,
    show_answers,
)
from ragblend.bench.common.configs import PREFIX_TOKENS
from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.bench.common.shapes import find_dtype, find_shape
from ragblend.bench.common.workloads import make_prompts, random_model, synthetic_segmenter, threads
from ragblend.bench.quality.measures import kl
from ragblend.cli.options import split_names
from ragblend.cli.printing import err
from ragblend.cli.session import quiet_libraries, use_threads
from ragblend.engine.fusion.rules import DEFAULT_RATIO, check_ratio, find_rule
from ragblend.engine.generation import Request
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.hf.layers import TransformersLayers
from ragblend.engine.load import load_engine
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.kv import KVHeader, LayerKV, MemoryKV, dtype_name, in_memory
from ragblend.engine.store.open import open_store
from ragblend.engine.store.quantize import CODE_DTYPES
from ragblend.engine.store.tiered import MemoryStore
from ragblend.errors import UsageError
from ragblend.intervals import mean_interval
from tools.demo_model.cases import Setting

SCHEMA_VERSION = 2
OUT = Path("data/results/kv-dtypes.json")
NOWHERE = Path("-")


@dataclass(frozen=True, slots=True)
class DtypesConfig:
    """What to compare with KV as computed. `num_questions` 0 leaves the demo model out, `num_prompts` 0 the rounding
    of the shape, `repeats` 0 its times, `shape` None all of it."""

    kv_dtypes: tuple[str, ...] = tuple(CODE_DTYPES)
    num_questions: int = 210
    context_tokens: int = 256  # of the questions' prefix and chunks, about
    shape: str | None = "llama-200m"
    num_prompts: int = 0  # each is also prefilled in bfloat16, which most CPUs emulate, slowly
    dtypes: tuple[str, ...] = ("float32",)  # that the shape is timed in
    num_chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = DEFAULT_RATIO
    rule: str = "auto"
    repeats: int = 5
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for kv_dtype in self.kv_dtypes:
            if kv_dtype not in CODE_DTYPES:
                raise UsageError(
                    f"kv_dtype is {kv_dtype!r}; choose from {', '.join(CODE_DTYPES)} (KV as computed is run anyway)"
                )
        for name in ("context_tokens", "num_chunks", "chunk_tokens", "question_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        for name in ("num_questions", "num_prompts", "repeats"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 0 (leave it out) or more")
        if self.shape is not None:
            find_shape(self.shape)
        for dtype in self.dtypes:
            find_dtype(dtype)
        check_ratio(self.ratio)
        find_rule(self.rule)

    @property
    def stored(self) -> tuple[str, ...]:
        """KV dtypes of the stores, as computed first."""
        return (AUTO, *dict.fromkeys(self.kv_dtypes))

    @property
    def measured(self) -> tuple[str, ...]:
        """KV dtypes whose rounding is measured: those of the stores, and four bits."""
        return (*self.stored, *GROUPS)

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """Full reuse, and blend."""
        return REUSE, Configuration("blend", find_rule(self.rule).name, self.ratio)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a chunk's file, of the shape's heads and layers and `chunk_tokens` tokens, header included."""

    dtype: str
    kv_dtype: str
    bytes_per_token: float
    share: float  # of the file as computed


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One storage dtype in one mode, from disk, page cache dropped: medians over the repeats."""

    model: str
    dtype: str  # computed in
    kv_dtype: str  # stored as; "auto" as computed
    mode: str
    rule: str
    ratio: float
    num_samples: int
    bytes_per_token: float  # of the chunks' files
    byte_share: float  # of the files' bytes as computed
    ttft_s: float  # lookup + load + fuse + first logits
    ttft_min_s: float
    ttft_max_s: float
    ttft_increase_s: float  # mean over that from KV as computed in the same turn, and its 95 % interval
    ttft_increase_low_s: float
    ttft_increase_high_s: float
    cpu_s: float  # processor time, the loader's thread included: what a busy machine spares
    load_s: float
    stall_s: float
    kl_to_as_computed: float  # of the first token, nats: 0 for KV as computed only, so it was this store that was read


def bench_dtypes(config: DtypesConfig, out: Path | None, echo: Callable[[str], None]) -> dict[str, Any]:
    """Card and tables to `echo`, JSON to `out`; returns the JSON object."""
    with threads(config.threads):
        card = hardware_card()
        for line in (*card_lines(card), ""):
            echo(line)
        sizes = measure_sizes(config, echo) if config.shape is not None else []
        runs: list[AnswersRun | TimedRun] = [*measure_demo(config, echo)] if config.num_questions else []
        if config.shape is not None:
            runs += measure_shape(config, echo) if config.num_prompts else []
            runs += time_shape(config, echo) if config.repeats else []
    facts = {
        "schema_version": SCHEMA_VERSION,
        "command": "benchmarks.kv_dtypes",
        "hardware": card,
        "config": asdict(config),
        "sizes": [asdict(size) for size in sizes],
        "runs": [asdict(run) for run in runs],
    }
    if out != NOWHERE:
        path = out or OUT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts) + "\n")
        echo(f"result in {path}")
    return facts


# -- bytes


def measure_sizes(config: DtypesConfig, echo: Callable[[str], None]) -> list[Size]:
    """One chunk of the shape in 32 and in 16 bits, as computed, in eight and in four."""
    assert config.shape is not None
    shape, token_ids = find_shape(config.shape), tuple(range(config.chunk_tokens))
    generator, sizes = torch.Generator().manual_seed(config.seed), list[Size]()
    dims = (shape.num_kv_heads, config.chunk_tokens, shape.head_dim)
    drawn = [[torch.randn(dims, generator=generator) for _ in ("keys", "values")] for _ in range(shape.num_layers)]
    for name in ("float32", "bfloat16"):
        header = KVHeader("0" * 32, "0" * 32, (1,) * PREFIX_TOKENS, token_ids, shape.num_layers, name)
        kv = MemoryKV(header, tuple(LayerKV(*(tensor.to(find_dtype(name)) for tensor in layer)) for layer in drawn))
        whole = file_bytes(kv, AUTO)
        for kv_dtype in config.measured:
            nbytes = file_bytes(kv, kv_dtype)
            sizes.append(Size(name, kv_dtype, nbytes / config.chunk_tokens, nbytes / whole))
    echo(f"{config.shape}, a chunk of {config.chunk_tokens} tokens: bytes per token, share of KV as computed")
    for size in sizes:
        echo(f"{size.dtype:<10}{size.kv_dtype:<9}{size.bytes_per_token:>9.0f}{size.share:>7.3f}")
    echo("")
    return sizes


# -- rounding


def measure_demo(config: DtypesConfig, echo: Callable[[str], None]) -> list[AnswersRun]:
    """Questions over held-out stories to the demo model."""
    with (
        load_engine("demo", MemoryStore(STORE_BYTES), dtype="float32", on_miss="inline") as base,
        load_engine("demo", MemoryStore(STORE_BYTES), dtype="bfloat16", on_miss="inline") as rounded,
    ):
        setting = Setting(config.num_chunks, config.context_tokens)
        items = make_items(base, setting, config.num_questions, 0.0, config.seed)
        found = measure_answers(
            Subject(base, rounded, items, MAX_ANSWER_TOKENS), config.configurations, config.measured
        )
    show_answers(found, echo)
    return found


def measure_shape(config: DtypesConfig, echo: Callable[[str], None]) -> list[AnswersRun]:
    """Prompts of random tokens, no two with a chunk in common, to random weights; one token each."""
    assert config.shape is not None
    rounded = random_model(find_shape(config.shape), torch.bfloat16, config.seed)
    models = (copy.deepcopy(rounded).float(), rounded)  # the same weights
    base, other = (
        TransformersEngine(
            TransformersLayers(model),
            synthetic_segmenter(find_shape(config.shape).vocab_size),
            MemoryStore(STORE_BYTES),
            name=config.shape,
            fingerprint=str(model.dtype),
            on_miss="inline",
        )
        for model in models
    )
    sizes = (config.num_chunks, config.chunk_tokens, config.question_tokens)
    vocab_size = find_shape(config.shape).vocab_size
    prompts = (make_prompts(*sizes, 1, vocab_size, config.seed + n).prompts[0] for n in range(config.num_prompts))
    items = [Item(prompt, "", "random", 0.0) for prompt in prompts]
    found = measure_answers(Subject(base, other, items, 1), config.configurations, config.measured)
    show_answers(found, echo)
    return found


# -- times


@dataclass(slots=True)
class _Timed:
    """Prefills of one store in one mode."""

    log_probs: Tensor
    ttft_s: list[float]
    cpu_s: list[float]
    load_s: list[float]
    stall_s: list[float]


def time_shape(config: DtypesConfig, echo: Callable[[str], None]) -> list[TimedRun]:
    """The same prompt from each store on disk, in each dtype, taking turns; files are dropped from the page cache."""
    assert config.shape is not None
    shape = find_shape(config.shape)
    model = random_model(shape, torch.float32, config.seed)
    sizes = (config.num_chunks, config.chunk_tokens, config.question_tokens)
    work = make_prompts(*sizes, num_prompts=1, vocab_size=shape.vocab_size, seed=config.seed)
    runs: list[TimedRun] = []
    for dtype in sorted((dtype_name(find_dtype(name)) for name in config.dtypes), reverse=True):  # float32 first
        model.to(find_dtype(dtype))
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its tables stay in float32
        with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as directory:
            stores = {name: open_store(Path(directory) / name, memory_gib=0, kv_dtype=name) for name in config.stored}  # type: ignore[arg-type]
            layers, segmenter = TransformersLayers(model), synthetic_segmenter(shape.vocab_size)
            base = TransformersEngine(
                layers, segmenter, stores[AUTO], name=config.shape, fingerprint=dtype, on_miss="inline"
            )
            for chunk in work.chunks:
                base.precompute(chunk)
            _copy(stores[AUTO], [store for name, store in stores.items() if name != AUTO])
            request = base.request(work.prompts[0], mode="full", rule=config.rule)
            engines = {name: over(base, store) for name, store in stores.items()}
            timed = _time_all(config, engines, request, Path(directory))
            num_bytes = {name: store.nbytes() for name, store in stores.items()}
            found = _timed_runs(config, dtype, timed, num_bytes)
            _show_timed(config, found, echo)
            runs += found
    return runs


def _copy(source: KVStore, targets: Sequence[KVStore]) -> None:
    for key in source.keys():  # noqa: SIM118 (a KVStore is not a dict)
        kv = source.get(key)
        assert kv is not None
        for target in targets:
            target.put(in_memory(kv))


def _time_all(
    config: DtypesConfig, engines: Mapping[str, TransformersEngine], full: Request, directory: Path
) -> dict[tuple[Configuration, str], _Timed]:
    """Every store in every mode once as a warm-up, then in turns."""
    timed: dict[tuple[Configuration, str], _Timed] = {}
    for repeat in range(config.repeats + 1):
        for configuration in config.configurations:
            rule = config.rule if configuration.mode == "blend" else "auto"
            request = replace(full, mode=configuration.mode, rule=rule, ratio=configuration.ratio)
            for name, engine in engines.items():
                drop_page_cache(directory.rglob("*.safetensors"))
                start_s, start_cpu_s = perf_counter(), process_time()
                prefilled = engine.prefill(request)
                log_probs = _log_probs(prefilled.logits)
                elapsed_s, elapsed_cpu_s = perf_counter() - start_s, process_time() - start_cpu_s
                taken = timed.setdefault((configuration, name), _Timed(log_probs, [], [], [], []))
                if repeat:
                    taken.ttft_s.append(elapsed_s)
                    taken.cpu_s.append(elapsed_cpu_s)
                    taken.load_s.append(prefilled.report.load_s)
                    taken.stall_s.append(prefilled.report.stall_s)
    return timed


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Have the next read of the files come from the device. They must have been synced to it."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _timed_runs(
    config: DtypesConfig,
    dtype: str,
    timed: Mapping[tuple[Configuration, str], _Timed],
    num_bytes: Mapping[str, int],
) -> list[TimedRun]:
    num_tokens = config.num_chunks * config.chunk_tokens
    runs = []
    for (configuration, kv_dtype), taken in timed.items():
        plain = timed[configuration, AUTO]
        increases = [mine - theirs for mine, theirs in zip(taken.ttft_s, plain.ttft_s, strict=True)]
        low, high = mean_interval(increases)
        runs.append(
            TimedRun(
                config.shape or "",
                dtype,
                kv_dtype,
                configuration.mode,
                configuration.rule,
                configuration.ratio,
                len(taken.ttft_s),
                bytes_per_token=num_bytes[kv_dtype] / num_tokens,
                byte_share=num_bytes[kv_dtype] / num_bytes[AUTO],
                ttft_s=statistics.median(taken.ttft_s),
                ttft_min_s=min(taken.ttft_s),
                ttft_max_s=max(taken.ttft_s),
                ttft_increase_s=fmean(increases),
                ttft_increase_low_s=low,
                ttft_increase_high_s=high,
                cpu_s=statistics.median(taken.cpu_s),
                load_s=statistics.median(taken.load_s),
                stall_s=statistics.median(taken.stall_s),
                kl_to_as_computed=kl(plain.log_probs, taken.log_probs),
            )
        )
    return runs


def _log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _show_timed(config: DtypesConfig, runs: Sequence[TimedRun], echo: Callable[[str], None]) -> None:
    """One line per run."""
    echo(
        f"{config.shape} {runs[0].dtype}, {config.num_chunks} x {config.chunk_tokens} tokens from disk; medians of "
        f"{config.repeats}, mean increase (95 % interval)"
    )
    echo(
        f"{'mode':<7}{'rule':<13}{'stored':<7}{'B/token':>8}{'share':>7}{'TTFT s':>8}{'min':>8}{'max':>8}"
        f"  {'increase s':<28}{'cpu s':>8}{'load s':>8}{'stall':>7}{'KL':>9}"
    )
    for run in runs:
        increase = f"{run.ttft_increase_s:+.3f} ({run.ttft_increase_low_s:+.3f} to {run.ttft_increase_high_s:+.3f})"
        echo(
            f"{run.mode:<7}{run.rule:<13}{run.kv_dtype:<7}{run.bytes_per_token:>8.0f}{run.byte_share:>7.3f}"
            f"{run.ttft_s:>8.3f}{run.ttft_min_s:>8.3f}{run.ttft_max_s:>8.3f}  {increase:<28}{run.cpu_s:>8.3f}"
            f"{run.load_s:>8.3f}{run.stall_s:>7.3f}{run.kl_to_as_computed:>9.1e}"
        )
    echo("")


def main(
    kv_dtypes: Annotated[str, typer.Option(help="Comma-separated: int8, fp8.")] = "int8,fp8",
    questions: Annotated[int, typer.Option(help="Of the demo model; 0 leaves it out.")] = 210,
    context_tokens: Annotated[int, typer.Option(help="Of their prefix and chunks, about.")] = 256,
    shape: Annotated[str, typer.Option(help="Random weights for bytes and times; '' for none.")] = "llama-200m",
    prompts: Annotated[int, typer.Option(help="Of the shape, for what rounding does to the first token; slow.")] = 0,
    dtypes: Annotated[str, typer.Option(help="That the shape is timed in.")] = "float32",
    chunks: int = 6,
    chunk_tokens: int = 512,
    question_tokens: int = 32,
    ratio: float = 0.15,
    rule: str = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs per store and mode; 0 for none.")] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default is torch's choice.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file, data/results/kv-dtypes.json; - for none.")] = None,
    seed: int = 0,
) -> None:
    """KV stored as computed, as int8 and as fp8: bytes, TTFT from disk, and what rounding does to the first token.

    Four bits are measured beside them, but cannot be stored.
    """
    use_threads(threads)
    quiet_libraries()
    config = DtypesConfig(
        kv_dtypes=tuple(split_names(kv_dtypes)),
        num_questions=questions,
        context_tokens=context_tokens,
        shape=shape or None,
        num_prompts=prompts,
        dtypes=tuple(split_names(dtypes)),
        num_chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        rule=rule,
        repeats=repeats,
        threads=threads,
        seed=seed,
    )
    bench_dtypes(config, out, lambda line: err.print(line, markup=False))


if __name__ == "__main__":
    typer.run(main)
