"""What the connector's tiers report to `/metrics`. Needs no vLLM."""

from __future__ import annotations

import logging
import shutil

import pytest

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.vllm.metric_sources import TierMetrics


def listed(metrics: TierMetrics) -> dict[str, float]:
    """The series that change with the next listing of the disk."""
    metrics._due_s = 0.0
    found = metrics.take_changes()
    metrics._listing.join()
    return found | metrics.take_changes()


@pytest.mark.parametrize("has_notes", [False, True])
def test_a_store_that_is_deleted_under_the_server_is_logged_and_counted(tmp_path, caplog, has_notes):
    disk = DiskStore(tmp_path / "kv", fsync=False)
    if has_notes:
        disk.put_model("fingerprint", {"model": "m"})
    caplog.set_level(logging.WARNING)
    metrics, of_another = (TierMetrics(TieredStore(disk), shows_bytes=shows) for shows in (True, False))
    assert listed(metrics)["store_missing"] == 0
    assert "store_missing" not in listed(metrics)
    assert not caplog.text
    shutil.move(disk.root, tmp_path / "elsewhere")
    if has_notes:
        (disk.root / "ab").mkdir(parents=True)  # what a chunk that is stored leaves
    assert listed(metrics)["store_missing"] == 1
    assert "store_missing" not in listed(metrics) | of_another.take_changes()
    assert caplog.text.count(f"the store {disk.root} was deleted") == 1
    shutil.rmtree(disk.root, ignore_errors=True)
    shutil.move(tmp_path / "elsewhere", disk.root)
    assert listed(metrics)["store_missing"] == 0
    assert caplog.text.count("was restored") == 1
