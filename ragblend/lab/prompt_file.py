"""A prompt that an application sent: reads it from a file, and finds the stored texts in it that are not reused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ragblend.catalog.registry import ChunkRegistry, open_registry
from ragblend.catalog.schema import text_id
from ragblend.engine.base import LEAST_QUOTE, LocalEngine
from ragblend.errors import UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text
from ragblend.frameworks.content import text_and_chunks
from ragblend.lab.near_texts import NearText, find_near_texts
from ragblend.prompt.token_index import EDGE, WINDOW
from ragblend.prompt.types import Message, Prompt, ToolCall

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


def find_missed_reuse(engine: LocalEngine, prompt: Prompt) -> list[dict[str, Any]]:
    """Return JSON objects for stored texts that the prompt contains in large part, but whose KV is not wholly reused.

    "document": a document with the text, as COLLECTION/ID; "" if none is known, for example for an ingested folder.
    "text": the stored text. "share": share of the text's words that the prompt contains. "reason": why the KV is not
    reused. `find_near_texts` chooses at most MAX_NEAR texts among all of the store, including those of other namespaces
    and tokenizers.
    """
    num_matched: Counter[tuple[int, ...]] = Counter()
    for run in engine.match(prompt).runs:
        num_matched[run.chunk_ids] += run.num_tokens

    def is_matched(text: str) -> bool:
        ids = engine.renderer.chunk_ids(text)
        return num_matched[ids] > max(0, len(ids) - EDGE - 1)

    with open_registry(engine.store, create=False) as registry:
        near = find_near_texts(registry.texts(), "\n\n".join(each.content for each in prompt.messages), is_matched)
        missed = []
        for each in near:
            unnamed = ("", text_id(each.text))
            owners = (key for key in registry.documents_of(each.text) if key.id not in unnamed)
            names = (f"{key.collection}/{key.id}".lstrip("/") for key in owners)
            reason = _reason(each, engine, registry)
            missed.append({"document": next(names, ""), "text": each.text, "share": each.share, "reason": reason})
        return missed


def _reason(near: NearText, engine: LocalEngine, registry: ChunkRegistry) -> str:
    tokenizer = engine.renderer.fingerprint
    owners = registry.tokenizers_and_namespaces_of(near.text)
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
