"""One request's KV in vLLM's paged cache: stored chunks are placed in its blocks, what is read again is kept aside.

`PagedKV` is written to, `PagedSource` reads ahead for it. Knows blocks, slots and `layers`; nothing of rules and plans.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragblend.engine.fusion.loader import LayerLoader, Timeline
from ragblend.engine.fusion.plan import Placement
from ragblend.engine.store.kv import LayerKV

if TYPE_CHECKING:
    from ragblend.engine.vllm.layers import Piece, VllmLayers


class PagedKV:
    """FusedLayers over one request's blocks. `length` rows are valid.

    What is written to blocks cannot be read back, so in the layers in `kept` what is placed or written stays at hand
    until the next of them: [H, capacity, D] of keys and of values. `num_behind` rows behind the `num_rows` that have
    blocks are only asked: they stand nowhere else.
    """

    def __init__(
        self,
        layers: VllmLayers,
        block_ids: Sequence[int],
        num_rows: int,
        kept: Collection[int] = (),
        num_behind: int = 0,
    ) -> None:
        self.length = 0
        self._layers = layers
        self.blocks = torch.tensor(block_ids, dtype=torch.int64, device=layers.device)
        self._num_rows, self._capacity = num_rows, num_rows + num_behind
        self._kept = frozenset(kept)
        self._at_hand: dict[int, LayerKV] = {}
        self._last: tuple[Tensor, list[Piece]] | None = None
        self._nothing = torch.empty(0, 0, 0, dtype=layers.dtype, device=layers.device)

    def keys(self, layer: int) -> Tensor:
        """Keys [H, capacity, D] of a kept layer, valid where placed or written; empty for other layers."""
        return self._at_hand[layer].keys if layer in self._at_hand else self._nothing

    def values(self, layer: int) -> Tensor:
        """Values [H, capacity, D] of a kept layer, valid where placed or written; empty for other layers."""
        return self._at_hand[layer].values if layer in self._at_hand else self._nothing

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rotated `keys` and `values` [H, R, D] at `rows` [R], ascending."""
        if layer in self._at_hand:
            self._at_hand[layer].keys[:, rows] = keys
            self._at_hand[layer].values[:, rows] = values
        if self._capacity > self._num_rows:
            count = int((rows < self._num_rows).sum())
            rows, keys, values = rows[:count], keys[:, :count], values[:, :count]
        if not len(rows):
            return
        slots = self.blocks[rows // self._layers.block_size] * self._layers.block_size
        self._layers.write(layer, slots + rows % self._layers.block_size, keys, values)

    def place(self, layer: int, rows: Tensor, stored: LayerKV) -> None:
        """Put stored (pre-RoPE) KV [H, R, D] of one chunk at `rows` [R], and keep it at hand where it is read."""
        keys, values = (tensor.to(self._layers.device, non_blocking=True) for tensor in stored)
        keys = self._layers.place_keys(layer, keys, rows)
        if layer in self._kept and layer not in self._at_hand:
            self._at_hand.clear()
            heads, _, dim = keys.shape
            self._at_hand[layer] = LayerKV(
                keys.new_zeros(heads, self._capacity, dim), values.new_zeros(heads, self._capacity, values.shape[2])
            )
        self.write(layer, rows, keys, values)

    def place_again(self, layer: int, rows: Tensor, stored: LayerKV) -> None:
        """Put pre-RoPE KV [H, R, D] in the place of what stands at `rows` [R]."""
        self.write(layer, rows, self._layers.place_keys(layer, stored.keys, rows), stored.values)

    def place_all(self, placement: Placement) -> None:
        """Put every layer of one chunk in its place; the rows up to its end are valid then."""
        rows = torch.arange(placement.start, placement.end, device=self._layers.device)
        for layer in range(self._layers.num_layers):
            self.place(layer, rows, placement.kv.layer(layer))
        self.length = placement.end

    def pieces(self, rows: Tensor) -> list[Piece]:
        """`rows` ready to be run; remembered, because most layers run the same rows as the one before."""
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, self._layers.cut(rows, self.blocks[None], torch.zeros_like(rows)))
        return self._last[1]


class PagedSource:
    """LayerSource that reads ahead in a thread and places in the caller's: vLLM's cache has one writer.

    Use as a context manager; leaving it stops the reader. Layer 0 of chunks that would have to be read is computed,
    but only by a rank that is alone: the embedding is a sum over ranks, which all of them must call, and what one has
    in memory another may have to read. (Several ranks have read everything before this, see `BlendWorker`.)

    `again`: layers stay in host memory once they are placed, until they are moved.
    """

    def __init__(
        self, placements: Sequence[Placement], layers: VllmLayers, paged: PagedKV, *, again: bool = False
    ) -> None:
        self._paged, self._layers = paged, layers
        self._read: dict[int, list[tuple[slice, LayerKV]]] = {}
        self._again = again
        self._placed: dict[int, list[tuple[slice, LayerKV]]] = {}
        self._place_s = 0.0
        self._loader = LayerLoader(
            placements,
            layers.num_layers,
            lambda _layer, keys, _rows: keys,
            self,
            torch.device("cpu"),
            first_layer=self._first_layer if layers.num_ranks == 1 else None,
        )

    @property
    def num_computed(self) -> int:
        """Tokens whose layer-0 keys and values are computed instead of read."""
        return self._loader.num_computed

    def timeline(self, ends_s: Sequence[float]) -> Timeline:
        """As `LayerLoader.timeline`: here a layer is loaded once it is read, and placing it counts as fusing."""
        return self._loader.timeline(ends_s)

    @property
    def load_s(self) -> float:
        """Seconds of reading, overlapped or not, and of placing."""
        return self._loader.load_s + self._place_s

    @property
    def stall_s(self) -> float:
        """Seconds that fusing waited for."""
        return self._loader.stall_s + self._place_s

    def _first_layer(self, token_ids: Tensor) -> LayerKV:
        """Pre-RoPE keys and values [H, T, D] of layer 0."""
        return self._layers.project_kv(0, self._layers.embed(token_ids.to(self._layers.device)))

    def write(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Called by the loader: keep one chunk's layer until it is waited for."""
        self._read.setdefault(layer, []).append((rows, LayerKV(keys, values)))

    def wait(self, layer: int) -> None:
        """Block until `layer` is read, then place it. Raises DamagedEntryError for a damaged entry."""
        self._loader.wait(layer)
        start_s = perf_counter()
        read = self._read.pop(layer, [])
        for rows, stored in read:
            self._paged.place(layer, self._positions(rows), stored)
        if self._again and read:
            self._placed[layer] = read
        self._place_s += perf_counter() - start_s

    def stored(self, layer: int, rows: Tensor) -> LayerKV:
        """Pre-RoPE keys and values [H, R, D] at `rows` [R] of a layer that was waited for: see MovableSource."""
        places, parts = rows.cpu(), list[LayerKV]()
        for span, kv in self._placed[layer]:
            taken = places[(places >= span.start) & (places < span.stop)] - span.start
            parts.append(LayerKV(kv.keys[:, taken], kv.values[:, taken]))
        return LayerKV(*(torch.cat(each, 1).to(self._layers.device) for each in zip(*parts, strict=True)))

    def move(self, layer: int, shares: Tensor, by: LayerKV) -> None:
        """Place that layer once more, each row with its share, `shares` [T], of `by` [H, 1, D], keys before rotation,
        added."""
        device, start_s = self._layers.device, perf_counter()
        for rows, stored in self._placed.pop(layer):
            mine = shares[rows, None]
            if bool(mine.any()):
                moved = (
                    (old.to(device, non_blocking=True) + drift * mine).to(old.dtype)
                    for old, drift in zip(stored, by, strict=True)
                )
                self._paged.place_again(layer, self._positions(rows), LayerKV(*moved))
        self._place_s += perf_counter() - start_s

    def _positions(self, rows: slice) -> Tensor:
        return torch.arange(rows.start, rows.stop, device=self._layers.device)

    def __enter__(self) -> PagedSource:
        self._loader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loader.__exit__(*error)
