"""`open_store`: the tiers that are asked for, one over the other. Nothing heavy is imported before it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ragblend.engine.store.base import KVStore
    from ragblend.engine.store.quantize import KvDtype
    from ragblend.engine.store.signing import KeyChoice
    from ragblend.engine.store.tiered import TieredStore


GIB = 1 << 30


class StoreOptions(TypedDict, total=False):
    """Keyword arguments of `open_store` that an engine passes on."""

    memory_gib: float
    disk_gib: float
    remote: str | None
    remote_timeout_s: float
    kv_dtype: KvDtype


def open_store(
    path: str | Path | None,
    *,
    memory_gib: float = 2.0,
    disk_gib: float = 0.0,
    remote: str | None = None,
    remote_timeout_s: float = 5.0,
    kv_dtype: KvDtype = "auto",
    create: bool = True,
    fsync: bool = True,
    store_key: KeyChoice = "auto",
) -> TieredStore:
    """Memory over the directory `path` over a shared place: the tiers that are asked for, fastest first.

    `memory_gib`: budget of the memory tier, 0 leaves it out. `path` None leaves the disk tier out, `disk_gib` limits
    it (0: no limit). `remote`: `redis://HOST:PORT/DB`, `s3://BUCKET/PREFIX` or any fsspec URL; one `get` from it takes
    `remote_timeout_s` at most. `kv_dtype`: how new KV is stored,
    "auto" as computed, "int8" or "fp8" in eight bits; what is there is read whatever it is. Raises NotFoundError when
    `path` does not exist and `create` is False, UsageError for what is no URL. Nothing is asked of the remote yet.
    `fsync` False is for a disk tier whose entries may go missing in a power cut. `store_key`: what entries are signed
    with, and must be; "auto" the process's own key, if it has one (`signing.find_key`).
    """
    from ragblend.engine.store.disk import DiskStore
    from ragblend.engine.store.remote.tier import open_remote
    from ragblend.engine.store.signing import chosen_key
    from ragblend.engine.store.tiered import MemoryStore, TieredStore

    key = chosen_key(store_key)
    tiers: list[KVStore] = []
    if memory_gib > 0:
        tiers.append(memory := MemoryStore(int(memory_gib * GIB)))
    if path is not None:
        budget = int(disk_gib * GIB) or None
        disk = DiskStore(path, fsync=fsync, create=create, capacity_bytes=budget, store_key=key)
        tiers.append(disk)
        for document, keys in disk.pins().items() if memory_gib > 0 else ():
            memory.pin(document, keys)
    if remote is not None:
        tiers.append(open_remote(remote, timeout_s=remote_timeout_s, store_key=key))
    return TieredStore(*tiers, kv_dtype=kv_dtype)


def tier_defaults() -> dict[str, Any]:
    """What `open_store` does where StoreOptions say nothing."""
    defaults = open_store.__kwdefaults__ or {}
    return {name: defaults[name] for name in StoreOptions.__annotations__}
