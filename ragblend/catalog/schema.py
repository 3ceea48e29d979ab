"""The tables of the catalogue, for SQLAlchemy. Opens no database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    and_,
    bindparam,
    insert,
)
from sqlalchemy.types import UserDefinedType

from ragblend.option_fields import is_unicode

SCHEMA_VERSION = 1
METADATA = MetaData()


INDEX_MARK = "index:"
"""Prefix of the collections that stand for an index."""


class DocumentKey(NamedTuple):
    """Key of a document in a catalogue: its collection, its id, and the namespace that it belongs to.

    A document of the index that the catalogue has: INDEX_MARK, its source and "". An index in another catalogue is one
    document here, with all texts of which the store has KV: `ChunkIndex.collection`, "" and "".
    """

    collection: str = ""
    id: str = ""
    namespace: str = ""

    @property
    def name(self) -> str:
        """The document's name in commands: COLLECTION/ID."""
        return f"{self.collection}/{self.id}".rstrip("/")

    def parameters(self) -> dict[str, object]:
        """Return the parameters of a statement with the condition `equals_parameters(table, *DocumentKey._fields)`."""
        return {f"b_{name}": value for name, value in self._asdict().items()}


class DocumentFacts(NamedTuple):
    """The version of a document, and its source: the file, page or address that it came from. "" if unknown."""

    version: str = ""
    source: str = ""


class Blob(UserDefinedType[bytes]):
    """Column type for bytes. A damaged row may have a value of another type, which this class returns as it is.

    SQLAlchemy's LargeBinary would convert that value.
    """

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the SQL name of the type."""
        return "BLOB"


class EscapedText(TypeDecorator[str]):
    """Column type for text that PostgreSQL sorts by its bytes.

    PostgreSQL rejects NUL characters, so each is stored as two other characters.
    """

    impl = Text(collation="C")
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:
        """Return the text with NUL characters escaped."""
        return value if value is None else value.replace("\x1a", "\x1a1").replace("\x00", "\x1a0")

    def process_result_value(self, value: str | None, dialect: object) -> str | None:
        """Return the text with NUL characters restored."""
        return value if value is None else value.replace("\x1a0", "\x00").replace("\x1a1", "\x1a")


POSTGRES = "postgresql"
INTEGER = Integer().with_variant(BigInteger(), POSTGRES)
TEXT = Text().with_variant(EscapedText(), POSTGRES)
BLOB = Blob().with_variant(LargeBinary(), POSTGRES)


def _blob(name: str) -> Column[bytes]:
    return Column(name, BLOB, nullable=False)


def _text(name: str) -> Column[str]:
    return Column(name, TEXT, nullable=False)


def _number() -> Column[int]:
    return Column("number", INTEGER, primary_key=True)


def _table(name: str, *columns: Column[Any] | UniqueConstraint, key: str = "") -> Table:
    """Return a table. `key`: the columns of the primary key; "" if one column already is the primary key.

    SQLite never gives the `number` of a deleted row to another one.
    """
    for column in columns:
        if isinstance(column, Column):
            column.primary_key = column.primary_key or column.name in key.split()
    is_numbered = columns[0].name == "number"
    return Table(name, METADATA, *columns, sqlite_autoincrement=is_numbered, sqlite_with_rowid=not key)


def _partial_index(name: str, *columns: Column[Any], where: ColumnElement[bool], unique: bool = False) -> Index:
    """Create an index of the rows that meet the condition `where`."""
    return Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


FACTS = Table("facts", METADATA, Column("name", TEXT, primary_key=True), _text("value"))
"""Facts of the catalogue and of its index, and the names of models by fingerprint."""
TEXTS = _table("texts", _number(), Column("key", BLOB, nullable=False, unique=True), _text("text"))
"""The texts of chunks, without white space at their ends. A text lives while a row of CHUNKS has its key."""
ENTRIES = _table(
    "entries", *(_text(name) for name in ("key", "fingerprint", "namespace")), Column("ids_hash", BLOB), key="key"
)
"""Entries, each with the namespace and the hash of the token ids of its chunk, NULL if unknown. `fingerprint`: of the
model if the entry was stored completely and not deleted, else ""."""
Index("entries_by_chunk", ENTRIES.c.ids_hash, ENTRIES.c.namespace)
TOKEN_IDS = _table(
    "token_ids",
    _number(),
    _text("tokenizer"),
    _text("namespace"),
    _blob("key"),
    _blob("ids"),
    UniqueConstraint("key", "tokenizer", "namespace"),
)
"""The token ids of texts, for each tokenizer (its fingerprint) and namespace."""


class SentDocumentCounts(NamedTuple):
    """Counts of one stored document. Known KV: entries that were stored before. New KV: entries that were added."""

    num_chunks: int = 0
    num_tokens: int = 0
    num_known_kv: int = 0
    num_new_kv: int = 0
    new_kv_bytes: int = 0


_DOCUMENT_TEXTS = "source version file_version top ingestion sent_version stored_version metadata reason"
DOCUMENTS = _table(
    "documents",
    _number(),
    *(_text(name) for name in ("namespace", "collection", "id")),
    *(Column(name, TEXT, nullable=False, server_default="") for name in _DOCUMENT_TEXTS.split()),
    Column("body", TEXT),
    *(Column(name, INTEGER, nullable=False, server_default="0") for name in SentDocumentCounts._fields),
    UniqueConstraint("namespace", "collection", "id"),
)
"""Documents with chunks, a source, a version or a status.

- Of an index: `collection` is INDEX_MARK, `id` the document's source, `source` its file, `version` its content hash.
  `file_version` and `top` are those of the file (`IngestedFile`), the same in each document of the file.
- Of frameworks: `source` and `version` are its DocumentFacts.
- Sent to a server: `ingestion` is not "". `sent_version` was sent last, `stored_version` stored last. `body` is set
  while it waits. It has DocumentFacts, too, once it is stored.
"""
Index("documents_by_source", DOCUMENTS.c.source)
IS_INDEXED = and_(DOCUMENTS.c.namespace == "", DOCUMENTS.c.collection == INDEX_MARK)
"""Condition for the documents of an index."""
IS_OF_INDEX = DOCUMENTS.c.collection.startswith(INDEX_MARK) & (IS_INDEXED | (DOCUMENTS.c.id == ""))
"""Condition for the documents of an index of this or of another catalogue, whose texts every namespace keeps: an index
has no namespace until an engine ingests into it, and its documents may be there before."""
IS_SENT = DOCUMENTS.c.ingestion != ""
"""Condition for the documents that clients sent to a server."""
_partial_index("documents_waiting", DOCUMENTS.c.namespace, DOCUMENTS.c.number, where=DOCUMENTS.c.body.is_not(None))

SHARED_METADATA = MetaData()
"""Additional tables of a catalogue that several servers share."""
LEASES = Table(
    "leases",
    SHARED_METADATA,
    Column("name", EscapedText, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
)
"""The server that works on each document, and the end of its lease."""
CHUNKS = Table(
    "chunks",
    METADATA,
    *(Column(name, INTEGER, nullable=False) for name in ("document", "ordinal")),
    _blob("key"),
    *(Column(name, INTEGER, nullable=False, server_default="0") for name in ("start", "end")),
    *(Column(name, TEXT, nullable=False, server_default="") for name in ("before", "after", "metadata")),
    Column("id", INTEGER),
    Column("vector", BLOB),
    Column("generation", INTEGER),
    UniqueConstraint("document", "ordinal"),
)
"""The chunks of documents: the number of the document, and the key of the text.

- start, end: offsets of the chunk in the document, in characters; 0 if unknown.
- before, after: the white space around the text.
- id, vector, generation: of the chunks of an index (see `IndexRows`), NULL for others.
"""
Index("chunks_by_text", CHUNKS.c.key, CHUNKS.c.document)
IN_DOCUMENT = CHUNKS.c.document == DOCUMENTS.c.number
"""Condition for the chunks of a document."""
HAS_VECTOR = CHUNKS.c.id.is_not(None)
"""Condition for the chunks of an index."""
_partial_index("chunks_by_id", CHUNKS.c.id, where=HAS_VECTOR, unique=True)
_partial_index("chunks_with_vector_by_text", CHUNKS.c.key, CHUNKS.c.id, where=HAS_VECTOR)
# A search lists new chunks from this index alone, without reading texts and vectors.
_partial_index(
    "chunks_by_generation", CHUNKS.c.generation, CHUNKS.c.document, CHUNKS.c.ordinal, CHUNKS.c.id, where=HAS_VECTOR
)


DELETIONS = _table("deletions", _number(), *(_text(name) for name in ("key", "tier", "source")))
"""Entries that have to be deleted from a tier. A row stays while a remote tier is unreachable, and contains no text.

tier: a value of `Ledger.local_tier`, or a remote tier's URL. source: the document that had the text; "" if unknown."""
Index("deletions_by_key", DELETIONS.c.key)
LOST_TEXTS = _table("lost_texts", _number(), *(_text(name) for name in ("source", "text")))
"""Texts that documents of the index (`source`) have lost, until the deletion of their entries is recorded."""


def insert_rows(connection: Connection, table: Table, rows: Iterable[Mapping[str, object]]) -> int:
    """Insert rows. Return their number."""
    listed = [dict(row) for row in rows]
    if listed:
        connection.execute(insert(table), listed)
    return len(listed)


def normalize_text(text: str) -> str:
    """Return the stripped text; "" if it contains lone surrogates, which are not valid Unicode."""
    return text.strip() if is_unicode(text) else ""


def text_key(stripped: str) -> bytes:
    """Return the key of a text, a hash of 16 bytes. The caller strips the text first."""
    return hashlib.blake2b(stripped.encode(), digest_size=16).digest()


def text_id(text: str) -> str:
    """Return the id of a document that is identified by its text alone: the text's key as 32 hex digits."""
    return hashlib.blake2b(text.strip().encode(errors="surrogatepass"), digest_size=16).hexdigest()


MAX_VALUES = 500
"""Values of one `IN` list, because databases limit their number."""


def split_into_batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the values in lists of at most `MAX_VALUES`."""
    listed = list(values)
    return (listed[start : start + MAX_VALUES] for start in range(0, len(listed), MAX_VALUES))


def equals_parameters(table: Table, *names: str) -> ColumnElement[bool]:
    """Return the condition that each of the columns `names` equals the statement's parameter `b_<name>`."""
    return and_(*(table.c[name] == bindparam(f"b_{name}") for name in names))


def is_in_values(column: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that a column's value is in the statement's parameter `values`, a list."""
    return column.in_(bindparam("values", expanding=True))


def find_existing(connection: Connection, query: Select[Any], values: Iterable[Any], **parameters: object) -> set[Any]:
    """Return those of `values` that are in a column of the database.

    `query`: selects the column, with the condition `is_in_values(column)`. `parameters`: the query's other parameters.
    """
    existing: set[Any] = set()
    for some in split_into_batches(values):
        existing.update(connection.execute(query, {"values": some, **parameters}).scalars())
    return existing
