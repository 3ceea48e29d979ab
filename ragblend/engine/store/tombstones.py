"""What was forgotten, told to every replica that shares a remote tier, also to one that is down at that moment.

    REMOTE notes/ID         a record: keys, or a namespace, and when
    ROOT/forgotten/ID.json  the same, once this disk has heeded it

Who forgets leaves a record in the remote tier. Each replica looks for records that its own disk has not heeded, at its
start and every few seconds, and heeds each once: what is stored again afterwards stays. A record that the remote tier
has lost is put back by whoever has heeded it. After KEPT_S it goes, here and there.
Knows stores, keys and namespaces. Knows nothing about servers, prompts or models.
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
from ragblend.files.directory import Directory, unlink
from ragblend.files.reading import read_file

log = logging.getLogger(__name__)

FORGOTTEN_DIR = "forgotten"
POLL_INTERVAL_S = 5.0
FIRST_POLL_TIMEOUT_S = 3.0  # a server waits for its first look; longer no more than for a remote that is down
TOMBSTONE_TTL_S = 90 * 86_400.0  # a replica that was down for longer starts with an empty disk, or is cleared by hand
_KIND = "forgotten"
_NAME = re.compile(r"\d{13}-[0-9a-f]{16}")  # milliseconds since the epoch, and chance
_FRESH_S = 60.0  # clocks of replicas may be off by so much
_MAX_RECORD_BYTES = 1 << 20


class Tombstone(NamedTuple):
    """What is to be forgotten: `keys`, and everything of `namespace` where that is given."""

    name: str
    keys: tuple[str, ...] = ()
    namespace: str | None = None

    @property
    def time_s(self) -> float:
        """When it was told, in seconds since the epoch, by the teller's clock."""
        return int(self.name[:13]) / 1e3


class AppliedTombstones(NamedTuple):
    """What one look found: keys that this disk has forgotten, and namespaces.

    `recent_keys`: those told while this process was running. It may have sent them to the remote tier afterwards."""

    keys: tuple[str, ...] = ()
    recent_keys: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()


def publish_tombstone(remote: RemoteStore, *, keys: Sequence[str] = (), namespace: str | None = None) -> Tombstone:
    """Leave a record in `remote`. Raises BackendUnreachableError: then nobody else was told."""
    record = Tombstone(f"{int(time.time() * 1e3):013d}-{secrets.token_hex(8)}", tuple(keys), namespace)
    facts = {"keys": list(record.keys), "namespace": record.namespace, "name": record.name}
    remote.values.put_metadata(record.name, encode_signed_json(facts, _KIND, remote.store_key))
    return record


class TombstoneWatcher:
    """Heeds records of `remote` for `disk`. `belongs`: whether KV of one namespace is of another, salts and all.

    `start` looks in a thread of its own, `take_applied` is what was heeded since the last call."""

    def __init__(self, disk: DiskStore, remote: RemoteStore, belongs: Callable[[str, str], bool]) -> None:
        self._disk, self._remote, self._belongs = disk, remote, belongs
        self._folder = disk.root / FORGOTTEN_DIR
        self._directory = Directory(disk.root, fsync=True)
        self._applied_names: set[str] | None = None  # heeded in this process, or on this disk before it began
        self._born_s = time.time()
        self._applied: list[AppliedTombstones] = []
        self.num_applied = 0  # records, since this process began
        self._lock = threading.Lock()
        self._stopped, self._has_looked = threading.Event(), threading.Event()

    def start(self) -> None:
        """Look now, and from then on in the background, where a remote that is silent keeps nobody."""
        threading.Thread(target=self._work, name="ragblend-forgotten", daemon=True).start()
        if not self._has_looked.wait(FIRST_POLL_TIMEOUT_S):
            log.warning(
                "the remote does not say what other replicas have forgotten; what this disk has is used meanwhile"
            )

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def take_applied(self) -> AppliedTombstones:
        """What was heeded since the last call."""
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
        """Heed what is new, put back what the remote tier has lost, drop what is old. A remote that is down costs
        nothing but the news."""
        try:
            remote_names = {name for name in self._remote.values.list_metadata() if _NAME.fullmatch(name)}
            local_names = {path.stem for path in self._folder.glob("*.json") if _NAME.fullmatch(path.stem)}
            oldest = f"{int((time.time() - TOMBSTONE_TTL_S) * 1e3):013d}"
            self._applied_names = set(local_names) if self._applied_names is None else self._applied_names
            for name in sorted(
                remote_names - self._applied_names
            ):  # also one that another process over this disk was first to heed
                if name > oldest:
                    self._apply(name)
                    self._applied_names.add(name)
            for name in sorted(local_names - remote_names):
                if name > oldest:
                    self._remote.values.put_metadata(name, read_file(self._path(name)))
            for name in [name for name in remote_names | local_names if name < oldest]:
                unlink(self._path(name))
                self._remote.values.delete_metadata(name)
        except (RagblendError, OSError) as error:
            log.warning("what other replicas have forgotten is not known at this moment: %s", error)

    def _apply(self, name: str) -> None:
        data = self._remote.values.get_metadata(name)
        try:
            record = _parse_tombstone(name, data, self._remote)
        except ValueError as error:
            log.warning("a record of what was forgotten is not heeded: %s: %s", name, error)
            return
        assert data is not None
        keys = set(record.keys)
        if record.namespace is not None:
            named = (header for header in self._disk.headers() if self._belongs(header.namespace, record.namespace))
            keys.update(header.key for header in named)
        with self._lock:  # before anything goes, so that a fetch under way notices
            self.num_applied += 1
        for key in keys:
            self._disk.delete(key)
        fresh = tuple(keys) if record.time_s > self._born_s - _FRESH_S else ()
        namespaces = () if record.namespace is None else (record.namespace,)
        with self._lock:
            self._applied.append(AppliedTombstones(tuple(keys), fresh, namespaces))
        try:
            self._directory.write(self._path(name), data)  # last: killed before, it is heeded again
        except StoreNotWritableError:
            self._stopped.set()
            raise

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def _parse_tombstone(name: str, data: bytes | None, remote: RemoteStore) -> Tombstone:
    """Raises ValueError for what nobody told."""
    if data is None or len(data) > _MAX_RECORD_BYTES:
        raise ValueError("it is gone or too large")
    facts = decode_signed_json(data, _KIND, remote.store_key)
    keys, namespace = facts.get("keys"), facts.get("namespace")
    if facts.get("name") != name or not _are_texts(keys) or not isinstance(namespace, str | None):
        raise ValueError("it is no such record")
    return Tombstone(name, tuple(keys or ()), namespace)


def _are_texts(keys: object) -> bool:
    return isinstance(keys, list) and all(isinstance(key, str) for key in keys)
