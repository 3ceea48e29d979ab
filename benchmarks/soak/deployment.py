"""Two `ragblend serve` replicas, a Redis between them and a file of API keys, as processes of this machine.

Everything can be killed (kill -9) and started again at its old address. Knows texts; knows nothing of prompts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak.memory import rss_bytes
from benchmarks.soak.work import TENANTS, Text
from ragblend.catalog.registry import ChunkRegistry
from ragblend.errors import BackendUnreachableError, NotFoundError
from ragblend.files.store_folder import CATALOG_FILE

ADMIN_KEY = "soak-key-of-the-admin"
ON_CPU = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32")
PAGED_KV_BYTES = 8 << 20
"""Room for about seven prompts at once: requests wait for blocks, as they would behind long prompts."""
MEMORY_GIB = 0.01  # about thirty chunks, so that the memory tier evicts all the while
WITHOUT_PERSISTENCE = ("--save", "", "--appendonly", "no")
REDIS_OPTIONS = (*WITHOUT_PERSISTENCE, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
START_S, STOP_S = 600.0, 60.0
READING_BODY = {"model": "demo", "prompt": [1, 7], "max_tokens": 2, "ignore_eos": True}
"""Sent when counters are read: the engine tells what it has counted at its next step."""
OF_READING = {"finished_length": 1, "generation_tokens_total": 2}
"""What that adds to the counters."""


def flags_of(remote: str, keys: Path) -> list[str]:
    """What the soak's replicas are served with."""
    paged = ["--kv-cache-memory-bytes", str(PAGED_KV_BYTES)]
    return ["--api-keys-file", str(keys), "--remote", remote, *ON_CPU, *paged]


def key_of(tenant: str) -> str:
    """The API key that is bound to the namespace `tenant`."""
    return f"soak-key-of-{tenant}"


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Redis:
    """A redis-server with `options`. Without persistence it loses its entries when it is killed."""

    def __init__(self, home: Path, options: Sequence[str] = REDIS_OPTIONS) -> None:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            raise NotFoundError("there is no redis-server here; install one: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(home), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start(self) -> None:
        """Empty. Returns once it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)
        self.num_starts += 1
        end_s = time.monotonic() + STOP_S
        while not self._answers():
            if time.monotonic() > end_s:
                raise BackendUnreachableError(f"redis-server did not start within {STOP_S:g} s")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory, by process."""
        process = self._process
        rss = rss_bytes(process.pid) if process is not None else None
        return {} if rss is None else {f"redis {self.num_starts}": rss}


@dataclass(slots=True)
class ReplicaRun:
    """A replica from one start to its end, in seconds of `time.monotonic`."""

    name: str
    start_s: float
    read_s: float | None = None  # when its counters were last read, with no request under way
    end_s: float | None = None
    counters: dict[str, float] = field(default_factory=dict)  # then


class ServedReplica:
    """A server that runs, as clients see it: where it is, and its lives with their counters."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self.lives: list[ReplicaRun] = []
        self._before: dict[str, float] = {}

    def begin(self) -> None:
        """Clients begin now; what was counted before is not theirs."""
        self._before = self._counters()
        self.lives.append(ReplicaRun(f"{self.name} {len(self.lives) + 1}", time.monotonic()))

    def read_counters(self) -> None:
        """Note what `/metrics` says. Nothing may be under way; what was counted last is brought out by a step more."""
        life, now = self.lives[-1], self._counters()
        life.counters = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        life.read_s = time.monotonic()

    def _counters(self) -> dict[str, float]:
        with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60) as http:
            time.sleep(2.0)  # those who hung up last are still being aborted
            http.post("/v1/completions", json=READING_BODY).raise_for_status()
            time.sleep(1.0)
            return counters_in(http.get("/metrics").raise_for_status().text)


class Replica(ServedReplica):
    """One `ragblend serve` with a store of its own, and all the processes it starts. `flags` are those of `serve`."""

    def __init__(
        self, name: str, home: Path, threads: int, flags: Sequence[str], model: str = "demo", **environment: str
    ) -> None:
        self.home, self.port = home, free_port()
        super().__init__(name, f"http://127.0.0.1:{self.port}")
        home.mkdir()
        self.store = home / "kv"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", "ragblend", "serve", model, "--store", str(self.store)]
        self._command += ["--port", str(self.port), *flags]
        left_out = ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY", "RAGBLEND_API_KEY")
        self._environment = {name: value for name, value in os.environ.items() if name not in left_out} | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            **environment,
        }

    def start(self) -> None:
        """Begin another life, with the store of the one before. Returns at once: `wait` before asking it."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.home, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self.lives.append(ReplicaRun(f"{self.name} {len(self.lives) + 1}", time.monotonic()))

    def wait(self) -> None:
        """Until it is healthy."""
        assert self._process is not None
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        said = (self.home / "log").read_text(errors="replace")[-2000:]
        raise BackendUnreachableError(f"{self.name} did not come up; its log ends with:\n{said}")

    def make_known(self, texts: Sequence[Text], tokenizer: str) -> None:
        """Have the replica find these texts in everybody's prompts, as those who ingest them do.

        `tokenizer`: the fingerprint of the ids' tokenizer.
        """
        with ChunkRegistry(self.store / CATALOG_FILE) as registry:
            for tenant in TENANTS:
                registry.add_ids(((f"text {text.number}", text.token_ids) for text in texts), tokenizer, tenant)

    def kill(self) -> None:
        """Kill -9, to all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.lives[-1].end_s = time.monotonic()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """As Ctrl-C does; killed when that takes too long."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def pids(self) -> list[int]:
        """Its processes; none where it does not run."""
        process = self._process
        return [] if process is None or process.poll() is not None else _session_of(process.pid)

    def tracebacks(self) -> list[str]:
        """Errors with a traceback in the log, each by its last line."""
        found, inside = [], False
        for line in (self.home / "log").read_text(errors="replace").splitlines():
            said = re.sub(r"^\([^)]*\)\s*(ERROR [^]]*\])?", "", line)  # the process, time and place before it
            if "Traceback (most recent call last)" in said:
                inside = True
            elif inside and said.strip() and not said.startswith("  "):
                found.append(said.strip()[:300])
                inside = False
        return found

    def rss_bytes(self) -> dict[str, int]:
        """Resident memory, by process."""
        process, found = self._process, {}
        for pid in self.pids():
            role = "api" if process is not None and pid == process.pid else _command_of(pid)
            if role.startswith("VLLM") or role == "api":
                rss = rss_bytes(pid)
                if rss is not None:
                    found[f"{self.lives[-1].name} {role.removeprefix('VLLM::').lower()}"] = rss
        return found


def counters_in(text: str) -> dict[str, float]:
    """Series of vLLM in a `/metrics` text by name, without `vllm:`, summed over their labels; of finished requests by
    reason.

    >>> counters_in('vllm:a_total{engine="0"} 2.0\\nvllm:request_success_total{engine="0",finished_reason="stop"} 1.0')
    {'a_total': 2.0, 'finished_stop': 1.0}
    """
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        if name == "request_success_total":
            reason = dict(pair.split("=", 1) for pair in labels.split(","))["finished_reason"]
            name = f"finished_{reason.strip(chr(34))}"
        if name.endswith("_total") or name.startswith("finished_"):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def grants(tenants: Sequence[str]) -> dict[str, Any]:
    """API keys of a keys file: each of `tenants` may ask and ingest."""
    return {
        **{key_of(tenant): {"namespace": tenant, "rights": ["ask", "ingest"]} for tenant in tenants},
        ADMIN_KEY: {"namespace": "operations", "rights": ["admin"]},
    }


def write_keys(path: Path, tenants: Sequence[str]) -> None:
    """The keys file."""
    path.touch(mode=0o600)
    path.write_text(json.dumps({"open": ["/health"], "keys": grants(tenants)}))


def _session_of(leader: int) -> list[int]:
    """Processes of the session that `leader` began."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            # pid (name) state ppid pgrp session ...; a name may have blanks and brackets in it
            if int((place / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(place.name))
    return found


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
