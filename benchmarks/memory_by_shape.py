"""Whether vLLM's process grows by requests, or by sizes of requests that it has not met: with ragblend and without.

    python -m benchmarks.memory_by_shape --out data/results/memory-by-shape.json

On a CPU, what multiplies matrices keeps something for each number of rows. So two rounds of prompts that are new are
sent, and then the first round once more: what grows by requests grows in all three, what grows by sizes not in the
last. vLLM as it is (`stock`) does the first column, with the connector and blends the second; each in a process of its
own. Memory is what malloc has handed out and not got back (mallinfo2), which no fragmentation blurs. Linux with glibc.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.bench.ttft_vllm import vllm_card
from ragblend.cli.printing import err

SCHEMA_VERSION = 1
ROUNDS = (0, 1, 0)  # seeds of the prompts
AT_ONCE, ANSWER_TOKENS = 16, 8
OPTIONS = {"max_model_len": 512, "max_num_seqs": AT_ONCE, "block_size": 32, "kv_cache_memory_bytes": 8 << 20}
_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def used_mib() -> float:
    """What this process has allocated, by malloc's own count."""
    gc.collect()
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _MallInfo
    found = mallinfo2()
    return float(found.uordblks + found.hblkhd) / (1 << 20)


def grown(rounds: Sequence[Callable[[], None]]) -> list[float]:
    """MiB in use before any round, and after each."""
    used = [used_mib()]
    for run in rounds:
        run()
        used.append(used_mib())
    return [round(each, 1) for each in used]


def stock(num_requests: int) -> list[float]:
    """vLLM without ragblend, over prompts of 60 to 260 random tokens."""
    from vllm import LLM, SamplingParams

    from ragblend.demo import WEIGHTS

    llm = LLM(
        str(WEIGHTS), dtype="float32", enforce_eager=True, enable_prefix_caching=False,
        disable_log_stats=True, **OPTIONS,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def round_of(seed: int) -> None:
        drawn = random.Random(seed)
        prompts = [[drawn.randrange(3, 300) for _ in range(drawn.randint(60, 260))] for _ in range(num_requests)]
        for first in range(0, num_requests, AT_ONCE):
            some = prompts[first : first + AT_ONCE]
            llm.generate([{"prompt_token_ids": ids} for ids in some], sampling, use_tqdm=False)

    return grown([lambda seed=seed: round_of(seed) for seed in ROUNDS])  # type: ignore[misc]


def blended(num_requests: int) -> list[float]:
    """vLLM with ragblend, which blends three of the demo's stored passages for each request."""
    from ragblend import SegmentedPrompt, load_engine
    from ragblend.demo.corpus import sample_corpus

    passages = [chunk for record in sample_corpus().records for chunk in record.chunks][:60]
    with (
        tempfile.TemporaryDirectory(prefix="ragblend-bench-") as store,
        load_engine("demo", store, backend="vllm", on_miss="inline", memory_gib=0.01, vllm_options=OPTIONS) as engine,
    ):
        for passage in passages:
            engine.precompute(passage)

        def round_of(seed: int) -> None:
            drawn = random.Random(seed)
            prompts = [SegmentedPrompt(drawn.sample(passages, 3), "Where?") for _ in range(num_requests)]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda prompt: engine.generate(prompt, mode="blend", max_tokens=ANSWER_TOKENS), prompts))

        return grown([lambda seed=seed: round_of(seed) for seed in ROUNDS])  # type: ignore[misc]


PARTS: dict[str, Callable[[int], list[float]]] = {"stock": stock, "blended": blended}


def _apart(part: str, num_requests: int) -> list[float]:
    """`part` in a process of its own."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR"} | ({"VLLM_PLUGINS": ""} if part == "stock" else {})
    command = [sys.executable, "-m", "benchmarks.memory_by_shape", "--requests", str(num_requests), "--part", part]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    requests: Annotated[int, typer.Option(help="Of each round.")] = 600,
    part: Annotated[str, typer.Option(help="stock or blended, in this process; both, apart, without.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the JSON object.")] = None,
) -> None:
    """Print MiB in use before the rounds and after each, and write them."""
    if part:
        print(json.dumps(PARTS[part](requests)))
        return
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": "benchmarks.memory_by_shape",
        "hardware": vllm_card(),
        "config": {"requests": requests, "rounds": ROUNDS, **OPTIONS},
        "used_mib": {},
    }
    for name in PARTS:
        facts["used_mib"][name] = used = _apart(name, requests)
        err.print(f"{name}: {used[0]} MiB, then {', '.join(f'{each:+.1f}' for each in _steps(used))}")
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n")


def _steps(used: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(used)]


if __name__ == "__main__":
    typer.run(main)
