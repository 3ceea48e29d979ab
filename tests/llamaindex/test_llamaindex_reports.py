"""The report of an answer in what LlamaIndex' own query and chat engines return, and strict calls inside of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import MockEmbedding, PromptHelper, VectorStoreIndex, get_response_synthesizer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from ragblend.frameworks.strict import ChunkNotReusedError
from ragblend.llamaindex import BlendLLM, BlendSynthesizer
from ragblend.llamaindex.reports import _tracker
from ragblend.precompute import precompute_documents

TEXTS = [
    "The lighthouse on Gull Rock was built long ago.",
    "Its lamp is repaired by Tomas each spring.",
]
QUESTION = "Who repairs the lamp?"
WAYS = ("whole", "stream", "async", "async stream")


@pytest.fixture
def llm(tiny_engine, chat_renderer):
    engine = tiny_engine(renderer=chat_renderer)
    precompute_documents(TEXTS, engine)
    return BlendLLM(engine=engine, max_tokens=4, strict=True)


@pytest.fixture
def index():
    return VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=MockEmbedding(8))


def query(engine: Any, way: str) -> Any:
    """The response to QUESTION, read to its end."""
    if not way.startswith("async"):
        response = engine.query(QUESTION)
        assert str(response)
        return response

    async def ask() -> Any:
        response = await engine.aquery(QUESTION)
        if way == "async stream":
            assert [piece async for piece in response.response_gen]
        return response

    return asyncio.run(ask())


def chat(engine: Any, way: str, message: str) -> Any:
    """The engine's response to a message, read to its end."""

    async def ask() -> Any:
        response = await (engine.astream_chat if way == "async stream" else engine.achat)(message)
        if way == "async stream":
            assert [piece async for piece in response.async_response_gen()]
        return response

    if way.startswith("async"):
        return asyncio.run(ask())
    response = (engine.stream_chat if way == "stream" else engine.chat)(message)
    if way == "stream":
        assert list(response.response_gen)
    return response


def check(report: Any, hits: int, *, calls: int) -> None:
    """The report is that of the last call, and the list of all calls ends with it."""
    assert (report["num_chunk_hits"], len(report["calls"])) == (hits, calls)
    assert {name: value for name, value in report.items() if name != "calls"} == report["calls"][-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("mode", "hits", "calls"),
    [("compact", 2, 1), ("refine", 1, 2), ("tree_summarize", 2, 1), ("simple_summarize", 2, 1), ("accumulate", 1, 2)],
)
def test_a_query_engines_response_has_the_report(mode, hits, calls, way, llm, index):
    if mode == "accumulate" and "stream" in way:
        pytest.skip("LlamaIndex does not stream this mode")
    response = query(index.as_query_engine(llm=llm, response_mode=mode, streaming="stream" in way), way)
    check(response.metadata["ragblend"], hits, calls=calls)
    assert {node.node_id for node in response.source_nodes} == response.metadata.keys() - {"ragblend"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("mode", "hits", "calls"),
    [("condense_plus_context", 2, 2), ("context", 2, 1), ("simple", 0, 1), ("condense_question", 2, 2)],
)
def test_a_chat_engines_response_has_the_report_of_its_answer(mode, hits, calls, way, llm, index):
    engine = index.as_chat_engine(chat_mode=mode, llm=llm)
    check(chat(engine, way, QUESTION).metadata["ragblend"], hits, calls=1)
    response = chat(engine, way, "And when?")
    check(response.metadata["ragblend"], hits, calls=calls)
    assert len(engine.chat_history) == 4
    if mode == "condense_question":
        check(response.sources[0].raw_output.metadata["ragblend"], hits, calls=1)


def test_reports_of_overlapping_queries_stay_apart(llm, index):
    engine = index.as_query_engine(llm=llm)

    async def ask() -> Any:
        return await asyncio.gather(*(engine.aquery(f"{QUESTION} {n}") for n in range(4)))

    for response in asyncio.run(ask()):
        check(response.metadata["ragblend"], 2, calls=1)
    assert not _tracker.open_spans


def test_a_stream_that_is_closed_early_has_a_response_without_values(llm, index):
    response: Any = index.as_query_engine(llm=llm, streaming=True).query(QUESTION)
    next(response.response_gen)
    response.response_gen.close()
    assert response.metadata["ragblend"] == {}
    assert llm.complete(QUESTION, strict=False).text  # the engine is free


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # LlamaIndex reads chat streams there
@pytest.mark.parametrize("way", WAYS)
def test_strict_queries_raise_for_documents_that_are_not_stored(way, llm):
    index = VectorStoreIndex([TextNode(text="That boat was never stored by us.")], embed_model=MockEmbedding(8))
    with pytest.raises(ChunkNotReusedError, match="no ingested chunk was found"):
        query(index.as_query_engine(llm=llm, streaming="stream" in way), way)
    with pytest.raises(ChunkNotReusedError, match="no ingested chunk was found"):
        chat(index.as_chat_engine(chat_mode="condense_plus_context", llm=llm), way, QUESTION)
    assert not _tracker.open_spans


def test_strict_concerns_calls_outside_of_components_and_prompts_with_nodes_only(llm, index):
    with pytest.raises(ChunkNotReusedError, match="no ingested chunk was found"):
        llm.complete(QUESTION)
    helper = PromptHelper(context_window=512, num_output=4, chunk_size_limit=16)  # one node in each prompt
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    options: dict[str, Any] = {"llm": llm, "prompt_helper": helper, "response_mode": "tree_summarize"}
    check(get_response_synthesizer(**options).synthesize(QUESTION, nodes).metadata["ragblend"], 0, calls=3)
    fusion = QueryFusionRetriever([index.as_retriever()], llm=llm, num_queries=3, use_async=False)
    engine = RetrieverQueryEngine(fusion, BlendSynthesizer(llm))
    check(engine.query(QUESTION).metadata["ragblend"], 2, calls=2)
    with pytest.raises(ChunkNotReusedError):
        BlendSynthesizer(llm).get_response(QUESTION, ["That boat was never stored by us."])
