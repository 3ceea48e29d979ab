"""Deployment under test: `ragblend serve` replicas, a Redis and a file of API keys, as processes of this machine.

Each process can be killed (SIGKILL) and restarted at the same address.
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

from benchmarks.ports import free_port
from benchmarks.soak.memory import rss_bytes
from benchmarks.soak.work import TENANTS, Text
from ragblend.catalog.registry import ChunkRegistry
from ragblend.errors import BackendUnreachableError, NotFoundError
from ragblend.files.store_folder import CATALOG_FILE

ADMIN_KEY = "soak-key-of-the-admin"
ON_CPU = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32")
PAGED_KV_BYTES = 8 << 20
"""Size of the KV cache, about seven prompts, so that requests wait for blocks as they would with long prompts."""
MEMORY_GIB = 0.01  # about thirty chunks, so that the memory tier evicts throughout the run
WITHOUT_PERSISTENCE = ("--save", "", "--appendonly", "no")
REDIS_OPTIONS = (*WITHOUT_PERSISTENCE, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
START_S, STOP_S = 600.0, 60.0
READING_BODY = {"model": "demo", "prompt": [1, 7], "max_tokens": 2, "ignore_eos": True}
"""Request that is sent before counters are read, because the engine updates its counters in the next step."""
OF_READING = {"finished_length": 1, "generation_tokens_total": 2}
"""Contribution of that request to the counters."""


def flags_of(remote: str, keys: Path) -> list[str]:
    """Return the `ragblend serve` flags of the replicas."""
    paged = ["--kv-cache-memory-bytes", str(PAGED_KV_BYTES)]
    return ["--api-keys-file", str(keys), "--remote", remote, *ON_CPU, *paged]


def key_of(tenant: str) -> str:
    """Return the API key of the namespace `tenant`."""
    return f"soak-key-of-{tenant}"


class Redis:
    """A redis-server process with `options`. Without persistence its entries are lost when it is killed."""

    def __init__(self, home: Path, options: Sequence[str] = REDIS_OPTIONS) -> None:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            raise NotFoundError("redis-server is not installed; run: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(home), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    def start(self) -> None:
        """Start the process and wait until it answers. Raises BackendUnreachableError after STOP_S seconds."""
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
        """Send SIGKILL to the process, if it runs, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def rss_bytes(self) -> dict[str, int]:
        """Return {process name: resident bytes}; empty if the process does not run."""
        process = self._process
        rss = rss_bytes(process.pid) if process is not None else None
        return {} if rss is None else {f"redis {self.num_starts}": rss}


@dataclass(slots=True)
class ReplicaRun:
    """A replica from one start to its end. Times are in seconds of `time.monotonic`."""

    name: str
    start_s: float
    read_s: float | None = None  # when its counters were last read, with no request in progress
    end_s: float | None = None
    counters: dict[str, float] = field(default_factory=dict)  # values at `read_s`


class Replica:
    """One `ragblend serve` with its own store, and the processes it starts. `runs` has an element per start."""

    def __init__(
        self, name: str, home: Path, threads: int, flags: Sequence[str], model: str = "demo", **environment: str
    ) -> None:
        self.name, self.home, self.port = name, home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.runs: list[ReplicaRun] = []
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
        """Start the server over its store, and add an element to `runs`. Does not wait until it is healthy."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.home, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        self.runs.append(ReplicaRun(f"{self.name} {len(self.runs) + 1}", time.monotonic()))

    def wait(self) -> None:
        """Wait until the server is healthy. Raises BackendUnreachableError if it ends, or after START_S seconds."""
        assert self._process is not None
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        log = (self.home / "log").read_text(errors="replace")[-2000:]
        raise BackendUnreachableError(f"{self.name} did not start; its log ends with:\n{log}")

    def read_counters(self) -> None:
        """Store the values of `/metrics` in the current run. No request may be in progress."""
        with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60) as http:
            time.sleep(2.0)  # the requests of clients that disconnected last are still being aborted
            http.post("/v1/completions", json=READING_BODY).raise_for_status()
            time.sleep(1.0)
            self.runs[-1].counters = counters_in(http.get("/metrics").raise_for_status().text)
        self.runs[-1].read_s = time.monotonic()

    def register_texts(self, texts: Sequence[Text], tokenizer: str) -> None:
        """Add the texts to the catalogue of every namespace, so that the replica finds them in all prompts.

        tokenizer: fingerprint of the tokenizer that made the ids.
        """
        with ChunkRegistry(self.store / CATALOG_FILE) as registry:
            for tenant in TENANTS:
                registry.add_ids(((f"text {text.number}", text.token_ids) for text in texts), tokenizer, tenant)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the replica, if it runs, and wait for their end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.runs[-1].end_s = time.monotonic()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGINT to all processes of the replica. Kill them if they run longer than STOP_S seconds."""
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
        """Return the ids of the replica's processes; empty if it does not run."""
        process = self._process
        return [] if process is None or process.poll() is not None else _session_of(process.pid)

    def tracebacks(self) -> list[str]:
        """Return the last line of each traceback in the log."""
        found, inside = [], False
        for line in (self.home / "log").read_text(errors="replace").splitlines():
            text = re.sub(r"^\([^)]*\)\s*(ERROR [^]]*\])?", "", line)  # without process, time and source line
            if "Traceback (most recent call last)" in text:
                inside = True
            elif inside and text.strip() and not text.startswith("  "):
                found.append(text.strip()[:300])
                inside = False
        return found

    def rss_bytes(self) -> dict[str, int]:
        """Return {process name: resident bytes} of the API server and vLLM's processes."""
        process, found = self._process, {}
        for pid in self.pids():
            role = "api" if process is not None and pid == process.pid else _command_of(pid)
            if role.startswith("VLLM") or role == "api":
                rss = rss_bytes(pid)
                if rss is not None:
                    found[f"{self.runs[-1].name} {role.removeprefix('VLLM::').lower()}"] = rss
        return found


def counters_in(text: str) -> dict[str, float]:
    """Return vLLM's counters in a `/metrics` text: {name without "vllm:": sum over all labels}.

    Finished requests are counted by reason, as `finished_REASON`.

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
    """Return the `keys` of a keys file: a key with the rights ask and ingest for each tenant, and an admin key."""
    return {
        **{key_of(tenant): {"namespace": tenant, "rights": ["ask", "ingest"]} for tenant in tenants},
        ADMIN_KEY: {"namespace": "operations", "rights": ["admin"]},
    }


def write_keys(path: Path, tenants: Sequence[str]) -> None:
    """Write a keys file for the tenants, readable only by the owner."""
    path.touch(mode=0o600)
    path.write_text(json.dumps({"open": ["/health"], "keys": grants(tenants)}))


def _session_of(leader: int) -> list[int]:
    """Return the ids of the processes in the session of `leader`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            # pid (name) state ppid pgrp session ...; the name may contain spaces and parentheses
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(folder.name))
    return found


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
