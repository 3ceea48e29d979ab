"""Answers of a batch equal answers made one by one, also if others fail, are cancelled or are added."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_prompts import CHUNKS
from torch import Tensor

from ragblend.engine import base, generation, loop
from ragblend.engine.generation import MAX_UNREAD_PIECES, DecodeStep, GenerationStream, RunningAnswer
from ragblend.engine.loop import MAX_NUM_SEQS, EngineLoop
from ragblend.engine.report import Generation
from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import PromptTooLongError, UsageError
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(120)  # a place that is not given back would hang

PROMPTS = tuple(
    Prompt(CHUNKS[first : first + count], question)
    for first in range(2)
    for count in range(3)
    for question in ("what is that?", "the theory of the chunk, and the answer to the other question?")
)


@pytest.fixture(scope="module")
def engine(tiny_layers, renderer):
    """A tiny Llama whose store holds CHUNKS. Shared: answering leaves it as it was."""
    store = MemoryStore(1 << 26)
    options: dict[str, Any] = {"name": "tiny-llama", "fingerprint": "llama", "on_miss": "inline"}
    with TransformersEngine(tiny_layers("llama"), renderer, store, **options) as made:
        list(made.precompute_all(CHUNKS))
        yield made


def same(found: Generation, expected: Generation) -> None:
    """The same answer; what the model thought of it may differ by float noise."""
    facts = [
        (each.text, each.token_ids, each.finish_reason, each.report.num_reused_tokens) for each in (found, expected)
    ]
    assert facts[0] == facts[1]
    assert found.report.completion_tokens == len(found.token_ids)
    assert (found.logprobs is None) == (expected.logprobs is None)
    for mine, theirs in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def finished(engine: TransformersEngine, streams: Sequence[GenerationStream], **how: Any) -> list[Generation]:
    """The answers of streams, none of which fails."""
    assert engine.run_to_end(streams, **how) == [None] * len(streams)
    return [stream.result for stream in streams]


OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 14)},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 99),
        "top_p": st.sampled_from([0.5, 1.0]),
        "top_k": st.sampled_from([1, 5]),
        "min_p": st.just(0.05),
        "repetition_penalty": st.just(1.3),
        "presence_penalty": st.just(0.5),
        "frequency_penalty": st.just(0.5),
        "logit_bias": st.dictionaries(st.integers(3, 290), st.sampled_from([-5.0, 5.0]), max_size=3),
        "logprobs": st.booleans(),
        "stop": st.lists(st.sampled_from(["e", "th", "xyz"]), max_size=2),
        "mode": st.sampled_from(["blend", "full", "reuse", "prefix"]),
        "recompute_ratio": st.sampled_from([0.1, 1.0]),
    },
)


@settings(max_examples=12)
@given(asked=st.lists(st.tuples(st.sampled_from(PROMPTS), OPTIONS), min_size=1, max_size=12))
def test_any_mix_of_prompts_and_options_gives_what_each_gives_alone(engine, asked):
    asked = [(prompt, {"seed": 0, **options}) for prompt, options in asked]
    expected = [engine.generate(prompt, **options) for prompt, options in asked]
    found = finished(engine, [engine.stream(prompt, **each) for prompt, each in asked])
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)


@contextmanager
def held(engine: TransformersEngine) -> Iterator[None]:
    """Block the engine's loop in a call, so that it finds everything queued inside this block at once."""
    is_held, goes_on = threading.Event(), threading.Event()
    call = engine.loop.submit(lambda: is_held.set() or goes_on.wait(60))
    assert is_held.wait(60)
    yield
    goes_on.set()
    assert call.result()


def note_sizes(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the number of answers of each later step."""
    sizes: list[int] = []
    decode = engine.loop._decode
    monkeypatch.setattr(engine.loop, "_decode", lambda steps: sizes.append(len(steps)) or decode(steps))
    return sizes


def test_steps_are_batched_and_ended_answers_leave_the_batch(engine, monkeypatch):
    sizes = note_sizes(engine, monkeypatch)
    lengths = [2, 9, 5, 9, 3]
    answers = finished(engine, [engine.stream(PROMPTS[0], max_tokens=count) for count in lengths])
    assert [len(answer.token_ids) for answer in answers] == lengths  # PROMPTS[0] goes on for so long
    assert sizes == [5, 4, 3, 3, 2, 2, 2, 2]


def test_no_more_answers_are_decoded_together_than_max_num_seqs(tiny_engine, monkeypatch):
    engine = tiny_engine("llama", max_num_seqs=3)
    expected = engine.generate(PROMPTS[0], max_tokens=6)
    sizes = note_sizes(engine, monkeypatch)
    for answer in engine.generate_batch([PROMPTS[0]] * 7, max_tokens=6):
        same(answer, expected)
    assert max(sizes) == 3
    assert len(sizes) == 15  # 5 steps each, of 3 + 3 + 1


def test_one_at_a_time_is_the_steps_of_one_prompt(tiny_engine, monkeypatch):
    engine = tiny_engine("llama", max_num_seqs=1)
    sizes = note_sizes(engine, monkeypatch)
    assert [len(each.token_ids) for each in engine.generate_batch(PROMPTS[:3], max_tokens=4)] == [4, 4, 4]
    assert sizes == [1] * 9


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_a_number_that_is_none_is_refused(value):
    with pytest.raises(UsageError, match="max_num_seqs"):
        EngineLoop(lambda steps: [], value)


# --- errors, ends and threads ---


def test_an_answer_that_fails_leaves_the_others_as_they_are(engine, monkeypatch):
    prompts = PROMPTS[:5]
    expected = [engine.generate(prompt, max_tokens=8) for prompt in prompts]
    streams = [engine.stream(prompt, max_tokens=8) for prompt in prompts]
    prefill, decode = engine._prefill, engine.loop._decode

    def failing_prefill(request, store_get):
        if request is streams[1].request:
            raise RuntimeError("no memory for it")
        return prefill(request, store_get)

    def failing_decode(steps: Sequence[DecodeStep]) -> Sequence[Tensor]:
        if any(step.fused.length == streams[3].request.prompt.num_tokens + 4 for step in steps):
            raise RuntimeError("its KV is gone")
        return decode(steps)

    streams[3] = engine.stream(Prompt(CHUNKS, "a question that no other is as long as: what is it?"), max_tokens=8)
    monkeypatch.setattr(engine, "_prefill", failing_prefill)
    monkeypatch.setattr(engine.loop, "_decode", failing_decode)
    errors = engine.run_to_end(streams)
    assert list(map(str, errors)) == ["None", "no memory for it", "None", "its KV is gone", "None"]
    for number in (0, 2, 4):
        same(streams[number].result, expected[number])
    assert streams[3].result.finish_reason == "cancelled"
    assert len(streams[3].result.token_ids) == 5
    monkeypatch.undo()
    same(engine.generate_batch([prompts[0]], max_tokens=8)[0], expected[0])


def test_generate_batch_raises_the_first_error_and_checks_before_it_starts(engine, monkeypatch):
    with pytest.raises(PromptTooLongError):
        engine.generate_batch([PROMPTS[0], Prompt((), "word " * 3000)], max_tokens=4)
    monkeypatch.setattr(engine, "_prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory for it")))
    with pytest.raises(RuntimeError, match="no memory"):
        engine.generate_batch(PROMPTS[:2], max_tokens=4)


def test_what_a_watch_ends_or_raises_is_that_answers_alone(engine):
    expected = engine.generate(PROMPTS[0], max_tokens=10)
    streams = [engine.stream(PROMPTS[0], max_tokens=10) for _ in range(4)]

    def watch(answer: RunningAnswer) -> bool:
        if answer.result is streams[1].result and len(answer.result.token_ids) >= 3:
            raise TimeoutError("too slow")
        return answer.result is streams[2].result and len(answer.result.token_ids) >= 2

    errors = engine.run_to_end(streams, watch)
    assert [type(error) for error in errors] == [type(None), TimeoutError, type(None), type(None)]
    assert streams[2].result.finish_reason == "cancelled"
    assert streams[2].result.token_ids == expected.token_ids[: len(streams[2].result.token_ids)]
    assert streams[2].result.report.completion_tokens < 10
    same(streams[0].result, expected)
    same(streams[3].result, expected)


@pytest.mark.parametrize("num_threads", [3, MAX_NUM_SEQS + 4])
def test_threads_that_ask_at_the_same_time_are_answered_together(engine, monkeypatch, num_threads):
    asked = [(PROMPTS[number % len(PROMPTS)], 16 + number) for number in range(num_threads)]
    expected = [engine.generate(prompt, max_tokens=count) for prompt, count in asked]
    sizes = note_sizes(engine, monkeypatch)
    barrier = threading.Barrier(num_threads)

    def answer(each: tuple[Prompt, int]) -> Generation:
        barrier.wait()
        return engine.generate(each[0], max_tokens=each[1])

    for _ in range(3):
        with ThreadPoolExecutor(num_threads) as pool:
            for mine, theirs in zip(pool.map(answer, asked), expected, strict=True):
                same(mine, theirs)
    assert 1 < max(sizes) <= MAX_NUM_SEQS
    assert is_at_rest(engine)


def is_at_rest(engine: TransformersEngine) -> bool:
    """Whether the loop has nothing to do, and holds no answer, after the round that is under way."""
    for _ in range(2):
        engine.loop.call(lambda: None)
    return not engine.loop._running and not engine.loop._waiting


def endless(engine: TransformersEngine, prompt: Prompt) -> GenerationStream:
    """An answer that shows a letter at every step."""
    return engine.stream(prompt, max_tokens=300, logit_bias={engine.renderer.text_ids("a")[0]: 100.0})


def test_a_stream_that_is_left_takes_no_more_steps(engine):
    """Closed, dropped, or closed before its prefill: the loop comes to rest, and the others have their answers."""
    expected = engine.generate(PROMPTS[1], max_tokens=12)
    closed, dropped, waiting = (endless(engine, PROMPTS[0]) for _ in range(3))
    other = engine.stream(PROMPTS[1], max_tokens=12)
    assert next(closed) == next(dropped) == "a"
    with held(engine):
        other.start()
        waiting.start()
        waiting.close()  # does not wait for a place
    closed.close()
    del dropped
    same(finished(engine, [other])[0], expected)
    assert is_at_rest(engine)
    assert closed.result.finish_reason == waiting.result.finish_reason == "cancelled"
    assert 0 < len(closed.result.token_ids) < 300
    assert waiting.result.token_ids == []
    assert list(closed) == list(closed.result.text[1:])  # what was made can still be read
    assert next(closed, None) is None


def test_an_unread_stream_pauses_and_frees_its_place(tiny_engine):
    engine = tiny_engine("llama", max_num_seqs=1)
    expected = engine.generate(PROMPTS[1], max_tokens=12)
    unread = [endless(engine, PROMPTS[0]) for _ in range(3)]
    for stream in unread:
        assert next(stream) == "a"
    same(engine.generate(PROMPTS[1], max_tokens=12), expected)
    engine.loop.call(lambda: None)
    assert [len(stream.result.token_ids) for stream in unread] == [MAX_UNREAD_PIECES + 1] * 3
    assert [next(unread[0]) for _ in range(40)] == ["a"] * 40  # it goes on where it is read
    assert unread[1].wait() is None  # and where its end is waited for
    assert len(unread[1].result.token_ids) == 300
    unread[0].close()
    assert unread[0].result.finish_reason == "cancelled"
    engine.close()
    assert len("".join(unread[2])) == MAX_UNREAD_PIECES


def test_an_interrupt_cancels_the_answers_of_its_thread_only(engine, monkeypatch):
    """Ctrl-C in a thread that waits for an answer, while the loop makes another thread's answer as well."""
    expected = engine.generate(PROMPTS[1], max_tokens=12)
    mine, other = endless(engine, PROMPTS[0]), engine.stream(PROMPTS[1], max_tokens=12)
    other.start()
    monkeypatch.setattr(mine, "wait", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.run_to_end([mine])
    assert mine.result.finish_reason == "cancelled"
    same(finished(engine, [other])[0], expected)
    assert is_at_rest(engine)


def test_an_answers_error_is_raised_once_where_its_text_is_read(engine, monkeypatch):
    stream = endless(engine, PROMPTS[0])
    decode = engine.loop._decode
    monkeypatch.setattr(engine.loop, "_decode", lambda steps: [ValueError("no room")] * len(steps))
    assert next(stream) == "a"
    with pytest.raises(ValueError, match="no room"):
        list(stream)
    assert list(stream) == []
    monkeypatch.setattr(engine.loop, "_decode", decode)
    assert engine.generate(PROMPTS[0], max_tokens=3).token_ids


def test_a_stream_that_cannot_be_started_can_be_closed(engine, monkeypatch):
    stream = engine.stream(PROMPTS[0], max_tokens=3)
    with monkeypatch.context() as changed:
        changed.setattr(engine, "prepare_prefill", lambda request: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
    assert len(finished(engine, [stream])[0].token_ids) == 3  # it can also be started again
    stream.close()


def test_a_call_runs_between_steps_and_its_error_is_its_callers(engine):
    stream = endless(engine, PROMPTS[0])
    next(stream)
    with pytest.raises(ZeroDivisionError):
        engine.loop.call(lambda: 1 / 0)
    assert engine.loop.call(lambda: engine.loop.call(threading.get_ident)) != threading.get_ident()
    assert len(stream.result.token_ids) < 300  # the call did not wait for the answer's end
    stream.close()


@pytest.mark.parametrize("num_requests", [12, pytest.param(125, marks=pytest.mark.slow)])
def test_streams_cancelled_at_random_leave_the_others_their_answers(engine, num_requests):
    """8 threads with a stream each, `num_requests` a thread, a third of them left at some token."""
    expected = [engine.generate(prompt, max_tokens=9).text for prompt in PROMPTS]

    def ask(number: int) -> int:
        draw = random.Random(number)
        num_whole = 0
        for _ in range(num_requests):
            place = draw.randrange(len(PROMPTS))
            stream, leaves_at = engine.stream(PROMPTS[place], max_tokens=9), draw.choice([99, 99, draw.randrange(5)])
            found = ""
            for count, piece in enumerate(stream):
                found += piece
                if count == leaves_at:
                    stream.close()
                    break
            else:
                assert found == expected[place]
                num_whole += 1
            assert expected[place].startswith(found)
        return num_whole

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) > 4 * num_requests
    assert is_at_rest(engine)


def test_closing_the_engine_ends_what_is_being_answered(tiny_engine):
    engine = tiny_engine("llama")
    streams = [engine.stream(prompt, max_tokens=1000) for prompt in PROMPTS[:3]]

    def watch(answer: RunningAnswer) -> bool:
        if len(answer.result.token_ids) == 4:
            engine.close()
        return False

    for answer in finished(engine, streams, cancel_check=watch):
        assert answer.finish_reason == "cancelled"
        assert len(answer.token_ids) < 8


def test_reports_of_a_batch_count_the_first_token_from_the_call(engine, monkeypatch):
    """Waiting for another's prefill is a part of the time to first token, and not of decoding; a shared step is."""
    now_s, prefill, decode = [0.0], engine._prefill, engine.loop._decode

    def passing(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*asked: Any) -> Any:
            now_s[0] += seconds
            return function(*asked)

        return slow

    for module in (base, generation, loop):
        monkeypatch.setattr(module, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(engine, "_prefill", passing(100.0, prefill))
    monkeypatch.setattr(engine.loop, "_decode", passing(1.0, decode))
    reports = [answer.report for answer in engine.generate_batch(PROMPTS[:4], max_tokens=4)]
    assert [report.ttft_s for report in reports] == [100.0, 200.0, 300.0, 400.0]
    assert [(report.decode_s, report.completion_tokens) for report in reports] == [(3.0, 4)] * 4


def test_after_a_failing_batched_step_answers_run_one_by_one(engine, monkeypatch, caplog):
    decode = engine.loop._decode

    def one_at_a_time(steps: Sequence[Any]) -> Any:
        if len(steps) > 1:
            raise RuntimeError("no room for two")
        return decode(steps)

    expected = finished(engine, [engine.stream(PROMPTS[0], max_tokens=6) for _ in range(2)])
    monkeypatch.setattr(engine.loop, "_decode", one_at_a_time)
    found = finished(engine, [engine.stream(PROMPTS[0], max_tokens=6) for _ in range(2)])
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)
    assert [line.levelname for line in caplog.records if "no room for two" in line.message] == ["WARNING"]
