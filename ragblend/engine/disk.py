"""The durable tier: one safetensors file per chunk, readable layer by layer, every byte under a checksum.

    ROOT/ab/abcdef....safetensors   an entry; `.damaged` instead of `.safetensors` once it failed a checksum
    ROOT/models/FINGERPRINT.json    whose KV the store holds

A file's metadata is one JSON string (safetensors writes several keys in random order, one is deterministic). Its
first field is the xxh3_128 of length prefix and header, taken with that field's own digits zeroed, so it sits at a
fixed offset and is checked before anything is parsed; every later format version keeps this rule. Each layer's keys
and values lie side by side under one checksum. Token ids are plain JSON numbers: about as many bytes as base64 for
five-digit ids, and `jq` shows them.

Works on headers, tensors and files. Knows nothing about models, prompts or other tiers.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import platform
import re
import resource
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from ragblend.engine.kv import DTYPES, LAYOUT_VERSION, ChunkKV, KVHeader, LayerKV, in_memory
from ragblend.engine.protocols import StoreCounters
from ragblend.errors import DamagedEntryError, NotFoundError, RagblendError, StoreFullError, UsageError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Version of how an entry is written; LAYOUT_VERSION says what its tensors mean."""

ENTRY_SUFFIX, DAMAGED_SUFFIX, TEMP_SUFFIX = ".safetensors", ".damaged", ".tmp"
MODELS_DIR = "models"
TOUCH_INTERVAL_S = 60.0  # last use is known to the minute, so a hot entry costs one utime a minute
TEMP_MAX_AGE_S = 3600.0

_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OPENING = b'{"__metadata__":{"ragblend":"{\\"header_xxh3_128\\":\\"'
_DIGITS = slice(8 + len(_OPENING), 8 + len(_OPENING) + 32)
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_NAME = re.compile(r"[0-9A-Za-z_-]{3,128}")  # a key or fingerprint becomes a file name: no dots, no slashes
# Temp files name their host: a process id says nothing about a writer on another machine of a shared file system.
_HOST = xxh3_128_hexdigest(platform.node().encode())[:8]


class StoreNotWritableError(RagblendError):
    """The store's directory is read-only, not ours, or failing; nothing was stored."""


class StoreEntry(NamedTuple):
    """One stored chunk. `nbytes` is the file's size, `last_used_s` seconds since the epoch, to the minute."""

    key: str
    nbytes: int
    last_used_s: float
    header: KVHeader


class VerifyResult(NamedTuple):
    """Whether every byte of one file is what was written; `reason` is empty when it is."""

    key: str
    ok: bool
    reason: str


class GcResult(NamedTuple):
    """What `gc` removed, or would remove: evicted keys, quarantined and leftover temp files, and the bytes."""

    evicted: tuple[str, ...]
    num_quarantined: int
    num_temp_files: int
    freed_bytes: int
    kept_bytes: int


class _UnreadableError(Exception):
    """These bytes are not an entry, or not the one asked for."""


class _OtherVersionError(_UnreadableError):
    """An intact entry of a format that this version does not read."""


# --- the format: header bytes <-> facts ---


class _Span(NamedTuple):
    """Where one layer lies in the file."""

    offset: int
    nbytes: int
    keys_shape: tuple[int, int, int]
    values_shape: tuple[int, int, int]
    checksum: str


def _encode_header(header: KVHeader, layers: Sequence[LayerKV], checksums: Sequence[str]) -> bytes:
    """Length prefix and header. Its length depends on shapes and facts, not on the checksums' digits."""
    facts = {
        "header_xxh3_128": "0" * 32,  # first, so that its digits sit at _DIGITS
        "format_version": FORMAT_VERSION,
        "layout_version": header.layout_version,
        "key": header.key,
        "fingerprint": header.fingerprint,
        "namespace": header.namespace,
        "dtype": header.dtype,
        "num_layers": header.num_layers,
        "prefix_ids": [int(token) for token in header.prefix_ids],
        "token_ids": [int(token) for token in header.token_ids],
        "layers_xxh3_128": list(checksums),
    }
    table: dict[str, Any] = {"__metadata__": {"ragblend": json.dumps(facts, separators=(",", ":"))}}
    end = 0
    for index, layer in enumerate(layers):
        for name, tensor in (("keys", layer.keys), ("values", layer.values)):
            start, end = end, end + tensor.nbytes
            table[f"layer.{index:03d}.{name}"] = {
                "dtype": _SAFETENSORS_DTYPES[header.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # as safetensors does: tensor data starts 8-byte aligned
    raw = bytearray(len(text).to_bytes(8, "little") + text)
    raw[_DIGITS] = xxh3_128_hexdigest(raw).encode()
    return bytes(raw)


def _decode_header(raw: bytes, file_nbytes: int) -> tuple[KVHeader, tuple[_Span, ...]]:
    """Facts and layer positions of a file that starts with `raw` and has `file_nbytes` bytes."""
    if raw[8 : _DIGITS.start] != _OPENING:
        raise _UnreadableError("not written by ragblend")
    zeroed = bytearray(raw)
    zeroed[_DIGITS] = b"0" * 32
    if xxh3_128_hexdigest(zeroed).encode() != raw[_DIGITS]:
        raise _UnreadableError("the header does not match its checksum")
    try:
        table = json.loads(raw[8:])
        facts = json.loads(table.pop("__metadata__")["ragblend"])
        versions = (facts["format_version"], facts["layout_version"])
        if versions != (FORMAT_VERSION, LAYOUT_VERSION):
            raise _OtherVersionError(
                f"format and layout versions {versions}, this ragblend reads {(FORMAT_VERSION, LAYOUT_VERSION)}"
            )
        header = KVHeader(
            key=facts["key"],
            fingerprint=facts["fingerprint"],
            prefix_ids=tuple(facts["prefix_ids"]),
            token_ids=tuple(facts["token_ids"]),
            num_layers=facts["num_layers"],
            dtype=facts["dtype"],
            namespace=facts["namespace"],
            layout_version=facts["layout_version"],
        )
        spans = _layer_spans(header, table, facts["layers_xxh3_128"], start=len(raw))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _UnreadableError(f"the header does not describe an entry: {error!r}") from error
    end = spans[-1].offset + spans[-1].nbytes if spans else len(raw)
    if end != file_nbytes:
        raise _UnreadableError(f"the file has {file_nbytes} bytes, its header says {end}")
    return header, spans


def _layer_spans(header: KVHeader, table: Mapping[str, Any], checksums: Sequence[str], start: int) -> tuple[_Span, ...]:
    """Position of every layer; ValueError unless the tensors follow each other without a gap, and all are [H, T, D]."""
    if len(table) != 2 * header.num_layers or len(checksums) != header.num_layers:
        raise ValueError(f"{len(table)} tensors and {len(checksums)} checksums for {header.num_layers} layers")
    spans, end = [], 0
    num_tokens, itemsize = header.num_tokens, DTYPES[header.dtype].itemsize
    for index, checksum in enumerate(checksums):
        layer_start, shapes = end, []
        for name in ("keys", "values"):
            tensor = table[f"layer.{index:03d}.{name}"]
            heads, tokens, dim = tensor["shape"]
            nbytes = heads * tokens * dim * itemsize
            if tensor["data_offsets"] != [end, end + nbytes] or tokens != num_tokens or nbytes < 0:
                raise ValueError(f"layer {index} {name} at {tensor['data_offsets']}, shape {tensor['shape']}")
            end += nbytes
            shapes.append((heads, tokens, dim))
        spans.append(_Span(start + layer_start, end - layer_start, shapes[0], shapes[1], checksum))
    return tuple(spans)


# --- reading: one open file, one layer at a time ---


class _OpenFile:
    """A read-only descriptor that closes when the last reader lets go of it, so no read meets a reused number."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = -1  # __del__ runs even when the next line raises
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def keepable(self) -> bool:
        """Whether half of the process's descriptors are still free (the kernel hands out the lowest number)."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return limit == resource.RLIM_INFINITY or self.fd < limit // 2

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on; _UnreadableError when the file ends first."""
        while buffer.nbytes:
            count = os.preadv(self.fd, [buffer], offset)
            if count == 0:
                raise _UnreadableError(f"the file ends at byte {offset}, {buffer.nbytes} bytes early")
            buffer, offset = buffer[count:], offset + count

    def header_bytes(self) -> tuple[bytes, int]:
        """Length prefix with header, unverified, and the file's size in bytes."""
        size = os.fstat(self.fd).st_size
        prefix = bytearray(8)
        self.read(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if not len(_OPENING) + 32 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise _UnreadableError(f"a header of {length} bytes in a file of {size}")
        text = bytearray(length)
        self.read(memoryview(text), 8)
        return bytes(prefix + text), size


class DiskKV:
    """ChunkKV in a file. Each `layer` call reads and verifies that layer alone, into memory of its own.

    The file stays open, so deleting or replacing the entry does not disturb a reader. `close`, leaving a `with`
    block or garbage collection lets it go; after that, and when the process is short of descriptors, `layer` opens
    the file again and accepts it if its header, and so every checksum, is the same. Safe to share between threads.
    """

    def __init__(self, key: str, path: Path, file: _OpenFile, on_damage: Callable[[str, Path, _OpenFile, str], None]):
        raw, file_nbytes = file.header_bytes()
        self.header, self._spans = _decode_header(raw, file_nbytes)
        if self.header.key != key:
            raise _UnreadableError(f"it holds the KV of {self.header.key}")
        self._path, self._digits, self._on_damage = path, raw[_DIGITS], on_damage
        self._file: _OpenFile | None = file if file.keepable else None

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(span.nbytes for span in self._spans)

    def layer(self, index: int) -> LayerKV:
        """Keys and values of one layer, [H, T, D] each, on the CPU. Read-only by contract: they share one buffer.

        Raises DamagedEntryError when its bytes fail their checksum, or the file is gone and was not kept open.
        """
        file = None
        try:
            file = self._file or self._reopen()
            return self._read(file, index)
        except _UnreadableError as error:
            if file is not None:
                self._on_damage(self.header.key, self._path, file, str(error))
            raise DamagedEntryError(self.header.key, str(error)) from error
        except OSError as error:
            raise DamagedEntryError(self.header.key, f"layer {index} cannot be read: {error}") from error

    def close(self) -> None:
        """Let the file go; a read under way in another thread still finishes."""
        self._file = None

    def __enter__(self) -> DiskKV:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reopen(self) -> _OpenFile:
        file = _OpenFile(self._path)
        if file.header_bytes()[0][_DIGITS] != self._digits:
            raise OSError(errno.ESTALE, "the entry was replaced by another one")
        return file

    def _read(self, file: _OpenFile, index: int) -> LayerKV:
        span = self._spans[index]
        num_keys = math.prod(span.keys_shape)
        # Normal tensors even under inference_mode: only those count in-place writes, which MemoryStore checks.
        with torch.inference_mode(False):
            buffer = torch.empty(span.nbytes, dtype=torch.uint8, device="cpu")  # not zeroed first, as bytearray is
            data = buffer.numpy().data
            file.read(data, span.offset)
            if xxh3_128_hexdigest(data) != span.checksum:
                raise _UnreadableError(f"layer {index} does not match its checksum")
            flat = buffer.view(DTYPES[self.header.dtype])
            return LayerKV(flat[:num_keys].view(span.keys_shape), flat[num_keys:].view(span.values_shape))


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order; no copy when it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# --- the store: names, atomic writes, quarantine, eviction ---


class DiskStore:
    """KVStore in a directory, safe to share between threads and processes.

    `fsync=False` is for tests and scratch stores: a power cut may then lose or damage the latest entries (which the
    checksums notice). `create=False` raises NotFoundError when `root` does not exist.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, create: bool = True) -> None:
        self.root = Path(root)
        self._fsync = fsync
        self._counters = StoreCounters()
        self._lock = threading.Lock()
        if not create and not self.root.is_dir():
            raise NotFoundError(f"no store at {self.root}; fill one with: ragblend ingest DOCS --store {self.root}")
        try:
            self._make_directory(self.root)
        except OSError as error:
            raise self._write_error(error, self.root, 0) from error

    @property
    def counters(self) -> StoreCounters:
        """Hits, misses, puts, damage and evictions of this process since the store was opened."""
        return self._counters

    def get(self, key: str, token_ids: Sequence[int] | None = None) -> DiskKV | None:
        """The entry, its header verified and no layer read; None for a miss. Never raises.

        A damaged or foreign file is moved aside. One of another version, or with token ids other than `token_ids`,
        stays where it is: somebody else may be able to use it.
        """
        path, file = self.root / key[:2] / f"{key}{ENTRY_SUFFIX}", None
        try:
            file = _OpenFile(self._path(key))
            kv = DiskKV(key, path, file, self._quarantine)
            if token_ids is not None and kv.header.token_ids != tuple(token_ids):
                raise _OtherVersionError(
                    f"its {kv.header.num_tokens} token ids differ from the {len(token_ids)} asked for"
                )
        except FileNotFoundError:
            self._count(num_misses=1)
            return None
        except (OSError, UsageError) as error:
            log.warning("stored KV %s cannot be read: %s", key, error)
            self._count(num_misses=1)
            return None
        except _OtherVersionError as error:
            log.warning("stored KV %s in %s is not used: %s", key, path, error)
            self._count(num_misses=1, num_damaged=1)
            return None
        except _UnreadableError as error:
            assert file is not None
            self._quarantine(key, path, file, str(error))
            self._count(num_misses=1)
            return None
        self._count(num_hits=1)
        _touch(file.fd, os.fstat(file.fd))
        return kv

    def put(self, kv: ChunkKV) -> None:
        """Store a chunk; when it returns, the entry survives a crash. Needs memory for one more layer at most.

        An entry of the same key is replaced, and its damaged copy dropped. Raises StoreFullError when the disk or the
        quota is full, StoreNotWritableError for any other refusal; no trace of the entry is left then.
        """
        path = self._path(kv.header.key)
        held = in_memory(kv)
        checksums = ["0" * 32] * len(held.layers)
        header_nbytes = len(_encode_header(held.header, held.layers, checksums))

        def write(stream: BinaryIO) -> None:
            # Checksums belong in the header but come from the data: write that first, so each layer is copied once.
            stream.seek(header_nbytes)
            for index, layer in enumerate(held.layers):
                data = (_tensor_bytes(layer.keys), _tensor_bytes(layer.values))
                checksums[index] = _checksum(*data)
                stream.writelines(data)
            stream.seek(0)
            stream.write(_encode_header(held.header, held.layers, checksums))

        self._replace(path, header_nbytes + held.nbytes, write)
        _unlink(path.with_suffix(DAMAGED_SUFFIX))
        self._count(num_puts=1)

    def contains(self, key: str) -> bool:
        """Whether `get` would answer, judged by the header (so that ingestion recomputes what is damaged)."""
        return self.header(key) is not None

    def header(self, key: str) -> KVHeader | None:
        """The verified header of an entry; None when there is none that this version reads. Counts nothing."""
        try:
            path = self._path(key)
            return DiskKV(key, path, _OpenFile(path), self._quarantine).header
        except (OSError, UsageError, _UnreadableError):
            return None

    def delete(self, key: str) -> bool:
        """Remove an entry, and its damaged copy; whether there was one. Readers that hold it are not disturbed."""
        try:
            path = self._path(key)
        except UsageError:
            return False
        removed = [_unlink(path), _unlink(path.with_suffix(DAMAGED_SUFFIX))]
        return any(removed)

    def keys(self) -> Iterator[str]:
        """Keys of all entries, without temp and damaged files; unverified."""
        return (path.stem for path in self._files(ENTRY_SUFFIX))

    def nbytes(self) -> int:
        """Bytes of all entries' files, damaged ones included, on disk."""
        return sum(stat.st_size for suffix in (ENTRY_SUFFIX, DAMAGED_SUFFIX) for _, stat in self._stats(suffix))

    def entries(self) -> Iterator[StoreEntry]:
        """Every readable entry with its header, size and last use."""
        for path, stat in self._stats(ENTRY_SUFFIX):
            header = self.header(path.stem)
            if header is not None:
                yield StoreEntry(path.stem, stat.st_size, stat.st_mtime, header)

    def touch(self, key: str) -> None:
        """Note that an entry was used (a faster tier answered for it), so that `gc` keeps it."""
        with suppress(OSError, UsageError):
            path = self._path(key)
            _touch(path, path.stat())

    def verify(self) -> Iterator[VerifyResult]:
        """Read every byte of every file, quarantined ones included; what fails is quarantined."""
        for path in self._files(DAMAGED_SUFFIX):
            if (reason := self._check(path)) is not None:
                yield VerifyResult(path.stem, False, f"quarantined: {reason or 'its bytes match again'}")
        for path in self._files(ENTRY_SUFFIX):
            if (reason := self._check(path)) is not None:
                yield VerifyResult(path.stem, not reason, reason)

    def clean(self) -> int:
        """Remove temp files that a dead process of this host, or anyone an hour ago, left behind; how many."""
        return sum(_unlink(path) for path, _ in self._leftovers())

    def gc(
        self, max_bytes: int | None = None, keep: Callable[[str], bool] | None = None, dry_run: bool = False
    ) -> GcResult:
        """Remove leftovers, damaged files, entries that `keep` turns down, then the least recently used ones.

        max_bytes: what the remaining files may hold together; None leaves the rest alone. `dry_run` only reports.
        """
        if max_bytes is not None and max_bytes < 0:
            raise UsageError(f"max_bytes is {max_bytes}; choose 0 (empty the store) or more")
        leftovers, quarantined = list(self._leftovers()), list(self._stats(DAMAGED_SUFFIX))
        entries = sorted(self._stats(ENTRY_SUFFIX), key=lambda item: (item[1].st_mtime_ns, item[0]))
        kept_bytes = sum(stat.st_size for _, stat in entries)
        unwanted = {path for path, _ in entries if keep is not None and not keep(path.stem)}
        kept_bytes -= sum(stat.st_size for path, stat in entries if path in unwanted)
        evicted = []
        for path, stat in entries:  # oldest first
            if path not in unwanted:
                if max_bytes is None or kept_bytes <= max_bytes:
                    continue
                kept_bytes -= stat.st_size
            evicted.append((path, stat))
        doomed = leftovers + quarantined + evicted
        if not dry_run:
            for path, _ in doomed:
                _unlink(path)
            self._count(num_evicted=len(evicted))
        freed_bytes = sum(stat.st_size for _, stat in doomed)
        keys = tuple(path.stem for path, _ in evicted)
        return GcResult(keys, len(quarantined), len(leftovers), freed_bytes, kept_bytes)

    def put_model(self, fingerprint: str, facts: Mapping[str, Any]) -> None:
        """Note whose KV this store holds (name, dtype, number of layers, ...), as JSON. Raises what `put` raises."""
        path = self.root / MODELS_DIR / f"{_checked_name(fingerprint)}.json"
        data = json.dumps(dict(facts), indent=2, sort_keys=True).encode() + b"\n"
        with suppress(OSError):
            if path.read_bytes() == data:
                return
        self._replace(path, len(data), lambda stream: stream.write(data))

    def models(self) -> dict[str, dict[str, Any]]:
        """What `put_model` noted, by fingerprint; an unreadable note is skipped with a warning."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted((self.root / MODELS_DIR).glob("[!.]*.json")):
            try:
                found[path.stem] = dict(json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.warning("model descriptor %s is skipped: %s", path, error)
        return found

    def _path(self, key: str) -> Path:
        return self.root / _checked_name(key)[:2] / f"{key}{ENTRY_SUFFIX}"

    def _files(self, suffix: str) -> Iterator[Path]:
        """Files of that suffix whose name is a key in the right directory, in order of their keys."""
        for path in sorted(self.root.glob(f"??/[!.]*{suffix}")):
            if _NAME.fullmatch(path.stem) and path.stem[:2] == path.parent.name:
                yield path

    def _stats(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._files(suffix):
            with suppress(FileNotFoundError):  # deleted or quarantined meanwhile
                yield path, path.stat()

    def _leftovers(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in sorted(self.root.glob(f"*/.*{TEMP_SUFFIX}")):
            with suppress(FileNotFoundError):
                stat = path.stat()
                if time.time() - stat.st_mtime > TEMP_MAX_AGE_S or _writer_is_dead(path.name):
                    yield path, stat

    def _check(self, path: Path) -> str | None:
        """Why this file is not an intact entry of its name; "" when it is, None when it is gone."""
        file = None
        try:
            file = _OpenFile(path)
            kv = DiskKV(path.stem, path, file, self._quarantine)
            for index in range(kv.header.num_layers):
                kv._read(file, index)
        except FileNotFoundError:
            return None
        except (OSError, _OtherVersionError) as error:
            return str(error)
        except _UnreadableError as error:
            assert file is not None
            if path.suffix != DAMAGED_SUFFIX:
                self._quarantine(path.stem, path, file, str(error))
            return str(error)
        return ""

    def _quarantine(self, key: str, path: Path, file: _OpenFile, reason: str) -> None:
        """Move a damaged file out of the way, unless another writer has already replaced it."""
        self._count(num_damaged=1)
        aside = path.with_suffix(DAMAGED_SUFFIX)
        try:
            if os.path.samestat(os.fstat(file.fd), path.stat()):
                path.replace(aside)
                outcome = f"moved to {aside}"
            else:
                outcome = "already replaced by another writer"
        except OSError as error:
            outcome = f"not moved aside: {error}"
        log.warning("stored KV %s is damaged (%s), %s; repair: ragblend verify --repair", key, reason, outcome)

    def _replace(self, path: Path, nbytes: int, write: Callable[[BinaryIO], Any]) -> None:
        """Put a file in place in one step: whoever looks sees the old one or the whole new one, also after a crash."""
        temp = path.with_name(f".{path.stem}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
        try:
            self._make_directory(path.parent)
            with temp.open("xb") as stream:
                write(stream)
                stream.flush()
                if self._fsync:
                    os.fsync(stream.fileno())
            temp.replace(path)
            if self._fsync:
                _fsync_directory(path.parent)
        except BaseException as error:
            _unlink(temp)
            if isinstance(error, OSError):
                raise self._write_error(error, path, nbytes) from error
            raise

    def _make_directory(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            if self._fsync:
                _fsync_directory(path.parent)

    def _write_error(self, error: OSError, path: Path, nbytes: int) -> RagblendError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(
                f"{path} needs {nbytes} bytes, {_free_bytes(self.root)} are free there ({error.strerror}). "
                f"Make room: ragblend gc --store {self.root}, or choose a store on a larger disk"
            )
        return StoreNotWritableError(
            f"{path} cannot be written: {error.strerror or error}. Check the owner and the mount of {self.root}, "
            f"or choose another place with --store DIR"
        )

    def _count(self, **steps: int) -> None:
        with self._lock:
            for name, step in steps.items():
                setattr(self._counters, name, getattr(self._counters, name) + step)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a file of a store; use ragblend.engine.keys.chunk_key or fingerprint")
    return name


def _checksum(*parts: memoryview) -> str:
    """xxh3_128 of the parts, one after the other."""
    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _touch(target: int | Path, stat: os.stat_result) -> None:
    """Set the modification time to now if it is older than TOUCH_INTERVAL_S; a read-only store keeps its times."""
    with suppress(OSError):
        if time.time() - stat.st_mtime > TOUCH_INTERVAL_S:
            os.utime(target)


def _unlink(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _writer_is_dead(temp_name: str) -> bool:
    """Whether the process of this host that a temp file is named after no longer runs."""
    parts = temp_name.split(".")  # "", key, host, pid, random, "tmp"
    if len(parts) != 6 or parts[2] != _HOST or not parts[3].isdigit():
        return False
    try:
        os.kill(int(parts[3]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
