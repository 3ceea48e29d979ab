"""Strict calls: an error unless the chunks of a prompt are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragblend.errors import RagblendError
from ragblend.prompt.types import Prompt

if TYPE_CHECKING:
    from ragblend.engine.api import Engine


class ChunkNotReusedError(RagblendError):
    """A call with `strict=True` whose prompt does not reuse the stored KV of all its chunks. See `check_chunks`."""


def check_chunks(engine: Engine, prompt: Prompt) -> None:
    """Raise ChunkNotReusedError if a chunk of `prompt` would not be reused.

    There are three cases: the prompt contains no ingested chunk; a chunk in `prompt.chunks` is not in the prompt's
    text; a chunk in the text has no stored KV.
    """
    for chunk in prompt.chunks:
        if not any(chunk.text.strip() in message.content for message in prompt.messages):
            raise ChunkNotReusedError(
                f"the prompt names the chunk {chunk.text[:60]!r} but does not contain its text; "
                "put chunks into the prompt unchanged, or call with strict=False"
            )
    matched = engine.match(prompt)
    if not matched.runs:
        raise ChunkNotReusedError(
            "no ingested chunk was found in the prompt; ingest the documents into this store "
            "(ragblend.precompute.precompute_documents), or call with strict=False"
        )
    for run in matched.runs:
        if not engine.has_kv(run.chunk_ids):
            text = engine.renderer.plain_text(run.chunk_ids).strip()
            raise ChunkNotReusedError(
                f"the chunk {text[:60]!r} has no KV in the store; precompute it "
                "(ragblend.precompute.precompute_documents), or call with strict=False"
            )
