"""Chat templates: turns in the form and order that a template accepts, the default template, and the pinned date.

Depends on messages and the language of templates, not on tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ragblend.prompt.types import CHUNK_SEPARATOR, Message, Prompt

PINNED_DATE = datetime(2024, 7, 26)
"""Date in stored prefixes of a chat template that writes today's date, so that their KV is found on later days."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}\n\n"
    "{% elif message.role == 'assistant' %}Answer: {{ message.content }}\n\n"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
"""The chat template for tokenizers that have none."""

# Template code that defines `strftime_now` for PINNED_DATE, with a replacement for each of strftime's directives.
# Arguments of a template may only be plain data, so the clock is written as a macro.
_READINGS = {f"%{letter}": PINNED_DATE.strftime(f"%{letter}") for letter in "dmyYBbAajHIMSpxXcZzUWwGVuf"}
_READINGS = {f"%-{name[1]}": text.lstrip("0") or "0" for name, text in _READINGS.items()} | _READINGS
PINNED_CLOCK = (
    "{% macro strftime_now(format) %}{% set read = namespace(text=format) %}"
    + "".join(f"{{% set read.text = read.text | replace({name!r}, {text!r}) %}}" for name, text in _READINGS.items())
    + "{{ read.text }}{% endmacro %}{{ '' }}"
)

Turn = Mapping[str, Any]
"""Message in the form that chat templates read."""


def as_turn(message: Message) -> Turn:
    """Return a message in the form that chat templates read."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parsed_arguments(call.arguments)},
            }
            for call in message.calls
        ]
    if message.role == "tool":
        turn |= {"tool_call_id": message.call_id, "name": message.name}
    return turn


def _parsed_arguments(arguments: str) -> Any:
    """Return the JSON object in `arguments`, or `arguments` itself if it is no JSON object."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def turn_arrangements(prompt: Prompt) -> Iterator[Sequence[Message]]:
    """Yield the prompt's turns, and then other versions of the turns for templates that reject the first version.

    A prompt with tool calls or results has two versions. In both, tool results have the name of their tool. In the
    second one, call ids have nine letters and digits, for Mistral.

    For other prompts, the second version merges adjacent turns of one role, for Gemma and Mistral. If the first turn is
    a system text, a third version also moves this text to the start of the next turn. If there is no next turn, the
    text becomes a user turn.
    """
    if any(message.calls or message.role == "tool" for message in prompt.messages):
        named = _with_tool_names(prompt.messages)
        yield named
        yield _with_short_call_ids(named)
        return
    messages = prompt.messages
    yield messages
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            message = replace(message, content=merged.pop().content + CHUNK_SEPARATOR + message.content)
        merged.append(message)
    yield merged
    if merged[0].role == "system":
        system, first = merged[0], merged[1:2]
        content = system.content + CHUNK_SEPARATOR + first[0].content if first else system.content
        yield [Message(first[0].role if first else "user", content), *merged[2:]]


def _with_short_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with new call ids of nine letters and digits."""
    ids: dict[str, str] = {}

    def short(call_id: str) -> str:
        return ids.setdefault(call_id, f"call{len(ids):05}")

    return [
        replace(
            message,
            calls=tuple(replace(call, id=short(call.id)) for call in message.calls),
            call_id=short(message.call_id) if message.role == "tool" else message.call_id,
        )
        for message in messages
    ]


def _with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the tool's name in each tool turn without one, from the call that it answers."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return [
        replace(message, name=names.get(message.call_id, ""))
        if message.role == "tool" and not message.name
        else message
        for message in messages
    ]


def controls_model(token: str) -> bool:
    """Return True if an added token controls the model, for example `<tool_call>`, although it is not marked special.

    Runs of spaces (GPT-NeoX, OLMo), newlines (Gemma) and single letters that a tokenizer adds are ordinary text.

    >>> controls_model("<think>"), controls_model("    "), controls_model("é")
    (True, False, False)
    """
    return len(token) > 1 and any(letter.isalnum() for letter in token)
