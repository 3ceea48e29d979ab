"""Ctrl-C: prints at once which results are kept and how to continue, and ends the command within seconds.

typer converts KeyboardInterrupt to an exit code before `main` receives it, and a command ends only after its current
step. The signal handler therefore writes the line.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from ragblend.redaction import redact_command

EXIT_INTERRUPTED = 130
STOP_S = 2.0
"""Longest time in seconds from Ctrl-C to the process's end. Index and store files appear in one step, so ending the
process at any moment leaves no partial file."""

_GOES_ON = "is kept; the same command goes on from there"
_MADE_AT_THE_END = "nothing is kept, because results are saved at the end; the same command begins again"
_KEPT = {
    "ingest": f"what was indexed and prefilled so far {_GOES_ON}",
    "precompute": f"what was prefilled so far {_GOES_ON}",
    "demo": f"what was prefilled so far {_GOES_ON}",
    "push": f"what was sent so far {_GOES_ON}",
    "remove": "what was removed stays removed; the same command does the rest",
    "gc": "what was removed stays removed; the same command does the rest",
    "verify": "what was repaired so far is kept; the same command checks again",
    "sign": f"what was signed so far {_GOES_ON}",
    "calibrate": _MADE_AT_THE_END,
    "profile": _MADE_AT_THE_END,
    "bench": _MADE_AT_THE_END,
    "analyze": _MADE_AT_THE_END,
}
_OTHERWISE = "what is stored stays; the same command begins again"
_STOPPED_BY_CTRL_C = ("ui", "serve")  # Ctrl-C is the normal way to end these


def interrupt_message(arguments: Sequence[str]) -> str:
    """Return the line to print on Ctrl-C in the command with these arguments: what is kept, and how to continue.

    >>> interrupt_message(["push"])
    'interrupted: what was sent so far is kept; the same command goes on from there: ragblend push'
    """
    kept = _KEPT.get(_command_name(arguments), _OTHERWISE)
    return f"interrupted: {kept}: {shlex.join(redact_command(['ragblend', *arguments]))}"


@contextmanager
def handle_interrupt(arguments: Sequence[str]) -> Iterator[None]:
    """On Ctrl-C while a command runs, print how to continue it and raise KeyboardInterrupt.

    If the process still runs after `STOP_S` seconds, or at a second Ctrl-C, it ends with exit code 130. For `ui` and
    `serve`, Ctrl-C keeps its normal effect.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _command_name(arguments) in _STOPPED_BY_CTRL_C:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
        ending = threading.Timer(STOP_S, os._exit, (EXIT_INTERRUPTED,))
        ending.daemon = True
        ending.start()
        with suppress(OSError):  # written directly, because stderr's buffer may be in use
            newline = "\n" if os.isatty(2) else ""  # the terminal shows ^C
            os.write(2, f"{newline}{interrupt_message(arguments)}\n".encode(errors="backslashreplace"))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _command_name(arguments: Sequence[str]) -> str:
    return next((each for each in arguments if not each.startswith("-")), "")
