"""Ingestion contexts: which variants of a chunk a store keeps, and which chunks an engine can prefill.

A variant is one chunk's KV in one ingestion context. The store's context policy (see `engine.store.format.keys`)
decides whether neutral variants are kept. Depends on chunks and engines. Prefills nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from ragblend.catalog.ledger import open_ledger
from ragblend.engine.api import Engine
from ragblend.engine.deletions import run_deletions, schedule_deletions
from ragblend.errors import UsageError
from ragblend.ingestion.prefill import num_chunk_tokens
from ragblend.option_fields import check_unicode
from ragblend.options import CONTEXT, ContextPolicy
from ragblend.prompt.token_index import EDGE, WINDOW
from ragblend.prompt.types import Chunk


def apply_context_policy(engine: Engine, requested: ContextPolicy | None) -> None:
    """Set the engine's context policy to `requested`, and record the policy in the store.

    The policy says which variants of a chunk are stored, see `chunk_variants`. `requested` None: keep the engine's
    policy; "none" is then not recorded. Raises UsageError for the policy "none" if the store has recorded "neutral",
    because only some chunks of the store would then have neutral variants.
    """
    if requested is None and engine.context == "none":
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
    """Return the variants of `chunks` to store: each chunk, and for the policy "neutral" also its neutral variant.

    The KV of the chunk itself is computed after the prefix alone, and that of the neutral variant after the prefix and
    the neutral text.
    """
    variants: list[Chunk] = []
    for chunk in chunks:
        variants.append(chunk)
        if policy == "neutral":
            variants.append(replace(chunk, context="neutral"))
    return variants


def all_variants(text: str) -> list[Chunk]:
    """Return every variant that a chunk with this text can have."""
    return [Chunk(text, context=policy) for policy in get_args(ContextPolicy)]


def fits_context_length(chunk: Chunk, engine: Engine) -> bool:
    """Return True if the model's context length has space for this variant of the chunk and the ids before it."""
    return _num_prefill_tokens(chunk, engine) <= engine.context_length


def explain_unfit_text(text: str, engine: Engine) -> str:
    """Return the reason for which the engine cannot prefill `text` as a chunk, and a fix; "" if it can."""
    try:
        check_unicode(text, "its text")
    except UsageError as error:
        return str(error)
    num_tokens = _num_prefill_tokens(Chunk(text), engine)
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


def _num_prefill_tokens(chunk: Chunk, engine: Engine) -> int:
    """Return the number of tokens of a variant's prefill: the ids before it, the chunk, and two tokens for vLLM."""
    num_before = len(engine.default_prefix_ids) + (chunk.context == "neutral") * len(engine.neutral_ids)
    return num_before + engine.renderer.count_tokens(chunk.text) + 2


def delete_other_variants(chunks: Sequence[Chunk], kept: Iterable[Chunk], engine: Engine) -> int:
    """Delete the stored variants of `chunks` that are not in `kept`.

    If the engine's policy is "none", also delete the neutral variants of all chunks that were added through LangChain,
    LlamaIndex or a server, and those of other namespaces on this machine. Return the number of deleted entries. Raises
    UnfinishedDeletionError if a remote tier does not answer.
    """
    kept_keys = {engine.key(chunk) for chunk in kept}
    every = [each for chunk in chunks for each in all_variants(chunk.text)]
    neutral_here = list[str]()
    with open_ledger(engine.store) as ledger:
        if engine.context == "none":
            every += [Chunk(text, context="neutral") for text in ledger.texts()]
            headers = (header for tier in engine.store.tiers if not tier.is_remote for header in tier.headers())
            neutral_ids = engine.neutral_ids
            neutral_here += [each.key for each in headers if each.prefix_ids[-len(neutral_ids) :] == neutral_ids]
        keys = [key for key in dict.fromkeys((*map(engine.key, every), *neutral_here)) if key not in kept_keys]
        schedule_deletions(dict.fromkeys(keys, ""), engine.store, ledger)
        return len(run_deletions(engine.store, ledger))
