"""Documents -> chunks that fit a token budget and from which the document can be rebuilt.

Cuts at paragraphs, then sentences, then words. Counts tokens with a callable from outside, so it imports no tokenizer,
and takes LangChain or LlamaIndex splitters without importing either. Knows nothing about embeddings, storage or models.
`split` is the default; `adapt_splitter` lets other people's splitters in; reading files is `documents`.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ragblend.corpus.documents import Document
from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk


class TokenCounter(Protocol):
    """How the LLM's own tokenizer counts; passed in from outside."""

    def __call__(self, text: str, /) -> int:
        """Number of tokens of `text` alone, without special tokens."""


class Splitter(Protocol):
    """What ingestion cuts documents with; `functools.partial(split, count_tokens=...)` is one."""

    def __call__(self, document: Document, /) -> list[Chunk]:
        """Chunks of one document, in reading order."""


# Words, and the runs between sentence marks of scripts that put no space after a sentence.
_WORD = re.compile(r"[^\s。！？]+[。！？]*|[。！？]+")
_NO_BLANK = re.compile(r"\S")
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’)\]»]*$")
_ABBREVIATION = re.compile(r"^\W*(?:\w|mr|mrs|ms|dr|st|prof|jr|sr|no|vs|fig|e\.g|i\.e|cf|al)\.$", re.IGNORECASE)

_AT_WORD, _AT_LINE, _AT_SENTENCE, _AT_PARAGRAPH = range(4)


def split(document: Document, count_tokens: TokenCounter, max_tokens: int = 512) -> list[Chunk]:
    """Chunks of at most `max_tokens` tokens, overlap 0: `document.text[chunk.start:chunk.end] == chunk.text`.

    Each chunk runs as far as the budget lets it and ends at the last paragraph, else sentence, else line in its second
    half, else at a word; only a word that exceeds the budget alone is cut inside. Chunks carry no outer whitespace, and
    that is all they lose. Their metadata is the document's plus `num_tokens`. Raises UsageError when `max_tokens` is
    below 1 or one character needs more.
    """
    if max_tokens < 1:
        raise UsageError(f"chunk size is {max_tokens} tokens; choose 1 or more, for example 256")
    text = document.text
    # One number per word is all that is kept: a text of short words would take many times its size otherwise.
    ends = array("I" if len(text) < 1 << 32 else "Q", (match.end() for match in _WORD.finditer(text)))
    budget = _TokenBudget(text, count_tokens, max_tokens)
    chunks: list[Chunk] = []
    first, start = 0, _start_of_word(text, ends, 0)
    while first < len(ends):
        last, num_tokens = first - 1, 0
        if ends[first] - start <= budget.probe_chars:
            last, num_tokens = budget.find_last_end(start, ends, first)
        if last < first:
            letters = range(start + 1, ends[first] + 1)
            last_letter, num_tokens = budget.find_last_end(start, letters, 0)
            if last_letter < 0:
                raise UsageError(
                    f"chunk size is {max_tokens} tokens, but {text[start]!r} in {document.source or 'the document'} "
                    "needs more alone; choose a larger chunk size"
                )
            end = letters[last_letter]
            first += end == ends[first]
        else:
            if last + 1 < len(ends):
                cut = _best_cut(text, ends, first, last, start)
                cut_tokens = num_tokens if cut == last else count_tokens(text[start : ends[cut]])
                if cut_tokens <= max_tokens:  # fewer characters may be more tokens; then the verified end stands
                    last, num_tokens = cut, cut_tokens
            end, first = ends[last], last + 1
        assert num_tokens <= max_tokens
        chunks.append(
            Chunk(text[start:end], document.source, start, end, {**document.metadata, "num_tokens": num_tokens})
        )
        # The rest of a word that was cut opens the next chunk.
        start = _start_of_word(text, ends, first) if first and end == ends[first - 1] else end
    return chunks


def _start_of_word(text: str, ends: Sequence[int], index: int) -> int:
    """Where the word starts that ends at `ends[index]`; the end of the text behind the last."""
    found = _NO_BLANK.search(text, ends[index - 1] if index else 0)
    return found.start() if found else len(text)


def _strength(text: str, start: int, end: int, after: int) -> int:
    """How good a place the gap between a word [start, end) and the next word at `after` is to cut."""
    gap = text[end:after]
    if gap.count("\n") > 1 or "\f" in gap:
        return _AT_PARAGRAPH
    word = text[max(start, end - 16) : end]
    if _SENTENCE_END.search(word) and not _ABBREVIATION.match(word):
        return _AT_SENTENCE
    return _AT_LINE if "\n" in gap else _AT_WORD


def _best_cut(text: str, ends: Sequence[int], first: int, last: int, start: int) -> int:
    """The last of the strongest gaps in the second half of the chunk, so that no chunk but the final is half empty."""
    best, strongest = last, -1
    word = bisect_right(ends, (start + ends[last]) // 2, first, last)
    word_start = _start_of_word(text, ends, word)
    while word <= last:
        after = _start_of_word(text, ends, word + 1)
        strength = _strength(text, word_start, ends[word], after)
        if strength >= strongest:
            best, strongest = word, strength
        word, word_start = word + 1, after
    return best


class _TokenBudget:
    """Finds how far a chunk may reach with few counts: guesses by characters per token, then counts the real text.

    What is counted grows with the chunk, never with the text: a piece far beyond what tokens usually hold is counted
    from its beginning, in pieces that grow, until it is known to exceed the budget.
    """

    _MAX_GUESSES = 6
    _PROBE = 32, 4096  # characters per token, and at least: no prose comes near, and runs of one letter do

    def __init__(self, text: str, count_tokens: TokenCounter, max_tokens: int) -> None:
        self._text, self._count, self._max_tokens = text, count_tokens, max_tokens
        self._slack = max_tokens // 32  # full enough: the cut moves back to a sentence anyway
        self._chars_per_token = 4.0
        self.probe_chars = max(self._PROBE[0] * max_tokens, self._PROBE[1])

    def find_last_end(self, start: int, ends: Sequence[int], first: int) -> tuple[int, int]:
        """Last index of `ends` from `first` that was counted and fits, and its tokens; (first - 1, 0) if none fits."""
        fits, fits_tokens, exceeds = first - 1, 0, len(ends)
        guesses = 0
        while exceeds - fits > 1 and (fits < first or fits_tokens < self._max_tokens - self._slack):
            target = start + round(self._max_tokens * self._chars_per_token)
            index = bisect_right(ends, target, first) - 1 if guesses < self._MAX_GUESSES else (fits + exceeds) // 2
            index = min(max(index, fits + 1), exceeds - 1)
            num_tokens, end = self._count_up_to(start, ends[index])
            guesses += 1
            if num_tokens > self._max_tokens:
                exceeds = bisect_left(ends, end, fits + 1, index)
            else:
                fits, fits_tokens = index, num_tokens
            self._chars_per_token = (end - start) / max(num_tokens, 1)
        return fits, fits_tokens

    def _count_up_to(self, start: int, end: int) -> tuple[int, int]:
        """Tokens from `start` to `end`, or to an earlier place by which there are too many; and that place."""
        size = self.probe_chars
        while start + size < end:
            num_tokens = self._count(self._text[start : start + size])
            if num_tokens > self._max_tokens:
                return num_tokens, start + size
            size *= 4
        return self._count(self._text[start:end]), end


# --- other people's splitters ----------------------------------------------------------------------------------------


class _SplitPiece(NamedTuple):
    text: str
    start: int | None  # where the splitter says it lies
    metadata: dict[str, Any]


def adapt_splitter(splitter: Any) -> Splitter:
    """Any LangChain text splitter, LlamaIndex node parser or callable(Document) as a Splitter, by its methods alone.

    Pieces are looked up in the document to recover their offsets. A piece the splitter rewrote (normalised, prefixed
    with a header) keeps its text, with `start == end` where the search stood and `verbatim: False` in its metadata.
    """
    cut = _find_split_function(splitter)
    if cut is None:
        if callable(splitter):
            return splitter  # type: ignore[no-any-return]
        raise UsageError(
            f"{type(splitter).__name__} is no splitter; pass a LangChain text splitter, a LlamaIndex node parser "
            "or a callable that takes a ragblend.chunker.Document and returns chunks"
        )
    # With overlap a piece may begin inside the one before; without, searching from its end keeps repeats apart.
    overlap = getattr(splitter, "_chunk_overlap", getattr(splitter, "chunk_overlap", None))
    return _SplitterAdapter(cut, overlap == 0, _describe_splitter(splitter))


def get_splitter_version(splitter: Splitter) -> str:
    """What tells a splitter from one that cuts otherwise: its `version` if it has one, else its name."""
    named = getattr(splitter, "version", None) or getattr(splitter, "__qualname__", None) or type(splitter).__qualname__
    return str(named)


@dataclass(frozen=True, slots=True)
class _SplitterAdapter:
    """Somebody else's splitter as a Splitter. `version`: its name and its settings."""

    split: Callable[[Document], Iterable[Any]]
    from_end: bool
    version: str

    def __call__(self, document: Document, /) -> list[Chunk]:
        """Chunks of one document."""
        return _locate_pieces(document, self.split(document), from_end=self.from_end)


def _describe_splitter(splitter: Any) -> str:
    """A splitter's class and those of its settings that are plain values."""
    plain = (str, int, float, bool, type(None))
    settings = {
        name.lstrip("_"): value
        for name, value in sorted(getattr(splitter, "__dict__", {}).items())
        if isinstance(value, plain)
        or (isinstance(value, list | tuple) and all(isinstance(item, plain) for item in value))
    }
    digest = hashlib.blake2b(repr(settings).encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{type(splitter).__name__} {digest}" if settings else type(splitter).__name__


def _find_split_function(splitter: Any) -> Callable[[Document], Iterable[Any]] | None:
    if hasattr(splitter, "get_nodes_from_documents"):

        def nodes(document: Document) -> Iterable[Any]:
            # Node parsers insist on their own Document class; whoever holds a parser has the module loaded.
            schema = importlib.import_module("llama_index.core.schema")
            pieces: Iterable[Any] = splitter.get_nodes_from_documents([schema.Document(text=document.text)])
            return pieces

        return nodes
    if hasattr(splitter, "create_documents"):  # keeps add_start_index
        return lambda document: splitter.create_documents([document.text])
    if hasattr(splitter, "split_text"):
        return lambda document: splitter.split_text(document.text)
    return None


def _to_piece(item: Any) -> _SplitPiece:
    if isinstance(item, str):
        return _SplitPiece(item, None, {})
    metadata = dict(getattr(item, "metadata", None) or {})
    if hasattr(item, "page_content"):
        return _SplitPiece(item.page_content, metadata.pop("start_index", None), metadata)
    return _SplitPiece(item.get_content(), getattr(item, "start_char_idx", None), metadata)


def _locate_pieces(document: Document, items: Iterable[Any], *, from_end: bool) -> list[Chunk]:
    chunks: list[Chunk] = []
    search_from = 0
    for piece in map(_to_piece, items):
        text = piece.text.strip()
        if not text:
            continue
        metadata = {**document.metadata, **piece.metadata}
        start = _find(document.text, text, piece, search_from)
        if start < 0:
            chunks.append(Chunk(text, document.source, search_from, search_from, {**metadata, "verbatim": False}))
            continue
        end = start + len(text)
        chunks.append(Chunk(text, document.source, start, end, metadata))
        search_from = end if from_end else start + 1
    return chunks


def _find(text: str, wanted: str, piece: _SplitPiece, search_from: int) -> int:
    """Where `wanted` starts in `text`, or -1: as told if true and ahead, else the next place, else any (nesting)."""
    claimed_start = -1 if piece.start is None else piece.start + len(piece.text) - len(piece.text.lstrip())
    claimed_start = claimed_start if claimed_start >= 0 and text.startswith(wanted, claimed_start) else -1
    if claimed_start >= search_from:  # LlamaIndex tells an earlier copy of a repeated text
        return claimed_start
    ahead = text.find(wanted, search_from)
    return ahead if ahead >= 0 else claimed_start if claimed_start >= 0 else text.find(wanted)
