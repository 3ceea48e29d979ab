"""The documents of an index in the catalogue: chunks with vectors, the files they came from, and texts that they lost.

A document is added, replaced or removed in one transaction, so a reader never sees half of one. The texts that it loses
are recorded in the same transaction, so that their KV is deleted even if the process is killed first. Does not depend
on search, embedders or KV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, Select, bindparam, delete, exists, func, insert, select, update

from ragblend.catalog.index_rows import (
    IngestedFile,
    OrphanedTexts,
    as_chunk,
    chunk_values,
    is_intact_chunk,
    row_id,
)
from ragblend.catalog.registry import ChunkRegistry
from ragblend.catalog.schema import (
    CHUNKS,
    DELETIONS,
    DOCUMENTS,
    FACTS,
    FILES,
    HAS_VECTOR,
    INDEX_MARK,
    IS_INDEXED,
    TEXTS,
    DocumentKey,
    equals_parameters,
    find_existing,
    insert_rows,
    is_in_values,
    split_into_batches,
    text_key,
)
from ragblend.errors import NotFoundError, StoreMismatchError
from ragblend.prompt.types import Chunk

_CHUNK_ID = re.compile("[0-9a-f]{16}")
_CHUNK_ROWS = (
    select(CHUNKS, DOCUMENTS.c.id.label("source"), (CHUNKS.c.before + TEXTS.c.text + CHUNKS.c.after).label("text"))
    .join(DOCUMENTS, DOCUMENTS.c.number == CHUNKS.c.document)
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
_IS_TEXT = DELETIONS.c.text != ""
_DELETE_EMPTY_FILE = delete(FILES).where(
    equals_parameters(FILES, "path"),
    ~exists(select(DOCUMENTS.c.number).where(IS_INDEXED, DOCUMENTS.c.source == FILES.c.path)),
)


class IndexedDocuments:
    """The documents of an index, in the catalogue of `registry`.

    Inside `read_transaction` or `write_transaction`, the methods of this object and of `registry` use that transaction.
    Outside of both, each method has a separate transaction. Methods raise the errors of `Catalog`. After the
    catalogue's file was replaced, searches and changes raise StoreMismatchError.
    """

    def __init__(self, registry: ChunkRegistry) -> None:
        self.registry = registry
        self._rows, self._write = registry._rows, registry._write
        self._identity = registry.identity

    def close(self) -> None:
        """Close the catalogue. The file `vectors.faiss` is not written (see `ChunkIndex.save`)."""
        self.registry.close()

    def read_transaction(self) -> AbstractContextManager[Connection]:
        """Read one state of the catalogue inside the block. Other processes may write at the same time."""
        return self.registry._transaction("DEFERRED")

    def write_transaction(self) -> AbstractContextManager[Connection]:
        """Apply all changes of the block, or none. No other thread or process can change the catalogue inside it."""
        return self._write()

    # --- facts of the index ---

    def create(self, facts: Mapping[str, object]) -> None:
        """Create the index with these facts (embedder, dimension, tokenizer, ...). An existing index is not changed."""
        with self._write():
            if not self.exists():
                self._put_fact("index", _facts_as_text(facts))
                self._put_fact("generation", "0")

    def exists(self) -> bool:
        """Return True if the catalogue has an index. Raises CorruptError if it has documents but no facts."""
        has_facts = bool(self._rows(select(FACTS.c.name).where(FACTS.c.name == "index")))
        if not has_facts and self.num_documents:
            raise self.registry.damage_error("it has documents, but the facts of the index are missing")
        return has_facts

    def read_metadata(self) -> dict[str, str]:
        """Return the facts of the index (embedder, dimension, tokenizer, ...), as texts by name."""
        try:
            facts: dict[str, str] = json.loads(self._fact("index"))
        except ValueError as error:
            raise self.registry.damage_error(f"the facts of the index are damaged ({error})") from error
        return facts

    @property
    def collection(self) -> str:
        """Name under which a store's registry records the texts of this index."""
        return f"{INDEX_MARK}{self.read_metadata()['id']}"

    def generation(self) -> int:
        """Return the generation: the number of changes to documents since the index was created. The row of a chunk has
        the generation in which the chunk was written."""
        return int(self._fact("generation"))

    def write_metadata(self, **changes: object) -> None:
        """Change or add facts of the index."""
        with self._write():
            self._put_fact("index", _facts_as_text(self.read_metadata() | changes))

    # --- reading ---

    @property
    def num_documents(self) -> int:
        """Number of documents, including those without chunks."""
        return int(self._rows(select(func.count()).select_from(DOCUMENTS).where(IS_INDEXED))[0][0])

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return int(self._rows(select(func.count()).select_from(CHUNKS).where(HAS_VECTOR))[0][0])

    def sources(self) -> list[str]:
        """Return the sources of all documents, in the order of their addition."""
        return [row.id for row in self._rows(_DOCUMENTS)]

    def content_hashes_by_file(self) -> dict[str, dict[str, str]]:
        """Return {file: {source: content hash}} of all documents, in the order in which they were added.

        Documents that were added without a file are under the file "".
        """
        found: dict[str, dict[str, str]] = {}
        for row in self._rows(_DOCUMENTS):
            found.setdefault(row.source, {})[row.id] = row.version
        return found

    def files(self) -> dict[str, IngestedFile]:
        """Return the records of ingested files, by path."""
        return {row.path: IngestedFile._make(row) for row in self._rows(select(FILES).order_by(FILES.c.path))}

    def chunks(self, source: str | None = None) -> Iterator[Chunk]:
        """Yield all chunks, or those of one document, in reading order.

        Each document is read in a separate transaction, so the index may change between two documents.
        """
        for name in self.sources() if source is None else [source]:
            yield from (as_chunk(row) for row in self._intact_rows(_OF_SOURCE, source=name))

    def get(self, ids: Iterable[str]) -> dict[str, Chunk]:
        """Return the chunks with these ids, in the order of `ids`. Unknown ids are left out."""
        wanted = [chunk_id for chunk_id in dict.fromkeys(ids) if _CHUNK_ID.fullmatch(chunk_id)]
        found = {row.id: as_chunk(row) for row in self._rows_with_ids([row_id(chunk_id) for chunk_id in wanted])}
        return {chunk_id: found[row_id(chunk_id)] for chunk_id in wanted if row_id(chunk_id) in found}

    def texts(self) -> Iterator[str]:
        """Yield the text of every chunk, with duplicates."""
        return (chunk.text for chunk in self.chunks())

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
        found: list[Row[Any]] = []
        with self.read_transaction() as connection:
            for some in split_into_batches(dict.fromkeys(text_key(text.strip()) for text in texts)):
                ids = [row.id for row in connection.execute(_A_CHUNK_OF_EACH, {"values": some})]
                found += filter(is_intact_chunk, self._rows(_WITH_IDS, values=ids))
        return found

    def row_ids(self, newer_than: int = -1) -> NDArray[np.int64]:
        """Return the row ids [n] of the chunks written after generation `newer_than`, in document order."""
        rows = self._rows(_IDS_SINCE, generation=newer_than)  # SQLite would read all chunks to sort them
        ids, documents, ordinals = np.array([tuple(row) for row in rows], np.int64).reshape(-1, 3).T
        return ids[np.lexsort((ordinals, documents))]

    def rows(self, ids: Sequence[int]) -> Sequence[Row[Any]]:
        """Return the chunk rows with these row ids, in no fixed order. Raises CorruptError for lost or damaged rows."""
        found = self._rows_with_ids(ids)
        if len(found) < len(ids):
            raise self.registry.damage_error("it lists chunks that are missing")
        return found

    def rows_around(self, row: Row[Any], distance: int) -> Sequence[Row[Any]]:
        """Return a chunk's row and up to `distance` rows of its document on each side, in document order."""
        span = {"first": row.ordinal - distance, "last": row.ordinal + distance}
        return self._intact_rows(_AROUND, document=row.document, **span)

    # --- texts whose entries are to be deleted ---

    def orphaned_texts(self) -> OrphanedTexts:
        """Return the texts that were removed from documents of the index and that no chunk has any more.

        `delete_orphaned_kv` deletes the KV of these texts.
        """
        with self.read_transaction() as connection:
            rows = self._rows(select(DELETIONS).where(_IS_TEXT).order_by(DELETIONS.c.number))
            source_of = {row.text: row.source for row in reversed(rows)}
            key_of = {text: text_key(text.strip()) for text in source_of}
            kept = set[bytes]()
            for some in split_into_batches(set(key_of.values())):
                kept.update(row.key for row in connection.execute(_A_CHUNK_OF_EACH, {"values": some}))
            sources = dict.fromkeys(row.source for row in rows)
            there = find_existing(connection, _KNOWN_SOURCES, sources)
            return OrphanedTexts(
                tuple(text for text, key in key_of.items() if key not in kept),
                tuple(source for source in sources if source not in there),
                source_of,
                max((row.number for row in rows), default=0),
            )

    def clear_orphaned_texts(self, orphaned: OrphanedTexts) -> None:
        """Delete the records of the `orphaned` texts, because their entries are scheduled for deletion."""
        with self._write() as connection:
            connection.execute(delete(DELETIONS).where(_IS_TEXT, DELETIONS.c.number <= orphaned.last_number))

    # --- writing ---

    def _replace(
        self, source: str, content_hash: str, items: Mapping[str, tuple[Chunk, NDArray[np.float32]]], file: str = ""
    ) -> None:
        """Store a document in place of its older version. `items`: chunk id -> (chunk, vector [dim])."""
        with self._write() as connection:
            generation = self._advance()
            old = self._rows(_OF_SOURCE, source=source)
            is_named = (IS_INDEXED, DOCUMENTS.c.id == source)
            number = connection.execute(select(DOCUMENTS.c.number).where(*is_named)).scalar()
            facts = {"source": file, "version": content_hash}
            if number is None:
                key = DocumentKey(INDEX_MARK, source)
                inserted = connection.execute(insert(DOCUMENTS), {**key._asdict(), **facts}).inserted_primary_key
                assert inserted is not None
                number = inserted[0]
            else:
                connection.execute(update(DOCUMENTS).where(*is_named).values(**facts))
                connection.execute(delete(CHUNKS).where(CHUNKS.c.document == number))
            rows = [chunk_values(*item, number, place, generation) for place, item in enumerate(items.values())]
            insert_rows(connection, CHUNKS, rows)
            text_of = {text_key(text): text for chunk, _ in items.values() for text in [chunk.text.strip()]}
            self.registry.add_texts(text_of)
            lost = {row.key: row.text for row in old if row.key not in text_of}
            self._record_orphans(connection, source, lost)

    def remove_document(self, source: str) -> int:
        """Remove a document. Return the number of its chunks. Raises NotFoundError for an unknown source."""
        with self._write() as connection:
            old = self._rows(_OF_SOURCE, source=source)
            found = connection.execute(
                select(DOCUMENTS.c.number, DOCUMENTS.c.source).where(IS_INDEXED, DOCUMENTS.c.id == source)
            ).first()
            if found is None:
                raise NotFoundError(f"{self.registry.name} has no document {source!r}; list them: ragblend documents")
            self._advance()
            connection.execute(delete(DOCUMENTS).where(DOCUMENTS.c.number == found.number))
            connection.execute(delete(CHUNKS).where(CHUNKS.c.document == found.number))
            records = connection.execute(select(FILES).where(FILES.c.path == found.source)).all()
            self.record_files(IngestedFile(record.path, "", record.top) for record in records)  # the file is read again
            self._record_orphans(connection, source, {row.key: row.text for row in old})
        return len(old)

    def record_files(self, records: Iterable[IngestedFile]) -> None:
        """Record ingested files, each in place of its older record. A file without documents is not recorded."""
        if given := {record.path: record._asdict() for record in records}:
            with self._write() as connection:
                paths = [{"b_path": path} for path in given]
                connection.execute(delete(FILES).where(equals_parameters(FILES, "path")), paths)
                insert_rows(connection, FILES, given.values())
                connection.execute(_DELETE_EMPTY_FILE, paths)

    def clear(self) -> None:
        """Remove the index: all documents and facts. Stored KV stays."""
        with self._write() as connection:
            keys = connection.execute(select(CHUNKS.c.key).where(HAS_VECTOR).distinct()).scalars().all()
            connection.execute(delete(CHUNKS).where(HAS_VECTOR))
            self.registry.delete_unowned_texts(keys)
            connection.execute(delete(FILES))
            connection.execute(delete(DOCUMENTS).where(IS_INDEXED))
            connection.execute(delete(DELETIONS).where(_IS_TEXT))
            connection.execute(delete(FACTS).where(FACTS.c.name.in_(("index", "generation"))))

    # --- helpers ---

    def _fact(self, name: str) -> str:
        rows = self._rows(select(FACTS.c.value).where(FACTS.c.name == name))
        if self.registry.identity != self._identity:
            raise StoreMismatchError(
                f"{self.registry.name} was deleted or replaced after this index was opened; open the index again"
            )
        value = str(rows[0].value) if rows else ""
        if not value or (name == "generation" and not value.isdecimal()):
            raise self.registry.damage_error(f"the row {name!r} of the index's facts is missing or damaged")
        return value

    def _put_fact(self, name: str, value: str) -> None:
        with self._write() as connection:
            connection.execute(delete(FACTS).where(FACTS.c.name == name))
            insert_rows(connection, FACTS, [{"name": name, "value": value}])

    def _advance(self) -> int:
        generation = self.generation() + 1
        self._put_fact("generation", str(generation))
        return generation

    def _record_orphans(self, connection: Connection, source: str, lost: Mapping[bytes, str]) -> None:
        """Record the texts that a document has lost, by their keys, and delete those that no document has."""
        # The table never reuses a number, so a reader can delete the rows it has read, and no later ones.
        rows = ({"key": "", "tier": "", "source": source, "text": text} for text in lost.values())
        insert_rows(connection, DELETIONS, rows)
        self.registry.delete_unowned_texts(lost)

    def _rows_with_ids(self, ids: Sequence[int]) -> Sequence[Row[Any]]:
        return [row for some in split_into_batches(ids) for row in self._intact_rows(_WITH_IDS, values=some)]

    def _intact_rows(self, query: Select[Any], **values: object) -> Sequence[Row[Any]]:
        rows = self._rows(query, **values)
        damaged = next((row for row in rows if not is_intact_chunk(row)), None)
        if damaged is not None:
            what = f"the id of chunk {damaged.id + 2**63:016x} of {damaged.source} does not match its text"
            raise self.registry.damage_error(what)
        return rows


def _facts_as_text(facts: Mapping[str, object]) -> str:
    return json.dumps({key: str(value) for key, value in facts.items()})
