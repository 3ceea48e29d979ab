from __future__ import annotations

from ragblend.catalog.ledger import Ledger
from ragblend.catalog.schema import SentDocumentCounts
from ragblend.catalog.sent_documents import SentDocument


def send(table: Ledger, *ids: str, namespace: str = "", text: str = "text") -> str:
    return table.add_sent(namespace, [SentDocument("notes", each, "v1", {"text": text}, {}) for each in ids])[0]


def test_documents_of_a_collection_are_next_in_the_order_of_arrival(kept_place):
    with Ledger(kept_place) as table:
        send(table, "1", "2")
        send(table, "3", namespace="tenant")
        send(table, "1", text="of another version")
        assert [each.id for each in table.next_waiting(10, 1000, after="tenant")] == ["2", "1"]
        assert [each.id for each in table.next_waiting(1, 1000, after="tenant")] == ["2"]
        assert [each.id for each in table.next_waiting(10, 1, after="tenant")] == ["2"], "the first however long it is"
        assert [each.id for each in table.next_waiting(10, 1000, after="")] == ["3"], "the next namespace has its turn"


def test_what_was_sent_again_meanwhile_is_not_finished(kept_place):
    with Ledger(kept_place) as table, Ledger(kept_place) as other:
        send(table, "1")
        (first,) = table.next_waiting(10, 1000)
        send(other, "1")
        table.record_outcome(first, SentDocumentCounts(1), "", is_stored=True)
        assert table.status_counts("", None, None)["notes"]["num_pending"] == 1
        (again,) = other.next_waiting(10, 1000)
        other.record_outcome(again, SentDocumentCounts(2), "", is_stored=True)
        summary = table.status_counts("", "notes", None)["notes"]
        assert (summary["num_stored"], summary["num_waiting"], summary["num_chunks"]) == (1, 0, 2)


def test_a_removed_document_is_neither_waiting_nor_in_the_file(kept_place, tmp_path):
    with Ledger(kept_place) as table:
        send(table, "1", "2", text="a secret")
        table.begin_removal("", "notes", ["1"])
        assert [each.id for each in table.next_waiting(10, 1000)] == ["2"]
        assert [each["id"] for each in table.list_reasons("", None, None, 10)] == ["1"]
        assert table.end_removal("", "notes", ["1", "2", "unknown"]) == 2
        assert table.status_counts("", None, None) == {}
        assert not any(b"a secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_the_next_documents_are_found_without_reading_all_that_wait(tmp_path):
    """A server asks for each batch; a hundred thousand may wait."""
    with Ledger(tmp_path / "catalog.sqlite") as table:
        for namespace in "abc":
            documents = [SentDocument("kb", str(number), "v", {"chunks": ["A."]}, {}) for number in range(3000)]
            table.add_sent(namespace, documents)
        num_steps = 0

        def count() -> int:
            nonlocal num_steps
            num_steps += 100
            return 0

        with table._locked() as connection:
            connection.connection.driver_connection.set_progress_handler(count, 100)
        for after, namespace in (("", "a"), ("a", "b"), ("c", "a")):
            assert {each.namespace for each in table.next_waiting(4, 1000, after=after)} == {namespace}
        assert num_steps < 3000
