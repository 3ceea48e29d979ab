"""LangChain vector stores: one over a ragblend index, and one that precomputes what goes into any other store.

`PrecomputingVectorStore` is the ingestion hook for LangChain's own APIs (`add_documents`, `delete`, the indexing API).
Knows langchain-core, the index and the adapter. Knows nothing about chains.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ragblend.corpus.documents import has_visible_text
from ragblend.corpus.embedders import (
    LANGCHAIN_PREFIX,
    Embedder,
    FloatArray,
    default_embedder,
    embed_question,
    load_embedder,
)
from ragblend.corpus.vectors import normalize_rows
from ragblend.errors import NotFoundError, UsageError, check_unicode
from ragblend.frameworks.model import delete_documents_kv, precompute_and_register
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.deletion import delete_orphaned_kv, find_registered_texts
from ragblend.prompt.types import Chunk

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance
except ImportError as error:
    raise ImportError("ragblend.vectorstores needs LangChain: pip install 'ragblend[langchain]'") from error

logger = logging.getLogger(__name__)

Filter = Mapping[str, Any] | Callable[[Document], bool]
"""Chooses documents: metadata that they must have, or a function that returns True for those to keep."""

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
    """A LangChain `Embeddings` as the embedder of a ragblend index.

    `name` is recorded in the index; by default the class, model and revision of the embedding.
    """

    def __init__(self, embeddings: Embeddings, name: str = "") -> None:
        self.embeddings = embeddings
        self.name = name or _embedding_name(embeddings)

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


_MODEL_ATTRIBUTES = ("model_name", "model", "model_id", "repo_id", "deployment")  # of LangChain's integrations


def _embedding_name(embeddings: Embeddings) -> str:
    """The class of an embedding, then its model and revision where its attributes name them."""
    inner = getattr(embeddings, "underlying_embeddings", embeddings)  # CacheBackedEmbeddings returns its vectors
    found = (getattr(inner, attribute, None) for attribute in _MODEL_ATTRIBUTES)
    model = next((value for value in found if isinstance(value, str) and value), "")
    if model and Path(model).is_dir():
        model = str(Path(model).resolve())  # the same from every working folder
    options = getattr(inner, "model_kwargs", None)
    revision = getattr(inner, "revision", None) or (options.get("revision") if isinstance(options, dict) else None)
    return " ".join(str(part) for part in (f"{LANGCHAIN_PREFIX}{type(inner).__name__}", model, revision) if part)


def _as_embedder(embedding: Embeddings | None) -> Embedder | None:
    """The embedder that an index takes for a LangChain embedding; None for None."""
    if embedding is None:
        return None
    return embedding.embedder if isinstance(embedding, BlendEmbeddings) else LangChainEmbedder(embedding)


class BlendVectorStore(VectorStore):
    """A ragblend index (FAISS and SQLite on disk, no pickle) as a LangChain vector store.

    Documents added here are one chunk each, under their own id. Chunks that `ragblend ingest` put into the same index
    are found too; their ids are the chunks'. `delete` and `get_by_ids` take both; a chunk of an ingested file cannot be
    deleted alone.

    `index` is an open index or its folder, and `embedding` the LangChain embedding with which the folder's index was
    made. An index that was made with an embedder of ragblend's own opens without it.
    """

    def __init__(self, index: ChunkIndex | str | Path, embedding: Embeddings | None = None) -> None:
        if isinstance(index, ChunkIndex) and embedding is not None:
            raise UsageError("index is open and has its embedder; leave embedding out, or pass the folder of the index")
        self.index = index if isinstance(index, ChunkIndex) else open_index(index, _as_embedder(embedding))

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
        """Store texts as `add_documents` stores documents, with the same return value and errors."""
        return self.add_documents(_make_documents(texts, metadatas, ids))

    def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Store documents, each in place of an older one with its id. Return the ids of those that were stored.

        `ids` replace the documents' own; a document without an id is given one. A document without visible text is not
        stored and is logged; an older one of its id is removed. Raises UsageError, before anything is stored, for
        another number of ids than documents and for text that is not Unicode.
        """
        names = [name or str(uuid.uuid4()) for name in _resolve_ids(documents, ids)]
        for name, document in zip(names, documents, strict=True):
            check_unicode(name, "an id")
            check_unicode(document.page_content, f"the text of document {name!r}")
        named = dict(zip(names, documents, strict=True))
        blank = {name: "" for name, document in named.items() if not has_visible_text(document.page_content)}
        chunks = [
            Chunk(document.page_content, _SOURCE_PREFIX + name, metadata=document.metadata)
            for name, document in named.items()
            if name not in blank
        ]
        vectors = self.index.embed([chunk.text for chunk in chunks])  # all at once: embedding is the slow part
        with self.index.write_transaction():  # all documents or none
            for chunk, vector in zip(chunks, vectors, strict=True):
                self.index.add_document(chunk.source, chunk.id, [chunk], vector[None, :])
            for name in blank:
                with suppress(NotFoundError):
                    self.index.remove_document(_SOURCE_PREFIX + name)
        if blank:
            logger.warning("not stored: %s: no visible text", ", ".join(blank))
        return [name for name in names if name not in blank]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Remove documents by id, all that came in through LangChain without `ids`; unknown ids are passed over."""
        stored = set(self.index.sources())
        names = None if ids is None else _as_ids(ids)
        sources = (
            [_SOURCE_PREFIX + name for name in dict.fromkeys(names)]
            if names is not None
            else [s for s in stored if s.startswith(_SOURCE_PREFIX)]
        )
        part = next(
            (name for name in names or () if _SOURCE_PREFIX + name not in stored and self.index.get([name])), None
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
            next(self.index.chunks(_SOURCE_PREFIX + name), None) or self.index.get([name]).get(name)
            for name in _as_ids(ids)
        )
        return [_document(chunk) for chunk in found if chunk is not None]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the `k` nearest documents; see `similarity_search_with_score`."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` nearest documents with their cosines.

        `filter` is a dictionary of metadata that a document must have, or a function that is passed a document and
        returns True to keep it. `neighbours` and `order` are those of `ChunkIndex.search`.
        """
        hits = self.index.search(query, k, is_allowed=_make_predicate(filter), **kwargs)
        return [(_document(hit.chunk), hit.score) for hit in hits]

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the `k` documents nearest to a vector; see `similarity_search_with_score`."""
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, **kwargs)]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents nearest to a vector with their cosines; see `similarity_search_with_score`."""
        hits = self.index.search(embedding, k, is_allowed=_make_predicate(filter), **kwargs)
        return [(_document(hit.chunk), hit.score) for hit in hits]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return `k` of the `fetch_k` nearest documents, each unlike those before it (maximal marginal relevance).

        `lambda_mult`: 1 weighs nearness to the query alone, 0 difference from the other documents alone. `filter` is
        that of `similarity_search_with_score`.
        """
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
        """Return the documents of `max_marginal_relevance_search` for the vector of a query."""
        hits = self.index.search(embedding, fetch_k, is_allowed=_make_predicate(filter), **kwargs)
        vectors = self.index.embed([hit.chunk.text for hit in hits])  # the stored ones
        chosen = maximal_marginal_relevance(np.array(embedding, np.float32), vectors.tolist(), lambda_mult, k)
        return [_document(hits[position].chunk) for position in chosen]

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
        store = cls(open_index(path, _as_embedder(embedding), create=True))
        store.add_texts(texts, metadatas, ids=ids)
        return store


def _make_documents(
    texts: Iterable[str], metadatas: Sequence[dict[str, Any]] | None, ids: Sequence[Any] | None
) -> list[Document]:
    """The documents of `add_texts`. Raises UsageError for another number of metadatas or ids than texts."""
    if isinstance(texts, str):
        raise UsageError("texts is one string; pass a list of texts: add_texts([text])")
    texts = list(texts)
    if metadatas and len(metadatas) != len(texts):
        raise UsageError(f"metadatas has {len(metadatas)} items for {len(texts)} texts; pass one for each text")
    if ids and len(ids) != len(texts):
        raise UsageError(f"ids has {len(ids)} items for {len(texts)} texts; pass one for each text, None to make it up")
    given = zip(texts, metadatas or [{}] * len(texts), _as_ids(ids or [None] * len(texts)), strict=True)
    return [Document(text, metadata=metadata or {}, id=name or None) for text, metadata, name in given]


def _resolve_ids(documents: Sequence[Document], ids: Sequence[Any] | None) -> list[str]:
    """The id of each document, "" for none: those of `ids`, without `ids` the documents' own.

    Raises UsageError for another number of ids than documents.
    """
    if ids and len(ids) != len(documents):
        raise UsageError(
            f"ids has {len(ids)} items for {len(documents)} documents; pass one for each document, None to make it up"
        )
    return _as_ids(ids or [document.id for document in documents])


def _as_ids(ids: Sequence[Any]) -> list[str]:
    """Ids as strings: integers as their digits, None as "". Raises UsageError for one string and for other types."""
    if isinstance(ids, str):
        raise UsageError(f"ids is one string, {ids!r}; pass a list of ids: [{ids!r}]")
    other = next((name for name in ids if not isinstance(name, str | int | uuid.UUID | None)), None)
    if other is not None:
        raise UsageError(f"an id is {other!r}, a {type(other).__name__}; choose a string or an integer")
    return ["" if name is None else str(name) for name in ids]


def _make_predicate(filter: Filter | None) -> Callable[[Chunk], bool] | None:
    """What `ChunkIndex.search` takes for a `filter`. Raises UsageError for one that is no dictionary or function."""
    if filter is None:
        return None
    if isinstance(filter, Mapping):
        wanted = json.loads(json.dumps(dict(filter), default=str))  # metadata are stored in this form
        return lambda chunk: wanted.items() <= _document(chunk).metadata.items()
    if not callable(filter):
        raise UsageError(
            f"filter is {filter!r}; pass a dictionary of metadata, {{'source': 'a.txt'}}, or a function of a Document"
        )
    return lambda chunk: bool(filter(_document(chunk)))


def _document(chunk: Chunk) -> Document:
    if chunk.source.startswith(_SOURCE_PREFIX):
        return Document(chunk.text, id=chunk.source.removeprefix(_SOURCE_PREFIX), metadata=dict(chunk.metadata))
    place = {"source": chunk.source, "start": chunk.start, "end": chunk.end}
    return Document(chunk.text, id=chunk.id, metadata={**place, **chunk.metadata})


class PrecomputingVectorStore(VectorStore):
    """Any LangChain vector store, with the KV of its documents precomputed as they arrive and dropped as they go.

    `PrecomputingVectorStore(Chroma(...), llm)` goes wherever the inner store went, LangChain's indexing API included.
    Documents are indexed first: when precomputing fails they are found all the same, and prefilled when asked for.
    `llm` is a ChatBlend or BlendLLM, or an engine. KV of a text that another document still has stays. Attributes that
    only the inner store has (`save_local`, ...) are its own: a method among them that adds or deletes documents
    precomputes and deletes no KV.
    """

    def __init__(self, inner: VectorStore, llm: Any) -> None:
        self.inner = inner
        self.llm = llm

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner store."""
        if name == "inner" or name.startswith("__"):  # `inner` is missing while a copy is made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def embeddings(self) -> Embeddings | None:
        """What the inner store embeds with."""
        return self.inner.embeddings

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Index and precompute texts. Return their ids. Raises UsageError for another number of ids than texts."""
        documents = _make_documents(texts, metadatas, ids)
        return self.add_documents(documents, **kwargs, **({"ids": ids} if ids else {}))

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Index and precompute documents. Return their ids. Raises UsageError for another number of ids.

        A document that the model cannot prefill is indexed nevertheless, and logged, see `precompute_documents`.
        """
        names = _resolve_ids(documents, kwargs.get("ids"))
        given = zip(kwargs.get("ids") or names, names, strict=True)  # the inner store's ids may be integers
        replaced = self._documents([inner_id for inner_id, name in given if name])
        ids = self.inner.add_documents(documents, **kwargs)
        precompute_and_register(documents, self.llm, _names(names))
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

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """The inner store's diverse documents near a vector."""
        return self.inner.max_marginal_relevance_search_by_vector(embedding, k, fetch_k, lambda_mult, **kwargs)

    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return self.inner._similarity_search_with_relevance_scores(query, k, **kwargs)

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
        names = _names(document.id for document in _make_documents(texts, metadatas, ids))
        store = cls(inner.from_texts(texts, embedding, metadatas, **({"ids": ids} if ids else {}), **kwargs), llm)
        precompute_and_register(texts, llm, names)
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
    return [f"langchain/{name}" if name not in (None, "") else "" for name in ids]
