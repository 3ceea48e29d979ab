"""The split: training and test share no entity name, no pair and no phrasing."""

from __future__ import annotations

import random

import pytest

from tools.demo_model.questions import all_questions
from tools.demo_model.stories import Plan, Story, focus, tell
from tools.demo_model.world import (
    COMPARISONS,
    QUESTION_OPENINGS,
    RELATIONS,
    TWO_HOPS,
    VALUES,
    Entity,
    Split,
    choose_opening,
    draw_entity,
    is_held_out,
    name_is_held_out,
)

NUM_STORIES = 150


def stories(split: Split, seed: int = 3) -> list[Story]:
    rng = random.Random(seed)
    told = []
    for _ in range(NUM_STORIES):
        allowed, weights = focus(rng)
        plan = Plan((2, 3, 2), (1, 3), allowed, weights, title=0.3, compound=0.2, filler=0.1)
        told.append(tell(rng, plan, split))
    return told


def entities(story: Story) -> set[Entity]:
    return {entity for fact in story.facts for entity in (fact.subject, fact.value)}


@pytest.mark.parametrize(("split", "held_out"), [("train", False), ("test", True)])
def test_every_name_of_two_words_belongs_to_its_split(split: Split, held_out: bool) -> None:
    kinds = ("person", "event")
    found = [entity for story in stories(split) for entity in entities(story) if entity.kind in kinds]
    assert len(found) > 200
    assert all(name_is_held_out(entity) == held_out for entity in found)


@pytest.mark.parametrize(("split", "held_out"), [("train", False), ("test", True)])
def test_every_fact_belongs_to_its_split(split: Split, held_out: bool) -> None:
    facts = [fact for story in stories(split) for fact in story.facts]
    assert len(facts) > 1000
    assert all(is_held_out(fact.subject.key, fact.value.key) == held_out for fact in facts)


def test_no_question_phrasing_is_in_both_splits() -> None:
    templates = [question for relation in RELATIONS.values() for question in relation.questions]
    templates += [question for questions in TWO_HOPS.values() for question in questions]
    templates += [question for questions in COMPARISONS.values() for question, _ in questions]
    rng = random.Random(0)
    for template in templates:
        used = {
            split: {choose_opening(rng, template, QUESTION_OPENINGS, split, plain=0.5) for _ in range(300)}
            for split in ("train", "test")
        }
        assert len(used["test"]) == 1
        assert used["train"] == set(QUESTION_OPENINGS) - used["test"]


def test_stories_ask_in_the_phrasings_of_their_split() -> None:
    asked = {
        split: {
            question.text.replace(question.subject.name, "{S}")
            for story in stories(split)
            for question in all_questions(random.Random(1), story, split)
            if question.kind != "comparison"
        }
        for split in ("train", "test")
    }
    assert min(map(len, asked.values())) > 40
    assert asked["train"].isdisjoint(asked["test"])


def test_a_tenth_of_all_pairs_is_held_out() -> None:
    pairs = [(first, second) for first in VALUES["city"] for second in VALUES["river"]]
    assert 0.08 < sum(is_held_out(*pair) for pair in pairs) / len(pairs) < 0.12


def test_drawn_entities_share_no_distinctive_word() -> None:
    rng, used = random.Random(5), set[str]()
    drawn = [draw_entity(rng, "company", "test", used) for _ in range(40)]
    stems = [entity.words[0] for entity in drawn if entity is not None]
    assert len(stems) == len(set(stems)) > 20
