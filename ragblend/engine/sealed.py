"""Small JSON files with a checksum: whose bytes changed is told apart from what was written.

Knows dictionaries and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_hexdigest

CHECKSUM = "xxh3_128"


def seal(facts: Mapping[str, Any], kind: str = "") -> bytes:
    """`facts` as a JSON file with their checksum. `kind` is checked too: a file that belongs elsewhere is no good here.

    >>> unseal(seal({"document": "a.txt"}, "pin"), "pin")
    {'document': 'a.txt'}
    """
    return (json.dumps({**facts, CHECKSUM: _checksum(facts, kind)}, indent=1) + "\n").encode()


def unseal(data: bytes, kind: str = "") -> dict[str, Any]:
    """The facts in a file. Raises ValueError, with the reason, when these are not the bytes that were written."""
    try:
        facts: dict[str, Any] = dict(json.loads(data))
        found = facts.pop(CHECKSUM)
        if found != _checksum(facts, kind) or data != seal(facts, kind):
            raise ValueError("its checksum is wrong")
    except KeyError as error:
        raise ValueError("it has no checksum") from error
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no such file ({error})") from error
    return facts


def _checksum(facts: Mapping[str, Any], kind: str) -> str:
    return xxh3_128_hexdigest(f"{kind}\0{json.dumps(dict(facts))}".encode())
