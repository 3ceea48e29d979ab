"""What finding the nearest of many vectors takes in each place they may be in, and how many of the true ones are found.

    python -m benchmarks.vector_index --vectors 100000 --out data/results/vector-index.json

Vectors of unit length around random centres, as embeddings of texts are around topics; questions are drawn alike. A
question is timed alone, in this process, as an index asks it: candidates, then exact scores of those, from memory here
and from SQLite there. Building is what `follow` does, training included. Read `measure` first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ragblend.bench.common.hardware import card_lines, hardware_card
from ragblend.cli.printing import err, print_json
from ragblend.cli.session import use_threads
from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.rows import Row
from ragblend.corpus.vectors.base import Ids, cosines, nearest, unit_rows
from ragblend.corpus.vectors.choice import choose
from ragblend.corpus.vectors.faiss_file import FaissVectors
from ragblend.corpus.vectors.outside import Outside
from ragblend.corpus.vectors.places import open_vectors

SCHEMA_VERSION = 1
K, NUMBER = 10, "benchmark0000000"
PLACES = ("faiss", "faiss:IVF1024,Flat", "faiss:HNSW32")


@dataclass(frozen=True, slots=True)
class PlaceRun:
    """One place. Latencies are of one question at a time; `nbytes` of the file, None where a server keeps them."""

    place: str
    num_vectors: int
    build_s: float
    nbytes: int | None
    recall_at_10: float  # share of the exact ten that are found
    median_s: float
    p95_s: float


class Synthetic:
    """A catalogue of vectors [n, dim] in memory."""

    def __init__(self, vectors: FloatArray) -> None:
        self.matrix = vectors

    def generation(self) -> int:
        """One change: all came at once."""
        return 1

    def ids(self, newer_than: int = -1) -> Ids:
        """[n]"""
        return np.arange(len(self.matrix) if newer_than < 1 else 0, dtype=np.int64)

    def marks(self) -> tuple[Ids, Ids]:
        """[n] and [n]"""
        return self.ids(), self.ids()

    def rows(self, ids: Sequence[int]) -> list[Row]:
        """The rows with these ids."""
        return [Row(i, "", "", 0, 0, 0, 0, "", "", None, self.matrix[i].tobytes(), 1, b"", 0) for i in ids]


def clustered(count: int, centres: FloatArray, rng: np.random.Generator) -> FloatArray:
    """[count, dim] unit vectors, each beside one of `centres` [m, dim], at a cosine of about 0.8 to it."""
    dim = centres.shape[1]
    chosen = centres[rng.integers(len(centres), size=count)]
    return unit_rows(chosen + 0.75 * rng.standard_normal((count, dim), np.float32) / np.float32(dim**0.5))


def measure(place: str, catalogue: Synthetic, questions: FloatArray, wanted: NDArray[np.int64]) -> PlaceRun:
    """Build, ask, and forget again. wanted: [questions, K] ids of the exact nearest."""
    choice, dim = choose(place), catalogue.matrix.shape[1]
    vectors = open_vectors(choice, NUMBER, dim)
    try:
        start_s = perf_counter()
        vectors.follow(catalogue)
        build_s = perf_counter() - start_s
        nbytes = len(vectors.as_bytes()) if isinstance(vectors, FaissVectors) else None
        took_s, found = [], 0
        for question, best in zip(questions, wanted, strict=True):
            vector = question.reshape(1, -1)
            start_s = perf_counter()
            hits = nearest(vectors, vector, K, lambda ids, vector=vector: cosines(catalogue.rows(ids), vector))  # type: ignore[misc]
            took_s.append(perf_counter() - start_s)
            found += len(hits.keys() & set(best.tolist()))
        recall = found / wanted.size
        return PlaceRun(
            choice.shown, len(vectors), build_s, nbytes, recall, median(took_s), float(np.quantile(took_s, 0.95))
        )
    finally:
        if isinstance(vectors, Outside):
            vectors.forget()
        vectors.close()


def main(
    vectors: Annotated[int, typer.Option("--vectors", min=1000, help="How many vectors.")] = 100_000,
    dim: Annotated[int, typer.Option("--dim", min=2, help="Numbers in each.")] = 384,
    places: Annotated[list[str], typer.Option("--place", help="Where; again for others.")] = list(PLACES),  # noqa: B006
    questions: Annotated[int, typer.Option("--questions", min=1, help="How many are asked.")] = 200,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON there.")] = None,
) -> None:
    """Measure each place on the same vectors and questions."""
    use_threads(threads)
    rng = np.random.default_rng(0)
    centres = unit_rows(rng.standard_normal((1000, dim), np.float32))
    catalogue, asked = Synthetic(clustered(vectors, centres, rng)), clustered(questions, centres, rng)
    wanted = np.stack([np.argpartition(catalogue.matrix @ question, -K)[-K:] for question in asked])
    card = hardware_card()
    err.print("\n".join(card_lines(card)))
    err.print(f"{'place':<32}{'build s':>9}{'MiB':>8}{'recall':>8}{'median ms':>11}{'p95 ms':>8}")
    runs: list[dict[str, Any]] = []
    shown = "".join(f" --place '{choose(place).shown}'" for place in places)
    command = f"python -m benchmarks.vector_index --vectors {vectors} --dim {dim} --questions {questions}{shown}"
    facts = {"schema_version": SCHEMA_VERSION, "command": command, "hardware": card, "runs": runs}
    for place in places:
        run = measure(place, catalogue, asked, wanted)
        size = f"{run.nbytes / 2**20:.0f}" if run.nbytes else "-"
        numbers = f"{run.recall_at_10:>8.3f}{run.median_s * 1e3:>11.2f}{run.p95_s * 1e3:>8.2f}"
        err.print(f"{run.place:<32}{run.build_s:>9.1f}{size:>8}{numbers}", markup=False)
        runs.append(asdict(run))
        if out is not None:  # after each: the next may take an hour
            out.write_text(json.dumps(facts, indent=1) + "\n")
    print_json(facts)


if __name__ == "__main__":
    typer.run(main)
