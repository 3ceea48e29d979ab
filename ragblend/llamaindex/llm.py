"""The LlamaIndex LLM over one ragblend engine. Imported as `ragblend.llamaindex.BlendLLM`.

Depends on llama-index-core and `frameworks.model`, not on retrieval or nodes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from ragblend.engine.report import Generation
from ragblend.errors import UsageError
from ragblend.frameworks.aio import iterate_in_thread, run_in_thread
from ragblend.frameworks.content import Block, reject_block, text_and_chunks
from ragblend.frameworks.model import BlendModel, MessageAndChunks, Request
from ragblend.frameworks.tools import may_return_calls, split_text_and_calls
from ragblend.prompt.tools import CallFormat, CallReader
from ragblend.prompt.types import Chunk, Message, ToolCall

try:
    from llama_index.core.base.llms.types import (
        CachePoint,
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CitableBlock,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        LogProb,
        MessageRole,
        TextBlock,
        ThinkingBlock,
        ToolCallBlock,
    )
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.llms.structured_llm import StructuredLLM
    from llama_index.core.tools import BaseTool

    from ragblend.llamaindex.reports import add_report, carries_chunks, open_reports
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


class BlendLLM(BlendModel, FunctionCallingLLM):
    """A LlamaIndex LLM that answers from the stored KV of chunks, calls tools and fills schemas.

    Make it by `BlendLLM(model="demo", store="kv/")` or `BlendLLM(engine=engine)`. Every call may set mode, rule,
    recompute_ratio, max_tokens, temperature, stop and strict. A response has the report on reuse in `raw["ragblend"]`,
    a response of a query or chat engine in `metadata["ragblend"]`, with those of all calls in its list "calls". Prompts
    that engines and retrievers send without a node of the answer are not strict.
    A `CitableBlock` in a message names a chunk. If the store lacks the chunk's KV, the KV is stored in the background.

    Agents, `structured_predict` and `as_structured_llm` constrain the answer to calls and schemas during generation.
    They need the extra `structured`, except with vLLM. A stream yields a call once the call is complete.

    is_chat_model: False makes LlamaIndex send a string instead of messages. raw: True sends this string to the model
    without the chat template.
    """

    is_chat_model: bool = True
    raw: bool = False

    @classmethod
    def class_name(cls) -> str:
        """Return the name in LlamaIndex's serialized form."""
        return "ragblend_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """Return the model's name, context length and longest answer. LlamaIndex limits prompts by both lengths."""
        return LLMMetadata(
            context_window=self.engine.context_length,
            num_output=self._options({}).max_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self.model,
            is_function_calling_model=self.is_chat_model,
        )

    @property
    def tokenizer(self) -> Callable[[str], list[int]]:
        """Return the model's tokenizer: a function from a text to its token ids.

        Set `Settings.tokenizer = llm.tokenizer`, so that LlamaIndex counts this model's tokens. By default, LlamaIndex
        counts tokens of GPT. Prompts may then exceed this model's context length.
        """
        return lambda text: list(self.engine.renderer.text_ids(text))

    # --- chat ---

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; roles are kept."""
        request = self._chat_request(messages, kwargs)
        return self._chat_response(request, self._answer(request))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Run `chat` without blocking the event loop."""

        def answer(cancelled: threading.Event) -> ChatResponse:
            request = self._chat_request(messages, kwargs)
            return self._chat_response(request, self._answer(request, cancelled))

        return await run_in_thread(answer)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream `chat`."""
        return self._stream_chat(self._chat_request(messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream `chat` without blocking the event loop."""
        return iterate_in_thread(self._stream_chat(self._chat_request(messages, kwargs)))

    # --- tools ---

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        demanded: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `chat` for a call of LlamaIndex' agents and programs."""
        asked = [ChatMessage(role=MessageRole.USER, content=user_msg)] if isinstance(user_msg, str) else [user_msg]
        return {
            "messages": [*(chat_history or []), *(message for message in asked if message is not None)],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": tool_choice or ("required" if tool_required or demanded else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def as_structured_llm(self, output_cls: Any, **kwargs: Any) -> StructuredLLM:
        """Return this model with answers that are objects of the Pydantic class `output_cls`."""
        return super().as_structured_llm(_check_class(output_cls), **kwargs)

    def structured_predict(self, output_cls: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the answer to `prompt` as an object of the Pydantic class `output_cls`.

        Raises ValueError if `max_tokens` cuts the answer, as the three other forms of this method do.
        """
        return super().structured_predict(_check_class(output_cls), prompt, *args, **kwargs)

    async def astructured_predict(self, output_cls: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `structured_predict` without blocking the event loop."""
        return await super().astructured_predict(_check_class(output_cls), prompt, *args, **kwargs)

    def _structured_stream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        # LlamaIndex requires a call only if it does not stream.
        asked = {**(llm_kwargs or {}), "demanded": True}
        latest = None
        for latest in super()._structured_stream_call(_check_class(output_cls), prompt, asked, **kwargs):
            yield latest
        _check_is_whole(latest, output_cls)

    async def _structured_astream_call(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        asked = {**(llm_kwargs or {}), "demanded": True}
        objects = await super()._structured_astream_call(_check_class(output_cls), prompt, asked, **kwargs)

        async def whole_objects() -> AsyncGenerator[Any]:
            latest = None
            async for latest in objects:
                yield latest
            _check_is_whole(latest, output_cls)

        return whole_objects()

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the complete calls in an answer.

        Raises ValueError if the answer calls no tool; with `error_on_no_tool_call=False`, returns [] instead.
        """
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(
                f"the answer calls no tool ({response.message.content!r}); demand a call with tool_required=True, and "
                "raise max_tokens if it was cut"
            )
        return [
            ToolSelection(tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=call.tool_kwargs)
            for call in calls
            if isinstance(call.tool_kwargs, dict)
        ]

    # --- completion ---

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer the string `prompt`: a user turn in the chat template, or the whole prompt if the field `raw` is True.

        If `formatted` is False and the model has a `completion_to_prompt`, that function converts `prompt` first.
        """
        request = self._text_request(prompt, formatted, kwargs)
        return self._completion(request, self._answer(request))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Run `complete` without blocking the event loop."""

        def answer(cancelled: threading.Event) -> CompletionResponse:
            request = self._text_request(prompt, formatted, kwargs)
            return self._completion(request, self._answer(request, cancelled))

        return await run_in_thread(answer)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream `complete`."""
        return self._stream_response(self._text_request(prompt, formatted, kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Stream `complete` without blocking the event loop."""
        return iterate_in_thread(self._stream_response(self._text_request(prompt, formatted, kwargs)))

    # --- inside ---

    def _chat_request(self, messages: Sequence[ChatMessage], call: dict[str, Any]) -> Request:
        if not messages:
            raise UsageError("no messages given; pass at least one ChatMessage with text")
        turns = [_message_and_chunks(message) for message in messages]
        text = "\n".join(message.content for message, _ in turns)
        return self._begin(turns, text, call)

    def _text_request(self, prompt: str, formatted: bool, call: dict[str, Any]) -> Request:
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        return self._begin(prompt, prompt, {"raw": self.raw, **call})

    def _begin(self, content: str | Sequence[MessageAndChunks], text: str, call: dict[str, Any]) -> Request:
        """Return the request of a call, whose report the calls of LlamaIndex around it receive."""
        if not carries_chunks(text):
            call = {**call, "strict": False}
        request = self._prepare(content, **call)
        if request.options.n not in (None, 1):
            raise UsageError(
                f"n is {request.options.n}; LlamaIndex's responses have one answer: leave it out, call again"
            )
        return request._replace(reports=open_reports())

    def _chat_response(self, request: Request, result: Generation) -> ChatResponse:
        if may_return_calls(request.options):
            blocks = _blocks(result.text, self.engine.renderer.call_format_in_text)
            # LlamaIndex' programs check this field for calls before they read them.
            more = {"tool_calls": [block.model_dump() for block in blocks if isinstance(block, ToolCallBlock)]}
            message = ChatMessage(
                role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more if more["tool_calls"] else {}
            )
            facts = _facts(request, result)
            return ChatResponse(message=message, raw=facts, additional_kwargs=facts["usage"])
        return _as_chat(self._completion(request, result))

    def _stream_chat(self, request: Request) -> Generator[ChatResponse]:
        if not may_return_calls(request.options):
            yield from map(_as_chat, self._stream_response(request))
            return
        form, stream, answer_text = self.engine.renderer.call_format_in_text, self._open(request), ""
        reader = CallReader(form)
        for piece in self._pieces(stream, request):
            said = "".join(part for part in reader.push(piece) if isinstance(part, str))
            if said:
                answer_text += said
                yield _as_chat(CompletionResponse(text=answer_text, delta=said))
        whole = self._chat_response(request, stream.result)
        whole.delta = (whole.message.content or "").removeprefix(answer_text)
        yield whole

    def _stream_response(self, request: Request) -> Generator[CompletionResponse]:
        stream = self._open(request)
        text = ""
        for piece in self._pieces(stream, request):
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        yield self._completion(request, stream.result).model_copy(update={"text": text, "delta": ""})

    def _completion(self, request: Request, result: Generation) -> CompletionResponse:
        facts = _facts(request, result)
        # LlamaIndex's token counters read additional_kwargs.
        response = CompletionResponse(text=result.text, raw=facts, additional_kwargs=facts["usage"])
        if result.logprobs is not None:
            facts["logprobs"] = logprobs = self._logprobs(result)
            names = ("token", "logprob", "bytes")
            response.logprobs = [
                [LogProb(**{name: each[name] for name in names}) for each in (token, *token["top_logprobs"])]
                for token in logprobs["content"]
            ]
        return response


def _check_class(output_cls: Any) -> Any:
    if not isinstance(output_cls, type) or not issubclass(output_cls, BaseModel) or output_cls is BaseModel:
        raise UsageError(
            f"output_cls is {str(output_cls)[:80]}; pass a Pydantic class. Put another type into one of its fields: "
            "class Answer(BaseModel): value: TYPE"
        )
    return output_cls


def _check_is_whole(answer: Any, output_cls: type) -> None:
    """Raise ValueError if the last object of a stream is a partial one: LlamaIndex' class with optional fields."""
    if not isinstance(answer, output_cls):
        raise ValueError(f"the answer is no complete {output_cls.__name__}; raise max_tokens if it was cut")


def _message_and_chunks(message: ChatMessage) -> MessageAndChunks:
    """Return a LlamaIndex message as a Message of ragblend, and its CitableBlocks as chunks.

    Text blocks are separate lines, as in `ChatMessage.content`. A model's thinking is omitted.
    """
    parts: list[Block] = []
    calls: list[ToolCall] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            tool_arguments = block.tool_kwargs
            arguments = (
                tool_arguments if isinstance(tool_arguments, str) else json.dumps(tool_arguments, ensure_ascii=False)
            )
            calls.append(ToolCall(block.tool_name, arguments, block.tool_call_id or ""))
            continue
        if isinstance(block, ThinkingBlock | CachePoint):
            continue
        if isinstance(block, CitableBlock):
            for cited in block.content:
                if not isinstance(cited, TextBlock):
                    reject_block(cited.block_type)
                parts.append(Chunk(cited.text.strip(), block.source, metadata={"title": block.title}))
            continue
        if not isinstance(block, TextBlock):
            reject_block(block.block_type)
        parts += ["\n", block.text] if parts and isinstance(parts[-1], str) else [block.text]
    more = message.additional_kwargs
    text, chunks = text_and_chunks(parts)
    call_id, name = str(more.get("tool_call_id", "")), str(more.get("name", ""))
    return Message(_ROLES[message.role], text, tuple(calls), call_id, name), chunks


def _blocks(text: str, form: CallFormat) -> list[TextBlock | ToolCallBlock]:
    """Return an answer's text and its complete calls."""
    content, calls = split_text_and_calls(text, form)
    blocks: list[TextBlock | ToolCallBlock] = [TextBlock(text=content)] if content else []
    for id, name, arguments in calls:
        with suppress(ValueError, RecursionError):
            blocks.append(ToolCallBlock(tool_call_id=id, tool_name=name, tool_kwargs=json.loads(arguments)))
    return blocks


def _facts(request: Request, result: Generation) -> dict[str, Any]:
    """Return `raw` of a response, and give the report to the calls around this one."""
    report = result.report
    usage = {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "cached_tokens": report.num_reused_tokens,
    }
    facts = report.as_dict()
    add_report(request.reports, facts)
    return {"ragblend": facts, "usage": usage, "finish_reason": result.finish_reason}


def _as_chat(response: CompletionResponse) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=response.text)
    return ChatResponse(
        message=message,
        delta=response.delta,
        raw=response.raw,
        logprobs=response.logprobs,
        additional_kwargs=response.additional_kwargs,
    )
