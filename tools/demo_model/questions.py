"""Questions about a story, with answer, kind, gold chunks and the chance of a blind guess.

Kinds: `one_hop` (the fact names its subject, or refers to it inside the chunk), `cross_ref` (the subject is named in
an earlier chunk only), `two_hop_chunk` (two facts of one chunk), `two_hop_cross` (two chunks, both explicit),
`two_hop_ref` (two facts, at least one by a cross-chunk reference), `comparison`, `not_stated`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from tools.demo_model.stories import Fact, Story
from tools.demo_model.world import (
    COMPARISONS,
    NOT_STATED,
    QUESTION_OPENINGS,
    RELATIONS,
    TWO_HOPS,
    Entity,
    Relation,
    Split,
    choose_opening,
)

KINDS = ("one_hop", "cross_ref", "two_hop_chunk", "two_hop_cross", "two_hop_ref", "comparison", "not_stated")
REFERENCE_KINDS = ("cross_ref", "two_hop_ref")
"""The kinds that need the state of an earlier chunk: what full reuse loses."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `competing`: elimination cannot find the answer.

    `steps` are what a reader must know at a name in the question before the answer: the entity between two hops, or
    the years to compare."""

    kind: str
    text: str
    answer: str
    facts: tuple[Fact, ...]
    subject: Entity
    guess: float
    steps: tuple[tuple[Entity, Entity], ...] = ()
    competing: bool = True

    @property
    def gold_chunks(self) -> tuple[int, ...]:
        """Chunks that a reader needs: those of the facts and those that name what a fact refers to."""
        needed = {fact.chunk for fact in self.facts} | {fact.named_in for fact in self.facts if fact.cross}
        return tuple(sorted(needed))


def all_questions(rng: random.Random, story: Story, split: Split, num_comparisons: int = 6) -> list[Question]:
    """Every question the story can answer, and as many as there are gaps to ask for."""
    known = story.known()
    orphans = Counter(fact.value.kind for fact in story.facts if fact.cross)
    questions: list[Question] = []
    for fact in story.facts:
        text = phrase(rng, rng.choice(fact.relation.questions), split, S=fact.subject.name)
        guess = 1 / story.num_values(fact.value.kind)
        kind = "cross_ref" if fact.cross else "one_hop"
        competing = orphans[fact.value.kind] > 1 if fact.cross else guess < 1
        questions.append(Question(kind, text, fact.value.name, (fact,), fact.subject, guess, (), competing))
        for (first, second), templates in TWO_HOPS.items():
            if first == fact.relation.name:
                text = phrase(rng, rng.choice(templates), split, S=fact.subject.name)
                questions += _two_hop(story, known, orphans, fact, RELATIONS[second], text)
    questions += _comparisons(rng, story, split, num_comparisons)
    questions += _gaps(rng, story, known, split)
    return questions


def phrase(rng: random.Random, template: str, split: Split, **names: str) -> str:
    """The question as it is asked: an opening, then the template with its names."""
    opening = choose_opening(rng, template, QUESTION_OPENINGS, split, plain=0.6)
    return f"{opening} {template.format(**names)}".strip()


def _two_hop(
    story: Story,
    known: dict[tuple[Entity, str], Fact],
    orphans: Counter[str],
    first: Fact,
    relation: Relation,
    text: str,
) -> list[Question]:
    second = known.get((first.value, relation.name))
    guess = 1 / max(1, story.num_values(relation.value))
    steps = ((first.subject, first.value),)
    if second is None:
        if relation not in story.asked_about.get(first.value.kind, ()):
            return []
        num = story.num_values(relation.value)
        return [Question("not_stated", text, NOT_STATED, (first,), first.subject, 1 / (num + 1), steps)]
    kind = "two_hop_cross"
    competing = guess < 1
    if first.cross or second.cross:
        kind = "two_hop_ref"
        competing = any(orphans[fact.value.kind] > 1 for fact in (first, second) if fact.cross)
    elif first.chunk == second.chunk:
        kind = "two_hop_chunk"
    return [Question(kind, text, second.value.name, (first, second), first.subject, guess, steps, competing)]


def _comparisons(rng: random.Random, story: Story, split: Split, num: int) -> list[Question]:
    questions = []
    for name, templates in COMPARISONS.items():
        facts = [fact for fact in story.facts if fact.relation.name == name and not fact.cross]
        pairs = [(a, b) for a in facts for b in facts if a.value.words < b.value.words]
        for early, late in rng.sample(pairs, min(len(pairs), num)):
            template, smaller_wins = rng.choice(templates)
            first, second = (early, late) if rng.random() < 0.5 else (late, early)
            text = phrase(rng, template, split, A=first.subject.name, B=second.subject.name)
            winner = early if smaller_wins else late
            steps = ((early.subject, early.value), (late.subject, late.value))
            questions.append(
                Question("comparison", text, winner.subject.name, (early, late), first.subject, 0.5, steps)
            )
    return questions


def _gaps(rng: random.Random, story: Story, known: dict[tuple[Entity, str], Fact], split: Split) -> list[Question]:
    entities = {fact.subject for fact in story.facts} | {fact.value for fact in story.facts}
    questions = []
    for entity in sorted(entities, key=lambda e: e.name):
        for relation in story.asked_about.get(entity.kind, ()):
            if (entity, relation.name) not in known:
                text = phrase(rng, rng.choice(relation.questions), split, S=entity.name)
                guess = 1 / (story.num_values(relation.value) + 1)
                questions.append(Question("not_stated", text, NOT_STATED, (), entity, guess))
    return questions
