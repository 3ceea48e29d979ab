"""Keys of entries, the contexts under which they are looked up, and fingerprints of models.

Two keys are equal exactly when the KV is the same, and two fingerprints exactly when the model is.

A chunk is prefilled after the prefix alone (context "none"). It can also be prefilled after the prefix and an
*ingestion context*: a fixed text about nothing in particular (context "neutral"). The chunk's tokens have then attended
to other text than the prompt's first tokens, as in later prompts. Only the chunk's own slice of the KV is stored. The
context policy of a store is "none", or "neutral" to store both variants; the disk tier keeps it. In a prompt, KV is
exact only if the tokens before it are those after which it was computed.

Works on token ids, bytes and files. Does not depend on tensors or stores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from ragblend.engine.store.format.kv import LAYOUT_VERSION, KVHeader
from ragblend.errors import RagblendError
from ragblend.files.directory import Directory
from ragblend.files.reading import read_file

log = logging.getLogger(__name__)


def chunk_key(
    fingerprint: str,
    prefix_ids: Sequence[SupportsIndex],
    token_ids: Sequence[SupportsIndex],
    namespace: str = "",
) -> str:
    """Return the key of a chunk's entry: 32 hex digits.

    Two keys are equal if and only if all arguments and LAYOUT_VERSION are equal. Ids may be any integers below 2**32,
    also NumPy's. prefix_ids: the tokens before the chunk when its KV is computed: the prefix, and the neutral text of a
    neutral variant.

    >>> chunk_key("model", [1], [5, 6]) == chunk_key("model", [1, 5], [6])
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    # Every part is preceded by its length, so no two different tuples of parts give the same bytes.
    for part in (
        str(LAYOUT_VERSION).encode(),
        fingerprint.encode(),
        _ids(prefix_ids),
        _ids(token_ids),
        namespace.encode(),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def key_from_header(header: KVHeader) -> str:
    """Return the key of the entry with this header."""
    return chunk_key(header.fingerprint, header.prefix_ids, header.token_ids, header.namespace)


def _ids(token_ids: Sequence[SupportsIndex]) -> bytes:
    packed = array("I", tuple(map(index, token_ids)))  # index rejects fractions, array rejects more than 32 bits
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


# --- fingerprints


def fingerprint(weights_digest: str, config: Mapping[str, Any], dtype: str) -> str:
    """Return a model's fingerprint: 32 hex digits, equal if and only if all three arguments are equal.

    weights_digest: a digest of the weights, as from `digest_files`. config: the architecture, with RoPE.
    """
    text = json.dumps([weights_digest, dict(config), dtype], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_files(paths: Iterable[Path], cache: Path | None = None) -> str:
    """Return 32 hex digits for the names and contents of files, independent of the order of `paths`. Raises OSError.

    cache: a JSON file with the digests of earlier calls by path, size and modification time; None: no cache.
    """
    cached_digests = _read_cache(cache)
    named_digests = []
    changed = False
    for path in paths:
        stat = path.stat()
        entry = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if entry not in cached_digests:
            cached_digests[entry] = _digest_file(path)
            changed = True
        named_digests.append((path.name, cached_digests[entry]))
    if changed and cache is not None:
        _write_cache(cache, cached_digests)
    digest = hashlib.blake2b(digest_size=16)
    for name, file_digest in sorted(named_digests):  # by digest too: shards in two folders may share a name
        digest.update(f"{name}\0{file_digest}\0".encode())
    return digest.hexdigest()


def default_digest_cache() -> Path:
    """Return the path of the cache of file digests: `$XDG_CACHE_HOME/ragblend/weights.json`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ragblend" / "weights.json"


def _digest_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None:
        return {}
    try:
        entries = json.loads(read_file(cache))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(entry): str(value) for entry, value in entries.items()} if isinstance(entries, dict) else {}


def _write_cache(cache: Path, digests: Mapping[str, str]) -> None:
    # Losing this file costs one re-hash, so a read-only home is not an error.
    try:
        Directory(cache.parent, fsync=False).write(cache, json.dumps(dict(digests)).encode())
    except RagblendError as error:
        log.debug("weight digests were not cached: %s", error)
