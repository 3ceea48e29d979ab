"""Opens the index of an engine, checks that both have the same tokenizer, and configures its chunker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ragblend.chunker import DEFAULT_CHUNK_SIZE, Splitter, get_splitter_version, split
from ragblend.engine.api import DocumentEngine, Engine
from ragblend.errors import StoreMismatchError, UsageError
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.sync import ChunkerConfig


def open_engine_index(
    path: str | Path,
    engine: DocumentEngine,
    embedder: str | None = None,
    chunk_size: int | None = None,
    *,
    create: bool = True,
) -> ChunkIndex:
    """Return the index at `path`. With `create`, a missing one is created for the engine's tokenizer.

    `chunk_size` (in tokens) is recorded in a new index; None is the default size. `embedder` None: a new index gets the
    default embedder, an existing index keeps its own. Raises NotFoundError for a missing index, StoreMismatchError for
    an index with another embedder, tokenizer or namespace.
    """
    index = open_index(
        path,
        embedder,
        create=create,
        tokenizer=engine.name,
        tokenizer_fingerprint=engine.renderer.fingerprint,
        chunk_size=chunk_size or DEFAULT_CHUNK_SIZE,
    )
    made_for = index.manifest
    if made_for.tokenizer_fingerprint not in ("", engine.renderer.fingerprint):
        index.close()
        raise StoreMismatchError(
            f"the index {path} was chunked for {made_for.tokenizer}, but the engine runs {engine.name}, whose "
            f"tokenizer differs. Use `model={made_for.tokenizer!r}`, or ingest again: ragblend ingest DOCS --store "
            f"NEW_PATH --model {engine.name}"
        )
    namespace = index.index_facts().get("namespace", engine.namespace)
    if namespace != engine.namespace and index.num_documents:
        index.close()
        raise StoreMismatchError(
            f"the documents of {path} were ingested for namespace {namespace!r}, but the namespace is "
            f"{engine.namespace!r}. Set RAGBLEND_NAMESPACE={namespace!r}, or give each namespace a `store`"
        )
    return index


def resolve_chunker(
    index: ChunkIndex, engine: Engine, chunk_size: int | None, splitter: Splitter | None, notify: Callable[[str], None]
) -> ChunkerConfig:
    """Return the chunker for the next ingestion, and record it in the index. Call `notify` if it changed.

    Without `splitter`, the chunker is the default splitter, which cuts chunks of `chunk_size` tokens. `chunk_size`
    None: the size recorded in the index.
    """
    made = index.manifest
    if not made.num_documents:
        index.change_index_facts(namespace=engine.namespace)
    size = validate_chunk_size(engine, chunk_size or made.chunk_size or DEFAULT_CHUNK_SIZE)
    name = get_splitter_version(splitter) if splitter is not None else ""
    if (size, name) != (made.chunk_size, made.splitter):
        if made.num_documents and (made.chunk_size or made.splitter) and (name or f"{size} tokens") != made.chunker:
            notify(
                f"the chunker changes from {made.chunker} to {name or f'{size} tokens'}: the documents of this "
                "ingestion are split and prefilled again, other documents when they are ingested"
            )
        index.change_index_facts(chunk_size=size, splitter=name)
    if splitter is not None:
        return ChunkerConfig(splitter, name)
    return ChunkerConfig(lambda document: split(document, engine.renderer.count_tokens, size), str(size))


def validate_chunk_size(engine: Engine, chunk_size: int) -> int:
    """Return `chunk_size`. Raises UsageError if a chunk and a question would exceed the model's context length."""
    longest = engine.context_length - 64
    if not 0 < chunk_size <= longest:
        raise UsageError(
            f"chunk size is {chunk_size} tokens, but {engine.name} reads {engine.context_length}; choose 1 to "
            f"{longest} (`chunk_size`), small enough that several chunks fit"
        )
    return chunk_size
