"""Pydantic models of requests and responses under `/v1/ragblend/documents`, and the parsers of request bodies.

Strict: a field of another type, or an unknown one, is rejected by its name. Depends on neither HTTP nor documents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator

from ragblend.catalog.sent_documents import SentDocument
from ragblend.errors import UsageError

MAX_BODY_BYTES = 32 << 20  # reading one keeps the front end from sending tokens meanwhile
_MAX_REASONS = 3  # of one refused body
_DIGEST_CHARS = 32

T = TypeVar("T")
Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]
Collection = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^@\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]
Text = Annotated[str, Field(max_length=16 << 20)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class DocumentInput(_Strict):
    """One document: a `text`, which the server cuts, or the `chunks` that prompts will contain."""

    id: Name | None = Field(None, description="Sent again, it replaces the document. Default: a digest of the texts.")
    text: Text | None = None
    chunks: Annotated[list[Text], Field(min_length=1, max_length=100_000)] | None = None
    chunk_size: Annotated[int, Field(ge=16, le=1 << 20)] | None = Field(
        None, description="Most tokens of a chunk of `text`, in the model's own. Default: 512."
    )
    version: Name | None = Field(
        None,
        description="Names these texts. With the version that the document has, `chunks` come to those it has already; "
        "default: a digest of the texts, so that a document which has not changed costs nothing.",
    )
    metadata: dict[str, Any] = Field(default_factory=dict, description="Given back as it is.")
    vectors: list[Annotated[list[FiniteFloat], Field(min_length=1, max_length=1 << 16)]] | None = Field(
        None, description="One for each chunk, by which similar chunks are found. Default: the server's own embedder's."
    )
    embedder: Name | None = Field(None, description="Names what made `vectors`: those of one name are compared.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.text is None) == (self.chunks is None):
            raise ValueError("give either `text` or `chunks`")
        if self.chunk_size is not None and self.text is None:
            raise ValueError("`chunk_size` is for `text`")
        if self.version is not None and self.chunks is None:
            raise ValueError("`version` is for `chunks`")
        if (self.vectors is None) != (self.embedder is None):
            raise ValueError("`vectors` and `embedder` belong together")
        if self.vectors is not None and (self.chunks is None or len(self.vectors) != len(self.chunks)):
            raise ValueError("`vectors` must have one vector for each of `chunks`")
        if len({len(vector) for vector in self.vectors or ()}) > 1:
            raise ValueError("all `vectors` must have the same length")
        try:
            json.dumps(self.metadata, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"`metadata` has what JSON cannot give back: {error}") from None
        return self

    def to_sent(self, collection: str) -> SentDocument:
        """Return the document as the server records it."""
        body = self.model_dump(include={"text", "chunks", "chunk_size", "vectors"}, exclude_none=True)
        texts = json.dumps([self.text, self.chunks, self.chunk_size])
        digest = hashlib.blake2b(texts.encode(), digest_size=_DIGEST_CHARS // 2).hexdigest()
        if self.vectors is not None:
            body["embedder"] = f"{self.embedder}, {len(self.vectors[0])}"  # only vectors of one length can be compared
        if self.version is not None:
            body["adds"] = True
        return SentDocument(collection, self.id or digest, self.version or digest, body, self.metadata)


class DocumentsInput(_Strict):
    """Documents of one collection."""

    collection: Collection = "default"
    documents: Annotated[list[DocumentInput], Field(min_length=1, max_length=100_000)]


class DeletionInput(_Strict):
    """Documents to delete: those of these `ids`; without `ids`, all documents of the `collection`."""

    collection: Collection = "default"
    ids: Annotated[list[Name], Field(min_length=1, max_length=100_000)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ids is None and "collection" not in self.model_fields_set:
            raise ValueError("give `ids`, or the `collection` that is to be removed")
        return self


class Accepted(BaseModel):
    """Response to a POST whose documents are recorded for ingestion. GET with this `ingestion` returns progress."""

    ingestion: str
    num_documents: int


class StoredCounts(BaseModel):
    """Numbers of chunks, of their tokens, of entries stored before and by this ingestion, and the latter's bytes."""

    num_chunks: int
    num_tokens: int
    num_known_kv: int
    num_new_kv: int
    new_kv_bytes: int


class CollectionCounts(StoredCounts):
    """Numbers of stored, pending and failed documents, and of those that are still being processed."""

    num_stored: int
    num_pending: int
    num_failed: int
    num_waiting: int


class DocumentReason(BaseModel):
    """Reason why a document is not stored, or is stored without a chunk."""

    collection: str
    id: str
    status: Literal["stored", "pending", "failed"]
    reason: str


class Summary(BaseModel):
    """Documents of a namespace, by collection. `reasons` has at most 1,000 entries.

    `batch` has the number of chunks of the namespace that the server prefills now, and the number done.
    """

    collections: dict[str, CollectionCounts]
    reasons: list[DocumentReason]
    batch: dict[Literal["num_done", "num_chunks"], int]


class DocumentStatus(StoredCounts, DocumentReason):
    """One document. `num_kv`: number of its entries in the store now, in every variant."""

    version: str
    ingestion: str
    metadata: dict[str, Any]
    num_kv: int


class Removed(BaseModel):
    """Numbers of deleted documents, and of entries that no document needs any more."""

    num_documents: int
    num_kv: int


_COLLECTION: TypeAdapter[str] = TypeAdapter(Collection)


def read_documents(body: bytes, content_type: str, collection: str | None) -> list[SentDocument]:
    """Return the documents of a POST body: one JSON object, or JSON lines with one document per line.

    `collection` is that of JSON lines; a JSON object contains its own. Raises UsageError with the position of the
    error.
    """
    if "ndjson" in content_type or "jsonl" in content_type or "json-lines" in content_type:
        named = _validated(lambda: _COLLECTION.validate_python(collection or "default"), "the collection")
        lines = [(number, line) for number, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
        if not lines:
            raise UsageError("the body is empty; send one JSON document in each line")
        read = [
            _validated(partial(DocumentInput.model_validate_json, line), f"line {number}") for number, line in lines
        ]
        documents = [document.to_sent(named) for document in read]
    else:
        if collection is not None:
            raise UsageError("`collection` stands in the body, not in the address, unless that is JSON lines")
        given = _validated(lambda: DocumentsInput.model_validate_json(body), "the body")
        documents = [document.to_sent(given.collection) for document in given.documents]
    seen: set[str] = set()
    for document in documents:
        if document.id in seen and "adds" not in document.body:
            raise UsageError(f"the id {document.id[:80]!r} stands there twice; send each document once")
        seen.add(document.id)
    return documents


def read_deletion(body: bytes) -> DeletionInput:
    """Return the parsed body of a DELETE. Raises UsageError."""
    return _validated(lambda: DeletionInput.model_validate_json(body), "the body")


def _validated(read: Callable[[], T], what: str) -> T:
    try:
        return read()
    except ValidationError as error:
        problems = error.errors(include_input=False, include_url=False, include_context=False)
        said = [": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in problems]
        more = f" (and {len(said) - _MAX_REASONS} more)" if len(said) > _MAX_REASONS else ""
        raise UsageError(f"{what} is refused: {'; '.join(said[:_MAX_REASONS])}{more}") from None
