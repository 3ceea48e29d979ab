"""Namespaces of stored KV, with the cache salts of vLLM's requests. Imports neither vLLM nor torch."""

from __future__ import annotations

import hashlib
import re

from ragblend.errors import UsageError
from ragblend.option_fields import check_unicode

MAX_NAMESPACE = 256  # letters
_SALTED = "#salt:"
_WITH_SALT = re.compile(rf"{_SALTED}[0-9a-f]{{32}}\Z")


def check_namespace(namespace: str, *, allows_salt: bool = False) -> None:
    """Raise UsageError unless a namespace is Unicode of at most MAX_NAMESPACE characters without "#salt:".

    `allows_salt`: the namespace may be one that `salted_namespace` returned.
    """
    if allows_salt:
        namespace = _WITH_SALT.sub("", namespace)
    if len(namespace) > MAX_NAMESPACE:
        raise UsageError(f"the namespace has {len(namespace)} characters, but at most {MAX_NAMESPACE} are allowed")
    check_unicode(namespace, "the namespace")
    if _SALTED in namespace:
        raise UsageError(f"the namespace {namespace!r} contains {_SALTED!r}, which is reserved for cache salts")


def salted_namespace(namespace: str, cache_salt: str | None) -> str:
    """Return the namespace in which the chunks of a request with vLLM's `cache_salt` are stored and found.

    The namespace contains a hash of the salt, because a salt is a secret.

    >>> salted_namespace("acme", None), salted_namespace("acme", "s3cret")
    ('acme', 'acme#salt:43e5f7d9dcee38263874835a0396cefa')
    """
    if not cache_salt:
        return namespace
    salt = hashlib.blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{namespace}{_SALTED}{salt}"


def equals_ignoring_salt(stored: str, namespace: str) -> bool:
    """Return True if an entry's namespace `stored`, without its cache salt, equals `namespace`."""
    return stored.partition(_SALTED)[0] == namespace


def vllm_cache_salt(namespace: str) -> str:
    """Return the `cache_salt` for vLLM's own prefix cache, which keeps the blocks of namespaces separate there."""
    return f"ragblend-{hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()}"
