"""ragblend: prefill every RAG chunk once, keep its KV cache, fuse the retrieved chunks' caches at query time.

Everything public is one import away and loaded on first use, so `import ragblend` needs no torch, LangChain,
LlamaIndex or vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragblend.engine import load_engine, open_store
    from ragblend.engine.generation import Conversation
    from ragblend.index import open_index
    from ragblend.llm import BlendLLM, ChatBlend
    from ragblend.precompute import ingest
    from ragblend.segments import Chunk, SegmentedPrompt

__version__ = "0.1.0"

_HOME = {
    "BlendLLM": "ragblend.llm",
    "ChatBlend": "ragblend.llm",
    "Chunk": "ragblend.segments",
    "Conversation": "ragblend.engine.generation",
    "SegmentedPrompt": "ragblend.segments",
    "ingest": "ragblend.precompute",
    "load_engine": "ragblend.engine",
    "open_index": "ragblend.index",
    "open_store": "ragblend.engine",
}

__all__ = [
    "BlendLLM",
    "ChatBlend",
    "Chunk",
    "Conversation",
    "SegmentedPrompt",
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
