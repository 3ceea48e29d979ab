"""Vectors in FAISS: flat and in memory, or any index of `faiss.index_factory`, mapped from its file.

What FAISS cannot remove is marked by the id -1 and left out of answers; once a quarter is, all is built anew. What has
to be trained stays flat until there is enough to train it on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import faiss
import numpy as np
from numpy.typing import NDArray

from ragblend.corpus.database import ChunkDatabase
from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.vectors.base import ROWS_PER_PAGE, Ids, NearestRows, stack_vectors
from ragblend.errors import UsageError
from ragblend.files.reading import open_file
from ragblend.redaction import redact

FAISS = "faiss"
FORMS = "faiss, or faiss:FACTORY (FAISS's own names, such as faiss:HNSW32 or faiss:IVF1024,Flat?nprobe=32)"
_OPTIONS = ("nprobe", "efSearch")
_ROUNDING = 1e-5  # kinds that are not flat sum float32 in an order of their own; what differs by more is no tie
_LEAST_PER_CENTROID, _MOST_PER_CENTROID = 39, 256  # what FAISS's k-means warns below, and samples down to
_CODES, _CODED = 256, ("PQ", "RQ", "LSQ", "PCA", "ITQ")  # centroids of a quantizer of 8 bits, and who has them
_EF_SEARCH = 64  # FAISS's own 16 finds too little among many vectors
_GONE = -1  # the id of what was removed
_MAPPED = getattr(faiss, "IO_FLAG_MMAP_IFC", 0)  # of every kind; older releases read into memory


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of FAISS index. Two choices are the same kind when `remembered` is."""

    remembered: str  # what an index notes
    target: str  # FAISS's factory string
    options: tuple[tuple[str, str], ...] = ()

    def number(self, name: str) -> int:
        """An option, a whole number; 0 where it is not given. Raises UsageError for anything else."""
        value = dict(self.options).get(name, "0")
        if not value.isdecimal() or len(value) > 9:
            raise UsageError(f"{name} is {value!r} in {self.remembered}; choose a whole number")
        return int(value)


def choose(text: str) -> Choice:
    """What `text` says. Raises UsageError, which shows no secret, for anything that is none of `FORMS`.

    >>> choose("faiss:HNSW32?efSearch=64").target, choose("faiss:Flat").remembered
    ('HNSW32', 'faiss')
    """
    kind, _, rest = text.partition(":")
    if kind != FAISS:
        raise UsageError(
            f"vectors is {redact(text)!r}; choose {FORMS}. Vectors in a database are its LangChain store's, wrapped: "
            "ragblend.vectorstores.PrecomputingVectorStore(store, llm)"
        )
    target, _, query = rest.partition("?")
    options = tuple(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted({name for name, _ in options} - {*_OPTIONS}):
        known = ", ".join(_OPTIONS)
        raise UsageError(f"vectors is {text!r}: it has {', '.join(unknown)} behind '?', known: {known}; choose {FORMS}")
    target = target or "Flat"
    if target == "Flat" and options:
        raise UsageError(f"vectors is {text!r}: a flat index has no options; choose {FORMS}")
    written = FAISS if target == "Flat" else f"faiss:{target}" + (f"?{urlencode(options)}" if options else "")
    return Choice(written, target, options)


class FaissVectors:
    """Unit vectors [dim] by row id, derived from a database, as of its `generation`: what is missing or stale is made
    again by `sync`."""

    def __init__(self, dim: int, choice: Choice | None = None, generation: int = -1) -> None:
        self.generation = generation  # -1: before the first change
        self._choice, self._dim = choice or choose(FAISS), dim
        self.is_flat = self._choice.target == "Flat"  # as chosen: others may be flat until they are trained
        self._is_mapped = False
        self._needed = 0 if self.is_flat else _num_needed(_make_index(dim, self._choice), self._choice.target)
        self.faiss: Any = self._empty()
        self._num_gone = 0

    @staticmethod
    def from_bytes(data: bytes, generation: int) -> FaissVectors:
        """What `to_bytes` wrote of flat ones. FAISS's parser is not made for hostile bytes: compare their checksum
        before."""
        found = FaissVectors(1, generation=generation)
        found.faiss = faiss.deserialize_index(np.frombuffer(data, np.uint8))
        return found

    @staticmethod
    def from_file(path: Path, sha256: str, dim: int, choice: Choice, generation: int) -> FaissVectors | None:
        """What `to_bytes` wrote, mapped; None where the file's checksum is another. Raises OSError."""
        fd = open_file(path)
        with os.fdopen(fd, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
                return None
            found = FaissVectors(dim, choice, generation)
            # The very file whose bytes were compared: another may have its name by now.
            found.faiss = faiss.read_index(f"/proc/self/fd/{fd}", _MAPPED)
        found._is_mapped = bool(_MAPPED)
        found._num_gone = int((found._ids() == _GONE).sum())
        found._set_options()
        return found

    def to_bytes(self) -> bytes:
        """All of it, for a file."""
        return bytes(faiss.serialize_index(self.faiss).tobytes())

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.faiss.d)

    @property
    def is_exact(self) -> bool:
        """Whether all vectors are compared."""
        return self.is_flat or isinstance(faiss.downcast_index(self.faiss.index), faiss.IndexFlat)

    def __len__(self) -> int:
        return int(self.faiss.ntotal) - self._num_gone

    # --- following ---

    def sync(self, catalogue: ChunkDatabase) -> None:
        """Come to hold the vectors of the catalogue and no others, those written since anew."""
        wanted, changed = catalogue.ids(), catalogue.ids(newer_than=self.generation)
        held = self._ids()
        stale = ~np.isin(held, wanted) | np.isin(held, changed)
        missing = wanted[~np.isin(wanted, held[~stale])]
        if self._needs_rebuild(wanted.size, int(stale.sum()), held.size):
            self._build(catalogue, wanted)
        else:
            if stale.any() or missing.size:
                self._copy_to_memory()
            self._drop(held, stale)
            self._add(catalogue, missing)
        self.generation = catalogue.generation()
        assert len(self) == wanted.size

    def _needs_rebuild(self, num_wanted: int, num_stale: int, num_held: int) -> bool:
        """Whether all is to be built anew: too much is marked as gone, or there is enough to train on now."""
        if self.is_flat:
            return False
        if self.is_exact:
            return num_wanted >= max(self._needed, 1)
        return num_wanted < self._needed or 4 * num_stale > num_held

    def _build(self, catalogue: ChunkDatabase, wanted: Ids) -> None:
        """All of it anew, trained on an even sample."""
        self._is_mapped, self._num_gone = False, 0
        self.faiss = self._empty()
        if self._needed and wanted.size >= self._needed:
            made = _make_index(self._dim, self._choice)
            # Evenly through the ids, which are hashes: in document order a sample could miss whole topics.
            count = self._needed * _MOST_PER_CENTROID // _LEAST_PER_CENTROID
            sample = np.sort(wanted)[:: max(1, wanted.size // count)][:count]
            made.train(stack_vectors(catalogue.rows(sample.tolist())))
            self.faiss = faiss.IndexIDMap(made)
            self._set_options()
        self._add(catalogue, wanted)

    def _drop(self, held: Ids, stale: NDArray[np.bool_]) -> None:
        if self.is_exact:
            if stale.any():
                self.faiss.remove_ids(held[stale])
            return
        held[stale] = _GONE
        faiss.copy_array_to_vector(held, self.faiss.id_map)
        self._num_gone = int((held == _GONE).sum())

    def _add(self, catalogue: ChunkDatabase, missing: Ids) -> None:
        for start in range(0, missing.size, ROWS_PER_PAGE):
            page = catalogue.rows(missing[start : start + ROWS_PER_PAGE].tolist())
            self.faiss.add_with_ids(stack_vectors(page), np.array([row.id for row in page], np.int64))

    # --- searching ---

    def nearest(
        self, vector: FloatArray, k: int, exact_scores: Callable[[list[int]], dict[int, float]]
    ) -> dict[int, float]:
        """Row ids and scores of the `k` nearest to `vector` [1, dim]. Of equals the same are taken whatever came
        first: an index that followed its folder answers as one that is new.

        exact_scores: scores of those rows that are in the database, for kinds whose own are rounded.
        """
        total = len(self)
        if not total:
            return {}
        slack = 0.0 if self.is_flat else _ROUNDING
        wanted, asked = min(k, total), min(2 * k + 8, total)
        while True:
            scores, ids = self.search(vector, asked)
            is_last = asked == total or len(ids) < asked or not self.is_exact
            if is_last or scores[-1] < scores[wanted - 1] - slack:
                break
            asked = min(8 * asked, total)  # equals reach beyond what was asked for
        if not self.is_flat:
            found = exact_scores(ids.tolist())
            ids, scores = np.array([*found], np.int64), np.array([*found.values()], np.float32)
        best = np.lexsort((ids, -scores))[:wanted]
        return dict(zip(ids[best].tolist(), scores[best].tolist(), strict=True))

    def search(self, vector: FloatArray, count: int) -> NearestRows:
        """The `count` nearest to `vector` [1, dim]; fewer where there are no more, or some were not looked at."""
        total, asked = int(self.faiss.ntotal), count
        while True:
            scores, ids = (found[0] for found in self.faiss.search(vector, min(asked, total)))
            if self.is_exact:
                return NearestRows(scores, ids)
            there = ids != _GONE  # which also fills what was not found
            if there.sum() >= count or asked >= min(count + self._num_gone, total):
                return NearestRows(scores[there][:count], ids[there][:count])
            asked *= 2

    # --- inside ---

    def _empty(self) -> Any:
        if self.is_flat or self._needed:
            return faiss.IndexIDMap2(faiss.IndexFlatIP(self._dim))
        index = faiss.IndexIDMap(_make_index(self._dim, self._choice))
        _set_options(index.index, self._choice)
        return index

    def _ids(self) -> Ids:
        found: Ids = faiss.vector_to_array(self.faiss.id_map)
        return found

    def _copy_to_memory(self) -> None:
        """Into memory of its own: FAISS ends the process when what is mapped is changed."""
        if self._is_mapped:
            self.faiss = faiss.deserialize_index(faiss.serialize_index(self.faiss))
            self._is_mapped = False
            self._set_options()

    def _set_options(self) -> None:
        if not self.is_exact:
            _set_options(self.faiss.index, self._choice)


def _make_index(dim: int, choice: Choice) -> Any:
    """An empty index of the kind. Raises UsageError for what FAISS does not know, or what is not searched by rows."""
    why = ""
    try:
        made = faiss.index_factory(dim, choice.target, faiss.METRIC_INNER_PRODUCT)
        if isinstance(made, faiss.IndexIDMap | faiss.IndexIDMap2):
            why = "it maps ids itself, which is done here"
        elif made.metric_type != faiss.METRIC_INNER_PRODUCT:
            why = "it does not compare by inner product"
        elif made.d != dim or isinstance(made, faiss.IndexFlat):
            why = "it is flat; write faiss"
        elif isinstance(made, faiss.IndexIVF) and made.nlist < 1:
            why = "it has no lists"
        else:
            faiss.IndexIDMap(made)
            _set_options(made, choice)
            return made
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        why = str(error).strip().splitlines()[-1].rpartition(": ")[2]
    raise UsageError(
        f"{choice.remembered} is no FAISS index for vectors of {dim} numbers ({why}); choose faiss, faiss:HNSW32, "
        "faiss:IVF1024,Flat?nprobe=32 or another string of its index factory"
    )


def _set_options(index: Any, choice: Choice) -> None:
    """How far a search looks: what was chosen, else the square root of the lists, and `_EF_SEARCH`."""
    index = faiss.downcast_index(index)
    if (lists := _num_lists(index)) and not choice.number("nprobe"):
        faiss.extract_index_ivf(index).nprobe = max(1, round(lists**0.5))
    for name in ("nprobe", "efSearch"):
        if value := choice.number(name):
            faiss.ParameterSpace().set_index_parameter(index, name, value)
    if isinstance(index, faiss.IndexHNSW) and not choice.number("efSearch"):
        index.hnsw.efSearch = _EF_SEARCH


def _num_lists(index: Any) -> int:
    """Lists of an inverted file; 0 where there is none."""
    try:
        return int(faiss.extract_index_ivf(index).nlist)
    except RuntimeError:
        return 0


def _num_needed(made: Any, factory: str) -> int:
    """How many vectors it takes to train an index; 0 where it needs no training."""
    if made.is_trained:
        return 0
    is_coded = any(word in factory for word in _CODED)
    return _LEAST_PER_CENTROID * max(_num_lists(made), _CODES if is_coded else 1)
