"""Gauges of a server's documents and of its catalogue in vLLM's `/metrics`.

    vllm:ragblend_catalog_unreachable                       1 while the catalogue's database does not answer
    vllm:ragblend_documents{status, store_namespace}          stored, pending and failed documents
    vllm:ragblend_pending_bytes{store_namespace}              size of the pending documents
    vllm:ragblend_oldest_pending_seconds{store_namespace}     age of the oldest of them
    vllm:ragblend_pending_documents_limit                   most pending documents of a namespace
    vllm:ragblend_pending_bytes_limit                       most of their characters

A thread reads them from the catalogue, also while no client asks. Replicas with one catalogue report the same counts.
Depends on the catalogue and on Prometheus' client, which vLLM brings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path

from ragblend.catalog.database import resolve_catalog
from ragblend.catalog.ledger import Ledger
from ragblend.errors import RagblendError
from ragblend.server.limits import MAX_WAITING, MAX_WAITING_CHARS

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class DocumentMetrics:
    """Reads the catalogue of the store `root`, or the one at the URL `catalog`, and sets the gauges.

    `by_namespace`: whether each namespace has its own series. If not, all documents have the `store_namespace` "",
    because the clients of a server without API keys may name any number of namespaces.
    """

    def __init__(self, root: Path, catalog: str | None = None, *, by_namespace: bool) -> None:
        from prometheus_client import Gauge

        self._place, self._by_namespace = resolve_catalog(root, catalog), by_namespace
        self._ledger: Ledger | None = None
        self._marks = deque[tuple[float, int]]()  # times, and the highest number of a document at that time
        self._known = set[str]()  # namespaces with series

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            # Front end processes over one catalogue read the same numbers.
            return Gauge(f"vllm:ragblend_{name}", text, labels, multiprocess_mode="mostrecent")

        self._unreachable = gauge("catalog_unreachable", "1 while the catalogue's database does not answer, else 0")
        self._documents = gauge("documents", "Documents that servers were sent", "status", "store_namespace")
        self._bytes = gauge("pending_bytes", "Size of the documents that wait to be stored", "store_namespace")
        self._age_s = gauge("oldest_pending_seconds", "Age of the oldest document that waits", "store_namespace")
        self._limits = [
            gauge("pending_documents_limit", "Most documents of a namespace that may wait; beyond it, clients get 429"),
            gauge("pending_bytes_limit", "Most characters of them"),
        ]
        for limit, most in zip(self._limits, (MAX_WAITING, MAX_WAITING_CHARS), strict=True):
            limit.set(most)

    def start(self) -> None:
        """Start the thread that updates the gauges every few seconds."""
        threading.Thread(target=self._run, name="ragblend-document-metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            start_s = time.monotonic()
            try:
                self.update()
            except Exception:
                log.exception("the metrics of documents are not updated")
            time.sleep(max(_EVERY_S, 10 * (time.monotonic() - start_s)))

    def update(self) -> None:
        """Read the catalogue, and set the gauges. While it does not answer, those of documents stay as they are."""
        if isinstance(self._place, Path) and not self._place.exists():
            return  # a store whose folder was deleted; opening the catalogue would create it
        try:
            if self._ledger is None:
                self._ledger = Ledger(self._place)
            backlogs, highest = self._ledger.backlogs(by_namespace=self._by_namespace)
        except RagblendError as error:
            log.info("the metrics of documents are not updated: %s", error)
            self._unreachable.set(1)
            return
        self._unreachable.set(0)
        now_s = time.monotonic()
        if not self._marks or highest > self._marks[-1][1]:
            self._marks.append((now_s, highest))
        pending = [each.oldest for each in backlogs.values() if each.oldest is not None]
        oldest = min(pending, default=highest)
        while len(self._marks) > 1 and self._marks[0][1] < oldest:
            self._marks.popleft()
        for namespace in self._known - backlogs.keys():
            for status in ("stored", "pending", "failed"):
                self._documents.remove(status, namespace)
            self._bytes.remove(namespace)
            self._age_s.remove(namespace)
        self._known = set(backlogs)
        for namespace, each in backlogs.items():
            counts = {"stored": each.num_stored, "pending": each.num_pending, "failed": each.num_failed}
            for status, count in counts.items():
                self._documents.labels(status, namespace).set(count)
            self._bytes.labels(namespace).set(each.pending_bytes)
            seen_s = next((at_s for at_s, number in self._marks if number >= (each.oldest or 0)), now_s)
            self._age_s.labels(namespace).set(0 if each.oldest is None else now_s - seen_s)
