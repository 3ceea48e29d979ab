"""Chunk files as values of Redis or Valkey: `redis://[:PASSWORD@]HOST[:PORT][/DB]`, `rediss://` for TLS.

The byte budget is set on the server: `maxmemory` with `maxmemory-policy allkeys-lru`. Replies are not trusted: a call
ends at its time limit however slowly bytes arrive, and when it has read as many as the largest value has. Works on
named bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, cast

from ragblend.engine.store.remote.limits import connect_timeout_s
from ragblend.errors import BackendUnreachableError, StoreFullError, UsageError
from ragblend.redaction import has_secret, redact, url_password_hint

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import parse_url
    from redis.retry import Retry
except ImportError as error:
    raise ImportError("a redis:// tier needs redis-py: pip install 'ragblend[redis]'") from error

PREFIX = "ragblend:kv:"
NOTES = "ragblend:notes"  # a hash, so that its names are listed without a scan of the database
WRITE_TIMEOUT_S = 30.0  # a large value over a slow line; only the writer thread waits
WALK_TIMEOUT_S = 600.0  # for a scan of the whole database, as in `stats` and `gc`
_MAX_VALUE_BYTES = 512 * 1024 * 1024  # Redis' own limit (proto-max-bulk-len)
_MAX_REPLY_BYTES = _MAX_VALUE_BYTES + (1 << 16)  # of one call: no list of ours is as long as a value may be
_SCAN_BATCH = 500
_SPARE_ROUNDS = 100_000  # of a scan, in addition to one per key: the table of a database that was emptied stays long


class RedisValues:
    """ByteStore in one Redis database, under `ragblend:kv:KEY`. Connects at the first call.

    `timeout_s` bounds each call as a whole. Nothing is retried here; the caller counts failures.
    """

    max_value_bytes = _MAX_VALUE_BYTES
    FORM = "redis://HOST:PORT/DB"
    _reader: redis.Redis
    _writer: redis.Redis

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = redact(url)
        self._redact = partial(redact, echo_of=url)  # a library's message may contain the password
        self._hides = has_secret(url)  # then no exception of a library may reach a traceback
        self._timeout_s = timeout_s
        try:
            self._use(url)
        except (ValueError, redis.RedisError) as error:
            message = self._redact(str(error))
            raise UsageError(
                f"{self.url} is not a Redis URL ({message}); write {self.FORM}{url_password_hint(url)}"
            ) from None

    def _use(self, url: str) -> None:
        """Create the clients for a URL. Raises ValueError and RedisError for an invalid one."""
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        self._reader, self._writer = (
            redis.Redis(connection_pool=BoundedPool(**{**options, **socket_options(seconds)}, retry=NEVER))
            for seconds in (self._timeout_s, WRITE_TIMEOUT_S)
        )

    def get(self, name: str) -> bytes | None:
        """Return the value; None if there is none. Another Redis type gives an empty value, which is no entry."""
        with self._call(self._timeout_s):
            try:
                return cast("bytes | None", self._reader.get(PREFIX + name))
            except redis.ResponseError as error:
                if not _is_wrong_type(error):
                    raise
                return b""

    def put(self, name: str, data: bytes) -> None:
        """Set the value, in one step."""
        with self._call(WRITE_TIMEOUT_S):
            self._writer.set(PREFIX + name, data)

    def contains(self, name: str) -> bool:
        """Return True if there is a value."""
        with self._call(self._timeout_s):
            try:
                return bool(self._reader.strlen(PREFIX + name))
            except redis.ResponseError as error:
                if not _is_wrong_type(error):
                    raise
                return False

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Return for each name True if there is a value; one round trip."""
        return [bool(length) for length in self._lengths([f"{PREFIX}{name}".encode() for name in names])]

    def _lengths(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the bytes of each value, 0 if there is none, None for other types than strings."""
        with self._call(self._timeout_s):
            pipeline = self._reader.pipeline(transaction=False)
            for key in keys:
                pipeline.strlen(key)
            found = pipeline.execute(raise_on_error=False)
            problem = next((each for each in found if isinstance(each, Exception) and not _is_wrong_type(each)), None)
            if problem is not None:
                raise problem
        return [None if isinstance(each, Exception) else int(each) for each in found]

    def delete(self, name: str) -> bool:
        """Delete the value; return True if there was one."""
        with self._call(self._timeout_s):
            return bool(self._reader.delete(PREFIX + name))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield every name with the bytes of its value. Raises BackendUnreachableError if the scan does not end."""
        until_s = monotonic() + WALK_TIMEOUT_S
        for where in self._scan_arguments():
            yield from self._sizes(until_s, **where)

    def _scan_arguments(self) -> Iterable[Mapping[str, Any]]:
        """Return the extra arguments of commands that scan all keys, one mapping per server to scan."""
        return ({},)

    def _sizes(self, until_s: float, **where: Any) -> Iterator[tuple[str, int]]:
        cursor, seen = 0, {0}
        with self._call(self._timeout_s):
            num_keys = int(self._reader.dbsize(**where))
        while True:
            with self._call(self._timeout_s):
                cursor, names = self._scan(cursor, **where)
            for name, size in zip(names, self._lengths(names), strict=True):
                if size is not None:
                    yield name.decode("utf-8", "replace").removeprefix(PREFIX), size
            if cursor == 0:
                return
            if cursor in seen or len(seen) > _SPARE_ROUNDS + num_keys or monotonic() > until_s:
                raise BackendUnreachableError(
                    f"{self.url} does not come to the end of its keys ({len(seen)} rounds for {num_keys}); is it a "
                    "Redis? Check it: ragblend doctor --remote URL"
                )
            seen.add(cursor)

    def _scan(self, cursor: int, **where: Any) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and some keys with our prefix."""
        found = self._reader.scan(cursor, match=f"{PREFIX}*", count=_SCAN_BATCH, **where)
        return cast("tuple[int, list[bytes]]", found)

    def clean(self) -> int:
        """Return 0: a value appears in one step, so there is nothing to delete."""
        return 0

    def list_metadata(self) -> list[str]:
        """Return the names of the metadata values."""
        with self._call(self._timeout_s):
            return [name.decode("utf-8", "replace") for name in cast("list[bytes]", self._reader.hkeys(NOTES))]

    def get_metadata(self, name: str) -> bytes | None:
        """Return a metadata value; None if there is none."""
        with self._call(self._timeout_s):
            return cast("bytes | None", self._reader.hget(NOTES, name))

    def put_metadata(self, name: str, data: bytes) -> None:
        """Write a metadata value in one step."""
        with self._call(self._timeout_s):
            self._writer.hset(NOTES, name, data)

    def delete_metadata(self, name: str) -> None:
        """Delete a metadata value, if there is one."""
        with self._call(self._timeout_s):
            self._reader.hdel(NOTES, name)

    def ping(self) -> None:
        """Make one round trip."""
        with self._call(self._timeout_s):
            self._reader.ping()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        for client in (self._reader, self._writer):
            client.connection_pool.disconnect()

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


NEVER = Retry(NoBackoff(), 0)


def socket_options(timeout_s: float) -> dict[str, Any]:
    """Return the options of a connection whose calls take at most `timeout_s` seconds."""
    return {
        "protocol": 2,
        "socket_connect_timeout": connect_timeout_s(timeout_s),
        "socket_timeout": timeout_s,
        "socket_read_size": 1 << 20,  # values are megabytes
    }


class BoundedPool(redis.ConnectionPool):
    """A redis-py pool, of any connection class, whose sockets obey the limits of the calling thread's call."""

    def __init__(self, connection_class: Any = redis.Connection, **options: Any) -> None:
        super().__init__(connection_class=type("Bounded", (_Bounded, connection_class), {}), **options)


class _Bounded:
    """Mixin for a redis-py connection whose socket obeys the limits of the calling thread's call."""

    def _connect(self) -> _Socket:
        return _Socket(super()._connect())  # type: ignore[misc]


class _Socket:
    """A socket that obeys `_CALL`: a socket's own time limit begins again with every byte."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._timeout_s: float | None = plain.gettimeout()  # 0: do not wait

    def recv(self, nbytes: int) -> bytes:
        self._plain.settimeout(self._wait_s())
        data = cast("bytes", self._plain.recv(nbytes))
        _CALL.count(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        self._plain.settimeout(self._wait_s())
        count = int(self._plain.recv_into(buffer, nbytes))
        _CALL.count(count)
        return count

    def sendall(self, data: Any) -> None:
        self._plain.settimeout(self._wait_s())
        self._plain.sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _wait_s(self) -> float:
        return _CALL.left_s() if self._timeout_s is None else min(self._timeout_s, _CALL.left_s())


open_values = RedisValues
"""Called by `open_remote` with the URL and the time limit of one call in seconds."""
