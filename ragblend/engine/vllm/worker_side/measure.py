"""Times vLLM's model in a worker, before the first request, for `brief_profile.measure_briefly`.

Every rank measures, because they run the model together; the first writes the profile into the store, where the
scheduler, which starts after the workers, reads it. Runs over the KV blocks from 1 on, as `self_check` does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import key_from_header
from ragblend.engine.store.format.kv import KVHeader, KVSpec, MemoryKV, dtype_name
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.tuning.brief_profile import (
    CHUNK_TOKENS,
    COUNTS,
    MEASURE_S,
    QUESTION_TOKENS,
    keep_profile,
    measure_briefly,
    random_ids,
)
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.tuning.machine import read_machine_profile
from ragblend.engine.vllm.jobs import BlendJob, BlendTurn
from ragblend.engine.vllm.params import BlendParams
from ragblend.engine.vllm.worker_side.layers import VllmLayers
from ragblend.engine.vllm.worker_side.paged import PagedKV
from ragblend.engine.vllm.worker_side.prefill import prefill_chunk
from ragblend.engine.vllm.worker_side.worker import BlendWorker, JobResult
from ragblend.errors import RagblendError
from ragblend.prompt.types import ChunkRun, Variant

log = logging.getLogger(__name__)

_NO_LIMIT_BYTES = 1 << 50


def measure_at_start(
    layers: VllmLayers,
    store: TieredStore,
    *,
    fingerprint: str,
    hardware: dict[str, Any],
    spec: KVSpec,
    vocab_size: int,
    num_blocks: int,
    context_length: int,
    seconds: float = MEASURE_S,
) -> None:
    """Measure this machine within `seconds` and keep the profile in the store, unless the store has one.

    All ranks must call this. Overwrites the KV blocks from 1 on. If the model cannot be measured, a warning says so:
    requests are then blended as if none were slower.
    """
    disk = store.find_tier(DiskStore)
    assert disk is not None
    is_measured = read_machine_profile(disk.root, fingerprint, hardware, store_key=disk.store_key) is not None
    if layers.count_ranks([is_measured]) == [layers.num_ranks]:
        return
    model = _TimedWorker(layers, vocab_size, min(context_length, (num_blocks - 1) * layers.block_size))
    try:
        profile = measure_briefly(
            model,
            fingerprint=fingerprint,
            hardware=hardware,
            spec=spec,
            kv_dtype=store.kv_dtype,
            disk_dir=disk.kv_dir,
            seconds=seconds,
        )
    except Exception as error:  # of any class: a server must start, and blends without a profile
        log.warning("vLLM was not measured, so slow blends are not avoided: %s", error)
        return
    finally:
        model.close()
    if profile is not None and layers.rank == 0:
        keep_profile(disk.root, profile)


class _TimedWorker:
    """`TimedModel` of a worker's layers over an idle paged cache."""

    def __init__(self, layers: VllmLayers, vocab_size: int, longest_tokens: int) -> None:
        self.longest_tokens = longest_tokens
        self._layers = layers
        self._chunks = [random_ids(CHUNK_TOKENS, vocab_size, number + 1) for number in range(COUNTS[-1])]
        self._question = random_ids(QUESTION_TOKENS, vocab_size)
        self._store = MemoryStore(_NO_LIMIT_BYTES)
        self._worker = BlendWorker(layers, self._store, longest_tokens)

    def num_tokens(self, num_chunks: int) -> int:
        return num_chunks * CHUNK_TOKENS + QUESTION_TOKENS

    def full_prefill_s(self, num_chunks: int) -> float:
        return self._forward_s(self._ids(num_chunks), 0)

    def store_chunks(self, num_chunks: int) -> None:
        layers = self._layers
        for ids in self._chunks[:num_chunks]:
            with layers.without_adapters():
                kv = prefill_chunk(layers, self._paged(CHUNK_TOKENS, 0), self._header(ids))
            whole = tuple(layers.gather_heads(kv.layer(layer)) for layer in range(layers.num_layers))
            self._store.put(MemoryKV(kv.header, whole))

    def blend_s(self, num_chunks: int, rule: str, ratio: float) -> float:
        ids, end = self._ids(num_chunks), num_chunks * CHUNK_TOKENS
        runs = tuple(
            ChunkRun(chunk, 0, at * CHUNK_TOKENS, (at + 1) * CHUNK_TOKENS, variant=self._variant(chunk))
            for at, chunk in enumerate(self._chunks[:num_chunks])
        )
        job = BlendJob(
            "profile",
            BlendParams("blend", rule=rule, ratio=ratio),
            RequestTuning(rule, ratio),
            ids,
            runs,
            end,
            (BlendTurn(0, len(ids), runs),),
            self._blocks(len(ids)),
            "profile",
        )
        start_s, finished = perf_counter(), list[JobResult]()
        self._worker.submit(job)
        while not finished:
            finished = self._worker.run_slice()
        if finished[0].failed or finished[0].report.num_chunk_hits < num_chunks:
            raise RagblendError(f"a blend failed: {finished[0].report.refused_reason or 'its chunks were not found'}")
        return perf_counter() - start_s + self._forward_s(ids, end)

    def agrees(self, is_true: bool) -> bool:
        return self._layers.count_ranks([is_true]) == [self._layers.num_ranks]

    def close(self) -> None:
        """End the worker's threads."""
        self._worker.close()

    def _ids(self, num_chunks: int) -> tuple[int, ...]:
        return (*(token for chunk in self._chunks[:num_chunks] for token in chunk), *self._question)

    def _forward_s(self, ids: Sequence[int], start: int) -> float:
        """Return the seconds of vLLM's own forward pass over the tokens from `start` on."""
        layers, start_s = self._layers, perf_counter()
        rows = torch.arange(start, len(ids), device=layers.device)
        token_ids = torch.tensor(ids[start:], device=layers.device)
        with torch.inference_mode(), layers.without_adapters():
            for call in layers.attention_calls([rows], [self._paged(len(ids), start)]):
                layers.forward(token_ids[call.span], call)
        if layers.device.type == "cuda":
            torch.cuda.synchronize(layers.device)
        return perf_counter() - start_s

    def _paged(self, num_tokens: int, length: int) -> PagedKV:
        target = PagedKV(self._layers, self._blocks(num_tokens), num_tokens)
        target.length = length
        return target

    def _blocks(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(1, 1 + -(-num_tokens // self._layers.block_size)))  # block 0 is vLLM's null block

    def _header(self, ids: tuple[int, ...]) -> KVHeader:
        header = KVHeader("", "profile", (), ids, self._layers.num_layers, dtype_name(self._layers.dtype))
        return replace(header, key=key_from_header(header))

    def _variant(self, ids: tuple[int, ...]) -> Variant:
        return Variant(self._header(ids).key, "approximate", exact=False)
