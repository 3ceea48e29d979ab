"""Child process that reads a file before this process does: a crash, a hang or a memory bomb ends the child alone.

PDF, HTML, Parquet and spreadsheets are parsed by C, C++ and Rust. `check_reading` starts `python -m` of this module,
which imports the readers and nothing of models.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import deque
from typing import IO

from ragblend.corpus.readers.formats import READERS
from ragblend.errors import RagblendError, UnreadableDocumentError

_MIN_TIME_S, _TIME_PER_MB_S = 30.0, 10.0
_MIN_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 32  # address space, of which libraries reserve more than they use
_OUT_OF_MEMORY = 3  # exit status


def check_reading(file: IO[bytes], num_bytes: int, suffix: str) -> None:
    """Read `file` of `num_bytes` in a child process, by the reader of its name's `suffix` (".pdf").

    Raises UnreadableDocumentError where the child crashed, took longer than 10 s per MB (at least 30 s) or more memory
    than 4 GiB and 32 times the file. A file that a reader rejects with a reason passes, as does plain text, which is
    not read. `file` has a descriptor and is read from its beginning; its position is changed.
    """
    if suffix.lower() not in READERS:
        return
    descriptor = file.fileno()  # first of all: a spooled file moves to the disk when it is asked for one
    file.flush()
    file.seek(0)
    limit_s = max(_MIN_TIME_S, _TIME_PER_MB_S * num_bytes / 1e6)
    command = _command(suffix.lower(), _MIN_MEMORY + _MEMORY_PER_BYTE * num_bytes)
    try:
        status = subprocess.run(
            command,
            stdin=descriptor,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise UnreadableDocumentError(
            f"reading it took longer than {limit_s:.0f} s; save it anew with the program that made it, or as text"
        ) from error
    if status == _OUT_OF_MEMORY:
        raise UnreadableDocumentError("reading it took too much memory; split it, or save it as text")
    if status:
        raise UnreadableDocumentError(
            f"reading it crashed ({_name_status(status)}); save it anew with the program that made it, or as text"
        )


def _command(suffix: str, memory_bytes: int) -> list[str]:
    return [sys.executable, "-m", __name__, suffix, str(memory_bytes)]


def _name_status(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"


def _limit_memory(num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(suffix: str, memory_bytes: str) -> int:
    """Read standard input by the reader of `suffix`. Return 0, also for an error with a reason, or 3 for no memory."""
    _limit_memory(int(memory_bytes))
    try:
        deque(READERS[suffix](sys.stdin.buffer.read()), maxlen=0)
    except RagblendError:
        return 0
    except MemoryError:
        return _OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
