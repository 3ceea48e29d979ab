"""Stores of KV in eight bits: the same bits in every tier, and engines whose ratio 1 is still full prefill."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tier_support import DictValues

from ragblend import open_store
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import ChunkKV, KVHeader, LayerKV, MemoryKV, convert_kv_dtype, load_into_memory
from ragblend.engine.store.quantize import CODE_DTYPES, QuantizedLayer
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import UsageError
from ragblend.prompt.prompt import Chunk, SegmentedPrompt

KV_DTYPES = ["auto", *CODE_DTYPES]
CHUNKS = (
    Chunk("the theory of the other chunk is in the answer to the question of the chunk", source="one.txt"),
    Chunk("question the chunk with that theory and answer what the other question is", source="two.txt"),
    Chunk("what the other question is and the answer to it is the chunk with the theory", source="three.txt"),
)
PROMPT = SegmentedPrompt(CHUNKS, "what is that?")


def make_kv(seed: int = 0, tokens: int = 24, num_layers: int = 3, heads: int = 2, dim: int = 8) -> MemoryKV:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(range(100 * seed, 100 * seed + tokens))
    layers = tuple(
        LayerKV(*(torch.randn(heads, tokens, dim, generator=generator) for _ in range(2))) for _ in range(num_layers)
    )
    return MemoryKV(KVHeader(chunk_key("model", (1,), ids), "model", (1,), ids, num_layers, "float32"), layers)


def as_bits(kv: ChunkKV | None) -> list[bytes]:
    """Every stored tensor of every layer."""
    assert kv is not None
    layers = [kv.stored_layer(index) for index in range(kv.header.num_layers)]
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for layer in layers for tensor in layer]


# --- tiers ---


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_every_tier_holds_the_same_eight_bits_and_hands_them_up(tmp_path: Path, kv_dtype: str) -> None:
    values, kv = DictValues(), make_kv()
    first = TieredStore(
        MemoryStore(1 << 20), DiskStore(tmp_path / "a", fsync=False), RemoteStore(values), kv_dtype=kv_dtype
    )
    first.put(kv)
    assert first.flush(10)
    expected = as_bits(convert_kv_dtype(kv, kv_dtype))
    key = kv.header.key
    for tier in first.tiers:
        found = tier.get(key, kv.header.token_ids)
        assert found is not None
        assert found.header == dataclasses.replace(kv.header, kv_dtype=kv_dtype)
        assert as_bits(found) == expected
    # A machine that stores KV as computed takes what the remote has, and moves it up as it is.
    second = TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path / "b", fsync=False), RemoteStore(values))
    assert as_bits(second.get(key)) == expected
    assert second.flush(10)
    assert as_bits(second.tiers[0].get(key)) == as_bits(second.tiers[1].get(key)) == expected
    third = TieredStore(MemoryStore(1 << 20), DiskStore(tmp_path / "b"))
    load_into_memory(third.get(key))
    assert as_bits(third.tiers[0].get(key)) == expected, "read layer by layer from disk, held as it was stored"
    for store in (first, second, third):
        store.close()


def test_a_store_may_hold_all_dtypes_and_reads_what_it_finds(tmp_path: Path) -> None:
    kvs = {kv_dtype: make_kv(seed) for seed, kv_dtype in enumerate(KV_DTYPES)}
    for kv_dtype, kv in kvs.items():
        open_store(tmp_path, kv_dtype=kv_dtype).put(kv)
    store = open_store(tmp_path, memory_gib=0)
    for kv_dtype, kv in kvs.items():
        found = store.get(kv.header.key, kv.header.token_ids)
        assert found is not None
        assert found.header.stored_dtype == (kv_dtype if kv_dtype != "auto" else "float32")
        for index in range(kv.header.num_layers):
            for exact, read in zip(kv.layer(index), found.layer(index), strict=True):
                assert read.dtype == exact.dtype
                assert (read - exact).abs().max() <= {"auto": 0.0, "int8": 0.02, "fp8": 0.3}[kv_dtype]


def test_a_memory_budget_holds_three_times_as_many_chunks_of_float32() -> None:
    kvs = [make_kv(seed, tokens=128, dim=64) for seed in range(20)]
    held = {}
    for kv_dtype in ("auto", "int8"):
        store = TieredStore(MemoryStore(5 * kvs[0].nbytes), kv_dtype=kv_dtype)
        for kv in kvs:
            store.put(kv)
        held[kv_dtype] = len(list(store.keys()))
    assert held["auto"] == 5
    assert held["int8"] >= 17


def test_another_dtype_replaces_what_a_remote_tier_has_too(tmp_path: Path) -> None:
    values, kv = DictValues(), make_kv()
    store = TieredStore(DiskStore(tmp_path, fsync=False), RemoteStore(values))
    store.put(kv)
    assert store.flush(10)
    store.kv_dtype = "int8"
    store.put(kv)
    assert store.flush(10)
    assert len(values.data[kv.header.key]) > kv.nbytes, "the same key means the same KV, so it is not sent again"
    store.replace(kv)
    assert store.flush(10)
    assert len(values.data[kv.header.key]) < kv.nbytes
    assert as_bits(store.get(kv.header.key)) == as_bits(convert_kv_dtype(kv, "int8"))
    store.close()


# --- the loader ---


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_the_loader_dequantises_in_its_thread_and_places_as_if_nothing_was_stored(
    kv_dtype: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragblend.engine.fusion import loader

    threads = []
    restored = loader.dequantized

    def noting(layer: Any) -> LayerKV:
        threads.append(threading.current_thread().name)
        return restored(layer)

    monkeypatch.setattr(loader, "dequantized", noting)
    packed = [convert_kv_dtype(make_kv(seed), kv_dtype) for seed in (1, 2)]
    plain = [MemoryKV(dataclasses.replace(kv.header, kv_dtype=None), tuple(map(kv.layer, range(3)))) for kv in packed]
    fused = []
    for kvs in (packed, plain):
        placements = [
            SimpleNamespace(kv=kv, start=start, end=start + 24) for kv, start in zip(kvs, (0, 30), strict=True)
        ]
        fused.append(FusedKV.allocate([(2, 8, 8)] * 3, 60, torch.empty(0)))
        for layer in range(3):
            fused[-1].keys(layer).zero_()
            fused[-1].values(layer).zero_()
        place = lambda layer, keys, rows: keys + rows[None, :, None]  # noqa: E731
        with LayerLoader(placements, 3, place, fused[-1], torch.device("cpu"), together=together) as layers:
            for layer in range(3):
                layers.wait(layer)
    for layer in range(3):
        assert torch.equal(fused[0].keys(layer), fused[1].keys(layer))
        assert torch.equal(fused[0].values(layer), fused[1].values(layer))
    assert threads[:6] == ["ragblend-loader"] * 6
    assert threads[6:] == ["MainThread"] * 6, "what is in memory as computed needs no thread"


# --- engines ---


@pytest.fixture
def engines(tiny_engine: Callable[..., TransformersEngine]) -> dict[str, TransformersEngine]:
    """A tiny Llama over a store of each dtype that holds CHUNKS."""
    made = {}
    for kv_dtype in KV_DTYPES:
        made[kv_dtype] = tiny_engine("llama", store=TieredStore(MemoryStore(1 << 26), kv_dtype=kv_dtype))
        for chunk in CHUNKS:
            assert made[kv_dtype].precompute(chunk) > 0
    return made


def logits(engine: TransformersEngine, ratio: float, mode: Any = "blend", rule: str = "cacheblend") -> torch.Tensor:
    return engine.prefill(engine.request(PROMPT, mode=mode, rule=rule, recompute_ratio=ratio)).logits


@pytest.mark.parametrize("rule", ["auto", "ask", "cacheblend", "random"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_ratio_one_is_full_prefill_from_any_store(engines: Any, kv_dtype: str, rule: str) -> None:
    """The chunk behind its own prefix is recomputed too, where rounding moved it."""
    engine = engines[kv_dtype]
    full = logits(engine, 1.0, "full")
    assert (logits(engine, 1.0, rule=rule) - full).abs().max() <= 1e-4
    report = engine.generate(PROMPT, rule=rule, recompute_ratio=1.0, max_tokens=1).report
    assert [chunk.num_recomputed_tokens > 0 for chunk in report.chunks] == [kv_dtype != "auto", True, True]


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_below_ratio_one_the_chunk_behind_its_prefix_stays_and_is_not_called_exact(engines: Any, kv_dtype: str) -> None:
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


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_prefix_mode_reuses_nothing_that_was_rounded(engines: Any, kv_dtype: str) -> None:
    """Mode `prefix` is exact: a chunk in eight bits is computed there."""
    engine = engines[kv_dtype]
    assert (logits(engine, 0.0, "prefix") - logits(engine, 1.0, "full")).abs().max() <= 1e-4
    report = engine.generate(PROMPT, mode="prefix", max_tokens=1).report
    assert [chunk.hit for chunk in report.chunks] == [False] * 3
    assert [chunk.kv_dtype for chunk in report.chunks] == [None] * 3


@pytest.mark.parametrize(("kv_dtype", "bound"), [("int8", 0.05), ("fp8", 0.3)])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7])
def test_eight_bits_move_the_logits_little_beside_reuse_itself(
    engines: Any, kv_dtype: str, bound: float, ratio: float
) -> None:
    """The same tokens are recomputed (rule random), so that what differs is the rounding alone."""
    plain = logits(engines["auto"], ratio, rule="random")
    moved = (logits(engines[kv_dtype], ratio, rule="random") - plain).abs().max()
    reuse_error = (logits(engines["auto"], 0.0) - logits(engines["auto"], 1.0, "full")).abs().max()
    assert 0 < moved <= bound * reuse_error


@pytest.mark.parametrize("kv_dtype", CODE_DTYPES)
def test_damage_in_eight_bits_is_a_miss_and_the_answer_full_prefills(
    tiny_engine: Any, tmp_path: Path, kv_dtype: str
) -> None:
    """Every layer of the first chunk in turn; at ratio 1, where the answer is known."""
    engine = tiny_engine("llama", store=open_store(tmp_path, memory_gib=0, kv_dtype=kv_dtype))
    full = logits(engine, 1.0, "full")
    path = tmp_path / engine.key(CHUNKS[1])[:2] / f"{engine.key(CHUNKS[1])}.safetensors"
    for layer in range(engine.layers.num_layers):
        for chunk in CHUNKS:
            engine.precompute(chunk)
        data = bytearray(path.read_bytes())
        kv = engine.store.get(engine.key(CHUNKS[1]))
        offset = len(data) - kv.nbytes + layer * kv.nbytes // kv.header.num_layers + 3
        data[offset] ^= 8
        path.write_bytes(data)
        prefilled = engine.prefill(engine.request(PROMPT, recompute_ratio=1.0, rule="random"))
        assert prefilled.report.num_damaged_entries == 1
        assert (prefilled.logits - full).abs().max() <= 1e-4


def test_known_is_known_whatever_the_dtype(tiny_engine: Any, tmp_path: Path) -> None:
    kept = {}
    for first, second in (("int8", "auto"), ("auto", "int8"), ("fp8", "int8")):
        place = tmp_path / f"{first}-{second}"
        tiny_engine("llama", store=open_store(place, kv_dtype=first)).precompute(CHUNKS[0])
        engine = tiny_engine("llama", store=open_store(place, kv_dtype=second))
        assert engine.is_stored(CHUNKS[0])
        assert engine.precompute(CHUNKS[0]) == 0
        kept[first] = engine.store.get(engine.key(CHUNKS[0])).header.stored_dtype
    assert kept == {"int8": "int8", "auto": "float32", "fp8": "fp8"}


def test_the_forecast_is_that_of_the_store(engines: Any) -> None:
    per_token = {kv_dtype: engine.bytes_per_token for kv_dtype, engine in engines.items()}
    heads, dim, num_layers = 2, 16, 6
    assert per_token["auto"] == 2 * heads * dim * 4 * num_layers
    assert per_token["int8"] == per_token["fp8"] == (2 * heads * dim + 4 * heads) * num_layers


def test_bytes_stored_are_counted_as_stored(tiny_engine: Any) -> None:
    engine = tiny_engine("llama", store=TieredStore(MemoryStore(1 << 26), kv_dtype="int8"))
    assert engine.precompute(CHUNKS[0]) == engine.store.nbytes()
    assert isinstance(engine.store.get(engine.key(CHUNKS[0])).stored_layer(0), QuantizedLayer)


def test_a_store_that_is_passed_has_a_dtype_of_its_own() -> None:
    from ragblend import load_engine

    with pytest.raises(UsageError, match=r"TieredStore.*kv_dtype='int8'"):
        load_engine("demo", MemoryStore(10), kv_dtype="int8")
