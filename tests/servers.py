"""Servers for tests on free loopback ports: Redis, S3, HTTP servers, and a TCP proxy that injects faults.

If a server is not installed, the test is skipped, and the reason has the command that installs it.
"""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from benchmarks.servers import Redis, ServerProcess, free_port
from ragblend.errors import NotFoundError


def wait_until(claim: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until `claim()` is true. Fails with the text `what` after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


class RedisServer(Redis):
    """A redis-server process without persistence. After `kill` (SIGKILL), `start` starts it again without entries."""

    def __init__(self, directory: Path) -> None:
        pytest.importorskip("redis", reason="redis-py is not installed: pip install 'ragblend[redis]'")
        try:
            super().__init__(directory)
        except NotFoundError as error:
            pytest.skip(str(error))
        self.cluster_port = 0  # port for the other nodes of a cluster


def running_redis(directory: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(directory)
    server.start(*options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running_s3() -> Iterator[int]:
    """Run an empty S3 server (moto). Yield its port."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'ragblend[s3]'")
    server = moto.ThreadedMotoServer("127.0.0.1", free_port(), verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


def point_s3_at(port: int, patch: pytest.MonkeyPatch) -> None:
    """Set the environment variables of S3 to `127.0.0.1:port`, with keys that moto accepts."""
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "test")


class RedisNodes:
    """A Redis Cluster of three nodes. The last node has a replica. `url` is that of the first node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers = [RedisServer(directory) for _ in range(4)]
        self.url = f"redis+cluster://127.0.0.1:{self._servers[0].port}"

    @property
    def last(self) -> RedisServer:
        """Return the node that has a replica."""
        return self._servers[2]

    def start(self) -> None:
        """Start the cluster without entries. Wait until all slots are assigned and the replica is up to date."""
        import redis

        for server in self._servers:
            server.cluster_port = free_port()
            (self._directory / f"{server.port}.conf").unlink(missing_ok=True)
            options = f"--cluster-enabled yes --cluster-node-timeout 1000 --cluster-port {server.cluster_port}"
            server.start(*options.split(), "--cluster-config-file", f"{server.port}.conf")
        *nodes, replica = (redis.Redis(port=server.port) for server in self._servers)
        step = -(-_NUM_SLOTS // len(nodes))
        for number, node in enumerate(nodes):
            last = min((number + 1) * step, _NUM_SLOTS) - 1
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", number * step, last)
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self._servers[1:]:
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, server.cluster_port)
        every = (*nodes, replica)
        wait_until(
            lambda: all(node.cluster("INFO")["cluster_state"] == "ok" for node in every), 60, "the cluster is ok"
        )
        of = nodes[2].execute_command("CLUSTER", "MYID")
        wait_until(lambda: bool(replica.execute_command("CLUSTER", "REPLICATE", of)), 60, "the replica follows")
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up", 60, "the replica is up to date")

    def kill(self) -> None:
        for server in self._servers:
            server.kill()


_NUM_SLOTS = 16384  # of every Redis Cluster


class HttpServer(ServerProcess):
    """A ServerProcess that the constructor starts; `wait` until it is healthy."""

    def __init__(self, command: Sequence[str], url: str, home: Path, environment: Mapping[str, str]) -> None:
        super().__init__(command, url, home, environment)
        self.start()


class LoopbackServer:
    """Server on a loopback port that handles every connection by `_serve` in a separate thread."""

    def __init__(self) -> None:
        self.num_connections = 0
        self._open: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for connection in (self._server, *self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                self.num_connections += 1
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        raise NotImplementedError


class TcpProxy(LoopbackServer):
    """Proxy that forwards a loopback port to another one, or injects the fault `mode`.

    Modes: pass (no fault); delay (`delay_s` before each reply); hang (accept requests, send no reply); drip (one byte
    of the reply per 20 ms); refuse (close each connection at once); error (reply HTTP 500); cut (close after
    `cut_after` bytes of reply); announce (replace the length of a Redis value by `announced`); corrupt (flip a bit of
    each reply).
    """

    def __init__(self, target_port: int) -> None:
        self.mode, self.delay_s, self.cut_after, self.announced = "pass", 0.0, 0, 0
        self._target = ("127.0.0.1", target_port)
        super().__init__()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            if self.mode == "refuse":
                return
            with socket.create_connection(self._target) as server:
                self._open.append(server)
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                self._replies(client, server)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self.mode == "error":
                    client.sendall(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    break
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        sent = 0
        while data := server.recv(1 << 16):
            if self.mode == "hang":
                continue
            if self.mode == "delay":
                time.sleep(self.delay_s)
            if self.mode == "cut":
                client.sendall(data[: max(0, self.cut_after - sent)])
                sent += len(data)
                if sent >= self.cut_after:
                    client.shutdown(socket.SHUT_RDWR)
                    return
            elif self.mode == "announce":
                client.sendall(re.sub(rb"\$\d+\r\n", b"$%d\r\n" % self.announced, data, count=1))
            elif self.mode == "corrupt":
                place = random.randrange(len(data))
                client.sendall(data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :])
            elif self.mode == "drip":
                for index in range(len(data)):
                    client.sendall(data[index : index + 1])
                    time.sleep(0.02)
            else:
                client.sendall(data)


class TalkingServer(LoopbackServer):
    """Server that answers every request with the bytes that `reply(words)` yields, until the client disconnects.

    words: those of a Redis command, or of the first line of an HTTP request.
    """

    def __init__(self, reply: Callable[[list[bytes]], Iterable[bytes]], *, is_http: bool = False) -> None:
        self.num_requests = 0
        self._reply, self._is_http = reply, is_http
        super().__init__()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, client.makefile("rb") as stream:
            while words := self._request(stream):
                self.num_requests += 1
                for part in self._reply(words):
                    client.sendall(part)

    def _request(self, stream: BinaryIO) -> list[bytes]:
        first = stream.readline()
        if not self._is_http:
            return [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(first[1:] or 0))]
        while stream.readline().strip():
            pass
        return first.split()
