"""What commands print: results on stdout as text or as one JSON object, progress and log on stderr.

Importing this loads neither torch nor a framework: `ragblend --help` answers at once.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ragblend.config import with_flags
from ragblend.options import DiskBudget
from ragblend.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ragblend.config import Settings
    from ragblend.engine.api import Engine
    from ragblend.index import SearchHit

SCHEMA_VERSION = 1
PROGRESS_INTERVAL_S = 30.0  # between two lines of progress, where stderr is no terminal

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)


class FlagFormatter(logging.Formatter):
    """Log records with flags in the place of argument names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        return with_flags(super().format(record))


def print_error(message: object) -> None:
    """Print an error of the library on stderr, with flags in the place of argument names."""
    err.print(f"error: {with_flags(str(message))}", markup=False, style="red", soft_wrap=True)


def print_notice(message: str) -> None:
    """Print a line of the library on stderr, with flags in the place of argument names."""
    err.print(with_flags(message))


def print_result(facts: dict[str, Any], text: str, json_: bool) -> None:
    """The same facts as one JSON object or as text."""
    if json_:
        print_json(facts)
    else:
        out.print(text, markup=False)


def print_json(facts: dict[str, Any]) -> None:
    """One JSON object on one line of stdout, its schema version first."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **facts}, default=str))


def print_ingest(report: Any, settings: Settings, json_: bool) -> None:
    """What an ingestion did and cost."""
    from ragblend.corpus.folder_scan import display_source
    from ragblend.engine.store.tiered import format_bytes

    per_token = f"{format_bytes(report.bytes_per_token)} per token"
    where = f"store {settings.store}: {format_bytes(report.store_bytes)}"
    if settings.is_served:
        where = f"store of {redact(settings.backend)}: {format_bytes(report.new_kv_bytes)} more"
    skipped = [f"{display_source(path)} {with_flags(reason.partition(';')[0])}" for path, reason in report.skipped]
    lines = [
        f"{report.num_documents} documents ({report.num_unchanged} unchanged), {report.num_chunks} chunks, "
        f"{report.num_tokens} tokens",
        *([f"gone: {join_names(map(display_source, report.removed))}"] if report.removed else []),
        *([f"{report.num_removed_kv} KV caches of what is changed or gone removed"] if report.num_removed_kv else []),
        f"{report.num_new_kv} chunks prefilled in {report.prefill_s:.1f} s, {report.num_known_kv} already stored"
        + (f", {report.num_rewritten_kv} of them rewritten" if report.num_rewritten_kv else ""),
        f"{where}, {per_token}",
        *([f"{len(report.skipped)} files are no documents: {join_names(skipped)}"] if skipped else []),
        *([f"left out by .gitignore: {join_names(map(display_source, report.ignored))}"] if report.ignored else []),
        *(f"failed: {display_source(failure.path)}: {with_flags(failure.reason)}" for failure in report.failures),
    ]
    print_result(report.as_dict(), "\n".join(lines), json_)


def source_facts(hit: SearchHit) -> dict[str, Any]:
    """One retrieved chunk, as `--json` shows it."""
    chunk = hit.chunk
    return {
        "source": chunk.source,
        "start": chunk.start,
        "end": chunk.end,
        "score": round(hit.score, 4),
        "text": chunk.text,
    }


def print_sources(hits: Sequence[SearchHit]) -> None:
    """The retrieved chunks, one line each."""
    from ragblend.corpus.folder_scan import display_source

    for number, hit in enumerate(hits, start=1):
        chunk = hit.chunk
        text = " ".join(chunk.text.split())
        text = text if len(text) <= 160 else text[:157] + "..."
        place = f"{display_source(chunk.source)}:{chunk.start}-{chunk.end}"
        out.print(f"[{number}] {place} ({hit.score:.2f}) {text}", markup=False)


def print_shadow(engine: Engine, settings: Settings) -> None:
    """Wait for full prefill beside the requests that were chosen, and say how often it agreed. Nothing if it is off."""
    if settings.shadow:
        engine.flush_shadow()
        err.print(engine.shadow.summary(), markup=False)


def remote_line(facts: dict[str, Any]) -> str:
    """The same for people."""
    from ragblend.engine.store.tiered import format_bytes

    if not facts["reachable"]:
        return f"remote {facts['url']}: not reachable; answers go on without it"
    held, ping_ms = format_bytes(facts["store_bytes"]), facts["latency_s"] * 1e3
    text = f"remote {facts['url']}: KV of {facts['num_stored_chunks']} chunks, {held}; answers in {ping_ms:.1f} ms"
    lacks = f"\n  it lacks {facts['num_missing']} of the chunks here; send them: ragblend push --remote {facts['url']}"
    return text + (lacks if facts["num_missing"] else "")


def limit_line(limit_bytes: int | None, disk_gib: DiskBudget) -> str:
    """How much the store may hold, and who said so."""
    from ragblend.engine.store.tiered import format_bytes

    if limit_bytes is None:
        return "limit: none"
    who = "as much as it leaves free; another: RAGBLEND_DISK_GIB" if disk_gib == "auto" else "disk_gib"
    return f"limit: {format_bytes(limit_bytes)} ({who})"


def join_names(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many there are more.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more (--json lists all)'
    """
    every = list(names)
    more = f" and {len(every) - most} more (--json lists all)" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def count_of(items: Sequence[Any], what: str) -> str:
    """How many there are of something.

    >>> count_of(["a"], "document"), count_of([], "document")
    ('1 document', '0 documents')
    """
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"


class _RateColumn(ProgressColumn):
    """How many are done per second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s")


def progress_lines(
    notify: Callable[[str], None], every_s: float = PROGRESS_INTERVAL_S
) -> Callable[[str, int, int | None], None]:
    """A progress callback that says, now and then, how far a stage is, how fast it goes and how long it will take."""
    starts: dict[str, tuple[float, int]] = {}  # when a stage was seen first, and how far it was
    said_s = monotonic()

    def on_progress(stage: str, done: int, total: int | None) -> None:
        nonlocal said_s
        now_s = monotonic()
        start_s, first = starts.setdefault(stage, (now_s, done))
        if now_s - said_s < every_s or done <= first or now_s == start_s:
            return
        said_s = now_s
        rate = (done - first) / (now_s - start_s)
        left = "" if total is None else f" of {total}, {(total - done) / rate:.0f} s left"
        notify(f"{stage}: {done}{left}, {rate:.3g}/s")

    return on_progress


@contextmanager
def progress_bars() -> Iterator[Any]:
    """A progress callback that draws bars with rate and time left on stderr, or lines where that is no terminal."""
    if not err.is_terminal:
        yield progress_lines(err.print)
        return
    columns = (
        TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield on_progress
