"""The child process that reads an upload first: what it lets pass, and what ends it."""

from __future__ import annotations

import subprocess
import sys
import time
from tempfile import SpooledTemporaryFile

import pytest
from pdf_files import line, make_pdf

from ragblend.corpus.readers import child, formats
from ragblend.errors import UnreadableDocumentError

PROGRAMS = {
    "crash": "import os; os.abort()",
    "exit": "raise ValueError",
    "hang": "import time; time.sleep(60)",
    "memory": "from ragblend.corpus.readers import child; child._limit_memory(1 << 30)\n"
    "try: bytearray(2 << 30)\nexcept MemoryError: raise SystemExit(3)",
}


def spooled(data: bytes) -> SpooledTemporaryFile:
    file = SpooledTemporaryFile(1 << 20)  # noqa: SIM115 (the caller closes it)
    file.write(data)
    return file


def check(data: bytes, suffix: str) -> None:
    with spooled(data) as file:
        formats.try_reading_in_child(file, len(data), suffix)
        file.seek(0)
        assert file.read() == data


@pytest.fixture
def program(request, monkeypatch):
    monkeypatch.setattr(child, "_COMMAND", (sys.executable, "-c", PROGRAMS[request.param]))


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        (make_pdf(line("Hello")), ".pdf"),
        (make_pdf(line("Hello")), ".PDF"),
        (b"%PDF-1.7 and nothing", ".pdf"),  # the next reader rejects it with a reason
        (b"<p>Hello", ".html"),
        (b"a,b\n1,2\n", ".csv"),
        (b"plain", ".txt"),
        (b"\0", ".unknown"),
        (b"", ".pdf"),
    ],
)
def test_what_can_be_read_or_is_rejected_with_a_reason_passes(data, suffix):
    check(data, suffix)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("crash", r"reading it crashed \(SIGABRT\); split it"),
        ("exit", r"reading it crashed \(exit status 1\); split it"),
        ("memory", "reading it took too much memory; split it"),
    ],
    indirect=["program"],
)
def test_a_child_that_dies_is_an_error_with_a_reason(program, reason):
    with pytest.raises(UnreadableDocumentError, match=reason):
        check(b"data", ".pdf")


@pytest.mark.parametrize("program", ["hang"], indirect=True)
def test_a_child_that_hangs_is_ended(program, monkeypatch):
    monkeypatch.setattr(formats, "_MIN_TIME_S", 0.5)
    start_s = time.monotonic()
    with pytest.raises(UnreadableDocumentError, match=r"took longer than [01] s"):
        check(b"data", ".pdf")
    assert time.monotonic() - start_s < 30


def test_the_limits_grow_with_the_file(monkeypatch):
    seen = {}

    def run(command, timeout, **_):
        seen["timeout"], seen["memory"] = timeout, int(command[-2])
        return subprocess.CompletedProcess(command, 0, '[null, ""]')

    monkeypatch.setattr(subprocess, "run", run)
    with spooled(b"data") as file:
        formats.try_reading_in_child(file, 1000, ".pdf")
        small = dict(seen)
        formats.try_reading_in_child(file, 50_000_000, ".pdf")
    assert small["timeout"] == 30
    assert seen["timeout"] == 500
    assert seen["memory"] > small["memory"] >= 4 << 30


def test_a_file_beyond_the_memory_of_the_child_is_named(monkeypatch):
    """A real reader under a small limit."""
    data = b"<p>" + b"word " * 12_000_000
    monkeypatch.setattr(formats, "_MIN_MEMORY", 200 << 20)
    monkeypatch.setattr(formats, "_MEMORY_PER_BYTE", 0)
    with pytest.raises(UnreadableDocumentError, match=r"reading it (took too much memory|crashed)"):
        check(data, ".html")


def test_the_child_imports_no_models():
    program = "import sys, ragblend.corpus.readers.formats; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "ragblend.corpus.readers.pdf" in modules
    assert not {"torch", "transformers", "numpy", "pyarrow", "faiss"} & set(modules)
