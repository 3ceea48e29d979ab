"""Malformed and malicious bodies for `POST` and `DELETE /v1/ragblend/documents`. Each is rejected."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

JSON, LINES = "application/json", "application/x-ndjson"


class Hostile(NamedTuple):
    """A rejected request. named: text that the error must contain, such as a field, a limit or a position."""

    method: str
    body: bytes
    named: str = ""
    content_type: str = JSON
    query: str = ""


def _document(**fields: Any) -> bytes:
    return json.dumps({"collection": "kb", "documents": [fields]}).encode()


_TEXT = {"id": "a", "text": "Some text."}
_CHUNKS = {"id": "a", "chunks": ["One.", "Two."]}

_POSTED: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b" \n\t ",
    "no JSON": b"hello",
    "two objects": b'{"documents": [{"text": "a"}]} {}',
    "null": b"null",
    "a number": b"7",
    "a string": b'"documents"',
    "a list": b"[]",
    "an empty object": b"{}",
    "not Unicode": b'{"documents": [{"text": "\xff\xfe"}]}',
    "half a surrogate": b'{"documents": [{"text": "\\ud800"}]}',
    "an unknown field": b'{"documents": [{"text": "a"}], "model": "demo"}',
    "neither text nor chunks": _document(id="a"),
    "text and chunks": _document(**_TEXT, chunks=["a"]),
    "an id twice": json.dumps({"documents": [_TEXT, _TEXT]}).encode(),
    "a huge chunk size": _document(**_TEXT, chunk_size=10**30),
    "a chunk size for chunks": _document(**_CHUNKS, chunk_size=64),
    "a version of a text": _document(**_TEXT, version="1"),
}
_LINES = {
    "no lines": b"\n\n",
    "a line that is a list": b'{"text": "a"}\n[]\n',
    "lines of a whole body": b'{"collection": "kb", "documents": [{"text": "a"}]}\n',
    "lines with an id twice": b'{"id": "a", "text": "a"}\n{"id": "a", "text": "b"}\n',
}
_DELETED = {
    "nothing": b"",
    "no JSON": b"hello",
    "a list": b"[]",
    "an empty object": b"{}",
    "every tenant's": b'{"collection": "*", "ids": null, "all": true}',
}


_TYPES = {
    "a number": "7",
    "a fraction": "1.5",
    "true": "true",
    "a list": '["a"]',
    "an object": '{"a": 1}',
    "no number": "NaN",
    "no finite number": "1e999",
    "many digits": "9" * 5000,
}
_NAMES = {
    **_TYPES,
    "nothing": '""',
    "too long": json.dumps("a" * 1025),
    "a NUL": r'"a\u0000b"',
    "a line break": r'"a\nb"',
    "a DEL": r'"a\u007fb"',
}
_LIST = {"a string": '"a"', "a number": "7", "true": "true", "an object": '{"0": "a"}', "empty": "[]"}
_SIZES = {
    **{name: value for name, value in _TYPES.items() if name != "a number"},
    "a text": '"512"',
    "nothing": "0",
    "too little": "15",
    "too much": str((1 << 20) + 1),
    "negative": "-512",
}
_TEXTS = {**_LIST, "numbers": "[7]", "nulls": '["a", null]', "lists": '[["a"]]', "booleans": "[true]"}
_METADATA = {name: value for name, value in _TYPES.items() if name != "an object"}
_METADATA |= {"no number inside": '{"a": [NaN]}', "half a surrogate": r'{"a": "\ud800"}', "many digits": "9" * 5000}
_METADATA |= {"too deep": '{"a":' * 300 + "1" + "}" * 300}
_FIELDS: dict[str, tuple[dict[str, str], str]] = {  # {field: (wrong values, other fields of the document)}
    "id": (_NAMES, '"text": "a"'),
    "text": (_TYPES, '"id": "a"'),
    "chunks": (_TEXTS, '"id": "a"'),
    "chunk_size": (_SIZES, '"text": "a"'),
    "version": (_NAMES, '"chunks": ["a"]'),
    "metadata": (_METADATA, '"text": "a"'),
    "vectors": ({"an unknown field": '["AACAPw=="]'}, '"chunks": ["a"]'),
}
_WHOLE = b'{"collection": "kb", "documents": [{"id": "a", "text": "A text.", "metadata": {"page": [1, 2.5, null]}}]}'
_LINE = '{"id": "ä", "text": "Ein schöner Text.", "metadata": {"page": 3}}'
_ENCODED = {
    **{name: _LINE.encode(name) for name in ("utf-16", "utf-16-be", "utf-32", "latin-1", "cp037")},
    "gzip": gzip.compress(_LINE.encode()),
    "zlib": zlib.compress(_LINE.encode()),
    "base64": base64.b64encode(_LINE.encode()),
    "a form": b"id=a&text=Some+text.",
    "a part": b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\nA text.\r\n--x--\r\n',
}
_COLLECTIONS = {**_NAMES, "of another namespace": '"@globex/kb"', "null": "null"}


def _generate() -> Iterator[tuple[str, Hostile]]:
    syntax = "Invalid JSON"
    for field, (values, beside) in _FIELDS.items():
        for what, value in values.items():
            document = f"{{{beside}, {json.dumps(field)}: {value}}}".encode()
            named = syntax if what in ("half a surrogate", "many digits", "too deep") else field
            yield f"{field}: {what}", Hostile("POST", b'{"documents": [' + document + b"]}", named)
            yield f"{field} in a line: {what}", Hostile("POST", b'{"text": "a"}\n' + document, "line 2", LINES)
    for what, value in _COLLECTIONS.items():
        named = syntax if what == "many digits" else "collection"
        posted = f'{{"collection": {value}, "documents": [{{"text": "a"}}]}}'.encode()
        yield f"collection: {what}", Hostile("POST", posted, named)
        yield f"removed collection: {what}", Hostile("DELETE", f'{{"collection": {value}}}'.encode(), named)
    for what, value in {**_TEXTS, "names of nothing": '[""]', "a NUL": r'["a\u0000"]'}.items():
        yield f"removed ids: {what}", Hostile("DELETE", f'{{"ids": {value}}}'.encode(), "ids")
    for what, value in (_LIST | {"numbers": "[7]", "nulls": "[null]", "lists": "[[]]", "null": "null"}).items():
        yield f"documents: {what}", Hostile("POST", f'{{"documents": {value}}}'.encode(), "documents")
    for end in range(1, len(_WHOLE), 3):
        yield f"cut after {end} bytes", Hostile("POST", _WHOLE[:end], syntax)
    for end in range(1, len(_LINE), 3):
        body = b'{"text": "a"}\n' + _LINE.encode()[:end]
        yield f"a last line of {end} bytes", Hostile("POST", body, "line 2", LINES)
    for name, body in _ENCODED.items():
        for method, kind in (("POST", JSON), ("DELETE", JSON)):
            yield f"{method} in {name}", Hostile(method, body, syntax, kind)
        yield f"a line in {name}", Hostile("POST", body, "line", LINES)
    for depth in (200, 100_000):
        for what, opened in (("lists", b"["), ("objects", b'{"documents":')):
            yield f"{depth} {what}", Hostile("POST", opened * depth, syntax)
            yield f"{depth} {what} to remove", Hostile("DELETE", opened * depth, syntax)
    for what, body in {
        "lines as one object": b'{"text": "a"}\n{"text": "b"}',
        "with a mark": b"\xef\xbb\xbf{}",
    }.items():
        yield what, Hostile("POST", body, syntax)


HOSTILE: dict[str, Hostile] = {
    **{f"posted: {name}": Hostile("POST", body) for name, body in _POSTED.items()},
    **{f"posted: {name}": Hostile("POST", body, content_type=LINES) for name, body in _LINES.items()},
    **{f"deleted: {name}": Hostile("DELETE", body) for name, body in _DELETED.items()},
    **dict(_generate()),
}
"""Requests by name. Most are generated: fields with values of wrong types, and truncated or encoded bodies."""
