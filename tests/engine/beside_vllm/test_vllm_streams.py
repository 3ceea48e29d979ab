"""The report at the end of a stream: exactly one, whether vLLM itself sends it or not. Needs no vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from ragblend.server.api import add_reports_of_all_prompts, add_reports_to_streams

REPORT = {"ragblend": {"num_chunk_hits": 2}}
TEXT = 'data: {"choices": [{"text": "mentions kv_transfer_params"}]}\n\n'
DONE = "data: [DONE]\n\n"


def sent_by_a_server(last: dict[str, Any] | None, is_chat: bool) -> list[str]:
    """A stream of one token, `last` at its end where vLLM's own release sends that."""

    async def stream(request: Any, *given: Any, metadata: Any) -> AsyncIterator[str]:
        *_, results, _ = given
        async for _ in results:
            yield TEXT
        if last is not None:
            yield f"data: {json.dumps(last)}\n\n"
        yield DONE

    async def results() -> AsyncIterator[Any]:
        result = SimpleNamespace(request_id="r", kv_transfer_params=REPORT)
        yield result if is_chat else (0, result)

    serving = SimpleNamespace(stream_generator=stream)
    add_reports_to_streams(serving, "stream_generator", 0 if is_chat else 1)
    given = [results(), "r"] if is_chat else [None, results(), "r"]
    request = SimpleNamespace(kv_transfer_params={"ragblend": {"mode": "blend"}})

    async def collected() -> list[str]:
        return [each async for each in serving.stream_generator(request, *given, metadata=None)]

    return asyncio.run(collected())


@pytest.mark.parametrize(
    "last",
    [
        None,  # before 0.33
        {"choices": [{"text": "", "finish_reason": "length"}], "kv_transfer_params": REPORT},  # from 0.33 on
        {"choices": [], "kv_transfer_params": None},
    ],
)
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_a_stream_has_one_report(last, is_chat):
    events = sent_by_a_server(last, is_chat)
    parsed = [json.loads(event.removeprefix("data: ")) for event in events if event != DONE]
    assert [each["kv_transfer_params"] for each in parsed if each.get("kv_transfer_params")] == [REPORT]
    assert (events[0], events[-1]) == (TEXT, DONE)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([1], {"ragblend": 1}),
        ([1, 2, 3], {"ragblend": [1, 2, 3]}),
        ([1, None], {"ragblend": [1, None]}),
        ([None, None], None),
        ([None], None),
    ],
)
def test_each_prompt_of_a_request_has_its_report(reports, expected):
    outputs = [
        SimpleNamespace(request_id=f"r-{number}", kv_transfer_params=each and {"ragblend": each}, num_cached_tokens=5)
        for number, each in enumerate(reports)
    ]

    async def stream(request: Any, inputs: Any, results: AsyncIterator[Any], request_id: str) -> AsyncIterator[str]:
        async for _ in results:
            yield TEXT
        yield DONE

    async def results() -> AsyncIterator[Any]:
        for number in reversed(range(len(outputs))):  # prompts end in any order
            yield number, outputs[number]

    async def call_workers(*args: Any, **kwargs: Any) -> list[None]:
        return [None]

    serving = SimpleNamespace(
        stream_generator=stream,
        engine_client=SimpleNamespace(collective_rpc=call_workers),
        request_output_to_completion_response=lambda batch, request: SimpleNamespace(
            kv_transfer_params=batch[0].kv_transfer_params,  # as vLLM's
            usage=SimpleNamespace(prompt_tokens_details=SimpleNamespace(cached_tokens=batch[-1].num_cached_tokens)),
        ),
    )
    add_reports_to_streams(serving, "stream_generator", 1)
    add_reports_of_all_prompts(serving)
    request = SimpleNamespace(kv_transfer_params={"ragblend": {}})
    response = serving.request_output_to_completion_response(outputs, request)
    assert response.kv_transfer_params == expected
    assert response.usage.prompt_tokens_details.cached_tokens == 5 * len(outputs)

    async def collected() -> list[str]:
        return [each async for each in serving.stream_generator(request, None, results(), "r")]

    streamed = [json.loads(each.removeprefix("data: ")) for each in asyncio.run(collected()) if each != DONE]
    assert [each["kv_transfer_params"] for each in streamed if "kv_transfer_params" in each] == [
        *filter(None, [expected])
    ]
