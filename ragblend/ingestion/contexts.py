"""Ingestion contexts: which variants of a chunk a store keeps, and after which chunks a similar variant is computed.

A variant is one chunk's KV in one ingestion context. A similar variant is computed after the most similar chunks, which
an index or `registered_similar` finds by vectors. The store's context policy (see `engine.store.format.keys`) decides
whether similar variants are kept. Depends on chunks and engines. Prefills nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ragblend.catalog.registry import open_registry
from ragblend.engine.api import Engine
from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.ingestion.prefill import num_chunk_tokens
from ragblend.option_fields import check_unicode
from ragblend.options import CONTEXT, ContextPolicy
from ragblend.prompt.token_index import EDGE, WINDOW
from ragblend.prompt.types import Chunk

NUM_SIMILAR = 2
"""Number of chunks in the context of a similar variant."""


class SimilarChunkFinder(Protocol):
    """Finds the chunks that are most similar to a chunk. Implementations: ChunkIndex, RegisteredChunkFinder."""

    def similar_texts(self, text: str, count: int, is_allowed: Callable[[str], bool]) -> list[str]:
        """Return the texts nearest to `text`, at most `count`, nearest first. Duplicates, `text` itself, and texts for
        which `is_allowed` returns False are left out.
        """


def apply_context_policy(engine: Engine, requested: ContextPolicy | None) -> None:
    """Set the engine's context policy to `requested`, and record the policy in the store.

    The policy says which variants of a chunk are stored, see `chunk_variants`. `requested` None: keep the engine's
    policy; the default policy "none" is then not recorded. Raises UsageError for the policy "none" if the store has
    recorded "similar", because only some chunks of the store would then have similar variants.
    """
    if requested is None and engine.context == engine.default_context == "none":
        return
    policy, recorded = CONTEXT.validate("context", requested or engine.context), engine.store.read_context_policy()
    if recorded not in (None, "none", policy):
        raise UsageError(
            f"the chunks of the store have the context {recorded!r}, not {policy!r}; change it for all chunks: "
            f"ragblend precompute --context {policy}"
        )
    if policy != recorded or policy != engine.context:
        engine.set_context_policy(policy)


def chunk_variants(chunks: Iterable[Chunk], policy: ContextPolicy) -> list[Chunk]:
    """Return the variants of `chunks` to store: each chunk and, for the policy "similar", also its similar variant.

    The KV of the chunk itself is computed after the prefix alone. The KV of the similar variant is computed after
    similar chunks. The returned variants have no `context_texts`; `attach_similar_texts` adds them.
    """
    found: list[Chunk] = []
    for chunk in chunks:
        found.append(chunk)
        if policy == "similar":
            found.append(replace(chunk, context="similar"))
    return found


def all_variants(text: str) -> list[Chunk]:
    """Return every variant that a chunk with this text can have."""
    return [Chunk(text, context="none"), Chunk(text, context="similar")]


def attach_similar_texts(chunks: Sequence[Chunk], engine: Engine, index: SimilarChunkFinder | None) -> list[Chunk]:
    """Return `chunks`, with `context_texts` added to the similar variants that lack them.

    The `context_texts` are the texts that `index` finds nearest to the chunk. Each is in `chunks` or has stored KV in
    the engine's namespace. A variant is left out if no text is found, or if none fits into the model's context length
    together with the chunk. Raises UsageError if texts are needed and `index` is None.
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
                    "chunks with the context 'similar' are computed after others that an index finds, but no index is "
                    "given; use one (ragblend.ingest, ragblend precompute), or the context 'none'"
                )
            context_texts = tuple(reversed(index.similar_texts(chunk.text, NUM_SIMILAR, is_allowed)))  # nearest last
            while context_texts and _num_prefill_tokens(chunk, context_texts, engine) > engine.context_length:
                context_texts = context_texts[1:]
            chunk = replace(chunk, context_texts=context_texts)
            if not context_texts:
                continue
        found.append(chunk)
    return found


def explain_unfit_text(text: str, engine: Engine) -> str:
    """Return the reason for which the engine cannot prefill `text` as a chunk, and a fix; "" if it can."""
    try:
        check_unicode(text, "its text")
    except UsageError as error:
        return str(error)
    num_tokens = _num_prefill_tokens(Chunk(text), (), engine)
    if num_tokens <= engine.context_length:
        return ""
    return (
        f"it has {num_tokens} tokens with the system text, but {engine.name} reads {engine.context_length}; split it "
        "into chunks that leave space for a question"
    )


def explain_short_text(chunk: Chunk, engine: Engine) -> str:
    """Return why prompts never reuse the KV of a chunk, and a fix; "" unless the chunk is too short to be found."""
    if num_chunk_tokens(chunk, engine) >= WINDOW + EDGE:  # as its metadata say, so that most texts are not tokenized
        return ""
    num_tokens = len(engine.renderer.chunk_ids(chunk.text))
    if num_tokens >= WINDOW:
        return ""
    return (
        f"{chunk.text.strip()[:60]!r} has {num_tokens} tokens; prompts reuse no text of fewer than {WINDOW}. Store it "
        "together with the text next to it"
    )


def _num_prefill_tokens(chunk: Chunk, context_texts: Sequence[str], engine: Engine) -> int:
    """Return the number of tokens of a chunk's prefill: prefix, `context_texts`, chunk, and two tokens for vLLM."""
    parts = engine.renderer.ids_with_separators(context_texts)
    return len(engine.default_prefix_ids) + sum(map(len, parts)) + engine.renderer.count_tokens(chunk.text) + 2


def delete_other_variants(chunks: Sequence[Chunk], kept: Iterable[Chunk], engine: Engine) -> tuple[int, str]:
    """Delete the stored variants of `chunks` that are not in `kept`.

    If the engine's policy is not "similar", also delete the similar variants of all chunks that were added through
    LangChain, LlamaIndex or a server. Return the number of deleted entries and a problem: the error message if a remote
    tier did not answer, else "".
    """
    kept_keys = {engine.key(chunk) for chunk in kept}
    every = [each for chunk in chunks for each in all_variants(chunk.text)]
    keys = [key for key in dict.fromkeys(map(engine.key, every)) if key not in kept_keys]
    num_removed, problem = 0, ""
    with open_registry(engine.store) as registry:
        framework_keys = [] if engine.context == "similar" else registry.stored_variant_keys()
        keys += framework_keys
        registry.remove_stored_entries(keys)
        for key in keys:
            try:
                num_removed += engine.store.delete(key)
            except BackendUnreachableError as error:
                problem = str(error)
        if not problem:  # else the next call deletes them again
            registry.set_variants_stored(framework_keys, is_stored=False)
    return num_removed, problem
