"""LangChain vector store that wraps a ragblend index or any other vector store, and precomputes its documents.

`BlendVectorStore` is the ingestion hook for LangChain's own APIs (`add_documents`, `delete`, the indexing API).
Depends on langchain-core, the index and ingestion. Does not depend on chains.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from ragblend.catalog.indexed_documents import LANGCHAIN_SOURCE
from ragblend.catalog.vectors import normalize_rows
from ragblend.corpus.documents import has_visible_text
from ragblend.corpus.embedders import (
    LANGCHAIN_PREFIX,
    Embedder,
    FloatArray,
    default_embedder,
    embed_question,
    load_embedder,
)
from ragblend.corpus.metadata import metadata_to_json
from ragblend.errors import NotFoundError, UsageError
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.deletion import delete_or_warn, delete_orphaned_kv
from ragblend.ingestion.documents import delete_precomputed
from ragblend.ingestion.identity import LANGCHAIN_COLLECTION
from ragblend.option_fields import check_unicode
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance

    from ragblend.langchain.documents import (
        Filter,
        as_document,
        given_or_own_ids,
        make_documents,
        make_predicate,
        normalize_ids,
    )
except ImportError as error:
    raise ImportError("ragblend.vectorstores needs LangChain: pip install 'ragblend[langchain]'") from error

logger = logging.getLogger(__name__)


class BlendEmbeddings(Embeddings):
    """LangChain embeddings by a ragblend embedder. `embedder`: an Embedder or a name; None: the default embedder."""

    def __init__(self, embedder: Embedder | str | None = None) -> None:
        self.embedder = load_embedder(embedder) if isinstance(embedder, str) else embedder or default_embedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one unit vector per text."""
        return [[float(value) for value in row] for row in self.embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        """Return the unit vector of a question."""
        return [float(value) for value in embed_question(self.embedder, text)]


class LangChainEmbedder:
    """A LangChain `Embeddings` as the embedder of a ragblend index.

    name: recorded in the index; by default the class, model and revision of the embedding.
    """

    def __init__(self, embeddings: Embeddings, name: str = "") -> None:
        self.embeddings = embeddings
        self.name = name or _embedding_name(embeddings)

    @cached_property
    def dim(self) -> int:
        """Length of a vector. Embeds one word to measure it."""
        return len(self.embeddings.embed_query("length"))

    def embed(self, texts: Sequence[str], /) -> FloatArray:
        """Return the vectors of texts, each of length 1: [n, dim] float32."""
        rows = self.embeddings.embed_documents(list(texts)) if texts else []
        return normalize_rows(np.reshape(np.array(rows, np.float32), (len(texts), self.dim)))

    def embed_query(self, text: str, /) -> FloatArray:
        """Return the unit vector [dim] float32 of a question."""
        return normalize_rows(self.embeddings.embed_query(text))


_MODEL_ATTRIBUTES = ("model_name", "model", "model_id", "repo_id", "deployment")  # of LangChain's integrations


def _embedding_name(embeddings: Embeddings) -> str:
    """Return the class of an embedding, then its model and revision if its attributes name them."""
    inner = getattr(embeddings, "underlying_embeddings", embeddings)  # CacheBackedEmbeddings returns its vectors
    names = (getattr(inner, attribute, None) for attribute in _MODEL_ATTRIBUTES)
    model = next((value for value in names if isinstance(value, str) and value), "")
    if model and Path(model).is_dir():
        model = str(Path(model).resolve())  # does not depend on the working folder
    options = getattr(inner, "model_kwargs", None)
    revision = getattr(inner, "revision", None) or (options.get("revision") if isinstance(options, dict) else None)
    return " ".join(str(part) for part in (f"{LANGCHAIN_PREFIX}{type(inner).__name__}", model, revision) if part)


def _as_embedder(embedding: Embeddings | None) -> Embedder | None:
    """Return the index's embedder for a LangChain embedding; None for None."""
    if embedding is None:
        return None
    return embedding.embedder if isinstance(embedding, BlendEmbeddings) else LangChainEmbedder(embedding)


def _delegate(name: str) -> Any:
    """Return a method that calls the inner store's method of this name."""

    def method(self: BlendVectorStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(VectorStore, name).__doc__
    return method


class BlendVectorStore(VectorStore):
    """A LangChain vector store around another one. It also precomputes the KV of added documents.

    The deletion of the last document with a text also deletes the KV of the text, if `llm` is set.

    inner: the vector store with the documents: any LangChain vector store, an open ragblend index, or its folder.
    llm: a ChatBlend, a BlendLLM or an engine that precomputes; None: documents are only indexed. Documents are indexed
    first. If the precomputation of a document fails, searches still find it, and its text is prefilled in prompts.
    embedding: only if `inner` is a folder: the LangChain embedding with which its index was made; None if the index was
    made with a ragblend embedder. An `embedding` for an open `inner` raises UsageError.
    collection: a name for the documents of this vector store in the KV store. Two vector stores may have documents with
    the same ids, so each needs its own name. The default consists of the inner store's class and the name of its data
    (collection, index, table, folder). Stores without such a name, for example in memory, are numbered in the order in
    which a process opens them.

    Other attributes are the inner store's (`index`, `save_local`, ...).
    """

    def __init__(
        self,
        inner: VectorStore | ChunkIndex | str | Path,
        embedding: Embeddings | None = None,
        *,
        llm: Any = None,
        collection: str = "",
    ) -> None:
        if embedding is not None and not isinstance(inner, str | Path):
            raise UsageError(
                f"inner is an open {type(inner).__name__}, which has an embedding; leave embedding out, or pass the "
                "folder of an index"
            )
        if isinstance(inner, str | Path):
            inner = open_index(inner, _as_embedder(embedding))
        self.inner = _IndexStore(inner) if isinstance(inner, ChunkIndex) else inner
        self.llm = llm
        self.collection = collection or _collection_of(self.inner)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner store."""
        if name == "inner" or name.startswith("__"):  # `inner` is missing while a copy is made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def embeddings(self) -> Embeddings | None:
        """Embedding of texts and questions."""
        return self.inner.embeddings

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Store texts like `add_documents`, with the same result and errors."""
        documents = make_documents(texts, metadatas)
        return self.add_documents(documents, **kwargs, **({"ids": ids} if ids else {}))

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Store and precompute documents, and return their ids. A document replaces an older one with the same id.

        ids: used instead of the documents' own ids. A document that the model cannot prefill is stored, and a warning
        is logged; see `precompute_documents`. If the numbers of ids and documents differ, UsageError is raised, and
        nothing is stored.
        """
        given_ids = given_or_own_ids(documents, kwargs.get("ids"))
        ids = self.inner.add_documents(documents, **kwargs)
        if self.llm is not None:
            # An index stores no blank document.
            stored_ids = normalize_ids(ids) if len(ids) == len(documents) else given_ids
            precompute_documents(documents, self.llm, ids=stored_ids, collection=self.collection)
            self._delete_orphaned_kv()
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete the documents with these ids and, if `llm` is set, their KV. Unknown ids are ignored.

        `ids=None` deletes from a ragblend index all documents that were added through LangChain, with their KV. For any
        other inner store, `inner.delete(None)` is called and the KV stays; `ragblend remove COLLECTION` deletes the KV.
        """
        if ids is None and isinstance(self.inner, _IndexStore):
            ids = self.inner.ids()
        result = self.inner.delete(ids, **kwargs)
        if self.llm is not None:
            delete_precomputed(normalize_ids(ids or []), self.llm, collection=self.collection)
            self._delete_orphaned_kv()
        return result

    def _delete_orphaned_kv(self) -> None:
        if isinstance(self.inner, _IndexStore):  # the next deletion retries an unreachable remote tier
            delete_or_warn(partial(delete_orphaned_kv, self.inner.index, getattr(self.llm, "engine", self.llm)))

    get_by_ids = _delegate("get_by_ids")
    similarity_search = _delegate("similarity_search")
    similarity_search_with_score = _delegate("similarity_search_with_score")
    similarity_search_by_vector = _delegate("similarity_search_by_vector")
    max_marginal_relevance_search = _delegate("max_marginal_relevance_search")
    max_marginal_relevance_search_by_vector = _delegate("max_marginal_relevance_search_by_vector")
    _similarity_search_with_relevance_scores = _delegate("_similarity_search_with_relevance_scores")
    _select_relevance_score_fn = _delegate("_select_relevance_score_fn")
    aget_by_ids = _delegate("aget_by_ids")
    asimilarity_search = _delegate("asimilarity_search")
    asimilarity_search_with_score = _delegate("asimilarity_search_with_score")
    asimilarity_search_by_vector = _delegate("asimilarity_search_by_vector")
    amax_marginal_relevance_search = _delegate("amax_marginal_relevance_search")
    amax_marginal_relevance_search_by_vector = _delegate("amax_marginal_relevance_search_by_vector")
    _asimilarity_search_with_relevance_scores = _delegate("_asimilarity_search_with_relevance_scores")

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
        """Add texts to the index in the folder `path`, which is created if missing, and return the vector store.

        kwargs: `llm` and `collection`, as in the constructor. Raises UsageError without `path`.
        """
        if not path:
            raise UsageError("path is missing; name the folder of the index: from_texts(..., path='index/')")
        store = cls(open_index(path, _as_embedder(embedding), create=True), **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store


class _IndexStore(VectorStore):
    """A ragblend index (FAISS and SQLite on disk, no pickle) as a LangChain vector store.

    Each added document is one chunk with the document's id. Searches also find chunks that `ragblend ingest` added to
    the index, with the chunks' ids. A single chunk of an ingested file cannot be deleted.
    """

    def __init__(self, index: ChunkIndex) -> None:
        self.index = index

    @property
    def embeddings(self) -> Embeddings:
        embedder = self.index.embedder
        return embedder.embeddings if isinstance(embedder, LangChainEmbedder) else BlendEmbeddings(embedder)

    def ids(self) -> list[str]:
        """Return the ids of all documents that were added through LangChain."""
        sources = self.index.sources()
        return [source.removeprefix(LANGCHAIN_SOURCE) for source in sources if source.startswith(LANGCHAIN_SOURCE)]

    def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Store all documents or none. Return their ids; a document without an id gets a new one.

        A document without visible text is not stored, and a warning is logged. An older one with its id is removed.
        """
        names = [name or str(uuid.uuid4()) for name in given_or_own_ids(documents, ids)]
        named = dict(zip(names, documents, strict=True))
        for name, document in zip(names, documents, strict=True):
            check_unicode(name, "an id")
            check_unicode(document.page_content, f"the text of document {name!r}")
            metadata_to_json(document.metadata, f"the metadata of document {name!r}")  # raises an error before the work
        blank = [name for name, document in named.items() if not has_visible_text(document.page_content)]
        chunks = [
            Chunk(document.page_content, LANGCHAIN_SOURCE + name, metadata=document.metadata)
            for name, document in named.items()
            if name not in blank
        ]
        vectors = self.index.embed([chunk.text for chunk in chunks])  # in one call, because embedding is slow
        with self.index.write_transaction():
            for chunk, vector in zip(chunks, vectors, strict=True):
                self.index.add_document(chunk.source, chunk.id, [chunk], vector[None, :])
            for name in blank:
                with suppress(NotFoundError):
                    self.index.remove_document(LANGCHAIN_SOURCE + name)
        if blank:
            logger.warning("documents without visible text were not stored: %s", ", ".join(blank))
        return [name for name in names if name not in blank]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        names = dict.fromkeys(normalize_ids(ids or []))
        stored = set(self.index.sources()).intersection(LANGCHAIN_SOURCE + name for name in names)
        others = self.index.get([name for name in names if LANGCHAIN_SOURCE + name not in stored])
        if others:
            raise UsageError(
                f"{next(iter(others))} is a chunk of an ingested file; remove the file: ragblend remove FILE"
            )
        for source in stored:
            self.index.remove_document(source)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        rows = (
            next(self.index.chunks(LANGCHAIN_SOURCE + name), None) or self.index.get([name]).get(name)
            for name in normalize_ids(ids)
        )
        return [as_document(chunk) for chunk in rows if chunk is not None]

    def similarity_search_with_score(
        self, query: str | list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents nearest to a question or a vector, with their cosines.

        filter: a dictionary of metadata that a document must have, or a function of a document that returns True to
        keep it. kwargs: `neighbours` and `order` of `ChunkIndex.search`.
        """
        hits = self.index.search(query, k, is_allowed=make_predicate(filter), **kwargs)
        return [(as_document(hit.chunk), hit.score) for hit in hits]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return self.similarity_search_with_score(embedding, k, **kwargs)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        return [document for document, _ in self.similarity_search_with_score(embedding, k, **kwargs)]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        vector = self.index.query_vector(query)[0].tolist()
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        hits = self.index.search(embedding, fetch_k, is_allowed=make_predicate(filter), **kwargs)
        vectors = self.index.embed([hit.chunk.text for hit in hits])  # the stored ones
        chosen = maximal_marginal_relevance(np.array(embedding, np.float32), vectors.tolist(), lambda_mult, k)
        return [as_document(hits[position].chunk) for position in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: (1 + cosine) / 2

    @classmethod
    def from_texts(cls, texts: list[str], embedding: Embeddings, *args: Any, **kwargs: Any) -> Self:
        raise NotImplementedError("BlendVectorStore.from_texts opens the index")


_NAMES = ("collection_name", "index_name", "table_name", "namespace", "persist_directory", "location", "path", "folder")
"""Attributes in which vector stores have the name of their data, possibly after an underscore."""
_UNNAMED: WeakKeyDictionary[VectorStore, str] = WeakKeyDictionary()
_UNNAMED_COUNT: Counter[str] = Counter()


def _collection_of(inner: VectorStore) -> str:
    """Return the default collection of a vector store, the same in every process if its attributes name its data."""
    if isinstance(inner, _IndexStore):
        return inner.index.collection or LANGCHAIN_COLLECTION
    kind = type(inner).__name__
    stored = getattr(inner, "__dict__", {})
    attributes = {name.lstrip("_"): value for name, value in stored.items() if isinstance(value, str)}
    named = [f"{name}={attributes[name]}" for name in _NAMES if attributes.get(name)]
    if named:
        return f"{kind}({', '.join(named)})"
    if inner not in _UNNAMED:
        _UNNAMED_COUNT[kind] += 1
        _UNNAMED[inner] = f"{kind}#{_UNNAMED_COUNT[kind]}"
    return _UNNAMED[inner]
