"""Vector stores: what langchain-tests does not ask (KV comes and goes with documents, ingested chunks are found)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore

from ragblend import Chunk, open_index
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.llm import ChatBlend
from ragblend.precompute import precompute_documents
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore, PrecomputingVectorStore

A = "The lighthouse on Gull Rock was built long ago."
B = "Its lamp is repaired by Tomas each spring."


@pytest.fixture
def chat(tiny_engine: Callable[..., TransformersEngine]) -> ChatBlend:
    return ChatBlend(engine=tiny_engine(), max_tokens=4)


@pytest.fixture
def store(chat: ChatBlend) -> PrecomputingVectorStore:
    return PrecomputingVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=64)), chat)


def known(chat: ChatBlend, *texts: str) -> list[bool]:
    """Whether each text has its KV stored and is recognised in prompts; both or neither."""
    stored = [chat.engine.is_stored(text) for text in texts]
    assert stored == [text in chat.registry for text in texts]
    return stored


def test_documents_are_precomputed_as_they_arrive_and_dropped_as_they_go(
    store: PrecomputingVectorStore, chat: ChatBlend
) -> None:
    store.add_documents([Document(A, id="a"), Document(f" {B}\n", id="b")])
    assert known(chat, A, B) == [True, True]
    store.delete(["a"])
    assert known(chat, A, B) == [False, True]
    assert store.get_by_ids(["a"]) == []


def test_kv_of_a_text_that_another_document_has_stays(store: PrecomputingVectorStore, chat: ChatBlend) -> None:
    store.add_documents([Document(A, id="1"), Document(A, id="2"), Document(B, id="3")])
    store.delete(["1"])
    assert known(chat, A) == [True]
    store.delete(["2"])
    assert known(chat, A, B) == [False, True]


def test_a_replaced_documents_kv_goes(store: PrecomputingVectorStore, chat: ChatBlend) -> None:
    store.add_texts([A], ids=["1"])
    store.add_texts([B], ids=["1"])
    assert known(chat, A, B) == [False, True]


def test_a_document_that_comes_again_under_its_id_replaces_what_it_was(chat: ChatBlend) -> None:
    """Also in stores that cannot tell what they hold, and under ids that are given beside the documents."""

    class Mute(InMemoryVectorStore):
        def get_by_ids(self, ids: Any, /) -> list[Document]:
            raise NotImplementedError

    mute = PrecomputingVectorStore(Mute(DeterministicFakeEmbedding(size=64)), chat)
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


def test_precomputed_documents_with_ids_follow_too(chat: ChatBlend) -> None:
    precompute_documents([Document(A, id="1"), Document(B)], chat)
    precompute_documents([Document("Its keeper is Ada.", id="1")], chat)
    assert known(chat, A, B) == [False, True]
    precompute_documents([Document(B, id="1")], chat)
    precompute_documents([Document(A, id="1")], chat)
    assert known(chat, A, B) == [True, True], "that without an id has it still"


def test_our_index_as_inner_store_leaves_nothing_to_sweep(chat: ChatBlend, tmp_path: Path) -> None:
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        store = PrecomputingVectorStore(BlendVectorStore(opened), chat)
        store.add_documents([Document(A, id="a")])
        store.add_documents([Document(B, id="a")])
        assert known(chat, A, B) == [False, True]
        store.delete(["a"])
        assert known(chat, A, B) == [False, False]
        assert opened.orphaned_texts().last_id == 0


async def test_async_methods_precompute_too(store: PrecomputingVectorStore, chat: ChatBlend) -> None:
    await store.aadd_documents([Document(A, id="a")])
    assert known(chat, A) == [True]
    await store.adelete(["a"])
    assert known(chat, A) == [False]


def test_langchains_indexing_api(store: PrecomputingVectorStore, chat: ChatBlend) -> None:
    records = InMemoryRecordManager(namespace="test")
    records.create_schema()
    documents = [Document(A, metadata={"source": "a"}), Document(B, metadata={"source": "b"})]
    options: dict[str, Any] = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    assert index(documents, records, store, **options)["num_added"] == 2
    assert known(chat, A, B) == [True, True]
    assert index(documents[1:], records, store, **options)["num_deleted"] == 1
    assert known(chat, A, B) == [False, True]


def test_its_retriever_feeds_reuse(store: PrecomputingVectorStore, chat: ChatBlend) -> None:
    store.add_texts([A, B])
    (found,) = store.as_retriever(search_kwargs={"k": 1}).invoke(A)
    report = chat.invoke(f"{found.page_content}\n\nWho?").response_metadata["ragblend"]
    assert report["num_chunk_hits"] == 1


def test_from_texts(chat: ChatBlend) -> None:
    embedding = DeterministicFakeEmbedding(size=8)
    store = PrecomputingVectorStore.from_texts([A], embedding, inner=InMemoryVectorStore, llm=chat)
    assert known(chat, A) == [True]
    assert [document.page_content for document in store.similarity_search(A)] == [A]
    with pytest.raises(UsageError, match="inner="):
        PrecomputingVectorStore.from_texts([A], embedding)


# --- our index as a vector store --------------------------------------------------------------------------------------


def test_blend_store_finds_ingested_chunks_beside_its_own(tmp_path: Path) -> None:
    with open_index(tmp_path, HashingEmbedder(), create=True) as opened:
        opened.add_document("a.txt", "", [Chunk(A, "a.txt", 7)])
        store = BlendVectorStore(opened)
        store.add_documents([Document(B, id="b", metadata={"source": "b.txt"})])
        (ingested,), (own,) = store.similarity_search(A, k=1), store.similarity_search(B, k=1)
        assert (ingested.metadata["source"], ingested.metadata["start"]) == ("a.txt", 7)
        assert (own.id, own.metadata) == ("b", {"source": "b.txt"})
        assert store.get_by_ids([ingested.id or "", "b"]) == [ingested, own]
        with pytest.raises(UsageError, match="ragblend remove"):
            store.delete([ingested.id or ""])
        store.delete()
        assert [document.page_content for document in store.similarity_search(B, k=5)] == [A]


def test_blend_store_scores_are_cosines(tmp_path: Path) -> None:
    store = BlendVectorStore.from_texts([A, B], BlendEmbeddings(HashingEmbedder()), path=tmp_path)
    (best, score), _ = store.similarity_search_with_score(A)
    assert (best.page_content, round(score, 3)) == (A, 1.0)
    assert store.similarity_search_with_relevance_scores(A, k=1)[0][1] == pytest.approx(1.0)
    vector = store.embeddings.embed_query(A)
    assert store.similarity_search_by_vector(vector, k=1)[0].page_content == A
    store.index.close()


def test_blend_store_survives_reopening(tmp_path: Path) -> None:
    BlendVectorStore.from_texts([A], DeterministicFakeEmbedding(size=8), ids=["a"], path=tmp_path).index.close()
    with open_index(tmp_path) as opened:
        assert [document.id for document in BlendVectorStore(opened).get_by_ids(["a"])] == ["a"]
    with pytest.raises(UsageError, match="path is missing"):
        BlendVectorStore.from_texts([A], DeterministicFakeEmbedding(size=8))
