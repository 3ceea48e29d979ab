"""Where a blended request's time goes on a GPU: kernels, copies, waits of the host, and a pass without the host.

Parts of `benchmarks.gpu`, which runs each in a separate process. `profile` measures requests as the engine runs them,
with Triton's kernels and by torch alone. `layers` replays a pass as a CUDA graph, which shows what starting its kernels
costs. Everything also runs on a CPU with tiny shapes, where the times do not matter. Read `profile` first.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.operations import PACKAGE_DIR, DeviceLooks, Operations, kernels
from ragblend.engine.fusion.attention import attend_rows
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.vllm.engine import VllmEngine
from ragblend.errors import RagblendError
from ragblend.ingestion.report import ignore_progress
from ragblend.lab.bench.common.shapes import SHAPES, find_dtype
from ragblend.lab.bench.common.workloads import engine_for, make_prompts, precompute_chunks, random_model, vocab_size
from ragblend.lab.engines import NO_LIMIT_BYTES
from ragblend.lab.tables import Facts
from ragblend.options import Mode
from ragblend.prompt.types import Prompt

PROFILED = slice(1, None, 2)  # of the lengths: 4,096 and 16,384 of 2,048 to 32,768 tokens
SHARES = (0.0, 0.05)  # of a prompt's tokens, beside the question, that a pass of `layers` and `attention` has


class Case(NamedTuple):
    """Mode, rule and ratio of a request."""

    mode: Mode
    rule: str
    ratio: float

    def __str__(self) -> str:
        return self.mode if self.mode != "blend" else f"{self.rule} {self.ratio:.0%}"


RATIOS = {"ask": 0.05, "cacheblend": 0.15}
"""Each rule at its default ratio."""
CASES = (Case("full", "auto", 0.0), Case("reuse", "auto", 0.0), *(Case("blend", *each) for each in RATIOS.items()))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Device, model shapes and lengths of all parts except `exactness`, whose models are always small."""

    device: str
    shape: str  # in transformers
    vllm_shapes: tuple[str, str]  # the smaller one, and the larger one
    dtype: str
    tokens: tuple[int, ...]  # of prompts, ascending
    chunk_tokens: int
    question_tokens: int
    answer_tokens: int
    repeats: int
    end_s: float = float("inf")  # by `time.monotonic`: when the part that runs must end

    def lengths(self, part: slice = slice(None)) -> Iterator[int]:
        """Yield the lengths of prompts, shortest first.

        Raises RagblendError before a length for which less time is left than twice that of the length before.
        """
        tokens = self.tokens[part] or self.tokens
        needed_s = 0.0
        for index, each in enumerate(tokens):
            start_s = monotonic()
            left_s = max(0.0, self.end_s - start_s)
            if needed_s >= left_s:
                skipped = ", ".join(f"{more:,}" for more in tokens[index:])
                raise RagblendError(f"skipped {skipped} tokens, which need more than the {left_s:.0f} s that are left")
            yield each
            needed_s = 2 * (monotonic() - start_s)

    def open_engine(self, store: KVStore | None = None) -> TransformersEngine:
        """Return a transformers engine over `store`; None: a memory tier."""
        store = store or MemoryStore(NO_LIMIT_BYTES)
        return engine_for(self.shape, store, find_dtype(self.dtype), device=self.device)

    def store_chunks(self, engine: TransformersEngine | VllmEngine, tokens: int, count: int = 1) -> list[Prompt]:
        """Return `count` prompts of about `tokens` tokens, after storing their chunks, of which longer prompts have
        more."""
        chunks, prompts = make_prompts(*self.prompt_shape(tokens), count, vocab_size(engine))
        precompute_chunks(engine, chunks, ignore_progress)
        return prompts

    def prompt_shape(self, tokens: int) -> tuple[int, int, int]:
        """Return the number of chunks, and the tokens of a chunk and of the question, of about `tokens` tokens."""
        return tokens // self.chunk_tokens, self.chunk_tokens, self.question_tokens

    @property
    def is_gpu(self) -> bool:
        """Return True if the device is a GPU."""
        return self.device != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has computed everything."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def median_s(self, run: Callable[[], Any]) -> float:
        """Return the median seconds of `run`, after a warm-up."""
        taken = []
        for _ in range(self.repeats + 1):
            start_s = perf_counter()
            run()
            self.synchronize()
            taken.append(perf_counter() - start_s)
        return median(taken[1:])


# -- whole requests


def profile(sizes: Sizes) -> Iterator[Facts]:
    """Profile a prefill of each case, with Triton's kernels where they are, and by torch alone.

    On a CPU the kernels are counted, and neither run nor timed.
    """
    with sizes.open_engine() as engine:
        choices = _kernel_choices(engine, sizes)
        for tokens in sizes.lengths(PROFILED):
            (prompt,) = sizes.store_chunks(engine, tokens)
            render_s = sizes.median_s(partial(engine.renderer.render, prompt))
            for with_kernels in choices:
                engine.layers.uses_kernels = with_kernels
                for case in CASES:
                    prefill = _prepared(engine, prompt, case)
                    facts = {"tokens": tokens, "case": str(case), "kernels": with_kernels, "render_s": render_s}
                    if sizes.is_gpu:
                        stored = 0 if case.mode == "full" else tokens * engine.bytes_per_token
                        yield {**facts, **_gpu_profile(prefill, sizes, engine.layers.num_layers, stored)}
                    else:
                        yield {**facts, **_cpu_profile(prefill, engine.layers.num_layers)}


def _kernel_choices(engine: TransformersEngine, sizes: Sizes) -> tuple[bool, ...]:
    has_them = engine.layers.uses_kernels if sizes.is_gpu else kernels is not None
    return (True, False) if has_them else (False,)


def _prepared(engine: TransformersEngine, prompt: Prompt, case: Case) -> Callable[[], Any]:
    """Return a prefill that runs on the caller's thread, where it can be profiled."""
    request = engine.request(prompt, mode=case.mode, rule=case.rule, recompute_ratio=case.ratio)
    return lambda: engine.prepare_prefill(request)()


def _cpu_profile(run: Callable[[], Any], num_layers: int) -> Facts:
    with Operations():
        run()  # what is made once: the prefix, tables of rotations
    with Operations() as operations, DeviceLooks() as looks:
        run()
    return {"per_layer": operations.num / num_layers, "host_waits": dict(looks.places)}


def _gpu_profile(run: Callable[[], Any], sizes: Sizes, num_layers: int, stored_bytes: int) -> Facts:
    """Return the seconds of a request, and of them those in which kernels and copies run, and none of both.

    Also what the host starts, of all threads; its waits by line of the package; and the slowest kernels and host
    operations. `stored_bytes`: what is copied to the device.
    """
    median_s = sizes.median_s(run)
    waits = _host_waits(run)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        run()
        sizes.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "copies": []}
    events = profiled.events() or ()
    for event in events:
        if str(event.device_type) == "DeviceType.CUDA":
            name = "copies" if "HtoD" in event.name else "kernels"
            spans[name].append((event.time_range.start, event.time_range.end))
    starts = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cuMemcpy", "cudaMemset")
    launched = Counter(event.name for event in events if event.name.startswith(starts))
    averages = profiled.key_averages()
    on_device = [each for each in averages if str(each.device_type) == "DeviceType.CUDA"]
    slowest = Counter({each.key[:90]: round(each.self_device_time_total) for each in on_device})
    host = Counter({each.key: round(each.self_cpu_time_total) for each in averages})
    copies_s, busy_s = union_s(spans["copies"]), union_s(spans["kernels"] + spans["copies"])
    return {
        "median_s": median_s,
        "per_layer": launched.total() / num_layers,
        "kernels_s": union_s(spans["kernels"]),
        "copies_s": copies_s,
        "copied_bytes_per_s": stored_bytes / copies_s if copies_s else None,
        "device_idle_s": median_s - busy_s,
        "launched": dict(launched.most_common()),
        "host_waits": waits,
        "kernels_us": dict(slowest.most_common(14)),
        "host_us": dict(host.most_common(14)),
    }


def union_s(spans_us: Sequence[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of some spans, in microseconds, lasts.

    >>> union_s([(0.0, 2.0), (1.0, 3.0), (7.0, 8.0)])
    4e-06
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans_us):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total / 1e6


def _host_waits(run: Callable[[], Any]) -> dict[str, int]:
    """Return how often the host waits for the GPU, by file and line of the package."""
    places: Counter[str] = Counter()

    def record(*_args: Any, **_options: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE_DIR):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            places[f"{frame.f_code.co_filename[len(PACKAGE_DIR) + 1 :]}:{frame.f_lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(places.most_common(40))


# -- one pass, and its attention


@torch.inference_mode()
def layers(sizes: Sizes) -> Iterator[Facts]:
    """Measure a pass of a few rows through all layers: started by the host, and replayed as a CUDA graph."""
    model = TransformersLayers(random_model(SHAPES[sizes.shape], find_dtype(sizes.dtype), 0, sizes.device))
    choices = (True, False) if model.uses_kernels else (False,)
    for tokens in sizes.lengths(PROFILED):
        fused = FusedKV.allocate(model.kv_shapes, tokens, model.like)
        for index in range(model.num_layers):
            fused.keys(index).normal_()
            fused.values(index).normal_()
        for rows in _pass_rows(sizes, tokens):
            hidden = torch.randn(len(rows), model.config.hidden_size, device=sizes.device, dtype=model.dtype)

            def run(hidden: Tensor = hidden, rows: Tensor = rows, fused: FusedKV = fused) -> Tensor:
                for index in range(model.num_layers):
                    hidden = model.run_layer(index, hidden, rows, fused)
                return hidden

            for with_kernels in choices:
                model.uses_kernels = with_kernels
                facts = {"tokens": tokens, "rows": len(rows), "kernels": with_kernels, "by_host_s": sizes.median_s(run)}
                yield {**facts, **(_as_graph(run, sizes) if sizes.is_gpu else {})}


def _as_graph(run: Callable[[], Tensor], sizes: Sizes) -> Facts:
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            run()
        sizes.synchronize()
        start_s = perf_counter()
        with torch.cuda.graph(graph):
            run()
        return {"capture_s": perf_counter() - start_s, "graph_s": sizes.median_s(graph.replay)}
    except Exception as error:  # what cannot be captured is a result
        return {"graph_error": f"{type(error).__name__}: {error}"[:300]}


def _pass_rows(sizes: Sizes, tokens: int) -> Iterator[Tensor]:
    """Yield positions on the device: the question's, and with them a share of the others, drawn at random."""
    first = tokens - sizes.question_tokens
    for share in SHARES:
        drawn = torch.randperm(first)[: round(share * tokens)].sort().values
        yield torch.cat((drawn, torch.arange(first, tokens))).to(sizes.device)


@torch.inference_mode()
def attention(sizes: Sizes) -> Iterator[Facts]:
    """Measure the attention of scattered rows in one layer, by torch and by Triton's kernel."""
    shape, dtype = SHAPES[sizes.shape], find_dtype(sizes.dtype)
    for tokens in sizes.lengths(PROFILED):
        for rows in _pass_rows(sizes, tokens):
            query = torch.randn(1, shape.num_heads, len(rows), shape.head_dim, device=sizes.device, dtype=dtype)
            size = (2, shape.num_kv_heads, tokens, shape.head_dim)
            kv = LayerKV(*torch.randn(size, device=sizes.device, dtype=dtype))

            def by_torch(query: Tensor = query, kv: LayerKV = kv, rows: Tensor = rows) -> Tensor:
                return attend_rows(query, kv.keys[None], kv.values[None], rows, None)

            facts = {"tokens": tokens, "rows": len(rows), "torch_s": sizes.median_s(by_torch)}
            if kernels is not None and (sizes.is_gpu or kernels.INTERPRETS):
                layer = kernels.PagedLayer.from_contiguous(kv)

                def by_kernel(query: Tensor = query, layer: Any = layer, rows: Tensor = rows) -> Tensor:
                    assert kernels is not None
                    found: Tensor = kernels.attend(query, layer, rows)
                    return found.transpose(1, 2)

                facts["kernel_s"] = sizes.median_s(by_kernel)
                facts["largest_difference"] = float((by_kernel() - by_torch()).abs().max())
            yield facts


# -- copies to the device


def copies(sizes: Sizes) -> Iterator[Facts]:
    """Measure copies to the device: from ordinary and page-locked memory, and of chunks in pieces of several sizes."""
    size = (64 << 20) if sizes.is_gpu else (1 << 20)  # 64 MiB: a chunk of 512 tokens of Llama 3.1 8B
    ordinary = [torch.randint(256, (size,), dtype=torch.uint8) for _ in range(8)]
    yield _copy_line("into page-locked memory", 8 * size, lambda: [_locked(each, sizes) for each in ordinary], sizes)
    chunks = [_locked(each, sizes) for each in ordinary]
    there = torch.empty(8, size, dtype=torch.uint8, device=sizes.device)
    for name, sources, pieces in (
        ("ordinary memory", ordinary, 1),
        ("whole chunks", chunks, 1),
        ("chunks in 4 pieces", chunks, 4),
        ("chunks in 64 pieces, as the loader copies layers", chunks, 64),
    ):

        def run(sources: list[Tensor] = sources, pieces: int = pieces) -> None:
            for part in range(pieces):
                span = slice(part * size // pieces, (part + 1) * size // pieces)
                torch._foreach_copy_([each[span] for each in there], [each[span] for each in sources], True)

        yield _copy_line(name, 8 * size, run, sizes)


def _locked(tensor: Tensor, sizes: Sizes) -> Tensor:
    return tensor.pin_memory() if sizes.is_gpu else tensor.clone()


def _copy_line(name: str, nbytes: int, run: Callable[[], Any], sizes: Sizes) -> Facts:
    return {"copied": name, "bytes_per_s": nbytes / sizes.median_s(run)}
