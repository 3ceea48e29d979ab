"""Conversations with `ragblend serve`: the time to the first token of each turn, by blend, prefix and full.

    python -m benchmarks.conversations --model models/smollm2 --server-python .venv-vllm/bin/python \\
        --out data/results/conversations.json

Three kinds of conversation of six turns over passages of MuSiQue: `same` has all chunks in the first
turn, and later turns ask about them; `new` has new chunks in every turn, `mixed` in every other turn. The chunks go to
the server's documents API first. A turn's prompt begins with the conversation so far, including the answers that the
same mode gave, as chat clients send it. Answers of different modes differ, so each has the same number of tokens
(`ANSWER_TOKENS`): the modes then compute prompts of the same length. The only parameter of a request is the mode. At
ratio 1.0 the answers are compared with those of mode `full`. Read `converse` first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from benchmarks.results import ModelOption, OutOption, ServerPython, write_result
from benchmarks.stock_clients import Questions, ingest, served
from ragblend.engine.vllm.client import sse_events
from ragblend.lab.quality.tasks import SYSTEM

NUM_TURNS = 6
KINDS = {"same": (0,), "new": tuple(range(NUM_TURNS)), "mixed": (0, 2, 4)}
"""The turns that bring chunks."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "blend": {"mode": "blend"},
    "prefix": {"mode": "prefix"},
    "full": {"mode": "full"},
    "blend at ratio 1.0": {"mode": "blend", "ratio": 1.0},
}
"""Parameters of a request, by the name of the way in which a conversation is answered."""
LIMIT = 1.1  # times the better one of prefix and full
ANSWER_TOKENS = 16
REPORTED = ("mode", "num_chunks", "num_chunk_hits", "num_prefix_tokens", "num_reused_tokens", "num_recomputed_tokens")


class Turn(NamedTuple):
    """A question, and the chunks that precede it in the same message."""

    chunks: tuple[str, ...]
    question: str

    @property
    def text(self) -> str:
        """Return the content of the user's message."""
        return "\n\n".join([*self.chunks, self.question])


def conversations(model: str, kind: str, count: int, num_chunks: int) -> Iterator[list[Turn]]:
    """Yield `count` conversations of `NUM_TURNS` turns, which have different questions and passages."""
    asked = Questions(model, count * NUM_TURNS, num_chunks).asked
    for number in range(count):
        yield [
            Turn(tuple(chunks) if turn in KINDS[kind] else (), question)
            for turn, (chunks, question) in enumerate(asked[number * NUM_TURNS : (number + 1) * NUM_TURNS])
        ]


def converse(url: str, turns: list[Turn], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hold a conversation, beginning with an empty prefix cache. Return a record of each turn."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    messages, found = [{"role": "system", "content": SYSTEM}], []
    for turn in turns:
        messages.append({"role": "user", "content": turn.text})
        body = {
            "model": "model",
            "messages": messages,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "min_tokens": ANSWER_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"ragblend": params},
        }
        record, answer = _stream(url, body)
        messages.append({"role": "assistant", "content": answer})
        found.append(record | {"answer": answer})
    return found


def _stream(url: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the time to the first token, the counts of the report, and the answer."""
    record: dict[str, Any] = {}
    pieces: list[str] = []
    start_s = perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for event in sse_events(response.iter_lines()):
            pieces += [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
            if "ttft_s" not in record and any(pieces):
                record["ttft_s"] = perf_counter() - start_s
            if usage := event.get("usage"):
                record["prompt_tokens"] = usage["prompt_tokens"]
            if report := (event.get("kv_transfer_params") or {}).get("ragblend"):
                record |= {name: report[name] for name in REPORTED}
    return record, "".join(pieces)


def measure(url: str, model: str, count: int, num_chunks: int) -> list[dict[str, Any]]:
    """Return a record per conversation and way; the ways take turns at each conversation."""
    held = {kind: list(conversations(model, kind, count, num_chunks)) for kind in KINDS}
    for kind, many in held.items():
        documents = [
            {"id": f"{kind}-{number}-{turn}", "chunks": each.chunks}
            for number, turns in enumerate(many)
            for turn, each in enumerate(turns)
            if each.chunks
        ]
        print(kind, ingest(url, documents), flush=True)
    for params in WAYS.values():
        converse(url, held["same"][0], params)  # warm-up
    found = []
    for kind, many in held.items():
        for number, turns in enumerate(many):
            for way, params in WAYS.items():
                records = converse(url, turns, params)
                found.append({"kind": kind, "conversation": number, "way": way, "turns": records})
                print(kind, number, way, [round(record["ttft_s"], 3) for record in records], flush=True)
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return per kind the median TTFT of each turn by way, blend's divided by the better other one's (the median of the
    conversations), and the number of equal answers at ratio 1.0.
    """
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        held = {way: [each["turns"] for each in found if (each["kind"], each["way"]) == (kind, way)] for way in WAYS}
        ttft_s = {way: [[turn["ttft_s"] for turn in turns] for turns in many] for way, many in held.items()}
        over = [
            [blend / min(prefix, full) for blend, prefix, full in zip(*turns, strict=True)]
            for turns in zip(ttft_s["blend"], ttft_s["prefix"], ttft_s["full"], strict=True)
        ]
        pairs = [
            (blended["answer"], full["answer"])
            for ours, theirs in zip(held["blend at ratio 1.0"], held["full"], strict=True)
            for blended, full in zip(ours, theirs, strict=True)
        ]
        kinds[kind] = {
            "median_ttft_s": {way: _medians(turns) for way, turns in ttft_s.items()},
            "blend_over_the_better": _medians(over),
            "turns_over_the_limit": sum(each > LIMIT for each in _medians(over)),
            "answers_at_ratio_one": f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)} equal full's",
        }
    return kinds


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column."""
    return [median(column) for column in zip(*rows, strict=True)]


def main(
    model: ModelOption,
    server_python: ServerPython,
    count: Annotated[int, typer.Option("--conversations", help="Conversations of each kind.")] = 5,
    num_chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks of a turn that brings chunks.")] = 2,
    out: OutOption = None,
) -> None:
    """Serve, ingest, converse, and write JSON."""
    with tempfile.TemporaryDirectory() as folder, served(server_python, model, Path(folder)) as url:
        found = measure(url, model, count, num_chunks)
    kinds = summary(found)
    print(json.dumps(kinds, indent=1))
    facts = {
        "command": "benchmarks.conversations",
        "model": Path(model).name,
        "conversations_of_each_kind": count,
        "num_chunks": num_chunks,
        "answer_tokens": ANSWER_TOKENS,
        "kinds": kinds,
        "conversations": found,
    }
    write_result(facts, out)


if __name__ == "__main__":
    typer.run(main)
