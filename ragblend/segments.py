"""A prompt as ordered segments, and the only place where text becomes token ids (and ids text again).

Every segment is tokenized alone, without special tokens, and the prompt's ids are the concatenation. So a chunk has
one id sequence, hence one key, in every prompt. Text from outside (chunks, questions, system and earlier turns) can
never turn into a control token or a boundary: only the model's own template is read with special tokens.

Knows a Hugging Face tokenizer by its methods. Knows nothing about models, KV or stores.
Read `Segmenter.tokenize` first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ragblend.errors import RagblendError, UsageError
from ragblend.files import read_file

FORMAT_FILE = "ragblend.json"
"""File beside a model's config.json that declares its prompt format (see `DeclaredFormat`)."""

CHUNK_JOINT = "\n\n"
"""Stands between a chunk that was handed over and what follows it, for models that declare no chunk template. It is
text of the prompt and no part of the chunk, so a chunk has the same ids wherever it stands."""

PINNED_DATE = datetime(2024, 7, 26)
"""What stored KV takes for today where a chat template writes the date: KV must not be lost at midnight."""

REMEMBERED_CHARACTERS = 4 << 20
"""Of texts whose ids a Segmenter keeps at hand: with ids, about 50 MB for English, some 2,500 chunks of 400 tokens."""

_CHARACTER_TOKENS = 4  # most tokens that make one character together: the bytes of one in UTF-8
_ENTRY_CHARACTERS = 64  # what an entry costs beside its text, so that many short texts stay within the bound too


@dataclass(frozen=True, slots=True)
class Chunk:
    """A reusable piece of a document: the unit of retrieval and of stored KV.

    `text` is `document[start:end]` of the document named by `source`, character for character. `behind`, for
    precomputing: the text of the chunk before it, which its KV is to have seen; None is alone. `in_text`: it was found
    in the text of a prompt rather than handed over, so what stands around it is there already and nothing is added.
    """

    text: str
    source: str = ""
    start: int = 0
    end: int = -1  # -1 at construction means start + len(text)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    behind: str | None = None
    in_text: bool = field(default=False, compare=False)

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
class Message:
    """One turn: `role` is "system", "user" or "assistant"; `parts` in reading order."""

    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, init=False)
class SegmentedPrompt:
    """A prompt whose chunk boundaries are known.

    `SegmentedPrompt(chunks=[...], question=..., system=...)` is the usual one; `from_messages` takes any order of
    turns, text and chunks; `from_parts` is plain text for a completion, without a chat template.
    """

    messages: tuple[Message, ...]
    chat: bool  # False: the parts of the only message are the prompt, no template around them

    def __init__(self, chunks: Sequence[Part] = (), question: str = "", system: str | None = None) -> None:
        if isinstance(chunks, str):
            raise UsageError("chunks is one string; pass a list of chunks: chunks=[text]")
        if not question and not chunks:
            raise UsageError("the prompt is empty; give a question, chunks or both")
        user = Message("user", (*(_as_chunk(part) for part in chunks), *([question] if question else [])))
        self._set((*([Message("system", (system,))] if system else []), user), chat=True)

    @classmethod
    def from_messages(cls, messages: Iterable[Message | tuple[str, str | Part | Sequence[Part]]]) -> SegmentedPrompt:
        """Turns in order; each a Message or `(role, content)` with content a string, a Chunk or a list of both."""
        turns = tuple(m if isinstance(m, Message) else Message(m[0], _as_parts(m[1])) for m in messages)
        if not turns or not any(turn.parts for turn in turns):
            raise UsageError("no messages given; pass at least one ('user', text)")
        for turn in turns:
            if turn.role not in ("system", "user", "assistant"):
                raise UsageError(f"role is {turn.role!r}; choose system, user or assistant")
        prompt = cls.__new__(cls)
        prompt._set(turns, chat=True)
        return prompt

    @classmethod
    def from_parts(cls, parts: Sequence[Part]) -> SegmentedPrompt:
        """One plain text with chunks in it, for completion without a chat template."""
        if not any(parts):
            raise UsageError("the prompt is empty; give text or chunks")
        prompt = cls.__new__(cls)
        prompt._set((Message("user", tuple(parts)),), chat=False)
        return prompt

    def _set(self, messages: tuple[Message, ...], chat: bool) -> None:
        object.__setattr__(self, "messages", messages)
        object.__setattr__(self, "chat", chat)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks, in prompt order."""
        return tuple(part for message in self.messages for part in message.parts if isinstance(part, Chunk))

    def unrecognised(self) -> SegmentedPrompt:
        """The prompt as it was sent: chunks that were found in its text are text again, those handed over stay."""
        if not any(chunk.in_text for chunk in self.chunks):
            return self
        prompt = SegmentedPrompt.__new__(SegmentedPrompt)
        prompt._set(tuple(Message(turn.role, _without_found(turn.parts)) for turn in self.messages), self.chat)
        return prompt


def _without_found(parts: Iterable[Part]) -> tuple[Part, ...]:
    """`parts` with chunks found in text as text, neighbouring texts as one."""
    return tuple(joined_texts(part.text if isinstance(part, Chunk) and part.in_text else part for part in parts))


def joined_texts(parts: Iterable[Part]) -> Iterator[Part]:
    """`parts` with neighbouring texts as one, none empty.

    >>> list(joined_texts(["a", "", "b", Chunk("c"), ""]))[0]
    'ab'
    """
    for is_text, run in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if not is_text:
            yield from run
        elif text := "".join(map(str, run)):
            yield text


def _as_chunk(part: Part) -> Chunk:
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


class Piece(NamedTuple):
    """A stretch of text before tokenizing. `trusted` text is the model's own template and may hold control tokens."""

    text: str
    trusted: bool


class PromptFormat(Protocol):
    """How a model wants its prompt written: what stands around messages and around each chunk."""

    @property
    def frames_chunks(self) -> bool:
        """Whether a chunk gets a template of the model's own around it."""
        ...

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order."""
        ...

    def chunk_pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The text of one chunk with what its template puts around it."""
        ...

    def undated(self) -> PromptFormat:
        """The same format with every date that it writes replaced by `PINNED_DATE`."""
        ...


class PlainFormat:
    """For models without a chat template: the system text, the chunks, then `Question: ... Answer:`."""

    frames_chunks = False

    def __init__(self, bos: str = "") -> None:
        self._bos = bos

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order."""
        yield Piece(self._bos, trusted=True)
        for message in prompt.messages:
            before, after = self._frame(message.role) if prompt.chat else ("", "")
            framed = _last_text(message.parts)
            for index in range(len(message.parts)):
                yield Piece(before if index == framed.start else "", trusted=True)
                yield from _content(message.parts, index)
                yield Piece(after if index == framed.stop - 1 else "", trusted=True)
        if prompt.chat:
            yield Piece("Answer:", trusted=True)

    def chunk_pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The chunk's text, nothing else."""
        yield Piece(chunk.text, trusted=False)

    def undated(self) -> PromptFormat:
        """This format: it writes no date."""
        return self

    @staticmethod
    def _frame(role: str) -> tuple[str, str]:
        return {"system": ("", "\n\n"), "user": ("Question: ", "\n"), "assistant": ("Answer: ", "\n\n")}[role]


def _content(parts: Sequence[Part], index: int) -> Iterator[Piece | Chunk]:
    """One part of a turn, and behind a chunk that was handed over what sets it apart from the next part."""
    part, following = parts[index], parts[index + 1 : index + 2]
    if isinstance(part, str):
        yield Piece(part, trusted=False)
        return
    yield part
    if not part.in_text and following and not (isinstance(following[0], str) and following[0].startswith("\n")):
        yield Piece(CHUNK_JOINT, trusted=False)


def _last_text(parts: Sequence[Part]) -> range:
    """Indexes of the last text of a turn, in a user turn its question; an empty range when there is none.

    Chunks that were found in a text are part of it: recognising them must not move what is written around it.
    """
    is_text = [isinstance(part, str) or part.in_text for part in parts]
    is_blank = [isinstance(part, str) and not part.strip() for part in parts]
    last = next((index for index in reversed(range(len(parts))) if is_text[index] and not is_blank[index]), None)
    if last is None:
        return range(0)
    first = last
    while first > 0 and is_text[first - 1]:
        first -= 1
    stop = next((index for index in range(last, len(parts)) if not is_text[index]), len(parts))
    return range(first, stop)


class ChatTemplateFormat(PlainFormat):
    """The tokenizer's own chat template, rendered once per shape of conversation with a sentinel for each content.

    `template`: its text, where it is not the tokenizer's as it stands.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        super().__init__(bos=tokenizer.bos_token or "" if _adds_bos(tokenizer) else "")
        self._tokenizer = tokenizer
        self._template = template

    def undated(self) -> PromptFormat:
        """The template as it reads on `PINNED_DATE`, whatever the day."""
        template = str(self._tokenizer.get_chat_template())
        return ChatTemplateFormat(self._tokenizer, _PINNED_CLOCK + template) if "strftime_now" in template else self

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order."""
        if not prompt.chat:
            yield from super().pieces(prompt)
            return
        messages = prompt.messages
        try:
            literals = self._literals([message.role for message in messages])
        except UsageError:
            if messages[0].role != "system" or len(messages) < 2:
                raise
            # Some templates (Gemma) refuse a system turn; its text then opens the first user turn.
            first = Message(messages[1].role, (*messages[0].parts, "\n\n", *messages[1].parts))
            messages = (first, *messages[2:])
            literals = self._literals([message.role for message in messages])
        for literal, message in zip(literals, messages, strict=False):
            yield Piece(literal, trusted=True)
            for index in range(len(message.parts)):
                yield from _content(message.parts, index)
        yield Piece(literals[-1], trusted=True)

    def _literals(self, roles: Sequence[str]) -> list[str]:
        """What the template writes before, between and after the contents: len(roles) + 1 strings."""
        slots = [f"RAGBLENDSLOT{index}END" for index in range(len(roles))]
        turns = [{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise jinja2 errors of many kinds
            raise UsageError(f"the model's chat template refuses the turns {list(roles)}: {error}") from error
        written = _SLOT.split(str(text))  # a literal, a slot, a literal, ...
        found = written[1::2]
        if found != slots:
            pairs = zip(slots, [*found, *[""] * len(slots)], strict=False)
            wrong = next((turn for turn, (slot, name) in enumerate(pairs) if slot != name), len(slots))
            raise UsageError(
                f"the model's chat template drops, repeats or reorders turn {min(wrong, len(slots) - 1)} of "
                f"{list(roles)}; put everything into one user message, or use SegmentedPrompt.from_parts"
            )
        return written[::2]


_SLOT = re.compile(r"(RAGBLENDSLOT\d+END)")

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
class DeclaredFormat:
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

    def undated(self) -> PromptFormat:
        """This format: it writes no date."""
        return self

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order. Chunks are set apart by their template alone."""
        yield Piece(self.prefix, trusted=True)
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
                    yield Piece(before if index == framed else "", trusted=True)
                    yield Piece(lead(part), trusted=False)
                    yield Piece(after if index == framed else "", trusted=True)

    def _frame(self, role: str) -> tuple[str, str]:
        if role == "system":
            before, _, after = self.system.partition("{system}")
            return before, after
        return (self.question_prefix, self.answer_prefix) if role == "user" else ("", self.assistant_end)

    def chunk_pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The chunk's opening token, its text and its end; all belong to the chunk's ids."""
        yield Piece(self.chunk_prefix, trusted=True)
        yield Piece(self._lead(chunk.text), trusted=False)
        yield Piece(self.chunk_end, trusted=True)

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
    return PlainFormat(bos=tokenizer.bos_token if _adds_bos(tokenizer) and tokenizer.bos_token else "")


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a").input_ids
    return bool(ids) and ids[0] == tokenizer.bos_token_id


class Segmenter:
    """Text to segments and ids, for one tokenizer and one prompt format. Safe to share between threads."""

    def __init__(self, tokenizer: Any, format: PromptFormat) -> None:
        self._tokenizer = tokenizer
        self.backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)  # None: one written in Python
        self._lock = threading.Lock()
        # Retrieval returns the same chunks again and again, and each has one id sequence in every prompt.
        self._remembered: OrderedDict[tuple[Piece, bool], tuple[int, ...]] = OrderedDict()  # least recently used first
        self._num_remembered = 0  # characters
        self.format = format
        self.text_lead = getattr(format, "text_lead", "")
        special = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        added = tokenizer.get_added_vocab()
        control = {text: id for text, id in added.items() if text in special or _is_markup(text)}
        self._control_ids = frozenset(control.values())
        self._control = any_of(text for text in control if text.strip() and len(text) > 1)
        self._inside = _without_lead(tokenizer)

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal when the tokenizer and the prompt format give the same chunk ids."""
        facts = [type(self.format).__name__, repr(self.format) if isinstance(self.format, DeclaredFormat) else ""]
        words = sorted(self._tokenizer.get_vocab().items()) if self.backend is None else ()
        facts.append(repr(words) if self.backend is None else self.backend.to_str())
        return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()

    def tokenize(self, prompt: SegmentedPrompt) -> TokenizedPrompt:
        """Prefix, chunks, other text and suffix with ids and positions. Adjacent non-chunk pieces are one segment."""
        # A model that declares a template for chunks is to read it around those that were found, too.
        sent = prompt if self.format.frames_chunks else prompt.unrecognised()
        return TokenizedPrompt(self._segments(self.format.pieces(prompt)), sent if sent is not prompt else None)

    def as_sent(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        """What full prefill beside `prompt` is given: the text as it was sent, tokenized as if nothing were known of
        it. So a boundary that was found in it and moved a token boundary shows in the comparison."""
        return prompt if prompt.sent is None else self.tokenize(prompt.sent)

    def _segments(self, pieces: Iterable[Piece | Chunk]) -> tuple[Segment, ...]:
        runs: list[tuple[Chunk | None, list[int]]] = []
        begun = False  # whether text stands before the piece: some tokenizers put a space before the first of a prompt
        for piece in _merged(pieces):
            if isinstance(piece, Chunk):
                runs.append((piece, list(self.chunk_ids(piece))))
            elif runs and runs[-1][0] is None:
                runs[-1][1].extend(self._ids(piece, begun))
            else:
                runs.append((None, list(self._ids(piece, begun))))
            begun = begun or isinstance(piece, Chunk) or not self._is_control(piece)
        runs = [(chunk, ids) for chunk, ids in runs if ids]
        chunk_places = [index for index, (chunk, _) in enumerate(runs) if chunk is not None]
        segments, position = [], 0
        for index, (chunk, ids) in enumerate(runs):
            kind: SegmentKind = "chunk" if chunk is not None else "text"
            if chunk is None and (not chunk_places or index > chunk_places[-1]):
                kind = "suffix"
            elif chunk is None and index == 0:
                kind = "prefix"
            lead, tail = self.chunk_frame(chunk) if chunk is not None else (0, 0)
            segments.append(Segment(kind, tuple(ids), position, chunk, lead, tail))
            position += len(ids)
        return tuple(segments)

    def chunk_ids(self, chunk: Part) -> tuple[int, ...]:
        """The one id sequence of a chunk, template included: the same in every prompt."""
        pieces = self.format.chunk_pieces(_as_chunk(chunk))
        return tuple(itertools.chain.from_iterable(self._ids(piece) for piece in pieces))

    def context_ids(self, chunk: Part) -> tuple[int, ...]:
        """What a chunk is precomputed behind, after the prefix: the ids of the chunk it names in `behind` and of what
        stands between two chunks; or ()."""
        if not (isinstance(chunk, Chunk) and chunk.behind):
            return ()
        return self.chunk_ids(chunk.behind) + self.joint_ids

    @property
    def joint_ids(self) -> tuple[int, ...]:
        """The ids of what stands between two chunks; () where each has a template of its own."""
        return () if self.format.frames_chunks else self._ids(Piece(CHUNK_JOINT, trusted=False))

    def chunk_frame(self, chunk: Part) -> tuple[int, int]:
        """How many of the chunk's ids its template puts before its text, and how many behind it."""
        pieces = list(self.format.chunk_pieces(_as_chunk(chunk)))
        lead = list(itertools.takewhile(lambda piece: piece.trusted, pieces))
        tail = list(itertools.takewhile(lambda piece: piece.trusted, reversed(pieces[len(lead) :])))
        return sum(len(self._ids(piece)) for piece in lead), sum(len(self._ids(piece)) for piece in tail)

    def default_prefix_ids(self, system: str | None = None) -> tuple[int, ...]:
        """What ingestion computes chunks behind: the ids before the first chunk of a plain question with `system`.

        Where the chat template writes today's date, it is `PINNED_DATE` here: what is stored today is found tomorrow.
        """
        pieces = self.format.undated().pieces(SegmentedPrompt(["x"], "x", system))
        return TokenizedPrompt(self._segments(pieces)).prefix_ids

    def count_tokens(self, text: str) -> int:
        """Tokens that `text` takes as a chunk, its template included."""
        return len(self.chunk_ids(text))

    def text_ids(self, text: str) -> list[int]:
        """Ids of text from outside: no special tokens added, none read from the text."""
        return list(self._ids(Piece(text, trusted=False)))

    def _is_control(self, piece: Piece) -> bool:
        """Whether a piece of the template is control tokens alone: the text behind it is the prompt's first."""
        return not piece.text or (piece.trusted and not self._control.sub("", piece.text))

    def _ids(self, piece: Piece, inside: bool = True) -> tuple[int, ...]:
        """The piece's ids, from memory if it was asked for lately. `inside`: text of the prompt stands before it."""
        if not piece.text:
            return ()
        asked = (piece, inside and self._inside is not None)
        with self._lock:
            known = self._remembered.get(asked)
            if known is not None:
                self._remembered.move_to_end(asked)
                return known
        ids = tuple(self._fresh_ids(*asked))
        self._remember(asked, ids)
        return ids

    def _remember(self, asked: tuple[Piece, bool], ids: tuple[int, ...]) -> None:
        size = len(asked[0].text)
        if size > REMEMBERED_CHARACTERS // 64:
            return  # a whole document that is being cut: it would push out the chunks, and is counted once
        with self._lock:
            if asked in self._remembered:  # another thread was faster
                return
            self._remembered[asked] = ids
            self._num_remembered += size + _ENTRY_CHARACTERS
            while self._num_remembered > REMEMBERED_CHARACTERS:
                (oldest, _), _ = self._remembered.popitem(last=False)
                self._num_remembered -= len(oldest.text) + _ENTRY_CHARACTERS

    def _fresh_ids(self, piece: Piece, inside: bool) -> list[int]:
        if piece.trusted:
            return self._template_ids(piece.text, inside)
        ids = self._untrusted_ids(piece.text, inside)
        forged = self._control_ids.intersection(ids)
        if forged:
            raise RagblendError(
                f"the text {piece.text[:60]!r} tokenizes to the control tokens {sorted(forged)}; "
                "remove them from the document or the question"
            )
        return ids

    def _template_ids(self, text: str, inside: bool) -> list[int]:
        found = self._control.search(text) if inside else None
        if not inside or (found is not None and found.start() == 0):
            return self._encode(text, split_special_tokens=False)
        # Up to its first control token the template goes on with the text before it.
        end = found.start() if found is not None else len(text)
        rest = self._encode(text[end:], split_special_tokens=False) if text[end:] else []
        return [*self._encode_inside(text[:end]), *rest]

    def _untrusted_ids(self, text: str, inside: bool) -> list[int]:
        ids: list[int] = []
        # A control token's text is cut after its first character: both halves are ordinary text to the tokenizer,
        # and decoding gives the same characters back.
        for index, part in enumerate(_cut_inside(text, self._control)):
            if inside or (index and self._inside is not None):
                ids.extend(self._encode_inside(part))
            else:
                ids.extend(self._encode(part, split_special_tokens=True))
        return ids

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        # A fast tokenizer keeps the last split_special_tokens as state: two threads would read each other's.
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        return list(encoded.input_ids)

    def _encode_inside(self, text: str) -> list[int]:
        assert self._inside is not None
        return list(self._inside.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer's ids, control tokens and the format's leading space left out."""
        return self.plain_text(token_ids).removeprefix(self.text_lead)

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)) if token_ids else ""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of every id in turn, control tokens included: joined, it reads as the whole does.

        A character that several tokens make together is the last one's text; the others have "".
        """
        texts, start = [], 0
        for end in range(1, len(token_ids) + 1):
            # Two ids more than needed in front: some tokenizers drop the space of the first one they decode.
            before = max(0, start - 2)
            known = self._raw_text(token_ids[before:start])
            text = self._raw_text(token_ids[before:end])
            unfinished = text.endswith("\ufffd") and end < len(token_ids) and end - start < _CHARACTER_TOKENS
            texts.append("" if unfinished else text[len(known) :])
            start = start if unfinished else end
        return texts

    def _raw_text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False)) if token_ids else ""

    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer, as far as the tokenizer knows."""
        end = self._tokenizer.eos_token_id
        return frozenset(end if isinstance(end, list) else [end] if end is not None else [])


def _is_markup(text: str) -> bool:
    """Whether an added token that is not marked special steers the model all the same, as `<tool_call>` does.

    Runs of spaces (GPT-NeoX, OLMo), newlines (Gemma) and single letters that a tokenizer adds are ordinary text.

    >>> _is_markup("<think>"), _is_markup("    "), _is_markup("é")
    (True, False, False)
    """
    return len(text) > 1 and any(letter.isalnum() for letter in text)


def _merged(pieces: Iterable[Piece | Chunk]) -> Iterator[Piece | Chunk]:
    """`pieces` with neighbouring texts from outside as one: a tokenizer reads them as they were sent, in one go."""
    written = (piece for piece in pieces if isinstance(piece, Chunk) or piece.text)
    for is_outside, run in itertools.groupby(written, lambda piece: isinstance(piece, Piece) and not piece.trusted):
        if is_outside:
            yield Piece("".join(piece.text for piece in run), trusted=False)
        else:
            yield from run


def _without_lead(tokenizer: Any) -> Tokenizer | None:
    """The tokenizer as it reads text that other text precedes, for one that puts a space before whatever it is given
    (Llama 2's, Mistral's, Phi-3's); None for all others. Pieces that are tokenized alone must not get that space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not backend.encode("a", add_special_tokens=False).tokens[0].startswith(("▁", "Ġ")):
        return None
    facts = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        facts[part] = _steps_without_lead(facts[part])
    inside = Tokenizer.from_str(json.dumps(facts))
    inside.no_padding()
    inside.no_truncation()
    inside.encode_special_tokens = True  # used for text from outside, and for what holds no control token
    return inside


def _steps_without_lead(step: Any) -> Any:
    """A tokenizer's normalizer or pre-tokenizer, as its JSON has it, without what puts a space in front."""
    kind = step and step["type"]
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**step, "add_prefix_space": False}
    if kind == "Sequence":
        inner = next(name for name in step if name != "type")
        return {**step, inner: [left for each in step[inner] if (left := _steps_without_lead(each)) is not None]}
    return step


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of `texts` at a place, in time that does not grow with their number.

    >>> any_of(["<a>", "<ab>", "<b>"]).findall("<ab><b")
    ['<ab>']
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else r"(?!)")


def _branches(tree: Mapping[str, Any]) -> str:
    """The pattern of a tree of letters; "" marks the end of a text, and is tried last."""
    letters = [re.escape(letter) + _branches(rest) for letter, rest in tree.items() if letter]
    found = letters[0] if len(letters) == 1 else f"(?:{'|'.join(letters)})" if letters else ""
    return f"(?:{found})?" if letters and "" in tree else found


def _cut_inside(text: str, needles: re.Pattern[str]) -> list[str]:
    """`text` in pieces such that no needle lies within one piece.

    >>> _cut_inside("a</s>b", re.compile("</s>"))
    ['a<', '/s>b']
    """
    cuts = [0]
    found = needles.search(text)
    while found is not None:
        cuts.append(found.start() + 1)
        found = needles.search(text, found.start() + 1)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


class TextStream:
    """An answer's ids to text as they come, holding back bytes that do not yet make a character."""

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._steps = DecodeStream(skip_special_tokens=True)
        self._last: list[int] = []  # the ids of the last text given out
        self._held: list[int] = []  # those behind them
        self._begun = False

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        self._held.append(token_id)
        backend = self._segmenter.backend
        if backend is None:
            text = self._held_text()
            text = "" if text.endswith("\ufffd") and len(self._held) < _CHARACTER_TOKENS else text
        else:
            try:
                text = self._steps.step(backend, token_id) or ""
            except (
                Exception
            ):  # tokenizers has no class for it: bytes that a random model made undo an earlier character
                self._steps = DecodeStream(skip_special_tokens=True)
                text = self._held_text()
        return self._shown(text)

    def flush(self) -> str:
        """What is still held back at the end of the answer: an unfinished character, shown as U+FFFD."""
        return self._shown(self._held_text())

    def _held_text(self) -> str:
        known, whole = (self._segmenter.plain_text(ids) for ids in (self._last, self._last + self._held))
        return whole[len(known) :]

    def _shown(self, text: str) -> str:
        """`text`, once it is given out; the format's leading space opens an answer and is no part of it."""
        if not text:
            return ""
        self._last, self._held = self._held, []
        text = text if self._begun else text.removeprefix(self._segmenter.text_lead)
        self._begun = True
        return text
