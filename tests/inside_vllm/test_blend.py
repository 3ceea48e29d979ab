"""Blending inside vLLM against two judges: vLLM's own full prefill, and a CacheBlend written independently."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from continued import Continued, assert_continues
from harness import (
    PREFIX,
    ask,
    ask_all,
    assert_same_answer,
    engine,
    ingest,
    make_known,
    random_ids,
    recorded_selections,
    report,
    tokens,
)
from reference import Span
from refined import assert_full_prefill_follows, assert_refined_as_by_transformers, recorded_refinements
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from ragblend.engine.fusion import attention
from ragblend.engine.fusion.rules import DEFAULT_RULE, NO_PROBE_RULE
from ragblend.engine.vllm.worker_side import layers as vllm_layers

RATIOS = (0.0, 0.05, 0.15, 0.5)
RULES = ("cacheblend", "cacheblend_k", "random", "auto", "ask")
CHUNKS, QUESTION, STEPS = [random_ids(n, n) for n in (61, 40, 75)], random_ids(9, 4), 8
MISSING, LABEL = random_ids(33, 5), random_ids(7, 6)
TOLERANCE = 1e-3  # of log-probabilities, float32


@dataclass
class Prompt:
    """Ids, the same for the reference, and where the last chunk ends."""

    ids: list[int]
    parts: list[Span]
    question_start: int = 0


def plain_prompt() -> Prompt:
    """Prefix, three stored chunks, question."""
    return build([PREFIX, *(Part(chunk) for chunk in CHUNKS), QUESTION])


def patchy_prompt() -> Prompt:
    """The beginning of a chunk after the prefix, the last 80 % of another, chunks that are not stored, and text."""
    first, second, third = CHUNKS
    missing = Part(MISSING, stored=False), Part(MISSING[::-1], stored=False)
    return build([PREFIX, Part(third, 0, 50), missing[0], Part(first, 12), LABEL, Part(second), missing[1], QUESTION])


def labelled_prompt() -> Prompt:
    """Chunks whose first token differs behind a label, and two parts of one chunk."""
    first, second, third = CHUNKS
    parts = Part(third, 1, 40), Part(third, 42)
    return build([PREFIX, LABEL, Part(second, 1), LABEL[::-1], parts[0], LABEL, parts[1], LABEL, Part(first), QUESTION])


@dataclass
class Part:
    """Tokens [start, end) of a chunk; `end` None: its last."""

    chunk: list[int]
    start: int = 0
    end: int | None = None
    stored: bool = True


def build(pieces: list[list[int] | Part]) -> Prompt:
    prompt = Prompt([], [])
    for piece in pieces:
        start = len(prompt.ids)
        if isinstance(piece, list):
            prompt.ids += piece
            prompt.parts.append(Span(piece, stored=False))
            continue
        before, ids = piece.chunk[: piece.start], piece.chunk[piece.start : piece.end]
        prompt.ids += ids
        prompt.question_start = len(prompt.ids)
        exact = piece.stored and start == len(PREFIX) and not before
        prompt.parts.append(Span(ids, stored=piece.stored, exact=exact, behind=[*PREFIX, *before]))
    return prompt


def blend_params(ratio: float, rule: str = "cacheblend") -> dict[str, Any]:
    return {"mode": "blend", "rule": rule, "ratio": ratio}


GLOBAL = {"gemma2": (1, 3, 5), "gemma3": (2, 5)}  # their other layers see 50 tokens and 52
PLAIN = ("llama", "llama3_scaling", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3")


TOGETHER = ("llama together", *(f"{family} together" for family in GLOBAL))  # as on a GPU without kernels
BY_KERNELS = ("llama by kernels", "gemma2 by kernels")  # as on a GPU
EVERY_RATIO = ("llama", "gemma2 together")
"""Kinds that are asked with every rule at every ratio; the others, and all under Model Runner V2, whose kernels are
interpreted, with every rule once and with what else they may meet."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("llama", marks=[pytest.mark.smoke, pytest.mark.v2_runner]),
        *PLAIN[1:],
        *GLOBAL,
        *TOGETHER,
        *BY_KERNELS,
    ],
)
def kind(request):
    """A family's name, and how scattered rows attend: one by one in vLLM's backend, together, or by kernels."""
    return str(request.param)


@pytest.fixture(scope="module")
def family(kind):
    """The family's name."""
    return kind.split()[0]


@pytest.fixture(scope="module")
def store(kind, tmp_path_factory):
    """Where its engine stores chunks."""
    return tmp_path_factory.mktemp(f"kv-{kind.replace(' ', '-')}")


@pytest.fixture(scope="module")
def served(kind, family, store, checkpoint):
    """Its engine with the chunks stored."""
    with pytest.MonkeyPatch.context() as patch, engine_of(kind, checkpoint(family), store, patch) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        make_known(store, checkpoint(family), [MISSING, MISSING[::-1]])
        yield family, llm


def engine_of(kind: str, model: Path, store: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """`harness.engine`, in which all rows attend as `kind` says that can."""
    if "kernels" in kind:
        use_kernels(patch)
    if "together" in kind:
        patch.setattr(vllm_layers.VllmLayers, "attends_scattered_rows_together", True)
    return engine(model, store, **options)


def use_kernels(patch: pytest.MonkeyPatch) -> None:
    """Blend by Triton's kernels, interpreted, in larger tiles than a GPU's, which test_kernels_vllm.py has.

    The interpreter takes as long for a small tile as for a large one.
    """
    pytest.importorskip("triton")
    from ragblend.engine.fusion import kernels

    patch.setattr(attention, "KERNEL_DEVICES", {"cpu"})
    patch.setattr(kernels, "PLACED_TOKENS", 256)
    patch.setattr(kernels, "_attention_tile", lambda dim, num_pairs: (min(256, kernels._padded(num_pairs)), 256))


@contextmanager
def counted_together() -> Iterator[list[int]]:
    """How many rows each call of a layer had that attended together."""
    counts: list[int] = []
    attend = vllm_layers.VllmLayers._run

    def counting(layers: Any, layer: int, hidden: Any, piece: Any, *args: Any) -> Any:
        counts.append(len(hidden) if piece.parts else 0)
        return attend(layers, layer, hidden, piece, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_layers.VllmLayers, "_run", counting)
        yield counts


def assert_like_reference(
    output: Any, prompt: Prompt, reference: Continued, selected: list[int], ratio: float, rule: str, family: str
) -> None:
    """Same selection, same choice at every step, log-probabilities within TOLERANCE."""
    expected = reference.blended(prompt.parts, ratio, rule, selected, prompt.question_start, GLOBAL.get(family, ()))
    if rule != "random" and ratio > 0:
        assert selected == expected.selected
    assert_continues(output, reference, TOLERANCE)


def test_ratio_one_gives_vllms_own_tokens(served):
    _, llm = served
    for prompt, num_stored in ((plain_prompt(), 3), (patchy_prompt(), 3), (labelled_prompt(), 3)):
        plain = ask(llm, prompt.ids)
        blended = ask(llm, prompt.ids, blend_params(1.0))
        assert report(blended)["num_chunk_hits"] == num_stored
        assert_same_answer(blended, plain, TOLERANCE)


def test_probing_first_equals_full_prefill_if_all_stale_tokens_are_recomputed(served):
    """With ratio 1, no token is left to be corrected."""
    _, llm = served
    prompt = plain_prompt()
    blended = ask(llm, prompt.ids, blend_params(0.97, "ask"))
    (exact, *others) = report(blended)["chunks"]
    assert exact["exact"]
    assert [each["num_recomputed_tokens"] for each in others] == [each["num_tokens"] for each in others]
    assert tokens(blended) == tokens(ask(llm, prompt.ids))


def test_every_ratio_and_rule_agrees_with_the_independent_cacheblend(kind, served, stock):
    family, llm = served
    reference = Continued(stock(family))
    plain, patchy, labelled = plain_prompt(), patchy_prompt(), labelled_prompt()
    asked = [(plain, rule, 0.15) for rule in RULES]
    asked += [(plain, "cacheblend", 0.0), (patchy, "cacheblend", 0.5), (patchy, "auto", 0.15), (labelled, "ask", 0.15)]
    if kind in EVERY_RATIO and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
        asked += [(plain, rule, ratio) for rule in RULES for ratio in RATIOS if ratio != 0.15]
        asked += [(patchy, "cacheblend", ratio) for ratio in RATIOS] + [(patchy, rule, 0.15) for rule in RULES]
        asked.append((labelled, "cacheblend", 0.0))
    for prompt, rule, ratio in asked:
        with recorded_selections() as selections:
            output = ask(llm, prompt.ids, blend_params(ratio, rule), STEPS)
        stored = [(len(part.ids), part.exact) for part in prompt.parts if part.stored]
        if prompt is labelled:
            stored[1:3] = [(stored[1][0] + stored[2][0], False)]  # two parts of one chunk
        found = [chunk for chunk in report(output)["chunks"] if chunk["hit"]]
        assert [(each["num_tokens"], each["exact"]) for each in found] == stored
        rule_run = report(output)["rule"]
        if rule != "auto":
            assert rule_run == rule
        else:  # in the patchy prompt, more is to be run ahead than that is worth
            assert rule_run == (DEFAULT_RULE if prompt is plain else NO_PROBE_RULE)
        assert_like_reference(output, prompt, reference, selections[-1], ratio, rule_run, family)


@pytest.mark.parametrize(("rule", "alone"), [("ask", 1), ("cacheblend", 0), ("cacheblend_k", 0)])
def test_scattered_rows_attend_together_where_that_reads_less(kind, served, rule, alone):
    """All layers but the first, whose keys are no longer resident once the query probe has run through later layers.

    Kernels have all layers in the blocks.
    """
    _, llm = served
    prompt = patchy_prompt()
    with counted_together() as counts:
        ask(llm, prompt.ids, blend_params(0.15, rule), 1)
    assert counts
    expected = 0 if "kernels" in kind else alone if "together" in kind else len(counts)
    assert [count > 0 for count in counts].count(False) == expected


def test_stale_chunks_do_change_the_answer(served):
    """Without this, agreement would also hold for a model in which reuse costs nothing."""
    family, llm = served
    prompt = plain_prompt()
    stale, full = ask(llm, prompt.ids, blend_params(0.0)), ask(llm, prompt.ids)
    if family == "gemma2":  # with tied embeddings a tiny model says the same token over and over
        mine, theirs = (output.outputs[0].logprobs[0] for output in (stale, full))
        assert max(abs(mine[each].logprob - theirs[each].logprob) for each in mine.keys() & theirs.keys()) > 0.01
    else:
        assert tokens(stale) != tokens(full)


refines = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"), reason="this vLLM does not pass its blocks to connectors"
)


@refines
def test_an_answer_refined_to_ratio_one_goes_on_as_after_full_prefill(served):
    _, llm = served
    for prompt in (plain_prompt(), patchy_prompt()):
        answer = ask(llm, prompt.ids, blend_params(0.1, "ask") | {"refine_ratio": 1.0})
        assert_full_prefill_follows(llm, prompt.ids, answer, TOLERANCE)


@refines
@pytest.mark.parametrize("rule", ["ask", "cacheblend", "random"])
def test_a_refinement_computes_the_kv_of_the_transformers_engine(served, stock, rule):
    family, llm = served
    with recorded_refinements() as refinements:
        answer = ask(llm, patchy_prompt().ids, blend_params(0.1, rule) | {"refine_ratio": 0.3})
    (recorded,) = refinements
    assert_refined_as_by_transformers(stock(family), recorded)
    assert report(answer)["num_refined_tokens"] == recorded.result.num_tokens > report(answer)["num_recomputed_tokens"]


def test_a_batch_equals_its_requests_one_by_one(served):
    family, llm = served
    plain, patchy = plain_prompt(), patchy_prompt()
    # Those without parameters begin otherwise, so that no other is left to what they leave in vLLM's prefix cache.
    prompts = [
        (plain.ids, blend_params(0.15)),
        (plain.ids[1:], None),
        (patchy.ids, blend_params(0.3, "cacheblend_k")),
        (plain.ids, {"mode": "reuse"}),
        (patchy.ids[1:], None),
        (plain.ids, {"mode": "full"}),
        (plain.ids, blend_params(0.15, "ask")),  # each is corrected by its own recomputed tokens
        (patchy.ids, blend_params(0.3, "ask")),
    ]
    alone = [tokens(ask(llm, ids, params)) for ids, params in prompts]
    assert [tokens(output) for output in ask_all(llm, prompts)] == alone
    assert tokens(ask(llm, plain.ids)) == alone[5]
    assert alone[5] != alone[3] or family == "gemma2"
