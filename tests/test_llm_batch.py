"""LangChain's and LlamaIndex's ways to ask for several answers: decoded together, each with its own settings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from llama_index.core.llms import ChatMessage as LlamaIndexMessage
from torch import Tensor

from ragblend import BlendLLM, ChatBlend, load_engine
from ragblend.engine.generation import DecodeStep, RunningAnswer
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import PromptTooLongError, UsageError
from ragblend.llamaindex import BlendLLM as LlamaIndexLLM
from ragblend.precompute import precompute_documents

pytestmark = pytest.mark.timeout(120)  # a place that is not given back would hang

A = "The lighthouse on Gull Rock was built long ago, in 1872."
B = "Maren keeps the logbook of all the storms since 1901."
QUESTIONS = [f"Context:\n\n{A}\n\n{B}\n\nQuestion: who is number {number}?" for number in range(4)]
MOST = 3  # on their way together, at some moment; more where nothing else runs: threads start when they can
TOO_LONG = "word " * 3000


@pytest.fixture
def engine(tiny_engine, chat_renderer):
    """A tiny Llama whose store holds A and B."""
    made = tiny_engine(renderer=chat_renderer)
    precompute_documents([A, B], made)
    return made


@pytest.fixture
def sizes(engine, monkeypatch):
    """Of every step, how many answers it was made for."""
    found: list[int] = []
    decode = engine.loop._decode
    monkeypatch.setattr(engine.loop, "_decode", lambda steps: found.append(len(steps)) or decode(steps))
    return found


def models(engine: TransformersEngine, **fields: Any) -> list[Any]:
    """A chat and a string model."""
    return [model(engine=engine, **{"max_tokens": 20, **fields}) for model in (ChatBlend, BlendLLM)]


def text(answer: Any) -> str:
    """What a chat or a string model said."""
    return getattr(answer, "content", answer)


def texts(result: Any) -> list[str]:
    """The first answer to every prompt."""
    return [several[0].text for several in result.generations]


async def gathered(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls)


WAYS: dict[str, Callable[[Any], list[str]]] = {
    "batch": lambda llm: [text(each) for each in llm.batch(QUESTIONS)],
    "batch_as_completed": lambda llm: [text(each) for _, each in sorted(llm.batch_as_completed(QUESTIONS))],
    "abatch": lambda llm: [text(each) for each in asyncio.run(llm.abatch(QUESTIONS))],
    "ainvoke": lambda llm: [text(each) for each in asyncio.run(gathered([llm.ainvoke(each) for each in QUESTIONS]))],
    "generate_prompt": lambda llm: texts(llm.generate_prompt([llm._convert_input(each) for each in QUESTIONS])),
    "agenerate_prompt": lambda llm: texts(
        asyncio.run(llm.agenerate_prompt([llm._convert_input(each) for each in QUESTIONS]))
    ),
    "chain": lambda llm: (PromptTemplate.from_template("{q}") | llm | StrOutputParser()).batch(
        [{"q": each} for each in QUESTIONS]
    ),
}


@pytest.mark.parametrize(
    "way",
    [way if way in ("batch", "ainvoke") else pytest.param(way, marks=pytest.mark.slow) for way in WAYS],
)
def test_every_way_to_ask_for_several_decodes_them_together(way, engine, sizes):
    for llm in models(engine):
        expected = [text(llm.invoke(question)) for question in QUESTIONS]
        assert set(sizes) == {1}
        sizes.clear()
        assert WAYS[way](llm) == expected
        assert max(sizes) >= MOST
        sizes.clear()


def test_the_lists_of_generate_are_decoded_together(engine, sizes):
    chat, llm = models(engine)
    expected = [text(llm.invoke(question)) for question in QUESTIONS]
    run_id = uuid4()
    found = chat.generate([[HumanMessage(question)] for question in QUESTIONS], run_id=run_id, stop=["never said"])
    assert texts(found) == expected
    assert found.run[0].run_id == run_id
    assert len({info.run_id for info in found.run}) == len(QUESTIONS)
    assert texts(llm.generate(QUESTIONS)) == expected
    assert llm.generate(QUESTIONS).llm_output["token_usage"]["completion_tokens"] == sum(
        each[0].generation_info["ragblend"]["completion_tokens"] for each in llm.generate(QUESTIONS).generations
    )
    assert max(sizes) >= MOST


def test_llamaindex_calls_at_the_same_time_are_decoded_together(engine, sizes):
    llm = LlamaIndexLLM(engine=engine, max_tokens=20)
    asked = [[LlamaIndexMessage(role="user", content=question)] for question in QUESTIONS]
    expected = [llm.chat(messages).message.content for messages in asked]
    found = asyncio.run(gathered([llm.achat(messages) for messages in asked]))
    assert [each.message.content for each in found] == expected
    assert max(sizes) >= MOST


class Noting(BaseCallbackHandler):
    """Records the callbacks of the runs of one prompt."""

    def __init__(self) -> None:
        self.started: list[UUID] = []
        self.ended: list[tuple[UUID, str]] = []
        self.failed: list[UUID] = []

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        self.started += [run_id] * len(prompts)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.ended.append((run_id, response.generations[0][0].text))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.failed.append(run_id)


def test_a_prompt_that_fails_is_its_own_callbacks_affair(engine, sizes):
    for llm in models(engine):
        asked = [*QUESTIONS[:3], TOO_LONG, *QUESTIONS[3:]]
        handlers = [Noting() for _ in asked]
        configs = [{"callbacks": [handler]} for handler in handlers]
        expected = [text(llm.invoke(question)) for question in QUESTIONS]
        sizes.clear()
        answers = llm.batch(asked, configs, return_exceptions=True)
        assert isinstance(answers[3], PromptTooLongError)
        assert [text(each) for number, each in enumerate(answers) if number != 3] == expected
        assert max(sizes) >= MOST
        for number, handler in enumerate(handlers):
            assert len(handler.started) == 1
            assert [run for run, _ in handler.ended] == ([] if number == 3 else handler.started)
            assert handler.failed == (handler.started if number == 3 else [])
            assert number == 3 or handler.ended[0][1] == text(answers[number])
        with pytest.raises(PromptTooLongError):
            llm.batch(asked)
        found = asyncio.run(llm.abatch(asked, configs, return_exceptions=True))
        assert [isinstance(each, PromptTooLongError) for each in found] == [number == 3 for number in range(len(asked))]


@pytest.mark.parametrize("most", [1, 3])
def test_max_concurrency_is_kept(most, engine, sizes):
    for llm in models(engine):
        llm.batch(QUESTIONS, {"max_concurrency": most})
        asyncio.run(llm.abatch(QUESTIONS, {"max_concurrency": most}))
        assert max(sizes) == most


def test_several_answers_to_one_prompt_are_those_of_their_seeds(engine, sizes):
    for llm in models(engine, temperature=1.5):
        prompt = llm._convert_input(QUESTIONS[0])
        expected = [text(llm.invoke(QUESTIONS[0], seed=7 + number)) for number in range(4)]
        assert len(set(expected)) > 1
        sizes.clear()
        (found,) = llm.generate_prompt([prompt], n=4, seed=7).generations
        (later,) = asyncio.run(llm.agenerate_prompt([prompt], n=4, seed=7)).generations
        assert [each.text for each in found] == [each.text for each in later] == expected
        assert max(sizes) == 4
        with pytest.raises(UsageError, match="n is 3, but a stream has one answer"):
            next(iter(llm.stream(QUESTIONS[0], n=3)))
        with pytest.raises(UsageError, match="n is 0; choose a whole number, 1 to 128"):
            llm.invoke(QUESTIONS[0], n=0)


def test_a_call_that_is_cancelled_takes_no_other_with_it(engine, monkeypatch):
    chat, _ = models(engine)
    expected = [chat.invoke(question).content for question in QUESTIONS[:3]]
    all_run, is_cancelled, ended = threading.Event(), threading.Event(), []
    decode, end = engine.loop._decode, RunningAnswer.end

    def held(steps: Sequence[DecodeStep]) -> Sequence[Tensor]:
        if len(steps) == 3:
            all_run.set()
            assert is_cancelled.wait(60)
        all_run.wait(0.3)  # for the others to begin, on a busy machine
        return decode(steps)

    monkeypatch.setattr(engine.loop, "_decode", held)

    def note_end(answer: RunningAnswer, error: BaseException | None = None) -> None:
        ended.append(answer.result)
        end(answer, error)

    monkeypatch.setattr(RunningAnswer, "end", note_end)

    async def ask() -> list[Any]:
        tasks = [asyncio.create_task(chat.ainvoke(question)) for question in QUESTIONS[:3]]
        assert await asyncio.to_thread(all_run.wait, 60)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        is_cancelled.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(ask())
    assert isinstance(second, asyncio.CancelledError)
    assert [first.content, third.content] == [expected[0], expected[2]]
    (cancelled,) = [result for result in ended if result.finish_reason == "cancelled"]
    assert len(cancelled.token_ids) < 20


def test_a_timeout_is_of_each_answer(engine):
    for llm in models(engine, timeout=0.0):
        found = llm.batch(QUESTIONS[:3], return_exceptions=True)
        assert [type(each) for each in found] == [TimeoutError] * 3


def test_a_cached_answer_is_not_made_again(engine, sizes):
    for llm in models(engine, cache=InMemoryCache()):
        expected = [text(llm.invoke(question)) for question in QUESTIONS[:2]]
        sizes.clear()
        assert [text(each) for each in llm.batch(QUESTIONS[:3])][:2] == expected
        assert set(sizes) == {1}


def test_how_many_is_a_setting(tmp_path, tiny_engine):
    assert load_engine("demo").loop.max_num_seqs == 8
    assert load_engine("demo", max_num_seqs=2).loop.max_num_seqs == 2
    llm = BlendLLM(model="demo", store=tmp_path, engine_options={"max_num_seqs": 3})
    assert llm.engine.loop.max_num_seqs == 3
    with pytest.raises(UsageError, match="max_num_seqs is 0; choose"):
        load_engine("demo", max_num_seqs=0)
    with pytest.raises(UsageError, match="vllm_options="):
        load_engine("demo", backend="vllm", max_num_seqs=4)
