"""Blocking answers for asynchronous callers, each on a thread."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

ASYNC_ANSWERS = 64
"""Largest number of asynchronous calls that run at a time. An event loop's default pool has only four threads more than
cores, fewer than an engine may decode together."""

_threads: dict[int, ThreadPoolExecutor] = {}  # by process id, because a fork does not copy threads


async def run_in_thread(function: Callable[[threading.Event], T]) -> T:
    """Run `function` on a thread and return its result.

    `function` gets an event. If the caller is cancelled, the event is set, and `function` should end.
    """
    cancelled = threading.Event()
    call = partial(contextvars.copy_context().run, function, cancelled)
    pool = _threads.get(os.getpid()) or _threads.setdefault(os.getpid(), ThreadPoolExecutor(ASYNC_ANSWERS, "ragblend"))
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, call)
    except asyncio.CancelledError:
        cancelled.set()
        raise


async def iterate_in_thread(generator: Generator[T]) -> AsyncGenerator[T]:
    """Yield the items of `generator`, which runs on threads. Close `generator` at the end.

    If the caller stops early, `generator` is closed as soon as it has made its current item.
    """
    loop, done = asyncio.get_running_loop(), object()
    step: asyncio.Future[Any] | None = None
    try:
        while True:
            call = partial(contextvars.copy_context().run, next, generator, done)
            step = loop.run_in_executor(None, call)
            item = await asyncio.shield(step)  # cancelling the caller must not lose track of the thread
            if item is done:
                return
            yield item
    finally:
        if step is not None and not step.done():
            step.add_done_callback(partial(_close_after, generator))
        else:
            generator.close()


def _close_after(generator: Generator[Any], step: asyncio.Future[Any]) -> None:
    if not step.cancelled():
        step.exception()  # read, so that the event loop does not warn about it
    generator.close()
