"""From token ids to fused KV to tokens: keys, stored KV, stores, RoPE placement, selection, fusion, engines.

`open_store` and `load_engine` put the parts together; nothing heavy is imported before they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ragblend.errors import StoreMismatchError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.eviction import Policy
    from ragblend.engine.protocols import KVStore
    from ragblend.engine.store import TieredStore
    from ragblend.engine.transformers_engine import TransformersEngine

GIB = 1 << 30


def open_store(
    path: str | Path | None,
    *,
    memory_gib: float = 2.0,
    disk_gib: float = 0.0,
    remote: str | None = None,
    remote_timeout_s: float = 5.0,
    eviction: Policy = "lru",
    quota_gib: float | Mapping[str, float] = 0.0,
    create: bool = True,
) -> TieredStore:
    """Memory over the directory `path` over a shared place: the tiers that are asked for, fastest first.

    `memory_gib`: budget of the memory tier, 0 leaves it out. `path` None leaves the disk tier out, `disk_gib` limits
    it (0: no limit). `remote`: `redis://HOST:PORT/DB`, `s3://BUCKET/PREFIX` or any fsspec URL; one `get` from it takes
    `remote_timeout_s` at most. `eviction`: "lru", or "gdsf" for what saves the most prefill per byte. `quota_gib`:
    what each namespace may hold in each local tier, or by namespace (0: no limit). Raises NotFoundError when `path`
    does not exist and `create` is False, UsageError for what is no URL. Nothing is asked of the remote yet.
    """
    from ragblend.engine.disk import DiskStore
    from ragblend.engine.remote import open_remote
    from ragblend.engine.store import MemoryStore, TieredStore

    quotas = _quotas(quota_gib)
    tiers: list[KVStore] = []
    if memory_gib > 0:
        tiers.append(memory := MemoryStore(int(memory_gib * GIB), policy=eviction, quotas=quotas))
    if path is not None:
        budget = int(disk_gib * GIB) or None
        disk = DiskStore(path, create=create, capacity_bytes=budget, policy=eviction, quotas=quotas)
        tiers.append(disk)
        for document, keys in disk.pins().items() if memory_gib > 0 else ():
            memory.pin(document, keys)
    if remote is not None:
        tiers.append(open_remote(remote, timeout_s=remote_timeout_s))
    return TieredStore(*tiers)


def _quotas(quota_gib: float | Mapping[str, float]) -> int | dict[str, int] | None:
    """Quotas in bytes; None where there are none."""
    if isinstance(quota_gib, Mapping):
        return {namespace: int(gib * GIB) for namespace, gib in quota_gib.items()}
    return int(quota_gib * GIB) or None


def load_engine(
    model: str = "demo",
    store: str | Path | KVStore | None = None,
    *,
    backend: str = "transformers",
    dtype: str = "auto",
    device: str = "auto",
    system: str | None = None,
    namespace: str = "",
    on_miss: str = "store",
    memory_gib: float = 2.0,
    disk_gib: float = 0.0,
    remote: str | None = None,
    remote_timeout_s: float = 5.0,
    eviction: Policy = "lru",
    quota_gib: float | Mapping[str, float] = 0.0,
    new_model: bool = False,
    trust_remote_code: bool = False,
) -> TransformersEngine:
    """A model with its store, ready to precompute and answer.

    `model`: "demo", a Hugging Face id or a local path. `store`: a directory, any KVStore, or None for memory only;
    budgets, `remote`, `eviction` and quotas are those of `open_store`, and belong to the KVStore when one is given.
    `system` is the system text that chunks are precomputed behind. A directory that so far holds only other models'
    KV is refused with StoreMismatchError, unless `new_model` says that this one is to be added.
    """
    if backend != "transformers":
        raise UsageError(f"backend is {backend!r}; choose 'transformers'")
    from ragblend.engine.kv import dtype_name
    from ragblend.engine.store import MemoryStore
    from ragblend.engine.transformers_engine import TransformersEngine
    from ragblend.engine.transformers_layers import TransformersLayers
    from ragblend.engine.transformers_model import load_model
    from ragblend.segments import Segmenter, prompt_format

    if store is None and remote is None:
        tiers: KVStore = MemoryStore(int(memory_gib * GIB), policy=eviction, quotas=_quotas(quota_gib))
    elif store is None or isinstance(store, str | Path):
        tiers = open_store(
            store,
            memory_gib=memory_gib,
            disk_gib=disk_gib,
            remote=remote,
            remote_timeout_s=remote_timeout_s,
            eviction=eviction,
            quota_gib=quota_gib,
        )
    elif remote is not None:
        raise UsageError("a remote tier goes into the store that you pass: TieredStore(your_store, open_remote(URL))")
    else:
        tiers = store
    loaded = load_model(model, dtype, device, trust_remote_code)
    layers = TransformersLayers(loaded.model)
    if isinstance(store, str | Path):
        dtype = dtype_name(layers.dtype)
        facts: dict[str, str | int] = {"model": loaded.name, "dtype": dtype, "num_layers": layers.num_layers}
        _register(Path(store), loaded.fingerprint, facts, new_model)
    segmenter = Segmenter(loaded.tokenizer, prompt_format(loaded.tokenizer, loaded.path))
    return TransformersEngine(
        layers,
        segmenter,
        tiers,
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        system=system,
        namespace=namespace,
        on_miss=on_miss,
    )


def _register(path: Path, fingerprint: str, facts: dict[str, str | int], new_model: bool) -> None:
    """Note in the store whose KV it holds; refuse one that holds only other models'."""
    from ragblend.engine.disk import DiskStore

    disk = DiskStore(path)
    models = disk.models()
    if fingerprint in models:
        return
    if models and not new_model:
        held = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
        raise StoreMismatchError(
            f"{path} holds KV of {held}, the engine runs {facts['model']} ({facts['dtype']}), which would find nothing "
            f"there. Add it: ragblend precompute --model {facts['model']} --store {path}; or use another --store"
        )
    disk.put_model(fingerprint, facts)
