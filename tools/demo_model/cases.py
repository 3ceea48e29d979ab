"""Questions about held-out stories, with the ids of their prompts: what the demo model is trained for and measured on.

Every story uses only names, pairs and question phrasings that training never saw. Knows the demo's world and its
tokenizer; no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from tools.demo_model.questions import KINDS, Question, all_questions
from tools.demo_model.stories import Plan, Story, focus, tell
from tools.demo_model.tokenizer import ANSWER, BOS, DOC, EOS, QUESTION, SYSTEM, SYSTEM_TEXTS, encode, token_id


class Case(NamedTuple):
    """One held-out question: the prompt's segments as ids (prefix, then chunks), the suffix and the answer's ids.

    `texts` are the chunks and `system` the system text that the segments were made of. `opens_run` says of each chunk
    whether it can stand without those before it, so that the runs may change places."""

    question: Question
    segments: list[list[int]]
    suffix: list[int]
    answer: list[int]
    texts: tuple[str, ...] = ()
    system: str | None = None
    opens_run: tuple[bool, ...] = ()

    @property
    def num_context_tokens(self) -> int:
        """Prefix and chunks."""
        return sum(map(len, self.segments))


class Setting(NamedTuple):
    """A context: how many chunks, about how many tokens in all, whether a system text stands before them."""

    num_chunks: int = 6
    num_tokens: int = 200
    system: bool = False


def make_cases(
    tokenizer: Tokenizer,
    per_kind: int | Mapping[str, int],
    setting: Setting,
    seed: int,
    kinds: Sequence[str] = KINDS,
    keep: Callable[[Question], bool] = lambda question: True,
) -> list[Case]:
    """`per_kind` questions of every kind, all whose answer other values compete with, at most two from one story.

    A mapping says how many of which kinds; `keep` says which questions may be asked at all."""
    rng = random.Random(seed)
    wanted = per_kind if isinstance(per_kind, Mapping) else dict.fromkeys(kinds, per_kind)
    cases: dict[str, list[Case]] = {kind: [] for kind in wanted}
    while any(len(found) < wanted[kind] for kind, found in cases.items()):
        story = tell(rng, story_plan(rng, setting), "test")
        system = rng.choice(SYSTEM_TEXTS) if setting.system else None
        segments = _segments(tokenizer, story, system)
        if not 0.8 < sum(map(len, segments)) / setting.num_tokens < 1.2:
            continue
        asked = [q for q in all_questions(rng, story, "test") if q.competing and q.guess < 1 and keep(q)]
        for kind in wanted:
            options = [question for question in asked if question.kind == kind]
            for question in rng.sample(options, min(len(options), 2, wanted[kind] - len(cases[kind]))):
                suffix = [token_id(tokenizer, QUESTION), *encode(tokenizer, question.text)]
                suffix.append(token_id(tokenizer, ANSWER))
                answer = [*encode(tokenizer, question.answer), token_id(tokenizer, EOS)]
                told = Case(question, segments, suffix, answer, tuple(story.chunks), system, tuple(story.opens_run))
                cases[kind].append(told)
    return [case for found in cases.values() for case in found]


def story_plan(rng: random.Random, setting: Setting) -> Plan:
    """A story of about the setting's size whose runs of two or three chunks come in random order."""
    long = setting.num_tokens > 500
    per_chunk = setting.num_tokens / setting.num_chunks / (7.8 if long else 9)
    sentences = (max(1, math.floor(per_chunk * 0.8)), max(1, math.ceil(per_chunk * 1.2)))
    lengths: list[int] = []
    while sum(lengths) < setting.num_chunks:
        lengths.append(min(rng.choice((2, 2, 3)), setting.num_chunks - sum(lengths)))
    allowed, weights = focus(rng, (2, 3, 4) if long else (1, 2, 2))
    return Plan(
        tuple(lengths), sentences, allowed, weights, cross=0.35, inside=0.3, new=0.35, chain=0.8,
        filler=0.35 if long else 0.05, title=0.3, compound=0.15, plain=0.8,
    )  # fmt: skip


def _segments(tokenizer: Tokenizer, story: Story, system: str | None) -> list[list[int]]:
    prefix = [token_id(tokenizer, BOS)]
    if system is not None:
        prefix += [token_id(tokenizer, SYSTEM), *encode(tokenizer, system)]
    doc = token_id(tokenizer, DOC)
    return [prefix, *([doc, *encode(tokenizer, chunk)] for chunk in story.chunks)]
