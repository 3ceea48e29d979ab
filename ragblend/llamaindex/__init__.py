"""LlamaIndex: the LLM, the query engine, the synthesizer and the ingestion over one ragblend engine."""

from ragblend.llamaindex.llm import BlendLLM  # before `query`: its ImportError names the extra
from ragblend.llamaindex.query import (
    BlendIndexRetriever,
    BlendIngestion,
    BlendQueryEngine,
    BlendSynthesizer,
    delete_ref_doc,
)

__all__ = [
    "BlendIndexRetriever",
    "BlendIngestion",
    "BlendLLM",
    "BlendQueryEngine",
    "BlendSynthesizer",
    "delete_ref_doc",
]
