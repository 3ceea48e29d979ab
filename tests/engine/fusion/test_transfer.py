"""On a GPU, KV travels beside the computing and arrives whole. The tests of that run where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from ragblend import Prompt, load_engine
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import FusedKV, Placement
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV, convert_kv_dtype, slice_kv_rows
from ragblend.engine.store.memory import MemoryStore

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAYERS, HEADS, TOKENS, DIM = 8, 4, 2048, 64


def make_kv(index: int) -> MemoryKV:
    generator, token_ids = torch.Generator().manual_seed(index), tuple(range(index, index + TOKENS))
    header = KVHeader(chunk_key("model", (), token_ids), "model", (), token_ids, LAYERS, "float32")
    shape = (HEADS, TOKENS, DIM)
    tensors = [LayerKV(*(torch.randn(shape, generator=generator) for _ in range(2))) for _ in range(LAYERS)]
    return MemoryKV(header, tuple(tensors))


@on_gpu
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("tier", ["memory", "page-locked memory", "disk"])
def test_what_arrives_is_what_was_stored_while_the_gpu_is_busy(tier, together, kv_dtype, tmp_path):
    kvs = [convert_kv_dtype(make_kv(index), kv_dtype) for index in range(3)]
    if tier != "memory":
        store = DiskStore(tmp_path, fsync=False) if tier == "disk" else MemoryStore(1 << 40)
        store.page_locked = True
        for kv in kvs:
            store.put(kv)
        kvs = [store.get(kv.header.key) for kv in kvs]
    kvs[1] = slice_kv_rows(kvs[1], 7, TOKENS - 9)  # a run of a chunk
    starts = [0, TOKENS, 2 * TOKENS - 16]
    placements = [Placement(kv, start, exact=False) for kv, start in zip(kvs, starts, strict=True)]
    device = torch.device("cuda")
    busy = torch.randn(4096, 4096, device=device)
    stream = torch.cuda.Stream()  # vLLM does not compute on the default stream
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):  # freed memory comes round again
        with torch.cuda.stream(stream):
            fused = FusedKV.allocate([(HEADS, DIM, DIM)] * LAYERS, 3 * TOKENS, torch.empty(0, device=device))
            to = (LAYERS, lambda _, keys, __: keys, fused.write, device)
            with LayerLoader(placements, *to, together=together) as loader:
                for layer in range(LAYERS):
                    busy = (busy @ busy).clamp(-1, 1)
                    loader.wait(layer)
                    for kv, start in zip(kvs, starts, strict=True):
                        rows = slice(start, start + kv.header.num_tokens)
                        expected = kv.layer(layer)
                        torch.testing.assert_close(fused.keys(layer)[:, rows].cpu(), expected.keys, atol=0, rtol=0)
                        torch.testing.assert_close(fused.values(layer)[:, rows].cpu(), expected.values, atol=0, rtol=0)


@on_gpu
def test_the_embedded_model_answers_on_a_gpu_as_on_the_cpu(tmp_path):
    chunks = [" The Lorvane station was opened in 1921 .", " Its builder was Mara Ilsen , born in Toval ."]
    prompt = Prompt(chunks, "Who built the Lorvane station?")
    with load_engine("demo", tmp_path / "kv", dtype="float32", device="cpu", on_miss="inline") as cpu:
        for chunk in chunks:
            cpu.precompute(chunk)
        expected = [cpu.generate(prompt, recompute_ratio=ratio, max_tokens=8) for ratio in (0.0, 0.15, 1.0)]
    with load_engine("demo", tmp_path / "kv", dtype="float32", device="cuda", on_miss="inline") as gpu:
        for ratio, other in zip((0.0, 0.15, 1.0), expected, strict=True):
            answer = gpu.generate(prompt, recompute_ratio=ratio, max_tokens=8)
            assert answer.token_ids == other.token_ids
            assert answer.report.num_chunk_hits == 2
            assert answer.report.num_recomputed_tokens == other.report.num_recomputed_tokens
