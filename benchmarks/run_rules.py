"""Selection study of the rules for runs: least length, middles of chunks, and edges.

    python -m benchmarks.run_rules --model models/smollm2 --out data/results/run-rules.json

It uses questions that no reported figure uses. A prompt repeats stored chunks whole or in part. Each study changes the
parts that are placed from the store. It compares the first token with full prefill of the same ids, by
KL(full || blended) in nats:

- `edges`: whole chunks; some tokens at both ends of each run are computed instead of placed.
- `middles`: each chunk without its first third; placed whole, placed without its first tokens, or computed.
- `parts`: every other sentence of each chunk; runs shorter than some length are computed.

Rule and ratio are those of the default. Read `STUDIES` first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import typer
from torch import Tensor

from benchmarks.results import ModelOption, OutOption, write_result
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.intervals import mean_interval
from ragblend.lab.quality.data import find_data, get_dataset_split
from ragblend.lab.quality.records import read_cases
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt import token_index
from ragblend.prompt.types import ChunkRun, Prompt

NUM_CHUNKS, CHUNK_CHARACTERS, RATIO = 6, 900, 0.05


def whole(chunk: str) -> str:
    """Return the chunk unchanged."""
    return chunk


def without_first_third(chunk: str) -> str:
    """Return the chunk from the first space after its first third on."""
    return chunk[chunk.index(" ", len(chunk) // 3) + 1 :]


def every_other_sentence(chunk: str) -> str:
    """Return the first, third, fifth, ... sentence, as an extractive compressor might."""
    return " ".join(re.split(r"(?<=[.!?])\s+", chunk)[1::2]) or chunk


def trimmed(num_first: int, num_last: int) -> Callable[[ChunkRun], ChunkRun | None]:
    """Return a function that shortens a run: a number of tokens at its ends are computed instead of placed."""

    def trim(run: ChunkRun) -> ChunkRun | None:
        part = run.within(run.start + num_first, run.end - num_last)
        return part if part.num_tokens else None

    return trim


def at_least(num_tokens: int) -> Callable[[ChunkRun], ChunkRun | None]:
    """Return a function that leaves out shorter runs."""
    return lambda run: run if run.num_tokens >= num_tokens else None


STUDIES: dict[str, tuple[Callable[[str], str], dict[str, Callable[[ChunkRun], ChunkRun | None]]]] = {
    "edges": (whole, {f"{count} computed": trimmed(count, count) for count in (0, 1, 2, 4, 8)}),
    "middles": (
        without_first_third,
        {f"first {count} computed": trimmed(count, 0) for count in (0, 4, 16, 32)} | {"all computed": lambda run: None},
    ),
    "parts": (
        every_other_sentence,
        {f"from {count} tokens": at_least(count) for count in (8, 12, 16, 24, 32, 64)} | {"none": lambda run: None},
    ),
}
"""{study: (function from a stored chunk to its text in the prompt, {variant: function that changes a run})}.

The second function returns None for runs that are computed instead of placed.
"""


class Variant(NamedTuple):
    """Closeness of one variant to full prefill, over all questions."""

    study: str
    variant: str
    first_token_kl: float  # nats, mean
    interval: tuple[float, float]  # of the mean, 95 %
    first_token_same: float  # share of questions with the same first token
    placed_share: float  # of the prompt's tokens, mean


def run_study(engine: TransformersEngine, name: str, cases: Sequence[QaCase]) -> list[Variant]:
    """Prefill the prompt of every case in every variant of a study. Return the variants' results."""
    shown, variants = STUDIES[name]
    found: dict[str, list[tuple[float, bool, float]]] = {variant: [] for variant in variants}
    for case in cases:
        chunks = [passage[:CHUNK_CHARACTERS].rpartition(" ")[0] for passage in case.passages[:NUM_CHUNKS]]
        for chunk in chunks:
            engine.precompute(chunk)
        prompt = Prompt.from_messages(
            [("system", case.system or ""), ("user", "\n\n".join([*map(shown, chunks), case.question]))]
        )
        request = engine.request(prompt, recompute_ratio=RATIO, max_tokens=1)
        full = engine.prefill(replace(request, mode="full")).logits
        for variant, change in variants.items():
            runs = tuple(part for run in request.prompt.runs if (part := change(run)) is not None)
            changed = replace(request, prompt=replace(request.prompt, runs=runs))
            placed_share = sum(run.num_tokens for run in runs) / request.prompt.num_tokens
            found[variant].append((*_compare(engine, changed, full), placed_share))
    return [_summary(name, variant, rows) for variant, rows in found.items()]


def _compare(engine: TransformersEngine, request: Any, full: Tensor) -> tuple[float, bool]:
    logits = engine.prefill(request).logits
    return first_token_kl(full, logits), int(full.argmax()) == int(logits.argmax())


def _summary(study: str, variant: str, rows: Sequence[tuple[float, bool, float]]) -> Variant:
    divergences = [row[0] for row in rows]
    return Variant(
        study,
        variant,
        mean(divergences),
        mean_interval(divergences),
        mean(row[1] for row in rows),
        mean(row[2] for row in rows),
    )


def main(
    model: ModelOption,
    questions: Annotated[int, typer.Option("--questions", help="Questions per data set, at most.")] = 30,
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
    out: OutOption = None,
) -> None:
    """Run all studies, print a line per variant, and write the result as JSON."""
    quiet_libraries()
    set_num_threads(threads)
    cases = [
        case
        for name in ("musique", "nq")
        for case in [each for each in read_cases(find_data(name)) if get_dataset_split(each.question) == "selection"][
            :questions
        ]
    ]
    token_index.MIN_RUN = token_index.WINDOW  # shorter runs than the default are among the variants
    found: list[Variant] = []
    with load_engine(model, None, on_miss="inline") as engine:
        if not isinstance(engine, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        for name in STUDIES:
            for each in run_study(engine, name, cases):
                found.append(each)
                print_line(
                    f"{each.study:<8} {each.variant:<18} {each.first_token_kl:.4f} nats ({each.interval[0]:.4f} to "
                    f"{each.interval[1]:.4f}), same first token {each.first_token_same:.0%}, "
                    f"{each.placed_share:.0%} placed"
                )
    result = {
        "model": Path(model).name,
        "num_questions": len(cases),
        "recompute_ratio": RATIO,
        "variants": [each._asdict() for each in found],
    }
    write_result(result, out)


if __name__ == "__main__":
    typer.run(main)
