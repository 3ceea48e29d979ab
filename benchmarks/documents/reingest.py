"""Number of chunks that are prefilled again after a file was touched, renamed or edited.

An index is synchronised with a folder as by `ragblend ingest`, but no model runs. A chunk counts as prefilled if its
text was not in the index before, because KV is stored by token ids. Read `measure_edits` first.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.documents.files import ChosenFile
from benchmarks.documents.questions import count_tokens
from ragblend.chunker import split
from ragblend.cli.printing import print_notice
from ragblend.corpus.folder_scan import scan_folders
from ragblend.index import ChunkIndex, open_index
from ragblend.ingestion.sync import ChunkerConfig, sync_index

MAX_BYTES = 500_000  # largest edited file
NUM_FILES = {"table": 4}
"""Number of edited files by kind, the largest first; 1 for other kinds. A row shifts later chunks more or less far."""
CHUNK_TOKENS = 256  # small, so that files have enough chunks for a meaningful percentage


class Edit(NamedTuple):
    """A change to a file's bytes. `apply` returns the file's new bytes."""

    name: str
    kind: str
    apply: Callable[[bytes], bytes]


def _insert_line(at: float, line: bytes) -> Callable[[bytes], bytes]:
    """Return a function that inserts a line at the share `at` of all lines, but never before the first line."""

    def apply(data: bytes) -> bytes:
        lines = (data if data.endswith(b"\n") else data + b"\n").splitlines(keepends=True)
        lines.insert(max(1, int(at * len(lines))), line)
        return b"".join(lines)

    return apply


def _repeat_row(at: float) -> Callable[[bytes], bytes]:
    """Return a function that inserts a copy of the last row, with a new first cell, at the share `at` of all rows."""

    def apply(data: bytes) -> bytes:
        rows = data.splitlines()
        cells = rows[-1].split(b",")
        return _insert_line(at, b",".join([b"inserted", *cells[1:]]) + b"\n")(data)

    return apply


def _drop_row(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[: len(lines) // 2], *lines[len(lines) // 2 + 1 :]])


def _change_word(data: bytes) -> bytes:
    """Replace the first word of four to nine lower-case letters after the middle."""
    middle = len(data) // 2
    return data[:middle] + re.sub(rb"(?<=[ ])[a-z]{4,9}(?=[ ])", b"replaced", data[middle:], count=1)


EDITS = (
    Edit("nothing", "text", lambda data: data),
    Edit("touched", "text", lambda data: data),
    Edit("renamed", "text", lambda data: data),
    Edit("a line on top", "text", _insert_line(0, b"A line that was not there before.\n\n")),
    Edit("a word in the middle", "text", _change_word),
    Edit("a word in the middle", "html", _change_word),
    Edit("a paragraph on top", "html",
         lambda data: re.sub(rb"(?i)(<body[^>]*>)", rb"\1<p>A paragraph that is new.</p>", data, count=1)),
    Edit("saved again, same text", "pdf", lambda data: data + b"\n% saved again\n"),
    Edit("a row on top", "table", _repeat_row(0)),
    Edit("a row in the middle", "table", _repeat_row(0.5)),
    Edit("a row removed in the middle", "table", _drop_row),
    Edit("a row at the end", "table", _repeat_row(1)),
)  # fmt: skip


def measure_edits(files: Sequence[ChosenFile]) -> list[dict[str, Any]]:
    """Apply each edit to the largest files of its kind. Return a record per edit and file with both chunk counts."""
    found = []
    for kind in dict.fromkeys(edit.kind for edit in EDITS):
        sizes = {file: size for file in files if file.kind == kind and (size := file.path.stat().st_size) <= MAX_BYTES}
        largest = sorted(sizes, key=lambda file: (-sizes[file], file.name))[: NUM_FILES.get(kind, 1)]
        for edit in (edit for edit in EDITS if edit.kind == kind):
            for file in largest:
                num_chunks, num_prefilled = measure_edit(file.path, edit)
                percent = round(100 * num_prefilled / num_chunks, 1)
                print_notice(f"{edit.name:<30}{num_prefilled:>5} of {num_chunks} chunks, {percent:g} %: {file.name}")
                found.append({"kind": kind, "edit": edit.name, "file": file.name, "num_chunks": num_chunks,
                              "num_prefilled": num_prefilled, "percent": percent})  # fmt: skip
    return found


def measure_edit(path: Path, edit: Edit) -> tuple[int, int]:
    """Index a copy of the file, edit the copy, and index it again. Return (chunks, chunks prefilled again)."""
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        docs.mkdir()
        copy = Path(shutil.copy(path, docs))
        with open_index(Path(folder) / "index", "hashing", create=True, tokenizer="estimate") as index:
            before = _follow(index, docs)
            data = edit.apply(copy.read_bytes())
            if edit.name == "renamed":
                copy.rename(docs / f"renamed-{copy.name}")
            elif edit.name == "touched":
                os.utime(copy, (0, 0))
            elif edit.name != "nothing":
                assert data != copy.read_bytes(), f"{edit.name} changes nothing in {path}"
                copy.write_bytes(data)
            after = _follow(index, docs)
    return len(after), len(after - before)


def _follow(index: ChunkIndex, docs: Path) -> set[str]:
    """Synchronise the index with the folder. Return the texts of its chunks."""
    chunker = ChunkerConfig(lambda document: split(document, count_tokens, CHUNK_TOKENS), "estimate")
    report = sync_index(index, scan_folders([docs]), chunker, lambda *_: None).report
    if report.failures:
        raise SystemExit(f"{report.failures[0]}")
    return {chunk.text for chunk in index.chunks()}
