"""LangChain vector stores: one over a ragblend index, and one that precomputes what goes into any other store.

`PrecomputingVectorStore` is the ingestion hook for LangChain's own APIs (`add_documents`, `delete`, the indexing API).
Knows langchain-core, the index and the adapter. Knows nothing about chains.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ragblend.corpus.embedders import Embedder, FloatArray, default_embedder, embed_question, load_embedder
from ragblend.corpus.vectors.base import normalize_rows
from ragblend.errors import UsageError
from ragblend.frameworks.model import delete_documents_kv, precompute_and_register
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.deletion import delete_orphaned_kv, find_registered_texts
from ragblend.prompt.prompt import Chunk

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore
except ImportError as error:
    raise ImportError("ragblend.vectorstores needs LangChain: pip install 'ragblend[langchain]'") from error

_SOURCE_PREFIX = "langchain/"  # source, in the index, of a document that came in through LangChain; its id follows


class BlendEmbeddings(Embeddings):
    """A ragblend embedder for LangChain: an Embedder, its name, or None for the default one."""

    def __init__(self, embedder: Embedder | str | None = None) -> None:
        self.embedder = load_embedder(embedder) if isinstance(embedder, str) else embedder or default_embedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One unit vector per text."""
        return [[float(value) for value in row] for row in self.embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of a question."""
        return [float(value) for value in embed_question(self.embedder, text)]


class LangChainEmbedder:
    """A LangChain `Embeddings` as the embedder of a ragblend index. `name` is what the index records."""

    def __init__(self, embeddings: Embeddings, name: str = "") -> None:
        self.embeddings = embeddings
        self.name = name or f"langchain:{type(embeddings).__name__}"

    @cached_property
    def dim(self) -> int:
        """Length of a vector, by embedding one word."""
        return len(self.embeddings.embed_query("length"))

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """[n, dim] float32 unit rows."""
        rows = self.embeddings.embed_documents(list(texts)) if texts else []
        return normalize_rows(np.reshape(np.array(rows, np.float32), (len(texts), self.dim)))

    def embed_query(self, text: str, /) -> FloatArray:
        """[dim] float32, length 1."""
        return normalize_rows(self.embeddings.embed_query(text))


class BlendVectorStore(VectorStore):
    """A ragblend index (FAISS and SQLite on disk, no pickle) as a LangChain vector store.

    Documents added here are one chunk each, under their own id. Chunks that `ragblend ingest` put into the same index
    are found too; their ids are the chunks'. `delete` and `get_by_ids` take both; a chunk of an ingested file cannot be
    deleted alone.
    """

    def __init__(self, index: ChunkIndex | str | Path) -> None:
        self.index = index if isinstance(index, ChunkIndex) else open_index(index)

    @property
    def embeddings(self) -> Embeddings:
        """What embeds texts and questions."""
        embedder = self.index.embedder
        return embedder.embeddings if isinstance(embedder, LangChainEmbedder) else BlendEmbeddings(embedder)

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Store texts, each in place of an older one with its id. The ids, made up where none were given."""
        texts = list(texts)
        names = [name or str(uuid.uuid4()) for name in ids or [""] * len(texts)]
        metadata = metadatas or [{}] * len(texts)
        vectors = self.index.embed(texts)  # all at once: embedding is the slow part
        for name, text, facts, vector in zip(names, texts, metadata, vectors, strict=True):
            chunk = Chunk(text, _SOURCE_PREFIX + name, metadata=facts)
            self.index.add_document(chunk.source, chunk.id, [chunk], vector[None, :])
        return names

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Remove documents by id, all that came in through LangChain without `ids`; unknown ids are passed over."""
        stored = set(self.index.sources())
        sources = (
            [_SOURCE_PREFIX + name for name in ids]
            if ids is not None
            else [s for s in stored if s.startswith(_SOURCE_PREFIX)]
        )
        part = next(
            (name for name in ids or () if _SOURCE_PREFIX + name not in stored and self.index.get([name])), None
        )
        if part is not None:
            raise UsageError(f"{part} is a chunk of an ingested file; remove the whole file: ragblend remove FILE")
        for source in sources:
            if source in stored:
                self.index.remove_document(source)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids, in that order; unknown ids are passed over."""
        found = (
            next(self.index.chunks(_SOURCE_PREFIX + name), None) or self.index.get([name]).get(name) for name in ids
        )
        return [_document(chunk) for chunk in found if chunk is not None]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """The `k` nearest documents."""
        return [_document(hit.chunk) for hit in self.index.search(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """The `k` nearest documents with their cosines."""
        return [(_document(hit.chunk), hit.score) for hit in self.index.search(query, k, **kwargs)]

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """The `k` documents nearest to a vector."""
        return [_document(hit.chunk) for hit in self.index.search(embedding, k, **kwargs)]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: (1 + cosine) / 2

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        path: str | Path = "",
        **kwargs: Any,
    ) -> Self:
        """A store in folder `path`, made if there is none, with these texts in it."""
        if not path:
            raise UsageError("path is missing; name the folder of the index: from_texts(..., path='index/')")
        embedder = embedding.embedder if isinstance(embedding, BlendEmbeddings) else LangChainEmbedder(embedding)
        store = cls(open_index(path, embedder, create=True))
        store.add_texts(texts, metadatas, ids=ids)
        return store


def _document(chunk: Chunk) -> Document:
    if chunk.source.startswith(_SOURCE_PREFIX):
        return Document(chunk.text, id=chunk.source.removeprefix(_SOURCE_PREFIX), metadata=dict(chunk.metadata))
    place = {"source": chunk.source, "start": chunk.start, "end": chunk.end}
    return Document(chunk.text, id=chunk.id, metadata={**place, **chunk.metadata})


class PrecomputingVectorStore(VectorStore):
    """Any LangChain vector store, with the KV of its documents precomputed as they arrive and dropped as they go.

    `PrecomputingVectorStore(Chroma(...), llm)` goes wherever the inner store went, LangChain's indexing API included.
    Documents are indexed first: when precomputing fails they are found all the same, and prefilled when asked for.
    `llm` is a ChatBlend or BlendLLM, or an engine. KV of a text that another document still has stays.
    """

    def __init__(self, inner: VectorStore, llm: Any) -> None:
        self.inner = inner
        self.llm = llm

    @property
    def embeddings(self) -> Embeddings | None:
        """What the inner store embeds with."""
        return self.inner.embeddings

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Index and precompute documents, or by `add_texts`, which calls this, texts. Their ids."""
        given = kwargs.get("ids") or [document.id for document in documents]
        replaced = self._documents([name for name in given if name])
        ids = self.inner.add_documents(documents, **kwargs)
        precompute_and_register(documents, self.llm, _names(given))
        self._delete_kv(replaced)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Remove documents from the inner store, and their KV. Without `ids` KV stays, for `ragblend gc`."""
        gone = self._documents(ids or [])
        result = self.inner.delete(ids, **kwargs)
        self._delete_kv([*gone, *find_registered_texts(_names(ids or []), self.llm)])
        return result

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The inner store's documents with these ids."""
        return self.inner.get_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """The inner store's nearest documents."""
        return self.inner.similarity_search(query, k, **kwargs)

    def similarity_search_with_score(self, *args: Any, **kwargs: Any) -> list[tuple[Document, float]]:
        """The inner store's nearest documents with its scores."""
        return self.inner.similarity_search_with_score(*args, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """The inner store's documents nearest to a vector."""
        return self.inner.similarity_search_by_vector(embedding, k, **kwargs)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """The inner store's diverse documents."""
        return self.inner.max_marginal_relevance_search(query, k, fetch_k, lambda_mult, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self.inner._select_relevance_score_fn()

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        inner: type[VectorStore] | None = None,
        llm: Any = None,
        **kwargs: Any,
    ) -> Self:
        """An `inner` store made from these texts, with their KV precomputed by `llm`."""
        if inner is None or llm is None:
            raise UsageError("from_texts needs inner=, the class of the store to fill, and llm=, who precomputes")
        store = cls(inner.from_texts(texts, embedding, metadatas, **({"ids": ids} if ids else {}), **kwargs), llm)
        precompute_and_register(texts, llm)
        return store

    def _documents(self, ids: Sequence[str]) -> list[Document]:
        """What is stored under `ids` now; nothing for inner stores that cannot tell."""
        try:
            return self.inner.get_by_ids(ids) if ids else []
        except NotImplementedError:
            return []

    def _delete_kv(self, documents: Sequence[Document | str]) -> None:
        delete_documents_kv(documents, self.llm, still_used=self._has_text)
        if isinstance(self.inner, BlendVectorStore):
            delete_orphaned_kv(
                self.inner.index, getattr(self.llm, "engine", self.llm)
            )  # who cannot be told now is told later

    def _has_text(self, text: str) -> bool:
        """Whether some document still has this text: its nearest neighbour would be the text itself."""
        return any(document.page_content.strip() == text for document in self.inner.similarity_search(text, k=4))


def _names(ids: Iterable[str | None]) -> list[str]:
    """What `precompute_documents` knows documents by; "" for those without an id."""
    return [f"langchain/{name}" if name else "" for name in ids]
