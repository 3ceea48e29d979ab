"""Programs over one remote tier: what one removes leaves the disks of the others, also after an outage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from servers import wait_until

from ragblend import load_engine
from ragblend.catalog.ledger import Ledger, open_ledger
from ragblend.engine.deletions import schedule_deletions
from ragblend.engine.store import tombstones
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import load_into_memory
from ragblend.errors import BackendUnreachableError
from ragblend.ingestion.deletion import delete_stale_kv
from ragblend.ingestion.documents import delete_precomputed
from ragblend.operations.maintenance import verify_and_quarantine
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Chunk

TEXTS = {
    "a": "The fox lives in the old harbour.",
    "b": "Alice Kern plays the flute.",
    "c": "James Bell sells drones.",
}


@pytest.fixture
def program(tmp_path):
    """`program(name, **options)`: an engine over the folder `name` and the remote tier that all share."""
    with ExitStack() as stack:
        yield lambda name, **options: stack.enter_context(
            load_engine("demo", tmp_path / name, **{"remote": f"file://{tmp_path}/remote", "context": "none"} | options)
        )


def store(engine: Any, **texts: str) -> None:
    """Store documents, and copy to the engine's disk what another machine has computed."""
    precompute_documents([*texts.values()], engine, ids=[*texts])
    engine.store.fetch_from_remote([engine.key(Chunk(text)) for text in texts.values()])
    assert engine.store.flush(30)


@contextmanager
def outage(engine: Any) -> Iterator[None]:
    """Context in which the engine's remote tier does not delete. Removing the document `a` has failed in it."""

    def delete(name: str) -> bool:
        raise BackendUnreachableError("it is down")

    with pytest.MonkeyPatch.context() as down:
        down.setattr(engine.store.tiers[-1].values, "delete", delete)
        with pytest.raises(BackendUnreachableError, match="it is down"):
            delete_precomputed(["a"], engine)
        yield


def on_disk(engine: Any) -> set[str]:
    """The names in TEXTS whose KV is on the disk of an engine."""
    keys = set(DiskStore(engine.store.find_tier(DiskStore).root).keys())
    return {name for name, text in TEXTS.items() if engine.key(Chunk(text)) in keys}


def in_remote(engine: Any) -> set[str]:
    return {name for name, text in TEXTS.items() if engine.store.tiers[-1].contains(engine.key(Chunk(text)))}


def test_a_removal_reaches_running_and_later_programs(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tombstones, "POLL_INTERVAL_S", 0.1)
    one, running, ended = (program(name) for name in ("one", "running", "ended"))
    for engine in (one, running, ended):
        store(engine, **TEXTS)
    ended.close()
    delete_precomputed(["a"], one)
    store(one, b="Alice Kern plays the piano.")
    wait_until(lambda: on_disk(running) == {"c"}, 60, "the running program has deleted them")
    assert on_disk(ended) == {"a", "b", "c"}
    wait_until(lambda: on_disk(program("ended")) == {"c"}, 60, "the next program deletes them")
    assert in_remote(one) == on_disk(one) == {"c"}
    assert not verify_and_quarantine(tmp_path / "running").has_problems
    store(running, **TEXTS)  # its own documents
    for engine in (one, running):
        engine.store.apply_deletions()
    assert on_disk(running) == in_remote(one) == {"a", "b", "c"}


def test_a_removal_during_an_outage_is_completed_by_the_next_call(program):
    one, two = program("one"), program("two")
    for engine in (one, two):
        store(engine, **TEXTS)
    with outage(one):
        with pytest.raises(BackendUnreachableError, match="it is down"):
            delete_precomputed(["a"], one)
        store(one, b="Alice Kern plays the piano.")
        assert (on_disk(one), in_remote(one)) == ({"c"}, {"a", "b", "c"})
    store(two, b="Alice Kern plays the piano.")  # which is a document of another catalogue
    delete_precomputed(["a"], one)
    two.store.apply_deletions()
    assert in_remote(one) == on_disk(one) == on_disk(two) == {"c"}


def test_the_removal_of_one_text_leaves_the_variants_of_the_others_everywhere(program):
    """Both have all documents, each in its own catalogue. One computes the variants, and the other fetches them."""
    one, two = (program(name, context="neutral") for name in ("one", "two"))
    for engine in (one, two):
        store(engine, **TEXTS)
        assert engine.store.flush(30)
    variants = [two.key(Chunk(text, context="neutral")) for text in TEXTS.values()]
    two.store.fetch_from_remote(variants)
    assert two.store.flush(30)
    delete_precomputed(["a"], one)
    two.store.apply_deletions()
    for engine in (one, two):
        assert [engine.store.contains(key) for key in variants] == [False, True, True]


def test_a_text_added_again_during_an_outage_stays_after_it(program):
    one, two = program("one"), program("two")
    for engine in (one, two):
        store(engine, **TEXTS)
    with outage(one):
        assert on_disk(one) == {"b", "c"}
        store(one, a=TEXTS["a"])
    delete_precomputed(["b"], one)
    two.store.apply_deletions()
    assert in_remote(one) == on_disk(one) == on_disk(two) == {"a", "c"}


def test_deletions_recorded_before_a_kill_are_run_by_the_next_removal(program):
    one, two = program("one"), program("two")
    for engine in (one, two):
        store(engine, **TEXTS)
    with open_ledger(one.store) as ledger:
        schedule_deletions({one.key(Chunk(TEXTS["a"])): ""}, one.store, ledger)
    assert on_disk(one) == {"a", "b", "c"}
    delete_precomputed(["b"], one)
    two.store.apply_deletions()
    assert in_remote(one) == on_disk(one) == on_disk(two) == {"c"}


def test_an_upload_after_a_removal_is_never_found_and_deleted_next(program):
    one = program("one")
    store(one, **TEXTS)
    kv = one.store.get(one.key(Chunk(TEXTS["a"])))
    kept = load_into_memory(kv)
    delete_precomputed(["a"], one)
    one.store.tiers[-1].put(kept)  # as by a process that is killed before it reads the tombstone
    assert (TEXTS["a"] in one.known_chunks, in_remote(one)) == (False, {"a", "b", "c"})
    store(one, again=TEXTS["a"])
    delete_precomputed(["again"], one)
    assert in_remote(one) == on_disk(one) == {"b", "c"}


def test_a_text_added_before_its_tombstone_is_read_is_prefilled_again(program):
    one, two = program("one"), program("two")
    for engine in (one, two):
        store(engine, **TEXTS)
    delete_precomputed(["a"], one)
    with pytest.MonkeyPatch.context() as down:
        down.setattr(two.store, "apply_deletions", lambda: None)  # as while the remote tier does not answer
        precompute_documents([TEXTS["a"]], two, ids=["again"])
        assert on_disk(two) == {"a", "b", "c"}
    two.store.apply_deletions()
    assert on_disk(two) == {"b", "c"}
    store(two, again=TEXTS["a"])
    two.store.apply_deletions()
    assert on_disk(two) == {"a", "b", "c"}


def test_a_text_added_again_stays_while_its_stale_kv_is_deleted(program, monkeypatch):
    one, other = program("one"), program("one")
    store(one, **TEXTS)
    delete_precomputed(["a"], other)
    original, added = Ledger.find_unowned_texts, list[str]()

    def added_in_the_meantime(ledger, texts, namespace):
        unowned = original(ledger, texts, namespace)
        if unowned and not added:
            added.extend(unowned)
            store(other, again=TEXTS["a"])
        return unowned

    monkeypatch.setattr(Ledger, "find_unowned_texts", added_in_the_meantime)
    with open_ledger(one.store) as ledger:
        assert delete_stale_kv([Chunk(TEXTS["a"])], one, ledger) == 0
    assert added == [TEXTS["a"]]
    assert TEXTS["a"] in other.known_chunks
    assert on_disk(one) == {"a", "b", "c"}
