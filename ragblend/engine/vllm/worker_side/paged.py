"""One request's KV in vLLM's paged cache.

`PagedKV` writes a request's KV to its blocks. Triton's kernels also read it there. Without them, a layer that is read
again is also kept as a tensor. `PagedLayerLoader` reads the request's stored chunks ahead, and places them in a
`PagedKV`. Depends on blocks, slots and `layers`, not on rules and plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import PagedLayer, positions_on_host
from ragblend.engine.fusion.loader import DEPTH, ChunkGroup, LayerLoader
from ragblend.engine.fusion.plan import Placement
from ragblend.engine.fusion.protocols import FreshRowsCallback
from ragblend.engine.store.format.kv import LayerKV, StoredLayer
from ragblend.errors import DamagedEntryError, RagblendError

if TYPE_CHECKING:
    from ragblend.engine.vllm.worker_side.layers import VllmLayers

_LATENT_WORKSPACE = 64 * 1024  # most tokens whose latents vLLM's attention expands at once


def blend_device_bytes(vllm_config: Any) -> int:
    """Return how many bytes of GPU memory blending the longest prompt needs, in addition to vLLM's paged cache.

    This memory is for the layers that are read ahead, and for the resident layer or what kernels need. With MLA, it is
    also for vLLM's workspace of an attention call.
    """
    model, num_tokens = vllm_config.model_config, (DEPTH + 2) * vllm_config.model_config.max_model_len
    if getattr(model, "use_mla", False):
        return int((num_tokens + _LATENT_WORKSPACE) * model.get_head_size() * model.dtype.itemsize)
    heads = model.get_num_kv_heads(vllm_config.parallel_config)
    return int(num_tokens * 2 * heads * model.get_head_size() * model.dtype.itemsize)


RowsKV = tuple[slice, LayerKV]
"""Rows of a prompt, and their stored KV of one layer, with keys that are not rotated yet."""


class PagedKV:
    """One request's KV in its blocks of vLLM's paged cache (a PromptKVBuffer). The first `length` rows are valid.

    Without kernels, reading KV from blocks is slow. The KV of one layer at a time is then also kept in a tensor: the
    resident layer. `kept`: indices of the layers for which this is done. Placing a kept layer replaces the resident
    layer. `fully_resident_layer` is the resident layer's index once all placed rows are in the tensor, else None. With
    kernels, `pages` returns a layer in its blocks, and rows of kept layers attend to it by kernels.

    The capacity is `num_rows` + `num_probe_rows`. The first `num_rows` rows have blocks. The other rows are for a query
    probe, and exist only in the resident layer, or with kernels in a buffer of the size of their blocks. The blocks of
    the first `num_resident` rows have valid KV already. Callers must not write these rows. Each new resident layer gets
    a copy of their KV.
    """

    def __init__(
        self,
        layers: VllmLayers,
        block_ids: Sequence[int],
        num_rows: int,
        kept: Collection[int] = (),
        num_probe_rows: int = 0,
        num_resident: int = 0,
    ) -> None:
        self.length = 0
        self._layers = layers
        self.blocks = torch.tensor(block_ids, dtype=torch.int64, device=layers.device)
        self._positions = torch.arange(num_rows, device=layers.device)
        self._slots = self.blocks[self._positions // layers.block_size] * layers.block_size
        self._slots += self._positions % layers.block_size
        self._num_rows, self._capacity = num_rows, num_rows + num_probe_rows
        self._num_resident = num_resident
        self._kept = frozenset(kept)
        # The layer and its KV, [capacity, H, D] as vLLM's functions require it.
        self._resident_layer: tuple[int, LayerKV] | None = None
        self.fully_resident_layer: int | None = None
        self._nothing = torch.empty(0, 0, 0, dtype=layers.dtype, device=layers.device)
        self.has_pages = layers.uses_kernels
        if self.has_pages:
            self._tables, self._probe_pages = layers.cache.page_tables(block_ids, num_rows, num_probe_rows)

    def keys(self, layer: int) -> Tensor:
        """Return a layer's keys [H, capacity, D]; only placed and written rows are valid. Empty if not resident.

        With kernels [H, num_rows, D], a copy.
        """
        return self._resident_kv(layer).keys.transpose(0, 1)

    def values(self, layer: int) -> Tensor:
        """Return a layer's values, as `keys` does."""
        return self._resident_kv(layer).values.transpose(0, 1)

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rotated `keys` and `values` [H, R, D] at `rows` [R], ascending."""
        if self.has_pages:
            self.write_by_kernels(layer, rows, LayerKV(keys, values))
            return
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if self._resident_layer is not None and self._resident_layer[0] == layer:
            kept, fresh = self._resident_layer[1], LayerKV(keys, values)
            if self._layers.cache.rounds:
                fresh = LayerKV(keys.clone(), values.clone())
                self._layers.cache.round(layer, fresh)
            kept.keys[rows], kept.values[rows] = fresh
        if self._capacity > self._num_rows:
            count = bisect_left(positions_on_host(rows), self._num_rows)
            rows, keys, values = rows[:count], keys[:count], values[:count]
        if len(rows):
            self._layers.write(layer, self._slots[rows], keys, values)

    def write_by_kernels(self, layer: int, rows: Tensor, fresh: LayerKV, hook: FreshRowsCallback | None = None) -> None:
        """Write the rotated `fresh` KV [H, R, D] at `rows` [R], after the drift correction of `hook`, if it has one."""
        from ragblend.engine.fusion import kernels

        end = len(self._positions) if hook is None or hook.correction is None else len(hook.correction.shares)
        kernels.write_fresh_rows(self.pages(layer), rows, fresh, self._layers.kernel_rotation(layer, end), hook)

    def pages(self, layer: int) -> PagedLayer:
        """Return a layer's KV in the blocks, as kernels take it. Only if `has_pages`."""
        return PagedLayer(*self._layers.cache.pages(layer), self._tables[layer])

    def place(
        self, layer: int, stored: Sequence[RowsKV], drift: LayerKV | None = None, shares: Tensor | None = None
    ) -> None:
        """Rotate the stored keys of a layer, and write its KV to the blocks.

        If `layer` is in `kept`, the KV is also written to the resident layer. For drift correction, `shares` [T, M] @
        `drift` [H, M, D] is added before the rotation (T rows of the prompt, M landmarks of the `DriftCorrection`).
        """
        for rows, placed in self._placed(layer, stored, drift, shares):
            self._layers.write(layer, self._slots[rows], *placed)

    def place_in_resident_layer(self, layer: int, stored: Sequence[RowsKV]) -> None:
        """Write stored KV to the resident layer, but not to the blocks (unlike `place`).

        Has no effect if `layer` is not in `kept`.
        """
        for _ in self._placed(layer, stored):
            pass

    def _placed(
        self, layer: int, stored: Sequence[RowsKV], drift: LayerKV | None = None, shares: Tensor | None = None
    ) -> Iterator[tuple[slice, LayerKV]]:
        """Yield ranges of rows with rotated keys and values [R, H, D]. In a kept layer, adjacent chunks are one
        range."""
        for rows, parts in _side_by_side(stored) if layer in self._kept else ((each[0], [each]) for each in stored):
            target = self._target_buffer(layer, rows, parts[0][1])
            for span, kv in parts:
                here = slice(span.start - rows.start, span.stop - rows.start)
                for index, tensor in enumerate(kv):
                    device_tensor = tensor.to(self._layers.device, non_blocking=True)
                    if shares is not None and drift is not None:
                        device_tensor = device_tensor + shares[span] @ drift[index]
                    target[index][here] = device_tensor.transpose(0, 1)  # copies and transposes at once
            self._layers.rotate_keys(layer, target.keys, self._positions[rows])
            yield rows, target
            if layer in self._kept:  # after the backend has rounded it: not every backend's result stays when repeated
                self._layers.cache.round(layer, target)

    def _target_buffer(self, layer: int, rows: slice, like: LayerKV) -> LayerKV:
        """Return tensors [R, H, D] for these rows: views of the resident layer if `layer` is kept, else new tensors."""
        shapes = [(tensor.shape[0], tensor.shape[2]) for tensor in like]
        if layer not in self._kept:
            return LayerKV(*(self._nothing.new_empty(rows.stop - rows.start, *shape) for shape in shapes))
        resident = self._make_resident(layer, shapes)
        return LayerKV(*(tensor[rows] for tensor in resident))

    def _make_resident(self, layer: int, shapes: Sequence[Sequence[int]] = ()) -> LayerKV:
        """Return the tensors of the resident layer, which becomes `layer`; rows in blocks are copied.

        `shapes`: (H, D) of keys and of values, for the first layer; those in the blocks if not given.
        """
        if self._resident_layer is not None and self._resident_layer[0] == layer:
            return self._resident_layer[1]
        in_blocks = self._read_blocks(layer) if self._num_resident else ()
        # All layers use the same buffer, which the processor's cache contains already.
        kept = self._resident_layer[1] if self._resident_layer is not None else None
        shapes = shapes or [tensor.shape[1:] for tensor in in_blocks]
        kept = kept or LayerKV(*(self._nothing.new_zeros(self._capacity, *shape) for shape in shapes))
        self._resident_layer, self.fully_resident_layer = (layer, kept), None
        for target, tensor in zip(kept, in_blocks, strict=False):
            target[: self._num_resident] = tensor[: self._num_resident]
        return kept

    def _read_blocks(self, layer: int) -> LayerKV:
        """Return the keys and values [R, H, D] in the blocks of the first `num_resident` rows."""
        return self._layers.read(layer, self.blocks[: -(-self._num_resident // self._layers.block_size)])

    def read_layer(self, layer: int) -> None:
        """Make `layer` the resident layer, with the rows that have valid KV in blocks, if `layer` is in `kept`.

        With kernels, do nothing.
        """
        if layer in self._kept and not self.has_pages:
            self._make_resident(layer)
            self.fully_resident_layer = layer

    def read_rows(self, layer: int, rows: Tensor) -> LayerKV:
        """Return the rotated keys and values [R, H, D] at `rows` [R], which are among the first `num_resident`.

        With kernels, they are any rows that have blocks.
        """
        if self.has_pages:
            keys, values, table = self.pages(layer)
            assert table is not None
            pages, slots = table[rows // keys.shape[1]], rows % keys.shape[1]
            return LayerKV(keys[pages, slots], values[pages, slots])
        resident = self._resident_layer
        kv = resident[1] if resident is not None and resident[0] == layer else self._read_blocks(layer)
        return LayerKV(kv.keys[rows], kv.values[rows])

    def add_drift(self, layer: int, spans: Sequence[slice], drift: LayerKV, shares: Tensor) -> None:
        """Add `shares` [T, M] @ `drift` [H, M, D] to the rows in `spans` of the resident layer, and in their blocks.

        The drift of keys is a change before the rotation. Kernels add it to all rows with a share, in their blocks.
        """
        if self.has_pages:
            from ragblend.engine.fusion import kernels

            kernels.add_drift(self.pages(layer), drift, shares, self._layers.kernel_rotation(layer, len(shares)))
            return
        for rows in spans:
            target = LayerKV(*(tensor[rows] for tensor in self._make_resident(layer)))
            changes = ((shares[rows] @ each).to(self._nothing.dtype) for each in drift)
            keys, values = (each.transpose(0, 1).contiguous() for each in changes)
            self._layers.rotate_keys(layer, keys, self._positions[rows])
            target.keys.add_(keys)
            target.values.add_(values)
            self._layers.write(layer, self._slots[rows], *target)
            self._layers.cache.round(layer, target)

    def _resident_kv(self, layer: int) -> LayerKV:
        if self.has_pages:
            return self.read_rows(layer, self._positions)
        if self._resident_layer is None or self._resident_layer[0] != layer:
            return LayerKV(self._nothing, self._nothing)
        return self._resident_layer[1]

    def place_stored_layers(self, placement: Placement) -> None:
        """Place every layer of one chunk. Afterwards all rows up to the chunk's end are valid."""
        for layer in range(self._layers.num_layers):
            self.place(layer, [(slice(placement.start, placement.end), placement.kv.layer(layer))])
        self.length = placement.end

    def should_attend_together(self, layer: int, has_hook: bool) -> bool:
        """Return True if scattered rows of `layer` attend in one call: by kernels, or to the resident layer.

        `has_hook`: the layer runs with a FreshRowsCallback, which makes all placed rows resident.
        """
        can_attend = self.has_pages or has_hook or self.fully_resident_layer == layer
        return self._layers.attends_scattered_rows_together and layer in self._kept and can_attend


class PagedLayerLoader(LayerLoader):
    """LayerLoader whose layers are placed in a request's PagedKV.

    A thread reads ahead. The caller's thread places the layers, because vLLM's cache has one writer. On a GPU, the
    thread copies layers to the device while the GPU computes, except with `corrects_drift` and without kernels. With
    kernels, one launch places all chunks of a layer, and `apply_drift` changes them in their blocks. After an error,
    leaving the context does not wait for the current read. Placing counts as loading and as a stall, but in `timeline`
    as fusing.

    With a single rank, layer 0 of chunks that are not in memory is computed. Its stored KV is still read, as the last
    layer, because the store verifies and promotes whole entries. Several ranks read layer 0 first, because they would
    have to compute it together, and a chunk may be in the memory of one rank only. An entry that one of several ranks
    cannot read counts as damaged on all of them.

    `corrects_drift`: without kernels, chunks that are not exact are corrected before they are placed in blocks. If
    there are such chunks, the caller must call `apply_drift` for every layer but the first. A layer of such a chunk
    stays in host memory until `apply_drift` is called for it.
    """

    def __init__(
        self, placements: Sequence[Placement], layers: VllmLayers, paged: PagedKV, *, corrects_drift: bool = False
    ) -> None:
        self._paged, self._layers, self._placements = paged, layers, tuple(placements)
        # Layers that the reader has read and `wait` has not placed yet. The reader's callback references this dict and
        # not `self`: in a reference cycle, the request's layers would stay in memory until the next garbage collection.
        self._read: dict[int, list[RowsKV]] = {}
        self._unplaced: dict[int, tuple[ChunkGroup, Sequence[StoredLayer]]] = {}  # the same for kernels, as stored
        waits = corrects_drift and not layers.uses_kernels
        self._movable = {each.start for each in placements if waits and not each.exact}
        self._waiting: dict[int, list[RowsKV]] = {}  # chunks to be corrected, by layer
        self._staying: dict[int, list[RowsKV]] = {}  # the layer's other chunks, to make them resident again
        self._place_s = 0.0
        super().__init__(
            placements,
            layers.num_layers,
            lambda _layer, keys, _rows: keys,
            partial(_keep_layer, self._read),
            torch.device("cpu") if waits else layers.device,
            together=layers.uses_kernels,
            first_layer=partial(_first_layer, layers) if layers.num_ranks == 1 else None,
        )

    @property
    def load_s(self) -> float:
        """Seconds of reading plus seconds of placing. Reading that overlapped with fusing counts in full."""
        return super().load_s + self._place_s

    def wait(self, layer: int) -> None:
        """Wait until `layer` is read, then place it. Raises DamagedEntryError for a damaged entry, on all ranks."""
        if self._layers.num_ranks > 1:
            self._agree(layer)
        super().wait(layer)
        start_s = perf_counter()
        if layer in self._unplaced:
            group, parts = self._unplaced.pop(layer)
            group.place_by_kernels(parts, self._paged.pages(layer), self._layers.kernel_rotation(layer, group.end))
        read = self._read.pop(layer, [])
        movable = self._movable if layer else ()  # the first layer is exact as stored
        waiting = [(rows, kv) for rows, kv in read if rows.start in movable]
        staying = [(rows, kv) for rows, kv in read if rows.start not in movable]
        self._paged.place(layer, staying)
        if waiting:
            self._waiting[layer] = waiting
            if self._layers.attends_scattered_rows_together:
                self._staying[layer] = staying
            self._paged.place_in_resident_layer(layer, waiting)
        elif read:
            self._paged.fully_resident_layer = layer
        self._count_placing(start_s)

    def _count_placing(self, start_s: float) -> None:
        """Count the seconds since `start_s`, which placing took, as loading and as a stall."""
        seconds = perf_counter() - start_s
        self._place_s += seconds
        self.stall_s += seconds

    def _agree(self, layer: int) -> None:
        """Raise the error of one rank's reader on every rank, because all ranks must take the same path."""
        self.ready[layer].wait()
        error = self.error_at(layer)
        keys = [placement.kv.header.key for placement in self._placements]
        damaged = [isinstance(error, DamagedEntryError) and error.key == key for key in keys]
        failed = self._layers.count_ranks([*damaged, error is not None])
        if not failed[-1]:
            return
        bad = next((key for key, count in zip(keys, failed, strict=False) if count), None)
        if bad is None:
            raise error or RagblendError("another rank could not read what is stored; its log says why")
        own_error = error if isinstance(error, DamagedEntryError) and error.key == bad else None
        raise own_error or DamagedEntryError(bad, "as read by another rank")

    def read_stored(self, layer: int, rows: Tensor) -> LayerKV:
        """Return the stored pre-RoPE keys and values [H, R, D] at positions `rows` [R], ascending.

        Without kernels, all rows must be of chunks that wait for `apply_drift` in this layer.
        """
        if self._paged.has_pages:
            kv = self._paged.read_rows(layer, rows)
            keys = self._layers.unrotate_keys(layer, kv.keys.transpose(0, 1), rows)
            return LayerKV(keys, kv.values.transpose(0, 1))
        positions, parts = positions_on_host(rows), list[LayerKV]()
        for span, kv in self._waiting[layer]:
            mine = positions[bisect_left(positions, span.start) : bisect_left(positions, span.stop)]
            taken = torch.tensor(mine, dtype=torch.int64) - span.start  # on the CPU, as the waiting layers
            parts.append(LayerKV(kv.keys[:, taken], kv.values[:, taken]))
        return LayerKV(*(torch.cat(each, 1).to(self._layers.device) for each in zip(*parts, strict=True)))

    def apply_drift(self, layer: int, drift: LayerKV | None, shares: Tensor | None = None) -> None:
        """Correct and place the layer's chunks whose stored KV is not exact in this prompt.

        `PagedKV.place` describes `shares` and `drift`. If `drift` is None, the chunks are placed without a correction.
        """
        if self._paged.has_pages:
            if drift is not None and shares is not None:
                self._paged.add_drift(layer, (), drift, shares)
            return
        start_s = perf_counter()
        # Another layer may have been the resident one since `wait`.
        self._paged.place_in_resident_layer(layer, self._staying.pop(layer, []))
        self._paged.place(layer, self._waiting.pop(layer), drift, shares)
        self._paged.fully_resident_layer = layer
        self._count_placing(start_s)

    def _place_group(self, layer: int, group: ChunkGroup, parts: Sequence[StoredLayer]) -> None:
        if self._paged.has_pages:
            self._unplaced[layer] = group, parts
        else:
            super()._place_group(layer, group, parts)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.stop()
            return
        super().__exit__(kind, *error)
        assert not self._waiting, "a layer was not corrected, so its blocks are empty"


def _keep_layer(read: dict[int, list[RowsKV]], layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
    """Add one chunk's layer to `read`."""
    read.setdefault(layer, []).append((rows, LayerKV(keys, values)))


def _first_layer(layers: VllmLayers, token_ids: Tensor) -> LayerKV:
    """Return the pre-RoPE keys and values [H, T, D] of layer 0."""
    return layers.project_kv(0, layers.embed(token_ids.to(layers.device)))


def _side_by_side(stored: Sequence[RowsKV]) -> Iterator[tuple[slice, list[RowsKV]]]:
    """Yield groups of adjacent chunks in ascending order: the rows of the group, and its chunks."""
    group: list[RowsKV] = []
    start = end = 0
    for rows, kv in stored:
        if group and end != rows.start:
            yield slice(start, end), group
            group = []
        start, end = start if group else rows.start, rows.stop
        group.append((rows, kv))
    if group:
        yield slice(start, end), group
