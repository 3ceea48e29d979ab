"""Chunks are reused in every turn of a conversation, in both frameworks; other content is rejected by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    VideoBlock,
)

from ragblend.errors import UsageError
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llm import ChatBlend
from ragblend.precompute import precompute_documents

A, B, C = "The bakery was founded by Maren Holt.", "The lighthouse is painted green.", "The market is on Thursdays."
LONG = "The ferry leaves at nine, at noon and at six; in winter it waits for the train from the north, which is late."
ASSISTANT, SYSTEM, TOOL, USER = MessageRole.ASSISTANT, MessageRole.SYSTEM, MessageRole.TOOL, MessageRole.USER
CALL = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])


@pytest.fixture
def engine(tiny_engine, chat_renderer):
    made = tiny_engine(renderer=chat_renderer)
    precompute_documents([A, B, C, LONG], made)
    return made


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def marked(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "extras": {"chunk_id": said[:3]}}


FORMS: dict[str, tuple[int, list[BaseMessage]]] = {
    "in every turn": (
        4,
        [
            SystemMessage(f"Use this.\n\n{A}"),
            HumanMessage(f"{B}\n\nWhat colour?"),
            AIMessage(f"As you wrote:\n{B}"),
            HumanMessage(f"{C}\n\nWhen?"),
        ],
    ),
    "after the question": (2, [HumanMessage(f"Who?\n\n{A}\n\n{LONG}")]),
    "a question that is a short text known": (1, [HumanMessage(f"{A}\n\n{B}")]),
    "between question and instructions": (2, [HumanMessage(f"Who?\n\n{A}\n\n{B}\n\nBe brief.")]),
    "marked, after the question": (2, [HumanMessage([text("Who?"), marked(A), marked("Never ingested.")])]),
    "marked in an answer": (1, [HumanMessage("Hi"), AIMessage([text("It says: "), marked(A)]), HumanMessage("Who?")]),
    "blocks that are texts known": (2, [HumanMessage([text(A), text(B), text("Who?")])]),
    "a document block": (1, [HumanMessage([{"type": "text-plain", "text": A}, text("Who?")])]),
    "a separate turn": (2, [HumanMessage(A), HumanMessage(B), HumanMessage("Who?")]),
    "what a tool returned": (2, [HumanMessage("Who?"), CALL, ToolMessage(f"{A}\n\n{B}", tool_call_id="1")]),
    "blocks of a tool": (2, [HumanMessage("Who?"), CALL, ToolMessage([marked(A), text(B)], tool_call_id="1")]),
    "a tool's artifact": (
        1,
        [HumanMessage("Who?"), CALL, ToolMessage(f'[{{"x": "{A}"}}]', tool_call_id="1", artifact=[Document(A)])],
    ),
}
TOOLS = [{"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_found_in_every_form_that_langchain_sends(form, engine):
    count, messages = FORMS[form]
    report = ChatBlend(engine=engine, max_tokens=1).invoke(messages).response_metadata["ragblend"]
    num_missing = sum("Never" in str(message.content) for message in messages)
    assert (report["num_chunks"], report["num_chunk_hits"]) == (count, count - num_missing)


@pytest.mark.parametrize("form", [name for name in FORMS if "tool" in name])
def test_chunks_in_tool_results_are_found_with_bound_tools_too(form, engine):
    count, messages = FORMS[form]
    chat = ChatBlend(engine=engine, max_tokens=1).bind_tools(TOOLS, tool_choice="none")
    report = chat.invoke(messages).response_metadata["ragblend"]
    assert (report["num_chunks"], report["num_chunk_hits"]) == (count, count)


def test_a_marked_text_is_a_chunk_even_with_an_empty_mark(engine):
    blocks_sent = [{**text(A), "extras": {"chunk_id": ""}}, text("Who?")]
    request = ChatBlend(engine=engine)._request([HumanMessage(blocks_sent)], None)
    read = engine.renderer.plain_text(engine.renderer.render(request.prompt))
    assert f"{A}\n\nWho?" in read


def test_the_last_block_is_the_question_even_if_it_was_ingested(engine):
    answer = ChatBlend(engine=engine, max_tokens=1).invoke([HumanMessage([text(A), text("x"), text(B)])])
    assert answer.response_metadata["ragblend"]["num_chunks"] == 1


def cited(*texts: str) -> CitableBlock:
    return CitableBlock(title="a", source="a.md", content=[TextBlock(text=each) for each in texts])


def blocks(role: MessageRole, *of: Any) -> ChatMessage:
    return ChatMessage(role=role, blocks=list(of))


LLAMA_FORMS: dict[str, tuple[int, Sequence[ChatMessage]]] = {
    "in every turn": (
        3,
        [
            ChatMessage(role=SYSTEM, content=f"Use this.\n\n{A}"),
            ChatMessage(role=USER, content=f"{B}\n\nWhat colour?"),
            blocks(ASSISTANT, ThinkingBlock(content="Hm."), TextBlock(text="Green.")),
            ChatMessage(role=USER, content=f"{C}\n\nWhen?"),
        ],
    ),
    "after the question": (2, [ChatMessage(role=USER, content=f"Who?\n\n{A}\n\n{LONG}")]),
    "text blocks": (2, [blocks(USER, TextBlock(text=A), TextBlock(text=B), TextBlock(text="Who?"))]),
    "blocks to cite": (2, [blocks(USER, cited(A, B), CachePoint(cache_control={"type": "x"}), TextBlock(text="Who?"))]),
    "what a tool returned": (
        2,
        [
            ChatMessage(role=USER, content="Who?"),
            ChatMessage(role=TOOL, content=f"{A}\n\n{B}", additional_kwargs={"tool_call_id": "1"}),
        ],
    ),
}


@pytest.mark.parametrize("form", LLAMA_FORMS)
def test_chunks_are_found_in_every_form_that_llamaindex_sends(form, engine):
    count, messages = LLAMA_FORMS[form]
    report = LlamaBlend(engine=engine, max_tokens=1).chat(messages).raw["ragblend"]
    assert (report["num_chunks"], report["num_chunk_hits"]) == (count, count)


# --- what is no text ---

PICTURE = {"url": "http://localhost/x.png"}


@pytest.mark.parametrize(
    ("block", "kind", "instead"),
    [
        ({"type": "image_url", "image_url": PICTURE}, "image_url", "send a description"),
        ({"type": "image", **PICTURE}, "image", "send a description"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "audio", "transcript"),
        ({"type": "video", **PICTURE}, "video", "description"),
        ({"type": "file", **PICTURE}, "file", "its text"),
    ],
)
@pytest.mark.parametrize("message", [SystemMessage, HumanMessage, AIMessage, ToolMessage])
def test_langchain_content_that_is_no_text_is_an_error_with_a_replacement(message, block, kind, instead, engine):
    said = message(content=[text("See:"), block], **({"tool_call_id": "1"} if message is ToolMessage else {}))
    with pytest.raises(UsageError, match=f"type '.*{kind}'.*text only.*{instead}"):
        ChatBlend(engine=engine).invoke([said, HumanMessage("What is it?")])


@pytest.mark.parametrize(
    ("block", "instead"),
    [
        (ImageBlock(**PICTURE), "send a description"),
        (AudioBlock(**PICTURE), "transcript"),
        (VideoBlock(**PICTURE), "description"),
        (DocumentBlock(**PICTURE), "its text"),
        (CitableBlock(title="a", source="a", content=[ImageBlock(**PICTURE)]), "send a description"),
    ],
)
def test_llamaindex_content_that_is_no_text_is_an_error_with_a_replacement(block, instead, engine):
    with pytest.raises(UsageError, match=f"text only.*{instead}"):
        LlamaBlend(engine=engine).chat([blocks(USER, TextBlock(text="What is it?"), block)])


def test_what_a_model_thought_is_no_part_of_the_conversation(engine):
    thought = AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "Hello."}])
    chat = ChatBlend(engine=engine)
    turns = chat._request([HumanMessage("Hi"), thought, HumanMessage("Who?")], None).prompt.messages
    assert [turn.content for turn in turns] == ["Hi", "Hello.", "Who?"]
