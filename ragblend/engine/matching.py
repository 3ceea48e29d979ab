"""Matching of prompts for all engines: finds known chunks in token ids, and their entries in the store.

`KnownChunks.match` finds the known chunks of one tokenizer and one namespace as runs: those whose token ids are in the
store's ledger, with or without stored KV. The first search builds an index over them, which all engines of the process
share. Later searches update the index from the rows that any process has added or removed.

`find_variants` lists the variants of a run's chunk, and `find_stored` finds the best one that a store has.
`PrefixKVCache` has the KV of earlier prompts' prefixes. Depends on token ids, keys and the ledger, not on models or
engines.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from time import monotonic
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from ragblend.catalog.ledger import Ledger
from ragblend.engine.store.format.kv import ChunkKV
from ragblend.errors import BackendUnreachableError
from ragblend.prompt.token_index import TokenIndex
from ragblend.prompt.types import Chunk, ChunkRun, PrefixMatch, Variant, common_prefix_length

T = TypeVar("T")

log = logging.getLogger(__name__)

_CACHED_CHUNKS = 4096
_OUTAGE_PAUSE_S = 5.0  # seconds without another call to a catalogue that did not answer

PREFIXES_KEPT = 8  # prefixes whose KV an engine keeps in memory; they are few and short

LEAST_QUOTE = 64
"""Least tokens of a run at the end of a user's turn that counts as a document; a shorter run is a quotation."""


class KnownChunks:
    """The chunks that `ledger` has for one tokenizer and one namespace. `match` finds them in prompts.

    `tokenizer`: the tokenizer's fingerprint. While the ledger's database does not answer, no chunk is found, and one
    warning is logged. Prompts are then prefilled without stored KV. Thread-safe. Create an object with
    `open_known_chunks`.
    """

    def __init__(self, ledger: Ledger, tokenizer: str, namespace: str) -> None:
        self._ledger = ledger
        self._owner = (tokenizer, namespace)
        self._lock, self._outage_lock = threading.Lock(), threading.Lock()
        self._retry_at_s = 0.0  # on the monotonic clock, during an outage
        self._num_failures = 0
        self._cached_ids = lru_cache(_CACHED_CHUNKS)(ledger.read_ids)
        self._has_text = lru_cache(_CACHED_CHUNKS)(lambda text, version: ledger.has_ids(text, tokenizer, namespace))
        self._cached_document = lru_cache(_CACHED_CHUNKS)(lambda number: ledger.document_id_of_row(number, namespace))
        self._clear()

    def add(self, texts: Iterable[str], find_ids: Callable[[str], Sequence[int]]) -> None:
        """Add the chunks of these texts.

        `find_ids`: returns the token ids of a text. It is called for unknown texts only. If it returns no ids, the text
        is left out.
        """
        new = self._ledger.texts_without_ids(texts, *self._owner)
        self._ledger.add_ids(((text, ids) for text in new if (ids := find_ids(text))), *self._owner)

    def remove(self, text: str) -> None:
        """Remove the chunk of this text."""
        self._ledger.remove_ids(text, *self._owner)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self._search(lambda _: self._has_text(text, self._version), False)

    def match(
        self,
        token_ids: Sequence[int],
        tail_ids: Sequence[int],
        named: Mapping[tuple[int, ...], Chunk] | None = None,
        *,
        by_turn: bool = False,
    ) -> list[ChunkRun]:
        """Return the runs of a prompt's token ids: parts that equal a chunk or a part of one, in the prompt's order.

        `tail_ids`: the ids that the chat template writes after a user turn; () for a prompt without turns. `named`: the
        chunks that the prompt names, by their token ids. They are found even if they are unknown. `by_turn`: True if
        the chunks of every turn are fused with the question of this turn, and not with the prompt's last question.

        A run of fewer than LEAST_QUOTE tokens that ends the last turn, or with `by_turn` any turn, may be a quotation
        in the question. It is left out, unless `named` has its chunk and the turn has no other run of that chunk.
        """
        runs = self.find_runs(token_ids)
        if named:
            matched = {run.chunk_ids for run in runs}
            if unknown := [ids for ids, chunk in named.items() if ids not in matched and chunk.text not in self]:
                runs += [part for run in find_runs_of(unknown, token_ids) for part in run.without(runs)]
                runs.sort(key=lambda run: run.start)
            runs = [replace(run, chunk=named.get(run.chunk_ids)) for run in runs]
        ends = turn_ends(token_ids, tail_ids, runs) if by_turn else [len(token_ids)]
        kept = list[ChunkRun]()
        for start, end in pairwise([0, *ends]):
            in_turn = [run for run in runs if start <= run.start < end]
            if in_turn and in_turn[-1].num_tokens < LEAST_QUOTE and _is_quotation(in_turn, token_ids[:end], tail_ids):
                in_turn.pop()
            kept += in_turn
        return kept

    def find_runs(self, token_ids: Sequence[int]) -> list[ChunkRun]:
        """Return the parts of a prompt (token ids) that equal parts of known chunks.

        They are in the prompt's order and do not overlap. Short parts are left out (see `is_long_enough`).
        """
        return self._search(
            lambda index: [
                ChunkRun(tuple(ids.tolist()), chunk_start, start, end, document=self._cached_document(number))
                for number, chunk_start, start, end in index.find_runs(token_ids)
                if (ids := self._cached_ids(number)) is not None
            ],
            [],
        )

    def _search(self, search: Callable[[TokenIndex], T], default: T) -> T:
        """Update the index from the ledger and return `search(index)`.

        Return `default` while the ledger's database does not answer. During an outage, one caller tries again after a
        pause; the other callers get `default` at once. If the update fails, callers that waited for it get `default`.
        """
        if self._retry_at_s:
            with self._outage_lock:
                if monotonic() < self._retry_at_s:
                    return default
                self._retry_at_s = monotonic() + _OUTAGE_PAUSE_S
        num_failures = self._num_failures
        try:
            with self._lock:
                if num_failures != self._num_failures:
                    return default
                try:
                    self._update()
                except BackendUnreachableError as error:
                    self._num_failures += 1
                    self._record_outage(error)
                    return default
                index = self._index
            result = search(index)
        except BackendUnreachableError as error:
            self._record_outage(error)
            return default
        if self._retry_at_s:
            self._retry_at_s = 0.0
            log.warning("the catalogue answers again, so stored chunks are found in prompts")
        return result

    def _record_outage(self, error: BackendUnreachableError) -> None:
        with self._outage_lock:
            if not self._retry_at_s:
                log.warning(
                    "no stored chunk is found, so prompts are prefilled without stored KV until the catalogue answers: "
                    "%s",
                    error,
                )
            self._retry_at_s = monotonic() + _OUTAGE_PAUSE_S

    def close(self) -> None:
        """Close the ledger. The next call opens the database that is then at the ledger's path or URL."""
        with self._lock:
            self._ledger.close()
            self._cached_ids.cache_clear()
            self._cached_document.cache_clear()
            self._clear()

    def _clear(self) -> None:
        self._index = TokenIndex(self._cached_ids)
        self._version: tuple[int, int] | None = None
        self._identity = self._ledger.identity
        self._last_number = 0
        self._num_removals = 0

    def _update(self) -> None:
        """Bring the index to the state of the ledger."""
        version = self._ledger.change_counter()
        if version == self._version:
            return
        is_older = self._version is not None and version < self._version
        if is_older or self._identity != self._ledger.identity:  # another database replaced it
            self._clear()
        self._cached_ids.cache_clear()  # a removed chunk has no ids any more, so the index finds no run of it
        self._cached_document.cache_clear()
        num_removals = self._ledger.num_id_removals()
        added = self._ledger.ids_after(self._last_number, *self._owner)
        if num_removals != self._num_removals:  # counting takes long in PostgreSQL
            num_removed = len(self._index) + len(added) - self._ledger.count_tokenized_texts(*self._owner)
            if num_removed > len(self._index) // 4:
                self._clear()
                added = self._ledger.ids_after(0, *self._owner)
            self._num_removals = num_removals
        self._index.add(added)
        self._last_number = max((number for number, _ in added), default=self._last_number)
        self._version = version


def find_runs_of(chunks: Sequence[Sequence[int]], token_ids: Sequence[int]) -> list[ChunkRun]:
    """Return the parts of a prompt that equal parts of `chunks`, as `KnownChunks.find_runs` does for known chunks.

    `chunks`: token ids of each chunk. They should be few, because each call builds an index of them.
    """
    arrays = [np.asarray(ids) for ids in chunks]
    index = TokenIndex(arrays.__getitem__)
    index.add(enumerate(arrays))
    return [
        ChunkRun(tuple(arrays[number].tolist()), chunk_start, start, end)
        for number, chunk_start, start, end in index.find_runs(token_ids)
    ]


def turn_ends(token_ids: Sequence[int], tail_ids: Sequence[int], runs: Sequence[ChunkRun] = ()) -> list[int]:
    """Return the positions at which the turns of a prompt end, in ascending order. The last one is the prompt's end.

    `tail_ids`: the ids that the chat template writes after a user turn; a turn ends after them, unless they are inside
    one of `runs`.

    >>> turn_ends([5, 1, 2, 6, 7, 1, 2, 8], [1, 2]), turn_ends([5, 1, 2], [1, 2]), turn_ends([5, 6], [])
    ([3, 7, 8], [3], [2])
    """
    ids, tail, count = list(token_ids), list(tail_ids), len(tail_ids)
    ends, start = [], 0
    while tail:
        try:
            start = ids.index(tail[0], start)
        except ValueError:
            break
        end = start + count
        if ids[start:end] == tail and not any(run.start < end <= run.end for run in runs):
            ends.append(end)
        start += 1
    return ends if ends and ends[-1] == len(ids) else [*ends, len(ids)]


def last_turn_end(token_ids: Sequence[int], tail_ids: Sequence[int]) -> int:
    """Return the position at which a prompt's last user turn ends.

    It is the start of `tail_ids` if the prompt ends with them, else the end of the prompt.

    >>> last_turn_end([5, 6, 7, 1, 2], [1, 2]), last_turn_end([5, 6, 7], [1, 2])
    (3, 3)
    """
    num_tail = len(tail_ids)
    return len(token_ids) - (num_tail if num_tail and list(token_ids[-num_tail:]) == list(tail_ids) else 0)


def _is_quotation(runs: Sequence[ChunkRun], token_ids: Sequence[int], tail_ids: Sequence[int]) -> bool:
    """Return True if the last of `runs` ends the last turn, unless it is the only run of a chunk that is named."""
    last = runs[-1]
    is_only_run_of_named = last.chunk is not None and all(run.chunk_ids != last.chunk_ids for run in runs[:-1])
    return last.end >= last_turn_end(token_ids, tail_ids) and not is_only_run_of_named


_OPEN: WeakValueDictionary[tuple[object, str, str], KnownChunks] = WeakValueDictionary()
_OPEN_LOCK = threading.Lock()


def _reset_in_child() -> None:
    """Replace the lock and the shared objects in a forked process: a thread of the parent may hold their locks."""
    global _OPEN_LOCK
    _OPEN_LOCK = threading.Lock()
    _OPEN.clear()


os.register_at_fork(after_in_child=_reset_in_child)


def open_known_chunks(ledger: Ledger, tokenizer: str, namespace: str) -> KnownChunks:
    """Return the chunks that `ledger` has for a tokenizer (its fingerprint) and a namespace.

    Calls with the same database, tokenizer and namespace return the same object.
    """
    key = (ledger.key or id(ledger), tokenizer, namespace)
    with _OPEN_LOCK:
        chunks = _OPEN.get(key)
        if chunks is None:
            chunks = _OPEN[key] = KnownChunks(ledger, tokenizer, namespace)
        return chunks


def find_variants(
    run: ChunkRun,
    token_ids: Sequence[int],
    prefixes: Iterable[tuple[int, ...]],
    neutral_ids: tuple[int, ...],
    key_of: Callable[[tuple[int, ...]], str],
) -> Iterator[Variant]:
    """Yield the variants of a run's chunk that may be stored, the best first.

    The exact variant comes first, if there is one. Neutral variants follow, and then those of the chunk alone, each
    with one variant per prefix, in the order of `prefixes`. `token_ids`: the prompt. `prefixes`: token ids of each
    prefix. `neutral_ids`: the ids of the neutral text; () if the store has no neutral variants. `key_of`: returns the
    key of the chunk's entry whose KV was computed after these ids.

    >>> run = ChunkRun((7,), 0, start=3, end=4)
    >>> [(variant.key, variant.policy) for variant in find_variants(run, [1, 5, 6, 7], [(1,), (2,)], (9,), str)]
    [('(1, 9)', 'neutral'), ('(2, 9)', 'neutral'), ('(1,)', 'none'), ('(2,)', 'none')]
    """
    matches: dict[tuple[int, ...], PrefixMatch] = {
        prefix: "exact" if tuple(token_ids[: len(prefix)]) == prefix else "approximate" for prefix in prefixes
    }
    exact = [
        prefix
        for prefix, match in matches.items()
        if match == "exact" and len(prefix) == run.start and run.chunk_start == 0
    ]
    for prefix in exact:
        yield Variant(key_of(prefix), "exact", exact=True)
    for prefix, match in matches.items():
        if neutral_ids:
            yield Variant(key_of(prefix + neutral_ids), match, exact=False, policy="neutral")
    for prefix, match in matches.items():
        if prefix not in exact:
            yield Variant(key_of(prefix), match, exact=False)


def find_stored(
    run: ChunkRun, variants: Iterable[Variant], read: Callable[[str, Sequence[int]], ChunkKV | None]
) -> tuple[ChunkRun, ChunkKV] | None:
    """Return the run with the first of `variants` that is stored, and the KV of its entry; None if none is stored.

    `read`: returns the entry of a key and of a chunk's token ids, or None for a miss.
    """
    for variant in variants:
        kv = read(variant.key, run.chunk_ids)
        if kv is not None:
            return replace(run, variant=variant), kv
    return None


class PrefixKVCache(Generic[T]):
    """KV of the latest PREFIXES_KEPT prefixes, by their token ids and namespace. `T`: KV as the engine keeps it.

    `count_bytes`: returns the size of a prefix's KV. If all are larger than `capacity_bytes` together, the prefixes
    that were used the longest time ago are removed. Without it, their size has no limit. Not thread-safe.
    """

    def __init__(self, count_bytes: Callable[[T], int] | None = None, capacity_bytes: int = 0) -> None:
        self._count_bytes, self._capacity = count_bytes, capacity_bytes
        self._kv: OrderedDict[tuple[str, tuple[int, ...]], T] = OrderedDict()  # the latest one is the last

    def get(self, prefix_ids: tuple[int, ...], namespace: str = "") -> T | None:
        """Return a prefix's KV, or None."""
        kv = self._kv.get((namespace, prefix_ids))
        if kv is not None:
            self._kv.move_to_end((namespace, prefix_ids))
        return kv

    def find_longest(self, prefix_ids: tuple[int, ...], namespace: str = "") -> tuple[T | None, int]:
        """Return the KV that shares the most first tokens with a prefix, and their number.

        The KV is None if the namespace has none; KV that shares no token is returned with 0.
        """
        shared = {key: common_prefix_length(key[1], prefix_ids) for key in self._kv if key[0] == namespace}
        longest = max(shared, key=shared.__getitem__, default=None)
        if longest is None:
            return None, 0
        self._kv.move_to_end(longest)
        return self._kv[longest], shared[longest]

    def put(self, prefix_ids: tuple[int, ...], kv: T, namespace: str = "") -> None:
        """Add the KV of a prefix, and remove KV above the limits."""
        self._kv[namespace, prefix_ids] = kv
        self._kv.move_to_end((namespace, prefix_ids))
        while len(self._kv) > PREFIXES_KEPT or self._is_too_large():
            self._kv.popitem(last=False)

    def clear(self) -> None:
        """Remove all KV."""
        self._kv.clear()

    def __contains__(self, prefix: tuple[str, tuple[int, ...]]) -> bool:
        """Return True if the cache has the KV of `prefix`, a pair of namespace and token ids."""
        return prefix in self._kv

    def _is_too_large(self) -> bool:
        return self._count_bytes is not None and sum(map(self._count_bytes, self._kv.values())) > self._capacity
