"""Pydantic models of requests and responses under `/v1/ragblend/documents`, and the parsers of request bodies.

Parsing is strict: the error for a field that is unknown or has another type names the field. Does not depend on HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from ragblend.catalog.sent_documents import SentDocument
from ragblend.errors import UsageError
from ragblend.ingestion.documents import DocumentDetails

MAX_LISTED = 1000  # documents in a page
_MAX_REASONS = 3  # most problems in the error for one body
_DIGEST_CHARS = 32

T = TypeVar("T")
Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]
Collection = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^@\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]
Text = Annotated[str, Field(max_length=16 << 20)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
_SALT = Field(None, description="vLLM's `cache_salt`: prompts with the same salt find the documents, and no others do.")


class DocumentInput(BaseModel, strict=True, extra="forbid"):
    """One document: a `text`, which the server splits into chunks, or the `chunks` that prompts will contain."""

    id: Name | None = Field(
        None, description="A document with the id of an earlier one replaces it. Default: a digest of the texts."
    )
    text: Text | None = None
    chunks: Annotated[list[Text], Field(min_length=1, max_length=100_000)] | None = None
    chunk_size: Annotated[int, Field(ge=16, le=1 << 20)] | None = Field(
        None, description="Most tokens of a chunk of `text`, by the model's tokenizer. Default: 512."
    )
    version: Name | None = Field(
        None,
        description="Version of the document. With the document's current version, `chunks` are added to its chunks; "
        "another one replaces them. Default: a digest of the texts, so that an unchanged document is not stored again.",
    )
    metadata: dict[str, Any] = Field(default_factory=dict, description="Returned unchanged with the document.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.text is None) == (self.chunks is None):
            raise ValueError("give either `text` or `chunks`")
        if self.chunk_size is not None and self.text is None:
            raise ValueError("`chunk_size` is for `text`")
        if self.version is not None and self.chunks is None:
            raise ValueError("`version` is for `chunks`")
        try:
            json.dumps(self.metadata, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"`metadata` contains a value that JSON does not have: {error}") from None
        return self

    def to_sent_document(self, collection: str) -> SentDocument:
        """Return the document as the server records it."""
        body = self.model_dump(include={"text", "chunks", "chunk_size"}, exclude_none=True)
        texts = json.dumps([self.text, self.chunks, self.chunk_size])
        digest = hashlib.blake2b(texts.encode(), digest_size=_DIGEST_CHARS // 2).hexdigest()
        if self.version is not None:
            body["adds"] = True
        return SentDocument(collection, self.id or digest, self.version or digest, body, self.metadata)


class DocumentsInput(BaseModel, strict=True, extra="forbid"):
    """Documents of one collection."""

    collection: Collection = "default"
    cache_salt: CacheSalt | None = _SALT
    documents: Annotated[list[DocumentInput], Field(min_length=1, max_length=100_000)]


class DeletionInput(BaseModel, strict=True, extra="forbid"):
    """Documents to delete: the collection's documents with these `ids`; without `ids`, all of the `collection`.

    Only documents that were sent with the same `cache_salt` are deleted; without one, those without.
    """

    collection: Collection = "default"
    cache_salt: CacheSalt | None = _SALT
    ids: Annotated[list[Name], Field(min_length=1, max_length=100_000)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ids is None and "collection" not in self.model_fields_set:
            raise ValueError("give `ids`, or the `collection` to remove")
        return self


class AcceptedDocuments(BaseModel):
    """Response to a POST whose documents were recorded. GET with this `ingestion` returns their progress."""

    ingestion: str
    num_documents: int


class StoredCounts(BaseModel):
    """Numbers of stored chunks, of their tokens, and of their entries in the store.

    `num_known_kv`: entries that were stored before the ingestion. `num_new_kv`: entries that the ingestion stored, with
    `new_kv_bytes` bytes in all.
    """

    num_chunks: int
    num_tokens: int
    num_known_kv: int
    num_new_kv: int
    new_kv_bytes: int


class DocumentCounts(StoredCounts):
    """Numbers of stored, pending and failed documents.

    `num_waiting`: documents that wait to be stored. They count as pending, or as stored if they were sent again with
    the version that is stored.
    """

    num_stored: int
    num_pending: int
    num_failed: int
    num_waiting: int


class DocumentReason(BaseModel):
    """Status of a document. `reason`: why it failed, has no chunk, is not in the remote tier, or has a chunk too short
    for prompts to reuse it; "" for none of these."""

    collection: str
    id: str
    status: Literal["stored", "pending", "failed"]
    reason: str


class IngestionSummary(BaseModel):
    """Documents of a namespace, by collection. `reasons`: see DocumentReason, of at most 1,000 documents.

    `batch`: progress of the documents that are being stored now: "num_done" of "num_chunks" chunks are prefilled. Both
    are 0 if no documents of this namespace are being stored. `documents`: with `limit`, a page of all documents that
    the store has, sorted by collection and id. `next`: the parameter `after` of the next page; "" on the last page.
    """

    collections: dict[str, DocumentCounts]
    reasons: list[DocumentReason]
    batch: dict[Literal["num_done", "num_chunks"], int]
    documents: list[DocumentDetails]
    next: str


class DocumentStatus(StoredCounts, DocumentReason):
    """Status of one document. `num_kv`: number of its entries in the store at present, in all variants."""

    version: str
    ingestion: str
    metadata: dict[str, Any]
    num_kv: int


class RemovalCounts(BaseModel):
    """Numbers of deleted documents, and of deleted entries, which no other document needs."""

    num_documents: int
    num_kv: int


_COLLECTION: TypeAdapter[str] = TypeAdapter(Collection)
_CURSOR: TypeAdapter[tuple[str, str]] = TypeAdapter(tuple[str, str])


def read_documents(body: bytes, content_type: str, collection: str | None) -> tuple[list[SentDocument], str | None]:
    """Return the documents of a POST body and their `cache_salt`. The body is a JSON object, or a document per line.

    `collection`: the collection of documents in JSON lines; None means "default". A JSON object names the collection
    itself, so UsageError is raised if `collection` is given, too. UsageError is also raised for an invalid body, with
    the position of the error, and if two documents have the same id and the second one has no `version`.
    """
    if "ndjson" in content_type or "jsonl" in content_type or "json-lines" in content_type:
        named = _validated(lambda: _COLLECTION.validate_python(collection or "default"), "the collection")
        lines = [(number, line) for number, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
        if not lines:
            raise UsageError("the body is empty; send one JSON document in each line")
        read = [
            _validated(partial(DocumentInput.model_validate_json, line), f"line {number}") for number, line in lines
        ]
        documents, cache_salt = [document.to_sent_document(named) for document in read], None
    else:
        if collection is not None:
            raise UsageError("?collection= is only for JSON lines; put `collection` into the JSON object")
        parsed = _validated(lambda: DocumentsInput.model_validate_json(body), "the body")
        documents = [document.to_sent_document(parsed.collection) for document in parsed.documents]
        cache_salt = parsed.cache_salt
    seen: set[str] = set()
    for document in documents:
        if document.id in seen and "adds" not in document.body:
            raise UsageError(f"the id {document.id[:80]!r} is given twice; send each document once")
        seen.add(document.id)
    return documents, cache_salt


def read_cursor(after: str) -> tuple[str, str]:
    """Return the collection and the id behind which a page begins. Raises UsageError for a text that no page named."""
    collection, document_id = _validated(lambda: _CURSOR.validate_json(after or '["", ""]'), "`after`")
    return collection, document_id


def read_deletion(body: bytes) -> DeletionInput:
    """Return the parsed body of a DELETE. Raises UsageError."""
    return _validated(lambda: DeletionInput.model_validate_json(body), "the body")


def _validated(read: Callable[[], T], what: str) -> T:
    try:
        return read()
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        reasons = [": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in problems]
        more = f" (and {len(reasons) - _MAX_REASONS} more)" if len(reasons) > _MAX_REASONS else ""
        raise UsageError(f"{what} is invalid: {'; '.join(reasons[:_MAX_REASONS])}{more}") from None
