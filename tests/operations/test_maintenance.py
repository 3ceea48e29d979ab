"""Repairs of a store whose entries lie in another folder."""

import sqlite3
from contextlib import closing

from ragblend import load_engine
from ragblend.catalog.ledger import open_ledger
from ragblend.engine.store.disk import DiskStore
from ragblend.operations.maintenance import drop_files_that_block_opening, verify_and_quarantine


def test_entries_in_another_folder_are_recorded_after_the_catalogue_was_dropped(tmp_path):
    store, kv_dir = tmp_path / "store", str(tmp_path / "kv")
    with load_engine("demo", store, kv_dir=kv_dir) as engine:
        engine.precompute("Basalt is a volcanic rock.")
    with closing(sqlite3.connect(store / "catalog.sqlite", isolation_level=None)) as file:
        file.execute("PRAGMA writable_schema = 1")
        file.execute("DELETE FROM sqlite_master WHERE name = 'chunks_by_text'")
    report = verify_and_quarantine(store, kv_dir=kv_dir)
    assert list(report.damaged_files) == ["catalog.sqlite"]
    drop_files_that_block_opening(report, store, kv_dir=kv_dir)
    disk = DiskStore(store, kv_dir=kv_dir)
    keys = set(disk.keys())
    assert len(keys) == 1
    with open_ledger(disk) as ledger:
        assert set(ledger.fingerprints_by_key()) == keys
