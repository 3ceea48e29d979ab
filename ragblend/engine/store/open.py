"""`open_store` opens the configured tiers as one store. Nothing heavy is imported before it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ragblend.option_keywords import TierKeywords
from ragblend.options import DiskBudget, TierOptions

if TYPE_CHECKING:
    from ragblend.engine.store.base import KVStore
    from ragblend.engine.store.eviction import Capacity
    from ragblend.engine.store.format.signing import KeyChoice
    from ragblend.engine.store.tiered import TieredStore


GIB = 1 << 30


def open_store(
    path: str | Path | None,
    *,
    create: bool = True,
    fsync: bool = True,
    store_key: KeyChoice = "auto",
    **tiers: Unpack[TierKeywords],
) -> TieredStore:
    """Open a store of up to three tiers, fastest first: memory, the directory `path`, and a remote backend.

    - path: the store's folder; None omits the disk tier. `create` False: the folder must exist.
    - fsync: with False, a power cut may lose the latest entries of the disk tier.
    - store_key: signs new entries; stored entries without its signature are misses. "auto": the process's own key, if
      there is one (`signing.find_process_key`).

    `tiers` are the fields of TierOptions:

    - memory_gib: budget of the memory tier in GiB; 0 omits the tier.
    - disk_gib: budget of the disk tier in GiB; "auto": by the free space of the disk, see `eviction`; 0: no limit.
    - kv_dir: the folder of the disk tier's entries, if it is not `kv` in `path`.
    - remote: `redis://HOST:PORT/DB`, `s3://BUCKET/PREFIX` or another object store. It is not contacted yet.
    - remote_timeout_s: the longest that a `get` waits for the remote tier, in seconds.
    - catalog: `postgresql://USER:PASSWORD@HOST/DATABASE` for the catalogue of a fleet. Default: the URL in
      RAGBLEND_CATALOG or the user's settings, else a file in `path`. Without `path`, the default is in memory.
    - kv_dtype: the dtype of new KV: "auto" as computed, "int8" or "fp8" in eight bits. Entries of any dtype are read.

    Raises NotFoundError if `path` does not exist and `create` is False, UsageError for an invalid URL.
    """
    options = TierOptions(**tiers)
    from ragblend.engine.store.disk import DiskStore
    from ragblend.engine.store.format.signing import resolve_key
    from ragblend.engine.store.remote.tier import open_remote
    from ragblend.engine.store.tiered import MemoryStore, TieredStore

    key = resolve_key(store_key)
    opened: list[KVStore] = []
    if options.memory_gib > 0:
        opened.append(MemoryStore(int(options.memory_gib * GIB)))
    if path is not None:
        budget = parse_capacity(options.disk_gib)
        opened.append(
            DiskStore(
                path,
                fsync=fsync,
                create=create,
                capacity_bytes=budget,
                store_key=key,
                kv_dir=options.kv_dir,
                catalog=options.catalog,
            )
        )
    if options.remote is not None:
        opened.append(open_remote(options.remote, timeout_s=options.remote_timeout_s, store_key=key))
    return TieredStore(*opened, kv_dtype=options.kv_dtype, catalog=options.catalog)


def parse_capacity(disk_gib: DiskBudget) -> Capacity:
    """Convert `disk_gib` (in GiB) to a DiskStore's `capacity_bytes`. "auto" stays "auto"; 0 gives None (no limit)."""
    return "auto" if disk_gib == "auto" else int(disk_gib * GIB) or None
