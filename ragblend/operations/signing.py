"""Sign the entries that a store holds, and check a remote tier's entries in the same way.

Works with stores and keys. Does not depend on an index or a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.eviction import ENTRY_SUFFIX
from ragblend.engine.store.kv import KVSpec
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.signing import StoreKey
from ragblend.errors import BackendUnreachableError, DamagedEntryError
from ragblend.ingestion.sync import Progress, ignore_progress


@dataclass(slots=True)
class SignReport:
    """Result of `sign_store`. `refused`: entries that are damaged or of unexpected shapes, by key."""

    num_signed: int = 0
    num_known: int = 0  # already signed with the key
    num_notes: int = 0  # notes on models, calibrations and machines
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, with `refused` as a count and the reasons in `refused_keys`."""
        return {**asdict(self), "refused": len(self.refused), "refused_keys": self.refused}


def sign_store(
    store: str | Path,
    key: StoreKey,
    *,
    signed_with: StoreKey | None = None,
    progress: Progress = ignore_progress,
    kv_dir: str | None = None,
) -> SignReport:
    """Sign with `key` every unsigned entry and note of the directory, also quarantined unsigned ones. Return the
    counts.

    With `signed_with`, only entries with this key's signature are signed. Without it every intact entry is, so the
    caller trusts everyone who could write to the store. After an interruption, call it again.
    """
    report = SignReport()
    old, new = (DiskStore(store, create=False, store_key=each, kv_dir=kv_dir) for each in (signed_with, key))
    report.num_notes = new.sign_metadata_files(old)
    load_expected_specs(old)
    paths = list(old.paths())
    for done, path in enumerate(paths, start=1):
        if new.contains(path.stem):
            report.num_known += 1
        else:
            try:
                times = path.stat()
                new.put(old.read_at(path))
                with suppress(OSError):  # keeps the entry's time of last use
                    os.utime(path.with_suffix(ENTRY_SUFFIX), ns=(times.st_atime_ns, times.st_mtime_ns))
                report.num_signed += 1
            except FileNotFoundError:
                pass  # evicted since it was listed
            except (OSError, DamagedEntryError) as error:
                report.refused[path.stem] = str(error)
        progress("sign", done, len(paths))
    return report


def load_expected_specs(disk: DiskStore, *others: RemoteStore) -> None:
    """Make the stores check entries' shapes against the notes on the models in `disk`."""
    for fingerprint, facts in disk.models().items():
        if (shape := KVSpec.from_facts(facts)) is not None:
            disk.set_expected_spec(fingerprint, shape)
            for each in others:
                each.set_expected_spec(fingerprint, shape)


def verify_remote(remote: RemoteStore, store: str | Path) -> dict[str, str]:
    """Read every byte of a remote tier. Return the reasons by key for entries that are damaged or not properly signed.

    `store`: its notes describe the models' KV. Raises BackendUnreachableError if the remote tier does not answer.
    """
    status = remote.status()
    if not status.reachable:
        raise BackendUnreachableError(status.problem)
    load_expected_specs(DiskStore(store, create=False), remote)
    return {result.key: result.reason for result in remote.verify() if not result.ok}


def repair_remote(remote: RemoteStore, store: str | Path, damaged: Iterable[str], *, kv_dir: str | None = None) -> int:
    """Delete a remote tier's `damaged` entries and send those that the directory has. Return the number sent."""
    disk, sent = DiskStore(store, create=False, kv_dir=kv_dir), 0
    for key in damaged:
        remote.delete(key)
        with suppress(DamagedEntryError):
            if (kv := disk.get(key)) is not None:
                remote.send(kv)
                sent += 1
    return sent
