"""What goes when a text goes: its KV in every tier, KV that was computed behind it, its place in the registry, pins.

The index notes what its documents no longer have (see `chunkdb`); `sweep` deletes it, and may be killed at any moment:
the next one goes on. Knows the index, engines and stores; nothing of files or frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ragblend.engine.disk import DiskStore, StoreEntry
from ragblend.engine.protocols import Engine
from ragblend.engine.store import Pins, TieredStore
from ragblend.errors import BackendUnreachableError
from ragblend.index import ChunkIndex
from ragblend.registry import ChunkRegistry, registry_of
from ragblend.segments import Chunk

Ids = tuple[int, ...]


def sweep(index: ChunkIndex, engine: Engine) -> tuple[int, str]:
    """Delete what documents have left behind that were changed or removed. How many chunks' KV went.

    A text that a framework's document has as well stays. Where a remote tier cannot be told, this says why, and it is
    told by the next sweep.
    """
    left = index.leftovers()
    if not left.last_id:
        return 0, ""
    with closing(registry_of(engine.store)) as registry:
        gone = registry.release(left.texts)
    num_removed, problem = forget_texts(gone, engine, left.pairs, everywhere=True)
    if isinstance(engine.store, Pins):
        for source in left.sources:
            engine.store.unpin(source)
    if not problem:
        index.drop_leftovers(left)
    return num_removed, problem


def forget_texts(
    texts: Iterable[str], engine: Engine, pairs: Iterable[tuple[str, str]] = (), *, everywhere: bool = False
) -> tuple[int, str]:
    """Drop the KV of texts and of `pairs` (behind, text) that the engine stores, in every tier.

    everywhere: in the local disk tier, whose headers are read for it, also that of other models and prefixes, and of
    whatever was computed behind these texts, in the engine's own namespace. How many entries went, and why a remote
    tier could not be told; "" where it was.
    """
    chunks = [Chunk(text) for text in dict.fromkeys(texts)]
    neighbours = [Chunk(text, behind=behind) for behind, text in pairs]
    keys = dict.fromkeys(engine.key(chunk) for chunk in (*chunks, *neighbours))
    disk, ids_of = disk_store(engine), engine.segmenter.chunk_ids
    if disk is not None and keys and everywhere:
        namespace, prefix = getattr(engine, "namespace", ""), tuple(getattr(engine, "default_prefix_ids", ()))
        gone = {ids_of(chunk) for chunk in chunks}
        apart = [(engine.segmenter.context_ids(chunk), ids_of(chunk)) for chunk in neighbours]
        mine = (entry for entry in disk.entries() if entry.header.namespace == namespace)
        joint = engine.segmenter.joint_ids
        lost = {hash(prefix + ids + joint) for ids in gone}
        keys |= dict.fromkeys(keys_without(mine, gone.__contains__, joint, apart, lost))
    num_removed, problem = 0, ""
    for key in keys:
        try:
            num_removed += engine.store.delete(key)
        except BackendUnreachableError as error:
            problem = str(error)
    return num_removed, problem


def keys_without(
    entries: Iterable[StoreEntry],
    is_gone: Callable[[Ids], bool],
    joint: Ids,
    pairs: Iterable[tuple[Ids, Ids]] = (),
    behind_gone: Iterable[int] = (),
) -> Iterator[str]:
    """Keys of entries whose token ids are gone, that were computed behind such entries, or behind the first of a pair.

    A neighbour version is stored behind prefix, chunk and `joint` (what stands between two chunks), and that chunk
    behind the prefix: so one tells of the other. behind_gone: hashes of contexts that are gone where nothing is there
    to tell.
    """
    befores: dict[Ids, list[Ids]] = {}
    for behind, ids in pairs:
        befores.setdefault(ids, []).append(behind)
    doomed, seen = set(behind_gone), []  # hashes: the ids of a large store would not fit into memory
    for entry in entries:
        context, ids = entry.header.prefix_ids, entry.header.token_ids
        if is_gone(ids):
            doomed.add(hash(context + ids + joint))
            yield entry.key
        elif any(context[-len(behind) :] == behind for behind in befores.get(ids, ())):
            yield entry.key
        else:
            seen.append((entry.key, hash(context)))
    yield from (key for key, context in seen if context in doomed)


def forget_chunks(chunks: Iterable[Chunk], model: Any, still_used: Callable[[str], bool]) -> int:
    """Drop KV and registered texts of what a framework has deleted, save what is `still_used`. How many had KV.

    `model`: an engine, or an object with one at `.engine`. Raises BackendUnreachableError when a remote tier cannot be
    told.
    """
    gone = list(dict.fromkeys(chunk.text for chunk in chunks if not still_used(chunk.text)))
    registry_for(model).remove(gone)
    num_removed, problem = forget_texts(gone, getattr(model, "engine", model))
    if problem:
        raise BackendUnreachableError(problem)
    return num_removed


def registered_under(names: Iterable[str], model: Any) -> list[str]:
    """The texts of documents that were precomputed under these names."""
    registry = registry_for(model)
    return [text for name in names if name for text in registry.texts_of(name)]


def registry_for(model: Any) -> ChunkRegistry:
    """The registry of a framework's model, or of an engine."""
    engine: Engine = getattr(model, "engine", model)
    return getattr(model, "registry", None) or registry_of(engine.store)


def disk_store(engine: Engine) -> DiskStore | None:
    """The local disk tier of the engine's store, if it has one."""
    tiers = engine.store.tiers if isinstance(engine.store, TieredStore) else (engine.store,)
    return next((tier for tier in tiers if isinstance(tier, DiskStore)), None)


def store_folders(engine: Engine) -> list[Path]:
    """Folders of this machine that the engine's store keeps its files in."""
    tiers: Sequence[Any] = getattr(engine.store, "tiers", (engine.store,))
    return [tier.root for tier in tiers if isinstance(getattr(tier, "root", None), Path)]
