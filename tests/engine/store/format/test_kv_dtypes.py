"""Stores of KV in eight bits: the same bits in every tier, and engines whose ratio 1 is still full prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tier_support import DictValues, flip, make_kv, path_of
from tiny_prompts import CHUNKS, PROMPT

from ragblend import open_store
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.chunk_file import encode_chunk
from ragblend.engine.store.format.kv import ChunkKV, convert_kv_dtype, load_into_memory
from ragblend.engine.store.format.quantize import CODE_DTYPES, QuantizedLayer
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine

KV_DTYPES = ["auto", *CODE_DTYPES]
SLOW_RULES = [pytest.param(rule, marks=pytest.mark.slow) for rule in ("auto", "ask", "random")]


def as_file(kv: ChunkKV | None) -> bytes:
    """Every stored bit of an entry."""
    assert kv is not None
    return encode_chunk(load_into_memory(kv))


# --- tiers ---


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_every_tier_holds_the_same_eight_bits_and_hands_them_up(tmp_path, kv_dtype):
    values, kv = DictValues(), make_kv(tokens=24, num_layers=3)
    first = TieredStore(
        MemoryStore(1 << 20), DiskStore(tmp_path / "a", fsync=False), RemoteStore(values), kv_dtype=kv_dtype
    )
    first.put(kv)
    assert first.flush(10)
    expected = as_file(convert_kv_dtype(kv, kv_dtype))
    key = kv.header.key
    for tier in first.tiers:
        assert as_file(tier.get(key, kv.header.token_ids)) == expected
    # A machine that stores KV as computed takes what the remote has, and moves it up as it is.
    second = TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path / "b", fsync=False), RemoteStore(values))
    assert as_file(second.get(key)) == expected
    assert second.flush(10)
    assert as_file(second.tiers[0].get(key)) == as_file(second.tiers[1].get(key)) == expected
    third = TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path / "b"))
    load_into_memory(third.get(key))
    assert as_file(third.tiers[0].get(key)) == expected, "read layer by layer from disk, held as it was stored"
    for store in (first, second, third):
        store.close()


def test_a_store_may_hold_all_dtypes_and_reads_what_it_finds(tmp_path):
    kvs = {kv_dtype: make_kv(seed, tokens=24) for seed, kv_dtype in enumerate(KV_DTYPES)}
    for kv_dtype, kv in kvs.items():
        open_store(tmp_path, kv_dtype=kv_dtype).put(kv)
    store = open_store(tmp_path, memory_gib=0)
    for kv_dtype, kv in kvs.items():
        found = store.get(kv.header.key, kv.header.token_ids)
        assert found.header.stored_dtype == (kv_dtype if kv_dtype != "auto" else "float32")
        for index in range(kv.header.num_layers):
            for exact, read in zip(kv.layer(index), found.layer(index), strict=True):
                assert read.dtype == exact.dtype
                assert (read - exact).abs().max() <= {"auto": 0.0, "int8": 0.02, "fp8": 0.3}[kv_dtype]


def test_a_memory_budget_holds_three_times_as_many_chunks_of_float32():
    kvs = [make_kv(seed, tokens=128, dim=64) for seed in range(20)]
    held = {}
    for kv_dtype in ("auto", "int8"):
        store = TieredStore(MemoryStore(5 * kvs[0].nbytes), kv_dtype=kv_dtype)
        for kv in kvs:
            store.put(kv)
        held[kv_dtype] = len(list(store.keys()))
    assert held["auto"] == 5
    assert held["int8"] >= 17


def test_another_dtype_replaces_what_a_remote_tier_has_too(tmp_path):
    values, kv = DictValues(), make_kv(tokens=24, num_layers=3)
    store = TieredStore(DiskStore(tmp_path, fsync=False), RemoteStore(values))
    store.put(kv)
    assert store.flush(10)
    store.kv_dtype = "int8"
    store.put(kv)
    assert store.flush(10)
    assert len(values.data[kv.header.key]) > kv.nbytes, "the same key means the same KV, so it is not sent again"
    store.replace_dtype(kv)
    assert store.flush(10)
    assert len(values.data[kv.header.key]) < kv.nbytes
    assert as_file(store.get(kv.header.key)) == as_file(convert_kv_dtype(kv, "int8"))
    store.close()


# --- engines ---


@pytest.fixture
def engines(tiny_engine):
    """A tiny Llama over a store of each dtype that holds CHUNKS."""
    made = {}
    for kv_dtype in KV_DTYPES:
        made[kv_dtype] = tiny_engine("llama", store=TieredStore(MemoryStore(1 << 26), kv_dtype=kv_dtype))
        for chunk in CHUNKS:
            assert made[kv_dtype].precompute(chunk) > 0
    return made


def logits(engine: TransformersEngine, ratio: float, mode: Any = "blend", rule: str = "cacheblend") -> torch.Tensor:
    return engine.prefill(engine.request(PROMPT, mode=mode, rule=rule, recompute_ratio=ratio)).logits


@pytest.mark.parametrize("rule", ["cacheblend", *SLOW_RULES])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_ratio_one_is_full_prefill_from_any_store(engines, kv_dtype, rule):
    """The chunk behind its own prefix is recomputed too, where rounding moved it."""
    engine = engines[kv_dtype]
    full = logits(engine, 1.0, "full")
    assert (logits(engine, 1.0, rule=rule) - full).abs().max() <= 1e-4
    report = engine.generate(PROMPT, rule=rule, recompute_ratio=1.0, max_tokens=1).report
    assert [chunk.num_recomputed_tokens > 0 for chunk in report.chunks] == [kv_dtype != "auto", True, True]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_below_ratio_one_an_eight_bit_chunk_stays_and_is_not_exact(engines, kv_dtype):
    engine = engines[kv_dtype]
    report = engine.generate(PROMPT, rule="random", recompute_ratio=0.5, max_tokens=1).report
    first, *others = report.chunks
    assert (first.hit, first.prefix_match, first.exact, first.num_recomputed_tokens) == (True, "exact", False, 0)
    assert all(chunk.num_recomputed_tokens > 0 for chunk in others)
    assert [chunk.kv_dtype for chunk in report.chunks] == [kv_dtype] * 3
    plain = engines["auto"].generate(PROMPT, rule="random", recompute_ratio=0.5, max_tokens=1).report
    assert plain.chunks[0].exact
    assert [chunk.kv_dtype for chunk in plain.chunks] == ["float32"] * 3
    assert report.charged_budget == plain.charged_budget


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_prefix_mode_reuses_nothing_that_was_rounded(engines, kv_dtype):
    """Mode `prefix` is exact: a chunk in eight bits is computed there."""
    engine = engines[kv_dtype]
    assert (logits(engine, 0.0, "prefix") - logits(engine, 1.0, "full")).abs().max() <= 1e-4
    report = engine.generate(PROMPT, mode="prefix", max_tokens=1).report
    assert [chunk.hit for chunk in report.chunks] == [False] * 3
    assert [chunk.kv_dtype for chunk in report.chunks] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.05), ("fp8", 0.3)])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7])
def test_eight_bits_move_the_logits_little_beside_reuse_itself(engines, kv_dtype, bound, ratio):
    """The same tokens are recomputed (rule random), so that what differs is the rounding alone."""
    plain = logits(engines["auto"], ratio, rule="random")
    moved = (logits(engines[kv_dtype], ratio, rule="random") - plain).abs().max()
    reuse_error = (logits(engines["auto"], 0.0) - logits(engines["auto"], 1.0, "full")).abs().max()
    assert 0 < moved <= bound * reuse_error


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_damage_in_eight_bits_is_a_miss_and_the_answer_full_prefills(tiny_engine, tmp_path, kv_dtype):
    """Every layer of the first chunk in turn; at ratio 1, where the answer is known."""
    engine = tiny_engine("llama", store=open_store(tmp_path, memory_gib=0, kv_dtype=kv_dtype))
    full = logits(engine, 1.0, "full")
    path = path_of(tmp_path, engine.key(CHUNKS[1]))
    for layer in range(engine.layers.num_layers):
        list(engine.precompute_all(CHUNKS))
        kv = engine.store.get(engine.key(CHUNKS[1]))
        flip(path, layer * kv.nbytes // kv.header.num_layers + 3 - kv.nbytes, 8)
        prefilled = engine.prefill(engine.request(PROMPT, recompute_ratio=1.0, rule="random"))
        assert prefilled.report.num_damaged_entries == 1
        assert (prefilled.logits - full).abs().max() <= 1e-4


@pytest.mark.slow
def test_known_is_known_whatever_the_dtype(tiny_engine, tmp_path):
    kept = {}
    for first, second in (("int8", "auto"), ("auto", "int8"), ("fp8", "int8")):
        place = tmp_path / f"{first}-{second}"
        tiny_engine("llama", store=open_store(place, kv_dtype=first)).precompute(CHUNKS[0])
        engine = tiny_engine("llama", store=open_store(place, kv_dtype=second))
        assert engine.is_stored(CHUNKS[0])
        assert engine.precompute(CHUNKS[0]) == 0
        kept[first] = engine.store.get(engine.key(CHUNKS[0])).header.stored_dtype
    assert kept == {"int8": "int8", "auto": "float32", "fp8": "fp8"}


def test_bytes_stored_are_counted_as_stored(tiny_engine):
    engine = tiny_engine("llama", store=TieredStore(MemoryStore(1 << 26), kv_dtype="int8"))
    assert engine.precompute(CHUNKS[0]) == engine.store.nbytes()
    assert isinstance(engine.store.get(engine.key(CHUNKS[0])).stored_layer(0), QuantizedLayer)
