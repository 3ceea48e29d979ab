"""What fusion asks of a model and of stored KV, as Protocols.

Implemented by `transformers.layers`, `vllm.layers` and `loader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import NamedTuple, Protocol

from torch import Tensor

from ragblend.engine.fusion.attention import ProbeQueries
from ragblend.engine.store.kv import LayerKV


class PromptKVBuffer(Protocol):
    """Where a prompt's KV is put together: per layer, keys and values of all its tokens, in prompt order.

    `keys` and `values` are asked for at the layers where a plan probes or checks, the latest that was waited for.
    """

    length: int  # rows that are valid in every layer

    def keys(self, layer: int) -> Tensor: ...  # [H, capacity, D], rotated to their positions
    def values(self, layer: int) -> Tensor: ...  # [H, capacity, D]
    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None: ...


class FreshKVHook(NamedTuple):
    """Who is to be told keys and values of a layer before they are written, and before anybody attends to anything."""

    row_indices: Tensor  # indices into the rows that are run
    callback: Callable[[LayerKV], None]  # gets those rows' pre-RoPE keys, and values, [H, N, D]


class LayerSource(Protocol):
    """Where the fusor waits for stored KV. `wait` returns when the layer is placed in the FusedLayers it was made for.

    Layers are waited for in ascending order; a layer waited for before is there at once. It raises DamagedEntryError
    when stored bytes turn out wrong: the request starts again with that chunk as a miss. Once `ready[layer]` is set,
    waiting for the layer does not block.
    """

    @property
    def ready(self) -> Sequence[Event] | None: ...  # None: all layers are there
    def wait(self, layer: int) -> None: ...


class CorrectableLayerSource(LayerSource, Protocol):
    """A LayerSource for plans that carry. `apply_drift` works on the layer waited for last, before any row of placed
    chunks is written there. If any chunk is placed that is not exact, every layer but the first is moved, once."""

    def read_stored(
        self, layer: int, rows: Tensor
    ) -> LayerKV: ...  # of positions [R], where it was waited for and not yet
    # moved, and not the first: pre-RoPE keys, values [H, R, D]
    def apply_drift(
        self, layer: int, drift: LayerKV | None, shares: Tensor | None = None
    ) -> None: ...  # adds `shares` [T, M] of `by` [H, M, D] float32; None: they stay as they are


class QueryProbeHook(Protocol):
    """Sees the queries of the rows that a layer runs and the keys [H, rows[-1] + 1, D] they meet, both rotated. Called
    once; the queries may be kept, the keys may not. Given the values too, it attends for them: [Hq, Q, D]."""

    def __call__(self, queries: ProbeQueries, keys: Tensor, values: Tensor | None = None) -> Tensor | None: ...


class LayerwiseModel(Protocol):
    """A decoder whose layers can be run one at a time, over any subset of the prompt's tokens.

    `rows` are prompt positions [R], ascending; `hidden` is [R, hidden size]. Each row attends to every row of
    `fused` at or before its own position. `place_keys` may be called from a second thread; the rest runs one
    request at a time. Nothing here keeps a reference to what it returns.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def kv_share(self) -> float: ...  # share of one layer's parameters that makes K and V, for charged budgets
    def embed(self, token_ids: Tensor) -> Tensor: ...
    def project_kv(self, layer: int, hidden: Tensor) -> LayerKV: ...  # pre-RoPE keys, values [H, R, D]; no attention
    def place_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor: ...  # [H, R, D] rotated to rows
    def run_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer, hook: FreshKVHook | None = None
    ) -> Tensor: ...
    def run_probe_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer, probe_hook: QueryProbeHook | None
    ) -> Tensor: ...  # `run_layer` for rows that may be asked only; `watch` sees their queries and the keys
    def run_layer_keeping_kv(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer
    ) -> tuple[Tensor, LayerKV]: ...  # the same, and the rows' pre-RoPE keys and values [H, R, D]
    def logits(self, hidden: Tensor) -> Tensor: ...  # [R, vocabulary], float32


class PackedPrefillModel(LayerwiseModel, Protocol):
    """A LayerwiseModel that also runs several chunks in one pass, each behind the same prefix."""

    def run_packed_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, spans: tuple[slice, ...], prefix: PromptKVBuffer
    ) -> tuple[Tensor, LayerKV]: ...  # hidden [R, hidden size] of chunks at `spans`, their pre-RoPE keys and values


class SelfCheckModel(PackedPrefillModel, Protocol):
    """A PackingModel that also offers its own, untouched full prefill to be compared with."""

    @property
    def like(self) -> Tensor: ...  # an empty tensor of the KV's dtype and device
    @property
    def kv_shapes(self) -> Sequence[tuple[int, int, int]]: ...  # per layer: H, D of keys, D of values
    def full_prefill(
        self, token_ids: Tensor
    ) -> tuple[Tensor, list[LayerKV]]: ...  # last logits [vocabulary], rotated KV
    def chunked_prefill(
        self, token_ids: Tensor, cuts: Sequence[int]
    ) -> tuple[Tensor, list[LayerKV]]: ...  # the same, by pieces that are cut at those places
    def self_check_mode(
        self, window: int
    ) -> AbstractContextManager[None]: ...  # inside, layers that see a window see so many tokens, and no rounding grows
