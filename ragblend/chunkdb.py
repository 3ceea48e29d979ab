"""Documents, chunks and vectors in one SQLite file: the truth behind an index. Knows nothing of search or embedders.

A document is added, replaced or removed in one transaction, so a reader never sees half of one. What it no longer has
is noted in the same transaction, for whoever deletes KV and registered texts: killed in between, that is not forgotten.
Every row carries a checksum, and SQLite's errors leave here as ours, with the way out.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragblend.chunkrows import (
    SCHEMA,
    SCHEMA_VERSION,
    SELECT,
    DocumentChange,
    FileNote,
    Leftovers,
    Row,
    columns_of,
    text_hash,
    versions_of,
)
from ragblend.errors import CorruptError, NotFoundError, RagblendError, StoreFullError, StoreMismatchError, UsageError
from ragblend.files import check_file
from ragblend.segments import Chunk

DATABASE = "chunks.sqlite"
_LOCK_TIMEOUT_S = 30.0
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
        with self._translated():
            self._connection = _connect(self.path)
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
        written = json.dumps({key: str(value) for key, value in facts.items()})
        pairs = [("facts", written), ("facts_checksum", str(zlib.crc32(written.encode()))), ("generation", "0")]
        with _translated(folder):
            connection = _connect(folder / DATABASE, create=True)
            try:  # one transaction: killed inside it, there is no index rather than half of one
                connection.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", pairs)
                connection.commit()
            finally:
                connection.close()
        return ChunkDatabase(folder)

    @staticmethod
    def is_blank(folder: Path) -> bool:
        """Whether creation was killed before its transaction: a file without a single table."""
        with _translated(folder):
            connection = _connect(folder / DATABASE)
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
        found = self._connection.execute(
            "SELECT source FROM documents WHERE ? IN (status, '*') ORDER BY id", ("*" if status is None else status,)
        )
        return [source for (source,) in found]

    def documents(self) -> dict[str, dict[str, str]]:
        """Content hashes by source, by file, first added first; of those that came in without a file under ""."""
        found: dict[str, dict[str, str]] = {}
        query = "SELECT file, source, content_hash FROM documents ORDER BY id"
        for file, source, content_hash in self._connection.execute(query):
            found.setdefault(file, {})[source] = content_hash
        return found

    def files(self) -> list[FileNote]:
        """Every file noted, by path."""
        return [
            FileNote(*row) for row in self._connection.execute("SELECT path, version, top FROM files ORDER BY path")
        ]

    def leftovers(self) -> Leftovers:
        """What is left to delete elsewhere, less what the index has come to have again."""
        rows = self._connection.execute("SELECT id, source, text, behind FROM leftovers ORDER BY id").fetchall()
        texts = dict.fromkeys(text for _, _, text, behind in rows if not behind)
        pairs = dict.fromkeys((behind, text) for _, _, text, behind in rows if behind)
        return Leftovers(
            tuple(text for text in texts if not self._has("chunks", "text_hash", text_hash(text))),
            tuple(pair for pair in pairs if not self._has_pair(*pair)),
            tuple(
                source
                for source in dict.fromkeys(source for _, source, _, _ in rows)
                if not self._has("documents", "source", source)
            ),
            max((row[0] for row in rows), default=0),
        )

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
        found: tuple[str, str] | None = self._connection.execute(
            "SELECT content_hash, status FROM documents WHERE source = ?", (source,)
        ).fetchone()
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
        for source in self.sources(None):
            for row in self._select("WHERE d.source = ? ORDER BY c.ordinal", (source,)):
                if not row.is_sound():
                    yield f"{self.path}: chunk {row.chunk_id} of {source} is not what was written"

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
            self._connection.execute(
                "INSERT INTO documents (source, file, content_hash, status) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (source) DO UPDATE SET file = excluded.file, content_hash = excluded.content_hash, "
                "status = excluded.status",
                (source, file, content_hash, status),
            )
            document = self._connection.execute("SELECT id FROM documents WHERE source = ?", (source,)).fetchone()[0]
            self._connection.execute("DELETE FROM chunks WHERE document = ?", (document,))
            self._connection.executemany(
                "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
            self._connection.executemany("UPDATE files SET version = '' WHERE path = ?", files)  # it has more to give
            self._drop_empty_files(file for (file,) in files)
            self._leave(source, versions_of([row.text for row in old]))
        return [row.forgotten() for row in old]

    def set_status(self, sources: Iterable[str], status: str) -> None:
        """Note how far documents have come. Raises NotFoundError, and then nothing is noted."""
        with self.writing():
            update = "UPDATE documents SET status = ? WHERE source = ?"
            for source in sources:
                self._require(self._connection.execute(update, (status, source)), source)

    def note_files(self, notes: Iterable[FileNote]) -> None:
        """Note files, each in place of what was noted of it. A file that holds no document is not kept."""
        notes = list(notes)
        with self.writing():
            self._connection.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", notes)
            self._drop_empty_files(note.path for note in notes)

    def set_facts(self, **changes: object) -> None:
        """Record other facts than the creator did."""
        with self.writing():
            written = json.dumps(self.facts() | {key: str(value) for key, value in changes.items()})
            pairs = [(written, "facts"), (str(zlib.crc32(written.encode())), "facts_checksum")]
            self._connection.executemany("UPDATE meta SET value = ? WHERE key = ?", pairs)

    def drop_leftovers(self, last_id: int) -> None:
        """Forget leftovers up to this id."""
        with self.writing():
            self._connection.execute("DELETE FROM leftovers WHERE id <= ?", (last_id,))

    # --- inside ---

    def _require(self, change: sqlite3.Cursor, source: str) -> None:
        if not change.rowcount:
            raise NotFoundError(f"no document {source!r} in {self.folder}; see ragblend stats --index {self.folder}")

    def _drop_empty_files(self, paths: Iterable[str]) -> None:
        empty = "DELETE FROM files WHERE path = ?1 AND NOT EXISTS (SELECT 1 FROM documents WHERE file = ?1)"
        self._connection.executemany(empty, ((path,) for path in paths))

    def _leave(self, source: str, versions: Iterable[tuple[str, str]]) -> None:
        insert = "INSERT INTO leftovers (source, text, behind) VALUES (?, ?, ?)"
        self._connection.executemany(insert, ((source, text, behind) for text, behind in versions))

    def _has(self, table: str, column: str, value: object) -> bool:
        query = f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1"
        return self._connection.execute(query, (value,)).fetchone() is not None

    def _has_pair(self, behind: str, text: str) -> bool:
        """Whether some document has `text` right after `behind`."""
        query = (
            "SELECT 1 FROM chunks c JOIN chunks b ON b.document = c.document AND b.ordinal = c.ordinal - 1 "
            "WHERE c.text_hash = ? AND b.text_hash = ? LIMIT 1"
        )
        return self._connection.execute(query, (text_hash(text), text_hash(behind))).fetchone() is not None

    def _advance(self) -> int:
        self._connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
        return self.generation()

    def _meta(self, key: str) -> str:
        found = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        value = "" if found is None else str(found[0])
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
        if str(zlib.crc32(self._meta("facts").encode())) != self._meta("facts_checksum"):
            raise CorruptError(f"{self.path} does not say what made it. {reingest(self.folder)}")

    @contextmanager
    def _transaction(self, kind: Literal["DEFERRED", "IMMEDIATE"]) -> Iterator[None]:
        with self.lock, self._translated():
            self._connection.execute(f"BEGIN {kind}")
            try:
                yield
                self._connection.commit()
            except BaseException:
                self._connection.rollback()
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        with _translated(self.folder):
            yield


def reingest(folder: Path) -> str:
    """The way out of a damaged database."""
    return f"Delete {folder} and run ragblend ingest DOCS --index {folder}; stored KV is found again, not recomputed"


def _connect(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode, so that every BEGIN is written where it matters."""
    try:
        check_file(path)
    except OSError as error:
        raise CorruptError(f"{path} cannot be opened: {error.strerror or error}. {reingest(path.parent)}") from error
    # In a folder that cannot be written (a package, a mounted image) nobody else writes either.
    frozen = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    mode = "mode=rwc" if create else "mode=ro&immutable=1" if frozen else "mode=rw"
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{mode}",
        uri=True,
        timeout=_LOCK_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if not frozen:
            connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # what was removed is not to be read in the file either
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # used after close: a bug in the caller
    except sqlite3.IntegrityError as error:
        raise RagblendError(f"{folder}: two chunks share one id ({error}); nothing was written, report it") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite3 cannot always decode its own message
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise RagblendError(f"another process is writing {folder}; wait for it to end and try again") from error
        if code == sqlite3.SQLITE_FULL:
            raise StoreFullError(f"no room for {folder}; free disk space and run the command again") from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise RagblendError(f"cannot open or write {folder} ({error}); check its permissions") from error
        raise CorruptError(f"{folder / DATABASE} is damaged ({error}). {reingest(folder)}") from error
