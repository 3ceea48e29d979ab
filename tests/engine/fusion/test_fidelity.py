"""The report's figures against transformers' own eager attention and full prefill, over a model ragblend never saw."""

from __future__ import annotations

import pytest
import torch
from reference import Reference
from test_fuse import GLOBAL, INDEPENDENT, PREFIX, Prompt, attended, blend, full_prefill, make_prompt
from tiny_prompts import CHUNKS, PROMPT
from torch import Tensor

from ragblend.engine.fusion.check_layers import measure_deviation, schedule_check_layers
from ragblend.engine.fusion.plan import (
    FusePlan,
    FuseResult,
    Placement,
    first_token_kl,
    question_attention_shares,
    record_fusion,
)
from ragblend.engine.fusion.rules import RULES
from ragblend.engine.report import BlendReport
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV

CHECK_LAYER = 1


def placements_of(prompt: Prompt) -> tuple[Placement, ...]:
    """Placements of the chunks; their KV does not matter for counting."""

    def stored(ids: list[int]) -> MemoryKV:
        empty = LayerKV(torch.empty(1, len(ids), 1), torch.empty(1, len(ids), 1))
        return MemoryKV(KVHeader("key", "model", (), tuple(ids), 6, "float32"), (empty,) * 6)

    return tuple(Placement(stored(ids), start, start == PREFIX) for start, ids in prompt.starts("chunk"))


def plan_of(prompt: Prompt, rule: str) -> FusePlan:
    checks = schedule_check_layers(RULES[rule], 0.15, CHECK_LAYER, 6)
    placements = placements_of(prompt)
    return FusePlan(torch.tensor(prompt.ids), placements, RULES[rule], 0.15, checks, len(prompt.prefix))


@pytest.mark.parametrize("ratio", [0.15, 0.4])
@pytest.mark.parametrize("family", INDEPENDENT)
def test_attention_shares_are_those_of_eager_attention(family, ratio, stock_model, tiny_layers):
    prompt = make_prompt(31)
    outcome = blend(tiny_layers(family), prompt, ratio, "ask")
    report = BlendReport("blend", "ask", ratio)
    record_fusion(report, (), plan_of(prompt, "ask"), outcome.result, 0)

    mass = attended(stock_model(family), prompt, GLOBAL.get(family, range(6)))
    mass /= mass.sum()  # sinks take some of it
    expected = {"exact": 0.0, "recomputed": 0.0, "stale": 0.0}
    stored = [position for start, ids in prompt.starts("chunk")[1:] for position in range(start, start + len(ids))]
    for position, share in enumerate(mass.tolist()):
        stale = "recomputed" if position in outcome.recomputed else "stale"
        expected[stale if position in stored else "exact"] += share
    assert min(expected.values()) > 0.01
    for name, share in expected.items():
        assert getattr(report, f"attention_{name}") == pytest.approx(share, abs=1e-5)
    assert report.attention_exact + report.attention_recomputed + report.attention_stale == pytest.approx(1, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["cacheblend", "cacheblend_k"])
@pytest.mark.parametrize("family", INDEPENDENT)
def test_mean_deviation_compares_stored_kv_with_full_prefill_at_the_check_layer(family, rule, stock_model, tiny_layers):
    prompt, model = make_prompt(32), stock_model(family)
    outcome = blend(tiny_layers(family), prompt, 0.15, rule)
    report = BlendReport("blend", rule, 0.15)
    record_fusion(report, (), plan_of(prompt, rule), outcome.result, 0)

    # Layer 0's output is exact, so the check computes the KV of full prefill at layer 1.
    _, full = full_prefill(model, prompt.ids)
    stale = Reference(model).blend(prompt.reference_spans(), {1: 0.0})
    expected = []
    for position in outcome.recomputed:
        computed = full.layers[CHECK_LAYER]
        shares = [
            (fresh[0, :, position] - stored[CHECK_LAYER][position]).norm() / fresh[0, :, position].norm()
            for fresh, stored in ((computed.keys, stale.keys), (computed.values, stale.values))
        ]
        expected.append(float(sum(shares)) / 2)
    assert report.mean_deviation == pytest.approx(sum(expected) / len(expected), rel=1e-3)
    assert report.mean_deviation > 0.01


def test_every_rank_reports_the_same_deviation():
    """Two ranks with one KV head each have, after summing, the deviation of one rank with both."""
    generator = torch.Generator().manual_seed(3)
    fresh, stored = (LayerKV(*torch.randn(2, 2, 9, 16, generator=generator)) for _ in range(2))
    whole = measure_deviation(fresh, stored)
    halves = [[LayerKV(*(tensor[[rank]] for tensor in each)) for each in (fresh, stored)] for rank in (0, 1)]
    other: list[Tensor] = []  # what the other rank adds
    measure_deviation(*halves[1], lambda squares: other.append(squares) or squares)
    both = measure_deviation(*halves[0], lambda squares: squares + other[0])
    for deviation in ("v", "k", "kv"):
        torch.testing.assert_close(both.squared(deviation), whole.squared(deviation))
        torch.testing.assert_close(both.relative(deviation), whole.relative(deviation))


def test_a_chunk_that_ends_the_prompt_leaves_its_last_token_exact():
    prompt = Prompt([("chunk", [5, 6, 7]), ("chunk", [8, 9])])
    plan = plan_of(prompt, "ask")
    fused = FuseResult(torch.empty(0), torch.tensor([1]), attention=torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25]))
    assert question_attention_shares(plan, fused) == pytest.approx((0.25, 0.2, 0.55))


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"attention_stale": 0.4}, "3/4 chunks from the store, 60 of 90 prompt tokens reused, 5 recomputed"),
        ({"mode": "reuse"}, "3/4 chunks from the store, 60 of 90 prompt tokens reused"),
        ({"num_chunks": 0}, "no stored chunk found in the prompt, 60 of 90 prompt tokens reused, 5 recomputed"),
        ({"mode": "full", "num_reused_tokens": 0}, "full prefill, 0 of 90 prompt tokens reused"),
        ({"mode": "prefix", "refused_reason": "loading takes 3 s"},
         "stored KV not used: loading takes 3 s, 60 of 90 prompt tokens reused"),
    ],
    ids=["blend", "reuse", "no chunk", "full prefill", "refused"],
)  # fmt: skip
def test_a_reports_line_counts_reused_chunks_and_gives_the_fallback_reason(facts, line):
    counts = {"num_chunks": 4, "num_chunk_hits": 3, "num_reused_tokens": 60, "num_recomputed_tokens": 5}
    report = BlendReport(**{"mode": "blend", "prompt_tokens": 90, "ttft_s": 0.033, **counts, **facts})
    assert report.summary() == f"{line}, first token after 33 ms"


def test_the_engines_report_has_the_shares_of_the_rule_that_ran(tiny_engine):
    engine = tiny_engine("llama")
    list(engine.precompute_all(CHUNKS))
    asked = engine.generate(PROMPT, rule="ask", recompute_ratio=0.2, max_tokens=1).report
    assert asked.attention_exact + asked.attention_recomputed + asked.attention_stale == pytest.approx(1)
    assert asked.mean_deviation is None
    measured = engine.generate(PROMPT, rule="cacheblend", recompute_ratio=0.2, max_tokens=1).report
    assert measured.attention_exact is None
    assert measured.mean_deviation > 0
    for mode in ("full", "prefix", "reuse"):
        assert engine.generate(PROMPT, mode=mode, max_tokens=1).report.mean_deviation is None


def test_first_token_kl_is_torchs_own():
    generator = torch.Generator().manual_seed(1)
    full, other = torch.randn(2, 300, generator=generator)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=full.double()), torch.distributions.Categorical(logits=other.double())
    )
    assert first_token_kl(full, other) == pytest.approx(float(expected), rel=1e-9)
    assert 0 <= first_token_kl(full, full + 3) < 1e-12
