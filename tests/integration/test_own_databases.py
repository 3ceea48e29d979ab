"""Vector stores of other databases over ragblend's KV, which is found by text: a real Qdrant, a real PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import VectorStore
from langchain_qdrant import QdrantVectorStore
from postgres import running_postgres
from qdrant_client import QdrantClient, models

from ragblend import Prompt, open_index
from ragblend.chains import create_blend_chain
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.frameworks.engines import share_engine
from ragblend.llm import ChatBlend
from ragblend.precompute import ingest
from ragblend.vectorstores import BlendEmbeddings, BlendVectorStore

PROMPT = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])
DIM = 256


class Reports(BaseCallbackHandler):
    """Collects what the LLM says about reuse, from inside any chain."""

    def __init__(self) -> None:
        self.hits: list[tuple[int, int]] = []

    def on_llm_end(self, response: LLMResult, **kwargs: object) -> None:
        generation = response.generations[0][0]
        assert isinstance(generation, ChatGeneration)
        report = generation.message.response_metadata["ragblend"]
        self.hits.append((report["num_chunk_hits"], report["num_chunks"]))


@pytest.fixture
def folder(tmp_path, passages):
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, text in enumerate(passages):
        (folder / f"{number}.txt").write_text(text)
    return folder


def qdrant(folder: Path) -> Iterator[VectorStore]:
    """Qdrant's local mode, in a folder."""
    client = QdrantClient(path=str(folder / "qdrant"))
    client.create_collection("docs", models.VectorParams(size=DIM, distance=models.Distance.COSINE))
    yield QdrantVectorStore(client, "docs", BlendEmbeddings(HashingEmbedder(DIM)))
    client.close()


def postgres(folder: Path) -> Iterator[VectorStore]:
    """A table of a PostgreSQL server with pgvector."""
    langchain_postgres = pytest.importorskip("langchain_postgres", reason="no langchain-postgres: pip install '.[dev]'")
    with running_postgres() as url:
        database = langchain_postgres.PGEngine.from_connection_string(url.replace("postgresql:", "postgresql+psycopg:"))
        database.init_vectorstore_table("docs", vector_size=DIM)
        yield langchain_postgres.PGVectorStore.create_sync(database, BlendEmbeddings(HashingEmbedder(DIM)), "docs")
        asyncio.run(database.close())


@pytest.fixture(params=[qdrant, postgres], ids=lambda kind: kind.__name__)
def database(request, tmp_path):
    """An empty vector store of a database."""
    opened: Callable[[Path], Iterator[VectorStore]] = request.param
    yield from opened(tmp_path)


def test_what_a_database_gets_is_prefilled_and_goes_with_its_document(database, tmp_path, chat_model_path, passages):
    chat = ChatBlend(
        model=str(chat_model_path),
        store=tmp_path / "kv",
        engine_options={"on_miss": "inline"},
        max_tokens=4,
        strict=True,
    )
    store = BlendVectorStore(database, llm=chat)
    ids = store.add_documents([Document(text, metadata={"number": place}) for place, text in enumerate(passages[:4])])
    assert all(chat.engine.is_stored(text) for text in passages[:4])

    found = store.similarity_search(passages[2], k=2)
    assert found[0].page_content == passages[2]
    assert found[0].metadata["number"] == 2

    reports = Reports()
    retriever = store.as_retriever(search_kwargs={"k": 3})
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))
    answer = chain.invoke({"input": "Who repairs the lamp?"}, {"callbacks": [reports]})
    assert reports.hits == [(3, 3)]
    result = create_blend_chain(retriever, chat).invoke("Who repairs the lamp?")
    assert result["answer"] == answer["answer"]
    assert result["report"]["num_reused_tokens"] > 0

    store.delete([ids[2]])
    assert [chat.engine.is_stored(text) for text in passages[:4]] == [True, True, False, True]
    assert passages[2] not in {document.page_content for document in store.similarity_search(passages[2], k=4)}

    store.add_documents([Document(passages[4])], ids=[ids[0]])  # in place of an older version
    assert [chat.engine.is_stored(text) for text in passages[:5]] == [False, True, False, True, True]
    chat.engine.close()


def test_a_chain_over_a_database_reuses_what_ragblend_ingested(database, folder, tmp_path, chat_model_path):
    with (
        share_engine(str(chat_model_path), tmp_path / "kv", on_miss="inline") as engine,
        open_index(tmp_path / "index", HashingEmbedder(), create=True) as index,
    ):
        ingest(folder, engine, index)
        database.add_texts([chunk.text for chunk in index.chunks()])
        retriever = database.as_retriever(search_kwargs={"k": 3})
        chat = ChatBlend(engine=engine, max_tokens=8, strict=True)
        reports = Reports()
        chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))
        result = chain.invoke({"input": "Who repairs the lamp?"}, {"callbacks": [reports]})
        assert reports.hits == [(3, 3)]
        chunks = [document.page_content for document in result["context"]]
        plain = Prompt(chunks, "Who repairs the lamp?")
        assert result["answer"] == engine.generate(plain, max_tokens=8).text
        assert create_blend_chain(retriever, chat).invoke("Who repairs the lamp?")["answer"] == result["answer"]
