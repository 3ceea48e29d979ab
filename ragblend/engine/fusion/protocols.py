"""Protocols that fusion requires of a model and of a source of stored KV.

Implemented by `transformers.layers`, `vllm.layers`, `vllm.paged` and `loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import NamedTuple, Protocol

from torch import Tensor

from ragblend.engine.fusion.attention import ProbeQueries
from ragblend.engine.fusion.rules import DriftCorrection
from ragblend.engine.store.format.kv import LayerKV


class PromptKVBuffer(Protocol):
    """Buffer for a prompt's KV: keys and values of all its tokens per layer, in prompt order.

    `fuse` reads `keys` and `values` only of the layer that was loaded last, and only in two cases: at the check layer,
    and during a query probe, in every layer up to the last probe layer.
    """

    length: int  # rows that are valid in every layer

    def keys(self, layer: int) -> Tensor: ...  # [H, capacity, D], rotated to their positions
    def values(self, layer: int) -> Tensor: ...  # [H, capacity, D]
    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None: ...


class FreshRowsCallback(NamedTuple):
    """Function that a layer calls with the fresh keys and values of some rows, and the indices of these rows.

    The call comes after the layer has computed the keys and values, and before it writes them to the PromptKVBuffer.
    Instead of calling the function, a model that reads the buffer may compute the drift itself, by `correction`.
    """

    row_indices: Tensor  # indices into the rows that are run
    callback: Callable[[LayerKV], None]  # gets those rows' pre-RoPE keys, and values, [H, N, D]
    correction: DriftCorrection | None = None  # the correction that the function applies to the layer
    apply_drift: Callable[[LayerKV], None] | None = None  # applies the correction's drift [H, M, D]


class LayerSource(Protocol):
    """Source of stored KV, which places it in one PromptKVBuffer, layer by layer.

    `wait` returns when the layer is placed. `fuse` waits for layers in ascending order. A second `wait` for a layer
    returns at once. If stored bytes are damaged, `wait` raises DamagedEntryError, and the request starts again with the
    damaged chunk as a miss. Once `ready[layer]` is set, `wait(layer)` does not block.

    A placed chunk is stale if its KV was computed without the tokens before it in the prompt. If a chunk is stale and
    the plan corrects drift, `fuse` calls `apply_drift` once for every layer except the first. It does so after waiting
    for the layer, and before it writes recomputed rows of placed chunks into that layer.
    """

    @property
    def ready(self) -> Sequence[Event]: ...
    def wait(self, layer: int) -> None: ...

    # Returns pre-RoPE keys, values [H, R, D] at positions [R] of a layer that was waited for and is not corrected yet.
    def read_stored(self, layer: int, rows: Tensor) -> LayerKV: ...

    # Adds `shares` [T, M] times `drift` [H, M, D] float32, or nothing if `drift` is None, and completes the layer.
    def apply_drift(self, layer: int, drift: LayerKV | None, shares: Tensor | None = None) -> None: ...


QueryProbeHook = Callable[[ProbeQueries, Tensor, Tensor | None], Tensor | None]
"""Function that a layer calls once, with the rotated queries of the probe's rows, the rotated keys and the values.

The keys [H, queries.rows[-1] + 1, D] end with the key of the last query's token. The function may keep a reference to
the queries, but not to the keys. It returns the attention output [Hq, Q, D] of the queries; None if the values are
None. With `queries.pages`, kernels compute: the keys and values are those of its pages."""


class LayerwiseModel(Protocol):
    """Decoder whose layers can be run one at a time, over any subset of the prompt's tokens.

    `rows` are prompt positions [R], ascending; `hidden` is [R, hidden size]. Each row attends to every row of `fused`
    at or before its own position. `place_keys` may be called from a second thread; the other methods run one request at
    a time. No method keeps a reference to its result.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def global_layers(self) -> tuple[int, ...]: ...  # layers without an attention window, if other layers have one
    @property
    def kv_share(self) -> float: ...  # share of one layer's parameters that makes K and V, for charged budgets
    def embed(self, token_ids: Tensor) -> Tensor: ...
    def project_kv(self, layer: int, hidden: Tensor) -> LayerKV: ...  # pre-RoPE keys, values [H, R, D]; no attention
    def place_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor: ...  # [H, R, D] rotated to rows
    def run_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer, hook: FreshRowsCallback | None = None
    ) -> Tensor: ...
    def run_probe_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer, probe_hook: QueryProbeHook | None
    ) -> Tensor: ...  # `run_layer` for rows that may have no blocks; the hook receives their queries and the keys
    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, vocabulary], float32
