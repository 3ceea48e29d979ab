"""How a model wants its prompt written: its chat template, a declared format, or plain text.

A format turns a SegmentedPrompt into parts: `TemplateText` text, which may hold control tokens, and text from outside,
which may not. Knows a Hugging Face tokenizer by its methods. Knows no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from ragblend.errors import UsageError
from ragblend.files.reading import read_file
from ragblend.prompt.prompt import CHUNK_DELIMITER, Chunk, Message, Part, SegmentedPrompt, ToolCall
from ragblend.prompt.tools import CallFormat, infer_call_format
from ragblend.prompt.trimming import RenderedTemplate, detect_trimming

FORMAT_FILE = "ragblend.json"
"""File beside a model's config.json that declares its prompt format (see `DeclaredFormat`)."""


PINNED_DATE = datetime(2024, 7, 26)
"""What stored KV takes for today where a chat template writes the date: KV must not be lost at midnight."""


class TemplateText(str):
    """Text of the model's own template, which may hold control tokens. Every other string is text from outside."""

    __slots__ = ()


class PromptFormat:
    """How a model wants its prompt written: what stands around messages and around each chunk."""

    merges_turns: ClassVar[bool] = True
    """Whether neighbouring turns of one role are to come as one. A chat template is asked what it makes of them."""

    @property
    def frames_chunks(self) -> bool:
        """Whether a chunk gets a template of the model's own around it."""
        return False

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Part]:
        """Template text and content, in reading order."""
        raise NotImplementedError

    def chunk_pieces(self, chunk: Chunk) -> Iterator[str]:
        """The text of one chunk with what its template puts around it; all of it belongs to the chunk's ids."""
        yield chunk.text

    def undated(self) -> PromptFormat:
        """The same format with every date that it writes replaced by `PINNED_DATE`."""
        return self

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes a call of a tool; None where it is to be told (`tools.written_out`)."""
        return None


class PlainFormat(PromptFormat):
    """For models without a chat template: the system text, the chunks, then `Question: ... Answer:`."""

    def __init__(self, bos: str = "") -> None:
        self._bos = bos

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Part]:
        """Template text and content, in reading order."""
        yield TemplateText(self._bos)
        for message in prompt.messages:
            before, after = self._frame(message.role) if prompt.chat else ("", "")
            framed = _last_text(message.parts)
            for index in range(len(message.parts)):
                yield TemplateText(before if index == framed.start else "")
                yield from _content(message.parts, index)
                yield TemplateText(after if index == framed.stop - 1 else "")
        if prompt.chat:
            yield TemplateText("Answer:")

    @staticmethod
    def _frame(role: str) -> tuple[str, str]:
        return {"system": ("", "\n\n"), "user": ("Question: ", "\n"), "assistant": ("Answer: ", "\n\n")}[role]


def _content(parts: Sequence[Part], index: int) -> Iterator[Part]:
    """One part of a turn, and around a chunk that was handed over what sets it apart from other parts."""
    part, before, following = parts[index], parts[index - 1] if index else "", parts[index + 1 : index + 2]
    if isinstance(part, str):
        yield part
        return
    if not part.found_in_prompt and (before[-1:].strip() if isinstance(before, str) else before.found_in_prompt):
        yield CHUNK_DELIMITER
    yield part
    if not part.found_in_prompt and following and not (isinstance(following[0], str) and following[0].startswith("\n")):
        yield CHUNK_DELIMITER


def _last_text(parts: Sequence[Part]) -> range:
    """Indexes of the last text of a turn, in a user turn its question; an empty range when there is none.

    Chunks that were found in a text are part of it: recognising them must not move what is written around it.
    """
    runs = groupby(range(len(parts)), lambda index: _is_text(parts[index]))
    texts = [list(run) for is_text, run in runs if is_text]
    said = [run for run in texts if any(_text(parts[index]).strip() for index in run)]
    return range(said[-1][0], said[-1][-1] + 1) if said else range(0)


def _is_text(part: Part) -> bool:
    return isinstance(part, str) or part.found_in_prompt


def _text(part: Part) -> str:
    return part if isinstance(part, str) else part.text


class ChatTemplateFormat(PlainFormat):
    """The tokenizer's own chat template, rendered once per shape of conversation with a sentinel for each content.

    `template`: its text, where it is not the tokenizer's as it stands.
    """

    merges_turns: ClassVar[bool] = False

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        super().__init__(_bos(tokenizer))
        self._tokenizer = tokenizer
        self._template = template

    def undated(self) -> PromptFormat:
        """The template as it reads on `PINNED_DATE`, whatever the day."""
        template = str(self._tokenizer.get_chat_template())
        return ChatTemplateFormat(self._tokenizer, _PINNED_CLOCK + template) if "strftime_now" in template else self

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Part]:
        """Template text and content, in reading order.

        Turns that the template refuses, it gets with neighbours of one role as one, and then with the system text in
        front of the first user turn.
        """
        if not prompt.chat:
            yield from super().pieces(prompt)
            return
        refusal: UsageError | None = None
        for messages in _arrangements(prompt):
            try:
                written, contents = self._written(messages, prompt.tools)
            except UsageError as error:
                refusal = refusal or error
                continue
            for literal, number in zip(written.literals, written.order, strict=False):
                yield TemplateText(literal)
                for index in range(len(contents[number])):
                    yield from _content(contents[number], index)
            yield TemplateText(written.literals[-1])
            return
        assert refusal is not None
        raise refusal

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[RenderedTemplate, Sequence[tuple[Part, ...]]]:
        """What the template makes of some turns, and what it takes of their contents."""
        contents: list[tuple[Part, ...]]
        if tools:
            contents, turns = with_calls(messages)
        else:
            contents = [message.parts for message in messages]
            names = _slots(range(len(contents)))
            turns = [{"role": turn.role, "content": name} for turn, name in zip(messages, names, strict=True)]
        slots = {name: number for number, name in enumerate(_slots(range(len(contents))))}
        return detect_trimming(turns, contents, slots, lambda given: self._literals(given, len(contents), tools))

    @cached_property
    def call_format(self) -> CallFormat | None:
        """As the template writes calls; None where it knows no tools, or writes arguments otherwise than as JSON."""
        if "tools" not in str(self._tokenizer.get_chat_template()):
            return None
        names, slots = ("ragblendone", "ragblendtwo"), _slots(range(1, 3))
        tools = [
            {"type": "function", "function": {"name": name, "description": "", "parameters": {}}} for name in names
        ]
        asked, calls = Message("user", ("x",)), tuple(ToolCall(name, "") for name in names)

        def written(answer: Message) -> str:
            return self._rendered(with_calls([asked, answer])[1], tools, False)

        def called(num_calls: int) -> str:
            text = written(Message("assistant", (), calls[:num_calls]))
            return text.removeprefix(head).removesuffix(tail) if text.startswith(head) else ""

        try:
            head = self._rendered(with_calls([asked])[1], tools)
            tail = written(Message("assistant", ("x",))).rpartition(slots[0])[2]
            one = called(1)
            contents, turns = with_calls([asked, Message("assistant", (), calls[:1]), Message("tool", ("x",))])
            self._literals(turns, len(contents), tools)  # what a tool returned is to be written, too
        except Exception:  # templates raise errors of many kinds
            return None
        try:
            two = called(2)
        except Exception:  # one call at a time (Llama 3.1)
            two = None
        return infer_call_format(one, two, names, slots) if names[0] in head else None

    def _rendered(self, turns: Sequence[Any], tools: Sequence[Any], asks: bool = True) -> str:
        """The template's text of some turns, with the slots of arguments bare."""
        more = {"tools": [dict(tool) for tool in tools]} if tools else {}
        text = self._tokenizer.apply_chat_template(
            turns, chat_template=self._template, tokenize=False, add_generation_prompt=asks, **more
        )
        return _ARGUMENTS.sub(r"RAGBLENDSLOT\1END", str(text)) if tools else str(text)

    def _literals(self, turns: Sequence[Mapping[str, Any]], num_slots: int, tools: Sequence[Any]) -> RenderedTemplate:
        """What the template writes before, between and after the contents of `turns`, which are `num_slots`."""
        slots = _slots(range(num_slots))
        roles = [turn["role"] for turn in turns]
        try:
            text = self._rendered(turns, tools)
        except Exception as error:  # templates raise jinja2 errors of many kinds
            raise UsageError(f"the model's chat template refuses the turns {roles}: {error}") from error
        written = _SLOT.split(text)  # a literal, a slot, a literal, ...
        found = written[1::2]
        if sorted(found) != sorted(slots):
            wrong = next(turn for turn, slot in enumerate([*slots, ""]) if found.count(slot) != 1)
            raise UsageError(
                f"the model's chat template drops or repeats turn {min(wrong, len(roles) - 1)} of {roles}; put "
                "everything into one user message, or use SegmentedPrompt.from_parts"
            )
        return RenderedTemplate(written[::2], [slots.index(slot) for slot in found])


def _arrangements(prompt: SegmentedPrompt) -> Iterator[Sequence[Message]]:
    """The turns, and what a template that refuses them may take instead: neighbours of one role as one, as Gemma and
    Mistral want it, and the system text at the front of the first user turn, or in its place."""
    yield prompt.messages
    if prompt.tools:
        return
    merged: list[Message] = []
    for message in prompt.messages:
        if merged and merged[-1].role == message.role:
            message = replace(message, parts=(*merged.pop().parts, CHUNK_DELIMITER, *message.parts))
        merged.append(message)
    yield merged
    if merged[0].role == "system":
        system, asked = merged[0], merged[1:2]
        parts = (*system.parts, CHUNK_DELIMITER, *asked[0].parts) if asked else system.parts
        yield [Message(asked[0].role if asked else "user", parts), *merged[2:]]


_SLOT = re.compile(r"(RAGBLENDSLOT\d+END)")
# Arguments are a JSON object, and so is their slot, until it is found: one that was written otherwise is not.
_ARGUMENTS = re.compile(r'\{\s*"RAGBLENDJSON(\d+)END"\s*:\s*0\s*\}')


def _slots(numbers: Iterable[int]) -> list[str]:
    return [f"RAGBLENDSLOT{number}END" for number in numbers]


def with_calls(messages: Iterable[Message]) -> tuple[list[tuple[Part, ...]], list[dict[str, Any]]]:
    """What stands in the slots of a conversation with tools, and its turns as chat templates read them.

    Ids only say which result belongs to which call; they are written anew, in a form that every template takes.
    """
    contents: list[tuple[Part, ...]] = []
    ids: dict[str, str] = {}
    names: dict[str, str] = {}  # of the tools that were called, by the call's id

    def slot(parts: tuple[Part, ...], kind: str = "SLOT") -> str:
        contents.append(parts)
        return f"RAGBLEND{kind}{len(contents) - 1}END"

    def number(id: str) -> str:
        return ids.setdefault(id, f"call{len(ids):05}")

    turns: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": slot(message.parts) if message.parts else ""}
        if message.calls:
            turn["tool_calls"] = [
                {
                    "id": number(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": {slot((call.arguments,), "JSON"): 0}},
                }
                for call in message.calls
            ]
        names |= {call.id: call.name for call in message.calls}
        if message.role == "tool":
            name = message.name or names.get(message.call_id, "")
            turn |= {"tool_call_id": number(message.call_id), "name": name}
        turns.append(turn)
    return contents, turns


# In front of a template: `strftime_now` as it was on that day. What a template is given may only be plain data, so the
# clock is written in the template's own language, a replacement for each of strftime's directives.
_READINGS = {f"%{letter}": PINNED_DATE.strftime(f"%{letter}") for letter in "dmyYBbAajHIMSpxXcZzUWwGVuf"}
_READINGS = {f"%-{name[1]}": text.lstrip("0") or "0" for name, text in _READINGS.items()} | _READINGS
_PINNED_CLOCK = (
    "{% macro strftime_now(format) %}{% set read = namespace(text=format) %}"
    + "".join(f"{{% set read.text = read.text | replace({name!r}, {text!r}) %}}" for name, text in _READINGS.items())
    + "{{ read.text }}{% endmacro %}{{ '' }}"
)


@dataclass(frozen=True, slots=True)
class DeclaredFormat(PromptFormat):
    """A prompt format that a model declares in `ragblend.json` beside its config (the demo model does).

    `text_lead` precedes all text from outside; `collapse_whitespace` turns every run of whitespace in a chunk
    into one space, for models trained on single-spaced text.
    """

    prefix: str = ""
    system: str = "{system}"
    chunk_prefix: str = ""
    chunk_end: str = ""
    text_lead: str = ""
    question_prefix: str = ""
    answer_prefix: str = ""
    assistant_end: str = ""
    collapse_whitespace: bool = False

    @classmethod
    def read(cls, path: Path) -> DeclaredFormat:
        """Read a `ragblend.json`; raises UsageError for fields it does not know."""
        try:
            fields = dict(json.loads(read_file(path)))
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not a JSON object: {error}") from error
        unknown = set(fields) - set(cls.__dataclass_fields__)
        if unknown:
            raise UsageError(f"{path} declares {sorted(unknown)}; known fields: {', '.join(cls.__dataclass_fields__)}")
        return cls(**{name: value for name, value in fields.items() if value is not None})

    @property
    def frames_chunks(self) -> bool:
        """Whether a chunk gets a template of the model's own around it."""
        return bool(self.chunk_prefix or self.chunk_end)

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Part]:
        """Template text and content, in reading order. Chunks are set apart by their template alone."""
        yield TemplateText(self.prefix)
        for message in prompt.messages:
            before, after = self._frame(message.role) if prompt.chat else ("", "")
            lead = self._lead if prompt.chat else str
            texts = [index for index, part in enumerate(message.parts) if isinstance(part, str) and lead(part)]
            # A system text's frame opens the turn; that of a question stands behind the chunks, where it was trained.
            framed = texts and (texts[0] if message.role == "system" else texts[-1])
            is_text = frozenset(texts)
            for index, part in enumerate(message.parts):
                if isinstance(part, Chunk):
                    yield part
                elif index in is_text:
                    yield TemplateText(before if index == framed else "")
                    yield lead(part)
                # A question's frame ends with its turn, so that an answer follows chunks behind the question, too.
                closes = framed if message.role == "system" else len(message.parts) - 1
                yield TemplateText(after if texts and index == closes else "")

    def _frame(self, role: str) -> tuple[str, str]:
        if role == "system":
            before, _, after = self.system.partition("{system}")
            return before, after
        return (self.question_prefix, self.answer_prefix) if role == "user" else ("", self.assistant_end)

    def chunk_pieces(self, chunk: Chunk) -> Iterator[str]:
        """The chunk's opening token, its text and its end; all belong to the chunk's ids."""
        yield TemplateText(self.chunk_prefix)
        yield self._lead(chunk.text)
        yield TemplateText(self.chunk_end)

    def _lead(self, text: str) -> str:
        if self.collapse_whitespace:
            text = " ".join(text.split())
        return self.text_lead + text if text and not text.startswith(self.text_lead) else text


def prompt_format(tokenizer: Any, model_path: str | Path | None = None) -> PromptFormat:
    """The format a model declares, else its chat template, else plain text."""
    declared = Path(model_path) / FORMAT_FILE if model_path else None
    if declared is not None and declared.is_file():
        return DeclaredFormat.read(declared)
    if getattr(tokenizer, "chat_template", None):
        return ChatTemplateFormat(tokenizer)
    return PlainFormat(_bos(tokenizer))


def _bos(tokenizer: Any) -> str:
    """What the tokenizer itself puts before a text."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token or "" if ids and ids[0] == tokenizer.bos_token_id else ""


def is_markup(text: str) -> bool:
    """Whether an added token that is not marked special steers the model all the same, as `<tool_call>` does.

    Runs of spaces (GPT-NeoX, OLMo), newlines (Gemma) and single letters that a tokenizer adds are ordinary text.

    >>> is_markup("<think>"), is_markup("    "), is_markup("é")
    (True, False, False)
    """
    return len(text) > 1 and any(letter.isalnum() for letter in text)
