"""Deployment under test: `ragblend serve` replicas, a Redis and a file of API keys, as processes of this machine.

Each process can be killed (SIGKILL) and restarted at the same address.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.servers import WITHOUT_PERSISTENCE, Redis, ServerProcess, free_port
from benchmarks.soak.memory import rss_bytes
from benchmarks.soak.work import TENANTS, Text
from ragblend.catalog.ledger import Ledger
from ragblend.files.store_folder import CATALOG_FILE

ADMIN_KEY = "soak-key-of-the-admin"
ON_CPU = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "32")
PAGED_KV_BYTES = 8 << 20
"""Size of the KV cache, about seven prompts, so that requests wait for blocks as they would with long prompts."""
TERMINATE_S = 90.0  # longer than the default of --shutdown-timeout
MEMORY_GIB = 0.01  # about thirty chunks, so that the memory tier evicts throughout the run
REDIS_OPTIONS = (*WITHOUT_PERSISTENCE, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
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


class SoakRedis(Redis):
    """The Redis of a run. It counts its starts, so that each process has a separate series of memory samples."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, REDIS_OPTIONS)
        self.num_starts = 0

    def start(self, *options: str) -> None:
        """Start the process, and wait until it answers."""
        super().start(*options)
        self.num_starts += 1

    def rss_bytes(self) -> dict[str, int]:
        """Return {process name: resident bytes}; empty if the process does not run."""
        process = self.process
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


class Replica(ServerProcess):
    """One `ragblend serve demo` with its own store, and the processes it starts. `runs` has an element per start."""

    def __init__(self, name: str, home: Path, threads: int, flags: Sequence[str], **environment: str) -> None:
        self.name, self.store = name, home / "kv"
        self.runs: list[ReplicaRun] = []
        home.mkdir()
        port = free_port()
        command = [sys.executable, "-m", "ragblend", "serve", "demo", "--store", str(self.store)]
        left_out = ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY", "RAGBLEND_API_KEY")
        passed_on = {name: value for name, value in os.environ.items() if name not in left_out} | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            **environment,
        }
        super().__init__([*command, "--port", str(port), *flags], f"http://127.0.0.1:{port}", home, passed_on)

    def start(self) -> None:
        """Start the server over its store, and add an element to `runs`. Does not wait until it is healthy."""
        super().start()
        self.runs.append(ReplicaRun(f"{self.name} {len(self.runs) + 1}", time.monotonic()))

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
        with Ledger(self.store / CATALOG_FILE) as ledger:
            for tenant in TENANTS:
                ledger.add_ids(((f"text {text.number}", text.token_ids) for text in texts), tokenizer, tenant)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the replica, if it runs, and wait for their end."""
        if self._process is not None:
            self.runs[-1].end_s = time.monotonic()
        super().kill()

    def terminate(self) -> int | None:
        """Send SIGTERM to the server, and wait until it has ended. Return its exit code; None if it was killed."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        try:
            exit_code = process.wait(TERMINATE_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        self.kill()
        return exit_code

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
