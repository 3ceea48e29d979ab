"""`TokenIdRows`: the token ids of texts in a ledger, for each tokenizer and namespace. `engine.matching` finds them in
prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, delete, func, select

from ragblend.catalog.database import Catalog
from ragblend.catalog.schema import (
    CHUNKS,
    DOCUMENTS,
    IN_DOCUMENT,
    IS_INDEXED,
    TEXTS,
    TOKEN_IDS,
    equals_parameters,
    find_existing,
    insert_rows,
    is_in_values,
    normalize_text,
    split_into_batches,
    text_key,
)
from ragblend.option_fields import is_unicode

_ID_DTYPE = np.dtype("<u4")
_OF_OWNER = equals_parameters(TOKEN_IDS, "tokenizer", "namespace")
_AFTER_NUMBER = TOKEN_IDS.c.number > bindparam("number")
_IDS_AFTER = select(TOKEN_IDS.c.number, TOKEN_IDS.c.ids).where(_AFTER_NUMBER, _OF_OWNER).order_by(TOKEN_IDS.c.number)
_IDS_OF_NUMBER = select(TOKEN_IDS.c.ids).where(equals_parameters(TOKEN_IDS, "number"))
_DOCUMENTS_WITH_IDS = (  # unsorted, for else SQLite reads all documents of the namespace in their order
    select(DOCUMENTS.c.collection, DOCUMENTS.c.id, CHUNKS.c.key)
    .join(CHUNKS, IN_DOCUMENT)
    .join(TOKEN_IDS, TOKEN_IDS.c.key == CHUNKS.c.key)
    .where(equals_parameters(TOKEN_IDS, "number"), equals_parameters(DOCUMENTS, "namespace"))
    .where(DOCUMENTS.c.id != "", ~IS_INDEXED)
)
_TEXTS_WITH_IDS = (
    select(TEXTS.c.text, TOKEN_IDS.c.ids)
    .join(TOKEN_IDS, TOKEN_IDS.c.key == TEXTS.c.key)
    .where(is_in_values(TOKEN_IDS.c.ids), _OF_OWNER)
)
_KEYS_WITH_IDS = select(TOKEN_IDS.c.key).where(is_in_values(TOKEN_IDS.c.key), _OF_OWNER)
_OF_TEXT = equals_parameters(TOKEN_IDS, "key")
_OWNERS_OF_IDS = (
    select(TOKEN_IDS.c.tokenizer, TOKEN_IDS.c.namespace)
    .where(_OF_TEXT)
    .order_by(TOKEN_IDS.c.tokenizer, TOKEN_IDS.c.namespace)
)
_COUNT_IDS = select(func.count()).select_from(TOKEN_IDS).where(_OF_OWNER)
_IDS_OF_TEXTS = select(TOKEN_IDS.c.key, TOKEN_IDS.c.namespace, TOKEN_IDS.c.ids).where(is_in_values(TOKEN_IDS.c.key))
_REMOVALS = "removals"


class HashedIds(NamedTuple):
    """The token ids of a text (its key) in a namespace: their hash and their number."""

    text_key: bytes
    namespace: str
    ids_hash: bytes
    num_ids: int


class TokenIdRows(Catalog):
    """The part of `Ledger` with the token ids of texts. tokenizer: the fingerprint of a tokenizer."""

    def add_ids(self, chunks: Iterable[tuple[str, Sequence[int]]], tokenizer: str, namespace: str) -> None:
        """Store the token ids of texts. `chunks`: pairs (text, token ids). Existing rows are not changed."""
        rows = {text_key(text.strip()): np.asarray(ids, "<u4").tobytes() for text, ids in chunks if is_unicode(text)}
        with self._locked() as connection:
            if _keys_without_ids(connection, rows, tokenizer, namespace):
                with self.write_transaction():
                    owner = {"tokenizer": tokenizer, "namespace": namespace}
                    missing = _keys_without_ids(connection, rows, tokenizer, namespace)
                    insert_rows(connection, TOKEN_IDS, ({**owner, "key": key, "ids": rows[key]} for key in missing))
                    self._num_changes += 1

    def texts_without_ids(self, texts: Iterable[str], tokenizer: str, namespace: str) -> list[str]:
        """Return the texts whose token ids are missing."""
        text_of = {text_key(text.strip()): text for text in texts if is_unicode(text)}
        with self._locked() as connection:
            return [text_of[key] for key in _keys_without_ids(connection, text_of, tokenizer, namespace)]

    def has_ids(self, text: str, tokenizer: str, namespace: str) -> bool:
        """Return True if the token ids of a text are stored."""
        return is_unicode(text) and not self.texts_without_ids([text], tokenizer, namespace)

    def tokenizers_and_namespaces_of(self, text: str) -> list[tuple[str, str]]:
        """Return each (tokenizer, namespace) for which the token ids of a text are stored."""
        rows = self._rows(_OWNERS_OF_IDS, b_key=text_key(normalize_text(text)))
        return [(row.tokenizer, row.namespace) for row in rows]

    def remove_ids(self, text: str, tokenizer: str, namespace: str) -> None:
        """Delete the token ids of a text."""
        if is_unicode(text):
            row = {"b_tokenizer": tokenizer, "b_namespace": namespace, "b_key": text_key(text.strip())}
            with self.write_transaction() as connection:
                connection.execute(delete(TOKEN_IDS).where(_OF_TEXT, _OF_OWNER), row)
                self._count_id_removal(connection)

    def remove_ids_without_text(self) -> None:
        """Delete the token ids of texts that no document has."""
        with self.write_transaction() as connection:
            connection.execute(delete(TOKEN_IDS).where(TOKEN_IDS.c.key.not_in(select(TEXTS.c.key))))
            self._count_id_removal(connection)

    def _count_id_removal(self, connection: Connection) -> None:
        self._write_fact(connection, _REMOVALS, str(self.num_id_removals() + 1))
        self._num_changes += 1

    def num_id_removals(self) -> int:
        """Return the number of removals of token ids since the ledger was created, in all namespaces."""
        return int(self._read_fact(_REMOVALS) or 0)

    def ids_after(self, number: int, tokenizer: str, namespace: str) -> list[tuple[int, NDArray[np.uint32]]]:
        """Return (row number, token ids) of the rows with numbers above `number`."""
        values = {"number": number, "b_tokenizer": tokenizer, "b_namespace": namespace}
        with self._locked() as connection:
            rows: Any = connection.execute(_IDS_AFTER, values)
            return [(row_number, _decode_ids(ids)) for row_number, ids in rows]  # faster than attributes of rows

    def read_ids(self, number: int) -> NDArray[np.uint32] | None:
        """Return the token ids of a row number; None if the row was deleted."""
        rows = self._rows(_IDS_OF_NUMBER, b_number=number)
        return _decode_ids(rows[0].ids) if rows else None

    def texts_with_ids(
        self, chunks: Iterable[Sequence[int]], tokenizer: str, namespace: str
    ) -> dict[tuple[int, ...], str]:
        """Return {token ids: text} of the chunks with these token ids. Reads all rows of the tokenizer."""
        ids_of = {np.asarray(ids, "<u4").tobytes(): tuple(ids) for ids in chunks}
        text_of: dict[tuple[int, ...], str] = {}
        for some in split_into_batches(ids_of):
            rows = self._rows(_TEXTS_WITH_IDS, values=some, b_tokenizer=tokenizer, b_namespace=namespace)
            text_of.update((ids_of[row.ids], row.text) for row in rows)
        return text_of

    def document_id_of_row(self, number: int, namespace: str) -> str:
        """Return the id of a document in the namespace that has the text of this row number; "" for none.

        Documents that only their text identifies are left out.
        """
        rows = self._rows(_DOCUMENTS_WITH_IDS, b_number=number, b_namespace=namespace)
        named = [(str(row.collection), str(row.id)) for row in rows if row.id != row.key.hex()]
        return min(named)[1] if named else ""

    def count_tokenized_texts(self, tokenizer: str, namespace: str) -> int:
        """Return the number of texts with token ids."""
        return int(self._rows(_COUNT_IDS, b_tokenizer=tokenizer, b_namespace=namespace)[0][0])

    def hash_token_ids(self, text_keys: Iterable[bytes]) -> list[HashedIds]:
        """Return the hashes of the token ids of texts, for all tokenizers and namespaces."""
        batches = (self._rows(_IDS_OF_TEXTS, values=some) for some in split_into_batches(text_keys))
        return [
            HashedIds(row.key, row.namespace, hash_ids(row.ids), len(row.ids) // _ID_DTYPE.itemsize)
            for rows in batches
            for row in rows
        ]


def hash_ids(ids: Sequence[int] | bytes) -> bytes:
    """Return the hash of a chunk's token ids, which may be the bytes of a row of TOKEN_IDS."""
    data = ids if isinstance(ids, bytes) else np.asarray(ids, "<u4").tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _keys_without_ids(connection: Connection, keys: Collection[bytes], tokenizer: str, namespace: str) -> list[bytes]:
    """Return the keys of texts whose token ids are missing."""
    stored = find_existing(connection, _KEYS_WITH_IDS, keys, b_tokenizer=tokenizer, b_namespace=namespace)
    return [key for key in keys if key not in stored]


def _decode_ids(data: object) -> NDArray[np.uint32]:
    """Return the token ids of a row. A damaged row whose value is no list of ids has none, and is never found."""
    if not isinstance(data, bytes) or len(data) % _ID_DTYPE.itemsize:
        data = b""
    return np.frombuffer(data, _ID_DTYPE)
