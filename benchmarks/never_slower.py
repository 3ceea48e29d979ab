"""Time to first token of requests that name no ratio, beside full prefill: no median may be above 1.05 times.

    python -m benchmarks.never_slower --out FILE.json
    .venv-vllm/bin/python -m benchmarks.never_slower --engine vllm --out FILE.json

The second command adds vLLM's runs to the file. A model of random weights, prompts of 200 to 4,000 tokens whose chunks
are all stored, and four machines: KV in memory, KV on the disk, a disk that takes ten times as long as full prefill,
and a host that waits in each operation of the model. Each starts with an empty store, so the engine measures the
machine itself, as a user's does. A request and a full prefill take turns on the same prompt, and each time is a
stopwatch around the call for one token. Read `measure_machine` first.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.results import OutOption, split_counts, write_result
from ragblend import load_engine
from ragblend.cli.printing import print_notice
from ragblend.engine.loop import EngineLoop
from ragblend.engine.report import BlendReport
from ragblend.engine.store.format.chunk_file import DiskKV
from ragblend.engine.tuning import brief_profile
from ragblend.lab.bench.common.configs import PREFIX_TOKENS
from ragblend.lab.bench.common.shapes import find_shape
from ragblend.lab.bench.common.workloads import make_prompts, save_checkpoint, torch_threads
from ragblend.prompt.types import Prompt

GOAL = 1.05
"""Largest TTFT of a request that names no ratio, as a multiple of full prefill's: the median of the pairs."""
MACHINES = ("memory", "disk", "slow-disk", "waiting-host")
QUESTION_TOKENS, CHUNK_TOKENS = 32, 500
SLOWDOWN = 10.0
"""Time to load a prompt from the slow disk, in times of its full prefill."""
WAIT_S = 100e-6
"""Time that the waiting host waits in each operation."""


class WaitingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations of the thread that has entered it start WAIT_S later."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        end_s = perf_counter() + WAIT_S
        while perf_counter() < end_s:
            pass
        return func(*args, **(kwargs or {}))


@contextmanager
def waiting_host(engine: str) -> Iterator[None]:
    """Let every operation wait: of this thread, in which vLLM starts, and of the threads that run models."""
    from ragblend.engine.vllm.engine import _EngineLoop

    owner, name = (EngineLoop, "_run") if engine == "transformers" else (_EngineLoop, "run")
    run = getattr(owner, name)

    def waiting(self: Any) -> None:
        with WaitingMode():  # type: ignore[no-untyped-call]
            run(self)

    setattr(owner, name, waiting)
    try:
        with WaitingMode() if engine == "vllm" else nullcontext():  # type: ignore[no-untyped-call]
            yield
    finally:
        setattr(owner, name, run)


@contextmanager
def slow_disk(bytes_per_s: float) -> Iterator[None]:
    """Let every read of a stored layer from a disk take as long as on a disk of this speed."""
    read = DiskKV.stored_layer

    def slowly(self: DiskKV, index: int) -> Any:
        start_s = perf_counter()
        layer = read(self, index)
        left_s = self.nbytes / self.header.num_layers / bytes_per_s - (perf_counter() - start_s)
        time.sleep(max(0.0, left_s))
        return layer

    DiskKV.stored_layer = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        DiskKV.stored_layer = read  # type: ignore[method-assign]


@contextmanager
def timed_measurements() -> Iterator[list[float]]:
    """Yield a list of the seconds that engines measure."""
    from ragblend.engine.transformers import measure as transformers_measure

    modules: list[Any] = [transformers_measure]
    try:
        from ragblend.engine.vllm.worker_side import measure as vllm_measure

        modules.append(vllm_measure)
    except ImportError:  # no vLLM here
        pass
    seconds: list[float] = []

    def measure(*args: Any, **options: Any) -> Any:
        start_s = perf_counter()
        try:
            return brief_profile.measure_briefly(*args, **options)
        finally:
            seconds.append(perf_counter() - start_s)

    for module in modules:
        module.measure_briefly = measure
    try:
        yield seconds
    finally:
        for module in modules:
            module.measure_briefly = brief_profile.measure_briefly


def prompts_of(num_tokens: int, vocab_size: int, count: int) -> tuple[list[Any], list[Prompt]]:
    """Return the chunks and prompts of a length; the chunks have about CHUNK_TOKENS tokens."""
    num_chunks = max(1, round(num_tokens / CHUNK_TOKENS))
    chunk_tokens = (num_tokens - PREFIX_TOKENS - QUESTION_TOKENS) // num_chunks
    return make_prompts(num_chunks, chunk_tokens, QUESTION_TOKENS, count, vocab_size, seed=num_tokens)


def time_request(engine: Any, prompt: Prompt, mode: str) -> tuple[float, BlendReport]:
    """Return the seconds of one request, by a stopwatch, and its report."""
    if hasattr(engine, "reset_prefix_cache"):
        engine.reset_prefix_cache()
    start_s = perf_counter()
    answer = engine.generate(prompt, mode=mode, max_tokens=1)
    return perf_counter() - start_s, answer.report


def measure_machine(
    engine: str, machine: str, model: Path, lengths: Sequence[int], repeats: int, slow_bytes_per_s: float
) -> list[dict[str, Any]]:
    """Return one run per length: times of requests and full prefills in pairs, on one machine."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    options: dict[str, Any] = {"auto_profile": True, "on_miss": "inline", "context": "none"}
    options["memory_gib"] = 8.0 if machine in ("memory", "waiting-host") else 0.0
    if engine == "vllm":
        options["vllm_options"] = {"max_model_len": max(lengths) + 256}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=model.parent))
        measured_s = stack.enter_context(timed_measurements())
        if machine == "slow-disk":
            stack.enter_context(slow_disk(slow_bytes_per_s))
        if machine == "waiting-host":
            stack.enter_context(waiting_host(engine))
        loaded: Any = stack.enter_context(load_engine(str(model), folder, backend=engine, **options))
        workload = {length: prompts_of(length, vocab_size, repeats) for length in lengths}
        for chunks, _ in workload.values():
            for chunk in chunks:
                loaded.precompute(chunk)
        first_s, _ = time_request(loaded, workload[lengths[0]][1][0], "blend")  # transformers measures now
        runs = []
        for length, (_, prompts) in workload.items():
            run = measure_pairs(partial(time_request, loaded), prompts)
            runs.append({"engine": engine, "machine": machine, "tokens": length, **run})
            print_notice(
                f"{engine} {machine} {length}: full {run['full_s']:.3f} s, request {run['request_s']:.3f} s, "
                f"{run['request_over_full']:.2f}x; {', '.join(sorted(set(run['modes'])))}; {run['decision']}"
            )
        for run in runs:
            run["measured_s"], run["first_request_s"] = sum(measured_s), first_s
            run["bytes_per_token"] = loaded.bytes_per_token
    return runs


def measure_pairs(
    timed: Callable[[Prompt, str], tuple[float, BlendReport]], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Return the times of requests that name no ratio and of full prefills, which take turns on the same prompts."""
    timed(prompts[0], "full")  # warm-up
    timed(prompts[0], "blend")
    pairs: list[dict[str, tuple[float, BlendReport]]] = []
    for number, prompt in enumerate(prompts):
        modes = ("full", "blend") if number % 2 else ("blend", "full")
        pairs.append({mode: timed(prompt, mode) for mode in modes})
    ratio = median(pair["blend"][0] / pair["full"][0] for pair in pairs)
    reports = [pair["blend"][1] for pair in pairs]
    return {
        "full_s": median(pair["full"][0] for pair in pairs),
        "request_s": median(pair["blend"][0] for pair in pairs),
        "request_over_full": ratio,
        "meets_goal": ratio <= GOAL,
        "modes": [report.mode for report in reports],
        "decision": reports[-1].refused_reason or reports[-1].decision,
    }


def main(
    engine: Annotated[str, typer.Option("--engine", help="transformers or vllm.")] = "transformers",
    shape: Annotated[str, typer.Option("--shape", help="Model of random weights.")] = "llama-50m",
    lengths: Annotated[str, typer.Option("--lengths", help="Tokens of the prompts.")] = "200,400,1000,2000,4000",
    machines: Annotated[str, typer.Option("--machines", help="Machines, comma-separated.")] = ",".join(MACHINES),
    repeats: Annotated[int, typer.Option("--repeats", help="Pairs at each length.")] = 5,
    out: OutOption = None,
) -> None:
    """Measure each machine, and write the result; runs of the other engine in the file stay."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    counts, start_s = split_counts(lengths), perf_counter()
    runs: list[dict[str, Any]] = []
    if out is not None and out.exists():
        runs = [run for run in json.loads(out.read_text())["runs"] if run["engine"] != engine]
    with torch_threads(1), tempfile.TemporaryDirectory(prefix="ragblend-never-slower-") as home:
        model = Path(home) / "model"
        save_checkpoint(find_shape(shape), model)
        slow_bytes_per_s = 1e6  # until the model's prefill was timed
        for machine in machines.split(","):
            made = measure_machine(engine, machine, model, counts, repeats, slow_bytes_per_s)
            longest = made[-1]
            if machine in ("memory", "disk"):
                slow_bytes_per_s = longest["tokens"] * longest["bytes_per_token"] / (SLOWDOWN * longest["full_s"])
            runs += made
    config = {"shape": shape, "lengths": counts, "repeats": repeats, "wait_s": WAIT_S, "slowdown": SLOWDOWN}
    print_notice(
        f"{perf_counter() - start_s:.0f} s in all; goal met in {sum(run['meets_goal'] for run in runs)} of "
        f"{len(runs)} runs"
    )
    write_result({"config": config, "goal": GOAL, "runs": runs}, out)


if __name__ == "__main__":
    typer.run(main)
