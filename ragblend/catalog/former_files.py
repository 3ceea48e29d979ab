"""Copies rows into the catalogue, once, from the database files of earlier versions.

Most rows keep their checksums, so `verify` still finds the damaged ones.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from ragblend.catalog.schema import DocumentKey
from ragblend.errors import RagblendError, StoreMismatchError
from ragblend.files.directory import remove_file
from ragblend.files.sqlite import connect, wrap_sqlite_errors
from ragblend.files.store_folder import (
    FORMER_INDEX_FILE,
    FORMER_MANIFEST,
    FORMER_REGISTRY_FILE,
    FORMER_SERVER_FILE,
    VECTORS_FILE,
)

log = logging.getLogger(__name__)

_OWNER = "name_part(document, 0), name_part(document, 1), name_part(document, 2)"
_SENT = (
    "namespace, collection, id, ingestion, version, stored_version, metadata, body, reason, num_chunks, num_tokens, "
    "num_known_kv, num_new_kv, new_kv_bytes"
)
_PLACE, _CONTENT = 'document, ordinal, start, "end", text, metadata', "vector, generation, text_hash"
_VARIANTS = "entry, key, embedder, vector, is_stored, checksum"
_COPIES = {
    FORMER_REGISTRY_FILE: (
        ("texts (key, text)", "key, text FROM registered_texts ORDER BY id"),
        (
            "document_texts (collection, id, namespace, key, start, checksum)",
            f"{_OWNER}, key, 0, row_checksum({_OWNER}, key, 0) FROM text_holders "
            "WHERE checksum IS row_checksum(document, key)",
        ),
        (
            "document_facts (collection, id, namespace, version, source, checksum)",
            f"{_OWNER}, version, '', row_checksum({_OWNER}, version, '') FROM document_versions "
            "WHERE checksum IS row_checksum(document, version)",
        ),
        ("stored_entries (entry, fingerprint, checksum)", "key, fingerprint, checksum FROM stored_kv"),
        ("entry_chunks (ids_hash, namespace, entry, checksum)", "* FROM chunk_entries"),
        (f"variants ({_VARIANTS})", f"{_VARIANTS} FROM similar_variants ORDER BY id"),
        (f"variants ({_VARIANTS})", f"{_VARIANTS} FROM similar_versions ORDER BY entry"),  # an older version
        (
            "token_ids (tokenizer, namespace, key, ids, checksum)",
            "tokenizer, namespace, key, ids, checksum FROM chunk_token_ids ORDER BY id",
        ),
    ),
    FORMER_SERVER_FILE: ((f"sent_documents ({_SENT})", f"{_SENT} FROM documents ORDER BY number"),),
    FORMER_INDEX_FILE: (
        ("documents (number, source, file, content_hash, status, checksum)", "* FROM documents ORDER BY id"),
        ("index_facts (name, value, checksum)", "key, value, checksum FROM meta"),
        ("files (path, version, top, checksum)", "* FROM files"),
        (
            f"chunks (id, {_PLACE}, vector, generation, text_key, checksum)",
            f"id, {_PLACE}, {_CONTENT}, iif(checksum IS row_checksum(id, chunk_id, {_PLACE}, num_tokens, {_CONTENT}), "
            f"row_checksum(id, {_PLACE}, {_CONTENT}), -1) FROM chunks ORDER BY id",
        ),
        (
            "orphaned_texts (source, text, checksum)",
            "source, text, row_checksum(source, text) FROM leftovers "
            "WHERE behind = '' AND checksum IS row_checksum(id, source, text, behind) ORDER BY id",
        ),
        (
            "pending_deletions (key, place, source, text_key, checksum)",
            "key, place, source, text_hash, row_checksum(key, place, source, text_hash) FROM doomed "
            "WHERE checksum IS row_checksum(key, place, source, text_hash, behind_hash) ORDER BY rowid",
        ),
    ),
}
"""For each file: pairs of the target table with its columns, and the columns and table to select from."""
_INDEX_VERSION = 3
_NAME = re.compile(r"(?:@([^/]*)/)?(\w+\(.*?\)|[^/]*)/(.*)", re.DOTALL)


def import_former_files(folder: Path, connection: sqlite3.Connection, *, removes_files: bool) -> None:
    """Copy the rows of an earlier version's database files into the catalogue.

    `folder`: the store's folder, which contains the files. `connection`: to the catalogue. `removes_files`: remove each
    file after it was copied. If the process is killed, the next call copies the remaining files. Raises CorruptError
    for a damaged file, StoreMismatchError for an index of an unsupported version.
    """
    for name, copies in _COPIES.items():
        path = folder / name
        if not path.exists():
            continue
        again = "ingest the documents again: stored KV is found, not recomputed"
        fix = f"Delete it and {again}. Or ragblend verify --repair --store {folder}"
        try:
            with wrap_sqlite_errors(path, fix), closing(connect(path, fix)) as former:
                num_rows = _copy(former, connection, copies, path)
        except RagblendError:
            if path.exists():
                raise
            continue  # another process has copied it
        if removes_files:
            others = (VECTORS_FILE, FORMER_MANIFEST) if name == FORMER_INDEX_FILE else ()
            for each in (*others, f"{name}-wal", f"{name}-shm", name):
                remove_file(folder / each)
        what = f"{num_rows} {'texts' if name == FORMER_REGISTRY_FILE else 'documents'}"
        log.warning("%s was written by an earlier version; its %s were copied into the catalogue", path, what)


def _copy(
    former: sqlite3.Connection, connection: sqlite3.Connection, copies: Sequence[tuple[str, str]], path: Path
) -> int:
    """Copy the tables. Return the number of rows of the first one."""
    former.create_function("name_part", 2, lambda document, part: _split(str(document))[part], deterministic=True)
    former.execute("BEGIN")
    connection.execute("BEGIN IMMEDIATE")
    with former, connection:  # both commit, or roll back after an error
        tables = {name for (name,) in former.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if path.name == FORMER_INDEX_FILE and tables:
            _check_index(former, path)
        # A process that was killed before it removed the index file had copied all of it, and the copy may be newer.
        is_read = path.name == FORMER_INDEX_FILE and connection.execute("SELECT 1 FROM index_facts").fetchone()
        for target, selected in () if is_read else copies:
            if selected.partition(" FROM ")[2].partition(" ")[0] in tables:
                marks = ", ".join("?" * (target.count(",") + 1))
                insert = f"INSERT OR IGNORE INTO {target} VALUES ({marks})"
                connection.executemany(insert, former.execute(f"SELECT {selected}"))
        table = copies[0][0].partition(" ")[0]
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _check_index(former: sqlite3.Connection, path: Path) -> None:
    """Raise StoreMismatchError unless the index has the last version before the catalogue."""
    version = former.execute("PRAGMA user_version").fetchone()[0]
    if version != _INDEX_VERSION:
        raise StoreMismatchError(
            f"{path} has index schema {version}, but this ragblend reads schema {_INDEX_VERSION}; use the ragblend "
            "that made it, or ingest again into a new folder"
        )


def _split(name: str) -> DocumentKey:
    """Parse a document's name, whose parts earlier versions separated by slashes.

    >>> [tuple(_split(name)) for name in ("langchain/a/b", "@tenant/notes/1", "Chroma(path=/a/b)/1", "index:12")]
    [('langchain', 'a/b', ''), ('notes', '1', 'tenant'), ('Chroma(path=/a/b)', '1', ''), ('index:12', '', '')]
    """
    found = _NAME.fullmatch(name)
    return DocumentKey(found[2], found[3], unquote(found[1] or "")) if found is not None else DocumentKey(name)
