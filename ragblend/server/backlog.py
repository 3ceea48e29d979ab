"""Bound on the documents of a namespace that wait to be stored, so that one client does not fill the disk of all."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from ragblend.catalog.sent_documents import SentDocument, SentDocumentTable
from ragblend.errors import BacklogFullError

MAX_WAITING, MAX_WAITING_CHARS = 100_000, 256 << 20  # documents of a namespace that wait, and their characters
RETRY_AFTER_S = 10  # seconds after which a client whose namespace has as many sends more


class Backlog:
    """Counts of the documents in `table` that wait, by namespace. Thread-safe."""

    def __init__(self, table: SentDocumentTable) -> None:
        self._table = table
        self._counts: dict[str, tuple[float, int, int]] = {}  # time of the count, documents, characters
        self._lock = threading.Lock()

    def add(self, namespace: str, documents: Sequence[SentDocument]) -> None:
        """Count documents that are sent now.

        Raises BacklogFullError if then more than MAX_WAITING documents of the namespace, or MAX_WAITING_CHARS, would
        wait. A namespace without waiting documents may send as many as fit into one request. The documents in the
        table are counted at most once in RETRY_AFTER_S / 2 seconds, because the database reads them for that.
        """
        with self._lock:
            now_s = time.monotonic()
            counted_s, num_documents, num_chars = self._counts.get(namespace, (-math.inf, 0, 0))
            if now_s - counted_s > RETRY_AFTER_S / 2:
                counted_s, (num_documents, num_chars) = now_s, self._table.count_waiting(namespace)
            new_chars = sum(len(str(document.body)) for document in documents)
            is_full = num_documents + len(documents) > MAX_WAITING or num_chars + new_chars > MAX_WAITING_CHARS
            if num_documents and is_full:
                self._counts[namespace] = counted_s, num_documents, num_chars
                raise BacklogFullError(
                    f"{num_documents} documents of this namespace, of {num_chars} characters, wait to be stored; at "
                    f"most {MAX_WAITING}, of {MAX_WAITING_CHARS} characters, may. Send more in {RETRY_AFTER_S} seconds"
                )
            self._counts[namespace] = counted_s, num_documents + len(documents), num_chars + new_chars
