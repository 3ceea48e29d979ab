"""Does retrieval find a fact in the second half of a chunk that is longer than the embedder reads?

    python benchmarks/embedding_windows.py --questions nq_open_oracle_400.json \
        --output data/results/embedding-windows.json
    python benchmarks/embedding_windows.py --questions musique_s_100.json --rounds 1 --two

Real questions, each with the passage that answers it ("Lost in the Middle", Liu et al. 2023: NQ-open, oracle file), or
MuSiQue's with ten passages each. The passages are laid end to end in random order and cut into chunks of twice what the
embedder reads. A question is found when the chunk in which the first passage with its answer says it is among the k
nearest; reported apart for answers in the part that a cut-off embedding sees and for those behind it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragblend.bench.common.hardware import hardware_card
from ragblend.corpus.embedders import FloatArray, MiniLMEmbedder, _cut, _Window

KS = (1, 3, 6)


class Question(NamedTuple):
    """A question, the passages of its record, and what answers it."""

    text: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]


class Case(NamedTuple):
    """A question, the chunk that answers it and how far into that chunk the answer begins, in the embedder's tokens."""

    question: str
    chunk: int
    at_token: int


def read_questions(path: Path) -> list[Question]:
    """Questions of either file whose first passage with the answer says it word for word."""
    found = []
    for record in json.loads(path.read_text()):
        passages = [record["text"]] if "text" in record else [each["text"] for each in record["ctxs"]]
        found.append(Question(record["question"], tuple(passages), tuple(record["answers"])))
    return found


def lay_out(
    questions: Sequence[Question], embedder: MiniLMEmbedder, tokens: int, seed: int
) -> tuple[list[str], list[Case]]:
    """Chunks of `tokens` of all passages in random order, and where each question's answer stands in them."""
    passages = list(dict.fromkeys(text for question in questions for text in question.passages))
    random.Random(seed).shuffle(passages)
    whole = "\n\n".join(passages)
    spans = embedder._token_spans(whole)
    starts = range(0, len(spans), tokens)
    bounds = [(spans[start][0], spans[min(start + tokens, len(spans)) - 1][1]) for start in starts]
    chunks = [whole[a:b] for a, b in bounds]
    cases, first = [], np.array([start for start, _ in spans])
    for question in questions:
        for passage in question.passages:
            inside = next((m.start() for a in question.answers if (m := re.search(re.escape(a), passage, re.I))), None)
            if inside is None:
                continue
            place = whole.index(passage) + inside
            token = int(np.searchsorted(first, place, side="right")) - 1
            cases.append(Case(question.text, token // tokens, token % tokens))
            break
    return chunks, cases


# --- ways to make one vector of a long text ---

Way = Callable[[MiniLMEmbedder, Sequence[str]], FloatArray]


def beginning(embedder: MiniLMEmbedder, texts: Sequence[str]) -> FloatArray:
    """What sentence-transformers does by itself: the rest is cut off."""
    return embedder._encode(embedder._model.encode_document, list(texts))


def pooled(cut: Callable[[str, Sequence[tuple[int, int]], int], list[_Window]], weighted: bool = True) -> Way:
    """The mean of the windows' vectors, by their tokens or all alike."""

    def embed(embedder: MiniLMEmbedder, texts: Sequence[str]) -> FloatArray:
        rows = []
        for text in texts:
            windows = cut(text, embedder._token_spans(text), embedder.max_tokens - embedder._num_extra_tokens)
            vectors = embedder._encode(embedder._model.encode_document, [window.text for window in windows])
            weights = [window.num_tokens if weighted else 1 for window in windows]
            row = np.average(vectors, axis=0, weights=weights)
            rows.append(row / np.linalg.norm(row))
        return np.array(rows, np.float32)

    return embed


def full_windows(text: str, spans: Sequence[tuple[int, int]], room: int, step: int | None = None) -> list[_Window]:
    """Windows of `room` tokens, the last one shorter; `step` below `room` makes them overlap."""
    shared = room - (step or room)
    starts = [start for start in range(0, len(spans), step or room) if start == 0 or start + shared < len(spans)]
    ends = [min(start + room, len(spans)) for start in starts]
    return [_Window(text[spans[a][0] : spans[b - 1][1]], b - a) for a, b in zip(starts, ends, strict=True)]


def overlapping(text: str, spans: Sequence[tuple[int, int]], room: int) -> list[_Window]:
    """Windows that overlap by half."""
    return full_windows(text, spans, room, room // 2)


WAYS: dict[str, Way] = {
    "beginning only (version 1)": beginning,
    "equal windows, by tokens (version 2)": lambda embedder, texts: embedder.embed(texts),
    "equal windows, cut as version 2, all alike": pooled(_cut, weighted=False),
    "full windows and a rest, by tokens": pooled(full_windows),
    "full windows and a rest, all alike": pooled(full_windows, weighted=False),
    "windows that overlap by half": pooled(overlapping),
}


def recall(questions: FloatArray, chunks: FloatArray, cases: Sequence[Case], k: int) -> float:
    """Share of `cases` whose chunk is among the k nearest."""
    nearest = np.argsort(-questions @ chunks.T, axis=1)[:, :k]  # [num_cases, k]
    return float(np.mean([case.chunk in row for case, row in zip(cases, nearest, strict=True)])) if cases else 0.0


def main() -> None:
    """Print a table per way and one JSON line; `--output` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, nargs="+")
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk, in the embedder's tokens")
    parser.add_argument("--rounds", type=int, default=5, help="random orders of the passages")
    parser.add_argument("--two", action="store_true", help="only the beginning, and what the embedder does now")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    embedder = MiniLMEmbedder()
    limit = embedder.max_tokens
    runs = []
    for path in arguments.questions:
        questions = read_questions(path)
        found: dict[tuple[str, str, int], list[float]] = {}
        counts: list[tuple[int, int, int]] = []
        for seed in range(arguments.rounds):
            chunks, cases = lay_out(questions, embedder, arguments.tokens, seed)
            asked = np.array([embedder.embed_query(case.question) for case in cases])
            seen = np.array([case.at_token < limit for case in cases])
            counts.append((len(chunks), int(seen.sum()), int((~seen).sum())))
            for way, embed in list(WAYS.items())[: 2 if arguments.two else None]:
                vectors = embed(embedder, chunks)
                for half, mask in (("first half", seen), ("second half", ~seen), ("all", np.ones_like(seen))):
                    part = [case for case, inside in zip(cases, mask, strict=True) if inside]
                    for k in KS:
                        found.setdefault((way, half, k), []).append(recall(asked[mask], vectors, part, k))
        print(f"{path.name}: {counts[0][0]} chunks of {arguments.tokens} tokens, {arguments.rounds} orders of passages")
        columns = [(half, k) for half in ("second half", "first half") for k in KS]
        print(f"{'':<46}" + "".join(f"{f'{half} @{k}':>17}" for half, k in columns))
        for way in WAYS if not arguments.two else list(WAYS)[:2]:
            line = (np.mean(found[way, half, k]) for half, k in columns)
            print(f"{way:<46}" + "".join(f"{value:>17.3f}" for value in line))
        runs += [
            {"questions": path.name, "way": way, "where": half, "k": k, "recall": round(float(np.mean(values)), 4),
             "recall_by_order": [round(value, 4) for value in values],
             "num_chunks_first_second": counts}
            for (way, half, k), values in found.items()
        ]  # fmt: skip
    facts = {"schema_version": 1, "command": "benchmarks/embedding_windows.py", "hardware": hardware_card("cpu"),
             "embedder": embedder.name, "chunk_tokens": arguments.tokens, "runs": runs}  # fmt: skip
    line = json.dumps(facts)
    print(line)
    if arguments.output is not None:
        arguments.output.write_text(line + "\n")


if __name__ == "__main__":
    main()
