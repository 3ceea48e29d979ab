"""Chunks that frameworks bring into a store that keeps similar versions: found, used, and gone with what they saw."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from servers import RedisServer, wait_until
from similar_texts import TEXTS, texts_behind

from ragblend import BlendLLM, Chunk, Prompt, load_engine, open_index, precompute
from ragblend.catalog.database import delete_catalog_files
from ragblend.catalog.registry import open_registry
from ragblend.catalog.schema import DocumentKey
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import KVHeader, load_into_memory
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.ingestion import registered_similar
from ragblend.ingestion.documents import delete_precomputed
from ragblend.llamaindex import BlendIngestion, delete_ref_doc
from ragblend.precompute import precompute_documents, precompute_index
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore

FOX, KERN, BELL, MOSS = ALL = tuple(TEXTS.values())


@pytest.fixture(autouse=True)
def by_words(monkeypatch):
    """Use an embedder that does not depend on the installed extras."""
    monkeypatch.setattr(registered_similar, "_default_embedder", HashingEmbedder)


@pytest.fixture
def opened(opened):
    """`opened`, in the context "similar"."""
    return lambda **options: opened(**{"context": "similar", **options})


def similar(text: str) -> Chunk:
    return Chunk(text, context="similar")


def seen_by(engine: TransformersEngine, text: str) -> set[str] | None:
    """Which of ALL the similar version of `text` was computed behind; None without one."""
    header = engine.store.find_tier(DiskStore).header(engine.key(similar(text)))
    return None if header is None else texts_in(engine, header)


def texts_in(engine: TransformersEngine, header: KVHeader) -> set[str]:
    return {TEXTS[name] for name in texts_behind(engine, header)}


def is_left(engine: TransformersEngine, text: str, store: Any = None) -> bool:
    """True if an entry of `store`, by default the disk, is of `text` or was computed behind it."""
    store, own = store or engine.store.find_tier(DiskStore), engine.renderer.chunk_ids(text)
    headers = [store.get(key).header for key in list(store.keys())]
    return any(text in texts_in(engine, header) or header.token_ids == own for header in headers)


def test_chunks_are_stored_alone_and_behind_those_like_them_and_prompts_use_both(opened):
    engine = opened()
    report = precompute_documents(ALL, engine)
    assert (report.num_chunks, report.num_new_kv) == (4, 8)
    assert seen_by(engine, FOX) == {KERN, BELL}  # those with most words in common, and never itself
    assert precompute_documents(ALL, engine).num_new_kv == 0
    answer = opened(context=None).generate(Prompt([MOSS, FOX, KERN], "Who plays?"), max_tokens=1)
    assert [chunk.context for chunk in answer.report.chunks] == ["none", "similar", "similar"]


def test_unless_told_otherwise_a_deep_model_keeps_similar_variants_of_what_frameworks_bring(deep_model, tmp_path):
    llm = BlendLLM(model=deep_model, store=str(tmp_path / "kv"))
    assert precompute_documents([Document(text) for text in ALL], llm).num_new_kv == 8
    llm.engine.close()
    with load_engine(deep_model, tmp_path / "alone", context="none") as engine:
        assert precompute_documents(ALL, engine).num_new_kv == 4


def test_chunks_that_came_alone_get_a_similar_version_when_others_are_there(opened):
    engine = opened()
    assert precompute_documents([FOX], engine).num_new_kv == 1
    assert seen_by(engine, FOX) is None
    report = precompute_documents([BELL], opened())
    assert (report.num_chunks, report.num_new_kv) == (1, 3)
    assert (seen_by(engine, FOX), seen_by(engine, BELL)) == ({BELL}, {FOX})


def langchain_store(engine: TransformersEngine) -> BlendVectorStore:
    store = BlendVectorStore(InMemoryVectorStore(BlendEmbeddings("hashing")), llm=engine)
    store.add_documents([Document(text, id=text) for text in ALL])
    return store


def in_langchain(engine: TransformersEngine) -> Callable[[str], object]:
    store = langchain_store(engine)
    return lambda text: store.delete([text])


def in_langchain_replaced(engine: TransformersEngine) -> Callable[[str], object]:
    store = langchain_store(engine)
    return lambda text: store.add_documents([Document("Another text replaces all of it.", id=text)])


def in_llamaindex(engine: TransformersEngine) -> Callable[[str], object]:
    source = NodeRelationship.SOURCE
    nodes = [TextNode(text=text, relationships={source: RelatedNodeInfo(node_id=text)}) for text in ALL]
    index = VectorStoreIndex(BlendIngestion(llm=engine)(nodes), embed_model=MockEmbedding(embed_dim=8))
    return lambda text: delete_ref_doc(index, text, engine)


def by_name(engine: TransformersEngine) -> Callable[[str], object]:
    precompute_documents(ALL, engine, ids=ALL)
    return lambda text: precompute_documents(["Another text."], engine, ids=[text])


@pytest.mark.parametrize("brought", [in_langchain, in_langchain_replaced, in_llamaindex, by_name])
def test_whatever_was_computed_behind_a_removed_chunk_goes_with_it_and_is_computed_again_behind_others(
    opened, tmp_path, brought
):
    url = f"file://{tmp_path}/shared"
    engine = opened(remote=url)
    remove = brought(engine)
    engine.store.flush()
    assert BELL in (seen_by(engine, FOX) or ())
    remove(BELL)
    engine.store.flush()
    for tier in engine.store.tiers:
        assert not is_left(engine, BELL, tier), tier
    assert not any(each.text == BELL for _, each in open_registry(engine.store).variants_after(0, "hashing 1"))
    precompute_documents(["One more."], engine)
    assert seen_by(engine, FOX) is not None, "it was computed again, behind what is left"
    assert BELL not in seen_by(engine, FOX)


def test_a_chunk_that_is_removed_while_others_are_computed_behind_it_leaves_nothing(opened, monkeypatch):
    engine, other = opened(), opened()
    first: list[str] = []

    def precompute(chunk: Any, compute: Callable[..., int] = engine.precompute) -> int:
        if chunk.context == "similar" and BELL in chunk.context_texts and not first:
            first.append(chunk.text)
            delete_precomputed([BELL], other)  # from another process, before this one is stored
        return compute(chunk)

    monkeypatch.setattr(engine, "precompute", precompute)
    monkeypatch.setattr(engine, "precompute_all", lambda chunks: map(engine.precompute, chunks))
    precompute_documents(ALL, engine, ids=ALL)
    assert first
    assert not is_left(engine, BELL)


def test_a_chunk_that_is_removed_while_its_missing_variant_is_computed_leaves_nothing(opened, monkeypatch):
    engine, other = opened(), opened()
    precompute_documents(ALL, engine, ids=ALL)
    delete_precomputed([KERN], engine)
    with open_registry(engine.store) as registry:
        finder = registered_similar.open_registered_finder(engine, registry)
        missing = [chunk.text for chunk in finder.find_missing_variants()]
    assert FOX in missing

    def precompute(chunk: Any, compute: Callable[..., int] = engine.precompute) -> int:
        if chunk.text == FOX:
            delete_precomputed([FOX], other)  # by another process, which could not find what is not stored
        return compute(chunk)

    monkeypatch.setattr(engine, "precompute", precompute)
    monkeypatch.setattr(engine, "precompute_all", lambda chunks: map(engine.precompute, chunks))
    precompute_documents(["One more."], engine, ids=["more"])
    assert not is_left(engine, FOX)
    assert engine.known_chunks.find_runs(engine.renderer.chunk_ids(FOX)) == []
    assert engine.known_chunks.find_runs(engine.renderer.chunk_ids(MOSS)), "the others are still known"


def test_a_text_that_another_document_gets_while_it_is_removed_keeps_its_entries(opened, monkeypatch):
    engine, other = opened(), opened()
    precompute_documents(ALL, engine, ids=ALL)
    adding: list[threading.Thread] = []

    def delete_local(key: str, delete: Callable[[str], bool] = engine.store.delete_local) -> bool:
        found = delete(key)
        if not adding and key == engine.key(FOX):
            adding.append(threading.Thread(target=precompute_documents, args=([FOX], other), kwargs={"ids": ["copy"]}))
            adding[0].start()
            adding[0].join(1.0)  # it may have to wait for this removal
        return found

    monkeypatch.setattr(engine.store, "delete_local", delete_local)
    delete_precomputed([FOX], engine)
    (thread,) = adding
    thread.join(60)
    assert FOX in open_registry(engine.store)
    assert engine.is_stored(FOX)
    assert seen_by(engine, FOX) is not None


def test_a_killed_removal_is_finished_by_the_next_call(opened, monkeypatch):
    engine = opened()
    precompute_documents(ALL, engine, ids=ALL)

    def killed(key: str) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "delete_local", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_precomputed([BELL], engine)
    for text in ("One more.", "And another."):  # the first call deletes what was left
        precompute_documents([text], engine, ids=[text])
    assert not is_left(engine, BELL)
    assert seen_by(engine, FOX) is not None, "it was computed again"


def test_an_outage_of_the_remote_tier_at_the_check_leaves_nothing_computed_behind_a_removed_chunk(
    opened, tmp_path, monkeypatch
):
    """Also on other machines that have fetched it."""
    server = RedisServer(tmp_path)
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    server.start(*durable)
    try:
        engine, other = opened(remote=server.url), opened(remote=server.url)

        def precompute(chunk: Any, compute: Callable[..., int] = engine.precompute) -> int:
            is_behind = chunk.context == "similar" and BELL in chunk.context_texts
            if is_behind and server.process is not None:
                delete_precomputed([BELL], other)
            result = compute(chunk)
            if is_behind and server.process is not None:
                assert engine.store.flush(30)
                server.kill()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(engine, "precompute", precompute)
            patch.setattr(engine, "precompute_all", lambda chunks: map(engine.precompute, chunks))
            precompute_documents(ALL, engine, ids=ALL)
        assert server.process is None
        server.start(*durable)
        wait_until(
            lambda: all(tier.is_available() for tier in engine.store.find_tiers(RemoteStore)), 90, "it is used again"
        )
        for text in ("One more.", "And another."):  # the first call deletes what the outage has left
            precompute_documents([text], engine, ids=[text])
        assert engine.store.flush(30)
        for tier in engine.store.tiers:
            assert not is_left(engine, BELL, tier), tier
        assert seen_by(engine, FOX) is not None, "it was computed again"
    finally:
        server.kill()


def test_what_an_interrupted_call_computed_behind_a_chunk_removed_since_is_computed_again(opened, monkeypatch):
    engine = opened()
    precompute_documents([FOX, KERN], engine, ids=["fox", "kern"])

    def interrupted(chunks: Any, *_: Any) -> None:
        raise KeyboardInterrupt  # a killed process checks nothing

    with monkeypatch.context() as patch:
        patch.setattr(precompute, "delete_stale_kv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            precompute_documents([BELL], engine, ids=["bell"])
    late = load_into_memory(engine.store.get(engine.key(similar(BELL))))
    delete_precomputed(["kern"], engine)
    engine.store.put(late)  # the removal came between the choice of the similar chunks and the write
    assert KERN in (seen_by(engine, BELL) or ())
    precompute_documents([BELL], engine, ids=["bell"])
    assert seen_by(engine, BELL) == {FOX}


def test_a_removed_chunk_leaves_nothing_of_another_prefix_or_an_earlier_version(opened):
    """Entries that this engine has no key for are found by the records of what they hold, or by reading them once."""
    engine, other = opened(), opened(system="Answer briefly.", namespace="")
    precompute_documents(ALL, other, ids=ALL)
    precompute_documents(ALL, engine, ids=ALL)
    before = {header.key for header in engine.store.find_tier(DiskStore).headers()}
    assert is_left(engine, BELL)
    with open_registry(engine.store) as registry, registry._write() as connection:
        connection.exec_driver_sql("DELETE FROM entry_chunks")  # as in a new catalogue of an old folder
    assert delete_precomputed([BELL], engine) > 4
    assert not is_left(engine, BELL)
    assert delete_precomputed([MOSS], engine) >= 2, "all entries are recorded now"
    assert 0 < len(list(engine.store.find_tier(DiskStore).headers())) < len(before)
    assert not is_left(engine, MOSS)
    with open_registry(engine.store) as registry:
        assert registry.entries_of_chunks([engine.renderer.chunk_ids(text) for text in (BELL, MOSS)], "") == [[], []]


def test_removing_one_chunk_reads_no_other_entry(opened, monkeypatch):
    engine = opened()
    precompute_documents(ALL, engine, ids=ALL)
    delete_precomputed([MOSS], engine)  # the first removal records what the folder has
    monkeypatch.setattr(DiskStore, "headers", lambda store: pytest.fail("all entries were read"))
    assert delete_precomputed([BELL], engine) > 1
    monkeypatch.undo()
    assert not is_left(engine, BELL)


def test_a_store_that_keeps_chunks_alone_from_now_on_drops_their_similar_variants(opened, tmp_path):
    engine = opened()
    precompute_documents(ALL, engine)
    with open_index(tmp_path / "index", HashingEmbedder(), create=True) as index:
        assert precompute_index(engine, index, "none").num_removed_kv == 4
        assert [seen_by(engine, text) for text in ALL] == [None] * 4
        assert precompute_documents(ALL, opened(context=None)).num_new_kv == 0
        precompute_index(engine, index, "similar")
    assert precompute_documents([FOX], engine).num_new_kv == 4
    assert seen_by(engine, FOX) == {KERN, BELL}


@pytest.mark.parametrize("blank", ["", " \n", Chunk(""), Chunk("\t"), Document("")], ids=repr)
def test_blank_texts_are_no_chunks_even_where_nothing_else_is_there(opened, blank):
    engine = opened()
    report = precompute_documents([blank], engine)
    assert (report.num_chunks, report.num_new_kv) == (0, 0)
    assert precompute_documents([FOX, blank, KERN], engine).num_new_kv == 4


def test_an_engine_that_keeps_chunks_alone_forgets_what_another_computed_behind_them(opened):
    alone = opened(context="none")
    engine = opened()
    precompute_documents(ALL, engine, ids=ALL)
    assert BELL in (seen_by(engine, FOX) or ())
    delete_precomputed([BELL], alone)
    assert not is_left(engine, BELL)


def test_namespaces_in_one_store_never_see_each_other_chunks(opened):
    mine, yours = opened(namespace="mine"), opened(namespace="yours")
    precompute_documents([FOX, KERN], mine)
    assert precompute_documents([BELL], yours).num_new_kv == 1  # nothing near it that is its own
    precompute_documents([MOSS], yours)
    assert seen_by(yours, BELL) == {MOSS}
    assert seen_by(mine, FOX) == {KERN}


def test_similar_chunks_come_from_the_catalogue_that_replaced_another(opened):
    engine = opened()
    precompute_documents([FOX, BELL], engine)
    delete_catalog_files(engine.store.find_tier(DiskStore).root)
    precompute_documents([KERN, MOSS], engine)
    with open_registry(engine.store) as registry:
        finder = registered_similar.open_registered_finder(engine, registry)
        assert finder.similar_texts(KERN, 3, lambda _: True) == [MOSS]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.sampled_from(["a b", "b c", "c d", "a", "b", "d e f", "f"]), unique=True, min_size=1),
    refused=st.sets(st.sampled_from(["a b", "b c", "c d", "a", "b"])),
    count=st.integers(0, 3),
)
def test_the_nearest_are_found_that_may_stand(texts, refused, count):
    with load_engine("demo", context="similar") as engine, open_registry(engine.store) as registry:
        finder = registered_similar.open_registered_finder(engine, registry)
        assert finder is not None
        registry.add(texts, DocumentKey("notes", "1"))
        finder.request_variants(map(Chunk, texts))
        rows = dict(zip(texts, HashingEmbedder().embed(texts), strict=True))
        for text in texts:
            found = finder.similar_texts(text, count, lambda each: each not in refused)
            allowed = [each for each in texts if each != text and each not in refused]
            assert len(found) == min(count, len(allowed))
            assert set(found) <= set(allowed)
            scores = [float(rows[text] @ rows[each]) for each in found]
            assert scores == sorted(scores, reverse=True)
            left = [float(rows[text] @ rows[each]) for each in allowed if each not in found]
            assert not found or not left or min(scores) >= max(left) - 1e-6
