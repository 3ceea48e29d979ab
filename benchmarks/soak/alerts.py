"""Every alert of the chart's rules, provoked on real servers, and cleared as docs/operators.md says.

    python -m benchmarks.soak.alerts --out data/results/alerts.json

A Prometheus (`python -m tools.deploy.fetch`) reads the rules and scrapes two `ragblend serve demo` of this machine
each second: `plain` with a disk alone, `shared` with a Redis and a catalogue in PostgreSQL. A minute of a rule takes a
second here (`SPEED`): its ranges, its `for` and the age of a document are divided by 60, everything else is as it is
installed. A server that does not reach its remote tier looks again after up to a real minute, so that rule is divided
by 4 only. An alert must fire after the fault, with the value that is written down, and must be gone after the repair.

Read `Trial` first, then the cases.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import typer
import yaml

from benchmarks.postgres import run_postgres
from benchmarks.results import write_both
from benchmarks.servers import Redis, ServerProcess, free_port
from benchmarks.soak.deployment import Replica
from benchmarks.soak.rolling import DOCUMENTS, text_of
from ragblend.cli.printing import print_notice
from ragblend.engine.store.format.signed_json import decode_signed_json
from ragblend.engine.store.metadata import MACHINES_DIR
from ragblend.engine.tuning.loading_controller import machine_profile_from
from ragblend.engine.tuning.machine import write_profile
from ragblend.errors import BackendUnreachableError, NotFoundError, RagblendError
from ragblend.lab.bench.ttft_vllm import vllm_hardware_card
from tools.deploy.fetch import find_tool

RULES = Path(__file__).parents[2] / "deploy" / "helm" / "ragblend" / "monitoring" / "rules.yaml"
SPEED, SPEEDS = 60, {"RagblendRemoteFailing": 4}
FIRES_S, CLEARS_S = 420.0, 300.0
FLAGS = ("--enforce-eager", "--max-model-len", "1024", "--block-size", "32", "--context", "none")
FEW_BYTES, MANY_BYTES = 8 << 20, 96 << 20  # of vLLM's paged KV: 1,600 and 19,000 tokens
NUM_DOCUMENTS, NUM_CLIENTS, LONG_ANSWER = 40, 24, 400
Case = Callable[["Trial"], Any]


def faster(rule: dict[str, Any]) -> dict[str, Any]:
    """Return an alert rule in which a minute takes less time."""
    speed = SPEEDS.get(rule["alert"], SPEED)

    def seconds(minutes: str) -> str:
        return f"{60 * int(minutes) // speed}s"

    expr = re.sub(r"\[(\d+)m\]", lambda match: f"[{seconds(match[1])}]", rule["expr"])
    expr = expr.replace("> 1800", f"> {1800 // speed}")  # the age of a document
    waits = {"for": seconds(rule["for"].removesuffix("m"))} if "for" in rule else {}
    return {**rule, "expr": expr, **waits}


class Prometheus(ServerProcess):
    """A Prometheus with the rules, which scrapes `targets`: {name: URL}."""

    def __init__(self, home: Path, targets: dict[str, str]) -> None:
        found = find_tool("prometheus")
        if found is None:
            raise NotFoundError("no Prometheus; get one: python -m tools.deploy.fetch")
        home.mkdir()
        groups = yaml.safe_load(RULES.read_text())["groups"]
        groups = [{**group, "rules": [faster(rule) for rule in group["rules"]]} for group in groups]
        (home / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
        scraped = [
            {"targets": [url.removeprefix("http://")], "labels": {"namespace": name, "pod": f"{name}-0"}}
            for name, url in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(home / "rules.yaml")],
            "scrape_configs": [{"job_name": "ragblend", "static_configs": scraped}],
        }
        (home / "prometheus.yaml").write_text(yaml.safe_dump(config))
        url = f"http://127.0.0.1:{free_port()}"
        options = ["--config.file", str(home / "prometheus.yaml"), "--storage.tsdb.path", str(home / "data")]
        command = [found, *options, "--web.listen-address", url.removeprefix("http://")]
        super().__init__(command, url, home, os.environ)

    def wait_up(self) -> None:
        """Wait until it answers queries."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/-/ready").status_code == 200:
                    return
            time.sleep(0.2)
        raise BackendUnreachableError(f"Prometheus did not start; see {self.home}/log")

    def firing(self) -> dict[str, str]:
        """Return {alert: value} of the alerts that fire."""
        alerts = httpx.get(f"{self.url}/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        return {each["labels"]["alertname"]: each["value"] for each in alerts if each["state"] == "firing"}

    def value(self, query: str) -> float:
        """Return the sum of a query's values."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}).raise_for_status().json()
        return sum(float(each["value"][1]) for each in answer["data"]["result"])


class Server(Replica):
    """One `ragblend serve demo`, whose flags can be changed before its next start."""

    def restart(self, *flags: str) -> None:
        """Stop it, and start it with other flags."""
        self.stop()
        self._command = [*self._command[: self._command.index(FLAGS[0])], *FLAGS, *flags]
        self.start()
        self.wait()

    def send(self, *numbers: int) -> None:
        """Send documents, and wait until no document is pending."""
        self.post_documents(*numbers)
        while self.num_pending():
            time.sleep(0.5)

    def post_documents(self, *numbers: int) -> None:
        """Send documents."""
        body = [{"id": str(number), "chunks": [text_of(number)]} for number in numbers]
        httpx.post(f"{self.url}{DOCUMENTS}", json={"documents": body}, timeout=60).raise_for_status()

    def num_pending(self) -> int:
        """Return the number of documents that wait."""
        answer = httpx.get(f"{self.url}{DOCUMENTS}", timeout=60).raise_for_status().json()
        return sum(each["num_waiting"] for each in answer["collections"].values())

    def ask(self, *numbers: int, max_tokens: int = 2, timeout_s: float = 120) -> None:
        """Ask about documents."""
        prompt = f"<s>{''.join(f'<doc> {text_of(number)}' for number in numbers)}<q> What does the firm sell?<a>"
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body |= {"add_special_tokens": False}
        httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s).raise_for_status()

    def files(self) -> list[Path]:
        """Return the paths of the stored KV."""
        return sorted(self.store.glob("kv/??/*.safetensors"))

    def ready(self) -> dict[str, Any]:
        """Return the state that the readiness route reports."""
        return dict(httpx.get(f"{self.url}/ragblend/ready", timeout=30).json())


class Trial:
    """The servers, and what was found out about each alert."""

    def __init__(self, home: Path, stack: ExitStack, notify: Callable[[str], None]) -> None:
        self.home, self._stack, self._notify = home, stack, notify
        self.results: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, Any] = {}
        self.postgres = stack.enter_context(run_postgres())
        self.redis = Redis(home)
        stack.callback(self.redis.kill)
        self.redis.start()
        paged = ("--kv-cache-memory-bytes", str(MANY_BYTES))
        remote = {"RAGBLEND_REMOTE": self.redis.url, "RAGBLEND_CATALOG": self.postgres.url}
        small = {"RAGBLEND_MEMORY_GIB": "0"}  # what is read is read from the disk or the remote tier
        self.plain = Server("plain", home / "plain", 1, [*FLAGS, *paged], **small)
        self.shared = Server("shared", home / "shared", 1, [*FLAGS, *paged], **small, **remote)
        for server in self.servers:
            stack.callback(server.kill)
            server.start()
        for server in self.servers:
            server.wait()
            server.send(*range(NUM_DOCUMENTS))
        self.prometheus = Prometheus(home / "prometheus", {each.name: each.url for each in self.servers})
        stack.callback(self.prometheus.kill)
        self.prometheus.start()
        self.prometheus.wait_up()

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both servers."""
        return (self.plain, self.shared)

    def run(self, alerts: tuple[str, ...], case: Case) -> None:
        """Provoke the alerts by one case, wait until they fire, repair, and wait until they are gone."""
        self._notify(f"{', '.join(alerts)}: {(case.__doc__ or '').splitlines()[0]}")
        fired = dict[str, dict[str, Any]]()
        with contextmanager(case)(self):
            start_s = time.monotonic()
            while len(fired) < len(alerts) and time.monotonic() < start_s + FIRES_S:
                for name, value in self.prometheus.firing().items():
                    if name in alerts and name not in fired:
                        fired[name] = {"value": float(value), "fired_s": round(time.monotonic() - start_s, 1)}
                time.sleep(0.5)
        repaired_s = time.monotonic()
        with self.traffic(1, self._trickle):
            while time.monotonic() < repaired_s + CLEARS_S:
                still = self.prometheus.firing().keys() & set(alerts)
                for name in set(alerts) & fired.keys() - still:
                    fired[name].setdefault("cleared_s", round(time.monotonic() - repaired_s, 1))
                if not still:
                    break
                time.sleep(0.5)
        for name in alerts:
            self.results[name] = {"provoked_by": (case.__doc__ or "").splitlines()[0], **fired.get(name, {})}
            self._notify(f"  {name}: {self.results[name]}")

    @contextmanager
    def traffic(self, num_clients: int, ask: Callable[[random.Random], None]) -> Iterator[None]:
        """Call `ask` in threads, again and again."""
        ended = threading.Event()

        def work(number: int) -> None:
            draw = random.Random(number)
            while not ended.is_set():
                with suppress(httpx.HTTPError):  # a server that is down
                    ask(draw)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join(130)

    def _trickle(self, draw: random.Random) -> None:
        for server in self.servers:
            with suppress(httpx.HTTPError):
                server.ask(draw.randrange(NUM_DOCUMENTS), timeout_s=20)
        time.sleep(0.3)

    def type(self, *command: str) -> list[str]:
        """Run a command of ragblend. Return the lines that it prints."""
        done = subprocess.run([sys.executable, "-m", "ragblend", *command], capture_output=True, text=True, timeout=900)
        return [line.replace(str(self.home), "") for line in done.stdout.splitlines()]


def ask_some(server: Server, draw: random.Random) -> None:
    """Ask about three documents in a random order, so that vLLM's prefix cache seldom has the prompt."""
    server.ask(*draw.sample(range(NUM_DOCUMENTS), 3))


# -- cases: the fault, then `yield` while the alert is waited for, then the repair


def damaged(trial: Trial) -> Iterator[None]:
    """A byte in the middle of 20 of 40 files of stored KV is flipped."""
    for path in trial.plain.files()[::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
    with trial.traffic(2, partial(ask_some, trial.plain)):
        yield
    trial.notes["verify of a damaged store"] = trial.type("verify", "--store", str(trial.plain.store))[:1]
    trial.plain.send(*range(NUM_DOCUMENTS))
    trial.notes["verify after sending again"] = trial.type("verify", "--store", str(trial.plain.store))[:1]


def missing(trial: Trial) -> Iterator[None]:
    """The folder of the store is moved away."""
    store, away = trial.plain.store, trial.home / "away"
    store.rename(away)
    with trial.traffic(1, partial(ask_some, trial.plain)):
        yield
        trial.notes["ready without a store"] = trial.plain.ready()
    shutil.rmtree(store, ignore_errors=True)
    away.rename(store)
    trial.plain.ask(0)


def few_hits(trial: Trial) -> Iterator[None]:
    """All files of stored KV are deleted."""
    for path in trial.plain.files():
        path.unlink()
    with trial.traffic(2, partial(ask_some, trial.plain)):
        yield
        trial.plain.send(*range(NUM_DOCUMENTS))
        trial.notes["entries after sending again"] = len(trial.plain.files())
        time.sleep(30 * 60 / SPEED)  # the requests before count for the range of the rule


def left_to_vllm(trial: Trial) -> Iterator[None]:
    """The machine profile says that the disk reads 100 kB/s."""
    plain = trial.plain
    plain.stop()
    trial.type("profile", "--backend", "vllm", "--model", "demo", "--store", str(plain.store))
    for path in plain.store.glob("machines/*.json"):
        profile = machine_profile_from(decode_signed_json(path.read_bytes(), MACHINES_DIR, None))
        write_profile(plain.store, replace(profile, bytes_per_s=dict.fromkeys(profile.bytes_per_s, 1e5)))
    plain.start()
    plain.wait()
    with trial.traffic(2, partial(ask_some, plain)):
        yield
    shutil.rmtree(plain.store / "machines")
    plain.restart("--kv-cache-memory-bytes", str(MANY_BYTES))


def overload(trial: Trial) -> Iterator[None]:
    """24 clients want long answers of a server with paged KV for four of them."""
    trial.plain.restart("--kv-cache-memory-bytes", str(FEW_BYTES))

    def ask_long(draw: random.Random) -> None:
        trial.plain.ask(draw.randrange(NUM_DOCUMENTS), max_tokens=LONG_ANSWER)

    with trial.traffic(NUM_CLIENTS, ask_long):
        yield
        trial.plain.restart("--kv-cache-memory-bytes", str(MANY_BYTES))
        time.sleep(60)  # the same clients, and more paged KV
        trial.notes["waiting with more paged KV"] = trial.prometheus.value("max(vllm:num_requests_waiting)")


def catalog_down(trial: Trial) -> Iterator[None]:
    """PostgreSQL is stopped."""
    trial.postgres.stop()
    with trial.traffic(1, partial(ask_some, trial.shared)):
        yield
        trial.notes["ready without a catalogue"] = trial.shared.ready()
    trial.postgres.start()


def documents_wait(trial: Trial) -> Iterator[None]:
    """16 clients ask all the time, and 300 documents are sent."""
    with trial.traffic(16, partial(ask_some, trial.shared)):
        trial.shared.post_documents(*range(1000, 1300))
        yield
    while trial.shared.num_pending():
        time.sleep(0.5)


def drops_writes(trial: Trial) -> Iterator[None]:
    """Redis is full and evicts nothing."""
    import redis

    client = redis.Redis(port=trial.redis.port)
    client.config_set("maxmemory", "1mb")
    trial.shared.post_documents(*range(2000, 2020))
    with trial.traffic(1, partial(ask_some, trial.shared)):
        yield
    client.config_set("maxmemory", "0")
    push = trial.type("push", "--store", str(trial.shared.store), "--remote", trial.redis.url)
    trial.notes["push"] = [line.replace(str(trial.redis.port), "6379") for line in push]


def loading_slow(trial: Trial) -> Iterator[None]:
    """Redis answers after 3 s, and only Redis has the chunks."""
    import redis

    client = redis.Redis(port=trial.redis.port)
    numbers = iter(range(1000, 1300))
    for path in trial.shared.files():
        path.unlink()

    def ask_one(draw: random.Random) -> None:
        client.client_pause(3000)
        trial.shared.ask(next(numbers))

    with trial.traffic(1, ask_one):
        yield


def stuck(trial: Trial) -> Iterator[None]:
    """The engine's process is suspended while a request waits for Redis and none runs."""
    shared = trial.shared
    for path in shared.files():
        path.unlink()
    redis = trial.redis.process
    assert redis is not None
    os.kill(redis.pid, signal.SIGSTOP)
    asking = threading.Thread(target=_ask_and_fail, args=(shared,), daemon=True)
    asking.start()
    end_s = time.monotonic() + 4.5
    while time.monotonic() < end_s:
        text = httpx.get(f"{shared.url}/metrics", timeout=10).text
        waiting, running = (
            sum(
                float(value) for value in re.findall(rf"^vllm:num_requests_{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
            )
            for name in ("waiting", "running")
        )
        if waiting > 0 and running == 0:
            break
    for pid in shared.pids():
        if "VLLM" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(pid, signal.SIGSTOP)
    yield
    shared.kill()
    os.kill(redis.pid, signal.SIGCONT)
    shared.start()
    shared.wait()


def _ask_and_fail(server: Server) -> None:
    with suppress(httpx.HTTPError):
        server.ask(1200, 1201, timeout_s=300)


def remote_down(trial: Trial) -> Iterator[None]:
    """Redis is stopped."""
    trial.redis.kill()
    with trial.traffic(1, _once_a_second(partial(ask_some, trial.shared))):
        yield
        trial.notes["ready without a remote tier"] = trial.shared.ready()
    trial.redis.start()


def _once_a_second(ask: Callable[[random.Random], None]) -> Callable[[random.Random], None]:
    def paced(draw: random.Random) -> None:
        ask(draw)
        time.sleep(1.0)

    return paced


CASES: dict[tuple[str, ...], Case] = {
    ("RagblendDamagedEntries",): damaged,
    ("RagblendStoreMissing",): missing,
    ("RagblendFewHits",): few_hits,
    ("RagblendSlowFirstToken", "RagblendQueueLong", "RagblendPagedKvFull"): overload,
    ("RagblendCatalogUnreachable",): catalog_down,
    ("RagblendDocumentsWait",): documents_wait,
    ("RagblendRemoteDropsWrites",): drops_writes,
    ("RagblendLoadingSlow",): loading_slow,
    ("RagblendStuck",): stuck,
    ("RagblendRemoteFailing",): remote_down,
    ("RagblendRequestsLeftToVllm",): left_to_vllm,
}


def main(only: str = "", out: Path | None = None) -> None:
    """Provoke all alerts, or those whose names contain a part of `only` ("Damaged,Stuck").

    With `only`, the other alerts in the file `out` stay as they are. The exit code is 1 if one did not fire, or stayed.
    """
    earlier = json.loads(out.read_text()) if only and out is not None and out.exists() else {"alerts": {}, "seen": {}}
    with tempfile.TemporaryDirectory(prefix="ragblend-alerts-") as home, ExitStack() as stack:
        trial = Trial(Path(home), stack, print_notice)
        for alerts, case in CASES.items():
            if any(part in name for name in alerts for part in only.split(",")):
                try:
                    trial.run(alerts, case)
                except (httpx.HTTPError, RagblendError, subprocess.SubprocessError) as error:
                    trial.results |= {name: {"error": repr(error)} for name in alerts}
                    print_notice(f"  {error!r}")
        found = earlier["alerts"] | trial.results
    problems = [name for name in found if "cleared_s" not in found[name]]
    facts = {
        "command": "benchmarks.soak.alerts",
        "hardware": vllm_hardware_card(),
        "speed": {"RagblendRemoteFailing": SPEEDS["RagblendRemoteFailing"], "others": SPEED},
        "alerts": {name: found[name] for alerts in CASES for name in alerts if name in found},
        "seen": earlier["seen"] | trial.notes,
        "problems": problems,
    }
    write_both(facts, out)
    if problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
