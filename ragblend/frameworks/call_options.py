"""Options of one call to a framework's model, and the names that other libraries have for them.

Depends on option values, not on models, engines or frameworks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ragblend.errors import UsageError
from ragblend.option_fields import Validator, int_between, nearest_name_hint, option, reject_unknown_names
from ragblend.options import MODEL_NAMES, SECONDS, TOOLS, TRUE_OR_FALSE, GenerationOptions, LoadOptions

MAX_ANSWERS = 128
"""Most answers to one prompt, as with OpenAI."""
TOOL_CHOICE = Validator(
    lambda value: isinstance(value, str | bool | Mapping), "auto, any, required, none or the name of a tool"
)
RESPONSE_FORMAT = Validator(lambda value: isinstance(value, Mapping), "a dictionary such as {'type': 'json_object'}")

ALSO_CALLED = {
    "model_name": "model",
    "base_url": "backend",
    "torch_dtype": "dtype",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Field names of other libraries, each with the field's name here."""
ENGINE_OPTIONS = {*MODEL_NAMES, *(each.name for each in fields(LoadOptions))} - {
    *("dtype", "device", "system", "namespace", "max_retries", "api_key")
}
"""Arguments of `load_engine` that are no fields and are passed in `engine_options`."""


@reject_unknown_names
@dataclass(frozen=True, slots=True)
class CallOptions(GenerationOptions):
    """Options of one call to a BlendLLM, ChatBlend or LlamaIndex model.

    The model's fields and the model's `call_options` are the defaults. `tools`, `tool_choice`, `parallel_tool_calls`
    and `response_format` have no defaults.
    """

    timeout: float | None = option(None, "Longest time for a whole answer, in seconds.", SECONDS)
    strict: bool = option(False, "Raise an error if a chunk is not reused.", TRUE_OR_FALSE)
    tools: Sequence[Mapping[str, Any]] = option((), "Tools in OpenAI's form.", TOOLS)
    tool_choice: Any = option(None, "auto, required, none or the name of a tool.", TOOL_CHOICE)
    parallel_tool_calls: bool | None = option(None, "Allow several calls in one answer.", TRUE_OR_FALSE)
    response_format: Any = option(None, "Form of the answer, in OpenAI's form.", RESPONSE_FORMAT)
    n: int | None = option(None, "Number of answers to one prompt.", int_between(1, MAX_ANSWERS))


OPTION_NAMES = tuple(option.name for option in fields(CallOptions))
PER_CALL_OPTIONS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "response_format"})  # no defaults
# Arguments that frameworks add to the user's own; engines do not use them.
IGNORED_OPTIONS = frozenset({"stream", "formatted", "ls_structured_output_format", "structured_output_format", "model"})
LEGACY_TOOL_OPTIONS = ("functions", "function_call")  # OpenAI's earlier names of tools
CALL_ALIASES = {other: name for other, name in ALSO_CALLED.items() if name in (*OPTION_NAMES, "model")}
"""The names of ALSO_CALLED that a call may have."""


def reject_unknown(field: str, options: Mapping[str, Any] | None, allowed: Collection[str]) -> None:
    """Raise UsageError if `options`, the value of `field`, has names that are not in `allowed`."""
    unknown = sorted(set(options or ()).difference(allowed))
    if unknown:
        choices = ", ".join(sorted(allowed))
        near = nearest_name_hint(unknown[0], allowed)
        raise UsageError(f"{field} has {', '.join(unknown)}{near}; choose from {choices}. Pass others as fields")
