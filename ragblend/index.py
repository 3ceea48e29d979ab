"""`ChunkIndex`: adds, replaces, removes and searches chunks with their vectors on disk.

The catalogue contains all data (see `catalog.indexed_documents`). The file `vectors.faiss` is derived from the
catalogue. An index that is opened reads this file and adds the catalogue's later rows; a missing or damaged file is
rebuilt. One machine has one writer at a time and any number of readers. Depends on vectors and chunks, not on prompts,
KV or LLMs.
Read `search` first, then `_sync_vectors`.
"""

from __future__ import annotations

import base64
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from sqlalchemy import Row

from ragblend.catalog.indexed_documents import as_chunk
from ragblend.catalog.ledger import Ledger, catalog_location, open_ledger
from ragblend.catalog.schema import DocumentKey, text_key
from ragblend.catalog.sqlite import explain_reingestion
from ragblend.catalog.vectors import FaissVectors, normalize_rows
from ragblend.config import Settings
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
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_file
from ragblend.files.store_folder import CATALOG_FILE, VECTORS_FILE
from ragblend.option_fields import check_unicode, default_of
from ragblend.prompt.types import Chunk

logger = logging.getLogger(__name__)

_VECTORS_BYTES = 1 << 40
_CHECK_AT_OPEN_BYTES = 64 * 2**20  # the pages of a larger catalogue are checked by `find_problems`

PROBE_TEXT = "The vector of this sentence identifies the embedding model of an index."
"""Text that is embedded when an index is created, and again before another process embeds its first text."""
_MAX_PROBE_DISTANCE = 0.1  # between unit vectors: MiniLM in bfloat16 is .008 from float32, unrelated vectors 1.4


class SearchHit(NamedTuple):
    """A chunk that a search returns. `score`: cosine. `rank`: 0 is best. `is_neighbour`: the chunk is not a hit, but
    near a hit in its document, and has that hit's score and rank."""

    chunk: Chunk
    score: float
    rank: int
    is_neighbour: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """Facts of an index: its embedder, tokenizer, chunk size in tokens, number of changes (`generation`) and sizes.

    `chunk_size` and `splitter` are those of the last ingestion.
    """

    embedder: str
    embedder_version: int
    dim: int
    tokenizer: str
    tokenizer_fingerprint: str
    chunk_size: int
    generation: int
    num_documents: int
    num_chunks: int
    splitter: str = ""  # name and version of the application's splitter; "": ragblend's chunker

    @property
    def chunker(self) -> str:
        """Name and version of the application's splitter; without one, the chunk size, such as "512 tokens"."""
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
    """Return the index in the folder `path`. With `create`, a missing index is created.

    A relative path is resolved at once, so a later change of the working folder has no effect. `embedder` None: a new
    index gets `default_embedder()`; an existing index loads its recorded embedder when the first text is embedded.
    `tokenizer`, `tokenizer_fingerprint` and `chunk_size` (in tokens) are for a new index only.
    Raises NotFoundError for a missing index, UsageError if `path` is a file, StoreMismatchError for another embedder or
    schema, CorruptError for damage. See `ChunkIndex.embedder` for the check of the embedder's vectors.
    """
    named = expand_user_path(path, "index")
    folder = named.absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name a folder for the index")
    missing = NotFoundError(f"{named} has no documents; add some: ragblend ingest DOCS --store {named}")
    if not create and not os.path.lexists(folder / CATALOG_FILE):
        raise missing
    index = ChunkIndex(folder)
    try:
        is_new = not index.has_index()
        if is_new:
            if not create:
                raise missing
            embedder = load_embedder(_embedder_id(embedder)) if isinstance(embedder, str) else embedder
            embedder = embedder or default_embedder()
            facts = {"embedder": embedder.name, "embedder_version": embedder_version(embedder)}
            facts |= {"dim": embedder.dim, "chunk_size": chunk_size, "splitter": ""}
            facts |= {"tokenizer": tokenizer, "tokenizer_fingerprint": tokenizer_fingerprint, "id": uuid.uuid4().hex}
            facts["probe"] = base64.b64encode(_embed_probe(embedder).astype("<f4").tobytes()).decode()
            index.create_index(facts)
        index._load(embedder, is_new=is_new)
    except BaseException:
        index.close()
        raise
    return index


def _embedder_id(embedder: str) -> str:
    """Return the name of an embedder. A folder is named by its absolute path."""
    folder = expand_user_path(embedder, "embedder")
    return str(folder.resolve()) if folder.is_dir() else embedder


def _embed_probe(embedder: Embedder) -> FloatArray:
    """Return the unit vector [dim] float32 of PROBE_TEXT."""
    return normalize_rows(embedder.embed([PROBE_TEXT])[0])


class ChunkIndex(Ledger):
    """An open index; create it with `open_index`. A context manager that saves changes and closes the index.

    It is the `Ledger` of its folder, which has the methods that read documents, with a search over their vectors.
    `add_document` commits before it returns, so a killed ingestion loses no added document, and every reader finds it
    at the next search. Threads may share an index. Every method raises CorruptError for damaged rows.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path / CATALOG_FILE)
        self.path = path
        self._embedder_lock = threading.RLock()  # an embedder may not be thread-safe
        self._changed = False
        self._is_outdated = False  # the search file lacks changes of a process that was killed before `save`

    def _load(self, embedder: Embedder | str | None, *, is_new: bool) -> None:
        """Read the facts and the vectors of the index. `embedder`: see `open_index`."""
        self._embedder = None if isinstance(embedder, str) else embedder
        self._check_structure()
        try:
            self._made_by = self.manifest
            facts = self.index_facts()
            self._id = bytes.fromhex(facts["id"])
            probe = np.frombuffer(base64.b64decode(facts["probe"]), "<f4")
        except (KeyError, ValueError) as error:
            raise self.damage_error(f"the facts of the index are damaged ({error!r})") from error
        if embedder is not None:
            self._check_embedder(embedder)
        self._probe = None if is_new else probe  # [dim]; None: the embedder's vector was compared with it
        self._vectors = FaissVectors(self._made_by.dim)
        if is_new:
            self.save()
        else:
            self._open_vectors()

    @property
    def manifest(self) -> Manifest:
        """Current facts of the index."""
        with self.read_transaction():
            facts = self.index_facts()
            return Manifest(
                embedder=facts["embedder"],
                embedder_version=int(facts["embedder_version"]),
                dim=int(facts["dim"]),
                tokenizer=facts["tokenizer"],
                tokenizer_fingerprint=facts["tokenizer_fingerprint"],
                chunk_size=int(facts["chunk_size"]),
                generation=self.generation(),
                num_documents=self.num_documents,
                num_chunks=self.num_chunks,
                splitter=facts["splitter"],
            )

    @property
    def embedder(self) -> Embedder:
        """Embedder of this index. If none was given, it is loaded by the recorded name.

        Raises StoreMismatchError if its vector of PROBE_TEXT differs from the vector that the index has recorded.
        """
        with self._embedder_lock:
            if self._embedder is None:
                self._check_version(self._made_by.embedder)
                self._embedder = load_embedder(self._made_by.embedder)
            if self._probe is not None:
                self._check_probe(self._embedder, self._probe)
                self._probe = None
            return self._embedder

    @contextmanager
    def ledger_for(self, store: Any) -> Iterator[Ledger]:
        """Yield the ledger of `store`, a KVStore: this object if index and store share a catalogue.

        Transactions of the index then cover both.
        """
        if catalog_location(store) == self.key:
            yield self
        else:
            with open_ledger(store) as ledger:
                yield ledger

    def texts_to_register(self, texts: Iterable[str], ledger: Ledger) -> dict[DocumentKey, dict[str, int]]:
        """Return what the ledger of a store has to record before it stores KV of these texts of the index.

        This is nothing if index and store share a catalogue, which has the documents of the index. For others, see
        `Ledger.add_texts`.
        """
        if ledger.key == self.key:
            return {}
        return {DocumentKey(self.collection): dict.fromkeys(texts, 0)}

    # --- changes ---

    def add_document(
        self,
        source: str,
        content_hash: str,
        chunks: Sequence[Chunk],
        vectors: ArrayLike | None = None,
        *,
        file: str = "",
    ) -> None:
        """Store a document in place of its older version, in one transaction. Equal chunks are stored once.

        content_hash: any string that changes with the document's content; `content_hashes_by_file` returns it. vectors:
        [len(chunks), dim], not necessarily unit vectors; None: embed the texts now. file: the path of the file that
        contains the document; "" for none. `vectors.faiss` is not written; `save` writes it. Raises UsageError for a
        chunk with another `source`, and for text that is not valid Unicode.
        """
        for text in (source, *(chunk.text for chunk in chunks)):
            check_unicode(text, f"the document {source!r}")
        other_source = next((chunk.source for chunk in chunks if chunk.source != source), None)
        if other_source is not None:
            raise UsageError(
                f"a chunk of document {source!r} has the source {other_source!r}; add each document with its own chunks"
            )
        if vectors is None:
            vectors = self.embed([chunk.text for chunk in chunks])
        rows = self._unit_rows(vectors, len(chunks))
        items = {chunk.id: (chunk, row) for chunk, row in zip(chunks, rows, strict=True)}
        self._write_document(source, content_hash, items, file)
        self._changed = True

    def find_unknown_texts(self, texts: Iterable[str]) -> list[str]:
        """Return the `texts` that no chunk of the index has, without duplicates."""
        texts = dict.fromkeys(texts)
        stored = self.stored_vectors(texts)
        return [text for text in texts if text_key(text.strip()) not in stored]

    def embed(self, texts: Sequence[str], known_vectors: Mapping[str, FloatArray] | None = None) -> FloatArray:
        """Return a unit vector per text, [n, dim]. A text that a chunk of the index has is not embedded again.

        known_vectors: vectors [dim] by text, which another process computed with the index's embedder. Raises
        UsageError for text that is not valid Unicode.
        """
        for text in texts:
            check_unicode(text, "a text to embed")
        keys = [text_key(text.strip()) for text in texts]
        stored = {key: np.frombuffer(vector, "<f4") for key, vector in self.stored_vectors(texts).items()}
        missing = dict.fromkeys(text for text, key in zip(texts, keys, strict=True) if key not in stored)
        passed = {text: known_vectors[text] for text in missing if text in known_vectors} if known_vectors else {}
        left = [text for text in missing if text not in passed]
        fresh = dict(zip(passed, self._unit_rows([*passed.values()], len(passed)), strict=True))
        with self._embedder_lock:
            fresh |= zip(left, self._unit_rows(self.embedder.embed(left) if left else (), len(left)), strict=True)
        rows = [fresh[text] if text in fresh else stored[key] for text, key in zip(texts, keys, strict=True)]
        return np.array(rows, np.float32).reshape(len(texts), self._made_by.dim)

    def remove_document(self, source: str) -> int:
        """Remove a document. Return the number of its chunks. Raises NotFoundError for an unknown source."""
        num_removed = super().remove_document(source)
        self._changed = True
        return num_removed

    @property
    def is_saved(self) -> bool:
        """False while `vectors.faiss` lacks changes, made by this object or left by a process that was killed before it
        called `save`; else True.
        """
        return not self._changed and not self._is_outdated

    def save(self) -> None:
        """Write the vectors of all chunks to `vectors.faiss` in one step.

        Without this call, for example after a kill, the next open reads the missing vectors from the catalogue. The
        catalogue is written to the disk first, so that `vectors.faiss` never has more rows than the catalogue.
        """
        self.truncate_log()
        with self._search_snapshot():
            data = self._vectors.to_bytes(self._id)
        folder = Directory(self.path, fsync=True, full_hint="Free disk space and run the command again")
        folder.remove_stale_files()
        folder.write(self.path / VECTORS_FILE, data)
        self._changed = self._is_outdated = False

    def rebuild(self) -> None:
        """Build `vectors.faiss` again from the vectors in the catalogue. Embeds no text."""
        with self.read_transaction():
            self._vectors = FaissVectors(self._made_by.dim)
            self._sync_vectors()
        self.save()

    def find_problems(self) -> list[str]:
        """Return one sentence for each damage to the catalogue or `vectors.faiss`. Reads all chunks and texts."""
        problems = super().find_problems()
        try:
            self.check_chunks()
        except CorruptError as error:
            problems.append(str(error))
        return [*problems, *self.find_search_problems()]

    def check_chunks(self) -> None:
        """Read all chunks. Raises CorruptError for a chunk whose id does not match its text, source and start."""
        for _ in self.chunks():
            pass

    def find_search_problems(self) -> list[str]:
        """Return one sentence for each damage to `vectors.faiss`."""
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

    # --- search ---

    def search(
        self,
        query: str | ArrayLike,
        k: int = default_of(Settings, "k"),
        *,
        neighbours: int = default_of(Settings, "neighbours"),
        order: Literal["score", "document"] = default_of(Settings, "order"),
        is_allowed: Callable[[Chunk], bool] | None = None,
    ) -> list[SearchHit]:
        """Return the `k` chunks nearest to `query`, a question or a vector [dim]; fewer if the index has fewer.

        neighbours: number of chunks to add before and after each hit, from the hit's document. No chunk occurs twice.
        order: "score" sorts hits by score, each with its neighbours. "document" sorts documents by their best hit, and
        the chunks of a document by reading order. is_allowed: returns False for chunks to leave out; None allows all.
        The search includes every committed document of any process. Raises UsageError for `k` below 1, negative
        `neighbours` or another `order`.
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
            hits = list(itertools.islice(rows, k))
            placed = self._with_neighbours(hits, neighbours, is_allowed)
        if order == "document":
            turn = {document: place for place, document in enumerate(dict.fromkeys(row.document for row, _ in hits))}
            placed.sort(key=lambda pair: (turn[pair[0].document], pair[0].ordinal))
        return [hit for _, hit in placed]

    def _rows_by_score(self, vector: FloatArray, num_first: int) -> Iterator[tuple[Row[Any], float]]:
        """Yield rows with their cosines to `vector` [1, dim], nearest first; equal cosines by row id.

        `num_first` rows are read first, then four times as many, and so on.
        """
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
        self, hits: list[tuple[Row[Any], float]], distance: int, is_allowed: Callable[[Chunk], bool] | None
    ) -> list[tuple[Row[Any], SearchHit]]:
        rank_of = {row.id: rank for rank, (row, _) in enumerate(hits)}
        placed: dict[int, tuple[Row[Any], SearchHit]] = {}
        for hit, _ in hits:
            for row in self.rows_around(hit, distance) if distance else [hit]:
                is_neighbour = row.id not in rank_of
                if is_neighbour and is_allowed is not None and not is_allowed(as_chunk(row)):
                    continue
                rank = rank_of[hit.id if is_neighbour else row.id]  # a hit next to another hit keeps its own score
                placed.setdefault(row.id, (row, SearchHit(as_chunk(row), hits[rank][1], rank, is_neighbour)))
        return list(placed.values())

    def query_vector(self, query: str | ArrayLike) -> FloatArray:
        """Return the unit vector [1, dim] float32 of a question, or of a vector [dim]."""
        if isinstance(query, str):
            check_unicode(query, "the question")
            with self._embedder_lock:
                query = embed_question(self.embedder, query)
        return self._unit_rows(np.reshape(np.asarray(query, np.float32), (1, -1)), 1)

    def _unit_rows(self, vectors: ArrayLike, num_rows: int) -> FloatArray:
        """Return a copy [num_rows, dim] with rows of length 1. Raises StoreMismatchError for another shape."""
        rows, dim = np.array(vectors, np.float32), self._made_by.dim
        if num_rows == 0 and rows.size == 0:
            return rows.reshape(0, dim)
        if rows.shape != (num_rows, dim):
            raise StoreMismatchError(
                f"vectors have shape {rows.shape}, but {self.path} needs {(num_rows, dim)}, one per text; use its "
                f"embedder {self._made_by.embedder!r}, or {explain_reingestion(self.path / CATALOG_FILE)}"
            )
        return normalize_rows(rows)

    # --- vectors.faiss ---

    @contextmanager
    def _search_snapshot(self) -> Iterator[None]:
        """Read one state of the catalogue inside the block, with vectors of the same generation."""
        with self.read_transaction():
            self._sync_vectors()
            yield

    def _check_structure(self) -> None:
        """Raise CorruptError if the structure of the catalogue's file is damaged.

        A search would not find a chunk that is missing in one of SQLite's indexes, and report no error.
        """
        file = self.path / CATALOG_FILE
        if file.exists() and file.stat().st_size <= _CHECK_AT_OPEN_BYTES:
            for problem in self.find_structure_problems():
                raise self.damage_error(f"it is damaged ({problem})")

    def _open_vectors(self) -> None:
        self._vectors, damage = self._read_vectors()
        stored_generation = self._vectors.generation
        with self.read_transaction():
            self._sync_vectors(force=True)
        self._is_outdated = self._vectors.generation != stored_generation
        if damage:
            logger.warning("%s; it was rebuilt from %s without loss", damage, CATALOG_FILE)
        if stored_generation < 0:
            try:
                self.save()
            except RagblendError as error:  # a reader without write permission can still search
                logger.warning("%s could not be saved: %s", self.path / VECTORS_FILE, error)

    def _read_vectors(self) -> tuple[FaissVectors, str]:
        """Return the vectors of `vectors.faiss`, and the damage because of which they are empty.

        The latter is "" for an undamaged or missing file.
        """
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
        """Make the vectors equal to the catalogue's, as the current transaction reads it."""
        if force or self._vectors.generation != self.generation():
            self._check_generation(self._vectors.generation)
            self._vectors.sync(self)

    def _check_generation(self, generation: int) -> None:
        """Raise CorruptError if the catalogue's generation, which only grows, is below `generation`."""
        lost = generation - self.generation()
        if lost > 0:
            raise self.damage_error(
                f"it lacks the last {lost} changes that {VECTORS_FILE} contains, because its log was damaged or an "
                "older copy was restored"
            )

    def _check_embedder(self, embedder: Embedder | str) -> None:
        made_by = self._made_by
        name, dim = (
            (_embedder_id(embedder), made_by.dim) if isinstance(embedder, str) else (embedder.name, embedder.dim)
        )
        if (name, dim) != (made_by.embedder, made_by.dim):
            raise StoreMismatchError(
                f"{self.path} was made with embedder {made_by.embedder!r} (dim {made_by.dim}), not {name!r} "
                f"(dim {dim}); leave `embedder` out to use the recorded one, or "
                f"{explain_reingestion(self.path / CATALOG_FILE)}"
            )
        self._check_version(embedder)

    def _check_probe(self, embedder: Embedder, recorded: FloatArray) -> None:
        """Raise StoreMismatchError if `embedder` returns another vector for PROBE_TEXT than the recorded one [dim]."""
        distance = float(np.linalg.norm(_embed_probe(embedder) - recorded))
        if distance > _MAX_PROBE_DISTANCE:
            raise StoreMismatchError(
                f"{self.path} was made with another model or revision of {embedder.name!r}: their vectors of one text "
                f"have the distance {distance:.2f} (rounding causes at most {_MAX_PROBE_DISTANCE}), so a search would "
                "find the wrong chunks. Pass the embedding that made the index, or "
                f"{explain_reingestion(self.path / CATALOG_FILE)}"
            )

    def _check_version(self, embedder: Embedder | str) -> None:
        """Raise StoreMismatchError if the vectors were made by another version of `embedder`."""
        made, now = self._made_by.embedder_version, embedder_version(embedder)
        if made != now:
            raise StoreMismatchError(
                f"{self.path} was embedded by version {made} of {self._made_by.embedder!r}, but this is version {now}; "
                f"{explain_reingestion(self.path / CATALOG_FILE)}"
            )
