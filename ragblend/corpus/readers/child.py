"""Calls of readers in a child process, so that a crash, an endless loop or a memory bomb ends only the child.

C, C++ and Rust libraries parse PDF, HTML, Parquet and spreadsheets. The child runs this module with `python -m`. It
imports the module of the called function and no model code.
"""

from __future__ import annotations

import json
import pkgutil
import signal
import subprocess
import sys
from typing import Any

from ragblend.errors import RagblendError, UnreadableDocumentError

_COMMAND = (sys.executable, "-P", "-m", __name__)
_OUT_OF_MEMORY = 3  # exit status


def run_in_child(
    function: str, *arguments: str, limit_s: float, memory_bytes: int, fix: str, **stdin: Any
) -> tuple[Any, str]:
    """Call a reader function in a child process. Return (result, ""), or (None, reason) for a rejected file.

    Pass the file as `stdin=FILE` or `input=BYTES`, as for `subprocess.run`. `function`: "MODULE:NAME". Its arguments
    are the file's bytes and then `arguments`, and it must return a JSON value. `memory_bytes`: limit of the child's
    address space. `fix`: advice at the end of error messages. Raises UnreadableDocumentError if the child crashed, took
    longer than `limit_s` seconds or exceeded `memory_bytes`.
    """
    command = [*_COMMAND, function, str(memory_bytes), *arguments]
    try:
        child = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, **stdin)
    except subprocess.TimeoutExpired as error:
        raise UnreadableDocumentError(f"reading it took longer than {limit_s:.0f} s; {fix}") from error
    if child.returncode == _OUT_OF_MEMORY:
        raise UnreadableDocumentError(f"reading it took too much memory; {fix}")
    if child.returncode:
        raise UnreadableDocumentError(f"reading it crashed ({_name_status(child.returncode)}); {fix}")
    result, rejected = json.loads(child.stdout)
    return result, rejected


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


def main(function: str, memory_bytes: str, *arguments: str) -> int:
    """Run in the child: call `function`, and print as JSON the (result, reason) that `run_in_child` returns.

    `function` gets the bytes of stdin and then `arguments`. Return the exit status: 3 if memory ran out, else 0.
    """
    _limit_memory(int(memory_bytes))
    try:
        answer = pkgutil.resolve_name(function)(sys.stdin.buffer.read(), *arguments), ""
    except RagblendError as error:
        answer = None, str(error)
    except MemoryError:
        return _OUT_OF_MEMORY
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
