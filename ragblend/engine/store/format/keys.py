"""Keys of entries, the contexts under which they are looked up, and fingerprints of models.

Two keys are equal exactly when the KV is the same, and two fingerprints exactly when the model is.

A chunk is prefilled after the prefix alone (context "none"). It can also be prefilled after an *ingestion context*
between the prefix and the chunk: the most similar chunks of the corpus, which are likely to be retrieved with it
(context "similar"). The chunk has then attended to text like that of later prompts. Only the chunk's own slice of the
KV is stored. The context policy of a store is "none", or "similar" to store both variants; the disk tier keeps it. In a
prompt, KV is exact only if the tokens before it are those after which it was computed.

Works on token ids, bytes and files. Does not depend on tensors or stores.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from ragblend.engine.report import PrefixMatch
from ragblend.engine.store.format.kv import LAYOUT_VERSION, KVHeader
from ragblend.errors import RagblendError, UsageError
from ragblend.files.directory import Directory
from ragblend.files.reading import read_file
from ragblend.options import ContextPolicy

log = logging.getLogger(__name__)

SIMILAR = "similar"
"""`chunk_key`'s `context` for KV that was computed after the most similar chunks. Their ids are not in the key."""


def chunk_key(
    fingerprint: str,
    prefix_ids: Sequence[SupportsIndex],
    token_ids: Sequence[SupportsIndex],
    namespace: str = "",
    context: str = "",
) -> str:
    """Return the key of a chunk's entry: 32 hex digits.

    Two keys are equal if and only if all arguments and LAYOUT_VERSION are equal. Ids may be any integers below 2**32,
    also NumPy's. prefix_ids: the tokens of the prefix, without similar chunks. context: SIMILAR for KV that was
    computed after similar chunks, "" for KV that was computed after the prefix alone.

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
        *([context.encode()] if context else []),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def key_from_header(header: KVHeader) -> str:
    """Return the key of the entry with this header.

    Raises ValueError if a length in `header.context` is not positive, or if their sum exceeds `len(prefix_ids)`.

    >>> key_from_header(KVHeader("", "model", (1, 5, 6), (7,), 1, "float32", context=(2,))) == chunk_key(
    ...     "model", [1], [7], context=SIMILAR
    ... )
    True
    """
    lengths, prefix_ids = header.context, header.prefix_ids
    if not lengths:
        return chunk_key(header.fingerprint, prefix_ids, header.token_ids, header.namespace)
    if not all(type(length) is int and length > 0 for length in lengths) or sum(lengths) > len(prefix_ids):
        raise ValueError(f"context lengths {lengths[:8]} in a prefix of {len(prefix_ids)} ids")
    own = prefix_ids[: len(prefix_ids) - sum(lengths)]
    return chunk_key(header.fingerprint, own, header.token_ids, header.namespace, SIMILAR)


def _ids(token_ids: Sequence[SupportsIndex]) -> bytes:
    packed = array("I", tuple(map(index, token_ids)))  # index rejects fractions, array rejects more than 32 bits
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


# --- contexts


@dataclass(frozen=True, slots=True)
class IngestionContext:
    """The similar chunks that are put between the prefix and a chunk when the chunk is precomputed.

    Each of `parts` has the token ids of one similar chunk and of the separator after it. Without parts, the chunk
    directly follows the prefix.
    """

    policy: ContextPolicy = "none"
    parts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids of all parts.

        They are not part of the chunk's key, because a lookup has only the prompt. The prompt does not show which
        similar chunks preceded the chunk when its KV was computed.
        """
        return tuple(itertools.chain.from_iterable(self.parts))

    @property
    def part_lengths(self) -> tuple[int, ...]:
        """Return the number of token ids of each part, for `KVHeader.context`."""
        return tuple(map(len, self.parts))

    def validate(self) -> None:
        """Raise UsageError if the policy is "similar" and there are no `parts`."""
        if self.policy == "similar" and not self.parts:
            raise UsageError(
                "context is 'similar' without context_texts, the chunks after which the KV is computed; precompute the "
                "chunk with its index (ragblend.ingest, ragblend precompute), or name them: "
                "Chunk(TEXT, context='similar', context_texts=(...))"
            )


NO_CONTEXT = IngestionContext()


@dataclass(frozen=True, slots=True)
class LookupContext:
    """One variant of a chunk to look up in the store: KV computed after this prefix, under this context policy.

    `exact`: the variant's KV was computed after exactly the tokens that precede the chunk in the prompt.
    """

    token_ids: tuple[int, ...] = field(repr=False)  # the prefix, `chunk_key`'s `prefix_ids`
    match: PrefixMatch  # "exact" if the prompt begins with this prefix
    exact: bool
    policy: ContextPolicy
    name: str = ""  # `chunk_key`'s `context`


KEY_CONTEXTS: dict[ContextPolicy, str] = {"none": "", "similar": SIMILAR}
"""`chunk_key`'s `context` for the variants of each policy."""


def lookup_contexts(
    token_ids: Sequence[int],
    start: int,
    prefixes: Iterable[tuple[int, ...]],
    policy: ContextPolicy = "none",
    *,
    is_beginning: bool = True,
) -> list[LookupContext]:
    """Return the contexts in which to look up the chunk at index `start` of a prompt, the best first.

    The exact context comes first, if there is one. The contexts of the store's `policy` follow, and then those of
    "none". Each policy gives one context per prefix, in the order of `prefixes`. token_ids: the prompt. prefixes: token
    ids of each prefix. is_beginning: True if the chunk's first token is at `start`. False if a later token of the chunk
    is there; then no context is exact.

    >>> found = lookup_contexts([1, 5, 6, 7], 3, [(1,), (2,)], policy="similar")
    >>> [(context.token_ids, context.policy) for context in found]
    [((1,), 'similar'), ((2,), 'similar'), ((1,), 'none'), ((2,), 'none')]
    """
    policies: tuple[ContextPolicy, ...] = ("similar", "none") if policy == "similar" else ("none",)
    candidates = []
    for kind in policies:
        for prefix in dict.fromkeys(prefixes):
            begins = tuple(token_ids[: len(prefix)]) == prefix
            match: PrefixMatch = "exact" if begins else "approximate"
            exact = begins and kind == "none" and len(prefix) == start and is_beginning
            candidates.append(LookupContext(prefix, match, exact, kind, KEY_CONTEXTS[kind]))
    return [context for context in candidates if context.exact] + [
        context for context in candidates if not context.exact
    ]


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
    known = _read_cache(cache)
    named_digests = []
    changed = False
    for path in paths:
        stat = path.stat()
        entry = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if entry not in known:
            known[entry] = _digest_file(path)
            changed = True
        named_digests.append((path.name, known[entry]))
    if changed and cache is not None:
        _write_cache(cache, known)
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
        known = json.loads(read_file(cache))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(entry): str(value) for entry, value in known.items()} if isinstance(known, dict) else {}


def _write_cache(cache: Path, known: Mapping[str, str]) -> None:
    # Losing this file costs one re-hash, so a read-only home is not an error.
    try:
        Directory(cache.parent, fsync=False).write(cache, json.dumps(dict(known)).encode())
    except RagblendError as error:
        log.debug("weight digests were not cached: %s", error)
