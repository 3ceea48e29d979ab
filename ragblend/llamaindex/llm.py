"""The LlamaIndex LLM over one ragblend engine. Imported as `ragblend.llamaindex.BlendLLM`.

Knows llama-index-core and the adapter. Knows nothing about retrieval or nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pydantic import ConfigDict

from ragblend.engine.report import Generation
from ragblend.errors import UsageError
from ragblend.frameworks.model import BlendModel, Request, Turn, iterate_in_thread, run_in_thread

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        LogProb,
        MessageRole,
        TextBlock,
    )
    from llama_index.core.llms import CustomLLM
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
except ImportError as error:
    raise ImportError("ragblend.llamaindex needs LlamaIndex: pip install 'ragblend[llamaindex]'") from error

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


class BlendLLM(BlendModel, CustomLLM):
    """A LlamaIndex LLM that answers from fused chunk KV.

    `BlendLLM(model="demo", store="kv/")`, or `BlendLLM(engine=engine)`. Every call may set mode, rule, recompute_ratio,
    max_tokens, temperature, stop, separator, strict and `segments=[...]` (strings, nodes or Chunks that are in the
    prompt word for word). Responses carry the report in `raw["ragblend"]`. `is_chat_model=False` makes LlamaIndex send
    one string instead of messages, and `raw=True` sends that string without the model's template.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, protected_namespaces=(), extra="forbid", hide_input_in_errors=True
    )

    is_chat_model: bool = True
    raw: bool = False

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised form."""
        return "ragblend_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """Context window and names, which decide how LlamaIndex packs prompts."""
        return LLMMetadata(
            context_window=self.engine.context_length,
            num_output=self._with({}).max_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self.model,
        )

    # --- chat ---

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; roles are kept."""
        return _chat_response(self, self._answer(self._chat_request(messages, kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat`, without blocking the event loop."""
        return _chat_response(self, await self._aanswer(lambda: self._chat_request(messages, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, piece by piece."""
        return (_as_chat(piece) for piece in self._stream_response(self._chat_request(messages, kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`chat`, piece by piece, without blocking the event loop."""
        request = self._chat_request(messages, kwargs)

        async def pieces() -> ChatResponseAsyncGen:
            async for piece in iterate_in_thread(self._stream_response(request)):
                yield _as_chat(piece)

        return pieces()

    # --- completion ---

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer one string: a user turn, or with `raw` the prompt itself."""
        return _completion(self, self._answer(self._text_request(prompt, formatted, kwargs)))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete`, without blocking the event loop."""
        return _completion(self, await self._aanswer(lambda: self._text_request(prompt, formatted, kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """`complete`, piece by piece."""
        return self._stream_response(self._text_request(prompt, formatted, kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`complete`, piece by piece, without blocking the event loop."""
        request = self._text_request(prompt, formatted, kwargs)

        async def pieces() -> CompletionResponseAsyncGen:
            async for piece in iterate_in_thread(self._stream_response(request)):
                yield piece

        return pieces()

    # --- inside ---

    def _chat_request(self, messages: Sequence[ChatMessage], call: dict[str, Any]) -> Request:
        if not messages:
            raise UsageError("no messages given; pass at least one ChatMessage with text")
        return _one_answer(self._prepare([_turn(message) for message in messages], **call))

    def _text_request(self, prompt: str, formatted: bool, call: dict[str, Any]) -> Request:
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        return _one_answer(self._prepare(prompt, raw=self.raw, **call))

    async def _aanswer(self, prepare: Callable[[], Request]) -> Generation:
        def answer(cancelled: threading.Event) -> Generation:
            return self._answer(prepare(), cancelled)

        return await run_in_thread(answer)

    def _stream_response(self, request: Request) -> Generator[CompletionResponse]:
        stream = self._open(request)
        text = ""
        for piece in self._pieces(stream, request):
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        yield _completion(self, stream.result).model_copy(update={"text": text, "delta": ""})


def _one_answer(request: Request) -> Request:
    if request.options.n not in (None, 1):
        raise UsageError(f"n is {request.options.n}; LlamaIndex's responses have one answer: leave it out, call again")
    return request


def _turn(message: ChatMessage) -> Turn:
    """A message as a turn; its text blocks are separate lines, as in `ChatMessage.content`."""
    parts: list[str] = []
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise UsageError(
                f"a message has a block of type {block.block_type!r}; the engine reads text only. Remove it, or "
                "describe it in words"
            )
        parts += ["\n", block.text] if parts else [block.text]
    return Turn(_ROLES[message.role], parts)


def _facts(result: Generation) -> dict[str, Any]:
    report = result.report
    usage = {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "cached_tokens": report.num_reused_tokens,
    }
    return {"ragblend": report.as_dict(), "usage": usage, "finish_reason": result.finish_reason}


def _completion(model: BlendModel, result: Generation) -> CompletionResponse:
    facts = _facts(result)
    response = CompletionResponse(text=result.text, raw=facts)
    if result.logprobs is not None:
        facts["logprobs"] = found = model._logprobs(result)
        names = ("token", "logprob", "bytes")
        response.logprobs = [
            [LogProb(**{name: each[name] for name in names}) for each in (token, *token["top_logprobs"])]
            for token in found["content"]
        ]
    return response


def _chat_response(model: BlendModel, result: Generation) -> ChatResponse:
    return _as_chat(_completion(model, result))


def _as_chat(response: CompletionResponse) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=response.text)
    return ChatResponse(message=message, delta=response.delta, raw=response.raw, logprobs=response.logprobs)
