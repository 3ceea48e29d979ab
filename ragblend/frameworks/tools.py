"""Tools and schemas of a call to a framework's model: the tool choice, the constraint on the answer, and its parsing.

`output_constraint` converts a call's options to `structured_outputs`. Both frameworks' models use it for calls with
tools or a schema. Does not depend on a framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ragblend.errors import UsageError
from ragblend.prompt.render import Renderer
from ragblend.prompt.tools import CallFormat, check_tools, read_calls, structural_tag, tool_names

if TYPE_CHECKING:
    from ragblend.frameworks.call_options import CallOptions


def output_constraint(options: CallOptions, renderer: Renderer) -> Mapping[str, Any] | None:
    """Return the constraint on an answer, in the form of vLLM's `structured_outputs`; None for free text.

    The constraint is made from the call's tools, `response_format` and `structured_outputs`. Raises UsageError if two
    of them exclude each other.
    """
    asked = _parse_response_format(options.response_format) if options.response_format else options.structured_outputs
    if options.response_format and options.structured_outputs:
        raise UsageError("the call has response_format and structured_outputs; leave one of them out")
    choice = resolve_tool_choice(options)
    if choice == "none":
        return asked
    if asked is not None and "json" not in asked:
        raise UsageError(
            f"the call has tools and {next(iter(asked))}; leave one out, or bind_tools(..., tool_choice='none')"
        )
    # If a call is required, only the model ends the list of calls, and a small model repeats itself. So it is one call
    # unless parallel_tool_calls is set.
    parallel = choice == "auto" if options.parallel_tool_calls is None else options.parallel_tool_calls
    schema = asked["json"] if asked is not None else None
    schema = json.loads(schema) if isinstance(schema, str) else schema
    return structural_tag(renderer.call_format, options.tools, choice, parallel, schema)


def resolve_tool_choice(options: CallOptions) -> str:
    """Return the tool choice of a call: "none", "auto", "required" or the name of a tool.

    `options.tool_choice` may have the form of any framework. Raises UsageError for tools that are not functions, and
    for a choice that names no tool.
    """
    check_tools(options.tools)
    asked, names = options.tool_choice, tool_names(options.tools)
    if isinstance(asked, Mapping):
        function = asked.get("function")
        asked = function.get("name") if isinstance(function, Mapping) else asked.get("name", asked.get("type"))
    if asked == "none" or (not names and asked in (None, False, "auto")):
        return "none"
    if not names:
        raise UsageError(f"tool_choice is {asked!r}, but the call has no tools; add them: bind_tools([...])")
    choice = {None: "auto", False: "auto", True: "required", "any": "required"}.get(asked, asked)
    if choice not in ("auto", "required", *names):
        raise UsageError(f"tool_choice is {asked!r}; choose auto, any, required, none or one of {', '.join(names)}")
    return str(choice)


def may_return_calls(options: CallOptions) -> bool:
    """Return True if the call has tools and its tool choice allows the answer to call them."""
    return bool(options.tools) and resolve_tool_choice(options) != "none"


def split_text_and_calls(text: str, form: CallFormat) -> tuple[str, list[tuple[str, str, str]]]:
    """Return an answer's text and its calls as (id, name, arguments).

    The arguments are JSON. If the answer was cut, the JSON of the last call may be incomplete.
    """
    content, calls = read_calls(text, form)
    return content, [(new_call_id(), name, arguments) for name, arguments in calls]


def new_call_id() -> str:
    """Return a new id for a call."""
    return f"call_{uuid4().hex[:24]}"


def _parse_response_format(asked: Any) -> Mapping[str, Any] | None:
    """Return OpenAI's response_format as `structured_outputs`. Raises UsageError for an unknown form."""
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    described = asked.get("json_schema") if kind == "json_schema" else None
    if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
        raise UsageError(
            f"response_format is {str(asked)[:80]!r}; pass {{'type': 'json_schema', 'json_schema': {{'name': ..., "
            "'schema': SCHEMA}}, type 'json_object' or 'text', or use with_structured_output"
        )
    return {"json": described["schema"]}
