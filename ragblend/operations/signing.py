"""Sign what a store holds already, and read what a remote tier holds with the same eyes.

Knows stores and keys. Knows no index and no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
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

Progress = Callable[[str, int, int | None], None]


@dataclass(slots=True)
class SignReport:
    """What `sign_store` did. `refused`: keys of entries that are damaged, or not what they should be, with reasons."""

    num_signed: int = 0
    num_known: int = 0  # were signed with the key already
    num_notes: int = 0  # on models, calibrations and machines
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """`refused` as a count, `refused_keys` with the reasons."""
        return {**asdict(self), "refused": len(self.refused), "refused_keys": self.refused}


def sign_store(
    store: str | Path,
    key: StoreKey,
    *,
    signed_with: StoreKey | None = None,
    progress: Progress | None = None,
    kv_dir: str | None = None,
) -> SignReport:
    """Sign with `key` every entry and note of the directory that is not yet, also those that were moved aside unsigned.

    `signed_with`: only what carries this key's signature is signed anew. Without it everything that is intact is, so
    whoever could write there is trusted now. Interrupted, it goes on where it was.
    """
    report = SignReport()
    old, new = (DiskStore(store, create=False, store_key=each, kv_dir=kv_dir) for each in (signed_with, key))
    report.num_notes = new.sign_metadata_files(old)
    load_expected_specs(old)
    on_progress = progress or (lambda stage, done, total: None)
    paths = list(old.paths())
    for done, path in enumerate(paths, start=1):
        if new.contains(path.stem):
            report.num_known += 1
        else:
            try:
                times = path.stat()
                new.put(old.read_at(path))
                with suppress(OSError):  # it was not used just now
                    os.utime(path.with_suffix(ENTRY_SUFFIX), ns=(times.st_atime_ns, times.st_mtime_ns))
                report.num_signed += 1
            except FileNotFoundError:
                pass  # evicted meanwhile
            except (OSError, DamagedEntryError) as error:
                report.refused[path.stem] = str(error)
        on_progress("sign", done, len(paths))
    return report


def load_expected_specs(disk: DiskStore, *others: RemoteStore) -> None:
    """Have entries' shapes checked against what the store notes of its models."""
    for fingerprint, facts in disk.models().items():
        if (shape := KVSpec.from_facts(facts)) is not None:
            disk.set_expected_spec(fingerprint, shape)
            for each in others:
                each.set_expected_spec(fingerprint, shape)


def verify_remote(remote: RemoteStore, store: str | Path) -> dict[str, str]:
    """What of a remote tier's entries is damaged, or not signed as it should be: reasons by key. Reads every byte.

    `store`: its notes say what models' KV looks like. Raises BackendUnreachableError where the other side is away.
    """
    status = remote.status()
    if not status.reachable:
        raise BackendUnreachableError(status.problem)
    load_expected_specs(DiskStore(store, create=False), remote)
    return {result.key: result.reason for result in remote.verify() if not result.ok}


def repair_remote(remote: RemoteStore, store: str | Path, damaged: Iterable[str], *, kv_dir: str | None = None) -> int:
    """Delete damaged entries of a remote tier; those that the directory has intact are sent again. How many were."""
    disk, sent = DiskStore(store, create=False, kv_dir=kv_dir), 0
    for key in damaged:
        remote.delete(key)
        with suppress(DamagedEntryError):
            if (kv := disk.get(key)) is not None:
                remote.send(kv)
                sent += 1
    return sent
