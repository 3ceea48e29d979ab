"""Which versions of its chunks a store keeps, by its ingestion context, and what each is computed behind.

The policy is the store's (see `engine.store.keys`); the chunks that a similar version is computed behind are found
by vectors, an index's or those of `nearby`. Knows chunks and engines; prefills nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from ragblend.catalog.registry import open_registry
from ragblend.catalog.schema import text_key
from ragblend.engine.api import Engine
from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.option_fields import check_unicode
from ragblend.options import CONTEXT, ContextPolicy
from ragblend.prompt.types import Chunk

NUM_SIMILAR = 2
"""Chunks that a similar version is computed behind."""


class SimilarChunkFinder(Protocol):
    """Finds the chunks that are like a chunk. A ChunkIndex is one."""

    def similar_texts(self, text: str, count: int, is_allowed: Callable[[str], bool]) -> list[str]:
        """Return up to `count` texts nearest to `text` for which `is_allowed` returns True, nearest first, without
        `text` itself and without duplicates.
        """

    def vectors(self, texts: Iterable[str]) -> dict[bytes, bytes]:
        """Of those `texts` that are there, by `text_key` of the stripped text."""


def resolve_context_policy(engine: Engine, requested: ContextPolicy | None) -> None:
    """Use the context that is wanted, and have the store remember it; None is the engine's, which may be what the store
    remembers. That chunks stand alone is remembered only where they would not anyway.

    Raises UsageError where it remembers another: its chunks would be of two kinds.
    """
    if requested is None and engine.context == engine.default_context == "none":
        return
    policy, remembered = CONTEXT.validate("context", requested or engine.context), engine.store.read_context()
    if remembered not in (None, "none", policy):
        raise UsageError(
            f"the store keeps its chunks in the context {remembered!r}, not {policy!r}; change it for all of them: "
            f"ragblend precompute --context {policy}"
        )
    if policy != remembered or policy != engine.context:
        engine.set_context_policy(policy)


def chunk_variants(chunks: Iterable[Chunk], policy: ContextPolicy) -> list[Chunk]:
    """All that a store of this policy keeps of `chunks`: each alone, and its similar version where there are such.

    Those do not say yet what they are behind: see `attach_similar_texts`.
    """
    found: list[Chunk] = []
    for chunk in chunks:
        found.append(chunk)
        if policy == "similar":
            found.append(replace(chunk, context="similar"))
    return found


def every_version(text: str) -> list[Chunk]:
    """Every version that a chunk can have, by their keys."""
    return [Chunk(text, context="none"), Chunk(text, context="similar")]


def attach_similar_texts(chunks: Sequence[Chunk], engine: Engine, index: SimilarChunkFinder | None) -> list[Chunk]:
    """`chunks`, the similar versions among them with the texts that they are to be computed behind.

    Those are the nearest by the finder's own vectors among the chunks that are precomputed in the engine's namespace,
    or given here to be. One that has none near it, or no room in the model's context, is left out: it stays alone.
    Raises UsageError without an index.
    """
    given = {chunk.text.strip() for chunk in chunks}
    known: dict[str, bool] = {}

    def is_allowed(text: str) -> bool:
        if text not in known:
            known[text] = text.strip() in given or engine.is_stored(Chunk(text, context="none"))
        return known[text]

    found = []
    for chunk in chunks:
        if chunk.context == "similar" and not chunk.context_texts:
            if index is None:
                raise UsageError(
                    "chunks in the context 'similar' are computed behind others that an index finds; give it one "
                    "(ragblend.ingest, ragblend precompute), or keep them alone: context 'none'"
                )
            behind = tuple(reversed(index.similar_texts(chunk.text, NUM_SIMILAR, is_allowed)))  # the nearest beside it
            while behind and not _fits(chunk, behind, engine):
                behind = behind[1:]
            chunk = replace(chunk, context_texts=behind)
            if not behind:
                continue
        found.append(chunk)
    return found


def delete_stale_variants(chunks: Iterable[Chunk], engine: Engine, index: SimilarChunkFinder | None) -> int:
    """Delete those of the similar versions, stored a moment ago, that are behind a text which is gone meanwhile: who
    removed it may have looked before they were there. How many."""
    similar = [chunk for chunk in chunks if chunk.context == "similar"]
    if index is None or not similar:
        return 0
    there = index.vectors({text for chunk in similar for text in chunk.context_texts})
    stale = [chunk for chunk in similar if any(text_key(text.strip()) not in there for text in chunk.context_texts)]
    return sum(engine.forget(chunk) for chunk in stale)


def explain_unfit_text(text: str, engine: Engine) -> str:
    """Return why the engine cannot prefill `text` as a chunk, with what to do; "" if it can."""
    try:
        check_unicode(text, "its text")
    except UsageError as error:
        return str(error)
    num_tokens = _num_prefill_tokens(Chunk(text), (), engine)
    if num_tokens <= engine.context_length:
        return ""
    return (
        f"it takes {num_tokens} tokens with the system text, {engine.name} reads {engine.context_length}; split it "
        "into chunks that leave room for a question"
    )


def _fits(chunk: Chunk, behind: Sequence[str], engine: Engine) -> bool:
    return _num_prefill_tokens(chunk, behind, engine) <= engine.context_length


def _num_prefill_tokens(chunk: Chunk, behind: Sequence[str], engine: Engine) -> int:
    """Tokens of the pass that prefills a chunk after `behind`: the prefix, `behind`, the chunk, and two for vLLM."""
    prefix_ids: Sequence[int] = getattr(engine, "default_prefix_ids", ())
    parts = engine.renderer.context_parts(behind)
    return len(prefix_ids) + sum(map(len, parts)) + engine.renderer.count_tokens(chunk.text) + 2


def delete_other_variants(chunks: Sequence[Chunk], kept: Iterable[Chunk], engine: Engine) -> tuple[int, str]:
    """Delete every version of `chunks` that is none of those `kept`, and where the store keeps similar versions no
    longer, those of what frameworks have brought.

    How many went, and why a remote tier could not be told; "" where it was.
    """
    stay = {engine.key(chunk) for chunk in kept}
    every = [each for chunk in chunks for each in every_version(chunk.text)]
    keys = [key for key in dict.fromkeys(map(engine.key, every)) if key not in stay]
    num_removed, problem = 0, ""
    with closing(open_registry(engine.store)) as registry:
        brought = [] if engine.context == "similar" else registry.similar_entries()
        keys += brought
        registry.remove_stored(keys)
        for key in keys:
            try:
                num_removed += engine.store.delete(key)
            except BackendUnreachableError as error:
                problem = str(error)
        if not problem:  # else the next call is to find them
            registry.set_similar_stored(brought, is_stored=False)
    return num_removed, problem
