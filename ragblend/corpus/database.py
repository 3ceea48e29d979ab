"""Documents, chunks and vectors in one SQLite file: the truth behind an index. Knows nothing of search or embedders.

A document is added, replaced or removed in one transaction, so a reader never sees half of one. What it no longer
has is noted in the same transaction, for whoever deletes KV and registered texts: killed in between, that is not
forgotten.
Every row carries a checksum that is looked at whenever it is read; SQLite's errors leave here as ours, with the way
out.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragblend.corpus.rows import (
    CHECKED,
    SCHEMA,
    SCHEMA_VERSION,
    SELECT,
    DocumentChange,
    Doomed,
    FileNote,
    Leftovers,
    Row,
    columns_of,
    text_hash,
    versions_of,
)
from ragblend.errors import CorruptError, NotFoundError, RagblendError, StoreMismatchError, UsageError
from ragblend.files.directory import refusal
from ragblend.files.sqlite import connect, row_checksum, translated, truncate_log
from ragblend.prompt.prompt import Chunk

DATABASE = "chunks.sqlite"
_CHECK_AT_OPEN_BYTES = 64 * 2**20  # a larger file is checked as its rows are read, and by `problems`
_PAGE = 500  # values in one SELECT ... IN


class ChunkDatabase:
    """One connection, shared by threads under `lock`. Methods that take no transaction run in their own.

    Raises CorruptError (bytes changed), StoreMismatchError (another schema), StoreFullError, or RagblendError when
    another process holds the write lock for longer than 30 seconds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / DATABASE
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._inside: Literal["", "DEFERRED", "IMMEDIATE"] = ""  # which transaction is open
        with self._translated():
            self._connection = connect(self.path, reingest(self.path.parent))
            try:
                self._check()
            except BaseException:
                self._connection.close()
                raise

    @staticmethod
    def create(folder: Path, facts: Mapping[str, object]) -> ChunkDatabase:
        """An empty database in `folder` with `facts` in its meta table; an existing one is opened as it is."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{folder} is not a folder; name a folder for the index") from error
        except OSError as error:
            raise refusal(error, folder) from error
        written = {"facts": json.dumps({key: str(value) for key, value in facts.items()}), "generation": "0"}
        rows = [(*pair, row_checksum(*pair)) for pair in written.items()]
        with _translated(folder):
            connection = connect(folder / DATABASE, reingest(folder), create=True)
            try:  # one transaction: killed inside it, there is no index rather than half of one
                connection.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?, ?)", rows)
                connection.commit()
            finally:
                connection.close()
        return ChunkDatabase(folder)

    @staticmethod
    def is_blank(folder: Path) -> bool:
        """Whether creation was killed before its transaction: a file without a single table."""
        with _translated(folder):
            connection = connect(folder / DATABASE, reingest(folder))
            try:
                return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            finally:
                connection.close()

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._connection.close()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One state of the database for several reads; others may write meanwhile."""
        with self._transaction("DEFERRED"):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """All or nothing, one process at a time."""
        with self._transaction("IMMEDIATE"):
            yield

    # --- reading: each inside `reading` or `writing` ---

    def facts(self) -> dict[str, str]:
        """What the creator recorded."""
        facts: dict[str, str] = json.loads(self._meta("facts"))
        return facts

    def generation(self) -> int:
        """How many times documents changed."""
        return int(self._meta("generation"))

    def num_documents(self) -> int:
        """Documents stored, those without a chunk included."""
        return int(self._connection.execute("SELECT count(*) FROM documents").fetchone()[0])

    def num_chunks(self) -> int:
        """Chunks stored."""
        return int(self._connection.execute("SELECT count(*) FROM chunks").fetchone()[0])

    def sources(self, status: str | None) -> list[str]:
        """Sources of documents with `status` (None: all), first added first."""
        where = "WHERE ? IN (status, '*') ORDER BY id"
        found = self._checked("documents", "source", where, ("*" if status is None else status,))
        return [source for (source,) in found]

    def documents(self) -> dict[str, dict[str, str]]:
        """Content hashes by source, by file, first added first; of those that came in without a file under ""."""
        found: dict[str, dict[str, str]] = {}
        for file, source, content_hash in self._checked("documents", "file, source, content_hash", "ORDER BY id"):
            found.setdefault(file, {})[source] = content_hash
        return found

    def files(self) -> list[FileNote]:
        """Every file noted, by path."""
        return [FileNote(*row) for row in self._checked("files", "path, version, top", "ORDER BY path")]

    def leftovers(self) -> Leftovers:
        """What is left to delete elsewhere, less what the index has come to have again."""
        rows = list(self._checked("leftovers", "id, source, text, behind", "ORDER BY id"))
        texts = {text: source for _, source, text, behind in reversed(rows) if not behind}
        pairs = {(behind, text): source for _, source, text, behind in reversed(rows) if behind}
        return Leftovers(
            tuple(text for text in texts if not self.has_text(text_hash(text))),
            tuple(pair for pair in pairs if not self.has_pair(*map(text_hash, pair))),
            tuple(
                source
                for source in dict.fromkeys(source for _, source, _, _ in rows)
                if not self._has("documents", "source", source)
            ),
            {text: source for (_, text), source in pairs.items()} | texts,
            max((row[0] for row in rows), default=0),
        )

    def doomed(self) -> list[Doomed]:
        """Entries that are to go and have not been seen to be gone, in the order in which they are to."""
        return [Doomed(*row) for row in self._checked("doomed", CHECKED["doomed"], "ORDER BY rowid")]

    def is_doomed(self, entry: Doomed) -> bool:
        """Whether the entry is to go: noted, and nothing has its text again, or behind the other."""
        noted = self._checked("doomed", CHECKED["doomed"], "WHERE key = ? AND place = ?", (entry.key, entry.place))
        if not any(row == tuple(entry) for row in noted):
            return False
        if entry.behind_hash:
            return not self.has_pair(entry.behind_hash, entry.text_hash)
        return not self.has_text(entry.text_hash)

    def has_text(self, hashed: bytes) -> bool:
        """Whether some chunk has the text of this `text_hash`."""
        return self._has("chunks", "text_hash", hashed)

    def has_pair(self, behind_hash: bytes, hashed: bytes) -> bool:
        """Whether some document has the one text right behind the other."""
        query = (
            "SELECT 1 FROM chunks c JOIN chunks b ON b.document = c.document AND b.ordinal = c.ordinal - 1 "
            "WHERE c.text_hash = ? AND b.text_hash = ? LIMIT 1"
        )
        return self._connection.execute(query, (hashed, behind_hash)).fetchone() is not None

    def vectors(self, texts: Iterable[str]) -> dict[bytes, bytes]:
        """The vectors, as stored, of those `texts` that some chunk has, by `text_hash`."""
        hashes, found = list(dict.fromkeys(map(text_hash, texts))), {}
        for start in range(0, len(hashes), _PAGE):
            page = hashes[start : start + _PAGE]
            for row in self._select(f"WHERE c.text_hash IN ({', '.join('?' * len(page))})", page):
                if row.is_sound():
                    found[text_hash(row.text)] = row.vector
        return found

    def document(self, source: str) -> tuple[str, str] | None:
        """(content hash, status) of a document, or None."""
        found: tuple[str, str] | None = next(
            self._checked("documents", "content_hash, status", "WHERE source = ?", (source,)), None
        )
        return found

    def ids(self, newer_than: int = -1) -> NDArray[np.int64]:
        """[n] row ids, in document order, of chunks written after generation `newer_than`."""
        found = self._connection.execute(
            "SELECT id FROM chunks WHERE generation > ? ORDER BY document, ordinal", (newer_than,)
        )
        return np.array([row_id for (row_id,) in found], np.int64)

    def rows_of(self, source: str) -> list[Row]:
        """Rows of one document in reading order."""
        return self._sound(self._select("WHERE d.source = ? ORDER BY c.ordinal", (source,)))

    def rows_around(self, row: Row, distance: int) -> list[Row]:
        """The row with up to `distance` rows before and after it in its document."""
        span = (row.document, row.ordinal - distance, row.ordinal + distance)
        return self._sound(self._select("WHERE c.document = ? AND c.ordinal BETWEEN ? AND ? ORDER BY c.ordinal", span))

    def rows(self, column: Literal["id", "chunk_id"], values: Sequence[object]) -> list[Row]:
        """Rows whose `column` is one of `values`, in no order; absent chunk ids are left out, row ids must be there."""
        found: list[Row] = []
        for start in range(0, len(values), _PAGE):
            page = values[start : start + _PAGE]
            found += self._select(f"WHERE c.{column} IN ({', '.join('?' * len(page))})", page)
        if column == "id" and len(found) < len(values):
            raise CorruptError(f"{self.path} lists chunks it does not hold. {reingest(self.folder)}")
        return self._sound(found)

    def problems(self) -> Iterator[str]:
        """What is wrong with the stored bytes, one sentence each."""
        for (line,) in self._connection.execute("PRAGMA integrity_check").fetchall():
            if line != "ok":
                yield f"{self.path}: {line}"
        for table, columns in CHECKED.items():
            if table == "chunks":
                continue  # one by one, below
            damaged = f"SELECT count(*) FROM {table} WHERE checksum IS NOT row_checksum({columns})"
            if count := self._connection.execute(damaged).fetchone()[0]:
                yield f"{self.path}: {count} rows of {table} are not what was written"
        strays = "SELECT count(*) FROM chunks WHERE document NOT IN (SELECT id FROM documents)"
        if count := self._connection.execute(strays).fetchone()[0]:
            yield f"{self.path}: {count} chunks belong to no document"
        for row in self._connection.execute(SELECT):  # by name, and by what its id is of
            if not Row(*row).is_sound():
                yield f"{self.path}: chunk {row[1]} of {row[2]} is not what was written"

    # --- writing: each its own transaction ---

    def replace(
        self,
        source: str,
        content_hash: str,
        status: str,
        items: Mapping[str, tuple[Chunk, NDArray[np.float32]]],
        file: str = "",
    ) -> DocumentChange:
        """Store a document whole, in place of its older version. items: chunk id -> (chunk, vector [dim])."""
        with self.writing():
            generation = self._advance()
            # Unchecked: replacing a damaged document repairs it.
            old = {row.chunk_id: row for row in self._select("WHERE d.source = ? ORDER BY c.ordinal", (source,))}
            known = self._connection.execute("SELECT id FROM documents WHERE source = ?", (source,)).fetchone()
            document = int(known[0]) if known is not None else self._next_id("documents")
            self._put("documents", (document, source, file, content_hash, status))
            self._connection.execute("DELETE FROM chunks WHERE document = ?", (document,))
            self._connection.executemany(
                f"INSERT INTO chunks ({CHECKED['chunks']}, checksum) VALUES ({', '.join('?' * 13)})",
                (columns_of(*item, document, ordinal, generation) for ordinal, item in enumerate(items.values())),
            )
            kept = versions_of([chunk.text for chunk, _ in items.values()])
            self._leave(source, [version for version in versions_of([row.text for row in old.values()])
                                 if version not in kept])  # fmt: skip
        return DocumentChange(
            added=tuple(chunk for chunk_id, (chunk, _) in items.items() if chunk_id not in old),
            kept=tuple(chunk for chunk_id, (chunk, _) in items.items() if chunk_id in old),
            removed=tuple(row.forgotten() for chunk_id, row in old.items() if chunk_id not in items),
        )

    def remove(self, source: str) -> list[Chunk]:
        """Forget a document; returns the chunks it had, without metadata. Raises NotFoundError."""
        with self.writing():
            self._advance()
            old = self._select("WHERE d.source = ? ORDER BY c.ordinal", (source,))
            condition = "WHERE document IN (SELECT id FROM documents WHERE source = ?)"
            self._connection.execute(f"DELETE FROM chunks {condition}", (source,))
            files = self._connection.execute("SELECT file FROM documents WHERE source = ?", (source,)).fetchall()
            self._require(self._connection.execute("DELETE FROM documents WHERE source = ?", (source,)), source)
            self._connection.executemany(  # it has more to give
                "UPDATE files SET version = '', checksum = row_checksum(path, '', top) WHERE path = ?", files
            )
            self._drop_empty_files(file for (file,) in files)
            self._leave(source, versions_of([row.text for row in old]))
        return [row.forgotten() for row in old]

    def set_status(self, sources: Iterable[str], status: str) -> None:
        """Note how far documents have come. Raises NotFoundError, and then nothing is noted."""
        with self.writing():
            columns = CHECKED["documents"].replace("status", "?1")
            update = f"UPDATE documents SET status = ?1, checksum = row_checksum({columns}) WHERE source = ?2"
            for source in sources:
                self._require(self._connection.execute(update, (status, source)), source)

    def note_files(self, notes: Iterable[FileNote]) -> None:
        """Note files, each in place of what was noted of it. A file that holds no document is not kept."""
        notes = list(notes)
        with self.writing():
            for note in notes:
                self._put("files", note)
            self._drop_empty_files(note.path for note in notes)

    def set_facts(self, **changes: object) -> None:
        """Record other facts than the creator did."""
        with self.writing():
            written = json.dumps(self.facts() | {key: str(value) for key, value in changes.items()})
            self._put("meta", ("facts", written))

    def doom(self, entries: Iterable[Doomed], last_id: int) -> None:
        """Note which entries are to go, in place of the leftovers up to this id, whose texts are forgotten."""
        with self.writing():
            for entry in entries:
                self._put("doomed", entry)
            self._connection.execute("DELETE FROM leftovers WHERE id <= ?", (last_id,))

    def pardon(self, entries: Iterable[Doomed]) -> None:
        """Forget that entries are to go: they are gone, or wanted again."""
        with self.writing():
            rows = ((entry.key, entry.place) for entry in entries)
            self._connection.executemany("DELETE FROM doomed WHERE key = ? AND place = ?", rows)

    def truncate_log(self) -> None:
        """Let what was deleted leave the log, too."""
        with self.lock, self._translated():
            truncate_log(self._connection)

    # --- inside ---

    def _require(self, change: sqlite3.Cursor, source: str) -> None:
        if not change.rowcount:
            raise NotFoundError(f"no document {source!r} in {self.folder}; see ragblend stats --index {self.folder}")

    def _drop_empty_files(self, paths: Iterable[str]) -> None:
        empty = "DELETE FROM files WHERE path = ?1 AND NOT EXISTS (SELECT 1 FROM documents WHERE file = ?1)"
        self._connection.executemany(empty, ((path,) for path in paths))

    def _leave(self, source: str, versions: Iterable[tuple[str, str]]) -> None:
        # Numbers that never come again: whoever has read some drops these, and none that came since.
        for number, version in enumerate(versions, start=self.generation() << 24):
            self._put("leftovers", (number, source, *version))

    def _next_id(self, table: str) -> int:
        return int(self._connection.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()[0])

    def _put(self, table: str, columns: Sequence[object]) -> None:
        """A row with its checksum, in place of the one of the same key."""
        values = (*columns, row_checksum(*columns))
        places = ", ".join("?" * len(values))
        self._connection.execute(
            f"INSERT OR REPLACE INTO {table} ({CHECKED[table]}, checksum) VALUES ({places})", values
        )

    def _checked(self, table: str, columns: str, rest: str, values: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Columns of the rows that `rest` selects. Raises CorruptError when one is not what was written."""
        query = f"SELECT checksum IS row_checksum({CHECKED[table]}), {columns} FROM {table} {rest}"
        for is_sound, *found in self._connection.execute(query, values).fetchall():
            if not is_sound:
                raise CorruptError(f"{self.path}: a row of {table} is not what was written. {reingest(self.folder)}")
            yield tuple(found)

    def _has(self, table: str, column: str, value: object) -> bool:
        query = f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1"
        return self._connection.execute(query, (value,)).fetchone() is not None

    def _advance(self) -> int:
        generation = self.generation() + 1
        self._put("meta", ("generation", str(generation)))
        return generation

    def _meta(self, key: str) -> str:
        value = next((str(found) for (found,) in self._checked("meta", "value", "WHERE key = ?", (key,))), "")
        if not value or (key == "generation" and not value.isdecimal()):
            raise CorruptError(f"{self.path} has lost its {key!r}. {reingest(self.folder)}")
        return value

    def _select(self, where: str, values: Sequence[object]) -> list[Row]:
        return [Row(*columns) for columns in self._connection.execute(SELECT + where, values)]

    def _sound(self, rows: list[Row]) -> list[Row]:
        damaged = next((row for row in rows if not row.is_sound()), None)
        if damaged is not None:
            what = f"chunk {damaged.chunk_id} of {damaged.source} in {self.path} is not what was written"
            raise CorruptError(f"{what}. {reingest(self.folder)}")
        return rows

    def _check(self) -> None:
        if not self._connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'chunks'").fetchone()[0]:
            raise CorruptError(f"{self.path} holds no index. {reingest(self.folder)}")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise StoreMismatchError(
                f"{self.folder} has index schema {version}, this ragblend reads {SCHEMA_VERSION}; "
                "use the ragblend that made it, or ingest again into a new folder"
            )
        schema = {sql for (sql,) in self._connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table'")}
        if schema != {statement.replace("IF NOT EXISTS ", "") for statement in SCHEMA if "TABLE" in statement}:
            raise CorruptError(f"{self.path} has other tables than ragblend makes. {reingest(self.folder)}")
        if self.path.stat().st_size <= _CHECK_AT_OPEN_BYTES:
            # Not quick_check, which skips the indexes: a chunk missing from one would be silently unfindable.
            verdict = self._connection.execute("PRAGMA integrity_check").fetchone()[0]
            if verdict != "ok":
                raise CorruptError(f"{self.path} is damaged ({verdict}). {reingest(self.folder)}")
        self._meta("facts")

    @contextmanager
    def _transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
        if self._process != os.getpid():
            raise RagblendError(
                f"the index {self.folder} was opened before this process was forked; SQLite cannot be carried over. "
                "Open it in this process"
            )
        with self.lock:
            if self._inside:  # part of the one that is open; the lock says that it is this thread's
                assert kind == "DEFERRED" or self._inside == "IMMEDIATE", "a reader cannot become a writer"
                yield
                return
            with self._translated():
                self._connection.execute(f"BEGIN {kind}")
                self._inside = kind
                try:
                    yield
                    self._connection.commit()
                except BaseException:
                    self._connection.rollback()
                    raise
                finally:
                    self._inside = ""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with _translated(self.folder):
            yield


def reingest(folder: Path) -> str:
    """The way out of a damaged database."""
    return (
        f"Delete {folder} and run ragblend ingest DOCS --index {folder}; stored KV is found again, not recomputed. "
        f"What was being removed goes with: ragblend gc --orphans --index {folder}"
    )


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    with translated(folder / DATABASE, reingest(folder)):
        yield
