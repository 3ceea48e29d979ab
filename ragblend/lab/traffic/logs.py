"""Logs of requests: JSON lines, each the body of an OpenAI chat completion or completion. Read `RequestLog`.

Error messages never quote a log, which may be confidential.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.engine.namespaces import salted_namespace
from ragblend.engine.vllm.params import PARAMS_KEY
from ragblend.errors import NotFoundError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import open_regular_file
from ragblend.frameworks.content import is_media

STDIN = "-"
NUM_NAMED = 20  # skipped lines whose place and reason are kept

Piece = str | tuple[int, ...]
"""A text, which is tokenized alone, or token ids."""


class LoggedRequest(NamedTuple):
    """One logged prompt: the pieces of its text, the number of its media, and its namespace."""

    pieces: Sequence[Piece]
    num_media: int  # images, files and sounds, whose tokens are unknown
    namespace: str


class RequestLog:
    """The requests in log files, one per line. Iterating over a RequestLog yields them in order.

    `skipped` lists the first NUM_NAMED lines that hold no request, each as "FILE:LINE: reason". Raises NotFoundError
    for a file that does not exist, UsageError for a folder.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.files = [_checked(expand_user_path(path, "the log")) for path in paths]
        self.num_skipped, self.skipped = 0, list[str]()

    def __iter__(self) -> Iterator[LoggedRequest]:
        for path in self.files:
            with nullcontext(sys.stdin.buffer) if path == STDIN else os.fdopen(open_regular_file(path), "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        request = self._read(f"{path}:{number}", line)
                        if request is not None:
                            yield request

    def _read(self, place: str, line: bytes) -> LoggedRequest | None:
        try:
            request = parse_request(json.loads(line))
            reason = "neither messages nor a prompt"
        except json.JSONDecodeError as error:
            request, reason = None, f"no JSON: {error.msg} at character {error.pos}"
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            request, reason = None, f"no request: {type(error).__name__}"
        if request is None:
            self.num_skipped += 1
            if len(self.skipped) < NUM_NAMED:
                self.skipped.append(f"{place}: {reason}")
        return request


def _checked(path: Path) -> str:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the files in it: ragblend analyze {path}/*")
    if str(path) != STDIN and not path.exists():
        raise NotFoundError(f"{path} does not exist; name files of logged requests, or - for the standard input")
    return str(path)


def parse_request(body: Any) -> LoggedRequest | None:
    """Return the request in an OpenAI body; None if the body has neither messages nor a prompt.

    Raises TypeError, AttributeError or ValueError for a field of the wrong type.

    >>> parse_request({"messages": [{"role": "user", "content": "Hi"}]}).pieces
    ['<user>\\n', 'Hi', '\\n']
    """
    if not isinstance(body, Mapping):
        return None
    ours = (body.get("kv_transfer_params") or {}).get(PARAMS_KEY) or {}
    namespace = salted_namespace(str(ours.get("namespace") or ""), body.get("cache_salt"))
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages:
        return LoggedRequest(*_read_chat(messages, body.get("tools")), namespace)
    if prompt and isinstance(prompt, str):
        return LoggedRequest([prompt], 0, namespace)
    if prompt and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in prompt):
        return LoggedRequest([tuple(prompt)], 0, namespace)
    return None


def _read_chat(messages: Sequence[Mapping[str, Any]], tools: object) -> tuple[list[Piece], int]:
    """Return the pieces of a chat and the number of its media."""
    num_media = 0
    # Templates write tools before the first turn.
    pieces: list[Piece] = [f"<tools>\n{_dumped(tools)}\n"] if tools else []
    for message in messages:
        content = message.get("content") or []
        texts = [_text(part) for part in ([content] if isinstance(content, str) else content)]
        num_media += texts.count(None)
        pieces += [turn_header(str(message.get("role"))), *(text for text in texts if text is not None)]
        pieces += [f"\n{_dumped(call)}" for call in message.get("tool_calls") or ()]
        pieces.append("\n")
    return pieces, num_media


def turn_header(role: str) -> str:
    """Return the line that stands for the header of a turn. The real header depends on the chat template."""
    return f"<{role}>\n"


def _text(part: str | Mapping[str, Any]) -> str | None:
    """Return the text of a content part, the JSON of a part of another type; None for media."""
    if isinstance(part, str):
        return part
    if isinstance(text := part.get("text"), str):
        return text
    return None if is_media(str(part.get("type"))) else _dumped(part)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
