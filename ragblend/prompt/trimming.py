"""What a chat template leaves out of the turns it is given: whitespace at their ends, and what a model thought before.

Contents are never put through a template, only slots for them. So a template that trims or cuts is found out by giving
it slots with whitespace, or with a thought, beside them. Knows turns and parts. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ragblend.prompt.prompt import Part

_THOUGHT, _THOUGHT_END = "RAGBLENDTHOUGHT", "</think>"


class RenderedTemplate(NamedTuple):
    """What a template wrote: `literals` before, between and after the contents, whose numbers are in `order`."""

    literals: list[str]
    order: list[int]


Write = Callable[[Sequence[Mapping[str, Any]]], RenderedTemplate]
"""Turns through the template. Raises UsageError for those that it refuses, drops or repeats."""


def detect_trimming(
    turns: Sequence[Mapping[str, Any]], contents: Sequence[tuple[Part, ...]], slots: Mapping[str, int], write: Write
) -> tuple[RenderedTemplate, list[tuple[Part, ...]]]:
    """What the template writes around the contents, and what it takes of each.

    turns: as templates read them, the content of each one of the `slots`, which say its number, or no content.
    """
    turn_by_number = {slots[turn["content"]]: turn for turn in turns if turn["content"] in slots}
    taken, thoughts = list(contents), dict[int, str]()

    def tried(before: Mapping[int, str], after: Mapping[int, str]) -> RenderedTemplate:
        given = {number: (before.get(number, ""), after.get(number, "")) for number in turn_by_number}
        return write(
            [
                {**turn, "content": turn["content"].join(given[slots[turn["content"]]])}
                if turn["content"] in slots
                else turn
                for turn in turns
            ]
        )

    for number, turn in turn_by_number.items():
        answer = _behind_thought(contents[number]) if turn["role"] == "assistant" else None
        mark = {**thoughts, number: _THOUGHT + _THOUGHT_END}
        if answer is not None and not any(_THOUGHT in literal for literal in tried(mark, {}).literals):
            taken[number], thoughts = answer, mark
    plain = tried(thoughts, {})
    leads = {number: lead for number in turn_by_number if (lead := _lead(taken[number]))}
    if leads:
        wider = tried({number: thoughts.get(number, "") + leads.get(number, "") for number in turn_by_number}, {})
        for place, number in enumerate(plain.order):
            if number in leads:
                kept = _growth(plain, wider, place)
                first, *rest = taken[number]
                taken[number] = (str(first)[max(0, len(leads[number]) - kept) :], *rest)
    tails = {number: tail for number in turn_by_number if (tail := _tail(taken[number]))}
    if tails:
        wider = tried(thoughts, tails)
        for place, number in enumerate(plain.order, start=1):
            if number in tails:
                cut = max(0, len(tails[number]) - _growth(plain, wider, place))
                *rest, last = taken[number]
                taken[number] = (*rest, str(last)[: len(str(last)) - cut])
    return plain, taken


def _growth(plain: RenderedTemplate, wider: RenderedTemplate, place: int) -> int:
    """How many characters of what stood beside a slot the template kept."""
    return len(wider.literals[place]) - len(plain.literals[place])


def _lead(parts: Sequence[Part]) -> str:
    """The whitespace that a content begins with."""
    first = parts[0] if parts else ""
    return first[: len(first) - len(first.lstrip())] if isinstance(first, str) else ""


def _tail(parts: Sequence[Part]) -> str:
    """The whitespace that a content ends with."""
    last = parts[-1] if parts else ""
    return last[len(last.rstrip()) :] if isinstance(last, str) else ""


def _behind_thought(parts: Sequence[Part]) -> tuple[Part, ...] | None:
    """What follows the last thought in an answer; None where there is none."""
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, str) and _THOUGHT_END in part:
            return (part.rpartition(_THOUGHT_END)[2], *parts[index + 1 :])
    return None
