"""A prompt that an application sent: reads it from a file, and finds the stored texts in it that are not reused."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.catalog.schema import text_id
from ragblend.corpus.citations import describe_chunk
from ragblend.engine.base import LocalEngine
from ragblend.engine.matching import LEAST_QUOTE
from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text
from ragblend.frameworks.content import text_and_chunks
from ragblend.index import ChunkIndex
from ragblend.lab.near_texts import NearText, find_near_texts
from ragblend.prompt.token_index import EDGE, WINDOW
from ragblend.prompt.types import Chunk, ChunkRun, Message, Prompt, ToolCall

STDIN = "-"
_EXPECTED = 'give messages, such as [{"role": "user", "content": "..."}], an OpenAI request body, or plain text'


def read_prompt(path: str) -> Prompt:
    """Return the prompt in the file `path`, or on standard input for "-".

    The file holds JSON messages, the body of an OpenAI request, or plain text, which is one user turn.

    Raises UsageError for JSON of another form, NotFoundError for a missing file.
    """
    if path == STDIN:
        text = sys.stdin.buffer.read().decode("utf-8-sig", errors="replace")
    else:
        text = read_text(expand_user_path(path, "--prompt"), "the prompt", _EXPECTED)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None  # text, which may begin like JSON
    if not isinstance(body, list | dict):
        return Prompt(question=text)
    try:
        return _from_json(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the prompt in {path} is JSON without messages ({error!r}); {_EXPECTED}") from error


def _from_json(body: Any) -> Prompt:
    if isinstance(body, Mapping) and isinstance(body.get("prompt"), str):
        return Prompt.from_text(body["prompt"])
    messages, tools = (body["messages"], body.get("tools") or ()) if isinstance(body, Mapping) else (body, ())
    turns, chunks = [], []
    for message in messages:
        text, named = text_and_chunks(message.get("content") or "")
        calls = tuple(
            ToolCall(call["function"]["name"], call["function"]["arguments"], call.get("id", ""))
            for call in message.get("tool_calls") or ()
        )
        role = "system" if message["role"] == "developer" else message["role"]
        turns.append(Message(role, text, calls, message.get("tool_call_id") or "", message.get("name") or ""))
        chunks += named
    return Prompt.from_messages(turns, tools, chunks)


def name_stored_chunks(engine: LocalEngine, prompt: Prompt, index: ChunkIndex | None) -> Prompt:
    """Return the same prompt, in which the stored chunks are named that the engine finds in it.

    A report then has their sources. `index`: the documents that `ingest` read; None if the store has none.
    """
    chunk_ids = {run.chunk_ids for run in engine.match(prompt).runs if run.chunk is None}
    with open_ledger(engine.store, create=False) as ledger:
        texts = ledger.texts_with_ids(chunk_ids, engine.renderer.fingerprint, engine.namespace).values()
        chunks = [*prompt.chunks, *_find_chunks(texts, ledger, index).values()]
    if prompt.is_chat:
        return Prompt.from_messages(prompt.messages, prompt.tools, chunks)
    return Prompt.from_text(prompt.messages[0].content, chunks)


def _find_chunks(texts: Collection[str], ledger: Ledger, index: ChunkIndex | None) -> dict[str, Chunk]:
    """Return for each text a chunk that has it. Its source is a file, else COLLECTION/ID, else ""."""
    indexed = index.find_chunks(texts) if index is not None else {}
    chunks = {}
    for text in texts:
        owners = (key for key in ledger.documents_of(text) if key.id not in ("", text_id(text)))
        names = (f"{key.collection}/{key.id}".lstrip("/") for key in owners)
        chunks[text] = indexed.get(text.strip()) or Chunk(text, next(names, ""))
    return chunks


def find_missed_reuse(engine: LocalEngine, prompt: Prompt, index: ChunkIndex | None = None) -> list[dict[str, Any]]:
    """Return JSON objects for stored texts that the prompt contains in large part, but whose KV is not wholly reused.

    "document": the file or the document (COLLECTION/ID) with the text; "" if none is known. "name": one line that names
    the text (`describe_chunk`). "text": the stored text. "share": share of the text's words that the prompt contains.
    "num_tokens": tokens of the text. "num_missed_tokens": how many of them are not found in the prompt. "missed": the
    longest part of the text that is not found; the text itself if no part is. "reason": why it is not found.

    `find_near_texts` chooses at most MAX_NEAR texts among all of the store, including those of other namespaces and
    tokenizers. `index`: the documents that `ingest` read; None if the store has none.
    """
    runs: defaultdict[tuple[int, ...], list[ChunkRun]] = defaultdict(list)
    for run in engine.match(prompt).runs:
        runs[run.chunk_ids].append(run)

    def missed_part(text: str) -> tuple[int, int, str]:
        """Return the number of the text's tokens, how many are in no run, and the longest such part."""
        ids = engine.renderer.chunk_ids(text)
        is_found = np.zeros(len(ids), bool)
        for run in runs[ids]:
            is_found[run.chunk_start : run.chunk_start + run.num_tokens] = True
        bounds = np.flatnonzero(np.diff(np.concatenate(([True], is_found, [True])).astype(int))).reshape(-1, 2)
        longest = max(bounds.tolist(), key=lambda part: part[1] - part[0], default=[0, 0])
        is_whole = not is_found.any()
        return len(ids), int((~is_found).sum()), text if is_whole else engine.renderer.plain_text(ids[slice(*longest)])

    def is_matched(text: str) -> bool:
        num_tokens, num_missed, _ = missed_part(text)
        return num_tokens - num_missed > max(0, num_tokens - EDGE - 1)

    with open_ledger(engine.store, create=False) as ledger:
        near = find_near_texts(ledger.texts(), "\n\n".join(each.content for each in prompt.messages), is_matched)
        chunk_of = _find_chunks([each.text for each in near], ledger, index)
        missed = []
        for each in near:
            chunk = chunk_of[each.text]
            num_tokens, num_missed, part = missed_part(each.text)
            missed.append(
                {
                    "document": chunk.source,
                    "name": describe_chunk(chunk),
                    "text": each.text,
                    "share": each.share,
                    "num_tokens": num_tokens,
                    "num_missed_tokens": num_missed,
                    "missed": part,
                    "reason": _reason(each, engine, ledger),
                }
            )
        return missed


def _reason(near: NearText, engine: LocalEngine, ledger: Ledger) -> str:
    tokenizer = engine.renderer.fingerprint
    owners = ledger.tokenizers_and_namespaces_of(near.text)
    namespaces = [namespace for owner, namespace in owners if owner == tokenizer]
    if engine.namespace in namespaces:
        same = (
            f"the same text; chunks of fewer than {WINDOW} tokens are not found, nor at the end of the last message "
            f"chunks of fewer than {LEAST_QUOTE}"
        )
        return near.difference or same
    where = "stored for no model yet: ragblend precompute"
    if namespaces:
        where = f"stored for namespace {', '.join(map(repr, namespaces))}, not {engine.namespace!r}"
    elif owners:
        where = "stored for another tokenizer"
    return f"{where}; {near.difference}" if near.difference else f"the same text, {where}"
