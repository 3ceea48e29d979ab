"""The demo world: what exists in it, what can be said about it, and what training never sees.

Entities have a type and a name of one to three words; relations link a subject to a value. The held-out split is a
hash of names, so that it needs no list and no seed: `is_held_out(a, b)` is true for one pair in ten, and every phrase
has exactly one opening that training never uses. Knows nothing about documents, tokens or tensors.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tools.demo_model import vocab

Split = Literal["train", "test"]

HELD_OUT_ONE_IN = 10
"""One pair of words in this many belongs to the held-out split."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Something with a name: a person, a company, a city, a project, an event, or a plain value (a product, a year)."""

    kind: str
    words: tuple[str, ...]
    female: bool = False

    @property
    def name(self) -> str:
        """The name inside a sentence.

        >>> Entity("event", ("the", "safety", "review")).name
        'the safety review'"""
        return " ".join(self.words)

    @property
    def opening_name(self) -> str:
        """The name at the start of a sentence.

        >>> Entity("event", ("the", "safety", "review")).opening_name
        'The safety review'"""
        return self.name[0].upper() + self.name[1:]

    @property
    def key(self) -> str:
        """The word that stands for the entity in held-out pairs."""
        return self.words[1] if self.kind in ("project", "event") else self.words[0]

    @property
    def pronoun(self) -> str:
        """How a later sentence refers to a person."""
        return "She" if self.female else "He"


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact's kind: verb phrases with ``{O}`` state it, questions with ``{S}`` ask for it."""

    name: str
    subject: str
    value: str
    phrases: tuple[str, ...]
    questions: tuple[str, ...]


def _relation(name: str, subject: str, value: str, phrases: str, questions: str) -> Relation:
    split = [tuple(part.strip() for part in text.split("|")) for text in (phrases, questions)]
    return Relation(name, subject, value, split[0], split[1])


RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        _relation("work", "person", "company", "works at {O}|works for {O}|has a job at {O}",
                  "Where does {S} work?|Which company employs {S}?"),
        _relation("home", "person", "city", "lives in {O}|has a home in {O}",
                  "Where does {S} live?|In which city does {S} live?"),
        _relation("born", "person", "city", "was born in {O}|grew up in {O}",
                  "Where was {S} born?|In which city was {S} born?"),
        _relation("play", "person", "instrument", "plays the {O}|can play the {O}", "What instrument does {S} play?"),
        _relation("eat", "person", "food", "likes {O}|loves to eat {O}",
                  "What food does {S} like?|What does {S} like to eat?"),
        _relation("study", "person", "subject", "studied {O}|has a degree in {O}", "What did {S} study?"),
        _relation("role", "person", "role", "serves as the {O}|is the {O} on duty",
                  "What is the role of {S}?|What role does {S} have?"),
        _relation("base", "company", "city", "is based in {O}|has its main office in {O}",
                  "Where is {S} based?|In which city is {S} based?"),
        _relation("make", "company", "product", "makes {O}|sells {O}", "What does {S} make?|What does {S} sell?"),
        _relation("found", "company", "year", "was founded in {O}|was started in {O}", "When was {S} founded?"),
        _relation("river", "city", "river", "lies on the river {O}|was built by the river {O}",
                  "On which river does {S} lie?|Which river flows through {S}?"),
        _relation("land", "city", "sight", "is famous for its {O}|has an old {O}", "What is {S} famous for?"),
        _relation("client", "project", "company", "was ordered by {O}|is paid for by {O}",
                  "Which company ordered {S}?|Who is the client of {S}?"),
        _relation("site", "project", "city", "is located in {O}|is carried out in {O}",
                  "Where is {S} located?|In which city is {S} located?"),
        _relation("start", "project", "year", "began in {O}|was approved in {O}", "When did {S} begin?"),
        _relation("place", "event", "city", "took place in {O}|was held in {O}",
                  "Where did {S} take place?|In which city was {S} held?"),
        _relation("topic", "event", "product", "dealt with {O}|was about {O}",
                  "What did {S} deal with?|What was {S} about?"),
        _relation("date", "event", "month", "was scheduled for {O}|ended in {O}", "For which month was {S} scheduled?"),
    )
}  # fmt: skip

SUBJECTS: dict[str, tuple[Relation, ...]] = {
    kind: tuple(relation for relation in RELATIONS.values() if relation.subject == kind)
    for kind in ("person", "company", "city", "project", "event")
}

VALUES: dict[str, tuple[str, ...]] = {
    "city": vocab.CITIES, "river": vocab.RIVERS, "product": vocab.PRODUCTS, "food": vocab.FOODS,
    "instrument": vocab.INSTRUMENTS, "subject": vocab.SUBJECTS, "sight": vocab.SIGHTS, "year": vocab.YEARS,
    "role": vocab.ROLES, "month": vocab.MONTHS,
}  # fmt: skip

TWO_HOPS: dict[tuple[str, str], tuple[str, ...]] = {
    ("work", "base"): ("In which city is the employer of {S} based?", "Where is the employer of {S} based?"),
    ("work", "make"): ("What does the employer of {S} make?", "What does the employer of {S} sell?"),
    ("work", "found"): ("When was the employer of {S} founded?",),
    ("home", "river"): (
        "On which river does the home town of {S} lie?",
        "Which river flows through the home town of {S}?",
    ),
    ("home", "land"): ("What is the home town of {S} famous for?",),
    ("client", "base"): ("Where is the client of {S} based?", "In which city is the client of {S} based?"),
    ("client", "make"): ("What does the client of {S} make?", "What does the client of {S} sell?"),
    ("client", "found"): ("When was the client of {S} founded?",),
    ("site", "river"): ("On which river does the site of {S} lie?", "Which river flows through the site of {S}?"),
    ("site", "land"): ("What is the site of {S} famous for?",),
    ("place", "river"): ("On which river does the venue of {S} lie?", "Which river flows through the venue of {S}?"),
    ("place", "land"): ("What is the venue of {S} famous for?",),
}

COMPARISONS: dict[str, tuple[tuple[str, bool], ...]] = {
    "found": (
        ("Which company was founded first, {A} or {B}?", True),
        ("Which company is older, {A} or {B}?", True),
        ("Which company was founded later, {A} or {B}?", False),
        ("Which company is younger, {A} or {B}?", False),
    ),
}
"""Relation -> (question, whether the smaller year wins)."""

NOT_STATED = "not stated"

REFERENCES: dict[str, tuple[str, ...]] = {
    "company": ("The company", "The firm"),
    "city": ("The city", "The town"),
    "project": ("The project", "The programme"),
    "event": ("The meeting", "The session"),
}

STATEMENT_OPENINGS = (
    "",
    "In short,",
    "At present,",
    "For the record,",
    "According to the register,",
    "By all accounts,",
)
QUESTION_OPENINGS = ("", "From the records:", "Please answer:", "For the report:", "One question:", "Check the files:")

FILLERS = (
    "No further action was needed.", "The minutes were approved without changes.", "All figures were checked twice.",
    "Copies of this note went to every department.", "The next update is due at the end of the quarter.",
    "Nothing else was reported this week.", "The file was last changed on Monday.", "Costs stayed within the plan.",
    "A short summary follows below.", "Several open points remain.", "Staff were informed by letter.",
    "The weather was mild and dry.", "Details can be found in the archive.", "There were no complaints.",
    "Most tasks were finished on time.", "Two visitors asked for a tour.", "Travel expenses will be paid back soon.",
    "The old printer was finally replaced.", "Parking spaces are limited on weekdays.", "Lunch was served at noon.",
    "Everyone agreed on the next steps.", "This page was reviewed twice last year.", "Some numbers are still missing.",
    "The lift was out of order for two days.", "Questions may be sent to the front desk.", "Keys must be returned.",
    "It rained for most of the afternoon.", "A new coffee machine arrived on Friday.", "Sales were stable.",
    "Please keep this note on file.", "Turnover grew slightly over the winter.", "The audit found no errors.",
)  # fmt: skip


def is_held_out(first: str, second: str) -> bool:
    """True for one ordered pair of words in ten; equal on every machine and in every run."""
    return zlib.crc32(f"{first}|{second}".encode()) % HELD_OUT_ONE_IN == 0


def held_out_opening(template: str, num_openings: int) -> int:
    """Index of the opening that training never puts before `template`."""
    return zlib.crc32(template.encode()) % num_openings


def choose_opening(rng: random.Random, template: str, openings: Sequence[str], split: Split, plain: float) -> str:
    """An opening for `template`: in training never its held-out one; in the test split always.

    plain: share of training sentences that get the empty opening where it is allowed."""
    held = held_out_opening(template, len(openings))
    if split == "test":
        return openings[held]
    if held != 0 and rng.random() < plain:
        return openings[0]
    return openings[rng.choice([index for index in range(len(openings)) if index != held])]


def name_is_held_out(entity: Entity) -> bool:
    """Whether the test split owns this name: people and events are held out by their pair of words."""
    if entity.kind == "person":
        return is_held_out(entity.words[0], entity.words[1])
    if entity.kind == "event":
        return is_held_out(entity.words[1], entity.words[2])
    return False


def draw_entity(rng: random.Random, kind: str, split: Split, used: set[str]) -> Entity | None:
    """A new entity of the split whose distinctive words are not in `used` (they are added), or None."""
    for _ in range(400):
        entity = _draw(rng, kind)
        distinctive = _distinctive(entity)
        if used.isdisjoint(distinctive) and _fits(entity, split):
            used.update(distinctive)
            return entity
    return None


def draw_value(rng: random.Random, kind: str, subject: Entity, split: Split, used: set[str]) -> Entity | None:
    """A value for a fact about `subject`, unused in this story if possible, with the pair in the split."""
    if kind in ("person", "company", "project", "event"):
        for _ in range(40):
            seen = set(used)
            entity = draw_entity(rng, kind, split, seen)
            if entity is not None and pair_fits(subject, entity, split):
                used.update(seen)
                return entity
        return None
    choices = [word for word in VALUES[kind] if is_held_out(subject.key, word) == (split == "test")]
    fresh = [word for word in choices if word not in used] or (choices if kind in ("year", "month", "role") else [])
    if not fresh:
        return None
    word = rng.choice(fresh)
    used.add(word)
    return Entity(kind, (word,))


def pair_fits(subject: Entity, value: Entity, split: Split) -> bool:
    """Whether a fact that links the two belongs to the split."""
    return is_held_out(subject.key, value.key) == (split == "test")


def _draw(rng: random.Random, kind: str) -> Entity:
    if kind == "person":
        female = rng.random() < 0.5
        first = rng.choice(vocab.FEMALE_NAMES if female else vocab.MALE_NAMES)
        return Entity(kind, (first, rng.choice(vocab.LAST_NAMES)), female)
    if kind == "company":
        return Entity(kind, (rng.choice(vocab.COMPANY_STEMS),))
    if kind == "project":
        return Entity(kind, ("Project", rng.choice(vocab.PROJECT_NAMES)))
    if kind == "event":
        return Entity(kind, ("the", rng.choice(vocab.EVENT_TOPICS), rng.choice(vocab.EVENT_FORMS)))
    return Entity(kind, (rng.choice(VALUES[kind]),))


def _distinctive(entity: Entity) -> tuple[str, ...]:
    """Words no other entity of the same story may have: a last name, a company's name, an event's topic."""
    return (entity.words[1],) if entity.kind in ("person", "project", "event") else (entity.words[0],)


def _fits(entity: Entity, split: Split) -> bool:
    if entity.kind not in ("person", "event"):
        return True
    return name_is_held_out(entity) == (split == "test")
