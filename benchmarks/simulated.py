"""What `ragblend simulate` says of two replicas, beside what two replicas do: TTFT and throughput at several rates.

    python -m benchmarks.simulated --out data/results/simulate.json

Two `ragblend serve` with random weights on this machine, a thread and a disk of their own each. Generated RAG
traffic, its chunks ingested, is sent in real time, round robin, by Poisson's moments. Between the runs the replicas are
profiled with other prompts, one alone and both at once: they share a machine's cores, caches and way to memory, so each
is slower while the other computes, and a run is simulated by the mean of the two, weighed by how busy it finds the
replicas. The times are the medians of the rounds before and after a run, so that a machine that gets slower or faster
is not the model's fault. Each replica's engine and worker are one process: as two, vLLM's default, they wait for each
other by spinning, and four that spin on two cores are no two replicas (`--spinning` shows it). Read `measure` first.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import typer

from benchmarks.soak.deployment import Replica
from ragblend.bench.common.configs import Case
from ragblend.bench.common.shapes import find_dtype, find_shape
from ragblend.bench.common.workloads import save_checkpoint
from ragblend.bench.throughput import Answered, arrival_times, checked, serve
from ragblend.bench.traffic.demand import Demand, demand_of
from ragblend.bench.traffic.deployment import Batching, Deployment, SimulatedMode
from ragblend.bench.traffic.generate import Traffic, generate
from ragblend.bench.traffic.reading import entries_read
from ragblend.bench.traffic.requests import NO_MARKS
from ragblend.bench.traffic.saving import Kind
from ragblend.bench.traffic.simulation import SimulatedRun, simulate
from ragblend.bench.traffic.spool import Spooled
from ragblend.bench.traffic.tokens import Estimate, Ids
from ragblend.bench.ttft_vllm import vllm_card
from ragblend.cli.printing import err, print_json
from ragblend.cli.session import quiet_libraries, use_threads
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.tuning.pipeline import Curve, MachineProfile
from ragblend.engine.vllm.answer import Delta, VllmRequest, blend_params
from ragblend.engine.vllm.client import VllmClient
from ragblend.options import GenerationOptions
from ragblend.prompt.prompt import Segment, SegmentKind, TokenizedPrompt
from ragblend.upkeep.measure import read_speed

SCHEMA_VERSION = 1
NUM_REPLICAS = 2
BATCHING = Batching(batch_tokens=1024, max_seqs=64, paged_tokens=64 * 1024)
SERVED = ("--dtype", "float32", "--context", "none", "--enforce-eager", "--max-model-len", "1024", "--block-size", "32")
LONGEST, QUESTION = 6, 24  # chunks of the longest profiled prompt, and tokens behind them
DECODED, DECODED_TOGETHER = 33, 8  # tokens and requests by which decoding is timed
WITHIN = 0.2
_ROUNDS_OF_BUSY = 5  # how busy they are makes everything longer, and that them busier
REPEATS = 2  # of each time in a profile round, on each replica

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """What is run. `loads`: rates as shares of what the profile says that two replicas can prefill in that mode."""

    shape: str = "llama-50m"
    num_requests: int = 40
    loads: tuple[float, ...] = (0.3, 0.6, 1.5)
    modes: tuple[SimulatedMode, ...] = ("full", "prefix", "blend")
    answer_tokens: int = 8
    seed: int = 0
    spinning: bool = False
    traffic: Traffic = field(
        default_factory=lambda: Traffic(
            chunks_per_turn=4, num_documents=40, chunks_per_document=2, chunk_words=64, system_words=32,
            question_words=24, answer_words=1, log_answers=False, marked=True,
        )
    )  # fmt: skip


class _Numbers(Estimate):
    """Pieces of words as token ids of a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._size = vocab_size

    def ids(self, text: str) -> Ids:
        """The pieces' ids, each in the vocabulary."""
        return (super().ids(text) % self._size).astype(np.int32)


class _Balancer:
    """Round robin over clients."""

    def __init__(self, clients: Sequence[VllmClient]) -> None:
        self._clients = clients
        self._home: dict[int, VllmClient] = {}

    def assign(self, requests: Iterable[VllmRequest]) -> None:
        """The n-th goes to the n-th client, and so on."""
        self._home = {id(each): self._clients[n % len(self._clients)] for n, each in enumerate(requests)}

    def deltas(self, request: VllmRequest) -> Generator[Delta]:
        """From its replica."""
        yield from self._home[id(request)].deltas(request)


@dataclass(slots=True)
class _Times:
    """What one profile round took: seconds of prefill by tokens, of blending by ratio, of a step by requests."""

    full_s: dict[int, list[float]] = field(default_factory=dict)
    blend_s: dict[float, list[float]] = field(default_factory=dict)
    step_s: dict[int, list[float]] = field(default_factory=dict)

    def __add__(self, other: _Times) -> _Times:
        return _Times(
            {key: taken + other.full_s[key] for key, taken in self.full_s.items()},
            {key: taken + other.blend_s[key] for key, taken in self.blend_s.items()},
            {key: taken + other.step_s[key] for key, taken in self.step_s.items()},
        )


class _Round(NamedTuple):
    """What a profile round took: with the other replicas idle, and with all at once."""

    alone: _Times
    together: _Times

    def __add__(self, other: _Round) -> _Round:  # type: ignore[override]  # not a longer tuple
        return _Round(self.alone + other.alone, self.together + other.together)


class _Profiler:
    """Times prompts of its own, on one replica after the other and on all at once."""

    def __init__(self, clients: Sequence[VllmClient], config: SimulatedConfig, vocab_size: int) -> None:
        self._clients, self._vocab_size = clients, vocab_size
        self._rule = find_rule("auto", clients[0].facts.num_layers)
        self._draw = random.Random(1_000_003)
        self.chunks = [self._ids(config.traffic.chunk_words) for _ in range(LONGEST)]

    def round(self) -> _Round:
        """Each time `REPEATS` times on each replica, alone and together."""
        found = _Round(_Times(), _Times())
        for client in self._clients:
            self._round(client, found.alone)
        with ThreadPoolExecutor(len(self._clients)) as pool:
            list(pool.map(lambda client: self._round(client, found.together), self._clients))
        return found

    def _round(self, client: VllmClient, times: _Times) -> None:
        for _ in range(REPEATS):
            for count in (0, 1, 3, LONGEST):
                prompt = self._prompt(self.chunks[:count])
                times.full_s.setdefault(prompt.num_tokens, []).append(self._ttft_s(client, prompt, "full", 1.0))
            for ratio in (0.0, self._rule.ratio, 0.5):
                prompt = self._prompt(self.chunks)
                times.blend_s.setdefault(ratio, []).append(self._ttft_s(client, prompt, "blend", ratio))
            for together in (1, DECODED_TOGETHER):
                times.step_s.setdefault(together, []).append(self._step_s(client, together))

    def _prompt(self, chunks: Sequence[tuple[int, ...]]) -> TokenizedPrompt:
        pieces: list[tuple[SegmentKind, tuple[int, ...]]] = [("chunk", chunk) for chunk in chunks]
        return prompt_of([*pieces, ("suffix", self._ids(QUESTION))])

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self._vocab_size) for _ in range(count))

    def _ttft_s(self, client: VllmClient, prompt: TokenizedPrompt, mode: SimulatedMode, ratio: float) -> float:
        (answer,) = checked(Case(mode, "auto"), serve(client, [request_of(client, prompt, mode, ratio, 1)], [0.0]))
        return answer.ttft_s

    def _step_s(self, client: VllmClient, together: int) -> float:
        """Seconds of a step of so many requests."""
        requests = [request_of(client, self._prompt([]), "full", 1.0, DECODED) for _ in range(together)]
        last = max(serve(client, requests, [0.0] * together), key=lambda each: each.ttft_s)
        return (last.total_s - last.ttft_s) / (DECODED - 1)

    def profile(self, times: _Round, busy: float, disk_bytes_per_s: float) -> tuple[MachineProfile, Curve]:
        """The medians, as a profile and seconds of a step by requests, where the other replica is `busy` so much."""

        def mean(alone: dict[Any, list[float]], together: dict[Any, list[float]]) -> dict[Any, float]:
            median = statistics.median
            return {key: (1 - busy) * median(alone[key]) + busy * median(together[key]) for key in sorted(alone)}

        full_s = mean(times.alone.full_s, times.together.full_s)
        blend_s = mean(times.alone.blend_s, times.together.blend_s)
        step_s = mean(times.alone.step_s, times.together.step_s)
        longest_s, facts = full_s[max(full_s)], self._clients[0].facts
        shares = tuple((ratio, taken_s / longest_s) for ratio, taken_s in blend_s.items())
        profile = MachineProfile(
            facts.fingerprint, {"engine": "vllm", "ranks": 1}, facts.num_layers, facts.bytes_per_token,
            tuple(full_s.items()), shares, {"disk": disk_bytes_per_s},
        )  # fmt: skip
        return profile, tuple((float(count), taken_s) for count, taken_s in step_s.items())


def trace(config: SimulatedConfig) -> tuple[list[Demand], list[TokenizedPrompt]]:
    """The traffic as it is simulated, and as it is sent."""
    tokens, count = _Numbers(find_shape(config.shape).vocab_size), Estimate()
    traffic = replace(config.traffic, num_sessions=config.num_requests, seed=config.seed)
    made = generate(traffic, lambda text: len(count.ids(text)))
    with entries_read("generated", made, tokens, NO_MARKS) as logs:
        demands = demand_of(logs.spool, tokens, config.answer_tokens)
        return demands, [replayed(request) for request in logs.spool.in_order()]


def deployment_of(profile: MachineProfile, decode_s: Curve, mode: SimulatedMode) -> Deployment:
    """The replicas, as the simulation has them."""
    rule = find_rule("auto", profile.num_layers)
    kind = Kind(rule.ratio, rule.asks_first, profile.bytes_per_s["disk"])
    return Deployment(
        profile, mode, kind=kind, decode_s=decode_s, batching=BATCHING, ingested=True, stores_misses=False
    )


def prompt_of(pieces: Iterable[tuple[SegmentKind, Sequence[int]]]) -> TokenizedPrompt:
    """A prompt of pieces."""
    segments: list[Segment] = []
    for kind, ids in pieces:
        if len(ids):
            segments.append(Segment(kind, tuple(ids), segments[-1].end if segments else 0))
    return TokenizedPrompt(tuple(segments))


def replayed(request: Spooled) -> TokenizedPrompt:
    """A logged request as it is sent."""
    pieces: list[tuple[SegmentKind, list[int]]] = []
    ids, place = request.ids.tolist(), 0
    for start, end in request.chunks:
        pieces += [("text" if place else "prefix", ids[place:start]), ("chunk", ids[start:end])]
        place = end
    return prompt_of([*pieces, ("suffix", ids[place:])])


def request_of(
    client: VllmClient, prompt: TokenizedPrompt, mode: SimulatedMode, ratio: float, num_output: int
) -> VllmRequest:
    """A request of exactly so many tokens."""
    return VllmRequest(
        prompt, blend_params(prompt, mode, "auto", ratio, client.namespace), GenerationOptions(max_tokens=num_output)
    )


class _Bench:
    """Two replicas that run, and what is sent to them."""

    def __init__(self, config: SimulatedConfig, home: Path, stack: ExitStack, tell: Tell) -> None:
        self.config, self._tell = config, tell
        shape = find_shape(config.shape)
        model = home / config.shape
        save_checkpoint(config.shape, model, find_dtype("float32"), config.seed)
        flags = [*SERVED, "--max-num-seqs", str(BATCHING.max_seqs)]
        flags += ["--max-num-batched-tokens", str(BATCHING.batch_tokens)]
        token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
        flags += ["--kv-cache-memory-bytes", str(int(BATCHING.paged_tokens) * token_bytes)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(config.spinning))}
        self._replicas = [
            Replica(f"replica-{n}", home / f"replica-{n}", 1, flags, str(model), **environment)
            for n in range(NUM_REPLICAS)
        ]
        tell("starting two replicas")
        for replica in self._replicas:
            stack.callback(replica.stop)
            replica.start()
        for replica in self._replicas:
            replica.wait()
        self._clients = []
        for replica in self._replicas:
            client = load_engine(str(model), backend=replica.url, on_miss="inline")
            assert isinstance(client, VllmClient)
            self._clients.append(stack.enter_context(client))
        self.demands, self._prompts = trace(config)
        self.profiler = _Profiler(self._clients, config, shape.vocab_size)
        self.rule = find_rule("auto", shape.num_layers)
        self._ingest()
        self.profiler.round()  # the first of everything takes longer

    def _ingest(self) -> None:
        """Every chunk, on every replica."""
        found = {segment.token_ids for prompt in self._prompts for segment in prompt.chunk_segments}
        chunks = sorted(found) + self.profiler.chunks
        self._tell(f"ingesting {len(chunks)} chunks on each")
        with ThreadPoolExecutor(NUM_REPLICAS) as pool:
            list(pool.map(lambda client: [client.precompute_ids(chunk) for chunk in chunks], self._clients))

    def reset(self) -> None:
        """Empty the prefix caches, and what the workers have in memory."""
        for client in self._clients:
            httpx.post(f"{client.connection.url}/reset_prefix_cache?reset_external=true", timeout=60).raise_for_status()

    def disk_speed(self) -> float:
        """Bytes per second of a replica's disk, as the traffic finds it: in the page cache."""
        store = DiskStore(self._replicas[0].store)
        keys = sorted(store.keys())
        return statistics.median(read_speed(store, keys[place : place + 4]) for place in range(0, len(keys) - 3, 4))

    def seconds(self) -> tuple[float, float, float]:
        """Seconds: now, of all cores busy, and those of them that were ours."""
        ours = [os.getpid()] + [pid for each in self._replicas for pid in each.pids()]
        return time.monotonic(), busy_s(), sum(map(cpu_s, ours))

    def others(self, before: tuple[float, float, float]) -> float:
        """Cores that were busy for others since then, in the mean."""
        passed, busy, ours = (late - early for early, late in zip(before, self.seconds(), strict=True))
        return round(max(0.0, busy - ours) / passed, 2)

    def replay(self, mode: SimulatedMode, arrivals_s: Sequence[float]) -> list[Answered]:
        """Send the traffic."""
        self.reset()
        balancer, ratio = _Balancer(self._clients), self.rule.ratio
        requests = [
            request_of(self._clients[0], each, mode, ratio, self.config.answer_tokens) for each in self._prompts
        ]
        balancer.assign(requests)
        return checked(Case(mode, "auto"), serve(balancer, requests, arrivals_s))


def measure(config: SimulatedConfig, tell: Tell) -> dict[str, Any]:
    """Replay in reality, then simulate; the JSON object."""
    with tempfile.TemporaryDirectory(prefix="ragblend-simulated-") as home, ExitStack() as stack:
        bench = _Bench(config, Path(home), stack, tell)
        disk = bench.disk_speed()
        rounds = [bench.profiler.round()]
        rates = {mode: _capacity(bench, mode, rounds[0], disk) for mode in config.modes}
        runs = []
        for load in config.loads:
            for mode in config.modes:
                rate = load * rates[mode]
                arrivals_s = arrival_times(rate, config.num_requests, config.seed)
                before = bench.seconds()
                answers = bench.replay(mode, arrivals_s)
                others = bench.others(before)
                rounds.append(bench.profiler.round())
                real = _figures(answers)
                busy, deployment, simulated = _simulated(bench, rounds[-2] + rounds[-1], mode, arrivals_s, disk)
                found = simulated.as_dict()
                off = {name: found[name] / real[name] - 1 for name in real}
                runs.append(
                    {"mode": mode, "load": load, "rate": rate, "others": others, "measured": real}
                    | {"simulated": {name: found[name] for name in real}, "off": off}
                    | {"within": all(abs(off[name]) <= WITHIN for name in ("throughput", "ttft_s"))}
                    | {"profile": {**deployment.profile.as_dict(), "fingerprint": ""}}
                    | {"decode_s": deployment.decode_s, "busy": busy}
                )
                tell(table_line(runs[-1]))
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "benchmarks.simulated",
            "hardware": vllm_card(),
            "config": asdict(config),
            "rule": bench.rule.name,
            "ratio": bench.rule.ratio,
            "prompt_tokens": statistics.fmean(demand.num_tokens for demand in bench.demands),
            "prefill_s_by_round": [
                {
                    name: {str(tokens): taken for tokens, taken in sorted(times.full_s.items())}
                    for name, times in each._asdict().items()
                }
                for each in rounds
            ],
            "runs": runs,
        }


def busy_s() -> float:
    """Seconds that this machine's cores have been busy."""
    _, user, nice, system, _idle, _wait, irq, softirq, *_ = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _simulated(
    bench: _Bench, times: _Round, mode: SimulatedMode, arrivals_s: Sequence[float], disk: float
) -> tuple[float, Deployment, SimulatedRun]:
    """How busy the replicas are, and the simulation in which they are that."""
    busy = 1.0
    for _ in range(_ROUNDS_OF_BUSY):
        deployment = deployment_of(*bench.profiler.profile(times, busy, disk), mode)
        found = simulate(bench.demands, arrivals_s, deployment, NUM_REPLICAS)
        busy = found.busy
    return busy, deployment, found


def _capacity(bench: _Bench, mode: SimulatedMode, times: _Round, disk: float) -> float:
    """Requests per second that two replicas can serve, by the first round."""
    at_once = [0.0] * len(bench.demands)
    deployment = deployment_of(*bench.profiler.profile(times, 1.0, disk), mode)
    return simulate(bench.demands, at_once, deployment, NUM_REPLICAS).throughput


def _figures(answers: Sequence[Answered]) -> dict[str, float]:
    """What is compared. Throughput from the first arrival to the last token, as in the simulation."""
    ttft_s = [answer.ttft_s for answer in answers]
    span_s = max(each.arrival_s + each.total_s for each in answers) - min(each.arrival_s for each in answers)
    return {
        "throughput": len(answers) / span_s,
        "ttft_s": statistics.median(ttft_s),
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
    }


def table_head() -> str:
    """Of the columns of `table_line`."""
    heads = ("rate", "served/s", "simulated", "TTFT s", "simulated", "p95 s", "simulated")
    return "mode    " + "".join(f"{head:>11}" for head in heads)


def table_line(run: dict[str, Any]) -> str:
    """What people read."""
    real, found = run["measured"], run["simulated"]
    values = (run["rate"], *(side[name] for name in real for side in (real, found)))
    verdict = "within" if run["within"] else "NOT within"
    return (
        f"{run['mode']:<8}{''.join(f'{value:>11.3f}' for value in values)}  {verdict} {WITHIN:.0%}; others kept "
        f"{run['others']:.1f} cores busy"
    )


def main(
    requests: int = 40, loads: str = "0.3,0.6,1.5", seed: int = 0, spinning: bool = False, out: Path | None = None
) -> None:
    """A table on stderr, one line of JSON on stdout, and in `out`."""
    use_threads(1)
    quiet_libraries()
    config = SimulatedConfig(
        num_requests=requests, loads=tuple(map(float, loads.split(","))), seed=seed, spinning=spinning
    )
    facts = measure(config, lambda line: err.print(line, markup=False))
    for line in (table_head(), *map(table_line, facts["runs"])):
        err.print(line, markup=False)
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n")
    print_json(facts)


if __name__ == "__main__":
    typer.run(main)
