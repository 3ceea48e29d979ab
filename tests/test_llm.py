"""The LangChain models over tiny engines: what they send, what they return, and how they behave under load."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda

from ragblend import Chunk, Prompt
from ragblend.engine.report import BlendReport, Generation
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.tiered import MemoryStore
from ragblend.errors import PromptTooLongError, UsageError
from ragblend.frameworks.engines import share_engine
from ragblend.frameworks.strict import ChunkNotReusedError
from ragblend.llamaindex import BlendLLM as LlamaBlend
from ragblend.llm import BlendLLM, ChatBlend
from ragblend.options import GenerationOptions
from ragblend.precompute import precompute_documents
from ragblend.prompt.types import Message, ToolCall

A = "The lighthouse on Gull Rock was built long ago, in 1872."
B = "Maren keeps the logbook of all the storms since 1901."
CONTEXT = f"Context:\n\n{A}\n\n{B}\n\nQuestion: who?"


@pytest.fixture
def engine(tiny_engine, chat_renderer):
    engine = tiny_engine(renderer=chat_renderer)
    precompute_documents([A, B], engine)
    return engine


@pytest.fixture
def chat(engine):
    return ChatBlend(engine=engine, max_tokens=8)


class ScriptedEngine:
    """An engine whose every token waits for a permit, to test the order of events and closed streams."""

    name, fingerprint, context_length = "scripted", "f", 100
    system: str | None = None
    renderer = SimpleNamespace(text_ids=lambda text: [len(word) for word in text.split()])

    def __init__(self, pieces: tuple[str, ...] = ("one ", "two ", "three"), permits: int = 0) -> None:
        self.store: Any = SimpleNamespace(tiers=())
        self.pieces = pieces
        self.permits = threading.Semaphore(permits)
        self.closed = threading.Event()
        self.started = threading.Event()
        self.prompts: list[Prompt] = []
        self.options: list[dict[str, Any]] = []

    def close(self) -> None:
        """Do nothing: it has no threads."""

    def stream(self, prompt: Prompt, **options: Any) -> Any:
        self.prompts.append(prompt)
        self.options.append(options)
        return _ScriptedStream(self)


class _ScriptedStream:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.result = Generation("", [], "cancelled", BlendReport("blend", "auto", 0.15))
        self._left = iter(engine.pieces)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.engine.started.set()
        piece = next(self._left, None)
        if piece is None:
            self.result.finish_reason = "stop"
            raise StopIteration
        assert self.engine.permits.acquire(timeout=20)
        self.result.text += piece
        return piece

    def close(self) -> None:
        self.engine.closed.set()


def scripted(kind: Any = ChatBlend, **settings: Any) -> tuple[Any, ScriptedEngine]:
    engine = ScriptedEngine(permits=settings.pop("permits", 0))
    return kind(engine=engine, **settings), engine


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_string_prompts_become_the_models_own_layout_unless_raw(engine):
    as_turn = engine.generate(Prompt.from_messages([("user", CONTEXT)]), max_tokens=8)
    as_it_is = engine.generate(Prompt.from_text(CONTEXT), max_tokens=8)
    assert (as_turn.report.num_chunk_hits, as_it_is.report.num_chunk_hits) == (2, 2)
    assert BlendLLM(engine=engine, max_tokens=8).invoke(CONTEXT) == as_turn.text
    assert BlendLLM(engine=engine, max_tokens=8, raw=True).invoke(CONTEXT) == as_it_is.text
    assert as_turn.text != as_it_is.text


async def test_blend_llm_keeps_the_roles_of_chat_prompts():
    llm, engine = scripted(BlendLLM, permits=99)
    value = ChatPromptTemplate.from_messages([("system", "S"), ("human", "H"), ("ai", "A"), ("human", "Q")]).invoke({})
    llm.invoke(value)
    await llm.ainvoke(value)
    list(llm.stream(value))
    [piece async for piece in llm.astream(value)]
    llm.batch([value])
    await llm.abatch([value])
    llm.generate_prompt([value])
    assert len(engine.prompts) == 7
    wanted = [("system", "S"), ("user", "H"), ("assistant", "A"), ("user", "Q")]
    for prompt in engine.prompts:
        assert [(message.role, message.content) for message in prompt.messages] == wanted


def prompt_sent(*messages: BaseMessage, **settings: Any) -> Prompt:
    chat, engine = scripted(permits=99, **settings)
    chat.invoke(list(messages))
    return engine.prompts[0]


def test_turns_stay_as_they_are_and_tools_documents_are_named():
    call = AIMessage("", tool_calls=[{"name": "search", "args": {"k": 2}, "id": "1"}])
    found = ToolMessage(f"{A}\n\n{B}", tool_call_id="1", artifact=[Document(A, metadata={"source": "a"}), Document(B)])
    said = [HumanMessage("Who?"), call, found, ToolMessage("42", tool_call_id="2"), ChatMessage("c", role="user")]
    prompt = prompt_sent(SystemMessage("a"), SystemMessage("b"), *said, HumanMessage(""))
    assert prompt.messages == (
        Message("system", "a"),
        Message("system", "b"),
        Message("user", "Who?"),
        Message("assistant", "", (ToolCall("search", '{"k": 2}', "1"),)),
        Message("tool", f"{A}\n\n{B}", call_id="1"),
        Message("tool", "42", call_id="2"),
        Message("user", "c"),
        Message("user", ""),
    )
    assert [(chunk.text, chunk.source) for chunk in prompt.chunks] == [(A, "a"), (B, "")]
    system = Message("system", "S")
    assert prompt_sent(*said, system="S").messages == (system, *prompt.messages[2:-1])
    assert prompt_sent(SystemMessage("a"), *said, system="S").messages[0].content == "a"


def test_settings_reach_the_engine_and_calls_override_them():
    chat, engine = scripted(permits=99, temperature=0.5, max_tokens=7, stop=["x"], mode="reuse", rule="random", seed=1)
    chat.invoke("Q")
    chat.invoke("Q", stop=["y"], temperature=0.0, max_tokens=3, mode="full", recompute_ratio=0.5, top_p=0.9)
    ChatBlend(engine=chat.engine, recompute_ratio="auto").invoke("Q")
    first = {"mode": "reuse", "rule": "random", "max_tokens": 7, "temperature": 0.5, "stop": ["x"], "seed": 1}
    second = {"mode": "full", "max_tokens": 3, "temperature": 0.0, "stop": ["y"], "recompute_ratio": 0.5, "top_p": 0.9}
    defaults = GenerationOptions().keywords
    expected = [{**defaults, **first}, {**defaults, **first, **second}, {**defaults, "recompute_ratio": "auto"}]
    assert engine.options == expected


# --- what comes back --------------------------------------------------------------------------------------------------


def test_usage_and_metadata(chat):
    message = chat.invoke(CONTEXT)
    report = message.response_metadata["ragblend"]
    usage = message.usage_metadata
    assert usage["input_tokens"] == report["prompt_tokens"]
    assert usage["output_tokens"] == report["completion_tokens"]
    assert usage["input_token_details"]["cache_read"] == report["num_reused_tokens"] > 0
    assert message.response_metadata["model_name"] == "tiny llama"
    assert message.response_metadata["finish_reason"] in ("stop", "length")


def test_sampling_options_have_the_names_of_other_chat_models(engine):
    chat = ChatBlend(engine=engine, max_tokens=8, temperature=1.0, seed=3, top_k=5, call_options={"min_p": 0.01})
    plain = chat.invoke(CONTEXT)
    assert chat.invoke(CONTEXT).content == plain.content
    first = engine.generate(chat._prepare(CONTEXT).prompt, max_tokens=1).token_ids[0]
    banned = chat.invoke(CONTEXT, temperature=0, logit_bias={str(first): -100}, logprobs=True, top_logprobs=2)
    found = banned.response_metadata["logprobs"]["content"]
    assert len(found) == banned.usage_metadata["output_tokens"]
    assert found[0]["logprob"] < found[0]["top_logprobs"][0]["logprob"] < 0
    assert found[0]["top_logprobs"][0]["token"] == engine.renderer.token_texts([first])[0]
    assert "logprobs" not in plain.response_metadata
    assert (
        ChatBlend(engine=engine, top_k=5)._identifying_params != ChatBlend(engine=engine, top_k=6)._identifying_params
    )


def test_streaming_adds_up_to_invoke(chat):
    chunks = list(chat.stream(CONTEXT))
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    merged, whole = add_ai_message_chunks(*chunks), chat.invoke(CONTEXT)
    assert merged.text == whole.text
    assert merged.usage_metadata == whole.usage_metadata
    assert merged.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert merged.response_metadata["ragblend"]["num_chunk_hits"] == 2


def test_what_changes_answers_changes_the_cache_key():
    keys = set()
    for settings in ({}, {"system": "S"}, {"mode": "full"}, {"recompute_ratio": 0.5}, {"max_tokens": 1}):
        keys.add(scripted(**settings)[0]._get_llm_string())
    assert len(keys) == 5


def test_callbacks_see_tokens_and_errors():
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []
            self.errors: list[BaseException] = []

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.tokens.append(token)

        def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
            self.errors.append(error)

    for kind in (ChatBlend, BlendLLM):
        seen = Seen()
        llm, _ = scripted(kind, permits=99)
        list(llm.stream("Q", {"callbacks": [seen]}))
        assert [token for token in seen.tokens if token] == ["one ", "two ", "three"]
        with pytest.raises(UsageError):
            llm.invoke(" ", {"callbacks": [seen]})
        assert len(seen.errors) == 1


def test_tracing_parameters(engine):
    chat = ChatBlend(engine=engine, temperature=0.5, stop=["x"])
    params = chat._get_ls_params()
    assert params["ls_provider"] == "ragblend"
    assert params["ls_model_name"] == "tiny llama"
    assert (params["ls_temperature"], params["ls_stop"]) == (0.5, ["x"])
    assert BlendLLM(engine=engine)._get_ls_params()["ls_model_type"] == "llm"


def test_as_chat_shares_engine_and_settings(engine):
    chat = BlendLLM(engine=engine, max_tokens=3, mode="reuse", stop=["x"]).as_chat()
    assert chat.engine is engine
    assert (chat.max_tokens, chat.mode, chat.stop) == (3, "reuse", ["x"])


# --- copies -----------------------------------------------------------------------------------------------------------


def rebuilt(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, rebuilt, lambda model: model.model_copy(deep=True)])
@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_a_copied_model_answers_equally_and_shares_its_engine(kind, copied, tmp_path):
    model = kind(
        model="demo", store=str(tmp_path), max_tokens=4, engine_options={"memory_gib": 1}, stop=["never"], strict=True
    )
    precompute_documents([A, B], model)
    other = copied(model)
    assert other.engine is model.engine
    assert other.model_dump() == model.model_dump()
    assert (other.stop, other.strict) == (["never"], True)
    first, second = (each.invoke(CONTEXT) for each in (model, other))
    assert getattr(first, "content", first) == getattr(second, "content", second)
    other.stop.append("more")
    assert model.stop == ["never"]
    model.engine.close()
    assert rebuilt(model).engine is not model.engine


def test_a_relative_store_is_the_same_from_every_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llm = BlendLLM(model="demo", store="kv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for other in (rebuilt(llm), copy.deepcopy(llm), llm.as_chat()):
        assert other.engine is llm.engine
    precompute_documents([A], llm)
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_another_process_opens_the_engine_again(tmp_path):
    chat = ChatBlend(model="demo", store=str(tmp_path / "kv"), max_tokens=4, namespace="mine")
    precompute_documents([A, B], chat)
    answer = chat.invoke(CONTEXT)
    chain = PromptTemplate.from_template("{text}") | chat
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(chain.invoke, {"text": CONTEXT}).result()
    assert found.text == answer.text
    assert found.response_metadata["ragblend"]["num_chunk_hits"] == 2
    chat.engine.close()


@pytest.mark.slow
def test_a_forked_process_gets_an_error_instead_of_hanging(tmp_path):
    code = (
        "import os, sys; from ragblend.llm import ChatBlend\n"
        "chat = ChatBlend(model='demo', store=sys.argv[1], max_tokens=1)\n"
        "chat.invoke('Who?')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        chat.invoke('Who?')\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "    own = ChatBlend(model='demo', store=sys.argv[1], max_tokens=1)\n"
        "    print(own.engine is chat.engine)\n"
        "    sys.exit()\n"  # at exit, the child leaves its parent's engine alone
        "os.waitpid(child, 0)\n"
        "chat.engine.close()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert re.search(r"loaded before this process was forked.*get_context\('spawn'\)\nFalse", shown)


@pytest.mark.slow
def test_a_process_forked_during_requests_gets_errors_and_never_hangs(tmp_path):
    """Threads hold the engine's lock, and the ledger's, in the moment of the fork; a stream is half way."""
    code = """if True:
        import os, signal, sys, threading, time
        from ragblend import Prompt
        from ragblend.catalog.ledger import open_ledger
        from ragblend.catalog.schema import DocumentKey
        from ragblend.llm import BlendLLM
        from ragblend.precompute import precompute_documents
        llm = BlendLLM(model='demo', store=sys.argv[1], max_tokens=3)
        texts = [f"The red boat number {n} is in the harbour of Oslo, long enough to be found." for n in range(8)]
        precompute_documents(texts, llm)
        def ask():
            while True:
                llm.invoke("Read: " + " ".join(texts) + " Where is it?")
        def add():
            while True:
                llm.engine.add_known_chunks([f"Another text, which was added at {time.monotonic()}, long enough."])
        for work in (ask, ask, add):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
        prompt = Prompt(texts[:3], "Where is it?")
        stream = llm.engine.stream(prompt, max_tokens=500)
        next(stream)
        calls = {
            "invoke": lambda: llm.invoke("Where?"),
            "generate": lambda: llm.engine.generate(prompt),
            "stream": lambda: next(stream),
            "precompute": lambda: precompute_documents(["A new text."], llm),
            "ledger": lambda: open_ledger(llm.engine.store).add_texts({DocumentKey("a", "1"): {"A child's text.": 0}}),
        }
        for name, call in list(calls.items()) * 3:
            child = os.fork()
            if not child:
                signal.alarm(20)
                try:
                    call()
                    os.write(1, f"{name}: done\\n".encode())
                except Exception as error:
                    os.write(1, f"{name}: {error}"[:80].encode() + b"\\n")
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                os.write(1, f"{name}: hangs\\n".encode())
        os._exit(0)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    lines = shown.splitlines()
    assert len(lines) == 15
    for line in lines:
        wanted = "ledger: done" if line.startswith("ledger") else "was loaded before this process was forked"
        assert wanted in line


def test_objects_that_cannot_be_pickled_are_shared_by_deep_copies(engine):
    chat = ChatBlend(engine=engine)
    assert copy.deepcopy(chat).engine is engine
    with pytest.raises(TypeError, match=r"the engine of this .* is an object.*ChatBlend\(model=\.\.\., store='DIR'\)"):
        pickle.dumps(chat)
    for attempt in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"TransformersEngine holds a model.*Send the arguments of load_engine"):
            attempt(engine)
    held = ChatBlend(model="demo", store=MemoryStore(1 << 20))
    with pytest.raises(TypeError, match="the store of this"):
        pickle.dumps(held)
    assert copy.deepcopy(held).store is held.store


def test_configurable_fields_open_the_engine_that_they_name(tmp_path):
    options = {"memory_gib": 1}
    model = ChatBlend(model="demo", store=tmp_path / "a", max_tokens=2, engine_options=options)
    fields = {"temperature": ConfigurableField("t"), "store": ConfigurableField("s")}
    configurable: Any = model.configurable_fields(**fields)
    warm, _ = configurable._prepare({"configurable": {"t": 0.5}})
    assert (warm.engine, warm.temperature, warm.engine_options) == (model.engine, 0.5, options)
    other, _ = configurable._prepare({"configurable": {"s": str(tmp_path / "b")}})
    assert other.engine is not model.engine
    assert other.engine.store.tiers[1].root == tmp_path / "b"
    other.engine.close()
    model.engine.close()


# --- warnings -------------------------------------------------------------------------------------------------------

LONG = "Context: " + "This text about the harbour was never ingested. " * 30 + "\n\nWho built it?"


def test_a_chain_over_an_empty_store_logs_the_command_that_fills_it(tmp_path, caplog):
    llm = BlendLLM(model="demo", store=tmp_path, max_tokens=1, engine_options={"memory_gib": 1})
    for _ in range(4):
        llm.invoke(LONG, max_tokens=1)
    llm.engine.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("nothing was reused: nothing is stored yet; ingest the documents first: ragblend ingest")
    assert f"ragblend ingest DOCS --model demo --store {tmp_path}" in line
    assert line.endswith("ragblend.precompute.precompute_documents(documents, llm)")


class CountingCache(InMemoryCache):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"lookup": 0, "update": 0}

    def lookup(self, prompt: str, llm_string: str) -> Any:
        self.counts["lookup"] += 1
        return super().lookup(prompt, llm_string)

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.counts["update"] += 1
        super().update(prompt, llm_string, return_val)


class CountingCallbacks(BaseCallbackHandler):
    def __init__(self) -> None:
        self.counts = {"start": 0, "token": 0, "end": 0}

    def on_llm_start(self, *_: Any, **__: Any) -> None:
        self.counts["start"] += 1

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self.counts["start"] += 1

    def on_llm_new_token(self, *_: Any, **__: Any) -> None:
        self.counts["token"] += 1

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.counts["end"] += 1


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "generate_prompt", "stream", "astream"])
async def test_callbacks_fire_once_and_the_cache_is_read_once(kind, way):
    cache, callbacks = CountingCache(), CountingCallbacks()
    llm, engine = scripted(kind, permits=99, cache=cache)
    config: Any = {"callbacks": [callbacks]}
    if way == "ainvoke":
        await llm.ainvoke("Q", config)
    elif way == "batch":
        llm.batch(["Q"], config)
    elif way == "generate_prompt":
        llm.generate_prompt([ChatPromptValue(messages=[HumanMessage("Q")])], callbacks=[callbacks])
    elif way == "astream":
        assert [piece async for piece in llm.astream("Q", config)]
    else:
        assert list(getattr(llm, way)("Q", config))
    is_stream = "stream" in way
    assert len(engine.prompts) == 1
    assert (callbacks.counts["start"], callbacks.counts["end"]) == (1, 1)
    last = int(kind is ChatBlend)  # LangChain reports the empty chunk that ends a chat stream, too
    assert callbacks.counts["token"] == (3 + last if is_stream else 0)
    assert cache.counts == ({"lookup": 0, "update": 0} if is_stream else {"lookup": 1, "update": 1})


# --- streaming, concurrency, cancelling -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_first_tokens_stream_before_the_last_is_generated(kind):
    llm, engine = scripted(kind, permits=1)
    pieces = llm.stream("Q")
    first = next(pieces)
    assert getattr(first, "content", first) == "one "
    assert not engine.closed.is_set()
    engine.permits.release(9)
    assert "".join(getattr(piece, "content", piece) for piece in pieces) == "two three"
    assert engine.closed.is_set()
    engine.closed.clear()
    left = llm.stream("Q")
    next(left)
    left.close()
    assert engine.closed.wait(5)


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
async def test_async_streaming_is_as_prompt(kind):
    llm, engine = scripted(kind, permits=1)
    pieces = llm.astream("Q")
    first = await anext(pieces)
    assert getattr(first, "content", first) == "one "
    engine.permits.release(9)
    assert "".join([getattr(piece, "content", piece) async for piece in pieces]) == "two three"


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
@pytest.mark.parametrize("streaming", [True, False])
async def test_cancelling_frees_the_engine(kind, streaming):
    llm, engine = scripted(kind)

    async def consume() -> None:
        async for _ in llm.astream("Q"):
            pass

    task = asyncio.create_task(consume() if streaming else llm.ainvoke("Q"))
    await asyncio.to_thread(engine.started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.permits.release(1)  # the step under way ends, and no other begins
    assert await asyncio.to_thread(engine.closed.wait, 5)
    assert engine.permits._value == 0


def test_timeout_ends_a_slow_answer():
    chat, engine = scripted(permits=99, timeout=0.0)
    with pytest.raises(TimeoutError, match=r"timeout=0\.0"):
        chat.invoke("Q")
    assert engine.closed.is_set()


# --- strictness -------------------------------------------------------------------------------------------------------


def test_strict_refuses_what_is_not_reused(chat):
    def named(text: str) -> HumanMessage:
        return HumanMessage([{"type": "text", "text": text, "extras": {"chunk_id": "1"}}, "Who?"])

    artifact = ToolMessage("Nothing.", tool_call_id="1", artifact=[Document(A)])
    refused = {
        "no ingested chunk": HumanMessage("What is new?"),
        "has no KV": named("A passage that was never stored."),
        "does not contain its text": artifact,
    }
    for reason, message in refused.items():
        with pytest.raises(ChunkNotReusedError, match=reason):
            chat.invoke([HumanMessage(f"{B}\n\nWho?"), message] if message is artifact else [message], strict=True)
    chat.invoke([refused["has no KV"]])  # without strict it is ordinary prefill
    assert chat.invoke([named(A)], strict=True).response_metadata["ragblend"]["num_chunk_hits"] == 1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [[], [HumanMessage("")], [HumanMessage([]), SystemMessage(" \n")], ""])
@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_empty_prompts_are_refused(kind, messages, engine):
    with pytest.raises(UsageError, match=r"empty|no messages"):
        kind(engine=engine).invoke(messages)


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
async def test_a_prompt_beyond_the_context_is_langchains_own_error_too(kind, engine):
    llm, long = kind(engine=engine, max_tokens=2), "the chunk " * 2000
    for attempt in (lambda: llm.invoke(long), lambda: list(llm.stream(long)), lambda: llm.batch([long])):
        with pytest.raises(ContextOverflowError, match="retrieve fewer chunks") as raised:
            attempt()
        assert isinstance(raised.value, PromptTooLongError)
    with pytest.raises(ContextOverflowError):
        await llm.ainvoke(long)
    with pytest.raises(ContextOverflowError):
        [piece async for piece in llm.astream(long)]
    shorter = RunnableLambda(lambda prompt: "a shorter one")
    assert llm.with_fallbacks([shorter], exceptions_to_handle=(ContextOverflowError,)).invoke(long) == "a shorter one"


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM, LlamaBlend])
@pytest.mark.parametrize(
    "option",
    [
        {"timeout": "5"},
        {"timeout": (1, 2)},
        {"timeout": float("nan")},
        {"timeout": -1},
        {"strict": "yes"},
        {"n": 0},
        {"n": 1000},
        {"tools": "add"},
        {"tools": ["add"]},
        {"tool_choice": 5},
        {"parallel_tool_calls": "no"},
        {"response_format": "json"},
        {"max_tokens": 24.0},
    ],
    ids=str,
)
def test_an_option_of_a_wrong_type_is_named_by_calls_and_models(kind, option, engine):
    (name,) = option
    with pytest.raises(UsageError, match=f"^{name} is .*; choose "):
        kind(engine=engine)._options(option)
    if name in kind.model_fields:
        with pytest.raises(UsageError, match=f"{name} is .*; choose "):
            kind(engine=engine, **option)


@pytest.mark.parametrize("option", [{"max_retries": -1}, {"max_retries": "2"}, {"store": 5}])
def test_a_field_of_a_wrong_type_is_named(option):
    (name,) = option
    with pytest.raises(UsageError, match=f"{name} is .*; choose "):
        ChatBlend(model="demo", **option)


def test_unknown_roles_are_refused(chat):
    with pytest.raises(UsageError, match="'critic'"):
        chat.invoke([ChatMessage(content="Q", role="critic")])


# --- engines ----------------------------------------------------------------------------------------------------------


def test_models_of_one_store_share_an_engine(tmp_path):
    chat, llm = ChatBlend(model="demo", store=tmp_path), BlendLLM(store=str(tmp_path))
    assert chat.engine is llm.engine
    assert share_engine("demo", tmp_path / "other") is not chat.engine
    precompute_documents([A], chat)
    (run,) = llm.engine.match(llm._prepare(f"{A}\n\nWho?").prompt).runs
    assert llm.engine.renderer.plain_text(run.chunk_ids).strip() == A
    chat.engine.close()


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_loading_options_have_the_names_of_transformers(kind, tmp_path):
    options = {"device_map": "cpu", "model_kwargs": {"token": "hf_secret"}}
    model = kind(model="demo", store=tmp_path, torch_dtype="bfloat16", engine_options=options)
    assert str(model.engine.layers.dtype) == "torch.bfloat16"
    again = kind(model="demo", store=tmp_path, dtype=model.engine.layers.dtype, engine_options=options)
    assert (model.dtype, again.dtype, again.engine) == ("bfloat16", "bfloat16", model.engine)
    assert "hf_secret" not in f"{model!r} {model.model_dump()} {model._identifying_params}"
    assert model.configurable_fields(dtype=ConfigurableField("d")) is not None
    model.engine.close()
    with pytest.raises(UsageError, match="dtype is 'float8'; choose one of auto"):
        kind(torch_dtype="float8")


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_the_ingestion_context_is_an_engine_option(kind, tmp_path):
    model = kind(model="demo", store=tmp_path, engine_options={"context": "neutral"})
    assert model.engine.context == "neutral"
    precompute_documents([A, B], model)
    assert model.engine.is_stored(Chunk(B, context="neutral"))
    assert kind(model="demo", store=tmp_path, engine_options={"context": "none"}).engine is not model.engine
    model.engine.close()
    with pytest.raises(UsageError, match="context is 'some'; choose one of none, neutral"):
        kind(model="demo", store=tmp_path / "other", engine_options={"context": "some"})


def test_engine_options_set_the_tiers_and_shadow_of_the_loaded_engine(tmp_path):
    options = {"memory_gib": 0, "disk_gib": 2, "kv_dtype": "int8", "shadow": 1.0}
    llm = BlendLLM(model="demo", store=tmp_path, engine_options=options, max_tokens=2)
    (disk,) = llm.engine.store.tiers
    assert (disk.capacity_bytes, llm.engine.store.kv_dtype) == (2 << 30, "int8")
    assert llm.engine is not share_engine("demo", tmp_path)
    precompute_documents([A, B], llm)
    llm.invoke(CONTEXT)
    llm.engine.flush_shadow()
    assert llm.engine.shadow.num_shadowed == 1
    chat = llm.as_chat()
    assert (chat.engine, chat.engine_options) == (llm.engine, options)
    llm.engine.close()


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_engine_options_that_nothing_could_use_are_refused(kind, engine):
    with pytest.raises(UsageError, match=r"engine_options has memory.*nearest is 'memory_gib'; choose from .*shadow"):
        kind(engine_options={"memory": 8})
    with pytest.raises(UsageError, match="engine_options has device"):
        kind(engine_options={"device": "cpu"})
    with pytest.raises(UsageError, match="pass them to load_engine"):
        kind(engine=engine, engine_options={"memory_gib": 8})
    with pytest.raises(UsageError, match="memory_gib cannot be set here"):
        kind(model="demo", backend="http://127.0.0.1:1", engine_options={"memory_gib": 8})


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_well_and_stores_its_misses(tmp_path):
    code = (
        "import sys; from ragblend import load_engine; from ragblend.llm import ChatBlend\n"
        "own, given = sys.argv[1:]\n"
        "for chat in (ChatBlend(model='demo', store=own), ChatBlend(engine=load_engine('demo', given))):\n"
        f"    chat.invoke([('user', [{{'type': 'text', 'text': {A!r}, 'chunk_id': '1'}}, 'Who?'])], max_tokens=1)"
    )
    stores = [tmp_path / "own", tmp_path / "given"]
    subprocess.run([sys.executable, "-c", code, *map(str, stores)], check=True, timeout=120)
    assert [len(list(DiskStore(store).keys())) for store in stores] == [1, 1]


@pytest.mark.parametrize(
    ("framework", "module", "extra"),
    [("langchain_core", "ragblend.llm", "langchain"), ("llama_index", "ragblend.llamaindex", "llamaindex")],
)
def test_import_without_the_framework_names_the_extra(framework, module, extra):
    code = (
        f"import sys; sys.modules[{framework!r}] = None\n"
        f"try: import {module}\n"
        "except ImportError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"pip install 'ragblend[{extra}]'" in shown
