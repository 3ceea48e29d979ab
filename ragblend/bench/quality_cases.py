"""Questions over held-out stories, as an application would ask them: texts, of which the engine makes the ids.

Knows the demo world's generator and the engine's context length; nothing of modes and measures.
"""

from __future__ import annotations

import random

from ragblend.bench.quality_runs import MAX_ANSWER_TOKENS, Item
from ragblend.demo.evaluate import Case, Setting, make_cases
from ragblend.demo.questions import KINDS
from ragblend.demo.tokenizer import build_tokenizer
from ragblend.engine.transformers_engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.segments import SegmentedPrompt

ROOM = 64  # tokens for question and answer


def make_items(
    engine: TransformersEngine, setting: Setting, num_questions: int, system_share: float, seed: int
) -> list[Item]:
    """Equally many questions of every kind, story by story, stories with and without a system text mixed."""
    if setting.num_tokens > engine.context_length - ROOM:
        raise UsageError(
            f"a context of {setting.num_tokens} tokens, question and answer do not fit the {engine.context_length} "
            f"that {engine.name} reads; choose --context-tokens of {engine.context_length - ROOM} or less"
        )
    per_kind = max(1, round(num_questions / len(KINDS)))
    num_system = round(per_kind * system_share)
    tokenizer = build_tokenizer()
    cases: list[Case] = []
    for number, system in ((per_kind - num_system, False), (num_system, True)):
        if number:
            cases += make_cases(tokenizer, number, setting._replace(system=system), seed + int(system))
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
    return Item(prompt, case.question.answer, case.question.kind, case.question.guess)


def fits(engine: TransformersEngine, case: Case) -> bool:
    """Whether the model reads the case's context, its question and an answer."""
    return case.num_context_tokens + len(case.suffix) + MAX_ANSWER_TOKENS <= engine.context_length
