"""A scripted model that calls tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class ToolCaller(BaseChatModel):
    """Model that calls the tool search_documents with `query`, and answers "mine" after the tool's result."""

    query: str

    @property
    def _llm_type(self) -> str:
        return "tool-caller"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> ToolCaller:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        call = {"name": "search_documents", "args": {"query": self.query}, "id": "1", "type": "tool_call"}
        answer = AIMessage("mine") if messages[-1].type == "tool" else AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])
