"""The fusor against two judges: the stock model's own full prefill, and a CacheBlend written independently."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from reference import Reference, Span, as_cached, as_held
from tiny_models import LATENT, ROTATIONS, WINDOWED
from torch import Tensor
from transformers import DynamicCache

from ragblend.engine.fusion.check_layers import schedule_check_layers
from ragblend.engine.fusion.fuse import fuse
from ragblend.engine.fusion.loader import LayerLoader
from ragblend.engine.fusion.plan import ALLOCATED_LAYERS, FusedKV, FusePlan, FuseResult, Placement
from ragblend.engine.fusion.prefill import prefill_chunks
from ragblend.engine.fusion.rules import CHECK_LAYER, RULES
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV
from ragblend.engine.transformers.layers import TransformersLayers, cache_argument_name
from ragblend.options import SelectionOptions

PREFIX, QUESTION = 5, 7
CHUNKS = (26, 17, 31)
INDEPENDENT = ("llama", "mistral", "phi3", "qwen2", "qwen3", *LATENT, *ROTATIONS, *WINDOWED)
GLOBAL = {
    "gemma2": (1, 3, 5), "gemma3": (2, 5), "gemma4": (2, 5), "gemma4_moe": (2, 5), "gpt_oss": (1, 3, 5),
    "qwen2_window": (0, 1, 2), "cohere2": (2, 5), "exaone4": (2, 5), "olmo3": (2, 5),
}  # fmt: skip
RATIOS = (0.05, 0.15, 0.5)
ATOL = 1e-4


@dataclass
class Prompt:
    """Token ids of one prompt: spans in order, each ("prefix" | "chunk" | "missing" | "text", ids)."""

    spans: list[tuple[str, list[int]]]

    @property
    def ids(self) -> list[int]:
        return [token for _, ids in self.spans for token in ids]

    @property
    def prefix(self) -> list[int]:
        kind, ids = self.spans[0]
        return ids if kind == "prefix" else []

    def starts(self, *kinds: str) -> list[tuple[int, list[int]]]:
        found, position = [], 0
        for kind, ids in self.spans:
            if kind in kinds:
                found.append((position, ids))
            position += len(ids)
        return found

    def reference_spans(self) -> list[Span]:
        spans, position = [], 0
        for kind, ids in self.spans:
            stored, behind = kind == "chunk", self.prefix
            spans.append(Span(ids, stored, stored and bool(behind) and position == len(behind), behind))
            position += len(ids)
        return spans


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_prompt(seed: int = 0, chunks: tuple[int, ...] = CHUNKS, prefix: int = PREFIX) -> Prompt:
    spans = [("prefix", random_ids(prefix, 1000 + seed))] if prefix else []
    spans += [("chunk", random_ids(count, 10 * seed + index)) for index, count in enumerate(chunks)]
    return Prompt([*spans, ("text", random_ids(QUESTION, 2000 + seed))])


def store_chunk(layers: TransformersLayers, prefix_ids: list[int], ids: list[int]) -> MemoryKV:
    return _store_chunk(layers, tuple(prefix_ids), tuple(ids))


@cache
def _store_chunk(layers: TransformersLayers, prefix_ids: tuple[int, ...], ids: tuple[int, ...]) -> MemoryKV:
    header = KVHeader("key", "model", prefix_ids, ids, layers.num_layers, "float32")
    return prefill_chunks(layers, prefix_kv(layers, prefix_ids), [header])[0]


def prefix_kv(layers: TransformersLayers, prefix_ids: Sequence[int]) -> FusedKV:
    fused = FusedKV.allocate(layers.kv_shapes, len(prefix_ids), layers.like)
    if prefix_ids:
        fuse(layers, FusePlan(torch.tensor(prefix_ids), ()), fused)
    return fused


@dataclass
class Outcome:
    logits: Tensor
    recomputed: list[int]
    fused: FusedKV
    result: FuseResult


def blend(
    layers: TransformersLayers,
    prompt: Prompt,
    ratio: float = 0.15,
    rule: str = "cacheblend",
    check_layer: int = CHECK_LAYER,
    options: SelectionOptions | None = None,
    change: Callable[[list[Placement]], list[Placement]] = lambda placements: placements,
    first_layer: Callable[[Tensor], LayerKV] | None = None,
    **plan_fields: Any,
) -> Outcome:
    """Fuse `prompt`: its prefix resident, its chunks stored behind the prefix, the first one exact."""
    placements = [
        Placement(store_chunk(layers, prompt.prefix, ids), start, start == len(prompt.prefix) > 0)
        for start, ids in prompt.starts("chunk")
    ]
    placements = change(placements)
    fused = FusedKV.allocate(layers.kv_shapes, len(prompt.ids), layers.like)
    for layer in range(layers.num_layers):  # what is neither written nor placed must not be read
        fused.keys(layer).fill_(torch.nan)
        fused.values(layer).fill_(torch.nan)
    fused.copy_front(prefix_kv(layers, prompt.prefix), len(prompt.prefix))
    plan = FusePlan(
        torch.tensor(prompt.ids),
        tuple(placements),
        replace(RULES[rule], deviation=(options and options.deviation) or RULES[rule].deviation),
        ratio,
        schedule_check_layers(RULES[rule], ratio, check_layer, layers.num_layers, options),
        len(prompt.prefix),
        probe_layers=RULES[rule].probe_layers(layers.num_layers, layers.global_layers),
        **plan_fields,
    )
    to = (layers.num_layers, layers.place_keys, fused.write, layers.device)
    with LayerLoader(plan.placements, *to, first_layer=first_layer, correctable=(layers, fused)) as loader:
        result = fuse(layers, plan, fused, loader)
    return Outcome(result.logits, result.recomputed.tolist(), fused, result)


class Elsewhere:
    """A chunk that must be read, and whose stored layer 0 is NaN."""

    def __init__(self, kv: MemoryKV) -> None:
        self.header, self.nbytes, self._kv = kv.header, kv.nbytes, kv

    def layer(self, index: int) -> LayerKV:
        keys, values = self._kv.layer(index)
        return LayerKV(keys * torch.nan, values * torch.nan) if index == 0 else LayerKV(keys, values)

    stored_layer = layer


def blend_from_elsewhere(layers: TransformersLayers, *args: Any, **options: Any) -> Outcome:
    """`blend`, with layer 0 computed from the token ids."""
    return blend(
        layers,
        *args,
        change=lambda placements: [placement._replace(kv=Elsewhere(placement.kv)) for placement in placements],
        first_layer=lambda token_ids: layers.project_kv(0, layers.embed(token_ids)),
        **options,
    )


@torch.no_grad()
def full_prefill(model: Any, ids: list[int]) -> tuple[Tensor, DynamicCache]:
    kv = DynamicCache()
    logits = model(torch.tensor([ids]), **{cache_argument_name(model): kv}).logits[0, -1]
    for layer in kv.layers:
        layer.keys, layer.values = as_held(model, layer.keys, layer.values)
    return logits, kv


def assert_same_kv(fused: FusedKV, kv: DynamicCache) -> None:
    for index, layer in enumerate(kv.layers):
        count = layer.keys.shape[2]
        torch.testing.assert_close(fused.keys(index)[:, :count], layer.keys[0], atol=ATOL, rtol=0)
        torch.testing.assert_close(fused.values(index)[:, :count], layer.values[0], atol=ATOL, rtol=0)


def assert_same_rows(mine: FusedKV, other: FusedKV, rows: Any = slice(None), atol: float = 0.0) -> None:
    """The same KV at those rows of every layer."""
    for layer in range(6):
        torch.testing.assert_close(mine.keys(layer)[:, rows], other.keys(layer)[:, rows], atol=atol, rtol=0)
        torch.testing.assert_close(mine.values(layer)[:, rows], other.values(layer)[:, rows], atol=atol, rtol=0)


def assert_full_prefill(outcome: Outcome, model: Any, prompt: Prompt) -> None:
    """Logits and all KV are the stock model's own."""
    logits, kv = full_prefill(model, prompt.ids)
    torch.testing.assert_close(outcome.logits, logits, atol=ATOL, rtol=0)
    assert_same_kv(outcome.fused, kv)


# --- against full prefill ---


@pytest.mark.parametrize(
    ("rule", "fused_by"),
    [("cacheblend", blend), ("cacheblend_k", blend_from_elsewhere), ("random", blend), ("ask", blend_from_elsewhere)],
)
def test_ratio_one_equals_the_stock_models_full_prefill(family, rule, fused_by, stock_model, tiny_layers):
    prompt = make_prompt()
    assert_full_prefill(fused_by(tiny_layers(family), prompt, 1.0, rule), stock_model(family), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ask", "cacheblend", "random"])
@pytest.mark.parametrize("ratio", [0.0, 0.15])
def test_layer_0_computed_is_layer_0_stored(rule, ratio, family, tiny_layers):
    """Selection, logits and all KV are equal, also in rows that are not recomputed."""
    layers, prompt = tiny_layers(family), make_prompt(6)
    stored, computed = blend(layers, prompt, ratio, rule), blend_from_elsewhere(layers, prompt, ratio, rule)
    assert computed.recomputed == stored.recomputed
    torch.testing.assert_close(computed.logits, stored.logits, atol=1e-5, rtol=0)
    assert_same_rows(computed.fused, stored.fused, atol=1e-5)


def test_a_stale_chunk_is_far_from_full_prefill(family, stock_model, tiny_layers):
    """Without this, `ratio 1.0 is exact` would also hold for a model in which reuse costs nothing."""
    prompt = make_prompt()
    outcome = blend(tiny_layers(family), prompt, 0.0)
    logits, _ = full_prefill(stock_model(family), prompt.ids)
    assert (outcome.logits - logits).abs().max() > 100 * ATOL
    assert outcome.recomputed == []


@pytest.mark.slow
def test_intermediate_ratios_lie_between_full_reuse_and_full_prefill(family, stock_model, tiny_layers):
    layers, model = tiny_layers(family), stock_model(family)
    errors = dict.fromkeys((0.0, *RATIOS, 1.0), 0.0)
    for seed in range(3):
        prompt = make_prompt(seed)
        _, kv = full_prefill(model, prompt.ids)
        for ratio in errors:
            fused = blend(layers, prompt, ratio).fused
            errors[ratio] += sum(
                float((fused.values(index) - layer.values[0]).square().mean()) for index, layer in enumerate(kv.layers)
            )
    assert errors[1.0] < 1e-6
    for ratio in RATIOS:
        assert errors[1.0] < errors[ratio] < errors[0.0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3_partial", "gemma", "qwen3_moe"])
def test_a_missing_chunk_in_the_middle_is_computed_in_place(family, stock_model, tiny_layers):
    prompt = make_prompt(2)
    prompt.spans[2] = ("missing", prompt.spans[2][1])
    assert_full_prefill(blend(tiny_layers(family), prompt, 1.0), stock_model(family), prompt)


def test_a_prompt_without_stored_chunks_is_full_prefill(stock_model, tiny_layers):
    prompt = Prompt([("prefix", random_ids(5, 1)), ("missing", random_ids(20, 2)), ("text", random_ids(6, 3))])
    assert_full_prefill(blend(tiny_layers("llama"), prompt, 0.15), stock_model("llama"), prompt)


@pytest.mark.parametrize("chunks", [(9, 9, 9), (1, 2, 3), (70, 1), (2, 2)])
def test_chunks_of_any_length_are_exact_at_ratio_one(chunks, stock_model, tiny_layers):
    """Lengths equal to the number of KV heads, and single tokens, are where layouts get mixed up."""
    for family in ("qwen3", "phi3"):
        prompt = make_prompt(3, chunks)
        assert_full_prefill(blend(tiny_layers(family), prompt, 1.0), stock_model(family), prompt)


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("kind", ["the same chunk twice", "ends with a chunk"])
def test_repeated_and_final_chunks_agree_with_the_reference(kind, ratio, stock_model, tiny_layers):
    """Placed twice; its last token computed."""
    prompt = make_prompt(4)
    if kind == "ends with a chunk":
        prompt.spans.pop()
    else:
        prompt.spans[3] = prompt.spans[2] = prompt.spans[1]
    outcome = blend(tiny_layers("llama"), prompt, ratio)
    expected = Reference(stock_model("llama")).blend(prompt.reference_spans(), {1: ratio})
    torch.testing.assert_close(outcome.logits, expected.logits, atol=ATOL, rtol=0)
    assert kind != "ends with a chunk" or outcome.recomputed == expected.selected
    if ratio == 1.0:
        torch.testing.assert_close(outcome.logits, full_prefill(stock_model("llama"), prompt.ids)[0], atol=ATOL, rtol=0)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("question", [[], [5, 6, 7]])
def test_a_prompt_of_one_exact_chunk_is_full_prefill(rule, question, stock_model, tiny_layers):
    prompt = Prompt([("prefix", random_ids(4, 1)), ("chunk", random_ids(20, 2)), ("text", question)])
    assert_full_prefill(blend(tiny_layers("qwen3"), prompt, 0.15, rule), stock_model("qwen3"), prompt)


# --- against the independent CacheBlend ---


def assert_same_blend(outcome: Outcome, expected: Any) -> None:
    assert outcome.recomputed == expected.selected
    torch.testing.assert_close(outcome.logits, expected.logits, atol=ATOL, rtol=0)
    for layer, (keys, values) in enumerate(zip(expected.keys, expected.values, strict=True)):
        torch.testing.assert_close(outcome.fused.keys(layer), keys.transpose(0, 1), atol=ATOL, rtol=0)
        torch.testing.assert_close(outcome.fused.values(layer), values.transpose(0, 1), atol=ATOL, rtol=0)


@pytest.mark.parametrize("family", INDEPENDENT)
@pytest.mark.parametrize(
    ("rule", "deviation"), [("cacheblend", "v"), pytest.param("cacheblend_k", "k", marks=pytest.mark.slow)]
)
def test_blending_agrees_with_the_independent_cacheblend(family, rule, deviation, stock_model, tiny_layers):
    prompt, reference = make_prompt(7), Reference(stock_model(family))
    for ratio in RATIOS:
        expected = reference.blend(prompt.reference_spans(), {1: ratio}, deviation)
        assert expected.selected
        assert_same_blend(blend(tiny_layers(family), prompt, ratio, rule), expected)


@pytest.mark.parametrize("ratio", RATIOS)
def test_over_a_hole_both_rules_agree_with_the_reference(ratio, stock_model, tiny_layers):
    """A missing chunk and loose text between chunks run ahead with the question; only the question's queries count."""
    prompt, reference = make_prompt(22, (12, 20, 9, 15)), Reference(stock_model("qwen3"))
    prompt.spans[2] = ("missing", prompt.spans[2][1])
    prompt.spans.insert(4, ("text", random_ids(4, 5)))
    spans = prompt.reference_spans()
    asked = reference.blend(spans, {0: ratio}, "ask", range(6), carry=RULES["ask"].drift_gain)
    assert asked.selected
    assert_same_blend(blend(tiny_layers("qwen3"), prompt, ratio, "ask"), asked)
    assert_same_blend(blend(tiny_layers("qwen3"), prompt, ratio), reference.blend(spans, {1: ratio}))


def attended(model: Any, prompt: Prompt, layers: Sequence[int]) -> Tensor:
    """[T] what the question attends to in `layers` over stale KV: transformers' own eager attention over a cache put
    together from the stored chunks."""
    stale = Reference(model).blend(prompt.reference_spans(), {1: 0.0})
    kv, end = DynamicCache(), len(prompt.ids) - QUESTION
    for layer, (keys, values) in enumerate(zip(stale.keys, stale.values, strict=True)):
        placed = (each[:end].transpose(0, 1)[None] for each in (keys, values))
        kv.update(*as_cached(model, *placed), layer)
    with torch.no_grad():
        question = torch.tensor([prompt.ids[end:]])
        seen = model(question, output_attentions=True, **{cache_argument_name(model): kv}).attentions
    return torch.stack([seen[layer][0].mean(dim=(0, 1)) for layer in layers]).mean(0)


@pytest.mark.parametrize("family", INDEPENDENT)
@pytest.mark.parametrize(
    "ratio", [pytest.param(each, marks=[] if each == 0.15 else pytest.mark.slow) for each in RATIOS]
)
def test_asking_first_recomputes_both_ends_and_what_the_stock_model_attends_to(family, ratio, stock_model, tiny_layers):
    """In every layer, or every global one beside windows, over nothing but stale KV; what was run ahead leaves no trace
    in what is fused then, and the tokens kept move as those say that are recomputed."""
    prompt, layers = make_prompt(26), tiny_layers(family)
    outcome, asked = blend(layers, prompt, ratio, "ask"), GLOBAL.get(family, range(6))
    expected = attended(stock_model(family), prompt, asked)
    torch.testing.assert_close(outcome.result.attention, expected, atol=1e-5, rtol=0)
    first, end = PREFIX + CHUNKS[0], len(prompt.ids) - QUESTION  # the first chunk is exact
    count = min(end - first, math.ceil(ratio * sum(CHUNKS)))
    ends = {first, first + CHUNKS[1] - 1, first + CHUNKS[1], end - 1}  # of the two others, regardless of attention
    order = sorted(range(first, end), key=lambda position: (position not in ends, -float(expected[position])))
    assert outcome.recomputed == sorted(order[:count])
    carry = RULES["ask"].drift_gain
    assert 0 < carry <= 1
    judge = Reference(stock_model(family))
    assert_same_blend(outcome, judge.blend(prompt.reference_spans(), {}, recomputed=outcome.recomputed, carry=carry))
    rows = [count, *(count + QUESTION * (layer <= asked[-1]) for layer in range(1, layers.num_layers))]
    assert outcome.result.rows_per_layer == rows, "the question is charged in every layer that it ran ahead"


@pytest.mark.parametrize("rule", ["ask", "cacheblend"])
@pytest.mark.parametrize("hole", [False, True])
def test_a_question_that_is_only_probed_changes_nothing_before_it(rule, hole, tiny_layers):
    layers, prompt = tiny_layers("qwen3"), make_prompt(27, (12, 20, 9, 15))
    if hole:
        prompt.spans[2] = ("missing", prompt.spans[2][1])
    end = len(prompt.ids) - QUESTION
    whole, asked = (blend(layers, prompt, 0.15, rule, num_fused=last) for last in (None, end))
    assert asked.recomputed == whole.recomputed != []
    assert (asked.fused.length, asked.logits.numel()) == (end, 0)
    assert_same_rows(asked.fused, whole.fused, slice(end), atol=2e-5)
    if rule == "cacheblend":  # nothing is asked, so nothing is run behind the end
        assert asked.fused.keys(0)[:, end:].isnan().all()
        assert asked.result.rows_per_layer == whole.result.rows_per_layer
    else:
        torch.testing.assert_close(asked.result.attention, whole.result.attention)
        rows = whole.result.rows_per_layer
        # Layer 0 of the question runs again in the pass that computes it.
        assert asked.result.rows_per_layer == pytest.approx([rows[0] + QUESTION, *rows[1:]])


@pytest.mark.parametrize("rule", ["ask", "cacheblend"])
def test_rule_inputs_summed_over_ranks_select_the_same_tokens(rule, tiny_layers):
    layers, prompt = tiny_layers("llama"), make_prompt(28)
    alone, three = (blend(layers, prompt, rule=rule, sum_over_ranks=sums) for sums in (None, lambda each: 3 * each))
    assert three.recomputed == alone.recomputed
    if rule == "ask":
        torch.testing.assert_close(three.result.attention, alone.result.attention)
        assert float(three.result.attention.sum()) == pytest.approx(1)


def test_the_question_runs_ahead_only_where_there_is_something_to_choose(tiny_layers):
    layers, candidates = tiny_layers("llama"), sum(CHUNKS[1:])
    result = blend(layers, make_prompt(26), 0.15, "ask").result
    assert result.probe_s > 0
    assert result.fixed_cost == 0
    for ratio in (0.0, 1.0):
        result = blend(layers, make_prompt(26), ratio, "ask").result
        assert result.attention is None
        assert result.rows_per_layer == [candidates * ratio] * 6


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEPENDENT)
def test_chosen_tokens_without_deviation_are_blended_as_in_the_reference(family, stock_model, tiny_layers):
    prompt = make_prompt(17)
    outcome = blend(tiny_layers(family), prompt, 0.25, "random")
    assert len(outcome.recomputed) == 19  # ceil(0.25 * 74)
    assert outcome.result.rows_per_layer == [19.0] * 6
    judge = Reference(stock_model(family))
    assert_same_blend(outcome, judge.blend(prompt.reference_spans(), {}, recomputed=outcome.recomputed))


@pytest.mark.parametrize(("check_layer", "ratio"), [(2, 0.3), (5, 0.2), (0, 0.4)])
def test_other_check_layers_agree_with_the_independent_cacheblend(check_layer, ratio, stock_model, tiny_layers):
    prompt = make_prompt(9)
    outcome = blend(tiny_layers("qwen2"), prompt, ratio, check_layer=check_layer)
    # At layer 0 both see rounding noise instead of deviations, so only layers above it have an order to agree on.
    if check_layer == 0:
        assert len(outcome.recomputed) == 30  # ceil(0.4 * 74)
    else:
        expected = Reference(stock_model("qwen2")).blend(prompt.reference_spans(), {check_layer: ratio})
        assert_same_blend(outcome, expected)


def test_without_a_prefix_no_chunk_is_exact_and_the_reference_agrees(stock_model, tiny_layers):
    """The first chunk's own deviation is rounding noise then, so the selection must come from the others."""
    prompt = make_prompt(11, prefix=0)
    expected = Reference(stock_model("llama")).blend(prompt.reference_spans(), {1: 0.15})
    outcome = blend(tiny_layers("llama"), prompt, 0.15)
    assert_same_blend(outcome, expected)
    assert min(outcome.recomputed) >= CHUNKS[0]


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_the_exact_chunk_is_never_recomputed(family, ratio, tiny_layers):
    layers, prompt = tiny_layers(family), make_prompt(14)
    untouched, outcome = blend(layers, prompt, 0.0), blend(layers, prompt, ratio)
    exact = slice(0, PREFIX + CHUNKS[0])
    assert min(outcome.recomputed) >= exact.stop
    assert_same_rows(outcome.fused, untouched.fused, exact)


def test_rows_per_layer_include_the_measured_rows_up_to_the_check_layer(tiny_layers):
    layers = tiny_layers("llama")
    result = blend(layers, make_prompt(18), 0.15, check_layer=2).result
    candidates, kept = sum(CHUNKS[1:]), 12  # ceil(0.15 * 74)
    measured = candidates * layers.kv_share
    assert result.rows_per_layer == pytest.approx([candidates, candidates, kept + measured, kept, kept, kept])
    assert result.fixed_cost == pytest.approx(measured)
    assert 0 < layers.kv_share < 0.5


# --- causality ---


def perturb(placements: list[Placement], which: int) -> list[Placement]:
    """The placements, one of them with other KV."""
    kv = placements[which].kv
    changed = MemoryKV(kv.header, tuple(LayerKV(keys + 1.0, values - 1.0) for keys, values in kv.layers))
    return [each._replace(kv=changed) if each is placements[which] else each for each in placements]


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma", "qwen3_moe"])
def test_no_token_attends_to_a_later_one(family, ratio, tiny_layers):
    """Perturbing the last chunk's stored KV must leave every earlier row as it is, to the bit."""
    layers, prompt = tiny_layers(family), make_prompt(19, (20, 24, 30))
    third = PREFIX + 20 + 24

    def rows_of_second_chunk(outcome: Outcome) -> list[int]:
        return [row for row in outcome.recomputed if row < third]

    # `random` does not look at the KV, so it selects the same tokens.
    before = blend(layers, prompt, ratio, "random")
    after = blend(layers, prompt, ratio, "random", change=partial(perturb, which=-1))
    assert rows_of_second_chunk(before) == rows_of_second_chunk(after) != []
    assert_same_rows(before.fused, after.fused, slice(third))
    if ratio < 1:
        assert not torch.allclose(before.logits, after.logits, atol=1e-3)


# --- FusedKV ---


@pytest.mark.parametrize("layers_per_allocation", [0, 8])
def test_fused_kv_grows_when_written_beyond_its_capacity(layers_per_allocation, monkeypatch):
    monkeypatch.setitem(ALLOCATED_LAYERS, "cpu", layers_per_allocation)
    fused = FusedKV.allocate([(2, 4, 4)] * 2, 3, torch.empty(0))
    for layer in range(2):
        fused.write(layer, slice(0, 3), torch.full((2, 3, 4), 1.0), torch.full((2, 3, 4), 2.0))
    for row in range(3, 200):
        for layer in range(2):
            fused.write(layer, torch.tensor([row]), torch.full((2, 1, 4), float(row)), torch.full((2, 1, 4), -1.0))
    for layer in range(2):
        assert (fused.keys(layer)[:, :3] == 1).all()
        assert fused.keys(layer)[0, 3:200, 0].tolist() == list(range(3, 200))
        assert (fused.values(layer)[:, :3] == 2).all()
        assert (fused.values(layer)[:, 3:200] == -1).all()


def test_stored_keys_are_before_rope(family, stock_model, tiny_layers):
    """The same chunk behind prefixes of different lengths has the same layer-0 keys."""
    layers, ids = tiny_layers(family), random_ids(12, 3)
    near, far = store_chunk(layers, random_ids(2, 1), ids), store_chunk(layers, random_ids(90, 2), ids)
    torch.testing.assert_close(near.layer(0).keys, far.layer(0).keys, atol=1e-6, rtol=0)
    torch.testing.assert_close(near.layer(0).values, far.layer(0).values, atol=1e-6, rtol=0)
    assert (near.layer(1).values - far.layer(1).values).abs().max() > 1e-3
