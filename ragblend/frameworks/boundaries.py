"""Chunk boundaries, found again in a prompt that a framework has glued into one string.

`recover_chunks` is the one place for it: explicit segments, then a separator, then the registry of ingested texts. What
it finds are places in a text, so it cannot add, drop or move a character: joined, the parts read as the text that was
sent, whatever was ingested. Two texts are the same when they are equal after `strip()`.

Knows strings and chunks, nothing about tokens, KV or frameworks. Read `recover_chunks`, then `_RegistryMatcher`.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol

from ragblend.corpus.text_index import TextIndex
from ragblend.errors import UsageError
from ragblend.prompt.prompt import CHUNK_DELIMITER, Chunk, Part, merge_texts
from ragblend.prompt.segmenter import any_of

logger = logging.getLogger(__name__)

Block = Part | Mapping[str, Any]
"""Text, a chunk, or a content block `{"type": "text", "text": ..., "extras": {"chunk_id": ...}}`."""
SHORT_CHARS = 24
"""A text below this may be an everyday word: at the end of a user's turn it is never taken for a chunk."""

MAX_MATCHES = 10_000
"""Known texts that are recognised in one message: more is a table of everyday words, and each costs a place."""


class ChunkSpan(NamedTuple):
    """A chunk at `start .. end` of a text."""

    start: int
    end: int
    chunk: Chunk


class TextRegistry(Protocol):
    """Texts of ingested chunks; `corpus.texts.ChunkRegistry` is one."""

    def __contains__(self, text: object) -> bool: ...

    def searching(self) -> AbstractContextManager[TextIndex]:
        """The texts as they are now."""
        ...


def recover_chunks(
    content: str | Sequence[Block],
    *,
    segments: Sequence[Part] = (),
    separator: str | None = None,
    registry: TextRegistry | None = None,
    is_stored: Callable[[str], bool] | None = None,
    asks: bool = False,
    framed: bool = False,
    max_matches: int = MAX_MATCHES,
) -> tuple[Part, ...]:
    """Text and chunks of one message, in order; () for one that is blank.

    Marked by the caller, and chunks wherever they stand: Chunks and blocks with a `chunk_id` in `content`; `segments`
    found verbatim in it, each as often as it is given; pieces that a `separator` cuts out, when their text is in the
    `registry` or `is_stored` (without both: pieces between two separators). A separator is no text: it is dropped, and
    where no whitespace stands around it, it reads as a blank line.

    The `registry` is searched in what is still text, under rules that keep a quoted sentence what it is:

    - A known text counts where it fills whole lines, or stands behind a label (`[1]`, `Content:`, `- `, `<doc>`) and
      before nothing but a note (`(page 1)`, `</doc>`) on its line. Never inside a sentence, a word, a number or a URL.
    - `asks` (a user's turn): what follows a label such as `Question:` is none; neither is the end of the turn, unless
      it stands there for the first time, ends with no question mark, and has a label with a colon (`Is it so: ...`)
      only if one before had it, too.
    - A block that is a known text, whole, stands alone; not as the last one of a user's turn.
    - `max_matches`: what is known stays text from there on, and a warning says so.
    - `framed` (the model puts a template around chunks): whole lines only, and not at the end of a user's turn.

    >>> recover("Context:\\n\\nfirst\\n\\nsecond\\n\\nQuestion: why?", segments=["first", "second"])[1].text
    'first'
    """
    if registry is not None and not isinstance(content, str | Chunk) and len(content) > 1:
        *blocks, last = content
        known_blocks = (_known_block(block, registry) for block in (blocks if asks else content))
        content = [part for parts in known_blocks for part in parts] + ([last] if asks else [])
    parts = _flatten(content)
    if separator is not None:
        check_separator(separator)
        judges = [test for test in (registry.__contains__ if registry is not None else None, is_stored) if test]
        parts = _separated(parts, separator, judges, asks)
    if segments:
        parts = _explicit(parts, segments)
    if registry is not None:
        with registry.searching() as known:
            parts = _RegistryMatcher(parts, known, asks, framed, max_matches).cut()
    if not any(isinstance(part, Chunk) or part.strip() for part in parts):
        return ()
    return tuple(parts)


def check_separator(separator: str) -> None:
    """Raise UsageError for a separator that frameworks would change on the way."""
    if not separator or separator != separator.strip():
        raise UsageError(
            f"separator is {separator!r}; frameworks strip outer whitespace, so choose a mark without it that no "
            "document contains, for example '[[RB]]'"
        )


# --- what the caller marks ---


def _flatten(content: str | Sequence[Block]) -> list[Part]:
    blocks: Sequence[Block] = [content] if isinstance(content, str | Chunk) else content
    parts: list[Part] = []
    for block in blocks:
        parts += [block] if isinstance(block, str) else _marked(block)
    return list(merge_texts(parts))


def _known_block(block: Block, registry: TextRegistry) -> list[Block]:
    """A block, its text as a chunk if that is known."""
    text = block.get("text") if isinstance(block, Mapping) and _is_text(block) and _marks(block) is None else block
    core = text.strip() if isinstance(text, str) else ""
    if not isinstance(text, str) or len(core) < SHORT_CHARS or core not in registry:
        return [block]
    before, _, after = text.partition(core)
    return [before, _found(core), after]


def _is_text(block: Mapping[str, Any]) -> bool:
    return block.get("type", "text") in ("text", "text-plain")


def _marks(block: Mapping[str, Any]) -> Any:
    """The id of a block that is marked as a chunk; None where it is not."""
    return (block.get("extras") or {}).get("chunk_id", block.get("chunk_id"))


_INSTEAD = {
    "image": "have a model that sees describe it, and send its words",
    "audio": "send its transcript",
    "video": "send its transcript, or a description",
    "file": "send its text (`ragblend ingest` reads PDF, HTML, Office and others)",
}
_INSTEAD |= {"document": _INSTEAD["file"], "media": "describe it in words"}


def is_media(kind: str) -> bool:
    """Whether a content block of that type is something to see or hear, or a file.

    >>> [is_media(kind) for kind in ("image_url", "input_audio", "reasoning")]
    [True, True, False]
    """
    return any(name in kind for name in _INSTEAD)


def refuse_block(kind: str) -> NoReturn:
    """Raise UsageError for a content block that no engine reads."""
    instead = next((what for name, what in _INSTEAD.items() if name in kind), "send its text as a text block")
    raise UsageError(f"a content block has type {kind!r}; the engine reads text only. Leave it out, or {instead}")


def _marked(block: Chunk | Mapping[str, Any]) -> list[Part]:
    """The parts of one block; whitespace around a chunk's text stays outside of the chunk."""
    if isinstance(block, Chunk):
        return [block] if block.text.strip() else [block.text]
    text = block.get("text")
    if not _is_text(block) or not isinstance(text, str):
        refuse_block(str(block.get("type", "text")))
    extras, chunk_id = block.get("extras") or {}, _marks(block)
    core = text.strip()
    if chunk_id is None or not core:
        return [text]
    before, _, after = text.partition(core)
    return [before, Chunk(core, str(extras.get("source") or ""), metadata={"chunk_id": chunk_id}), after]


def _cut(text: str, spans: Iterable[ChunkSpan]) -> Iterator[Part]:
    """`text` in parts, the `spans` (ascending, apart) as chunks."""
    place = 0
    for span in spans:
        yield text[place : span.start]
        yield span.chunk
        place = span.end
    yield text[place:]


def _found(text: str) -> Chunk:
    """A chunk that stands in a text."""
    return Chunk(text, found_in_prompt=True)


def _handed_over(chunk: Chunk, text: Part, start: int, end: int) -> Chunk:
    """A chunk that the caller says stands in `text`, from where he says it came. Where it stands between whitespace and
    the end of a line, the prompt is laid out as if the chunk had been a part of its own: nothing is added there."""
    assert isinstance(text, str)
    inside = (end < len(text) and text[end] != "\n") or bool(text[:start][-1:].strip())
    return Chunk(text[start:end], chunk.source, metadata=chunk.metadata, found_in_prompt=inside)


def _separated(parts: Sequence[Part], separator: str, known: Sequence[Callable[[str], bool]], asks: bool) -> list[Part]:
    """`parts` without the separators, and as chunks what they cut out that is `known`; without a judge, what stands
    between two of them. A user's turn does not end with a chunk."""
    found: list[Part] = []
    for index, part in enumerate(parts):
        pieces = part.split(separator) if isinstance(part, str) else []
        if len(pieces) < 2:
            found.append(part)
            continue
        ends_turn = asks and index == len(parts) - 1
        before = ""  # the last character that stands before the piece
        for place, piece in enumerate(pieces):
            if before and piece and not before.isspace() and not piece[0].isspace():
                found.append(CHUNK_DELIMITER)
            last = place == len(pieces) - 1
            core = piece.strip()
            is_chunk = any(test(core) for test in known) if known else place > 0 and not last
            if core and is_chunk and not (last and ends_turn):
                start = piece.index(core)
                found += _cut(piece, [ChunkSpan(start, start + len(core), _found(core))])
            else:
                found.append(piece)
            before = piece[-1:] or before
    return list(merge_texts(found))


def _explicit(parts: Sequence[Part], segments: Sequence[Part]) -> list[Part]:
    """Cut `segments` out of the texts, each as often as it is given: first where it fills whole lines."""
    given: dict[str, deque[Chunk]] = {}
    for segment in segments:
        chunk = segment if isinstance(segment, Chunk) else Chunk(segment)
        if text := chunk.text.strip():
            given.setdefault(text, deque()).append(chunk)
    if not given:
        return list(parts)
    search = _GivenChunkMatcher(given)
    taken: list[list[ChunkSpan]] = [[] for _ in parts]
    for whole_lines in (True, False):
        for index, part in enumerate(parts):
            if isinstance(part, str):
                taken[index] = list(search.spans(part, taken[index], whole_lines))
    pieces = (_cut(part, spans) if isinstance(part, str) else (part,) for part, spans in zip(parts, taken, strict=True))
    return list(merge_texts(chain.from_iterable(pieces)))


_HEAD = 8  # characters of a segment by which its places are looked for


class _GivenChunkMatcher:
    """Segments that are still to be found. What lies in a text that was taken is not looked at again, and what has been
    found as often as it was given is no longer looked for."""

    def __init__(self, given: dict[str, deque[Chunk]]) -> None:
        self._given, self._left = given, sum(map(len, given.values()))
        self._known, self._heads = TextIndex(given), any_of(each[:_HEAD] for each in given)

    def spans(self, text: str, taken: Sequence[ChunkSpan], whole_lines: bool) -> Iterator[ChunkSpan]:
        """`taken` (ascending, apart), and between them the first places of what is left, the longest at each."""
        place = 0
        for span in (*taken, None):
            end = len(text) if span is None else span.start
            while self._left and (found := self._heads.search(text, place, end)) is not None:
                here = self._at(text, found.start(), end, whole_lines)
                place = found.start() + 1 if here is None else here.end
                if here is not None:
                    yield here
            if span is not None:
                yield span
                place = span.end

    def _at(self, text: str, start: int, limit: int, whole_lines: bool) -> ChunkSpan | None:
        """The longest segment that is left and stands at `start`, where it ends by `limit` and cuts no word."""
        if not (_begins_line(text, start) if whole_lines else _may_cut(text, start)):
            return None
        for known in self._known.starting_at(text, start):
            end = start + len(known)
            if end > limit or not (_LINE_END.match(text, end) if whole_lines else _may_cut(text, end)):
                continue
            chunk = self._given[known].popleft()
            self._left -= 1
            if not self._given[known]:
                self._known.discard(known)
            return ChunkSpan(start, end, _handed_over(chunk, text, start, end))
        return None


# --- where a chunk may begin and end ---

# Scripts that put no space between words: a boundary may stand between any two of their letters.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff]|[\U00020000-\U0003ffff]"
)
_URL = re.compile(r"""(?:\b[A-Za-z][A-Za-z0-9+.-]{0,63}://|\bwww\.)[^\s<>"]*""")
_RUN = 2048  # characters on either side of a place that are looked at for a URL


def _may_cut(text: str, place: int) -> bool:
    """Whether a chunk may begin or end at `place`: not inside a word, a number or a URL.

    >>> [_may_cut(text, place) for text, place in (("12 euro", 2), ("125", 2), ("12,5", 2), ("see www.a.b", 8))]
    [True, False, False, False]
    """
    before, after = text[place - 1 : place], text[place : place + 1]
    if not before or not after or before.isspace() or after.isspace():
        return True
    if _is_letter(before) and _is_letter(after) and not _UNSPACED.match(before) and not _UNSPACED.match(after):
        return False
    around = text[max(0, place - 2) : place + 2]
    if re.search(r"\d[.,:'’/]\d", around):  # place is next to the mark, so a digit beyond it belongs to the number
        return False
    return not _in_url(text, place)


def _in_url(text: str, place: int) -> bool:
    """Whether a URL begins before `place` and goes on behind it."""
    start = max(0, place - _RUN)
    window = text[start : place + _RUN]
    if "://" not in window and "www." not in window:
        return False
    return any(found.start() < place - start < found.end() for found in _URL.finditer(window))


def _is_letter(character: str) -> bool:
    return character.isalnum() or character == "_"


def _begins_line(text: str, start: int) -> bool:
    """Whether nothing but blanks stands before `start` on its line."""
    return _LINE_START.search(text[max(0, start - _INDENT) : start]) is not None


_INDENT = 256  # blanks before a text that still fills its line
_LINE_START = re.compile(r"(?:^|\n)[ \t]*\Z")
_LINE_END = re.compile(r"[ \t\r]*(?:\n|\Z)")

# --- what the registry knows ---

# What frameworks and people put before a passage on its line: a bullet, a number, brackets, a tag, or a name of one or
# two words, perhaps with a number, and a colon.
_LABEL = re.compile(
    r"(?:[-*+•‣>]+[ \t]+"
    r"|#?\d{1,4}[.):][ \t]+"
    r"|\[[^\]\n]{1,60}\]:?[ \t]*|\([^()\n]{1,60}\):?[ \t]*|<[A-Za-z][^<>\n]{0,80}>[ \t]*"
    r"|[^\W\d][\w’'-]*(?:[ \t][^\W\d][\w’'-]*)?(?:[ \t]?[#\d][\d.]{0,6})?[ \t]?[:：][ \t]+)"
)
# A label with one of these words last announces a question: "Question: ..." is no passage, even if it was ingested.
_ASKING = re.compile(
    r"(?:\b(?:questions?|query|queries|q|user|human|inputs?|ask|asked|request|task|frage|pregunta|pergunta|domanda"
    r"|vraag|вопрос|سؤال)|问题|問題|質問|질문)\W*\d*\W*\Z",
    re.IGNORECASE,
)
_ASKING_LINE = re.compile(r"(?:\A|\n)[ \t#>*]*([^\n:：]{0,60})[:：][ \t*]*\s*\Z")
# What they put behind it: a note in brackets, a closing tag.
_REST = re.compile(r"(?:[ \t]*(?:</[^<>\n]{1,80}>|\([^()\n]{0,80}\)|\[[^\[\]\n]{0,80}\]))*[ \t\r]*(?:\n|\Z)")
_GAP, _BLANKS = re.compile(r"[ \t]+"), re.compile(r"[ \t]*")
_NOTHING = re.compile(r"\s*\Z")
_MAX_LABELS = 3
_QUESTION_MARKS = ("?", "？", "؟", ";")


class _RegistryMatcher:
    """One search for known texts: a line after the other, each place once."""

    def __init__(self, parts: Sequence[Part], known: TextIndex, asks: bool, framed: bool, max_matches: int) -> None:
        self._left = max_matches
        self._max_matches = max_matches
        self._parts, self._known, self._asks, self._framed = parts, known, asks, framed
        self._seen = {part.text for part in parts if isinstance(part, Chunk)}
        self._labels: set[str] = set()  # those that known texts stood behind, without their numbers

    def cut(self) -> list[Part]:
        """The parts, known texts cut out of the texts among them."""
        found: list[Part] = []
        for index, part in enumerate(self._parts):
            if isinstance(part, str):
                before = self._parts[index - 1] if index else ""
                at_line = not (isinstance(before, Chunk) and before.found_in_prompt)
                ends_turn = self._asks and index == len(self._parts) - 1
                found += _cut(part, self._spans(part, at_line, ends_turn))
            else:
                found.append(part)
        return list(merge_texts(found))

    def _spans(self, text: str, at_line: bool, ends_turn: bool) -> Iterator[ChunkSpan]:
        """Known texts in `text`, which begins a line or goes on with one."""
        line = 0 if at_line else _next_line(text, 0)
        while line < len(text):
            chain = self._on_line(text, line)
            if chain and ends_turn and _NOTHING.match(text, chain[-1][1]) and not self._may_end(text, line, chain):
                chain = ()
            if len(chain) > self._left:
                logger.warning(
                    "more than %d ingested texts stand in one message; what follows them is read as text. To have more "
                    "of them reused, raise max_matches",
                    self._max_matches,
                )
                self._left = 0
                return
            self._left -= len(chain)
            if chain:
                self._labels.add(_label(text, line, chain[0][0]))
            for start, end in chain:
                self._seen.add(text[start:end])
                yield ChunkSpan(start, end, _found(text[start:end]))
            line = _next_line(text, chain[-1][1] if chain else line)

    def _on_line(self, text: str, line: int) -> Sequence[tuple[int, int]]:
        """Places of known texts, one or several with blanks between them, that fill the line at `line`."""
        place = _BLANKS.match(text, line).end()  # type: ignore[union-attr]  # it matches anywhere
        chain = self._chain(text, place)
        if not chain and not self._framed:
            for _ in range(_MAX_LABELS):
                label = _LABEL.match(text, place)
                if label is None or (self._asks and _ASKING.search(label.group())):
                    break
                place = label.end()
                if chain := self._chain(text, place):
                    break
        if chain and self._asks and _asks_for(text, line):
            return ()
        return chain

    def _chain(self, text: str, place: int) -> Sequence[tuple[int, int]]:
        chain: list[tuple[int, int]] = []
        if not _may_cut(text, place):
            return ()
        while True:
            following = None
            for known in self._known.starting_at(text, place):
                end = place + len(known)
                if _LINE_END.match(text, end) or (not self._framed and _may_cut(text, end) and _REST.match(text, end)):
                    return [*chain, (place, end)]
                gap = None if self._framed or following else _GAP.match(text, end)
                if gap is not None and next(self._known.starting_at(text, gap.end()), None) is not None:
                    following = (end, gap.end())
            if following is None:
                return ()
            chain.append((place, following[0]))
            place = following[1]

    def _may_end(self, text: str, line: int, chain: Sequence[tuple[int, int]]) -> bool:
        """Whether what ends a user's turn is a passage rather than the question: see `recover_chunks`."""
        start, end = chain[0][0], chain[-1][1]
        known, label = text[start:end], _label(text, line, start)
        return (
            not self._framed
            and len(chain) == 1
            and (not label.endswith((":", "：")) or label in self._labels)
            and len(known) >= SHORT_CHARS
            and not known.endswith(_QUESTION_MARKS)
            and known not in self._seen
        )


def _asks_for(text: str, line: int) -> bool:
    """Whether the last words before the line at `line` announce a question."""
    announced = _ASKING_LINE.search(text[max(0, line - 128) : line])
    return announced is not None and _ASKING.search(announced.group(1)) is not None


def _label(text: str, line: int, start: int) -> str:
    """What stands before `start` on its line, without numbers: "Document 3: " and "Document 4: " are the same."""
    return re.sub(r"\d+", "", text[line:start]).strip()


def _next_line(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end + 1
