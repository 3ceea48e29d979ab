"""Gauges of documents and of the catalogue, which a server's front end adds to vLLM's `/metrics`."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import SentDocumentCounts
from ragblend.catalog.sent_documents import SentDocument
from ragblend.errors import BackendUnreachableError
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.server import document_metrics
from ragblend.server.document_metrics import DocumentMetrics
from ragblend.server.limits import MAX_WAITING, MAX_WAITING_CHARS


@pytest.fixture
def seconds(monkeypatch):
    """The clock: a list whose last item is the time."""
    at = [100.0]
    monkeypatch.setattr(document_metrics.time, "monotonic", lambda: at[-1])
    return at


@pytest.fixture
def make(tmp_path):
    """Function that returns metrics over the catalogue in `tmp_path`; they are taken off the ledger afterwards."""
    made: list[DocumentMetrics] = []

    def build(**options: Any) -> DocumentMetrics:
        made.append(DocumentMetrics(tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        for gauge in (each._unreachable, each._documents, each._bytes, each._age_s, *each._limits):
            REGISTRY.unregister(gauge)


def sent(*ids: str) -> list[SentDocument]:
    return [SentDocument("kb", each, "1", {"text": "t" * 100}, {}) for each in ids]


def shown(name: str, **labels: str) -> float | None:
    value = REGISTRY.get_sample_value(f"vllm:ragblend_{name}", labels)
    return None if value is None else float(value)


def test_documents_are_counted_by_namespace(make, seconds, tmp_path):
    metrics, table = make(by_namespace=True), Ledger(tmp_path / CATALOG_FILE)
    metrics.update()
    assert (shown("pending_documents_limit"), shown("pending_bytes_limit")) == (MAX_WAITING, MAX_WAITING_CHARS)
    table.add_sent("acme", sent("a", "b", "c"))
    table.add_sent("globex", sent("a"))
    metrics.update()
    seconds.append(160.0)
    table.add_sent("acme", sent("d"))
    first, second, *_ = table.next_waiting(10, 1 << 20)
    table.record_outcome(first, SentDocumentCounts(), "", is_stored=True)
    table.record_outcome(second, SentDocumentCounts(), "too long", is_stored=False)
    metrics.update()
    for status in ("stored", "failed"):
        assert shown("documents", status=status, store_namespace="acme") == 1
        assert shown("documents", status=status, store_namespace="globex") == 0
    assert shown("documents", status="pending", store_namespace="acme") == 2
    assert 200 < (shown("pending_bytes", store_namespace="acme") or 0) < 300
    assert shown("oldest_pending_seconds", store_namespace="acme") == 60
    (third,) = (each for each in table.next_waiting(10, 1 << 20) if each.id == "c")
    table.record_outcome(third, SentDocumentCounts(), "", is_stored=True)
    table.end_removal("globex", "kb", ["a"])
    seconds.append(170.0)
    metrics.update()
    assert shown("oldest_pending_seconds", store_namespace="acme") == 10  # of "d"
    assert shown("oldest_pending_seconds", store_namespace="globex") is None


def test_without_api_keys_clients_make_no_series(make, tmp_path):
    metrics = make(by_namespace=False)
    metrics.update()
    assert not [*tmp_path.iterdir()], "a deleted store stays deleted"
    table = Ledger(tmp_path / CATALOG_FILE)
    metrics.update()
    assert shown("documents", status="pending", store_namespace="") == 0
    for number in range(20):
        table.add_sent(f"n{number}", sent("a"))
    metrics.update()
    assert shown("documents", status="pending", store_namespace="") == 20
    assert metrics._known == {""}


def test_a_catalogue_that_does_not_answer_is_shown_until_it_does(make, tmp_path, monkeypatch):
    metrics, table = make(by_namespace=True), Ledger(tmp_path / CATALOG_FILE)
    table.add_sent("acme", sent("a"))
    metrics.update()
    calls, backlogs = count(), Ledger.backlogs

    def failing(ledger: Ledger, **options: Any) -> Any:
        if next(calls) == 0:
            raise BackendUnreachableError("the catalogue does not answer")
        return backlogs(ledger, **options)

    monkeypatch.setattr(Ledger, "backlogs", failing)
    for expected in (1, 0):
        metrics.update()
        assert shown("catalog_unreachable") == expected
        assert shown("documents", status="pending", store_namespace="acme") == 1
