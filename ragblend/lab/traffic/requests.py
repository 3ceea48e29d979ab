"""Requests in logged JSON values: bodies of OpenAI chat completions and completions, bare or as a value's `body`.

`requests_in` is the entry point. Works on JSON values and texts; does not depend on files or tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ragblend.engine.vllm.params import PARAMS_KEY, salted_namespace
from ragblend.frameworks.boundaries import TextRegistry, recover_chunks
from ragblend.prompt.prompt import Chunk

_MEDIA = ("image", "audio", "video", "file")
_ROLES = {"developer": "system", "function": "tool"}


class ChunkMarkers(NamedTuple):
    """What marks chunks in plain texts: a separator, or a registry of ingested texts."""

    separator: str | None = None
    registry: TextRegistry | None = None


NO_MARKERS = ChunkMarkers()


class PromptPiece(NamedTuple):
    """A text or token ids, tokenized alone. `is_chunk`: it is one chunk, whole."""

    content: str | tuple[int, ...]
    is_chunk: bool = False


class LoggedRequest(NamedTuple):
    """One prompt. `time_s`: seconds since 1970; None where the log has none. `answer`: the generated text."""

    pieces: Sequence[PromptPiece]
    answer: str = ""
    time_s: float | None = None
    namespace: str = ""
    num_media: int = 0  # images, files and sounds, whose tokens are unknown


def requests_in(value: object, markers: ChunkMarkers = NO_MARKERS) -> Iterator[LoggedRequest]:
    """The requests of one logged JSON value: none for other values, several for a completions body with a list.

    >>> [each.time_s for each in requests_in({"messages": [{"role": "user", "content": "Hi"}], "timestamp": 7})]
    [7.0]
    """
    if not isinstance(value, Mapping):
        return
    body = value.get("body", value)
    if not isinstance(body, Mapping):
        return
    params = body.get("kv_transfer_params")
    ours = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    ours = ours if isinstance(ours, Mapping) else {}
    salt = body.get("cache_salt")
    namespace = salted_namespace(str(ours.get("namespace") or ""), salt if isinstance(salt, str) else None)
    time_s, answer = _time_s(value.get("timestamp")), _answer(value.get("response"))
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        pieces, num_media = _chat(messages, body.get("tools"), markers)
        yield LoggedRequest(pieces, answer, time_s, namespace, num_media)
        return
    for prompt in _prompts(body.get("prompt")):
        if isinstance(prompt, str):
            pieces = list(_parts(prompt, markers, asks=False))
        else:
            pieces = list(_cut_ids(prompt, ours.get("spans")))
        yield LoggedRequest(pieces, answer, time_s, namespace)


def _chat(messages: list[Any], tools: object, markers: ChunkMarkers) -> tuple[list[PromptPiece], int]:
    """The pieces of a chat, and its number of media. A line with the role stands for what a chat template adds."""
    pieces, num_media = [], 0
    if tools:  # templates write them before the first turn
        pieces.append(PromptPiece(f"<tools>\n{_dumped(tools)}\n"))
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        role = str(message.get("role") or "user")[:64]
        content, calls = message.get("content"), message.get("tool_calls")
        parts = content if isinstance(content, list) else [content]
        blocks = [_block(part) for part in parts if isinstance(part, str | Mapping)]
        texts = [block for block in blocks if block is not None]
        num_media += len(blocks) - len(texts)
        pieces.append(PromptPiece(turn_header(_ROLES.get(role, role))))
        if texts:
            plain = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else texts
            pieces += _parts(plain, markers, asks=role == "user")
        pieces += [PromptPiece(f"\n{_dumped(call)}") for call in (calls if isinstance(calls, list) else ())]
        pieces.append(PromptPiece("\n"))
    return pieces, num_media


def turn_header(role: str) -> str:
    """What stands for a chat template's tokens before a turn."""
    return f"<{role}>\n"


def _block(part: str | Mapping[str, Any]) -> str | dict[str, Any] | None:
    """A content part as text, with its mark where it is a chunk; None for media. A part of another type is its JSON."""
    if isinstance(part, str):
        return part
    text = part.get("text")
    if isinstance(text, str):
        marks = {name: part[name] for name in ("extras", "chunk_id") if isinstance(part.get(name), str | dict)}
        return {"type": "text", "text": text, **marks} if marks else text
    return None if any(name in str(part.get("type")) for name in _MEDIA) else _dumped(part)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parts(content: str | list[Any], markers: ChunkMarkers, asks: bool) -> Iterator[PromptPiece]:
    if isinstance(content, str) and not markers.separator and markers.registry is None:
        yield PromptPiece(content)
        return
    for part in recover_chunks(content, separator=markers.separator, registry=markers.registry, asks=asks):
        yield PromptPiece(part.text, is_chunk=True) if isinstance(part, Chunk) else PromptPiece(str(part))


def _prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        return []
    if prompt and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in prompt):
        return [tuple(prompt)]
    return [found for each in prompt if isinstance(each, str | list) for found in _prompts(each)]


def _cut_ids(ids: tuple[int, ...], spans: Any) -> Iterator[PromptPiece]:
    """Token ids, cut at the chunks that the request's parameters name; whole where these are malformed."""
    try:
        bounds = [(int(start), int(end)) for start, end in spans or ()]
    except (TypeError, ValueError):
        bounds = []
    place = 0
    for start, end in bounds:
        if place <= start < end <= len(ids):
            yield PromptPiece(ids[place:start])
            yield PromptPiece(ids[start:end], is_chunk=True)
            place = end
    yield PromptPiece(ids[place:])


def _answer(response: Any) -> str:
    """The generated text of a chat completion or a completion, bare or as `body`; "" where there is none."""
    try:
        choice = response.get("body", response)["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (AttributeError, KeyError, IndexError, TypeError):
        return ""
    return text if isinstance(text, str) else ""


def _time_s(value: object) -> float | None:
    """Seconds since 1970 of a timestamp, a number of seconds or ISO 8601; None for anything else.

    >>> [_time_s(value) for value in (1.5e9, "1970-01-01T00:01:00Z", "soon", True)]
    [1500000000.0, 60.0, None, None]
    """
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None
