"""What is to be fused and what came of it: stored KV and its places, the prompt's KV, a plan, and what was found.

Tensors, positions and stored KV. Knows nothing about how fusing is done (`fuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import on_host
from ragblend.engine.fusion.rules import NO_RECOMPUTE, RULES, CheckLayer, SelectionRule, num_to_recompute
from ragblend.engine.store.kv import ChunkKV, LayerKV


class Placement(NamedTuple):
    """Stored KV and the prompt position it is placed at. `exact`: it was computed behind precisely these tokens.

    What is exact is not recomputed. KV in eight bits, which rounding moved a little, is at ratio 1, so that ratio 1 is
    full prefill from any store.
    """

    kv: ChunkKV
    start: int
    exact: bool
    has_context: bool = False  # computed behind other text than the prefix, so it misses less of what stands here

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.kv.header.num_tokens


@dataclass(eq=False)
class FusedKV:
    """The KV of one prompt: per layer, keys (rotated) and values [H, capacity, D], of which `length` rows are valid.

    Grows when written beyond its capacity, so decoding appends to it. Owned by one request.
    """

    _layers: list[LayerKV]
    length: int

    @classmethod
    def allocate(cls, shapes: Sequence[tuple[int, int, int]], capacity: int, like: Tensor) -> FusedKV:
        """Room for `capacity` tokens; `shapes[l]` is (H, D of keys, D of values), dtype and device as `like`."""
        return cls(
            [LayerKV(like.new_empty(h, capacity, dk), like.new_empty(h, capacity, dv)) for h, dk, dv in shapes], 0
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    def keys(self, layer: int) -> Tensor:
        """Rotated keys of one layer, [H, capacity, D]."""
        return self._layers[layer].keys

    def values(self, layer: int) -> Tensor:
        """Values of one layer, [H, capacity, D]."""
        return self._layers[layer].values

    def write(self, layer: int, rows: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [H, R, D] at `rows` (positions [R], or a slice)."""
        last = rows.stop if isinstance(rows, slice) else on_host(rows)[-1] + 1
        if last > self._layers[layer].keys.shape[1]:
            self._grow(last)
        self._layers[layer].keys[:, rows] = keys
        self._layers[layer].values[:, rows] = values

    def _grow(self, needed: int) -> None:
        # A quarter more at a time keeps the copying linear in the number of decoded tokens.
        for index, (keys, values) in enumerate(self._layers):
            more = max(needed, keys.shape[1] + max(64, keys.shape[1] // 4)) - keys.shape[1]
            self._layers[index] = LayerKV(
                torch.cat((keys, keys.new_empty(keys.shape[0], more, keys.shape[2])), dim=1),
                torch.cat((values, values.new_empty(values.shape[0], more, values.shape[2])), dim=1),
            )

    def copy_front(self, other: FusedKV, count: int) -> None:
        """Take the first `count` rows of every layer from `other`."""
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.keys[:, :count] = theirs.keys[:, :count]
            mine.values[:, :count] = theirs.values[:, :count]
        self.length = max(self.length, count)


@dataclass(frozen=True, slots=True)
class FusePlan:
    """One prompt to fuse: its ids, the stored KV with its places, and how many rows at the front are there already.

    Of several `checks`, layers ascend and ratios do not grow: each keeps a part of what the one before it kept, as in
    CacheBlend's gradual filtering (section 4.3). Without rule and checks, all stored KV is kept.
    `num_resident` rows of the FusedKV are valid and exact before fusing starts (a prefix, earlier turns).
    """

    token_ids: Tensor  # [T] int64, on the model's device
    placements: tuple[Placement, ...]  # ascending, not overlapping, all at or after num_resident
    rule: SelectionRule = RULES["random"]
    checks: tuple[CheckLayer, ...] = NO_RECOMPUTE
    num_resident: int = 0
    seed: int = 0
    num_fused: int | None = None  # tokens from here on are asked only: others compute them, and the logits. None: all
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # adds up evidence where each rank has some of the heads
    probe_layers: tuple[int, ...] = ()  # where the rule reads the question's attention, ascending; () reads none
    question_start: int | None = None  # first token of the question; None: what follows the last placed chunk
    # What follows from these.
    end: int = field(init=False)  # position after the last token that is fused
    wants_logits: bool = field(init=False)  # whether the last token is computed for its logits, or is like any other
    num_chunk_tokens: int = field(init=False)  # of all placed chunks
    num_queries: int = field(init=False)  # tokens of the question, the last token at least
    corrects_drift: bool = field(init=False)  # whether tokens that are kept move with those that are recomputed

    def __post_init__(self) -> None:
        count, last = sum(placement.kv.header.num_tokens for placement in self.placements), self.checks[-1]
        start = self.question_start
        if start is None:
            # Where the question stands before its chunks, what follows the last of them asks in its place, and does so
            # no worse than the question would, run once more behind them (data/results/asking-musique.json).
            start = max((placement.end for placement in self.placements), default=self.num_resident)
        recomputes_some = last.ratio < 1 and num_to_recompute(last.ratio, count, count) > 0
        for name, value in (
            ("end", len(self.token_ids) if self.num_fused is None else self.num_fused),
            ("wants_logits", self.num_fused is None),
            ("num_chunk_tokens", count),
            ("num_queries", max(1, len(self.token_ids) - start)),
            ("corrects_drift", self.rule.drift_gain > 0 and recomputes_some),
        ):
            object.__setattr__(self, name, value)


@dataclass(slots=True)
class FuseResult:
    """What fusing found: logits of the last token, and which chunk tokens were recomputed."""

    logits: Tensor  # [vocabulary] float32; empty where the plan wants none
    recomputed: Tensor  # positions [R] of the chunk tokens recomputed through the last layer
    rows_per_layer: list[float] = field(default_factory=list)  # placed chunk tokens run, probes by their share
    fixed_cost: float = 0.0  # the part of them that a deeper model pays once too: what the first check had to see
    probe_s: float = 0.0  # seconds spent until the question's attention was known, waiting for its layers included
    attention: Tensor | None = None  # [T] float32, what the probe found
    deviation: Tensor | None = None  # [T] float32, see relative_deviation; NaN where the first check measured nothing
    select_s: float = 0.0  # seconds spent at the checks: candidates measured, scored and chosen

    def add_fixed_cost(self, num_rows: float, plan: FusePlan) -> None:
        """Count rows that something else ran at layer 0, and that a deeper model runs no more of."""
        self.rows_per_layer[0] += num_rows
        if plan.checks[0].layer == 0:
            self.fixed_cost += num_rows
