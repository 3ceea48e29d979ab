"""Documents, chunks and vectors in one SQLite file: the truth behind an index. Knows nothing of search or embedders.

A document is added, replaced or removed in one transaction, so a reader never sees half of one. What it no longer
has is noted in the same transaction, for whoever deletes KV and registered texts: killed in between, that is not
forgotten. `tables` opens the file and checks its rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragblend.corpus.checked_database import CheckedDatabase, make_reingest_hint
from ragblend.corpus.schema import (
    CHECKED_COLUMNS,
    SELECT_CHUNKS,
    ChunkRow,
    IngestedFile,
    OrphanedTexts,
    PendingDeletion,
    make_row,
    text_hash,
)
from ragblend.errors import CorruptError, NotFoundError
from ragblend.prompt.types import Chunk

_OF_DOCUMENT = "WHERE d.source = ? ORDER BY c.ordinal"
_DELETION_COLUMNS = "key, place, source, text_hash"


class ChunkDatabase(CheckedDatabase):
    """The documents of an index, their chunks and vectors, the files they came from, and what they left behind."""

    # --- reading ---

    @property
    def num_documents(self) -> int:
        """Documents stored, those without a chunk included."""
        return int(self._rows("SELECT count(*) FROM documents")[0][0])

    @property
    def num_chunks(self) -> int:
        """Chunks stored."""
        return int(self._rows("SELECT count(*) FROM chunks")[0][0])

    def sources(self, status: str | None = None) -> list[str]:
        """Sources of all documents, first added first; with `status`, of those that have it."""
        found = self._select_checked("documents", "source", "WHERE status = ifnull(?, status) ORDER BY id", (status,))
        return [source for (source,) in found]

    def documents(self) -> dict[str, dict[str, str]]:
        """Content hashes by source, by file, first added first; of those that came in without a file under ""."""
        found: dict[str, dict[str, str]] = {}
        for file, source, content_hash in self._select_checked(
            "documents", "file, source, content_hash", "ORDER BY id"
        ):
            found.setdefault(file, {})[source] = content_hash
        return found

    def files(self) -> dict[str, IngestedFile]:
        """What is noted of the files that documents came from, by path."""
        return {
            row[0]: IngestedFile(*row)
            for row in self._select_checked("files", CHECKED_COLUMNS["files"], "ORDER BY path")
        }

    def chunks(self, source: str | None = None) -> Iterator[Chunk]:
        """All chunks, or those of one document, in reading order. Each document is whole, as of its turn."""
        for name in self.sources() if source is None else [source]:
            yield from (row.chunk() for row in self._require_intact(self._select(_OF_DOCUMENT, (name,))))

    def get(self, ids: Iterable[str]) -> dict[str, Chunk]:
        """The chunks with these ids, in that order; ids that are not here are left out."""
        wanted = list(dict.fromkeys(ids))
        found = {row.chunk_id: row.chunk() for row in self._rows_with("chunk_id", wanted)}
        return {chunk_id: found[chunk_id] for chunk_id in wanted if chunk_id in found}

    def texts(self) -> Iterator[tuple[str, str]]:
        """(chunk id, text) of every chunk."""
        return ((chunk.id, chunk.text) for chunk in self.chunks())

    def texts_since(self, generation: int) -> list[str]:
        """The texts of chunks that were added after the manifest had that generation."""
        with self.read_transaction():
            return [row.text for row in self.rows(self.ids(newer_than=generation).tolist())]

    def vectors(self, texts: Iterable[str]) -> dict[bytes, bytes]:
        """The vectors, as stored, of those `texts` that some chunk has, by `text_hash`."""
        found = {}
        with self.read_transaction():
            for hashed in dict.fromkeys(map(text_hash, texts)):
                # One will do, of as many as a line that every document has; damaged, the text is embedded again.
                for row in self._select("WHERE c.text_hash = ? LIMIT 1", (hashed,)):
                    if row.is_intact():
                        found[hashed] = row.vector
        return found

    def ids(self, newer_than: int = -1) -> NDArray[np.int64]:
        """[n] row ids, in document order, of chunks written after generation `newer_than`."""
        query = "SELECT id FROM chunks WHERE generation > ? ORDER BY document, ordinal"
        return np.array([row_id for (row_id,) in self._rows(query, (newer_than,))], np.int64)

    def rows(self, ids: Sequence[int]) -> list[ChunkRow]:
        """The rows with these ids, in no order. Raises CorruptError when one is not here."""
        found = self._rows_with("id", ids)
        if len(found) < len(ids):
            raise CorruptError(f"{self._file} lists chunks it does not hold. {make_reingest_hint(self.path)}")
        return found

    def rows_around(self, row: ChunkRow, distance: int) -> list[ChunkRow]:
        """The row with up to `distance` rows before and after it in its document."""
        span = (row.document, row.ordinal - distance, row.ordinal + distance)
        return self._require_intact(
            self._select("WHERE c.document = ? AND c.ordinal BETWEEN ? AND ? ORDER BY c.ordinal", span)
        )

    def find_row_problems(self) -> list[str]:
        """What is wrong with the stored bytes, one sentence each."""
        with self.read_transaction():
            found = [line for (line,) in self._rows("PRAGMA integrity_check") if line != "ok"]
            for table, columns in CHECKED_COLUMNS.items():
                damaged = f"SELECT count(*) FROM {table} WHERE checksum IS NOT row_checksum({columns})"
                if table != "chunks" and (count := self._rows(damaged)[0][0]):
                    found.append(f"{count} rows of {table} are not what was written")
            strays = "SELECT count(*) FROM chunks WHERE document NOT IN (SELECT id FROM documents)"
            if count := self._rows(strays)[0][0]:
                found.append(f"{count} chunks belong to no document")
            for row in map(
                ChunkRow._make, self._connection.execute(SELECT_CHUNKS)
            ):  # by name, and by what its id is of
                if not row.is_intact():
                    found.append(f"chunk {row.chunk_id} of {row.source} is not what was written")
        return [f"{self._file}: {problem}" for problem in found]

    # --- what is left to delete elsewhere ---

    def orphaned_texts(self) -> OrphanedTexts:
        """What documents had that are gone or changed, and nothing here has now. `forget.sweep` deletes it."""
        with self.read_transaction():
            rows = self._select_checked("leftovers", "id, source, text, behind", "ORDER BY id")
            texts = {text: source for _, source, text, behind in reversed(rows) if not behind}
            sources = dict.fromkeys(source for _, source, _, _ in rows)
            return OrphanedTexts(
                tuple(text for text in texts if not self._has_text(text_hash(text))),
                tuple(source for source in sources if not self._has("documents", "source", source)),
                texts,
                max((row[0] for row in rows), default=0),
            )

    def schedule_deletions(self, entries: Iterable[PendingDeletion], leftovers: OrphanedTexts) -> None:
        """Note which entries are to go, in place of `orphaned_texts`: from then on nothing here tells the texts."""
        with self.write_transaction():
            for entry in entries:
                self._put("doomed", (*entry, b""))
            self._connection.execute("DELETE FROM leftovers WHERE id <= ?", (leftovers.last_id,))

    def pending_deletions(self) -> list[PendingDeletion]:
        """The entries of stores that `schedule_deletions` noted and `clear_deletions` has not taken off, in the order
        they were noted in."""
        return [PendingDeletion(*row) for row in self._select_checked("doomed", _DELETION_COLUMNS, "ORDER BY rowid")]

    def is_deletion_pending(self, entry: PendingDeletion) -> bool:
        """Whether an entry is still noted, and nothing here has its text again."""
        with self.read_transaction():
            noted = self._select_checked(
                "doomed", _DELETION_COLUMNS, "WHERE key = ? AND place = ?", (entry.key, entry.place)
            )
            return tuple(entry) in noted and not self._has_text(entry.text_hash)

    def clear_deletions(self, entries: Iterable[PendingDeletion]) -> None:
        """Take entries off the list: they are gone, or wanted again."""
        with self.write_transaction():
            rows = ((entry.key, entry.place) for entry in entries)
            self._connection.executemany("DELETE FROM doomed WHERE key = ? AND place = ?", rows)

    # --- writing ---

    def _replace(
        self, source: str, content_hash: str, items: Mapping[str, tuple[Chunk, NDArray[np.float32]]], file: str = ""
    ) -> None:
        """Store a document whole, in place of its older version. items: chunk id -> (chunk, vector [dim])."""
        with self.write_transaction():
            generation = self._advance()
            # Unchecked: replacing a damaged document repairs it.
            old = self._select(_OF_DOCUMENT, (source,))
            known = self._rows("SELECT id FROM documents WHERE source = ?", (source,))
            document = (known or self._rows("SELECT coalesce(max(id), 0) + 1 FROM documents"))[0][0]
            self._put("documents", (document, source, file, content_hash, "indexed"))
            self._connection.execute("DELETE FROM chunks WHERE document = ?", (document,))
            self._connection.executemany(
                f"INSERT INTO chunks ({CHECKED_COLUMNS['chunks']}, checksum) VALUES ({', '.join('?' * 13)})",
                (make_row(*item, document, ordinal, generation) for ordinal, item in enumerate(items.values())),
            )
            kept = {chunk.text for chunk, _ in items.values()}
            self._record_orphans(source, (row.text for row in old if row.text not in kept))

    def remove_document(self, source: str) -> int:
        """Forget a document. How many chunks it had. Raises NotFoundError when it is not here."""
        with self.write_transaction():
            self._advance()
            old = self._select(_OF_DOCUMENT, (source,))
            found = self._rows("DELETE FROM documents WHERE source = ? RETURNING id, file", (source,))
            if not found:
                self._raise_not_found(source)
            ((document, file),) = found
            self._connection.execute("DELETE FROM chunks WHERE document = ?", (document,))
            forget = "UPDATE files SET version = '', checksum = row_checksum(path, '', top) WHERE path = ?"
            self._connection.execute(forget, (file,))  # it has more to give
            self._drop_empty_files([file])
            self._record_orphans(source, (row.text for row in old))
        return len(old)

    def set_status(self, sources: Iterable[str], status: str) -> None:
        """Note how far documents have come, such as "precomputed". Raises NotFoundError, and then nothing is noted."""
        columns = CHECKED_COLUMNS["documents"].replace("status", "?")
        update = f"UPDATE documents SET status = ?, checksum = row_checksum({columns}) WHERE source = ?"
        with self.write_transaction():
            for source in sources:
                if not self._connection.execute(update, (status, status, source)).rowcount:
                    self._raise_not_found(source)

    def record_files(self, notes: Iterable[IngestedFile]) -> None:
        """Note what was read of files, each in place of its older note; one that holds no document is not kept."""
        notes = list(notes)
        with self.write_transaction():
            for note in notes:
                self._put("files", note)
            self._drop_empty_files([note.path for note in notes])

    # --- inside ---

    def _raise_not_found(self, source: str) -> None:
        raise NotFoundError(f"no document {source!r} in {self.path}; see ragblend stats --store {self.path}")

    def _drop_empty_files(self, paths: Iterable[str]) -> None:
        empty = "DELETE FROM files WHERE path = ? AND NOT EXISTS (SELECT 1 FROM documents WHERE file = path)"
        self._connection.executemany(empty, ((path,) for path in paths))

    def _record_orphans(self, source: str, texts: Iterable[str]) -> None:
        # Numbers that never come again: whoever has read some drops these, and none that came since.
        for number, text in enumerate(dict.fromkeys(texts), start=self.generation() << 24):
            self._put("leftovers", (number, source, text, ""))

    def _has_text(self, hashed: bytes) -> bool:
        """Whether some chunk has the text of this `text_hash`."""
        return self._has("chunks", "text_hash", hashed)

    def _select(self, where: str, values: Sequence[object]) -> list[ChunkRow]:
        return [ChunkRow(*columns) for columns in self._rows(SELECT_CHUNKS + where, values)]

    def _rows_with(self, column: Literal["id", "chunk_id"], values: Sequence[object]) -> list[ChunkRow]:
        where = f"WHERE c.{column} IN (SELECT value FROM json_each(?))"  # one parameter: their number is limited
        return self._require_intact(self._select(where, (json.dumps(values),)))

    def _require_intact(self, rows: list[ChunkRow]) -> list[ChunkRow]:
        damaged = next((row for row in rows if not row.is_intact()), None)
        if damaged is not None:
            what = f"chunk {damaged.chunk_id} of {damaged.source} in {self._file} is not what was written"
            raise CorruptError(f"{what}. {make_reingest_hint(self.path)}")
        return rows
