"""A store's ingestion context: kept, followed by every command, changed as a whole, and gone with what it was of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from similar_texts import TEXTS, texts_behind

from ragblend import Chunk, Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader
from ragblend.engine.store.metadata import CONTEXT_FILE
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.index import open_index
from ragblend.ingestion.contexts import chunk_variants
from ragblend.ingestion.deletion import find_orphaned_keys
from ragblend.ingestion.documents import pin_document, remove_documents
from ragblend.operations.maintenance import collect_garbage, push_store, repair_store, verify_and_quarantine
from ragblend.precompute import ingest, open_engine_index, precompute_chunks, precompute_documents, precompute_index


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def bring_in(docs: Path, engine: TransformersEngine, **options: Any) -> Any:
    return ingest(docs, engine, docs.parent / "kv", **{"chunk_size": 32, "embedder": "hashing", **options})


def similar(name: str) -> Chunk:
    return Chunk(TEXTS[name], context="similar")


def test_similar_variants_are_stored_once_remembered_and_used(docs, opened):
    engine = opened()
    report = bring_in(docs, engine, context="similar")
    assert (report.num_chunks, report.num_new_kv) == (4, 8)
    again = bring_in(docs, opened())
    assert (again.num_new_kv, again.num_known_kv) == (0, 8)
    behind = texts_behind(engine, engine.store.find_tier(DiskStore).header(engine.key(similar("fox"))))
    assert behind == {"kern", "bell"}  # those with most words in common, and never itself
    prompt = Prompt([Chunk(TEXTS[name]) for name in ("fox", "kern", "moss")], "Who plays the flute?")
    report = opened().generate(prompt, max_tokens=1).report
    assert [(chunk.exact, chunk.context) for chunk in report.chunks] == [
        (True, "none"), (False, "similar"), (False, "similar"),
    ]  # fmt: skip


def test_unless_told_otherwise_it_is_similar_for_a_deep_model_and_none_for_a_shallow_one(
    docs, opened, deep_model, tmp_path
):
    prompt = Prompt([TEXTS[name] for name in ("bell", "kern", "moss")], "Who?")

    def contexts_of(engine: TransformersEngine) -> list[str]:
        chunks = engine.generate(prompt, mode="reuse", max_tokens=1).report.chunks
        assert all(chunk.hit for chunk in chunks)
        return [chunk.context for chunk in chunks]

    url = f"file://{tmp_path}/shared"
    with load_engine(deep_model, tmp_path / "deep", remote=url, on_miss="inline") as engine:
        assert bring_in(docs, engine, chunk_size=200).num_new_kv == 8
        assert engine.store.read_context_policy() == "similar"
        assert contexts_of(engine) == ["none", "similar", "similar"]
    with load_engine(deep_model, tmp_path / "replica", remote=url, on_miss="inline") as engine:
        assert contexts_of(engine) == ["none", "similar", "similar"]  # read from the store
    with load_engine(deep_model, tmp_path / "none", context="none", on_miss="inline") as engine:
        assert bring_in(docs, engine, chunk_size=200).num_new_kv == 4
        assert engine.store.read_context_policy() == "none"
    with load_engine(deep_model, tmp_path / "none", on_miss="inline") as engine:
        assert contexts_of(engine) == ["none"] * 3
        assert {engine.key(text) for text in prompt.chunks} == set(engine.likely_keys(prompt.chunks))
        with open_engine_index(docs.parent / "kv", engine, create=False) as index:
            assert precompute_index(engine, index).num_new_kv == 0, "the context none was requested"
            assert precompute_index(engine, index, context="similar").num_new_kv == 4
        assert engine.store.read_context_policy() == "similar"
    with open_index(docs.parent / "kv") as index:
        index.clear()
    engine = opened()
    assert (bring_in(docs, engine).num_new_kv, engine.store.read_context_policy()) == (4, None)


def test_a_chunk_with_nothing_beside_it_stays_alone_and_an_index_is_needed(docs, opened):
    for name in ("kern", "bell", "moss"):
        (docs / f"{name}.txt").unlink()
    engine = opened()
    assert bring_in(docs, engine, context="similar").num_new_kv == 1
    assert bring_in(docs, engine).num_new_kv == 0
    with pytest.raises(UsageError, match="an index finds"):
        precompute_chunks([similar("kern")], engine)
    assert precompute_documents([TEXTS["kern"]], engine).num_new_kv == 1  # as frameworks do: alone


def test_another_context_is_refused_by_ingest_and_set_by_precompute(docs, opened):
    engine = opened()
    bring_in(docs, engine)
    assert engine.store.read_context_policy() is None
    assert bring_in(docs, engine, context="similar").num_new_kv == 4  # a second version of what is there
    with pytest.raises(UsageError, match="precompute --context none"):
        bring_in(docs, engine, context="none")
    with open_engine_index(docs.parent / "kv", engine, create=False) as index:
        pin_document(str(docs / "fox.txt"), engine, index)
        for policy, num_new, num_removed in (("none", 0, 4), ("similar", 4, 0), ("none", 0, 4)):
            report = precompute_index(engine, index, policy)
            assert (report.num_new_kv, report.num_removed_kv) == (num_new, num_removed)
            wanted = {engine.key(chunk) for chunk in chunk_variants(index.chunks(), policy)}
            assert set(engine.store.keys()) == wanted
            pinned = engine.store.find_tier(DiskStore).pins()[str(docs / "fox.txt")]
            assert set(pinned) == {engine.key(chunk) for chunk in chunk_variants([Chunk(TEXTS["fox"])], policy)}
            assert (engine.context, engine.store.read_context_policy()) == (policy, policy)


def test_after_remove_nothing_anywhere_was_computed_behind_the_document(docs, opened, tmp_path):
    url = f"file://{tmp_path}/shared"
    with opened(remote=url) as engine:
        bring_in(docs, engine, context="similar")
        engine.store.flush()
        remote, disk = engine.store.tiers[-1], engine.store.find_tier(DiskStore)
        headers = {name: disk.header(engine.key(similar(name))) for name in TEXTS}
        behind = {name: texts_behind(engine, header) for name, header in headers.items()}
        lost = {name for name, others in behind.items() if "fox" in others}
        kept = set(TEXTS) - lost - {"fox"}
        assert lost == {"kern", "bell"}
        disk.delete(headers["bell"].key)  # evicted here, or stored by another machine, so its header is unknown
        for tier in engine.store.tiers[:1]:
            tier.delete(headers["bell"].key)
        with open_engine_index(tmp_path / "kv", engine, create=False) as index:
            remove_documents([str(docs / "fox.txt")], engine, index)
        for tier in (disk, remote):
            assert set(tier.keys()) == {
                *(engine.key(Chunk(TEXTS[name])) for name in TEXTS if name != "fox"),
                *(engine.key(similar(name)) for name in kept),
            }
        for header in disk.headers():
            assert "fox" not in texts_behind(engine, header)
        (docs / "fox.txt").unlink()
        assert bring_in(docs, engine).num_new_kv == len(lost)
        for name in lost:
            others = texts_behind(engine, disk.header(engine.key(similar(name))))
            assert len(others) == 2
            assert "fox" not in others


def test_in_memory_alone_it_is_the_same(docs):
    with load_engine("demo") as engine:
        bring_in(docs, engine, context="similar")
        assert len(list(engine.store.keys())) == 8
        (docs / "fox.txt").unlink()
        bring_in(docs, engine)
        (memory,) = engine.store.tiers
        assert all("fox" not in texts_behind(engine, header) for header in memory.headers())
        assert len(list(memory.keys())) == 6


def test_a_namespace_is_not_computed_behind_another_ones_chunks(docs, opened, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, names in ((ours, ("kern", "moss")), (theirs, ("fox", "bell"))):
        folder.mkdir()
        for name in names:
            (docs / f"{name}.txt").rename(folder / f"{name}.txt")
    options = {"chunk_size": 32, "embedder": "hashing", "context": "similar"}
    with open_engine_index(tmp_path / "kv", opened(namespace="them"), "hashing") as index:  # one index, two tenants
        for folder, namespace in ((theirs, "them"), (ours, "us")):
            ingest(folder, opened(namespace=namespace), index, **options)
    engine = opened(namespace="us")
    behind = [
        texts_behind(engine, header) for header in DiskStore(tmp_path / "kv").headers() if header.namespace == "us"
    ]
    assert sorted(map(sorted, behind)) == [[], [], ["kern"], ["moss"]]


def test_a_document_that_goes_while_others_are_computed_behind_it_leaves_nothing(docs, opened, tmp_path, monkeypatch):
    engine, original = opened(), TransformersEngine._prefill_chunks
    index = tmp_path / "kv"
    bring_in(docs, engine)

    def removed_meanwhile(self, chunks, behind):
        made = original(self, chunks, behind)
        if behind.policy == "similar":  # another process, which does not see what is not stored yet
            with opened() as other, open_engine_index(index, other, create=False) as found:
                if str(docs / "fox.txt") in found.sources():
                    remove_documents([str(docs / "fox.txt")], other, found)
        return made

    monkeypatch.setattr(TransformersEngine, "_prefill_chunks", removed_meanwhile)
    with open_engine_index(index, engine, create=False) as ours:
        precompute_index(engine, ours, "similar")
    left = {header.key: texts_behind(engine, header) for header in DiskStore(tmp_path / "kv").headers()}
    assert not any("fox" in behind for behind in left.values())
    assert engine.key(similar("moss")) in left


@pytest.mark.parametrize(("gone", "is_orphaned"), [((5, 6), True), ((7,), True), ((9,), True), ((8,), False)])
def test_what_stands_between_two_chunks_belongs_to_neither_where_an_entry_is_looked_for(gone, is_orphaned):
    header = KVHeader("key", "model", (1, 5, 6, 0, 7, 0), (9,), 1, "float32", context=(3, 2))
    assert list(find_orphaned_keys([header], {gone: "why"}.get, separator_ids=(0,))) == [("key", "why")] * is_orphaned


def test_upkeep_works_on_similar_variants(docs, opened, tmp_path):
    url = f"file://{tmp_path}/shared"
    with opened() as engine:
        bring_in(docs, engine, context="similar")
        keys = {name: engine.key(similar(name)) for name in TEXTS}
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
    assert {key for key in keys.values() if DiskStore(store).has_file(key)} == {keys["moss"]}


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
        bring_in(docs, engine, context="similar")
    note = tmp_path / "kv" / CONTEXT_FILE
    note.write_bytes(note.read_bytes()[:-9])
    place = ("--store", str(tmp_path / "kv"))
    assert run_command("ask", "Who plays the flute?", *place) == 4
    assert "ragblend precompute --context" in capsys.readouterr().err
    assert run_command("verify", *place, "--json") == 4
    assert list(json.loads(capsys.readouterr().out)["damaged_files"]) == [CONTEXT_FILE]
    assert run_command("verify", "--repair", *place) == 0
    assert not note.exists()
    assert run_command("precompute", "--context", "similar", *place) == 0
    assert DiskStore(tmp_path / "kv").read_context_policy() == "similar"
