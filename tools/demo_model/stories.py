"""Random stories: runs of chunks that state facts, and the questions they answer.

A run is a piece of one record: its chunks keep their order, its first chunk needs nothing before it, and a later one
may open with a reference ("The company makes lamps.") whose meaning stands in an earlier chunk of the run. Runs are
shuffled, so other records come between and around. A reference always means the most recent entity of its type.
Knows nothing about tokens or files. Read `tell` first, then `questions.ask`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.demo_model.world import (
    FILLERS,
    REFERENCES,
    RELATIONS,
    STATEMENT_OPENINGS,
    SUBJECTS,
    Entity,
    Relation,
    Split,
    choose_opening,
    draw_entity,
    draw_value,
    pair_fits,
)

PEOPLE = {"person": 1.0}


@dataclass(frozen=True, slots=True)
class Fact:
    """One statement and where it stands. `cross`: its subject is named only in the earlier chunk `named_in`."""

    subject: Entity
    relation: Relation
    value: Entity
    sentence: str
    chunk: int
    cross: bool
    named_in: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a story is told. Probabilities are per sentence, weights are relative."""

    run_lengths: tuple[int, ...] = (2, 2, 2)  # chunks in each run
    sentences: tuple[int, int] = (1, 3)  # facts or fillers per chunk
    allowed: Mapping[str, Sequence[Relation]] = field(default_factory=lambda: SUBJECTS)
    weights: Mapping[str, float] = field(default_factory=lambda: PEOPLE)
    cross: float = 0.3  # refer back across a chunk border
    inside: float = 0.3  # go on about an entity of the same chunk
    new: float = 0.4  # introduce a new entity rather than return to one
    chain: float = 0.7  # when returning, prefer companies, cities and people who have no facts yet
    filler: float = 0.0
    title: float = 0.0  # per run
    compound: float = 0.0  # "... and ..." adds a second fact
    plain: float = 0.8  # sentences without an opening phrase


@dataclass(slots=True)
class Story:
    """Chunks in prompt order with their facts."""

    chunks: list[str]
    facts: list[Fact]
    asked_about: Mapping[str, Sequence[Relation]]
    opens_run: list[bool]  # per chunk: the first of its run

    def known(self) -> dict[tuple[Entity, str], Fact]:
        """Facts by subject and relation; a subject has at most one value per relation."""
        return {(fact.subject, fact.relation.name): fact for fact in self.facts}

    def num_values(self, kind: str) -> int:
        """Different values of one type: one over this is the chance of a blind guess."""
        return len({fact.value for fact in self.facts if fact.value.kind == kind})


class Teller:
    """Writes one story, sentence by sentence, in the order of the runs before shuffling."""

    def __init__(self, rng: random.Random, plan: Plan, split: Split) -> None:
        self.rng, self.plan, self.split = rng, plan, split
        self.used: set[str] = set()
        self.entities: list[Entity] = []
        self.said: set[tuple[Entity, str]] = set()
        self.facts: list[Fact] = []
        self.recent: dict[str, tuple[Entity, int]] = {}  # type -> most recent entity of this run, chunk of its name

    def open_relations(self, entity: Entity) -> list[Relation]:
        """What has not been said about `entity` yet."""
        return [r for r in self.plan.allowed.get(entity.kind, ()) if (entity, r.name) not in self.said]

    def chunk(self, index: int, first: bool) -> str:
        """Text of one chunk; `first` of its run."""
        sentences: list[str] = []
        if first and self.rng.random() < self.plan.title:
            entity = self.some_entity()
            if entity is not None:
                self.recent[entity.kind] = (entity, index)
                sentences.append(f"# {entity.opening_name}")
        for _ in range(self.rng.randint(*self.plan.sentences)):
            told = [] if self.rng.random() < self.plan.filler else self.statement(index) or self.statement(index)
            sentences += told or [self.rng.choice(FILLERS)]
        return " ".join(sentences)

    def some_entity(self) -> Entity | None:
        """A known or a new entity with something left to say about it."""
        rng, plan = self.rng, self.plan
        if self.entities and rng.random() > plan.new:
            known = [entity for entity in self.entities if self.open_relations(entity)]
            untold = [
                e for e in known if e.kind != "person" or len(self.open_relations(e)) == len(plan.allowed["person"])
            ]
            if known:
                return rng.choice(untold if untold and rng.random() < plan.chain else known)
        kind = rng.choices(list(plan.weights), list(plan.weights.values()))[0]
        entity = draw_entity(rng, kind, self.split, self.used)
        if entity is not None:
            self.entities.append(entity)
        return entity

    def subject(self, index: int) -> tuple[Entity, bool, int] | None:
        """The next sentence's subject, whether to refer to it by a pronoun, and the chunk that names it."""
        rng, plan = self.rng, self.plan
        told = [(e, c) for e, c in self.recent.values() if self.open_relations(e)]
        across = [(e, c) for e, c in told if c < index]
        inside = [(e, c) for e, c in told if c == index]
        if across and rng.random() < plan.cross:
            entity, named_in = rng.choices(across, [1 / (index - c) for _, c in across])[0]
            return entity, True, named_in
        if inside and rng.random() < plan.inside:
            entity, named_in = rng.choice(inside)
            return entity, rng.random() < 0.8, named_in
        entity = self.some_entity()  # type: ignore[assignment]
        return None if entity is None else (entity, False, index)

    def statement(self, index: int) -> list[str]:
        """One sentence with a fact, sometimes two; nothing when the split leaves no value."""
        rng = self.rng
        chosen = self.subject(index)
        if chosen is None or not self.open_relations(chosen[0]):
            return []
        entity, refers, named_in = chosen
        phrases: list[str] = []
        facts: list[tuple[Relation, Entity]] = []
        for _ in range(2 if rng.random() < self.plan.compound else 1):
            relation = self.pick_relation(entity)
            value = self.value(entity, relation) if relation else None
            if relation is None:
                break
            self.said.add((entity, relation.name))  # also when the split has no value left: do not try again
            if value is None:
                break
            phrases.append(rng.choice(relation.phrases).format(O=value.name))
            facts.append((relation, value))
        if not facts:
            return []
        if not refers:
            self.recent[entity.kind] = (entity, index)
        opening = choose_opening(rng, facts[0][0].phrases[0], STATEMENT_OPENINGS, self.split, self.plan.plain)
        if self.split == "test" and rng.random() < self.plan.plain:
            opening = ""
        name = self.reference(entity) if refers else entity.opening_name
        if opening and not (entity.kind in ("person", "company", "city", "project") and not refers):
            name = name[0].lower() + name[1:]
        sentence = f"{opening} {name} {' and '.join(phrases)}.".strip()
        for relation, value in facts:
            if value.kind in SUBJECTS:
                self.recent[value.kind] = (value, index)
            self.facts.append(Fact(entity, relation, value, sentence, index, refers and named_in < index, named_in))
        return [sentence]

    def reference(self, entity: Entity) -> str:
        """A pronoun or "The company"."""
        return entity.pronoun if entity.kind == "person" else self.rng.choice(REFERENCES[entity.kind])

    def pick_relation(self, entity: Entity) -> Relation | None:
        """Something new to say, with a liking for facts that lead on."""
        left = self.open_relations(entity)
        if not left:
            return None
        leading = [r for r in left if r.value == "company" or r.name in ("home", "site", "place")]
        return self.rng.choice(leading if leading and self.rng.random() < 0.35 else left)

    def value(self, subject: Entity, relation: Relation) -> Entity | None:
        """A value for the fact: sometimes an entity that the story already has, so that facts chain."""
        if relation.value in SUBJECTS and self.rng.random() < 0.35:
            known = [e for e in self.entities if e.kind == relation.value and pair_fits(subject, e, self.split)]
            known = [e for e in known if e != subject]
            if known:
                return self.rng.choice(known)
        value = draw_value(self.rng, relation.value, subject, self.split, self.used)
        if value is not None and value.kind in SUBJECTS:
            self.entities.append(value)
        return value


def tell(rng: random.Random, plan: Plan, split: Split) -> Story:
    """Write every run, then shuffle the runs; facts carry chunk numbers of the shuffled order."""
    teller = Teller(rng, plan, split)
    runs: list[list[int]] = []
    texts: list[str] = []
    for length in plan.run_lengths:
        teller.recent = {}
        runs.append(list(range(len(texts), len(texts) + length)))
        texts += [teller.chunk(index, index == runs[-1][0]) for index in runs[-1]]
    rng.shuffle(runs)
    order = [index for run in runs for index in run]
    place = {old: new for new, old in enumerate(order)}
    facts = [
        Fact(f.subject, f.relation, f.value, f.sentence, place[f.chunk], f.cross, place[f.named_in])
        for f in teller.facts
    ]
    opens_run = [index == run[0] for run in runs for index in run]
    return Story([texts[index] for index in order], facts, plan.allowed, opens_run)


def focus(
    rng: random.Random, per_type: tuple[int, ...] = (1, 2, 2)
) -> tuple[dict[str, list[Relation]], dict[str, float]]:
    """Few relations per story, so that several values of one type compete: allowed relations and subject weights.

    With many relations the type of the answer alone gives it away, and a model learns no binding at all."""
    groups: list[tuple[dict[str, float], float]] = [
        ({"person": 1.0}, 1.0),
        ({"person": 0.65, "company": 0.35}, 4.0),
        ({"person": 0.65, "city": 0.35}, 3.0),
        ({"company": 0.6, "city": 0.4}, 0.7),
        ({"project": 0.6, "company": 0.4}, 2.0),
        ({"project": 0.6, "city": 0.4}, 1.0),
        ({"event": 0.6, "city": 0.4}, 1.0),
        ({"person": 0.4, "company": 0.2, "city": 0.15, "project": 0.15, "event": 0.1}, 3.0),
    ]
    weights = rng.choices([g for g, _ in groups], [w for _, w in groups])[0]
    allowed: dict[str, list[Relation]] = {}
    for kind in SUBJECTS:
        allowed[kind] = []
        if kind in weights:
            allowed[kind] = rng.sample(SUBJECTS[kind], min(len(SUBJECTS[kind]), rng.choice(per_type)))
    links = (("person", "company", "work"), ("person", "city", "home"), ("project", "company", "client"),
             ("project", "city", "site"), ("event", "city", "place"))  # fmt: skip
    for place, (subject, value, name) in enumerate(links):
        if subject in weights and value in weights and RELATIONS[name] not in allowed[subject]:
            allowed[subject][-(place % 2)] = RELATIONS[name]
    return allowed, weights
