"""Measurements of the document readers: words compared with other programs, CPU time, memory and failures.

All files of a kind are read by one child process, so that its peak memory is that of this kind. Read `measure_kind`
first.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any, NamedTuple

from benchmarks.documents.files import ChosenFile
from benchmarks.documents.references import WordDifference, compare_words, reference_texts
from ragblend.corpus.documents import read_documents
from ragblend.errors import NotADocumentError, UnreadableDocumentError

MB = 1_000_000
NAMED_ERRORS = (NotADocumentError, UnreadableDocumentError)
MISSING_BARS = {"html": 1.5, "pdf": 4.0, "office": 2.0, "books": 2.0}
"""Limit of the mean percentage of missing words, by kind."""
SPEED_BARS = {"html": 0.15, "pdf": 0.3}
"""Limit of CPU seconds per MB, by kind."""


class ReadText(NamedTuple):
    """Text of one file as the readers return it. `error` is "" if the file was read. `cpu_s`: CPU seconds."""

    text: str
    error: str
    cpu_s: float
    peak_bytes: int  # peak memory of the process up to this file


class FileResult(NamedTuple):
    """Measurements of one file. `difference` is None if no reference finds a word in the file."""

    name: str
    nbytes: int
    cpu_s: float
    error: str
    difference: WordDifference | None


@dataclass(frozen=True, slots=True)
class KindResult:
    """Measurements of all files of a kind. Means and maxima include unreadable files, but no file without words."""

    kind: str
    num_files: int
    num_compared: int
    missing_mean: float | None
    missing_worst: float | None
    extra_mean: float | None
    extra_worst: float | None
    cpu_s_per_mb: float
    peak_mb: float  # growth of the child's peak memory over all files of the kind
    peak_mb_of_largest: float  # growth over the largest file, which is read first
    largest_mb: float
    failures: dict[str, str] = field(default_factory=dict)  # {unreadable file with words: error}
    without_text: dict[str, str] = field(default_factory=dict)  # {unreadable file without words: error}
    files: tuple[FileResult, ...] = ()

    def over_bars(self) -> list[str]:
        """Return a sentence for each limit that this kind exceeds."""
        found = []
        if self.missing_mean is not None and self.missing_mean > (bar := MISSING_BARS.get(self.kind, 100.0)):
            found.append(f"{self.kind}: {self.missing_mean:.1f} % of the words are missing, but the limit is {bar:g} %")
        if self.cpu_s_per_mb > (bar := SPEED_BARS.get(self.kind, 1e9)):
            found.append(f"{self.kind}: {self.cpu_s_per_mb:.2f} s/MB, but the limit is {bar:g} s/MB")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with floats rounded to four decimals."""
        facts = asdict(self)
        facts["files"] = [
            {**file._asdict(), "difference": file.difference and file.difference._asdict()} for file in self.files
        ]
        return dict(_rounded(facts))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def measure_kind(kind: str, files: Sequence[ChosenFile]) -> KindResult:
    """Read all `files` of a kind in one child process, the largest first. Compare their words in this process."""
    files = sorted(files, key=lambda file: (-file.path.stat().st_size, file.name))
    paths = [str(file.path) for file in files]
    texts = read_in_child([paths[-1], *paths])  # the first one is uncounted: readers load modules on first use
    start_bytes = texts.pop(0).peak_bytes
    results = tuple(_compare(file, read) for file, read in zip(files, texts, strict=True))
    compared = [file.difference for file in results if file.difference is not None]
    missing, extra = [each.missing_percent for each in compared], [each.extra_percent for each in compared]
    return KindResult(
        kind,
        len(files),
        len(compared),
        mean(missing) if missing else None,
        max(missing, default=None),
        mean(extra) if extra else None,
        max(extra, default=None),
        sum(file.cpu_s for file in results) / sum(file.nbytes for file in results) * MB,
        (texts[-1].peak_bytes - start_bytes) / MB,
        (texts[0].peak_bytes - start_bytes) / MB,
        results[0].nbytes / MB,
        {file.name: file.error for file in results if file.error and file.difference is not None},
        {file.name: file.error for file in results if file.error and file.difference is None},
        results,
    )


def _compare(file: ChosenFile, read: ReadText) -> FileResult:
    difference = compare_words(read.text, reference_texts(file.path))
    return FileResult(file.name, file.path.stat().st_size, read.cpu_s, read.error, difference)


def read_in_child(paths: Sequence[str]) -> list[ReadText]:
    """Read the files at `paths` in a child process that imports only the readers. Return their texts in order.

    Raises CalledProcessError if the child process crashes.
    """
    command = (sys.executable, "-m", "benchmarks.documents.reading")
    ran = subprocess.run(command, input=json.dumps(paths).encode(), stdout=subprocess.PIPE, check=True)
    return [ReadText(*each) for each in json.loads(ran.stdout)]


def read_text(path: str) -> ReadText:
    """Return the text of a file as ingestion reads it: its documents, joined by blank lines."""
    data, start_s = Path(path).read_bytes(), process_time()
    text = error = ""
    try:
        contents = read_documents(path, data)
        text, error = "\n\n".join(document.text for document in contents.documents), contents.failure
    except NAMED_ERRORS as raised:
        error = f"{type(raised).__name__}: {raised}"
    except Exception as raised:  # readers must not raise other errors: record the class instead of failing
        error = f"UNNAMED {type(raised).__name__}: {raised}"
    return ReadText(text, error, process_time() - start_s, _peak_bytes())


def _peak_bytes() -> int:
    """Return this process's peak resident memory. On Linux `ru_maxrss` is not used: it includes the parent's."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    peaks_kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * (peaks_kib[0] if peaks_kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    json.dump([read_text(path) for path in json.load(sys.stdin)], sys.stdout)
