"""Comparison of both engines on real prompts over one store: tokens selected for recompute, and answers.

    make real-model test-vllm
    .venv-vllm/bin/python -m benchmarks.both_engines --model models/smollm2 --questions 50 \\
        --out data/results/both-engines.json

transformers and vLLM both run in this process, in float32. The transformers engine stores the chunks; vLLM finds them
under the same keys.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.results import ModelOption, write_result
from ragblend import load_engine
from ragblend.cli.options import split_numbers
from ragblend.corpus.embedders import default_embedder
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.tasks import SYSTEM


def watch_selections() -> list[list[int]]:
    """Return a list that is filled with the positions that each of vLLM's blends recomputes."""
    from ragblend.engine.vllm.worker_side import worker as vllm_worker

    worker: Any = vllm_worker
    selections: list[list[int]] = []
    record_fusion = worker.record_fusion

    def watching(report: Any, runs: Any, plan: Any, result: Any, num_known: int) -> None:
        selections.append(result.recomputed.tolist())
        record_fusion(report, runs, plan, result, num_known)

    worker.record_fusion = watching
    return selections


def compare(config: QualityConfig, ratios: list[float], store: Path) -> list[dict[str, Any]]:
    """Run each prompt at each ratio on both engines. Return a record per prompt and ratio."""
    options: dict[str, Any] = {"dtype": "float32", "system": SYSTEM, "on_miss": "inline"}
    serving = {"max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30}
    found = []
    with ExitStack() as stack:
        local: Any = stack.enter_context(load_engine(config.model, store, **options))
        vllm: Any = stack.enter_context(
            load_engine(config.model, store, backend="vllm", vllm_options=serving, **options)
        )
        selections, embedder = watch_selections(), default_embedder()
        for case in load_cases(config):
            prompt = build_prompt(case, local, embedder, config)
            for chunk in prompt.chunks:
                local.precompute(chunk)
            for ratio in ratios:
                asked = {
                    "rule": "ask",
                    "recompute_ratio": ratio,
                    "max_tokens": case.answer_tokens(config.answer_tokens),
                }
                selections.clear()
                vllm_answer = vllm.generate(prompt, **asked)
                prefilled = local.prefill(local.request(prompt, **asked))
                answer = local.generate(prompt, **asked)
                (selected,), expected = selections, sorted(prefilled.recomputed.tolist())
                found.append(
                    {
                        "question": case.question,
                        "ratio": ratio,
                        "num_hits": vllm_answer.report.num_chunk_hits,
                        "num_selected": len(expected),
                        "num_shared": len({*selected} & {*expected}),
                        "same_selection": selected == expected,
                        "same_answer": vllm_answer.token_ids == answer.token_ids,
                    }
                )
                print(len(found), found[-1])
    return found


def main(
    model: ModelOption,
    data: Annotated[str, typer.Option("--data", help="Data set.")] = "musique",
    split: Annotated[str, typer.Option("--split", help="Part of the data set.")] = "all",
    questions: Annotated[int, typer.Option("--questions", help="Number of questions.")] = 50,
    ratios: Annotated[str, typer.Option("--ratios", help="Recompute ratios, comma-separated.")] = "0.05,0.15",
    out: Annotated[Path | None, typer.Option("--out", help="JSON file of the result. Default: none.")] = None,
) -> None:
    """Compare the engines, print the totals, and write JSON."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that `watch_selections` can patch it
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    torch.set_num_threads(1)
    config = QualityConfig(model=model, data=data, part=split, num_questions=questions)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        found = compare(config, split_numbers(ratios), Path(folder) / "kv")
    num_selected = sum(each["num_selected"] for each in found)
    facts = {
        "config": config.as_dict(),
        "num_prompts": len(found),
        "same_selection": sum(each["same_selection"] for each in found),
        "shared_tokens": sum(each["num_shared"] for each in found) / max(1, num_selected),
        "same_answer": sum(each["same_answer"] for each in found),
        "prompts": found,
    }
    print({name: facts[name] for name in ("num_prompts", "same_selection", "shared_tokens", "same_answer")})
    if out is not None:
        write_result(facts, out)


if __name__ == "__main__":
    typer.run(main)
