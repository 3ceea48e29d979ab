"""`DocumentRows`: the documents of a ledger by collection, id and namespace, and their texts.

A text lives while a document has a chunk with it: there is no other rule. Two texts are identical if they are equal
after `strip()`. When the last document of a namespace loses a text, its KV can be deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from sqlalchemy import Connection, bindparam, delete, exists, func, insert, select, update

from ragblend.catalog.entries import EntryRows
from ragblend.catalog.schema import (
    CHUNKS,
    DOCUMENTS,
    IN_DOCUMENT,
    IS_INDEXED,
    IS_OF_INDEX,
    IS_SENT,
    TEXTS,
    TOKEN_IDS,
    DocumentFacts,
    DocumentKey,
    equals_parameters,
    find_existing,
    insert_rows,
    is_in_values,
    normalize_text,
    split_into_batches,
    text_key,
)

OF_DOCUMENT = equals_parameters(DOCUMENTS, *DocumentKey._fields)
HAS_CHUNKS = exists(CHUNKS.c.document).where(IN_DOCUMENT)
_KNOWN_KEYS = select(TEXTS.c.key).where(is_in_values(TEXTS.c.key))
_HAS_OWNER = exists(CHUNKS.c.document).where(CHUNKS.c.key == TEXTS.c.key)
_IS_OWNER = IN_DOCUMENT & ((DOCUMENTS.c.namespace == bindparam("b_namespace")) | IS_OF_INDEX)
_KEYS_OF_NAMESPACE = _KNOWN_KEYS.where(_HAS_OWNER.where(_IS_OWNER))
_NUMBER = select(DOCUMENTS.c.number).where(OF_DOCUMENT)
_CHUNKS_OF = select(CHUNKS.c.key, CHUNKS.c.start).join(DOCUMENTS, IN_DOCUMENT).where(OF_DOCUMENT)
_STARTS_OF = _CHUNKS_OF.where(is_in_values(CHUNKS.c.key))
_TEXTS_OF = _CHUNKS_OF.join(TEXTS, TEXTS.c.key == CHUNKS.c.key).add_columns(TEXTS.c.text)
_NEXT_ORDINAL = select(func.coalesce(func.max(CHUNKS.c.ordinal) + 1, 0)).where(equals_parameters(CHUNKS, "document"))
_REMOVE_CHUNKS = delete(CHUNKS).where(equals_parameters(CHUNKS, "document", "key"))
_REMOVE_EMPTY = delete(DOCUMENTS).where(
    equals_parameters(DOCUMENTS, "number"),
    DOCUMENTS.c.version == "",
    DOCUMENTS.c.source == "",
    ~IS_SENT,
    ~HAS_CHUNKS,
)
_NAMES = [DOCUMENTS.c[name] for name in DocumentKey._fields]
_OWNERS_OF = select(*_NAMES).join(CHUNKS, IN_DOCUMENT).where(~IS_INDEXED, equals_parameters(CHUNKS, "key")).distinct()
_FACTS = select(DOCUMENTS.c.version, DOCUMENTS.c.source).where(OF_DOCUMENT)


class DocumentRows(EntryRows):
    """The part of `Ledger` with documents and their texts."""

    # --- reading ---

    def texts(self) -> Iterator[str]:
        """Yield the texts, stripped, in the order of addition."""
        is_visible = TEXTS.c.text != ""  # an index may have a blank chunk
        return (row.text for row in self._rows(select(TEXTS.c.text).where(is_visible).order_by(TEXTS.c.number)))

    def text_keys(self) -> set[bytes]:
        """Return the keys of all texts."""
        return {row.key for row in self._rows(select(TEXTS.c.key))}

    def text_of(self, key: bytes) -> str:
        """Return the text with this key; "" if no document has it."""
        return next((str(row.text) for row in self._rows(select(TEXTS.c.text).where(TEXTS.c.key == key))), "")

    def texts_of(self, document: DocumentKey, before: int | None = None) -> set[str]:
        """Return the texts that belong to a document. before: only texts whose middle is before this offset."""
        rows = self._rows(_TEXTS_OF, **document.parameters())
        return {row.text for row in rows if before is None or row.start + len(row.text) / 2 < before}

    def text_keys_of(self, document: DocumentKey) -> set[bytes]:
        """Return the keys of the texts that belong to a document."""
        return {row.key for row in self._rows(_CHUNKS_OF, **document.parameters())}

    def documents_of(self, text: str) -> list[DocumentKey]:
        """Return the names of the documents that have a text, without those of the catalogue's index."""
        rows = self._rows(_OWNERS_OF.order_by(*_NAMES), b_key=text_key(normalize_text(text)))
        return [DocumentKey(*row) for row in rows]

    def ids_beginning_with(self, prefix: str, collection: str, namespace: str) -> list[str]:
        """Return the ids of a collection's documents with chunks that begin with `prefix`, which is not empty."""
        columns, behind = DOCUMENTS.c, prefix[:-1] + chr(ord(prefix[-1]) + 1)
        query = select(columns.id).where(columns.namespace == namespace, columns.collection == collection)
        query = query.where(columns.id >= prefix, columns.id < behind, HAS_CHUNKS)
        return [row.id for row in self._rows(query.order_by(columns.id))]

    def facts_of(self, document: DocumentKey) -> DocumentFacts:
        """Return the version and the source of a document that `set_facts` recorded."""
        rows = self._rows(_FACTS, **document.parameters())
        return DocumentFacts(*rows[0]) if rows else DocumentFacts()

    def find_unowned_texts(self, texts: Iterable[str], namespace: str) -> list[str]:
        """Return the `texts` that neither an index nor a document of `namespace` has. Duplicates and blank texts are
        left out."""
        key_of = {text: text_key(stripped) for text in texts if (stripped := normalize_text(text))}
        with self._locked() as connection:
            owned = find_existing(connection, _KEYS_OF_NAMESPACE, set(key_of.values()), b_namespace=namespace)
        return [text for text, key in key_of.items() if key not in owned]

    # --- writing: adding known texts writes nothing ---

    def add_texts(self, texts_of: Mapping[DocumentKey, Mapping[str, int]]) -> int:
        """Add texts, except blank ones, to documents, in one transaction. Return the number of texts that no document
        had before.

        texts_of: for each document, the offset of each of its texts in the document, in characters; 0 if unknown.
        """
        text_of: dict[bytes, str] = {}
        starts_of: dict[DocumentKey, dict[bytes, int]] = {}
        for document, starts in texts_of.items():
            stripped = {text: start for each, start in starts.items() if (text := normalize_text(each))}
            starts_of[document] = {text_key(text): start for text, start in stripped.items()}
            text_of |= {text_key(text): text for text in stripped}
        with self._locked() as connection:
            if not _find_missing_texts(connection, text_of) and not any(
                _find_missing_chunks(connection, document, by_key) for document, by_key in starts_of.items()
            ):
                return 0
            with self.write_transaction():  # another process may have inserted some rows
                num_new = self._insert_texts(connection, text_of)
                for document, by_key in starts_of.items():
                    if missing := _find_missing_chunks(connection, document, by_key):
                        _add_chunks(connection, document, missing)
        return num_new

    def set_facts(self, facts: Mapping[DocumentKey, DocumentFacts]) -> None:
        """Record the version and the source of documents. A document without both and without chunks is removed."""
        if facts:
            with self.write_transaction() as connection:
                for document, each in facts.items():
                    values, key = each._asdict(), document.parameters()
                    is_present = connection.execute(update(DOCUMENTS).where(OF_DOCUMENT).values(**values), key).rowcount
                    if not is_present and any(each):
                        insert_document(connection, {**document._asdict(), **values})
                    elif is_present and not any(each):
                        connection.execute(_REMOVE_EMPTY, {"b_number": find_number(connection, document)})

    def remove_texts(self, texts_of: Mapping[DocumentKey, Iterable[str]], namespace: str) -> list[str]:
        """Remove texts from documents. Return those that neither an index nor a document of `namespace` has any more.

        Their token ids for the namespace are deleted. Texts that no document has are deleted with all token ids.
        """
        removed = {
            name: {text_key(text): text for text in map(normalize_text, texts)} for name, texts in texts_of.items()
        }
        text_of = {key: text for texts in removed.values() for key, text in texts.items()}
        if not text_of:
            return []
        with self.write_transaction() as connection:
            for document, texts in removed.items():
                number = find_number(connection, document)
                if number is not None and texts:
                    connection.execute(_REMOVE_CHUNKS, [{"b_document": number, "b_key": key} for key in texts])
                    connection.execute(_REMOVE_EMPTY, {"b_number": number})
            released = set(text_of) - find_existing(connection, _KEYS_OF_NAMESPACE, text_of, b_namespace=namespace)
            if left := released - self._delete_texts_without_document(connection, released):
                values = [{"b_namespace": namespace, "b_key": key} for key in left]
                connection.execute(delete(TOKEN_IDS).where(equals_parameters(TOKEN_IDS, "namespace", "key")), values)
                self._count_id_removal(connection)
        return [text for key, text in text_of.items() if key in released]

    @staticmethod
    def _insert_texts(connection: Connection, text_of: Mapping[bytes, str]) -> int:
        """Insert texts by their keys, in the transaction that adds their chunks. Return the number of new ones."""
        missing = _find_missing_texts(connection, text_of)
        return insert_rows(connection, TEXTS, ({"key": key, "text": text_of[key]} for key in missing))

    def _delete_texts_without_document(self, connection: Connection, keys: Iterable[bytes]) -> set[bytes]:
        """Delete those of the texts with these keys that no document has, with all of their token ids, in the
        transaction that removes chunks. Return their keys."""
        keys = {*keys}
        without = keys - find_existing(connection, _KNOWN_KEYS.where(_HAS_OWNER), keys)
        if without:
            values = [{"b_key": key} for key in without]
            for table in (TEXTS, TOKEN_IDS):
                connection.execute(delete(table).where(equals_parameters(table, "key")), values)
            self._count_id_removal(connection)
        return without


def find_number(connection: Connection, document: DocumentKey) -> int | None:
    """Return the number of a document's row; None without one."""
    number: int | None = connection.execute(_NUMBER, document.parameters()).scalar()
    return number


def insert_document(connection: Connection, values: Mapping[str, object]) -> int:
    """Insert a document's row. Return its number."""
    inserted = connection.execute(insert(DOCUMENTS), dict(values)).inserted_primary_key
    assert inserted is not None
    return int(inserted[0])


def _add_chunks(connection: Connection, document: DocumentKey, starts: Mapping[bytes, int]) -> None:
    """Add chunks to a document, in place of those with the same texts. starts: offsets by the texts' keys."""
    number = find_number(connection, document)
    if number is None:
        number = insert_document(connection, document._asdict())
    else:
        connection.execute(_REMOVE_CHUNKS, [{"b_document": number, "b_key": key} for key in starts])
    first = connection.execute(_NEXT_ORDINAL, {"b_document": number}).scalar_one()
    rows = ({"document": number, "key": key, "start": start} for key, start in starts.items())
    insert_rows(connection, CHUNKS, ({**row, "ordinal": first + place} for place, row in enumerate(rows)))


def _find_missing_texts(connection: Connection, keys: Collection[bytes]) -> list[bytes]:
    """Return those of the keys of texts that no text has."""
    present = find_existing(connection, _KNOWN_KEYS, keys)
    return [key for key in keys if key not in present]


def _find_missing_chunks(
    connection: Connection, document: DocumentKey, starts: Mapping[bytes, int]
) -> dict[bytes, int]:
    """Return the chunks that a document lacks, or has at another offset. `starts`: offsets by the texts' keys."""
    start_of: dict[bytes, int] = {}
    for some in split_into_batches(starts):
        rows = connection.execute(_STARTS_OF, {**document.parameters(), "values": some})
        start_of.update((row.key, row.start) for row in rows)
    return {key: start for key, start in starts.items() if start_of.get(key) != start}
