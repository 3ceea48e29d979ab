"""Conversations over stored chunks: the time to the first token of each turn, by blend, prefix and full, in one vLLM.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.conversations --model models/smollm2 \
        --out data/results/conversations.json

Three kinds of conversation of six turns over passages of MuSiQue: `same` has all chunks in the first
turn, and later turns ask about them; `new` has new chunks in every turn, `mixed` in every other turn. A turn's prompt
begins with the conversation so far, including the answers that the same mode gave, as chat clients send it. The only
parameter of a request is the mode: vLLM's scheduler finds the chunks in the token ids. At ratio 1.0 the answers are
compared with those of mode `full`. Read `converse` first.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ragblend import load_engine
from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.engine.vllm.base_engine import VllmRequest
from ragblend.engine.vllm.params import BlendParams
from ragblend.lab.bench.common.configs import QualityConfig
from ragblend.lab.bench.ttft_vllm import vllm_hardware_card
from ragblend.lab.quality.data import SYSTEM, load_cases
from ragblend.options import GenerationOptions
from ragblend.prompt.types import Message, Prompt

TURNS = 6
KINDS = {"same": (0,), "new": tuple(range(TURNS)), "mixed": (0, 2, 4)}
"""The turns that bring chunks."""
LIMIT = 1.1  # times the better one of prefix and full


class Way(NamedTuple):
    """How the requests of a conversation are answered."""

    name: str
    params: BlendParams


WAYS = (
    Way("blend", BlendParams("blend")),
    Way("prefix", BlendParams("prefix")),
    Way("full", BlendParams("full")),
    Way("blend at ratio 1.0", BlendParams("blend", ratio=1.0)),
)


class Turn(NamedTuple):
    """A question, and the chunks that precede it in the same message."""

    chunks: tuple[str, ...]
    question: str

    @property
    def text(self) -> str:
        """Return the content of the user's message."""
        return "\n\n".join([*self.chunks, self.question])


def conversations(config: QualityConfig, engine: Any, num_chunks: int, kind: str, count: int) -> Iterator[list[Turn]]:
    """Yield conversations of `TURNS` turns; each has questions and passages that no other has."""
    cases = load_cases(config)
    for number in range(count):
        turns = []
        for turn, case in enumerate(cases[number * TURNS : (number + 1) * TURNS]):
            passages = case.passages[: num_chunks if turn in KINDS[kind] else 0]
            texts = (
                split(Document(text), engine.renderer.count_tokens, config.chunk_tokens)[0].text for text in passages
            )
            turns.append(Turn(tuple(texts), case.question))
        yield turns


def converse(engine: Any, turns: list[Turn], way: Way, answer_tokens: int) -> list[dict[str, Any]]:
    """Hold a conversation, beginning with an empty prefix cache. Return a record of each turn."""
    engine.reset_prefix_cache()
    messages, found = [Message("system", SYSTEM)], []
    for turn in turns:
        messages.append(Message("user", turn.text))
        ids = engine.renderer.render(Prompt.from_messages(messages))
        request = VllmRequest(ids, way.params, GenerationOptions(max_tokens=answer_tokens))
        start_s, ttft_s, report = perf_counter(), None, None
        answer: list[int] = []
        with closing(engine.run_request(request)) as deltas:
            for delta in deltas:
                if delta.token_ids and ttft_s is None:
                    ttft_s = perf_counter() - start_s
                answer += [token for token in delta.token_ids if token not in engine.stop_ids]
                report = delta.report or report
        text = engine.renderer.decode(answer).strip()
        messages.append(Message("assistant", text))
        record = {"ttft_s": ttft_s, "prompt_tokens": len(ids), "answer": text}
        if report is not None:
            names = ("mode", "num_chunks", "num_chunk_hits", "num_prefix_tokens", "num_reused_tokens")
            record |= {name: getattr(report, name) for name in (*names, "num_recomputed_tokens")}
        found.append(record)
    return found


def measure(engine: Any, config: QualityConfig, num_chunks: int, count: int) -> list[dict[str, Any]]:
    """Return a record per conversation and way; the ways take turns at each conversation."""
    found = []
    converse(engine, next(conversations(config, engine, num_chunks, "same", 1)), WAYS[0], config.answer_tokens)  # warm
    for kind in KINDS:
        for number, turns in enumerate(conversations(config, engine, num_chunks, kind, count)):
            for chunk in dict.fromkeys(chunk for turn in turns for chunk in turn.chunks):
                engine.precompute(chunk)
            for way in WAYS:
                held = converse(engine, turns, way, config.answer_tokens)
                found.append({"kind": kind, "conversation": number, "way": way.name, "turns": held})
                print(kind, number, way.name, [round(turn["ttft_s"], 3) for turn in held], flush=True)
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return per kind the mean TTFT of each turn by way, blend's divided by the better other one's, and the number of
    equal answers at ratio 1.0.
    """
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        held = {
            way.name: [each["turns"] for each in found if (each["kind"], each["way"]) == (kind, way.name)]
            for way in WAYS
        }
        means = {
            way: [sum(turns[turn]["ttft_s"] for turns in many) / len(many) for turn in range(TURNS)]
            for way, many in held.items()
        }
        over = [
            blend / min(others) for blend, *others in zip(means["blend"], means["prefix"], means["full"], strict=True)
        ]
        pairs = [
            (mine["answer"], full["answer"])
            for ours, theirs in zip(held["blend at ratio 1.0"], held["full"], strict=True)
            for mine, full in zip(ours, theirs, strict=True)
        ]
        kinds[kind] = {
            "mean_ttft_s": means,
            "blend_over_the_better": over,
            "turns_over_the_limit": sum(each > LIMIT for each in over),
            "answers_at_ratio_one": f"{sum(mine == full for mine, full in pairs)} of {len(pairs)} equal full's",
        }
    return kinds


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--conversations", type=int, default=3, help="Of each kind.")
    parser.add_argument("--num-chunks", type=int, default=2, help="Of a turn that brings some.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    config = QualityConfig(model=given.model, data="musique", part="all", num_questions=given.conversations * TURNS)
    serving = {"max_model_len": 8192, "kv_cache_memory_bytes": 2 << 30}
    options: dict[str, Any] = {"dtype": "float32", "system": SYSTEM, "on_miss": "inline"}
    with (
        tempfile.TemporaryDirectory() as folder,
        load_engine(given.model, Path(folder) / "kv", backend="vllm", vllm_options=serving, **options) as engine,
    ):
        found = measure(engine, config, given.num_chunks, given.conversations)
        hardware = vllm_hardware_card()
    facts = {
        "model": Path(given.model).name,
        "conversations_of_each_kind": given.conversations,
        "num_chunks": given.num_chunks,
        "hardware": hardware,
        "kinds": summary(found),
        "conversations": found,
    }
    print(json.dumps(facts["kinds"], indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
