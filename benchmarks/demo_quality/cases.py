"""Questions over held-out stories, as an application would ask them: texts, of which the engine makes the ids.

Knows the demo world's generator and the engine's context length; nothing of modes and measures.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal, get_args

from benchmarks.demo_quality.runs import MAX_ANSWER_TOKENS, MULTI_HOP_KINDS, Item
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.prompt.prompt import SegmentedPrompt
from tools.demo_model.cases import Case, Setting, make_cases
from tools.demo_model.questions import KINDS, Question
from tools.demo_model.tokenizer import build_tokenizer
from tools.demo_model.world import HELD_OUT_ONE_IN

ROOM = 64  # tokens for question and answer

Part = Literal["any", "selection", "reported"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Questions to choose rules by, and questions to report: no pair of subject and answer is in both."""

SELECTION_ONE_IN = 4


def part_of(question: Question) -> Part:
    """Where a question belongs, by a hash of its subject and its answer: no list and no seed."""
    number = zlib.crc32(f"{question.subject.key}|{question.answer}".encode()) // HELD_OUT_ONE_IN
    return "reported" if number % SELECTION_ONE_IN else "selection"


def make_items(
    engine: TransformersEngine,
    setting: Setting,
    num_questions: int,
    system_share: float,
    seed: int,
    num_multi_hop: int = 0,
    part: Part = "any",
) -> list[Item]:
    """Equally many questions of every kind, story by story, stories with and without a system text mixed.

    `num_multi_hop` more are of the kinds whose evidence stands in several chunks."""
    if setting.num_tokens > engine.context_length - ROOM:
        raise UsageError(
            f"a context of {setting.num_tokens} tokens, question and answer do not fit the {engine.context_length} "
            f"that {engine.name} reads; choose --context-tokens of {engine.context_length - ROOM} or less"
        )
    counts = dict.fromkeys(KINDS, max(1, round(num_questions / len(KINDS))))
    for kind in MULTI_HOP_KINDS:
        counts[kind] += round(num_multi_hop / len(MULTI_HOP_KINDS))
    behind_system = {kind: round(count * system_share) for kind, count in counts.items()}
    plain = {kind: count - behind_system[kind] for kind, count in counts.items()}
    tokenizer = build_tokenizer()
    cases: list[Case] = []
    for number, system in ((plain, False), (behind_system, True)):
        here = setting._replace(system=system)
        cases += make_cases(tokenizer, number, here, seed + int(system), keep=lambda q: part in ("any", part_of(q)))
    stories: dict[tuple[str, ...], list[Item]] = {}
    for case in cases:
        # The generator's lengths scatter: a story for the longest context can exceed what the model reads.
        if fits(engine, case):
            stories.setdefault(case.texts, []).append(item_of(case))
    told = list(stories.values())
    random.Random(seed).shuffle(told)
    return [item for story in told for item in story]


def item_of(case: Case) -> Item:
    """The case as an application would ask it: texts, of which the engine makes the ids."""
    prompt = SegmentedPrompt(case.texts, case.question.text, case.system)
    texts = reorder(case)
    other = None if texts is None else SegmentedPrompt(texts, case.question.text, case.system)
    return Item(prompt, case.question.answer, case.question.kind, case.question.guess, other)


def reorder(case: Case) -> tuple[str, ...] | None:
    """The case's chunks in another order that says the same: its runs change places. None if there is only one."""
    runs: list[list[str]] = []
    for text, opens in zip(case.texts, case.opens_run, strict=True):
        if opens:
            runs.append([])
        runs[-1].append(text)
    shuffled = list(runs)
    rng = random.Random(zlib.crc32(repr(case.texts).encode()))
    while len(runs) > 1 and shuffled == runs:
        rng.shuffle(shuffled)
    return None if shuffled == runs else tuple(text for run in shuffled for text in run)


def fits(engine: TransformersEngine, case: Case) -> bool:
    """Whether the model reads the case's context, its question and an answer."""
    return case.num_context_tokens + len(case.suffix) + MAX_ANSWER_TOKENS <= engine.context_length
