"""Structured answers: what is no schema is refused, what was cut is an error, in every form of the call.

The model is random: its answers are noise, and each follows its schema.
"""

# LangChain and LlamaIndex read annotations as they are, so they are not strings here.
import asyncio
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel, RootModel, model_validator
from typing_extensions import TypedDict as NewTypedDict

from ragblend.errors import UsageError
from ragblend.llamaindex import BlendLLM
from ragblend.llm import ChatBlend

Kind = Literal["round", "square"]
METHODS = ("json_schema", "function_calling", "json_mode")
ASKED = "Which tower?"


class Tower(BaseModel):
    """A lighthouse."""

    kind: Kind


class TowerDict(TypedDict):
    """A lighthouse."""

    kind: Kind


class NewTowerDict(NewTypedDict):
    """A lighthouse."""

    kind: Kind


@dataclass
class TowerData:
    """A lighthouse."""

    kind: Kind


class TowerTuple(NamedTuple):
    kind: Kind


class Kinds(RootModel[Kind]):
    """A kind."""


class Plain:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind


class Color(enum.Enum):
    RED = "red"


class Rejecting(Tower):
    @model_validator(mode="after")
    def reject(self) -> "Rejecting":
        raise ValueError("never true")


class Odd(BaseModel):
    call: Callable[[], None]


def build(kind: Kind) -> None:
    """Build a lighthouse."""


OBJECT = {"type": "object", "properties": {"kind": {"enum": ["round", "square"]}}, "required": ["kind"]}
REFERENCE = {"$ref": "#/$defs/tower", "$defs": {"tower": OBJECT}}
NO_SCHEMAS = [
    *(Color, Plain, int, str, bool, float, list, dict, type(None), BaseModel, Odd),
    *(list[int], dict[str, int], Literal["a"], Tower | None, Any),
    *("Tower", 3, True, [Tower], Tower(kind="round")),
]
SCHEMAS = {
    "pydantic": Tower,
    "typed dict": TowerDict,
    "typing_extensions": NewTowerDict,
    "dataclass": TowerData,
    "named tuple": TowerTuple,
    "function": build,
    "tool": tool(build),
    "object": OBJECT,
    "titled": {"title": "tower", "description": "A lighthouse.", **OBJECT},
    "reference": REFERENCE,
    "openai function": {"name": "tower", "parameters": OBJECT},
    "openai tool": {"type": "function", "function": {"name": "tower", "parameters": OBJECT}},
    "openai format": {"name": "tower", "schema": OBJECT},
    "openai response format": {"type": "json_schema", "json_schema": {"name": "tower", "schema": OBJECT}},
}
NO_OBJECTS = [
    Kinds,
    {"enum": ["round", "square"]},
    {"title": "kind", "type": "string", "enum": ["round", "square"]},
    {"name": "kind", "schema": {"type": "string", "enum": ["round", "square"]}},
    {"$ref": "#/$defs/kind", "$defs": {"kind": {"type": "string", "enum": ["round", "square"]}}},
    {"anyOf": [{"type": "string", "enum": ["round"]}, OBJECT]},
]


@pytest.fixture
def engine(tiny_engine, chat_renderer):
    return tiny_engine(renderer=chat_renderer)


@pytest.fixture
def chat(engine):
    return ChatBlend(engine=engine, max_tokens=120)


@pytest.mark.parametrize("schema", NO_SCHEMAS, ids=str)
def test_what_is_no_schema_is_refused_with_what_is_accepted(schema, chat):
    accepted = "pass a Pydantic class, a TypedDict, a dataclass, a function, a tool or a JSON schema"
    for method in METHODS:
        with pytest.raises(UsageError, match=accepted):
            chat.with_structured_output(schema, method=method)
    with pytest.raises(UsageError, match=accepted):
        chat.bind_tools([schema])


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_an_answer_follows_every_kind_of_schema_whole_and_streamed(schema, method, strict, chat):
    found = chat.with_structured_output(schema, method=method, strict=strict).invoke(ASKED)
    assert isinstance(found, Tower if schema is Tower else dict)
    assert dict(found) in ({"kind": "round"}, {"kind": "square"})
    assert list(chat.with_structured_output(schema, method=method, strict=strict).stream(ASKED))[-1] == found


@pytest.mark.parametrize("schema", NO_OBJECTS, ids=str)
def test_a_schema_of_no_object_is_rejected_where_answers_are_objects(schema, chat):
    found = chat.with_structured_output(schema, max_tokens=20).invoke(ASKED)
    kind = found.root if isinstance(found, Kinds) else found
    assert kind in ("round", "square", {"kind": "round"}, {"kind": "square"})
    for method in METHODS[1:]:
        with pytest.raises(UsageError, match=f"other values than objects, but the answers of method='{method}'"):
            chat.with_structured_output(schema, method=method)
    parameters = schema.model_json_schema() if schema is Kinds else schema.get("schema", schema)
    described = {"type": "function", "function": {"name": "kind", "parameters": parameters}}
    for tools in ([described], [Kinds]):
        with pytest.raises(
            UsageError, match=r"parameters of the tool '[kK]inds?' are .* arguments of a call are an obj"
        ):
            chat.bind_tools(tools)
    with pytest.raises(UsageError, match="arguments of a call are an object"):
        chat.invoke(ASKED, tools=[described])


def last(items: Iterable[Any]) -> Any:
    """The last of the items, all of which are read."""
    return list(items)[-1]


async def alast(items: Any) -> Any:
    """The last of the items, all of which are read."""
    return [item async for item in items][-1]


@pytest.mark.parametrize("schema", [Tower, OBJECT])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", [{"max_tokens": 4}, {"max_tokens": 14}, {"stop": ["kin", "{"]}], ids=str)
async def test_a_truncated_answer_is_an_error_in_every_form_of_call(cut, method, schema, chat):
    held = chat.with_structured_output(schema, method=method, **cut)
    with pytest.raises(OutputParserException, match="raise max_tokens if it was cut, and leave out stop strings"):
        held.invoke(ASKED)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        await held.ainvoke(ASKED)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        last(held.stream(ASKED))
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        await alast(held.astream(ASKED))
    assert isinstance(held.batch([ASKED], return_exceptions=True)[0], OutputParserException)
    raw = chat.with_structured_output(schema, method=method, include_raw=True, **cut)
    for found in (
        raw.invoke(ASKED),
        await raw.ainvoke(ASKED),
        last(raw.stream(ASKED)),
        await alast(raw.astream(ASKED)),
    ):
        assert found["parsed"] is None
        assert isinstance(found["parsing_error"], OutputParserException)
        assert found["raw"].response_metadata["ragblend"]


@pytest.mark.parametrize("method", METHODS[:2])
def test_an_answer_that_was_cut_is_an_error_if_invoke_streams_inside(method, engine):
    chat = ChatBlend(engine=engine, streaming=True, max_tokens=120)
    whole = chat.with_structured_output(OBJECT, method=method, include_raw=True).invoke(ASKED)
    assert whole["parsed"]["kind"] in ("round", "square")
    size = whole["raw"].usage_metadata["output_tokens"]
    for cut in (3, size // 2, size - 2):  # LangChain completes a call that was streamed
        with pytest.raises(OutputParserException, match="raise max_tokens"):
            chat.with_structured_output(OBJECT, method=method, max_tokens=cut).invoke(ASKED)


def test_a_number_that_was_cut_is_an_error(chat):
    held = chat.with_structured_output({"type": "integer", "minimum": 10**11}, max_tokens=3)
    with pytest.raises(OutputParserException, match="is no complete JSON"):
        held.invoke(ASKED)


def test_an_answer_that_a_class_rejects_is_an_error_whole_and_streamed(chat):
    held = chat.with_structured_output(Rejecting)
    for call in (held.invoke, lambda asked: last(held.stream(asked))):
        with pytest.raises(OutputParserException, match="never true"):
            call(ASKED)


# --- LlamaIndex ---


@pytest.mark.parametrize(
    "output_cls", [Color, TowerDict, TowerData, Plain, OBJECT, list[int], int, Tower | None, None], ids=str
)
def test_llama_index_refuses_what_is_no_pydantic_class(output_cls, engine):
    llm, prompt = BlendLLM(engine=engine), PromptTemplate(ASKED)
    for call in (
        lambda: llm.structured_predict(output_cls, prompt),
        lambda: asyncio.run(llm.astructured_predict(output_cls, prompt)),
        lambda: list(llm.stream_structured_predict(output_cls, prompt)),
        lambda: llm.as_structured_llm(output_cls),
    ):
        with pytest.raises(UsageError, match=r"output_cls is .*; pass a Pydantic class"):
            call()


@pytest.mark.parametrize("max_tokens", [4, 14])
async def test_llama_index_raises_where_an_answer_was_cut(max_tokens, engine):
    llm, prompt = BlendLLM(engine=engine, max_tokens=max_tokens), PromptTemplate(ASKED)
    held, asked = llm.as_structured_llm(Tower), [ChatMessage(ASKED)]
    with pytest.raises(ValueError, match="raise max_tokens if it was cut"):
        llm.structured_predict(Tower, prompt)
    with pytest.raises(ValueError, match="raise max_tokens if it was cut"):
        await llm.astructured_predict(Tower, prompt)
    with pytest.raises(ValueError, match="no complete Tower; raise max_tokens if it was cut"):
        last(llm.stream_structured_predict(Tower, prompt))
    with pytest.raises(ValueError, match="no complete Tower; raise max_tokens if it was cut"):
        await alast(await llm.astream_structured_predict(Tower, prompt))
    with pytest.raises(ValueError, match="raise max_tokens if it was cut"):
        held.chat(asked)
    with pytest.raises(ValueError, match="raise max_tokens if it was cut"):
        last(held.stream_chat(asked))
