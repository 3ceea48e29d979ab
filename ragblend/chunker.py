"""Documents -> chunks that fit a token budget and from which the document can be rebuilt.

Cuts at paragraphs, then sentences, then words. Counts tokens with a callable that the caller passes, and accepts
LangChain and LlamaIndex splitters without importing either. Does not depend on embeddings, storage or models. `split`
is the default; `adapt_splitter` wraps other splitters; `corpus.documents` reads files.
"""

from __future__ import annotations

import hashlib
import importlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragblend.corpus.cuts import find_best_cut, find_grapheme_ends, find_word_ends, start_of_word
from ragblend.corpus.documents import Document
from ragblend.corpus.layout import Layout
from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk

TokenCounter = Callable[[str], int]
"""Function of the LLM's own tokenizer. Returns the number of tokens of a text alone, without special tokens."""

DEFAULT_CHUNK_SIZE = 512
"""Most tokens of a chunk, where neither the store nor a setting says."""
Splitter = Callable[[Document], list[Chunk]]
"""Function that ingestion cuts documents with, such as `functools.partial(split, count_tokens=...)`.

Returns the chunks of one document, in reading order.
"""


def split(document: Document, count_tokens: TokenCounter, chunk_size: int = DEFAULT_CHUNK_SIZE) -> list[Chunk]:
    """Return chunks of at most `chunk_size` tokens, without overlap; a chunk is `document.text[start:end]`.

    A chunk ends after the last paragraph in its second half, else after the last sentence there, else after the last
    line, else after a word. A word is cut only if it alone exceeds `chunk_size`. It is cut between graphemes (a letter
    with its marks, an emoji of several characters), and a grapheme only if it alone exceeds `chunk_size`. A chunk does
    not end directly after a heading, inside a code block or inside a table row, unless its last three quarters have no
    better place. Only whitespace between chunks is lost. A chunk has the document's metadata and `num_tokens`.

    A chunk of records (a CSV, a log) ends in its last three fifths, before the row whose content has the lowest hash.
    An added row therefore changes few chunks.

    A chunk that continues a table begins with the table's header row, if that takes at most a quarter of `chunk_size`.
    Its text is then the header row, a line break and `document.text[chunk.start:chunk.end]`, and its metadata has
    `verbatim: False`. Raises UsageError if `chunk_size` is below 1 or one character needs more.
    """
    if chunk_size < 1:
        raise UsageError(f"chunk size is {chunk_size} tokens; choose 1 or more, for example 256")
    return list(_Cutter(document, count_tokens, chunk_size).cut())


class _Cutter:
    """Cuts one document from its beginning to its end."""

    def __init__(self, document: Document, count_tokens: TokenCounter, chunk_size: int) -> None:
        self._document, self._count, self._chunk_size = document, count_tokens, chunk_size
        self._text = text = document.text
        self._ends = find_word_ends(text)
        self._layout = Layout(text, document.marks)
        self._budget = _TokenBudget(text, count_tokens, chunk_size)
        self._fit_headers: dict[tuple[int, int], str] = {}  # of the latest table: its header row, "" if it is too long

    def cut(self) -> Iterator[Chunk]:
        """Yield the chunks."""
        text, ends = self._text, self._ends
        first, start = 0, start_of_word(text, ends, 0)
        while first < len(ends):
            header = self._find_header(start)
            last, num_tokens = self._find_last(start, first, header)
            if last < first and header:
                header = ""
                last, num_tokens = self._find_last(start, first, header)
            if last < first:
                end, num_tokens = self._cut_word(start, ends[first])
                first += end == ends[first]
            else:
                end, first = ends[last], last + 1
            assert num_tokens <= self._chunk_size
            facts = {**self._document.metadata, "num_tokens": num_tokens} | ({"verbatim": False} if header else {})
            yield Chunk(header + text[start:end], self._document.source, start, end, facts)
            # The rest of a word that was cut opens the next chunk.
            start = start_of_word(text, ends, first) if first and end == ends[first - 1] else end

    def _find_header(self, start: int) -> str:
        """Return the header row and line break that a chunk from `start` repeats, "" for none."""
        span = self._layout.find_header(start)
        if span is None:
            return ""
        if span not in self._fit_headers:
            header = self._text[span[0] : span[1]].strip() + "\n"
            fits = self._count(header) <= self._chunk_size // 4
            self._fit_headers = {span: header if fits else ""}
        return self._fit_headers[span]

    def _find_last(self, start: int, first: int, header: str) -> tuple[int, int]:
        """Return the number of the last word of a chunk from `start`, and its tokens; (first - 1, 0) if none fits."""
        text, ends = self._text, self._ends
        if ends[first] - start > self._budget.probe_chars:
            return first - 1, 0
        last, num_tokens = self._budget.find_last_end(start, ends, first, header)
        if last < first or last + 1 == len(ends):
            return last, num_tokens
        cut = find_best_cut(text, ends, first, last, start, self._layout)
        cut_tokens = num_tokens if cut == last else self._count(header + text[start : ends[cut]])
        # Fewer characters may be more tokens; the counted end is used then.
        return (cut, cut_tokens) if cut_tokens <= self._chunk_size else (last, num_tokens)

    def _cut_word(self, start: int, end: int) -> tuple[int, int]:
        """Return where to cut a word that exceeds the budget, and the tokens up to there."""
        letters = range(start + 1, end + 1)
        last, num_tokens = self._budget.find_last_end(start, letters, 0)
        if last < 0:
            raise UsageError(
                f"chunk size is {self._chunk_size} tokens, but {self._text[start]!r} in "
                f"{self._document.source or 'the document'} needs more alone; choose a larger chunk size"
            )
        cut = letters[last]
        graphemes = find_grapheme_ends(self._text, start, cut)
        if graphemes and graphemes[-1] < cut:
            fits, fits_tokens = self._budget.find_last_end(start, graphemes, 0)
            if fits >= 0:
                return graphemes[fits], fits_tokens
        return cut, num_tokens


class _TokenBudget:
    """Finds the end of a chunk with few counts: estimates it by characters per token, then counts the text.

    The counted characters grow with the chunk, not with the document: a long piece is counted from its beginning, in
    growing parts, until they exceed the budget.
    """

    _MAX_GUESSES = 6
    _PROBE = 32, 4096  # characters per token, and at least: no prose comes near, and runs of one letter do

    def __init__(self, text: str, count_tokens: TokenCounter, chunk_size: int) -> None:
        self._text, self._count, self._chunk_size = text, count_tokens, chunk_size
        self._slack = chunk_size // 32  # full enough: the cut moves back to a sentence anyway
        self._chars_per_token = 4.0
        self.probe_chars = max(self._PROBE[0] * chunk_size, self._PROBE[1])

    def find_last_end(self, start: int, ends: Sequence[int], first: int, header: str = "") -> tuple[int, int]:
        """Return the last index of `ends` from `first` that fits with `header` before it, and its tokens.

        (first - 1, 0) if none fits."""
        fits, fits_tokens, exceeds = first - 1, 0, len(ends)
        guesses = 0
        while exceeds - fits > 1 and (fits < first or fits_tokens < self._chunk_size - self._slack):
            target = start + round(self._chunk_size * self._chars_per_token) - len(header)
            index = bisect_right(ends, target, first) - 1 if guesses < self._MAX_GUESSES else (fits + exceeds) // 2
            index = min(max(index, fits + 1), exceeds - 1)
            num_tokens, end = self._count_up_to(start, ends[index], header)
            guesses += 1
            if num_tokens > self._chunk_size:
                exceeds = bisect_left(ends, end, fits + 1, index)
            else:
                fits, fits_tokens = index, num_tokens
            self._chars_per_token = (len(header) + end - start) / max(num_tokens, 1)
        return fits, fits_tokens

    def _count_up_to(self, start: int, end: int, header: str) -> tuple[int, int]:
        """Return the tokens from `start` to `end`, or to an earlier position that exceeds the budget; and that
        position."""
        size = self.probe_chars
        while start + size < end:
            num_tokens = self._count(header + self._text[start : start + size])
            if num_tokens > self._chunk_size:
                return num_tokens, start + size
            size *= 4
        return self._count(header + self._text[start:end]), end


# --- other splitters --------------------------------------------------------------------------------------------------


class _SplitPiece(NamedTuple):
    text: str
    start: int | None  # as the splitter reports it
    metadata: dict[str, Any]


def adapt_splitter(splitter: Any) -> Splitter:
    """Return a LangChain text splitter, LlamaIndex node parser or callable(Document) as a Splitter.

    The offsets of a piece are found by searching for its text in the document. A piece that the splitter rewrote
    (normalized, prefixed with a header) is not found. Such a piece keeps its text. Its metadata has `verbatim: False`,
    and both `start` and `end` are the offset at which the search began. Raises UsageError for an object that is no
    splitter.
    """
    cut = _find_split_function(splitter)
    if cut is None:
        if callable(splitter):
            return splitter  # type: ignore[no-any-return]
        raise UsageError(
            f"{type(splitter).__name__} is no splitter; pass a LangChain text splitter, a LlamaIndex node parser "
            "or a callable that takes a ragblend.chunker.Document and returns chunks"
        )
    # With overlap a piece may begin inside the previous one. Without, the search starts at the previous end, so that
    # repeated texts get different offsets.
    overlap = getattr(splitter, "_chunk_overlap", getattr(splitter, "chunk_overlap", None))
    return _SplitterAdapter(cut, overlap == 0, _describe_splitter(splitter))


def get_splitter_version(splitter: Splitter) -> str:
    """Return the name that identifies how a splitter cuts: its `version` if it has one, else its name."""
    named = getattr(splitter, "version", None) or getattr(splitter, "__qualname__", None) or type(splitter).__qualname__
    return str(named)


@dataclass(frozen=True, slots=True)
class _SplitterAdapter:
    """A framework's splitter as a Splitter. `version`: its name and its settings."""

    split: Callable[[Document], Iterable[Any]]
    from_end: bool
    version: str

    def __call__(self, document: Document, /) -> list[Chunk]:
        """Return the chunks of one document."""
        return _locate_pieces(document, self.split(document), from_end=self.from_end)


def _describe_splitter(splitter: Any) -> str:
    """Return a splitter's class and a digest of its settings that are plain values."""
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
            # Node parsers require their own Document class; a caller with a parser has loaded its module.
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
    """Return the offset of `wanted` in `text`; -1 if it is missing.

    It is the offset that the splitter reports, if `wanted` is there and not before `search_from`. Else it is the next
    occurrence from `search_from` on, else any occurrence, because pieces may be nested.
    """
    claimed_start = -1 if piece.start is None else piece.start + len(piece.text) - len(piece.text.lstrip())
    claimed_start = claimed_start if claimed_start >= 0 and text.startswith(wanted, claimed_start) else -1
    if claimed_start >= search_from:  # LlamaIndex may report an earlier copy of a repeated text
        return claimed_start
    ahead = text.find(wanted, search_from)
    return ahead if ahead >= 0 else claimed_start if claimed_start >= 0 else text.find(wanted)
