"""Requests in what logs hold: OpenAI bodies, bare or wrapped, LiteLLM, LangSmith runs, Langfuse observations.

`requests_in` is the one place: a JSON value to no, one or several `LoggedRequest`s. What is told apart by which fields
there are, as each tool documents them (docs/analyze.md names the pages). Knows no files and no tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ragblend.engine.vllm.params import PARAMS_KEY, salted_namespace
from ragblend.frameworks.boundaries import KnownTexts, recover
from ragblend.prompt.prompt import Chunk

MAX_DEPTH = 16  # of content parts in content parts

_TIMES = (
    "timestamp", "start_time", "startTime", "started_at", "created_at", "createdAt", "request_time", "time", "ts",
    "created",
)  # fmt: skip
_ANSWERS = (
    "body", "choices", "message", "generations", "messages", "kwargs", "data", "content", "text", "output",
)  # fmt: skip
_PAGES = ("data", "runs", "observations", "generations", "requests")
_ROLES = {"human": "user", "ai": "assistant", "developer": "system", "function": "tool", "model": "assistant"}
_TEXT_TYPES = ("text", "text-plain", "input_text", "output_text", "refusal", "thinking", "reasoning")
_NO_TEXT = ("image", "audio", "video", "file", "document", "media", "pdf")


class Piece(NamedTuple):
    """A piece of a prompt, tokenized alone: a text or token ids. `is_chunk`: its boundaries are known as a chunk's."""

    content: str | tuple[int, ...]
    is_chunk: bool = False


class LoggedRequest(NamedTuple):
    """One prompt. `time_s`: seconds since 1970; None where the log has none. `answer`: the text that was generated."""

    pieces: tuple[Piece, ...]
    answer: str = ""
    time_s: float | None = None
    namespace: str = ""
    num_media: int = 0  # images and the like, whose tokens are unknown


class Marks(NamedTuple):
    """How chunks are marked in plain texts: by a separator, or by being known."""

    separator: str | None = None
    registry: KnownTexts | None = None


NO_MARKS = Marks()


def requests_in(value: Any, marks: Marks = NO_MARKS) -> Iterator[LoggedRequest]:
    """The requests of one logged JSON value; none for what is something else (a span, an embedding, a result).

    >>> [each.time_s for each in requests_in({"messages": [{"role": "user", "content": "Hi"}], "timestamp": 7})]
    [7.0]
    """
    for entry in _entries(value):
        body, answer = _body(entry)
        if body is not None:
            yield from _requests(entry, body, answer, marks)


def _entries(value: Any) -> Iterator[Mapping[str, Any]]:
    """The log entries of a value: itself, or those on an export's page."""
    if isinstance(value, list):
        for each in value:
            if isinstance(each, Mapping):
                yield each
    elif isinstance(value, Mapping):
        page = next((value[name] for name in _PAGES if isinstance(value.get(name), list)), None)
        if page is None or _is_body(value):
            yield value
        else:
            yield from (each for each in page if isinstance(each, Mapping))


def _is_body(value: Any) -> bool:
    return isinstance(value, Mapping) and (bool(value.get("messages")) or bool(value.get("prompt")) or _responds(value))


def _responds(body: Mapping[str, Any]) -> bool:
    """Whether it is a body of OpenAI's Responses API; that of an embedding also has an `input`."""
    given = body.get("input")
    if isinstance(given, list):
        return any(isinstance(each, Mapping) and ("role" in each or "content" in each) for each in given)
    return isinstance(given, str) and ("instructions" in body or "max_output_tokens" in body)


def _body(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, Any]:
    """The request's body in a log entry, and what was answered; (None, None) for an entry that is no request."""
    if "run_type" in entry:  # LangSmith
        if entry["run_type"] != "llm":
            return None, None
        return _as_body(entry.get("inputs")), entry.get("outputs")
    if "type" in entry and ("traceId" in entry or "trace_id" in entry):  # Langfuse
        if str(entry["type"]).upper() != "GENERATION":
            return None, None
        return _as_body(entry.get("input")), _decoded(entry.get("output"))
    for name in ("body", "request", "request_body", "params", "standard_logging_object", "proxy_server_request"):
        inner = _decoded(entry.get(name))
        if isinstance(inner, Mapping):
            found, answer = (inner, inner.get("response")) if _is_body(inner) else _body(inner)
            if found is not None:
                return found, answer if answer is not None else _decoded(entry.get("response"))
    return (entry, entry.get("response")) if _is_body(entry) else (None, None)


def _as_body(given: Any) -> Mapping[str, Any] | None:
    """A tracing tool's input as a body: it may be one, or messages, or a text, or one of these as a string of JSON."""
    given = _decoded(given)
    if isinstance(given, str):
        return {"prompt": given} if given else None
    if isinstance(given, list):
        return {"messages": given}
    if isinstance(given, Mapping):
        if _is_body(given):
            return given
        if isinstance(given.get("prompts"), list):  # LangChain's completion models
            return {"prompt": given["prompts"]}
        if isinstance(given.get("input"), str | list):
            return _as_body(given["input"])
        if "role" in given and "content" in given:
            return {"messages": [given]}
    return None


def _decoded(value: Any) -> Any:
    """JSON that was logged as a string."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _requests(entry: Mapping[str, Any], body: Mapping[str, Any], answer: Any, marks: Marks) -> Iterator[LoggedRequest]:
    time_s = _time_s(entry) if (found := _time_s(body)) is None else found
    params = body.get("kv_transfer_params") or (body.get("extra_body") or {}).get("kv_transfer_params") or {}
    ours = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    ours = ours if isinstance(ours, Mapping) else {}
    salt = body.get("cache_salt")
    namespace = salted_namespace(str(ours.get("namespace") or ""), salt if isinstance(salt, str) else None)
    if body.get("messages") or _responds(body):
        reader = _Reader(marks)
        pieces = [*reader.tools(body.get("tools")), *reader.turns(body)]
        yield LoggedRequest(tuple(pieces), _text_of(answer), time_s, namespace, reader.num_media)
        return
    for prompt in _prompts(body["prompt"]):
        if isinstance(prompt, str):
            spoken = tuple(Piece(*each) for each in _parts(prompt, marks, asks=False))
        else:
            spoken = tuple(_cut_ids(prompt, ours.get("spans")))
        yield LoggedRequest(spoken, _text_of(answer), time_s, namespace)


def _prompts(prompt: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        return []
    if prompt and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in prompt):
        return [tuple(prompt)]
    return [found for each in prompt if isinstance(each, str | list) for found in _prompts(each)]


def _cut_ids(ids: tuple[int, ...], spans: Any) -> Iterator[Piece]:
    """Token ids, cut where ragblend's parameters say that chunks are; uncut where these are none."""
    try:
        bounds = [(int(start), int(end)) for start, end in spans or ()]
    except (TypeError, ValueError):
        bounds = []
    place = 0
    for start, end in bounds:
        if place <= start < end <= len(ids):
            yield Piece(ids[place:start])
            yield Piece(ids[start:end], is_chunk=True)
            place = end
    yield Piece(ids[place:])


def _parts(content: str | list[Any], marks: Marks, asks: bool) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a chunk) for each part of a message."""
    marked = isinstance(content, list) or marks.separator or marks.registry is not None
    parts = recover(content, separator=marks.separator, registry=marks.registry, asks=asks) if marked else (content,)
    for part in parts:
        yield (part.text, True) if isinstance(part, Chunk) else (str(part), False)


class _Reader:
    """The turns of one chat. Around each turn stands a line with its role, for what a chat template puts there."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self.num_media = marks, 0

    def tools(self, tools: Any) -> Iterator[Piece]:
        """What may be called: templates write it before the first turn."""
        if isinstance(tools, list) and tools:
            yield Piece(f"<tools>\n{json.dumps(tools, ensure_ascii=False, default=str)}\n")

    def turns(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """Every turn, in order."""
        if isinstance(body.get("instructions"), str):
            yield from self._turn("system", body["instructions"], ())
        if isinstance(body.get("system"), str | list):  # Anthropic's, which LiteLLM passes on
            yield from self._turn("system", body["system"], ())
        messages = body.get("messages") or body.get("input")
        if isinstance(messages, str):
            yield from self._turn("user", messages, ())
            return
        for message in _flat(messages, 0):
            role, content, calls = _message(message)
            yield from self._turn(role, content, calls)

    def _turn(self, role: str, content: Any, calls: Any) -> Iterator[Piece]:
        yield Piece(header(role))
        blocks = list(self._blocks(content, 0))
        plain = len(blocks) == 1 and isinstance(blocks[0], str)
        if blocks:
            for part in _parts(blocks[0] if plain else blocks, self._marks, role == "user"):
                yield Piece(*part)
        for call in calls if isinstance(calls, list) else ():
            yield Piece(f"\n{json.dumps(call, ensure_ascii=False, default=str)}")
        yield Piece("\n")

    def _blocks(self, content: Any, depth: int) -> Iterator[Any]:
        """Texts and marked text blocks; whatever else there is, is counted (media) or written as JSON."""
        if isinstance(content, str):
            yield content
        elif isinstance(content, list | tuple) and depth < MAX_DEPTH:
            for each in content:
                yield from self._blocks(each, depth + 1)
        elif isinstance(content, Mapping) and depth < MAX_DEPTH:
            kind, text = str(content.get("type", "text")), content.get("text")
            if isinstance(text, str) and (kind in _TEXT_TYPES or "text" in kind):
                marks = {
                    name: content[name] for name in ("extras", "chunk_id") if isinstance(content.get(name), str | dict)
                }
                yield {"type": "text", "text": text, **marks} if marks else text
            elif any(name in kind for name in _NO_TEXT):
                self.num_media += 1
            elif "content" in content:  # a tool's result
                yield from self._blocks(content["content"], depth + 1)
            else:
                yield json.dumps(content, ensure_ascii=False, default=str)


def header(role: str) -> str:
    """What stands for a chat template's tokens before a turn."""
    return f"<{role}>\n"


def _flat(messages: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Messages; LangChain logs a list of lists."""
    if isinstance(messages, Mapping):
        yield messages
    elif isinstance(messages, list) and depth < MAX_DEPTH:
        for each in messages:
            yield from _flat(each, depth + 1)


def _message(message: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Role, content and tool calls, in OpenAI's form or in one of those that LangChain writes."""
    inner = message.get("kwargs") or message.get("data")
    fields = inner if isinstance(inner, Mapping) else message
    role = fields.get("role") or fields.get("type") or message.get("type")
    if isinstance(message.get("id"), list) and message["id"] and role in (None, "constructor"):
        role = str(message["id"][-1]).removesuffix("Chunk").removesuffix("Message").lower()
    role = str(role or "user")[:64]
    more = fields.get("additional_kwargs")
    calls = fields.get("tool_calls") or (more.get("tool_calls") if isinstance(more, Mapping) else None)
    content = fields.get("content")
    if content is None:  # the Responses API has calls and their results as turns of their own
        content = fields.get("output") or fields.get("arguments")
    return _ROLES.get(role, role), content, calls


def _text_of(answer: Any) -> str:
    """The generated text in a response, of any of the forms; "" where there is none."""
    answer = _decoded(answer)
    for _ in range(MAX_DEPTH):
        if isinstance(answer, str):
            return answer
        if isinstance(answer, list):
            answer = answer[0] if answer else None
        elif isinstance(answer, Mapping):
            names = (
                "body",
                "choices",
                "message",
                "generations",
                "messages",
                "kwargs",
                "data",
                "content",
                "text",
                "output",
            )
            answer = next((answer[name] for name in names if answer.get(name)), None)
        else:
            return ""
    return ""


def _time_s(entry: Mapping[str, Any]) -> float | None:
    """When the request was made, in seconds since 1970; None where nothing says so.

    >>> [_time_s({"time": time}) for time in (1.5e9, 1.5e12, "1970-01-01T00:01:00Z", "soon", True)]
    [1500000000.0, 1500000000.0, 60.0, None, None]
    """
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                continue
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            while abs(value) > 1e11:  # milliseconds, microseconds, nanoseconds
                value /= 1000
            return float(value)
    return None
