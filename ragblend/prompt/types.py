"""Prompts: a caller's messages with the chunks that they name, and the same prompt as token ids with runs of chunks.

An engine renders a `Prompt` (`render`), finds runs of known chunks in its token ids (`engine.matching`), and keeps both
in a `MatchedPrompt`. Plain data. Does not depend on tokenizers, chat templates, models or stores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ragblend.errors import UsageError
from ragblend.options import ContextPolicy
from ragblend.prompt.token_index import EDGE, is_long_enough

CHUNK_SEPARATOR = "\n\n"
"""Separator of chunks, and of the last chunk and the question, in prompts that this package assembles."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Reusable piece of a document: the unit of retrieval and of stored KV.

    `text` is `document[start:end]` of the document named by `source`, character for character, unless `metadata` has
    `verbatim: False`. `context` says what precedes the chunk when its KV is precomputed. "neutral": the prefix and the
    neutral text; "none" and None: the prefix alone.
    """

    text: str
    source: str = ""
    start: int = 0
    end: int = -1  # -1 at construction means start + len(text)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    context: ContextPolicy | None = None

    def __post_init__(self) -> None:
        if self.end < 0:
            object.__setattr__(self, "end", self.start + len(self.text))

    @property
    def id(self) -> str:
        """Return 16 hex digits that identify the chunk in its document.

        They are computed from `source`, `start` and `text`. The same text in another place has another id.
        """
        parts = f"{self.source}\0{self.start}\0{self.text}".encode()
        return hashlib.blake2b(parts, digest_size=8).hexdigest()


Part = str | Chunk
"""A piece of one message: plain text, or a chunk whose KV may be stored."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool by a model: the tool's name, its arguments as JSON, and an id that the result refers to."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is "system", "user", "assistant" or "tool".

    `calls`: the assistant's tool calls. In a tool's turn, which is the result of a call, `call_id` is the id of the
    call and `name` the name of the tool.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, init=False)
class Prompt:
    """Messages and tools for one answer, as text, and the chunks that the caller names in the messages.

    `Prompt(chunks=[...], question=..., system=...)` is the usual form: one user turn, in which `separator` is written
    after each chunk. `from_messages` makes a prompt of any turns. `from_text` makes one of plain text, for a completion
    without a chat template.

    An engine stores the named chunks that are not stored yet, for later prompts. It also finds stored chunks that the
    prompt does not name. `tools`: functions that the model may call, in OpenAI's form: {"type": "function", "function":
    {"name", "description", "parameters"}}.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = field(hash=False)
    chunks: tuple[Chunk, ...]
    is_chat: bool  # False: the content of the only message is the prompt, without a chat template
    uses_tools: bool = field(compare=False, repr=False)  # True if there are tools, or calls or results in the turns

    def __init__(
        self,
        chunks: Sequence[Part] = (),
        question: str = "",
        system: str | None = None,
        *,
        separator: str = CHUNK_SEPARATOR,
    ) -> None:
        if isinstance(chunks, str):
            raise UsageError("chunks is one string; pass a list of chunks: chunks=[text]")
        if not question and not chunks:
            raise UsageError("the prompt is empty; pass a question, chunks or both")
        named = tuple(as_chunk(part) for part in chunks)
        content = separator.join([*(chunk.text for chunk in named), *([question] if question else [])])
        first = [Message("system", system)] if system else []
        self._set((*first, Message("user", content)), (), named, is_chat=True)

    @classmethod
    def from_messages(
        cls,
        messages: Iterable[Message | tuple[str, str | Part | Sequence[Part]]],
        tools: Sequence[Mapping[str, Any]] = (),
        chunks: Sequence[Part] = (),
    ) -> Prompt:
        """Return a prompt of turns: Messages, or pairs (role, content) whose content is text, a Chunk or a list.

        `chunks`: chunks whose texts the messages contain as strings. Chunks in the contents need not be repeated there.
        Raises UsageError without content or for an unknown role.
        """
        turns: list[Message] = []
        named = [as_chunk(chunk) for chunk in chunks]
        for turn in messages:
            if isinstance(turn, Message):
                turns.append(turn)
                continue
            role, content = turn
            parts = [content] if isinstance(content, str | Chunk) else list(content)
            turns.append(Message(role, join_parts(parts)))
            named += [part for part in parts if isinstance(part, Chunk)]
        if not any(turn.content or turn.calls for turn in turns):
            raise UsageError("no messages given; pass at least one ('user', text)")
        for message in turns:
            if message.role not in ("system", "user", "assistant", "tool"):
                raise UsageError(f"role is {message.role!r}; choose system, user, assistant or tool")
        prompt = cls.__new__(cls)
        prompt._set(tuple(turns), tuple(tools), tuple(named), is_chat=True)
        return prompt

    @classmethod
    def from_text(cls, content: str | Sequence[Part], chunks: Sequence[Part] = ()) -> Prompt:
        """Return a prompt of plain text, or of joined texts and Chunks, for a completion without a chat template.

        Raises UsageError for an empty text.
        """
        parts = [content] if isinstance(content, str) else list(content)
        text = join_parts(parts)
        if not text:
            raise UsageError("the prompt is empty; pass text or chunks")
        named = [*(part for part in parts if isinstance(part, Chunk)), *map(as_chunk, chunks)]
        prompt = cls.__new__(cls)
        prompt._set((Message("user", text),), (), tuple(named), is_chat=False)
        return prompt

    def _set(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        chunks: tuple[Chunk, ...],
        *,
        is_chat: bool,
    ) -> None:
        uses_tools = bool(tools) or any(message.role == "tool" or message.calls for message in messages)
        fields = {"messages": messages, "tools": tools, "chunks": chunks, "is_chat": is_chat, "uses_tools": uses_tools}
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def join_parts(parts: Iterable[Part]) -> str:
    """Return the joined text of `parts`. A Chunk is separated from the part before and after by a blank line.

    No blank line is added where whitespace separates the two already.

    >>> join_parts(["See", Chunk("a b"), Chunk("c"), "Why?"])
    'See\\n\\na b\\n\\nc\\n\\nWhy?'
    >>> join_parts(["See ", "this:\\n", Chunk("a b"), "\\nWhy?"])
    'See this:\\na b\\nWhy?'
    """
    text, after_chunk = "", False
    for part in parts:
        piece = part if isinstance(part, str) else part.text
        is_chunk = not isinstance(part, str)
        if text and piece and (is_chunk or after_chunk) and not text[-1].isspace() and not piece[0].isspace():
            text += CHUNK_SEPARATOR
        if piece:
            text, after_chunk = text + piece, is_chunk
    return text


def as_chunk(part: Part) -> Chunk:
    """Return `part` if it is a Chunk; else a Chunk of this text, without a source."""
    return part if isinstance(part, Chunk) else Chunk(part)


PrefixMatch = Literal["exact", "approximate"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a run's chunk: its KV after one prefix, and how this KV fits into the prompt.

    `key`: of its entry in the store. `match`: "exact" if the prompt begins with the prefix after which the KV was
    computed. `exact`: True if the KV was computed after precisely the tokens that precede the run in the prompt.
    `policy`: of the ingestion context. `nbytes`: size of the entry's tensors; 0 if the entry was not read.
    """

    key: str
    match: PrefixMatch
    exact: bool
    policy: ContextPolicy = "none"
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """A part of a chunk in a prompt: positions [start, end) of the prompt equal the chunk's ids from `chunk_start` on.

    `chunk`: the Chunk, if the prompt names it, else None. `document`: the id of a document that contains the chunk
    according to the ledger; "" if unknown. `variant`: the stored variant whose KV is used; None before the lookup,
    and for a chunk that is not stored.
    """

    chunk_ids: tuple[int, ...] = field(repr=False)
    chunk_start: int
    start: int
    end: int
    chunk: Chunk | None = field(default=None, repr=False)
    document: str = ""
    variant: Variant | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return self.end - self.start

    @property
    def source(self) -> str:
        """Return the source of the chunk, else its document; "" if neither is known."""
        return (self.chunk.source if self.chunk is not None else "") or self.document

    def within(self, start: int, end: int) -> ChunkRun:
        """Return the part of the run between two positions of the prompt; empty if they do not overlap the run."""
        start = max(start, self.start)
        end = max(start, min(end, self.end))
        return replace(self, chunk_start=self.chunk_start + start - self.start, start=start, end=end)

    def without(self, others: Iterable[ChunkRun]) -> list[ChunkRun]:
        """Return the parts of the run that no other run covers. Parts that are too short for a run are left out."""
        parts = [self]
        for other in others:
            parts = [
                rest
                for part in parts
                for rest in (part.within(part.start, other.start), part.within(other.end, part.end))
                if is_long_enough(rest.num_tokens, len(self.chunk_ids))
            ]
        return parts


@dataclass(frozen=True, slots=True)
class MatchedPrompt:
    """Token ids of a prompt, and the runs of chunks in them in the order of the prompt.

    `prefix_ids`: the ids before the first user message's text, or the special tokens before a plain text; () for none.
    KV stored for this prefix was computed with these ids in front of the chunk.
    """

    token_ids: list[int] = field(repr=False)
    runs: tuple[ChunkRun, ...] = ()
    prefix_ids: tuple[int, ...] = field(default=(), repr=False)
    match_s: float = field(default=0.0, compare=False)  # seconds that rendering and matching took

    @property
    def num_tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.token_ids)

    @property
    def num_prefix(self) -> int:
        """Return the number of tokens before the first run; 0 if the prompt has no run."""
        return self.runs[0].start if self.runs else 0

    @property
    def question_start(self) -> int | None:
        """Return the position after the last run; None if there is no run, or if no token follows the last one."""
        end = self.runs[-1].end if self.runs else self.num_tokens
        return end if end < self.num_tokens else None

    @property
    def parts(self) -> Iterator[tuple[int, int, ChunkRun | None]]:
        """Yield the runs and the text between them as (start, end, run or None), in order. They cover the prompt."""
        last_end = 0
        for run in self.runs:
            if run.start > last_end:
                yield last_end, run.start, None
            yield run.start, run.end, run
            last_end = run.end
        if last_end < self.num_tokens:
            yield last_end, self.num_tokens, None

    @property
    def runs_by_chunk(self) -> list[list[int]]:
        """Return the runs grouped by chunk: for each matched chunk, the indices of its runs in `runs`, in order.

        Two adjacent runs are in one group if the second is a later part of the same chunk. Up to EDGE tokens may be in
        both, because text inserted into a chunk may repeat what follows it. A chunk that the prompt contains twice has
        two groups.
        """
        numbers: list[list[int]] = []
        for index, run in enumerate(self.runs):
            before = self.runs[index - 1] if index else None
            if (
                before is not None
                and run.chunk_ids == before.chunk_ids
                and run.chunk_start >= before.chunk_start + before.num_tokens - EDGE
            ):
                numbers[-1].append(index)
            else:
                numbers.append([index])
        return numbers


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading ids that two sequences share.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(first), len(second))
    different = np.flatnonzero(np.asarray(first[:length]) != np.asarray(second[:length]))
    return int(different[0]) if len(different) else length
