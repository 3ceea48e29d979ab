"""KV stored as computed beside KV in eight bits: bytes, time to first token from disk, and what rounding does.

Two subjects. Questions over held-out stories for the demo model, where right and wrong mean something but chunks and
heads are small; and a real shape with random weights, where bytes and times are real but answers mean nothing. The
yardstick of both is the bf16 noise floor: how far full prefill in bfloat16 is from full prefill in float32, and how far
the same mode is from itself when all of it is computed in bfloat16.
Read `bench_dtypes` first.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

from ragblend.bench.hardware import card_lines, hardware_card
from ragblend.bench.quality_cases import make_items
from ragblend.bench.quality_runs import FULL, REUSE, Answer, Configuration, answer, kl, request_for
from ragblend.bench.ttft import threads
from ragblend.bench.workloads import (
    PREFIX_TOKENS,
    find_dtype,
    find_shape,
    make_prompts,
    random_model,
    synthetic_segmenter,
)
from ragblend.demo.evaluate import Setting
from ragblend.engine import load_engine, open_store
from ragblend.engine.chunk_file import encode_chunk
from ragblend.engine.generation import Request
from ragblend.engine.kv import KVHeader, LayerKV, MemoryKV, dtype_name, in_memory, stored_as
from ragblend.engine.protocols import KVStore
from ragblend.engine.quantize import CODE_DTYPES
from ragblend.engine.selection import DEFAULT_RATIO, check_ratio, find_rule
from ragblend.engine.store import MemoryStore, TieredStore
from ragblend.engine.transformers_engine import TransformersEngine
from ragblend.engine.transformers_layers import TransformersLayers
from ragblend.errors import UsageError
from ragblend.intervals import mean_interval

SCHEMA_VERSION = 1
OUT = Path("data/results/kv-dtypes.json")
NOWHERE = Path("-")
AUTO = "auto"  # as computed
_MEMORY_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class DtypesConfig:
    """What to compare with KV as computed. `num_questions` 0 leaves the demo model out, `shape` None the shape."""

    kv_dtypes: tuple[str, ...] = tuple(CODE_DTYPES)
    num_questions: int = 210
    shape: str | None = "llama-200m"
    dtypes: tuple[str, ...] = ("float32",)  # that the shape computes in; a CPU without bfloat16 emulates it, slowly
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
        for name in ("num_chunks", "chunk_tokens", "question_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")
        if self.num_questions < 0:
            raise UsageError(f"num_questions is {self.num_questions}; choose 0 (no demo model) or more")
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
class DtypeRun:
    """One storage dtype in one mode, means over the questions or medians over the repeats. KL in nats, None where not
    measured. Full prefill is that in float32; of a shape, that in `dtype`. `kl_increase` is over the same mode from KV
    as computed (the demo model's: in float32), with its 95 % bootstrap interval; `noise_floor` is
    KL(full prefill in float32 || in bfloat16) of the same prompts.
    """

    model: str
    dtype: str  # computed in
    kv_dtype: str  # stored as; "auto" as computed
    mode: str
    rule: str
    ratio: float
    num_samples: int
    first_token_kl: float  # KL(full || this)
    noise_floor: float | None
    kl_increase: float
    kl_increase_low: float | None = None
    kl_increase_high: float | None = None
    kl_to_as_computed: float = 0.0  # KL(the same from KV as computed || this)
    top1_agreement: float | None = None  # of the first token, with full prefill
    same_answer: float | None = None  # share of answers that are those from KV as computed, to the letter
    exact_match: float | None = None
    bytes_per_token: float | None = None  # of the chunks' files
    byte_share: float | None = None  # of the files' bytes as computed
    ttft_s: float | None = None  # lookup + load + fuse + first logits; from disk, page cache dropped
    ttft_min_s: float | None = None
    ttft_max_s: float | None = None
    cpu_s: float | None = None  # processor time of the same, the loader's thread included: what a busy machine spares
    load_s: float | None = None
    stall_s: float | None = None


def bench_dtypes(config: DtypesConfig, out: Path | None, echo: Callable[[str], None]) -> dict[str, Any]:
    """`ragblend bench dtypes`: card and tables to `echo`, JSON to `out`; returns the JSON object."""
    with threads(config.threads):
        card = hardware_card()
        for line in (*card_lines(card), ""):
            echo(line)
        sizes = measure_sizes(config, echo) if config.shape is not None else []
        runs = measure_answers(config, echo) if config.num_questions else []
        runs += measure_shape(config, echo) if config.shape is not None else []
    facts = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench dtypes",
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
    """One chunk of the shape in 32 and in 16 bits, as computed and in eight."""
    assert config.shape is not None
    shape, token_ids = find_shape(config.shape), tuple(range(config.chunk_tokens))
    generator, sizes = torch.Generator().manual_seed(config.seed), list[Size]()
    dims = (shape.num_kv_heads, config.chunk_tokens, shape.head_dim)
    drawn = [[torch.randn(dims, generator=generator) for _ in ("keys", "values")] for _ in range(shape.num_layers)]
    for name in ("float32", "bfloat16"):
        header = KVHeader("0" * 32, "0" * 32, (1,) * PREFIX_TOKENS, token_ids, shape.num_layers, name)
        kv = MemoryKV(header, tuple(LayerKV(*(tensor.to(find_dtype(name)) for tensor in layer)) for layer in drawn))
        whole = len(encode_chunk(kv))
        for kv_dtype in config.stored:
            nbytes = len(encode_chunk(stored_as(kv, kv_dtype)))
            sizes.append(Size(name, kv_dtype, nbytes / config.chunk_tokens, nbytes / whole))
    echo(f"{config.shape}, a chunk of {config.chunk_tokens} tokens: bytes per token, share of KV as computed")
    for size in sizes:
        echo(f"{size.dtype:<10}{size.kv_dtype:<7}{size.bytes_per_token:>9.0f}{size.share:>7.3f}")
    echo("")
    return sizes


# -- answers of the demo model


def measure_answers(config: DtypesConfig, echo: Callable[[str], None]) -> list[DtypeRun]:
    """The same questions from each store, in float32, beside full prefill in float32 and in bfloat16."""
    with (
        load_engine("demo", MemoryStore(_MEMORY_BYTES), dtype="float32", on_miss="inline") as base,
        load_engine("demo", MemoryStore(_MEMORY_BYTES), dtype="bfloat16", on_miss="inline") as rounded,
    ):
        stores = {kv_dtype: TieredStore(MemoryStore(_MEMORY_BYTES), kv_dtype=kv_dtype) for kv_dtype in config.stored}
        engines = {("float32", kv_dtype): _over(base, store) for kv_dtype, store in stores.items()}
        engines["bfloat16", AUTO] = rounded
        found: dict[tuple[Configuration, str, str], list[Answer]] = {}
        fulls, floor, golds = list[Answer](), list[float](), list[str]()
        for item in make_items(base, Setting(config.num_chunks, 256), config.num_questions, 0.0, config.seed):
            request = request_for(base, item.prompt)
            golds.append(item.answer)
            fulls.append(answer(base, request, FULL))
            floor.append(kl(fulls[-1].log_probs, answer(rounded, request, FULL).log_probs))
            for dtypes, engine in engines.items():
                for chunk in item.prompt.chunks:
                    engine.precompute(chunk)
                for configuration in config.configurations:
                    found.setdefault((configuration, *dtypes), []).append(answer(engine, request, configuration))
        runs = [
            _answers_run(case, taken, found[case[0], "float32", AUTO], fulls, floor, golds)
            for case, taken in sorted(found.items(), key=lambda item: item[0][0].mode != "reuse")
        ]
    _show(f"demo model, {len(fulls)} questions over {config.num_chunks} chunks; mean KL in nats", runs, echo)
    return runs


def _answers_run(
    case: tuple[Configuration, str, str],
    taken: Sequence[Answer],
    plain: Sequence[Answer],
    fulls: Sequence[Answer],
    floor: Sequence[float],
    golds: Sequence[str],
) -> DtypeRun:
    far = [kl(full.log_probs, each.log_probs) for full, each in zip(fulls, taken, strict=True)]
    increase = [
        each - kl(full.log_probs, as_computed.log_probs)
        for each, full, as_computed in zip(far, fulls, plain, strict=True)
    ]
    low, high = mean_interval(increase)
    pairs = list(zip(taken, plain, strict=True))
    configuration, dtype, kv_dtype = case
    return DtypeRun(
        "demo",
        dtype,
        kv_dtype,
        configuration.mode,
        configuration.rule,
        configuration.ratio,
        len(taken),
        fmean(far),
        fmean(floor),
        fmean(increase),
        low,
        high,
        fmean(kl(as_computed.log_probs, each.log_probs) for each, as_computed in pairs),
        fmean(_top1(full.log_probs) == _top1(each.log_probs) for full, each in zip(fulls, taken, strict=True)),
        fmean((each.text, each.ended) == (as_computed.text, as_computed.ended) for each, as_computed in pairs),
        fmean(each.ended and each.text == gold for each, gold in zip(taken, golds, strict=True)),
    )


# -- a shape: bytes, times, and logits of random weights


@dataclass(slots=True)
class _Timed:
    """Prefills of one store in one mode."""

    log_probs: Tensor
    ttft_s: list[float]
    cpu_s: list[float]
    load_s: list[float]
    stall_s: list[float]


def measure_shape(config: DtypesConfig, echo: Callable[[str], None]) -> list[DtypeRun]:
    """The same prompt from each store on disk, in each dtype, taking turns; files are dropped from the page cache."""
    assert config.shape is not None
    shape = find_shape(config.shape)
    model = random_model(shape, torch.float32, config.seed)
    sizes = (config.num_chunks, config.chunk_tokens, config.question_tokens)
    work = make_prompts(*sizes, num_prompts=1, vocab_size=shape.vocab_size, seed=config.seed)
    fulls: dict[str, Tensor] = {}
    runs: list[DtypeRun] = []
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
            fulls[dtype] = _log_probs(base.prefill(request).logits)
            engines = {name: _over(base, store) for name, store in stores.items()}
            timed = _time_all(config, engines, request, Path(directory))
            num_bytes = {name: store.nbytes() for name, store in stores.items()}
            runs += _shape_runs(config, dtype, timed, num_bytes, fulls)
            title = f"{config.shape} {dtype}, {config.num_chunks} x {config.chunk_tokens} tokens from disk; medians"
            _show(f"{title} of {config.repeats}", [run for run in runs if run.dtype == dtype], echo)
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


def _shape_runs(
    config: DtypesConfig,
    dtype: str,
    timed: Mapping[tuple[Configuration, str], _Timed],
    num_bytes: Mapping[str, int],
    fulls: Mapping[str, Tensor],
) -> list[DtypeRun]:
    num_tokens = config.num_chunks * config.chunk_tokens
    floor = kl(fulls["float32"], fulls["bfloat16"]) if len(fulls) == 2 else None
    runs = []
    for (configuration, kv_dtype), taken in timed.items():
        far = kl(fulls[dtype], taken.log_probs)
        plain = timed[configuration, AUTO].log_probs
        runs.append(
            DtypeRun(
                config.shape or "",
                dtype,
                kv_dtype,
                configuration.mode,
                configuration.rule,
                configuration.ratio,
                len(taken.ttft_s),
                far,
                floor,
                far - kl(fulls[dtype], plain),
                kl_to_as_computed=kl(plain, taken.log_probs),
                top1_agreement=float(_top1(fulls[dtype]) == _top1(taken.log_probs)),
                bytes_per_token=num_bytes[kv_dtype] / num_tokens,
                byte_share=num_bytes[kv_dtype] / num_bytes[AUTO],
                ttft_s=statistics.median(taken.ttft_s),
                ttft_min_s=min(taken.ttft_s),
                ttft_max_s=max(taken.ttft_s),
                cpu_s=statistics.median(taken.cpu_s),
                load_s=statistics.median(taken.load_s),
                stall_s=statistics.median(taken.stall_s),
            )
        )
    return runs


# -- shared


def _over(base: TransformersEngine, store: KVStore) -> TransformersEngine:
    """The same model over another store."""
    return TransformersEngine(
        base.layers,
        base.segmenter,
        store,
        name=base.name,
        fingerprint=base.fingerprint,
        on_miss="inline",
        check=False,
    )


def _log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _top1(log_probs: Tensor) -> int:
    return int(log_probs.argmax())


def _show(title: str, runs: Sequence[DtypeRun], echo: Callable[[str], None]) -> None:
    """One line per run; what was not measured is a dash."""
    echo(title)
    echo(
        f"{'mode':<7}{'rule':<13}{'computed':<10}{'stored':<7}{'B/token':>8}{'share':>7}{'TTFT s':>8}{'min':>8}"
        f"{'cpu s':>8}{'load s':>8}{'stall':>7}{'KL':>10}{'increase':>10}{'floor':>9}{'to auto':>9}"
        f"{'top-1':>7}{'same':>7}{'exact':>7}"
    )
    for run in runs:
        echo(
            f"{run.mode:<7}{run.rule:<13}{run.dtype:<10}{run.kv_dtype:<7}"
            f"{_cell(run.bytes_per_token, 8, 0)}{_cell(run.byte_share, 7)}"
            f"{_cell(run.ttft_s, 8)}{_cell(run.ttft_min_s, 8)}{_cell(run.cpu_s, 8)}{_cell(run.load_s, 8)}"
            f"{_cell(run.stall_s, 7)}"
            f"{run.first_token_kl:>10.2e}{run.kl_increase:>10.1e}{_cell(run.noise_floor, 9, kind='e')}"
            f"{run.kl_to_as_computed:>9.1e}{_cell(run.top1_agreement, 7)}{_cell(run.same_answer, 7)}"
            f"{_cell(run.exact_match, 7)}"
        )
    echo("")


def _cell(value: float | None, width: int, digits: int = 3, kind: str = "f") -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{1 if kind == 'e' else digits}{kind}}"
