"""Texts and marks of files that are built here, by digest: a reader that changes them changes every index.

When a digest changes on purpose, or because a parser has a new release, raise READERS_VERSION in
ragblend/corpus/readers/formats.py, so that files that did not change are read again. The right digests are in the
assertion that fails. A new format adds a function below.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import pytest

from ragblend.corpus.documents import read_documents
from ragblend.corpus.readers.formats import READERS_VERSION


def table_csv() -> bytes:
    return b'id,name,note,note\n1,bolt,"M8, zinc",new\n2,"nut ""hex""",,"two\nlines"\n3,a,b,c,d\n'


def statement_csv() -> bytes:
    return b"Konto;DE00\nZeitraum;Mai\n\nTag;Text;Betrag\n02.05.;Miete, Mai;-800,00\n03.05.;Lohn;2.000,00\n"


def texts_csv() -> bytes:
    return b"id\ttext\n1\tThe ferry leaves at nine.\n2\tThe mill stands by the river.\n"


def records_json() -> bytes:
    parts = [{"id": "P-1", "sizes": [1, 2], "vector": [0.5] * 99}, {"id": "P-2", "note": None}]
    return json.dumps(
        [{"text": "label", "n": 1, "parts": parts}, {"name": "Pump", "parts": parts, "ok": True}]
    ).encode()


def records_jsonl() -> bytes:
    return b'"one"\n{"content": "two", "summary": "' + b"long " * 60 + b'"}\n{"ctxs": [{"title": "T", "text": "x"}]}\n'


GOLDENS: dict[str, tuple[Callable[[], bytes], str]] = {
    "table.csv": (table_csv, "c145a3f661f03dd547807b4905e0719a"),
    "statement.csv": (statement_csv, "8cee22c9ebfcdec95fbeef4c42bc5ed5"),
    "texts.tsv": (texts_csv, "b0e457e82601166deb95b7f0199c1447"),
    "records.json": (records_json, "ddf7bb6d08556ab60f4f03ec14f891ee"),
    "records.jsonl": (records_jsonl, "419adb40006367c3a8f1bab31efcfb17"),
}


def digest_of(name: str, data: bytes) -> str:
    documents = read_documents(f"/{name}", data).documents
    found = [(document.source, document.text, document.marks) for document in documents]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize("name", GOLDENS)
def test_readers_give_the_texts_that_they_gave_before(name: str) -> None:
    build, golden = GOLDENS[name]
    assert (READERS_VERSION, digest_of(name, build())) == (3, golden)
