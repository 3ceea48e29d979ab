"""Texts of ingested chunks, kept beside their KV, so that they are found again in a plain prompt (see `boundaries`).

Two texts are the same when they are equal after `strip()`. A text is here for whoever added it: an index, or documents
that a framework knows by their ids; when the last of them lets it go, nobody needs its KV either. The file also lists
the entries that ingestion has stored beside it, so that one that went missing is missed. Knows strings and one SQLite
file. Knows nothing about tokens, KV, engines or frameworks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

from ragblend.errors import CorruptError, StoreMismatchError
from ragblend.files.directory import refusal, remove_file
from ragblend.files.sqlite import connect, row_checksum, translated, truncate_log

logger = logging.getLogger(__name__)

REGISTRY_FILE = "texts.sqlite"
"""In a store's directory: the texts whose KV it holds."""

ANCHOR_CHARS = 24
"""Texts are looked up by their first characters."""

_TABLE, _HOLDERS, _STORED = "registered_texts", "text_holders", "stored_kv"
_VERSION = 2
_SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS {_TABLE} "
    "(id INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, text TEXT NOT NULL)",
    f"CREATE TABLE IF NOT EXISTS {_HOLDERS} "
    "(document TEXT NOT NULL, key BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (document, key)) WITHOUT ROWID",
    f"CREATE INDEX IF NOT EXISTS holders_by_text ON {_HOLDERS} (key)",
    f"CREATE TABLE IF NOT EXISTS {_STORED} "
    "(key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    f"PRAGMA user_version = {_VERSION}",
)
_TABLES = {sql.split()[5]: sql.replace("IF NOT EXISTS ", "") for sql in _SCHEMA if "CREATE TABLE" in sql}
_DAMAGED_ROWS = {
    "texts": f"FROM {_TABLE} WHERE key IS NOT text_key(text)",  # their key is their checksum
    "holders of texts": f"FROM {_HOLDERS} WHERE checksum IS NOT row_checksum(document, key)",
    "stored entries": f"FROM {_STORED} WHERE checksum IS NOT row_checksum(key, fingerprint)",
}


class TextIndex:
    """Known texts by their first characters; says which begin at a place of a longer text. Not safe between threads.

    A place costs a look-up and, where texts share their first characters, a binary search among those.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._by_anchor: dict[str, _SameAnchor] = {}
        self._short: set[str] = set()
        self._short_lengths: list[int] = []  # longest first
        self._num_short = Counter[int]()  # by length
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Know a stripped, non-empty text; twice is once."""
        if len(text) < ANCHOR_CHARS:
            if text not in self._short:
                self._short.add(text)
                self._note_length(len(text), 1)
        else:
            self._by_anchor.setdefault(text[:ANCHOR_CHARS], _SameAnchor()).add(text)

    def discard(self, text: str) -> None:
        """Forget a text, if it is known."""
        if len(text) < ANCHOR_CHARS:
            if text in self._short:
                self._short.discard(text)
                self._note_length(len(text), -1)
            return
        group = self._by_anchor.get(text[:ANCHOR_CHARS])
        if group is not None:
            group.discard(text)
            if not group:
                del self._by_anchor[text[:ANCHOR_CHARS]]

    def starting_at(self, text: str, place: int) -> Iterator[str]:
        """The known texts that begin at `place` of `text`, the longest first.

        >>> index = TextIndex(["The first chunk is here, long enough.", "The first chunk is here,", "The"])
        >>> list(index.starting_at("> The first chunk is here, you see?", 2))
        ['The first chunk is here,', 'The']
        """
        group = self._by_anchor.get(text[place : place + ANCHOR_CHARS])
        if group is not None:
            yield from group.starting_at(text, place)
        for length in self._short_lengths:
            candidate = text[place : place + length]
            if len(candidate) == length and candidate in self._short:
                yield candidate

    def _note_length(self, length: int, change: int) -> None:
        self._num_short[length] += change
        self._short_lengths = sorted(+self._num_short, reverse=True)


class _SameAnchor:
    """Texts that begin alike, in order, each with the longest other one that it begins with."""

    def __init__(self) -> None:
        self._sorted: list[str] = []
        self._begins_with: dict[str, str] = {}
        self._waiting: set[str] = set()  # added, not yet in order
        self._longest = 0

    def __bool__(self) -> bool:
        return bool(self._sorted or self._waiting)

    def add(self, text: str) -> None:
        place = bisect_left(self._sorted, text)
        if self._sorted[place : place + 1] != [text]:
            self._waiting.add(text)

    def discard(self, text: str) -> None:
        self._waiting.discard(text)
        place = bisect_left(self._sorted, text)
        if self._sorted[place : place + 1] != [text]:
            return
        del self._sorted[place]
        shorter = self._begins_with.pop(text, None)
        for longer in self._longer(text, place):
            if self._begins_with[longer] == text:
                self._begin(longer, shorter)

    def starting_at(self, text: str, place: int) -> Iterator[str]:
        self._put_in_order()
        # Whatever `text` begins with at `place` is the text sorted just before it, or one that that begins with.
        following = bisect_right(self._sorted, text[place : place + self._longest])
        known = self._sorted[following - 1] if following else None
        while known is not None:
            if text.startswith(known, place):
                yield known
            known = self._begins_with.get(known)

    def _put_in_order(self) -> None:
        if len(self._waiting) * 16 > len(self._sorted):  # many: sorting all is cheaper than placing each
            self._sorted = sorted({*self._sorted, *self._waiting})
            self._begins_with = {}
            open_texts: list[str] = []
            for text in self._sorted:
                while open_texts and not text.startswith(open_texts[-1]):
                    open_texts.pop()
                self._begin(text, open_texts[-1] if open_texts else None)
                open_texts.append(text)
        else:
            for text in self._waiting:
                self._insert(text)
        self._longest = max(self._longest, *map(len, self._waiting), 0)
        self._waiting.clear()

    def _insert(self, text: str) -> None:
        place = bisect_left(self._sorted, text)
        shorter = self._sorted[place - 1] if place else None
        while shorter is not None and not text.startswith(shorter):
            shorter = self._begins_with.get(shorter)
        self._sorted.insert(place, text)
        self._begin(text, shorter)
        for longer in self._longer(text, place + 1):
            if self._begins_with.get(longer) == shorter:
                self._begins_with[longer] = text

    def _longer(self, text: str, place: int) -> Iterator[str]:
        """The texts from `place` on that begin with `text`."""
        while place < len(self._sorted) and self._sorted[place].startswith(text):
            yield self._sorted[place]
            place += 1

    def _begin(self, text: str, shorter: str | None) -> None:
        if shorter is None:
            self._begins_with.pop(text, None)
        else:
            self._begins_with[text] = shorter


class ChunkRegistry:
    """The texts of ingested chunks, kept in the SQLite file `path`, or in memory when that is None.

    Safe between threads and processes: what another process adds is found at the next call. `close` frees the file;
    the next call opens it again. Raises CorruptError for a damaged file, StoreMismatchError for somebody else's.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = threading.RLock()
        self._forget_memory()
        self._held: dict[str, set[str]] = {}  # texts by document, where no file keeps them
        self._stored: dict[str, str] = {}  # the same of `stored`
        self._connection: sqlite3.Connection | None = None
        _OPEN.add(self)
        if self.path is not None:
            with self._current():  # fail here rather than at the first prompt
                pass

    # --- what it holds ---

    def texts(self) -> Iterator[str]:
        """Every text, stripped, first added first."""
        with self._current():
            texts = list(self._texts)
        return iter(texts)

    def __len__(self) -> int:
        with self._current():
            return len(self._texts)

    def __contains__(self, text: object) -> bool:
        with self._current():
            return isinstance(text, str) and text.strip() in self._texts

    @contextmanager
    def searching(self) -> Iterator[TextIndex]:
        """The texts as they are now, for a search; others wait meanwhile."""
        with self._current():
            yield self._index

    # --- changing it ---

    def add(self, texts: Iterable[str], document: str = "") -> int:
        """Know these texts, for `document` among others ("": an index); blank ones are skipped. How many were new."""
        with self._current() as connection:
            known = list(dict.fromkeys(filter(None, map(_normal, texts))))
            new = [text for text in known if text not in self._texts]
            if connection is not None and new:
                connection.execute("BEGIN IMMEDIATE")
                rows = ((_key(text), text) for text in new)
                connection.executemany(f"INSERT OR IGNORE INTO {_TABLE} (key, text) VALUES (?, ?)", rows)
                connection.execute("COMMIT")
                # Ids are read back rather than guessed: another process may have added in between.
                self._load(connection)
            else:
                self._remember(new)
            self._hold(connection, document, known)
        return len(new)

    def leaving(self, document: str, texts: Iterable[str]) -> list[str]:
        """What `replace` would return: the texts of a document that would be nobody's."""
        stay = set(map(_normal, texts))
        with self._current() as connection:
            left = self._texts_of(connection, document) - stay
            return sorted(text for text in left if not self._is_held(connection, text, but=document))

    def replace(self, document: str, texts: Iterable[str]) -> list[str]:
        """Know these texts for a document, in place of those it had; none: it is gone. What `release` returns."""
        has_now = {text for text in map(_normal, texts) if text}
        with self._current() as connection:
            self.add(has_now, document)
            return self.release(self._texts_of(connection, document) - has_now, document)

    def release(self, texts: Iterable[str], document: str = "") -> list[str]:
        """Know these texts no longer for `document`; those that nobody else has are forgotten, and returned."""
        released = list(dict.fromkeys(map(_normal, texts)))
        with self._current() as connection:
            if connection is None:
                self._held.get(document, set()).difference_update(released)
            elif released:
                connection.execute("BEGIN IMMEDIATE")
                rows = ((document, _key(text)) for text in released)
                connection.executemany(f"DELETE FROM {_HOLDERS} WHERE document = ? AND key = ?", rows)
                connection.execute("COMMIT")
            gone = [text for text in released if not self._is_held(connection, text)]
            self.remove(gone)
        return gone

    def remove(self, texts: Iterable[str]) -> int:
        """Forget these texts, whoever has them. How many were known."""
        with self._current() as connection:
            doomed = list(dict.fromkeys(map(_normal, texts)))
            gone = [text for text in doomed if text in self._texts]
            if connection is not None and doomed:  # by their keys: a row of which a bit changed goes as well
                connection.execute("BEGIN IMMEDIATE")
                for table in (_TABLE, _HOLDERS):
                    connection.executemany(f"DELETE FROM {table} WHERE key = ?", ((_key(text),) for text in doomed))
                connection.execute("COMMIT")
            for text in gone:
                del self._texts[text]
                self._index.discard(text)
            for held in self._held.values():
                held.difference_update(gone)
        return len(gone)

    def texts_of(self, document: str) -> set[str]:
        """The texts that a document has."""
        with self._current() as connection:
            return self._texts_of(connection, document)

    @contextmanager
    def holding(self) -> Iterator[Callable[[bytes], bool]]:
        """Nobody adds a text meanwhile, from any process; yields whether one of this key is here. For moments."""
        with self._current() as connection:
            if connection is None:
                yield {_key(text) for text in self._texts}.__contains__
                return
            query = f"SELECT 1 FROM {_TABLE} WHERE key = ?"
            connection.execute("BEGIN IMMEDIATE")
            yield lambda key: connection.execute(query, (key,)).fetchone() is not None
            connection.execute("COMMIT")

    # --- what is stored beside it ---

    def note_stored(self, keys: Iterable[str], fingerprint: str) -> None:
        """Note entries that were stored, by the model of this fingerprint."""
        with self._current() as connection:
            if connection is None:
                self._stored.update(dict.fromkeys(keys, fingerprint))
                return
            known = {key for (key,) in connection.execute(f"SELECT key FROM {_STORED}")}
            new = [(key, fingerprint) for key in dict.fromkeys(keys) if key not in known]
            if new:
                rows = ((*row, row_checksum(*row)) for row in new)
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(f"INSERT OR REPLACE INTO {_STORED} VALUES (?, ?, ?)", rows)
                connection.execute("COMMIT")

    def forget_stored(self, keys: Iterable[str]) -> None:
        """Note that entries are to go, or gone: nobody misses them."""
        with self._current() as connection:
            if connection is None:
                for key in keys:
                    self._stored.pop(key, None)
                return
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(f"DELETE FROM {_STORED} WHERE key = ?", ((key,) for key in keys))
            connection.execute("COMMIT")

    def stored(self) -> dict[str, str]:
        """Keys of entries that were stored and not deleted since, with their model's fingerprint; of sound rows."""
        with self._current() as connection:
            if connection is None:
                return dict(self._stored)
            sound = "WHERE checksum IS row_checksum(key, fingerprint)"  # a damaged key may name no file at all
            return dict(connection.execute(f"SELECT key, fingerprint FROM {_STORED} {sound} ORDER BY key").fetchall())

    # --- its bytes ---

    def problems(self) -> list[str]:
        """Whatever is wrong with the file, a sentence each. Raises CorruptError when it cannot be read at all."""
        with self._current() as connection:
            if connection is None:
                return []
            found = [f"{self.path}: {line}" for (line,) in connection.execute("PRAGMA integrity_check") if line != "ok"]
            for what, rows in _DAMAGED_ROWS.items():
                if count := connection.execute(f"SELECT count(*) {rows}").fetchone()[0]:
                    found.append(f"{self.path}: {count} {what} are not what was written")
            return found

    def drop_damaged(self) -> None:
        """Forget the rows that are not what was written; whoever they were of adds them again."""
        with self._current() as connection:
            for rows in _DAMAGED_ROWS.values() if connection is not None else ():
                assert connection is not None
                connection.execute(f"DELETE {rows}")
        self.close()

    def truncate_log(self) -> None:
        """Let what was removed leave the file's log, where it stands until others have stopped reading."""
        with self._current() as connection:
            if connection is not None:
                truncate_log(connection)

    def close(self) -> None:
        """Free the file. Nothing is lost, and using the registry again opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
                self._forget_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _forked(self) -> None:
        """In a forked process: whoever held the lock is not here, and SQLite wants a connection for each process."""
        self._lock = threading.RLock()
        if self._connection is not None:
            _PARENTS.append(self._connection)  # closed here, it would let go of the parent's locks
            self._connection = None
            self._forget_memory()

    def _forget_memory(self) -> None:
        self._texts: dict[str, None] = {}
        self._index = TextIndex()
        self._last_id = 0
        self._data_version = -1  # SQLite's count of other connections' commits

    def _remember(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._texts:
                self._texts[text] = None
                self._index.add(text)

    def _hold(self, connection: sqlite3.Connection | None, document: str, texts: list[str]) -> None:
        if connection is None:
            self._held.setdefault(document, set()).update(texts)
            return
        query = f"SELECT key FROM {_HOLDERS} WHERE document = ?"
        held = {key for (key,) in connection.execute(query, (document,))}
        missing = [(document, key) for key in map(_key, texts) if key not in held]
        if missing:  # so that adding what is known writes nothing
            connection.execute("BEGIN IMMEDIATE")
            rows = ((*row, row_checksum(*row)) for row in missing)
            connection.executemany(f"INSERT OR IGNORE INTO {_HOLDERS} VALUES (?, ?, ?)", rows)
            connection.execute("COMMIT")

    def _texts_of(self, connection: sqlite3.Connection | None, document: str) -> set[str]:
        if connection is None:
            return set(self._held.get(document, ()))
        query = f"SELECT t.text FROM {_TABLE} t JOIN {_HOLDERS} h ON h.key = t.key WHERE h.document = ?"
        return {text for (text,) in connection.execute(query, (document,))}

    def _is_held(self, connection: sqlite3.Connection | None, text: str, but: str | None = None) -> bool:
        """Whether a document has the text, other than the one named in `but`."""
        if connection is None:
            return any(text in texts for document, texts in self._held.items() if document != but)
        query = f"SELECT 1 FROM {_HOLDERS} WHERE key = ? AND document IS NOT ? LIMIT 1"
        return connection.execute(query, (_key(text), but)).fetchone() is not None

    @contextmanager
    def _current(self) -> Iterator[sqlite3.Connection | None]:
        """Hold the lock, with memory as the file is now; yields the connection, None for a registry in memory."""
        with self._lock:
            if self.path is None:
                yield None
                return
            with _translated(self.path):
                if self._connection is None:
                    self._connection = _open(self.path)
                connection = self._connection
                try:
                    version = int(connection.execute("PRAGMA data_version").fetchone()[0])
                    if version != self._data_version:
                        self._load(connection)
                        self._data_version = version
                    yield connection
                finally:
                    if connection.in_transaction:  # only after an error
                        with suppress(sqlite3.Error):
                            connection.execute("ROLLBACK")

    def _load(self, connection: sqlite3.Connection) -> None:
        """Read what is new; everything, when another process removed something."""
        connection.execute("BEGIN")  # one state of the file for both reads
        newer = f"SELECT id, text, key IS text_key(text) FROM {_TABLE} WHERE id > ? ORDER BY id"
        rows = connection.execute(newer, (self._last_id,)).fetchall()
        count = int(connection.execute(f"SELECT count(*) FROM {_TABLE}").fetchone()[0])
        connection.execute("COMMIT")
        if count != len(self._texts) + len(rows):
            self._texts, self._index = {}, TextIndex()
            rows = connection.execute(newer, (-1,)).fetchall()
        if damaged := sum(not is_sound for _, _, is_sound in rows):
            logger.warning("%d texts in %s are not what was written and match nothing; mend it: ragblend verify "
                           "--repair", damaged, self.path)  # fmt: skip
        self._remember(text for _, text, _ in rows)
        self._last_id = max([self._last_id, *(row_id for row_id, _, _ in rows)])


def _normal(text: str) -> str:
    """The text as it is compared; "" for one that cannot be registered (lone surrogates are no Unicode text)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return ""
    return text.strip()


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _open(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode to a file that holds the tables, made if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(error, path) from error
    if not os.access(path.parent, os.W_OK) and not path.exists():
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.create_function("row_checksum", -1, row_checksum)  # what is added lives as long as the connection
    else:
        connection = connect(path, f"Move {path} away", create=True)
    try:
        connection.create_function("text_key", 1, _key, deterministic=True)
        tables = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
        if tables and tables.keys().isdisjoint(_TABLES):
            raise StoreMismatchError(
                f"{path} is not a registry of chunk texts (it holds the tables {', '.join(sorted(tables))}); "
                "keep the index and the store in different folders: --index DIR --store OTHER_DIR"
            )
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        has_schema = all(tables.get(name) == sql for name, sql in _TABLES.items())
        if tables and has_schema != (version == _VERSION):  # other versions have other tables
            raise CorruptError(
                f"{path} is damaged (version {version} with other tables than that has). {_way_out(path)}"
            )
        if tables and version != _VERSION:
            raise StoreMismatchError(
                f"{path} is version {version} of a registry, this ragblend reads {_VERSION}; delete it and ingest the "
                "documents again: stored KV is found, not recomputed"
            )
        if not tables:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    with translated(path, _way_out(path)):
        yield


def _way_out(path: Path) -> str:
    return (
        f"Mend it: ragblend verify --repair --store {path.parent}; or delete it and ingest the documents again: stored "
        "KV is found, not recomputed"
    )


_OPEN: WeakSet[ChunkRegistry] = WeakSet()
_PARENTS: list[sqlite3.Connection] = []


_FORK_WAIT_S = 1.0
_held: list[Any] = []


def _before_fork() -> None:
    """No thread is inside of SQLite while a process is forked: its own locks would never be let go in the child."""
    _held.extend(each._lock for each in list(_OPEN) if each._lock.acquire(timeout=_FORK_WAIT_S))


def _after_fork() -> None:
    for lock in _held:
        lock.release()
    _held.clear()


def _in_child() -> None:
    _held.clear()
    for registry in list(_OPEN):
        registry._forked()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)

_IN_MEMORY: WeakKeyDictionary[Any, ChunkRegistry] = WeakKeyDictionary()
_IN_MEMORY_LOCK = threading.Lock()


def drop_registry(root: Path) -> None:
    """Remove the registry in a store's directory: damaged beyond reading, it is made anew by whoever adds texts."""
    for suffix in ("-wal", "-shm", ""):
        remove_file(root / f"{REGISTRY_FILE}{suffix}")


def folders_of(store: Any) -> list[Path]:
    """Folders of this machine that a KVStore, whatever it is, keeps its files in."""
    roots = (getattr(tier, "root", None) for tier in getattr(store, "tiers", (store,)))
    return [root for root in roots if isinstance(root, Path)]


def registry_of(store: Any) -> ChunkRegistry:
    """The registry of a KVStore: the file beside its local disk tier, else one in memory that lives with the store."""
    for root in folders_of(store):
        return ChunkRegistry(root / REGISTRY_FILE)
    with _IN_MEMORY_LOCK:
        return _IN_MEMORY.setdefault(store, ChunkRegistry())
