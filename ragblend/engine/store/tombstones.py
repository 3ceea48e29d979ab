"""Tombstones: propagate deletions through the remote tier to every replica, also to replicas that are offline.

    REMOTE notes/ID         a tombstone: keys, or a namespace, and the time
    ROOT/forgotten/ID.json  the same, once this disk has applied it

A replica that deletes entries writes a tombstone to the remote tier. Each replica polls for tombstones that its disk
has not applied, at its start and every few seconds, and applies each once: an entry that is stored again later stays. A
replica that has applied a tombstone writes it back if the remote tier has lost it. After TOMBSTONE_TTL_S it is deleted
everywhere. Works on stores, keys and namespaces. Does not depend on servers, prompts or models.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.signed_json import decode_signed_json, encode_signed_json
from ragblend.errors import RagblendError, StoreNotWritableError
from ragblend.files.directory import Directory, try_remove_file
from ragblend.files.reading import read_file

log = logging.getLogger(__name__)

FORGOTTEN_DIR = "forgotten"
POLL_INTERVAL_S = 5.0
FIRST_POLL_TIMEOUT_S = 3.0  # how long the start of a server waits for the first poll
TOMBSTONE_TTL_S = 90 * 86_400.0  # a replica that was offline for longer must start with an empty disk
_KIND = "forgotten"
_NAME = re.compile(r"\d{13}-[0-9a-f]{16}")  # milliseconds since the epoch, and a random number
_FRESH_S = 60.0  # the largest difference between clocks of replicas
_MAX_RECORD_BYTES = 1 << 20


class Tombstone(NamedTuple):
    """A record in the remote tier that entries were deleted: those with `keys` and, unless it is None, those of
    `namespace`."""

    name: str
    keys: tuple[str, ...] = ()
    namespace: str | None = None

    @property
    def time_s(self) -> float:
        """Time of the deletion in seconds since the epoch, by the clock of the replica that published it."""
        return int(self.name[:13]) / 1e3


class AppliedTombstones(NamedTuple):
    """The deletions of one poll: keys that were deleted from this disk, and namespaces.

    `recent_keys`: keys of tombstones published while this process was running. The process may have sent these entries
    to the remote tier after the deletion.
    """

    keys: tuple[str, ...] = ()
    recent_keys: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()


def publish_tombstone(remote: RemoteStore, *, keys: Sequence[str] = (), namespace: str | None = None) -> Tombstone:
    """Write a tombstone to `remote` and return it. Raises BackendUnreachableError if the remote tier does not answer;
    then no replica learns of the deletion."""
    record = Tombstone(f"{int(time.time() * 1e3):013d}-{secrets.token_hex(8)}", tuple(keys), namespace)
    facts = {"keys": list(record.keys), "namespace": record.namespace, "name": record.name}
    remote.values.put_metadata(record.name, encode_signed_json(facts, _KIND, remote.store_key))
    return record


class TombstoneWatcher:
    """Polls the tombstones in `remote`, and deletes the entries that they name from `disk`.

    `belongs(namespace, deleted)` returns True if a deletion of the namespace `deleted` includes the KV of `namespace`:
    the same namespace, with or without a salt. `start` begins polling in a background thread. `take_applied` returns
    the deletions since its last call.
    """

    def __init__(self, disk: DiskStore, remote: RemoteStore, belongs: Callable[[str, str], bool]) -> None:
        self._disk, self._remote, self._belongs = disk, remote, belongs
        self._folder = disk.root / FORGOTTEN_DIR
        self._directory = Directory(disk.root, fsync=True)
        self._applied_names: set[str] | None = None  # applied by this process, or to this disk before it started
        self._born_s = time.time()
        self._applied: list[AppliedTombstones] = []
        self.num_applied = 0  # tombstones applied since this process started
        self._lock = threading.Lock()
        self._stopped, self._has_looked = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start the background thread. Waits up to FIRST_POLL_TIMEOUT_S for its first poll."""
        threading.Thread(target=self._work, name="ragblend-forgotten", daemon=True).start()
        if not self._has_looked.wait(FIRST_POLL_TIMEOUT_S):
            log.warning(
                "%s did not answer within %g s, so deletions by other replicas are unknown; entries on this disk stay "
                "in use. Check it: ragblend doctor --remote URL",
                self._remote.remote_url,
                FIRST_POLL_TIMEOUT_S,
            )

    def stop(self) -> None:
        """Stop polling."""
        self._stopped.set()

    def take_applied(self) -> AppliedTombstones:
        """Return the deletions since the last call."""
        with self._lock:
            applied, self._applied = self._applied, []
        return AppliedTombstones(
            *(tuple(item for each in applied for item in each[part]) for part in range(len(AppliedTombstones._fields)))
        )

    def _work(self) -> None:
        self.poll()
        self._has_looked.set()
        while not self._stopped.wait(POLL_INTERVAL_S):
            self.poll()

    def poll(self) -> None:
        """Apply new tombstones, restore those that the remote tier has lost, and delete expired ones. Logs a warning if
        the remote tier does not answer."""
        try:
            remote_names = {name for name in self._remote.values.list_metadata() if _NAME.fullmatch(name)}
            local_names = {path.stem for path in self._folder.glob("*.json") if _NAME.fullmatch(path.stem)}
            oldest = f"{int((time.time() - TOMBSTONE_TTL_S) * 1e3):013d}"
            self._applied_names = set(local_names) if self._applied_names is None else self._applied_names
            # Also a tombstone that another process over this disk has applied.
            for name in sorted(remote_names - self._applied_names):
                if name > oldest:
                    self._apply(name)
                    self._applied_names.add(name)
            for name in sorted(local_names - remote_names):
                if name > oldest:
                    self._remote.values.put_metadata(name, read_file(self._path(name)))
            for name in [name for name in remote_names | local_names if name < oldest]:
                try_remove_file(self._path(name))
                self._remote.values.delete_metadata(name)
        except (RagblendError, OSError) as error:
            log.warning("deletions by other replicas are unknown at the moment: %s", error)

    def _apply(self, name: str) -> None:
        data = self._remote.values.get_metadata(name)
        try:
            record = _parse_tombstone(name, data, self._remote)
        except ValueError as error:
            log.warning("the tombstone %s of %s is ignored: %s", name, self._remote.remote_url, error)
            return
        assert data is not None
        keys = set(record.keys)
        if record.namespace is not None:
            named = (header for header in self._disk.headers() if self._belongs(header.namespace, record.namespace))
            keys.update(header.key for header in named)
        with self._lock:  # before the deletion, so that a fetch in progress detects it
            self.num_applied += 1
        for key in keys:
            self._disk.delete(key)
        fresh = tuple(keys) if record.time_s > self._born_s - _FRESH_S else ()
        namespaces = () if record.namespace is None else (record.namespace,)
        with self._lock:
            self._applied.append(AppliedTombstones(tuple(keys), fresh, namespaces))
        try:
            # Last, so that a process killed before applies the tombstone again.
            self._directory.write(self._path(name), data)
        except StoreNotWritableError:
            self._stopped.set()
            raise

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _parse_tombstone(name: str, data: bytes | None, remote: RemoteStore) -> Tombstone:
    """Return the tombstone in `data`. Raises ValueError for data that `publish_tombstone` did not write."""
    if data is None or len(data) > _MAX_RECORD_BYTES:
        raise ValueError("it is gone or too large")
    facts = decode_signed_json(data, _KIND, remote.store_key)
    keys, namespace = facts.get("keys"), facts.get("namespace")
    are_texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if facts.get("name") != name or not are_texts or not isinstance(namespace, str | None):
        raise ValueError("it is no such record")
    return Tombstone(name, tuple(keys or ()), namespace)
