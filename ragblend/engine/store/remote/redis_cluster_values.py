"""Chunk files in a Redis or Valkey Cluster: `redis+cluster://[:PASSWORD@]HOST[:PORT]`, `rediss+cluster://` for TLS.

HOST is any node, or a name that resolves to one. The client discovers the other nodes, and discovers them again when
they change. The cluster's own hash of a key selects its node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from random import sample
from typing import Any, cast

from redis import RedisError
from redis.cluster import RedisCluster
from redis.connection import parse_url

from ragblend.engine.store.remote.redis_values import (
    NEVER,
    WRITE_TIMEOUT_S,
    BoundedPool,
    RedisValues,
    socket_options,
)
from ragblend.errors import UsageError


class RedisClusterValues(RedisValues):
    """ByteStore over all nodes of a cluster. Connects at the first call.

    The chunks of a failed node are unavailable until the cluster replaces it. A call to it fails and discovers the
    nodes again; nothing is retried here.
    """

    FORM = "redis+cluster://HOST:PORT"

    def _use(self, url: str) -> None:
        url = url.replace("+cluster://", "://", 1)
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        if options.get("db") or "path" in options:
            raise UsageError(f"{self.url}: a cluster has one database, and no socket file; write {self.FORM}")
        self._open = {
            seconds: partial(
                RedisCluster,
                url=url,
                connection_pool_class=BoundedPool,
                retry=NEVER,
                require_full_coverage=False,  # without one node, the chunks of the others stay available
                **socket_options(seconds),
            )
            for seconds in (self._timeout_s, WRITE_TIMEOUT_S)
        }
        self._opened: dict[float, RedisCluster] = {}
        self._opening = threading.Lock()

    @property
    def _reader(self) -> Any:  # type: ignore[override]  # one that connects when it is made
        return self._client(self._timeout_s)

    @property
    def _writer(self) -> Any:  # type: ignore[override]
        return self._client(WRITE_TIMEOUT_S)

    def _client(self, seconds: float) -> RedisCluster:
        with self._opening:
            if seconds not in self._opened:
                self._opened[seconds] = self._open[seconds]()
            return self._opened[seconds]

    def _scan_arguments(self) -> Iterator[Mapping[str, Any]]:
        with self._call(self._timeout_s):
            nodes = self._reader.get_primaries()
        yield from ({"target_nodes": node} for node in nodes)

    def _scan(self, cursor: int, **where: Any) -> tuple[int, list[bytes]]:
        cursors, names = super()._scan(cursor, **where)
        (cursor,) = cast("dict[str, int]", cursors).values()  # by node; one was queried
        return cursor, names

    def ping(self) -> None:
        """Make a round trip to a node that holds chunks. Raises BackendUnreachableError if none of them answers."""
        with self._call(self._timeout_s):
            nodes = self._reader.get_primaries()
            for left, node in enumerate(sample(nodes, len(nodes)), start=1 - len(nodes)):
                try:
                    self._reader.ping(target_nodes=node)
                    return
                except RedisError:
                    if not left:
                        raise

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        with self._opening:
            clients, self._opened = list(self._opened.values()), {}
        for client in clients:
            try:
                client.close()
            except RedisError:
                continue


open_values = RedisClusterValues
"""Called by `open_remote` with the URL and the time limit of one call in seconds."""
