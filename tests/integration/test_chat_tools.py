"""Tools and schemas through LangChain, on a random model: its answers are noise, and every one is valid.

The model is a real one on the real engine; what it says is noise, so every test is of form and of what is passed on.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from ragblend import open_index
from ragblend.chains import BlendRetriever
from ragblend.corpus.embedders import HashingEmbedder
from ragblend.errors import UsageError
from ragblend.llm import BlendLLM, ChatBlend
from ragblend.prompt.types import Chunk

Short = Annotated[str, Field(max_length=12)]


class Lamp(Enum):
    OIL = "oil"
    GAS = "gas"


class Room(BaseModel):
    floor: int = Field(ge=0, le=99)
    lamps: list[Lamp] = Field(max_length=3)


class Tower(BaseModel):
    """A lighthouse."""

    name: Short
    lit: bool
    rooms: list[Room] = Field(max_length=2)
    keeper: Short | None = None


class Branch(BaseModel):
    size: int = Field(ge=0, le=9)
    left: Branch | None


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["round", "square"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
}


@tool
def fill(litres: Annotated[int, Field(ge=0, le=99)], oil: Literal["whale", "rape"]) -> str:
    """Fill the lamp with oil."""
    return f"filled {litres} of {oil}"


@tool
def ring() -> str:
    """Ring the bell."""
    return "rang"


@pytest.fixture
def chat(chat_engine):
    return ChatBlend(engine=chat_engine, max_tokens=600)


# --- schemas ---


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Tower, Branch])  # tests/frameworks/test_schemas.py has the other kinds of schema
def test_a_class_of_several_levels_comes_back_as_one(chat, schema, method):
    # LangChain's strict form leaves open what refers to itself.
    for seed, strict in enumerate((None, False, None if schema is Branch else True)):
        held = chat.with_structured_output(schema, method=method, strict=strict)
        assert isinstance(held.bind(temperature=1.0, seed=seed).invoke("Which tower?"), schema)


def test_a_schema_may_refer_to_itself_and_hold_any_letters(chat):
    tree = {
        "title": "tree",
        "type": "object",
        "properties": {"größe": {"enum": ["schön", "日本", "🙂"]}, "ast": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["größe", "ast"],
    }
    jsonschema.validate(chat.with_structured_output(tree).invoke("Which?", temperature=1.0, seed=1), tree)


def test_a_format_that_forbids_nothing_is_no_obstacle(chat):
    schema = {"type": "object", "properties": {"at": {"type": "string", "format": "path", "maxLength": 4}}}
    held = chat.with_structured_output({**schema, "required": ["at"]})
    assert len(held.invoke("Which?")["at"]) <= 4


class Named(BaseModel):
    name: Short


@pytest.mark.parametrize("schema", [SCHEMA, Named])
async def test_schemas_stream_batch_and_await(chat, schema):
    held = chat.with_structured_output(schema)
    whole = held.invoke("Which?")
    grown = list(held.stream("Which?"))
    assert grown[-1] == whole
    assert schema is Named or len(grown) > 1
    assert [each async for each in held.astream("Which?")][-1] == whole
    assert await held.ainvoke("Which?") == whole
    assert held.batch(["Which?", "Which?"]) == [whole, whole]


def test_raw_answers_come_with_what_was_parsed(chat):
    for method in ("json_schema", "function_calling"):
        held = chat.with_structured_output(Tower, method=method, include_raw=True)
        found = held.invoke("Which tower?")
        assert isinstance(found["raw"], AIMessage)
        assert isinstance(found["parsed"], Tower)
        assert found["parsing_error"] is None


def test_a_called_tool_leaves_nothing_to_parse(chat):
    for schema in (Tower, SCHEMA):
        held = chat.with_structured_output(schema, tools=[ring], tool_choice="ring", include_raw=True)
        found = held.invoke("Which?")
        assert [call["name"] for call in found["raw"].tool_calls] == ["ring"]
        assert (found["parsed"], found["parsing_error"]) == (None, None)


def test_json_mode_is_any_object(chat):
    held = chat.with_structured_output(None, method="json_mode", include_raw=True)
    assert held.invoke("Which?", max_tokens=60)["raw"].content.startswith("{")


def test_a_schema_changes_no_character_of_the_prompt(chat, calls):
    chat.invoke("Which tower?", max_tokens=1)
    chat.with_structured_output(SCHEMA).invoke("Which tower?")
    assert calls[0][0] == calls[1][0]


def test_chunks_are_reused_under_a_schema(chat, passages):
    held = chat.with_structured_output(Tower, include_raw=True)
    found = held.invoke(f"{passages[0]}\n\n{passages[4]}\n\nWhich tower?")
    assert isinstance(found["parsed"], Tower)
    report = found["raw"].response_metadata["ragblend"]
    assert (report["num_chunks"], report["num_chunk_hits"]) == (2, 2)


def test_answers_are_held_without_any_framework_words_too(chat, chat_engine):
    held = {"regex": "[a-z]{4}"}
    assert chat.invoke("Q", structured_outputs=held).content.isalpha()
    assert BlendLLM(engine=chat_engine, call_options={"structured_outputs": held}).invoke("Q").isalpha()
    assert (
        chat.invoke("Q", response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}).content[0] == "{"
    )


# --- tools ---


@pytest.mark.parametrize(
    "choice", ["any", "required", True, "fill", "ring", {"type": "function", "function": {"name": "fill"}}]
)
def test_a_demanded_call_comes_and_its_arguments_follow_the_schema(chat, choice):
    message = chat.bind_tools([fill, ring], tool_choice=choice).invoke("Hello!")
    (call,) = message.tool_calls
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "stop"
    if choice in ("any", "required", True):
        assert call["name"] in ("fill", "ring")
    else:
        assert call["name"] == ("ring" if choice == "ring" else "fill")
    assert call["name"] == "fill" or call["args"] == {}
    assert {"fill": fill, "ring": ring}[call["name"]].invoke(call).tool_call_id == call["id"]


@pytest.mark.parametrize("tools", [[fill, ring], []])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_called_where_nothing_need_be(chat, choice, tools):
    message = chat.bind_tools(tools, tool_choice=choice).invoke("Hello!", max_tokens=20)
    assert message.tool_calls == []
    assert message.content


def test_several_calls_come_where_they_may(chat):
    several = chat.bind_tools([fill, ring], tool_choice="any", parallel_tool_calls=True)
    numbers = set()
    for seed in range(6):
        message = several.invoke("Hello!", temperature=1.0, seed=seed, max_tokens=300)
        numbers.add(len(message.tool_calls))
        assert len({call["id"] for call in message.tool_calls}) == len(message.tool_calls)
        assert all(call["name"] in ("fill", "ring") for call in message.tool_calls)
    assert max(numbers) > 1


async def test_streamed_calls_are_the_ones_of_an_answer_in_one_piece(chat):
    bound = chat.bind_tools([fill], tool_choice="any", parallel_tool_calls=True)
    whole = bound.invoke("Hello!", temperature=1.0, seed=3, max_tokens=300)
    chunks = list(bound.stream("Hello!", temperature=1.0, seed=3, max_tokens=300))
    later = [chunk async for chunk in bound.astream("Hello!", temperature=1.0, seed=3, max_tokens=300)]
    for pieces in (chunks, later):
        summed = pieces[0]
        for piece in pieces[1:]:
            summed += piece
        assert isinstance(summed, AIMessageChunk)
        made, wanted = summed.tool_calls[: len(whole.tool_calls)], whole.tool_calls
        assert [(call["name"], call["args"]) for call in made] == [(call["name"], call["args"]) for call in wanted]
        assert summed.usage_metadata == whole.usage_metadata
    assert sum(len(chunk.tool_call_chunks) for chunk in chunks) > len(whole.tool_calls) + 1  # in pieces, as they come


def test_a_call_that_was_cut_is_no_call(chat):
    bound = chat.bind_tools([fill], tool_choice="any")
    whole = bound.invoke("Hello!")
    assert len(whole.tool_calls) == 1
    assert whole.usage_metadata is not None
    end = len(chat.engine.renderer.text_ids("}}\n</tool_call>")) + 2
    cut = bound.invoke("Hello!", max_tokens=whole.usage_metadata["output_tokens"] - end)
    assert (cut.tool_calls, cut.response_metadata["finish_reason"]) == ([], "length")
    assert cut.invalid_tool_calls[0]["name"] == "fill"


def test_tools_and_a_schema_give_one_or_the_other(chat):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for seed in range(4):
        both = chat.bind_tools([fill], response_format=wanted)
        message = both.invoke("Hello!", temperature=1.0, seed=seed)
        if message.tool_calls:
            assert message.content == ""
        else:
            jsonschema.validate(json.loads(message.content), SCHEMA)


def test_a_tool_with_an_unsupported_schema_is_named_with_its_keyword(chat):
    @tool
    def pick(which: set[str]) -> str:
        """Pick some."""
        return ""

    with pytest.raises(UsageError, match=r'after .*pick.*: Unimplemented keys: \["uniqueItems"\]\)'):
        chat.bind_tools([ring, pick], tool_choice="any").invoke("Hello!")


def test_an_agent_calls_two_tools_and_answers_from_blended_documents(chat, passages, tmp_path):
    """A random model calls no tool unprompted: middleware demands the next one, as in a user's agent."""
    plan = {0: "search", 1: "fill"}

    @wrap_model_call
    def demanded(request: Any, handler: Any) -> Any:
        turns = sum(isinstance(message, AIMessage) for message in request.messages)
        return handler(request.override(tool_choice=plan.get(turns, "none"), model_settings={"max_tokens": 100}))

    with open_index(tmp_path, HashingEmbedder(), create=True) as index:
        for number, text in enumerate(passages):
            index.add_document(f"{number}.txt", "", [Chunk(text, f"{number}.txt")])
        retriever = BlendRetriever(index=index, k=3)

        @tool(response_format="content_and_artifact")
        def search(about: Literal["lamp", "boat"]) -> tuple[str, list[Document]]:
            """Search the documents."""
            found = retriever.invoke(about)
            return "\n\n".join(each.page_content for each in found), found

        agent: Any = create_agent(chat, [search, fill], middleware=[demanded])
        messages = agent.invoke({"messages": [("user", "Who repairs the lamp?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert [message.name for message in messages if message.type == "tool"] == ["search", "fill"]
    assert messages[4].content.startswith("filled ")
    reports = [message.response_metadata["ragblend"] for message in messages if message.type == "ai"]
    assert [report["num_chunk_hits"] for report in reports] == [0, 3, 3]
    assert reports[-1]["num_reused_tokens"] > 0


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy, AutoStrategy])
def test_an_agent_answers_in_the_form_it_was_made_for(chat, strategy):
    agent: Any = create_agent(chat, [], response_format=strategy(Room))
    found = agent.invoke({"messages": [("user", "Which room?")]}, {"recursion_limit": 4})["structured_response"]
    assert isinstance(found, Room)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"tools": [], "tool_choice": "any"}, "tool_choice is 'any', but the call has no tools"),
        ({"tool_choice": "sing"}, "tool_choice is 'sing'; choose auto, any, required, none or one of fill, ring"),
        ({"structured_outputs": {"regex": "a"}}, "the call has tools and regex"),
        ({"response_format": {"type": "xml"}}, "response_format is .*'xml'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}}, "leave one of them out"),
        ({"functions": [{"name": "x"}]}, "pass tools instead"),
    ],
)
def test_unsupported_requests_are_refused_with_the_reason(chat, call, said):
    with pytest.raises(UsageError, match=said):
        chat.bind_tools([fill, ring]).invoke("Q", **call)


def test_other_ways_are_named(chat, chat_engine):
    with pytest.raises(UsageError, match="method is 'magic'; choose one of json_schema, function_calling, json_mode"):
        chat.with_structured_output(SCHEMA, method="magic")
    with pytest.raises(UsageError, match="schema is None"):
        chat.with_structured_output(None)
    with pytest.raises(NotImplementedError, match="as_chat"):
        BlendLLM(engine=chat_engine).invoke("Q", tools=[{"name": "x"}])
    with pytest.raises(NotImplementedError, match="as_chat"):
        BlendLLM(engine=chat_engine).with_structured_output(Room)
    with pytest.raises(NotImplementedError, match="as_chat"):
        BlendLLM(engine=chat_engine).bind_tools([fill])
