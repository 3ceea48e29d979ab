"""LangChain documents of a vector store: their ids, filters by metadata, and documents made from chunks.

Depends on langchain-core and chunks, not on stores.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from ragblend.catalog.indexed_documents import LANGCHAIN_SOURCE
from ragblend.corpus.metadata import metadata_to_json
from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk

Filter = Mapping[str, Any] | Callable[[Document], bool]
"""Chooses documents: metadata that they must have, or a function that returns True for those to keep."""


def make_documents(texts: Iterable[str], metadatas: Sequence[dict[str, Any]] | None) -> list[Document]:
    """Return the texts with their metadata as LangChain documents.

    `metadatas`: None or [] gives every document empty metadata. Raises UsageError if there are not as many `metadatas`
    as `texts`, and if `texts` is one string.
    """
    if isinstance(texts, str):
        raise UsageError("texts is one string; pass a list of texts: add_texts([text])")
    texts = list(texts)
    if metadatas and len(metadatas) != len(texts):
        raise UsageError(f"metadatas has {len(metadatas)} items for {len(texts)} texts; pass one for each text")
    pairs = zip(texts, metadatas or [{}] * len(texts), strict=True)
    return [Document(text, metadata=metadata or {}) for text, metadata in pairs]


def given_or_own_ids(documents: Sequence[Document], ids: Sequence[Any] | None) -> list[str]:
    """Return an id for each document: those in `ids`, or the documents' own ids if `ids` is None or [].

    A document without an id gets "". Raises UsageError if there are not as many `ids` as documents.
    """
    names = normalize_ids(ids or [document.id for document in documents])
    if len(names) != len(documents):
        raise UsageError(
            f"ids has {len(names)} items for {len(documents)} documents; pass one for each document, None for a new id"
        )
    return names


def normalize_ids(ids: Sequence[Any]) -> list[str]:
    """Return ids as strings: integers as their digits, UUIDs in their usual form, None as "".

    Raises UsageError for ids of other types, and if `ids` is one string.
    """
    if isinstance(ids, str):
        raise UsageError(f"ids is one string, {ids!r}; pass a list of ids: [{ids!r}]")
    other = next((name for name in ids if not isinstance(name, str | int | uuid.UUID | None)), None)
    if other is not None:
        raise UsageError(f"an id is {other!r}, a {type(other).__name__}; choose a string or an integer")
    return ["" if name is None else str(name) for name in ids]


def make_predicate(filter: Filter | None) -> Callable[[Chunk], bool] | None:
    """Return a predicate of chunks for the argument `is_allowed` of `ChunkIndex.search`; None if `filter` is None.

    `filter` is a dictionary of metadata that the chunk must have, or a function of a LangChain Document. Raises
    UsageError for any other type, and for a dictionary of values that no metadata have (see `metadata_to_json`).
    """
    if filter is None:
        return None
    if isinstance(filter, Mapping):
        wanted = json.loads(metadata_to_json(filter, "the filter"))  # metadata are stored in this form
        return lambda chunk: wanted.items() <= as_document(chunk).metadata.items()
    if not callable(filter):
        raise UsageError(
            f"filter is {filter!r}; pass a dictionary of metadata, {{'source': 'a.txt'}}, or a function of a Document"
        )
    return lambda chunk: bool(filter(as_document(chunk)))


def as_document(chunk: Chunk) -> Document:
    """Return a chunk of an index as a LangChain document."""
    if chunk.source.startswith(LANGCHAIN_SOURCE):
        return Document(chunk.text, id=chunk.source.removeprefix(LANGCHAIN_SOURCE), metadata=dict(chunk.metadata))
    place = {"source": chunk.source, "start": chunk.start, "end": chunk.end}
    return Document(chunk.text, id=chunk.id, metadata={**place, **chunk.metadata})
