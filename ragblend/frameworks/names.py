"""What other libraries call our settings: langchain-huggingface, langchain-openai, transformers' pipelines.

Knows names. Knows no framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragblend.errors import UsageError

ALSO_CALLED = {
    "model_id": "model",
    "model_name": "model",
    "pipeline": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "request_timeout": "timeout",
    "base_url": "backend",
    "openai_api_base": "backend",
    "openai_api_key": "api_key",
    "num_return_sequences": "n",
}
"""Other names, and ours."""
IN_PIPELINES = "pipeline_kwargs"
_SAYS_NOTHING = ("pad_token_id", "clean_up_tokenization_spaces", "truncation", "padding", "batch_size")
_OF_ANSWERS = ("max_tokens", "stop", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


def as_ours(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under our names, those in `pipeline_kwargs` among them. Raises UsageError for one that is said twice.

    >>> as_ours({"model_id": "demo", "pipeline_kwargs": {"max_new_tokens": 8, "do_sample": False}})
    {'model': 'demo', 'max_tokens': 8, 'temperature': 0.0}
    """
    ours: dict[str, Any] = {}
    inside = _of_a_pipeline(given.get(IN_PIPELINES) or {})
    for name, value in [*((name, given[name]) for name in given if name != IN_PIPELINES), *inside.items()]:
        known = ALSO_CALLED.get(name, name)
        if ours.get(known) is not None and value is not None and ours[known] != value:
            raise UsageError(f"{known} is {ours[known]!r}, and as {name} {value!r}; say it once")
        ours[known] = value if ours.get(known) is None else ours[known]
    return ours


def _of_a_pipeline(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a text-generation pipeline, as settings of an answer. Raises UsageError for what no engine
    does."""
    left = {name: value for name, value in kwargs.items() if name not in _SAYS_NOTHING and value is not None}
    samples = left.pop("do_sample", None)
    if left.pop("return_full_text", False):
        raise UsageError("pipeline_kwargs has return_full_text=True; an answer comes without its prompt: leave it out")
    ours = {ALSO_CALLED.get(name, name): value for name, value in left.items()}
    unknown = [name for name in ours if name not in _OF_ANSWERS]
    if unknown:
        known = ", ".join((*_OF_ANSWERS, "do_sample"))
        raise UsageError(f"pipeline_kwargs has {unknown[0]}; what an engine here does is {known}")
    if samples is not None:
        ours["temperature"] = ours.get("temperature", 1.0) if samples else 0.0
    return ours
