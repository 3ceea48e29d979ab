"""Swap the LLM, keep the chain: how much of the chunks that a framework was given does the engine reuse?

Every chain of LangChain and every response mode of LlamaIndex runs with nothing but the LLM replaced. Each call reads
the ids that transformers makes of the messages which the framework sent, and at ratio 1.0 it answers as full prefill
does. The rows are those of data/results/drift.json. Run with RAGBLEND_UPDATE_RESULTS=1 to write them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from tool_caller import ToolCaller
from transformers import AutoTokenizer

from ragblend import Prompt
from ragblend.chains import blend_tool, create_blend_chain, create_history_aware_blend_chain
from ragblend.engine.api import Engine, Stream
from ragblend.frameworks.model import BlendModel
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llamaindex import BlendSynthesizer
from ragblend.llm import BlendLLM, ChatBlend

QUESTION = "Who repairs the lamp of the lighthouse?"
RESULTS = Path(__file__).parents[2] / "data" / "results" / "drift.json"
UPDATE = "RAGBLEND_UPDATE_RESULTS"  # set to 1: write the table instead of comparing with it
K = 3
Call = tuple[Prompt, Stream]


@dataclass
class Row:
    """One line of the table: over all LLM calls of one run, chunks given and reused, and the share of their tokens."""

    framework: str
    chain: str
    llm: str
    calls: int
    given: int
    reused: int
    token_share: float
    note: str = ""


class FixedRetriever(BaseRetriever):
    """Always the same documents: the chain is under test, not retrieval."""

    texts: list[str]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(text, id=str(n), metadata={"source": f"{n}.txt"}) for n, text in enumerate(self.texts)]


# --- LangChain --------------------------------------------------------------------------------------------------------

CHAT = ChatPromptTemplate.from_messages([("system", "Use the context.\n\n{context}"), ("human", "{input}")])


def stuff(llm: Any, retriever: FixedRetriever) -> str:
    return str(create_stuff_documents_chain(llm, CHAT).invoke({"context": retriever.invoke(""), "input": QUESTION}))


def retrieval(llm: Any, retriever: FixedRetriever) -> str:
    return str(
        create_retrieval_chain(retriever, create_stuff_documents_chain(llm, CHAT)).invoke({"input": QUESTION})["answer"]
    )


def retrieval_qa(make: Callable[..., Any]) -> Callable[[Any, FixedRetriever], str]:
    return lambda llm, retriever: str(make(llm, retriever=retriever).invoke(QUESTION)["result"])


def qa_chain(llm: Any, retriever: FixedRetriever) -> str:
    given = {"input_documents": retriever.invoke(""), "question": QUESTION}
    return str(load_qa_chain(llm, chain_type="stuff").invoke(given)["output_text"])


def by_hand(llm: Any, retriever: FixedRetriever) -> str:
    def join(documents: list[Document]) -> str:
        return "\n---\n".join(f"[{n}] {document.page_content}" for n, document in enumerate(documents))

    prompt = PromptTemplate.from_template("Sources:\n{context}\n\nQ: {input}\nA:")
    chain = {"context": retriever | join, "input": RunnablePassthrough()} | prompt | llm | StrOutputParser()
    return str(chain.invoke(QUESTION))


def list_repr(llm: Any, retriever: FixedRetriever) -> str:
    prompt = PromptTemplate.from_template("{context}\nQ: {input}")
    return str(({"context": retriever, "input": RunnablePassthrough()} | prompt | llm | StrOutputParser()).invoke("Q"))


def agent(llm: Any, retriever: FixedRetriever) -> str:
    made = create_agent(ToolCaller(query=QUESTION), [blend_tool(retriever)])
    *messages, _ = made.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    return str((llm | StrOutputParser()).invoke([SystemMessage("Be brief."), *messages]))


def ours(llm: Any, retriever: FixedRetriever) -> str:
    return str(create_blend_chain(retriever, llm, system="Be brief.").invoke(QUESTION)["answer"])


def ours_with_history(llm: Any, retriever: FixedRetriever) -> str:
    chain = create_history_aware_blend_chain(retriever, llm, rephrase=lambda given: str(given["input"]))
    history = [HumanMessage("Where is it?"), AIMessage("On Gull Rock.")]
    return str(chain.invoke({"input": QUESTION, "chat_history": history})["answer"])


LANGCHAIN: dict[str, Callable[[Any, FixedRetriever], str]] = {
    "create_stuff_documents_chain": stuff,
    "create_retrieval_chain": retrieval,
    "RetrievalQA.from_chain_type": retrieval_qa(RetrievalQA.from_chain_type),
    "RetrievalQA.from_llm": retrieval_qa(RetrievalQA.from_llm),
    "load_qa_chain": qa_chain,
    "LCEL by hand": by_hand,
    "create_agent + blend_tool": agent,
    "create_blend_chain": ours,
    "create_history_aware_blend_chain": ours_with_history,
}


# --- LlamaIndex -------------------------------------------------------------------------------------------------------


def query(llm: LlamaBlend, texts: list[str], header: bool = False, **options: Any) -> str:
    engine = llama_index(texts, header).as_query_engine(llm=llm, similarity_top_k=K, **options)
    return str(engine.query(QUESTION))


def chat(llm: LlamaBlend, texts: list[str], mode: ChatMode) -> str:
    return str(llama_index(texts).as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=K).chat(QUESTION))


def llama_index(texts: list[str], header: bool = False) -> VectorStoreIndex:
    nodes = [TextNode(text=text, metadata={"file": f"{n}.txt"} if header else {}) for n, text in enumerate(texts)]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(8))


LLAMA: dict[str, Callable[[LlamaBlend, list[str]], str]] = {
    "compact": partial(query, response_mode=ResponseMode.COMPACT),
    "compact, nodes with metadata": partial(query, header=True, response_mode=ResponseMode.COMPACT),
    "refine": partial(query, response_mode=ResponseMode.REFINE),
    "tree_summarize": partial(query, response_mode=ResponseMode.TREE_SUMMARIZE),
    "accumulate": partial(query, response_mode=ResponseMode.ACCUMULATE),
    "compact_accumulate": partial(query, response_mode=ResponseMode.COMPACT_ACCUMULATE),
    "BlendSynthesizer": lambda llm, texts: query(llm, texts, True, response_synthesizer=BlendSynthesizer(llm)),
    "chat engine, context": partial(chat, mode=ChatMode.CONTEXT),
    "chat engine, condense_plus_context": partial(chat, mode=ChatMode.CONDENSE_PLUS_CONTEXT),
}


# --- the comparison ---------------------------------------------------------------------------------------------------


def messages_of(prompt: Prompt) -> list[tuple[str, str]]:
    """The framework's messages for a chat template without tools: tool results come before the question."""
    messages: list[tuple[str, str]] = []
    for message in prompt.messages:
        if message.role == "tool":
            messages[-1] = ("user", f"{message.content}\n\n{messages[-1][1]}")
        elif message.content:
            messages.append((message.role, message.content))
    return messages


def check_calls(calls: list[Call], engine: Engine, tokenizer: Any, ratio: float | None) -> None:
    """Each call reads transformers' own ids and answers as the engine; at ratio 1.0 the answer is full prefill's."""
    assert calls
    for prompt, stream in calls:
        messages = messages_of(prompt)
        turns = [{"role": role, "content": content} for role, content in messages]
        own_ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert engine.match(prompt).token_ids == own_ids
        plain = Prompt.from_messages(messages)
        options = {"max_tokens": 12, "recompute_ratio": ratio}
        assert stream.result.token_ids == engine.generate(plain, **options).token_ids
        if ratio == 1.0:
            assert stream.result.token_ids == engine.generate(plain, mode="full", max_tokens=12).token_ids


def measured(framework: str, chain: str, llm: BlendModel, calls: list[Call], given: Sequence[str]) -> Row:
    """given: the passages that the framework put into its prompts, each as often as it did."""
    chunks = [chunk for _, stream in calls for chunk in stream.result.report.chunks if chunk.hit]
    num_given = sum(len(llm.engine.renderer.chunk_ids(text)) for text in given)
    share = round(sum(chunk.num_tokens for chunk in chunks) / num_given, 3)
    return Row(framework, chain, type(llm).__name__, len(calls), len(given), len(chunks), share)


def passages_sent(calls: list[Call], passages: list[str]) -> list[str]:
    """The passages in what the framework sent, each as often as it is there."""
    sent = [message.content for prompt, _ in calls for message in prompt.messages]
    return [text for text in passages for _ in range(sum(each.count(text) for each in sent))]


@pytest.fixture(scope="module")
def tokenizer(chat_model_path):
    """The chat model's tokenizer, as transformers loads it."""
    return AutoTokenizer.from_pretrained(chat_model_path)


@pytest.fixture(scope="module")
def table():
    """The rows that the tests of this file add; saved when all ran and it is asked."""
    rows: list[Row] = []
    yield rows
    if os.environ.get(UPDATE) == "1" and len(rows) == 2 * len(LANGCHAIN) + len(LLAMA) + 2:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({"schema_version": 2, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def check_published(row: Row) -> None:
    """The row is the published one of its chain and model, unless the table is being rewritten."""
    if os.environ.get(UPDATE) == "1":
        return
    published = [Row(**each) for each in json.loads(RESULTS.read_text())["rows"]]
    same = [each for each in published if (each.framework, each.chain, each.llm) == (row.framework, row.chain, row.llm)]
    assert same == [row], f"{RESULTS.name} says otherwise; if this is meant, run with {UPDATE}=1 and look at the diff"


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
@pytest.mark.parametrize("chain", list(LANGCHAIN))
@pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")
def test_langchain_reuses_every_chunk_when_only_the_llm_is_swapped(
    chain, kind, chat_engine, tokenizer, passages, calls, table
):
    retriever = FixedRetriever(texts=passages[:K])
    llm = kind(engine=chat_engine, max_tokens=12)
    answer = LANGCHAIN[chain](llm, retriever)
    row = measured("langchain", chain, llm, calls, passages_sent(calls, passages))
    table.append(row)
    check_published(row)
    assert (row.given, row.reused) == (K, K)
    assert row.token_share > 0.95
    assert answer == calls[-1][1].result.text
    check_calls(calls, chat_engine, tokenizer, ratio=None)
    calls.clear()
    LANGCHAIN[chain](kind(engine=chat_engine, max_tokens=12, recompute_ratio=1.0), retriever)
    check_calls(calls, chat_engine, tokenizer, ratio=1.0)


@pytest.mark.parametrize("mode", list(LLAMA))
def test_llamaindex_reuses_every_chunk_when_only_the_llm_is_swapped(
    mode, chat_engine, tokenizer, passages, calls, table
):
    llm = LlamaBlend(engine=chat_engine, max_tokens=12)
    LLAMA[mode](llm, passages[:K])
    row = measured("llamaindex", mode, llm, calls, passages_sent(calls, passages))
    table.append(row)
    check_published(row)
    assert row.given == row.reused >= K
    assert row.token_share > 0.95
    check_calls(calls, chat_engine, tokenizer, ratio=None)
    calls.clear()
    LLAMA[mode](LlamaBlend(engine=chat_engine, max_tokens=12, recompute_ratio=1.0), passages[:K])
    check_calls(calls, chat_engine, tokenizer, ratio=1.0)


def test_of_documents_with_escaped_line_breaks_the_lines_are_reused(chat_engine, tokenizer, passages, calls, table):
    broken = [text for text in passages if "\n" in text]
    asked = ChatBlend(engine=chat_engine, max_tokens=12)
    list_repr(asked, FixedRetriever(texts=broken))
    table.append(measured("langchain", "context=retriever", asked, calls, broken))
    table[-1].note = "the documents' Python repr: line breaks are escaped"
    check_calls(calls, chat_engine, tokenizer, ratio=None)
    calls.clear()
    llama = LlamaBlend(engine=chat_engine, max_tokens=12)
    query(llama, broken, response_mode=ResponseMode.SIMPLE_SUMMARIZE)
    table.append(measured("llamaindex", "simple_summarize", llama, calls, broken))
    table[-1].note = "LlamaIndex prints a Python list (run-llama/llama_index#22392)"
    check_calls(calls, chat_engine, tokenizer, ratio=None)
    for row in table[-2:]:
        check_published(row)
        assert row.reused == len(broken)
        assert row.token_share > 0.9
