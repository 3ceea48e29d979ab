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
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ragblend.errors import RagblendError, UsageError
from ragblend.prompt.formats import DeclaredFormat, PromptFormat, TemplateText, is_markup
from ragblend.prompt.prompt import (
    CHUNK_DELIMITER,
    Chunk,
    Part,
    Segment,
    SegmentedPrompt,
    SegmentKind,
    TokenizedPrompt,
    as_chunk,
)
from ragblend.prompt.tools import HERMES, CallFormat, tools_as_text

REMEMBERED_CHARACTERS = 4 << 20
"""Of texts whose ids a Segmenter keeps at hand: with ids, about 50 MB for English, some 2,500 chunks of 400 tokens."""

_CHARACTER_TOKENS = 4  # most tokens that make one character together: the bytes of one in UTF-8
_ENTRY_CHARACTERS = 64  # what an entry costs beside its text, so that many short texts stay within the bound too


class Segmenter:
    """Text to segments and ids, for one tokenizer and one prompt format. Safe to share between threads."""

    def __init__(self, tokenizer: Any, format: PromptFormat) -> None:
        self._tokenizer = tokenizer
        self.backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)  # None: one written in Python
        self._lock = threading.Lock()
        # Retrieval returns the same chunks again and again, and each has one id sequence in every prompt.
        self._remembered: OrderedDict[tuple[str, bool, bool], tuple[int, ...]] = (
            OrderedDict()
        )  # least recently used first
        self._num_remembered = 0  # characters
        self.format = format
        self.text_lead = getattr(format, "text_lead", "")
        special = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        added = tokenizer.get_added_vocab()
        control = {text: id for text, id in added.items() if text in special or is_markup(text)}
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
        if prompt.tools:
            prompt = self._with_tools(prompt)
        # A model that declares a template for chunks is to read it around those that were found, too.
        sent = prompt if self.format.frames_chunks else prompt.without_recognized()
        return TokenizedPrompt(self._segments(self.format.pieces(prompt)), sent if sent is not prompt else None)

    def _with_tools(self, prompt: SegmentedPrompt) -> SegmentedPrompt:
        """Tools for the chat template to write, or where it knows none, as text. Raises UsageError for tools that would
        write control tokens: templates write them as they are."""
        if self.format.call_format is None:
            return tools_as_text(prompt)
        forged = self._control.search(json.dumps(prompt.tools, ensure_ascii=False))
        if forged:
            raise UsageError(f"a tool's description has the control token {forged.group()!r}; remove it from there")
        return prompt

    @cached_property
    def calls(self) -> CallFormat:
        """How this model writes calls of tools."""
        return self.format.call_format or HERMES

    @cached_property
    def calls_shown(self) -> CallFormat:
        """The same as the text of an answer has it, control tokens left out."""

        def show(text: str) -> str:
            return "".join(p if isinstance(p, str) else self.plain_text([p]) for p in self.literal(text))

        return self.calls.without_control_tokens(show)

    def as_sent(self, prompt: TokenizedPrompt) -> TokenizedPrompt:
        """What full prefill beside `prompt` is given: the text as it was sent, tokenized as if nothing were known of
        it. So a boundary that was found in it and moved a token boundary shows in the comparison."""
        return prompt if prompt.sent is None else self.tokenize(prompt.sent)

    def _segments(self, pieces: Iterable[Part]) -> tuple[Segment, ...]:
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
        pieces = self.format.chunk_pieces(as_chunk(chunk))
        return tuple(itertools.chain.from_iterable(self._ids(piece) for piece in pieces))

    def context_parts(self, chunk: Chunk) -> tuple[tuple[int, ...], ...]:
        """What a chunk is precomputed behind, after the prefix: for each text that it names in `context_texts` its ids
        as a chunk, with those of what stands between two chunks."""
        return tuple(self.chunk_ids(text) + self.delimiter_ids for text in chunk.context_texts)

    @property
    def delimiter_ids(self) -> tuple[int, ...]:
        """The ids of what stands between two chunks; () where each has a template of its own."""
        return () if self.format.frames_chunks else self._ids(CHUNK_DELIMITER)

    def chunk_frame(self, chunk: Part) -> tuple[int, int]:
        """How many of the chunk's ids its template puts before its text, and how many behind it."""
        pieces = list(self.format.chunk_pieces(as_chunk(chunk)))
        lead = list(itertools.takewhile(_is_template, pieces))
        tail = list(itertools.takewhile(_is_template, reversed(pieces[len(lead) :])))
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
        return list(self._ids(text))

    def _is_control(self, piece: str) -> bool:
        """Whether a piece is control tokens of the template alone: the text behind it is the prompt's first."""
        return not piece or (_is_template(piece) and not self._control.sub("", piece))

    def _ids(self, piece: str, inside: bool = True) -> tuple[int, ...]:
        """The piece's ids, from memory if it was asked for lately. `inside`: text of the prompt stands before it."""
        if not piece:
            return ()
        asked = (piece, _is_template(piece), inside and self._inside is not None)
        with self._lock:
            known = self._remembered.get(asked)
            if known is not None:
                self._remembered.move_to_end(asked)
                return known
        ids = tuple(self._fresh_ids(*asked))
        if len(piece) > REMEMBERED_CHARACTERS // 64:
            return ids  # a whole document that is being cut: it would push out the chunks, and is counted once
        with self._lock:
            if asked not in self._remembered:  # another thread may have been faster
                self._remembered[asked] = ids
                self._num_remembered += len(piece) + _ENTRY_CHARACTERS
            while self._num_remembered > REMEMBERED_CHARACTERS:
                (oldest, *_), _ = self._remembered.popitem(last=False)
                self._num_remembered -= len(oldest) + _ENTRY_CHARACTERS
        return ids

    def _fresh_ids(self, text: str, is_template: bool, inside: bool) -> list[int]:
        if is_template:
            return self._template_ids(text, inside)
        ids = self._untrusted_ids(text, inside)
        forged = self._control_ids.intersection(ids)
        if forged:
            raise RagblendError(
                f"the text {text[:60]!r} tokenizes to the control tokens {sorted(forged)}; "
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
            # Not verbose: the tokenizer warns of a text beyond the model's context, also of a document that is only
            # counted here and then cut. A prompt that is too long raises PromptTooLongError.
            encoded = self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
            )
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

    def literal(self, text: str) -> list[str | int]:
        """`text` as a template would be read: plain text, and the control tokens in it as their ids."""
        pieces: list[str | int] = []
        start = 0
        for found in self._control.finditer(text):
            ids = self._encode(found.group(), split_special_tokens=False)
            pieces += [text[start : found.start()], *ids]
            start = found.end()
        return [piece for piece in (*pieces, text[start:]) if piece != ""]

    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer, as far as the tokenizer knows."""
        end = self._tokenizer.eos_token_id
        return frozenset(end if isinstance(end, list) else [end] if end is not None else [])


def _is_template(piece: Part) -> bool:
    return isinstance(piece, TemplateText)


def _merged(pieces: Iterable[Part]) -> Iterator[Part]:
    """`pieces` with neighbouring texts from outside as one: a tokenizer reads them as they were sent, in one go."""
    written = (piece for piece in pieces if piece)
    for is_outside, run in itertools.groupby(written, lambda piece: not isinstance(piece, Chunk | TemplateText)):
        if is_outside:
            yield "".join(map(str, run))
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
            # tokenizers has no class for it: bytes that a random model made undo an earlier character.
            except Exception:
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
