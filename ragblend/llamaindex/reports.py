"""Reports of a BlendLLM's answers in what LlamaIndex' query engines, synthesizers and chat engines return.

These components keep only the text of an LLM's answer. LlamaIndex' instrumentation calls a span handler at the
beginning and the end of each of their calls; so it is known in which calls an LLM is called, and what they return.

Depends on llama-index-core, not on engines.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    PydanticResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.instrumentation import root_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers import BaseSynthesizer

_RESPONSES = (
    Response,
    PydanticResponse,
    StreamingResponse,
    AsyncStreamingResponse,
    AgentChatResponse,
    StreamingAgentChatResponse,
)
_COMPONENTS = (BaseChatEngine, BaseQueryEngine, BaseRetriever, BaseSynthesizer)


class _Call(BaseSpan):
    """Call of a method of LlamaIndex: the call that it is a part of, and the response that it returned."""

    parent: Any = None
    instance: Any = None
    arguments: Any = None
    response: Any = None
    reports: Any = None  # what add_report fills; None until a BlendLLM is called in this call

    def and_parents(self) -> Iterator[_Call]:
        """Yield this call and the calls that it is a part of, the innermost first."""
        call: _Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def attach_reports(self) -> None:
        """Put the reports into the metadata of the response, once both exist."""
        if self.response is not None and self.reports is not None:
            metadata = getattr(self.response, "metadata", None)  # a StreamingAgentChatResponse declares none
            self.response.metadata = {**(metadata or {}), "ragblend": self.reports}


_resumed: ContextVar[_Call | None] = ContextVar("ragblend_resumed_call", default=None)
"""The call whose stream is being read: some synthesizers call the LLM only then, when the call has returned."""


class _CallTracker(BaseSpanHandler[_Call]):
    """Keeps the running calls by their ids."""

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> _Call:
        parent = _resumed.get() or self.open_spans.get(parent_span_id or "")
        return _Call(id_=id_, parent=parent, instance=instance, arguments=bound_args.arguments)

    def prepare_to_exit_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> _Call | None:
        call = self.open_spans.get(id_)
        if call is not None and isinstance(result, _RESPONSES):
            if isinstance(instance, BaseSynthesizer) and isinstance(result, StreamingResponse):
                result.response_gen = _resume(call, result.response_gen)
            elif isinstance(instance, BaseSynthesizer) and isinstance(result, AsyncStreamingResponse):
                result.response_gen = _aresume(call, result.response_gen)
            call.response = result
            call.attach_reports()
        return call

    def prepare_to_drop_span(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, err: Any = None, **kwargs: Any
    ) -> _Call | None:
        return self.open_spans.get(id_)

    def calls(self) -> Iterator[_Call]:
        """Yield the calls that the caller is a part of, the innermost first."""
        call = self.open_spans.get(active_span_id.get() or "")
        return iter(()) if call is None else call.and_parents()


def _resume(call: _Call, pieces: Generator[str]) -> Generator[str]:
    """Yield `pieces` of a stream; what is called to make them is a part of `call`."""
    with closing(pieces):
        while True:
            token = _resumed.set(call)
            try:
                piece = next(pieces)
            except StopIteration:
                return
            finally:
                _resumed.reset(token)
            yield piece


async def _aresume(call: _Call, pieces: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(pieces):
        while True:
            token = _resumed.set(call)
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                return
            finally:
                _resumed.reset(token)
            yield piece


_tracker = _CallTracker()
root_dispatcher.add_span_handler(_tracker)


def open_reports() -> list[dict[str, Any]]:
    """Return the dictionaries for the report of an answer that begins now, one for each call that it is a part of.

    Each is `metadata["ragblend"]` of the call's response. `add_report` fills them, for a stream after its end.
    """
    calls = list(_tracker.calls())
    for call in calls:
        if call.reports is None:
            call.reports = {}
            call.attach_reports()
    return [call.reports for call in calls]


def add_report(reports: Sequence[dict[str, Any]], report: dict[str, Any]) -> None:
    """Write an answer's report into `reports`: its values, and the report itself at the end of the list "calls"."""
    for each in reports:
        each.update(report)
        each.setdefault("calls", []).append(report)


def carries_chunks(text: str) -> bool:
    """Return False for a prompt with this text that a component of LlamaIndex sends for another purpose than an answer.

    Examples are a chat engine that rewrites a question, and a retriever that generates questions. The prompt of an
    answer contains a node of its synthesizer. Returns True for a prompt that no component sends.
    """
    components = [call for call in _tracker.calls() if isinstance(call.instance, _COMPONENTS)]
    texts: list[str] = []  # of the outermost synthesizer, because it may summarize its own answers
    for call in components:
        if isinstance(call.instance, BaseSynthesizer):
            nodes = call.arguments.get("nodes") or ()
            texts = [node.get_content() for node in nodes] or list(call.arguments.get("text_chunks") or texts)
    return not components or any(part.strip() and part.strip() in text for part in texts)
