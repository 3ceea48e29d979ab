"""Blending from disk: layer 0 is computed, everything else read, and the outcome is that of blending from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from continued import Continued, assert_continues
from harness import (
    PREFIX,
    ask,
    ask_all,
    assert_same_answer,
    connector_worker,
    engine,
    ingest,
    random_ids,
    recorded_selections,
    report,
    tokens,
)
from reference import Span
from slow_reads import SlowEntry, emptied, replaced_reads

from ragblend.engine.store.format.kv import ChunkKV, LayerKV, StoredLayer
from ragblend.engine.vllm.worker_side.layers import VllmLayers

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40, 75)], random_ids(9, 4)
IDS = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *CHUNKS[2], *QUESTION]
PARTS = [Span(PREFIX), *(Span(chunk, True, chunk is CHUNKS[0], PREFIX) for chunk in CHUNKS), Span(QUESTION)]
NUM_LAYERS, NUM_CHUNK_TOKENS = 6, 61 + 40 + 75
QKV = ("q_pr", "k_pr", "v_pr", "qkv_")
ROUNDING = 1e-4  # of log-probabilities
RULES = ("ask", "cacheblend", "cacheblend_k", "random")


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "phi3"])
def served(request, checkpoint, tmp_path_factory):
    """A family's name and its engine with the chunks stored: with QK-norm, and with one projection for Q, K and V."""
    family = str(request.param)
    with engine(checkpoint(family), tmp_path_factory.mktemp(family), skip_tokenizer_init=True) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        yield family, llm


def forget_memory(*but: str) -> None:
    """Leave only the keys `but` in the worker's memory tier."""
    emptied(connector_worker()._store, *but)


def params(**changes: Any) -> dict[str, Any]:
    return {"mode": "blend", "rule": "ask", "ratio": 0.15, **changes}


class _Watched(SlowEntry):
    """A chunk on disk whose reads are noted; what is read of layer 0 is no use."""

    def __init__(self, kv: ChunkKV, reads: list[int]) -> None:
        super().__init__(kv, lambda: None)
        self._reads = reads

    def stored_layer(self, index: int) -> StoredLayer:
        self._reads.append(index)
        stored = super().stored_layer(index)
        return type(stored)(*(torch.full_like(tensor, torch.nan) for tensor in stored)) if index == 0 else stored


@contextmanager
def watched_disk() -> Iterator[list[int]]:
    """The layers that are read from the worker's disk, in their order."""
    reads: list[int] = []
    with replaced_reads(connector_worker()._store.tiers[1], lambda kv: _Watched(kv, reads)):
        yield reads


@contextmanager
def computed_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each call that computes layer 0 for chunks."""
    project, counts = VllmLayers.project_kv, []

    def counting(self: VllmLayers, layer: int, hidden: torch.Tensor) -> LayerKV:
        counts.extend([len(hidden)] if layer == 0 else [])
        return project(self, layer, hidden)

    with monkeypatch.context() as patch:
        patch.setattr(VllmLayers, "project_kv", counting)
        yield counts


@pytest.mark.parametrize("rule", RULES)
def test_from_disk_as_from_memory_and_as_the_independent_cacheblend(served, stock, rule, monkeypatch):
    """Layer 0 as read is NaN, so that a use of it would show in the answer."""
    family, llm = served
    reference = Continued(stock(family))
    for ratio in (0.0, 0.15, 0.5):
        ask(llm, IDS, params(rule=rule, ratio=ratio))  # moves the chunks into memory
        with recorded_selections() as selections, computed_tokens(monkeypatch) as computed:
            held = ask(llm, IDS, params(rule=rule, ratio=ratio))
            assert computed == []
            forget_memory()
            with watched_disk() as reads:
                read = ask(llm, IDS, params(rule=rule, ratio=ratio))
        forget_memory()  # what has moved up is worth nothing
        assert computed == [NUM_CHUNK_TOKENS]
        assert reads == [layer for layer in (*range(1, NUM_LAYERS), 0) for _ in CHUNKS]
        assert selections[0] == selections[1]
        assert_same_answer(read, held, ROUNDING)
        expected = reference.blended(PARTS, ratio, rule, selections[1], 181)
        if rule != "random" and ratio:
            assert selections[1] == expected.selected
        assert_continues(read, reference)


def test_computing_layer_0_is_charged_once_and_reported_as_the_rest_is(served, stock):
    family, llm = served
    share = connector_worker().layers.kv_share
    layer = stock(family).model.layers[0]
    made = [weight.numel() for name, weight in layer.named_parameters() if name.split(".")[1][:4] in QKV]
    assert len(made) == (1 if family == "phi3" else 3)
    # vLLM computes Q with K and V. On a CPU it packs the weights away, and they are counted, too; it pads experts.
    everything, padding = sum(weight.numel() for weight in layer.parameters()), 0.2 if "moe" in family else 1e-3
    assert share == pytest.approx(sum(made) / everything, rel=padding)
    for mode in ("blend", "reuse"):
        ask(llm, IDS, params(mode=mode))
        held = report(ask(llm, IDS, params(mode=mode)))
        forget_memory()
        read = report(ask(llm, IDS, params(mode=mode)))
        for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "num_prefix_tokens", "rule"):
            assert read[name] == held[name], name
        assert read["charged_budget"] - held["charged_budget"] == pytest.approx(share / NUM_LAYERS)
        assert read["charged_budget_32"] - held["charged_budget_32"] == pytest.approx(share / 32)
        assert min(read["load_s"], read["stall_s"]) > 0


def test_blending_from_disk_moves_the_chunks_into_memory_whole(served):
    _, llm = served
    forget_memory()
    expected = tokens(ask(llm, IDS, params()))
    memory, disk = connector_worker()._store.tiers
    assert len(list(memory.keys())) == len(CHUNKS)
    for key in memory.keys():  # noqa: SIM118
        for layer in range(NUM_LAYERS):
            for mine, stored in zip(memory.get(key).layer(layer), disk.get(key).layer(layer), strict=True):
                assert torch.equal(mine, stored)
    hits = disk.counters.num_hits
    assert tokens(ask(llm, IDS, params())) == expected
    assert disk.counters.num_hits == hits


def test_only_chunks_that_are_not_in_memory_are_computed(served, monkeypatch):
    _, llm = served
    held = ask(llm, IDS, params())
    memory = connector_worker()._store.tiers[0]
    kept = next(key for key in memory.keys() if memory.get(key).header.num_tokens == len(CHUNKS[1]))  # noqa: SIM118
    forget_memory(kept)
    with computed_tokens(monkeypatch) as computed:
        mixed = ask(llm, IDS, params())
    assert computed == [len(CHUNKS[0]) + len(CHUNKS[2])]
    assert_same_answer(mixed, held, ROUNDING)


def test_requests_that_share_a_pass_compute_layer_0_each(served, monkeypatch):
    _, llm = served
    prompts = [(IDS, params(ratio=ratio)) for ratio in (0.02, 0.05, 0.1)]
    alone = [ask(llm, *prompt) for prompt in prompts]
    forget_memory()
    with computed_tokens(monkeypatch) as computed:
        together = ask_all(llm, prompts)
    assert computed[0] == NUM_CHUNK_TOKENS
    for found, expected in zip(together, alone, strict=True):
        assert_same_answer(found, expected, ROUNDING)


def test_damage_in_layer_0_is_a_miss_although_nobody_needed_it(served):
    _, llm = served
    full = tokens(ask(llm, IDS))
    forget_memory()
    disk = connector_worker()._store.tiers[1]
    key = next(key for key in disk.keys() if disk.header(key).num_tokens == len(CHUNKS[1]))  # noqa: SIM118
    path = disk._path(key)
    whole, values = bytearray(path.read_bytes()), disk.get(key).layer(0).values.contiguous()
    whole[bytes(whole).index(values.numpy().tobytes())] ^= 1
    with path.open("r+b") as stream:
        stream.write(whole)
    damaged = ask(llm, IDS, params(ratio=1.0))
    found = report(damaged)
    assert (found["num_chunk_hits"], found["num_damaged_entries"], found["refused_reason"]) == (2, 1, "")
    assert tokens(damaged) == full
    assert not disk.contains(key)
    assert ingest(llm, PREFIX, CHUNKS[1])["refused_reason"] == ""


def test_the_work_counts_between_two_engine_steps(served, monkeypatch):
    """Slices of one token: computing layer 0 takes a separate one, and no slice has more than a layer's work."""
    _, llm = served
    expected = ask(llm, IDS, params())
    worker, slices = connector_worker(), []
    run_slice, run_layer, project = worker.run_slice, worker.layers.run_layer, worker.layers.project_kv

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda layer, *rest: (slices[-1].append(f"{name} {layer}"), work(layer, *rest))[1]

    forget_memory()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_slice", NUM_LAYERS)
        patch.setattr(worker, "run_slice", lambda *args: (slices.append([]), run_slice(*args))[1])
        patch.setattr(worker.layers, "run_layer", noting("run", run_layer))
        patch.setattr(worker.layers, "project_kv", noting("kv", project))
        found = ask(llm, IDS, params())
    assert_same_answer(found, expected, ROUNDING)
    busy = [done for done in slices if done]
    assert busy[0] == ["kv 0"]
    assert len(busy) >= NUM_LAYERS
    assert all(len({done.split()[1] for done in each}) == 1 for each in busy)
