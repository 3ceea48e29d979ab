"""Logs as token ids, in the order of the requests' times: files -> lines -> requests -> ids. Read `read_requests`.

A log has one JSON value per line: the body of an OpenAI chat completion or completion, bare or as a value's `body`;
gzip is unpacked. Broken lines are counted, and no error quotes a log. Exports are often newest first, so all requests
are read before the first is looked at: the memory holds each text's ids once, and 4 bytes for a text of a request.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from ragblend.engine.vllm.params import PARAMS_KEY, salted_namespace
from ragblend.errors import EmptyCorpusError, NotFoundError
from ragblend.files.places import user_path
from ragblend.files.reading import open_file
from ragblend.frameworks.content import is_media
from ragblend.lab.traffic.tokens import Ids, Tokens

STDIN = "-"
MAX_LINE = 64 << 20
"""Bytes of one line; a longer one is broken. A prompt of a million tokens has 4 MB."""
NAMED = 20  # broken places that are named, of all that are counted

_ROLES = {"developer": "system", "function": "tool"}

Progress = Callable[[str, int, int | None], None]


Piece = str | tuple[int, ...]
"""A text, which is tokenized alone, or token ids."""


class LoggedRequest(NamedTuple):
    """One prompt. `time_s`: seconds since 1970; None where the log has none. `answer`: the generated text."""

    pieces: Sequence[Piece]
    answer: str = ""
    time_s: float | None = None
    namespace: str = ""
    num_media: int = 0  # images, files and sounds, whose tokens are unknown


class TokenizedRequest(NamedTuple):
    """One prompt as ids. `answer`: the turn that followed it."""

    ids: Ids
    answer: Ids
    seed: int  # of its namespace's hashes: no namespace finds the tokens of another


class RequestLog:
    """Tokenized requests, added in any order, read in that of their times."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._numbers: dict[int, int] = {}  # digest of a text: its place in `_ids`
        self._ids: list[Ids] = []
        self._namespaces = {"": 0}
        # Of each request: its namespace, the number of its prompt's pieces, and those pieces and its answer's.
        self._records, self._starts, self._times = array("i"), array("q", [0]), array("d")
        self.files: tuple[str, ...] = ()
        self.num_broken, self.broken = 0, list[str]()  # lines that could not be read, and the first places
        self.num_timed = self.num_media = 0
        self.num_other = 0  # logged values that are no requests, or have no text

    def __len__(self) -> int:
        return len(self._times)

    def add_broken(self, place: str, reason: str) -> None:
        """Count a place that cannot be read. `reason` does not quote the log."""
        self.num_broken += 1
        if len(self.broken) < NAMED:
            self.broken.append(f"{place}: {reason}")

    def add_logged(self, place: str, value: object) -> None:
        """Add the requests of one line."""
        try:
            added = [self.add(request) for request in requests_in(value)]
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
            self.add_broken(place, f"its fields are of another kind ({type(error).__name__})")
        else:
            self.num_other += not any(added)

    def add(self, request: LoggedRequest) -> bool:
        """Keep a request; False, and nothing, for one without a token."""
        pieces = [self._number(piece) for piece in request.pieces]
        if not any(len(self._ids[piece]) for piece in pieces):
            return False
        answer = [turn_header("assistant"), request.answer, "\n"] if request.answer else []
        self._records.extend((self._namespaces.setdefault(request.namespace, len(self._namespaces)), len(pieces)))
        self._records.extend([*pieces, *map(self._number, answer)])
        self._starts.append(len(self._records))
        # A request without a time keeps its place after the one before it.
        last_s = self._times[-1] if self._times else -math.inf
        self._times.append(last_s if request.time_s is None else request.time_s)
        self.num_timed += request.time_s is not None
        self.num_media += request.num_media
        return True

    def _number(self, piece: Piece) -> int:
        """Where the ids of a piece are; tokenizes it when it comes for the first time."""
        if isinstance(piece, str):
            key = xxhash.xxh3_128_intdigest(piece.encode("utf-8", "surrogatepass"))
        else:
            key = xxhash.xxh3_128_intdigest(np.asarray(piece, np.int32).tobytes(), seed=1)
        if (number := self._numbers.get(key)) is None:
            ids = self._tokens.ids(piece) if isinstance(piece, str) else np.asarray(piece, np.int32)
            number = self._numbers[key] = len(self._ids)
            self._ids.append(ids)
        return number

    def in_order(self) -> Iterator[TokenizedRequest]:
        """The requests, earliest first; of equal times, the one that was added first."""
        seeds = [xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) if name else 0 for name in self._namespaces]
        for index in np.argsort(np.frombuffer(self._times, np.float64), kind="stable"):
            namespace, num_pieces, *pieces = self._records[self._starts[index] : self._starts[index + 1]]
            texts = [self._ids[piece] for piece in pieces]
            end = sum(map(len, texts[:num_pieces]))
            ids, answer = np.split(np.concatenate(texts), [end])
            yield TokenizedRequest(ids, answer, seeds[namespace])


def read_requests(paths: Sequence[str | Path], tokens: Tokens, progress: Progress | None = None) -> RequestLog:
    """The requests of files and folders. Raises NotFoundError for a missing path, EmptyCorpusError for no request."""
    requests = RequestLog(tokens)
    requests.files = tuple(files_of(paths))
    for place, value in (line for path in requests.files for line in lines_of(path, requests.add_broken)):
        requests.add_logged(place, value)
        if progress is not None:
            progress("read", len(requests), None)
    if not len(requests):
        raise EmptyCorpusError(
            f"no request in {', '.join(requests.files[:3])}: {requests.num_broken} lines broken, {requests.num_other} "
            "values of another kind. A line is the JSON body of an OpenAI request: docs/analyze.md"
        )
    return requests


# -- files and lines


def files_of(paths: Iterable[str | Path]) -> list[str]:
    """The files of `paths`; a folder stands for all files below it in order of their names, hidden ones left out.

    Raises NotFoundError for a path that does not exist and for a folder without files.
    """
    found: list[str] = []
    for path in (user_path(each, "the log") for each in paths):
        if path.is_dir():
            below = sorted(each for each in path.rglob("*") if each.is_file() and each.name[0] not in ".~")
            if not below:
                raise NotFoundError(f"there is no file in {path}; name the folder that the logs are in")
            found += map(str, below)
        elif str(path) == STDIN or path.exists():
            found.append(str(path))
        else:
            raise NotFoundError(f"there is no {path}; name files with logged requests, or folders of them")
    return found


def lines_of(path: str | Path, broken: Callable[[str, str], None]) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of each line of a file, gzip or not; `broken` is told the place and why of all others."""
    number = 0
    try:
        with closing(_opened(path)) as stream:
            while line := stream.readline(MAX_LINE + 1):
                number += 1
                place = f"{path}:{number}"
                if len(line) > MAX_LINE:
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(1 << 20)
                    broken(place, f"longer than {MAX_LINE >> 20} MiB")
                elif line.strip():
                    try:
                        value = json.loads(line)
                    except json.JSONDecodeError as error:
                        broken(place, f"no JSON: {error.msg} at character {error.pos}")
                    except (ValueError, RecursionError) as error:
                        broken(place, f"no JSON: {type(error).__name__}")
                    else:
                        yield place, value
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or (type(error).__name__ if isinstance(error, OSError) else str(error))
        broken(str(path), f"cannot be read on: {why}")


def _opened(path: str | Path) -> io.BufferedReader | gzip.GzipFile:
    stream = cast(io.BufferedReader, sys.stdin.buffer if path == STDIN else os.fdopen(open_file(path), "rb"))
    return gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == b"\x1f\x8b" else stream


# -- requests in JSON values


def requests_in(value: object) -> Iterator[LoggedRequest]:
    """The requests of one logged JSON value: none for other values, several for a completions body with a list.

    >>> [each.time_s for each in requests_in({"messages": [{"role": "user", "content": "Hi"}], "timestamp": 7})]
    [7.0]
    """
    body = value.get("body", value) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(body, Mapping):
        return
    ours = (body.get("kv_transfer_params") or {}).get(PARAMS_KEY) or {}
    namespace = salted_namespace(str(ours.get("namespace") or ""), body.get("cache_salt"))
    time_s, answer = _time_s(value.get("timestamp")), _answer(value.get("response"))
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        pieces, num_media = _chat(messages, body.get("tools"))
        yield LoggedRequest(pieces, answer, time_s, namespace, num_media)
        return
    for prompt in _prompts(body.get("prompt")):
        yield LoggedRequest([prompt], answer, time_s, namespace)


def _chat(messages: list[Any], tools: object) -> tuple[list[Piece], int]:
    """The pieces of a chat, and its number of media. A line with the role stands for what a chat template adds."""
    num_media = 0
    # Templates write tools before the first turn.
    pieces: list[Piece] = [f"<tools>\n{_dumped(tools)}\n"] if tools else []
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        role, content = str(message.get("role") or "user")[:64], message.get("content")
        parts = content if isinstance(content, list) else [content]
        blocks = [_block(part) for part in parts if isinstance(part, str | Mapping)]
        texts = [block for block in blocks if block is not None]
        num_media += len(blocks) - len(texts)
        pieces += [turn_header(_ROLES.get(role, role)), *texts]
        pieces += [f"\n{_dumped(call)}" for call in message.get("tool_calls") or ()]
        pieces.append("\n")
    return pieces, num_media


def turn_header(role: str) -> str:
    """What stands for a chat template's tokens before a turn."""
    return f"<{role}>\n"


def _block(part: str | Mapping[str, Any]) -> str | None:
    """The text of a content part; None for media. A part of another type is its JSON."""
    if isinstance(part, str):
        return part
    text = part.get("text")
    if isinstance(text, str):
        return text
    return None if is_media(str(part.get("type"))) else _dumped(part)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _prompts(prompt: object) -> list[Piece]:
    """The prompts of a completion: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        return []
    if prompt and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in prompt):
        return [tuple(prompt)]
    return [found for each in prompt for found in _prompts(each)]


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
