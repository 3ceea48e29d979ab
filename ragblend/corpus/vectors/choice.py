"""What `--vectors` says: where an index's vectors are searched, and what of it may be remembered and shown.

A secret is in what was given only: what an index remembers, and what is printed, has none. Knows text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from os.path import normpath
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from ragblend.errors import UsageError
from ragblend.redaction import advice_on, is_secret, redacted

FAISS = "faiss"
FORMS = (
    "faiss, faiss:FACTORY (FAISS's own names, such as faiss:HNSW32 or faiss:IVF1024,Flat), "
    "qdrant://HOST:6333/COLLECTION, qdrants:// for TLS, qdrant:///FOLDER, or postgresql://USER@HOST:5432/DATABASE"
)
LOCAL_COLLECTION = "ragblend"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,200}")
_OF_FAISS = ("nprobe", "efSearch")


@dataclass(frozen=True, slots=True)
class Choice:
    """One place for vectors. Two choices are the same place when `remembered` is."""

    kind: Literal["faiss", "qdrant", "postgresql"]
    remembered: str  # what opens it again, without secrets
    target: str  # FAISS's factory string, the collection, or the URL for libpq with its password
    address: str = ""  # of a Qdrant server, or the folder
    is_local: bool = False
    options: tuple[tuple[str, str], ...] = ()  # ours
    secret: str = field(default="", repr=False)  # what was given: a library's message may echo it
    key: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """For people."""
        if self.kind != "postgresql":
            return self.remembered
        return redacted(self.remembered) + (f"?{urlencode(self.options)}" if self.options else "")

    def __repr__(self) -> str:
        """Without a password."""
        return f"Choice({self.shown!r})"

    def number(self, name: str) -> int:
        """An option, a whole number; 0 where it is not given. Raises UsageError for anything else."""
        value = dict(self.options).get(name, "0")
        if not value.isdecimal() or len(value) > 9:
            raise UsageError(f"{name} is {value!r} in {self.shown}; choose a whole number")
        return int(value)


def choose(text: str) -> Choice:
    """What `text` says. Raises UsageError, which shows no secret, for anything that is none of `FORMS`.

    >>> choose("faiss:HNSW32?efSearch=64").target, choose("qdrant://:key@db/docs").remembered
    ('HNSW32', 'qdrant://db:6333/docs')
    >>> choose("postgresql://me:secret@db/rag?sslmode=require").remembered
    'postgresql://me@db/rag?sslmode=require'
    """
    scheme = text.partition("://")[0]
    if text == FAISS or text.startswith("faiss:"):
        return _faiss(text)
    if scheme in ("qdrant", "qdrants"):
        return _qdrant(text)
    if scheme in ("postgresql", "postgres"):
        return _postgresql(text)
    raise UsageError(f"vectors is {redacted(text)!r}; choose {FORMS}")


def _faiss(text: str) -> Choice:
    target, _, query = text.partition(":")[2].partition("?")
    options = _options(query)
    if unknown := sorted({name for name, _ in options} - {*_OF_FAISS}):
        raise _refusal(text, f"it has {', '.join(unknown)} behind '?'; known: {', '.join(_OF_FAISS)}")
    target = target or "Flat"
    if target == "Flat" and options:
        raise _refusal(text, "a flat index has no options")
    written = FAISS if target == "Flat" else f"faiss:{target}" + (f"?{urlencode(options)}" if options else "")
    return Choice("faiss", written, target, options=options)


def _qdrant(text: str) -> Choice:
    url, port = _url(text)
    if url.query:
        raise _refusal(text, "options stand behind '?', and it has none")
    if not url.netloc:
        if url.scheme != "qdrant" or len(url.path) < 2:
            raise _refusal(text, "it names neither a server nor a folder")
        folder = normpath(unquote(url.path))
        return Choice("qdrant", f"qdrant://{quote(folder)}", LOCAL_COLLECTION, folder, is_local=True)
    collection = unquote(url.path).strip("/")
    if not url.hostname or not _NAME.fullmatch(collection):
        raise _refusal(text, "behind the server it names no collection of letters, digits, - and _")
    place = f"{_host(url)}:{port or 6333}"
    address = f"{'https' if url.scheme == 'qdrants' else 'http'}://{place}"
    key = unquote(url.password or url.username or "")
    return Choice("qdrant", f"{url.scheme}://{place}/{collection}", collection, address, key=key, secret=text)


def _postgresql(text: str) -> Choice:
    url, port = _url(text)
    given = _options(url.query)
    ours = tuple(each for each in given if each[0] in ("index", "ef_search"))
    if dict(ours).get("index", "hnsw") != "hnsw":
        raise _refusal(text, "its index may be hnsw, or is left out, which compares all vectors")
    theirs = [each for each in given if each not in ours]
    user = quote(unquote(url.username or ""), safe="")
    password = f":{quote(unquote(url.password), safe='')}" if url.password else ""
    tail = (_host(url) + (f":{port}" if port else "")) + url.path

    def written(with_secrets: bool) -> str:
        before = user + (password if with_secrets else "")
        options = theirs if with_secrets else [each for each in given if not is_secret(each[0])]
        query = f"?{urlencode(options)}" if options else ""
        return f"postgresql://{before}{'@' if before else ''}{tail}{query}"

    return Choice("postgresql", written(False), written(True), options=ours, secret=text)


def _url(text: str) -> tuple[SplitResult, int | None]:
    if advice_on(text):
        raise _refusal(text, "a mark in its password ends it early")
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise _refusal(text, "it cannot be read as a URL") from None
    if url.fragment:
        raise _refusal(text, "a '#' ends it early")
    return url, port


def _host(url: SplitResult) -> str:
    return f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""


def _options(query: str) -> tuple[tuple[str, str], ...]:
    return tuple(parse_qsl(query, keep_blank_values=True))


def _refusal(text: str, why: str) -> UsageError:
    shown = text if text.startswith("faiss:") else redacted(text)
    return UsageError(f"vectors is {shown!r}: {why}{advice_on(text)}; choose {FORMS}")
