"""Engines for measurements, which share a model but not a store."""

from __future__ import annotations

from typing import Any

from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine

NO_LIMIT_BYTES = 1 << 50  # capacity of a memory tier that holds everything


def with_own_store(base: TransformersEngine, **options: Any) -> TransformersEngine:
    """Return an engine with the model of `base`, and with an empty store in memory. It does no background work.

    options: arguments of TransformersEngine. By default, the fingerprint is that of `base`.
    """
    return TransformersEngine(
        base.layers,
        base.renderer,
        MemoryStore(NO_LIMIT_BYTES),
        **{"name": base.name, "fingerprint": base.fingerprint, "on_miss": "inline", "check": False, **options},
    )
