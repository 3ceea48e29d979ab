"""Requests whose chunks only a remote tier has: what is fetched, blended or prefilled, and what the report says.

The tier's speed is set, not measured, and far from the border of each decision, so no clock decides.
"""

from __future__ import annotations

import time

import pytest
import torch
from servers import wait_until
from tier_support import DictValues

from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.kv import load_into_memory
from ragblend.engine.store.read_speed import READS_KEPT, ReadSpeed
from ragblend.engine.store.remote import fetch as remote_fetch
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.engine.tuning.machine import machine_facts
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(120)
CHUNKS = ("the theory of the other chunk " * 8, "another chunk: that is the question " * 8)
PROMPT = Prompt(CHUNKS, "what is that?")
TOKEN_BYTES = 1536


class SlowRanges(DictValues):
    """DictValues whose ranges, after the first of a value, take `wait_s`."""

    wait_s = 0.0

    def get_range(self, name, start, end):
        if start:
            time.sleep(self.wait_s)
        return super().get_range(name, start, end)


@pytest.fixture
def remote_engine(tiny_engine, monkeypatch):
    """`remote_engine(token_s)`: an engine whose chunks a remote tier has, which loads a token in `token_s` seconds.

    Its machine prefills a token in 1 ms. None: the tier was never measured.
    """
    monkeypatch.setattr(remote_fetch, "START_BYTES", 64)
    own = MemoryStore(1 << 26)
    writer = tiny_engine("llama", own)
    for chunk in CHUNKS:
        writer.precompute(chunk)
    values = SlowRanges()
    values.data = {key: encode_chunk(load_into_memory(own.get(key))) for key in own.keys()}  # noqa: SIM118

    def build(token_s: float | None, latency_s: float = 0.0):
        engine = tiny_engine("llama", TieredStore(MemoryStore(1 << 26), RemoteStore(values, timeout_s=60)))
        engine.machine = MachineProfile(engine.fingerprint, machine_facts(), 6, TOKEN_BYTES, ((1000.0, 1.0),))
        speed = engine.store.read_speeds["remote"]
        for _ in range(READS_KEPT if token_s is not None else 0):  # more than this test's own reads
            speed.record(TOKEN_BYTES, token_s)
            speed.record_latency(latency_s)
        engine.values = values
        return engine

    return build


def test_chunks_slower_to_fetch_than_to_prefill_are_not_awaited(remote_engine):
    for engine in (remote_engine(0.1), remote_engine(1e-9, latency_s=100.0)):
        engine.values.calls.clear()
        full = engine.prefill(engine.request(PROMPT, mode="full"))
        found = engine.prefill(engine.request(PROMPT))
        assert torch.equal(found.logits, full.logits)
        assert found.report.mode == "full"
        assert "full prefill of" in found.report.refused_reason
        memory = engine.store.tiers[0]
        wait_until(lambda: len(list(memory.keys())) == 2, 30, "later requests find them in memory")  # noqa: B023
        again = engine.prefill(engine.request(PROMPT)).report
        assert (again.mode, again.num_chunk_hits, again.refused_reason) == ("blend", 2, "")
        engine.store.close()


def test_a_ratio_that_is_given_waits_for_the_chunks(remote_engine):
    engine = remote_engine(0.1)
    report = engine.prefill(engine.request(PROMPT, recompute_ratio=0.15)).report
    assert (report.mode, report.num_chunk_hits, report.decision) == ("blend", 2, "")
    engine.store.close()


def test_a_fast_tier_is_used_and_an_unknown_one_is_tried(remote_engine):
    for token_s in (1e-9, None):
        engine = remote_engine(token_s)
        report = engine.prefill(engine.request(PROMPT)).report
        assert (report.mode, report.rule, report.num_chunk_hits) == ("blend", "ask", 2)
        assert report.decision.startswith("ask at 0.15 is predicted to take")
        assert engine.store.read_speeds["remote"].latency_s >= 0
        assert engine.store.tiers[0].contains(engine.key(CHUNKS[0])), "it is promoted once all layers were read"
        engine.store.close()


def test_auto_takes_cacheblend_at_the_ratio_that_loading_hides(remote_engine):
    """Loading a token takes .5 ms, prefill 1 ms: `ask` would wait for it, and behind it some tokens are recomputed."""
    engine = remote_engine(0.5e-3)
    engine.machine = MachineProfile(
        engine.fingerprint, machine_facts(), 6, TOKEN_BYTES, ((1000.0, 1.0),), shares=((0.0, 0.3), (1.0, 1.0)),
        no_probe_shares=((0.0, 0.0), (1.0, 1.0)),
    )  # fmt: skip
    one = Prompt(CHUNKS[:1])
    report = engine.prefill(engine.request(one)).report
    assert report.rule == "cacheblend"
    assert report.recompute_ratio > 0.15
    assert report.decision.startswith(f"cacheblend at {report.recompute_ratio:.3g} ")
    named = engine.prefill(engine.request(one, rule="ask")).report
    assert named.rule == "ask"
    engine.store.close()


def test_layers_that_arrive_late_end_the_wait_and_not_the_answer(remote_engine):
    engine = remote_engine(None)
    remote = engine.store.find_tier(RemoteStore)
    remote.timeout_s, engine.values.wait_s = 0.3, 0.5
    full = engine.prefill(engine.request(PROMPT, mode="full"))
    found = engine.prefill(engine.request(PROMPT, recompute_ratio=1.0))
    assert (found.report.num_chunk_hits, found.report.num_damaged_entries) == (0, 0)
    assert torch.allclose(found.logits, full.logits, atol=1e-4)
    engine.store.close()


def test_the_medians_of_a_tier_are_of_its_latest_reads():
    speed = ReadSpeed()
    for number in range(100):
        speed.record(1000, 1.0 if number < 50 else 10.0)
    assert speed.bytes_per_s == 100.0
