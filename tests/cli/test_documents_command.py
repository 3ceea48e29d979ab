"""`ragblend documents` lists every document of a store, and `remove` takes what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CommandRunner
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from servers import RedisServer

from ragblend import ingest, load_engine
from ragblend.catalog.ledger import open_ledger
from ragblend.catalog.schema import text_id
from ragblend.catalog.stored_documents import list_added
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.store.disk import DiskStore
from ragblend.llamaindex import BlendIngestion
from ragblend.precompute import precompute_documents
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore

BASALT, SLATE, CHALK = "Basalt is a volcanic rock.", "Slate splits into thin plates.", "Chalk is a soft limestone."
BOTH = [Document(BASALT, id="b", metadata={"source": "rocks.txt"}), Document(SLATE, metadata={"source": "slate.txt"})]
PLACE = ("--store", "s")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return CommandRunner(capsys)


@pytest.fixture
def forbid_weights(monkeypatch):
    """Return a function after whose call no command can load the weights of a model."""
    return lambda: monkeypatch.setattr("ragblend.engine.transformers.model.load_model", None)


def fill_by_texts(store: str) -> None:
    with load_engine("demo", store) as engine:
        precompute_documents([BASALT, SLATE], engine)


def fill_by_documents(store: str) -> None:
    with load_engine("demo", store) as engine:
        precompute_documents(BOTH, engine, collection="rocks")


def fill_by_llama_index(store: str) -> None:
    with load_engine("demo", store) as engine:
        documents = [LlamaDocument(text=BASALT, id_="b"), LlamaDocument(text=SLATE, metadata={"file_path": "/a/s.txt"})]
        IngestionPipeline(transformations=[SentenceSplitter(), BlendIngestion(llm=engine)]).run(documents=documents)


def fill_folder(store: str) -> None:
    Path("docs").mkdir()
    for name, text in {"b.txt": BASALT, "s.txt": SLATE}.items():
        Path("docs", name).write_text(text)
    with load_engine("demo", store) as engine:
        ingest("docs", engine, store, embedder="hashing")


def fill_index(store: str, *, with_llm: bool = True) -> None:
    embeddings = BlendEmbeddings(HashingEmbedder())
    with load_engine("demo", "s" if with_llm else "unused") as engine:
        llm = engine if with_llm else None
        BlendVectorStore.from_documents(BOTH, embeddings, path=store, llm=llm)


def fill_index_without_llm(store: str) -> None:
    fill_index(store, with_llm=False)


def fill_by_vector_store(store: str) -> None:
    with load_engine("demo", store) as engine:
        inner = InMemoryVectorStore(BlendEmbeddings(HashingEmbedder()))
        BlendVectorStore(inner, llm=engine, collection="in memory").add_documents(BOTH)


def fill_for_a_tenant(store: str) -> None:
    with load_engine("demo", store, namespace="tenant") as engine:
        precompute_documents(BOTH, engine)


FILLERS: list[Callable[[str], None]] = [
    fill_by_texts,
    fill_by_documents,
    fill_by_llama_index,
    fill_folder,
    fill_index,
    fill_index_without_llm,
    fill_by_vector_store,
    fill_for_a_tenant,
]


@pytest.mark.parametrize("fill", FILLERS, ids=lambda each: each.__name__.removeprefix("fill_"))
def test_each_listed_document_of_any_store_can_be_removed_by_its_name(fill, run, forbid_weights):
    fill("s")
    forbid_weights()
    has_kv = fill is not fill_index_without_llm
    facts = run.facts("documents", *PLACE)
    documents = facts["documents"]
    assert (facts["schema_version"], facts["store"], facts["num_kv_without_document"]) == (1, "s", 0)
    assert len({each["collection"] for each in documents}) == 1
    assert [(each["num_chunks"], each["state"]) for each in documents] == [
        (1, "stored" if has_kv else "without_kv")
    ] * 2
    assert sum(each["kv_bytes"] for each in documents) == DiskStore("s").nbytes()
    out = run("documents", *PLACE)[1]
    assert f"collection {documents[0]['collection']}: 2 documents" in out
    garbage = run.facts("gc", "--orphans", *PLACE)
    assert garbage["evicted"] == [], "documents need all"
    first, second = documents
    assert all(each["id"].removeprefix(f"{Path.cwd()}/") in out for each in documents)
    assert run.facts("remove", first["id"], *PLACE)["num_kv"] == has_kv
    assert run.facts("documents", *PLACE)["documents"] == [second]
    name = second["source"] or f"{second['collection']}/{second['id']}"
    assert run.facts("remove", name, *PLACE)["num_kv"] == has_kv
    assert run("documents", *PLACE)[:2] == (0, "no documents\n")
    assert list(DiskStore("s").keys()) == []
    with open_ledger(DiskStore("s")) as ledger:
        assert (list(ledger.texts()), list_added(ledger)) == ([], [])


@pytest.mark.parametrize("fill", FILLERS, ids=lambda each: each.__name__.removeprefix("fill_"))
@pytest.mark.slow
def test_a_collection_is_removed_as_a_whole(fill, run, forbid_weights):
    fill("s")
    forbid_weights()
    (collection,) = {each["collection"] for each in run.facts("documents", *PLACE)["documents"]}
    assert run.facts("remove", collection, *PLACE)["num_chunks"] == 2
    assert run.facts("documents", *PLACE)["documents"] == []


def test_a_text_is_removed_by_a_file_that_holds_it(run, forbid_weights):
    with load_engine("demo", "s") as engine:
        precompute_documents([BASALT, Document(SLATE, id="s")], engine)
        engine.precompute(CHALK)
    forbid_weights()
    for name, text in {"b": BASALT, "s": SLATE, "c": CHALK, "o": "Other."}.items():
        Path(f"{name}.txt").write_text(f"{text}\n")
    facts = run.facts("documents", *PLACE)
    assert [each["text"] for each in facts["documents"]] == [BASALT, ""]
    assert facts["num_kv_without_document"] == 1
    assert "KV of 1 chunk that no document has; to delete it: ragblend gc --orphans" in run("documents", *PLACE)[1]
    assert run.facts("remove", "--text", "b.txt", *PLACE)["sources"] == [f"langchain/{text_id(BASALT)}"]
    assert run.facts("remove", "--text", "c.txt", *PLACE)["num_kv"] == 1, "no document had it"
    code, _, err = run("remove", "--text", "s.txt", *PLACE)
    assert (code, "the text is a chunk of langchain/s; remove that" in err) == (2, True)
    code, _, err = run("remove", "--text", "o.txt", *PLACE)
    assert (code, "s has no document 'the text of o.txt'" in err) == (3, True)
    code, _, err = run("remove", *PLACE)
    assert (code, "ragblend remove DOC, or --text FILE" in err) == (2, True)
    assert [each["id"] for each in run.facts("documents", *PLACE)["documents"]] == ["s"]


def test_orphans_of_a_store_without_an_index_are_found_for_every_tokenizer(run, forbid_weights):
    with load_engine("demo", "s", context="neutral") as engine:
        precompute_documents([BASALT, SLATE], engine)
        engine.precompute(CHALK)
        other_ids = (7, 8, 9) * 6
        engine.precompute_ids(other_ids)
        kept = {*engine.store.keys()} - {engine.key(CHALK)}
        with open_ledger(engine.store) as ledger:
            ledger.add_ids([(BASALT, other_ids)], "another tokenizer", "")
        orphan = engine.key(CHALK)
    forbid_weights()
    assert run.facts("verify", *PLACE)["orphans"] == 1
    assert run.facts("gc", "--orphans", *PLACE)["evicted"] == [orphan]
    assert {*DiskStore("s").keys()} == kept
    Path("s", "catalog.sqlite").unlink()
    code, _, err = run("gc", "--orphans", *PLACE)
    assert (code, "it is unknown which KV documents need" in err) == (3, True)
    assert {*DiskStore("s").keys()} == kept


def test_documents_of_an_index_in_another_folder_are_one_in_the_listing(run, forbid_weights):
    Path("b.txt").write_text(BASALT)
    with load_engine("demo", "s") as engine:
        ingest("b.txt", engine, "index", embedder="hashing")
    forbid_weights()
    (found,) = run.facts("documents", *PLACE)["documents"]
    assert (found["id"], found["num_chunks"], found["state"]) == ("", 1, "stored")
    assert "its documents are in another folder" in run("documents", *PLACE)[1]
    assert run.facts("gc", "--orphans", *PLACE)["evicted"] == []
    assert run.facts("remove", found["collection"], *PLACE)["num_kv"] == 1
    assert run.facts("documents", *PLACE)["documents"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b", "rocks/b", "rocks"])
def test_the_same_removal_completes_what_redis_did_not_answer(name, run, tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    place = (*PLACE, "--remote", server.url)
    try:
        with load_engine("demo", "s", remote=server.url) as engine:
            precompute_documents(BOTH[:1], engine, collection="rocks")
            engine.store.flush()
        server.kill()
        assert run("remove", name, *place)[0] == 5
        with open_ledger(DiskStore("s")) as ledger:
            assert ledger.find_pending_sources() == {"rocks/b"}
        assert run("remove", "other", *place)[0] == 3
        server.start()
        assert run.facts("remove", name, *place)["sources"] == ["rocks/b"]
        with open_ledger(DiskStore("s")) as ledger:
            assert ledger.find_pending_sources() == set()
        assert run("remove", name, *place)[0] == 3
    finally:
        server.kill()
