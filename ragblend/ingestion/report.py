"""Report of an ingestion, and its progress on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from threading import Timer
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TaskID, TimeRemainingColumn
from rich.progress import Progress as ProgressBars
from rich.text import Text

from ragblend.corpus.folder_scan import ReadFailure

BLANK_TEXT = "it has no visible text"
"""Reason for which a chunk is in `skipped`."""
NOT_IN_REMOTE = "it is stored, but not in the server's remote tier"
"""Beginning of a server's reason for a stored document of which some KV did not reach its remote tier."""

_LONG_S = 1.0  # work that takes longer is shown on a terminal


@dataclass(slots=True)
class IngestReport:
    """Results of one ingestion: numbers, sizes, durations, and lists of documents and files.

    The paths of files are absolute. The fields `num_..._kv` count entries. An entry is the KV of one chunk in one
    context, so a store with the context policy "neutral" has two entries of each chunk.
    """

    num_documents: int = 0
    num_unchanged: int = 0
    num_updated: int = 0
    num_chunks: int = 0  # chunks of the documents, new and stored ones
    num_tokens: int = 0  # tokens of those chunks, by the LLM's tokenizer
    num_new_kv: int = 0  # entries prefilled by this ingestion
    num_known_kv: int = 0  # entries that were stored before
    num_rewritten_kv: int = 0  # stored entries whose storage dtype was changed
    num_other_kv: int = 0  # stored entries that stay in another dtype than the store's
    new_kv_bytes: int = 0
    bytes_per_token: int = 0
    store_bytes: int | None = None  # size of the whole store on this machine; None if a server has it
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    num_evicted_kv: int = 0  # entries that the disk's budget evicted during it, also of earlier ingestions
    num_removed_kv: int = 0  # deleted entries of changed or removed chunks
    num_dropped: int = 0  # entries that did not reach the remote tier; `failures` has a line about them
    problem: str = ""  # why the last of these entries did not reach it
    is_full: bool = False  # the remote tier has no free space
    removed: list[str] = field(default_factory=list)  # documents that were removed, those of renamed files included
    renamed: dict[str, str] = field(default_factory=dict)  # old path of a file -> new path, with the same bytes
    failures: list[ReadFailure] = field(default_factory=list)
    skipped: list[ReadFailure] = field(default_factory=list)  # files that are no documents
    ignored: list[str] = field(default_factory=list)  # files and folders that `.gitignore` excludes
    notes: list[ReadFailure] = field(
        default_factory=list
    )  # parts of files left out or guessed; texts too short to find

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        lists = {name: [item._asdict() for item in getattr(self, name)] for name in ("failures", "skipped", "notes")}
        return {**asdict(self), **lists}


Progress = Callable[[str, int, int | None], None]
"""Called with a stage, the number of finished items, and the number of all or None.

The stages are "read" (documents), "embed" (chunks), "load" (the model), "prefill" and "push" (KV caches; "push" sends
them to a remote tier).
"""


def ignore_progress(stage: str, done: int, total: int | None) -> None:
    """Do nothing. The default `Progress`."""


class _RateColumn(ProgressColumn):
    """Number of items per second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s")


@contextmanager
def show_progress(progress: Progress | None) -> Iterator[Progress]:
    """Yield `progress`. For None, yield a callback that draws bars on stderr if it is a terminal, else does nothing.

    No bar is drawn for work that takes less than a second.
    """
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        with draw_bars(_LONG_S) as on_progress:
            yield on_progress
    else:
        yield ignore_progress


@contextmanager
def draw_bars(delay_s: float = 0.0) -> Iterator[Progress]:
    """Yield a progress callback that draws bars on stderr, a terminal, with rate and time left.

    It draws nothing in the first `delay_s` seconds.
    """
    # rich would draw nothing if COLUMNS is 0. Results on stdout are not redirected.
    size = shutil.get_terminal_size()
    terminal = Console(stderr=True, highlight=False, soft_wrap=True, width=size.columns, height=size.lines)
    columns = ("{task.description:<8}", BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn())
    bars = ProgressBars(*columns, console=terminal, transient=True, redirect_stdout=False)
    tasks: dict[str, TaskID] = {}

    def on_progress(stage: str, done: int, total: int | None) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    timer = Timer(delay_s, bars.start)
    timer.daemon = True
    timer.start()
    if not delay_s:
        timer.join()
    try:
        yield on_progress
    finally:
        timer.cancel()
        timer.join()  # it may be starting
        bars.stop()
