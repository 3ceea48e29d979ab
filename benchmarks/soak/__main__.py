"""Soak test of a served deployment: two replicas with API keys and a shared Redis, under load and faults.

    python -m benchmarks.soak --out data/results/soak.json

Two `ragblend serve demo --api-keys-file` run on this machine's CPU, each with its own store. Clients of three
namespaces ingest chunks and send prompts in every mode, streamed and not. Some clients disconnect early. Some prompts
contain chunks that only another namespace has ingested, or none. Some clients send a document, ask about it, delete it
and ask again. Redis is killed twice and restarted empty. One replica is stopped by SIGTERM and one is killed; both are
restarted over their stores. The run fails unless:

- every answer is right (`work`);
- no chunk was a hit in a namespace that had neither ingested it nor sent it in an earlier prompt (`ledger`);
- no chunk that a replica had stored was a miss there (`ledger`);
- every document was stored, and no deleted one was found or left on a disk (`clients.DocumentLife`);
- the counters of both replicas agree with what the clients observed.

The growth of memory is reported, but does not fail the run. Read `measure` first.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from benchmarks.results import write_both
from benchmarks.soak.clients import DISCONNECT_SHARE, STREAM_SHARE, Client, RequestGate
from benchmarks.soak.deployment import MEMORY_GIB, Replica, SoakRedis, flags_of, write_keys
from benchmarks.soak.ledger import Ledger, Stored, Sum, sums
from benchmarks.soak.memory import Growth, Sample, Sampler, growth
from benchmarks.soak.work import TENANTS, Text, Work, compute_references
from ragblend.cli.printing import print_notice
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.errors import UsageError
from ragblend.lab.bench.ttft_vllm import vllm_hardware_card

MIN_REQUESTS = 50
NUM_RECENT_TEXTS = 50  # new chunks that prompts are drawn from: the last ones that were ingested
PROBLEM_KINDS = (
    "wrong_answers", "foreign_hits", "lost_chunks", "wrong_reports", "without_report", "refused", "errors",
    "unanswered", "lost_documents", "damaged_entries", "foreign_entries",
)  # fmt: skip
"""Counts that must be zero."""

REPORTED_COUNTERS = (
    "ragblend_remote_hits_total", "ragblend_remote_failures_total", "ragblend_remote_dropped_writes_total",
    "ragblend_tier_hits_total", "ragblend_tier_evictions_total", "num_preemptions_total", "finished_abort",
)  # fmt: skip
"""Counters that clients cannot check. The result lists them as evidence that the faults took effect."""

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """Options of a run."""

    requests: int = 10_000
    clients: int = 16
    prompts: int = 24
    threads: int = 1  # of each engine
    seed: int = 0
    minutes: float = 120.0  # no request begins later

    def __post_init__(self) -> None:
        if self.requests < MIN_REQUESTS or self.clients < 1 or self.prompts < 2:
            raise UsageError(
                f"{self.requests} requests, {self.clients} clients, {self.prompts} prompts; choose at least "
                f"{MIN_REQUESTS}, 1 and 2"
            )


class Soak:
    """One run, from the start of the servers to the check of their stores."""

    def __init__(self, config: SoakConfig, notify: ProgressCallback) -> None:
        self.config, self._notify = config, notify
        self.faults: list[dict[str, Any]] = []
        self.requests_s = self._start_s = 0.0
        self.tracebacks: list[str] = []
        self.growths: list[Growth] = []
        self.series: dict[str, list[Sample]] = {}
        self.sums: list[Sum] = []

    def run(self, home: Path, stack: ExitStack) -> None:
        """Start the deployment, send all requests, inject the faults and check the stores.

        The processes are registered in `stack` and end when the caller closes it.
        """
        config = self.config
        write_keys(home / "keys.json", TENANTS)
        self._redis = redis = SoakRedis(home)
        stack.callback(redis.kill)
        redis.start()
        flags, memory = flags_of(redis.url, home / "keys.json"), str(MEMORY_GIB)
        self._replicas = [
            Replica(f"replica-{number}", home / f"replica-{number}", config.threads, flags, RAGBLEND_MEMORY_GIB=memory)
            for number in range(2)
        ]
        for replica in self._replicas:  # started in parallel, because importing vLLM takes long
            stack.callback(replica.stop)
            replica.start()
        engine = stack.enter_context(load_engine("demo", home / "texts", on_miss="inline"))
        work = Work(engine, config.prompts, config.seed)
        self.references = compute_references(work.questions, "demo", self._notify)
        self.ledger = Ledger(self.references, Stored())
        for replica in self._replicas:
            replica.wait()
            replica.register_texts(work.texts, work.tokenizer)
        self._gate = RequestGate(config.requests, 60 * config.minutes)
        fresh: deque[Text] = deque(maxlen=NUM_RECENT_TEXTS)
        clients = [
            Client(number, config.seed, work, self._replicas, self.ledger, self._gate, fresh)
            for number in range(config.clients)
        ]
        sampler = Sampler(self._rss_bytes, lambda: self._gate.num_done)
        sampler.start()
        self._start_s = time.monotonic()
        for client in clients:
            client.start()
        self._inject_faults()
        for client in clients:
            client.join()
        self.requests_s = time.monotonic() - self._start_s
        sampler.stop()
        for client in clients:
            if client.error is not None:
                raise client.error
        for replica in self._replicas:
            self._read_counters(replica)
        self.series = sampler.series
        self.growths = [growth(process, samples) for process, samples in sampler.series.items()]
        for replica in self._replicas:
            replica.stop()
            self.tracebacks += replica.tracebacks()
        self._check_stores(work)

    def _rss_bytes(self) -> dict[str, int]:
        found = self._redis.rss_bytes()
        for replica in self._replicas:
            found |= replica.rss_bytes()
        return found

    # -- faults

    def _inject_faults(self) -> None:
        self._restart_redis(0.08, 0.14)
        self._restart_replica(self._replicas[0], 0.20, 0.40, graceful=True)
        self._restart_replica(self._replicas[1], 0.45, 0.75, graceful=False, during=self._restart_second_redis)

    def _restart_second_redis(self) -> None:
        self._restart_redis(0.55, 0.62)

    def _num_requests_at(self, share: float) -> int:
        return int(share * self.config.requests)

    def _record_fault(self, what: str) -> None:
        seconds = round(time.monotonic() - self._start_s, 1)
        self.faults.append({"num_requests": self._gate.num_done, "seconds": seconds, "what": what})
        self._notify(f"{self._gate.num_done} requests: {what}")

    def _restart_redis(self, share: float, until: float) -> None:
        self._gate.wait_for(self._num_requests_at(share))
        self._redis.kill()
        self._record_fault("redis is killed")
        self._gate.wait_for(self._num_requests_at(until))
        self._redis.start()
        self._record_fault("redis is back, empty")

    def _restart_replica(
        self,
        replica: Replica,
        share: float,
        until: float,
        *,
        graceful: bool,
        during: Callable[[], None] | None = None,
    ) -> None:
        """Read the counters of a replica, stop it with requests in progress, start it at once, and wait for it.

        No request after share `until` begins before the replica is back.
        """
        self._gate.wait_for(self._num_requests_at(share))
        self._gate.close()
        self._read_counters(replica)
        self._gate.open(self._num_requests_at(until) + 1)
        self._gate.wait_for(self._gate.num_done + self.config.clients)
        if graceful:
            self._record_fault(f"{replica.name} is stopped")
            exit_code = replica.terminate()
            self._record_fault(f"{replica.name} has ended with {exit_code}")
            if exit_code != 0:
                self.ledger.fail("errors", f"{replica.name} ended with {exit_code}")
        else:
            replica.kill()
            self._record_fault(f"{replica.name} is killed")
        replica.start()
        back = threading.Thread(target=replica.wait, daemon=True)
        back.start()
        if during is not None:
            during()
        self._gate.wait_for(self._num_requests_at(until))
        back.join()
        self._record_fault(f"{replica.name} is back")
        self._gate.open(self.config.requests)

    # -- checks

    def _read_counters(self, replica: Replica) -> None:
        replica.read_counters()
        self.sums += sums(replica.runs[-1], self.ledger.attempts_at(replica.name))

    def _check_stores(self, work: Work) -> None:
        """Record a problem for each entry that is damaged or was not ingested in its namespace."""
        numbers = {text.token_ids: text.number for text in work.all_texts}
        ingested = self.ledger.stored.namespaces()
        for replica in self._replicas:
            store = DiskStore(replica.store)
            for result in store.verify():
                if not result.ok:
                    self.ledger.fail("damaged_entries", f"{result.key} of {replica.name}: {result.reason}")
            for header in store.headers():
                if (header.namespace, numbers.get(header.token_ids, -1)) not in ingested:
                    self.ledger.fail("foreign_entries", f"{header.key} of {replica.name} in {header.namespace!r}")

    @property
    def problems(self) -> list[str]:
        """Return a sentence for each problem."""
        off = [each for each in self.sums if not each.is_right]
        return self.ledger.problems + [
            f"counters: {each.replica} counted {each.counted:g} {each.counter}, clients {each.smallest:g} to "
            f"{each.largest:g}"
            for each in off
        ]

    def facts(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        counts = self.ledger.counts
        unread = [
            each
            for replica in self._replicas
            for run in replica.runs
            for each in self.ledger.attempts_at(replica.name)
            if run.end_s is not None and (run.read_s or run.start_s) < each.start_s < run.end_s
        ]
        return {
            "command": "benchmarks.soak",
            "hardware": vllm_hardware_card(),
            "config": {
                **asdict(self.config),
                "namespaces": len(TENANTS),
                "leaves": DISCONNECT_SHARE,
                "streams": STREAM_SHARE,
            },
            "num_requests": self._gate.num_done,
            "seconds": round(self.requests_s, 1),
            "requests_per_s": round(self._gate.num_done / self.requests_s, 2),
            "num_references": len(self.references),
            "certain_tokens": round(self.references.num_certain, 2),
            "faults": self.faults,
            "counts": {name: counts[name] for name in sorted(counts) if name not in PROBLEM_KINDS},
            "wrong": {name: counts[name] for name in PROBLEM_KINDS},
            "counters": [{**each._asdict(), "is_right": each.is_right} for each in self.sums],
            "seen": [
                {"replica": run.name, **{name: run.counters.get(name, 0.0) for name in REPORTED_COUNTERS}}
                for replica in self._replicas
                for run in replica.runs
            ],
            "tracebacks": self.tracebacks,
            "attempts_after_the_last_reading": len(unread),
            "rss_mib": {name: _thinned(samples) for name, samples in self.series.items()},
            "memory": [{**asdict(each), "is_flat": each.is_flat} for each in self.growths],
            "problems": self.problems[:50],
        }


def _thinned(samples: Sequence[Sample], count: int = 60) -> list[tuple[int, float]]:
    """Return about `count` of the samples, evenly spaced, as (requests, MiB)."""
    return [(each.num_requests, round(each.rss_bytes / 2**20, 1)) for each in samples[:: 1 + len(samples) // count]]


def measure(config: SoakConfig, notify: ProgressCallback) -> dict[str, Any]:
    """Run the soak test. Return the result as a JSON object, whose `problems` are empty if all checks passed."""
    soak = Soak(config, notify)
    with tempfile.TemporaryDirectory(prefix="ragblend-soak-") as home, ExitStack() as stack:
        soak.run(Path(home), stack)
        return soak.facts()


def table(facts: dict[str, Any]) -> list[str]:
    """Return the lines of a summary."""
    lines = [f"{facts['num_requests']} requests in {facts['seconds']:.0f} s, {facts['requests_per_s']:.1f} a second"]
    lines += [f"{name:<28}{count:>8}" for part in ("counts", "wrong") for name, count in facts[part].items()]
    off = sum(not each["is_right"] for each in facts["counters"])
    lines += ["", f"counters that do not add up  {off:>7} of {len(facts['counters'])}", ""]
    lines.append(f"{'memory':<26}{'requests':>9}{'MiB warm':>10}{'MiB last':>10}{'MiB per 1,000 requests':>30}")
    for each in facts["memory"]:
        slope = "-" if each["slope"] is None else f"{each['slope']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
        sizes = f"{each['num_requests']:>9}{each['warm_mib']:>10.1f}{each['last_mib']:>10.1f}"
        lines.append(f"{each['process']:<26}{sizes}{slope:>30}")
    return [*lines, "", *facts["problems"]]


def main(
    requests: int = 10_000,
    clients: int = 16,
    prompts: int = 24,
    threads: int = 1,
    seed: int = 0,
    minutes: float = 120.0,
    out: Path | None = None,
) -> None:
    """Run the soak test. Print a table to stderr and JSON to stdout, and write the JSON to `out`.

    The exit code is 1 if a check failed.
    """
    config = SoakConfig(requests, clients, prompts, threads, seed, minutes)
    set_num_threads(1)
    quiet_libraries()
    facts = measure(config, print_notice)
    for line in table(facts):
        print_notice(line)
    write_both(facts, out)
    if facts["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
