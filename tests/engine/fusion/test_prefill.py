"""Many chunks at once: packed passes give each chunk's KV, writes run in parallel, no prefilled KV is lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragblend.engine.fusion import prefill as ingestion
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.fusion.prefill import (
    TokenIds,
    batch_by_tokens,
    prefill_chunks,
    prefill_missing,
)
from ragblend.engine.fusion.protocols import PromptKVBuffer
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.errors import StoreFullError

pytestmark = pytest.mark.timeout(60)

PREFIX = (1, 7, 9)
TIMEOUT_S = 10.0


def header(ids: Sequence[int], prefix: TokenIds = PREFIX) -> KVHeader:
    return KVHeader(f"{hash(tuple(ids)) & 0xFFFF:032x}", "model", prefix, tuple(ids), 6, "float32")


def prefix_of(layers: Any, ids: TokenIds) -> PromptKVBuffer:
    """KV of a prefix, by the stock model."""
    with torch.inference_mode():
        _, kv = layers.full_prefill(torch.tensor(ids))
    return FusedKV([LayerKV(*layer) for layer in kv], len(ids))


def assert_packed_as_alone(layers: Any, counts: Sequence[int], seed: int, atol: float) -> None:
    """In one pass, chunks of `counts` random tokens have the KV of the model's own prefill of prefix and chunk.

    The prefix is not changed.
    """
    generator = torch.Generator().manual_seed(seed)
    headers = [header(torch.randint(3, 300, (count,), generator=generator).tolist()) for count in counts]
    prefix, untouched = prefix_of(layers, PREFIX), prefix_of(layers, PREFIX)
    packed = prefill_chunks(layers, prefix, headers)
    assert prefix.length == len(PREFIX)
    assert all(torch.equal(prefix.keys(layer), untouched.keys(layer)) for layer in range(6))
    for made, own in zip(packed, headers, strict=True):
        alone, start = prefix_of(layers, (*PREFIX, *own.token_ids)), len(PREFIX)
        assert made.header == own
        for layer in range(6):
            placed = layers.place_keys(layer, made.layer(layer).keys, torch.arange(start, alone.length))
            torch.testing.assert_close(placed, alone.keys(layer)[:, start:], atol=atol, rtol=1e-5)
            torch.testing.assert_close(made.layer(layer).values, alone.values(layer)[:, start:], atol=atol, rtol=1e-5)


@pytest.mark.parametrize("counts", [(5,), (20, 3, 41), (64, 65, 66)])
def test_packed_chunks_have_the_kv_of_chunks_prefilled_alone(tiny_layers, family, counts):
    assert_packed_as_alone(tiny_layers(family), counts, seed=3, atol=3e-5)


@settings(max_examples=20)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(480, 640)), min_size=1, max_size=5), st.integers(0, 1 << 16))
@example([600, 5], 0)
@example([520, 3, 640], 0)
def test_packing_in_any_order_and_length_changes_no_chunks_kv(tiny_model, counts, seed):
    """Long before short too; each time in a model that has not yet seen long positions."""
    assert_packed_as_alone(TransformersLayers(tiny_model("llama")), counts, seed, atol=1e-4)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_passes_hold_every_chunk_once_in_order_within_the_limit(counts, limit):
    chunks = [(number,) * count for number, count in enumerate(counts)]
    made = list(batch_by_tokens(chunks, limit))
    assert [chunk for together in made for chunk in together] == chunks
    for together in made:
        assert len(together) == 1 or sum(map(len, together)) <= limit
    for first, second in itertools.pairwise(made):
        assert sum(map(len, first)) + len(second[0]) > limit, "one more would have fitted"


class Store:
    """Notes what is stored; `hold` keeps writes waiting, `refuse_from` refuses them from that one on."""

    def __init__(self, refuse_from: int | None = None) -> None:
        self.stored: list[TokenIds] = []
        self.hold = threading.Event()
        self.hold.set()
        self._refuse_from = refuse_from

    def put(self, kv: MemoryKV) -> None:
        assert self.hold.wait(TIMEOUT_S)
        if self._refuse_from is not None and len(self.stored) >= self._refuse_from:
            raise StoreFullError("no room")
        self.stored.append(kv.header.token_ids)


def made_kv(chunks: Sequence[TokenIds]) -> list[MemoryKV]:
    """KV of the right size, made up."""
    return [
        MemoryKV(header(ids), tuple(LayerKV(*(torch.zeros(1, len(ids), 2) for _ in range(2))) for _ in range(6)))
        for ids in chunks
    ]


CHUNKS = [(number,) * 4 for number in range(10)]
NBYTES = 4 * 2 * 2 * 6 * 4


def test_chunks_are_reported_in_order_and_stored_once():
    store, known = Store(), {CHUNKS[1], CHUNKS[4]}
    chunks = [*CHUNKS[:6], CHUNKS[5]]
    nbytes = list(prefill_missing(chunks, lambda ids: ids not in known, made_kv, store.put, 8))
    assert nbytes == [NBYTES, 0, NBYTES, NBYTES, 0, NBYTES, NBYTES]
    assert list(dict.fromkeys(store.stored)) == [CHUNKS[0], CHUNKS[2], CHUNKS[3], CHUNKS[5]]


def test_the_model_goes_on_while_the_store_writes():
    store, prefilled = Store(), threading.Event()
    store.hold.clear()
    seen: list[int] = []

    def prefill(chunks: Sequence[TokenIds]) -> list[MemoryKV]:
        seen.append(len(store.stored))
        if chunks[0] == CHUNKS[-1]:
            prefilled.set()
        return made_kv(chunks)

    worker = threading.Thread(target=lambda: list(prefill_missing(CHUNKS, lambda _: True, prefill, store.put, 4)))
    worker.start()
    assert prefilled.wait(TIMEOUT_S), "prefilling waited for the first write"
    assert seen == [0] * len(CHUNKS)
    store.hold.set()
    worker.join(TIMEOUT_S)
    assert store.stored == CHUNKS


def test_the_model_waits_when_too_much_is_unwritten(monkeypatch):
    monkeypatch.setattr(ingestion, "UNWRITTEN_BYTES", 2 * NBYTES)
    store, seen = Store(), []

    def prefill(chunks: Sequence[TokenIds]) -> list[MemoryKV]:
        seen.append(len(store.stored))
        return made_kv(chunks)

    list(prefill_missing(CHUNKS, lambda _: True, prefill, store.put, 4))
    assert all(number - stored <= 2 for number, stored in enumerate(seen))


def test_a_store_that_refuses_ends_it_and_what_was_stored_before_stays():
    store, stored = Store(refuse_from=3), []
    with pytest.raises(StoreFullError):
        stored.extend(prefill_missing(CHUNKS, lambda _: True, made_kv, store.put, 4))
    assert stored == [NBYTES] * 3
    assert store.stored == CHUNKS[:3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ragblend-ingest")]


def test_an_interrupted_run_stores_what_it_had_prefilled():
    store = Store()

    def prefill(chunks: Sequence[TokenIds]) -> list[MemoryKV]:
        if chunks[0] == CHUNKS[5]:
            raise KeyboardInterrupt
        return made_kv(chunks)

    with pytest.raises(KeyboardInterrupt):
        list(prefill_missing(CHUNKS, lambda _: True, prefill, store.put, 4))
    assert store.stored == CHUNKS[:5]


def test_a_reader_that_leaves_early_leaves_no_thread_and_loses_nothing():
    store = Store()
    run = prefill_missing(CHUNKS, lambda _: True, made_kv, store.put, 4)
    next(run)
    run.close()
    assert store.stored == CHUNKS[: len(store.stored)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ragblend-ingest")]


def test_precompute_all_stores_what_precompute_would(tiny_engine):
    one, many = tiny_engine(), tiny_engine()
    chunks = ["the first chunk of the theory", "another chunk", "that is the question: what is that?", "another chunk"]
    alone = [one.precompute(chunk) for chunk in chunks]
    assert list(many.precompute_all(chunks)) == alone
    assert list(many.precompute_all(chunks)) == [0] * 4
    assert sorted(one.store.keys()) == sorted(many.store.keys())
    for key in one.store.keys():  # noqa: SIM118
        for layer in range(6):
            for mine, its in zip(one.store.get(key).layer(layer), many.store.get(key).layer(layer), strict=True):
                torch.testing.assert_close(its, mine, atol=1e-5, rtol=1e-5)
