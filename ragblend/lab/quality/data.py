"""Cases of a study, and their prompts: from a file, the checkout, or the sample corpus.

A hash of the question assigns it to the selection part or to the reported part. `records` reads files. Read
`load_cases` first.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from itertools import islice, zip_longest
from pathlib import Path

import ragblend
from ragblend.chunker import split
from ragblend.corpus.documents import Document
from ragblend.corpus.embedders import Embedder, embed_question
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import NotFoundError
from ragblend.files.places import expand_user_path
from ragblend.lab.bench.common.configs import NAMED_DATASETS, QualityConfig
from ragblend.lab.quality.records import read_cases
from ragblend.lab.quality.tasks import QaCase
from ragblend.prompt.types import Prompt

SELECTION_TENTHS = 3  # tenths of the questions that are for selection


def get_dataset_split(question: str) -> str:
    """Return the part of the data that a question belongs to: "selection" or "reported", by the hash of its text."""
    digit = blake2b(question.encode(), digest_size=8).digest()[0] % 10
    return "selection" if digit < SELECTION_TENTHS else "reported"


def load_cases(config: QualityConfig) -> list[QaCase]:
    """Return the first `num_questions` cases of `config.part`. Raises the errors of `find_data` and `read_cases`."""
    if config.data == "demo":
        return demo_cases(config)
    every = read_cases(find_data(config.data))
    return [case for case in every if _is_in_split(case, config.part)][: config.num_questions]


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
        if not pairs or 2 * len(pairs) > config.num_chunks or config.part not in ("all", get_dataset_split(asked.text)):
            continue
        draw = random.Random(asked.text)
        pairs += draw.sample(others, config.num_chunks // 2 - len(pairs))
        draw.shuffle(pairs)
        texts = tuple(chunks[place] for pair in pairs for place in (2 * pair, 2 * pair + 1))
        made.setdefault(asked.kind, []).append(QaCase(asked.text, (asked.answer,), texts, asked.kind, system=None))
    turns = (case for row in zip_longest(*made.values()) for case in row if case is not None)
    return list(islice(turns, config.num_questions))


def _is_in_split(case: QaCase, part: str | None) -> bool:
    # MultiNews has summaries without a question.
    return part in ("all", get_dataset_split(case.question or case.passages[0]))


def _chunks_of(case: QaCase, engine: TransformersEngine, config: QualityConfig) -> list[str]:
    if case.order == "given":
        return list(case.passages)
    count, size = engine.renderer.count_tokens, config.chunk_tokens
    documents = [Document(text, str(number)) for number, text in enumerate(case.passages)]
    return [chunk.text for document in documents for chunk in split(document, count, size)]


def build_prompt(case: QaCase, engine: TransformersEngine, embedder: Embedder, config: QualityConfig) -> Prompt:
    """Return the prompt of the case, over chunks as `ragblend ask` would choose them, or over its passages."""
    chunks = _chunks_of(case, engine, config)
    if case.order == "score":
        nearness = embedder.embed(chunks) @ embed_question(embedder, case.question)
        chunks = [chunks[place] for place in (-nearness).argsort()]
    return case.prompt(chunks[: config.num_chunks])
