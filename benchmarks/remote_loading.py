"""Time to first token with a remote tier at five speeds: full prefill, waiting for the tier, the loading controller.

    python -m benchmarks.remote_loading --out FILE.json

Redis and an S3 server (moto) run on this machine, each behind a line whose speed is set so that loading takes 0.02 to 8
times as long as full prefill. Every request finds its chunks in the remote tier alone. The three ways take turns on the
same prompts, and each time is a stopwatch around the call for one token. "waiting" is the engine without a machine
profile, which loads all stored chunks. The first requests at a speed are not timed: the tier measures its reads. Read
`measure_speed` first.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Annotated, Any

import httpx
import typer

from benchmarks.results import OutOption, write_result
from benchmarks.servers import Redis, ServerProcess, SlowLine, free_port
from ragblend.cli.printing import print_notice
from ragblend.engine.report import BlendReport
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.measure import measure_engine
from ragblend.errors import RagblendError
from ragblend.lab.bench.common.workloads import engine_for, make_prompts, torch_threads, vocab_size
from ragblend.prompt.types import Prompt

LOAD_OVER_PREFILL = (0.02, 0.25, 0.8, 3.0, 8.0)
LATENCIES_S = {"redis": 0.0005, "s3": 0.02}
WARM_UP = 3
GOAL = 1.1
"""Largest TTFT of the controller, as a multiple of the better of full prefill and waiting."""


@contextmanager
def open_server(name: str, home: Path) -> Iterator[tuple[int, str]]:
    """Run an empty Redis or S3 server. Yield its port, and the tier's URL with `{port}` for the port of a line."""
    if name == "redis":
        redis = Redis(home)
        redis.start()
        try:
            yield redis.port, "redis://127.0.0.1:{port}/0"
        finally:
            redis.kill()
        return
    port = free_port()
    moto = str(Path(sys.executable).with_name("moto_server"))
    server = ServerProcess([moto, "-H", "127.0.0.1", "-p", str(port)], f"http://127.0.0.1:{port}", home, {**os.environ})
    server.start()
    try:
        _create_bucket(port)
        yield port, "s3://ragblend/tier"
    finally:
        server.kill()


def _create_bucket(port: int) -> None:
    for _ in range(1000):
        try:
            httpx.put(f"http://127.0.0.1:{port}/ragblend").raise_for_status()
            return
        except httpx.TransportError:
            sleep(0.1)
    raise RagblendError("the S3 server does not start")


def open_tier(name: str, url: str, port: int) -> RemoteStore:
    """Open the tier at `port`."""
    if name == "s3":
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_DEFAULT_REGION="us-east-1",
            AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test",  # noqa: S106 (what moto accepts)
        )  # fmt: skip
    return open_remote(url.format(port=port), timeout_s=60.0)


def time_request(
    engine: TransformersEngine, store: TieredStore, prompt: Prompt, way: str, machine: Any
) -> tuple[float, BlendReport]:
    """Return the seconds of one request whose chunks the remote tier alone has, by a stopwatch, and its report."""
    memory, remote = store.find_tier(MemoryStore), store.find_tier(RemoteStore)
    assert memory is not None
    assert remote is not None
    for key in list(memory.keys()):
        memory.delete(key)
    for key in list(remote._flights):
        remote.drop_result(key)  # else the fetch of the request before serves this one
    engine.machine = machine if way == "controller" else None
    start_s = perf_counter()
    answer = engine.generate(prompt, mode="full" if way == "full" else "blend", max_tokens=1)
    seconds = perf_counter() - start_s
    _wait_until_quiet(store)
    return seconds, answer.report


def _wait_until_quiet(store: TieredStore) -> None:
    """Wait for the fetches that a request left to the background."""
    while store._prefetching or store.is_writing:
        sleep(0.01)


def measure_speed(
    name: str, url: str, port: int, prompts: Sequence[Prompt], base: TransformersEngine, load_s: float, nbytes: int
) -> dict[str, Any]:
    """Return the median TTFT of each way at one speed of the line: `nbytes` of KV load in about `load_s` seconds."""
    with SlowLine(port, nbytes / load_s, LATENCIES_S[name]) as line:
        store = TieredStore(MemoryStore(1 << 34), open_tier(name, url, line.port))
        engine = TransformersEngine(
            base.layers, base.renderer, store,
            name=base.name, fingerprint=base.fingerprint, on_miss="inline", check=False,
        )  # fmt: skip
        ways = ("full", "waiting", "controller")
        taken: dict[str, list[tuple[float, BlendReport]]] = {way: [] for way in ways}
        machine = base.machine
        for number in range(WARM_UP):
            time_request(engine, store, prompts[number % len(prompts)], "controller", machine)
        for number, prompt in enumerate(prompts):
            for shift in range(len(ways)):
                way = ways[(number + shift) % len(ways)]
                taken[way].append(time_request(engine, store, prompt, way, machine))
        speed = store.read_speeds["remote"]
        engine.close()
    found: dict[str, Any] = {"server": name, "line_bytes_per_s": nbytes / load_s, "latency_s": LATENCIES_S[name]}
    found |= {"measured_bytes_per_s": speed.bytes_per_s, "measured_latency_s": speed.latency_s}
    for way, samples in taken.items():
        found[f"{way}_s"] = median(seconds for seconds, _ in samples)
    better = [min(full[0], waiting[0]) for full, waiting in zip(taken["full"], taken["waiting"], strict=True)]
    better_s = min(found["full_s"], found["waiting_s"])
    pairs = [seconds / best for (seconds, _), best in zip(taken["controller"], better, strict=True)]
    reports = [report for _, report in taken["controller"]]
    off = [abs(report.ttft_s / seconds - 1) for samples in taken.values() for seconds, report in samples]
    return found | {
        "controller_over_better": found["controller_s"] / better_s,
        "controller_over_better_paired": median(pairs),
        "meets_goal": found["controller_s"] <= GOAL * better_s,
        "ttft_off": median(off),  # of the reports' `ttft_s` from the stopwatch, as a share
        "ttft_off_max": max(off),
        "modes": [report.mode for report in reports],
        "rules": [report.rule for report in reports],
        "ratios": [report.recompute_ratio for report in reports],
        "hits": [report.num_chunk_hits for report in reports],
        "decision": reports[-1].refused_reason or reports[-1].decision,
    }


def main(
    shape: Annotated[str, typer.Option("--shape", help="Model of random weights.")] = "llama-50m",
    num_chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks per prompt.")] = 4,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of each chunk.")] = 256,
    repeats: Annotated[int, typer.Option("--repeats", help="Requests of each way at each speed.")] = 5,
    servers: Annotated[str, typer.Option("--servers", help="redis, s3, or both, comma-separated.")] = "redis,s3",
    out: OutOption = None,
) -> None:
    """Measure every speed on every server, and write the result."""
    runs: list[dict[str, Any]] = []
    with torch_threads(1), tempfile.TemporaryDirectory() as home:
        own = MemoryStore(1 << 34)
        with engine_for(shape, own) as base:
            chunks, prompts = make_prompts(num_chunks, chunk_tokens, 32, repeats, vocab_size(base))
            for chunk in chunks:
                base.precompute(chunk)
            base.generate(prompts[0], mode="full", max_tokens=1)  # warm-up
            base.machine = machine = measure_engine(base)
            assert machine is not None
            nbytes = num_chunks * chunk_tokens * base.bytes_per_token
            for name in servers.split(","):
                with open_server(name, Path(home)) as (port, url):
                    tier = open_tier(name, url, port)
                    for key in list(own.keys()):
                        if (kv := own.get(key)) is not None:
                            tier.put_and_wait(kv)
                    tier.close()
                    full_s = median(_full_s(base, prompt) for prompt in prompts)
                    for slowdown in LOAD_OVER_PREFILL:
                        run = measure_speed(name, url, port, prompts, base, slowdown * full_s, nbytes)
                        runs.append({"load_over_prefill": slowdown, **run})
                        print_notice(
                            f"{name} {slowdown:g}: full {run['full_s']:.3f} s, waiting {run['waiting_s']:.3f} s, "
                            f"controller {run['controller_s']:.3f} s, {run['controller_over_better']:.2f}x; "
                            f"ttft_s off by {run['ttft_off']:.1%}; {run['decision']}"
                        )
    config = {"shape": shape, "num_chunks": num_chunks, "chunk_tokens": chunk_tokens, "repeats": repeats}
    write_result({"config": config, "machine": machine.as_dict(), "goal": GOAL, "runs": runs}, out)


def _full_s(engine: TransformersEngine, prompt: Prompt) -> float:
    start_s = perf_counter()
    engine.generate(prompt, mode="full", max_tokens=1)
    return perf_counter() - start_s


if __name__ == "__main__":
    typer.run(main)
