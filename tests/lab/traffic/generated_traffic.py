"""Traffic of known shares: RAG over documents by Zipf's law, in sessions or one question at a time, and agents.

`Generated` yields OpenAI bodies and counts which tokens were sent before: in the same beginning, at another
place, or never. It counts by segments (a system text, a chunk, a question), not by tokens or hashes, so that it is
independent of the analysis that it judges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ragblend.lab.traffic.logs import turn_header
from ragblend.lab.traffic.passages import BLOCK

Count = Callable[[str], int]

SYLLABLES = [first + vowel for first in "bdfgklmnprst" for vowel in "aeo"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked. Sizes are in words of one token each by the estimate; `system_words` begin every prompt."""

    num_sessions: int = 50
    turns: int = 1  # questions of one session; the conversation is sent again with each
    chunks_per_turn: int = 4
    num_documents: int = 200
    chunk_words: int = 120
    edit_every: int = 0  # number of requests after which a chunk of a document is rewritten; 0: never
    system_words: int = 60
    question_words: int = 24
    answer_words: int = 60


KINDS: dict[str, Traffic] = {
    "sessions": Traffic(num_sessions=40, turns=6, chunks_per_turn=2, edit_every=50),
    "questions": Traffic(num_sessions=240, edit_every=50),
    "agents": Traffic(
        num_sessions=16, turns=14, chunks_per_turn=0, chunk_words=600, system_words=600, question_words=250,
        answer_words=120, num_documents=20,
    ),
}  # fmt: skip
"""RAG in conversations, RAG one question at a time, and agents: long runs whose turns are nearly all new text. Each
fifth turn of an agent reads one chunk that others read, too."""


class Generated:
    """Request bodies of `traffic`, made in order. count: function that returns the number of tokens of a text.

    counts: tokens of the bodies taken so far that were in the prefix that was sent before (prefix), that were sent
    before at another place (elsewhere), and that were new (new).
    """

    def __init__(self, traffic: Traffic, count: Count) -> None:
        self.counts = {"prefix": 0, "elsewhere": 0, "new": 0}
        self._traffic, self._count = traffic, count
        self._tree: dict[str, Any] = {}  # beginnings of the prompts that were sent, by segments
        self._sent: set[str] = set()  # their chunks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        world = _World(self._traffic)
        for number, turns in enumerate(_conversations(self._traffic, world), start=1):
            self._enter([segment for turn in turns for segment in _segments(turn)])
            if self._traffic.edit_every and number % self._traffic.edit_every == 0:
                world.edit()
            yield {"model": "generated", "messages": [_message(turn) for turn in turns]}

    @property
    def num_tokens(self) -> int:
        return sum(self.counts.values())

    @property
    def shares(self) -> dict[str, float]:
        """Return the counts as shares of all tokens."""
        return {name: count / max(1, self.num_tokens) for name, count in self.counts.items()}

    def _enter(self, prompt: list[tuple[str, bool]]) -> None:
        """Count one prompt, then add it to what was sent."""
        sizes = [self._count(text) for text, _ in prompt]
        total = sum(sizes)
        prefix = min(self._known(prompt, sizes), total - 1) // BLOCK * BLOCK
        place = elsewhere = 0
        for (text, _), size in zip(prompt, sizes, strict=True):
            rest = place + size - max(place, prefix)
            if text in self._sent and rest > 0 and (place >= prefix or rest >= BLOCK):
                elsewhere += rest  # less than a block of what begins in the prefix is the rest of the prefix
            place += size
        self.counts["prefix"] += prefix
        self.counts["elsewhere"] += elsewhere
        self.counts["new"] += total - prefix - elsewhere
        self._sent |= {text for text, is_chunk in prompt if is_chunk}
        branch = self._tree
        for text, _ in prompt:
            branch = branch.setdefault(text, {})

    def _known(self, prompt: list[tuple[str, bool]], sizes: list[int]) -> int:
        """Return the number of tokens of the longest beginning that was sent before."""
        branch, known = self._tree, 0
        for (text, _), size in zip(prompt, sizes, strict=True):
            if text not in branch:
                break
            branch, known = branch[text], known + size
        return known


Turn = tuple[str, tuple[tuple[str, bool], ...]]
"""A role, and texts, each with whether it is a chunk."""


class _World:
    """Documents that are asked for by Zipf's law, and a source of words."""

    def __init__(self, traffic: Traffic) -> None:
        self.draw, self._traffic = random.Random(0), traffic
        count = traffic.num_documents
        self._documents = [[self.words(traffic.chunk_words) for _ in range(5)] for _ in range(count)]
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(count)))

    def words(self, count: int) -> str:
        """That many words of two to four syllables."""
        return " ".join("".join(self.draw.choices(SYLLABLES, k=self.draw.randint(2, 4))) for _ in range(count))

    def retrieve(self, count: int) -> list[str]:
        """That many chunks, no two the same."""
        found: dict[str, None] = {}
        while len(found) < min(count, len(self._documents)):
            (document,) = self.draw.choices(self._documents, cum_weights=self._weights)
            found[self.draw.choice(document)] = None
        return list(found)

    def edit(self) -> None:
        """Rewrite a chunk of one of the documents that are requested often."""
        document = self._documents[self.draw.randrange(min(10, len(self._documents)))]
        document[self.draw.randrange(len(document))] = self.words(self._traffic.chunk_words)


def _conversations(traffic: Traffic, world: _World) -> Iterator[list[Turn]]:
    """Yield the prompts of all sessions, several sessions at a time."""
    system = world.words(traffic.system_words) if traffic.system_words else ""
    waiting = [[("system", ((system, False),))] if system else [] for _ in range(traffic.num_sessions)]
    running: list[tuple[list[Turn], int]] = []
    while waiting or running:
        while waiting and len(running) < 8:
            running.append((list(waiting.pop()), 0))
        place = world.draw.randrange(len(running))
        turns, number = running[place]
        reads = 1 if not traffic.chunks_per_turn and number % 5 == 4 else traffic.chunks_per_turn
        question = world.words(traffic.question_words)
        texts = (*((chunk, True) for chunk in world.retrieve(reads)), (question, False))
        turns = [*turns, ("user", texts)]
        answer = world.words(traffic.answer_words)
        yield turns
        if number + 1 < traffic.turns:
            running[place] = ([*turns, ("assistant", ((answer, False),))], number + 1)
        else:
            running.pop(place)


_JOINT = "\n\n"


def _segments(turn: Turn) -> list[tuple[str, bool]]:
    """The pieces of a turn that the analysis reads: its header, its texts and the separators between them."""
    role, texts = turn
    found: list[tuple[str, bool]] = [(turn_header(role), False)]
    for number, text in enumerate(texts):
        found += ([(_JOINT, False)] if number else []) + [text]
    return [*found, ("\n", False)]


def _message(turn: Turn) -> dict[str, Any]:
    role, texts = turn
    return {"role": role, "content": _JOINT.join(text for text, _ in texts)}
