"""Schemas and tools on vLLM, in this process and behind HTTP: its structured outputs hold the answer, we read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from demo_texts import QUESTION, A, B
from harness import SMALL
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import MessageRole
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field
from served import served_demo

from ragblend import load_engine
from ragblend.errors import RagblendError
from ragblend.llamaindex import BlendLLM
from ragblend.llm import ChatBlend
from ragblend.precompute import precompute_documents

COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}  # the demo model gets lost in blank lines
# Chunks as short as these would be left to vLLM's prefix cache, which has the turns before them.
OPTIONS = {**SMALL, "structured_outputs_config": COMPACT, "enable_prefix_caching": False}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["town", "firm"]},
        "place": {
            "type": "object",
            "properties": {"known": {"type": "boolean"}, "name": {"type": "string", "maxLength": 8}},
            "required": ["known", "name"],
            "additionalProperties": False,
        },
        "marks": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3},
    },
    "required": ["kind", "place", "marks"],
    "additionalProperties": False,
}


class Found(BaseModel):
    """What was found."""

    kind: Literal["town", "firm"]
    name: Annotated[str, Field(max_length=8)]


@tool
def look_up(who: Literal["George Keller", "Julia Bishop"]) -> str:
    """Where a person lives."""
    return "Kinport"


@tool
def ring() -> str:
    """Ring the bell."""
    return "rang"


# LlamaIndex reads annotations as they are, so these are given as values.
def search_documents(about: str) -> str:
    """Search the documents."""
    return f"{A}\n\n{B}"


def live(who: str) -> str:
    """Where a person lives."""
    return "Kinport"


search_documents.__annotations__ = {"about": Literal["people", "firms"], "return": str}
live.__annotations__ = {"who": Literal["George Keller", "Julia Bishop"], "return": str}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    options = ("--max-model-len", "1024", "--structured-outputs-config", json.dumps(COMPACT))
    with served_demo(tmp_path_factory.mktemp("serve"), *options, "--no-enable-prefix-caching") as server:
        yield server.url


@pytest.fixture(scope="module", params=["server", "process"])
def chat(request, tmp_path_factory):
    store: Path | None = tmp_path_factory.mktemp("own") / "kv"
    options: dict[str, Any] = {"backend": "vllm", "vllm_options": OPTIONS}
    if request.param == "server":
        store, options = None, {"backend": request.getfixturevalue("url")}
    with load_engine("demo", store, on_miss="inline", **options) as engine:
        precompute_documents([A, B], engine)
        yield ChatBlend(engine=engine, max_tokens=200)


def test_a_schema_is_kept_over_blended_chunks(chat):
    held = chat.with_structured_output(SCHEMA, include_raw=True)
    found = held.invoke(f"{A}\n\n{B}\n\n{QUESTION}")
    jsonschema.validate(found["parsed"], SCHEMA)
    report = found["raw"].response_metadata["ragblend"]
    assert (report["num_chunk_hits"], report["mode"]) == (2, "blend")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_pydantic_class_comes_back(chat, method):
    assert isinstance(chat.with_structured_output(Found, method=method).invoke("Where is the firm?"), Found)


@pytest.mark.parametrize(
    ("asked", "valid"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'root ::= "lamp" | "boat"'}, lambda text: text in ("lamp", "boat")),
        ({"json": SCHEMA}, lambda text: json.loads(text)["kind"] in ("town", "firm")),
    ],
)
def test_every_kind_is_vllms_own(chat, asked, valid):
    assert valid(chat.invoke("What?", structured_outputs=asked).content)


@pytest.mark.parametrize("choice", ["any", "look_up", "ring"])
def test_a_demanded_call_comes(chat, choice):
    bound = chat.bind_tools([look_up, ring], tool_choice=choice)
    message = bound.invoke(f"{A}\n\nWhere does she live?")
    (call,) = message.tool_calls
    assert choice in ("any", call["name"])
    assert {"look_up": look_up, "ring": ring}[call["name"]].invoke(call).tool_call_id == call["id"]
    pieces = list(bound.stream(f"{A}\n\nWhere does she live?"))
    summed = pieces[0]
    for piece in pieces[1:]:
        summed += piece
    assert [(each["name"], each["args"]) for each in summed.tool_calls] == [(call["name"], call["args"])]


def test_unconstrained_answers_may_be_text_and_tool_results_are_read(chat):
    history = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[{"name": "look_up", "args": {"who": "George Keller"}, "id": "c1"}]),
        ToolMessage(A, tool_call_id="c1", name="look_up"),
    ]
    message = chat.bind_tools([look_up]).invoke(history, max_tokens=16)
    assert message.response_metadata["ragblend"]["num_chunk_hits"] == 1
    assert message.content or message.tool_calls


PLAN = ("search", "look_up", "none")  # the demo model was not trained on tools, so the test forces the next call


def test_an_agent_calls_two_tools_and_answers_from_blended_documents(chat):
    @tool(response_format="content_and_artifact")
    def search(about: Literal["people", "firms"]) -> tuple[str, list[Document]]:
        """Search the documents."""
        return f"{A}\n\n{B}", [Document(A), Document(B)]

    @wrap_model_call
    def demanded(request: Any, handler: Any) -> Any:
        turns = sum(isinstance(message, AIMessage) for message in request.messages)
        return handler(request.override(tool_choice=PLAN[turns], model_settings={"max_tokens": 60}))

    agent: Any = create_agent(chat, [search, look_up], middleware=[demanded])
    messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert [message.name for message in messages if message.type == "tool"] == ["search", "look_up"]
    reports = [message.response_metadata["ragblend"] for message in messages if message.type == "ai"]
    assert [report["num_chunk_hits"] for report in reports] == [0, 2, 2]
    assert reports[-1]["num_reused_tokens"] > 0


class Demanding(BlendLLM):
    """LlamaIndex has no middleware, so the next call is forced where its agents prepare a call."""

    def _prepare_chat_with_tools(self, tools: Any, chat_history: Any = None, **kwargs: Any) -> dict[str, Any]:
        num_results = sum(message.role == MessageRole.TOOL for message in chat_history or [])
        asked = super()._prepare_chat_with_tools(tools, chat_history=chat_history, **kwargs)
        return {**asked, "tool_choice": PLAN[num_results], "max_tokens": 60}


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_function_agent_does_it_too(chat, streaming):
    tools = [
        FunctionTool.from_defaults(each, name=name) for each, name in zip((search_documents, live), PLAN, strict=False)
    ]
    llm = Demanding(engine=chat.engine)
    answer = await FunctionAgent(tools=tools, llm=llm, streaming=streaming).run(QUESTION)
    assert [call.tool_name for call in answer.tool_calls] == ["search", "look_up"]
    assert answer.raw["ragblend"]["num_chunk_hits"] == 2


def test_what_vllm_cannot_follow_it_says(chat):
    with pytest.raises(RagblendError, match=r"(rejects the request|Grammar error|egex)"):
        chat.invoke("What?", structured_outputs={"regex": "("})
    assert chat.invoke("What?", max_tokens=2).content is not None
