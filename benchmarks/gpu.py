"""Exactness, time to first token, profiles, loading and decoding on a GPU, and vLLM: one command of 8 minutes at most.

    python -m benchmarks.gpu --out gpu.json                    # on the first GPU, models of random weights
    python -m benchmarks.gpu --parts profile,ttft --tokens 4096,16384 --budget 120
    python -m benchmarks.gpu --device cpu                      # tiny shapes, to test the command itself

Each part runs in a separate process and has a part of the budget; what one does not need goes to those after it. A part
measures the shortest prompts first and skips those for which no time is left. One that fails or is stopped keeps what
it has measured, and the result says why; the file is written after each part. Weights are drawn and nothing is
downloaded; vLLM draws its weights itself, so entries of its stores fit no other engine. Times are medians of requests
taken in turns after a warm-up. `predicted` is what `ragblend plan` expects. Read `PARTS` first.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import multiprocessing
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks import batch_decode, gpu_profile
from benchmarks.gpu_profile import CASES, RATIOS, Sizes
from benchmarks.hardware_model import LLAMA_8B
from benchmarks.results import OutOption, split_counts, write_result
from ragblend.cli.options import split_names
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries
from ragblend.engine.fusion.rules import RULES
from ragblend.engine.generation import PrefillResult
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.open import GIB, open_store
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.model import find_device
from ragblend.engine.vllm.engine import VllmEngine
from ragblend.errors import RagblendError, UsageError
from ragblend.lab.bench.common.configs import PREFIX_TOKENS, ModeAndRule, TtftConfig
from ragblend.lab.bench.common.shapes import SHAPES, find_dtype
from ragblend.lab.bench.common.workloads import (
    make_engine,
    make_prompts,
    open_directory,
    random_model,
)
from ragblend.lab.bench.ttft import TtftSample, sample_ttft, summarize
from ragblend.lab.bench.ttft_vllm import open_vllm
from ragblend.lab.engines import NO_LIMIT_BYTES
from ragblend.lab.hardware import GPUS, blend_s, full_prefill_s
from ragblend.lab.tables import Column, Facts, format_table
from ragblend.options import Mode
from ragblend.prompt.types import Chunk, Prompt

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")
"""Model families, each with another kind of attention: plain, biases, norms, soft caps, windows, sinks."""
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
GPU = Sizes("cuda", "llama-8b", ("llama-1b", "llama-8b"), "bfloat16", LENGTHS, 512, 32, 64, 3)
CPU = Sizes("cpu", "llama-1m", ("llama-1m", "llama-1m"), "float32", (256, 512), 64, 16, 8, 2)
BUDGET_S = 450.0
"""Of all parts. The command takes some seconds more, for its own start."""
CPU_PATIENCE = 20
"""Factor of the budget on a CPU, where the times do not matter."""


# -- exactness


def exactness(sizes: Sizes) -> Iterator[Facts]:
    """Compare each family in each dtype with the stock model's own forward, and float32 with the CPU."""
    for family in FAMILIES:
        for dtype in DTYPES:
            try:
                yield _exactness_of(family, dtype, sizes.device)
            except Exception as error:
                yield {"family": family, "dtype": dtype, "error": f"{type(error).__name__}: {error}"}


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


def ttft(sizes: Sizes) -> Iterator[Facts]:
    """Measure the cases with KV in memory, in transformers."""
    with sizes.open_engine() as engine:
        yield from _ttft_lines(engine, sizes, sizes.shape, "memory")


def loading(sizes: Sizes) -> Iterator[Facts]:
    """Measure the cases with KV on the disk, after writing it there, so from the system's page cache."""
    middle = replace(sizes, tokens=(sizes.tokens[len(sizes.tokens) // 2],))
    with open_directory() as directory, sizes.open_engine(open_store(directory, memory_gib=0)) as engine:
        yield from _ttft_lines(engine, middle, sizes.shape, "disk")


def vllm(sizes: Sizes, which: int, *, is_compiled: bool) -> Iterator[Facts]:
    """Measure the cases inside vLLM, with weights that it draws itself. `which`: of the shapes, 0 the smaller one."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("vllm is not installed; to measure it, run: pip install 'ragblend[vllm]'")
    shape = sizes.vllm_shapes[which]
    options: Facts = {"load_format": "dummy", "enforce_eager": not is_compiled}
    if is_compiled:  # graphs of decoding and of a question's rows; those of other sizes take time and are not used
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 16, 32, 64]}
    num_chunks, chunk_tokens, question_tokens = sizes.prompt_shape(sizes.tokens[-1])
    config = TtftConfig(
        shape=shape,
        dtype=sizes.dtype,
        backend="vllm",
        num_chunks=num_chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        vllm_options=options,
    )
    with open_vllm(config, shape, num_prompts=2, memory_gib=NO_LIMIT_BYTES / GIB) as engine:
        yield from _ttft_lines(engine, sizes, shape, "memory")


def _ttft_lines(engine: TransformersEngine | VllmEngine, sizes: Sizes, shape: str, tier: str) -> Iterator[Facts]:
    """Measure all cases at each length, in turns. Full prefill's seconds and tokens per second are in each line."""
    for tokens in sizes.lengths():
        (prompt,) = sizes.store_chunks(engine, tokens)
        samples: dict[ModeAndRule, list[TtftSample]] = {ModeAndRule(case.mode, case.rule): [] for case in CASES}
        for number in range(sizes.repeats + 1):  # the first is the warm-up
            for case in CASES:
                taken = sample_ttft(engine, prompt, ModeAndRule(case.mode, case.rule), case.ratio)
                samples[ModeAndRule(case.mode, case.rule)] += [taken] if number else []
        runs = summarize(samples)
        full_s = runs[0]["ttft_s"]
        num_chunks, chunk_tokens, question_tokens = sizes.prompt_shape(tokens)
        num_tokens = PREFIX_TOKENS + num_chunks * chunk_tokens + question_tokens
        for run in runs:
            facts = {"tokens": tokens, "shape": shape, "tier": tier, **_figures(run)}
            yield {
                **facts, "full_s": full_s, "full_tokens_per_s": num_tokens / full_s,
                "predicted": _predicted(run, tokens, shape, sizes) if isinstance(engine, TransformersEngine) else None,
            }  # fmt: skip


def _figures(run: Facts) -> Facts:
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


def _predicted(run: Facts, tokens: int, shape: str, sizes: Sizes) -> float | None:
    """Return the speedup that `ragblend plan` predicts from memory; None if it has no data of the GPU or the model."""
    if run["mode"] == "full" or not sizes.is_gpu or shape != "llama-8b":
        return None
    words = re.split("[ -]", torch.cuda.get_device_name(sizes.device))
    name = next((gpu for gpu in GPUS if gpu in words), None)
    if name is None:
        return None
    rule, device = RULES.get(run["rule"], RULES["ask"]), GPUS[name]  # full reuse has none, and its ratio is 0
    blended_s = blend_s(LLAMA_8B, device, rule, tokens, sizes.question_tokens, run["ratio"])
    return full_prefill_s(LLAMA_8B, device, tokens) / blended_s


# -- decoding


def decode(sizes: Sizes) -> Iterator[Facts]:
    """Measure decoding in a batch and one answer at a time, over blended prompts."""
    with sizes.open_engine() as engine:
        prompts = sizes.store_chunks(engine, sizes.tokens[0], count=8)
        engine.layers.model.generation_config.eos_token_id = None
        for run in batch_decode.measure(engine, prompts, (8,), sizes.answer_tokens, 1, print_line):
            yield asdict(run)


# -- parts


class Part(NamedTuple):
    """Function of a part, which yields the lines of its result, and its seconds of the budget `BUDGET_S`."""

    measure: Callable[[Sizes], Iterator[Facts]]
    share_s: float


PARTS: Mapping[str, Part] = {
    "profile": Part(gpu_profile.profile, 65),
    "ttft": Part(ttft, 45),
    "vllm-small": Part(partial(vllm, which=0, is_compiled=False), 75),
    "vllm-large": Part(partial(vllm, which=1, is_compiled=False), 60),
    "vllm-small-compiled": Part(partial(vllm, which=0, is_compiled=True), 55),
    "vllm-large-compiled": Part(partial(vllm, which=1, is_compiled=True), 75),
    "layers": Part(gpu_profile.layers, 20),
    "attention": Part(gpu_profile.attention, 10),
    "copies": Part(gpu_profile.copies, 10),
    "exactness": Part(exactness, 20),
    "loading": Part(loading, 8),
    "decode": Part(decode, 7),
}
"""The parts in their order: what was never measured on a GPU is first."""


def _run_part(name: str, sizes: Sizes, path: Path) -> None:
    """Run one part in this process. Write its lines to `path` after each one, and its error."""
    quiet_libraries()
    result: Facts = {"found": []}
    try:
        for line in PARTS[name].measure(sizes):
            result["found"].append(line)
            _replace(path, result)
    except RagblendError as error:
        result["error"] = str(error)
    except Exception:
        result["error"] = traceback.format_exc()
    _replace(path, {**result, "ended": True})


def _replace(path: Path, result: Facts) -> None:
    """Write `result` to `path` in one step, because this process may be stopped at any time."""
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").replace(path)


CONTEXT = multiprocessing.get_context("forkserver")


def import_once() -> None:
    """Import what all parts need, which takes seconds, in the server that starts their processes."""
    CONTEXT.set_forkserver_preload(["benchmarks.gpu_profile"])
    process = CONTEXT.Process(target=quiet_libraries)
    process.start()
    process.join()


def run_part(name: str, sizes: Sizes, limit_s: float) -> Facts:
    """Run a part in a separate process, stopped after `limit_s`. Return its lines, its seconds, and its error, if any.

    Lines are written to the JSON "found", also those of a part that failed or was stopped.
    """
    if limit_s <= 0:
        return {"found": [], "error": "skipped, because no time is left", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as directory:
        path, start_s = Path(directory) / "found.json", monotonic()
        process = CONTEXT.Process(target=_run_part, args=(name, replace(sizes, end_s=start_s + limit_s), path))
        process.start()
        process.join(max(0.0, start_s + limit_s - monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        result: Facts = json.loads(path.read_text()) if path.exists() else {"found": []}
        if not result.pop("ended", False):
            result["error"] = f"ended early: exit code {process.exitcode}, time limit {limit_s:.0f} s"
        return {**result, "seconds": round(monotonic() - start_s, 1)}


def limit_s(names: Sequence[str], left_s: float) -> float:
    """Return the limit of the first of the parts `names` that still run, if `left_s` are left for all of them.

    >>> limit_s(["copies", "attention"], 60.0)
    30.0
    """
    return left_s * PARTS[names[0]].share_s / sum(PARTS[name].share_s for name in names)


TTFT_COLUMNS: tuple[Column, ...] = (
    ("tokens", "<8", "tokens"), ("shape", "<10", "shape"), ("tier", "<8", "tier"), ("mode", "<7", "mode"),
    ("rule", "<11", "rule"), ("TTFT ms", ">9.1f", lambda run: 1e3 * run["ttft_s"]), ("speedup", ">9.2fx", "speedup"),
    ("predicted", ">11.1fx", "predicted"), ("full ms", ">9.1f", lambda run: 1e3 * run["full_s"]),
    ("full tokens/s", ">15.0f", "full_tokens_per_s"), ("stall ms", ">10.1f", lambda run: 1e3 * run["stall_s"]),
)  # fmt: skip


def table_lines(results: Mapping[str, Facts]) -> list[str]:
    """Return the lines of a summary: each part's seconds and error, then its lines. Times to first token are tables."""
    lines = []
    for name, part in results.items():
        lines.append(f"{name}: {part['seconds']} s{', INCOMPLETE: ' + part['error'] if 'error' in part else ''}")
        if part["found"] and "ttft_s" in part["found"][0]:
            lines += format_table(TTFT_COLUMNS, part["found"])
            continue
        for each in part["found"]:
            short = {name: value for name, value in each.items() if not isinstance(value, dict)}
            lines.append(
                "   ".join(
                    f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in short.items()
                )
            )
    return lines


def main(
    device: Annotated[str, typer.Option(help="Device: auto, cuda, cuda:1, or cpu for tiny shapes.")] = "auto",
    parts: Annotated[str, typer.Option(help="Parts to run, comma-separated. Default: all.")] = ",".join(PARTS),
    tokens: Annotated[str | None, typer.Option(help="Tokens of the prompts, comma-separated.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds of all parts together; on a CPU 20 times as many.")] = BUDGET_S,
    out: OutOption = None,
) -> None:
    """Run the parts, print tables and write the result."""
    quiet_libraries()
    place = find_device(device)
    sizes = CPU if place.type == "cpu" else replace(GPU, device=str(place))
    if tokens is not None:
        sizes = replace(sizes, tokens=tuple(sorted(split_counts(tokens))))
    names = split_names(parts)
    if unknown := [name for name in names if name not in PARTS]:
        raise UsageError(f"part is {unknown[0]!r}; choose from {', '.join(PARTS)}")
    import_once()
    end_s = monotonic() + budget * (1 if sizes.is_gpu else CPU_PATIENCE)
    results: dict[str, Facts] = {}
    for number, name in enumerate(names):
        limit = limit_s(names[number:], end_s - monotonic())
        print_line(f"{name}, {limit:.0f} s at most ...")
        results[name] = run_part(name, sizes, limit)
        if out is not None:  # after every part, in case the command is interrupted
            _write(results, sizes, budget, out)
    for line in table_lines(results):
        print_line(line)
    if out is None:
        _write(results, sizes, budget, out)


def _write(results: Mapping[str, Facts], sizes: Sizes, budget: float, out: Path | None) -> None:
    config = {name: value for name, value in asdict(sizes).items() if name != "end_s"}
    write_result(
        {"command": "benchmarks.gpu", "config": {**config, "budget_s": budget}, "parts": results}, out, sizes.device
    )


if __name__ == "__main__":
    typer.run(main)
