"""A foreign vector store and chain over documents ingested by ragblend: KV is found by text, so any store works."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_qdrant import QdrantVectorStore

from ragblend import SegmentedPrompt, open_index
from ragblend.chains import create_blend_chain
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.frameworks.model import share_engine
from ragblend.llm import ChatBlend
from ragblend.precompute import ingest
from ragblend.vectorstores import BlendEmbeddings, PrecomputingVectorStore

PROMPT = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])


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
def folder(tmp_path: Path, passages: list[str]) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number, text in enumerate(passages):
        (folder / f"{number}.txt").write_text(text)
    return folder


def test_qdrant_chain_reuses_what_ragblend_ingested(folder: Path, tmp_path: Path, chat_model_path: Path) -> None:
    with (
        share_engine(str(chat_model_path), tmp_path / "kv", on_miss="inline") as engine,  # type: ignore[attr-defined]
        open_index(tmp_path / "index", HashingEmbedder(), create=True) as index,
    ):
        ingest(folder, engine, index)
        qdrant = QdrantVectorStore.from_texts(
            [chunk.text for chunk in index.chunks()], BlendEmbeddings(HashingEmbedder(dim=256)), location=":memory:"
        )
        retriever = qdrant.as_retriever(search_kwargs={"k": 3})
        chat = ChatBlend(engine=engine, max_tokens=8, strict=True)
        reports = Reports()
        chain = create_retrieval_chain(retriever, create_stuff_documents_chain(chat, PROMPT))
        result = chain.invoke({"input": "Who repairs the lamp?"}, {"callbacks": [reports]})
        assert reports.hits == [(3, 3)]
        chunks = [document.page_content for document in result["context"]]
        plain = SegmentedPrompt(chunks, "Who repairs the lamp?")
        assert result["answer"] == engine.generate(plain, max_tokens=8).text
        assert create_blend_chain(retriever, chat).invoke("Who repairs the lamp?")["answer"] == result["answer"]


def test_qdrant_with_precomputing_ingestion(tmp_path: Path, chat_model_path: Path, passages: list[str]) -> None:
    chat = ChatBlend(model=str(chat_model_path), store=tmp_path / "kv", on_miss="inline", max_tokens=4)
    embedding = BlendEmbeddings(HashingEmbedder(dim=256))
    qdrant = QdrantVectorStore.from_texts(passages[:1], embedding, location=":memory:")
    store = PrecomputingVectorStore(qdrant, chat)
    ids = store.add_texts(passages[1:4])
    report = create_blend_chain(store.as_retriever(search_kwargs={"k": 4}), chat).invoke("Who?")["report"]
    assert (report["num_chunks"], report["num_chunk_hits"]) == (4, 3)
    store.delete(ids[:1])
    assert [chat.engine.is_stored(text) for text in passages[1:4]] == [False, True, True]
    chat.engine.close()
