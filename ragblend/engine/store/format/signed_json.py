"""Small JSON files with a checksum, and a signature if there is a key. The checksum detects changed bytes; the
signature authenticates the writer (see `signing`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_hexdigest

from ragblend.engine.store.format.signing import UNSIGNED, StoreKey

CHECKSUM, SIGNATURE = "xxh3_128", "signature"


def encode_signed_json(facts: Mapping[str, Any], kind: str, key: StoreKey | None = None) -> bytes:
    """Return `facts` as the bytes of a JSON file with a checksum, and with a signature if `key` is given.

    kind: any text. It is part of checksum and signature, so `decode_signed_json` rejects a file of another kind.

    >>> decode_signed_json(encode_signed_json({"context": "none"}, "context.json"), "context.json")
    {'context': 'none'}
    """
    plain = json.loads(json.dumps(dict(facts)))  # as `decode_signed_json` reads them
    return _written(plain, kind, None if key is None else key.sign("note", kind, _message(plain)))


def decode_signed_json(data: bytes, kind: str, key: StoreKey | None = None) -> dict[str, Any]:
    """Return the facts in `data`, the result of `encode_signed_json`. key: None checks no signature.

    Raises ValueError if the facts were changed, are of another kind, or are not signed with `key`.
    """
    try:
        fields: dict[str, Any] = dict(json.loads(data))
        signature = fields.pop(SIGNATURE, None)
        if CHECKSUM not in fields:
            raise ValueError("it has no checksum")
        facts = {name: value for name, value in fields.items() if name != CHECKSUM}
        if data != _written(facts, kind, signature):
            raise ValueError("its checksum is wrong")
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no such file ({error})") from error
    if key is not None and not key.has_signed("note", kind, _message(facts), str(signature)):
        raise ValueError(UNSIGNED)
    return facts


def _written(facts: Mapping[str, Any], kind: str, signature: object) -> bytes:
    signed = {} if signature is None else {SIGNATURE: signature}
    return (json.dumps({**facts, CHECKSUM: _checksum(facts, kind), **signed}, indent=1) + "\n").encode()


def _checksum(facts: Mapping[str, Any], kind: str) -> str:
    return xxh3_128_hexdigest(f"{kind}\0{json.dumps(dict(facts))}".encode())


def _message(facts: Mapping[str, Any]) -> bytes:
    """Return the bytes that are signed. They do not depend on the order of the facts."""
    return json.dumps(facts, sort_keys=True).encode()
