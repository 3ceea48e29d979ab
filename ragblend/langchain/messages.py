"""LangChain's messages as those of a Prompt with their chunks, and chat prompts as strings that keep their messages.

Depends on langchain-core and `frameworks.content`, not on models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ChatMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.prompt_values import ChatPromptValue, PromptValue

from ragblend.engine.report import Generation
from ragblend.errors import UsageError
from ragblend.frameworks.content import is_media, text_and_chunks
from ragblend.frameworks.model import NamedMessage
from ragblend.prompt.types import Chunk, Message, ToolCall

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class PromptWithRoles(str):
    """Chat prompt as a string, which BaseLLM requires, with its messages."""

    messages: Sequence[BaseMessage]

    @classmethod
    def from_messages(cls, messages: Sequence[BaseMessage]) -> Self:
        """Return the messages as a string with one line per message."""
        # The text names the roles, because callbacks show it and answer caches compare it.
        prompt = cls("\n".join(f"{message.type}: {message.text}" for message in messages))
        prompt.messages = messages
        return prompt


class _RolesPromptValue(ChatPromptValue):
    """Chat prompt whose string has its messages."""

    def to_string(self) -> str:
        """Return the messages as a string with the attribute `messages`."""
        return PromptWithRoles.from_messages(self.messages)


def keep_roles(prompt: PromptValue) -> PromptValue:
    """Return a chat prompt whose string has its messages; any other prompt unchanged."""
    if isinstance(prompt, ChatPromptValue) and not isinstance(prompt, _RolesPromptValue):
        if not prompt.messages:
            raise UsageError("no messages given; pass at least one message with text")
        return _RolesPromptValue(messages=prompt.messages)
    return prompt


def named_message(message: BaseMessage) -> NamedMessage:
    """Return a LangChain message as a Message, and its chunks. Raises UsageError for an unsupported role or content."""
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    role = _ROLES.get(name)
    if role is None:
        raise UsageError(f"a message has role {name!r}; use system, user, assistant or tool")
    if isinstance(message.content, str):
        text, chunks = message.content, list[Chunk]()
    else:
        # An answer's blocks other than text (tool calls, reasoning) are not part of the conversation.
        blocks = [block for block in message.content if role != "assistant" or _is_conversation_block(block)]
        text, chunks = text_and_chunks(blocks)
    artifact = getattr(message, "artifact", None)
    documents = artifact if isinstance(artifact, list | tuple) else [artifact]
    chunks += [_document_chunk(item) for item in documents if isinstance(item, Document | Chunk)]
    calls = (
        ToolCall(call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"] or "")
        for call in getattr(message, "tool_calls", ())
    )
    return Message(role, text, tuple(calls), getattr(message, "tool_call_id", ""), message.name or ""), chunks


def _is_conversation_block(block: str | Mapping[str, Any]) -> bool:
    """Return True for an answer's text, and for media, which `text_and_chunks` then rejects."""
    kind = "text" if isinstance(block, str) else str(block.get("type", "text"))
    return kind.startswith("text") or is_media(kind)


def _document_chunk(document: Document | Chunk) -> Chunk:
    if isinstance(document, Chunk):
        return document
    return Chunk(document.page_content.strip(), str(document.metadata.get("source") or ""), metadata=document.metadata)


def token_usage(result: Generation) -> UsageMetadata:
    """Return the token counts of an answer in LangChain's form; reused prompt tokens are `cache_read`."""
    report = result.report
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.completion_tokens,
        total_tokens=report.prompt_tokens + report.completion_tokens,
        input_token_details={"cache_read": report.num_reused_tokens},
    )
