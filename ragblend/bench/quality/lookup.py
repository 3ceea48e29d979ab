"""Prompts that only reading answers: values under keys, among many others. Made, not collected; seeded; any length.

Three kinds, each over passages that are full of statements of the same form, so that nothing but the statement itself
gives the answer away:

- `key_value`: one value by its key (the synthetic task of Liu et al., *Lost in the Middle*, TACL 2024);
- `needles`: three values by three keys, in the order asked ("multi-query" of Hsieh et al., *RULER*, COLM 2024);
- `tracking`: a value handed from name to name, each step in another passage ("variable tracking" of RULER). A chunk
  read alone holds a link without its end: this is where reuse without recompute must fail.

The idea is theirs; words, wording and generator are our own. Knows words and a token counter; no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise, product

from ragblend.bench.quality.cases import Case
from ragblend.errors import UsageError

KINDS = ("key_value", "needles", "tracking")
NUM_NEEDLES, NUM_LINKS = 3, 3

# ruff: noqa: SIM905 (lists of words)
_COLOURS = "amber azure black blond bronze brown copper coral crimson cyan golden green grey indigo ivory jade".split()
_THINGS = (
    "anchor apple arrow badge barrel basket bell bottle bridge candle castle clock cloud crown drum eagle falcon "
    "feather fiddle garden hammer harbour island kettle ladder lantern lemon lion marble mirror needle orchard otter"
).split()
_PLACES = "Athens Berlin Cairo Dublin Essen Florence Geneva Hanoi Lisbon Madrid Nairobi Oslo Paris Quito Rome".split()


def lookup_cases(
    num_chunks: int, chunk_tokens: int, count_tokens: Callable[[str], int], seed: int = 0
) -> Iterator[Case]:
    """Cases without end, the kinds in turn: `num_chunks` passages of at most `chunk_tokens` tokens each.

    Equal arguments give equal cases. Raises UsageError where a passage holds fewer than four statements."""
    draw = random.Random(seed)
    for kind in cycle(KINDS):
        yield _case(kind, num_chunks, chunk_tokens, count_tokens, draw)


def _case(
    kind: str, num_chunks: int, chunk_tokens: int, count_tokens: Callable[[str], int], draw: random.Random
) -> Case:
    keys = _keys(draw)
    if kind == "tracking":
        names = [next(keys) for _ in range(NUM_LINKS)]
        value = _value(draw)
        facts = [_stated(names[0], value), *(f"The code of the {b} is that of the {a}." for a, b in pairwise(names))]
        question, gold = f"What is the code of the {names[-1]}? Answer with the number only.", value
    else:
        values = {next(keys): _value(draw) for _ in range(NUM_NEEDLES if kind == "needles" else 1)}
        facts = [_stated(key, value) for key, value in values.items()]
        asked, gold = ", of the ".join(values), ", ".join(values.values())
        what = "What is the code" if len(values) == 1 else "What are the codes"
        question = f"{what} of the {asked}? Answer with the number{'s' * (len(values) > 1)} only, in this order."
        question = question.replace(", in this order", "") if len(values) == 1 else question
    return Case(question, (gold,), tuple(_passages(facts, keys, num_chunks, chunk_tokens, count_tokens, draw)), kind)


def _passages(
    facts: Sequence[str],
    keys: Iterator[str],
    num_chunks: int,
    chunk_tokens: int,
    count_tokens: Callable[[str], int],
    draw: random.Random,
) -> Iterator[str]:
    """Passages that are full, with `facts` in passages of their own where there are enough, in any order."""
    each = count_tokens(_stated("yellow trumpet of Florence", "0000")) + 1  # hardly any statement is longer
    room = chunk_tokens // each
    if room < 4:
        raise UsageError(f"a chunk of {chunk_tokens} tokens holds {room} statements; choose --chunk-tokens {4 * each}")
    turns = draw.sample(range(num_chunks), num_chunks)
    homes: list[list[str]] = [[] for _ in range(num_chunks)]
    for fact, place in zip(facts, cycle(turns), strict=False):
        homes[place].append(fact)
    for stated in homes:
        told = [*stated, *(_stated(next(keys), _value(draw)) for _ in range(room - len(stated)))]
        draw.shuffle(told)
        yield " ".join(told)


def _stated(key: str, value: str) -> str:
    return f"The code of the {key} is {value}."


def _value(draw: random.Random) -> str:
    return str(draw.randrange(1000, 10_000))


def _keys(draw: random.Random) -> Iterator[str]:
    """Keys that differ, short ones first: a long prompt needs more than there are pairs of words."""
    pairs = [f"{colour} {thing}" for colour, thing in product(_COLOURS, _THINGS)]
    draw.shuffle(pairs)
    yield from pairs
    for place in _PLACES:
        yield from (f"{pair} of {place}" for pair in pairs)
    raise UsageError(f"the prompt is longer than {len(pairs) * (len(_PLACES) + 1)} statements; choose a shorter one")
