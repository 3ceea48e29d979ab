"""Reading of files by ingestion: with the readers of this package, or with the caller's loader.

A loader is a function from a file's path to its documents. LangChain's and LlamaIndex's documents are recognised by
their attributes, so neither package is imported. Read `FileReader` first.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ragblend.corpus.documents import (
    MAX_FILE_MIB,
    Document,
    FileDocuments,
    OpenedFile,
    has_visible_text,
    normalize_text,
    open_file,
    open_source,
    reader_version,
)
from ragblend.corpus.folder_scan import make_source
from ragblend.corpus.metadata import metadata_to_json
from ragblend.corpus.readers.encodings import new_file_hash
from ragblend.errors import NotADocumentError, RagblendError, UnreadableDocumentError, UsageError

Loader = Callable[[str], Any]
"""A function from a file's absolute path to a string, a document, several of them, or a LangChain loader.

Documents are those of ragblend, LangChain and LlamaIndex. An exception is reported as the failure of that file alone.
"""


@dataclass(frozen=True, slots=True)
class FileReader:
    """Opens the files of an ingestion, with these settings.

    `max_file_mib`: larger files are not read; 0: no limit. `text_field`: field that holds the text of CSV, JSON and
    Parquet records; "" lets the reader choose. `loader`: function that reads every file in place of ragblend's readers.
    """

    max_file_mib: float = MAX_FILE_MIB
    text_field: str = ""
    loader: Loader | None = None

    def open(self, path: str) -> OpenedFile:
        """Return a file's digest and the function that reads it. Raises the errors of `open_source`."""
        if self.loader is None:
            return open_source(path, self.max_file_mib, self.text_field)
        with open_file(path, self.max_file_mib, any_kind=True) as file:
            digest = hashlib.file_digest(file, new_file_hash).hexdigest()
        return OpenedFile(digest, partial(load_file, self.loader, path))

    def reader_version(self, path: str) -> str:
        """Return the version of the reader of `path`, with the reader's settings. If this version changes, ingestion
        reads an unchanged file again.
        """
        if self.loader is not None:
            return f"loader {get_loader_version(self.loader)}"
        return reader_version(path, self.text_field)


DEFAULT_READER = FileReader()


def import_loader(name: str) -> Loader:
    """Return the loader `name`, such as "module:function". The module may be in the working folder.

    Raises UsageError if it cannot be imported or called.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"the loader is {name!r}; name it as module:function, for example `loader=my_loader:read`")
    folder = str(Path.cwd())
    sys.path.append(folder)  # last, so that a json.py there does not replace the standard library's
    try:
        loader = pkgutil.resolve_name(name)
    except Exception as error:  # importing a module may raise any error
        raise UsageError(
            f"the loader {name} cannot be imported ({_describe(error)}); check the name, and import it in Python"
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(loader):
        raise UsageError(f"the loader {name} is a {type(loader).__name__}; name a function from a path to documents")
    return loader  # type: ignore[no-any-return]


def get_loader_version(loader: Loader) -> str:
    """Return a loader's `version` if it has one, else its module and name."""
    named = loader if hasattr(loader, "__qualname__") else type(loader)
    return str(getattr(loader, "version", "") or f"{named.__module__}:{named.__qualname__}")


def load_file(loader: Loader, path: str) -> FileDocuments:
    """Return the documents that `loader` makes of a file. The loader runs when they are iterated.

    Iterating raises UnreadableDocumentError if the loader fails, NotADocumentError if no document has text.
    """
    return FileDocuments(_load_documents(loader, path))


def _load_documents(loader: Loader, path: str) -> Iterator[Document]:
    texts = ((text, metadata) for text, metadata in _run_loader(loader, path) if has_visible_text(text))
    first = list(islice(texts, 2))
    if not first:
        raise NotADocumentError(f"holds no text that the loader {get_loader_version(loader)} finds")
    if len(first) == 1:  # a single document needs no record number
        yield Document(first[0][0], make_source(path), first[0][1])
        return
    for number, (text, metadata) in enumerate(chain(first, texts)):
        yield Document(text, make_source(path, f"#{number}"), metadata)


def _run_loader(loader: Loader, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the texts and metadata of a loader's documents, one at a time."""
    try:
        for item in _list_items(loader(path)):
            text, metadata = _read_item(item)
            facts = _as_json(metadata)
            yield normalize_text(text), {name: value for name, value in facts.items() if value != path}
    except RagblendError:
        raise
    except Exception as error:  # a loader may raise any error
        raise UnreadableDocumentError(
            f"cannot be read by the loader {get_loader_version(loader)} ({_describe(error)})"
        ) from error


def _as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(metadata_to_json(metadata, "its metadata")))
    except UsageError as error:
        raise UnreadableDocumentError(str(error)) from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _list_items(value: Any) -> Iterable[Any]:
    if hasattr(value, "lazy_load"):  # a LangChain loader: the loader is its class
        return value.lazy_load()  # type: ignore[no-any-return]
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable) or _is_document(value):
        return (value,)  # LangChain's Documents are iterable (over their fields)
    return value


def _is_document(item: Any) -> bool:
    return hasattr(item, "page_content") or (hasattr(item, "text") and hasattr(item, "metadata"))


def _read_item(item: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the text and metadata of a string, or of a document of ragblend, LangChain or LlamaIndex."""
    if isinstance(item, str):
        return item, {}
    text = getattr(item, "page_content", None)
    if text is None:
        text = getattr(item, "text", None)
    if not isinstance(text, str):
        raise TypeError(f"it returns a {type(item).__name__}; return strings, or Documents of LangChain or LlamaIndex")
    return text, getattr(item, "metadata", None) or {}
