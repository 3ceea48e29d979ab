"""Vector stores: what langchain-tests does not ask (KV comes and goes with documents, ingested chunks are found)."""

from __future__ import annotations

import copy
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from ragblend import Chunk, Prompt, load_engine, open_index
from ragblend.catalog.ledger import open_ledger
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.errors import StoreMismatchError, UsageError
from ragblend.ingestion.documents import remove_indexed_documents
from ragblend.llm import ChatBlend
from ragblend.precompute import ingest, precompute_documents
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore

A = "The lighthouse on Gull Rock was built long ago."
B = "Its lamp is repaired by Tomas each spring."
QUESTION = "Who repairs the lamp?"


@pytest.fixture
def chat(tiny_engine):
    return ChatBlend(engine=tiny_engine(), max_tokens=4)


@pytest.fixture
def store(chat):
    return BlendVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=64)), llm=chat)


def known(chat: ChatBlend, *texts: str) -> list[bool]:
    """Whether each text has its KV stored and is found in prompts; both or neither."""
    stored = [chat.engine.is_stored(text) for text in texts]
    assert stored == [bool(chat.engine.match(Prompt(question=f"{text}\n\n{QUESTION}")).runs) for text in texts]
    return stored


def test_documents_are_precomputed_as_they_arrive_and_dropped_as_they_go(store, chat):
    store.add_documents([Document(A, id="a"), Document(f" {B}\n", id="b")])
    assert known(chat, A, B) == [True, True]
    store.delete(["a"])
    assert known(chat, A, B) == [False, True]
    assert store.get_by_ids(["a"]) == []


def test_kv_of_a_text_that_another_document_has_stays(store, chat):
    store.add_documents([Document(A, id="1"), Document(A, id="2"), Document(B, id="3")])
    store.delete(["1"])
    assert known(chat, A) == [True]
    store.delete(["2"])
    assert known(chat, A, B) == [False, True]


def test_a_document_that_comes_again_under_its_id_replaces_what_it_was(chat):
    """Also in stores that cannot list their documents, and under ids that are given next to the documents."""

    class Mute(InMemoryVectorStore):
        def get_by_ids(self, ids: Any, /) -> list[Document]:
            raise NotImplementedError

    mute = BlendVectorStore(Mute(DeterministicFakeEmbedding(size=64)), llm=chat)
    mute.add_documents([Document(A, id="1")])
    mute.add_documents([Document(B, id="1")])
    assert known(chat, A, B) == [False, True]
    mute.add_texts([A], ids=["1"])
    assert known(chat, A, B) == [True, False]
    mute.add_documents([Document(B)], ids=["2"])
    mute.delete(["1"])
    assert known(chat, A, B) == [False, True]
    mute.delete(["2"])
    assert known(chat, A, B) == [False, False]


def test_documents_that_are_replaced_together_leave_no_kv_of_their_former_text(store, chat):
    store.add_texts([A, A], ids=["1", "2"])
    store.add_texts([B, B], ids=["1", "2"])
    assert known(chat, A, B) == [False, True]
    store.delete(["1", "2"])
    assert known(chat, A, B) == [False, False]


def test_two_stores_with_equal_ids_keep_the_kv_of_both(chat, tmp_path):
    """Two tenants in memory, two indexes, and two that name their data: none deletes what another has added."""

    class Named(InMemoryVectorStore):
        def __init__(self, collection_name: str) -> None:
            super().__init__(DeterministicFakeEmbedding(size=64))
            self._collection_name = collection_name

    def in_memory() -> InMemoryVectorStore:
        return InMemoryVectorStore(DeterministicFakeEmbedding(size=64))

    with (
        open_index(tmp_path / "one", HashingEmbedder(), create=True) as one,
        open_index(tmp_path / "two", HashingEmbedder(), create=True) as two,
    ):
        for pair in ((in_memory(), in_memory()), (one, two), (Named("a"), Named("b"))):
            first, second = (BlendVectorStore(inner, llm=chat) for inner in pair)
            first.add_texts([A], ids=["1"])
            second.add_texts([B], ids=["1"])
            assert known(chat, A, B) == [True, True], first.collection
            second.delete(["1"])
            assert known(chat, A, B) == [True, False], second.collection
            again = BlendVectorStore(pair[0], llm=chat)  # as the next request of a server may do
            again.delete(["1"])
            assert known(chat, A, B) == [False, False], first.collection
    assert BlendVectorStore(Named("a"), llm=chat).collection == BlendVectorStore(Named("a"), llm=chat).collection


def test_two_indexes_of_one_folder_keep_the_kv_of_both(chat, tmp_path):
    file = tmp_path / "docs" / "a.txt"
    file.parent.mkdir()
    with (
        open_index(tmp_path / "whole", HashingEmbedder(), create=True) as whole,
        open_index(tmp_path / "cut", HashingEmbedder(), create=True) as cut,
    ):
        file.write_text(f"{A}\n\n{B}\n\nOld end.")
        ingest(file.parent, chat.engine, whole, chunk_size=200)
        ingest(file.parent, chat.engine, cut, chunk_size=chat.engine.renderer.count_tokens(A))
        pieces = [chunk.text for chunk in cut.chunks()]
        assert len(pieces) > 1
        file.write_text(f"{A}\n\n{B}\n\nNew end.")
        ingest(file.parent, chat.engine, whole)
        assert all(known(chat, *pieces)), "the other index has them until it is ingested, too"
        ingest(file.parent, chat.engine, cut)
        assert all(known(chat, *(chunk.text for index in (whole, cut) for chunk in index.chunks())))
        gone = set(pieces) - {chunk.text for chunk in cut.chunks()}
        assert gone
        assert not any(known(chat, *gone))


def test_a_removed_document_leaves_no_chunk_records_even_of_evicted_kv(tmp_path):
    (tmp_path / "a.txt").write_text(A)
    with (
        load_engine("demo", tmp_path / "kv") as engine,
        open_index(tmp_path / "index", HashingEmbedder(), create=True) as opened,
    ):
        ingest(tmp_path / "a.txt", engine, opened)
        chunk_ids = [engine.renderer.chunk_ids(A)]
        with open_ledger(engine.store) as ledger:
            assert ledger.entries_of_chunks(chunk_ids, "") == [[engine.key(A)]]
        for entry in (tmp_path / "kv").glob("kv/??/*.safetensors"):
            entry.unlink()
        remove_indexed_documents(opened.sources(), engine, opened)
        with open_ledger(engine.store) as ledger:
            assert ledger.entries_of_chunks(chunk_ids, "") == [[]]
        engine.precompute(A)
        assert engine.forget(A)
        with open_ledger(engine.store) as ledger:
            assert ledger.entries_of_chunks(chunk_ids, "") == [[]]


def test_one_string_is_one_document(chat):
    assert precompute_documents(A, chat).num_chunks == 1
    assert known(chat, A) == [True]


@pytest.mark.parametrize("is_index", [True, False], ids=["index", "another store"])
def test_a_chain_over_the_store_reuses_every_document_that_it_retrieves(is_index, chat, tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        inner = opened if is_index else InMemoryVectorStore(BlendEmbeddings("hashing"))
        store = BlendVectorStore(inner, llm=chat)
        assert len(store.add_texts([A, B])) == 2
        template = ChatPromptTemplate.from_template("{context}\n\n{input}")
        chain = create_retrieval_chain(store.as_retriever(), create_stuff_documents_chain(chat, template))
        chain.invoke({"input": QUESTION})
        prompt = Prompt(question=f"{A}\n\n{B}\n\n{QUESTION}")
        assert len(chat.engine.match(prompt).runs) == 2
        store.delete([document.id or "" for document in store.similarity_search(QUESTION, k=2)])
        assert known(chat, A, B) == [False, False]


def test_a_store_without_an_llm_has_no_kv(chat):
    store = BlendVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=64)))
    store.add_texts([A], ids=["a"])
    assert [document.page_content for document in store.similarity_search(A)] == [A]
    assert store.delete(["a"]) is not False
    assert known(chat, A) == [False]


def test_our_index_as_inner_store_leaves_nothing_to_sweep(chat, tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        store = BlendVectorStore(opened, llm=chat)
        store.add_documents([Document(A, id="a")])
        store.add_documents([Document(B, id="a")])
        assert known(chat, A, B) == [False, True]
        store.delete(["a"])
        assert known(chat, A, B) == [False, False]
        store.add_documents([Document(A, id="a"), Document(B)])
        store.delete()
        assert known(chat, A, B) == [False, False]
        assert opened.lost_texts().last_number == 0


def test_an_overlong_document_is_indexed_and_stops_no_other(store, chat, caplog):
    long = "the chunk " * 2000
    assert store.add_documents([Document(A, id="a"), Document(long, id="b"), Document(B, id="c")]) == ["a", "b", "c"]
    assert known(chat, A, long, B) == [True, False, True]
    assert len(store.get_by_ids(["a", "b", "c"])) == 3
    assert "not prefilled: b: it has" in caplog.text


async def test_async_methods_precompute_too(store, chat):
    await store.aadd_documents([Document(A, id="a")])
    assert known(chat, A) == [True]
    await store.adelete(["a"])
    assert known(chat, A) == [False]


def test_langchains_indexing_api(store, chat):
    records = InMemoryRecordManager(namespace="test")
    records.create_schema()
    documents = [Document(A, metadata={"source": "a"}), Document(B, metadata={"source": "b"})]
    options: dict[str, Any] = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    assert index(documents, records, store, **options)["num_added"] == 2
    assert known(chat, A, B) == [True, True]
    assert index(documents[1:], records, store, **options)["num_deleted"] == 1
    assert known(chat, A, B) == [False, True]


# --- our index as a vector store --------------------------------------------------------------------------------------


def test_blend_store_finds_ingested_chunks_beside_its_own(tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        cited = {"title": "T", "page": 3, "page_end": 4, "headings": ["Outer", "Inner"]}
        opened.add_document("a.txt", "", [Chunk(A, "a.txt", 7, metadata=cited)])
        store = BlendVectorStore(opened)
        store.add_documents([Document(B, id="b", metadata={"source": "b.txt"})])
        (ingested,), (own,) = store.similarity_search(A, k=1), store.similarity_search(B, k=1)
        assert (ingested.metadata["source"], ingested.metadata["start"]) == ("a.txt", 7)
        assert ingested.metadata.items() >= cited.items()
        assert store.similarity_search(A, filter={"headings": ["Outer", "Inner"]}) == [ingested]
        assert (own.id, own.metadata) == ("b", {"source": "b.txt"})
        assert store.get_by_ids([ingested.id or "", "b"]) == [ingested, own]
        with pytest.raises(UsageError, match="ragblend remove"):
            store.delete([ingested.id or ""])
        store.delete()
        assert [document.page_content for document in store.similarity_search(B, k=5)] == [A]


def test_blend_store_scores_are_cosines(tmp_path):
    store = BlendVectorStore.from_texts([A, B], BlendEmbeddings(HashingEmbedder()), path=tmp_path)
    (best, score), _ = store.similarity_search_with_score(A)
    assert (best.page_content, round(score, 3)) == (A, 1.0)
    assert store.similarity_search_with_relevance_scores(A, k=1)[0][1] == pytest.approx(1.0)
    vector = store.embeddings.embed_query(A)
    assert store.similarity_search_by_vector(vector, k=1)[0].page_content == A
    store.index.close()


MANY = [f"Fact {number} of {'odd' if number % 2 else 'even'} things." for number in range(40)]
METADATA = [{"number": number, "odd": number % 2 == 1, "tags": ["a", number % 3]} for number in range(40)]


def has_metadata(wanted: dict[str, Any], document: Document) -> bool:
    return all(key in document.metadata and document.metadata[key] == wanted[key] for key in wanted)


@pytest.mark.parametrize(
    "filter",
    [
        None,
        lambda document: document.metadata["number"] > 30,
        lambda document: document.id == "7" and document.page_content == MANY[7],
        lambda document: False,
        {"odd": True},
        {"odd": True, "tags": ["a", 1]},
        {"odd": True, "absent": None},
    ],
)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("similarity_search", {"k": 3}),
        ("similarity_search", {"k": 100}),
        ("similarity_search_with_score", {"k": 3}),
        ("similarity_search_by_vector", {"k": 3}),
        ("similarity_search_with_score_by_vector", {"k": 3}),
        ("max_marginal_relevance_search", {"k": 3, "fetch_k": 10, "lambda_mult": 0.3}),
        ("max_marginal_relevance_search", {"k": 30, "fetch_k": 10}),
        ("max_marginal_relevance_search_by_vector", {"k": 3, "lambda_mult": 0}),
    ],
)
def test_searches_find_what_langchains_own_store_finds(method, arguments, filter, both_stores):
    ours, langchains = both_stores
    query: Any = QUESTION if "by_vector" not in method else langchains.embeddings.embed_query(QUESTION)
    found = getattr(ours, method)(query, filter=filter, **arguments)
    as_function = partial(has_metadata, filter) if isinstance(filter, dict) else filter
    expected = getattr(langchains, method)(query, filter=as_function, **arguments)
    if "score" in method:
        assert [document for document, _ in found] == [document for document, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected])
    else:
        assert found == expected


@pytest.fixture(scope="module")
def both_stores(tmp_path_factory):
    """Our store and LangChain's InMemoryVectorStore, of the same texts."""
    embedding, ids = DeterministicFakeEmbedding(size=16), [str(number) for number in range(len(MANY))]
    path = tmp_path_factory.mktemp("index")
    ours = BlendVectorStore.from_texts(MANY, embedding, METADATA, ids=ids, path=path)
    yield ours, InMemoryVectorStore.from_texts(MANY, embedding, METADATA, ids=ids)
    ours.index.close()


async def test_retrievers_take_filters_and_every_search_type(both_stores):
    ours, langchains = both_stores
    only_odd = {"filter": lambda document: document.metadata["odd"], "k": 5}
    for search_type in ("similarity", "mmr"):
        expected = langchains.as_retriever(search_type=search_type, search_kwargs=only_odd).invoke(QUESTION)
        for filter in (only_odd["filter"], {"odd": True}):
            retriever = ours.as_retriever(search_type=search_type, search_kwargs={**only_odd, "filter": filter})
            assert retriever.invoke(QUESTION) == await retriever.ainvoke(QUESTION) == expected
    near = ours.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.6, "filter": {"odd": True}}
    )
    assert {document.metadata["odd"] for document in near.invoke(QUESTION)} == {True}
    with pytest.raises(UsageError, match=r"filter is 'odd'; pass a dictionary"):
        ours.similarity_search(QUESTION, filter="odd")


@pytest.mark.parametrize("wrapped", [False, True], ids=["index", "wrapper"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"texts": [A, B], "ids": ["1"]}, "ids has 1 items for 2 documents"),
        ({"texts": [A], "ids": ["1", "2"]}, "ids has 2 items for 1 documents"),
        ({"texts": [A, B], "metadatas": [{}]}, "metadatas has 1 items for 2 texts"),
        ({"texts": [A, B], "ids": "12"}, "ids is one string, '12'"),
        ({"texts": A}, "texts is one string"),
        ({"texts": [A, B], "ids": ["1", 2.5]}, "an id is 2.5, a float"),
        ({"documents": [Document(A), Document(B)], "ids": ["1"]}, "ids has 1 items for 2 documents"),
    ],
)
def test_arguments_of_another_length_or_type_are_refused_before_anything_is_stored(
    wrapped, arguments, reason, store, chat, tmp_path
):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        target: VectorStore = store if wrapped else BlendVectorStore(opened)
        add = target.add_documents if "documents" in arguments else target.add_texts
        with pytest.raises(UsageError, match=reason):
            add(**arguments)
        assert (opened.num_documents, store.inner.similarity_search(A), known(chat, A)) == (0, [], [False])


@pytest.mark.parametrize(
    "value",
    [
        *(2024, 2024.0, 1.5, 10**30, True, False, None, "x", "", [], {}, [1, [2.0, {"a": None}]], {"a": {"b": [True]}}),
        *(np.int64(2024), np.uint8(7), np.float64(1.5), np.float32(0.1), np.bool_(False), np.str_("x")),
        [np.int64(1), {"a": np.bool_(True)}],
    ],
    ids=repr,
)
def test_metadata_are_those_of_langchains_own_store(value, tmp_path):
    """Also after the index was opened again; NumPy's scalars are Python's."""
    documents = [Document(A, id="a", metadata={"x": value}), Document(B, id="b", metadata={"x": "other", "y": 1})]
    embedding = BlendEmbeddings("hashing")
    theirs = InMemoryVectorStore(embedding)
    with open_index(tmp_path, embedding.embedder, create=True) as opened:
        for each in (theirs, BlendVectorStore(opened)):
            each.add_documents(documents)
    ours = BlendVectorStore(tmp_path)
    (found,) = ours.get_by_ids(["a"])
    assert found.metadata == theirs.get_by_ids(["a"])[0].metadata
    plain = found.metadata["x"]
    assert "np." not in repr(plain)
    assert repr(plain) == repr(value) or "np." in repr(value)
    for wanted in (value, plain):
        is_wanted = partial(lambda document, wanted: document.metadata["x"] == wanted, wanted=wanted)
        expected = theirs.similarity_search(A, filter=is_wanted)
        assert ours.similarity_search(A, filter=is_wanted) == expected
        assert ours.similarity_search(A, filter={"x": wanted}) == expected
    if isinstance(plain, int | float):
        assert [ours.similarity_search(A, filter=lambda document, limit=limit: document.metadata["x"] != "other"
                and document.metadata["x"] > limit) for limit in (plain, plain - 1)] == [[], [found]]  # fmt: skip
    ours.index.close()


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (date(2024, 5, 3), "2024-05-03"),
        (datetime(2024, 5, 3, 7, 30, tzinfo=UTC), "2024-05-03T07:30:00+00:00"),
        (time(7, 30), "07:30:00"),
        (np.datetime64("2024-05-03T07:30"), "2024-05-03T07:30"),
        (Decimal("1.50"), "1.50"),
        (("a", date(2024, 5, 3)), ["a", "2024-05-03"]),
    ],
    ids=repr,
)
def test_dates_are_stored_as_iso_8601_and_found_by_either_form(value, stored, tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        store = BlendVectorStore(opened)
        store.add_documents([Document(A, id="a", metadata={"x": value})])
        assert store.get_by_ids(["a"])[0].metadata == {"x": stored}
        assert [len(store.similarity_search(A, filter={"x": each})) for each in (value, stored, "other")] == [1, 1, 0]
        with pytest.raises(UsageError, match="the filter: 'x' holds a set"):
            store.similarity_search(A, filter={"x": {1}})


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (Document(f"{B} \ud83d", id="b"), r"the text of document 'b' holds a lone surrogate, U\+D83D"),
        (Document(B, id="\ud83d"), "an id holds a lone surrogate"),
        (Document(B, id="b", metadata={(1, 2): 3}), r"metadata of document 'b': the key \(1, 2\) is a tuple"),
        (Document(B, id="b", metadata={"x": {"y": {1: 2}}}), "'b' in 'x': the key 1 is a int; choose a string, '1'"),
        (Document(B, id="b", metadata={"tags": ["a", {1, 2}]}), "'b': 'tags' holds a set, which cannot be stored"),
        (Document(B, id="b", metadata={"x": np.zeros(2)}), "'b': 'x' holds a ndarray"),
        (Document(B, id="b", metadata={"x": b"y"}), "'b': 'x' holds a bytes"),
        (Document(B, id="b", metadata={"x": LOOP}), "'b': 'x' holds a value that contains itself"),
        (Document(B, id="b", metadata={"x": 10**5000}), "the metadata of document 'b' cannot be stored .*4300 digits"),
    ],
)
def test_a_document_that_cannot_be_stored_is_named_and_nothing_is_stored(second, reason, tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        store = BlendVectorStore(opened)
        with pytest.raises(UsageError, match=reason):
            store.add_documents([Document(A, id="a"), second])
        assert opened.num_documents == 0
        store.add_texts([A])
        for search in (store.similarity_search, store.max_marginal_relevance_search):
            with pytest.raises(UsageError, match="the question holds a lone surrogate"):
                search("half \ud83d emoji")


def test_a_text_that_is_no_unicode_can_be_deleted(chat):
    class CountingEmbedding(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[1.0, float(len(text))] for text in texts]

        def embed_query(self, text: str) -> list[float]:
            return [1.0, float(len(text))]

    store = BlendVectorStore(InMemoryVectorStore(CountingEmbedding()), llm=chat)
    store.add_texts([f"{B} \udc80"], ids=["b"])
    store.delete(["b"])
    assert store.get_by_ids(["b"]) == []


@pytest.mark.parametrize("wrapped", [False, True], ids=["index", "wrapper"])
def test_ids_may_be_integers(wrapped, chat, tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        store: VectorStore = BlendVectorStore(opened, llm=chat) if wrapped else BlendVectorStore(opened)
        ids: Any = [0, 17]
        assert store.add_texts([A, B], ids=ids) == ["0", "17"]
        assert [document.id for document in store.get_by_ids(ids)] == ["0", "17"]
        assert store.add_texts([B], ids=ids[:1]) == ["0"]
        assert opened.num_documents == 2
        assert store.delete(ids[1:])
        assert [document.page_content for document in store.get_by_ids(ids)] == [B]


def test_blank_and_zero_width_texts_are_skipped_and_reported(tmp_path, caplog):
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        store = BlendVectorStore(opened)
        store.add_texts([B], ids=["blank"])
        assert store.add_texts(["", A, " \n", "\u200b\ufeff"], ids=["blank", "a", "space", "zero"]) == ["a"]
        assert [document.id for document in store.similarity_search("Who?", k=5)] == ["a"]
        assert caplog.messages == ["documents without visible text were not stored: blank, space, zero"]


def test_attributes_of_the_inner_store_are_reached(store, tmp_path):
    store.add_texts([A], ids=["a"])
    store.dump(str(tmp_path / "dumped"))
    assert InMemoryVectorStore.load(str(tmp_path / "dumped"), store.embedding).get_by_ids(["a"]) == store.get_by_ids(
        ["a"]
    )
    vector = store.embedding.embed_query(B)
    assert store.max_marginal_relevance_search_by_vector(vector, k=1) == store.get_by_ids(["a"])
    assert copy.copy(store).inner is store.inner
    with pytest.raises(AttributeError, match="save_local"):
        store.save_local("folder")


def test_an_index_of_the_users_embedding_is_reopened_with_that_embedding(tmp_path):
    embedding = DeterministicFakeEmbedding(size=8)
    BlendVectorStore.from_texts([A], embedding, ids=["a"], path=tmp_path).index.close()
    store = BlendVectorStore(tmp_path, embedding)
    assert [document.id for document in store.similarity_search(A, k=1)] == ["a"]
    with pytest.raises(UsageError, match="leave embedding out"):
        BlendVectorStore(store.index, embedding)
    store.index.close()
    with open_index(tmp_path) as opened:
        assert [document.id for document in BlendVectorStore(opened).get_by_ids(["a"])] == ["a"]
        with pytest.raises(UsageError, match=r"'langchain:Deterministic.*pass the embedding.*BlendVectorStore\(FOL"):
            BlendVectorStore(opened).similarity_search(A)
    with pytest.raises(UsageError, match="path is missing"):
        BlendVectorStore.from_texts([A], embedding)


class NamedEmbedding(DeterministicFakeEmbedding):
    """An embedding whose vectors depend on `seed`, not on its name."""

    model_name: str = ""
    model_kwargs: dict[str, Any] | None = None
    seed: str = ""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([self.seed + text for text in texts])

    def embed_query(self, text: str) -> list[float]:
        return super().embed_query(self.seed + text)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"model_name": "m1"}, {"model_name": "m2"}, "NamedEmbedding m1.*not.*NamedEmbedding m2"),
        ({"model_kwargs": {"revision": "r1"}}, {"model_kwargs": {"revision": "r2"}}, "r1.*not.*r2"),
        ({"model_name": "m1"}, {"model_name": "m1", "seed": "2"}, "another model or revision"),
        ({}, {"seed": "2"}, "another model or revision"),
        ({}, {"model_name": "m1"}, "NamedEmbedding'.*not.*NamedEmbedding m1"),
    ],
)
def test_another_embedding_of_equal_length_is_rejected(first, second, reason, tmp_path):
    BlendVectorStore.from_texts([A], NamedEmbedding(size=8, **first), path=tmp_path).index.close()
    with pytest.raises(StoreMismatchError, match=reason):
        BlendVectorStore.from_texts([B], NamedEmbedding(size=8, **second), path=tmp_path)
    with pytest.raises(StoreMismatchError, match=reason):
        BlendVectorStore(tmp_path, NamedEmbedding(size=8, **second)).similarity_search(A)
    with BlendVectorStore(tmp_path, NamedEmbedding(size=8, **first)).index as opened:
        assert [hit.chunk.text for hit in opened.search(A)] == [A], "the embedding that made the index finds all of it"


def test_a_cached_embedding_is_the_embedding_that_it_caches(tmp_path):
    embedding = NamedEmbedding(size=8, model_name="m1")
    BlendVectorStore.from_texts([A], embedding, path=tmp_path).index.close()
    cached = CacheBackedEmbeddings.from_bytes_store(embedding, InMemoryByteStore(), key_encoder="sha256")
    with BlendVectorStore(tmp_path, cached).index as opened:
        assert opened.search(A)[0].chunk.text == A
