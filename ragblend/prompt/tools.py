"""Tools in a prompt and calls in an answer: the format of calls, a grammar for answers that are calls, a reader.

A `CallFormat` is the text around a call. `find_call_format` reads it from calls that the model's chat template renders.
For a model whose template does not support tools, `tool_use_as_text` describes them and the format `HERMES` in the
system text. Depends on texts and JSON, not on tokens, engines or frameworks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ragblend.errors import UsageError
from ragblend.prompt.schemas import describes_object
from ragblend.prompt.types import CHUNK_SEPARATOR, Message, Prompt

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Valid names of a tool, none of which could be read as a control token."""

_TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text form in which a model writes calls: `opening` CALL (`delimiter` CALL)* `closing`.

    CALL is `begin` NAME `middle` JSON `end`. If `delimiter` is None, an answer has at most one call.
    """

    begin: str
    middle: str
    end: str
    delimiter: str | None = "\n"
    opening: str = ""
    closing: str = ""

    def without_control_tokens(self, strip: Callable[[str], str]) -> CallFormat:
        """Return the format without control tokens. `strip` removes them from a text, as decoding does."""
        parts = {name: strip(getattr(self, name)) for name in ("begin", "middle", "end", "opening", "closing")}
        return replace(self, **parts, delimiter=None if self.delimiter is None else strip(self.delimiter))

    def format_calls(self, calls: Iterable[Any]) -> str:
        """Return the text of ToolCalls in this format."""
        texts = (f"{self.begin}{call.name}{self.middle}{call.arguments}{self.end}" for call in calls)
        return self.opening + (self.delimiter or "").join(texts) + self.closing


HERMES = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
"""Format of most templates with tools, also used for models whose template does not support tools."""


def infer_call_format(one: str, two: str | None, names: Sequence[str], slots: Sequence[str]) -> CallFormat | None:
    """Return the call format of a template; None if its calls have no such format.

    `one`, `two`: the template's text of one call, and of two calls; `two` is None if the template rejects two calls.
    `names`: the tools of the two calls. `slots`: placeholders in the texts, where the arguments of the calls are.

    >>> one = "[CALLS] [{'name': 'add', 'args': X}]"
    >>> two = "[CALLS] [{'name': 'add', 'args': X}, {'name': 'sub', 'args': Y}]"
    >>> infer_call_format(one, two, ("add", "sub"), "XY")
    CallFormat(begin="{'name': '", middle="', 'args': ", end='}', delimiter=', ', opening='[CALLS] [', closing=']')
    """
    first = re.fullmatch(rf"(.*?){names[0]}(.*?){slots[0]}(.*)", one, re.DOTALL)
    if first is None:
        return None
    lead, middle, tail = first.groups()
    if two is None:
        return CallFormat(lead, middle, tail, None)
    pattern = map(re.escape, (lead + names[0] + middle + slots[0], names[1] + middle + slots[1] + tail))
    both = re.fullmatch("(.*)".join(pattern), two, re.DOTALL)
    if both is None:
        return None
    between = both[1]
    begin = _common_start(lead[::-1], between[::-1])[::-1]
    end = _common_start(tail, between[: len(between) - len(begin)])
    delimiter = between[len(end) : len(between) - len(begin)]
    return CallFormat(begin, middle, end, delimiter, lead[: len(lead) - len(begin)], tail[len(end) :])


def find_call_format(apply_template: Callable[..., str]) -> CallFormat | None:
    """Return the format in which a chat template writes tool calls.

    The result is None if the template does not support tools, or does not write arguments as JSON.
    `apply_template(turns, tools, add_generation_prompt=...)` returns the text that the template writes.
    """
    names, slots = ("ragblendone", "ragblendtwo"), ("RAGBLENDSLOT0END", "RAGBLENDSLOT1END")
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": {}}} for name in names]
    question = {"role": "user", "content": "x"}
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": {f"RAGBLENDJSON{number}END": 0}},
        }
        for number, name in enumerate(names)
    ]

    def rendered(*turns: Mapping[str, Any], add_generation_prompt: bool = True) -> str:
        return _ARGUMENTS.sub(
            r"RAGBLENDSLOT\1END", apply_template(turns, tools, add_generation_prompt=add_generation_prompt)
        )

    def called(num_calls: int) -> str:
        answer = {"role": "assistant", "content": "", "tool_calls": calls[:num_calls]}
        text = rendered(question, answer, add_generation_prompt=False)
        return text.removeprefix(head).removesuffix(tail) if text.startswith(head) else ""

    result = {"role": "tool", "content": "RAGBLENDRESULT", "tool_call_id": calls[0]["id"], "name": names[0]}
    try:
        head = rendered(question)
        tail = rendered(question, {"role": "assistant", "content": slots[0]}, add_generation_prompt=False).rpartition(
            slots[0]
        )[2]
        one = called(1)
        answered = rendered(question, {"role": "assistant", "content": "", "tool_calls": calls[:1]}, result)
    except UsageError:
        return None
    try:
        two: str | None = called(2)
    except UsageError:  # one call at a time (Llama 3.1)
        two = None
    knows_tools = names[0] in head and "RAGBLENDRESULT" in answered
    return infer_call_format(one, two, names, slots) if knows_tools else None


# The probe's arguments are a JSON object, so a template that writes arguments in another form does not match.
_ARGUMENTS = re.compile(r'\{\s*"RAGBLENDJSON(\d+)END"\s*:\s*0\s*\}')


def _common_start(first: str, second: str) -> str:
    size = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:size]


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError for tools that are not described as OpenAI describes a function."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not NAME.fullmatch(str(function.get("name", ""))):
            raise UsageError(
                f"the tool {str(tool)[:80]!r} is no function with a name of letters, digits and _.:-; write it as "
                "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': SCHEMA}}"
            )
        parameters = function.get("parameters")
        if parameters and not describes_object(parameters):
            raise UsageError(
                f"the parameters of the tool {function['name']!r} are {str(parameters)[:80]}, but the arguments of a "
                "call are an object; write them as {'type': 'object', 'properties': {...}}"
            )


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools, in order."""
    return [tool["function"]["name"] for tool in tools]


def tool_use_as_text(prompt: Prompt) -> Prompt:
    """Return `prompt` with its tools, calls and results as text, for a template that does not support tools."""
    return _tools_in_system_text(prompt) if prompt.tools else _results_in_user_turns(prompt)


def _tools_in_system_text(prompt: Prompt) -> Prompt:
    """Return `prompt` with its tools described in the system text, and calls and results as text of the turns.

    Adjacent turns that then have the same role are merged.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in prompt.tools)
    messages = list(prompt.messages)
    system = messages.pop(0).content + "\n\n" if messages[0].role == "system" else ""
    merged: list[Message] = [Message("system", system + _TOOLS_PROMPT.format(tools=lines))]
    for message in messages:
        role, content = message.role, message.content
        if message.calls:
            content += ("\n" if content else "") + HERMES.format_calls(message.calls)
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if merged[-1].role == role:
            content = f"{merged.pop().content}\n{content}"
        merged.append(Message(role, content))
    return Prompt.from_messages(merged, chunks=prompt.chunks)


def _results_in_user_turns(prompt: Prompt) -> Prompt:
    """Return `prompt` with the results of earlier tool calls as text of user turns. The prompt has no tools.

    A result is written before the question for which the model called the tool, where the model expects documents. A
    blank line follows each result. Turns without text are left out.
    """
    turns: list[tuple[str, list[str]]] = []
    num_results = 0  # results at the front of the last user turn
    for message in prompt.messages:
        if not message.content:
            continue
        if message.role == "tool" and turns and turns[-1][0] == "user":
            turns[-1][1].insert(num_results, message.content)
            num_results += 1
            continue
        waits = bool(turns) and num_results == len(turns[-1][1])  # the results' question is still to follow
        num_results = num_results if waits and message.role == "user" else int(message.role == "tool")
        role = "user" if message.role == "tool" else message.role
        if turns and turns[-1][0] == role:
            turns[-1][1].append(message.content)
        else:
            turns.append((role, [message.content]))
    messages = [Message(role, CHUNK_SEPARATOR.join(contents)) for role, contents in turns]
    return Prompt.from_messages(messages, chunks=prompt.chunks)


# --- constraint of an answer ---


def structural_tag(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    parallel: bool = True,
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `structured_outputs` that constrain an answer to calls of `tools`, in vLLM's and xgrammar's format.

    `choice`: "auto" allows calls or text; with `schema`, calls or JSON of that schema. "required" allows only calls.
    The name of a tool allows only one call of that tool. `parallel`: True allows several calls in one answer.
    """
    tags = [
        {
            "type": "tag",
            "begin": f"{form.begin}{tool['function']['name']}{form.middle}",
            "content": {"type": "json_schema", "json_schema": tool["function"].get("parameters") or _NO_PARAMETERS},
            "end": form.end,
        }
        for tool in tools
        if choice in ("auto", "required", tool["function"]["name"])
    ]
    only_one = not parallel or form.delimiter is None or choice not in ("auto", "required")
    calls: dict[str, Any] = (
        tags[0]
        if len(tags) == 1 and only_one
        else {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.delimiter or "",
            "at_least_one": True,
            "stop_after_first": only_one,
        }
    )
    if form.opening or form.closing:
        calls = {"type": "tag", "begin": form.opening, "content": calls, "end": form.closing}
    if choice == "auto" and schema is not None:
        calls = {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls]}
    elif choice == "auto":
        begins = [calls] if form.opening else tags
        trigger = _TRIGGER.match(form.opening or form.begin)
        calls = {
            "type": "triggered_tags",
            "triggers": [trigger.group() if trigger else form.opening or form.begin],
            "tags": begins,
            "at_least_one": False,
            "stop_after_first": only_one,
        }
    return {"structural_tag": {"type": "structural_tag", "format": calls}}


_NO_PARAMETERS = {"type": "object", "properties": {}}
_TRIGGER = re.compile(r"\s*(?:<[^<>\n]+>|\[[A-Z_]+\])")  # markup that only begins a call


# --- reading an answer ---


class CallPiece(NamedTuple):
    """Piece of call `number`. The first piece of a call has its `name`; later pieces have None and more `arguments`."""

    number: int  # index of the call in the answer
    name: str | None
    arguments: str


class CallReader:
    """Reader of the text and calls in a streamed answer. `form`: the format of calls in decoded text, which has no
    control tokens (`Renderer.call_format_in_text`).

    >>> reader = CallReader(HERMES)
    >>> pieces = ['Well.\\n<tool_call>\\n{"name": "add", "argu', 'ments": {"a": "}"}}\\n</tool_call>']
    >>> [found for piece in pieces for found in reader.push(piece)]
    ['Well.\\n', CallPiece(number=0, name='add', arguments=''), CallPiece(number=0, name=None, arguments='{"a": "}"}')]
    """

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._step: Callable[[], str | CallPiece | None] = self._text
        self._held = ""
        self._number = -1
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str) -> Iterator[str | CallPiece]:
        """Add `text`; yield the new text outside of calls, and the new pieces of calls."""
        self._held += text
        while True:
            before = (self._step, self._held)
            piece = self._step()
            if piece:
                yield piece
            if (self._step, self._held) == before:
                return

    def flush(self) -> str:
        """Return text that was held back because it could have begun a call; "" inside an unfinished call."""
        return self._held if self._step == self._text else ""

    def _text(self) -> str | None:
        start = self._form.opening + self._form.begin
        place = self._held.find(start)
        if place < 0:
            keep = next(
                (n for n in range(min(len(start) - 1, len(self._held)), 0, -1) if start.startswith(self._held[-n:])), 0
            )
            place, size = len(self._held) - keep, 0
        else:
            size, self._step = len(start), self._name
        text, self._held = self._held[:place], self._held[place + size :]
        return text

    def _name(self) -> CallPiece | None:
        name, middle, rest = self._held.partition(self._form.middle)
        if not middle:
            return None
        self._held, self._step, self._number = rest, self._arguments, self._number + 1
        return CallPiece(self._number, name, "")

    def _arguments(self) -> CallPiece | None:
        """Return the arguments so far, up to the end of their JSON object."""
        end = len(self._held)
        for place, letter in enumerate(self._held):
            if self._quoted:
                self._quoted = letter != '"' or self._escaped
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if not self._depth:
                    self._step, end = self._end, place + 1
                    break
        taken, self._held = self._held[:end], self._held[end:]
        return CallPiece(self._number, None, taken) if taken else None

    def _end(self) -> None:
        if len(self._held) >= len(self._form.end):
            self._held, self._step = self._held.removeprefix(self._form.end), self._after_call

    def _after_call(self) -> None:
        """Begin another call, or end the calls."""
        another, closing = (self._form.delimiter or "") + self._form.begin, self._form.closing
        if self._form.delimiter is not None and self._held.startswith(another):
            self._held, self._step = self._held[len(another) :], self._name
        elif not another.startswith(self._held) and not (
            closing and closing.startswith(self._held) and self._held != closing
        ):
            self._held, self._step = self._held.removeprefix(closing), self._text


def read_calls(text: str, form: CallFormat) -> tuple[str, list[tuple[str, str]]]:
    """Return an answer's text, and its calls as (name, arguments)."""
    reader, outside, calls = CallReader(form), "", list[tuple[str, str]]()
    for piece in reader.push(text):
        if isinstance(piece, str):
            outside += piece
        elif piece.name is not None:
            calls.append((piece.name, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return outside + reader.flush(), calls
