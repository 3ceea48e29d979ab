"""Tools and schemas through LlamaIndex, on a random model: its answers are noise, and every one is valid.

LlamaIndex reads the annotations of a tool's function as they are, so they are not strings here.
"""

from typing import Annotated, Any, Literal

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from ragblend.llamaindex import BlendLLM
from ragblend.precompute import precompute_documents

A = "The lighthouse on Gull Rock was built long ago, in 1872."
B = "Maren keeps the logbook of all the storms since 1901."


class Room(BaseModel):
    floor: int = Field(ge=0, le=99)
    lamp: Literal["oil", "gas"]


class Tower(BaseModel):
    """A lighthouse."""

    name: Annotated[str, Field(max_length=8)]
    rooms: list[Room] = Field(max_length=2)


def fill(litres: Literal[1, 2, 3], oil: Literal["whale", "rape"]) -> str:
    """Fill the lamp with oil."""
    return f"filled {litres} of {oil}"


def search(about: Literal["lamp", "logbook"]) -> str:
    """Search the documents."""
    return f"{A}\n\n{B}"


@pytest.fixture
def llm(tiny_engine, chat_renderer):
    engine = tiny_engine(renderer=chat_renderer)
    precompute_documents([A, B], engine)
    return BlendLLM(engine=engine, max_tokens=300)


TOOLS = [FunctionTool.from_defaults(search), FunctionTool.from_defaults(fill)]
ASKED = PromptTemplate("Which tower is {which}?")


async def test_structured_predict_gives_the_class(llm):
    assert isinstance(llm.structured_predict(Tower, ASKED, which="old"), Tower)
    assert isinstance(await llm.astructured_predict(Tower, ASKED, which="old"), Tower)
    assert isinstance(list(llm.stream_structured_predict(Tower, ASKED, which="old"))[-1], Tower)


def test_as_structured_llm_gives_the_class(llm):
    held = llm.as_structured_llm(Tower)
    assert isinstance(held.complete("Which tower?").raw, Tower)
    assert isinstance(held.chat([ChatMessage("Which tower?")]).raw, Tower)


async def test_demanded_calls_come_in_every_way_to_ask(llm):
    asked: dict[str, Any] = {"tools": TOOLS, "user_msg": "Hello!", "tool_required": True}
    responses = [
        llm.chat_with_tools(**asked),
        await llm.achat_with_tools(**asked),
        list(llm.stream_chat_with_tools(**asked))[-1],
        [each async for each in await llm.astream_chat_with_tools(**asked)][-1],
    ]
    calls = [llm.get_tool_calls_from_response(response)[0] for response in responses]
    assert {(call.tool_name, str(call.tool_kwargs)) for call in calls} == {
        (calls[0].tool_name, str(calls[0].tool_kwargs))
    }
    assert calls[0].tool_name in ("search", "fill")
    assert responses[0].raw["ragblend"]["mode"] == "blend"


def test_no_call_is_an_error_only_where_one_is_needed(llm):
    response = llm.chat_with_tools(TOOLS, user_msg="Hello!", max_tokens=8)
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="the answer calls no tool"):
        llm.get_tool_calls_from_response(response)


def test_predict_and_call_calls(llm):
    found = llm.predict_and_call(TOOLS[1:], user_msg="Fill it.", tool_required=True)
    assert str(found.response).startswith("filled ")


class Demanding(BlendLLM):
    """Demands two tool calls, which a random model would not make unprompted."""

    def _prepare_chat_with_tools(self, tools: Any, chat_history: Any = None, **kwargs: Any) -> dict[str, Any]:
        num_results = sum(message.role == MessageRole.TOOL for message in chat_history or [])
        choice = ("search", "fill", "none")[min(num_results, 2)]
        asked = super()._prepare_chat_with_tools(tools, chat_history=chat_history, **kwargs)
        return {**asked, "tool_choice": choice, "max_tokens": 100}


async def test_a_function_agent_calls_two_tools_and_answers_from_blended_documents(llm):
    agent = FunctionAgent(tools=TOOLS, llm=Demanding(engine=llm.engine), streaming=False)
    answer = await agent.run("Who keeps the lamp?")
    assert [call.tool_name for call in answer.tool_calls] == ["search", "fill"]
    assert str(answer.tool_calls[1].tool_output.content).startswith("filled ")
    assert answer.raw["ragblend"]["num_chunk_hits"] == 2


def test_calls_and_results_go_back_into_the_prompt(llm):
    call = ToolCallBlock(tool_call_id="c1", tool_name="search", tool_kwargs={"about": "lamp"})
    history = [
        ChatMessage("Who?"),
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(f"{A}\n\n{B}", role="tool", additional_kwargs={"tool_call_id": "c1", "name": "search"}),
    ]
    tools = [tool.metadata.to_openai_tool() for tool in TOOLS]
    matched = llm.engine.match(llm._chat_request(history, {"tools": tools}).prompt)
    text = "".join(llm.engine.renderer.token_texts(matched.token_ids))
    assert text.index("Who?") < text.index('{"about": "lamp"}') < text.index(A)
    assert len(matched.runs) == 2
