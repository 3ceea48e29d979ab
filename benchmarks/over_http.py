"""Ingestion time and closeness to full prefill of a server, compared with the local engine on the same documents.

    python -m benchmarks.over_http --model models/smollm2 --server-python .venv-vllm/bin/python \\
        --out data/results/over-http.json

The passages of MuSiQue questions are ingested by `ragblend serve`, through its documents API, and by the transformers
engine in this process. Both use their defaults. They take turns after every few documents, so that other load on the
machine affects both. CPU seconds are comparable even on a busy machine.

Each question is then asked over its passages, on both sides, in the default mode and in mode full. Closeness is the
Kullback-Leibler divergence of the first token's distribution from full prefill's, in nats, over the whole vocabulary:
the server is started with `--max-logprobs -1`, and its log-probabilities come through the OpenAI API. Read
`measure_closeness` first.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Annotated, Any

import httpx
import torch
import typer
from torch import Tensor

from benchmarks.results import ModelOption, OutOption, ServerPython, write_result
from benchmarks.stock_clients import TEMPLATE, Questions, ingest, served
from ragblend import Prompt, load_engine
from ragblend.engine.fusion.plan import first_token_kl
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import RagblendError
from ragblend.options import Mode
from ragblend.precompute import precompute_documents

_SESSIONS: set[int] = set()  # session ids of the processes that this one has started
_NAMED_ID = "token_id:"  # prefix of vLLM's tokens with `return_tokens_as_token_ids`


def measure_ingestion(
    url: str, engine: TransformersEngine, documents: Sequence[dict[str, Any]], num_together: int
) -> list[dict[str, Any]]:
    """Return a record for each batch of documents: the seconds, CPU seconds and new entries of both sides."""
    found = []
    for number, start in enumerate(range(0, len(documents), num_together)):
        batch = documents[start : start + num_together]
        record: dict[str, Any] = {"num_documents": len(batch)}
        for side in ("served", "local") if number % 2 else ("local", "served"):
            start_s, start_cpu_s = perf_counter(), _cpu_s(side)
            if side == "served":
                num_new = ingest(url, batch)["num_new_kv"]
            else:
                texts = [(document["id"], text) for document in batch for text in document["chunks"]]
                report = precompute_documents(
                    [text for _, text in texts],
                    engine,
                    ids=[name for name, _ in texts],
                    collection="musique",
                )
                num_new = report.num_new_kv
            record[f"{side}_s"], record[f"{side}_entries"] = perf_counter() - start_s, num_new
            record[f"{side}_cpu_s"] = _cpu_s(side) - start_cpu_s
        found.append(record)
        print(record, flush=True)
    return found


def _cpu_s(side: str) -> float:
    """Return the CPU seconds that this process has used, or the server's processes, which are a separate session."""
    if side == "local":
        return process_time()
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            # state ppid pgrp session ... utime stime
            fields = path.read_text().rpartition(")")[2].split()
            session, parent = int(fields[3]), int(fields[1])
            if session in _SESSIONS or (parent == os.getpid() and session != os.getsid(0)):
                _SESSIONS.add(session)
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_closeness(
    url: str, engine: TransformersEngine, questions: Questions, max_questions: int
) -> list[dict[str, Any]]:
    """Return a record for each question: the divergence from full prefill on both sides, and their hits."""
    found = []
    for chunks, question in questions.asked[:max_questions]:
        text = TEMPLATE.format(context="\n\n".join(chunks), question=question)
        record: dict[str, Any] = {"question": question}
        for side in ("served", "local"):
            logprobs, hits = {}, 0
            for mode in ("blend", "full"):
                if side == "served":
                    logprobs[mode], report = _ask_server(url, text, mode, engine.layers.config.vocab_size)
                    hits = max(hits, report["num_chunk_hits"])
                else:
                    prompt = Prompt.from_messages([("user", text)])
                    prefilled = engine.prefill(engine.request(prompt, mode=mode, max_tokens=1))
                    logprobs[mode] = prefilled.logits.double().log_softmax(-1)
                    hits = max(hits, prefilled.report.num_chunk_hits)
            record[side] = {
                "kl": first_token_kl(logprobs["full"], logprobs["blend"]),
                "is_first_token_equal": int(logprobs["full"].argmax()) == int(logprobs["blend"].argmax()),
                "hits": hits,
            }
            record[f"{side}_full"] = logprobs["full"]
        # Difference of the two engines without reuse, in nats.
        full, other = record.pop("local_full"), record.pop("served_full")
        record["full_kl"] = first_token_kl(full, other)
        found.append(record)
        print(len(found), record, flush=True)
    return found


def _ask_server(url: str, text: str, mode: Mode, vocab_size: int) -> tuple[Tensor, dict[str, Any]]:
    """Return the log-probabilities [vocabulary] of the first token, and the report."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": -1,
        "return_tokens_as_token_ids": True,
        **({"kv_transfer_params": {"ragblend": {"mode": "full"}}} if mode == "full" else {}),
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    (token,) = answer["choices"][0]["logprobs"]["content"]
    logprobs = torch.full((vocab_size,), -torch.inf, dtype=torch.float64)
    for each in token["top_logprobs"]:
        logprobs[int(each["token"].removeprefix(_NAMED_ID))] = each["logprob"]
    if not logprobs.isfinite().all():
        raise RagblendError(f"the server returned {int(logprobs.isfinite().sum())} of {vocab_size} log-probabilities")
    return logprobs.log_softmax(-1), answer["kv_transfer_params"]["ragblend"]


def main(
    model: ModelOption,
    server_python: ServerPython,
    num_questions: Annotated[int, typer.Option("--questions", help="Number of MuSiQue questions.")] = 40,
    num_chunks: Annotated[int, typer.Option("--num-chunks", help="Passages per question.")] = 3,
    num_together: Annotated[int, typer.Option("--num-together", help="Documents per turn of a side.")] = 4,
    out: OutOption = None,
) -> None:
    """Measure ingestion and closeness of a server and of the local engine, and write JSON."""
    torch.set_num_threads(1)
    questions = Questions(model, num_questions, num_chunks)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with (
            served(server_python, model, home, "--max-logprobs", "-1") as url,
            load_engine(model, home / "local", dtype="float32", on_miss="inline") as engine,
        ):
            assert isinstance(engine, TransformersEngine)
            warm, *documents = questions.documents
            measure_ingestion(url, engine, [warm], 1)
            ingestion = measure_ingestion(url, engine, documents, num_together)
            asked = measure_closeness(url, engine, questions, num_questions)
    seconds = {side: sum(record[f"{side}_s"] for record in ingestion) for side in ("served", "local")}
    cpu_s = {side: sum(record[f"{side}_cpu_s"] for record in ingestion) for side in ("served", "local")}
    mean_kl = {side: mean(record[side]["kl"] for record in asked) for side in ("served", "local")}
    facts = {
        "command": "benchmarks.over_http",
        "model": Path(model).name,
        "num_questions": len(asked),
        "num_chunks": num_chunks,
        "ingestion_s": seconds,
        "ingestion_ratio": seconds["served"] / seconds["local"],
        "ingestion_median_ratio": median(record["served_s"] / record["local_s"] for record in ingestion),
        "ingestion_cpu_ratio": cpu_s["served"] / cpu_s["local"],
        "mean_kl": mean_kl,
        "kl_difference": mean_kl["served"] - mean_kl["local"],
        "largest_kl_difference": max(abs(record["served"]["kl"] - record["local"]["kl"]) for record in asked),
        "equal_hits": sum(record["served"]["hits"] == record["local"]["hits"] for record in asked),
        "ingestion": ingestion,
        "questions": asked,
    }
    print(json.dumps({name: value for name, value in facts.items() if name not in ("ingestion", "questions")}))
    write_result(facts, out)


if __name__ == "__main__":
    typer.run(main)
