"""`IndexRows`: the documents of a folder's index in a ledger: chunks with vectors, their files, and the index's facts.

A document is added, replaced or removed in one transaction, so a reader never sees half of one. The texts that it loses
are recorded in the same transaction, so that their KV is deleted even if the process is killed first. Does not depend
on search, embedders or KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, Select, bindparam, delete, func, select, update

from ragblend.catalog.documents import DocumentRows, find_number, insert_document
from ragblend.catalog.schema import (
    CHUNKS,
    DOCUMENTS,
    FACTS,
    HAS_VECTOR,
    IN_DOCUMENT,
    INDEX_MARK,
    IS_INDEXED,
    LOST_TEXTS,
    TEXTS,
    DocumentKey,
    equals_parameters,
    find_existing,
    insert_rows,
    is_in_values,
    split_into_batches,
    text_key,
)
from ragblend.corpus.metadata import metadata_to_json
from ragblend.errors import CorruptError, NotFoundError, StoreMismatchError
from ragblend.prompt.types import Chunk

LANGCHAIN_SOURCE = "langchain/"
"""Beginning of the source of a document that was added to the index through LangChain. Its id follows."""
_CHUNK_ID = re.compile("[0-9a-f]{16}")
_CHUNK_ROWS = (
    select(CHUNKS, DOCUMENTS.c.id.label("source"), (CHUNKS.c.before + TEXTS.c.text + CHUNKS.c.after).label("text"))
    .join(DOCUMENTS, IN_DOCUMENT)
    .join(TEXTS, TEXTS.c.key == CHUNKS.c.key)
)
_DOCUMENTS = (
    select(DOCUMENTS.c.id, DOCUMENTS.c.source, DOCUMENTS.c.version).where(IS_INDEXED).order_by(DOCUMENTS.c.number)
)
_OF_SOURCE = _CHUNK_ROWS.where(IS_INDEXED, DOCUMENTS.c.id == bindparam("source")).order_by(CHUNKS.c.ordinal)
_WITH_IDS = _CHUNK_ROWS.where(is_in_values(CHUNKS.c.id))
_AROUND = _CHUNK_ROWS.where(
    CHUNKS.c.document == bindparam("document"), CHUNKS.c.ordinal.between(bindparam("first"), bindparam("last"))
).order_by(CHUNKS.c.ordinal)
_IDS_SINCE = select(CHUNKS.c.id, CHUNKS.c.document, CHUNKS.c.ordinal).where(
    HAS_VECTOR, CHUNKS.c.generation > bindparam("generation")
)
_A_CHUNK_OF_EACH = (
    select(CHUNKS.c.key, func.min(CHUNKS.c.id).label("id"))
    .where(HAS_VECTOR, is_in_values(CHUNKS.c.key))
    .group_by(CHUNKS.c.key)
)
_KNOWN_SOURCES = select(DOCUMENTS.c.id).where(IS_INDEXED, is_in_values(DOCUMENTS.c.id))
_OF_FILE = IS_INDEXED & equals_parameters(DOCUMENTS, "source")
_FILES = (  # a new document of a file has no version, and then its file is read again
    select(DOCUMENTS.c.source, func.min(DOCUMENTS.c.file_version), func.max(DOCUMENTS.c.top))
    .where(IS_INDEXED)
    .group_by(DOCUMENTS.c.source)
    .having(func.max(DOCUMENTS.c.top) != "")
    .order_by(DOCUMENTS.c.source)
)
_A_DOCUMENT_OF_FILE = select(DOCUMENTS.c.number).where(_OF_FILE).order_by(DOCUMENTS.c.number).limit(1)
_READ_AGAIN = (
    update(DOCUMENTS).where(DOCUMENTS.c.number == _A_DOCUMENT_OF_FILE.scalar_subquery()).values(file_version="")
)


class IngestedFile(NamedTuple):
    """The record of an ingested file. If the file's current version differs from `version`, the file is read again."""

    path: str
    version: str  # digest of the bytes, and the versions of reader and chunker; "": read the file again
    top: str  # the path given to the ingestion: this file, or a folder above it


class LostTexts(NamedTuple):
    """Texts that documents of the index have lost, and that no chunk of the index has any more.

    Their KV has to be deleted.
    """

    texts: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # documents that were removed
    source_of: Mapping[str, str] = MappingProxyType({})  # lost text -> the first document that had it
    last_number: int = 0  # `clear_lost_texts` removes the records up to this row number; 0: there are none


class IndexRows(DocumentRows):
    """The part of `Ledger` with the documents of a folder's index.

    After the catalogue's file was replaced, searches and changes of the index raise StoreMismatchError.
    """

    def __init__(self, place: str | Path | None = None) -> None:
        super().__init__(place)
        self._first_identity = self.identity

    # --- facts of the index ---

    def create_index(self, facts: Mapping[str, object]) -> None:
        """Create the index with these facts (embedder, dimension, tokenizer, ...). An existing index is not changed."""
        with self.write_transaction() as connection:
            if not self.has_index():
                self._write_fact(connection, "index", _facts_as_text(facts))
                self._write_fact(connection, "generation", "0")

    def has_index(self) -> bool:
        """Return True if the catalogue has an index. Raises CorruptError if it has documents but no facts."""
        has_facts = self._read_fact("index") is not None
        if not has_facts and self.num_documents:
            raise self.damage_error("it has documents, but the facts of the index are missing")
        return has_facts

    def index_facts(self) -> dict[str, str]:
        """Return the facts of the index (embedder, dimension, tokenizer, ...), as texts by name."""
        try:
            facts: dict[str, str] = json.loads(self._index_fact("index"))
        except ValueError as error:
            raise self.damage_error(f"the facts of the index are damaged ({error})") from error
        return facts

    def change_index_facts(self, **changes: object) -> None:
        """Change or add facts of the index."""
        with self.write_transaction() as connection:
            self._write_fact(connection, "index", _facts_as_text(self.index_facts() | changes))

    @property
    def collection(self) -> str:
        """Name under which the ledger of another store records the texts of this index."""
        return f"{INDEX_MARK}{self.index_facts()['id']}"

    def generation(self) -> int:
        """Return the generation: the number of changes to documents since the index was created. The row of a chunk has
        the generation in which the chunk was written."""
        return int(self._index_fact("generation"))

    def _index_fact(self, name: str) -> str:
        value = self._read_fact(name) or ""
        if self.identity != self._first_identity:
            raise StoreMismatchError(
                f"{self.name} was deleted or replaced after this index was opened; open the index again"
            )
        if not value or (name == "generation" and not value.isdecimal()):
            raise self.damage_error(f"the row {name!r} of the index's facts is missing or damaged")
        return value

    def _next_generation(self, connection: Connection) -> int:
        generation = self.generation() + 1
        self._write_fact(connection, "generation", str(generation))
        return generation

    # --- reading documents of the index ---

    @property
    def num_documents(self) -> int:
        """Number of documents of the index, including those without chunks."""
        return int(self._rows(select(func.count()).select_from(DOCUMENTS).where(IS_INDEXED))[0][0])

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the index."""
        return int(self._rows(select(func.count()).select_from(CHUNKS).where(HAS_VECTOR))[0][0])

    def sources(self) -> list[str]:
        """Return the sources of all documents of the index, in the order of their addition."""
        return [row.id for row in self._rows(_DOCUMENTS)]

    def content_hashes_by_file(self) -> dict[str, dict[str, str]]:
        """Return {file: {source: content hash}} of all documents, in the order in which they were added.

        Documents that were added without a file are under the file "".
        """
        by_file: dict[str, dict[str, str]] = {}
        for row in self._rows(_DOCUMENTS):
            by_file.setdefault(row.source, {})[row.id] = row.version
        return by_file

    def files(self) -> dict[str, IngestedFile]:
        """Return the records of ingested files, by path."""
        return {row[0]: IngestedFile._make(row) for row in self._rows(_FILES)}

    def chunks(self, source: str | None = None) -> Iterator[Chunk]:
        """Yield all chunks, or those of one document, in reading order.

        Each document is read in a separate transaction, so the index may change between two documents.
        """
        for name in self.sources() if source is None else [source]:
            yield from (as_chunk(row) for row in self._intact_rows(_OF_SOURCE, source=name))

    def get(self, ids: Iterable[str]) -> dict[str, Chunk]:
        """Return the chunks with these ids, in the order of `ids`. Unknown ids are left out."""
        row_ids = {chunk_id: row_id(chunk_id) for chunk_id in ids if _CHUNK_ID.fullmatch(chunk_id)}
        chunk_of = {row.id: as_chunk(row) for row in self._rows_with_ids([*row_ids.values()])}
        return {chunk_id: chunk_of[number] for chunk_id, number in row_ids.items() if number in chunk_of}

    def stored_vectors(self, texts: Iterable[str]) -> dict[bytes, bytes]:
        """Return the stored vectors of `texts`, as little-endian float32, by text key.

        The key of a text is `text_key(text.strip())`. Only one chunk of each text is read. A text without chunks, or
        whose chunk is damaged, is left out.
        """
        return {row.key: row.vector for row in self._rows_with_texts(texts)}

    def find_chunks(self, texts: Iterable[str]) -> dict[str, Chunk]:
        """Return for each of `texts` a chunk with that text, by the text without white space at its ends.

        A text without chunks, or whose chunk is damaged, is left out.
        """
        return {row.text.strip(): as_chunk(row) for row in self._rows_with_texts(texts)}

    def _rows_with_texts(self, texts: Iterable[str]) -> list[Row[Any]]:
        """Return the row of one chunk for each text. A text may be in every document, so only one is read.

        A damaged row is left out.
        """
        intact: list[Row[Any]] = []
        with self.read_transaction() as connection:
            for some in split_into_batches(dict.fromkeys(text_key(text.strip()) for text in texts)):
                ids = [row.id for row in connection.execute(_A_CHUNK_OF_EACH, {"values": some})]
                intact += filter(_is_intact, self._rows(_WITH_IDS, values=ids))
        return intact

    def row_ids(self, newer_than: int = -1) -> NDArray[np.int64]:
        """Return the row ids [n] of the chunks written after generation `newer_than`, in document order."""
        rows = self._rows(_IDS_SINCE, generation=newer_than)  # SQLite would read all chunks to sort them
        ids, documents, ordinals = np.array([tuple(row) for row in rows], np.int64).reshape(-1, 3).T
        return ids[np.lexsort((ordinals, documents))]

    def rows(self, ids: Sequence[int]) -> Sequence[Row[Any]]:
        """Return the chunk rows with these row ids, in no fixed order. Raises CorruptError for lost or damaged rows."""
        rows = self._rows_with_ids(ids)
        if len(rows) < len(ids):
            raise self.damage_error("it lists chunks that are missing")
        return rows

    def rows_around(self, row: Row[Any], distance: int) -> Sequence[Row[Any]]:
        """Return a chunk's row and up to `distance` rows of its document on each side, in document order."""
        span = {"first": row.ordinal - distance, "last": row.ordinal + distance}
        return self._intact_rows(_AROUND, document=row.document, **span)

    def _rows_with_ids(self, ids: Sequence[int]) -> Sequence[Row[Any]]:
        return [row for some in split_into_batches(ids) for row in self._intact_rows(_WITH_IDS, values=some)]

    def _intact_rows(self, query: Select[Any], **values: object) -> Sequence[Row[Any]]:
        rows = self._rows(query, **values)
        damaged = next((row for row in rows if not _is_intact(row)), None)
        if damaged is not None:
            what = f"the id of chunk {damaged.id + 2**63:016x} of {damaged.source} does not match its text"
            raise self.damage_error(what)
        return rows

    # --- texts whose entries are to be deleted ---

    def lost_texts(self) -> LostTexts:
        """Return the texts that documents of the index have lost, and that no chunk of the index has any more.

        `delete_orphaned_kv` deletes the KV of these texts.
        """
        with self.read_transaction() as connection:
            rows = self._rows(select(LOST_TEXTS).order_by(LOST_TEXTS.c.number))
            source_of = {row.text: row.source for row in reversed(rows)}
            key_of = {text: text_key(text.strip()) for text in source_of}
            kept = find_existing(connection, _A_CHUNK_OF_EACH, set(key_of.values()))
            sources = dict.fromkeys(row.source for row in rows)
            present = find_existing(connection, _KNOWN_SOURCES, sources)
            return LostTexts(
                tuple(text for text, key in key_of.items() if key not in kept),
                tuple(source for source in sources if source not in present),
                source_of,
                max((row.number for row in rows), default=0),
            )

    def clear_lost_texts(self, lost: LostTexts) -> None:
        """Delete the records of `lost` texts, because their entries are scheduled for deletion."""
        with self.write_transaction() as connection:
            connection.execute(delete(LOST_TEXTS).where(LOST_TEXTS.c.number <= lost.last_number))

    def _record_lost_texts(self, connection: Connection, source: str, text_of: Mapping[bytes, str]) -> None:
        """Record the texts that a document has lost, by their keys, and delete those that no document has."""
        # The table never reuses a number, so a reader can delete the rows it has read, and no later ones.
        rows = ({"source": source, "text": text} for text in text_of.values() if text)  # a blank one has no entry
        insert_rows(connection, LOST_TEXTS, rows)
        self._delete_texts_without_document(connection, text_of)

    # --- writing ---

    def _write_document(
        self, source: str, content_hash: str, items: Mapping[str, tuple[Chunk, NDArray[np.float32]]], file: str = ""
    ) -> None:
        """Store a document in place of its older version. `items`: chunk id -> (chunk, vector [dim])."""
        document = DocumentKey(INDEX_MARK, source)
        facts = {"source": file, "version": content_hash}
        with self.write_transaction() as connection:
            generation = self._next_generation(connection)
            older_rows = self._rows(_OF_SOURCE, source=source)
            number = find_number(connection, document)
            if number is None:
                number = insert_document(connection, {**document._asdict(), **facts})
            else:
                connection.execute(update(DOCUMENTS).where(DOCUMENTS.c.number == number).values(**facts))
                connection.execute(delete(CHUNKS).where(CHUNKS.c.document == number))
            rows = [_chunk_values(*item, number, place, generation) for place, item in enumerate(items.values())]
            insert_rows(connection, CHUNKS, rows)
            text_of = {text_key(text): text for chunk, _ in items.values() for text in [chunk.text.strip()]}
            self._insert_texts(connection, text_of)
            lost = {row.key: row.text for row in older_rows if row.key not in text_of}
            self._record_lost_texts(connection, source, lost)

    def remove_document(self, source: str) -> int:
        """Remove a document of the index. Return the number of its chunks. Raises NotFoundError for an unknown one."""
        with self.write_transaction() as connection:
            rows = self._rows(_OF_SOURCE, source=source)
            of_source = (IS_INDEXED, DOCUMENTS.c.id == source)
            document = connection.execute(select(DOCUMENTS.c.number, DOCUMENTS.c.source).where(*of_source)).first()
            if document is None:
                raise NotFoundError(f"{self.name} has no document {source!r}; list them: ragblend documents")
            self._next_generation(connection)
            connection.execute(delete(DOCUMENTS).where(DOCUMENTS.c.number == document.number))
            connection.execute(delete(CHUNKS).where(CHUNKS.c.document == document.number))
            if document.source:
                connection.execute(_READ_AGAIN, {"b_source": document.source})
            self._record_lost_texts(connection, source, {row.key: row.text for row in rows})
        return len(rows)

    def record_files(self, records: Iterable[IngestedFile]) -> None:
        """Record ingested files, each in place of its older record. A file without documents is not recorded."""
        if rows := [{"b_source": path, "new_version": version, "new_top": top} for path, version, top in records]:
            values: dict[str, Any] = {"file_version": bindparam("new_version"), "top": bindparam("new_top")}
            with self.write_transaction() as connection:
                connection.execute(update(DOCUMENTS).where(_OF_FILE).values(**values), rows)

    def clear(self) -> None:
        """Remove the index: all documents and facts. Stored KV stays."""
        with self.write_transaction() as connection:
            keys = connection.execute(select(CHUNKS.c.key).where(HAS_VECTOR).distinct()).scalars().all()
            connection.execute(delete(CHUNKS).where(HAS_VECTOR))
            self._delete_texts_without_document(connection, keys)
            connection.execute(delete(DOCUMENTS).where(IS_INDEXED))
            connection.execute(delete(LOST_TEXTS))
            connection.execute(delete(FACTS).where(FACTS.c.name.in_(("index", "generation"))))


def row_id(chunk_id: str) -> int:
    """Return the row id of a chunk: its hex id as a signed 64-bit integer. Row ids are ordered like hex ids."""
    return int(chunk_id, 16) - 2**63


def as_chunk(row: Row[Any]) -> Chunk:
    """Return the chunk of a row, which has the columns of CHUNKS, its `text` and the document's `source`.

    Raises CorruptError for metadata that are no JSON.
    """
    try:
        metadata = json.loads(row.metadata)
    except ValueError as error:
        raise CorruptError(
            f"the metadata of a chunk of {row.source} are damaged ({error}). Repair them: ragblend verify --repair"
        ) from error
    return Chunk(row.text, row.source, row.start, row.end, metadata)


def _is_intact(row: Row[Any]) -> bool:
    """Return True if the row's id is the `Chunk.id` for its text, source and start."""
    return bool(row_id(Chunk(row.text, row.source, row.start).id) == row.id)


def _chunk_values(
    chunk: Chunk, vector: NDArray[np.float32], document: int, ordinal: int, generation: int
) -> dict[str, object]:
    """Return the values of a chunk's row.

    `document`: number of the document's row. `ordinal`: the chunk's position in the document, from 0. Raises UsageError
    for metadata that cannot be stored.
    """
    text = chunk.text.strip()
    start = chunk.text.find(text)
    return {
        "id": row_id(chunk.id),
        "document": document,
        "ordinal": ordinal,
        "start": chunk.start,
        "end": chunk.end,
        "before": chunk.text[:start],
        "after": chunk.text[start + len(text) :],
        "metadata": metadata_to_json(chunk.metadata, f"the metadata of {chunk.source!r}"),
        "vector": vector.astype("<f4").tobytes(),
        "generation": generation,
        "key": text_key(text),
    }


def _facts_as_text(facts: Mapping[str, object]) -> str:
    return json.dumps({key: str(value) for key, value in facts.items()})
