"""A machine that holds no copy of an entry knows from a shared catalogue which texts it was computed after."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from ragblend import load_engine
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.store.kv import KVHeader
from ragblend.engine.store.remote.tier import open_remote
from ragblend.ingestion.documents import delete_precomputed
from ragblend.precompute import precompute_documents

NAMES = ("amber", "basalt", "copper", "denim", "ebony", "flint")
TEXTS = [f"The {name} of floor {floor} has {floor + 2} windows of {name}." for name in NAMES for floor in range(4)]


def remote_headers(url: str) -> dict[str, KVHeader]:
    with closing(open_remote(url)) as tier:
        return {key: kv.header for key in tier.keys() if (kv := tier.get(key)) is not None}  # noqa: SIM118


def test_a_removal_on_an_empty_disk_deletes_only_the_variants_that_were_computed_after_the_text(
    tmp_path: Path, shared_catalog: str
) -> None:
    url = f"file://{tmp_path}/remote"
    options: dict[str, Any] = {"catalog": shared_catalog, "remote": url, "context": "similar"}
    with load_engine("demo", tmp_path / "first", **options) as first:
        precompute_documents(TEXTS, first, ids=TEXTS, embedder=HashingEmbedder())
        first.store.flush()
        removed = first.renderer.chunk_ids(TEXTS[0])
    before = remote_headers(url)
    assert len(before) == 2 * len(TEXTS)
    after_removed = {
        key
        for key, header in before.items()
        if header.token_ids == removed or any(part[: len(removed)] == removed for part in header.context_ids)
    }
    assert 2 < len(after_removed) < len(TEXTS)
    with load_engine("demo", tmp_path / "empty", **options) as empty:
        assert delete_precomputed([TEXTS[0]], empty) == 0, "it has no copies"
        empty.store.flush()
    assert remote_headers(url).keys() == before.keys() - after_removed
