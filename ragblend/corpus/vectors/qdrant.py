"""Vectors in a Qdrant collection, on a server or in a folder (local mode, one process at a time).

Several indexes may share a collection: a point's id is of its index and its row, its payload names the index, and every
question asks for that. The state is a point of its own, which names none. Local mode compares all vectors; a server
searches its graph.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ragblend.corpus.embedders import FloatArray
from ragblend.corpus.vectors.base import Found, Ids
from ragblend.corpus.vectors.choice import Choice
from ragblend.errors import BackendUnreachableError, RagblendError, StoreMismatchError
from ragblend.redaction import redacted

try:
    from qdrant_client import QdrantClient, models
    from qdrant_client.http.exceptions import ApiException, ResponseHandlingException
except ImportError as error:
    raise ImportError("vectors in qdrant:// need qdrant-client: pip install 'ragblend[qdrant]'") from error

T = TypeVar("T")

TIMEOUT_S = 30
_BATCH = 512  # points in one request: 384 numbers each, as JSON, are 4 MB
_SCROLLED = 4096
_SPACE = uuid.UUID("9c0c0f0a-3d0e-5f43-9d42-8f3b8b3c3d11")  # of the ids made here


class QdrantPlace:
    """The vectors of one index."""

    def __init__(self, choice: Choice, number: str, dim: int) -> None:
        self.name, self.is_exact = choice.shown, choice.is_local
        self._choice, self._number, self._dim = choice, number, dim
        self._client: QdrantClient | None = None
        self._mine = models.Filter(must=[models.FieldCondition(key="index", match=models.MatchValue(value=number))])
        self._state_id = self._point_id("state")

    def state(self) -> str:
        """The payload of the point of the state."""

        def work(client: QdrantClient) -> str:
            found = client.retrieve(self._choice.target, [self._state_id], with_payload=True)
            return str((found[0].payload or {}).get("state", "")) if found else ""

        return self._of_collection(work, "")

    def set_state(self, state: str) -> None:
        """Make the collection if it is not there; put the point of the state."""
        point = models.PointStruct(id=self._state_id, vector=[0.0] * self._dim, payload={"state": state})
        self._do(self._make)
        self._do(partial(self._upsert, [point]))

    def count(self) -> int:
        """Points of this index."""

        def work(client: QdrantClient) -> int:
            return client.count(self._choice.target, count_filter=self._mine, exact=True).count

        return self._of_collection(work, 0)

    def held(self) -> tuple[Ids, Ids]:
        """[n] ids and [n] marks."""
        found = self._of_collection(self._held, list[tuple[int, int]]())
        columns = np.array(found, np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def put(self, ids: Ids, marks: Ids, vectors: FloatArray) -> None:
        """Vectors [n, dim] in place of those with the same ids."""
        payloads = [
            {"index": self._number, "row": row, "mark": mark}
            for row, mark in zip(ids.tolist(), marks.tolist(), strict=True)
        ]
        for start in range(0, len(payloads), _BATCH):
            page = payloads[start : start + _BATCH]
            batch = models.Batch(
                ids=[self._point_id(str(each["row"])) for each in page],
                vectors=vectors[start : start + _BATCH].tolist(),
                payloads=page,
            )
            self._do(partial(self._upsert, batch))

    def remove(self, ids: Ids) -> None:
        """Forget these."""
        for start in range(0, len(ids), _SCROLLED):
            points: list[Any] = [self._point_id(str(row)) for row in ids[start : start + _SCROLLED].tolist()]
            self._of_collection(partial(self._delete, models.PointIdsList(points=points)), None)

    def search(self, vector: FloatArray, count: int) -> Found:
        """The `count` nearest to `vector` [dim]."""

        def work(client: QdrantClient) -> list[Any]:
            return client.query_points(
                self._choice.target,
                query=vector.tolist(),
                query_filter=self._mine,
                limit=count,
                with_payload=["row"],
            ).points

        found = self._of_collection(work, list[Any]())
        scores = np.array([point.score for point in found], np.float32)
        return Found(scores, np.array([point.payload["row"] for point in found], np.int64))

    def drop(self) -> None:
        """Forget all of this index; the collection stays, with what others have there."""

        def work(client: QdrantClient) -> None:
            self._delete(models.PointIdsList(points=[self._state_id]), client)
            self._delete(models.FilterSelector(filter=self._mine), client)

        self._of_collection(work, None)

    def close(self) -> None:
        """Close the client; a folder may be opened by another process then."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # --- inside ---

    def _upsert(self, points: models.Batch | list[models.PointStruct], client: QdrantClient) -> None:
        client.upsert(self._choice.target, points, wait=True)

    def _delete(self, points: models.PointIdsList | models.FilterSelector, client: QdrantClient) -> None:
        client.delete(self._choice.target, points, wait=True)

    def _held(self, client: QdrantClient) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        after: Any = None
        while True:
            page, after = client.scroll(
                self._choice.target, scroll_filter=self._mine, limit=_SCROLLED, offset=after, with_payload=True
            )
            found += [(point.payload["row"], point.payload["mark"]) for point in page if point.payload]
            if after is None:
                return found

    def _make(self, client: QdrantClient) -> None:
        target = self._choice.target
        if client.collection_exists(target):
            made: Any = client.get_collection(target).config.params.vectors
            if (made.size, made.distance) != (self._dim, models.Distance.DOT):
                raise StoreMismatchError(
                    f"{self.name} compares vectors of {made.size} numbers by {made.distance.value}, this index has "
                    f"{self._dim}, compared by {models.Distance.DOT.value}; name another collection or folder"
                )
            return
        client.create_collection(target, models.VectorParams(size=self._dim, distance=models.Distance.DOT))
        if not self._choice.is_local:  # local mode has no such indexes, and says so
            tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
            client.create_payload_index(target, "index", tenant)

    def _point_id(self, name: str) -> str:
        return str(uuid.uuid5(_SPACE, f"{self._number} {name}"))

    def _of_collection(self, work: Callable[[QdrantClient], T], otherwise: T) -> T:
        """What `work` gives, or `otherwise` where there is no collection."""
        if not self._do(lambda client: client.collection_exists(self._choice.target)):
            return otherwise
        return self._do(work)

    def _do(self, work: Callable[[QdrantClient], T]) -> T:
        try:
            return work(self._connected())
        except ResponseHandlingException as error:
            raise BackendUnreachableError(
                f"vectors are in {self.name}, which does not answer: {self._said(error)}. Check the address and "
                "RAGBLEND_VECTORS, which may have the API key; nothing is lost, the index has every vector"
            ) from None
        except ApiException as error:
            raise RagblendError(f"{self.name} refuses: {self._said(error)}") from None

    def _connected(self) -> QdrantClient:
        if self._client is None:
            choice = self._choice
            if not choice.is_local:
                self._client = QdrantClient(
                    choice.address, api_key=choice.key or None, timeout=TIMEOUT_S, check_compatibility=False
                )
                return self._client
            try:
                self._client = QdrantClient(path=choice.address, force_disable_check_same_thread=True)
            except RuntimeError as error:  # its lock is taken
                raise RagblendError(
                    f"{self.name} is open in another process; Qdrant in a folder is for one at a time. Wait, or run a "
                    "Qdrant server: qdrant://HOST:6333/COLLECTION"
                ) from error
            except OSError as error:
                raise RagblendError(f"{self.name} cannot be opened: {error.strerror or error}") from error
        return self._client

    def _said(self, error: Exception) -> str:
        return " ".join(redacted(str(error), echo_of=self._choice.secret).split())[:400]
