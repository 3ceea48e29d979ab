"""Layers that see a window only, at any window and length: against the stock model and against the reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import test_fuse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference
from test_fidelity import placements_of
from test_fuse import (
    ATOL,
    PREFIX,
    Outcome,
    Prompt,
    assert_full_prefill,
    assert_same_blend,
    assert_same_rows,
    blend,
    full_prefill,
    make_prompt,
    random_ids,
)
from tiny_models import FAMILIES, WINDOWED, make_model
from transformers import Qwen2ForCausalLM

from ragblend.engine.fusion.plan import FusePlan, Placement
from ragblend.engine.fusion.rules import RULES, default_check_layer, find_rule, is_probe_worthwhile
from ragblend.engine.store.format.kv import LayerKV, MemoryKV
from ragblend.engine.transformers.layers import TransformersLayers

ALL_WINDOWED = tuple(family for family in WINDOWED if family not in test_fuse.GLOBAL)


@contextmanager
def window_of(layers: TransformersLayers, stock: Any, window: int) -> Iterator[None]:
    """Both models with windows of `window` tokens, and without cached chunks."""
    own = stock.config.sliding_window
    test_fuse._store_chunk.cache_clear()
    stock.config.sliding_window = window
    try:
        with layers.self_check_mode(window):
            yield
    finally:
        stock.config.sliding_window = own
        test_fuse._store_chunk.cache_clear()


def prompt_of(length: int, seed: int = 0, prefix: int = 2, question: int = 3, chunk: int = 11) -> Prompt:
    """A prompt of `length` tokens, in chunks of eleven and a shorter one."""
    left = length - prefix - question
    chunks = [chunk] * (left // chunk) + [left % chunk] * (left % chunk > 0)
    spans = [("prefix", random_ids(prefix, 1000 + seed))]
    spans += [("chunk", random_ids(count, 10 * seed + index)) for index, count in enumerate(chunks)]
    return Prompt([*spans, ("text", random_ids(question, 2000 + seed))])


# --- against full prefill ---


shapes = st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple)


@settings(max_examples=40)
@given(
    family=st.sampled_from(list(WINDOWED)),
    window=st.integers(1, 120),
    chunks=shapes,
    missing=st.integers(0, 5),
    rule=st.sampled_from(["ask", "cacheblend", "random"]),
    seed=st.integers(0, 5),
)
def test_ratio_one_is_full_prefill_at_any_window(family, window, chunks, missing, rule, seed, stock_model, tiny_layers):
    layers, stock, prompt = tiny_layers(family), stock_model(family), make_prompt(seed, chunks)
    if missing < len(chunks):
        prompt.spans[1 + missing] = ("missing", prompt.spans[1 + missing][1])
    with window_of(layers, stock, window):
        assert_full_prefill(blend(layers, prompt, 1.0, rule), stock, prompt)


@pytest.mark.parametrize("family", WINDOWED)
def test_decoding_goes_on_past_the_window_as_the_stock_model_does(family, stock_model, tiny_layers):
    """The prompt is shorter than the window, prompt and answer are longer."""
    layers, stock, prompt = tiny_layers(family), stock_model(family), prompt_of(36)
    with window_of(layers, stock, 40), torch.inference_mode():
        outcome = blend(layers, prompt, 1.0)
        ids, logits, fused = list(prompt.ids), outcome.logits, outcome.fused
        for _ in range(14):
            ids.append(int(logits.argmax()))
            hidden, rows = layers.embed(torch.tensor(ids[-1:])), torch.tensor([fused.length])
            for layer in range(layers.num_layers):
                hidden = layers.run_layer(layer, hidden, rows, fused)
            fused.length += 1
            logits = layers.logits(hidden)[-1]
            torch.testing.assert_close(logits, full_prefill(stock, ids)[0], atol=ATOL, rtol=0)


# --- against the independent CacheBlend ---


@pytest.mark.slow
@settings(max_examples=60)
@given(
    family=st.sampled_from(list(WINDOWED)),
    window=st.integers(1, 120),
    chunks=shapes,
    rule=st.sampled_from(["ask", "random"]),
    ratio=st.sampled_from([0.05, 0.15, 0.5, 0.8]),
    seed=st.integers(0, 5),
)
def test_ratios_between_agree_with_the_reference_at_any_window(
    family, window, chunks, rule, ratio, seed, stock_model, tiny_layers
):
    """The reference gets the recomputed tokens: where windows leave some without attention, there are
    ties. `ask` has what is kept move with what is recomputed."""
    layers, stock, prompt = tiny_layers(family), stock_model(family), make_prompt(seed, chunks)
    with window_of(layers, stock, window):
        outcome = blend(layers, prompt, ratio, rule)
        chosen, gain = outcome.recomputed, RULES[rule].drift_gain
        expected = Reference(stock).blend(prompt.reference_spans(), {}, recomputed=chosen, carry=gain)
    assert_same_blend(outcome, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize(("window", "ratio"), [(20, 0.1), (30, 0.05), (30, 0.15)])
@pytest.mark.parametrize(("rule", "deviation"), [("cacheblend", "v"), ("cacheblend_k", "k")])
def test_deviations_in_windowed_layers_agree_with_the_reference(
    family, window, ratio, rule, deviation, stock_model, tiny_layers
):
    layers, stock, prompt = tiny_layers(family), stock_model(family), make_prompt(7)
    with window_of(layers, stock, window):
        outcome = blend(layers, prompt, ratio, rule)
        expected = Reference(stock).blend(prompt.reference_spans(), {1: ratio}, deviation)
    assert_same_blend(outcome, expected)


# --- windows ---


@pytest.mark.parametrize("family", ALL_WINDOWED)
def test_a_recomputed_token_attends_to_its_window_only(family, stock_model, tiny_layers):
    """One token is recomputed; stored KV outside its window may be anything, stored KV within it counts."""
    layers, stock, prompt = tiny_layers(family), stock_model(family), make_prompt(3)
    row, window = PREFIX + 26 + 17 + 10, 12

    def recompute(changed: Sequence[int], number: float) -> Outcome:
        def change(placements: list[Placement]) -> list[Placement]:
            return [placement._replace(kv=altered(placement, changed, number)) for placement in placements]

        return blend(layers, prompt, 0.01, "fixed", change=change)

    random = find_rule("random")
    rule = type(random)("fixed", lambda evidence: (evidence.positions == row).float())
    with window_of(layers, stock, window), pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "fixed", rule)
        plain, outside = recompute((), 0.0), recompute(range(PREFIX, row + 1 - window), torch.nan)
        inside = recompute([row + 1 - window], 3.0)
    assert plain.recomputed == outside.recomputed == inside.recomputed == [row]
    assert_same_rows(plain.fused, outside.fused, row)
    assert (plain.fused.values(1)[:, row] - inside.fused.values(1)[:, row]).abs().max() > 1e-3


def altered(placement: Placement, rows: Sequence[int], number: float) -> MemoryKV:
    """The chunk with other values at those of its `rows`."""
    mine = [row - placement.start for row in rows if placement.start <= row < placement.end]
    layers = []
    for keys, values in placement.kv.layers:
        values = values.clone()
        values[:, mine] = number
        layers.append(LayerKV(keys, values))
    return MemoryKV(placement.kv.header, tuple(layers))


@pytest.mark.parametrize("family", WINDOWED)
def test_what_no_other_text_reaches_is_stored_exactly(family, stock_model, tiny_layers):
    """As long as all layers below see a window, a chunk's later tokens have seen nothing but the chunk."""
    layers, stock, window = tiny_layers(family), stock_model(family), 8
    prompt = Prompt([("prefix", random_ids(4, 1)), *(("chunk", random_ids(40, seed)) for seed in (2, 3))])
    first_global = test_fuse.GLOBAL.get(family, (6,))[0]
    with window_of(layers, stock, window):
        _, kv = full_prefill(stock, prompt.ids)
        stored = blend(layers, prompt, 0.0).fused
    for layer in range(layers.num_layers):
        reached = 44 + layer * (window - 1)
        rows = slice(min(reached, 83), 83)
        difference = (stored.values(layer)[:, rows] - kv.layers[layer].values[0][:, rows]).abs()
        if layer <= first_global and reached < 83:
            assert difference.max() < ATOL
            assert layer == 0 or (stored.values(layer) - kv.layers[layer].values[0])[:, 44:reached].abs().max() > ATOL
        elif difference.numel():
            assert difference.max() > ATOL


# --- what rules read ---


def test_rules_read_global_layers_or_windows_where_no_layer_is_global(tiny_layers):
    def reads(family: str, rule: str) -> tuple[int, tuple[int, ...]]:
        layers = tiny_layers(family)
        prompt = make_prompt()
        plan = FusePlan(torch.tensor(prompt.ids), placements_of(prompt), num_resident=PREFIX)
        plan = plan.with_rule(rule, 0.15, layers)
        assert (plan.rule.name, plan.recompute_ratio) == (rule, 0.15)
        return plan.check_layer, plan.probe_layers

    assert reads("gemma3", "ask") == (0, (2, 5))
    assert reads("gemma3", "cacheblend") == (2, ())
    assert reads("gpt_oss", "ask") == (0, (1, 3, 5))
    assert reads("qwen2_window", "cacheblend") == (1, ())
    assert reads("mistral_window", "ask") == reads("llama", "ask") == (0, tuple(range(6)))
    assert reads("mistral_window", "cacheblend") == (1, ())


def test_the_probe_runs_no_layer_after_the_last_one_it_reads():
    counts = {"num_candidates": 200, "num_chunk_tokens": 200, "num_layers": 31}
    assert not is_probe_worthwhile(RULES["ask"], 0.05, 60, **counts)
    assert is_probe_worthwhile(RULES["ask"], 0.05, 60, **counts, global_layers=(0, 5, 15))
    assert default_check_layer((0, 5, 15)) == 5


@pytest.mark.parametrize("num_global", [1, 2])
def test_drift_correction_reads_the_deepest_probed_layer_without_later_global_ones(num_global):
    """In Qwen2 with windows the first layers are global, so the probe stops there: no later layer is loaded yet."""
    changes = {**FAMILIES["qwen2_window"][1], "num_hidden_layers": 8, "max_window_layers": num_global}
    stock = make_model(Qwen2ForCausalLM, **changes)
    stock.set_attn_implementation("eager")
    layers, prompt = TransformersLayers(copy.deepcopy(stock)), make_prompt(28)
    test_fuse._store_chunk.cache_clear()
    outcome = blend(layers, prompt, 0.2, "ask")
    carried = {"carry": RULES["ask"].drift_gain, "deepest": num_global - 1}
    assert_same_blend(
        outcome, Reference(stock).blend(prompt.reference_spans(), {}, recomputed=outcome.recomputed, **carried)
    )
