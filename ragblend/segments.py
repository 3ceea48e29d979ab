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
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ragblend.errors import RagblendError, UsageError

FORMAT_FILE = "ragblend.json"
"""File beside a model's config.json that declares its prompt format (see `DeclaredFormat`)."""

CHUNK_END = "\n\n"
"""Belongs to the chunk it ends, for models that declare no chunk template, so that no token spans two chunks."""

REMEMBERED_CHARACTERS = 4 << 20
"""Of texts whose ids a Segmenter keeps at hand: with ids, about 50 MB for English, some 2,500 chunks of 400 tokens."""

_CHARACTER_TOKENS = 4  # most tokens that make one character together: the bytes of one in UTF-8
_ENTRY_CHARACTERS = 64  # what an entry costs beside its text, so that many short texts stay within the bound too


@dataclass(frozen=True, slots=True)
class Chunk:
    """A reusable piece of a document: the unit of retrieval and of stored KV.

    `text` is `document[start:end]` of the document named by `source`, character for character. `behind`, for
    precomputing: the text of the chunk before it, which its KV is to have seen; None is alone.
    """

    text: str
    source: str = ""
    start: int = 0
    end: int = -1  # -1 at construction means start + len(text)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    behind: str | None = None

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
    """The segments of one prompt in order; together they are every token of it."""

    segments: tuple[Segment, ...]

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

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order."""
        ...

    def chunk_pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The text of one chunk with what its template puts around it."""
        ...


class PlainFormat:
    """For models without a chat template: the system text, the chunks, then `Question: ... Answer:`."""

    def __init__(self, bos: str = "") -> None:
        self._bos = bos

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order."""
        yield Piece(self._bos, trusted=True)
        for message in prompt.messages:
            before, after = self._frame(message.role) if prompt.chat else ("", "")
            texts = [index for index, part in enumerate(message.parts) if isinstance(part, str)]
            for index, part in enumerate(message.parts):
                if isinstance(part, Chunk):
                    yield part
                    continue
                # The frame goes around the last text of a turn: in a user turn that is the question.
                last = index == texts[-1]
                yield Piece(before if last else "", trusted=True)
                yield Piece(part, trusted=False)
                yield Piece(after if last else "", trusted=True)
        if prompt.chat:
            yield Piece("Answer:", trusted=True)

    def chunk_pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The chunk's text and its end; both belong to the chunk's ids."""
        yield Piece(chunk.text, trusted=False)
        yield Piece(CHUNK_END, trusted=True)

    @staticmethod
    def _frame(role: str) -> tuple[str, str]:
        return {"system": ("", "\n\n"), "user": ("Question: ", "\n"), "assistant": ("Answer: ", "\n\n")}[role]


class ChatTemplateFormat(PlainFormat):
    """The tokenizer's own chat template, rendered once per shape of conversation with a sentinel for each content."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(bos=tokenizer.bos_token or "" if _adds_bos(tokenizer) else "")
        self._tokenizer = tokenizer

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
            for part in message.parts:
                yield part if isinstance(part, Chunk) else Piece(part, trusted=False)
        yield Piece(literals[-1], trusted=True)

    def _literals(self, roles: Sequence[str]) -> list[str]:
        """What the template writes before, between and after the contents: len(roles) + 1 strings."""
        slots = [f"RAGBLENDSLOT{index}END" for index in range(len(roles))]
        turns = [{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise jinja2 errors of many kinds
            raise UsageError(f"the model's chat template refuses the turns {list(roles)}: {error}") from error
        literals, rest = [], str(text)
        for slot in slots:
            before, found, rest = rest.partition(slot)
            if not found or slot in rest:
                raise UsageError(
                    f"the model's chat template drops, repeats or reorders turn {slots.index(slot)} of {list(roles)}; "
                    "put everything into one user message, or use SegmentedPrompt.from_parts"
                )
            literals.append(before)
        return [*literals, rest]


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
            fields = dict(json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a JSON object: {error}") from error
        unknown = set(fields) - set(cls.__dataclass_fields__)
        if unknown:
            raise UsageError(f"{path} declares {sorted(unknown)}; known fields: {', '.join(cls.__dataclass_fields__)}")
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def pieces(self, prompt: SegmentedPrompt) -> Iterator[Piece | Chunk]:
        """Template text and content, in reading order."""
        yield Piece(self.prefix, trusted=True)
        for message in prompt.messages:
            for part in message.parts:
                if isinstance(part, Chunk):
                    yield part
                elif prompt.chat:
                    yield from self._turn(message.role, part)
                else:
                    yield Piece(part, trusted=False)

    def _turn(self, role: str, text: str) -> Iterator[Piece]:
        if role == "system":
            before, _, after = self.system.partition("{system}")
        elif role == "user":
            before, after = self.question_prefix, self.answer_prefix
        else:
            before, after = "", self.assistant_end
        yield Piece(before, trusted=True)
        yield Piece(self._lead(text), trusted=False)
        yield Piece(after, trusted=True)

    def chunk_pieces(self, chunk: Chunk) -> Iterator[Piece]:
        """The chunk's opening token, its text and its end; all belong to the chunk's ids."""
        yield Piece(self.chunk_prefix, trusted=True)
        yield Piece(self._lead(chunk.text), trusted=False)
        yield Piece(self.chunk_end, trusted=True)

    def _lead(self, text: str) -> str:
        if self.collapse_whitespace:
            text = " ".join(text.split())
        return self.text_lead + text if not text.startswith(self.text_lead) else text


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
        self._lock = threading.Lock()
        # Retrieval returns the same chunks again and again, and each has one id sequence in every prompt.
        self._remembered: OrderedDict[Piece, tuple[int, ...]] = OrderedDict()  # least recently used first
        self._num_remembered = 0  # characters
        self.format = format
        self._text_lead = getattr(format, "text_lead", "")
        special = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        added = tokenizer.get_added_vocab()
        control = {text: id for text, id in added.items() if text in special or _is_markup(text)}
        self._control_ids = frozenset(control.values())
        # Longest first, so that a control token is cut before one that is a part of it.
        cuttable = (text for text in control if text.strip() and len(text) > 1)
        self._control_texts = sorted(cuttable, key=len, reverse=True)

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal when the tokenizer and the prompt format give the same chunk ids."""
        facts = [type(self.format).__name__, repr(self.format) if isinstance(self.format, DeclaredFormat) else ""]
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        facts.append(backend.to_str() if backend is not None else repr(sorted(self._tokenizer.get_vocab().items())))
        return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()

    def tokenize(self, prompt: SegmentedPrompt) -> TokenizedPrompt:
        """Prefix, chunks, other text and suffix with ids and positions. Adjacent non-chunk pieces are one segment."""
        runs: list[tuple[Chunk | None, tuple[int, ...]]] = []
        for piece in self.format.pieces(prompt):
            if isinstance(piece, Chunk):
                runs.append((piece, self.chunk_ids(piece)))
            elif runs and runs[-1][0] is None:
                runs[-1] = (None, runs[-1][1] + self._ids(piece))
            else:
                runs.append((None, self._ids(piece)))
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
            segments.append(Segment(kind, ids, position, chunk, lead, tail))
            position += len(ids)
        return TokenizedPrompt(tuple(segments))

    def chunk_ids(self, chunk: Part) -> tuple[int, ...]:
        """The one id sequence of a chunk, template included: the same in every prompt."""
        return tuple(itertools.chain.from_iterable(map(self._ids, self.format.chunk_pieces(_as_chunk(chunk)))))

    def context_ids(self, chunk: Part) -> tuple[int, ...]:
        """What a chunk is precomputed behind, after the prefix: the ids of the chunk it names in `behind`, or ()."""
        return self.chunk_ids(chunk.behind) if isinstance(chunk, Chunk) and chunk.behind else ()

    def chunk_frame(self, chunk: Part) -> tuple[int, int]:
        """How many of the chunk's ids its template puts before its text, and how many behind it."""
        pieces = list(self.format.chunk_pieces(_as_chunk(chunk)))
        lead = list(itertools.takewhile(lambda piece: piece.trusted, pieces))
        tail = list(itertools.takewhile(lambda piece: piece.trusted, reversed(pieces[len(lead) :])))
        return sum(len(self._ids(piece)) for piece in lead), sum(len(self._ids(piece)) for piece in tail)

    def default_prefix_ids(self, system: str | None = None) -> tuple[int, ...]:
        """What ingestion computes chunks behind: the ids before the first chunk of a plain question with `system`."""
        return self.tokenize(SegmentedPrompt(["x"], "x", system)).prefix_ids

    def count_tokens(self, text: str) -> int:
        """Tokens that `text` takes as a chunk, its template included."""
        return len(self.chunk_ids(text))

    def text_ids(self, text: str) -> list[int]:
        """Ids of text from outside: no special tokens added, none read from the text."""
        return list(self._ids(Piece(text, trusted=False)))

    def _ids(self, piece: Piece) -> tuple[int, ...]:
        """The piece's ids, from memory if it was asked for lately. Text and trust are all that they depend on."""
        if not piece.text:
            return ()
        with self._lock:
            known = self._remembered.get(piece)
            if known is not None:
                self._remembered.move_to_end(piece)
                return known
        ids = tuple(self._fresh_ids(piece))
        self._remember(piece, ids)
        return ids

    def _remember(self, piece: Piece, ids: tuple[int, ...]) -> None:
        if len(piece.text) > REMEMBERED_CHARACTERS // 64:
            return  # a whole document that is being cut: it would push out the chunks, and is counted once
        with self._lock:
            if piece in self._remembered:  # another thread was faster
                return
            self._remembered[piece] = ids
            self._num_remembered += len(piece.text) + _ENTRY_CHARACTERS
            while self._num_remembered > REMEMBERED_CHARACTERS:
                oldest, _ = self._remembered.popitem(last=False)
                self._num_remembered -= len(oldest.text) + _ENTRY_CHARACTERS

    def _fresh_ids(self, piece: Piece) -> list[int]:
        if piece.trusted:
            return self._encode(piece.text, split_special_tokens=False)
        ids = self._untrusted_ids(piece.text)
        forged = self._control_ids.intersection(ids)
        if forged:
            raise RagblendError(
                f"the text {piece.text[:60]!r} tokenizes to the control tokens {sorted(forged)}; "
                "remove them from the document or the question"
            )
        return ids

    def _untrusted_ids(self, text: str) -> list[int]:
        ids: list[int] = []
        # A control token's text is cut after its first character: both halves are ordinary text to the tokenizer,
        # and decoding gives the same characters back.
        for part in _cut_inside(text, self._control_texts):
            ids.extend(self._encode(part, split_special_tokens=True))
        return ids

    def _encode(self, text: str, *, split_special_tokens: bool) -> list[int]:
        # A fast tokenizer keeps the last split_special_tokens as state: two threads would read each other's.
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
        return list(encoded.input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer's ids, control tokens and the format's leading space left out."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return text.removeprefix(self._text_lead)

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


def _cut_inside(text: str, needles: Sequence[str]) -> list[str]:
    """`text` in pieces such that no needle lies within one piece.

    >>> _cut_inside("a</s>b", ["</s>"])
    ['a<', '/s>b']
    """
    for needle in needles:
        if needle in text:
            head, _, tail = text.partition(needle)
            return [*_cut_inside(head + needle[:1], needles), *_cut_inside(needle[1:] + tail, needles)]
    return [text]


class TextStream:
    """An answer's ids to text as they come, holding back bytes that do not yet make a character."""

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._ids: list[int] = []
        self._shown = 0  # characters already given out

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; may be empty."""
        self._ids.append(token_id)
        text = self._segmenter.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def flush(self) -> str:
        """What is still held back at the end of the answer: an unfinished character, shown as U+FFFD."""
        text = self._segmenter.decode(self._ids)
        piece, self._shown = text[self._shown :], len(text)
        return piece
