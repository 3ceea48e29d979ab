"""`KnownChunks`: finds the registered chunks of one tokenizer and one namespace in prompts.

The token ids are in the store's registry. The first search builds an index over them, which all engines of the process
share. Later searches add and remove what this process or another has changed. Depends on token ids and the registry,
not on KV or engines.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from time import monotonic
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ragblend.catalog.registry import ChunkRegistry
from ragblend.errors import BackendUnreachableError
from ragblend.prompt.match import ChunkRun
from ragblend.prompt.token_index import Run, TokenIndex

T = TypeVar("T")

log = logging.getLogger(__name__)

_CACHED_CHUNKS = 4096
_OUTAGE_PAUSE_S = 5.0  # before the next query to a catalogue that did not answer


class KnownChunks:
    """Finds runs of the chunks in `registry` that have token ids for a tokenizer and a namespace. Thread-safe.

    While the registry's server does not answer, no run is found, so prompts are prefilled without stored KV, and one
    warning is logged. Create it with `open_known_chunks`.
    """

    def __init__(self, registry: ChunkRegistry, tokenizer: str, namespace: str) -> None:
        self._registry = registry
        self._owner = (tokenizer, namespace)
        self._lock, self._outage_lock = threading.Lock(), threading.Lock()
        self._retry_at_s = 0.0  # on the monotonic clock, during an outage
        self._num_failures = 0
        self._version: tuple[int, int] | None = None  # of the registry, from which the cached values are
        self._cached_ids = lru_cache(_CACHED_CHUNKS)(registry.read_ids)
        self._has_text = lru_cache(_CACHED_CHUNKS)(lambda text: registry.has_ids(text, tokenizer, namespace))
        self._cached_document = lru_cache(_CACHED_CHUNKS)(lambda number: registry.document_with_ids(number, namespace))
        self._clear()

    def add(self, chunks: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Add chunks as (text, token ids). Known chunks are not changed."""
        self._registry.add_ids(chunks, *self._owner)

    def remove(self, text: str) -> None:
        """Remove the token ids of this text."""
        self._registry.remove_ids(text, *self._owner)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self._unless_outage(lambda: self._contains(text), False)

    def _contains(self, text: str) -> bool:
        with self._hold_lock():
            self._drop_stale_caches()
            return self._has_text(text)

    def find_runs(self, token_ids: Sequence[int]) -> list[ChunkRun]:
        """Return the runs of chunks in a prompt, in prompt order. They do not overlap."""
        return self._unless_outage(lambda: self._find_runs(token_ids), [])

    def _find_runs(self, token_ids: Sequence[int]) -> list[ChunkRun]:
        with self._hold_lock():
            self._update()
            index = self._index
        runs = index.find_runs(token_ids) if len(index) else []
        return [
            _chunk_run(run, ids, self._cached_document(run.chunk))
            for run in runs
            if (ids := self._cached_ids(run.chunk)) is not None
        ]

    def _unless_outage(self, call: Callable[[], T], default: T) -> T:
        """Return the call's result, or the default while the registry's server does not answer.

        After a pause, one caller queries the server again. Other callers get the default and do not wait.
        """
        if self._retry_at_s:
            with self._outage_lock:
                if monotonic() < self._retry_at_s:
                    return default
                self._retry_at_s = monotonic() + _OUTAGE_PAUSE_S
        try:
            found = call()
        except BackendUnreachableError as error:
            self._record_outage(error)
            return default
        if self._retry_at_s:
            self._retry_at_s = 0.0
            log.warning("the catalogue answers again, so stored chunks are found in prompts")
        return found

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the lock. Raise BackendUnreachableError if another call failed while this one waited for the lock."""
        num_failures = self._num_failures
        with self._lock:
            if num_failures != self._num_failures:
                raise BackendUnreachableError("the catalogue did not answer the call before this one")
            try:
                yield
            except BackendUnreachableError as error:
                self._num_failures += 1
                self._record_outage(error)  # before a waiting call fails, so that this error is logged
                raise

    def _record_outage(self, error: BackendUnreachableError) -> None:
        with self._outage_lock:
            if not self._retry_at_s:
                log.warning("no stored chunk is found, so prompts are prefilled without stored KV: %s", error)
            self._retry_at_s = monotonic() + _OUTAGE_PAUSE_S

    def close(self) -> None:
        """Close the registry's file and drop the index. The next call opens the file at that path again."""
        with self._lock:
            self._registry.close()
            self._version = None
            self._clear()

    def _clear(self) -> None:
        self._index = TokenIndex(self._cached_ids)
        self._indexed_version: tuple[int, int] | None = None
        self._last_number = 0
        self._num_removals = 0

    def _drop_stale_caches(self) -> tuple[int, int]:
        """Clear the caches if the registry has changed. Return its change counter."""
        version = self._registry.change_counter()
        if version != self._version:
            self._has_text.cache_clear()
            self._cached_ids.cache_clear()  # the index ignores chunks without ids, which are removed ones
            self._cached_document.cache_clear()
            self._version = version
        return version

    def _update(self) -> None:
        """Add and remove what changed in the registry since the last call."""
        version = self._drop_stale_caches()
        if version == self._indexed_version:
            return
        if self._indexed_version is not None and version < self._indexed_version:  # another database replaced the file
            self._clear()
        num_removals = self._registry.num_id_removals()
        added = self._registry.ids_after(self._last_number, *self._owner)
        if num_removals != self._num_removals:  # because counting is slow in PostgreSQL
            num_removed = len(self._index) + len(added) - self._registry.count_ids(*self._owner)
            if num_removed > len(self._index) // 4:
                self._clear()
                added = self._registry.ids_after(0, *self._owner)
            self._num_removals = num_removals
        self._index.add(added)
        self._last_number = max((number for number, _ in added), default=self._last_number)
        self._indexed_version = version


def find_runs_of(chunks: Sequence[Sequence[int]], token_ids: Sequence[int]) -> list[ChunkRun]:
    """Return the runs of these few chunks (token ids) in a prompt, in prompt order. They do not overlap."""
    arrays = [np.asarray(ids) for ids in chunks]
    index = TokenIndex(arrays.__getitem__)
    index.add(enumerate(arrays))
    return [_chunk_run(run, arrays[run.chunk]) for run in index.find_runs(token_ids)]


def _chunk_run(run: Run, ids: NDArray[np.integer], document: str = "") -> ChunkRun:
    return ChunkRun(tuple(ids.tolist()), run.chunk_start, run.start, run.end, document=document)


_OPEN: WeakValueDictionary[tuple[object, str, str], KnownChunks] = WeakValueDictionary()
_OPEN_LOCK = threading.Lock()


def _in_child() -> None:
    """Replace the lock in a forked process: a thread of the parent may have held the old one."""
    global _OPEN_LOCK
    _OPEN_LOCK = threading.Lock()
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_child)


def open_known_chunks(registry: ChunkRegistry, tokenizer: str, namespace: str) -> KnownChunks:
    """Return the KnownChunks of a registry's database, a tokenizer and a namespace. All callers share one object."""
    key = (registry.key or id(registry), tokenizer, namespace)
    with _OPEN_LOCK:
        known = _OPEN.get(key)
        if known is None:
            known = _OPEN[key] = KnownChunks(registry, tokenizer, namespace)
        return known
