"""Random conversations have the ids of the tokenizer's own `apply_chat_template`, for every kind of template."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from chat_templates import SPECIALS, TEMPLATES, Template
from pages import SMOLLM2
from transformers import AddedToken, AutoTokenizer

from ragblend.demo import WEIGHTS
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Message, Prompt, ToolCall

WORDS = (
    "the chunk", " of", " question", ".", ",", "?", "!", "'s", " 42", "3.14", "\n", "\n\n", "\r\n", "\t", " ", "   ",
    "    if x:", "{", '"', "\\", "</think>", "<", "|", "<tool_call>", "é", "e\u0301", "ß", "日本語", "한국", "עברית",
    "हिन्दी", "🙂", "👩\u200d👩\u200d👧", "\u200b", "\xa0", "\ufeff", "\ue0ff", "\u2028", "\x00", "ragblendcontrol0end",
)  # fmt: skip
NEUTRAL = "neutral"  # replaces a control token in a content; WORDS do not have it
Turn = dict[str, Any]


class Case(NamedTuple):
    """A tokenizer and what its chat template takes."""

    name: str
    tokenizer: Any
    template: Template
    renderer: Renderer
    control: frozenset[int]


@pytest.fixture(scope="module")
def cases(make_tokenizer, make_spaced_tokenizer):
    """Every template with tokenizers of three kinds, the demo model, and SmolLM2 where it is prepared."""
    made = []
    for name, template in TEMPLATES.items():
        for kind, make in (("byte level", make_tokenizer), ("spaced", make_spaced_tokenizer)):
            made.append((f"{name}, {kind}", make(template.text, SPECIALS), template))
        swallows = make_tokenizer(template.text)
        tokens = [AddedToken(text, special=True, lstrip="INST" in text, rstrip=True) for text in SPECIALS]
        swallows.add_special_tokens({"additional_special_tokens": tokens})
        made.append((f"{name}, swallows spaces", swallows, template))
    for path in (WEIGHTS, SMOLLM2):
        if path.exists():
            made.append((str(path), AutoTokenizer.from_pretrained(path), Template("")))
    result = []
    for name, tokenizer, template in made:
        renderer = Renderer(tokenizer)
        result.append(Case(name, tokenizer, template, renderer, frozenset(renderer._control_ids.values())))
    return result


def random_text(rng: random.Random, control: Sequence[str]) -> str:
    """A text of WORDS, of any characters and, one in twelve words, of `control`."""
    size = rng.choice([0, 1, 3, 10, 30, 30])
    size = 4000 if rng.random() < 0.005 else size
    words = rng.choices(WORDS, k=size) + [chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x30000)]))] * (
        size > 3
    )
    if control and words:
        words += rng.choices(control, k=max(1, size // 12))
    rng.shuffle(words)
    return "".join(words)


def random_conversation(rng: random.Random, case: Case, control: Sequence[str]) -> tuple[list[Turn], list[Turn]]:
    """Turns and tools as `apply_chat_template` takes them."""
    template = case.template
    turns: list[Turn] = []
    if template.system and rng.random() < 0.5:
        turns.append({"role": "system", "content": random_text(rng, control)})
    tools: list[Turn] = []
    if template.tools and rng.random() < 0.7:
        properties = {random_text(rng, control)[:20]: {"type": "string", "description": random_text(rng, control)}}
        parameters = {"type": "object", "properties": properties}
        function = {"name": "look-up", "description": random_text(rng, control), "parameters": parameters}
        tools = [{"type": "function", "function": function}]
    for number in range(rng.randrange(1, 8)):
        role = ("user", "assistant")[number % 2] if template.alternates else rng.choice(["user", "assistant"])
        if tools and rng.random() < 0.4:
            arguments = {random_text(rng, control)[:20]: random_text(rng, control), "n": rng.random()}
            call = {
                "id": f"call{number:05}",
                "type": "function",
                "function": {"name": "look-up", "arguments": arguments},
            }
            turns.append({"role": "assistant", "content": "", "tool_calls": [call] * rng.randrange(1, 3)})
            turns.append(
                {"role": "tool", "content": random_text(rng, control), "tool_call_id": call["id"], "name": "f"}
            )
        turns.append({"role": role, "content": random_text(rng, control)})
    turns[-1]["content"] += "x"  # a prompt of nothing is refused
    return turns, tools


def as_prompt(turns: Sequence[Turn], tools: Sequence[Turn]) -> Prompt:
    messages = [
        Message(
            turn["role"],
            turn["content"],
            tuple(
                ToolCall(call["function"]["name"], json.dumps(call["function"]["arguments"]), call["id"])
                for call in turn.get("tool_calls", ())
            ),
            turn.get("tool_call_id", ""),
            turn.get("name", ""),
        )
        for turn in turns
    ]
    return Prompt.from_messages(messages, tools)


def own(case: Case, turns: Sequence[Turn], tools: Sequence[Turn], *, tokenize: bool = True) -> Any:
    """What the tokenizer makes of a conversation itself: ids or text."""
    more = {"tools": tools} if tools else {}
    return case.tokenizer.apply_chat_template(
        turns, tokenize=tokenize, add_generation_prompt=True, return_dict=False, **more
    )


def neutral(case: Case, value: Any) -> Any:
    """Return `value` with NEUTRAL for each control token in its texts."""
    if isinstance(value, str):
        return case.renderer._control.sub(NEUTRAL, value)
    if isinstance(value, dict):
        return {neutral(case, name): neutral(case, item) for name, item in value.items()}
    return [neutral(case, item) for item in value] if isinstance(value, list) else value


def between_control(case: Case, ids: Sequence[int]) -> list[tuple[int, ...]]:
    """The ids in groups: each control token alone, and all ids between two of them."""
    return [
        group
        for is_control, tokens in groupby(ids, case.control.__contains__)
        for group in ([(token,) for token in tokens] if is_control else [tuple(tokens)])
    ]


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_control_stays_text(case: Case, number: int, turns: Sequence[Turn], tools: Sequence[Turn]) -> None:
    """Control tokens of the template are all there are; no other turn changes; the text is what was written."""
    ids = case.renderer.render(as_prompt(turns, tools))
    groups = between_control(case, ids)
    expected = between_control(case, own(case, neutral(case, turns), neutral(case, tools)))
    differ = [
        place
        for place, (group, other) in enumerate(zip(groups, expected, strict=True))
        if group != other and NEUTRAL not in case.tokenizer.decode(other)
    ]
    assert not differ, (case.name, number)
    text = own(case, turns, tools, tokenize=False).replace('<|\\"|>', '<|"|>')  # tools are written as JSON
    assert squeezed(case.tokenizer.decode(ids)) == squeezed(text), (case.name, number)


@pytest.mark.parametrize("count", [250, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_models_own_rendering(count, cases):
    for number in range(count):
        case, rng = cases[number % len(cases)], random.Random(number)
        turns, tools = random_conversation(rng, case, ())
        assert case.renderer.render(as_prompt(turns, tools)) == own(case, turns, tools), (case.name, number)


@pytest.mark.parametrize("count", [250, pytest.param(2_500, marks=pytest.mark.slow)])
def test_control_tokens_in_contents_stay_text_and_change_nothing_else(count, cases):
    for number in range(count):
        case, rng = cases[number % len(cases)], random.Random(number)
        turns, tools = random_conversation(rng, case, list(case.renderer._control_ids))
        check_control_stays_text(case, number, turns, tools)
