"""Signs the entries of a store, and verifies and repairs the entries of a remote tier.

Depends on stores and keys, not on an index or a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.signing import StoreKey
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError, DamagedEntryError
from ragblend.files.store_folder import ENTRY_SUFFIX
from ragblend.ingestion.report import Progress, ignore_progress


def sign_store(
    store: str | Path,
    key: StoreKey,
    *,
    signed_with: StoreKey | None = None,
    progress: Progress = ignore_progress,
    kv_dir: str | None = None,
) -> dict[str, Any]:
    """Sign every entry and metadata file of a store's folder with `key`, also the entries in quarantine.

    signed_with: an older key; only entries and files with its signature are signed again. None: every intact entry is
    signed, so the caller trusts everyone who could write to the store. After an interruption, call the function again.

    The result has numbers of entries: "num_signed", "num_known" (signed by `key` before) and "refused". "num_notes" is
    the number of signed metadata files. "refused_keys" maps each refused entry's key to the reason.
    """
    num_signed, num_known, refused = 0, 0, dict[str, str]()
    old, new = (DiskStore(store, create=False, store_key=each, kv_dir=kv_dir) for each in (signed_with, key))
    num_notes = new.sign_metadata_files_again(old)
    for fingerprint, spec in old.model_specs().items():
        old.set_expected_spec(fingerprint, spec)
    paths = list(old.paths())
    for done, path in enumerate(paths, start=1):
        if new.contains(path.stem):
            num_known += 1
        else:
            try:
                times = path.stat()
                new.put(old.read_entry_file(path))
                with suppress(OSError):  # keeps the entry's time of last use
                    os.utime(path.with_suffix(ENTRY_SUFFIX), ns=(times.st_atime_ns, times.st_mtime_ns))
                num_signed += 1
            except FileNotFoundError:
                pass  # evicted since it was listed
            except (OSError, DamagedEntryError) as error:
                refused[path.stem] = str(error)
        progress("sign", done, len(paths))
    counts = {"num_signed": num_signed, "num_known": num_known, "num_notes": num_notes, "refused": len(refused)}
    return {**counts, "refused_keys": refused}


def verify_remote(remote: RemoteStore, store: str | Path) -> dict[str, str]:
    """Read every byte of a remote tier. Return a dictionary from the keys of invalid entries to the reasons.

    An entry is invalid if it is damaged or wrongly signed. store: the directory with the models' KV shapes. Raises
    BackendUnreachableError if the remote tier does not answer.
    """
    status = remote.status()
    if not status.reachable:
        raise BackendUnreachableError(status.problem)
    for fingerprint, spec in DiskStore(store, create=False).model_specs().items():
        remote.set_expected_spec(fingerprint, spec)
    return {result.key: result.reason for result in remote.verify() if not result.ok}


def repair_remote(remote: RemoteStore, store: str | Path, damaged: Iterable[str], *, kv_dir: str | None = None) -> int:
    """Replace the `damaged` entries (keys) of a remote tier by the directory's copies. Return the number of copies.

    Entries without an intact copy are only deleted.
    """
    disk, sent = DiskStore(store, create=False, kv_dir=kv_dir), 0
    for key in damaged:
        remote.delete(key)
        with suppress(DamagedEntryError):
            if (kv := disk.get(key)) is not None:
                remote.put_and_wait(kv)
                sent += 1
    return sent
