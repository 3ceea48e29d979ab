"""Tools and schemas in LangChain: the runnables of `ChatBlend.bind_tools` and `with_structured_output`.

Depends on langchain-core and `frameworks.tools`, not on engines.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.output_parsers import (
    BaseCumulativeTransformOutputParser,
    BaseOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel
from typing_extensions import is_typeddict

from ragblend.errors import UsageError
from ragblend.frameworks.tools import new_call_id, split_text_and_calls
from ragblend.prompt.schemas import describes_object
from ragblend.prompt.tools import CallFormat, CallReader, check_tools

METHODS = ("json_schema", "function_calling", "json_mode")
_ACCEPTED = "a Pydantic class, a TypedDict, a dataclass, a function, a tool or a JSON schema"


def describe_tools(
    tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool], strict: bool | None = None
) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form. With `strict`, the schemas of the tools forbid additional properties and require
    every parameter. Raises UsageError for anything else than a tool.
    """
    described = [_describe_tool(tool, strict) for tool in tools]
    check_tools(described)
    return described


def bind_structured_output(
    chat: BaseChatModel,
    schema: Any,
    *,
    method: str = "json_schema",
    include_raw: bool = False,
    strict: bool | None = None,
    tools: Sequence[Any] | None = None,
    **options: Any,
) -> Runnable[Any, Any]:
    """Return `chat` with answers in the form of `schema`, as `ChatBlend.with_structured_output` describes."""
    if method not in METHODS:
        raise UsageError(f"method is {method!r}; choose one of {', '.join(METHODS)}")
    if schema is None and method != "json_mode":
        raise UsageError(f"schema is None; pass one, or method='json_mode' instead of {method!r} for any JSON object")
    function = _as_function_or_schema(schema)
    described = {"type": "object"} if function is None else json_schema(function, strict)
    if method != "json_schema" and not describes_object(described):
        raise UsageError(
            f"schema is {str(schema)[:80]}, which allows other values than objects, but the answers of "
            f"method={method!r} are objects; leave `method` out, or put the schema into a field of an object"
        )
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    call_options: dict[str, Any] = {} if schema is None else {"ls_structured_output_format": traced}
    parser: BaseOutputParser[Any]
    if method == "function_calling":
        (tool,) = describe_tools([function], strict)
        name = tool["function"]["name"]
        if is_class and not strict:
            tool["function"]["parameters"] = described
        call_options |= {"tool_choice": name, "parallel_tool_calls": False}
        llm = chat.bind_tools([tool, *(tools or ())], **call_options, **options)
        parser = (
            _PydanticCall(tools=[schema], first_tool_only=True)
            if is_class
            else _JsonCall(key_name=name, first_tool_only=True)
        )
    else:
        wanted: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": described}}
        bound = {"response_format": wanted, **call_options, **options}
        llm = chat.bind_tools(tools, strict=strict, **bound) if tools else chat.bind(**bound)
        parser = _PydanticAnswer(pydantic_object=schema) if is_class else _JsonAnswer()
    if not include_raw:
        return llm | parser

    def parsed_or_error(raw: BaseMessage) -> dict[str, Any]:
        try:
            return {"raw": raw, "parsed": parser.invoke(raw), "parsing_error": None}
        except Exception as error:
            return {"raw": raw, "parsed": None, "parsing_error": error}

    return llm | RunnableLambda(parsed_or_error)


def json_schema(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return the JSON schema of a Pydantic class, TypedDict, function or dict. `strict`: as in `describe_tools`."""
    if isinstance(schema, Mapping) and not {"function", "name"} & set(schema) and not strict:
        return dict(schema)
    function = _describe_tool(schema, strict)["function"]
    if isinstance(schema, type) and issubclass(schema, BaseModel) and not strict:
        return schema.model_json_schema()  # with its $defs: a schema may refer to itself
    return dict(function.get("parameters") or {"type": "object", "properties": {}})


def _as_function_or_schema(schema: Any) -> Any:
    """Return OpenAI's `response_format` as OpenAI's function, and a JSON schema with a title; all else unchanged."""
    if not isinstance(schema, Mapping):
        return schema
    spec = schema.get("json_schema", schema) if schema.get("type") == "json_schema" else schema
    if {"name", "schema"} <= set(spec):
        return {**{name: spec[name] for name in spec if name != "schema"}, "parameters": spec["schema"]}
    return spec if {"function", "title", "name"} & set(spec) else {"title": "answer", **spec}


def _describe_tool(tool: Any, strict: bool | None) -> dict[str, Any]:
    """Return a tool or schema in OpenAI's form of a tool. Raises UsageError for other values."""
    if isinstance(tool, type):
        has_fields = is_typeddict(tool) or is_dataclass(tool) or hasattr(tool, "_fields")  # NamedTuple
        is_known = has_fields or (is_basemodel_subclass(tool) and tool is not BaseModel)
    else:
        is_known = isinstance(tool, Mapping | BaseTool) or inspect.isroutine(tool)
    if not is_known:
        raise UsageError(
            f"the schema or tool is {str(tool)[:80]}; pass {_ACCEPTED}. Put another type into a field of a Pydantic "
            "class: class Answer(BaseModel): value: TYPE"
        )
    if isinstance(tool, Mapping) and "title" in tool and not {"name", "function", "toolSpec"} & set(tool):
        # LangChain leaves out a JSON schema that has no top-level properties, but a $ref.
        parameters = {name: value for name, value in tool.items() if name not in ("title", "description")}
        described = {"description": tool["description"]} if "description" in tool else {}
        tool = {"name": tool["title"], **described, "parameters": parameters}
    try:
        return convert_to_openai_tool(tool, strict=strict)
    except Exception as error:  # LangChain and Pydantic raise errors of many kinds
        raise UsageError(
            f"the schema or tool {str(tool)[:80]} cannot be described as a JSON schema ({error}); pass {_ACCEPTED}, "
            "whose fields have types of JSON"
        ) from error


class _WholeAnswer(BaseCumulativeTransformOutputParser[Any]):
    """A parser that raises OutputParserException for an answer that was cut, in a stream at the end.

    LangChain's parsers return None for a cut call, and complete cut JSON in streams.
    """

    needs_call: ClassVar[bool] = False

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if partial:
            return super().parse_result(result, partial=True)
        is_called = _check_is_whole(result[0], self.needs_call)
        return super().parse_result(result) if self.needs_call or not is_called else None

    def _transform(self, input: Iterator[str | BaseMessage]) -> Iterator[Any]:
        messages: list[Any] = []
        last = None
        for last in super()._transform(_keep(input, messages)):
            yield last
        whole = self._parse_all(messages)
        if whole != last:
            yield whole

    async def _atransform(self, input: AsyncIterator[str | BaseMessage]) -> AsyncIterator[Any]:
        messages: list[Any] = []
        last = None
        async for last in super()._atransform(_akeep(input, messages)):
            yield last
        whole = self._parse_all(messages)
        if whole != last:
            yield whole

    def _parse_all(self, messages: Sequence[Any]) -> Any:
        return self.parse_result([ChatGeneration(message=reduce(add, messages))])


def _keep(input: Iterator[Any], kept: list[Any]) -> Iterator[Any]:
    for each in input:
        kept.append(each)
        yield each


async def _akeep(input: AsyncIterator[Any], kept: list[Any]) -> AsyncIterator[Any]:
    async for each in input:
        kept.append(each)
        yield each


class _JsonAnswer(_WholeAnswer, JsonOutputParser):
    """Parser of JSON; None if a tool was called."""


class _PydanticAnswer(_WholeAnswer, PydanticOutputParser[Any]):
    """Parser of JSON for a Pydantic class; None if a tool was called."""


class _JsonCall(_WholeAnswer, JsonOutputKeyToolsParser):
    """Parser of a call."""

    needs_call: ClassVar[bool] = True


class _PydanticCall(_WholeAnswer, PydanticToolsParser):
    """Parser of a call for a Pydantic class."""

    needs_call: ClassVar[bool] = True


def _check_is_whole(answer: Generation, needs_call: bool) -> bool:
    """Return True if an answer has a complete call, False if it is JSON. Raises OutputParserException if it was cut."""
    message: Any = answer.message if isinstance(answer, ChatGeneration) else AIMessage(answer.text)
    if isinstance(message, AIMessageChunk):  # its `tool_calls` are completed by LangChain
        is_called = any(_is_json(call["args"]) for call in message.tool_call_chunks)
    else:
        is_called = bool(getattr(message, "tool_calls", None))
    is_cut = message.response_metadata.get("finish_reason") == "length"
    if not is_cut and (is_called or (not needs_call and _is_json(answer.text))):
        return is_called
    wanted = "has no complete call" if needs_call else "is no complete JSON"
    raise OutputParserException(
        f"the answer {wanted}; raise max_tokens if it was cut, and leave out stop strings", llm_output=answer.text
    )


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except (ValueError, RecursionError):
        return False
    return True


def tool_fields(text: str, form: CallFormat) -> dict[str, Any]:
    """Return the fields `content`, `tool_calls` and `invalid_tool_calls` of an AIMessage from the text of an answer.

    `form`: how the model writes calls. A call that was cut off is one of the `invalid_tool_calls`.
    """
    content, parsed_calls = split_text_and_calls(text, form)
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for id, name, arguments in parsed_calls:
        try:
            calls.append(ToolCall(name=name, args=json.loads(arguments), id=id, type="tool_call"))
        except (ValueError, RecursionError) as error:
            why = f"the arguments are no JSON ({error}); raise max_tokens if the answer was cut"
            invalid.append(InvalidToolCall(name=name, args=arguments, id=id, error=why, type="invalid_tool_call"))
    return {"content": content, "tool_calls": calls, "invalid_tool_calls": invalid}


def tool_chunks(reader: CallReader, pieces: Iterator[str]) -> Iterator[AIMessageChunk]:
    """Yield a streamed answer as message chunks. Each has a piece of text or a piece of a tool call.

    `pieces`: the answer's text, piece by piece. `reader`: a new CallReader, which finds the calls in the text.
    """
    for piece in pieces:
        for call_piece in reader.push(piece):
            if isinstance(call_piece, str):
                yield AIMessageChunk(content=call_piece)
                continue
            call = ToolCallChunk(
                name=call_piece.name,
                args=call_piece.arguments,
                id=new_call_id() if call_piece.name is not None else None,
                index=call_piece.number,
                type="tool_call_chunk",
            )
            yield AIMessageChunk(content="", tool_call_chunks=[call])
    rest = reader.flush()
    if rest:
        yield AIMessageChunk(content=rest)
