"""The report at the end of a completion stream: exactly one, whether vLLM itself sends it or not. Needs no vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from ragblend.server.api import report_in_streams

REPORT = {"ragblend": {"num_chunk_hits": 2}}
TEXT = 'data: {"choices": [{"text": "mentions kv_transfer_params"}]}\n\n'
DONE = "data: [DONE]\n\n"


def sent_by_a_server(last: dict[str, Any] | None) -> list[str]:
    """A stream of one token, `last` at its end where vLLM's own release sends that."""

    async def stream(request: Any, inputs: Any, results: Any, request_id: str) -> AsyncIterator[str]:
        async for _ in results:
            yield TEXT
        if last is not None:
            yield f"data: {json.dumps(last)}\n\n"
        yield DONE

    async def results() -> AsyncIterator[tuple[int, Any]]:
        yield 0, SimpleNamespace(request_id="r", kv_transfer_params=REPORT)

    serving = SimpleNamespace(completion_stream_generator=stream)
    report_in_streams(serving)
    request = SimpleNamespace(kv_transfer_params={"ragblend": {"mode": "blend"}})

    async def collected() -> list[str]:
        return [each async for each in serving.completion_stream_generator(request, None, results(), "r")]

    return asyncio.run(collected())


@pytest.mark.parametrize(
    "last",
    [
        None,  # before 0.33
        {"choices": [{"text": "", "finish_reason": "length"}], "kv_transfer_params": REPORT},  # from 0.33 on
        {"choices": [], "kv_transfer_params": None},
    ],
)
def test_a_stream_has_one_report(last: dict[str, Any] | None) -> None:
    events = sent_by_a_server(last)
    parsed = [json.loads(event.removeprefix("data: ")) for event in events if event != DONE]
    assert [each["kv_transfer_params"] for each in parsed if each.get("kv_transfer_params")] == [REPORT]
    assert (events[0], events[-1]) == (TEXT, DONE)
