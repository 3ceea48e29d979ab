"""Retrieval of 40 facts: counts the questions for which a chunk of a right file is among the first six.

Each question lists the files that contain its fact. Chunks have at most 512 tokens, estimated as 1.3 per word or
punctuation mark. The embedder is the package's default: all-MiniLM-L6-v2 if the extra `demo` is installed. Read
`ask_questions` first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.documents.files import ChosenFile
from benchmarks.documents.reading import NAMED_ERRORS
from ragblend.chunker import split
from ragblend.cli.printing import print_notice
from ragblend.corpus.documents import read_documents
from ragblend.corpus.embedders import Embedder, default_embedder, embed_question

QUESTIONS = Path(__file__).parents[2] / "data" / "questions" / "documents_40.json"
TOP = 6
MAX_DISTRACTOR_BYTES = {"pdf": 60_000}
"""Largest distractor by kind. Distractors are files that answer no question; embedding all would take half an hour."""
MAX_OTHER_BYTES = 8_000  # largest distractor of the other kinds
_TOKEN = re.compile(r"\w+|[^\w\s]")


class Question(NamedTuple):
    """A question and the files that contain its fact. `place`: the part of the file, such as "table"."""

    question: str
    kind: str
    place: str
    files: tuple[str, ...]


def load_questions(path: Path = QUESTIONS) -> list[Question]:
    """Return the questions in a JSON file."""
    facts = json.loads(path.read_text(encoding="utf-8"))
    return [Question(each["question"], each["kind"], each["place"], tuple(each["files"])) for each in facts]


def count_tokens(text: str) -> int:
    """Estimate the number of tokens of a text without a tokenizer: 1.3 per word or punctuation mark.

    >>> count_tokens("Rent is due."), count_tokens("")
    (5, 0)
    """
    return round(1.3 * len(_TOKEN.findall(text)))


def ask_questions(
    files: Sequence[ChosenFile], questions: Sequence[Question] | None = None, embedder: Embedder | None = None
) -> dict[str, Any]:
    """Return the number of questions whose first `TOP` chunks include one of a right file, by kind, and the others."""
    names = {file.name for file in files}
    asked = [each for each in (questions or load_questions()) if names.intersection(each.files)]
    embedder = embedder or default_embedder()
    chosen = [file for file in files if _is_searched(file, {name for each in asked for name in each.files})]
    owners, texts = _chunks(chosen)
    print_notice(f"{len(asked)} questions over {len(texts)} chunks of {len(set(owners))} files")
    vectors = embedder.embed(texts)
    found = [_is_found(each, owners, vectors, embedder) for each in asked]
    kinds = dict.fromkeys(each.kind for each in asked)
    by_kind = {
        kind: {"found": sum(hit for hit, each in zip(found, asked, strict=True) if each.kind == kind),
               "asked": sum(each.kind == kind for each in asked)}
        for kind in kinds
    }  # fmt: skip
    print_notice(", ".join(f"{kind} {count['found']} of {count['asked']}" for kind, count in by_kind.items()))
    return {
        "embedder": embedder.name,
        "token_counter": "1.3 per word or mark",
        "num_files": len(chosen),
        "num_chunks": len(texts),
        "top": TOP,
        "found": sum(found),
        "asked": len(asked),
        "by_kind": by_kind,
        "missed": [each.question for hit, each in zip(found, asked, strict=True) if not hit],
    }


def _is_searched(file: ChosenFile, asked_about: set[str]) -> bool:
    limit = MAX_DISTRACTOR_BYTES.get(file.kind, MAX_OTHER_BYTES)
    return file.name in asked_about or file.path.stat().st_size <= limit


def _chunks(files: Sequence[ChosenFile]) -> tuple[list[str], list[str]]:
    """Return the texts of all chunks, and a list of equal length with their files' names. Skips unreadable files."""
    owners: list[str] = []
    texts: list[str] = []
    for file in files:
        try:
            documents = list(read_documents(str(file.path), file.path.read_bytes()).documents)
        except NAMED_ERRORS:
            continue
        for document in documents:
            chunks = split(document, count_tokens)
            owners += [file.name] * len(chunks)
            texts += [chunk.text for chunk in chunks]
    return owners, texts


def _is_found(question: Question, owners: Sequence[str], vectors: Any, embedder: Embedder) -> bool:
    scores = vectors @ embed_question(embedder, question.question)
    return any(owners[at] in question.files for at in np.argsort(-scores, kind="stable")[:TOP])
