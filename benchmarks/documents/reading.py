"""What the readers make of each file: its words beside those of independent programs, time, memory, failures.

Read `measure_kind` first. A kind is read in a child process, so that peak memory is that kind's own.
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
"""Most words missing in the mean of a kind, in percent."""
SPEED_BARS = {"html": 0.15, "pdf": 0.3}
"""Most CPU seconds per MB."""


class ReadText(NamedTuple):
    """A file as it was read. `error` is empty where it was. `cpu_s` are seconds of CPU."""

    text: str
    error: str
    cpu_s: float
    peak_bytes: int  # of this process until now


class FileResult(NamedTuple):
    """One file of a kind. `difference` is None where no reference finds a word in it."""

    name: str
    nbytes: int
    cpu_s: float
    error: str
    difference: WordDifference | None


@dataclass(frozen=True, slots=True)
class KindResult:
    """The files of a kind. Means and worst are over files in which a reference finds words, also over unread ones."""

    kind: str
    num_files: int
    num_compared: int
    missing_mean: float | None
    missing_worst: float | None
    extra_mean: float | None
    extra_worst: float | None
    cpu_s_per_mb: float
    peak_mb: float  # growth of the child's peak while it read all files of the kind
    peak_mb_of_largest: float  # growth while it read the largest file, which it reads first
    largest_mb: float
    failures: dict[str, str] = field(default_factory=dict)  # files with words that were not read, with the error
    without_text: dict[str, str] = field(default_factory=dict)  # files in which no reference finds a word, likewise
    files: tuple[FileResult, ...] = ()

    def over_bars(self) -> list[str]:
        """Sentences about what is worse than the bars; empty where nothing is."""
        found = []
        if self.missing_mean is not None and self.missing_mean > (bar := MISSING_BARS.get(self.kind, 100.0)):
            found.append(f"{self.kind}: {self.missing_mean:.1f} % of the words are missing, at most {bar:g} should be")
        if self.cpu_s_per_mb > (bar := SPEED_BARS.get(self.kind, 1e9)):
            found.append(f"{self.kind}: {self.cpu_s_per_mb:.2f} s/MB, at most {bar:g} should be")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, floats rounded."""
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
    """Read all `files` of a kind in one child process, the largest first, and compare their words here."""
    files = sorted(files, key=lambda file: (-file.path.stat().st_size, file.name))
    paths = [str(file.path) for file in files]
    texts = read_in_child([paths[-1], *paths])  # what a first use of each reader loads is not a file's cost
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
    """The texts of the files at `paths`, read one after another by one child process that imports the readers alone.

    Raises CalledProcessError where the child does not survive a file.
    """
    command = (sys.executable, "-m", "benchmarks.documents.reading")
    ran = subprocess.run(command, input=json.dumps(paths).encode(), stdout=subprocess.PIPE, check=True)
    return [ReadText(*each) for each in json.loads(ran.stdout)]


def read_text(path: str) -> ReadText:
    """The text of a file as ingestion reads it: all of its documents, with blank lines between."""
    data, start_s = Path(path).read_bytes(), process_time()
    text = error = ""
    try:
        contents = read_documents(path, data)
        text, error = "\n\n".join(document.text for document in contents.documents), contents.failure
    except NAMED_ERRORS as raised:
        error = f"{type(raised).__name__}: {raised}"
    except Exception as raised:  # an error that readers must not raise is a result here, with its class
        error = f"UNNAMED {type(raised).__name__}: {raised}"
    return ReadText(text, error, process_time() - start_s, _peak_bytes())


def _peak_bytes() -> int:
    """Largest resident memory of this process so far. Its `ru_maxrss` would include that of its parent."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    peaks_kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return 1024 * (peaks_kib[0] if peaks_kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    json.dump([read_text(path) for path in json.load(sys.stdin)], sys.stdout)
