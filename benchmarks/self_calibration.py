"""The default ratio that ingestion chooses on stored chunks, over passages whose questions are for selection.

    python -m benchmarks.self_calibration --model MODEL --data musique --out FILE

The corpus is the passages of selection questions. `ingestion.self_calibration` chooses the ratio, as after an
ingestion, and the result has the measured curve: KL(full || blend) of the first token in nats. Compare it with that of
the real questions: `ragblend bench quality --model MODEL --data musique --split selection --rules ask --ratios
0.05,0.15,0.3,0.5`. Read `main` first.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from benchmarks.results import ModelOption, OutOption, write_both
from ragblend.chunker import split
from ragblend.cli.printing import print_line
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.corpus.documents import Document
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.ingestion.report import ignore_progress
from ragblend.ingestion.self_calibration import calibrate_on_chunks, make_prompts
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.data import load_cases
from ragblend.lab.quality.tasks import SYSTEM
from ragblend.prompt.types import Chunk


def passage_chunks(engine: TransformersEngine, config: QualityConfig) -> list[Chunk]:
    """Return the chunks of the selection questions' passages, in the order of the questions."""
    passages = [text for case in load_cases(config) for text in case.passages]
    documents = [Document(text, str(number)) for number, text in enumerate(dict.fromkeys(passages))]
    size, count = config.chunk_tokens, engine.renderer.count_tokens
    return [Chunk(chunk.text) for document in documents for chunk in split(document, count, size)]


def main(
    model: ModelOption,
    out: OutOption = None,
    data: Annotated[str, typer.Option("--data", help="musique or nq.")] = "musique",
    questions: Annotated[int, typer.Option("--questions", help="Questions whose passages are the corpus.")] = 30,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int | None, typer.Option("--threads", help="Compute threads.")] = None,
) -> None:
    """Store the chunks that the prompts need, choose the ratio on them, and write the measured curve as JSON."""
    quiet_libraries()
    set_num_threads(threads)
    config = QualityConfig(model=model, data=data, part="selection", num_questions=questions, dtype=dtype)
    with load_engine(model, dtype=dtype, on_miss="inline") as base, torch.inference_mode():
        if not isinstance(base, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        engine = with_own_store(base, system=SYSTEM, context="none")
        prompts = make_prompts(passage_chunks(base, config), SYSTEM)
        wanted = dict.fromkeys(chunk for prompt in prompts for chunk in prompt.chunks)
        for chunk in wanted:
            engine.precompute(chunk)
        start_s = perf_counter()
        calibration = calibrate_on_chunks(prompts, engine, ignore_progress)
        seconds = perf_counter() - start_s
    fit = calibration.fits[0]
    result: dict[str, Any] = {
        "model": Path(model).name,
        "data": data,
        "dtype": dtype,
        "num_prompts": len(prompts),
        "prompt_tokens": sum(len(engine.renderer.render(prompt)) for prompt in prompts) / len(prompts),
        "seconds": round(seconds, 1),
        **asdict(fit),
        "curve": [point._asdict() for point in fit.curve],
    }
    for point in fit.curve:
        print_line(f"{point.ratio:<5g} KL {point.kl:.4f} charged {point.charged_budget_32:.3f}")
    print_line(f"chosen: {fit.ratio:g}")
    write_both(result, out)


if __name__ == "__main__":
    typer.run(main)
