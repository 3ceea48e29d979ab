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

    1. The turns as they are; tool results have the name of their tool.
    2. Adjacent turns of one role are one turn, for Gemma and Mistral.
    3. System texts after the first turn are user turns, and adjacent turns of one role are one turn.
    4. The first system text is a user turn, too.

    If the prompt has tool calls or results, each version is followed by one in which the ids of calls have nine letters
    and digits, for Mistral.
    """
    messages: Sequence[Message] = prompt.messages
    uses_tools = any(message.calls or message.role == "tool" for message in messages)
    if uses_tools:
        messages = _with_tool_names(messages)
        yield messages
        yield _with_short_call_ids(messages)
    else:
        yield messages
    merged = _merge_adjacent(messages)
    as_user = [replace(message, role="user") if message.role == "system" else message for message in merged]
    for version in (merged, _merge_adjacent([*merged[:1], *as_user[1:]]), _merge_adjacent(as_user)):
        yield version
        if uses_tools:
            yield _with_short_call_ids(version)


def _merge_adjacent(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with adjacent ones of a role joined by a blank line. Tool calls and results stay apart."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is not None and before.role == message.role != "tool" and not (before.calls or message.calls):
            merged[-1] = replace(before, content=before.content + CHUNK_SEPARATOR + message.content)
        else:
            merged.append(message)
    return merged


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
