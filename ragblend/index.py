"""Chunks on disk with their vectors: add, replace, remove, search. No pickle, every write whole or not at all.

`chunks.sqlite` is the truth (see `database`). `vectors.faiss` is derived from it, and rebuilt whenever it is missing,
damaged or behind; `manifest.json` says what made both. One machine, one writer at a time, any number of readers.
Knows vectors and chunks, nothing about prompts, KV or models. Read `search` first, then `_catch_up`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ragblend.corpus.database import DATABASE, ChunkDatabase, reingest
from ragblend.corpus.embedders import Embedder, FloatArray, default_embedder, embedder_version, load_embedder
from ragblend.corpus.rows import SCHEMA_VERSION, DocumentChange, Doomed, FileNote, Leftovers, Row, text_hash
from ragblend.engine.store.sealed import seal, unseal
from ragblend.errors import CorruptError, NotFoundError, RagblendError, StoreMismatchError, UsageError
from ragblend.files.directory import Directory
from ragblend.files.reading import read_file
from ragblend.prompt.prompt import Chunk

logger = logging.getLogger(__name__)

VECTORS, MANIFEST = "vectors.faiss", "manifest.json"
_VECTORS_BYTES = 1 << 40
_PAGE = 4096  # vectors added to FAISS at a time


class SearchHit(NamedTuple):
    """A chunk found. `score` is the cosine, `rank` counts hits from 0; a neighbour carries those of its hit."""

    chunk: Chunk
    score: float
    rank: int
    is_neighbour: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What made the index. `generation` counts its changes; chunk size (tokens) and splitter are the latest used."""

    schema_version: int
    embedder: str
    embedder_version: int
    dim: int
    tokenizer: str
    tokenizer_fingerprint: str
    chunk_size: int
    generation: int
    num_documents: int
    num_chunks: int
    vectors_sha256: str
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
    """The index in folder `path`; with `create` an empty one where there is none.

    `embedder` defaults to the one that made the index (loaded at the first text), for a new index to
    `default_embedder()`. The other arguments are recorded at creation only. Raises NotFoundError, StoreMismatchError
    (another embedder, another schema) or CorruptError.
    """
    folder = Path(path)
    begun = create and not (folder / MANIFEST).exists()  # the manifest is the last thing that creation writes
    if (folder / DATABASE).exists() and not (begun and ChunkDatabase.is_blank(folder)):
        return ChunkIndex(ChunkDatabase(folder), embedder)
    if (folder / MANIFEST).exists():
        raise CorruptError(f"{folder / DATABASE} is missing. {reingest(folder)}")
    if not create:
        raise NotFoundError(f"no index at {folder}; make one: ragblend ingest DOCS --index {folder}")
    chosen = load_embedder(_place(embedder)) if isinstance(embedder, str) else embedder or default_embedder()
    facts = {"embedder": chosen.name, "embedder_version": embedder_version(chosen)}
    facts |= {"dim": chosen.dim, "chunk_size": chunk_size, "splitter": ""}
    facts |= {"tokenizer": tokenizer, "tokenizer_fingerprint": tokenizer_fingerprint}
    return ChunkIndex(ChunkDatabase.create(folder, facts), chosen, is_new=True)


def _place(embedder: str) -> str:
    """The name of an embedder; a folder's is the same from every working folder."""
    return str(Path(embedder).resolve()) if Path(embedder).is_dir() else embedder


class ChunkIndex:
    """An open index; `open_index` makes one. A context manager: leaving it saves what changed and closes it.

    A document counts as soon as `add_document` returns: a killed ingestion loses none, and every reader finds it at the
    next search. Threads may share an index. Any method raises CorruptError when stored bytes are not what was written.
    """

    def __init__(
        self, database: ChunkDatabase, embedder: Embedder | str | None = None, *, is_new: bool = False
    ) -> None:
        self.path = database.folder
        self._db = database
        self._lock = database.lock
        self._embedder_lock = threading.RLock()  # an embedder is not promised to be thread-safe
        self._embedder = None if isinstance(embedder, str) else embedder
        self._changed = is_new
        self._is_behind = False  # the search files lack changes of somebody who was killed before saving them
        self._vectors: Any = None  # faiss.IndexIDMap2, as of database generation `_generation`
        self._generation = -1
        self._vectors_sha256 = ""
        try:
            self._made_by = self.manifest
            if embedder is not None:
                self._check_embedder(embedder)
            self._open_vectors(is_new)
        except BaseException:
            database.close()
            raise

    # --- what it holds ---

    @property
    def manifest(self) -> Manifest:
        """The facts of the index as they are now."""
        with self._db.reading():
            return self._manifest()

    @property
    def num_chunks(self) -> int:
        """Chunks stored."""
        return self.manifest.num_chunks

    @property
    def num_documents(self) -> int:
        """Documents stored, those without a chunk included."""
        return self.manifest.num_documents

    @property
    def embedder(self) -> Embedder:
        """The embedder of this index; found by its recorded name when none was given."""
        with self._embedder_lock:
            if self._embedder is None:
                self._check_version(self._made_by.embedder)
                self._embedder = load_embedder(self._made_by.embedder)
            return self._embedder

    def sources(self, status: str | None = None) -> list[str]:
        """Sources of all documents, first added first; with `status`, of those that have it."""
        with self._db.reading():
            return self._db.sources(status)

    def documents(self) -> dict[str, dict[str, str]]:
        """Content hashes by source of all documents, by the file that holds them; "" for those without one."""
        with self._db.reading():
            return self._db.documents()

    def files(self) -> dict[str, FileNote]:
        """What is noted of the files that documents came from, by path."""
        with self._db.reading():
            return {note.path: note for note in self._db.files()}

    def leftovers(self) -> Leftovers:
        """What documents had that are gone or changed, and nothing here has now. `forgetting.sweep` deletes it."""
        with self._db.reading():
            return self._db.leftovers()

    def doomed(self) -> list[Doomed]:
        """The entries of stores that `doom` noted and `pardon` has not taken off, in the order they were noted in."""
        with self._db.reading():
            return self._db.doomed()

    def is_doomed(self, entry: Doomed) -> bool:
        """Whether an entry is still noted, and nothing here has its text again, or behind the other."""
        with self._db.reading():
            return self._db.is_doomed(entry)

    def document_hash(self, source: str) -> str | None:
        """The content hash a document was added with; None when it is not here. The same hash: nothing to do."""
        with self._db.reading():
            found = self._db.document(source)
        return found and found[0]

    def document_status(self, source: str) -> str | None:
        """The status a document was added with or set to; None when it is not here."""
        with self._db.reading():
            found = self._db.document(source)
        return found and found[1]

    def chunks(self, source: str | None = None) -> Iterator[Chunk]:
        """All chunks, or those of one document, in reading order. Each document is whole, as of its turn."""
        for name in self.sources() if source is None else [source]:
            with self._db.reading():
                rows = self._db.rows_of(name)
            yield from (row.chunk() for row in rows)

    def texts_since(self, generation: int) -> list[str]:
        """The texts of chunks that were added after the manifest had that generation."""
        with self._db.reading():
            return [row.text for row in self._db.rows("id", self._db.ids(newer_than=generation).tolist())]

    def texts(self) -> Iterator[tuple[str, str]]:
        """(chunk id, text) of every chunk, for finding chunks verbatim in a prompt."""
        return ((chunk.id, chunk.text) for chunk in self.chunks())

    def get(self, ids: Iterable[str]) -> dict[str, Chunk]:
        """The chunks with these ids, in that order; ids that are not here are left out."""
        wanted = list(dict.fromkeys(ids))
        with self._db.reading():
            found = {row.chunk_id: row.chunk() for row in self._db.rows("chunk_id", wanted)}
        return {chunk_id: found[chunk_id] for chunk_id in wanted if chunk_id in found}

    # --- changing it ---

    def add_document(
        self,
        source: str,
        content_hash: str,
        chunks: Sequence[Chunk],
        vectors: ArrayLike | None = None,
        *,
        status: str = "indexed",
        file: str = "",
    ) -> DocumentChange:
        """Store a document whole, in place of its older version if there is one; equal chunks are stored once.

        vectors: [len(chunks), dim], normalised here; None to embed the texts now. Every chunk's `source` must be
        `source`, or UsageError. `file`: what it was read from, if it was. `vectors.faiss` follows at `save`.
        """
        foreign = next((chunk.source for chunk in chunks if chunk.source != source), None)
        if foreign is not None:
            raise UsageError(f"a chunk of {foreign!r} was given to document {source!r}; give each document its own")
        if vectors is None:
            vectors = self.embed([chunk.text for chunk in chunks])
        rows = self._unit_rows(vectors, len(chunks))
        items = {chunk.id: (chunk, row) for chunk, row in zip(chunks, rows, strict=True)}
        change = self._db.replace(source, content_hash, status, items, file)
        self._changed = True
        return change

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """[n, dim] a vector per text. A text that some chunk has, wherever, is not embedded again."""
        with self._db.reading():
            stored = self._db.vectors(texts)
        missing = list(dict.fromkeys(text for text in texts if text_hash(text) not in stored))
        with self._embedder_lock:
            made = self._unit_rows(self.embedder.embed(missing) if missing else (), len(missing))
        fresh = dict(zip(missing, made, strict=True))
        rows = [fresh[text] if text in fresh else np.frombuffer(stored[text_hash(text)], "<f4") for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), self._made_by.dim)

    def remove_document(self, source: str) -> list[Chunk]:
        """Forget a document; returns the chunks it had, without metadata. Raises NotFoundError when it is not here."""
        removed = self._db.remove(source)
        self._changed = True
        return removed

    def set_status(self, sources: str | Iterable[str], status: str) -> None:
        """Note how far documents have come, such as "precomputed". Raises NotFoundError when one is not here."""
        self._db.set_status([sources] if isinstance(sources, str) else sources, status)

    def note_files(self, notes: Iterable[FileNote]) -> None:
        """Note what was read of files, each in place of its older note; one that holds no document is not kept."""
        self._db.note_files(notes)

    def set_chunker(self, chunk_size: int, splitter: str = "") -> None:
        """Note how documents are cut from now on: tokens per chunk, or the splitter that cuts instead."""
        self._db.set_facts(chunk_size=chunk_size, splitter=splitter)
        self._changed = True

    def doom(self, entries: Iterable[Doomed], leftovers: Leftovers) -> None:
        """Note which entries are to go, in place of `leftovers`: from then on nothing here tells the texts."""
        self._db.doom(entries, leftovers.last_id)

    def pardon(self, entries: Iterable[Doomed]) -> None:
        """Take entries off the list: they are gone, or wanted again."""
        self._db.pardon(entries)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nobody adds or removes documents meanwhile, from any process. For moments: others wait."""
        with self._db.writing():
            yield

    def truncate_log(self) -> None:
        """Let what was removed leave the database's log, where it stands until others have stopped reading."""
        self._db.truncate_log()

    @property
    def is_saved(self) -> bool:
        """Whether the search files have all that was changed, here or by a process that was killed before it saved."""
        return not self._changed and not self._is_behind

    def save(self) -> None:
        """Write `vectors.faiss` and `manifest.json`, each whole or not at all; killed in between, open rebuilds.

        Before that the database's log is emptied into it, so that the manifest knows of no change that is not durable.
        """
        self._db.truncate_log()
        with self._db.writing():  # other processes that save wait here
            self._catch_up()
            data = faiss.serialize_index(self._vectors).tobytes()
            self._vectors_sha256 = hashlib.sha256(data).hexdigest()
            manifest = seal(asdict(self._manifest()), MANIFEST)
            folder = Directory(self.path, fsync=True, make_room="Make room and run the command again")
            folder.clean()
            folder.write(self.path / VECTORS, data)
            folder.write(self.path / MANIFEST, manifest)
        self._changed = self._is_behind = False

    def rebuild(self) -> None:
        """Make the search structure anew from the database, and save it. Embeds nothing."""
        with self._lock:
            self._reset()
            self.save()

    def check(self) -> list[str]:
        """Whatever is wrong with the stored bytes, a sentence each; empty when all is well. Reads everything."""
        try:
            with self._db.reading():
                problems = list(self._db.problems())
        except CorruptError as error:
            problems = [str(error)]
        stored = self._read_vectors()
        if stored.damage:
            problems.append(stored.damage)
        try:
            with self._db.reading():
                self._check_generation(stored.generation)
        except CorruptError as error:
            if str(error) not in problems:
                problems.append(str(error))
        return problems

    def close(self) -> None:
        """Close the database, saving nothing; the next open brings the search structure up to date."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    ) -> list[SearchHit]:
        """The `k` chunks nearest to `query`, a question or a vector [dim]; fewer when the index holds fewer.

        neighbours: also this many chunks before and after each hit in its document, placed around it, none twice.
        order: "document" sorts documents by their best hit and, inside each, by reading order.
        Sees every document that any process has committed, saved or not.
        """
        if k < 1 or neighbours < 0 or order not in ("score", "document"):
            raise UsageError(
                f"k is {k}, neighbours {neighbours}, order {order!r}; "
                "choose k of 1 or more, neighbours of 0 or more, and order 'score' or 'document'"
            )
        vector = self._query_vector(query)  # [1, dim]
        with self._db.reading():
            self._catch_up()
            if not self._vectors.ntotal:
                return []
            score_of = self._nearest(vector, k)
            found = self._db.rows("id", list(score_of))
            found.sort(key=lambda row: (-score_of[row.id], row.id))  # as `_nearest` takes them: 3 begin with the best 1
            placed = self._with_neighbours(found, score_of, neighbours)
        if order == "document":
            turn = {document: place for place, document in enumerate(dict.fromkeys(row.document for row in found))}
            placed.sort(key=lambda pair: (turn[pair[0].document], pair[0].ordinal))
        return [hit for _, hit in placed]

    def _nearest(self, vector: FloatArray, k: int) -> dict[int, float]:
        """Row ids and scores of the `k` nearest to `vector` [1, dim]. Of equals the same are taken whatever came first:
        an index that followed its folder answers as one that is new."""
        total = self._vectors.ntotal
        wanted, asked = min(k, total), min(2 * k + 8, total)
        while True:
            scores, ids = (found[0] for found in self._vectors.search(vector, asked))  # [asked], best first
            if asked == total or scores[-1] < scores[wanted - 1]:
                break
            asked = min(8 * asked, total)  # equals reach beyond what was asked for
        best = np.lexsort((ids, -scores))[:wanted]
        return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))

    def _with_neighbours(
        self, found: list[Row], score_of: dict[int, float], distance: int
    ) -> list[tuple[Row, SearchHit]]:
        rank_of = {row.id: rank for rank, row in enumerate(found)}
        placed: dict[int, tuple[Row, SearchHit]] = {}
        for hit in found:
            for row in self._db.rows_around(hit, distance) if distance else [hit]:
                own = row if row.id in rank_of else hit  # a hit beside another hit keeps its own score
                is_neighbour = row.id not in rank_of
                placed.setdefault(
                    row.id, (row, SearchHit(row.chunk(), score_of[own.id], rank_of[own.id], is_neighbour))
                )
        return list(placed.values())

    def _query_vector(self, query: str | ArrayLike) -> FloatArray:
        if not isinstance(query, str):
            return self._unit_rows(np.reshape(np.asarray(query, np.float32), (1, -1)), 1)
        with self._embedder_lock:
            embed_query = getattr(self.embedder, "embed_query", None)
            vector = embed_query(query) if embed_query else self.embedder.embed([query])
        return self._unit_rows(np.reshape(vector, (1, -1)), 1)

    def _unit_rows(self, vectors: ArrayLike, num_rows: int) -> FloatArray:
        """A copy [num_rows, dim] with rows of length 1; rows of zeros stay, and what is 1 but for rounding."""
        rows, dim = np.array(vectors, np.float32), self._made_by.dim
        if num_rows == 0 and rows.size == 0:
            return rows.reshape(0, dim)
        if rows.shape != (num_rows, dim):
            raise StoreMismatchError(
                f"vectors have shape {rows.shape}, {self.path} needs {(num_rows, dim)}, one per text, by "
                f"{self._made_by.embedder!r}; use it, or make another index: ragblend ingest DOCS --index NEW_PATH"
            )
        if not np.isfinite(rows).all():
            raise UsageError("vectors hold NaN or infinity; check the embedder")
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)  # [num_rows, 1]
        np.divide(rows, lengths, out=rows, where=(lengths > 0) & (abs(lengths - 1) > 1e-6))
        return rows

    # --- the search structure ---

    class _Stored(NamedTuple):
        vectors: Any  # faiss.IndexIDMap2, or None when damaged
        generation: int = -1  # that the manifest names; -1 where it cannot be read
        damage: str = ""

    def _open_vectors(self, is_new: bool) -> None:
        self._reset()
        if is_new:
            self.save()
            return
        stored = self._read_vectors()
        if stored.damage:  # or a writer is between its two files: look again
            time.sleep(0.1)
            stored = self._read_vectors()
        if not stored.damage:
            self._vectors, self._generation = stored.vectors, stored.generation
        with self._db.reading():
            self._check_generation(stored.generation)
            self._catch_up(force=True)
        self._is_behind = bool(stored.damage) or self._generation != stored.generation
        if stored.damage:
            logger.warning("%s; search structure rebuilt from %s, nothing is lost", stored.damage, DATABASE)
            try:
                self.save()
            except RagblendError as error:  # a reader without write permission has its answer all the same
                logger.warning("the rebuilt search structure of %s could not be saved: %s", self.path, error)

    def _read_vectors(self) -> _Stored:
        try:
            manifest = unseal(read_file(self.path / MANIFEST), MANIFEST)
            sha256, generation = str(manifest["vectors_sha256"]), int(manifest["generation"])
            data = read_file(self.path / VECTORS, limit=_VECTORS_BYTES)
        except FileNotFoundError as error:
            return self._Stored(None, damage=f"{error.filename} is missing")
        except OSError as error:
            return self._Stored(None, damage=f"{error.filename} cannot be read ({error.strerror})")
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._Stored(None, damage=f"{self.path / MANIFEST} is damaged")
        # Compared before the native parser sees the bytes: it is not made for hostile ones.
        if hashlib.sha256(data).hexdigest() != sha256:
            return self._Stored(None, generation, f"{self.path / VECTORS} does not match its checksum")
        vectors = faiss.deserialize_index(np.frombuffer(data, np.uint8))
        if vectors.d != self._made_by.dim:
            return self._Stored(None, generation, f"{self.path / VECTORS} belongs to another index")
        self._vectors_sha256 = sha256
        return self._Stored(vectors, generation)

    def _reset(self) -> None:
        self._vectors = faiss.IndexIDMap2(faiss.IndexFlatIP(self._made_by.dim))
        self._generation = -1  # before the first change

    def _catch_up(self, *, force: bool = False) -> None:
        """Bring the vectors in memory to the state of the database that the current transaction sees."""
        generation = self._db.generation()
        if generation == self._generation and not force:
            return
        self._check_generation(self._generation)
        wanted, changed = self._db.ids(), self._db.ids(newer_than=self._generation)
        held = faiss.vector_to_array(self._vectors.id_map)
        stale = held[~np.isin(held, wanted) | np.isin(held, changed)]
        if stale.size:
            self._vectors.remove_ids(stale)
        missing = wanted[~np.isin(wanted, faiss.vector_to_array(self._vectors.id_map))]
        for start in range(0, missing.size, _PAGE):
            rows = self._db.rows("id", missing[start : start + _PAGE].tolist())
            vectors = np.frombuffer(b"".join(row.vector for row in rows), "<f4").reshape(len(rows), -1)
            self._vectors.add_with_ids(vectors.astype(np.float32), np.array([row.id for row in rows], np.int64))
        self._generation = generation
        assert self._vectors.ntotal == wanted.size

    def _check_generation(self, known: int) -> None:
        """Raise CorruptError when the database, whose counts only grow, has fewer changes than were `known` once."""
        lost = known - self._db.generation()
        if lost > 0:
            raise CorruptError(
                f"{self.path / DATABASE} lacks the last {lost} changes that {MANIFEST} knows of: its log was damaged, "
                f"or an older copy was put back. {reingest(self.path)}"
            )

    def _manifest(self) -> Manifest:
        facts = self._db.facts()
        return Manifest(
            schema_version=SCHEMA_VERSION,
            embedder=facts["embedder"],
            embedder_version=int(facts.get("embedder_version", 1)),
            dim=int(facts["dim"]),
            tokenizer=facts["tokenizer"],
            tokenizer_fingerprint=facts["tokenizer_fingerprint"],
            chunk_size=int(facts["chunk_size"]),
            generation=self._db.generation(),
            num_documents=self._db.num_documents(),
            num_chunks=self._db.num_chunks(),
            vectors_sha256=self._vectors_sha256,
            splitter=facts.get("splitter", ""),
        )

    def _check_embedder(self, embedder: Embedder | str) -> None:
        made_by = self._made_by
        name, dim = (_place(embedder), made_by.dim) if isinstance(embedder, str) else (embedder.name, embedder.dim)
        if (name, dim) != (made_by.embedder, made_by.dim):
            raise StoreMismatchError(
                f"{self.path} was made with embedder {made_by.embedder!r} (dim {made_by.dim}), not {name!r} "
                f"(dim {dim}); leave --embedder out to use that one, or make another index: ragblend ingest DOCS "
                "--index NEW_PATH (stored KV is found, not recomputed)"
            )
        self._check_version(embedder)

    def _check_version(self, embedder: Embedder | str) -> None:
        """Raise StoreMismatchError when the vectors here are not what `embedder`, of the same name, gives now."""
        made, now = self._made_by.embedder_version, embedder_version(embedder)
        if made != now:
            raise StoreMismatchError(
                f"{self.path} was embedded by version {made} of {self._made_by.embedder!r}, this is version {now}, "
                "which reads all of a long chunk and not only its beginning; make another index: ragblend ingest DOCS "
                "--index NEW_PATH. Stored KV is found again, not recomputed"
            )
