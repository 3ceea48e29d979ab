"""Stories and questions: the answers follow from the text, references from the chunk before."""

from __future__ import annotations

import hashlib
import random

from tools.demo_model.questions import KINDS, Question, all_questions
from tools.demo_model.stories import Plan, Story, focus, tell
from tools.demo_model.world import NOT_STATED, REFERENCES


def told(seed: int) -> tuple[Story, list[Question]]:
    rng = random.Random(seed)
    allowed, weights = focus(rng)
    story = tell(rng, Plan((2, 3, 2), (1, 3), allowed, weights, title=0.3, compound=0.2, filler=0.1), "test")
    return story, all_questions(rng, story, "test")


def test_a_seed_always_tells_the_same_story() -> None:
    text = "\n".join(
        "\n".join([*story.chunks, *(q.text + q.answer for q in asked)]) for story, asked in map(told, range(20))
    )
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN


def test_every_kind_of_question_occurs() -> None:
    assert {question.kind for seed in range(60) for question in told(seed)[1]} == set(KINDS)


def test_an_answer_stands_in_its_gold_chunk() -> None:
    for story, asked in map(told, range(60)):
        for question in asked:
            if question.kind not in ("comparison", "not_stated"):
                last = question.facts[-1]
                assert question.answer in last.sentence
                assert last.sentence in story.chunks[last.chunk]


def test_a_cross_chunk_fact_does_not_name_its_subject() -> None:
    pronouns = {"she", "he"} | {phrase.lower() for phrases in REFERENCES.values() for phrase in phrases}
    seen = 0
    for story, _ in map(told, range(60)):
        for fact in story.facts:
            if fact.cross:
                seen += 1
                assert fact.subject.name not in fact.sentence
                assert any(pronoun in fact.sentence.lower() for pronoun in pronouns)
                assert fact.named_in < fact.chunk
                assert fact.subject.name.lower() in story.chunks[fact.named_in].lower()
                assert not any(story.opens_run[fact.named_in + 1 : fact.chunk + 1])
    assert seen > 50


def test_no_other_entity_of_the_type_comes_between_name_and_reference() -> None:
    for story, _ in map(told, range(60)):
        for fact in story.facts:
            if fact.cross:
                between = [other for other in story.facts if fact.named_in < other.chunk < fact.chunk]
                named = {e for other in between for e in (other.subject, other.value) if e.name in other.sentence}
                assert all(e == fact.subject for e in named if e.kind == fact.subject.kind)


def test_what_is_not_stated_is_nowhere_in_the_story() -> None:
    for story, asked in map(told, range(60)):
        known = story.known()
        for question in asked:
            if question.kind == "not_stated" and not question.facts:
                assert question.answer == NOT_STATED
                possible = {name for entity, name in known if entity == question.subject}
                stems = {question_stem(template) for name in possible for template in templates(name)}
                assert question_stem(question.text.replace(question.subject.name, "{S}")) not in stems


def test_the_earlier_year_wins_a_comparison() -> None:
    seen = 0
    for _, asked in map(told, range(80)):
        for question in asked:
            if question.kind == "comparison":
                seen += 1
                early, late = question.facts
                assert int(early.value.name) < int(late.value.name)
                wants_late = "later" in question.text or "younger" in question.text
                assert question.answer == (late if wants_late else early).subject.name
    assert seen > 10


def templates(relation: str) -> tuple[str, ...]:
    from tools.demo_model.world import RELATIONS

    return RELATIONS[relation].questions


def question_stem(text: str) -> str:
    return text.split(": ")[-1].split(", ")[-1]


GOLDEN = "783fef9f49d562d8"
