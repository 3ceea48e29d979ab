"""LangChain retrieval over a ragblend index, and chains that name every retrieved document as a chunk.

`create_blend_chain` takes any LangChain retriever, because a chunk's KV is found by its tokens. Depends on
langchain-core, the index and `ragblend.llm`, not on vector stores (see `ragblend.vectorstores`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from ragblend.config import Settings
from ragblend.corpus.citations import describe_source
from ragblend.errors import UsageError
from ragblend.frameworks.conversation import REPHRASE
from ragblend.index import ChunkIndex, SearchHit, open_index
from ragblend.llm import BlendLLM, ChatBlend
from ragblend.option_fields import default_of

try:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.messages import (
        BaseMessage,
        HumanMessage,
        SystemMessage,
        convert_to_messages,
    )
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import (
        AddableDict,
        Runnable,
        RunnableBranch,
        RunnableGenerator,
        RunnableLambda,
        RunnablePassthrough,
    )
    from langchain_core.tools import BaseTool, create_retriever_tool

    from ragblend.langchain.model import unwrap_bindings
except ImportError as error:
    raise ImportError("ragblend.chains needs LangChain: pip install 'ragblend[langchain]'") from error

RetrieverLike = Runnable[str, list[Document]] | Callable[[str], list[Document]]
"""A LangChain retriever, or a function from a question to documents."""

REPHRASE_PROMPT = ChatPromptTemplate.from_messages(
    [("system", REPHRASE), MessagesPlaceholder("chat_history"), ("human", "{input}")]
)
"""Prompt of `create_history_aware_blend_chain` for a question that needs no earlier turn."""


class BlendRetriever(BaseRetriever):
    """Retriever that returns chunks of a ragblend index as LangChain documents. By default the best chunk is first.

    `index` is an open ChunkIndex or its folder. `k`, `neighbours` and `order` are arguments of `ChunkIndex.search`. A
    call may override them: `retriever.invoke(question, k=3)`.
    """

    index: Any
    k: int = default_of(Settings, "k")
    neighbours: int = default_of(Settings, "neighbours")
    order: Literal["score", "document"] = default_of(Settings, "order")

    def model_post_init(self, context: Any, /) -> None:
        """Open the index if it is given as a folder."""
        super().model_post_init(context)
        if isinstance(self.index, str | Path):
            self.index = open_index(self.index)
        if not isinstance(self.index, ChunkIndex):
            raise UsageError(f"index is a {type(self.index).__name__}; pass an open index or the path of its folder")

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        neighbours: int | None = None,
        order: Literal["score", "document"] | None = None,
    ) -> list[Document]:
        hits = self.index.search(
            query,
            self.k if k is None else k,
            neighbours=self.neighbours if neighbours is None else neighbours,
            order=order or self.order,
        )
        return [_document(hit) for hit in hits]


def _document(hit: SearchHit) -> Document:
    chunk = hit.chunk
    place = {"source": chunk.source, "start": chunk.start, "end": chunk.end, "chunk_id": chunk.id}
    return Document(chunk.text, id=chunk.id, metadata={**place, **chunk.metadata, "score": hit.score, "rank": hit.rank})


# --- chains -----------------------------------------------------------------------------------------------------------


def create_blend_chain(
    retriever: RetrieverLike, llm: Runnable[Any, Any], *, system: str | None = None
) -> Runnable[Any, dict[str, Any]]:
    """Return a chain that retrieves documents for a question and answers from them.

    Invoke it with a question or `{"input": question}`. The prompt is the documents, then the question, separated by
    blank lines. The result has the fields:

    - `input`: the question. `context`: the documents. `sources`: their distinct sources.
    - `citations`: file, pages and heading of each document, such as `a.pdf, p. 12, "Leave"`.
    - `answer`: a text. `report`: a BlendReport as a dictionary.

    A stream yields the documents, then the answer piece by piece, then the report. `llm` is a ChatBlend or BlendLLM.
    Any other chat model receives the documents as plain text, and the result has no report. Invoking the chain with an
    empty question raises UsageError.
    """
    return _chain(RunnableLambda(_as_input), "input", retriever, _chat(llm), system).with_config(run_name="blend_chain")


def create_history_aware_blend_chain(
    retriever: RetrieverLike,
    llm: Runnable[Any, Any],
    *,
    system: str | None = None,
    rephrase: Runnable[dict[str, Any], str] | Callable[[dict[str, Any]], str] | None = None,
) -> Runnable[Any, dict[str, Any]]:
    """Return a `create_blend_chain` for conversations. Its input is `{"input": question, "chat_history": [messages]}`.

    If the history is not empty, `rephrase` receives the input and returns the question to search for. By default the
    llm rephrases with REPHRASE_PROMPT. If the model is too small to rephrase, pass `rephrase=lambda x: x["input"]`.
    `search_query` in the result is the question that was searched for.
    """
    chat = _chat(llm)
    # A question alone has no chunk, so a strict model would reject it.
    alone = chat.bind(strict=False) if _is_blend_model(chat) else chat
    rewrite = _runnable(rephrase) if rephrase is not None else REPHRASE_PROMPT | alone | StrOutputParser()
    first = RunnableLambda(itemgetter("input"))
    query = RunnableBranch((lambda inputs: not inputs.get("chat_history"), first), rewrite)
    asked = RunnableLambda(_as_input) | RunnablePassthrough.assign(search_query=query)
    return _chain(asked, "search_query", retriever, chat, system).with_config(run_name="history_aware_blend_chain")


def _chain(
    asked: Runnable[Any, Any], query: str, retriever: RetrieverLike, chat: Runnable[Any, Any], system: str | None
) -> Runnable[Any, dict[str, Any]]:
    """Return the chain input -> documents -> message -> result. `query`: the field of `asked` to search for."""
    return (
        asked
        | RunnablePassthrough.assign(context=RunnableLambda(itemgetter(query)) | _runnable(retriever))
        | RunnablePassthrough.assign(message=RunnableLambda(partial(_messages, system, _is_blend_model(chat))) | chat)
        | RunnableGenerator(_results, _aresults)
    )


def _chat(llm: Runnable[Any, Any]) -> Runnable[Any, Any]:
    return llm.as_chat() if isinstance(llm, BlendLLM) else llm


def _is_blend_model(llm: Runnable[Any, Any]) -> bool:
    return isinstance(unwrap_bindings(llm)[0], ChatBlend)


def _runnable(step: Any) -> Runnable[Any, Any]:
    return step if isinstance(step, Runnable) else RunnableLambda(step)


def _as_input(value: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"input": value}
    if not isinstance(value.get("input"), str) or not value["input"].strip():
        raise UsageError('the chain needs a question: invoke it with a string or {"input": question}')
    return dict(value)


def _messages(system: str | None, as_chunks: bool, values: Mapping[str, Any]) -> list[BaseMessage]:
    """Return the messages: system text, history, and one user message of the documents and the question."""
    documents, question = values["context"], values["input"]
    history = convert_to_messages(values.get("chat_history") or [])
    if as_chunks:
        blocks: list[str | dict[Any, Any]] = [_block(document) for document in documents]
        user = HumanMessage(content=[*blocks, {"type": "text", "text": question}])
    else:
        user = HumanMessage(content="\n\n".join([*(document.page_content for document in documents), question]))
    return [*([SystemMessage(system)] if system else []), *history, user]


def _block(document: Document) -> dict[str, Any]:
    extras = {"chunk_id": document.id or "", "source": str(document.metadata.get("source") or "")}
    return {"type": "text", "text": document.page_content, "extras": extras}


def _results(chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        yield from _result(chunk)


async def _aresults(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    async for chunk in chunks:
        for result in _result(chunk):
            yield result


def _result(chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of one step's output: a message becomes answer and report."""
    plain = {name: value for name, value in chunk.items() if name != "message"}
    if "context" in plain:
        sources = (str(document.metadata.get("source") or "") for document in plain["context"])
        plain["sources"] = [source for source in dict.fromkeys(sources) if source]
        plain["citations"] = [
            describe_source(str(document.metadata.get("source") or ""), document.metadata)
            for document in plain["context"]
        ]
    if plain:
        yield AddableDict(plain)
    message = chunk.get("message")
    if message is not None:
        yield AddableDict(answer=message if isinstance(message, str) else message.text)
        report = getattr(message, "response_metadata", {}).get("ragblend")
        if report is not None:
            yield AddableDict(report=report)


# --- long documents ---------------------------------------------------------------------------------------------------

NO_ANSWER = "not stated"
MAP_PROMPT = "{input}\n\nAnswer from the passages above. If they do not say, answer: {no_answer}"
REFINE_PROMPT = (
    "{input}\n\nThe answer from earlier passages: {answer}\n\nIf the passages above say more, give a better answer; "
    "else repeat it."
)
COMBINE_PROMPT = "These are answers from different parts of one document:\n\n{answers}\n\n{input}"


def create_long_document_chain(
    llm: Runnable[Any, Any],
    *,
    combine: Literal["reduce", "refine", "rerank"] = "reduce",
    instruction: str | None = None,
    system: str | None = None,
    window_tokens: int | None = None,
    overlap_tokens: int | None = None,
    chunk_tokens: int | None = None,
    map_prompt: str = MAP_PROMPT,
    refine_prompt: str = REFINE_PROMPT,
    combine_prompt: str = COMBINE_PROMPT,
    no_answer: str = NO_ANSWER,
) -> Runnable[Any, dict[str, Any]]:
    """Return a chain that answers from a document longer than the model's context length, in overlapping windows.

    Invoke it with `{"input": question, "document": document}`. If `instruction` replaces the question ("Summarize the
    document."), invoke it with the document alone. A document is a text, a LangChain Document or a list of either.

    The document is cut into chunks of at most `chunk_tokens` (default: 256, at most a quarter of a window). A window
    is a series of chunks with at most `window_tokens` (default: as many as fit into a prompt). It repeats about
    `overlap_tokens` (default: a tenth) of the previous window, in whole chunks. Each chunk is prefilled once. Other
    windows and later questions reuse its KV. `combine`:

    - "reduce": the model answers every window, then combines the answers, in several rounds if they are many.
    - "refine": the model answers the windows in turn, each with the answer so far.
    - "rerank": the model answers every window; the result is the answer whose tokens have the highest probability.

    "reduce" and "rerank" omit answers that contain `no_answer`; "" omits none. If "reduce" has only equal answers left,
    the result is that answer. All prompts may have the fields {input} and {no_answer}. `refine_prompt` may also have
    {answer}, `combine_prompt` {answers}. The result has the fields:

    - `input`: the question. `answer`: a text.
    - `windows`: a dictionary for each window, in order, with `source`, `start`, `last_source`, `end`, `answer`,
      `report`, and for "rerank" `score`. The last window of "refine", or a sole window, has no `answer` and `report`.
    - `report`: the BlendReport of `answer`, if a final prompt generated it; missing if an earlier answer was chosen.
    - `tokens`: the sums `num_chunk_tokens`, `num_prefilled_tokens` (of chunks that were not stored), `prompt_tokens`,
      `num_reused_tokens` and `num_recomputed_tokens`.

    A stream yields the windows, then the answer. `llm`: a ChatBlend or BlendLLM, with bound arguments or without.
    Raises UsageError for another llm, another `combine`, or a prompt with other fields.
    """
    if combine not in ("reduce", "refine", "rerank"):
        raise UsageError(f"combine is {combine!r}; choose reduce, refine or rerank")
    if not _is_blend_model(chat := _chat(llm)):
        raise UsageError(
            f"llm is a {type(llm).__name__}; long documents need ChatBlend or BlendLLM, which count tokens"
        )
    from ragblend.langchain.long_documents import LongDocumentChain

    sizes = {"window_tokens": window_tokens, "overlap_tokens": overlap_tokens, "chunk_tokens": chunk_tokens}
    asked = LongDocumentChain(
        chat, combine, instruction, system, sizes, map_prompt, refine_prompt, combine_prompt, no_answer
    )
    return asked.build().with_config(run_name="long_document_chain")


# --- agents -----------------------------------------------------------------------------------------------------------


def blend_tool(
    retriever: BaseRetriever,
    name: str = "search_documents",
    description: str = "Search the documents. Returns the passages that may answer the question.",
) -> BaseTool:
    """Return a tool for `create_agent` that searches with `retriever`.

    The artifact of its ToolMessage is the list of retrieved documents. In the background, ChatBlend prefills the
    documents that have no stored KV, and stores their KV.
    """
    return create_retriever_tool(retriever, name, description, response_format="content_and_artifact")
