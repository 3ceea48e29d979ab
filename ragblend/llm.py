"""LangChain models over one ragblend engine: swap the model object, keep the chain.

`ChatBlend` is the chat model, `BlendLLM` the string model that still keeps the roles of chat prompts. Stored chunks are
found in the token ids of whatever the chain sends, so nothing else has to change; the report of what was reused is in
`response_metadata["ragblend"]`.

Knows langchain-core and the adapter. Knows nothing about retrieval or chains.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self, cast
from uuid import UUID

from ragblend.engine.report import Generation
from ragblend.errors import PromptTooLongError, UsageError, check_unicode
from ragblend.frameworks.aio import iterate_in_thread, run_in_thread
from ragblend.frameworks.content import is_media, text_and_chunks
from ragblend.frameworks.model import MAY_HOLD_SECRETS, BlendModel, NamedMessage, Request, redact_setting
from ragblend.frameworks.tools import may_return_calls
from ragblend.prompt.tools import CallReader
from ragblend.prompt.types import Chunk, Message, ToolCall
from ragblend.redaction import redact

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import Document
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.language_models import BaseChatModel, BaseLLM, LangSmithParams, LanguageModelInput, ModelProfile
    from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.outputs import (
        ChatGeneration,
        ChatGenerationChunk,
        ChatResult,
        GenerationChunk,
        LLMResult,
    )
    from langchain_core.outputs import Generation as TextGeneration
    from langchain_core.prompt_values import ChatPromptValue, PromptValue
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list
    from langchain_core.tools import BaseTool
except ImportError as error:
    raise ImportError("ragblend.llm needs LangChain: pip install 'ragblend[langchain]'") from error

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "ai": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class PromptOverflowError(PromptTooLongError, ContextOverflowError):
    """A prompt beyond the model's context: our error, and the one that LangChain's middleware catches."""


class _LangChainModel(BlendModel):
    """The behaviour of ChatBlend and BlendLLM. They differ in their requests, results and chunks."""

    _overflow_error: ClassVar[type[PromptTooLongError]] = PromptOverflowError

    @classmethod
    def from_model_id(cls, model_id: str, task: str | None = "text-generation", **settings: Any) -> Self:
        """A model by its name, as langchain-huggingface's classes are made. `settings` are the constructor's."""
        if task not in (None, "text-generation"):
            raise UsageError(f"task is {task!r}; the one that there is is 'text-generation': leave it out")
        if settings.get("backend") in ("default", "pipeline"):  # their names for transformers in this process
            del settings["backend"]
        return cls(model=model_id, **settings)

    # --- tokens ---

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of `text` by the engine's own tokenizer, or by `custom_get_token_ids`."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)
        check_unicode(text, "the text")
        return list(self.engine.renderer.text_ids(text))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages become, chat template and `tools` included.

        Of messages that no template takes, such as an answer alone: those of their texts.
        """
        from ragblend.chat_tools import describe_tools

        try:
            request = self._prepare(map(_named_message, messages), tools=describe_tools(tools or ()))
            return len(self.engine.renderer.render(request.prompt))
        except UsageError:
            return sum(len(self.get_token_ids(message.text)) for message in messages)

    # --- LangChain's serialised form ---

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether `langchain_core.load.dumps` writes the settings: yes; `to_json` says of which models."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where `langchain_core.load.loads` finds the class. It wants it allowed, as any that LangChain has no list of:
        `valid_namespaces=["ragblend"], allowed_objects=[ChatBlend]`."""
        return ["ragblend", "llm"]

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return the settings that open the engine again, without secrets.

        A model that was given an engine, a loaded model or a store that is an object has none: it is not written.
        """
        whole: Any = super()  # LangChain's half
        try:
            self.__getstate__()
        except TypeError:
            return cast("SerializedNotImplemented", whole.to_json_not_implemented())
        written: SerializedConstructor = whole.to_json()
        for name, value in written["kwargs"].items():
            shown = redact_setting(value) if name in MAY_HOLD_SECRETS else value
            written["kwargs"][name] = str(shown) if isinstance(shown, Path) else shown
        return written

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """`invoke` of each; an engine in this process decodes their tokens together.

        Each has its own callbacks and, with `return_exceptions`, its own error. `max_concurrency` in the config is how
        many are answered at a time; without it, as many as the engine decodes together (`max_num_seqs`).
        """
        return Runnable.batch(self, inputs, self._make_call_configs(config, len(inputs)), **kwargs)  # type: ignore[arg-type]

    def batch_as_completed(self, inputs: Sequence[Any], config: Any = None, **kwargs: Any) -> Iterator[Any]:
        """`batch`; each with its number, as soon as it is there."""
        plain: Any = Runnable
        yield from plain.batch_as_completed(self, inputs, self._make_call_configs(config, len(inputs)), **kwargs)

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """`batch`, without blocking the event loop."""
        return await Runnable.abatch(self, inputs, config, **kwargs)  # type: ignore[arg-type]

    def _make_call_configs(self, config: Any, count: int) -> list[RunnableConfig]:
        """The configs of `count` calls; the first, which is the one that counts, says how many run at a time."""
        configs = get_config_list(config, count)
        loop = getattr(self.engine, "loop", None)
        if loop is not None and configs and configs[0].get("max_concurrency") is None:
            configs[0] = {**configs[0], "max_concurrency": loop.max_num_seqs}
        return configs

    # --- answers ---

    def _generate(
        self,
        prompts: Any,
        stop: list[str] | None = None,
        run_manager: Any = None,
        *,
        cancelled: threading.Event | None = None,
        **call: Any,
    ) -> Any:
        """LangChain's result of one call; a set `cancelled` ends it early."""
        raise NotImplementedError

    async def _agenerate(
        self, prompts: Any, stop: list[str] | None = None, run_manager: Any = None, **call: Any
    ) -> Any:
        return await run_in_thread(lambda cancelled: self._generate(prompts, stop, cancelled=cancelled, **call))

    def _stream(
        self,
        prompt: Any,
        stop: list[str] | None = None,
        run_manager: Any = None,
        *,
        stream_usage: bool | None = None,
        **kwargs: Any,
    ) -> Generator[Any]:
        request = self._request(prompt, stop, **kwargs)
        if request.options.n not in (None, 1):
            raise UsageError(
                f"n is {request.options.n}; a stream has one answer: use invoke, generate or batch for several"
            )
        stream = self._open(request)
        for chunk in self._chunks(request, self._pieces(stream, request)):
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk
        yield self._last_chunk(stream.result, stream_usage)

    async def _astream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        async for chunk in iterate_in_thread(self._stream(prompt, stop, **kwargs)):
            calls = getattr(getattr(chunk, "message", None), "tool_call_chunks", None)
            if run_manager is not None and (chunk.text or calls):
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _request(self, prompt: Any, stop: list[str] | None, **call: Any) -> Request:
        raise NotImplementedError

    def _chunks(self, request: Request, pieces: Iterator[str]) -> Iterator[Any]:
        """LangChain's chunks of a streamed answer, without the last one."""
        raise NotImplementedError

    def _last_chunk(self, result: Generation, stream_usage: bool | None) -> Any:
        """The chunk that ends a streamed answer, with the report."""
        raise NotImplementedError

    def _facts(self, result: Generation) -> dict[str, Any]:
        """What goes into `response_metadata`; the report is under "ragblend"."""
        facts = {
            "model_name": self.model,
            "model_provider": "ragblend",
            "finish_reason": result.finish_reason,
            "ragblend": result.report.as_dict(),
        }
        return facts if result.logprobs is None else facts | {"logprobs": self._logprobs(result)}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What makes two answers differ: the key of an answer cache. Holds no secrets."""
        backend = self.backend if self.backend in ("transformers", "vllm") else redact(self.backend)
        own = {"backend": backend, "namespace": self.namespace, "system": self.system}
        own |= self._default_options()
        del own["timeout"]
        return {"model": self.model, "fingerprint": self.engine.fingerprint, **dict(sorted(own.items()))}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        whole: Any = super()  # LangChain's half
        params: LangSmithParams = whole._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragblend"
        given: Any = stop or self.stop  # one string may stand for a list
        stops = [given] if isinstance(given, str) else given
        return params | {"ls_stop": stops} if stops else params


# LangChain names the first argument of `_generate` and `_stream` differently in its two classes.
class ChatBlend(_LangChainModel, BaseChatModel):  # type: ignore[misc]
    """A LangChain chat model that answers from fused chunk KV.

    `ChatBlend(model="demo", store="kv/")`, or `ChatBlend(engine=engine)`. Every call may set mode, rule,
    recompute_ratio, max_tokens, temperature, top_k and the other fields of sampling, stop and strict. `logprobs=True`
    puts `logprobs` into `response_metadata`, in OpenAI's form; `n` answers to one prompt are several generations.
    Content blocks `{"type": "text", "text": ..., "extras": {"chunk_id": ...}}` and the documents in a ToolMessage's
    artifact name chunks, which are stored for the next time where they are not yet. `bind_tools` and
    `with_structured_output` hold the answer to calls and schemas while it is written, so that they are valid whatever
    the model knows; the extra `structured` is needed for it, save with vLLM. A prompt beyond the model's context raises
    PromptOverflowError: our PromptTooLongError, and LangChain's ContextOverflowError.
    """

    streaming: bool = False  # True: `invoke` streams inside, so that token callbacks fire
    stream_usage: bool = True  # whether a stream ends with the tokens that it took

    @property
    def _llm_type(self) -> str:
        return "ragblend-chat"

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # A key of LangChain's answer cache. By itself it would take the serialised form, which says nothing of the
        # weights, and is none where an engine was given.
        params = {**self._get_invocation_params(stop=stop, **kwargs), **kwargs}
        return str(sorted(params.items()))

    def _resolve_model_profile(self) -> ModelProfile:
        """What LangChain's middleware asks of a model: how much it reads, and what."""
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
        """This model with tools: functions, Pydantic classes, TypedDicts, LangChain tools or OpenAI's descriptions.

        `tool_choice`: "auto" (and None) leaves it to the model, "any" and "required" (and True) demand a call, a name a
        call of that tool, "none" forbids them. `parallel_tool_calls`: whether there may be several; None is yes where
        it is left to the model, and no where a call is demanded. `strict` as with OpenAI: every parameter is required.
        Arguments follow their schema in any case.
        """
        from ragblend.chat_tools import bind_tools

        return bind_tools(
            self, tools, strict, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **kwargs
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with answers in the form of `schema`: a Pydantic class, a TypedDict or a JSON schema.

        Answers are of that class for a Pydantic class, else dicts. `method`: "json_schema" holds the answer to it,
        "function_calling" has the model call a tool with it, "json_mode" takes any JSON object. The prompt stays as it
        is, but for the tool that "function_calling" describes: say in it what the fields are for. `include_raw=True`
        returns {"raw": AIMessage, "parsed": ..., "parsing_error": ...}. An answer that reaches max_tokens is no JSON.
        """
        from ragblend.chat_tools import bind_structured_output

        return bind_structured_output(self, schema, method=method, include_raw=include_raw, strict=strict, **kwargs)

    def _request(self, prompt: Sequence[BaseMessage], stop: list[str] | None, **call: Any) -> Request:
        if not prompt:
            raise UsageError("no messages given; pass at least one message with text")
        return self._prepare(map(_named_message, prompt), stop=stop, **call)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        *,
        run_id: UUID | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each conversation; an engine in this process decodes their tokens together.

        Raises the first error there was, once the others have ended.
        """
        loop, answer = getattr(self.engine, "loop", None), super().generate
        if loop is None or len(messages) < 2:
            return answer(messages, stop, callbacks, run_id=run_id, **kwargs)
        with ContextThreadPoolExecutor(max_workers=loop.max_num_seqs) as executor:
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
        said: dict[str, Any] = {"content": result.text}
        if request.options.tools and may_return_calls(request.options):
            from ragblend.chat_tools import tool_fields

            said = tool_fields(result.text, self.engine.renderer.calls_shown)
        message = AIMessage(**said, usage_metadata=_usage(result), response_metadata=self._facts(result))
        return ChatGeneration(message=message)

    def _chunks(self, request: Request, pieces: Iterator[str]) -> Iterator[ChatGenerationChunk]:
        if request.options.tools and may_return_calls(request.options):
            from ragblend.chat_tools import tool_chunks

            messages = tool_chunks(CallReader(self.engine.renderer.calls_shown), pieces)
        else:
            messages = (AIMessageChunk(content=piece) for piece in pieces)
        return (ChatGenerationChunk(message=message) for message in messages)

    def _last_chunk(self, result: Generation, stream_usage: bool | None) -> ChatGenerationChunk:
        wants_usage = self.stream_usage if stream_usage is None else stream_usage
        usage, facts = _usage(result) if wants_usage else None, self._facts(result)
        return ChatGenerationChunk(
            message=AIMessageChunk(content="", usage_metadata=usage, response_metadata=facts, chunk_position="last")
        )


class BlendLLM(_LangChainModel, BaseLLM):
    """A LangChain string model that answers from fused chunk KV. Takes what `ChatBlend` takes.

    A string prompt becomes one user turn in the model's chat template. `raw=True` sends it without any template. Chat
    prompts keep their roles. LangChain's answer cache does not look at what a call to a string model sets; give
    settings that differ to the constructor.
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
        """The chat model over the same engine, with the same settings."""
        shared = (*BlendModel.model_fields, "cache", "callbacks", "tags", "verbose")
        return ChatBlend(**{name: getattr(self, name) for name in shared})

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """Not on a model of strings: `as_chat()` has it."""
        raise NotImplementedError(f"tools: {type(self).__name__} writes strings; call them with as_chat()")

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Not on a model of strings: `as_chat()` has it, and `structured_outputs` holds a string to a schema."""
        raise NotImplementedError(
            f"{type(self).__name__} writes strings; use as_chat().with_structured_output(...), or the option "
            "structured_outputs={'json': SCHEMA} for JSON as a string"
        )

    # --- roles: BaseLLM turns every prompt into a string; ours remembers the messages it was made from ---

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        return _keep_roles(super()._convert_input(model_input))

    def generate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each prompt; chat prompts keep their roles."""
        kept = [_keep_roles(prompt) for prompt in prompts]
        return super().generate_prompt(kept, stop=stop, callbacks=callbacks, **kwargs)

    async def agenerate_prompt(
        self,
        prompts: list[PromptValue],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Answer each prompt; chat prompts keep their roles."""
        kept = [_keep_roles(prompt) for prompt in prompts]
        return await super().agenerate_prompt(kept, stop=stop, callbacks=callbacks, **kwargs)

    def _request(self, prompt: str, stop: list[str] | None, **call: Any) -> Request:
        if call.get("tools"):
            self.bind_tools(call["tools"])
        if isinstance(prompt, _PromptWithRoles):
            return self._prepare(map(_named_message, prompt.messages), stop=stop, **call)
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
        usages = [_usage(result) for results in answers for result in results]
        names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
        token_usage = {theirs: sum(usage[ours] for usage in usages) for ours, theirs in names.items()}  # type: ignore[literal-required]
        return LLMResult(
            generations=[
                [TextGeneration(text=result.text, generation_info=self._facts(result)) for result in results]
                for results in answers
            ],
            llm_output={"model_name": self.model, "token_usage": token_usage},
        )

    def _chunks(self, request: Request, pieces: Iterator[str]) -> Iterator[GenerationChunk]:
        return (GenerationChunk(text=piece) for piece in pieces)

    def _last_chunk(self, result: Generation, stream_usage: bool | None) -> GenerationChunk:
        return GenerationChunk(text="", generation_info=self._facts(result))


class _PromptWithRoles(str):
    """A chat prompt as the string BaseLLM insists on, with the messages it was made from."""

    messages: Sequence[BaseMessage]

    @classmethod
    def from_messages(cls, messages: Sequence[BaseMessage]) -> Self:
        # Callbacks show this text and answer caches compare it, so it names the roles.
        prompt = cls("\n".join(f"{message.type}: {message.text}" for message in messages))
        prompt.messages = messages
        return prompt


class _RolesPromptValue(ChatPromptValue):
    """A chat prompt whose string still knows its messages."""

    def to_string(self) -> str:
        """The messages as a string that carries them along."""
        return _PromptWithRoles.from_messages(self.messages)


def _keep_roles(prompt: PromptValue) -> PromptValue:
    if isinstance(prompt, ChatPromptValue) and not isinstance(prompt, _RolesPromptValue):
        if not prompt.messages:
            raise UsageError("no messages given; pass at least one message with text")
        return _RolesPromptValue(messages=prompt.messages)
    return prompt


def _named_message(message: BaseMessage) -> NamedMessage:
    """A LangChain message and its chunks; raises UsageError for roles and content that no engine reads."""
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    role = _ROLES.get(name)
    if role is None:
        raise UsageError(f"a message has role {name!r}; use system, user, assistant or tool")
    if isinstance(message.content, str):
        text, chunks = message.content, list[Chunk]()
    else:
        # What a model wrote besides text (tool calls, reasoning) is its own business, not part of the conversation.
        blocks = [block for block in message.content if role != "assistant" or _is_conversation_block(block)]
        text, chunks = text_and_chunks(blocks)
    artifact = getattr(message, "artifact", None)
    documents = artifact if isinstance(artifact, list | tuple) else [artifact]
    chunks += [_document_chunk(item) for item in documents if isinstance(item, Document | Chunk)]
    calls = (
        ToolCall(call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"] or "")
        for call in getattr(message, "tool_calls", ())
    )
    return Message(role, text, tuple(calls), getattr(message, "tool_call_id", ""), message.name or ""), chunks


def _is_conversation_block(block: str | Mapping[str, Any]) -> bool:
    """Whether a block of an answer belongs to the conversation: text, and what is then refused by name."""
    kind = "text" if isinstance(block, str) else str(block.get("type", "text"))
    return kind.startswith("text") or is_media(kind)


def _document_chunk(document: Document | Chunk) -> Chunk:
    if isinstance(document, Chunk):
        return document
    return Chunk(document.page_content.strip(), str(document.metadata.get("source") or ""), metadata=document.metadata)


def _usage(result: Generation) -> UsageMetadata:
    report = result.report
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.completion_tokens,
        total_tokens=report.prompt_tokens + report.completion_tokens,
        input_token_details={"cache_read": report.num_reused_tokens},
    )
