"""The identity of a document that a caller of `precompute_documents` passes: which stored document it replaces.

Reads strings, Chunks, LangChain Documents and LlamaIndex nodes. Depends on none of these frameworks.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import DocumentKey, text_id
from ragblend.corpus.folder_scan import ReadFailure
from ragblend.errors import UsageError
from ragblend.prompt.types import Chunk

LANGCHAIN_COLLECTION = "langchain"
"""Default collection."""
PAGE_MARK = "#page="


class Identity(NamedTuple):
    """What identifies the document of a chunk in its collection.

    - id: the caller's, else `source` with the page, else the text's (`text_id`).
    - source: the file, page or address that the document came from; "" if unknown.
    - version: the version of a LlamaIndex node's document; "" for others.
    - start: the chunk's offset in the document, in characters, if `source` identifies the document; else 0.
    - num_pages: number of pages of the file, if `source` and a page identify the document; 0 if unknown.
    - is_text: True if the text identifies the document, because it has neither an id nor a source.
    """

    id: str
    source: str = ""
    version: str = ""
    start: int = 0
    num_pages: int = 0
    is_text: bool = False


def identify(document: Any, chunk: Chunk, given_id: str = "") -> Identity:
    """Return the identity of a document. chunk: `as_chunk(document)`. given_id: the caller's id; "" for none.

    Without `given_id`, the id is a LangChain Document's `id`, or the id of a LlamaIndex node's document. LlamaIndex
    gives a document without an id a random one, another in each run. Such an id is ignored.
    """
    metadata = {} if chunk is document else chunk.metadata
    source, version = chunk.source, ""
    if hasattr(document, "node_id"):  # a node, whose metadata may have a page's number under "source"
        source = str(metadata.get("file_path") or source)
    if not given_id and hasattr(document, "page_content"):
        given_id = document.id or ""
    elif not given_id and hasattr(document, "node_id"):
        owner = document.source_node
        name = document.node_id if owner is None else owner.node_id
        version = "" if owner is None else owner.hash or ""
        given_id = "" if _is_random(name) else name
    source = source.encode(errors="backslashreplace").decode()  # a file's name may not be valid Unicode
    if given_id:
        is_same = chunk is document and source == given_id  # a server's chunk has the id in place of a source
        return Identity(given_id, "" if is_same else source, version)
    if not source:
        return Identity(text_id(chunk.text), is_text=True)
    page = next((metadata[name] for name in ("page", "page_label") if metadata.get(name) not in (None, "")), None)
    if page is None:
        return Identity(source, source, version, _count(metadata.get("start_index")) or chunk.start)
    num_pages = _count(metadata.get("total_pages"))
    return Identity(f"{source}{PAGE_MARK}{page}", source, version, _count(metadata.get("start_index")), num_pages)


def _is_random(name: str) -> bool:
    """Return True for an id as LlamaIndex makes it: a UUID of version 4."""
    try:
        return uuid.UUID(name).version == 4
    except ValueError:
        return False


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def identify_all(
    documents: Sequence[Any], chunks: Sequence[Chunk], ids: Sequence[str] = (), versions: Sequence[str] = ()
) -> list[Identity]:
    """Return the identity of each document. ids, versions: the caller's, one per document, "" for none; () for none.

    A file may be several documents of LlamaIndex, with a version each. All of them get one version.
    """
    triples = zip(documents, chunks, ids or [""] * len(documents), strict=True)
    identities = [identify(document, chunk, given_id) for document, chunk, given_id in triples]
    if versions:
        identities = [each._replace(version=version) for each, version in zip(identities, versions, strict=True)]
    versions_of: dict[str, set[str]] = {}
    for each in identities:
        versions_of.setdefault(each.id, set()).add(each.version)
    joined = {
        name: text_id(" ".join(sorted(each))) if len(each) > 1 else min(each) for name, each in versions_of.items()
    }
    return [each._replace(version=joined[each.id]) for each in identities]


def find_replaced_documents(
    identities: Iterable[Identity], texts_of: Mapping[DocumentKey, Iterable[str]], ledger: Ledger
) -> dict[DocumentKey, set[str]]:
    """Return the documents that lose texts, because a call passed `texts_of` for them, with the texts that they keep.

    - A document with the version that is stored loses none, and neither does one that its text identifies.
    - If the first chunk of a document has an offset, the document keeps the texts before this chunk: they came in an
      earlier call.
    - The pages behind the last page of a file lose their texts.

    identities: those of all chunks that were passed, also of those without a text in `texts_of`.
    """
    by_id: dict[str, Identity] = {}
    for each in identities:
        by_id[each.id] = min(each, by_id.get(each.id, each), key=lambda identity: identity.start)
    kept: dict[DocumentKey, set[str]] = {}
    num_pages: dict[DocumentKey, int] = {}  # by the document of the whole file
    for name, texts in texts_of.items():
        identity = by_id[name.id]
        if identity.num_pages:
            num_pages[name._replace(id=identity.source)] = identity.num_pages
        if not identity.is_text and not (identity.version and identity.version == ledger.facts_of(name).version):
            kept[name] = {*texts} | (ledger.texts_of(name, before=identity.start) if identity.start else set())
    for name, count in num_pages.items():
        for page_id in ledger.ids_beginning_with(name.id + PAGE_MARK, name.collection, name.namespace):
            page = page_id.removeprefix(name.id + PAGE_MARK)
            if page.isdecimal() and int(page) >= count:
                kept.setdefault(name._replace(id=page_id), set())
    return kept


def note_text_identities(
    documents: Sequence[Any], chunks: Sequence[Chunk], identities: Sequence[Identity]
) -> list[ReadFailure]:
    """Return the note of a report on those documents that only their text identifies; [] if there are none."""
    triples = zip(documents, chunks, identities, strict=True)
    labels = {each.id: document_label(document, chunk) for document, chunk, each in triples if each.is_text}
    reason = (
        f"documents with neither an id nor a source: {len(labels)}. Each is stored by its text: if the text changes, "
        "the earlier one stays until you remove it (`ragblend documents` lists its id). Pass `ids`, or documents "
        "with an id (LangChain `id`, LlamaIndex `doc_id`) or with metadata['source'] or metadata['file_path']"
    )
    return [ReadFailure(next(iter(labels.values())), reason)] if labels else []


def document_label(document: Any, chunk: Chunk) -> str:
    """Return the name of a framework's document for messages: "ID of SOURCE", or only one of the two.

    A document without an id and a source is named by the beginning of its text.
    """
    metadata, owner = chunk.metadata, getattr(document, "ref_doc_id", None)
    sources = (metadata.get(key) for key in ("source", "file_path", "file_name"))
    source = chunk.source or next(filter(None, sources), owner)
    name = getattr(document, "node_id", None) or getattr(document, "id", None)
    if chunk is document:  # its id is a hash
        name = None
    return " of ".join(str(part) for part in (name, source) if part) or repr(chunk.text[:60])


def as_chunk(document: Any) -> Chunk:
    """Return a Chunk from a string, a Chunk, a LangChain Document or a LlamaIndex node; else raise UsageError."""
    if isinstance(document, Chunk):
        return document
    if isinstance(document, str):
        return Chunk(document.strip())
    for attribute in ("page_content", "text"):
        text = getattr(document, attribute, None)
        if isinstance(text, str):
            metadata = dict(getattr(document, "metadata", None) or {})
            source = metadata.get("source") or getattr(document, "source", "")
            return Chunk(text.strip(), str(source or ""), metadata=metadata)
    raise UsageError(
        f"a document is a {type(document).__name__}; pass strings, Chunks, LangChain Documents or LlamaIndex nodes"
    )
