"""Files of earlier versions, whose rows are read into the catalogue once.

Rows that are not what was written are left out: the documents that they belonged to add them again when ingested.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import Connection, Table, select

from ragblend.catalog.schema import (
    DOCUMENT_TEXTS,
    ENTRY_CHUNKS,
    SENT_DOCUMENTS,
    STORED_ENTRIES,
    TEXTS,
    TOKEN_IDS,
    VARIANTS,
    VERSIONS,
    DocumentName,
    text_key,
    with_checksum,
)
from ragblend.errors import RagblendError
from ragblend.files.directory import remove_file
from ragblend.files.sqlite import connect, row_checksum, transaction, wrap_sqlite_errors
from ragblend.files.store_folder import FORMER_REGISTRY_FILE, FORMER_SERVER_FILE

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?:@([^/]*)/)?(\w+\(.*?\)|[^/]*)/(.*)", re.DOTALL)
_OR_REPAIR = "Or ragblend verify --repair --store "
_VARIANT_TABLES = ("similar_variants", "similar_versions")  # the latter of versions 3 and 4


def read_former_files(folder: Path, connection: Connection, *, is_kept: bool) -> None:
    """Read the files of an earlier version into the catalogue, and remove them where the catalogue `is_kept`.

    Killed in between, the next call does the rest. Raises CorruptError for a damaged file.
    """
    for name, copy in ((FORMER_REGISTRY_FILE, _copy_registry), (FORMER_SERVER_FILE, _copy_sent_documents)):
        path = folder / name
        if not path.exists():
            continue
        fix = f"Delete it and ingest the documents again: stored KV is found, not recomputed. {_OR_REPAIR}{folder}"
        try:
            with (
                wrap_sqlite_errors(path, fix),
                closing(connect(path, fix)) as former,
                transaction(former, "IMMEDIATE" if is_kept else "DEFERRED"),
                _transaction(connection),
            ):
                what = copy(former, connection)
        except RagblendError:
            if path.exists():
                raise
            continue  # another process has read it in
        if is_kept:
            for suffix in ("-wal", "-shm", ""):
                remove_file(Path(f"{path}{suffix}"))
        log.warning("%s was written by an earlier version: its %s are in the catalogue now", path, what)


@contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        yield
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise


def _copy_registry(former: sqlite3.Connection, connection: Connection) -> str:
    """Copy the texts and all that is known of them. Return how many they were, in words."""
    tables = {name for (name,) in former.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    num_damaged = 0

    def rows(table: str, columns: str, num_checked: int) -> Iterator[list[Any]]:
        nonlocal num_damaged
        if table in tables:
            order = "id" if table in ("chunk_token_ids", "similar_variants") else columns.split(",")[0]
            for *values, checksum in former.execute(f"SELECT {columns}, checksum FROM {table} ORDER BY {order}"):
                if checksum == row_checksum(*values[:num_checked]):
                    yield values
                else:
                    num_damaged += 1

    texts = [
        {"key": key, "text": content}
        for key, content in former.execute("SELECT key, text FROM registered_texts ORDER BY id")
        if isinstance(content, str) and key == text_key(content)
    ]
    num_damaged += former.execute("SELECT count(*) FROM registered_texts").fetchone()[0] - len(texts)
    _insert_missing(connection, TEXTS, ("key",), texts)
    versions = [
        with_checksum(VERSIONS, **_split(name)._asdict(), version=version)
        for name, version in rows("document_versions", "document, version", 2)
    ]
    _insert_missing(connection, VERSIONS, DocumentName._fields, versions)
    owners = [(_split(name), key) for name, key in rows("text_holders", "document, key", 2)]
    _insert_missing(
        connection,
        DOCUMENT_TEXTS,
        (*DocumentName._fields, "key"),
        [with_checksum(DOCUMENT_TEXTS, **name._asdict(), key=key) for name, key in owners],
    )
    _insert_missing(
        connection,
        STORED_ENTRIES,
        ("entry",),
        [with_checksum(STORED_ENTRIES, entry=e, fingerprint=f) for e, f in rows("stored_kv", "key, fingerprint", 2)],
    )
    chunks_of_entries = list(rows("chunk_entries", "ids_hash, namespace, entry", 3))
    if num_damaged:  # the entries in the store's folder are to be read and recorded again
        chunks_of_entries = [row for row in chunks_of_entries if row[2]]
    _insert_missing(
        connection,
        ENTRY_CHUNKS,
        ("ids_hash", "namespace", "entry"),
        [
            with_checksum(ENTRY_CHUNKS, ids_hash=ids_hash, namespace=namespace, entry=entry)
            for ids_hash, namespace, entry in chunks_of_entries
        ],
    )
    variants = [
        with_checksum(VARIANTS, entry=entry, key=key, embedder=embedder, vector=vector, is_stored=is_stored)
        for table in _VARIANT_TABLES
        for entry, key, embedder, vector, is_stored in rows(table, "entry, key, embedder, vector, is_stored", 4)
    ]
    _insert_missing(connection, VARIANTS, ("entry",), variants)
    ids = [
        with_checksum(TOKEN_IDS, tokenizer=tokenizer, namespace=namespace, key=key, ids=ids)
        for tokenizer, namespace, key, ids in rows("chunk_token_ids", "tokenizer, namespace, key, ids", 4)
    ]
    _insert_missing(connection, TOKEN_IDS, ("key", "tokenizer", "namespace"), ids)
    return f"{len(texts)} texts" + (f" ({num_damaged} damaged rows are left out)" if num_damaged else "")


def _copy_sent_documents(former: sqlite3.Connection, connection: Connection) -> str:
    """Copy the documents that a server was sent. Return how many they were, in words."""
    columns = [column.name for column in SENT_DOCUMENTS.columns if column.name != "number"]
    found = former.execute(f"SELECT {', '.join(columns)} FROM documents ORDER BY number")
    rows = [dict(zip(columns, row, strict=True)) for row in found]
    _insert_missing(connection, SENT_DOCUMENTS, ("namespace", "collection", "id"), rows)
    return f"{len(rows)} documents"


def _insert_missing(connection: Connection, table: Table, key: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    known = {tuple(row) for row in connection.execute(select(*(table.c[name] for name in key)))} if rows else set()
    if new := [row for row in rows if tuple(row[name] for name in key) not in known]:
        connection.execute(table.insert(), new)


def _split(name: str) -> DocumentName:
    """Return the name of a document, which earlier versions wrote with slashes between its parts.

    >>> [tuple(_split(name)) for name in ("langchain/a/b", "@tenant/notes/1", "Chroma(path=/a/b)/1", "index:12")]
    [('langchain', 'a/b', ''), ('notes', '1', 'tenant'), ('Chroma(path=/a/b)', '1', ''), ('index:12', '', '')]
    """
    found = _NAME.fullmatch(name)
    return DocumentName(found[2], found[3], unquote(found[1] or "")) if found is not None else DocumentName(name)
