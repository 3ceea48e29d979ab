"""Four texts, each of which shares words with two others, and which of them an entry was computed behind."""

from __future__ import annotations

from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.transformers.engine import TransformersEngine

TEXTS = {
    "fox": "Bob Fox lives in Norburg and plays the flute.",
    "kern": "Alice Kern works for Nexon and plays the flute.",
    "bell": "James Bell lives in Norburg and plays chess.",
    "moss": "Tara Moss has a job at Nexon, which sells drones.",
}


def texts_behind(engine: TransformersEngine, header: KVHeader) -> set[str]:
    """The names of those of TEXTS that an entry's prefix ids contain."""
    ids, found = header.prefix_ids, set()
    for name, text in TEXTS.items():
        mine = engine.renderer.chunk_ids(text)
        if any(ids[start : start + len(mine)] == mine for start in range(len(ids))):
            found.add(name)
    return found
