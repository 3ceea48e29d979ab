"""A prompt, from what a caller says to what the engine reads: messages of texts and chunks, then segments of token ids.

Plain data. Knows nothing about tokenizers, chat templates, models or stores.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ragblend.errors import UsageError
from ragblend.options import ContextPolicy

CHUNK_DELIMITER = "\n\n"
"""Stands between a chunk that was handed over and what follows it, for models that declare no chunk template. It is
text of the prompt and no part of the chunk, so a chunk has the same ids wherever it stands."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A reusable piece of a document: the unit of retrieval and of stored KV.

    `text` is `document[start:end]` of the document named by `source`, character for character. `context_texts`, for
    precomputing: the texts of other chunks that its KV is to have seen where its `context` is "similar"; None and
    "none" are the chunk alone. `found_in_prompt`: it was found in the text of a prompt rather than handed
    over, so what stands around it is there already and nothing is added.
    """

    text: str
    source: str = ""
    start: int = 0
    end: int = -1  # -1 at construction means start + len(text)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    context: ContextPolicy | None = None
    context_texts: tuple[str, ...] = ()
    found_in_prompt: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.end < 0:
            object.__setattr__(self, "end", self.start + len(self.text))

    @property
    def id(self) -> str:
        """16 hex digits; equal when source, start and text are equal."""
        parts = f"{self.source}\0{self.start}\0{self.text}".encode()
        return hashlib.blake2b(parts, digest_size=8).hexdigest()


Part = str | Chunk
"""A piece of one message: plain text, or a chunk whose KV may be stored."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made: the tool's name, its arguments as JSON, and an id that the result refers to."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is "system", "user", "assistant" or, where the prompt has tools, "tool"; `parts` in order.

    `calls`: what the assistant called. `call_id`: what a tool's turn is the result of, `name` that tool's.
    """

    role: str
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, init=False)
class SegmentedPrompt:
    """A prompt whose chunk boundaries are known.

    `SegmentedPrompt(chunks=[...], question=..., system=...)` is the usual one; `from_messages` takes any order of
    turns, text and chunks; `from_parts` is plain text for a completion, without a chat template. `tools`: what the
    model may call, each as OpenAI has it: {"type": "function", "function": {"name", "description", "parameters"}}.
    """

    messages: tuple[Message, ...]
    chat: bool  # False: the parts of the only message are the prompt, no template around them
    tools: tuple[Mapping[str, Any], ...] = field(hash=False)

    def __init__(self, chunks: Sequence[Part] = (), question: str = "", system: str | None = None) -> None:
        if isinstance(chunks, str):
            raise UsageError("chunks is one string; pass a list of chunks: chunks=[text]")
        if not question and not chunks:
            raise UsageError("the prompt is empty; give a question, chunks or both")
        user = Message("user", (*(as_chunk(part) for part in chunks), *([question] if question else [])))
        object.__setattr__(self, "messages", (*([Message("system", (system,))] if system else []), user))
        object.__setattr__(self, "chat", True)
        object.__setattr__(self, "tools", ())

    @classmethod
    def from_messages(
        cls,
        messages: Iterable[Message | tuple[str, str | Part | Sequence[Part]]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> SegmentedPrompt:
        """Turns in order; each a Message or `(role, content)` with content a string, a Chunk or a list of both."""
        turns = tuple(m if isinstance(m, Message) else Message(m[0], _as_parts(m[1])) for m in messages)
        if not turns or not any(turn.parts for turn in turns):
            raise UsageError("no messages given; pass at least one ('user', text)")
        for turn in turns:
            if turn.role not in ("system", "user", "assistant") and not (tools and turn.role == "tool"):
                raise UsageError(f"role is {turn.role!r}; choose system, user or assistant")
        return cls._create(turns, chat=True, tools=tools)

    @classmethod
    def from_parts(cls, parts: Sequence[Part]) -> SegmentedPrompt:
        """One plain text with chunks in it, for completion without a chat template."""
        if not any(parts):
            raise UsageError("the prompt is empty; give text or chunks")
        return cls._create((Message("user", tuple(parts)),), chat=False)

    @classmethod
    def _create(
        cls, messages: tuple[Message, ...], chat: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> SegmentedPrompt:
        prompt = cls.__new__(cls)
        object.__setattr__(prompt, "messages", messages)
        object.__setattr__(prompt, "chat", chat)
        object.__setattr__(prompt, "tools", tuple(tools))
        return prompt

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks, in prompt order."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, Chunk))

    def without_recognized(self) -> SegmentedPrompt:
        """The prompt as it was sent: chunks that were found in its text are text again, those handed over stay."""
        if not any(chunk.found_in_prompt for chunk in self.chunks):
            return self
        messages = []
        for turn in self.messages:
            sent = (part.text if isinstance(part, Chunk) and part.found_in_prompt else part for part in turn.parts)
            messages.append(replace(turn, parts=tuple(merge_texts(sent))))
        return self._create(tuple(messages), self.chat, self.tools)


def merge_texts(parts: Iterable[Part]) -> Iterator[Part]:
    """`parts` with neighbouring texts as one, none empty.

    >>> list(joined_texts(["a", "", "b", Chunk("c"), ""]))[0]
    'ab'
    """
    for is_text, run in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if not is_text:
            yield from run
        elif text := "".join(map(str, run)):
            yield text


def as_chunk(part: Part) -> Chunk:
    """A text as a chunk without a source."""
    return part if isinstance(part, Chunk) else Chunk(part)


def _as_parts(content: str | Part | Sequence[Part]) -> tuple[Part, ...]:
    return (content,) if isinstance(content, str | Chunk) else tuple(content)


SegmentKind = Literal["prefix", "chunk", "text", "suffix"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of one prompt: `token_ids` at positions `start .. start + num_tokens`."""

    kind: SegmentKind
    token_ids: tuple[int, ...]
    start: int
    chunk: Chunk | None = None
    num_lead: int = 0  # tokens that the chunk's template puts before its text, such as <doc>
    num_tail: int = 0  # and behind it

    @property
    def num_tokens(self) -> int:
        """Tokens in this span."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The segments of one prompt in order; together they are every token of it.

    `sent`: the prompt without the boundaries that were found in its text; None when none were.
    """

    segments: tuple[Segment, ...]
    sent: SegmentedPrompt | None = field(default=None, compare=False)

    @property
    def token_ids(self) -> list[int]:
        """All ids, concatenated."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.segments[-1].end if self.segments else 0

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids before the first chunk; () when the prompt starts with a chunk or has none."""
        first = self.segments[0] if self.segments else None
        return first.token_ids if first is not None and first.kind == "prefix" else ()

    @property
    def chunk_segments(self) -> tuple[Segment, ...]:
        """The chunks, in prompt order."""
        return tuple(segment for segment in self.segments if segment.kind == "chunk")
