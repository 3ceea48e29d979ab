"""Questions with gold answers and passages: from a file, the checkout, or the sample corpus.

A file is a JSON array or JSON lines of objects with

- `question`, `answers` (or `answer`) and `passages` or `ctxs`, texts or objects with `text`; or a single `text`, the
  passage with the answer, to which distractors from the other records are added (NQ-open);
- LongBench's `input`, `context` and `answers` (2WikiMQA, SAMSum, MultiNews): "Passage 1:" and the like begin passages;
  without an `input` the question asks for a summary of the passages in their order.

A hash of the question assigns it to the selection part or to the reported part. Read `load_cases` first.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ragblend
from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.corpus.embedders import Embedder, embed_question
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import CorruptError, NotFoundError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_text
from ragblend.lab.bench.common.configs import NAMED_DATASETS, QualityConfig
from ragblend.prompt.types import Prompt

SYSTEM = "You will read several passages and then answer a question about them. Answer with a few words only."
SELECTION_TENTHS = 3  # tenths of the questions that are for selection
SUMMARIZE = "Write a summary of all the passages."
NUM_DISTRACTORS = 9
_MAX_BYTES = 1 << 30  # of a file of questions
_PASSAGE = re.compile(r"^\s*Passage \d+:\s*$|^Passage \d+:", re.MULTILINE)


class QaCase(NamedTuple):
    """A question, and the passages from which the chunks of its prompt are chosen.

    `order`: how the chunks are chosen. "score" takes the chunks nearest to the question, nearest first; "document"
    takes the first chunks of the passages; "given" takes each passage as one chunk.
    """

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    kind: str = ""
    order: Literal["score", "document", "given"] = "given"
    system: str | None = SYSTEM


def get_dataset_split(question: str) -> str:
    """Return the part of the data that a question belongs to: "selection" or "reported", by the hash of its text."""
    digit = blake2b(question.encode(), digest_size=8).digest()[0] % 10
    return "selection" if digit < SELECTION_TENTHS else "reported"


def load_cases(config: QualityConfig) -> list[QaCase]:
    """Return the first `num_questions` cases of `config.part`. Raises the errors of `find_data` and `read_cases`."""
    if config.data == "demo":
        return demo_cases(config)
    every = read_cases(find_data(config.data))
    return [case for case in every if _is_in_split(case.question, config.part)][: config.num_questions]


def find_data(name: str) -> Path:
    """Return the path of the questions `name`: a file, or a named data set in data/questions.

    Only a checkout of ragblend has the data sets. Elsewhere, their names raise NotFoundError."""
    if name not in NAMED_DATASETS:
        return expand_user_path(name, "--data")
    place = Path("data/questions") / NAMED_DATASETS[name]
    for root in (Path(), Path(ragblend.__file__).parents[1]):
        if (root / place).is_file():
            return root / place
    raise NotFoundError(
        f"no {place} here: data set {name!r} comes with the checkout of ragblend, not with its wheel; "
        f"run in a checkout, or give the file's place: --data PATH/{NAMED_DATASETS[name]} --split reported"
    )


def read_cases(path: Path) -> list[QaCase]:
    """Return the questions and passages of a JSON or JSONL file, in its order.

    Raises CorruptError if the file contains something else, UsageError if it contains no question.
    """
    text = read_text(path, "--data", f"give a JSON or JSONL file, or {', '.join(NAMED_DATASETS)}, demo", _MAX_BYTES)
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except ValueError as error:
        raise CorruptError(f"{path} is neither a JSON array nor JSON lines: {error}") from error
    if not records:
        raise UsageError(
            f"--data is {path}, which holds no question; write objects with question, answers and passages"
        )
    cases = []
    for number, record in enumerate(records, start=1):
        try:
            cases.append(_case_of(record, records))
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise CorruptError(
                f"{path}, record {number}, is no question with answers and passages ({error!r}); "
                "wanted: question, answers, passages; or LongBench's input, context, answers"
            ) from error
    return cases


def _case_of(record: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> QaCase:
    question = record["question"] if "question" in record else record["input"]
    answers = record["answers"] if "answers" in record else record["answer"]
    answers = (answers,) if isinstance(answers, str) else tuple(answers)
    next(answer for answer in answers if answer.strip())  # raises StopIteration if no answer has text
    if "context" in record:
        passages = tuple(text for piece in _PASSAGE.split(record["context"]) if (text := piece.strip()))
    elif "text" in record:
        passages = _with_distractors(record, answers, others)
    else:
        given = record["passages"] if "passages" in record else record["ctxs"]
        passages = tuple(each if isinstance(each, str) else each["text"] for each in given)
    kind = str(record.get("kind", record.get("dataset", "")))
    if not question.strip():
        return QaCase(SUMMARIZE, answers, passages, kind, "document", "You will read several passages.")
    return QaCase(question, answers, passages, kind, "score")


def _with_distractors(
    record: Mapping[str, Any], answers: Sequence[str], others: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Return the record's passage among passages of other records without the answers, the same at every call."""
    draw = random.Random(record["question"])
    texts = [each["text"] for each in draw.sample(others, len(others)) if each is not record]
    lacking = (text for text in texts if not any(answer.lower() in text.lower() for answer in answers))
    passages = [record["text"], *islice(lacking, NUM_DISTRACTORS)]
    draw.shuffle(passages)
    return tuple(passages)


def demo_cases(config: QualityConfig) -> list[QaCase]:
    """Return questions about the sample corpus, each with `config.num_chunks` paragraphs as passages.

    Some of the passages answer the question, the others are random. The paragraphs of the corpus form pairs: the second
    continues the first. A case always has both paragraphs of a pair, in order. The kinds of questions alternate.
    """
    corpus = sample_corpus()
    chunks = [chunk for record in corpus.records for chunk in record.chunks]
    made: dict[str, list[QaCase]] = {}
    for asked in corpus.questions:
        pairs = sorted({place // 2 for place in corpus.gold_chunks(asked)})
        others = [pair for pair in range(len(chunks) // 2) if pair not in pairs]
        if not pairs or 2 * len(pairs) > config.num_chunks or not _is_in_split(asked.text, config.part):
            continue
        draw = random.Random(asked.text)
        pairs += draw.sample(others, config.num_chunks // 2 - len(pairs))
        draw.shuffle(pairs)
        texts = tuple(chunks[place] for pair in pairs for place in (2 * pair, 2 * pair + 1))
        made.setdefault(asked.kind, []).append(QaCase(asked.text, (asked.answer,), texts, asked.kind, system=None))
    turns = (case for row in zip_longest(*made.values()) for case in row if case is not None)
    return list(islice(turns, config.num_questions))


def _is_in_split(question: str, part: str | None) -> bool:
    return part in ("all", get_dataset_split(question))


def _chunks_of(case: QaCase, engine: TransformersEngine, config: QualityConfig) -> list[str]:
    if case.order == "given":
        return list(case.passages)
    count, size = engine.renderer.count_tokens, config.chunk_tokens
    documents = [Document(text, str(number)) for number, text in enumerate(case.passages)]
    return [chunk.text for document in documents for chunk in split(document, count, size)]


def build_prompt(case: QaCase, engine: TransformersEngine, embedder: Embedder, config: QualityConfig) -> Prompt:
    """Return the prompt of the case, as `ragblend ask` would build it."""
    chunks = _chunks_of(case, engine, config)
    if case.order == "score":
        nearness = embedder.embed(chunks) @ embed_question(embedder, case.question)
        chunks = [chunks[place] for place in (-nearness).argsort()]
    return Prompt(list(chunks[: config.num_chunks]), case.question, case.system)
