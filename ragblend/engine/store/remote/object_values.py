"""Chunk files as objects: `s3://BUCKET/PREFIX` and whatever else fsspec opens (`file:///DIR`, `gs://`, `az://`, ...).

Credentials, endpoints and regions come from where the file system's own library looks for them (for S3: `AWS_*`,
`~/.aws`, `AWS_ENDPOINT_URL`); they must allow to get, put, delete and list objects. The budget is the bucket's
lifecycle rules. Knows bytes under names.
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
NOTES = "notes"  # a folder of its own, so that listing them lists no chunk
WRITE_TIMEOUT_S = 60.0
_MAX_VALUE_BYTES = 5 * 2**30  # one S3 PUT
_PART_BYTES = 1 << 20
_NUM_ASKED = 32  # objects that are asked for side by side


class ObjectValues:
    """ByteStore in a bucket or folder: `PREFIX/ab/abcdef....safetensors`, laid out as a disk store's directory.

    `timeout_s` bounds a whole call where the file system is asynchronous (S3, Google, Azure). What an object announces
    as its size is checked before it is read, and no more is read. Nothing is retried here: the caller counts and
    decides.
    """

    max_value_bytes = _MAX_VALUE_BYTES

    def __init__(self, url: str, timeout_s: float, **options: Any) -> None:
        self.url = redact(url)
        self._redact = partial(redact, echo_of=url)  # a library's message may hold a password of ours
        self._hides = has_secret(url)  # what a library's exception holds must not reach a traceback then
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
        if hasattr(self._fs, "retries"):  # s3fs waits and tries five times; the breaker does that better
            self._fs.retries = 1

    def get(self, name: str) -> bytes | None:
        """The object's bytes, or None."""
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
        """Write the object. A local folder gets it in one step, as object stores do by themselves."""
        self._write(self._path(name), data)

    def _write(self, path: str, data: bytes) -> None:
        if isinstance(self._fs, LocalFileSystem):
            self._translate_errors(lambda: self._directory().write(Path(path), data))
        else:
            self._call("pipe_file", path, data, timeout_s=WRITE_TIMEOUT_S)

    def contains(self, name: str) -> bool:
        """Whether there is an object."""
        try:
            self._call("info", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Whether there is an object for each, asked for side by side."""
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
        """Remove the object; whether there was one."""
        if not self.contains(name):
            return False
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return False
        return True

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Every name with its object's bytes; lists the whole prefix."""
        try:
            found = self._call("find", self._root, detail=True, timeout_s=WRITE_TIMEOUT_S)
        except FileNotFoundError:
            return
        for path, facts in found.items():
            name = str(path).rpartition("/")[2]
            if name.endswith(SUFFIX) and not name.startswith("."):
                yield name.removesuffix(SUFFIX), int(facts["size"])

    def clean(self) -> int:
        """Remove the temp files of killed writers from a local folder; how many. Elsewhere objects appear whole."""
        if not isinstance(self._fs, LocalFileSystem) or not Path(self._root).is_dir():
            return 0
        found: int = self._translate_errors(lambda: self._directory().remove_stale_files())
        return found

    def list_metadata(self) -> list[str]:
        """Names of the notes; lists their folder alone."""
        try:
            found = self._call("find", f"{self._root}/{NOTES}", timeout_s=WRITE_TIMEOUT_S)
        except FileNotFoundError:
            return []
        names = (str(path).rpartition("/")[2] for path in found)
        return [name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")]

    def get_metadata(self, name: str) -> bytes | None:
        """The note, or None."""
        return self._read(self._note(name))

    def put_metadata(self, name: str, data: bytes) -> None:
        """Write a note, as a chunk is written."""
        self._write(self._note(name), data)

    def delete_metadata(self, name: str) -> None:
        """Remove a note, if it is there."""
        with suppress(FileNotFoundError):
            self._call("rm_file", self._note(name))

    def _note(self, name: str) -> str:
        return f"{self._root}/{NOTES}/{name}.json"

    def ping(self) -> None:
        """One round trip: ask for the bucket; one that is not there is a failure."""
        bucket = self._root.partition("/")[0]
        if not self._fs.async_impl or not bucket:
            self._translate_errors(lambda: self._fs.exists(self._root))
            return
        try:
            self._call("info", bucket)
        except FileNotFoundError as error:
            raise BackendUnreachableError(f"{self.url}: there is no {bucket!r} there; create it first") from error

    def close(self) -> None:
        """Nothing to do: fsspec shares its connections."""

    def _directory(self) -> Directory:
        return Directory(
            Path(self._root), fsync=True, full_hint=f"Make room for {self.url}, or choose another `remote`"
        )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:2]}/{name}{SUFFIX}"

    def _call(self, method: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """One call of the file system, cancelled when it takes too long; FileNotFoundError passes."""
        if not self._fs.async_impl:
            return self._translate_errors(lambda: getattr(self._fs, method)(*args, **options))
        return self._run_with_timeout(timeout_s or self._timeout_s, getattr(self._fs, f"_{method}")(*args, **options))

    async def _streamed(self, path: str) -> bytes:
        """An object in parts, as long as it is not longer than it announced itself."""
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
        """A file of a file system that is not asynchronous."""

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
        """What an asynchronous call gives, cancelled when it takes too long; FileNotFoundError passes."""

        async def limited() -> Any:
            return await asyncio.wait_for(call, limit_s)

        def wait() -> Any:
            future = asyncio.run_coroutine_threadsafe(limited(), self._fs.loop)
            return future.result(limit_s + 1.0)  # should the loop itself hang

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
    # Our own instance: another user of s3fs in this process keeps its own retries and limits.
    return {
        "skip_instance_cache": True,
        "use_listings_cache": False,
        "max_concurrency": 1,  # more would ask for the size first; chunks already come side by side
        "config_kwargs": {
            "connect_timeout": connect_timeout_s(timeout_s),
            "read_timeout": timeout_s,
            "retries": {"max_attempts": 0},
        },
    }


open_values = ObjectValues
"""What `open_remote` calls, with the URL and the time limit of one call in seconds."""
