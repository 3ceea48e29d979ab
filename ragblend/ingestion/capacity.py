"""Checks before an ingestion that the disk has capacity for the new KV."""

from __future__ import annotations

import math
import shutil

from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.eviction import RESCAN_SHARE
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.tiered import format_bytes
from ragblend.errors import StoreFullError

SIZE_MAX_AGE_S = 30.0  # of the size that a report of few documents contains


def stored_kv_bytes(engine: Engine, max_age_s: float = 0.0) -> int | None:
    """Return the size in bytes of the store: on disk, or in memory without a disk tier; None if a server has it.

    max_age_s: see `DiskStore.nbytes`. Listing takes as long as prefilling some small documents in a store of 100,000.
    """
    if engine.store.is_remote:
        return None
    if (disk := engine.store.find_tier(DiskStore)) is not None:
        return disk.nbytes(max_age_s)
    memory = engine.store.find_tier(MemoryStore)
    return None if memory is None else memory.nbytes()


def describe_capacity(disk: DiskStore, nbytes: int) -> str:
    """Return a message: the free disk space, and whether `nbytes` bytes of new KV will cause evictions.

    Raises StoreFullError if `nbytes` exceeds the free space. A store without a configured limit has an automatic limit;
    StoreFullError is also raised if `nbytes` exceeds that limit.
    """
    free = shutil.disk_usage(disk.kv_dir if disk.kv_dir.is_dir() else disk.root).free
    if nbytes > free:
        raise StoreFullError(
            f"the new KV needs {format_bytes(nbytes)}, but the disk of {disk.kv_dir} has {format_bytes(free)} free. "
            "Free space, choose another `store`, a half-precision `dtype`, or fewer documents; `precompute=False` only "
            "indexes"
        )
    available = f"{format_bytes(free)} free"
    if disk.certainly_fits(nbytes):
        return available
    stored_bytes = disk.nbytes(max_age_s=math.inf)
    limit = disk.limit_bytes(stored_bytes)
    # Other processes may have used the rest.
    if limit is not None and nbytes > limit * (1 - RESCAN_SHARE) - stored_bytes:
        stored_bytes = disk.nbytes()
        limit = disk.limit_bytes(stored_bytes)
    if limit is None or nbytes <= limit - stored_bytes:
        return available
    if disk.capacity_bytes == "auto" and nbytes > limit:  # a configured limit may evict; an automatic one must not
        raise StoreFullError(
            f"the new KV needs {format_bytes(nbytes)}, but {disk.kv_dir} may hold {format_bytes(limit)}: half of the "
            "free space, the store included, because no limit is set. Set one in GiB: `disk_gib=...` (0: no limit); "
            "`precompute=False` only indexes"
        )
    return (
        f"{available}; the store holds {format_bytes(stored_bytes)} and may hold {format_bytes(limit)}, so the least "
        "recently used KV is evicted (to keep it: `disk_gib=...`)"
    )
