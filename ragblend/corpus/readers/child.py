"""Reading of a file in a child process first, so that a crash, an endless loop or a memory bomb ends only the child.

C, C++ and Rust libraries parse PDF, HTML, Parquet and spreadsheets. `check_reading` runs this module with `python -m`;
it imports the readers and no model code.
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
_MIN_MEMORY, _MEMORY_PER_BYTE = 4 << 30, 32  # address space in bytes; libraries reserve more than they use
_OUT_OF_MEMORY = 3  # exit status


def check_reading(file: IO[bytes], num_bytes: int, suffix: str) -> None:
    """Read `file` of `num_bytes` in a child process, with the reader of the `suffix` (".pdf").

    Raises UnreadableDocumentError if the child crashed, took longer than 10 s per MB (at least 30 s) or needed more
    memory than 4 GiB and 32 times the file. A file that its reader rejects passes; plain text is not read. `file` must
    have a descriptor and is read from its beginning; its position changes.
    """
    if suffix.lower() not in READERS:
        return
    descriptor = file.fileno()  # first, because it moves a spooled file to the disk
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
            f"reading it took longer than {limit_s:.0f} s; save it again with the program that made it, or as text"
        ) from error
    if status == _OUT_OF_MEMORY:
        raise UnreadableDocumentError("reading it took too much memory; split it, or save it as text")
    if status:
        raise UnreadableDocumentError(
            f"reading it crashed ({_name_status(status)}); save it again with the program that made it, or as text"
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
    """Read stdin with the reader of `suffix`. Return 3 if memory ran out, else 0, also for a rejected file."""
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
