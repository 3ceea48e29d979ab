"""Servers that a benchmark or a test runs as processes of this machine: HTTP servers, and Redis.

Each can be killed (SIGKILL) and started again at the same address.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from ragblend.errors import BackendUnreachableError, NotFoundError

START_S, STOP_S = 600.0, 60.0
WITHOUT_PERSISTENCE = ("--save", "", "--appendonly", "no")
SERVER_PORTS = range(10_000, 32_768)
"""Below the ports that Linux (`ip_local_port_range`), macOS and Windows give to outgoing connections.

Above, a connection can take the port before the server starts, or while it restarts.
"""


def free_port() -> int:
    """Return a port of `SERVER_PORTS` that is not in use.

    Raises:
        OSError: 1,000 ports drawn at random are all in use.
    """
    # Not the shared generator: each test seeds it, so that all processes would choose the same port.
    for port in random.SystemRandom().sample(SERVER_PORTS, 1000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        f"no loopback port between {SERVER_PORTS[0]} and {SERVER_PORTS[-1]} is free; stop servers of earlier runs"
    )


class ServerProcess:
    """An HTTP server and its child processes. They write to one log, `home`/log, which all starts share.

    `command`: the command line of the server, which listens at `url`. It runs in the folder `home`.
    """

    def __init__(self, command: Sequence[str], url: str, home: Path, environment: Mapping[str, str]) -> None:
        self.url, self.home = url, home
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server. Does not wait until it is healthy."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.home, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, timeout_s: float = START_S) -> None:
        """Wait until the server is healthy. Raises BackendUnreachableError if it ends, or after `timeout_s` seconds."""
        assert self._process is not None
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        log = (self.home / "log").read_text(errors="replace")[-4000:]
        raise BackendUnreachableError(f"the server at {self.url} did not start; its log ends with:\n{log}")

    def kill(self) -> None:
        """Send SIGKILL to all processes of the server, if it runs, and wait for their end."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGINT to all processes of the server. Kill them if they run longer than STOP_S seconds."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None


class Redis:
    """A redis-server process with `options`. Without persistence its entries are lost when it is killed."""

    def __init__(self, home: Path, options: Sequence[str] = WITHOUT_PERSISTENCE) -> None:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            raise NotFoundError("no redis-server or valkey-server; install one: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(home), *options]

    def start(self, *options: str) -> None:
        """Start the process, with more `options`, and wait until it answers.

        Raises BackendUnreachableError after STOP_S seconds.
        """
        self.process = subprocess.Popen([*self._command, *options], stdout=subprocess.DEVNULL, start_new_session=True)
        end_s = time.monotonic() + STOP_S
        while not self._answers():
            if time.monotonic() > end_s:
                raise BackendUnreachableError(f"redis-server did not start within {STOP_S:g} s")
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def kill(self) -> None:
        """Send SIGKILL to the process, if it runs, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class SlowLine:
    """A TCP line in front of a loopback port, as a process: `bytes_per_s` for all replies together, `latency_s` each.

    A reply is delayed by the latency once, and then sent at the speed that its connections share.
    """

    def __init__(self, target_port: int, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.port = free_port()
        arguments = (self.port, target_port, bytes_per_s, latency_s)
        self._process = multiprocessing.get_context("spawn").Process(target=_run_line, args=arguments, daemon=True)

    def __enter__(self) -> SlowLine:
        self._process.start()
        end_s = time.monotonic() + STOP_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                if time.monotonic() > end_s:
                    raise BackendUnreachableError(f"the line did not open within {STOP_S:g} s") from None
                time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _run_line(port: int, target_port: int, bytes_per_s: float, latency_s: float) -> None:
    lock, busy_until_s = threading.Lock(), 0.0

    def wait_for_line(num_bytes: int) -> None:
        nonlocal busy_until_s
        with lock:
            busy_until_s = max(time.monotonic(), busy_until_s) + num_bytes / bytes_per_s
            until_s = busy_until_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def forward(source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                wait_for_line(len(data)) if is_reply else time.sleep(latency_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            client, _ = server.accept()
            with suppress(OSError):
                upstream = socket.create_connection(("127.0.0.1", target_port))
                for source, target, is_reply in ((client, upstream, False), (upstream, client, True)):
                    threading.Thread(target=forward, args=(source, target, is_reply), daemon=True).start()
