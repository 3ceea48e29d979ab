from __future__ import annotations

import logging
import shutil

from ragblend.catalog.ledger import open_ledger
from ragblend.engine.load import load_engine
from ragblend.engine.store.open import open_store
from ragblend.operations.maintenance import verify_and_quarantine
from ragblend.precompute import ingest

TEXT = "The Turin office has forty desks and a roof garden."


def test_entries_elsewhere_can_be_lost_and_nothing_else(tmp_path, caplog):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(TEXT)
    place = {"kv_dir": str(tmp_path / "fast"), "dtype": "float32"}

    def bring_in() -> tuple[int, int]:
        with load_engine("demo", tmp_path / "store", **place) as engine:
            report = ingest(tmp_path / "docs", engine, tmp_path / "store", embedder="hashing", context="none")
            return report.num_new_kv, report.num_known_kv

    assert bring_in() == (1, 0)
    assert len(list((tmp_path / "fast").glob("??/*.safetensors"))) == 1
    assert not (tmp_path / "store" / "kv").exists()
    assert bring_in() == (0, 1)
    shutil.rmtree(tmp_path / "fast")
    assert bring_in() == (1, 0)
    with (
        caplog.at_level(logging.WARNING),
        open_ledger(open_store(tmp_path / "store", **{"kv_dir": place["kv_dir"]})) as ledger,
    ):
        assert TEXT in ledger.texts()
    assert not verify_and_quarantine(tmp_path / "store", kv_dir=place["kv_dir"]).has_problems
