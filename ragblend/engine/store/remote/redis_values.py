"""Chunk files as values of Redis or Valkey: `redis://[:PASSWORD@]HOST[:PORT][/DB]`, `rediss://` for TLS.

`redis+cluster://HOST[:PORT]` and `rediss+cluster://` name any node of a cluster, or a name that resolves to one. The
client discovers the other nodes, and discovers them again when they change. The chunks of a failed node are unavailable
until the cluster replaces it.

The byte budget is set on the server: `maxmemory` with `maxmemory-policy allkeys-lru`. Replies are not trusted: a call
ends at its time limit however slowly bytes arrive, and when it has read as many bytes as the largest value has. Works
on named bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from random import sample
from time import monotonic
from typing import Any, cast

from ragblend.engine.store.base import ByteRange
from ragblend.engine.store.remote.limits import WALK_TIMEOUT_S, connect_timeout_s
from ragblend.errors import BackendUnreachableError, StoreFullError, UsageError
from ragblend.redaction import has_secret, password_encoding_hint, redact_message, redact_url

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.cluster import RedisCluster
    from redis.connection import parse_url
    from redis.retry import Retry
except ImportError as error:
    raise ImportError("a redis:// tier needs redis-py: pip install 'ragblend[redis]'") from error

PREFIX = "ragblend:kv:"
NOTES = "ragblend:notes"  # a hash, so that its names are listed without a scan of the database
NOTE_NAMES = "ragblend:note-names"  # the same names in a sorted set, which lists the latest ones
WRITE_TIMEOUT_S = 30.0  # a large value over a slow line; only the writer thread waits
_MAX_VALUE_BYTES = 512 * 1024 * 1024  # Redis' own limit (proto-max-bulk-len)
_MIN_RANGE_BYTES = 1 << 20  # a millisecond at 10 Gbit/s, twice a round trip
_MAX_REPLY_BYTES = _MAX_VALUE_BYTES + (1 << 16)  # of one call: no list of ours is as long as a value may be
_SCAN_BATCH = 500


class RedisValues:
    """ByteStore in one Redis database or cluster, under `ragblend:kv:KEY`. Connects at the first call.

    `timeout_s` limits each call, except `put` (WRITE_TIMEOUT_S) and `sizes` (WALK_TIMEOUT_S). Failed calls are not
    repeated, so that the caller counts every failure.
    """

    max_value_bytes = _MAX_VALUE_BYTES
    min_range_bytes = _MIN_RANGE_BYTES

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = redact_url(url)
        self._redact = partial(redact_message, url=url)  # a library's message may contain the password
        self._hides = has_secret(url)  # then no exception of a library may reach a traceback
        self._timeout_s = timeout_s
        self._is_cluster = "+cluster://" in url
        self._server_url = url.replace("+cluster://", "://", 1)
        self._opened: Any = None
        self._opening = threading.Lock()
        form = "redis+cluster://HOST:PORT" if self._is_cluster else "redis://HOST:PORT/DB"
        try:
            options = parse_url(self._server_url)  # type: ignore[no-untyped-call]
        except (ValueError, redis.RedisError) as error:
            message = self._redact(str(error))
            raise UsageError(
                f"{self.url} is not a Redis URL ({message}); write {form}{password_encoding_hint(url)}"
            ) from None
        if self._is_cluster and (options.get("db") or "path" in options):
            raise UsageError(f"{self.url} has a database or a socket file, but a cluster has neither; write {form}")

    def get(self, name: str) -> bytes | None:
        """Return the value. Return None if there is no value, or if the value is not a Redis string."""
        with self._call(self._timeout_s):
            try:
                return cast("bytes | None", self._client.get(PREFIX + name))
            except redis.ResponseError as error:
                if not _is_wrong_type(error):
                    raise
                return None

    def get_range(self, name: str, start: int, end: int) -> ByteRange | None:
        """Return the bytes [start, end) of the value, in one round trip. None: as in `get`."""
        with self._call(self._timeout_s):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.getrange(PREFIX + name, start, end - 1)
            pipeline.strlen(PREFIX + name)
            data, size = pipeline.execute(raise_on_error=False)
            problem = next((each for each in (data, size) if isinstance(each, Exception)), None)
            if problem is not None and not _is_wrong_type(problem):
                raise problem
        return ByteRange(data, size) if problem is None and size else None

    def put(self, name: str, data: bytes) -> None:
        """Set the value atomically."""
        with self._call(WRITE_TIMEOUT_S):
            self._client.set(PREFIX + name, data)

    def contains(self, name: str) -> bool:
        """Return True if there is a value."""
        return self.contains_many([name])[0]

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether there is a value, in one round trip."""
        return [bool(length) for length in self._lengths([f"{PREFIX}{name}".encode() for name in names])]

    def _lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the size in bytes of each value, 0 if there is none, None for other types than strings."""
        with self._call(self._timeout_s):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.strlen(key)
            replies = pipeline.execute(raise_on_error=False)
            problem = next((each for each in replies if isinstance(each, Exception) and not _is_wrong_type(each)), None)
            if problem is not None:
                raise problem
        return [None if isinstance(each, Exception) else int(each) for each in replies]

    def delete(self, name: str) -> bool:
        """Delete the value; return True if there was one."""
        with self._call(self._timeout_s):
            return bool(self._client.delete(PREFIX + name))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield every name with its value's size in bytes. Raises BackendUnreachableError after WALK_TIMEOUT_S."""
        until_s = monotonic() + WALK_TIMEOUT_S
        with self._call(self._timeout_s):
            key_iterator = self._client.scan_iter(match=f"{PREFIX}*", count=_SCAN_BATCH)
        while True:
            with self._call(until_s - monotonic()):
                keys = list(islice(key_iterator, _SCAN_BATCH))
            if not keys:
                return
            for key, size in zip(keys, self._lengths(keys), strict=True):
                if size is not None:
                    yield key.decode("utf-8", "replace").removeprefix(PREFIX), size

    def delete_temporary_files(self) -> int:
        """Return 0: writes are atomic and make no temporary files."""
        return 0

    def list_metadata(self, after: str = "") -> list[str]:
        """Return the names of the metadata values that sort after `after`; all names for ""."""
        with self._call(self._timeout_s):
            names = self._client.zrangebylex(NOTE_NAMES, f"({after}", "+") if after else self._client.hkeys(NOTES)
            return [name.decode("utf-8", "replace") for name in cast("list[bytes]", names)]

    def get_metadata(self, name: str) -> bytes | None:
        """Return a metadata value; None if there is none."""
        with self._call(self._timeout_s):
            return cast("bytes | None", self._client.hget(NOTES, name))

    def put_metadata(self, name: str, data: bytes) -> None:
        """Write a metadata value, and add its name to the sorted set that `list_metadata` reads if `after` is given.

        Both happen in one step, except in a cluster, where value and set may be on different nodes. If a cluster writes
        only the value, this call raises an error, but `list_metadata` without `after` returns the name.
        """
        with self._call(self._timeout_s):
            if self._is_cluster:  # the two keys may be on different nodes
                self._client.hset(NOTES, name, data)
                self._client.zadd(NOTE_NAMES, {name: 0})
                return
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hset(NOTES, name, data)
            pipeline.zadd(NOTE_NAMES, {name: 0})
            pipeline.execute()

    def delete_metadata(self, name: str) -> None:
        """Delete a metadata value, if there is one."""
        with self._call(self._timeout_s):
            self._client.hdel(NOTES, name)
            self._client.zrem(NOTE_NAMES, name)

    def ping(self) -> None:
        """Ping the server. In a cluster, ping the primary nodes in random order until one answers."""
        with self._call(self._timeout_s):
            if not self._is_cluster:
                self._client.ping()
                return
            nodes = self._client.get_primaries()
            for left, node in enumerate(sample(nodes, len(nodes)), start=1 - len(nodes)):
                try:
                    self._client.ping(target_nodes=node)
                    return
                except redis.RedisError:
                    if not left:
                        raise

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        with self._opening:
            client, self._opened = self._opened, None
        if client is not None:
            with suppress(redis.RedisError):
                client.close()

    @property
    def _client(self) -> Any:
        """The client of all calls; `_call` sets their time limits. A cluster's client connects when it is created."""
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> Any:
        options: dict[str, Any] = {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": connect_timeout_s(self._timeout_s),
            "socket_timeout": WRITE_TIMEOUT_S,
            "socket_read_size": 1 << 20,  # values are megabytes
        }
        if not self._is_cluster:
            parsed = parse_url(self._server_url)  # type: ignore[no-untyped-call]
            return redis.Redis.from_pool(_BoundedPool(**{**parsed, **options}))
        # Without one node, the chunks of the others stay available.
        options |= {"connection_pool_class": _BoundedPool, "require_full_coverage": False}
        return RedisCluster(url=self._server_url, **options)

    @contextmanager
    def _call(self, timeout_s: float) -> Iterator[None]:
        """Limit the calls of this thread inside to `timeout_s` seconds together, and translate their errors."""
        try:
            with _CALL.for_call(timeout_s):
                yield
        except redis.exceptions.OutOfMemoryError as error:
            raise StoreFullError(
                f"{self.url} is full ({self._redact(str(error))}); let it evict: "
                "redis-cli CONFIG SET maxmemory-policy allkeys-lru"
            ) from (None if self._hides else error)
        # The reply of a server that is not Redis may raise any of these inside the client.
        except (redis.RedisError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            message = self._redact(f"{type(error).__name__}: {error}")
            raise BackendUnreachableError(
                f"{self.url} does not answer ({message}); check it: ragblend doctor --remote URL"
            ) from (None if self._hides else error)


def _is_wrong_type(error: Exception) -> bool:
    """Return True if a key holds another type than a string, which ragblend never writes."""
    return isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE")


# --- limits of replies: bytes and time ---


class _CallLimits(threading.local):
    """The limits of this thread's current call: its deadline, and the bytes that its replies may still have."""

    until_s: float | None = None  # None: no call of this module
    num_bytes_left = 0

    @contextmanager
    def for_call(self, timeout_s: float) -> Iterator[None]:
        self.until_s, self.num_bytes_left = monotonic() + timeout_s, _MAX_REPLY_BYTES
        try:
            yield
        finally:
            self.until_s = None

    def left_s(self) -> float:
        """Return the seconds left; never 0, which sockets take as 'do not wait'. Raises TimeoutError."""
        left_s = WRITE_TIMEOUT_S if self.until_s is None else self.until_s - monotonic()
        if left_s <= 0:
            raise TimeoutError("the reply takes longer than its time limit; see remote_timeout_s")
        return left_s

    def count(self, num_bytes: int) -> None:
        """Count bytes that arrived. Raises OSError when they are more than any reply to ragblend has."""
        self.num_bytes_left -= num_bytes
        if self.until_s is not None and self.num_bytes_left < 0:
            raise OSError(f"the reply has more than {_MAX_REPLY_BYTES} bytes; the largest value has {_MAX_VALUE_BYTES}")


_CALL = _CallLimits()


class _BoundedPool(redis.ConnectionPool):
    """A redis-py pool, of any connection class, whose sockets obey the limits of the calling thread's call."""

    def __init__(self, connection_class: Any = redis.Connection, **options: Any) -> None:
        super().__init__(connection_class=type("Bounded", (_Bounded, connection_class), {}), **options)


class _Bounded:
    """Mixin for a redis-py connection whose socket obeys the limits of the calling thread's call."""

    def _connect(self) -> _Socket:
        return _Socket(super()._connect())  # type: ignore[misc]


class _Socket:
    """A socket that obeys `_CALL`. redis-py has a time limit per read only, which begins again with every byte."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._timeout_s: float | None = plain.gettimeout()  # 0: do not wait

    def recv(self, nbytes: int) -> bytes:
        data = cast("bytes", self._ready().recv(nbytes))
        _CALL.count(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        count = int(self._ready().recv_into(buffer, nbytes))
        _CALL.count(count)
        return count

    def sendall(self, data: Any) -> None:
        self._ready().sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _ready(self) -> Any:
        """Return the socket, set to wait no longer than the call may."""
        left_s = _CALL.left_s()
        self._plain.settimeout(left_s if self._timeout_s is None else min(self._timeout_s, left_s))
        return self._plain


open_values = RedisValues
"""Called by `open_remote` with the URL and the time limit of one call in seconds."""
