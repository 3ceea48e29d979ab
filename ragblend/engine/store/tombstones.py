"""Tombstones: propagate deletions through the remote tier to other processes and machines, also to those that are down.

    REMOTE notes/NUMBER-RANDOM         a tombstone: keys, or a namespace
    ROOT/forgotten/NUMBER-RANDOM.json  the same, once its entries are deleted from this disk

`TieredStore.delete_everywhere` deletes entries, and then writes a tombstone to the remote tier. Every other store over
this remote tier polls for new tombstones, every few seconds and before it stores entries. It deletes their entries from
its memory and its disk. It applies each tombstone once, so an entry that is stored again later stays.

The order of tombstones is that of their numbers: each is higher than those of all tombstones in the remote tier. No
clock is compared with another one, so a machine whose clock is wrong deletes what others delete. A poll lists only the
names after the newest known one. Every five seconds, a poll lists all names. A store with a disk then writes back the
tombstones that it has applied and that the remote tier has lost. The remote tier keeps the newest MAX_TOMBSTONES. A
machine that was down for that time has missed some: it deletes the entries that the remote tier does not
have. Works on stores, keys and namespaces. Does not depend on servers, prompts or models.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ragblend.engine.namespaces import equals_ignoring_salt
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.format.signed_json import decode_signed_json, encode_signed_json
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError, RagblendError
from ragblend.files.directory import Directory, try_remove_file
from ragblend.files.reading import read_file

log = logging.getLogger(__name__)

FORGOTTEN_DIR = "forgotten"
POLL_INTERVAL_S = 5.0
FIRST_POLL_TIMEOUT_S = 3.0  # how long the start of a server waits for the first poll
MAX_TOMBSTONES = 10_000  # in the remote tier; every machine lists their names every few seconds
MAX_KEYS = 4096  # of one tombstone
_KIND = "forgotten"
_NAME = re.compile(r"\d{13}-[0-9a-f]{16}")  # the number, and a random one: two machines may choose the same number
_LAST_NUMBER = 10**13 - 1
_MAX_RECORD_BYTES = 1 << 20


T = TypeVar("T")


class _DeletingStore(Protocol):
    """What `Tombstones` needs of the store of several tiers whose deletions it publishes (`TieredStore`)."""

    @property
    def tiers(self) -> tuple[KVStore, ...]: ...
    @property
    def is_writing(self) -> bool: ...
    def find_tier(self, kind: type[T]) -> T | None: ...
    def delete(self, key: str, tiers: Sequence[KVStore] | None = None) -> bool: ...
    def delete_local(self, key: str) -> bool: ...


class _Write(NamedTuple):
    namespace: str
    is_copy: bool  # of an entry in the remote tier
    applied: frozenset[str]  # names of the tombstones that were applied to the disk before


class Tombstones:
    """Writes tombstones (records of deleted entries) of `store` to its remote tier. Applies those of other stores."""

    def __init__(self, store: _DeletingStore, remote: RemoteStore) -> None:
        self._store, self._remote, self._disk = store, remote, store.find_tier(DiskStore)
        self._folder = None if self._disk is None else self._disk.root / FORGOTTEN_DIR
        self._applied: set[str] | None = None  # names; None before the first poll
        self._newest = ""  # name of the newest known tombstone
        self._list_all_at_s = 0.0  # on the monotonic clock; 0: at the next poll
        self._writes: dict[str, _Write] = {}  # by key: writes of this store that a tombstone may still concern
        self._applied_before = frozenset[str]()  # shared by the writes between two tombstones
        self._skips_disk = False
        self._has_warned = False
        self._watch_ended: threading.Event | None = None  # set to end the thread that polls
        self._lock = threading.Lock()

    def publish(self, keys: Collection[str] = (), *, whole_namespace: str | None = None) -> None:
        """Write tombstones for entries that were deleted from this store.

        These are the entries of `keys`, and all entries of `whole_namespace` unless it is None.
        Raises BackendUnreachableError if the remote tier does not answer; other stores then keep these entries.
        """
        listed = sorted(keys)
        for start in range(0, max(len(listed), whole_namespace is not None), MAX_KEYS):
            name = self._next_name()
            facts = {"keys": listed[start : start + MAX_KEYS], "namespace": whole_namespace, "name": name}
            data = encode_signed_json(facts, _KIND, self._remote.store_key)
            self._remote.values.put_metadata(name, data)
            with self._lock:
                self._record_applied(name, data)

    def _next_name(self) -> str:
        """Return a name that sorts after those of all tombstones in the remote tier.

        Its number is the time, which is above the numbers of tombstones that the remote tier has lost, or else the next
        number. Numbers are therefore ahead of the time if the clock of one machine is.
        """
        names = filter(_NAME.fullmatch, self._remote.values.list_metadata(self._newest))
        number = max(int(time.time() * 1e3), int(max(names, default=self._newest)[:13] or 0) + 1)
        return f"{min(number, _LAST_NUMBER):013d}-{secrets.token_hex(8)}"

    def record_write(self, header: KVHeader, *, is_copy: bool) -> None:
        """Record that the store begins to write an entry now.

        `poll` deletes the entry if a tombstone names it and the write began before that tombstone was applied. is_copy:
        the entry was fetched from the remote tier. A tombstone then deletes it even if the write began later.
        """
        if not is_copy and self._folder is not None:
            applied = frozenset(path.stem for path in self._folder.glob("*.json"))
            if applied != self._applied_before:
                self._applied_before = applied
        self._writes[header.key] = _Write(header.namespace, is_copy, self._applied_before)

    def watch(self, timeout_s: float = 0.0, *, skip_disk: bool = False) -> None:
        """Start a thread that calls `poll` at once, and then every POLL_INTERVAL_S seconds.

        Waits up to `timeout_s` seconds for the first poll, which applies tombstones from before the store was opened.
        skip_disk: do not delete from the disk tier, because another process watches the same disk and deletes there.
        """
        if self._watch_ended is not None:
            return
        self._skips_disk = skip_disk
        self._watch_ended, has_polled = threading.Event(), threading.Event()
        arguments = (weakref.ref(self), self._watch_ended, has_polled)
        threading.Thread(target=_poll_repeatedly, args=arguments, name="ragblend-deletions", daemon=True).start()
        if timeout_s and not has_polled.wait(timeout_s):
            log.warning(
                "deletions by other machines are unknown, because %s has not answered within %g s; check it: ragblend "
                "doctor --remote URL",
                self._remote.values.url,
                timeout_s,
            )

    def end_watch(self) -> None:
        """End the background thread that `watch` started, if there is one. Does not wait until the thread has ended."""
        if self._watch_ended is not None:
            self._watch_ended.set()
            self._watch_ended = None

    def poll(self) -> None:
        """Apply new tombstones of other stores. Every five seconds, also write back tombstones that the remote tier has
        lost, and delete those before the newest MAX_TOMBSTONES.

        Errors of the remote tier and the disk are not raised. Several in a row are logged as one warning. There is no
        warning for an unreachable remote tier, because the next request to that tier logs one.
        """
        with self._lock:
            try:
                if self._remote.is_available():
                    self._poll()
                    self._has_warned = False
            except BackendUnreachableError as error:
                self._list_all_at_s = 0.0  # it may come back without its tombstones
                log.info("deletions by other machines are unknown at the moment: %s", error)
            except (RagblendError, OSError) as error:
                level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True
                log.log(level, "deletions by other machines are unknown at the moment: %s", error)

    def _poll(self) -> None:
        # A later deletion of one of these entries also finds what was written.
        ended = {} if self._store.is_writing else dict(self._writes)
        lists_all = time.monotonic() >= self._list_all_at_s
        listed = self._remote.values.list_metadata("" if lists_all else self._newest)
        names = {name for name in listed if _NAME.fullmatch(name)}
        if self._applied is None:  # a store without a disk has no entry from before
            paths = None if self._folder is None else self._folder.glob("*.json")
            self._applied = names.copy() if paths is None else {p.stem for p in paths if _NAME.fullmatch(p.stem)}
        if lists_all and max(self._applied, default="") < (oldest := _oldest_kept(names)):
            self._delete_what_the_tier_lacks(oldest)
        for name in sorted(names - self._applied):
            try:
                self._apply(name)
            except ValueError as error:
                log.warning("the tombstone %s of %s is ignored: %s", name, self._remote.values.url, error)
                self._applied.add(name)
        if lists_all:
            self._restore_and_expire(names, self._applied)
            self._list_all_at_s = time.monotonic() + POLL_INTERVAL_S
        self._newest = max((self._newest, *names))
        for key, write in ended.items():
            if self._writes.get(key) == write:
                del self._writes[key]

    def _delete_what_the_tier_lacks(self, oldest: str) -> None:
        """Delete the local entries that are not in the remote tier, because tombstones before `oldest` are gone."""
        stored = {key for key, _ in self._remote.values.sizes()}
        tiers = self._local_tiers(self._skips_disk)
        keys = {key for tier in tiers for key in tier.keys()} - stored - {*self._writes}  # noqa: SIM118 (no dict)
        self._delete_from(keys, tiers)
        log.warning(
            "tombstones before %s are not in %s any more, and this machine has not seen all of them: %d KV caches that "
            "the remote tier does not have were deleted; ingest missing documents again",
            oldest,
            self._remote.values.url,
            len(keys),
        )

    def _local_tiers(self, is_disk_done: bool) -> list[KVStore]:
        """Return the tiers of this machine; without the disk if another process deletes, or has deleted, there."""
        tiers = [tier for tier in self._store.tiers if not tier.is_remote]
        return [tier for tier in tiers if tier.find_tier(DiskStore) is None] if is_disk_done else tiers

    def _delete_from(self, keys: Collection[str], tiers: Sequence[KVStore]) -> None:
        for key in keys:
            self._remote.drop_result(key)
            self._store.delete(key, tiers)
        if self._disk is not None and self._disk in tiers and self._disk.on_delete is not None:
            self._disk.on_delete(keys)

    def _restore_and_expire(self, names: set[str], applied: set[str]) -> None:
        """Write back applied tombstones that are not in `names`, all of the remote tier. Delete those before the newest
        MAX_TOMBSTONES."""
        oldest = _oldest_kept(names | applied)
        for name in [name for name in names | applied if name < oldest or name not in names]:
            path = self._path(name)
            if name < oldest:
                if name in names:
                    self._remote.values.delete_metadata(name)
                applied.discard(name)
                if path is not None:
                    try_remove_file(path)
            elif path is not None and path.exists():
                self._remote.values.put_metadata(name, read_file(path))

    def _apply(self, name: str) -> None:
        data = self._remote.values.get_metadata(name)
        keys, namespace = _parse_tombstone(name, data, self._remote)
        # Another process may have applied it to the disk, which may contain new entries of these keys since.
        is_applied = (path := self._path(name)) is not None and path.exists()
        tiers = self._local_tiers(is_applied or self._skips_disk)
        if namespace is not None:
            headers = (header for tier in tiers for header in tier.headers())
            keys.update(header.key for header in headers if equals_ignoring_salt(header.namespace, namespace))
            keys.update(
                key for key, write in [*self._writes.items()] if equals_ignoring_salt(write.namespace, namespace)
            )
        self._delete_from(keys, tiers)
        for key in keys:
            write = self._writes.get(key)
            if write is not None and write.is_copy:  # it may have been written later, and can be fetched again
                self._store.delete_local(key)
            elif write is not None and name not in write.applied:
                self._store.delete(key)
        assert data is not None
        self._record_applied(name, data)  # last, so that a process killed before applies the tombstone again

    def _record_applied(self, name: str, data: bytes) -> None:
        if self._applied is not None:
            self._applied.add(name)
        path = self._path(name)
        if self._disk is not None and path is not None and not self._skips_disk and not path.exists():
            try:
                Directory(self._disk.root, fsync=True).write(path, data)
            except RagblendError as error:  # the disk is full: the next process applies the tombstone again
                log.warning("%s", error)

    def _path(self, name: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{name}.json"


def _poll_repeatedly(reference: weakref.ref[Tombstones], ended: threading.Event, has_polled: threading.Event) -> None:
    """Poll until `ended`, or until nothing else refers to the tombstones and their store."""
    while (tombstones := reference()) is not None:
        tombstones.poll()
        del tombstones
        has_polled.set()
        if ended.wait(POLL_INTERVAL_S):
            return


def _oldest_kept(names: Collection[str]) -> str:
    """Return the first of the newest MAX_TOMBSTONES names; "" if there are fewer, so that none before was deleted."""
    return sorted(names)[-MAX_TOMBSTONES] if len(names) >= MAX_TOMBSTONES else ""


def _parse_tombstone(name: str, data: bytes | None, remote: RemoteStore) -> tuple[set[str], str | None]:
    """Return the keys and the namespace in `data`. Raises ValueError for data that `publish` did not write."""
    if data is None or len(data) > _MAX_RECORD_BYTES:
        raise ValueError("it is gone or too large")
    facts = decode_signed_json(data, _KIND, remote.store_key)
    keys, namespace = facts.get("keys"), facts.get("namespace")
    are_texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if facts.get("name") != name or not are_texts or not isinstance(namespace, str | None):
        raise ValueError("it is no such record")
    return set(keys or ()), namespace
