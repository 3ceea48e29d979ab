"""What texts of odd shapes cost: seconds and memory at 1, 10 and 100 MB, each point in a process of its own.

    python benchmarks/limits.py [--out data/results/limits.json] [--sizes 1,10,100] [--limit-s 60] [--only NAME ...]

A point that takes longer than the limit is ended, noted as `null`, and larger ones of its shape are left out. With
`--only`, the other shapes of OUT stay as they were. `growth` is the exponent between the two largest points: 1 is
linear, and n log n is a little above. docs/limits.md explains the shapes.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ragblend.bench.common.hardware import card_lines, hardware_card, peak_rss_bytes, reset_peak_rss
from ragblend.chunker import split
from ragblend.corpus.documents import Document, open_source, read_documents
from ragblend.corpus.texts import ChunkRegistry
from ragblend.errors import NotADocumentError
from ragblend.frameworks.boundaries import recover

SCHEMA_VERSION = 1
MB = 1_000_000
PROSE = "The ferry to the island leaves at nine from the old pier. It was late again; nobody on board minded much. "
HEAD = "This head is shared by all of the chunks that were registered. "
CHUNK_TOKENS = 512

Work = Callable[[], object]
"""What is timed; its result is a number that goes into the point."""


def filled(piece: str, size: int) -> str:
    """`size` characters of `piece` again and again."""
    return (piece * (size // len(piece) + 1))[:size]


TEXTS: dict[str, Callable[[int], str]] = {
    "prose": lambda size: filled(PROSE, size),
    "one word": lambda size: "a" * size,
    "data URI": lambda size: "data:;base64," + base64.b64encode(random.Random(0).randbytes(size * 3 // 4)).decode(),
    "a b a b": lambda size: filled("a b ", size),
}


def cut(text: str) -> Work:
    """Cutting alone: four characters are a token."""
    return lambda: len(split(Document(text), lambda piece: (len(piece) + 3) // 4, CHUNK_TOKENS))


def cut_and_count(text: str) -> Work:
    """Cutting as ingestion does it, with the embedded model's tokenizer."""
    from transformers import AutoTokenizer

    import ragblend.demo
    from ragblend.prompt.formats import prompt_format
    from ragblend.prompt.segmenter import Segmenter

    folder = Path(ragblend.demo.__file__).parent / "weights"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    segmenter = Segmenter(tokenizer, prompt_format(tokenizer, folder))
    return lambda: len(split(Document(text), segmenter.count_tokens, CHUNK_TOKENS))


def page(piece: str, size: int) -> Work:
    """Reading an HTML page."""
    data = filled(piece, size).encode()

    def read() -> int:
        try:
            return len(list(read_documents("page.html", data).documents))
        except NotADocumentError:
            return 0

    return read


def recognised(texts: list[str], prompt: str, **limits: Any) -> Work:
    """Finding registered texts in a prompt."""
    registry = ChunkRegistry()
    registry.add(texts)
    return lambda: sum(not isinstance(part, str) for part in recover(prompt, registry=registry, **limits))


def marked(segments: list[str], prompt: str) -> Work:
    """Finding the texts of `segments=` in a prompt."""
    return lambda: sum(not isinstance(part, str) for part in recover(prompt, segments=segments))


def distinct(size: int) -> Work:
    """Segments of about 1,000 characters, as many as fill the prompt."""
    segments = [f"{number} {PROSE * 9}".strip() for number in range(size // 1000)]
    return marked(segments, "\n\n".join(segments))


def read_and_cut(suffix: str, line: str, size: int) -> Work:
    """Reading a file and cutting its documents one after the other, as ingestion does before it embeds."""
    path = Path(tempfile.mkdtemp()) / f"file{suffix}"
    with path.open("w") as file:
        for _ in range(size // len(line)):
            file.write(line)

    def read() -> int:
        documents = open_source(str(path)).read().documents
        return sum(len(split(each, lambda piece: (len(piece) + 3) // 4, CHUNK_TOKENS)) for each in documents)

    return read


def of(work: Callable[[str], Work], make: Callable[[int], str], size: int) -> Work:
    """The work on a text of that size."""
    return work(make(size))


RECORD = json.dumps({"text": PROSE * 10}) + "\n"
SHAPES: dict[str, tuple[Callable[[int], Work], int]] = {  # name -> what makes the work, largest size in MB
    **{f"cut: {name}": (partial(of, cut, make), 100) for name, make in TEXTS.items()},
    **{f"cut, tokenizer: {name}": (partial(of, cut_and_count, make), 10) for name, make in TEXTS.items()},
    "page: <a": (lambda size: page("<a ", size), 100),
    "page: <!--": (lambda size: page("<!-- >", size), 100),
    "page: open quotes": (lambda size: page("<x y='", size), 100),
    "segments=: distinct": (distinct, 100),
    "segments=: nested": (lambda size: marked(["x " * n for n in range(1, size // 500)], "x " * (size // 500)), 10),
    "registered yes: lines of it": (lambda size: recognised(["yes"], filled("yes\n", size)), 100),
    "registered yes: all of them": (
        lambda size: recognised(["yes"], filled("yes\n", size), max_matches=sys.maxsize),
        10,
    ),
    "registered yes: a line of it": (lambda size: recognised(["yes"], filled("yes ", size)), 100),
    "100,000 registered, one head": (
        lambda size: recognised([f"{HEAD}{number}" for number in range(100_000)], filled(HEAD + "\n", size)),
        100,
    ),
    "read and cut: .txt": (lambda size: read_and_cut(".txt", PROSE + "\n", size), 100),
    "read and cut: .md": (lambda size: read_and_cut(".md", PROSE + "\n\n", size), 100),
    "read and cut: .jsonl": (lambda size: read_and_cut(".jsonl", RECORD, size), 100),
}


def measure(name: str, size_mb: int) -> dict[str, Any]:
    """One point, in this process: what it was given is made before the clock starts."""
    work = SHAPES[name][0](size_mb * MB)
    reset_peak_rss()
    before = peak_rss_bytes()
    start_s = perf_counter()
    found = work()
    seconds = perf_counter() - start_s
    return {"mb": size_mb, "seconds": round(seconds, 3), "peak_mb": round((peak_rss_bytes() - before) / MB), "n": found}


def curve(name: str, sizes: list[int], limit_s: float) -> Iterator[dict[str, Any]]:
    """The points of a shape, smallest first."""
    for size in sizes:
        if size > SHAPES[name][1]:
            return
        command = [sys.executable, __file__, "--point", name, str(size)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
        except subprocess.TimeoutExpired:
            yield {"mb": size, "seconds": None, "limit_s": limit_s}
            return
        yield json.loads(done.stdout.splitlines()[-1])


def growth(points: list[dict[str, Any]]) -> float | None:
    """The exponent between the two largest points that were finished."""
    done = [point for point in points if point["seconds"]][-2:]
    if len(done) < 2:
        return None
    (small, large) = done
    return round(math.log(large["seconds"] / small["seconds"]) / math.log(large["mb"] / small["mb"]), 2)


def main() -> None:
    """Measure, print the table, write the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", default="1,10,100")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    parser.add_argument("--point", nargs=2)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(measure(given.point[0], int(given.point[1]))))
        return
    card = hardware_card()
    print("\n".join(card_lines(card)))
    print(f"\n{'shape':<32}{'MB':>5}{'seconds':>9}{'MB more':>9}{'growth':>8}")
    runs = []
    for name in given.only:
        points = list(curve(name, [int(size) for size in given.sizes.split(",")], given.limit_s))
        runs.append({"shape": name, "points": points, "growth": growth(points)})
        for point in points:
            seconds = f"> {given.limit_s:.0f}" if point["seconds"] is None else f"{point['seconds']:.2f}"
            last = runs[-1]["growth"] if point is points[-1] else ""
            print(f"{name:<32}{point['mb']:>5}{seconds:>9}{point.get('peak_mb', ''):>9}{last!s:>8}", flush=True)
    result = {
        "schema_version": SCHEMA_VERSION,
        "command": "python benchmarks/limits.py",
        "hardware": card,
        "limit_s": given.limit_s,
        "runs": runs,
    }
    if given.out and given.out.exists() and given.only != list(SHAPES):  # some shapes anew, the others as they were
        known = {run["shape"]: run for run in json.loads(given.out.read_text())["runs"]}
        result["runs"] = list((known | {run["shape"]: run for run in runs}).values())
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    else:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
