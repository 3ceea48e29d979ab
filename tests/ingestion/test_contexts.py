"""A store's context policy: kept, followed by every command, and changed as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from ragblend import Chunk, Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.metadata import CONTEXT_FILE
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.index import open_index
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.documents import remove_indexed_documents
from ragblend.operations.maintenance import collect_garbage, push_store, repair_store, verify_and_quarantine
from ragblend.precompute import ingest, open_engine_index, precompute_documents, precompute_index

TEXTS = {
    "fox": "Bob Fox lives in Norburg and plays the flute.",
    "kern": "Alice Kern works for Nexon and plays the flute.",
    "bell": "James Bell lives in Norburg and plays chess.",
    "moss": "Tara Moss has a job at Nexon, which sells drones.",
}


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def bring_in(docs: Path, engine: TransformersEngine, **options: Any) -> Any:
    return ingest(docs, engine, docs.parent / "kv", **{"chunk_size": 32, "embedder": "hashing", **options})


def neutral(name: str) -> Chunk:
    return Chunk(TEXTS[name], context="neutral")


def test_neutral_variants_are_stored_once_remembered_and_used(docs, opened):
    engine = opened()
    report = bring_in(docs, engine, context="neutral")
    assert (report.num_chunks, report.num_new_kv) == (4, 8)
    again = bring_in(docs, opened())
    assert (again.num_new_kv, again.num_known_kv) == (0, 8)
    header = engine.store.find_tier(DiskStore).header(engine.key(neutral("fox")))
    assert header.prefix_ids == (*engine.default_prefix_ids, *engine.renderer.neutral_ids)
    prompt = Prompt([Chunk(TEXTS[name]) for name in ("fox", "kern", "moss")], "Who plays the flute?")
    report = opened().generate(prompt, max_tokens=1).report
    assert [(chunk.exact, chunk.context) for chunk in report.chunks] == [
        (True, "none"), (False, "neutral"), (False, "neutral"),
    ]  # fmt: skip


def test_chunks_are_stored_alone_unless_the_store_has_another_context(docs, opened, tmp_path):
    prompt = Prompt([TEXTS[name] for name in ("bell", "kern", "moss")], "Who?")

    def contexts_of(engine: TransformersEngine) -> list[str]:
        chunks = engine.generate(prompt, mode="reuse", max_tokens=1).report.chunks
        assert all(chunk.hit for chunk in chunks)
        return [chunk.context for chunk in chunks]

    url = f"file://{tmp_path}/shared"
    first, again = (opened(remote=url, on_miss="inline") for _ in range(2))
    assert (bring_in(docs, first).num_new_kv, first.store.read_context_policy()) == (4, None)
    assert contexts_of(first) == ["none"] * 3
    assert {first.key(text) for text in prompt.chunks} == set(first.likely_keys(prompt.chunks))
    with open_engine_index(docs.parent / "kv", first, create=False) as index:
        assert precompute_index(first, index, context="neutral").num_new_kv == 4
    assert first.store.read_context_policy() == "neutral"
    assert contexts_of(again) == ["none"] * 3, "an engine reads the context when it is loaded"
    assert contexts_of(opened(remote=url, on_miss="inline")) == ["none", "neutral", "neutral"]
    first.store.flush()
    assert contexts_of(opened("empty", remote=url, on_miss="inline")) == ["none"] * 3
    configured = opened("empty", remote=url, on_miss="inline", context="neutral")
    assert contexts_of(configured) == ["none", "neutral", "neutral"]


def test_a_chunk_that_only_fits_without_the_neutral_text_is_stored_alone(docs, opened):
    engine = opened()
    engine.context_length = len(engine.default_prefix_ids) + len(engine.neutral_ids) + 20
    (docs / "long.txt").write_text(" ".join(TEXTS.values()))
    report = bring_in(docs, engine, chunk_size=200, context="neutral")
    assert (report.num_new_kv, report.failures) == (9, [])
    report = precompute_documents([" ".join(TEXTS.values())], engine)
    assert (report.num_new_kv, report.num_known_kv, report.failures) == (0, 1, [])


def test_a_frameworks_text_has_two_variants_or_one_under_none(docs, opened):
    engine = opened()
    engine.set_context_policy("neutral")
    assert precompute_documents([TEXTS["kern"]], engine).num_new_kv == 2
    theirs = opened(namespace="theirs")
    precompute_documents([TEXTS["kern"]], theirs)
    bring_in(docs, engine)
    with open_engine_index(docs.parent / "kv", engine, create=False) as index:
        assert precompute_index(engine, index, "none").num_removed_kv == 5
    alone = {*map(engine.key, TEXTS.values()), theirs.key(TEXTS["kern"])}
    assert set(DiskStore(docs.parent / "kv").keys()) == alone


def test_another_context_is_refused_by_ingest_and_set_by_precompute(docs, opened):
    engine = opened()
    bring_in(docs, engine)
    assert engine.store.read_context_policy() is None
    assert bring_in(docs, engine, context="neutral").num_new_kv == 4  # a second version of what is there
    with pytest.raises(UsageError, match="precompute --context none"):
        bring_in(docs, engine, context="none")
    with open_engine_index(docs.parent / "kv", engine, create=False) as index:
        for policy, num_new, num_removed in (("none", 0, 4), ("neutral", 4, 0), ("none", 0, 4)):
            report = precompute_index(engine, index, policy)
            assert (report.num_new_kv, report.num_removed_kv) == (num_new, num_removed)
            wanted = {engine.key(chunk) for chunk in chunk_variants(index.chunks(), policy)}
            assert set(engine.store.keys()) == wanted
            assert (engine.context, engine.store.read_context_policy()) == (policy, policy)


def test_a_removal_deletes_both_variants_in_every_tier_and_no_others(docs, opened, tmp_path):
    with opened(remote=f"file://{tmp_path}/shared") as engine:
        bring_in(docs, engine, context="neutral")
        engine.store.flush()
        remote, disk = engine.store.tiers[-1], engine.store.find_tier(DiskStore)
        disk.delete(engine.key(neutral("fox")))  # as if it was evicted here
        with open_engine_index(tmp_path / "kv", engine, create=False) as index:
            remove_indexed_documents([str(docs / "fox.txt")], engine, index)
        kept = [Chunk(text) for name, text in TEXTS.items() if name != "fox"]
        for tier in (disk, remote):
            assert set(tier.keys()) == {engine.key(variant) for variant in chunk_variants(kept, "neutral")}
        (docs / "fox.txt").unlink()
        assert bring_in(docs, engine).num_new_kv == 0


def test_in_memory_alone_it_is_the_same(docs):
    with load_engine("demo") as engine:
        bring_in(docs, engine, context="neutral")
        assert len(list(engine.store.keys())) == 8
        (docs / "fox.txt").unlink()
        bring_in(docs, engine)
        kept = [Chunk(text) for name, text in TEXTS.items() if name != "fox"]
        assert set(engine.store.keys()) == {engine.key(variant) for variant in chunk_variants(kept, "neutral")}


def test_a_document_that_is_removed_while_it_is_prefilled_leaves_nothing(docs, opened, tmp_path, monkeypatch):
    engine, original = opened(), TransformersEngine._prefill_chunks
    index = tmp_path / "kv"
    bring_in(docs, engine)

    def removed_meanwhile(self, context, chunks):
        made = original(self, context, chunks)
        if context == "neutral":  # another process, which does not see what is not stored yet
            with opened() as other, open_engine_index(index, other, create=False) as found:
                if str(docs / "fox.txt") in found.sources():
                    remove_indexed_documents([str(docs / "fox.txt")], other, found)
        return made

    monkeypatch.setattr(TransformersEngine, "_prefill_chunks", removed_meanwhile)
    with open_engine_index(index, engine, create=False) as ours:
        precompute_index(engine, ours, "neutral")
    left = {header.key for header in DiskStore(tmp_path / "kv").headers()}
    kept = [Chunk(text) for name, text in TEXTS.items() if name != "fox"]
    assert left == {engine.key(variant) for variant in chunk_variants(kept, "neutral")}


def test_upkeep_works_on_neutral_variants(docs, opened, tmp_path):
    url = f"file://{tmp_path}/shared"
    with opened() as engine:
        bring_in(docs, engine, context="neutral")
        keys = {name: engine.key(neutral(name)) for name in TEXTS}
    store = tmp_path / "kv"
    assert push_store(store, open_remote(url)).num_sent == 8
    before = {path.name: path.read_bytes() for path in store.glob("kv/??/*")}
    place = next(store.glob(f"kv/??/{keys['bell']}*"))
    place.write_bytes(place.read_bytes()[:-1] + b"?")
    report = verify_and_quarantine(store)
    assert (list(report.damaged), report.orphans, report.num_without_kv) == ([keys["bell"]], 0, 0)
    with opened() as engine, open_engine_index(store, engine, create=False) as found:
        assert repair_store(report, engine, found) == 1
    assert {path.name: path.read_bytes() for path in store.glob("kv/??/*")} == before
    with opened(kv_dtype="int8") as engine, open_engine_index(store, engine, create=False) as found:
        assert precompute_index(engine, found, rewrite=True).num_rewritten_kv == 8
    assert {header.stored_dtype for header in DiskStore(store).headers()} == {"int8"}
    with opened() as engine, open_engine_index(store, engine, create=False) as found:
        assert precompute_index(engine, found, rewrite=True).num_rewritten_kv == 8
    assert {header.stored_dtype for header in DiskStore(store).headers()} == {"float32"}
    with open_index(store) as found:  # forgotten by the index alone, as a crash would leave it
        found.remove_document(str(docs / "fox.txt"))
    collect_garbage(store, orphans=True)
    assert {name for name, key in keys.items() if DiskStore(store).has_file(key)} == {"kern", "bell", "moss"}


def test_repair_counts_again(docs, opened, tmp_path):
    with opened() as engine:
        bring_in(docs, engine)
        engine.forget(Chunk(TEXTS["fox"]))
        (report := verify_and_quarantine(tmp_path / "kv")).damaged["a"] = "a"
        assert report.num_without_kv == 1
        with open_engine_index(tmp_path / "kv", engine, create=False) as index:
            assert repair_store(report, engine, index) == 1
        assert report.num_without_kv == 0


def test_a_damaged_note_is_named_and_dropped_by_verify(docs, opened, tmp_path, capsys):
    with opened() as engine:
        bring_in(docs, engine, context="neutral")
    note = tmp_path / "kv" / CONTEXT_FILE
    note.write_bytes(note.read_bytes()[:-9])
    place = ("--store", str(tmp_path / "kv"))
    assert run_command("ask", "Who plays the flute?", *place) == 4
    assert "ragblend precompute --context" in capsys.readouterr().err
    assert run_command("verify", *place, "--json") == 4
    assert list(json.loads(capsys.readouterr().out)["damaged_files"]) == [CONTEXT_FILE]
    assert run_command("verify", "--repair", *place) == 0
    assert not note.exists()
    assert run_command("precompute", "--context", "neutral", *place) == 0
    assert DiskStore(tmp_path / "kv").read_context_policy() == "neutral"
