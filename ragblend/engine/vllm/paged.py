"""One request's KV in vLLM's paged cache: stored chunks are placed in its blocks, what is read again is kept aside.

`PagedKV` is written to, `PagedSource` reads ahead for it. Knows blocks, slots and `layers`; nothing of rules and plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import on_host
from ragblend.engine.fusion.loader import LayerLoader, Timeline
from ragblend.engine.fusion.plan import Placement
from ragblend.engine.store.kv import LayerKV
from ragblend.errors import DamagedEntryError, RagblendError

if TYPE_CHECKING:
    from ragblend.engine.vllm.attention_calls import AttentionCall
    from ragblend.engine.vllm.layers import VllmLayers


class PlacedLayer(NamedTuple):
    """One layer of a stored chunk, keys before rotation, and where it goes."""

    rows: slice
    kv: LayerKV


class PagedKV:
    """FusedLayers over one request's blocks. `length` rows are valid.

    Reading blocks back is slow, so of the layers in `kept` the one that was placed last stays at hand, with what is
    written to it. `num_behind` rows behind the `num_rows` that have blocks are only asked: they
    stand nowhere else. The first `num_resident` rows are in the blocks already: they are never written, and are read
    into a kept layer from there. `whole` is the layer of which all that was placed is at hand as it was placed last.
    """

    def __init__(
        self,
        layers: VllmLayers,
        block_ids: Sequence[int],
        num_rows: int,
        kept: Collection[int] = (),
        num_behind: int = 0,
        num_resident: int = 0,
    ) -> None:
        self.length = 0
        self._layers = layers
        self.blocks = torch.tensor(block_ids, dtype=torch.int64, device=layers.device)
        self._positions = torch.arange(num_rows, device=layers.device)
        self._slots = self.blocks[self._positions // layers.block_size] * layers.block_size
        self._slots += self._positions % layers.block_size
        self._num_rows, self._capacity = num_rows, num_rows + num_behind
        self._num_resident = num_resident
        self._kept = frozenset(kept)
        # The layer, [capacity, H, D] as vLLM wants to be given it.
        self._resident_layer: tuple[int, LayerKV] | None = None
        self.whole: int | None = None
        self._last: tuple[Tensor, bool, list[AttentionCall]] | None = None
        self._much: tuple[Tensor, bool] | None = None
        self._nothing = torch.empty(0, 0, 0, dtype=layers.dtype, device=layers.device)

    def keys(self, layer: int) -> Tensor:
        """Keys [H, capacity, D] of the kept layer placed last, valid where placed or written; empty for others."""
        kept = self._resident_kv(layer)
        return kept.keys.transpose(0, 1) if kept is not None else self._nothing

    def values(self, layer: int) -> Tensor:
        """Values [H, capacity, D] of the kept layer placed last, valid where placed or written; empty for others."""
        kept = self._resident_kv(layer)
        return kept.values.transpose(0, 1) if kept is not None else self._nothing

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rotated `keys` and `values` [H, R, D] at `rows` [R], ascending."""
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        kept = self._resident_kv(layer)
        if kept is not None:
            kept.keys[rows], kept.values[rows] = keys, values
        if self._capacity > self._num_rows:
            count = bisect_left(on_host(rows), self._num_rows)
            rows, keys, values = rows[:count], keys[:count], values[:count]
        if len(rows):
            self._layers.write(layer, self._slots[rows], keys, values)

    def place(
        self, layer: int, stored: Sequence[PlacedLayer], drift: LayerKV | None = None, shares: Tensor | None = None
    ) -> None:
        """Put stored (pre-RoPE) KV at its rows in the blocks, and keep it at hand where the layer is read.

        With `by` [H, M, D] and `shares` [T, M], each row with its shares of it, before rotation, added.
        """
        for rows, placed in self._placed(layer, stored, drift, shares):
            self._layers.write(layer, self._slots[rows], *placed)

    def place_resident_only(self, layer: int, stored: Sequence[PlacedLayer]) -> None:
        """`place` at hand alone, in a kept layer: its blocks are left for `place` to fill, once it is known by what."""
        for _ in self._placed(layer, stored):
            pass

    def _placed(
        self, layer: int, stored: Sequence[PlacedLayer], drift: LayerKV | None = None, shares: Tensor | None = None
    ) -> Iterator[tuple[slice, LayerKV]]:
        """Runs of rows, with their keys, rotated, and their values, [R, H, D]: made in one go where there is room."""
        for rows, parts in _side_by_side(stored) if layer in self._kept else ((each.rows, [each]) for each in stored):
            room = self._target_buffer(layer, rows, parts[0].kv)
            for span, kv in parts:
                here = slice(span.start - rows.start, span.stop - rows.start)
                for index, tensor in enumerate(kv):
                    own = tensor.to(self._layers.device, non_blocking=True)
                    if shares is not None and drift is not None:
                        own = own + shares[span] @ drift[index]
                    room[index][here] = own.transpose(0, 1)  # one copy, which turns the layout as well
            self._layers.rotate_keys(layer, room.keys, self._positions[rows])
            yield rows, room

    def _target_buffer(self, layer: int, rows: slice, like: LayerKV) -> LayerKV:
        """Where those rows of the layer go: [R, H, D]."""
        shapes = [(tensor.shape[0], tensor.shape[2]) for tensor in like]
        if layer not in self._kept:
            return LayerKV(*(self._nothing.new_empty(rows.stop - rows.start, *shape) for shape in shapes))
        if self._resident_layer is None or self._resident_layer[0] != layer:
            # One room for all layers: memory that is warm already.
            kept = self._resident_layer[1] if self._resident_layer is not None else None
            kept = kept or LayerKV(*(self._nothing.new_zeros(self._capacity, *shape) for shape in shapes))
            self._resident_layer, self.whole = (layer, kept), None
            if self._num_resident:
                there = self._layers.read(layer, self.blocks[: -(-self._num_resident // self._layers.block_size)])
                for room, tensor in zip(kept, there, strict=True):
                    room[: self._num_resident] = tensor[: self._num_resident]
        return LayerKV(*(tensor[rows] for tensor in self._resident_layer[1]))

    def _resident_kv(self, layer: int) -> LayerKV | None:
        return (
            self._resident_layer[1] if self._resident_layer is not None and self._resident_layer[0] == layer else None
        )

    def place_all(self, placement: Placement) -> None:
        """Put every layer of one chunk in its place; the rows up to its end are valid then."""
        for layer in range(self._layers.num_layers):
            self.place(layer, [PlacedLayer(slice(placement.start, placement.end), placement.kv.layer(layer))])
        self.length = placement.end

    def should_attend_together(self, layer: int, rows: Tensor, has_hook: bool) -> bool:
        """Whether `rows` had better attend over what is at hand of the layer, and can: once told, all of it is."""
        if layer not in self._kept or not (has_hook or self.whole == layer):
            return False
        if self._much is None or self._much[0] is not rows:
            self._much = rows, self._layers.should_share_reads(rows)
        return self._much[1]

    def attention_calls(self, rows: Tensor, together: bool = False) -> list[AttentionCall]:
        """`rows` ready to be run, `together` over what is at hand; remembered, because most layers run the same rows as
        the one before."""
        if self._last is None or self._last[0] is not rows or self._last[1] != together:
            cut = self._layers.split_shared_calls([rows]) if together else self._cut(rows)
            self._last = (rows, together, cut)
        return self._last[2]

    def _cut(self, rows: Tensor) -> list[AttentionCall]:
        return self._layers.split_calls(rows, self.blocks[None], torch.zeros_like(rows))


class _ReadBuffer:
    """What the reader has read, until it is waited for. The loader knows this and not its owner: in a circle both, and
    the request's layers with them, would stay until the garbage collector's next round."""

    def __init__(self) -> None:
        self.layers: dict[int, list[PlacedLayer]] = {}

    def write(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Called by the loader: keep one chunk's layer."""
        self.layers.setdefault(layer, []).append(PlacedLayer(rows, LayerKV(keys, values)))


class PagedSource:
    """LayerSource that reads ahead in a thread and places in the caller's: vLLM's cache has one writer.

    Use as a context manager; leaving it stops the reader. Layer 0 of chunks that would have to be read is computed,
    but only by a rank that is alone: the embedding is a sum over ranks, which all of them must call, and what one has
    in memory another may have to read. What one of several ranks could not read counts as damaged for all of them.

    On a GPU the reader brings layers there, beside what the GPU computes. Leaving with an error does not wait for what
    is being read: the reader writes nowhere but here. `done` is set once it has ended.

    `moves`: every layer but the first will be moved, so chunks that may move get into the blocks only then. Until that
    they stay in host memory, all layers of them, because the question is asked in the last before the first is moved.
    Those in the memory tier are there anyway; of those read from disk this holds what was read, a layer less with each
    one moved.
    """

    def __init__(
        self, placements: Sequence[Placement], layers: VllmLayers, paged: PagedKV, *, moves: bool = False
    ) -> None:
        self._paged, self._layers, self._placements = paged, layers, tuple(placements)
        self._read = _ReadBuffer()
        self._movable = {each.start for each in placements if moves and not each.exact}
        self._waiting: dict[int, list[PlacedLayer]] = {}  # to be moved
        self._staying: dict[int, list[PlacedLayer]] = {}  # beside them, wanted at hand again then
        self._place_s = 0.0
        self._loader = LayerLoader(
            placements,
            layers.num_layers,
            lambda _layer, keys, _rows: keys,
            self._read,
            torch.device("cpu") if moves else layers.device,
            first_layer=partial(_first_layer, layers) if layers.num_ranks == 1 else None,
        )
        self.ready, self.done = self._loader.ready, self._loader.done

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

    def wait(self, layer: int) -> None:
        """Block until `layer` is read, then place it. Raises DamagedEntryError for a damaged entry, on all ranks."""
        if self._layers.num_ranks > 1:
            self._agree(layer)
        self._loader.wait(layer)
        start_s = perf_counter()
        read = self._read.layers.pop(layer, [])
        movable = self._movable if layer else ()  # the first layer is exact as stored
        waiting = [each for each in read if each.rows.start in movable]
        staying = [each for each in read if each.rows.start not in movable]
        self._paged.place(layer, staying)
        if waiting:
            self._waiting[layer] = waiting
            if self._layers.may_attend:
                self._staying[layer] = staying
            self._paged.place_resident_only(layer, waiting)
        elif read:
            self._paged.whole = layer
        self._place_s += perf_counter() - start_s

    def _agree(self, layer: int) -> None:
        """Raise on every rank what the reader of one of them met, or they would part ways."""
        self.ready[layer].wait()
        error = self._loader.error_at(layer)
        keys = [placement.kv.header.key for placement in self._placements]
        damaged = [isinstance(error, DamagedEntryError) and error.key == key for key in keys]
        failed = self._layers.count_ranks([*damaged, error is not None])
        if not failed[-1]:
            return
        bad = next((key for key, count in zip(keys, failed, strict=False) if count), None)
        if bad is None:
            raise error or RagblendError("another rank could not read what is stored; its log says why")
        own = error if isinstance(error, DamagedEntryError) and error.key == bad else None
        raise own or DamagedEntryError(bad, "as another rank read it")

    def read_stored(self, layer: int, rows: Tensor) -> LayerKV:
        """Pre-RoPE keys and values [H, R, D] at `rows` [R], ascending, that wait to be moved: see MovableSource."""
        places, parts = on_host(rows), list[LayerKV]()
        for span, kv in self._waiting[layer]:
            mine = places[bisect_left(places, span.start) : bisect_left(places, span.stop)]
            taken = torch.tensor(mine, dtype=torch.int64) - span.start  # what waits is in host memory
            parts.append(LayerKV(kv.keys[:, taken], kv.values[:, taken]))
        return LayerKV(*(torch.cat(each, 1).to(self._layers.device) for each in zip(*parts, strict=True)))

    def apply_drift(self, layer: int, drift: LayerKV | None, shares: Tensor | None = None) -> None:
        """Place what waited for it, with its shares, `shares` [T, M], of `by` [H, M, D] added before rotation."""
        start_s = perf_counter()
        self._paged.place_resident_only(
            layer, self._staying.pop(layer, [])
        )  # since then, another layer may have been at hand
        self._paged.place(layer, self._waiting.pop(layer), drift, shares)
        self._paged.whole = layer
        self._place_s += perf_counter() - start_s

    def __enter__(self) -> PagedSource:
        self._loader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._loader.stop()
            return
        self._loader.__exit__(*error)
        assert not self._waiting, "a layer was not moved: its blocks are empty"


def _first_layer(layers: VllmLayers, token_ids: Tensor) -> LayerKV:
    """Pre-RoPE keys and values [H, T, D] of layer 0."""
    return layers.project_kv(0, layers.embed(token_ids.to(layers.device)))


def _side_by_side(stored: Sequence[PlacedLayer]) -> Iterator[tuple[slice, list[PlacedLayer]]]:
    """Chunks in ascending order as runs without a gap."""
    run: list[PlacedLayer] = []
    for each in stored:
        if run and run[-1].rows.stop != each.rows.start:
            yield slice(run[0].rows.start, run[-1].rows.stop), run
            run = []
        run.append(each)
    if run:
        yield slice(run[0].rows.start, run[-1].rows.stop), run
