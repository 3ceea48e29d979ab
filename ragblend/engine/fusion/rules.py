"""Rules: which stale tokens are recomputed, and how the kept ones are corrected. A RULE IS ADDED HERE, in RULES.

A rule turns the `RuleInputs` of N candidate tokens into scores [N]; `fuse` recomputes those with the highest scores.
Candidates are the stale tokens, whose stored KV was computed without the tokens that precede them in the prompt.
Depends on tensors only, not on models, plans or stores.

The inputs of a rule have three sources. The plan has the positions. The check layers (`check_layers`), where `fuse`
recomputes K and V of the candidates, measure deviations. The query probe, which runs the question over stale KV,
measures attention.

Drift correction (`fit_drift_correction`) estimates the KV change of kept tokens from the measured change of recomputed
ones, for rules with a `drift_gain`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.store.format.kv import LayerKV
from ragblend.errors import UsageError
from ragblend.options import SHARE, Deviation

DEFAULT_RATIO = 0.15  # CacheBlend, section 4.2: the share that its authors found to restore most answers

# Layer 0's keys and values depend on the token alone, so stored and fresh agree there;
# layer 1 is the first that can show a deviation (CacheBlend, section 4.3).
CHECK_LAYER = 1

# Constants of `ask`, chosen on the selection split of real questions (`ragblend bench quality`): its default ratio,
# and the factors on the estimated change of kept tokens. At 5 % it is closer to full prefill than `cacheblend` is at
# 15 %, so the query probe may cost as much as recomputing the difference, PROBE_MARGIN, in addition to the ratio.
ASK_RATIO, DRIFT_GAIN, DRIFT_GAIN_IN_CONTEXT, PROBE_MARGIN = 0.05, 0.9, 0.8, 0.1

# Least layers of a deep model, such as the language model on which `ask` and its constants were chosen. Language models
# in use have 16 and more; the embedded model has 5.
DEEP_MODEL_LAYERS = 12
# First and last probe layer of a deep model, as shares of its depth. Attention in the first and
# the last layers is less specific to the question.
PROBE_DEPTHS = (1 / 3, 0.8)


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """Inputs of a rule: values of N candidate tokens, in prompt order. All tensors [N]."""

    positions: Tensor  # int64, position in the prompt
    deviation: Tensor | None = None  # float32, squared L2 of fresh minus stored KV, over heads and dimensions
    attention: Tensor | None = None  # float32, share of the question's attention on the token
    is_edge: Tensor | None = None  # bool, True for the first and last token of a placed part of a chunk
    seed: int = 0


def deviation_scores(inputs: RuleInputs) -> Tensor:
    """Return a score per candidate: its squared deviation at the check layer (CacheBlend, section 4.3)."""
    assert inputs.deviation is not None
    return inputs.deviation


def ask_scores(inputs: RuleInputs) -> Tensor:
    """Return a score per candidate: its share of the question's attention (ProphetKV, arXiv 2602.02579).

    The share is the mean over probe layers, heads and the question's tokens. The first and the last token of each part
    of a chunk (`is_edge`) get 1 more, so that they are recomputed first. Recomputing the first token helps because the
    first token of a text that was computed alone attracts attention (EPIC, arXiv 2410.15332). Drift correction needs a
    recomputed token in each part.
    """
    assert inputs.attention is not None
    assert inputs.is_edge is not None
    return inputs.attention + inputs.is_edge  # attention is a share, so at most 1


def random_scores(inputs: RuleInputs) -> Tensor:
    """Return a random score per candidate, as a control for the other rules. Equal seeds give equal scores."""
    generator = torch.Generator().manual_seed(inputs.seed)
    return torch.rand(len(inputs.positions), generator=generator).to(inputs.positions.device)


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A rule by its name: the function that scores candidate tokens, the inputs that it needs, and its defaults."""

    name: str
    score: Callable[[RuleInputs], Tensor]  # [N] float32; the highest are recomputed
    # KV that is measured at the check layers; all candidates then run through the layers before the first of them.
    # None: the rule measures no deviation.
    deviation: Deviation | None = None
    is_gradual: bool = False  # every layer from the first check layer on is one, and keeps fewer tokens than the last
    # Runs the query probe before it selects tokens. Most layers must then be loaded before recompute starts.
    probes_before_selection: bool = False
    ratio: float = DEFAULT_RATIO  # share of the chunk tokens to recompute, if the request has no ratio
    drift_gain: float = 0.0  # factor on the change of kept tokens that drift correction estimates; 0: no correction
    drift_gain_in_context: float = 0.0  # the same for tokens stored after other text than the prefix

    def probe_layers(self, num_layers: int, global_layers: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the probe layers, at which the rule reads the question's attention, ascending; () without a probe.

        They are the middle layers of a deep model, and all layers of a shallow one. `global_layers`: the layers without
        an attention window, in a model that has layers with and without one; else (). Of such a model, only global
        layers are probe layers: those among the middle layers, or all of them if no middle layer is global.

        >>> [RULES[name].probe_layers(3) for name in ("ask", "cacheblend")]
        [(0, 1, 2), ()]
        >>> RULES["ask"].probe_layers(30) == tuple(range(10, 24))
        True
        >>> [RULES["ask"].probe_layers(26, layers) for layers in ((5, 11, 17, 23), (5,))]
        [(11, 17), (5,)]
        """
        if not self.probes_before_selection:
            return ()
        first, end = (
            int(share * num_layers) for share in (PROBE_DEPTHS if num_layers >= DEEP_MODEL_LAYERS else (0, 1))
        )
        within = tuple(layer for layer in global_layers if first <= layer < end)
        return within or tuple(global_layers) or tuple(range(first, end))


RULES: dict[str, SelectionRule] = {
    rule.name: rule
    for rule in (
        # V alone is what the paper's code measures, K alone what LMCache's does.
        SelectionRule("cacheblend", deviation_scores, deviation="v"),
        SelectionRule("cacheblend_k", deviation_scores, deviation="k"),
        SelectionRule("cacheblend_gradual", deviation_scores, deviation="v", is_gradual=True),
        SelectionRule(
            "ask", ask_scores, probes_before_selection=True, ratio=ASK_RATIO, drift_gain=DRIFT_GAIN,
            drift_gain_in_context=DRIFT_GAIN_IN_CONTEXT,
        ),
        SelectionRule("random", random_scores),
    )
}  # fmt: skip

# On a real language model of 30 layers `ask` is the closest rule (`ragblend bench quality`,
# data/results/quality-musique.json). On the embedded one of 5 layers, at DEFAULT_RATIO, it answers more questions than
# `cacheblend` (data/results/quality-demo-reported.json).
DEFAULT_RULE = "ask"
# Rule for prompts whose query probe costs too much (`is_probe_worthwhile`): the closest rule without a probe, on
# questions that are not reported (`--split selection`).
NO_PROBE_RULE = "cacheblend"


def find_rule(name: str, num_layers: int = DEEP_MODEL_LAYERS) -> SelectionRule:
    """Return the rule called `name`. "auto" is the default rule; in a model of few layers it gets a higher ratio.

    Raises UsageError for an unknown name.

    >>> [(rule.name, rule.ratio) for rule in (find_rule("auto", 32), find_rule("auto", 5))]
    [('ask', 0.05), ('ask', 0.15)]
    """
    if name == "auto":
        return (
            RULES[DEFAULT_RULE]
            if num_layers >= DEEP_MODEL_LAYERS
            else replace(RULES[DEFAULT_RULE], ratio=DEFAULT_RATIO)
        )
    if name not in RULES:
        raise UsageError(f"rule {name!r} is unknown; choose auto or one of {', '.join(RULES)}")
    return RULES[name]


def default_check_layer(global_layers: Sequence[int]) -> int:
    """Return the check layer: the first layer after layer 0 that has no attention window; 1 if there is none.

    `global_layers`: the layers without a window. In the layers before the check layer, tokens attend only to their
    window, so their keys and values deviate little.

    >>> default_check_layer((5, 11, 17)), default_check_layer((0, 1, 2)), default_check_layer(())
    (5, 1, 1)
    """
    return next((layer for layer in global_layers if layer >= CHECK_LAYER), CHECK_LAYER)


def validate_ratio(ratio: float) -> float:
    """Return `ratio`. Raises UsageError unless 0 <= ratio <= 1."""
    return SHARE.validate("recompute_ratio", ratio)


def num_to_recompute(ratio: float, num_chunk_tokens: int, num_candidates: int) -> int:
    """Return the number of tokens to recompute: `ratio` of the chunk tokens, at most all candidates.

    >>> num_to_recompute(0.15, num_chunk_tokens=100, num_candidates=80)
    15
    """
    # round() first: 0.15 * 100 is 15.000000000000002 in floating point, which ceil would turn into 16.
    return min(num_candidates, math.ceil(round(ratio * num_chunk_tokens, 6)))


def is_probe_worthwhile(
    rule: SelectionRule,
    ratio: float,
    num_fresh: int,
    num_candidates: int,
    num_chunk_tokens: int,
    num_layers: int,
    global_layers: Sequence[int] = (),
) -> bool:
    """Return True if the rule's query probe of `num_fresh` tokens is cheap enough, or if there is no probe to run.

    The cost of a probe is the number of its tokens times the number of layers that they run through. Layer 0 does not
    count, because `fuse` uses its output again. The limit is the cost of recomputing the share `ratio` + PROBE_MARGIN
    of the chunk tokens: up to this cost, the probe brings the answer closer to full prefill than further recomputed
    tokens would. A long question over short chunks exceeds the limit.

    >>> [is_probe_worthwhile(RULES["ask"], 0.05, fresh, 200, 200, 31) for fresh in (40, 41)]
    [True, False]
    """
    layers = rule.probe_layers(num_layers, global_layers)
    if not layers or not num_candidates:
        return True  # there is no probe to run
    return num_fresh * layers[-1] <= (ratio + PROBE_MARGIN) * num_chunk_tokens * num_layers


# --- drift correction
#
# The change of a token's KV (fresh minus stored, keys before rotation) has a part that all tokens share, because text
# precedes them, and a part that similar tokens share, more so within one chunk. It is modelled as a Gaussian process
# over the tokens, whose kernel is the sum of both parts (Rasmussen and Williams 2006, chapter 2), with some recomputed
# tokens as landmarks (8.3.1, subset of regressors). One regression is fitted per prompt. Its mean is linear in the
# measured change, so each layer costs two small products.

# Chosen on the selection split of real questions, as DRIFT_GAIN is.
LANDMARKS = 48  # recomputed tokens in the regression; with all of them it is slower and no closer
SHARED_KERNEL_WEIGHT = 0.3  # kernel of the part that all tokens share; an equal token of the same chunk adds 1
OTHER_CHUNK = 0.5  # factor on the kernel of tokens in different chunks
# Squared distance per dimension of standardised values at which the kernel has fallen by e; the mean distance is 2.
KERNEL_LENGTH_SCALE = 4.0
NOISE = 1.0  # variance of the part that no other token shares
MAX_DRIFT_RATIO = 3.0  # cap on a change, in median changes: a chunk's first tokens change much more than others
# Depth of the layer whose stored values measure the similarity of tokens, as a share of all layers.
SIMILARITY_DEPTH = 0.4

_JITTER = 1e-6


class DriftCorrection(NamedTuple):
    """Regression that estimates the KV change of all T tokens from the measured change of N recomputed ones.

    M of the recomputed tokens are landmarks. The drift, which `estimate_drift` returns, has one row per landmark. The
    estimated change of token t is the sum of the M rows of the drift, weighted by `shares[t]`.
    """

    rows: Tensor  # positions [N] of the recomputed tokens, ascending
    weights: Tensor  # [M, N] float32
    shares: Tensor  # [T, M] float32, factors on the M rows of `drift`; 0 for tokens that are not corrected
    # For kernels, [T] int32: each token's index among the rows that run; -1: it is corrected; -2: it stays as it is.
    sources: Tensor | None = None

    def estimate_drift(self, change: LayerKV) -> LayerKV:
        """Return the drift [H, M, D] float32 of pre-RoPE keys and values, one row for each of the M landmarks.

        `change` [H, N, D] float32: fresh minus stored KV of the recomputed tokens. To correct the stored KV of all T
        tokens, add `shares` @ drift [H, T, D] to it.
        """
        # Heads of keys and values together, in half as many operations, if they have one shape.
        is_one = change.keys.shape == change.values.shape
        drifts = []
        for each in (torch.cat(change),) if is_one else change:
            length = torch.linalg.vector_norm(each, dim=2, keepdim=True)
            most = MAX_DRIFT_RATIO * length.median(1, keepdim=True).values  # of each head
            limited = each * (most / length.clamp_min(torch.finfo(each.dtype).tiny)).clamp_max(1.0)
            drifts.append(self.weights @ limited)
        return LayerKV(*drifts[0].chunk(2)) if is_one else LayerKV(*drifts)


def similarity_layer(num_layers: int, deepest: int) -> int:
    """Return the layer whose stored values measure how similar tokens are, for drift correction.

    It is the layer at SIMILARITY_DEPTH, but at most `deepest`, the last layer of the query probe, because later layers
    are not loaded yet. It is at least layer 1, because the values of layer 0 depend on the token alone.

    >>> [similarity_layer(count, count - 1) for count in (2, 5, 30)], similarity_layer(30, 3), similarity_layer(30, 0)
    ([1, 2, 12], 3, 1)
    """
    return max(1, min(int(SIMILARITY_DEPTH * num_layers), deepest))


def fit_drift_correction(
    values: Tensor,
    rows: Tensor,
    chunks: Tensor,
    recomputed: Tensor,
    recomputed_rows: Tensor,
    shares: Tensor,
    mean_over_ranks: Callable[[Tensor], Tensor],
) -> DriftCorrection:
    """Return the drift correction for N candidates in a prompt of T tokens. `rows` [N]: their positions, ascending.

    `values` [H, N, D]: the candidates' stored values at `similarity_layer`; similar values mean similar candidates.
    `chunks` [N]: index of each candidate's chunk. `recomputed`: indices of the recomputed candidates, at least one,
    ascending; `recomputed_rows`: their positions. `shares` [T]: factor on each position's estimated change, 0 for
    positions that are not corrected. `mean_over_ranks` averages a vector over the ranks, if each rank has some of the
    heads.
    """
    states = values.float().transpose(0, 1).flatten(1)
    states = (states - states.mean(0)) / states.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    count = min(LANDMARKS, len(recomputed))
    landmarks = recomputed[torch.arange(count, device=rows.device) * len(recomputed) // count]  # spread over the prompt
    distances = (torch.cdist(states, states[landmarks]).square() / states.shape[1]).flatten()
    distances = mean_over_ranks(distances).reshape(len(rows), len(landmarks))
    same = chunks[:, None] == chunks[landmarks]
    kernel = SHARED_KERNEL_WEIGHT + torch.exp(-distances / KERNEL_LENGTH_SCALE) * torch.where(
        same, 1.0, OTHER_CHUNK
    )  # [N, M]
    recomputed_kernel, landmark_kernel = kernel[recomputed].double(), kernel[landmarks].double()
    landmark_kernel.diagonal().add_(_JITTER)
    weights = torch.linalg.solve(recomputed_kernel.T @ recomputed_kernel + NOISE * landmark_kernel, recomputed_kernel.T)
    drift_weights = kernel.new_zeros(len(shares), len(landmarks))
    drift_weights[rows] = kernel * shares[rows, None]
    return DriftCorrection(recomputed_rows, weights.float(), drift_weights)
