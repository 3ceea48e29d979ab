"""Log records of libraries that read files, written to our log with the name of the file.

pypdf and trafilatura report what they repair in a file, and do not know the file's name. Depends on logging alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger(__name__)

_LIBRARIES = ("pypdf", "trafilatura")
_current_file: ContextVar[str] = ContextVar("current_file", default="")


class _FileNameHandler(logging.Handler):
    """Handler of a library's records: with the file's name while we read one, else as without this handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record to our log at level INFO, or pass it to the handlers above the library's logger."""
        path = _current_file.get()
        if path:
            log.info("%s: %s reports: %s", path, record.name, record.getMessage())
        else:  # the application's own call of the library
            logging.getLogger().callHandlers(record)


def _install() -> None:
    for library in map(logging.getLogger, _LIBRARIES):
        if not any(isinstance(handler, _FileNameHandler) for handler in library.handlers):
            library.addHandler(_FileNameHandler())
            library.propagate = False  # the handler passes records on itself


@contextmanager
def name_file_in_log(path: str) -> Iterator[None]:
    """Write what libraries log in this context to our log, with `path`. Other threads and tasks are not affected."""
    _install()
    token = _current_file.set(path)
    try:
        yield
    finally:
        _current_file.reset(token)
