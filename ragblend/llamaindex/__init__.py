"""LlamaIndex: the LLM, the query engine, the synthesizer and the ingestion over one ragblend engine."""

from ragblend.llamaindex.query import (
    BlendIndexRetriever,
    BlendIngestion,
    BlendLLM,
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
