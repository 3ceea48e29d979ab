"""`ragblend serve demo` as a separate process, on a CPU, for tests that send requests over HTTP."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from servers import HttpServer

from benchmarks.servers import free_port
from ragblend.catalog.ledger import Ledger
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.render import Renderer

# What the tests set for engines in their own process, or a user for a server of theirs.
_NOT_PASSED_ON = (
    "VLLM_PLUGINS",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_API_KEY",
    "RAGBLEND_API_KEY",
)


def environment(**own: str) -> dict[str, str]:
    """Return the environment of a server on this machine: one thread, bound to no core."""
    passed_on = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    return {**passed_on, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **own}


def start_demo(home: Path, *options: str, port: int | None = None, **own: str) -> HttpServer:
    """The embedded model served over the store `home`/kv, with vLLM's `options` and variables of its `own`. Not
    ready yet: `wait`. The caller stops it."""
    port = free_port() if port is None else port
    command = [sys.executable, "-m", "ragblend", "serve", "demo", "--store", str(home / "kv"), "--port", str(port)]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), *options]
    return HttpServer(command, f"http://127.0.0.1:{port}", home, environment(**own))


def metrics(url: str, key: str = "") -> dict[str, float]:
    """The values of vLLM's and ragblend's series in a server's `/metrics`, summed over their labels."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: dict[str, float] = {}
    lines = httpx.get(f"{url}/metrics", headers=headers, timeout=60).text
    for name, value in re.findall(r"^(vllm:\w+)\{[^}]*\} (\S+)$", lines, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def make_known(store: Path, renderer: Renderer, texts: list[str], namespace: str = "") -> None:
    """Have the server over `store` find chunks in prompts, as its own ingestion does."""
    with Ledger(store / CATALOG_FILE) as ledger:
        ledger.add_ids(((text, renderer.chunk_ids(text)) for text in texts), renderer.fingerprint, namespace)


@contextmanager
def served_demo(home: Path, *options: str, **own: str) -> Iterator[HttpServer]:
    """The same, ready, and stopped afterwards."""
    server = start_demo(home, *options, **own)
    try:
        server.wait(900)
        yield server
    finally:
        server.stop()
