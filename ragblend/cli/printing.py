"""Output of the commands: results on stdout, as text or as one JSON object; progress and the log on stderr.

Importing this module loads neither torch nor a framework, so that `ragblend --help` is fast.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import sys
import threading
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer

from ragblend.config import arguments_to_flags
from ragblend.errors import BackendUnreachableError, StoreFullError
from ragblend.options import DiskBudget
from ragblend.redaction import redact_url, url_in_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ragblend.config import Settings
    from ragblend.corpus.folder_scan import ReadFailure
    from ragblend.engine.api import Engine
    from ragblend.engine.store.remote.upload import PushReport
    from ragblend.index import SearchHit
    from ragblend.ingestion.report import IngestReport

SCHEMA_VERSION = 1
NUM_NAMED = 3  # files that a result names
NUM_NOTES = 20  # notes that an ingestion prints
PROGRESS_INTERVAL_S = 10.0  # between two lines of progress, if stderr is no terminal


def print_line(text: str) -> None:
    """Print a line of a command's result on stdout, without wrapping it."""
    print(text, flush=True)


def print_notice(text: str) -> None:
    """Print a line of progress or advice on stderr. Argument names stay, because the line may quote a question."""
    print(text, file=sys.stderr, flush=True)


def print_message(text: str) -> None:
    """Print a message of the library on stderr, with flags in place of argument names."""
    print_notice(arguments_to_flags(text))


def print_error(error: object) -> None:
    """Print an error of the library on stderr, with flags in place of argument names; red on a color terminal."""
    has_colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print_message(typer.style(f"error: {error}", fg="red") if has_colors else f"error: {error}")


def escape_unprintable() -> None:
    """Make stdout and stderr escape characters that their encoding lacks (ASCII locales), instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # a stream whose file became a pipe (dup2) cannot be reconfigured
                stream.reconfigure(errors="backslashreplace")


class FlagFormatter(logging.Formatter):
    """Formatter of log records that replaces argument names with flags."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        return arguments_to_flags(super().format(record))


def print_result(facts: dict[str, Any], text: str, json_: bool) -> None:
    """Print `facts` as one JSON object if `json_` is True, else `text`."""
    if json_:
        print_json(facts)
    else:
        print_line(text)


def print_json(facts: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout, its schema version first."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **facts}, default=str))


def print_ingest(report: IngestReport, settings: Settings, json_: bool) -> None:
    """Print what an ingestion did and cost; notes about the files go to stderr.

    Only a few of the removed or skipped files, and a few notes, are printed; `ragblend --verbose` prints all of them.
    """
    from ragblend.corpus.folder_scan import display_source, source_path
    from ragblend.engine.store.tiered import format_bytes

    per_token = f"{format_bytes(report.bytes_per_token)} per token"
    if report.store_bytes is None:
        where = f"store of {redact_url(settings.backend)}: {format_bytes(report.new_kv_bytes)} more"
    else:
        where = f"store {settings.store}: {format_bytes(report.store_bytes)}"
    most = None if logging.getLogger().isEnabledFor(logging.INFO) else NUM_NAMED
    join = functools.partial(join_names, max_names=most, flag="ragblend --verbose")
    skipped = [
        f"{display_source(path)} {arguments_to_flags(reason.partition(';')[0])}" for path, reason in report.skipped
    ]
    renamed = [f"{display_source(old)} -> {display_source(new)}" for old, new in report.renamed.items()]
    gone = [source for source in report.removed if source_path(source) not in report.renamed]
    num_kv = report.num_new_kv + report.num_known_kv
    kv = [f"{plural(report.num_new_kv, 'KV cache')} prefilled in {report.prefill_s:.1f} s"]
    kv += [f"{report.num_known_kv} already stored"]
    kv += [f"{report.num_rewritten_kv} of them rewritten"] if report.num_rewritten_kv else []
    two = "; a chunk has two: alone, and after a neutral text" if num_kv > report.num_chunks else ""
    lines = [
        f"{plural(report.num_documents, 'document')} ({report.num_unchanged} unchanged), "
        f"{plural(report.num_chunks, 'chunk')}, {plural(report.num_tokens, 'token')}",
        *([f"renamed: {join(renamed)}"] if renamed else []),
        *([f"gone: {join(map(display_source, gone))}"] if gone else []),
        *(
            [f"{plural(report.num_removed_kv, 'KV cache')} of changed or removed documents removed"]
            if report.num_removed_kv
            else []
        ),
        *([f"{', '.join(kv)}{two}"] if num_kv else []),
        *(
            [
                f"{plural(report.num_evicted_kv, 'KV cache')} evicted, because the store's budget is too small: "
                "set a larger `disk_gib`, and ingest again"
            ]
            if report.num_evicted_kv
            else []
        ),
        f"{where}, {per_token}",
        *([f"{plural(len(skipped), 'file')} skipped: {join(skipped)}"] if skipped else []),
        *([f"left out by .gitignore: {join(map(display_source, report.ignored))}"] if report.ignored else []),
        *(
            f"failed: {display_source(failure.path)}: {arguments_to_flags(failure.reason)}"
            for failure in report.failures
        ),
    ]
    print_result(report.as_dict(), "\n".join(lines), json_)
    if not json_:
        _print_notes(report.notes, len(report.notes) if most is None else NUM_NOTES)


def exit_if_dropped(report: IngestReport | PushReport) -> None:
    """End the command if entries did not reach the remote tier: with exit code 1 if it is full, else with 5."""
    if report.num_dropped:
        raise typer.Exit(StoreFullError.exit_code if report.is_full else BackendUnreachableError.exit_code)


def _print_notes(notes: Sequence[ReadFailure], most: int) -> None:
    from ragblend.corpus.folder_scan import display_source, escape_control

    for note in notes[:most]:
        print_message(f"note: {display_source(note.path)}: {escape_control(note.reason)}")
    if len(notes) > most:
        print_message(f"{len(notes) - most} more notes (ragblend --verbose ingest, or --json, lists all)")


def source_facts(hit: SearchHit) -> dict[str, Any]:
    """Return a retrieved chunk as JSON values; with title, page, page_end and headings if its metadata has them."""
    from ragblend.corpus.citations import citation_facts

    chunk = hit.chunk
    return {
        "source": chunk.source,
        "start": chunk.start,
        "end": chunk.end,
        **citation_facts(chunk.metadata),
        "score": round(hit.score, 4),
        "text": chunk.text,
    }


def print_sources(hits: Sequence[SearchHit]) -> None:
    """Print the retrieved chunks, one per line: file, page and heading, or character positions if it has neither."""
    from ragblend.corpus.citations import PLACE_FIELDS, describe_source
    from ragblend.corpus.folder_scan import display_source

    for number, hit in enumerate(hits, start=1):
        chunk = hit.chunk
        text = " ".join(chunk.text.split())
        text = text if len(text) <= 160 else text[:157] + "..."
        place = f"{display_source(chunk.source)}, characters {chunk.start}-{chunk.end}"
        if PLACE_FIELDS & chunk.metadata.keys():
            place = describe_source(chunk.source, chunk.metadata)
        print_line(f"[{number}] {place} (similarity {hit.score:.2f}) {text}")


def wait_and_print_shadow(engine: Engine, settings: Settings) -> None:
    """Wait for the shadow prefills, then print how often they agreed with the answers. If `shadow` is 0, do nothing."""
    if settings.shadow:
        engine.flush_shadow()
        print_notice(engine.shadow.summary())


def remote_line(facts: dict[str, Any]) -> str:
    """Return the text to print about the remote tier. `facts`: the result of `remote_facts`."""
    from ragblend.engine.store.tiered import format_bytes

    if not facts["reachable"]:
        return f"remote {facts['url']}: not reachable; answers do not use it"
    stored, ping_ms = format_bytes(facts["store_bytes"]), facts["latency_s"] * 1e3
    text = f"remote {facts['url']}: {plural(facts['num_stored_kv'], 'KV cache')}, {stored}; "
    text += f"answers in {ping_ms:.1f} ms"
    fix = f"ragblend push --remote {url_in_command(facts['url'])}"
    lacks = f"\n  it lacks {facts['num_missing']} of the local ones; send them: {fix}"
    return text + (lacks if facts["num_missing"] else "")


def limit_line(limit_bytes: int | None, disk_gib: DiskBudget) -> str:
    """Return the line about the store's limit, with the setting that it comes from. `limit_bytes` None: no limit."""
    from ragblend.engine.store.tiered import format_bytes

    if limit_bytes is None:
        return "limit: none"
    half = "half of the free space, the store included; set another: RAGBLEND_DISK_GIB"
    return f"limit: {format_bytes(limit_bytes)} ({half if disk_gib == 'auto' else 'disk_gib'})"


def join_names(names: Iterable[str], max_names: int | None = NUM_NAMED, flag: str = "--json") -> str:
    """Return one text: the first `max_names` of `names`, then "and N more" with the flag that lists all. If only one
    would be left out, it is named, too. With `max_names` None, all are named.

    >>> join_names(["a", "b", "c"], max_names=2), join_names(["a", "b", "c", "d"], max_names=2)
    ('a, b, c', 'a, b and 2 more (--json lists all)')
    """
    every = list(names)
    if max_names is None or len(every) <= max_names + 1:
        return ", ".join(every)
    return f"{', '.join(every[:max_names])} and {len(every) - max_names} more ({flag} lists all)"


def plural(number: int, what: str) -> str:
    """Return a number with the noun `what`, in the plural unless the number is 1.

    >>> plural(1, "document"), plural(0, "document")
    ('1 document', '0 documents')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


class ProgressLog:
    """Progress of stages as lines: how far the latest stage is, its rate and the time left."""

    def __init__(self, title: str = "working") -> None:
        self.begin(title)
        self._first: dict[str, tuple[float, int]] = {}  # time and count of a stage's first report
        self._latest: tuple[str, int, int | None] | None = None

    def begin(self, title: str) -> None:
        """Begin the work `title`. Lines show this title until the first stage reports."""
        self._title, self._begun_s = title, monotonic()

    def on_progress(self, stage: str, done: int, total: int | None) -> None:
        """Record that `done` of the `total` steps of a stage are done. `total` is None if it is unknown."""
        self._first.setdefault(stage, (monotonic(), done))
        self._latest = (stage, done, total)

    def line(self) -> str:
        """Return the current line."""
        now_s = monotonic()
        if self._latest is None:
            return f"{self._title}: {now_s - self._begun_s:.0f} s"
        stage, done, total = self._latest
        start_s, first = self._first[stage]
        text = f"{stage}: {done}" if total is None else f"{stage}: {done} of {total}"
        if done <= first or now_s <= start_s:
            return f"{text} after {now_s - start_s:.0f} s"
        rate = (done - first) / (now_s - start_s)
        left = "" if total is None else f", {(total - done) / rate:.0f} s left"
        return f"{text}{left}, {rate:.3g}/s"


@contextmanager
def progress_lines(
    notify: Callable[[str], None], every_s: float = PROGRESS_INTERVAL_S, title: str = "working"
) -> Iterator[ProgressLog]:
    """Yield a log of progress. `notify` gets the log's line every `every_s` seconds, also during a long step."""
    log, ended = ProgressLog(title), threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            notify(log.line())

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()


@contextmanager
def waiting_lines(title: str) -> Iterator[ProgressLog]:
    """Print a line on stderr from time to time during work that reports no stages. On a terminal, print nothing.

    Yields the log of these lines. Call its `begin` when another part of the work begins.
    """
    if sys.stderr.isatty():
        yield ProgressLog(title)
        return
    with progress_lines(print_notice, title=title) as log:
        yield log


@contextmanager
def progress_bars(title: str = "working") -> Iterator[Any]:
    """Yield a progress callback. It draws bars on stderr, with rate and time left.

    If stderr is no terminal, lines are printed instead. They show `title` until the first stage reports.
    """
    if not sys.stderr.isatty():
        with progress_lines(print_notice, title=title) as log:
            yield log.on_progress
        return
    from ragblend.ingestion.report import draw_bars

    with draw_bars() as on_progress:
        yield on_progress
