"""KV that was computed behind a chunk goes with that chunk, also where a blank line stands between the two."""

from __future__ import annotations

from pathlib import Path

from ragblend import Chunk, load_engine, open_index
from ragblend.engine.store.disk import DiskStore
from ragblend.operations.maintenance import collect_garbage
from ragblend.precompute import ingest

HEAD = "James Bell works for Nexex in Norburg and plays the flute on Sundays."
TAIL = "He lives in Halford and sells drones to the company that he works for."


def test_what_was_computed_behind_a_text_that_is_gone_is_an_orphan(chat_model_path: Path, tmp_path: Path) -> None:
    store, index, file = tmp_path / "kv", tmp_path / "index", tmp_path / "docs" / "a.txt"
    file.parent.mkdir()
    file.write_text(f"{HEAD}\n\n{TAIL}")
    with load_engine(str(chat_model_path), store, memory_gib=0) as engine:
        assert engine.segmenter.joint_ids
        size = max(engine.segmenter.count_tokens(HEAD), engine.segmenter.count_tokens(TAIL))
        ingest(file, engine, index, chunk_size=size, embedder="hashing", context="neighbour")
        assert len(list(DiskStore(store).keys())) == 3
        with open_index(index) as opened:  # forgotten by the index alone, as a crash or an older version would leave it
            assert [chunk.text for chunk in opened.chunks()] == [HEAD, TAIL]
            opened.remove_document(str(file))
            opened.add_document("other", "1", [Chunk(TAIL, "other")])
        collect_garbage(store, index)
        left = {entry.key for entry in DiskStore(store).entries()}
        assert left == {engine.key(TAIL)}
