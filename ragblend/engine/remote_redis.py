"""Chunk files as values of Redis or Valkey: `redis://[:PASSWORD@]HOST[:PORT][/DB]`, `rediss://` for TLS.

The budget is the server's own: `maxmemory` with `maxmemory-policy allkeys-lru`. Knows bytes under names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from urllib.parse import urlsplit, urlunsplit

from ragblend.errors import BackendUnreachableError, StoreFullError, UsageError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ImportError("a redis:// tier needs redis-py: pip install 'ragblend[redis]'") from error

PREFIX = "ragblend:kv:"
CONNECT_TIMEOUT_S = 1.0
WRITE_TIMEOUT_S = 30.0  # a large value over a slow line; only the writer thread waits
_MAX_VALUE_BYTES = 512 * 1024 * 1024  # Redis' own limit (proto-max-bulk-len)
_SCAN_BATCH = 500


class RedisValues:
    """ByteStore in one Redis database, under `ragblend:kv:KEY`. Connects at the first call, not before.

    `timeout_s` bounds each wait for the server. Nothing is retried here: the caller counts and decides.
    """

    max_value_bytes = _MAX_VALUE_BYTES

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = redacted(url)
        try:
            self._reader, self._writer = (self._client(url, seconds) for seconds in (timeout_s, WRITE_TIMEOUT_S))
        except (ValueError, redis.RedisError) as error:
            raise UsageError(f"{self.url} is not a Redis URL ({error}); write redis://HOST:PORT/DB") from error

    @staticmethod
    def _client(url: str, timeout_s: float) -> redis.Redis:
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=min(CONNECT_TIMEOUT_S, timeout_s),
            socket_timeout=timeout_s,
            socket_read_size=1 << 20,  # values are megabytes
            retry=Retry(NoBackoff(), 0),
        )

    def get(self, name: str) -> bytes | None:
        """The value, or None."""
        with self._errors():
            return cast("bytes | None", self._reader.get(PREFIX + name))

    def put(self, name: str, data: bytes) -> None:
        """Set the value, in one step."""
        with self._errors():
            self._writer.set(PREFIX + name, data)

    def contains(self, name: str) -> bool:
        """Whether there is a value."""
        with self._errors():
            return bool(self._reader.exists(PREFIX + name))

    def delete(self, name: str) -> bool:
        """Remove the value; whether there was one."""
        with self._errors():
            return bool(self._reader.delete(PREFIX + name))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every name with the bytes of its value; walks the whole database."""
        with self._errors():
            names = iter(self._reader.scan_iter(match=f"{PREFIX}*", count=_SCAN_BATCH))
            while batch := list(itertools.islice(names, _SCAN_BATCH)):
                pipeline = self._reader.pipeline(transaction=False)
                for name in batch:
                    pipeline.strlen(name)
                for name, size in zip(batch, pipeline.execute(), strict=True):
                    yield name.decode().removeprefix(PREFIX), int(size)

    def ping(self) -> None:
        """One round trip."""
        with self._errors():
            self._reader.ping()

    def abort(self) -> None:
        """Cut the readers' connections; the next call opens new ones."""
        self._reader.connection_pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        """Let the connections go; the next call opens new ones."""
        self._reader.close()
        self._writer.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as error:
            raise StoreFullError(
                f"{self.url} is full ({error}); let it evict: redis-cli CONFIG SET maxmemory-policy allkeys-lru"
            ) from error
        # A connection cut by `abort` may surface as any of these from inside the client.
        except (redis.RedisError, OSError, ValueError, AttributeError) as error:
            raise BackendUnreachableError(
                f"{self.url} does not answer ({type(error).__name__}: {error}); check it: ragblend doctor --remote URL"
            ) from error


def redacted(url: str) -> str:
    """The URL without its password and options.

    >>> redacted("redis://:secret@cache:6379/0?socket_timeout=1")
    'redis://cache:6379/0'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
