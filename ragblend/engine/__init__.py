"""From token ids to fused KV to tokens: keys, stored KV, stores, RoPE placement, selection, fusion, engines.

`open_store` and `load_engine` put the parts together; nothing heavy is imported before they are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ragblend.errors import StoreMismatchError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.protocols import KVStore
    from ragblend.engine.store import TieredStore
    from ragblend.engine.transformers_engine import TransformersEngine

GIB = 1 << 30


def open_store(path: str | Path, *, memory_gib: float = 2.0, create: bool = True) -> TieredStore:
    """A memory tier of `memory_gib` GiB over the directory `path`; 0 leaves the memory tier out.

    Raises NotFoundError when `path` does not exist and `create` is False.
    """
    from ragblend.engine.disk import DiskStore
    from ragblend.engine.store import MemoryStore, TieredStore

    disk = DiskStore(path, create=create)
    if memory_gib <= 0:
        return TieredStore(disk)
    return TieredStore(MemoryStore(int(memory_gib * GIB)), disk)


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
    new_model: bool = False,
    trust_remote_code: bool = False,
) -> TransformersEngine:
    """A model with its store, ready to precompute and answer.

    `model`: "demo", a Hugging Face id or a local path. `store`: a directory, any KVStore, or None for memory only.
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

    if store is None:
        tiers: KVStore = MemoryStore(int(memory_gib * GIB))
    else:
        tiers = open_store(store, memory_gib=memory_gib) if isinstance(store, str | Path) else store
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
