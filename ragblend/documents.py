"""Files -> documents: text, Markdown, HTML, CSV, JSON, JSON lines and PDF, one at a time or folder by folder.

Tells text from garbage and names the remedy for what it cannot read. Knows nothing about tokens, chunks or models.
Read `iter_documents` first; the readers below it are one function per format.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.errors import EmptyCorpusError, NotFoundError, UnreadableDocumentError, UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Document:
    """One text with a name. `source` is unique within a corpus; equal texts under two sources are fine."""

    text: str
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def content_hash(self) -> str:
        """32 hex digits; equal when text and metadata are equal, so ingestion can skip what did not change."""
        metadata = json.dumps(dict(self.metadata), sort_keys=True, default=str)
        return hashlib.blake2b(f"{metadata}\0{self.text}".encode(), digest_size=16).hexdigest()


class ReadFailure(NamedTuple):
    """A file that could not be read as text, and why, with the way out."""

    path: str
    reason: str


def load_documents(path: str | Path, *, glob: str = "*", root: str | Path | None = None) -> list[Document]:
    """Every document of one file or folder; all or nothing.

    Raises NotFoundError (no such path), UnreadableDocumentError (the first file that is no text) and
    EmptyCorpusError (a folder where nothing matches `glob`). To go on after a bad file, use `iter_documents`.
    """
    documents = []
    for item in iter_documents([path], glob=glob, root=root):
        if isinstance(item, ReadFailure):
            raise UnreadableDocumentError(f"cannot read {item.path}: {item.reason}")
        documents.append(item)
    if not documents:
        raise EmptyCorpusError(f"{path} holds no file that matches {glob!r}; name another folder or pattern")
    return documents


def iter_documents(
    paths: Iterable[str | Path], *, glob: str = "*", root: str | Path | None = None
) -> Iterator[Document | ReadFailure]:
    """Documents of all `paths` in order, and a ReadFailure per unreadable file or line of a JSON lines file.

    A missing path raises NotFoundError now.

    Folders are walked recursively, sorted, without hidden files and without following links to folders; `glob` filters
    inside folders only. A document's `source` is its path below `root` (default: the working folder), absolute
    when it lies elsewhere, plus `#record` or `#record.passage` (counted from 0) for files that hold several.
    """
    tops = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for top in tops:
        if not top.exists():
            raise NotFoundError(f"{top} does not exist; check the path you gave to `ragblend ingest`")
    return _walk(tops, glob, Path.cwd() if root is None else Path(root).resolve())


def _walk(tops: Sequence[Path], glob: str, root: Path) -> Iterator[Document | ReadFailure]:
    seen: set[Path] = set()
    for top in (path.resolve() for path in tops):
        for path in _files_below(top, glob) if top.is_dir() else [top]:
            if path in seen:  # `ingest docs docs/a.txt` names one file twice
                continue
            seen.add(path)
            name = (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
            try:
                yield from _read(path, name)
            except UnreadableDocumentError as error:
                yield ReadFailure(name, str(error))


def _files_below(folder: Path, glob: str) -> list[Path]:
    try:
        found = [path for path in folder.rglob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"glob is {glob!r}: {error}; give a relative pattern such as '*.md'") from error
    visible = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(visible, key=lambda path: path.relative_to(folder).parts)


def _read(path: Path, name: str) -> list[Document | ReadFailure]:
    """Documents of one file, and the lines that are none; raises UnreadableDocumentError with reason and remedy."""
    if not path.is_file():
        raise UnreadableDocumentError("is neither a file nor a folder; give regular files")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnreadableDocumentError(f"{error.strerror or error}; check its permissions") from error
    if not data:
        raise UnreadableDocumentError("is empty (0 bytes); remove it or write it again")
    reader = _READERS.get(path.suffix.lower(), _read_text)
    found = list(reader(data))
    bad = [item for item in found if isinstance(item, UnreadableDocumentError)]
    records = [(item[0], _sound(item[1]), item[2]) for item in found if isinstance(item, tuple)]
    documents: list[Document | ReadFailure] = [
        Document(text, name + key, metadata) for key, text, metadata in records if text.strip()
    ]
    if bad:
        reasons = [str(error) for error in bad[:_MAX_NAMED_LINES]]
        if len(bad) > _MAX_NAMED_LINES:
            reasons.append(f"{len(bad) - _MAX_NAMED_LINES} more lines are skipped, most likely for the same reason")
        return [*documents, *(ReadFailure(name, reason) for reason in reasons)]
    if not documents:
        remedy = "run OCR on it first" if path.suffix.lower() == ".pdf" else "remove it or check its contents"
        raise UnreadableDocumentError(f"holds no text; {remedy}")
    return documents


def _sound(text: str) -> str:
    """`text` with one kind of line break, and with lone surrogates (JSON can spell them) as U+FFFD: neither hashes."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


Record = tuple[str, str, dict[str, Any]]  # suffix of the source, text, metadata

_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_MAX_NAMED_LINES = 10  # bad lines of one file that are named one by one
_MAX_ODD_SHARE = 0.05  # of control, private and unassigned characters; prose has none, random bytes far more


def _decode(data: bytes, declared: str = "") -> str:
    """Text of `data`: by its byte order mark, else as `declared`, else UTF-8. No other encoding is guessed:
    latin-1 maps every byte to some character, so it would turn any garbage into a document."""
    marked = next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)
    if marked is None and b"\0" in data:
        raise UnreadableDocumentError("is a binary file (NUL bytes); convert it to text, HTML or PDF first")
    try:
        text = data.decode(marked or declared or "utf-8-sig")
    except (UnicodeError, LookupError) as error:
        where = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise UnreadableDocumentError(
            f"is not {marked or declared or 'UTF-8'} text ({where}); if it is text in another encoding, "
            "convert it: iconv -f ENCODING -t UTF-8 FILE"
        ) from error
    sample = text[:65536]
    num_odd = sum(
        unicodedata.category(char) in {"Cc", "Cn", "Co", "Cs"} and char not in "\t\n\r\f\x1b" for char in sample
    )
    if num_odd > _MAX_ODD_SHARE * len(sample):
        raise UnreadableDocumentError(
            f"is no text: {num_odd} of its first {len(sample)} characters are control or unassigned codes; "
            "convert it to text, HTML or PDF first"
        )
    return text


def _read_text(data: bytes) -> Iterator[Record]:
    yield "", _decode(data), {}


_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w-]+)""", re.IGNORECASE)


def _read_html(data: bytes) -> Iterator[Record]:
    found = None if data.startswith(b"\xef\xbb\xbf") else _CHARSET.search(data[:4096])
    declared = found[1].decode().lower() if found else ""
    # Browsers read "iso-8859-1" as Windows-1252 (WHATWG Encoding Standard), and pages rely on it for quotes and dashes.
    page = _decode(data, "cp1252" if declared in {"iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"} else declared)
    parsed = _HtmlText(page)
    extract = _trafilatura_extract()
    text = extract(page, include_comments=False) if extract else None
    yield "", text or parsed.text, {"title": parsed.title} if parsed.title else {}


@cache
def _trafilatura_extract() -> Callable[..., str | None] | None:
    """The extra `html`, which drops menus and footers that our own parser keeps; None when it is not installed."""
    try:
        from trafilatura import extract
    except ImportError as error:
        if error.name != "trafilatura":  # installed, but for example its lxml came without lxml_html_clean
            logger.warning("trafilatura does not import (%s); pages are read by the simpler parser", error)
        return None
    return extract  # type: ignore[no-any-return]


class _HtmlText(HTMLParser):
    """The visible text of a page, one blank line between blocks; for when trafilatura is missing or finds nothing."""

    _HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "title"})
    _INLINE = re.compile(  # every other element begins a block
        "a|abbr|b|bdi|bdo|big|cite|code|data|dfn|em|font|i|ins|kbd|label|mark|q|s|samp|small|span|strong|sub|sup"
        "|time|tt|u|var|wbr"
    )

    def __init__(self, page: str) -> None:
        super().__init__()
        self._open: list[str] = []  # hidden elements we are inside of
        self._pieces: list[str] = []
        self._title: list[str] = []
        self.feed(page)
        self.close()
        text = re.sub(r"[^\S\n]+", " ", "".join(self._pieces))
        self.text = re.sub(r" ?\n ?", "\n", re.sub(r"\s*\n\s*\n\s*", "\n\n", text)).strip()
        self.title = " ".join("".join(self._title).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._HIDDEN:
            self._open.append(tag)
        elif tag in {"td", "th"}:
            self._pieces.append(" ")
        elif not self._INLINE.fullmatch(tag):
            self._pieces.append("\n" if tag in {"br", "tr", "li"} else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            del self._open[self._open.index(tag) :]
        elif not self._INLINE.fullmatch(tag) and tag not in {"td", "th", "tr", "li"}:
            self._pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._open:
            self._pieces.append(re.sub(r"\s+", " ", data))
        elif self._open == ["title"]:
            self._title.append(data)


_TEXT_FIELDS = ("text", "content", "page_content")


def _read_csv(data: bytes) -> Iterator[Record]:
    """One document per row when a column is called text, content or page_content; else one, a paragraph per row."""
    text = _decode(data)
    header = text.partition("\n")[0]
    delimiter = max(",;\t|\x1f", key=lambda mark: (header.count(mark), mark == "\x1f"))  # \x1f: a single column
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restkey="", restval=""))
    except csv.Error as error:
        raise UnreadableDocumentError(f"is not CSV ({error}); repair it or rename it to .txt") from error
    wide = next((number for number, row in enumerate(rows) if "" in row and isinstance(row[""], list)), None)
    if wide is not None:
        raise UnreadableDocumentError(
            f"row {wide} has more fields than the header; quote the {delimiter!r} in its text"
        )
    column = next((name for name in (rows[0] if rows else ()) if name.strip().lower() in _TEXT_FIELDS), None)
    if column is None:
        lines = ("; ".join(f"{name}: {value}" for name, value in row.items() if value) for row in rows)
        yield "", "\n\n".join(lines), {}
        return
    for number, row in enumerate(rows):
        yield f"#{number}", row[column], {name: value for name, value in row.items() if name and name != column}


def _read_json(data: bytes) -> Iterator[Record]:
    try:
        value = json.loads(_decode(data))
    except (ValueError, RecursionError) as error:
        raise UnreadableDocumentError(f"is not JSON ({error}); repair it or rename it to .txt") from error
    if isinstance(value, list):
        for number, record in enumerate(value):
            yield from _record(record, f"#{number}", ".")
    else:
        yield from _record(value, "", "#")


def _read_jsonl(data: bytes) -> Iterator[Record | UnreadableDocumentError]:
    """A document per line; a line that is none is skipped and named, the others keep their numbers."""
    lines = [(number, line) for number, line in enumerate(_decode(data).split("\n"), start=1) if line.strip()]
    for record, (number, line) in enumerate(lines):  # splitlines() would cut inside JSON strings
        try:
            yield from list(_record(json.loads(line), f"#{record}", "."))
        except UnreadableDocumentError as error:
            yield UnreadableDocumentError(f"line {number} is skipped: {error}")
        except (ValueError, RecursionError) as error:
            where = f", column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else f": {error}"
            yield UnreadableDocumentError(
                f"line {number} is skipped, it is not JSON{where}; put one value on each line and ingest again"
            )


def _record(value: Any, key: str, joint: str) -> Iterator[Record]:
    """Documents of one JSON value: a string, {text: ...}, {ctxs: [...]} (MuSiQue) or {"0": ..., ...} (CacheBlend)."""
    if isinstance(value, str):
        yield key, value, {}
        return
    if isinstance(value, dict):
        if isinstance(value.get("ctxs"), list):
            # Question and answers stay out of the metadata: they belong to the record, not to the passage.
            for number, passage in enumerate(value["ctxs"]):
                yield from _record(passage, f"{key}{joint}{number}", ".")
            return
        name = next((name for name in _TEXT_FIELDS if isinstance(value.get(name), str)), None)
        if name is not None:
            extra = value.get("metadata")
            fields = {key: item for key, item in value.items() if key not in {name, "metadata"}}
            yield key, value[name], {**fields, **(extra if isinstance(extra, dict) else {})}
            return
        numbered = [name for name in value if name.isdecimal() and isinstance(value[name], str)]
        if numbered:
            for name in sorted(numbered, key=int):
                yield f"{key}{joint}{name}", value[name], {}
            return
    where = f"record {key[1:]}" if key else "its value"
    raise UnreadableDocumentError(
        f"{where} is neither a string nor an object with one of {', '.join(_TEXT_FIELDS)}, ctxs or numbered passages; "
        "rename the field that holds the text"
    )


def _read_pdf(data: bytes) -> Iterator[Record]:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise UnreadableDocumentError("PDF needs pypdf: pip install 'ragblend[pdf]'") from error
    try:
        pages = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except Exception as error:  # pypdf raises whatever a broken or locked file makes it stumble over
        raise UnreadableDocumentError(
            f"is a damaged or locked PDF ({error or type(error).__name__}); repair it or save it without a password"
        ) from error
    yield "", "\n\n".join(pages), {"num_pages": len(pages)}


_READERS: dict[str, Callable[[bytes], Iterator[Record | UnreadableDocumentError]]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    **dict.fromkeys((".jsonl", ".ndjson"), _read_jsonl),
    ".json": _read_json,
    ".pdf": _read_pdf,
}
