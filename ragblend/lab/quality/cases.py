"""A question with its gold answers and passages, and the part that it belongs to. Knows texts only."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple

SYSTEM = "You will read several passages and then answer a question about them. Answer with a few words only."
SELECTION_TENTHS = 3  # of the questions may choose


class QaCase(NamedTuple):
    """A question, and the passages that it is asked over.

    `order`: its chunks in a prompt are those nearest to the question, the nearest first ("score"), or the first ones
    ("document"), or the passages just as they are ("given")."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    kind: str = ""
    order: Literal["score", "document", "given"] = "given"
    system: str | None = SYSTEM


def get_dataset_split(question: str) -> str:
    """Whether a question may choose, or is reported: by a hash of its text."""
    digit = blake2b(question.encode(), digest_size=8).digest()[0] % 10
    return "selection" if digit < SELECTION_TENTHS else "reported"
