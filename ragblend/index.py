"""Chunks on disk with their vectors: add, replace, remove, search. No pickle, every write whole or not at all.

The catalogue is the truth (see `catalog.documents`). `vectors.faiss` is derived from it: read when the index is opened,
brought up to date by the rows written since, and made again where it is missing or damaged. One machine, one writer at
a time, any number of readers. Knows vectors and chunks, nothing about prompts, KV or models. Read `search` first, then
`_sync_vectors`.
"""

from __future__ import annotations

import base64
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from sqlalchemy import Row

from ragblend.catalog.documents import IndexedDocuments
from ragblend.catalog.index_rows import as_chunk
from ragblend.catalog.registry import ChunkRegistry, catalog_of, open_registry
from ragblend.catalog.schema import text_key
from ragblend.catalog.sqlite import explain_reingestion
from ragblend.catalog.vectors import FaissVectors, normalize_rows
from ragblend.corpus.embedders import (
    Embedder,
    FloatArray,
    default_embedder,
    embed_question,
    embedder_version,
    load_embedder,
)
from ragblend.errors import (
    CorruptError,
    NotFoundError,
    RagblendError,
    StoreMismatchError,
    UsageError,
)
from ragblend.files.directory import Directory
from ragblend.files.places import user_path
from ragblend.files.reading import read_file
from ragblend.files.store_folder import CATALOG_FILE, FORMER_INDEX_FILE, VECTORS_FILE, open_folder
from ragblend.option_fields import check_unicode
from ragblend.prompt.types import Chunk

logger = logging.getLogger(__name__)

_VECTORS_BYTES = 1 << 40
_CHECK_AT_OPEN_BYTES = 64 * 2**20  # the pages of a larger catalogue are checked by `find_problems`

PROBE_TEXT = "The vector of this sentence identifies the embedding model of an index."
"""Embedded when an index is created, and again before another process embeds its first text."""
_MAX_PROBE_DISTANCE = 0.1  # between unit vectors: MiniLM in bfloat16 is .008 from float32, unrelated vectors 1.4


class SearchHit(NamedTuple):
    """A chunk found. `score` is the cosine, `rank` counts hits from 0; a neighbour carries those of its hit."""

    chunk: Chunk
    score: float
    rank: int
    is_neighbour: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What made the index. `generation` counts its changes; chunk size (tokens) and splitter are the latest used."""

    embedder: str
    embedder_version: int
    dim: int
    tokenizer: str
    tokenizer_fingerprint: str
    chunk_size: int
    generation: int
    num_documents: int
    num_chunks: int
    splitter: str = ""  # somebody else's, that cut instead

    @property
    def chunker(self) -> str:
        """What the index was cut with, as calibrations name it."""
        return self.splitter or f"{self.chunk_size} tokens"


def open_index(
    path: str | Path,
    embedder: Embedder | str | None = None,
    create: bool = False,
    *,
    tokenizer: str = "",
    tokenizer_fingerprint: str = "",
    chunk_size: int = 0,
) -> ChunkIndex:
    """The index in folder `path`; with `create` an empty one where there is none. A relative path is resolved once,
    here, so the index stays where it is when the working folder changes.

    `embedder` defaults to the one that made the index (loaded at the first text), for a new index to
    `default_embedder()`. The other arguments are recorded at creation only. Raises NotFoundError, StoreMismatchError
    (another embedder, another schema), or CorruptError. An embedder of the recorded name that returns other vectors
    raises StoreMismatchError at the first text.
    """
    named = user_path(path, "index")
    folder = open_folder(named, "index")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name a folder for the index")
    missing = NotFoundError(f"no documents in {named}; add some: ragblend ingest DOCS --store {named}")
    if not create and not any(os.path.lexists(folder / name) for name in (CATALOG_FILE, FORMER_INDEX_FILE)):
        raise missing
    registry = ChunkRegistry(folder / CATALOG_FILE)
    documents = IndexedDocuments(registry)
    try:
        if documents.exists():
            return ChunkIndex(folder, registry, embedder)
        if not create:
            raise missing
        chosen = load_embedder(_embedder_id(embedder)) if isinstance(embedder, str) else embedder or default_embedder()
        facts = {"embedder": chosen.name, "embedder_version": embedder_version(chosen)}
        facts |= {"dim": chosen.dim, "chunk_size": chunk_size, "splitter": ""}
        facts |= {"tokenizer": tokenizer, "tokenizer_fingerprint": tokenizer_fingerprint, "id": uuid.uuid4().hex}
        facts["probe"] = base64.b64encode(_embed_probe(chosen, PROBE_TEXT).astype("<f4").tobytes()).decode()
        documents.create(facts)
        return ChunkIndex(folder, registry, chosen, is_new=True)
    except BaseException:
        registry.close()
        raise


def _embedder_id(embedder: str) -> str:
    """The name of an embedder; a folder's is the same from every working folder."""
    folder = user_path(embedder, "embedder")
    return str(folder.resolve()) if folder.is_dir() else embedder


def _embed_probe(embedder: Embedder, text: str) -> FloatArray:
    """[dim] float32, length 1."""
    return normalize_rows(embedder.embed([text])[0])


class ChunkIndex(IndexedDocuments):
    """An open index; `open_index` makes one. A context manager: leaving it saves what changed and closes it.

    What it holds is told by the methods of `IndexedDocuments`. A document counts as soon as `add_document` returns: a
    killed ingestion loses none, and every reader finds it at the next search. Threads may share an index. Any method
    raises CorruptError when stored bytes are not what was written.
    """

    def __init__(
        self, path: Path, registry: ChunkRegistry, embedder: Embedder | str | None = None, *, is_new: bool = False
    ) -> None:
        super().__init__(registry)
        self.path = path
        self._embedder_lock = threading.RLock()  # an embedder is not promised to be thread-safe
        self._embedder = None if isinstance(embedder, str) else embedder
        self._changed = False
        self._is_behind = False  # the search file lacks changes of somebody who was killed before saving them
        self._check_structure()
        self._made_by = self.manifest
        self._id = bytes.fromhex(self.read_metadata().get("id", "")).ljust(16, b"\0")
        if embedder is not None:
            self._check_embedder(embedder)
        # Read here, not under the embedder's lock: a thread that holds the catalogue's may be waiting for that one.
        self._probe = None if is_new else self._read_probe()  # None: nothing to compare, or compared already
        self._vectors = FaissVectors(self._made_by.dim)
        if is_new:
            self.save()
        else:
            self._open_vectors()

    @property
    def manifest(self) -> Manifest:
        """The facts of the index as they are now."""
        with self.read_transaction():
            facts = self.read_metadata()
            return Manifest(
                embedder=facts["embedder"],
                embedder_version=int(facts.get("embedder_version", 1)),
                dim=int(facts["dim"]),
                tokenizer=facts["tokenizer"],
                tokenizer_fingerprint=facts["tokenizer_fingerprint"],
                chunk_size=int(facts["chunk_size"]),
                generation=self.generation(),
                num_documents=self.num_documents,
                num_chunks=self.num_chunks,
                splitter=facts.get("splitter", ""),
            )

    @property
    def embedder(self) -> Embedder:
        """The embedder of this index; found by its recorded name when none was given.

        Raises StoreMismatchError when its vector of the probe text is not the one that the index has.
        """
        with self._embedder_lock:
            if self._embedder is None:
                self._check_version(self._made_by.embedder)
                self._embedder = load_embedder(self._made_by.embedder)
            if self._probe is not None:
                self._check_probe(self._embedder, *self._probe)
                self._probe = None
            return self._embedder

    @property
    def registry_name(self) -> str:
        """The name by which the chunk registry of a store knows what this index has; "" for an index made before
        indexes had an id of their own."""
        made_with = self.read_metadata().get("id", "")
        return f"index:{made_with}" if made_with else ""

    @contextmanager
    def registry_for(self, store: Any) -> Iterator[ChunkRegistry]:
        """Yield the registry of a KVStore: that of this index where both are in one folder, so that a transaction of
        the index is one of the registry."""
        if catalog_of(store) == self.registry.key:
            yield self.registry
        else:
            with open_registry(store) as registry:
                yield registry

    # --- changing it ---

    def add_document(
        self,
        source: str,
        content_hash: str,
        chunks: Sequence[Chunk],
        vectors: ArrayLike | None = None,
        *,
        file: str = "",
    ) -> None:
        """Store a document whole, in place of its older version if there is one; equal chunks are stored once.

        vectors: [len(chunks), dim], normalised here; None to embed the texts now. Every chunk's `source` must be
        `source`, or UsageError, and all text Unicode. `file`: what it was read from, if it was. `vectors.faiss` follows
        at `save`.
        """
        for text in (source, *(chunk.text for chunk in chunks)):
            check_unicode(text, f"the document {source!r}")
        other_source = next((chunk.source for chunk in chunks if chunk.source != source), None)
        if other_source is not None:
            raise UsageError(
                f"a chunk of {other_source!r} was given to document {source!r}; give each document its own"
            )
        if vectors is None:
            vectors = self.embed([chunk.text for chunk in chunks])
        rows = self._unit_rows(vectors, len(chunks))
        items = {chunk.id: (chunk, row) for chunk, row in zip(chunks, rows, strict=True)}
        self._replace(source, content_hash, items, file)
        self._changed = True

    def find_texts_without_vectors(self, texts: Sequence[str]) -> list[str]:
        """Those of `texts` that no chunk has, wherever, each once."""
        stored = self.vectors(texts)
        return list(dict.fromkeys(text for text in texts if text_key(text.strip()) not in stored))

    def embed(self, texts: Sequence[str], made: Mapping[str, FloatArray] | None = None) -> FloatArray:
        """[n, dim] a vector per text. A text that some chunk has, wherever, is not embedded again.

        made: [dim] vectors by text that this index's embedder has made elsewhere. Raises UsageError for a text that is
        not Unicode.
        """
        for text in texts:
            check_unicode(text, "a text to embed")
        stored = self.vectors(texts)
        missing = dict.fromkeys(text for text in texts if text_key(text.strip()) not in stored)
        taken = [text for text in missing if made is not None and text in made]
        left = [text for text in missing if made is None or text not in made]
        fresh = dict(
            zip(taken, self._unit_rows([made[text] for text in taken] if made else (), len(taken)), strict=True)
        )
        with self._embedder_lock:
            rows = self._unit_rows(self.embedder.embed(left) if left else (), len(left))
        fresh |= zip(left, rows, strict=True)
        found = [
            fresh[text] if text in fresh else np.frombuffer(stored[text_key(text.strip())], "<f4") for text in texts
        ]
        return np.array(found, np.float32).reshape(len(texts), self._made_by.dim)

    def remove_document(self, source: str) -> int:
        """Forget a document. How many chunks it had. Raises NotFoundError when it is not here."""
        num_removed = super().remove_document(source)
        self._changed = True
        return num_removed

    def set_chunker(self, chunk_size: int, splitter: str = "") -> None:
        """Note how documents are cut from now on: tokens per chunk, or the splitter that cuts instead."""
        self.write_metadata(chunk_size=chunk_size, splitter=splitter)
        self._changed = True

    @property
    def is_saved(self) -> bool:
        """Whether the search files have all that was changed, here or by a process that was killed before it saved."""
        return not self._changed and not self._is_behind

    def save(self) -> None:
        """Write `vectors.faiss`, whole or not at all; killed before that, the next open replays what it lacks.

        Before that the catalogue's log is emptied into its file, so that the vectors tell of no change that is not
        durable.
        """
        self.registry.truncate_log()
        with self._search_snapshot():
            data = self._vectors.to_bytes(self._id)
        folder = Directory(self.path, fsync=True, full_hint="Make room and run the command again")
        folder.remove_stale_files()
        folder.write(self.path / VECTORS_FILE, data)
        self._changed = self._is_behind = False

    def rebuild(self) -> None:
        """Make the search structure anew from the catalogue, and save it. Embeds nothing."""
        with self.read_transaction():
            self._vectors = FaissVectors(self._made_by.dim)
            self._sync_vectors()
        self.save()

    def find_problems(self) -> list[str]:
        """Whatever is wrong with the stored bytes, a sentence each; empty when all is well. Reads everything."""
        return [*self.registry.find_problems(), *self.find_search_problems()]

    def find_search_problems(self) -> list[str]:
        """Whatever is wrong with the search file, a sentence each."""
        stored, damage = self._read_vectors()
        try:
            self._check_generation(stored.generation)
        except CorruptError as error:
            return [str(error)]
        return [damage] if damage else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._changed:
                self.save()
        finally:
            self.close()

    # --- searching it ---

    def search(
        self,
        query: str | ArrayLike,
        k: int = 5,
        *,
        neighbours: int = 0,
        order: Literal["score", "document"] = "score",
        is_allowed: Callable[[Chunk], bool] | None = None,
    ) -> list[SearchHit]:
        """The `k` chunks nearest to `query`, a question or a vector [dim]; fewer when the index holds fewer.

        is_allowed: returns False for chunks to leave out, as hits and as neighbours; None allows all.
        neighbours: also this many chunks before and after each hit in its document, placed around it, none twice.
        order: "document" sorts documents by their best hit and, inside each, by reading order.
        Sees every document that any process has committed, saved or not.
        """
        if k < 1 or neighbours < 0 or order not in ("score", "document"):
            raise UsageError(
                f"k is {k}, neighbours {neighbours}, order {order!r}; "
                "choose k of 1 or more, neighbours of 0 or more, and order 'score' or 'document'"
            )
        vector = self.query_vector(query)
        with self._search_snapshot():
            rows = self._rows_by_score(vector, k)
            if is_allowed is not None:
                rows = ((row, score) for row, score in rows if is_allowed(as_chunk(row)))
            found = list(itertools.islice(rows, k))
            placed = self._with_neighbours(found, neighbours, is_allowed)
        if order == "document":
            turn = {document: place for place, document in enumerate(dict.fromkeys(row.document for row, _ in found))}
            placed.sort(key=lambda pair: (turn[pair[0].document], pair[0].ordinal))
        return [hit for _, hit in placed]

    def similar_texts(self, text: str, count: int, is_allowed: Callable[[str], bool] = lambda text: True) -> list[str]:
        """The texts of the `count` chunks nearest to the chunk of this text, by the vectors that are stored, nearest
        first: other texts than this one, none twice, that `may_stand` accepts. Fewer where there are no more.
        """
        own = self.vectors([text]).get(text_key(text.strip()))
        if own is None or not np.any(vector := np.frombuffer(own, "<f4")):
            return []
        seen, found = {text_key(text.strip())}, list[str]()
        with self._search_snapshot():
            for row, _ in self._rows_by_score(vector.reshape(1, -1), 4 * (count + 1)):
                if row.text_key in seen:
                    continue
                seen.add(row.text_key)
                if is_allowed(row.text):
                    found.append(row.text)
                    if len(found) == count:
                        break
        return found

    def _rows_by_score(self, vector: FloatArray, num_first: int) -> Iterator[tuple[Row[Any], float]]:
        """Yield rows with their cosines to `vector` [1, dim], the nearest first. `num_first` are read at once, then
        four times as many; equal cosines are in order of ids, so 3 rows begin with the best 1."""
        done, wanted = 0, num_first
        while True:
            score_of = self._vectors.nearest(vector, wanted)
            ids = list(score_of)
            rows = {row.id: row for row in self.rows(ids[done:])}
            yield from ((rows[row_id], score_of[row_id]) for row_id in ids[done:])
            if len(ids) < wanted:
                return
            done, wanted = len(ids), 4 * wanted

    def _with_neighbours(
        self, found: list[tuple[Row[Any], float]], distance: int, is_allowed: Callable[[Chunk], bool] | None
    ) -> list[tuple[Row[Any], SearchHit]]:
        rank_of = {row.id: rank for rank, (row, _) in enumerate(found)}
        placed: dict[int, tuple[Row[Any], SearchHit]] = {}
        for hit, _ in found:
            for row in self.rows_around(hit, distance) if distance else [hit]:
                is_neighbour = row.id not in rank_of
                if is_neighbour and is_allowed is not None and not is_allowed(as_chunk(row)):
                    continue
                rank = rank_of[hit.id if is_neighbour else row.id]  # a hit beside another hit keeps its own score
                placed.setdefault(row.id, (row, SearchHit(as_chunk(row), found[rank][1], rank, is_neighbour)))
        return list(placed.values())

    def query_vector(self, query: str | ArrayLike) -> FloatArray:
        """[1, dim] float32, length 1: the vector of a question, or a vector [dim]."""
        if isinstance(query, str):
            check_unicode(query, "the question")
            with self._embedder_lock:
                query = embed_question(self.embedder, query)
        return self._unit_rows(np.reshape(np.asarray(query, np.float32), (1, -1)), 1)

    def _unit_rows(self, vectors: ArrayLike, num_rows: int) -> FloatArray:
        """A copy [num_rows, dim] with rows of length 1."""
        rows, dim = np.array(vectors, np.float32), self._made_by.dim
        if num_rows == 0 and rows.size == 0:
            return rows.reshape(0, dim)
        if rows.shape != (num_rows, dim):
            raise StoreMismatchError(
                f"vectors have shape {rows.shape}, {self.path} needs {(num_rows, dim)}, one per text, by "
                f"{self._made_by.embedder!r}; use it, or {explain_reingestion(self.path / CATALOG_FILE)}"
            )
        return normalize_rows(rows)

    # --- the search structure ---

    @contextmanager
    def _search_snapshot(self) -> Iterator[None]:
        """One state of the catalogue, and vectors that are as new."""
        with self.read_transaction():
            self._sync_vectors()
            yield

    def _check_structure(self) -> None:
        """Raise CorruptError where the catalogue's file is damaged: a chunk missing from one of its indexes would be
        unfindable without a word."""
        file = self.path / CATALOG_FILE
        if file.exists() and file.stat().st_size <= _CHECK_AT_OPEN_BYTES:
            for problem in self.registry.find_structure_problems():
                raise self.registry.damage_error(f"it is damaged ({problem})")

    def _open_vectors(self) -> None:
        self._vectors, damage = self._read_vectors()
        stored_generation = self._vectors.generation
        with self.read_transaction():
            self._sync_vectors(force=True)
        self._is_behind = self._vectors.generation != stored_generation
        if damage:
            logger.warning("%s; search structure rebuilt from %s, nothing is lost", damage, CATALOG_FILE)
        if stored_generation < 0:
            try:
                self.save()
            except RagblendError as error:  # a reader without write permission has its answer all the same
                logger.warning("the search structure of %s could not be saved: %s", self.path, error)

    def _read_vectors(self) -> tuple[FaissVectors, str]:
        """Return the vectors of the search file, and why they are none: "" also where there is no file."""
        path, dim = self.path / VECTORS_FILE, self._made_by.dim
        try:
            return FaissVectors.from_bytes(read_file(path, limit=_VECTORS_BYTES), self._id, dim), ""
        except FileNotFoundError:
            return FaissVectors(dim), ""
        except OSError as error:
            return FaissVectors(dim), f"{error.filename} cannot be read ({error.strerror})"
        except ValueError as error:
            return FaissVectors(dim), f"{path} {error}"

    def _sync_vectors(self, *, force: bool = False) -> None:
        """Bring the vectors to the state of the database that the current transaction sees."""
        if force or self._vectors.generation != self.generation():
            self._check_generation(self._vectors.generation)
            self._vectors.sync(self)

    def _check_generation(self, known: int) -> None:
        """Raise CorruptError when the catalogue, whose counts only grow, has fewer changes than were `known` once."""
        lost = known - self.generation()
        if lost > 0:
            raise self.registry.damage_error(
                f"it lacks the last {lost} changes that {VECTORS_FILE} knows of: its log was damaged, or an older copy "
                "was put back"
            )

    def _check_embedder(self, embedder: Embedder | str) -> None:
        made_by = self._made_by
        name, dim = (
            (_embedder_id(embedder), made_by.dim) if isinstance(embedder, str) else (embedder.name, embedder.dim)
        )
        # Indexes written before name the class of a LangChain embedding only; the probe then decides about its model.
        has_name = name == made_by.embedder or name.startswith(f"{made_by.embedder} ")
        if not has_name or dim != made_by.dim:
            raise StoreMismatchError(
                f"{self.path} was made with embedder {made_by.embedder!r} (dim {made_by.dim}), not {name!r} "
                f"(dim {dim}); leave `embedder` out to use that one, or {explain_reingestion(self.path / CATALOG_FILE)}"
            )
        self._check_version(embedder)

    def _read_probe(self) -> tuple[str, FloatArray] | None:
        """A text and its vector [dim] in this index: the probe text's, or in an index without one some chunk's."""
        if recorded := self.read_metadata().get("probe"):
            return PROBE_TEXT, np.frombuffer(base64.b64decode(recorded), "<f4")
        with suppress(CorruptError):
            for row in self.rows(self.ids()[:1].tolist()):
                return row.text, np.frombuffer(row.vector, "<f4")
        return None

    def _check_probe(self, embedder: Embedder, text: str, recorded: FloatArray) -> None:
        """Raise StoreMismatchError when `embedder` returns another vector for `text` than the one recorded."""
        distance = float(np.linalg.norm(_embed_probe(embedder, text) - recorded))
        if distance > _MAX_PROBE_DISTANCE:
            raise StoreMismatchError(
                f"{self.path} was made with another model or revision than this {embedder.name!r}: their vectors of "
                f"one text are {distance:.2f} apart (at most {_MAX_PROBE_DISTANCE} is rounding), so a search would "
                "find the wrong chunks. Pass the embedding that made the index, or "
                f"{explain_reingestion(self.path / CATALOG_FILE)}"
            )

    def _check_version(self, embedder: Embedder | str) -> None:
        """Raise StoreMismatchError when the vectors here are not what `embedder`, of the same name, gives now."""
        made, now = self._made_by.embedder_version, embedder_version(embedder)
        if made != now:
            raise StoreMismatchError(
                f"{self.path} was embedded by version {made} of {self._made_by.embedder!r}, this is version {now}, "
                "which reads all of a long chunk and not only its beginning; "
                f"{explain_reingestion(self.path / CATALOG_FILE)}"
            )
