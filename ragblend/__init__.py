"""ragblend: prefill every RAG chunk once, keep its KV cache, fuse the retrieved chunks' caches at query time.

Everything public is one import away and loaded on first use, so `import ragblend` needs no torch, LangChain,
LlamaIndex or vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragblend.engine.generation import Conversation
    from ragblend.engine.load import load_engine
    from ragblend.engine.store.open import open_store
    from ragblend.index import open_index
    from ragblend.ingestion.ray_workers import RayWorkers
    from ragblend.llm import BlendLLM, ChatBlend
    from ragblend.precompute import ingest
    from ragblend.prompt.types import Chunk, Prompt

__version__ = "0.1.0"

_HOME = {
    "BlendLLM": "ragblend.llm",
    "ChatBlend": "ragblend.llm",
    "Chunk": "ragblend.prompt.types",
    "Conversation": "ragblend.engine.generation",
    "RayWorkers": "ragblend.ingestion.ray_workers",
    "Prompt": "ragblend.prompt.types",
    "ingest": "ragblend.precompute",
    "load_engine": "ragblend.engine.load",
    "open_index": "ragblend.index",
    "open_store": "ragblend.engine.store.open",
}

__all__ = [
    "BlendLLM",
    "ChatBlend",
    "Chunk",
    "Conversation",
    "Prompt",
    "RayWorkers",
    "__version__",
    "ingest",
    "load_engine",
    "open_index",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ragblend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
