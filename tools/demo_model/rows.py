"""Training rows: one story and as many of its questions as fit, as ids, positions and loss groups.

Generated on the fly and never repeated. Knows the tokenizer and the world; nothing about the model.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import world
from tools.demo_model.questions import Question, all_questions
from tools.demo_model.stories import Plan, Story, focus, tell
from tools.demo_model.tokenizer import ANSWER, BOS, DOC, EOS, PAD, QUESTION, SYSTEM, SYSTEM_TEXTS, encode, token_id

NONE, TEXT, SINGLE, STOP, REPEAT, TWO_HOP, COMPARE, GAP = range(8)
"""Loss groups of a target token: none, running text, one-fact answer, end, repetition, two-hop, comparison, gap."""

GROUP = {"one_hop": SINGLE, "cross_ref": SINGLE, "comparison": COMPARE, "not_stated": GAP}
DRAW = {"one_hop": 1.0, "cross_ref": 4.0, "two_hop_chunk": 2.0, "two_hop_cross": 2.0, "two_hop_ref": 4.0,
        "comparison": 1.0, "not_stated": 1.0}  # fmt: skip
MAX_POSITIONS = 4096


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What rows a stage trains on."""

    length: int
    far: float = 0.0  # share of rows whose chunks stand far apart in position
    induction: float = 0.0  # share of repeated random words
    pairs: float = 0.0  # share of bare "name value." lists
    dates: float = 0.0  # share of stories that give many years and are asked to compare them
    easy: bool = False  # one relation per story, no references
    one_hops: float = 1.0  # share of one-hop questions kept


class Batch(NamedTuple):
    """ids [B, T+1]; positions [B, T]; groups [B, T+1]; middle: flat indices into [B*T] and their target ids."""

    ids: Tensor
    positions: Tensor
    groups: Tensor
    middle_index: Tensor
    middle_target: Tensor


class _Row(NamedTuple):
    ids: list[int]
    groups: list[int]
    middles: list[tuple[int, int]]
    borders: list[tuple[int, bool]]  # where chunks and the first question begin; True: a new run


class RowMaker:
    """Makes batches of one stage; deterministic for a seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.special = {name: token_id(tokenizer, name) for name in (PAD, BOS, EOS, DOC, QUESTION, ANSWER, SYSTEM)}
        self.cache: dict[str, list[int]] = {}
        names = [name for values in world.VALUES.values() for name in values]
        self.word_ids = [encode(tokenizer, name)[0] for name in names]

    def ids(self, text: str) -> list[int]:
        """Ids of `text`, remembered."""
        if len(self.cache) > 100_000:
            self.cache.clear()
        if text not in self.cache:
            self.cache[text] = encode(self.tokenizer, text)
        return self.cache[text]

    def batch(self, plan: RowPlan, num_rows: int, text_share: float = 0.1) -> Batch:
        """`num_rows` rows of `plan.length` tokens; `text_share` of running text counts in the loss."""
        length = plan.length
        rows = [self.row(plan) for _ in range(num_rows)]
        ids = torch.full((num_rows, length + 1), self.special[PAD])
        groups = torch.zeros((num_rows, length + 1), dtype=torch.long)
        middles: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            groups[index, : len(row.ids)] = torch.tensor(row.groups)
            text = (groups[index, : len(row.ids)] == NONE) & (torch.rand(len(row.ids)) < text_share)
            groups[index, : len(row.ids)][text] = TEXT
            middles += [(index * length + place, target) for place, target in row.middles if place < length]
        pairs = torch.tensor(middles, dtype=torch.long).reshape(-1, 2)
        return Batch(ids, self.positions(rows, length, plan.far), groups, pairs[:, 0], pairs[:, 1])

    def positions(self, rows: list[_Row], length: int, far: float) -> Tensor:
        """Positions [B, T]: contiguous, or with jumps: far ones before runs and questions, short ones inside runs."""
        jumps = torch.zeros(len(rows), length)
        for index, row in enumerate(rows):
            if self.rng.random() >= far or not row.borders:
                continue
            limit = length * math.exp(self.rng.random() * math.log(MAX_POSITIONS / length)) - length
            near = {place: self.rng.randint(0, 120) for place, opens_run in row.borders if not opens_run}
            weights = {place: self.rng.random() ** 3 for place, opens_run in row.borders if opens_run}
            spare = limit - sum(near.values())
            if spare < 0:
                continue
            for place, jump in near.items():
                jumps[index, place] = jump
            for place, weight in weights.items():
                jumps[index, place] = math.floor(spare * weight / sum(weights.values()))
        return jumps.cumsum(1) + torch.arange(length)

    def row(self, plan: RowPlan) -> _Row:
        """One row of at most `plan.length + 1` ids."""
        kind = self.rng.random()
        if kind < plan.induction:
            return self.repeated_words(plan.length)
        if kind < plan.induction + plan.pairs:
            return self.bare_pairs(plan.length)
        return self.story_row(plan)

    def repeated_words(self, length: int) -> _Row:
        """A random sequence of words, again and again: what induction heads learn from."""
        period = self.rng.randint(6, length // 2)
        ids = ([self.rng.choice(self.word_ids) for _ in range(period)] * 12)[: length + 1]
        return _Row(ids, [NONE] * (period + 1) + [REPEAT] * (len(ids) - period - 1), [], [])

    def bare_pairs(self, length: int) -> _Row:
        """`name value.` several times, then names to be answered with their values."""
        rng, used = self.rng, set[str]()
        kind = rng.choice(list(world.VALUES))
        pairs = []
        for _ in range(rng.randint(2, 6)):
            entity = world.draw_entity(rng, "person" if rng.random() < 0.6 else "company", "train", used)
            value = entity and world.draw_value(rng, kind, entity, "train", used)
            if entity and value:
                pairs.append((self.ids(entity.name), self.ids(value.name)))
        dot = token_id(self.tokenizer, ".")
        ids = [self.special[DOC]]
        for name, told in pairs:
            ids += [*name, *told, dot]
        groups = [NONE] * len(ids)
        rng.shuffle(pairs)
        for name, told in pairs:
            if len(ids) + len(name) + len(told) + 3 > length + 1:
                break
            ids += [self.special[QUESTION], *name, self.special[ANSWER], *told, self.special[EOS]]
            groups += [NONE] * (len(name) + 2) + [SINGLE] * len(told) + [STOP]
        return _Row(ids[: length + 1], groups[: length + 1], [], [])

    def story_row(self, plan: RowPlan) -> _Row:
        """A story and a draw of its questions."""
        rng, special = self.rng, self.special
        while True:
            dates = rng.random() < plan.dates
            story = tell(rng, self.dates_plan(plan) if dates else self.story_plan(plan), "train")
            ids = [special[BOS]] if rng.random() < 0.9 else []
            if ids and rng.random() < 0.3:
                ids += [special[SYSTEM], *self.ids(rng.choice(SYSTEM_TEXTS))]
            borders = []
            for chunk, opens_run in zip(story.chunks, story.opens_run, strict=True):
                borders.append((len(ids), opens_run))
                ids.append(special[DOC])
                ids += encode(self.tokenizer, chunk)
            if len(ids) <= plan.length - (40 if plan.length > 96 else 20):
                break
        groups, middles = [NONE] * len(ids), []
        borders.append((len(ids), True))
        for question in self.draw(story, plan, dates):
            asked, answer = encode(self.tokenizer, question.text), self.ids(question.answer)
            if len(ids) + len(asked) + len(answer) + 3 > plan.length + 1:
                continue
            for subject, known in question.steps:
                middles.append((len(ids) + 1 + _last(asked, self.ids(subject.name)[-1]), self.ids(known.name)[0]))
            ids += [special[QUESTION], *asked, special[ANSWER], *answer, special[EOS]]
            groups += [NONE] * (len(asked) + 2)
            groups += [GROUP.get(question.kind, TWO_HOP)] * len(answer) + [STOP]
        return _Row(ids, groups, middles, borders)

    def draw(self, story: Story, plan: RowPlan, dates: bool) -> list[Question]:
        """The story's questions in random order, hard kinds first more often, unguessable ones mostly."""
        rng = self.rng
        num_comparisons = plan.length // 24 if dates else 6
        kept = [q for q in all_questions(rng, story, "train", num_comparisons) if q.guess < 1 or rng.random() < 0.25]
        if dates:
            kept = [q for q in kept if q.kind in ("one_hop", "comparison") and rng.random() < 0.9]
            return sorted(kept, key=lambda q: -(rng.random() ** (1 / (6 if q.kind == "comparison" else 1))))
        kept = [q for q in kept if q.kind != "one_hop" or rng.random() < plan.one_hops]
        if plan.easy:
            kept = [q for q in kept if q.kind == "one_hop"]
        return sorted(kept, key=lambda q: -(rng.random() ** (1 / DRAW[q.kind])))

    def story_plan(self, plan: RowPlan) -> Plan:
        """Lengths and probabilities of one story that should fit `plan.length`."""
        rng = self.rng
        if plan.easy:
            kind = rng.choice(("person", "person", "company", "city", "project", "event"))
            allowed = {name: [rng.choice(relations)] for name, relations in world.SUBJECTS.items()}
            return Plan((1,) * rng.randint(2, 4), (1, 1), allowed, {kind: 1.0}, cross=0, inside=0, new=0.95)
        sentences = max(2, round(plan.length * rng.uniform(0.25 if plan.length < 512 else 0.4, 0.82) / 11))
        short, middling, long = (1, 2, 2, 3), (1, 2, 3, 5, 7), (3, 5, 7, 10, 14)
        per_chunk = rng.choice(short if plan.length < 384 else middling if plan.length < 512 else long)
        num_chunks = max(1, min(max(24, plan.length // 64), round(sentences / per_chunk)))
        allowed, weights = focus(rng, (1, 2, 2) if plan.length < 512 else (2, 3, 4))
        return Plan(
            run_lengths(rng, num_chunks), (max(1, per_chunk - 1), per_chunk + 1), allowed, weights,
            cross=rng.choice((0.3, 0.5, 0.7)), inside=rng.choice((0.2, 0.5)), new=rng.choice((0.2, 0.3, 0.5)),
            chain=0.8, filler=rng.choice((0, 0, 0, 0.2)), title=rng.choice((0, 0.3, 0.6)),
            compound=rng.choice((0, 0.15, 0.3)), plain=rng.choice((0.7, 0.95)),
        )  # fmt: skip

    def dates_plan(self, plan: RowPlan) -> Plan:
        """Companies and the years they were founded in, with some other facts between: to learn the order of years."""
        rng = self.rng
        sentences = max(3, round(plan.length * rng.uniform(0.2, 0.5) / 10))
        per_chunk = rng.choice((1, 2, 3, 5))
        others = rng.choice(([], [], [world.RELATIONS["make"]], [world.RELATIONS["base"]]))
        return Plan(
            run_lengths(rng, max(1, round(sentences / per_chunk))), (per_chunk, per_chunk + 1),
            {"company": [world.RELATIONS["found"], *others]}, {"company": 1.0},
            cross=0.0, inside=0.2, new=0.8, filler=rng.choice((0, 0, 0.2)), title=0.1, plain=0.9,
        )  # fmt: skip


def run_lengths(rng: random.Random, num_chunks: int) -> tuple[int, ...]:
    """`num_chunks` split into runs of one to four."""
    lengths: list[int] = []
    while sum(lengths) < num_chunks:
        lengths.append(min(rng.choice((1, 2, 2, 3, 4)), num_chunks - sum(lengths)))
    return tuple(lengths)


def _last(ids: list[int], wanted: int) -> int:
    return max(index for index, token in enumerate(ids) if token == wanted)
