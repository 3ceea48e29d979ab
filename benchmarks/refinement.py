"""Refinement: how close refined answers are to full prefill, and what others wait for it.

    python -m benchmarks.refinement answers --model models/smollm2 --data musique --out data/results/refinement.json
    python -m benchmarks.refinement pauses --threads 1 --out FILE.json
    python -m benchmarks.refinement pauses --backend vllm --threads 1 --out FILE.json

`answers` compares three kinds of runs with full prefill, over the tokens of full prefill's greedy answer: the default
rule at its ratio, the same refined after the first token (`refine_ratio`), and one pass at the higher ratio. `--resume`
continues with the questions that the file `--out` lacks.

`pauses` compares requests with and without refinement in one process, in turns: the time to first token and the longest
pause between two tokens of a single client, and the requests per second of several clients. Other processes change CPU
seconds less than seconds. Read `measure_answers` and `measure_pauses` first.
"""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from benchmarks.batch_decode import opened
from benchmarks.results import ModelOption, OutOption, write_result
from ragblend.cli.options import split_numbers
from ragblend.cli.printing import print_line, print_notice
from ragblend.cli.session import quiet_libraries, set_num_threads
from ragblend.corpus.embedders import default_embedder
from ragblend.engine.generation import PrefillResult
from ragblend.engine.load import load_engine
from ragblend.engine.report import Generation
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.vllm.base_engine import VllmEngineBase
from ragblend.errors import UsageError
from ragblend.intervals import mean_interval
from ragblend.lab.bench.common.configs import PromptConfig, QualityConfig
from ragblend.lab.bench.common.shapes import SHAPES
from ragblend.lab.bench.common.workloads import make_prompts, vocab_size
from ragblend.lab.bench.ttft_vllm import open_vllm
from ragblend.lab.engines import with_own_store
from ragblend.lab.quality.data import build_prompt, load_cases
from ragblend.lab.quality.measures import score_fidelity, token_log_probs
from ragblend.lab.quality.study import answer_in_full
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt.types import Prompt

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Closeness(NamedTuple):
    """Closeness of one run to full prefill, on one question. KL in nats."""

    question: int
    run: str
    first_token_kl: float
    answer_kl: float  # mean over the tokens of full prefill's answer
    later_kl: float  # mean over the tokens after the first, which a refinement can change; 0 if there are none
    agreement: float  # share of these tokens that are the most likely ones in this run


def refine_now(prefilled: PrefillResult, answer_ids: Sequence[int]) -> None:
    """Refine a prefill after some tokens of the answer. Does nothing if no refinement was requested or needed."""
    if prefilled.refine is not None:
        for _ in prefilled.refine(prefilled, answer_ids):
            pass


def measure_answers(
    engine: TransformersEngine, prompt: Prompt, case: QaCase, number: int, ratios: Sequence[float], answer_tokens: int
) -> list[Closeness]:
    """Return the closeness of the default ratio, refined to each of `ratios`, and of one pass at each of `ratios`.

    The first token of a refined answer is scored before the refinement, the others after it.
    """
    expected = answer_in_full(engine, prompt, case, answer_tokens)
    answer = expected.full.token_ids
    seed = expected.request.options.seed

    def scores(prefilled: PrefillResult) -> Tensor:
        return token_log_probs(engine, expected.request.prompt, prefilled.fused, answer)

    def closeness(run: str, found: Tensor) -> Closeness:
        first_token_kl, _ = score_fidelity(found[:1], expected.reading[:1])
        later_kl = score_fidelity(found[1:], expected.reading[1:])[0] if len(found) > 1 else 0.0
        answer_kl, agreement = score_fidelity(found, expected.reading)
        return Closeness(number, run, first_token_kl, answer_kl, later_kl, agreement)

    results: list[Closeness] = []
    for ratio in ratios:
        prefilled = engine.prefill(engine.request(prompt, refine_ratio=ratio, seed=seed))
        before = scores(prefilled)
        if not results:
            results.append(closeness("not refined", before))
        refine_now(prefilled, answer[:1])
        results.append(closeness(f"refined to {ratio:g}", torch.cat((before[:1], scores(prefilled)[1:]))))
    for ratio in ratios:
        prefilled = engine.prefill(engine.request(prompt, recompute_ratio=ratio, seed=seed))
        results.append(closeness(f"one pass at {ratio:g}", scores(prefilled)))
    return results


def summarize(records: Sequence[Closeness]) -> list[dict[str, Any]]:
    """Return the means of each run over the questions, intervals of the KLs of the answer and of its later tokens, and
    the answer's KL as a share of that without refinement.
    """
    by_run: dict[str, list[Closeness]] = defaultdict(list)
    for record in records:
        by_run[record.run].append(record)
    base = fmean(record.answer_kl for record in records if record.run == "not refined")
    runs = []
    for name, found in by_run.items():
        answer_kl = fmean(record.answer_kl for record in found)
        runs.append(
            {
                "run": name,
                "num_questions": len(found),
                "first_token_kl": fmean(record.first_token_kl for record in found),
                "answer_kl": answer_kl,
                "answer_kl_interval": mean_interval([record.answer_kl for record in found]),
                "answer_kl_over_not_refined": answer_kl / base,
                "later_kl": fmean(record.later_kl for record in found),
                "later_kl_interval": mean_interval([record.later_kl for record in found]),
                "agreement": fmean(record.agreement for record in found),
            }
        )
    return runs


@app.command()
def answers(
    model: ModelOption,
    data: Annotated[str, typer.Option("--data", help="Questions: musique or nq.")] = "musique",
    split: Annotated[str, typer.Option("--split", help="Questions: reported or selection.")] = "reported",
    questions: Annotated[int, typer.Option("--questions", help="Questions, at most.")] = 40,
    ratios: Annotated[str, typer.Option("--ratios", help="Refine ratios, comma-separated.")] = "0.2",
    resume: Annotated[bool, typer.Option("--resume", help="Keep the questions that the file has.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int, typer.Option("--threads", help="Compute threads.")] = 1,
    out: OutOption = None,
) -> None:
    """Measure the closeness of refined answers to full prefill, on real questions."""
    quiet_libraries()
    set_num_threads(threads)
    config = QualityConfig(model=model, data=data, part=split, num_questions=questions, dtype=dtype)
    records = []
    if resume and out is not None and out.exists():
        records = [Closeness(**record) for record in json.loads(out.read_text(encoding="utf-8"))["records"]]
    done = {record.question for record in records}
    with load_engine(model, dtype=dtype, on_miss="inline") as base, torch.inference_mode():
        if not isinstance(base, TransformersEngine):
            raise UsageError(f"--model is {model!r}; give one that transformers runs here")
        embedder = default_embedder()
        for number, case in enumerate(load_cases(config)):
            if number in done:
                continue
            prompt = build_prompt(case, base, embedder, config)
            engine = with_own_store(base, system=case.system, context="none")
            for chunk in prompt.chunks:
                engine.precompute(chunk)
            records += measure_answers(
                engine, prompt, case, number, split_numbers(ratios), case.answer_tokens(config.answer_tokens)
            )
            gc.collect()  # the question's engine is a reference cycle, which holds gigabytes of KV
            facts = {
                "command": "benchmarks.refinement answers",
                "config": config.as_dict() | {"ratios": split_numbers(ratios)},
                "runs": summarize(records),
                "records": [record._asdict() for record in records],
            }
            if out is not None:
                write_result(facts, out)
            print_notice(f"{number + 1} of {questions} questions")
    for run in summarize(records):
        low, high = run["answer_kl_interval"]
        print_line(
            f"{run['run']:<18} first token {run['first_token_kl']:.4f}, answer {run['answer_kl']:.4f} nats ({low:.4f} "
            f"to {high:.4f}), {run['answer_kl_over_not_refined']:.2f} of not refined, after the first token "
            f"{run['later_kl']:.4f}, same token "
            f"{run['agreement']:.1%}, {run['num_questions']} questions"
        )


# --- pauses ---

AnyEngine = TransformersEngine | VllmEngineBase


class Single(NamedTuple):
    """One streamed answer without another request. Times in seconds."""

    ttft_s: float
    ttft_cpu_s: float  # CPU seconds of the process up to the first token
    longest_pause_s: float  # between two tokens
    refine_s: float
    request_cpu_s: float


@contextmanager
def opened_with(backend: str, subject: str, config: PromptConfig, clients: int, seed: int) -> Iterator[AnyEngine]:
    """Open the engine of a backend, transformers or vllm, over a shape with random weights or a checkpoint.

    Stored KV is in memory. vLLM has no prefix cache, in which it would find prompts that are sent again.
    """
    if backend == "transformers":
        engine = opened(subject, "float32", seed)
        yield engine
        engine.close()
        return
    if backend != "vllm":
        raise UsageError(f"--backend is {backend!r}; choose transformers or vllm")
    shape, model = (subject, None) if subject in SHAPES else (None, subject)
    with open_vllm(config, shape, model, num_prompts=clients, memory_gib=8.0) as served:
        yield served


def stream_alone(engine: AnyEngine, prompt: Prompt, refine_ratio: float, answer_tokens: int) -> Single:
    """Stream one answer, and return its times."""
    start_s, cpu_start_s = perf_counter(), process_time()
    stream = engine.stream(prompt, refine_ratio=refine_ratio, max_tokens=answer_tokens)
    times_s = [start_s]
    first_cpu_s = 0.0
    for _ in stream:
        first_cpu_s = first_cpu_s or process_time() - cpu_start_s
        times_s.append(perf_counter())
    pauses = [later - earlier for earlier, later in pairwise(times_s[1:])]
    report = stream.result.report
    return Single(report.ttft_s, first_cpu_s, max(pauses), report.refine_s, process_time() - cpu_start_s)


class Together(NamedTuple):
    """Answers of several clients, each of which sends its next request after an answer. Rates per second."""

    requests_per_s: float
    requests_per_cpu_s: float
    num_refined: int
    num_requests: int
    longest_ttft_s: float


def answer_clients(
    engine: AnyEngine, prompts: Sequence[Prompt], num_clients: int, refine_ratio: float, answer_tokens: int
) -> Together:
    """Answer `prompts` for some clients at the same time, and return the rates."""

    def client(number: int) -> list[Generation]:
        return [
            engine.generate(prompt, refine_ratio=refine_ratio, max_tokens=answer_tokens)
            for prompt in prompts[number::num_clients]
        ]

    start_s, cpu_start_s = perf_counter(), process_time()
    with ThreadPoolExecutor(num_clients) as pool:
        answers = [answer for found in pool.map(client, range(num_clients)) for answer in found]
    reports = [answer.report for answer in answers]
    return Together(
        len(answers) / (perf_counter() - start_s),
        len(answers) / (process_time() - cpu_start_s),
        sum(report.refined_after is not None for report in reports),
        len(answers),
        max(report.ttft_s for report in reports),
    )


def measure_pauses(
    engine: AnyEngine,
    prompts: Sequence[Prompt],
    ratio: float,
    num_clients: int,
    answer_tokens: int,
    repeats: int,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Measure requests without refinement, and refined to `ratio`, in turns. Return medians, and medians of ratios.

    `num_refined` and `num_requests`: of the clients' requests that ask for refinement, in all rounds.
    """
    single: dict[float, list[Single]] = {0.0: [], ratio: []}
    together: dict[float, list[Together]] = {0.0: [], ratio: []}
    for each in single:
        stream_alone(engine, prompts[0], each, answer_tokens)  # warm-up
    for number in range(repeats):
        notify(f"round {number + 1} of {repeats}")
        order = list(single)[:: 1 if number % 2 else -1]
        for prompt in prompts[:num_clients]:
            for each in order:
                single[each].append(stream_alone(engine, prompt, each, answer_tokens))
        for each in order:
            together[each].append(answer_clients(engine, prompts, num_clients, each, answer_tokens))

    def ratios(runs: dict[float, Any], name: str) -> float:
        pairs = zip(runs[ratio], runs[0.0], strict=True)
        return float(median(getattr(mine, name) / getattr(other, name) for mine, other in pairs))

    return {
        "refine_ratio": ratio,
        "num_rounds": repeats,
        "alone": {str(each): _medians(found) for each, found in single.items()},
        "ttft_ratio": ratios(single, "ttft_s"),
        "ttft_cpu_ratio": ratios(single, "ttft_cpu_s"),
        "clients": num_clients,
        "together": {str(each): _medians(found) for each, found in together.items()},
        "num_refined": sum(each.num_refined for each in together[ratio]),
        "num_requests": sum(each.num_requests for each in together[ratio]),
        "throughput_ratio": ratios(together, "requests_per_s"),
        "throughput_cpu_ratio": ratios(together, "requests_per_cpu_s"),
    }


def _medians(samples: Sequence[Any]) -> dict[str, float]:
    return {name: median(getattr(sample, name) for sample in samples) for name in samples[0]._fields}


@app.command()
def pauses(
    subject: Annotated[
        str, typer.Option("--subject", help="A shape with random weights, or a checkpoint.")
    ] = "llama-50m",
    backend: Annotated[str, typer.Option("--backend", help="transformers or vllm.")] = "transformers",
    ratio: Annotated[float, typer.Option("--ratio", help="Refine ratio.")] = 0.2,
    num_chunks: int = 6,
    chunk_tokens: int = 256,
    question_tokens: int = 32,
    answer_tokens: int = 32,
    clients: Annotated[int, typer.Option("--clients", help="Clients that send requests at the same time.")] = 8,
    requests: Annotated[int, typer.Option("--requests", help="Requests of each client and round.")] = 4,
    repeats: int = 5,
    threads: int | None = None,
    seed: int = 0,
    out: OutOption = None,
) -> None:
    """Measure first-token times, pauses and throughput with refinement, compared with requests without it."""
    quiet_libraries()
    set_num_threads(threads)
    options = {"enable_prefix_caching": False} if backend == "vllm" else {}
    sizes = PromptConfig(
        num_chunks=num_chunks, chunk_tokens=chunk_tokens, question_tokens=question_tokens, dtype="float32",
        vllm_options=options,
    )  # fmt: skip
    with opened_with(backend, subject, sizes, clients, seed) as engine:
        vocabulary = vocab_size(engine)
        chunks, prompts = make_prompts(*sizes.prompt_shape, clients * requests, vocabulary, seed, 2 * num_chunks)
        for chunk in chunks:
            engine.precompute(chunk)
        found = measure_pauses(engine, prompts, ratio, clients, answer_tokens, repeats, print_notice)
    config = {
        "subject": Path(subject).name, "backend": backend, "num_chunks": num_chunks, "chunk_tokens": chunk_tokens,
        "question_tokens": question_tokens, "answer_tokens": answer_tokens, "requests": requests, "threads": threads,
        "seed": seed,
    }  # fmt: skip
    write_result({"command": "benchmarks.refinement pauses", "config": config, **found}, out)
    plain, refined = found["alone"]["0.0"], found["alone"][str(ratio)]
    print_notice(
        f"first token {plain['ttft_s'] * 1e3:.0f} ms, refined {refined['ttft_s'] * 1e3:.0f} ms, ratio "
        f"{found['ttft_ratio']:.3f} (CPU {found['ttft_cpu_ratio']:.3f}); longest pause "
        f"{plain['longest_pause_s'] * 1e3:.0f} and {refined['longest_pause_s'] * 1e3:.0f} ms"
    )
    print_notice(
        f"{clients} clients: throughput ratio {found['throughput_ratio']:.3f} (CPU "
        f"{found['throughput_cpu_ratio']:.3f}), {found['num_refined']} of {found['num_requests']} answers refined"
    )


if __name__ == "__main__":
    app()
