"""Tools and schemas in LangChain: the runnables of `ChatBlend.bind_tools` and `with_structured_output`.

Depends on langchain-core and `frameworks.tools`, not on engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from ragblend.errors import UsageError
from ragblend.frameworks.tools import new_call_id, split_text_and_calls
from ragblend.prompt.tools import CallFormat, CallReader

METHODS = ("json_schema", "function_calling", "json_mode")


def describe_tools(
    tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool], strict: bool | None = None
) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form. With `strict`, the schemas of the tools forbid additional properties and require
    every parameter.
    """
    return [convert_to_openai_tool(tool, strict=strict) for tool in tools]


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
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    traced = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    shown: dict[str, Any] = {} if schema is None else {"ls_structured_output_format": traced}
    parser: BaseOutputParser[Any] | Runnable[Any, Any]
    if method == "function_calling":
        tool = convert_to_openai_tool(_with_title(schema), strict=strict)
        name = tool["function"]["name"]
        if is_class and not strict:
            tool["function"]["parameters"] = json_schema(schema)
        shown |= {"tool_choice": name, "parallel_tool_calls": False}
        llm = chat.bind_tools([tool, *(tools or ())], **shown, **options)
        parser = (
            PydanticToolsParser(tools=[schema], first_tool_only=True)
            if is_class
            else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
        )
    else:
        wanted: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": json_schema(schema, strict)}}
        bound = {"response_format": wanted, **shown, **options}
        llm = chat.bind_tools(tools, strict=strict, **bound) if tools else chat.bind(**bound)
        parser = _PydanticAnswer(pydantic_object=schema) if is_class else _JsonAnswer()
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def json_schema(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return the JSON schema of a Pydantic class, TypedDict, function or dict. `strict`: as in `describe_tools`."""
    if isinstance(schema, type) and issubclass(schema, BaseModel) and not strict:
        return schema.model_json_schema()  # with its $defs: a schema may refer to itself
    if isinstance(schema, Mapping) and not {"function", "name"} & set(schema) and not strict:
        return dict(schema)
    return convert_to_json_schema(_with_title(schema), strict=strict)


def _with_title(schema: Any) -> Any:
    """Return a JSON schema with the title that LangChain requires; other schemas unchanged."""
    if isinstance(schema, Mapping) and not {"function", "title", "name"} & set(schema):
        return {"title": "answer", **schema}
    return schema


class _JsonAnswer(JsonOutputParser):
    """Parser of complete JSON, because LangChain's own parser completes a cut answer. None if a tool was called."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return super().parse_result(result, partial=partial) if partial or _is_complete(result) else None


class _PydanticAnswer(PydanticOutputParser[Any]):
    """Parser of complete JSON for a Pydantic class; None if a tool was called."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return super().parse_result(result, partial=partial) if partial or _is_complete(result) else None


def _is_complete(result: Sequence[Generation]) -> bool:
    """Return True for JSON, False for a call. Raises OutputParserException for an answer that was cut."""
    text, answer = result[0].text, result[0]
    if not text and isinstance(answer, ChatGeneration) and getattr(answer.message, "tool_calls", None):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"the answer is no JSON ({error}); raise max_tokens if it was cut, and leave out stop strings"
        raise OutputParserException(message, llm_output=text) from error
    return True


def tool_fields(text: str, form: CallFormat) -> dict[str, Any]:
    """Return the fields `content`, `tool_calls` and `invalid_tool_calls` of an AIMessage from the text of an answer.

    `form`: how the model writes calls. A call that was cut off is one of the `invalid_tool_calls`.
    """
    content, found = split_text_and_calls(text, form)
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for id, name, arguments in found:
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
        for found in reader.push(piece):
            if isinstance(found, str):
                yield AIMessageChunk(content=found)
                continue
            call = ToolCallChunk(
                name=found.name,
                args=found.arguments,
                id=new_call_id() if found.name is not None else None,
                index=found.number,
                type="tool_call_chunk",
            )
            yield AIMessageChunk(content="", tool_call_chunks=[call])
    rest = reader.flush()
    if rest:
        yield AIMessageChunk(content=rest)
