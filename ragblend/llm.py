"""LangChain models over a ragblend engine: replace the model object, keep the chain.

`ChatBlend` is the chat model, `BlendLLM` the string model, which keeps the roles of chat prompts. Stored chunks are
found in the token ids of any prompt, so the chain does not change. The report on reused tokens is in
`response_metadata["ragblend"]`.

Depends on langchain-core and `ragblend.langchain`, not on retrieval or chains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from uuid import UUID

from ragblend.engine.api import BatchEngine
from ragblend.engine.report import Generation
from ragblend.errors import UsageError
from ragblend.frameworks.model import BlendModel, Request
from ragblend.frameworks.tools import may_return_calls
from ragblend.prompt.tools import CallReader

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.language_models import BaseChatModel, BaseLLM, LanguageModelInput, ModelProfile
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.outputs import (
        ChatGeneration,
        ChatGenerationChunk,
        ChatResult,
        GenerationChunk,
        LLMResult,
    )
    from langchain_core.outputs import Generation as TextGeneration
    from langchain_core.prompt_values import PromptValue
    from langchain_core.runnables import Runnable
    from langchain_core.runnables.config import ContextThreadPoolExecutor
    from langchain_core.tools import BaseTool

    from ragblend.langchain.model import LangChainModel, PromptWithRoles, keep_roles, message_and_chunks, token_usage
    from ragblend.langchain.model import PromptOverflowError as PromptOverflowError
    from ragblend.langchain.tools import bind_structured_output, describe_tools, tool_chunks, tool_fields
except ImportError as error:
    raise ImportError("ragblend.llm needs LangChain: pip install 'ragblend[langchain]'") from error


# LangChain names the first argument of `_generate` and `_stream` differently in its two classes.
class ChatBlend(LangChainModel, BaseChatModel):  # type: ignore[misc]
    """LangChain chat model that answers from the stored KV of chunks.

    Make it by `ChatBlend(model="demo", store="kv/")` or `ChatBlend(engine=engine)`. Every call may set mode, rule,
    strict, stop, recompute_ratio, max_tokens, and the sampling options: temperature, top_k and others. `logprobs=True`
    adds `logprobs` to `response_metadata`, in OpenAI's form. With `n`, the result has `n` generations for each prompt.

    A message may name its chunks: by content blocks `{"type": "text", "text": ..., "extras": {"chunk_id": ...}}`, or by
    the documents in a ToolMessage's artifact. If the store lacks the KV of a named chunk, the engine stores the KV for
    later prompts.

    `bind_tools` and `with_structured_output` constrain the answer during decoding, so that calls and JSON are valid
    with any model. They need the extra `structured`, except with vLLM. A prompt beyond the context length raises
    PromptOverflowError, which is a PromptTooLongError and LangChain's ContextOverflowError.
    """

    streaming: bool = False  # True: `invoke` streams internally and calls the token callbacks
    stream_usage: bool = True  # True: the last chunk of a stream has the token counts

    @property
    def _llm_type(self) -> str:
        return "ragblend-chat"

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # Key of LangChain's answer cache. LangChain's default is the serialised form, which does not contain the
        # fingerprint of the weights, and which a model made from an engine does not have.
        params = {**self._get_invocation_params(stop=stop, **kwargs), **kwargs}
        return str(sorted(params.items()))

    def _resolve_model_profile(self) -> ModelProfile:
        """Return the context length and the kinds of input, which LangChain's middleware reads."""
        return ModelProfile(
            name=self.model,
            max_input_tokens=self.engine.context_length,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            pdf_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=True,
        )

    # --- tools and schemas ---

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools: functions, Pydantic classes, TypedDicts, LangChain tools or OpenAI's dicts.

        `tool_choice`: "auto" (or None) lets the model choose; "any", "required" or True requires a call; the name of a
        tool requires a call of that tool; "none" allows no call. `parallel_tool_calls` allows several calls; None
        allows several only with "auto". `strict`: True makes every parameter required, as in OpenAI's API. The
        arguments of calls follow the tool's schema in any case.
        """
        options = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, **kwargs}
        set_options = {name: value for name, value in options.items() if value is not None}
        return self.bind(tools=describe_tools(tools, strict), **set_options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with answers in the form of `schema`.

        `schema`: a Pydantic class, a TypedDict, a dataclass, a function, a tool or a JSON schema. An answer is an
        object if `schema` is a Pydantic class, else a dict. `method`: "json_schema" constrains answers to the schema,
        "function_calling" makes the model call a tool with that schema, "json_mode" allows any JSON object. Only
        "function_calling" adds the schema to the prompt; for the two JSON methods, describe the fields in the prompt.

        An answer that is cut by max_tokens or a stop string raises OutputParserException, in a stream after the last
        piece. With `include_raw=True`, each result is {"raw": AIMessage, "parsed": ..., "parsing_error": ...}, and a
        parser's error is not raised. Raises UsageError for another `method` or kind of `schema`, if `schema` is None
        with a `method` other than "json_mode", and if it allows other values than objects with a `method` other than
        "json_schema".
        """
        return bind_structured_output(self, schema, method=method, include_raw=include_raw, strict=strict, **kwargs)

    def _request(self, prompt: Sequence[BaseMessage], stop: list[str] | None, **call: Any) -> Request:
        if not prompt:
            raise UsageError("no messages given; pass at least one message with text")
        return self._prepare(map(message_and_chunks, prompt), stop=stop, **call)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        run_id: UUID | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each conversation. An engine of the backend "transformers" decodes the answers together.

        If an answer of such an engine fails, its other answers are still completed; then the first error is raised.
        """
        engine, answer = self.engine, super().generate
        if not isinstance(engine, BatchEngine) or len(messages) < 2:
            return answer(messages, stop, callbacks, run_id=run_id, **kwargs)
        with ContextThreadPoolExecutor(max_workers=engine.max_num_seqs) as executor:
            futures = [
                executor.submit(answer, [one], stop, callbacks, run_id=None if number else run_id, **kwargs)
                for number, one in enumerate(messages)
            ]
        results = [future.result() for future in futures]
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[info for result in results for info in result.run or ()] or None,
        )

    def _generate(  # type: ignore[override]
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        *,
        cancelled: threading.Event | None = None,
        **call: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, **call)
        (answers,) = self._answers([request], cancelled)
        return ChatResult(generations=[self._generation(request, each) for each in answers])

    def _generation(self, request: Request, result: Generation) -> ChatGeneration:
        fields: dict[str, Any] = {"content": result.text}
        if request.options.tools and may_return_calls(request.options):
            fields = tool_fields(result.text, self.engine.renderer.call_format_in_text)
        message = AIMessage(**fields, usage_metadata=token_usage(result), response_metadata=self._facts(result))
        return ChatGeneration(message=message)

    def _chunks(self, request: Request, pieces: Iterator[str]) -> Iterator[ChatGenerationChunk]:
        if request.options.tools and may_return_calls(request.options):
            messages = tool_chunks(CallReader(self.engine.renderer.call_format_in_text), pieces)
        else:
            messages = (AIMessageChunk(content=piece) for piece in pieces)
        return (ChatGenerationChunk(message=message) for message in messages)

    def _last_chunk(self, result: Generation, stream_usage: bool | None) -> ChatGenerationChunk:
        wants_usage = self.stream_usage if stream_usage is None else stream_usage
        usage, facts = token_usage(result) if wants_usage else None, self._facts(result)
        return ChatGenerationChunk(
            message=AIMessageChunk(content="", usage_metadata=usage, response_metadata=facts, chunk_position="last")
        )


class BlendLLM(LangChainModel, BaseLLM):
    """LangChain string model that answers from the stored KV of chunks. Its arguments are those of `ChatBlend`.

    A string prompt is one user turn in the model's chat template; with `raw=True` it is the whole prompt, without a
    template. Chat prompts keep their roles. LangChain's answer cache ignores the options of a call to a string model.
    If you use this cache, set the options in the constructor instead.
    """

    raw: bool = False
    streaming: bool = False  # accepted for compatibility; use `stream`

    @property
    def _llm_type(self) -> str:
        return "ragblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "raw": self.raw}

    def as_chat(self) -> ChatBlend:
        """Return the chat model over the same engine, with the same settings."""
        shared = (*BlendModel.model_fields, "cache", "callbacks", "tags", "verbose")
        return ChatBlend(**{name: getattr(self, name) for name in shared})

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: a string model has no tools. `as_chat()` supports them."""
        raise NotImplementedError(f"tools: {type(self).__name__} returns strings; call tools with as_chat()")

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: a string model returns no objects. `as_chat()` supports them."""
        raise NotImplementedError(
            f"{type(self).__name__} returns strings; use as_chat().with_structured_output(...), or the option "
            "structured_outputs={'json': SCHEMA} for JSON as a string"
        )

    # --- roles: BaseLLM converts every prompt to a string, and PromptWithRoles keeps its messages ---

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        return keep_roles(super()._convert_input(model_input))

    def generate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each prompt; chat prompts keep their roles."""
        kept = [keep_roles(prompt) for prompt in prompts]
        return super().generate_prompt(kept, stop=stop, callbacks=callbacks, **kwargs)

    async def agenerate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each prompt; chat prompts keep their roles."""
        kept = [keep_roles(prompt) for prompt in prompts]
        return await super().agenerate_prompt(kept, stop=stop, callbacks=callbacks, **kwargs)

    def _request(self, prompt: str, stop: list[str] | None, **call: Any) -> Request:
        if call.get("tools"):
            self.bind_tools(call["tools"])
        if isinstance(prompt, PromptWithRoles):
            return self._prepare(map(message_and_chunks, prompt.messages), stop=stop, **call)
        return self._prepare(prompt, raw=self.raw, stop=stop, **call)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: Any = None,
        *,
        cancelled: threading.Event | None = None,
        **call: Any,
    ) -> LLMResult:
        answers = self._answers([self._request(prompt, stop, **call) for prompt in prompts], cancelled)
        usages = [token_usage(result) for results in answers for result in results]
        names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
        total_usage = {theirs: sum(usage[ours] for usage in usages) for ours, theirs in names.items()}  # type: ignore[literal-required]
        return LLMResult(
            generations=[
                [TextGeneration(text=result.text, generation_info=self._facts(result)) for result in results]
                for results in answers
            ],
            llm_output={"model_name": self.model, "token_usage": total_usage},
        )

    def _chunks(self, request: Request, pieces: Iterator[str]) -> Iterator[GenerationChunk]:
        return (GenerationChunk(text=piece) for piece in pieces)

    def _last_chunk(self, result: Generation, stream_usage: bool | None) -> GenerationChunk:
        return GenerationChunk(text="", generation_info=self._facts(result))
