"""LangChain retriever, chains and agent recipe over a tiny engine."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from tool_caller import ToolCaller

from ragblend import Chunk, Prompt, open_index
from ragblend.chains import (
    BlendRetriever,
    blend_tool,
    create_blend_chain,
    create_history_aware_blend_chain,
)
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.errors import NotFoundError, UsageError
from ragblend.llm import BlendLLM, ChatBlend
from ragblend.precompute import precompute_documents

TEXTS = [
    "The lighthouse on Gull Rock was built long ago.",
    "Its lamp is repaired by Tomas each spring.",
    "The supply boat comes on Thursdays, wind permitting.",
]
QUESTION = "Who repairs the lamp?"


@pytest.fixture
def index(tmp_path):
    with open_index(tmp_path / "index", HashingEmbedder(), create=True) as index:
        place = 0
        chunks: list[Chunk] = []
        for text in TEXTS:
            chunks.append(Chunk(text, "rock.txt", place, metadata={"page": len(chunks)}))
            place += len(text) + 2
        index.add_document("rock.txt", "", chunks)
        yield index


@pytest.fixture
def retriever(index):
    return BlendRetriever(index=index, k=2)


@pytest.fixture
def chat(tiny_engine, chat_renderer):
    engine = tiny_engine(renderer=chat_renderer)
    precompute_documents(TEXTS, engine)
    return ChatBlend(engine=engine, max_tokens=6)


# --- retriever --------------------------------------------------------------------------------------------------------


def test_documents_carry_place_score_and_metadata(retriever, index):
    first, second = retriever.invoke(QUESTION)
    assert first.page_content == TEXTS[1]
    (chunk,) = index.get([first.id or ""]).values()
    assert first.metadata["page"] == 1
    assert (first.metadata["source"], first.metadata["start"]) == ("rock.txt", chunk.start)
    assert first.metadata["score"] >= second.metadata["score"]
    assert [first.metadata["rank"], second.metadata["rank"]] == [0, 1]


def test_search_options_per_call(retriever):
    assert len(retriever.invoke(QUESTION, k=1)) == 1
    around = retriever.invoke(QUESTION, k=1, neighbours=1, order="document")
    assert [document.page_content for document in around] == TEXTS


def test_retriever_takes_a_folder(retriever, index, tmp_path):
    index.save()
    assert BlendRetriever(index=index.path, k=2).invoke(QUESTION) == retriever.invoke(QUESTION)
    with pytest.raises(NotFoundError, match="ragblend ingest"):
        BlendRetriever(index=tmp_path / "none")
    with pytest.raises(ValueError, match="path of its folder"):
        BlendRetriever(index=7)


# --- chain ------------------------------------------------------------------------------------------------------------


def test_answer_sources_and_report(chat, retriever):
    result = create_blend_chain(retriever, chat).invoke(QUESTION)
    assert list(result) == ["input", "context", "sources", "citations", "answer", "report"]
    assert result["sources"] == ["rock.txt"]
    assert result["citations"] == [f"rock.txt, p. {document.metadata['page']}" for document in result["context"]]
    assert result["context"] == retriever.invoke(QUESTION)
    assert (result["report"]["num_chunks"], result["report"]["num_chunk_hits"]) == (2, 2)
    assert result["report"]["chunks"][0]["source"] == "rock.txt"
    chunks = [document.page_content for document in result["context"]]
    assert result["answer"] == chat.engine.generate(Prompt(chunks, QUESTION), max_tokens=6).text


@pytest.mark.parametrize("model", ["chat", "llm", "bound"])
def test_every_form_of_our_models_gives_the_same(model, chat, retriever):
    forms: dict[str, Any] = {
        "chat": chat,
        "llm": BlendLLM(engine=chat.engine, max_tokens=6),
        "bound": ChatBlend(engine=chat.engine).bind(max_tokens=6),
    }
    result = create_blend_chain(retriever, forms[model]).invoke({"input": QUESTION})
    assert result["report"]["num_chunk_hits"] == 2
    assert result["answer"] == create_blend_chain(retriever, chat).invoke(QUESTION)["answer"]


def test_documents_of_the_chain_are_found_though_nothing_else_names_them(chat, retriever):
    for text in TEXTS:
        chat.engine.known_chunks.remove(text)
    assert create_blend_chain(retriever, chat).invoke(QUESTION)["report"]["num_chunk_hits"] == 2


async def test_streaming_gives_documents_then_text_then_report(chat, retriever):
    chain = create_blend_chain(retriever, chat)
    pieces = list(chain.stream(QUESTION))
    keys = [next(iter(piece)) for piece in pieces]
    assert keys[0] == "input"
    assert keys.index("context") < keys.index("answer") < keys.index("report") == len(keys) - 1
    answer = "".join(piece.get("answer", "") for piece in pieces)
    assert answer == chain.invoke(QUESTION)["answer"] == (await chain.ainvoke(QUESTION))["answer"]
    assert "".join([piece.get("answer", "") async for piece in chain.astream(QUESTION)]) == answer


def test_system_text_and_any_callable_as_retriever(chat):
    chain = create_blend_chain(lambda question: [Document(TEXTS[0])], chat, system="Be brief.")
    result = chain.invoke(QUESTION)
    prompt = Prompt([TEXTS[0]], QUESTION, system="Be brief.")
    assert result["answer"] == chat.engine.generate(prompt, max_tokens=6).text
    assert result["sources"] == []


def test_another_model_gets_plain_text_and_no_report(retriever):
    result = create_blend_chain(retriever, FakeListChatModel(responses=["Tomas"])).invoke(QUESTION)
    assert (result["answer"], "report" in result) == ("Tomas", False)


@pytest.mark.parametrize("given", ["", {"question": "Q"}, {"input": None}])
def test_a_chain_without_a_question_is_an_error(given, chat, retriever):
    with pytest.raises(UsageError, match="needs a question"):
        create_blend_chain(retriever, chat).invoke(given)


# --- conversations ----------------------------------------------------------------------------------------------------


def test_history_precedes_the_chunks_and_the_search_uses_the_rephrased_question(chat, retriever):
    asked: list[str] = []

    def retrieve(question: str) -> list[Document]:
        asked.append(question)
        return retriever.invoke(question)

    chain = create_history_aware_blend_chain(retrieve, chat, rephrase=lambda given: given["input"] + " (the lamp)")
    history = [HumanMessage("Is there a lamp?"), AIMessage("Yes.")]
    result = chain.invoke({"input": "Who repairs it?", "chat_history": history})
    assert asked == ["Who repairs it? (the lamp)"] == [result["search_query"]]
    chunks = [Chunk(document.page_content) for document in result["context"]]
    plain = Prompt.from_messages(
        [("user", "Is there a lamp?"), ("assistant", "Yes."), ("user", [*chunks, "Who repairs it?"])]
    )
    assert result["answer"] == chat.engine.generate(plain, max_tokens=6).text
    assert result["report"]["num_chunk_hits"] == 2


def test_by_default_the_llm_rephrases_even_when_strict(chat, retriever):
    strict = ChatBlend(engine=chat.engine, max_tokens=6, strict=True)
    chain = create_history_aware_blend_chain(retriever, strict)
    result = chain.invoke({"input": "Who repairs it?", "chat_history": [("human", "Is there a lamp?"), ("ai", "Yes.")]})
    assert isinstance(result["search_query"], str)
    assert result["report"]["num_chunk_hits"] == 2
    first = chain.invoke(QUESTION)  # there is no history that it could depend on
    assert first["search_query"] == QUESTION


# --- agents -----------------------------------------------------------------------------------------------------------


def test_the_results_of_an_agents_tool_are_read_from_the_store(chat, retriever):
    agent: Any = create_agent(ToolCaller(query=QUESTION), [blend_tool(retriever)])
    *messages, _ = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    answer = chat.invoke(messages)
    assert answer.response_metadata["ragblend"]["num_chunk_hits"] == 2
    chunks = [document.page_content for document in retriever.invoke(QUESTION)]
    assert answer.text == chat.engine.generate(Prompt(chunks, QUESTION), max_tokens=6).text
