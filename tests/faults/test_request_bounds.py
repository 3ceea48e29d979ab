"""Requests over a Redis that delays, trickles, hangs, lies and corrupts: in time, and right. `RAGBLEND_FAULTS=full`."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
from servers import TcpProxy
from tier_support import assert_same, quick_breaker

from ragblend.engine.store.format.kv import ChunkKV, load_into_memory
from ragblend.engine.store.remote import tier as remote
from ragblend.engine.store.remote.redis_values import RedisValues
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.errors import DamagedEntryError
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(3000)

FULL = os.environ.get("RAGBLEND_FAULTS") == "full"
NUM_REQUESTS = 1000 if FULL else 60
BOUND_S = 1.0 if FULL else 0.5
# A busy machine may be late by this much: when a wait ends, and with the whole answer, which competes for a processor.
LATE_WAIT_S, LATE_ANSWER_S = 1.0, 3.0
WORDS = ("the", "theory", "of", "other", "chunk", "and", "question", "what", "answer")
MODES = ("pass", "delay", "drip", "hang", "announce", "corrupt", "cut")


class Checked(TieredStore):
    """Compares whatever comes from far with what was computed, bit by bit, and notes how long a request waited."""

    expected: Mapping[str, Any]
    waited_s = 0.0
    num_fetched = 0

    def fetch_from_remote(self, keys: Sequence[str]) -> dict[str, ChunkKV]:
        start_s = time.perf_counter()
        found = super().fetch_from_remote(keys)
        self.waited_s = time.perf_counter() - start_s
        for key, kv in found.items():
            with suppress(DamagedEntryError):  # a layer that arrives later than the header
                assert_same(kv, self.expected[key])
        self.num_fetched += len(found)
        return found


def test_no_answer_is_late_or_wrong_whatever_stands_before_redis(redis_server, tiny_engine, counted, monkeypatch):
    """60 (full: 1000) requests of 4 to 12 chunks that only Redis has, the line to it in another state each time."""
    monkeypatch.setattr(remote, "RESULT_TTL_S", 0.0)
    rng = random.Random(3)
    texts = [" ".join(rng.choices(WORDS, k=40)) for _ in range(24)]
    own = MemoryStore(1 << 30)
    reference = tiny_engine("llama", own)
    writer = RemoteStore(RedisValues(redis_server.url, 5.0))
    for text in texts:
        reference.precompute(text)
        writer.put(own.get(reference.key(text)))
    assert writer.close(60)
    proxy = TcpProxy(redis_server.port)
    values = RedisValues(f"redis://127.0.0.1:{proxy.port}/0", BOUND_S)
    far = RemoteStore(values, timeout_s=BOUND_S, breaker=quick_breaker())
    store = Checked(far)
    store.expected = {key: load_into_memory(own.get(key)) for key in own.keys()}  # noqa: SIM118 (no dict)
    engine = tiny_engine("llama", store)
    outcomes: Counter[str] = Counter()
    longest_wait_s = 0.0
    for number in range(NUM_REQUESTS):
        if number == NUM_REQUESTS // 2:  # the second half over connections that the first has not broken
            values.close()
        proxy.mode = MODES[number % len(MODES)]
        proxy.delay_s, proxy.cut_after = rng.choice([0.1, rng.uniform(0.5, 10.0)]), rng.randrange(1, 20_000)
        proxy.announced = rng.choice([0, 1, 100, 19_000, 10**6, 10**9, 10**12])
        prompt = Prompt(rng.sample(texts, rng.randint(4, 12)), f"the question {number}?")
        mode = rng.choice(["blend", "blend", "prefix", "reuse"])
        options = {"recompute_ratio": 1.0} if mode == "blend" else {}
        wait_for_breaker(far)
        start_s, used_s, store.waited_s = time.perf_counter(), time.process_time(), 0.0
        answer = engine.generate(prompt, mode=mode, max_tokens=4, **options)
        # What the process did not compute in, the engine's thread among others, it waited.
        idle_s = time.perf_counter() - start_s - (time.process_time() - used_s)
        longest_wait_s = max(longest_wait_s, store.waited_s)
        assert store.waited_s < BOUND_S + LATE_WAIT_S, proxy.mode
        assert idle_s < BOUND_S + LATE_ANSWER_S, proxy.mode
        if mode == "reuse":
            known = {chunk.hit for chunk in answer.report.chunks}
            expected = reference.generate(prompt, mode="reuse", max_tokens=4) if known == {True} else None
        else:
            expected = reference.generate(prompt, mode="full", max_tokens=4)
        assert expected is None or answer.token_ids == expected.token_ids, proxy.mode
        outcomes[f"{proxy.mode}: {answer.report.num_chunk_hits} hits"] += 1
        outcomes["hits"] += answer.report.num_chunk_hits
        outcomes["misses"] += answer.report.num_chunks - answer.report.num_chunk_hits
    assert outcomes["hits"] > NUM_REQUESTS / 2
    assert store.num_fetched > 0
    assert outcomes["misses"] > NUM_REQUESTS / 2
    assert far.counters.num_failures > NUM_REQUESTS / 20
    assert far.counters.num_damaged > 0
    counted(
        f"{NUM_REQUESTS} requests over a Redis behind a line that delays, trickles, hangs, lies, corrupts and cuts: "
        f"{outcomes['hits']} chunk hits, {outcomes['misses']} misses, {far.counters.num_failures} failures, "
        f"{far.counters.num_damaged} damaged, 0 wrong; longest wait {longest_wait_s:.2f} s of {BOUND_S:g} s allowed"
    )
    far.close(0)
    proxy.close()


def wait_for_breaker(store: RemoteStore) -> None:
    """So that every request asks: an open breaker would spare it what this is about. A line that is dead stays so."""
    until_s = time.monotonic() + 0.3
    while not store.breaker.is_closed and time.monotonic() < until_s:
        store.contains("f" * 32)  # sends the probe
        time.sleep(0.01)
