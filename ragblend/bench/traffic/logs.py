"""Log files of any size as JSON values, one after the other: JSONL, JSON arrays and documents, vLLM's own text log.

What a file holds is seen from its content, never from its name; gzip is unpacked. What cannot be read is named by
file and line, counted, and passed over. Knows files and JSON, nothing of requests.
"""

from __future__ import annotations

import ast
import codecs
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from ragblend.errors import NotFoundError
from ragblend.files.reading import open_file

STDIN = "-"
MAX_LINE = 64 << 20
"""Bytes of one line, or of one value of an array; longer ones are broken. A prompt of a million tokens has 4 MB."""
MAX_DOCUMENT = 256 << 20  # of a file that is one JSON document over several lines
NAMED = 20  # broken places that are named, of all that are counted

_CHUNK = 1 << 20
_UNREADABLE = (OSError, EOFError, zlib.error)
_HIDDEN = re.compile(r"^[.~]")
# vLLM's `RequestLogger`, up to 0.10 at level INFO and since then at DEBUG: the prompt as Python's repr.
_VLLM = re.compile(r"(?:Received request|Request) (\S+?):?(?: details)?: prompt: (.+?), (?:params|prompt_token_ids): ")


Log = io.BufferedReader | gzip.GzipFile


@dataclass(slots=True)
class Broken:
    """What could not be read: how much, and where the first of it stands."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str, reason: str) -> None:
        """Count one; the first few are named. `reason` never quotes the log."""
        self.count += 1
        if len(self.places) < NAMED:
            self.places.append(f"{place}: {reason}")


def files_of(paths: Iterable[str | Path]) -> list[Path | str]:
    """The files of `paths`, folders with all that is below them in order of their names, hidden files left out.

    Raises NotFoundError for a path that does not exist and for a folder without files.
    """
    found: list[Path | str] = []
    for path in paths:
        if str(path) == STDIN:
            found.append(STDIN)
        elif Path(path).is_dir():
            below = sorted(each for each in Path(path).rglob("*") if each.is_file() and not _HIDDEN.match(each.name))
            if not below:
                raise NotFoundError(f"there is no file in {path}; name the folder that the logs are in")
            found += below
        elif Path(path).exists():
            found.append(Path(path))
        else:
            raise NotFoundError(f"there is no {path}; name files with logged requests, or folders of them")
    return found


def values_in(path: Path | str, broken: Broken) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) for each value of one file."""
    try:
        with closing(_opened(path)) as stream:
            yield from _values(stream, str(path), broken)
    except _UNREADABLE as error:
        why = getattr(error, "strerror", None) or (type(error).__name__ if isinstance(error, OSError) else str(error))
        broken.add(str(path), f"cannot be read on: {why}")


def _opened(path: Path | str) -> Log:
    """The file's bytes, unpacked where it is gzip."""
    raw: BinaryIO = sys.stdin.buffer if path == STDIN else cast(BinaryIO, os.fdopen(open_file(path), "rb"))
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(Any, raw))
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=stream)  # with a small buffer: what stands before a damage is read
    return stream


def _values(stream: Log, name: str, broken: Broken) -> Iterator[tuple[str, Any]]:
    head = stream.peek(3)
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    number, first = 0, b""
    while not first.strip():
        number, first = number + 1, stream.readline(MAX_LINE + 1)
        if not first:
            return
    start = first.strip()
    if start[:1] == b"[":
        yield from _array(first, stream, name, broken)
    elif start == b"{":
        yield from _document(first, stream, name, broken)
    else:
        yield from _lines(first, number, stream, name, broken, is_json=start[:1] == b"{")


def _lines(
    line: bytes, number: int, stream: Log, name: str, broken: Broken, is_json: bool
) -> Iterator[tuple[str, Any]]:
    """A value per line; in a text log those lines that show a request."""
    while line:
        place = f"{name}:{number}"
        if len(line) > MAX_LINE:
            while not line.endswith(b"\n") and line:
                line = stream.readline(_CHUNK)
            broken.add(place, f"longer than {MAX_LINE >> 20} MiB")
        elif line.strip():
            if is_json or line.lstrip()[:1] == b"{":
                try:
                    yield place, json.loads(line)
                except (ValueError, RecursionError) as error:
                    broken.add(place, _why(error))
            elif (shown := _logged_prompt(line)) is not None:
                yield place, shown
        number, line = number + 1, stream.readline(MAX_LINE + 1)


def _logged_prompt(line: bytes) -> dict[str, Any] | None:
    """The request in a line of vLLM's log; None for any other line."""
    found = _VLLM.search(line.decode("utf-8", "replace"))
    if found is None or found.group(2) == "None":
        return None
    try:
        return {"prompt": ast.literal_eval(found.group(2))}
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}


def _array(head: bytes, stream: Log, name: str, broken: Broken) -> Iterator[tuple[str, Any]]:
    """The elements of one JSON array, read bit by bit. Behind a broken one nothing can be found again."""
    decoder, characters = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("replace")
    text = characters.decode(head).lstrip()[1:]
    size, number, at_end = _CHUNK, 0, False
    while True:
        text = text.lstrip(" \t\r\n,")
        if text.startswith("]"):
            return
        try:
            value, end = decoder.raw_decode(text)
            if end == len(text) and not at_end:  # a number may go on
                raise ValueError("more to come")
        except (ValueError, RecursionError) as error:
            if at_end or len(text) > MAX_LINE or isinstance(error, RecursionError):
                if text or number == 0:
                    broken.add(f"{name}, element {number}", f"{_why(error)}; what follows is not read")
                return
            more = stream.read(size)
            at_end, size = not more, min(2 * size, MAX_LINE)  # twice as much each time: no value is parsed too often
            text += characters.decode(more, final=at_end)
            continue
        yield f"{name}, element {number}", value
        text, number, size = text[end:], number + 1, _CHUNK


def _document(head: bytes, stream: Log, name: str, broken: Broken) -> Iterator[tuple[str, Any]]:
    """One JSON object over many lines: the list in it where it is an export's page, else itself."""
    text = head + stream.read(MAX_DOCUMENT)
    if stream.read(1):
        broken.add(name, f"one JSON document of more than {MAX_DOCUMENT >> 20} MiB; write it as JSONL: jq -c '.data[]'")
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        broken.add(name, _why(error))
        return
    yield name, value


def _why(error: Exception) -> str:
    """What is wrong, without a word of what the log says."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {type(error).__name__}"
