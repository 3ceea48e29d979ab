"""Malformed and malicious bodies for `POST` and `DELETE /v1/ragblend/documents`. Each is rejected."""

from __future__ import annotations

import json
from typing import Any

JSON, LINES = "application/json", "application/x-ndjson"


def _document(**fields: Any) -> bytes:
    return json.dumps({"collection": "kb", "documents": [fields]}).encode()


_TEXT = {"id": "a", "text": "Some text."}
_CHUNKS = {"id": "a", "chunks": ["One.", "Two."]}

POSTED: dict[str, tuple[str, bytes]] = {
    "nothing": (JSON, b""),
    "blanks": (JSON, b" \n\t "),
    "no JSON": (JSON, b"hello"),
    "half an object": (JSON, b'{"documents": [{"text": "a"'),
    "two objects": (JSON, b'{"documents": [{"text": "a"}]} {}'),
    "null": (JSON, b"null"),
    "a number": (JSON, b"7"),
    "a string": (JSON, b'"documents"'),
    "a list": (JSON, b"[]"),
    "an empty object": (JSON, b"{}"),
    "no documents": (JSON, b'{"documents": []}'),
    "documents as an object": (JSON, b'{"documents": {"id": "a", "text": "b"}}'),
    "documents as a string": (JSON, b'{"documents": "a"}'),
    "a document that is a string": (JSON, b'{"documents": ["a"]}'),
    "a document that is null": (JSON, b'{"documents": [null]}'),
    "not Unicode": (JSON, b'{"documents": [{"text": "\xff\xfe"}]}'),
    "UTF-16": (JSON, '{"documents": [{"text": "a"}]}'.encode("utf-16")),
    "half a surrogate": (JSON, b'{"documents": [{"text": "\\ud800"}]}'),
    "brackets without end": (JSON, b"[" * 200_000),
    "objects without end": (JSON, b'{"documents":' * 100_000),
    "deep metadata": (
        JSON,
        b'{"documents": [{"text": "a", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}",
    ),
    "an unknown field": (JSON, b'{"documents": [{"text": "a"}], "model": "demo"}'),
    "an unknown field of a document": (JSON, _document(**_TEXT, embedding=[1])),
    "neither text nor chunks": (JSON, _document(id="a")),
    "text and chunks": (JSON, _document(**_TEXT, chunks=["a"])),
    "text that is a number": (JSON, _document(id="a", text=7)),
    "text that is a list": (JSON, _document(id="a", text=["a"])),
    "no chunks": (JSON, _document(id="a", chunks=[])),
    "chunks as a string": (JSON, _document(id="a", chunks="One.")),
    "a chunk that is null": (JSON, _document(id="a", chunks=["One.", None])),
    "an id that is a number": (JSON, _document(**{**_TEXT, "id": 7})),
    "an empty id": (JSON, _document(**{**_TEXT, "id": ""})),
    "a long id": (JSON, _document(**{**_TEXT, "id": "a" * 2000})),
    "an id with a NUL": (JSON, _document(**{**_TEXT, "id": "a\0b"})),
    "an id with a line break": (JSON, _document(**{**_TEXT, "id": "a\nb"})),
    "an id twice": (JSON, json.dumps({"documents": [_TEXT, _TEXT]}).encode()),
    "a collection that is a number": (JSON, b'{"collection": 7, "documents": [{"text": "a"}]}'),
    "an empty collection": (JSON, b'{"collection": "", "documents": [{"text": "a"}]}'),
    "another tenant's collection": (JSON, b'{"collection": "@globex/kb", "documents": [{"text": "a"}]}'),
    "a long collection": (JSON, json.dumps({"collection": "a" * 1000, "documents": [_TEXT]}).encode()),
    "a chunk size of nothing": (JSON, _document(**_TEXT, chunk_size=0)),
    "a negative chunk size": (JSON, _document(**_TEXT, chunk_size=-512)),
    "a chunk size that is a string": (JSON, _document(**_TEXT, chunk_size="512")),
    "a chunk size that is true": (JSON, _document(**_TEXT, chunk_size=True)),
    "a huge chunk size": (JSON, _document(**_TEXT, chunk_size=10**30)),
    "a chunk size for chunks": (JSON, _document(**_CHUNKS, chunk_size=64)),
    "a version of a text": (JSON, _document(**_TEXT, version="1")),
    "metadata as a list": (JSON, _document(**_TEXT, metadata=[1])),
    "metadata that is no number": (JSON, b'{"documents": [{"text": "a", "metadata": {"a": NaN}}]}'),
    "an endless number": (JSON, b'{"documents": [{"text": "a", "metadata": {"a": ' + b"9" * 50_000 + b"}}]}"),
    "vectors without an embedder": (JSON, _document(**_CHUNKS, vectors=[[1], [2]])),
    "an embedder without vectors": (JSON, _document(**_CHUNKS, embedder="mine")),
    "a vector too few": (JSON, _document(**_CHUNKS, vectors=[[1.0]], embedder="mine")),
    "vectors of two lengths": (JSON, _document(**_CHUNKS, vectors=[[1.0], [1.0, 2.0]], embedder="mine")),
    "vectors of nothing": (JSON, _document(**_CHUNKS, vectors=[[], []], embedder="mine")),
    "a vector of strings": (JSON, _document(**_CHUNKS, vectors=[["1"], ["2"]], embedder="mine")),
    "a vector that is infinite": (
        JSON,
        b'{"documents": [{"chunks": ["a"], "vectors": [[1e999]], "embedder": "mine"}]}',
    ),
    "vectors for a text": (JSON, _document(**_TEXT, vectors=[[1.0]], embedder="mine")),
    "no lines": (LINES, b"\n\n"),
    "a line that is no JSON": (LINES, b'{"text": "a"}\nhello\n'),
    "a line that is a list": (LINES, b'{"text": "a"}\n[]\n'),
    "lines of a whole body": (LINES, b'{"collection": "kb", "documents": [{"text": "a"}]}\n'),
    "lines with an id twice": (LINES, b'{"id": "a", "text": "a"}\n{"id": "a", "text": "b"}\n'),
    "half a last line": (LINES, b'{"text": "a"}\n{"text": "b'),
}

DELETED: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"hello",
    "a list": b"[]",
    "an empty object": b"{}",
    "no ids": b'{"ids": []}',
    "ids as a string": b'{"ids": "a"}',
    "an id that is a number": b'{"ids": [7]}',
    "an empty id": b'{"ids": [""]}',
    "every tenant's": b'{"collection": "*", "ids": null, "all": true}',
    "another tenant's collection": b'{"collection": "@globex/kb"}',
    "a collection that is a list": b'{"collection": ["kb"]}',
    "brackets without end": b"[" * 200_000,
}
