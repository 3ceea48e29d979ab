"""Chunk files as objects: `s3://BUCKET/PREFIX` and any URL that fsspec opens (`file:///DIR`, `gs://`, `az://`, ...).

Credentials, endpoints and regions are found by the file system's own library (for S3: `AWS_*`, `~/.aws`,
`AWS_ENDPOINT_URL`); they must allow to get, put, delete and list objects. The byte budget is set by the bucket's
lifecycle rules. Works on named bytes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from ragblend.engine.store.remote.limits import connect_timeout_s
from ragblend.errors import BackendUnreachableError, StoreFullError, UsageError
from ragblend.files.directory import Directory
from ragblend.redaction import has_secret, redact, url_password_hint

try:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem
except ImportError as error:
    raise ImportError("an object store tier needs fsspec: pip install 'ragblend[s3]'") from error

SUFFIX = ".safetensors"
NOTES = "notes"  # a separate folder, so that listing metadata lists no chunks
WRITE_TIMEOUT_S = 60.0
_MAX_VALUE_BYTES = 5 * 2**30  # one S3 PUT
_PART_BYTES = 1 << 20
_NUM_ASKED = 32  # objects that are queried in parallel


class ObjectValues:
    """ByteStore in a bucket or folder: `PREFIX/ab/abcdef....safetensors`, with the layout of a disk store's directory.

    `timeout_s` bounds a whole call if the file system is asynchronous (S3, Google, Azure). The announced size of an
    object is checked before it is read, and no more is read. Nothing is retried here; the caller counts failures.
    """

    max_value_bytes = _MAX_VALUE_BYTES

    def __init__(self, url: str, timeout_s: float, **options: Any) -> None:
        self.url = redact(url)
        self._redact = partial(redact, echo_of=url)  # a library's message may contain the password
        self._hides = has_secret(url)  # then no exception of a library may reach a traceback
        self._timeout_s = timeout_s
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **{**_defaults(url.partition("://")[0], timeout_s), **options})
        except ImportError as error:
            raise ImportError(
                f"{self.url} needs another package: {self._redact(str(error))}; for s3: pip install 'ragblend[s3]'"
            ) from None
        except Exception as error:  # of whatever file system the scheme names
            raise UsageError(
                f"{self.url} cannot be opened ({self._redact(str(error))}); write redis://HOST:6379/0, "
                f"s3://BUCKET/PREFIX or file:///DIR{url_password_hint(url)}"
            ) from None
        self._root = str(root).rstrip("/")
        if hasattr(self._fs, "retries"):  # s3fs retries five times; here the breaker decides
            self._fs.retries = 1

    def get(self, name: str) -> bytes | None:
        """Return the object's bytes; None if there is no object."""
        return self._read(self._path(name))

    def _read(self, path: str) -> bytes | None:
        try:
            return (
                self._run_with_timeout(self._timeout_s, self._streamed(path))
                if self._fs.async_impl
                else self._opened(path)
            )
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write the object in one step, also in a local folder."""
        self._write(self._path(name), data)

    def _write(self, path: str, data: bytes) -> None:
        if isinstance(self._fs, LocalFileSystem):
            self._translate_errors(lambda: self._directory().write(Path(path), data))
        else:
            self._call("pipe_file", path, data, timeout_s=WRITE_TIMEOUT_S)

    def contains(self, name: str) -> bool:
        """Return True if there is an object."""
        try:
            self._call("info", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Return for each name True if there is an object; queried in parallel."""
        if not self._fs.async_impl:
            return [self.contains(name) for name in names]
        found: list[bool] = self._run_with_timeout(
            self._timeout_s, self._contains_all([self._path(name) for name in names])
        )
        return found

    async def _contains_all(self, paths: Sequence[str]) -> list[bool]:
        gate = asyncio.Semaphore(_NUM_ASKED)

        async def is_there(path: str) -> bool:
            async with gate:
                try:
                    await self._fs._info(path)
                except FileNotFoundError:
                    return False
                return True

        return list(await asyncio.gather(*map(is_there, paths)))

    def delete(self, name: str) -> bool:
        """Delete the object; return True if there was one."""
        if not self.contains(name):
            return False
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield every name with its object's bytes. Lists the whole prefix."""
        try:
            found = self._call("find", self._root, detail=True, timeout_s=WRITE_TIMEOUT_S)
        except FileNotFoundError:
            return
        for path, facts in found.items():
            name = str(path).rpartition("/")[2]
            if name.endswith(SUFFIX) and not name.startswith("."):
                yield name.removesuffix(SUFFIX), int(facts["size"])

    def clean(self) -> int:
        """Delete killed writers' temporary files from a local folder; return their number. Others have none."""
        if not isinstance(self._fs, LocalFileSystem) or not Path(self._root).is_dir():
            return 0
        found: int = self._translate_errors(lambda: self._directory().remove_stale_files())
        return found

    def list_metadata(self) -> list[str]:
        """Return the names of the metadata values. Lists their folder alone."""
        try:
            found = self._call("find", f"{self._root}/{NOTES}", timeout_s=WRITE_TIMEOUT_S)
        except FileNotFoundError:
            return []
        names = (str(path).rpartition("/")[2] for path in found)
        return [name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")]

    def get_metadata(self, name: str) -> bytes | None:
        """Return a metadata value; None if there is none."""
        return self._read(self._note(name))

    def put_metadata(self, name: str, data: bytes) -> None:
        """Write a metadata value in one step."""
        self._write(self._note(name), data)

    def delete_metadata(self, name: str) -> None:
        """Delete a metadata value, if there is one."""
        with suppress(FileNotFoundError):
            self._call("rm_file", self._note(name))

    def _note(self, name: str) -> str:
        return f"{self._root}/{NOTES}/{name}.json"

    def ping(self) -> None:
        """Make one round trip. Raises BackendUnreachableError also for a bucket that does not exist."""
        bucket = self._root.partition("/")[0]
        if not self._fs.async_impl or not bucket:
            self._translate_errors(lambda: self._fs.exists(self._root))
            return
        try:
            self._call("info", bucket)
        except FileNotFoundError as error:
            raise BackendUnreachableError(f"{self.url}: there is no {bucket!r} there; create it first") from error

    def close(self) -> None:
        """Do nothing: fsspec shares its connections."""

    def _directory(self) -> Directory:
        return Directory(
            Path(self._root), fsync=True, full_hint=f"Make room for {self.url}, or choose another `remote`"
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}{SUFFIX}"

    def _call(self, method: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Call a method of the file system within a time limit. FileNotFoundError is not translated."""
        if not self._fs.async_impl:
            return self._translate_errors(lambda: getattr(self._fs, method)(*args, **options))
        return self._run_with_timeout(timeout_s or self._timeout_s, getattr(self._fs, f"_{method}")(*args, **options))

    async def _streamed(self, path: str) -> bytes:
        """Return an object, read in parts up to its announced size."""
        try:
            stream = await self._fs.open_async(path)
        except NotImplementedError:
            self._check_size(path, (await self._fs._info(path))["size"])
            return bytes(await self._fs._cat_file(path))
        try:
            parts, num_bytes = [bytes(await stream.read(_PART_BYTES))], 0
            self._check_size(path, stream.size)
            while parts[-1]:
                num_bytes += len(parts[-1])
                self._check_size(path, num_bytes)
                parts.append(bytes(await stream.read(_PART_BYTES)))
        finally:
            if (body := getattr(stream, "r", None)) is not None:  # s3fs' own `close` leaves the connection to it
                body.close()
        return b"".join(parts)

    def _opened(self, path: str) -> bytes:
        """Return an object of a file system that is not asynchronous."""

        def read() -> bytes:
            self._check_size(path, self._fs.size(path))
            with self._fs.open(path, "rb") as file:
                data = bytes(file.read(self.max_value_bytes + 1))
            self._check_size(path, len(data))
            return data

        return cast("bytes", self._translate_errors(read))

    def _check_size(self, path: str, nbytes: int | None) -> None:
        if nbytes is not None and nbytes > self.max_value_bytes:
            raise OSError(f"{path} has {nbytes} bytes; {self.max_value_bytes} is the most that is read")

    def _run_with_timeout(self, limit_s: float, call: Coroutine[Any, Any, Any]) -> Any:
        """Return an asynchronous call's result; cancel it at its time limit. FileNotFoundError is not translated."""

        async def limited() -> Any:
            return await asyncio.wait_for(call, limit_s)

        def wait() -> Any:
            future = asyncio.run_coroutine_threadsafe(limited(), self._fs.loop)
            return future.result(limit_s + 1.0)  # for the case that the loop itself hangs

        return self._translate_errors(wait)

    def _translate_errors(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (FileNotFoundError, StoreFullError):
            raise
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise BackendUnreachableError(
                f"{self.url} takes longer than its time limit; see remote_timeout_s"
            ) from error
        except Exception as error:  # every file system has its own exceptions; none may reach an answer
            message = self._redact(f"{type(error).__name__}: {error}")
            raise BackendUnreachableError(
                f"{self.url} fails ({message}); check it: ragblend doctor --remote URL"
            ) from (None if self._hides else error)


def _defaults(scheme: str, timeout_s: float) -> dict[str, Any]:
    if scheme not in ("s3", "s3a"):
        return {}
    # A separate instance: other code that uses s3fs in this process keeps its own retries and limits.
    return {
        "skip_instance_cache": True,
        "use_listings_cache": False,
        "max_concurrency": 1,  # more would request the size first; chunks are already fetched in parallel
        "config_kwargs": {
            "connect_timeout": connect_timeout_s(timeout_s),
            "read_timeout": timeout_s,
            "retries": {"max_attempts": 0},
        },
    }


open_values = ObjectValues
"""Called by `open_remote` with the URL and the time limit of one call in seconds."""
