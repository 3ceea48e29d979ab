"""Files and terminals of every kind: a sentence and an exit code each, and no line is lost."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ragblend.cli import printing
from ragblend.cli.lab.calibrate import _questions
from ragblend.config import Settings, load_settings
from ragblend.corpus.folder_scan import ReadFailure
from ragblend.engine.store.format.signing import read_key
from ragblend.errors import RagblendError, StoreFullError, StoreNotWritableError
from ragblend.files.output import write_output
from ragblend.index import SearchHit
from ragblend.ingestion.report import IngestReport
from ragblend.lab.plan import read_profile
from ragblend.lab.quality.data import find_data
from ragblend.lab.quality.records import read_cases
from ragblend.prompt.types import Chunk
from ragblend.server.api_keys import read_keys

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path):
    """An empty folder for commands."""
    return tmp_path


def python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# --- text files of a user ---


def read_settings(path: Path) -> Settings:
    path.rename(path.with_name("ragblend.toml"))
    return load_settings(directory=path.parent)


def read_as_key(path: Path):
    path.chmod(0o600) if path.exists() else None
    return read_key(path)


def read_as_keys(path: Path):
    path.chmod(0o600) if path.exists() else None
    return read_keys(path)


TEXTS = {
    "questions": (lambda path: _questions(str(path), None, "demo", 1), "Who is Ann?\n"),
    "data": (lambda path: read_cases(find_data(str(path))), '{"question": "q", "answers": ["a"], "passages": ["a"]}'),
    "settings": (read_settings, "k = 3\n"),
    "store key": (read_as_key, "0f" * 32),
    "API keys": (read_as_keys, '[keys."abcdefgh"]\nnamespace = "n"\nrights = ["ask"]\n'),
}
BAD_TEXTS = {
    "Latin-1": "caf\xe9\n".encode("latin-1"),
    "UTF-16": "k = 3\n".encode("utf-16"),
    "a picture": bytes(range(256)),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_byte_order_mark_changes_nothing(kind, tmp_path):
    read, text = TEXTS[kind]
    (tmp_path / "plain").write_text(text)
    (tmp_path / "marked").write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / "plain") == read(tmp_path / "marked")


@pytest.mark.parametrize("kind", [*TEXTS, "profile"])
@pytest.mark.parametrize("content", [*BAD_TEXTS, "a folder", "a pipe"])
def test_a_text_file_that_is_none_is_named_in_a_sentence(kind, content, tmp_path):
    read, path = TEXTS.get(kind, (read_profile, ""))[0], tmp_path / "given"
    if content == "a folder":
        path.mkdir()
    elif content == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(BAD_TEXTS[content])
    with pytest.raises(RagblendError, match=str(tmp_path)) as raised:
        read(path)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(("kind", "code"), [("questions", 2), ("data", 2), ("profile", 2)])
def test_an_empty_or_a_missing_text_file_is_named_in_a_sentence(kind, code, tmp_path):
    read = TEXTS.get(kind, (read_profile, ""))[0]
    with pytest.raises(RagblendError, match="does not exist") as raised:
        read(tmp_path / "gone")
    assert raised.value.exit_code == 3
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RagblendError, match=r"holds no question|is no machine profile") as raised:
        read(tmp_path / "empty")
    assert raised.value.exit_code == code


# --- what is written for a user ---


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("explain", "Who?", "--html", "."), 2, "--html is ., a folder"),
        (("explain", "Who?", "--html", "file/page.html"), 1, "cannot be written: Not a directory.*--html FILE"),
        (("explain", "Who?", "--html", "https://host/x"), 2, "--html is 'https://host/x', a URL"),
        (("bench", "ttft", "--plot", "[/b].txt"), 2, r"--plot is \[/b\].txt, but its ending"),
        (("bench", "ttft", "--plot", "x.foo"), 2, "--plot is x.foo, but its ending"),
        (("demo", "--dir", ""), 2, "--dir is ''"),
        (("demo", "--dir", "file"), 1, "cannot be written: .*--dir DIR"),
        (("init-key", "--key-file", ""), 2, "--key-file is ''"),
        (("sign", "--store", "s", "--old-key-file", "~no-such-user/x"), 2, "--old-key-file is '~no-such-user/x'"),
        (("stats", "--store", "redis://host"), 2, "--remote"),
        (("analyze", "file", "--profile", "file"), 2, "--profile: file is not UTF-8"),
    ],
)
def test_an_unusable_path_is_an_error_before_the_work_starts(run, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.setenv("RAGBLEND_STORE_KEY", "0f" * 32)
    (tmp_path / "file").write_bytes(b"caf\xe9")
    ended, out, err = run(*arguments)
    assert (ended, out) == (code, ""), err
    assert re.match(f"error: .*{said}", err), err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_names_the_option(tmp_path):
    with pytest.raises(StoreFullError, match="no space is left"):
        write_output(Path("/dev/full"), b"page", "--html FILE")
    with pytest.raises(StoreNotWritableError, match="--html FILE"):
        write_output(Path("/proc/nothing/page.html"), b"page", "--html FILE")


# --- terminals ---


@pytest.mark.parametrize("columns", ["0", "1", "-1", "\N{SUPERSCRIPT TWO}", "wide"])
def test_every_line_is_printed_at_any_terminal_size(tmp_path, columns):
    path = tmp_path / "schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel.key"
    command = ("-m", "ragblend", "init-key", "--key-file", str(path))
    environment = {"COLUMNS": columns, "LINES": columns, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    out, err = python(*command, **environment).communicate()
    assert (len(out.splitlines()), err) == (4, "")
    assert out.startswith(f"{tmp_path}/schl\\xfcssel.key holds a new key")
    again = python(*command, **environment)
    out, err = again.communicate()
    assert (again.returncode, out, err.startswith("error: there is a file at")) == (2, "", True)


def test_brackets_and_colons_in_names_are_printed_as_they_are(capsys):
    printing.print_notice("plot in [/b]:smile:.png")
    printing.print_result({}, "[1] a [red]word", json_=False)
    assert capsys.readouterr() == ("[1] a [red]word\n", "plot in [/b]:smile:.png\n")


def test_work_without_a_terminal_logs_its_progress_every_ten_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(printing, "monotonic", lambda: clock[0])
    assert printing.PROGRESS_INTERVAL_S == 10
    log = printing.ProgressLog("loading")
    clock[0] = 10.0
    assert log.line() == "loading: 10 s"
    log.on_progress("prefill", 0, 100)
    clock[0] = 20.0
    assert log.line() == "prefill: 0 of 100 after 10 s"
    log.on_progress("prefill", 5, 100)
    assert log.line() == "prefill: 5 of 100, 190 s left, 0.5/s"
    log.on_progress("read", 3, None)
    clock[0] = 30.0
    log.on_progress("read", 8, None)
    assert log.line() == "read: 8, 0.5/s"


def test_one_step_that_takes_long_is_reported_while_it_runs():
    said = threading.Event()
    with printing.progress_lines(lambda line: said.set(), every_s=0.001):
        assert said.wait(10)


@pytest.mark.parametrize("verbose", [False, True])
def test_files_that_are_left_out_are_named(capsys, monkeypatch, verbose):
    monkeypatch.setattr(logging.getLogger(), "isEnabledFor", lambda level: verbose)
    skipped = [ReadFailure(f"/docs/{name}", "is a named pipe, not a file; remove it") for name in "abcdef"]
    printing.print_ingest(IngestReport(skipped=skipped), Settings(), False)
    printing.print_ingest(IngestReport(skipped=skipped[:4]), Settings(), False)
    six, four = (line for line in capsys.readouterr().out.splitlines() if "files skipped" in line)
    assert ("/docs/f is a named pipe" in six) is verbose
    assert ("and 3 more (ragblend --verbose lists all)" in six) is not verbose
    assert "/docs/d is a named pipe, not a file" in four


@pytest.mark.parametrize("verbose", [False, True])
def test_notes_about_files_go_to_stderr_and_into_the_json(capsys, monkeypatch, verbose):
    monkeypatch.setattr(logging.getLogger(), "isEnabledFor", lambda level: verbose)
    notes = [ReadFailure(f"/docs/{n}.pdf", f"page {n} has a picture and no text\x1b[2J") for n in range(25)]
    printing.print_ingest(IngestReport(notes=notes), Settings(), False)
    out, err = capsys.readouterr()
    first, *_, last = err.splitlines()
    assert first == "note: /docs/0.pdf: page 0 has a picture and no text\\x1b[2J"
    assert ("24.pdf" in last) is verbose
    assert last.startswith("5 more notes") is not verbose
    assert "picture" not in out
    printing.print_ingest(IngestReport(notes=notes[:1]), Settings(), True)
    out, err = capsys.readouterr()
    assert json.loads(out)["notes"] == [{"path": "/docs/0.pdf", "reason": notes[0].reason}]
    assert err == ""


def test_a_source_is_printed_with_page_and_heading_or_with_its_characters(capsys):
    metadata = {"page": 12, "page_end": 13, "headings": ["Staff", "Leave"], "title": "Handbook", "num_tokens": 3}
    hits = [
        SearchHit(Chunk("Thirty days.", "handbook.pdf", 40, metadata=metadata), 0.5, 0),
        SearchHit(Chunk("Plain text.", "notes.txt", 7, metadata={"title": "T"}), 0.25, 1),
    ]
    printing.print_sources(hits)
    assert capsys.readouterr().out == (
        '[1] handbook.pdf, pp. 12-13, "Leave" (similarity 0.50) Thirty days.\n'
        "[2] notes.txt, characters 7-18 (similarity 0.25) Plain text.\n"
    )
    facts = printing.source_facts(hits[0])
    assert facts == {"source": "handbook.pdf", "start": 40, "end": 52, "score": 0.5, "text": "Thirty days."} | {
        name: metadata[name] for name in ("page", "page_end", "headings", "title")
    }


# --- Ctrl-C ---

_WAITING = """
import sys, time
from ragblend.cli import app as cli, interrupt
interrupt.STOP_S = {stop_s}
@cli.app.command("{name}")
def wait() -> None:
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep({step_s})
cli.app.registered_commands = cli.app.registered_commands[-1:]
sys.argv = ["ragblend", "{name}"]
cli.main()
"""


@pytest.mark.parametrize(
    ("name", "stop_s", "step_s", "kept"),
    [
        ("push", 60, 0, "what was sent so far is kept; the same command goes on from there: ragblend push"),
        ("search", 0.05, 60, "what is stored stays; the same command begins again: ragblend search"),
    ],
)
def test_ctrl_c_ends_long_steps_and_names_what_is_kept(name, stop_s, step_s, kept):
    started = python("-c", _WAITING.format(name=name, stop_s=stop_s, step_s=step_s))
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=30)
    assert (started.returncode, err) == (130, f"interrupted: {kept}\n")
