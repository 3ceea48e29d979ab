"""LlamaIndex over a tiny engine: the LLM's contract, the synthesizer, query and chat engines, ingestion."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import llama_index.core as llama_core
import pytest
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from ragblend import Chunk, Prompt, open_index
from ragblend.catalog.ledger import open_ledger
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.errors import PromptTooLongError, UsageError
from ragblend.frameworks.strict import ChunkNotReusedError
from ragblend.llamaindex import (
    BlendIndexRetriever,
    BlendIngestion,
    BlendLLM,
    BlendQueryEngine,
    BlendSynthesizer,
    delete_ref_doc,
)
from ragblend.precompute import precompute_documents

TEXTS = [
    "The lighthouse on Gull Rock was built long ago.",
    "Its lamp is repaired by Tomas each spring.",
    "The supply boat comes on Thursdays, wind permitting.",
]
A, B = TEXTS[:2]
QUESTION = "Who repairs the lamp?"


@pytest.fixture
def llm(tiny_engine, chat_renderer):
    engine = tiny_engine(renderer=chat_renderer)
    precompute_documents(TEXTS, engine)
    return BlendLLM(engine=engine, max_tokens=6)


@pytest.fixture
def nodes():
    made = [TextNode(text=text, id_=str(n), metadata={"file": f"{n}.txt"}) for n, text in enumerate(TEXTS[:2])]
    return [NodeWithScore(node=node, score=1.0 - 0.5 * n) for n, node in enumerate(made)]


@pytest.fixture
def vector_index():
    return VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=MockEmbedding(8))


def answer(llm: BlendLLM, chunks: list[str] = TEXTS[:2], question: str = QUESTION) -> str:
    return str(llm.engine.generate(Prompt(chunks, question), max_tokens=6).text)


# --- the LLM ----------------------------------------------------------------------------------------------------------


def test_prompts_are_packed_by_the_models_own_tokens(llm, monkeypatch):
    monkeypatch.setattr(llama_core, "global_tokenizer", llama_core.global_tokenizer)  # put back afterwards
    context = llm.metadata.context_window
    size = len(llm.tokenizer(TEXTS[0] + " "))
    assert llm.tokenizer(TEXTS[0]) == list(llm.engine.renderer.text_ids(TEXTS[0]))
    nodes = [NodeWithScore(node=TextNode(text=f"{n} {TEXTS[0]}"), score=1.0) for n in range(2 * context // size)]

    def asked() -> str:
        return str(get_response_synthesizer(llm=llm, response_mode=ResponseMode.COMPACT).synthesize(QUESTION, nodes))

    with pytest.raises(PromptTooLongError):
        asked()
    Settings.tokenizer = llm.tokenizer
    assert asked()


def test_it_is_a_llama_index_llm(llm):
    assert isinstance(llm, FunctionCallingLLM)
    assert issubclass(BlendSynthesizer, BaseSynthesizer)
    assert llm.metadata.context_window == llm.engine.context_length
    assert (llm.metadata.num_output, llm.metadata.model_name) == (6, "tiny llama")
    assert (llm.metadata.is_chat_model, llm.metadata.is_function_calling_model) == (True, True)


async def test_completion_in_all_four_ways(llm):
    prompt = f"{A}\n\n{B}\n\n{QUESTION}"
    response = llm.complete(prompt)
    assert response.text == answer(llm)
    assert response.raw["ragblend"]["num_chunk_hits"] == 2
    assert response.raw["usage"]["cached_tokens"] > 0
    assert (await llm.acomplete(prompt)).text == response.text
    streamed = list(llm.stream_complete(prompt))
    assert "".join(piece.delta or "" for piece in streamed) == streamed[-1].text == response.text
    assert streamed[-1].raw["ragblend"]["num_chunk_hits"] == 2
    later = [piece async for piece in await llm.astream_complete(prompt)]
    assert later[-1].text == response.text


async def test_chat_in_all_four_ways_keeps_roles(llm):
    messages = [
        ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
        ChatMessage(role=MessageRole.USER, content=f"{A}\n\n{QUESTION}"),
        ChatMessage(role=MessageRole.ASSISTANT, content="Tomas."),
        ChatMessage(role=MessageRole.USER, content="Who?"),
    ]
    plain = Prompt.from_messages(
        [("system", "Be brief."), ("user", [Chunk(A), QUESTION]), ("assistant", "Tomas."), ("user", "Who?")]
    )
    wanted = llm.engine.generate(plain, max_tokens=6).text
    response = llm.chat(messages)
    assert (response.message.role, response.message.content) == (MessageRole.ASSISTANT, wanted)
    assert response.raw["ragblend"]["num_chunks"] == 1
    assert (await llm.achat(messages)).message.content == wanted
    assert "".join(piece.delta or "" for piece in llm.stream_chat(messages)) == wanted
    assert "".join([piece.delta or "" async for piece in await llm.astream_chat(messages)]) == wanted


def test_predict_uses_messages_or_one_string(llm):
    template = PromptTemplate("{context}\n\n{question}")
    given = {"context": f"{A}\n\n{B}", "question": QUESTION}
    assert llm.predict(template, **given) == answer(llm)
    raw = BlendLLM(engine=llm.engine, max_tokens=6, is_chat_model=False, raw=True)
    plain = Prompt.from_text([Chunk(A), Chunk(B), QUESTION])
    assert raw.predict(template, **given) == llm.engine.generate(plain, max_tokens=6).text


def test_first_tokens_stream_before_the_last_and_closing_frees_the_engine(llm):
    long: Any = BlendLLM(engine=llm.engine, max_tokens=400).stream_complete(QUESTION)
    next(long)
    assert llm.complete(QUESTION).text == answer(llm, [], QUESTION)  # between two tokens the engine is free
    long.close()


async def test_cancelling_a_stream_frees_the_engine(llm):
    begun = asyncio.Event()

    async def consume() -> None:
        async for _ in await llm.astream_complete(QUESTION):
            begun.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await llm.acomplete(QUESTION)).text == answer(llm, [], QUESTION)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([ChatMessage(content=" ")], "empty"),
    ],
)
def test_bad_messages(messages, reason, llm):
    with pytest.raises(UsageError, match=reason):
        llm.chat(messages)


def test_bad_calls(llm):
    with pytest.raises(UsageError, match="recompute_rato"):
        llm.complete("Q", recompute_rato=0.2)
    with pytest.raises(UsageError, match="is no function with a name"):
        llm.complete("Q", tools=[{"name": "x"}])
    with pytest.raises(ChunkNotReusedError):
        llm.complete("Q", strict=True)
    with pytest.raises(PromptTooLongError):
        llm.complete("the chunk " * 2000)


# --- synthesizer and query engine -------------------------------------------------------------------------------------


async def test_synthesizer_names_the_nodes_as_chunks_and_keeps_sources(llm, nodes):
    for text in TEXTS:  # the synthesizer names the nodes
        llm.engine.known_chunks.remove(text)
    synthesizer = BlendSynthesizer(llm)
    response: Any = synthesizer.synthesize(QUESTION, nodes)
    assert response.response == answer(llm)
    assert response.source_nodes == nodes
    assert response.metadata["0"] == {"file": "0.txt"}
    assert response.metadata["ragblend"]["num_chunk_hits"] == 2
    later: Any = await synthesizer.asynthesize(QUESTION, nodes)
    assert (later.response, later.metadata["ragblend"]["num_chunk_hits"]) == (response.response, 2)


async def test_synthesizer_streams(llm, nodes):
    synthesizer = BlendSynthesizer(llm, streaming=True)
    response: Any = synthesizer.synthesize(QUESTION, nodes)
    assert response.metadata["ragblend"] == {}
    assert "".join(response.response_gen) == answer(llm)
    assert response.metadata["ragblend"]["num_chunk_hits"] == 2
    later: Any = await synthesizer.asynthesize(QUESTION, nodes)
    assert "".join([piece async for piece in later.response_gen]) == answer(llm)


def test_synthesizer_without_nodes_and_with_a_system_text(llm, nodes):
    empty: Any = BlendSynthesizer(llm, empty_response="Nothing found.").synthesize(QUESTION, [])
    assert empty.response == "Nothing found."
    response: Any = BlendSynthesizer(llm, system="Be brief.").synthesize(QUESTION, nodes)
    plain = Prompt([A, B], QUESTION, system="Be brief.")
    assert response.response == llm.engine.generate(plain, max_tokens=6).text


def test_the_text_behind_metadata_is_reused(llm, nodes):
    response: Any = BlendSynthesizer(llm, metadata_mode=MetadataMode.LLM).synthesize(QUESTION, nodes)
    report = response.metadata["ragblend"]
    assert (report["num_chunks"], report["num_chunk_hits"]) == (2, 2)
    assert (
        report["prompt_tokens"]
        > BlendSynthesizer(llm).synthesize(QUESTION, nodes).metadata["ragblend"]["prompt_tokens"]
    )


def test_synthesizer_refuses_other_llms():
    with pytest.raises(UsageError, match="BlendLLM"):
        BlendSynthesizer(MockLLM())


async def test_query_engine_over_a_llama_index(llm, vector_index):
    engine = BlendQueryEngine.from_index(vector_index, llm, similarity_top_k=2)
    response: Any = engine.query(QUESTION)
    chunks = [node.node.get_content() for node in response.source_nodes]
    assert len(chunks) == 2
    assert response.response == answer(llm, chunks)
    assert response.metadata["ragblend"]["num_chunk_hits"] == 2
    assert str(await engine.aquery(QUESTION)) == response.response
    streaming: Any = BlendQueryEngine.from_index(vector_index, llm, similarity_top_k=2, streaming=True).query(QUESTION)
    assert "".join(streaming.response_gen) == response.response


def test_query_engine_applies_postprocessors(llm, vector_index):
    none = SimilarityPostprocessor(similarity_cutoff=2.0)
    engine = BlendQueryEngine.from_args(vector_index.as_retriever(), llm, node_postprocessors=[none])
    assert str(engine.query(QUESTION)) == "Empty Response"


def test_arguments_that_would_do_nothing_are_refused(llm, vector_index, blend_index):
    for index in (vector_index, blend_index):
        with pytest.raises(UsageError, match=r"from_index does not know top_k, response_mode, because"):
            BlendQueryEngine.from_index(index, llm, top_k=2, response_mode="refine")
    with pytest.raises(UsageError, match="VectorStoreIndex has neither"):
        BlendQueryEngine.from_index(vector_index, llm, neighbours=1)
    retriever = vector_index.as_retriever()
    with pytest.raises(UsageError, match="from_args does not know text_qa_template"):
        BlendQueryEngine.from_args(retriever, llm, text_qa_template=PromptTemplate("{query_str}"))
    with pytest.raises(UsageError, match="the synthesizer's"):
        BlendQueryEngine.from_args(retriever, response_synthesizer=BlendSynthesizer(llm), system="Be brief.")
    around = BlendQueryEngine.from_index(blend_index.path, llm, similarity_top_k=1, neighbours=1, order="document")
    assert [node.node.get_content() for node in around.retrieve(QueryBundle(QUESTION))] == TEXTS
    assert around.query(QUESTION).metadata["ragblend"]["num_chunk_hits"] == 3


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_llm_answers_equally_and_shares_its_engine(copied, tmp_path, caplog):
    llm = BlendLLM(
        model="demo", store=str(tmp_path), max_tokens=4, engine_options={"memory_gib": 1}, recompute_ratio=0.5
    )
    precompute_documents(TEXTS, llm)
    other = copied(llm)
    assert other.engine is llm.engine
    assert (other.max_tokens, other.recompute_ratio, other.engine_options) == (4, 0.5, {"memory_gib": 1})
    assert other.complete(f"{A}\n\n{QUESTION}").text == llm.complete(f"{A}\n\n{QUESTION}").text
    assert other.callback_manager is not None
    assert not caplog.records
    llm.engine.close()


def test_pickle_rejects_an_engine_in_a_pipeline_and_accepts_an_llm(llm, tmp_path):
    with pytest.raises(TypeError, match="TransformersEngine holds a model"):
        pickle.dumps(BlendIngestion(llm=llm.engine))
    with pytest.raises(TypeError, match="the engine of this"):
        pickle.dumps(BlendIngestion(llm=llm))
    own = BlendLLM(model="demo", store=str(tmp_path), max_tokens=4)
    assert pickle.loads(pickle.dumps(BlendIngestion(llm=own))).llm.engine is own.engine
    own.engine.close()


# --- our index --------------------------------------------------------------------------------------------------------


@pytest.fixture
def blend_index(tmp_path):
    with open_index(tmp_path, HashingEmbedder(), create=True) as index:
        starts = [0, 100, 200]
        cited = {"page": 3, "headings": ["Outer", "Inner"], "title": "T"}
        chunks = [Chunk(text, "rock.txt", start, -1, cited) for text, start in zip(TEXTS, starts, strict=True)]
        index.add_document("rock.txt", "", chunks)
        index.save()
        yield index


async def test_index_retriever_gives_nodes_of_the_exact_text(blend_index, llm):
    retriever = BlendIndexRetriever(blend_index, similarity_top_k=1)
    (found,) = retriever.retrieve(QUESTION)
    assert found.node.get_content(metadata_mode=MetadataMode.LLM) == B
    assert (found.node.metadata["source"], found.node.ref_doc_id) == ("rock.txt", "rock.txt")
    assert (found.node.metadata["page"], found.node.metadata["headings"]) == (3, ["Outer", "Inner"])
    assert found.score is not None
    assert await retriever.aretrieve(QUESTION) == [found]


# --- ingestion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_async", [False, True])
async def test_pipeline_precomputes_and_deleting_forgets(use_async, tiny_engine):
    llm = BlendLLM(engine=tiny_engine(), max_tokens=4)
    documents = [Document(text=A, id_="a"), Document(text=B, id_="b")]
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), BlendIngestion(llm=llm)]
    )
    made = list(await pipeline.arun(documents=documents) if use_async else pipeline.run(documents=documents))
    assert [llm.engine.is_stored(text) for text in (A, B)] == [True, True]
    index = VectorStoreIndex(made, embed_model=MockEmbedding(8))
    response: Any = index.as_query_engine(llm=llm, similarity_top_k=2).query(QUESTION)
    assert len(response.source_nodes) == 2
    assert delete_ref_doc(index, "a", llm) == 1
    assert [llm.engine.is_stored(text) for text in (A, B)] == [False, True]
    assert list(open_ledger(llm.engine.store).texts()) == [B]
    assert delete_ref_doc(index, "unknown", llm) == 0


@pytest.mark.parametrize("metadata", [{}, {"file_path": "/a/rocks.txt"}])
def test_a_document_with_a_random_id_is_deleted_by_it(metadata, tiny_engine):
    llm = BlendLLM(engine=tiny_engine(), max_tokens=4)
    documents = [Document(text=A, metadata=metadata), Document(text=B, id_="b")]
    pipeline = IngestionPipeline(transformations=[SentenceSplitter(), BlendIngestion(llm=llm)])
    index = VectorStoreIndex(list(pipeline.run(documents=documents)), embed_model=MockEmbedding(8))
    assert delete_ref_doc(index, documents[0].doc_id, llm) == 1
    assert [llm.engine.is_stored(text) for text in (A, B)] == [False, True]


def test_a_changed_document_in_a_pipeline_drops_what_it_left(tiny_engine):
    llm = BlendLLM(engine=tiny_engine(), max_tokens=4)

    def run(**texts: str) -> None:
        splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0)
        pipeline = IngestionPipeline(transformations=[splitter, BlendIngestion(llm=llm)], disable_cache=True)
        pipeline.run(documents=[Document(text=text, id_=name) for name, text in texts.items()])

    run(a=A, b=B)
    run(a=TEXTS[2])
    assert [llm.engine.is_stored(text) for text in (A, B, TEXTS[2])] == [False, True, True]
    assert set(open_ledger(llm.engine.store).texts()) == {B, TEXTS[2]}
    run(a=B)
    run(b=A)
    assert [llm.engine.is_stored(text) for text in (A, B, TEXTS[2])] == [True, True, False], "a has B still"


def test_nodes_of_one_document_in_several_batches_keep_all_their_kv(tiny_engine):
    """And so do two pipelines that cut one document in two ways; a changed document replaces all of them."""
    llm = BlendLLM(engine=tiny_engine(), max_tokens=4)

    def nodes(text: str, chunk_size: int) -> list[Any]:
        splitter = SentenceSplitter(chunk_size=chunk_size, chunk_overlap=0)
        return list(splitter.get_nodes_from_documents([Document(text=text, id_="a")]))

    precompute = BlendIngestion(llm=llm)
    short, long = nodes(f"{A} {B} {A}", 12), nodes(f"{A} {B} {A}", 64)
    assert len(short) > 1
    for node in (*short, *long):
        precompute([node])
    texts = {node.get_content() for node in (*short, *long)}
    assert all(llm.engine.is_stored(text) for text in texts)
    changed = nodes(f"{B} {B}", 64)
    precompute(changed)
    kept = {node.get_content() for node in changed}
    assert [text for text in texts | kept if llm.engine.is_stored(text)] == list(kept)


def test_the_cache_of_a_pipeline_never_skips_the_prefill(tiny_engine, tmp_path):
    def make_pipeline(llm: BlendLLM) -> IngestionPipeline:
        splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0)
        return IngestionPipeline(transformations=[splitter, BlendIngestion(llm=llm)])

    llm = BlendLLM(engine=tiny_engine(), max_tokens=4)
    pipeline = make_pipeline(llm)
    for text in (A, B, A):
        pipeline.run(documents=[Document(text=text, id_="x")])
    assert [llm.engine.is_stored(text) for text in (A, B)] == [True, False]

    pipeline.persist(str(tmp_path))
    new = BlendLLM(engine=tiny_engine(), max_tokens=4)
    later = make_pipeline(new)
    later.load(str(tmp_path))
    later.run(documents=[Document(text=A, id_="x")])
    assert new.engine.is_stored(A), "the cache is persisted, the store is another one"


def test_sampling_and_logprobs_are_llamaindexs_own(llm):
    options = {"max_tokens": 4, "temperature": 1.0, "seed": 1, "top_k": 4, "logprobs": True, "top_logprobs": 2}
    llm = BlendLLM(engine=llm.engine, **options)
    response = llm.chat([ChatMessage(content="what is that?")])
    assert len(response.logprobs) == response.raw["usage"]["completion_tokens"]
    chosen, likeliest, _ = response.logprobs[0]
    assert chosen.logprob <= likeliest.logprob < 0
    assert response.raw["logprobs"]["content"][0]["token"] == chosen.token
    *_, last = llm.stream_complete("what is that?")
    assert (last.text, len(last.logprobs)) == (response.message.content, len(response.logprobs))
    with pytest.raises(UsageError, match="n is 2; LlamaIndex's responses have one answer"):
        llm.complete("what is that?", n=2)
