"""Common base of the LangChain models, and LangChain's messages as those of a Prompt.

The base has tokens, batches, streams, serialisation and metadata of answers. Depends on langchain-core and
`frameworks.model`. `ragblend.llm` has the models.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import LangSmithParams
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages import BaseMessage, ChatMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import get_config_list

from ragblend.engine.api import BatchEngine
from ragblend.engine.report import Generation
from ragblend.errors import PromptTooLongError, UsageError
from ragblend.frameworks.aio import iterate_in_thread, run_in_thread
from ragblend.frameworks.content import is_media, text_and_chunks
from ragblend.frameworks.model import MAY_HOLD_SECRETS, BlendModel, MessageAndChunks, Request, redact_setting
from ragblend.langchain.tools import describe_tools
from ragblend.option_fields import check_unicode
from ragblend.prompt.types import Chunk, Message, ToolCall
from ragblend.redaction import redact_url


class PromptOverflowError(PromptTooLongError, ContextOverflowError):
    """Raised for a prompt beyond the context length. It is also a ContextOverflowError, which LangChain's middleware
    catches."""


class LangChainModel(BlendModel):
    """Common base of ChatBlend and BlendLLM: tokens, batches, streams, the serialized form.

    The two classes convert LangChain's prompts to requests, and answers to LangChain's results.
    """

    _overflow_error: ClassVar[type[PromptTooLongError]] = PromptOverflowError

    @classmethod
    def from_model_id(cls, model_id: str, task: str | None = "text-generation", **settings: Any) -> Self:
        """Return `cls(model=model_id, **settings)`. The signature is that of langchain-huggingface's method.

        Raises UsageError for a `task` other than None and "text-generation".
        """
        if task not in (None, "text-generation"):
            raise UsageError(f"task is {task!r}, but only 'text-generation' is supported; leave it out")
        if settings.get("backend") in ("default", "pipeline"):  # langchain-huggingface's names for transformers
            del settings["backend"]
        return cls(model=model_id, **settings)

    # --- tokens ---

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of `text` by `custom_get_token_ids` if it is set, else by the engine's tokenizer."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)
        check_unicode(text, "the text")
        return list(self.engine.renderer.text_ids(text))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return the number of tokens of the prompt of these messages, chat template and `tools` included.

        If the template rejects the messages (an answer alone, for example), the tokens of their texts are counted.
        """
        try:
            request = self._prepare(map(message_and_chunks, messages), tools=describe_tools(tools or ()))
            return len(self.engine.renderer.render(request.prompt))
        except UsageError:
            return sum(len(self.get_token_ids(message.text)) for message in messages)

    # --- LangChain's serialised form ---

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: `langchain_core.load.dumps` writes the settings, see `to_json`."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the module in which `langchain_core.load.loads` finds the class.

        Allow it in the call of `loads`: `valid_namespaces=["ragblend"], allowed_objects=[ChatBlend]`.
        """
        return ["ragblend", "llm"]

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Return the settings with which the engine can be loaded again, without secrets.

        A model made from an engine, a loaded model or a store object has no such settings. The result then has
        LangChain's type "not_implemented".
        """
        whole: Any = super()  # the LangChain class
        try:
            self.__getstate__()
        except TypeError:
            return cast("SerializedNotImplemented", whole.to_json_not_implemented())
        written: SerializedConstructor = whole.to_json()
        for name, value in written["kwargs"].items():
            redacted = redact_setting(value) if name in MAY_HOLD_SECRETS else value
            written["kwargs"][name] = str(redacted) if isinstance(redacted, Path) else redacted
        return written

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """Return `invoke`'s result for each input. An engine in this process decodes the answers together.

        Each input has separate callbacks and, with `return_exceptions=True`, a separate error. `max_concurrency` in the
        config is the largest number of inputs answered at a time. Its default is `max_num_seqs` for a
        TransformersEngine, and LangChain's default for other engines.
        """
        return Runnable.batch(self, inputs, self._make_call_configs(config, len(inputs)), **kwargs)  # type: ignore[arg-type]

    def batch_as_completed(self, inputs: Sequence[Any], config: Any = None, **kwargs: Any) -> Iterator[Any]:
        """Yield (index, result) of `batch` for each input as soon as it is answered."""
        plain: Any = Runnable
        yield from plain.batch_as_completed(self, inputs, self._make_call_configs(config, len(inputs)), **kwargs)

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """Return the result of `batch` without blocking the event loop."""
        return await Runnable.abatch(self, inputs, config, **kwargs)  # type: ignore[arg-type]

    def _make_call_configs(self, config: Any, count: int) -> list[RunnableConfig]:
        """Return the configs of `count` calls. LangChain reads `max_concurrency` from the first one."""
        configs = get_config_list(config, count)
        engine = self.engine
        if isinstance(engine, BatchEngine) and configs and configs[0].get("max_concurrency") is None:
            configs[0] = {**configs[0], "max_concurrency": engine.max_num_seqs}
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
        """Return LangChain's result of one call. Setting `cancelled` ends it early."""
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
                f"n is {request.options.n}, but a stream has one answer; use invoke, generate or batch for several"
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
        """Return LangChain's chunks of a streamed answer, without the last one."""
        raise NotImplementedError

    def _last_chunk(self, result: Generation, stream_usage: bool | None) -> Any:
        """Return the chunk that ends a streamed answer, with the report."""
        raise NotImplementedError

    def _facts(self, result: Generation) -> dict[str, Any]:
        """Return the `response_metadata` of an answer, with the report under "ragblend"."""
        facts = {
            "model_name": self.model,
            "model_provider": "ragblend",
            "finish_reason": result.finish_reason,
            "ragblend": result.report.as_dict(),
        }
        return facts if result.logprobs is None else facts | {"logprobs": self._logprobs(result)}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Return the settings that change answers, without secrets: the key of LangChain's answer cache."""
        backend = self.backend if self.backend in ("transformers", "vllm") else redact_url(self.backend)
        parameters = {"backend": backend, "namespace": self.namespace, "system": self.system}
        parameters |= self._default_options()
        del parameters["timeout"]
        return {"model": self.model, "fingerprint": self.engine.fingerprint, **dict(sorted(parameters.items()))}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        whole: Any = super()  # the LangChain class
        params: LangSmithParams = whole._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragblend"
        stop_value: Any = stop or self.stop  # a list, or one string
        stops = [stop_value] if isinstance(stop_value, str) else stop_value
        return params | {"ls_stop": stops} if stops else params


def unwrap_bindings(llm: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model in a runnable, and the arguments that are bound to every call of it."""
    bound: dict[str, Any] = {}
    while isinstance(llm, RunnableBindingBase):
        bound, llm = {**llm.kwargs, **bound}, llm.bound
    return llm, bound


# --- messages ---

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


class PromptWithRoles(str):
    """Chat prompt as a string that also has its `messages`, because BaseLLM passes prompts on as strings only."""

    messages: Sequence[BaseMessage]

    @classmethod
    def from_messages(cls, messages: Sequence[BaseMessage]) -> Self:
        """Return the messages as a string with one line per message."""
        # The text names the roles, because callbacks show it and answer caches compare it.
        prompt = cls("\n".join(f"{message.type}: {message.text}" for message in messages))
        prompt.messages = messages
        return prompt


class _RolesPromptValue(ChatPromptValue):
    """Chat prompt whose string has its messages."""

    def to_string(self) -> str:
        """Return the messages as a string with the attribute `messages`."""
        return PromptWithRoles.from_messages(self.messages)


def keep_roles(prompt: PromptValue) -> PromptValue:
    """Return a chat prompt whose string is a PromptWithRoles, so that BaseLLM keeps the messages and their roles.

    Any other prompt is returned unchanged. Raises UsageError for a chat prompt without messages.
    """
    if isinstance(prompt, ChatPromptValue) and not isinstance(prompt, _RolesPromptValue):
        if not prompt.messages:
            raise UsageError("no messages given; pass at least one message with text")
        return _RolesPromptValue(messages=prompt.messages)
    return prompt


def message_and_chunks(message: BaseMessage) -> MessageAndChunks:
    """Return a LangChain message as a Message of ragblend, and the chunks that the LangChain message names.

    Raises UsageError for an unsupported role or content.
    """
    name = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    role = _ROLES.get(name)
    if role is None:
        raise UsageError(f"a message has role {name!r}; use system, user, assistant or tool")
    if isinstance(message.content, str):
        text, chunks = message.content, list[Chunk]()
    else:
        # An answer's blocks other than text (tool calls, reasoning) are not part of the conversation.
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
    """Return True for an answer's text, and for media, which `text_and_chunks` then rejects."""
    kind = "text" if isinstance(block, str) else str(block.get("type", "text"))
    return kind.startswith("text") or is_media(kind)


def _document_chunk(document: Document | Chunk) -> Chunk:
    if isinstance(document, Chunk):
        return document
    return Chunk(document.page_content.strip(), str(document.metadata.get("source") or ""), metadata=document.metadata)


def token_usage(result: Generation) -> UsageMetadata:
    """Return the token counts of an answer in LangChain's form; reused prompt tokens are `cache_read`."""
    report = result.report
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.completion_tokens,
        total_tokens=report.prompt_tokens + report.completion_tokens,
        input_token_details={"cache_read": report.num_reused_tokens},
    )
