"""Exactness, time to first token, loading, decoding and kernel launches on a GPU, in one command of 8 minutes at most.

    python -m benchmarks.gpu --out data/results/gpu-h100.json           # on the first GPU, models of random weights
    python -m benchmarks.gpu --device cpu                               # tiny shapes, to test the command itself
    python -m benchmarks.gpu --parts ttft --tokens 4096,8192

Each part runs in a separate process, within its own time. A part that fails or takes too long does not stop the
others, and the result says why. Weights are drawn on the device and nothing is downloaded. Times are medians of
requests taken in turns after a warm-up (`ragblend bench ttft`). `predicted` is what `benchmarks.hardware_model`
expects. Read `PARTS` first.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import multiprocessing
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import batch_decode, hardware_model
from benchmarks.results import OutOption, split_counts, write_result
from ragblend.cli.options import split_names
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries
from ragblend.engine.generation import PrefillResult
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import find_device
from ragblend.errors import RagblendError, UsageError
from ragblend.lab.bench.common.configs import TtftConfig
from ragblend.lab.bench.common.shapes import SHAPES, find_dtype
from ragblend.lab.bench.common.workloads import (
    engine_for,
    make_engine,
    make_prompts,
    random_model,
)
from ragblend.lab.bench.ttft import run_ttft
from ragblend.lab.engines import NO_LIMIT_BYTES
from ragblend.lab.hardware import GPUS
from ragblend.options import Mode
from ragblend.prompt.types import Chunk, Prompt

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")
"""Model families, each with another kind of attention: plain, biases, norms, soft caps, windows, sinks."""
DTYPES = ("float32", "bfloat16", "float16")
RATIOS = {"ask": 0.05, "cacheblend": 0.15}
"""Each rule at its default ratio."""
CPU_PATIENCE = 20
"""Factor of each part's time limit on a CPU, where the times do not matter."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Device, model shape and lengths of all parts except `exactness`, whose models are always small."""

    device: str
    shape: str
    dtype: str
    tokens: tuple[int, ...]  # of prompts
    chunk_tokens: int
    question_tokens: int
    answer_tokens: int
    repeats: int

    @contextmanager
    def engine(self, tokens: int, count: int = 1) -> Iterator[tuple[TransformersEngine, Sequence[Prompt]]]:
        """Open an engine with the chunks of `count` prompts of about `tokens` tokens in memory."""
        lengths = (tokens // self.chunk_tokens, self.chunk_tokens, self.question_tokens)
        chunks, prompts = make_prompts(*lengths, count, SHAPES[self.shape].vocab_size)
        store = MemoryStore(NO_LIMIT_BYTES)
        with engine_for(self.shape, store, find_dtype(self.dtype), device=self.device) as engine:
            for _ in engine.precompute_all(chunks):
                pass
            yield engine, prompts


GPU = Sizes("cuda", "llama-8b", "bfloat16", (4096, 8192, 16_384, 32_768), 512, 32, 64, 3)
CPU = Sizes("cpu", "llama-1m", "float32", (256, 512), 64, 16, 8, 2)


# -- exactness


def exactness(sizes: Sizes) -> list[dict[str, Any]]:
    """Compare each family in each dtype with the stock model's own forward, and float32 with the CPU."""
    found = []
    for family in FAMILIES:
        for dtype in DTYPES:
            try:
                found.append(_exactness_of(family, dtype, sizes.device))
            except Exception as error:
                found.append({"family": family, "dtype": dtype, "error": f"{type(error).__name__}: {error}"})
    return found


def _exactness_of(family: str, dtype: str, device: str) -> dict[str, Any]:
    """Compare one family in one dtype. An error is the largest difference of a logit, relative to the largest logit."""
    shape = replace(SHAPES["llama-1m"], family=family)
    model = random_model(shape, find_dtype(dtype))
    chunks, prompts = make_prompts(6, 64, 16, 2, shape.vocab_size)
    found: dict[str, Any] = {"family": family, "dtype": dtype}
    with closing(_stored(copy.deepcopy(model).to(device), family, chunks)) as engine:
        prefilled = [
            (_prefill(engine, prompt, "full"), _prefill(engine, prompt, "blend", "ask", 1.0)) for prompt in prompts
        ]
        found["ratio_one_error"] = max(_error(blended.logits, full.logits) for full, blended in prefilled)
        answers = [
            [
                engine.generate(prompt, mode=mode, rule="ask", recompute_ratio=1.0, max_tokens=16).token_ids
                for mode in ("full", "blend")
            ]
            for prompt in prompts
        ]
        found["same_answers"], found["num_answers"] = sum(full == blended for full, blended in answers), len(answers)
        if dtype == "float32" and device != "cpu":
            with closing(_stored(model, family, chunks)) as on_cpu:
                for rule in RATIOS:
                    pairs = [
                        [_prefill(each, prompt, "blend", rule, 0.15) for each in (engine, on_cpu)] for prompt in prompts
                    ]
                    found[f"{rule}_error_to_cpu"] = max(_error(mine.logits.cpu(), its.logits) for mine, its in pairs)
                    found[f"{rule}_same_tokens"] = sum(_recomputed(mine) == _recomputed(its) for mine, its in pairs)
    return found


def _stored(model: Any, family: str, chunks: Sequence[Chunk]) -> TransformersEngine:
    """Return an engine with `chunks` in memory. It has passed the exactness check of every loaded model."""
    engine = make_engine(model, MemoryStore(NO_LIMIT_BYTES), family, family)
    for chunk in chunks:
        engine.precompute(chunk)
    return engine


def _prefill(
    engine: TransformersEngine, prompt: Prompt, mode: Mode, rule: str = "auto", ratio: float = 1.0
) -> PrefillResult:
    return engine.prefill(engine.request(prompt, mode=mode, rule=rule, recompute_ratio=ratio))


def _recomputed(prefilled: PrefillResult) -> list[int]:
    assert prefilled.recomputed is not None
    return prefilled.recomputed.tolist()


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# -- time to first token


def ttft(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the four modes, `ask` at 5 % and `cacheblend` at 15 %, with KV in memory."""
    return [line for tokens in sizes.tokens for line in _ttft_of(sizes, tokens, "memory")]


def loading(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure reuse and blending with KV on the disk, after writing it there, so from the system's page cache."""
    return _ttft_of(sizes, sizes.tokens[min(1, len(sizes.tokens) - 1)], "disk")


def _ttft_of(sizes: Sizes, tokens: int, tier: str) -> list[dict[str, Any]]:
    lines = []
    for rule, ratio in RATIOS.items():
        gc.collect()  # the last engine's model: an engine is a cycle of references
        config = TtftConfig(
            shape=sizes.shape,
            dtype=sizes.dtype,
            device=sizes.device,
            num_chunks=tokens // sizes.chunk_tokens,
            chunk_tokens=sizes.chunk_tokens,
            question_tokens=sizes.question_tokens,
            modes=("full", "prefix", "reuse", "blend") if rule == "ask" else ("full", "blend"),
            rules=(rule,),
            ratio=ratio,
            repeats=sizes.repeats,
            tier=tier,
        )
        lines += [
            {"tokens": tokens, "tier": tier, **_figures(run), "predicted": _predicted(run, tokens, sizes)}
            for run in run_ttft(config)["runs"]
            if run["mode"] != "full" or rule == "ask"
        ]
    return lines


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    left_out = {
        "charged_budget",
        "charged_budget_32",
        "cpu_s",
        "speedup_cpu",
        "limit",
        "peak_rss_bytes",
        "select_share",
    }
    return {name: value for name, value in run.items() if name not in left_out}


def _predicted(run: dict[str, Any], tokens: int, sizes: Sizes) -> float | None:
    """Return the speedup that the hardware model predicts without the host; None if it has no data of GPU or model."""
    if run["mode"] != "blend" or sizes.device == "cpu" or sizes.shape != "llama-8b":
        return None
    words = re.split("[ -]", torch.cuda.get_device_name(sizes.device))
    known = next((gpu for gpu in GPUS if gpu in words), None)
    if known is None:
        return None
    line = hardware_model.estimate(known, tokens, run["ratio"], sizes.question_tokens, 0.6)
    return line.full_s / line.together_s


# -- copies to the device


def copies(sizes: Sizes) -> dict[str, float]:
    """Measure copies in bytes per second: into pinned memory, and from pinned and pageable memory to the device."""
    pageable = torch.randn(32 << 20, dtype=torch.float32)  # 128 MiB
    if sizes.device == "cpu":
        return {"copy_bytes_per_s": _bytes_per_s(pageable, lambda: pageable.clone(), sizes.device)}
    pinned, there = pageable.pin_memory(), pageable.to(sizes.device)
    return {
        "allocate_and_pin_bytes_per_s": _bytes_per_s(pageable, lambda: pageable.pin_memory(), sizes.device),
        "pin_into_kept_buffer_bytes_per_s": _bytes_per_s(pageable, lambda: pinned.copy_(pageable), sizes.device),
        "pinned_to_device_bytes_per_s": _bytes_per_s(
            pageable, lambda: there.copy_(pinned, non_blocking=True), sizes.device
        ),
        "pageable_to_device_bytes_per_s": _bytes_per_s(pageable, lambda: there.copy_(pageable), sizes.device),
    }


def _bytes_per_s(tensor: Tensor, run: Callable[[], Any], device: str) -> float:
    return tensor.nbytes / _median_seconds(run, device, 5)


def _median_seconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):  # the first is the warm-up
        start_s = perf_counter()
        run()
        _synchronize(device)
        taken.append(perf_counter() - start_s)
    return median(taken[1:])


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


# -- decoding


def decode(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure decoding in a batch and one answer at a time, over blended prompts."""
    with sizes.engine(sizes.tokens[0], count=8) as (engine, prompts):
        engine.layers.model.generation_config.eos_token_id = None
        runs = batch_decode.measure(engine, prompts, (8,), sizes.answer_tokens, 1, print_line)
        return [asdict(run) for run in runs]


# -- launches


class Case(NamedTuple):
    """Mode, rule and ratio of a prefill."""

    mode: Mode
    rule: str
    ratio: float

    def __str__(self) -> str:
        return self.mode if self.mode != "blend" else f"{self.rule} {self.ratio:.0%}"


CASES = (Case("full", "auto", 0.0), Case("reuse", "auto", 0.0), *(Case("blend", *each) for each in RATIOS.items()))


def launches(sizes: Sizes) -> list[dict[str, Any]]:
    """Count the launches of a prefill: kernels and copies on a GPU, operations other than views on a CPU."""
    lines = []
    for tokens in sizes.tokens[:1] if sizes.device == "cpu" else sizes.tokens[:2]:
        gc.collect()
        with sizes.engine(tokens) as (engine, prompts):
            for case in CASES:
                prefill = _prepared(engine, prompts[0], case)
                seconds = _median_seconds(prefill, sizes.device, 3)
                counted = _count_operations(prefill) if sizes.device == "cpu" else _profile(prefill)
                per_layer = counted["launches"] / engine.layers.num_layers
                lines.append(
                    {"tokens": tokens, "case": str(case), "seconds": seconds, "per_layer": per_layer, **counted}
                )
    return lines


def _prepared(engine: TransformersEngine, prompt: Prompt, case: Case) -> Callable[[], Any]:
    """Return a prefill that runs on the caller's thread, where it can be profiled."""
    request = engine.request(prompt, mode=case.mode, rule=case.rule, recompute_ratio=case.ratio)
    return lambda: engine.prepare_prefill(request)()


class _OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of this thread's operations, views excluded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _count_operations(run: Callable[[], Any]) -> dict[str, Any]:
    with _OperationCounter() as counter:
        run()
    return {"launches": counter.counts.total(), "by_name": dict(counter.counts.most_common(12))}


def _profile(run: Callable[[], Any]) -> dict[str, Any]:
    """Return the launches of all threads, the seconds of all kernels, and the slowest kernels and host operations."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    averages = profile.key_averages()
    started = Counter(
        {
            each.key: each.count
            for each in averages
            if each.key.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset"))
        }
    )
    on_device = [each for each in averages if str(each.device_type) == "DeviceType.CUDA"]
    kernels = Counter({each.key[:90]: round(each.self_device_time_total) for each in on_device})
    host = Counter({each.key: round(each.self_cpu_time_total) for each in averages})
    synchronisations = sum(each.count for each in averages if "Synchronize" in each.key)
    return {
        "launches": started.total(),
        "synchronisations": synchronisations,
        "device_busy_s": kernels.total() / 1e6,
        "launched": dict(started.most_common()),
        "kernels_us": dict(kernels.most_common(14)),
        "host_us": dict(host.most_common(14)),
    }


# -- vLLM


def vllm(sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the four modes inside vLLM. Compilation is disabled, because it takes a minute."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vllm is not installed; to measure it, run: pip install 'ragblend[vllm]'")
    shape = "llama-1b" if sizes.device != "cpu" else "llama-1m"
    config = TtftConfig(
        shape=shape,
        dtype=sizes.dtype,
        backend="vllm",
        vllm_options={"enforce_eager": True},
        rules=("ask",),
        ratio=RATIOS["ask"],
    )
    return [_figures(run) for run in run_ttft(config)["runs"]]


class Part(NamedTuple):
    """Function of a part, and the time limit of its process in seconds."""

    measure: Callable[[Sizes], Any]
    limit_s: float


PARTS: Mapping[str, Part] = {
    "exactness": Part(exactness, 75),
    "copies": Part(copies, 20),
    "ttft": Part(ttft, 140),
    "loading": Part(loading, 50),
    "launches": Part(launches, 55),
    "decode": Part(decode, 50),
    "vllm": Part(vllm, 90),
}


def _run_part(name: str, sizes: Sizes, path: Path) -> None:
    """Run one part in this process. Write its result or its error to `path`."""
    quiet_libraries()
    try:
        found = {"found": PARTS[name].measure(sizes)}
    except RagblendError as error:
        found = {"error": str(error)}
    except Exception:
        found = {"error": traceback.format_exc()}
    path.write_text(json.dumps(found))


def run_part(name: str, sizes: Sizes) -> dict[str, Any]:
    """Run a part in a separate process, killed at its time limit. Return its result or `error`, and its seconds."""
    with tempfile.TemporaryDirectory() as directory:
        path, start_s = Path(directory) / "found.json", perf_counter()
        process = multiprocessing.get_context("forkserver").Process(target=_run_part, args=(name, sizes, path))
        process.start()
        limit_s = PARTS[name].limit_s * (CPU_PATIENCE if sizes.device == "cpu" else 1)
        process.join(limit_s)
        if process.is_alive():
            process.kill()
            process.join()
        error = f"ended without a result: exit code {process.exitcode}, time limit {limit_s:g} s"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"error": error}
        return {**found, "seconds": round(perf_counter() - start_s, 1)}


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of a summary: errors, measured and predicted times to first token, launches, exactness."""
    lines = [
        f"{name}: {part['seconds']} s{', FAILED: ' + part['error'] if 'error' in part else ''}"
        for name, part in results.items()
    ]
    found = {name: part["found"] for name, part in results.items() if "found" in part}
    if "ttft" in found:
        lines.append("tokens   tier    mode    rule          ratio   TTFT ms   speedup  predicted  stall ms")
    for run in (*found.get("ttft", ()), *found.get("loading", ())):
        predicted = f"{run['predicted']:9.1f}x" if run["predicted"] is not None else " " * 10
        lines.append(
            f"{run['tokens']:6}   {run['tier']:7} {run['mode']:7} {run['rule']:12} {run['ratio']:6.2f}"
            f"{1e3 * run['ttft_s']:10.1f}{run['speedup']:9.2f}x {predicted}{1e3 * run['stall_s']:10.1f}"
        )
    lines += [
        f"{each['tokens']:6}   {each['case']:16} {each['per_layer']:8.1f} launches a layer, "
        f"{1e3 * each['seconds']:.1f} ms"
        for each in found.get("launches", ())
    ]
    for each in found.get("exactness", ()):
        lines.append(
            "   ".join(
                f"{name} {value:.1e}" if isinstance(value, float) else f"{name} {value}" for name, value in each.items()
            )
        )
    return lines


def main(
    device: Annotated[str, typer.Option(help="Device: auto, cuda, cuda:1, or cpu for tiny shapes.")] = "auto",
    parts: Annotated[str, typer.Option(help="Parts to run, comma-separated. Default: all.")] = ",".join(PARTS),
    tokens: Annotated[str | None, typer.Option(help="Tokens of the prompts, comma-separated.")] = None,
    out: OutOption = None,
) -> None:
    """Run the parts, print a table and write the result."""
    quiet_libraries()
    place = find_device(device)
    sizes = CPU if place.type == "cpu" else replace(GPU, device=str(place))
    if tokens is not None:
        sizes = replace(sizes, tokens=tuple(split_counts(tokens)))
    names = split_names(parts)
    if unknown := [name for name in names if name not in PARTS]:
        raise UsageError(f"part is {unknown[0]!r}; choose from {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    for name in names:
        print_line(f"{name} ...")
        results[name] = run_part(name, sizes)
        if out is not None:  # after every part, in case the command is interrupted
            _write(results, sizes, out)
    for line in table_lines(results):
        print_line(line)
    if out is None:
        _write(results, sizes, out)


def _write(results: Mapping[str, Any], sizes: Sizes, out: Path | None) -> None:
    write_result({"command": "benchmarks.gpu", "config": asdict(sizes), "parts": results}, out, sizes.device)


if __name__ == "__main__":
    typer.run(main)
