"""Chunk files as objects: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` and `file:///DIR`.

obstore finds credentials, endpoint and region in the environment, or in the metadata service of the machine. The
credentials must allow to get, put, delete and list objects. The byte budget is set by the bucket's lifecycle rules.
Works on named bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from ragblend.engine.store.base import ByteRange
from ragblend.engine.store.remote.limits import WALK_TIMEOUT_S, connect_timeout_s
from ragblend.errors import BackendUnreachableError, NotFoundError, StoreFullError, UsageError
from ragblend.files.directory import Directory
from ragblend.files.store_folder import ENTRY_SUFFIX
from ragblend.redaction import has_secret, redact_message, redact_url

try:
    import obstore
    from obstore.store import LocalStore, from_url
except ImportError as error:
    raise ImportError("an object store tier needs obstore: pip install 'ragblend[s3]'") from error

NOTES = "notes"  # a separate folder, so that listing metadata lists no chunks
WRITE_TIMEOUT_S = 60.0
_MAX_VALUE_BYTES = 5 * 2**30  # one S3 PUT
_MIN_RANGE_BYTES = 8 << 20  # S3 begins to answer after about 0.1 s, then sends about 90 MB/s for each request
_NUM_QUERIES = 32  # objects that are queried in parallel
_LIST_BATCH = 1000
_MAX_REASON_CHARS = 300
_SERVER_ERROR = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)  # of S3, Google and Azure
_user_pid: int | None = None  # the process that sent the first request


class ObjectValues:
    """ByteStore in a bucket or folder. Values are the objects `PREFIX/ab/abcdef....safetensors`, as in a disk store.

    `timeout_s` limits each request, body included; WRITE_TIMEOUT_S limits writes and lists. An object that is too large
    is rejected before its body is read. Failed requests are not repeated, so that the caller counts every failure.
    """

    max_value_bytes = _MAX_VALUE_BYTES
    min_range_bytes = _MIN_RANGE_BYTES

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = redact_url(url)
        self._timeout_s = timeout_s
        self._prefix = ""
        self._directory: Directory | None = None  # of a local folder
        if url.startswith("file://"):
            root = Path(url.removeprefix("file://")).resolve()
            hint = f"Make room for {self.url}, or choose another `remote`"
            self._directory = Directory(root, fsync=True, full_hint=hint, create=False)
            self._prefix = f"{root}/"
            self._reader = self._writer = LocalStore()
            return
        if has_secret(url):
            raise UsageError(
                f"{self.url} is given with a password or options, which are not read from the URL of an object store; "
                "set credentials in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        try:
            self._reader, self._writer = (_open(url, seconds) for seconds in (timeout_s, WRITE_TIMEOUT_S))
        except Exception as error:  # each client has its own exceptions
            raise UsageError(
                f"{self.url} cannot be opened ({_reason(error)}); write redis://HOST:6379/0, s3://BUCKET/PREFIX, "
                "gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR"
            ) from None

    def get(self, name: str) -> bytes | None:
        """Return the object's bytes; None if there is no object."""
        byte_range = self._read(self._path(name))
        return None if byte_range is None else byte_range.data

    def get_range(self, name: str, start: int, end: int) -> ByteRange | None:
        """Return the bytes [start, end) of the object; None if there is no object."""
        return self._read(self._path(name), (start, end))

    def put(self, name: str, data: bytes) -> None:
        """Write the object atomically, also in a local folder: readers never get a part of it."""
        self._write(self._path(name), data)

    def contains(self, name: str) -> bool:
        """Return True if there is an object."""
        with self._errors(self._timeout_s):
            try:
                obstore.head(self._reader, self._path(name))
            except FileNotFoundError:
                return False
        return True

    def contains_many(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether there is an object. All names are queried in parallel, within one time limit."""
        queries = ThreadPoolExecutor(_NUM_QUERIES, thread_name_prefix="ragblend-objects")
        try:
            with self._errors(self._timeout_s):
                return list(queries.map(self.contains, names, timeout=self._timeout_s))
        finally:
            queries.shutdown(wait=False, cancel_futures=True)

    def delete(self, name: str) -> bool:
        """Delete the object; return True if there was one."""
        return self.contains(name) and self._remove(self._path(name))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Return every name with its object's size in bytes. Lists the whole prefix."""
        return self._list("", ENTRY_SUFFIX)

    def delete_temporary_files(self) -> int:
        """Delete killed writers' temporary files from a local folder; return their number. Other backends have none."""
        return self._directory.remove_stale_files() if self._directory is not None else 0

    def list_metadata(self, after: str = "") -> list[str]:
        """Return the names of the metadata values that sort after `after`; all names for ""."""
        return [name for name, _ in self._list(NOTES, ".json", self._note(after) if after else None)]

    def get_metadata(self, name: str) -> bytes | None:
        """Return a metadata value; None if there is none."""
        byte_range = self._read(self._note(name))
        return None if byte_range is None else byte_range.data

    def put_metadata(self, name: str, data: bytes) -> None:
        """Write a metadata value atomically."""
        self._write(self._note(name), data)

    def delete_metadata(self, name: str) -> None:
        """Delete a metadata value, if there is one."""
        self._remove(self._note(name))

    def ping(self) -> None:
        """Send one small request. Raises BackendUnreachableError, also for a bucket that does not exist."""
        with self._errors(self._timeout_s):
            next(iter(obstore.list(self._reader, f"{self._prefix}{NOTES}", chunk_size=1)), None)

    def close(self) -> None:
        """Do nothing: obstore closes idle connections itself."""

    def _path(self, name: str) -> str:
        return f"{self._prefix}{name[:2]}/{name}{ENTRY_SUFFIX}"

    def _note(self, name: str) -> str:
        return f"{self._prefix}{NOTES}/{name}.json"

    def _read(self, path: str, wanted: tuple[int, int] | None = None) -> ByteRange | None:
        """Return the bytes of an object, or those that are `wanted`; None if there is no object."""
        with self._errors(self._timeout_s):
            try:
                response = obstore.get(self._reader, path, options={} if wanted is None else {"range": wanted})
            except FileNotFoundError:
                return None
            if (nbytes := response.meta["size"]) > self.max_value_bytes:
                raise OSError(f"{path} has {nbytes} bytes; {self.max_value_bytes} is the most that is read")
            return ByteRange(bytes(response.bytes()), nbytes)

    def _write(self, path: str, data: bytes) -> None:
        with self._errors(WRITE_TIMEOUT_S):
            if self._directory is not None:  # unlike obstore, it syncs, and a killed writer's files are known
                self._directory.write(Path(path), data)
                return
            try:  # in one request: a killed multipart upload leaves parts that no listing shows
                obstore.put(self._writer, path, data, use_multipart=False)
            except FileNotFoundError as error:
                raise NotFoundError(f"{self.url} cannot be written ({_reason(error)}); create the bucket") from None

    def _remove(self, path: str) -> bool:
        with self._errors(self._timeout_s), suppress(FileNotFoundError):
            obstore.delete(self._reader, path)
            return True
        return False

    def _list(self, folder: str, suffix: str, after: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield file name without suffix, and bytes, of each object below `folder` whose path sorts after `after`."""
        until_s = monotonic() + WALK_TIMEOUT_S
        batches = iter(obstore.list(self._writer, f"{self._prefix}{folder}", offset=after, chunk_size=_LIST_BATCH))
        while True:
            with self._errors(WRITE_TIMEOUT_S):
                if (batch := next(batches, None)) is None:
                    return
                if monotonic() > until_s:
                    raise OSError(f"the list of objects does not end within {WALK_TIMEOUT_S:g} s")
            for object_meta in batch:
                name = object_meta["path"].rpartition("/")[2]
                if name.endswith(suffix) and not name.startswith("."):
                    yield name.removesuffix(suffix), object_meta["size"]

    @contextmanager
    def _errors(self, timeout_s: float) -> Iterator[None]:
        """Raise BackendUnreachableError for the client's errors, except for a full disk and a missing bucket."""
        global _user_pid
        _user_pid = _user_pid or os.getpid()
        try:
            if _user_pid != os.getpid():  # the client's threads exist in the parent alone, so a request would hang
                raise OSError("this process was forked from one that used object stores; start it with spawn instead")
            yield
        except (StoreFullError, NotFoundError, BackendUnreachableError):
            raise
        except Exception as error:  # every client has its own exceptions, which may name credentials
            is_late = isinstance(error, TimeoutError) or "TimedOut" in str(error)
            reason = f"it takes longer than {timeout_s:g} s; see remote_timeout_s" if is_late else _reason(error)
            raise BackendUnreachableError(
                f"{self.url} fails ({reason}); check it: ragblend doctor --remote URL"
            ) from None


def _open(url: str, timeout_s: float) -> Any:
    """Return obstore's client for a URL. Sends no request. Raises the client's errors for an invalid URL."""
    limit = timedelta(seconds=timeout_s)
    return from_url(
        url,
        # http:// is used only where the configured endpoint says so.
        client_options={
            "timeout": limit,
            "connect_timeout": timedelta(seconds=connect_timeout_s(timeout_s)),
            "allow_http": True,
        },
        retry_config={"max_retries": 0, "retry_timeout": limit},
        **_aws_profile(url),
    )


def _aws_profile(url: str) -> Mapping[str, Any]:
    """Return the option that reads credentials of S3 from the user's profiles, which obstore leaves to boto3."""
    folder = Path.home() / ".aws"
    has_profiles = "AWS_PROFILE" in os.environ or any((folder / name).exists() for name in ("credentials", "config"))
    if not url.startswith("s3") or "AWS_ACCESS_KEY_ID" in os.environ or not has_profiles:
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UsageError("AWS profiles are read by boto3, which is not installed: pip install boto3") from None
    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # no profile has credentials
        return {}


def _reason(error: Exception) -> str:
    """Return the first line of an error, or the code and message of the server's reply."""
    text = str(error).partition("\n\nDebug source")[0]
    if (reply := _SERVER_ERROR.search(text)) is not None:
        return f"{reply[1]}: {reply[2]}"
    return redact_message(f"{type(error).__name__}: {text[:_MAX_REASON_CHARS]}", "")


open_values = ObjectValues
"""Called by `open_remote` with the URL and the time limit of one call in seconds."""
