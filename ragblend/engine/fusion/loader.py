"""Layer-wise loading of stored KV into the prompt's KV, ahead of `fuse`.

One background reader reads, dequantizes and places layer i+1 while layer i is fused. On the CPU, KV that is in memory
and not quantized is placed without a thread. Layer 0 has no earlier layer whose fusing could hide its loading, so it
can be computed instead of read. For a GPU, KV in page-locked memory is copied ahead without a thread, too (see
`host_to_device`). Depends on ChunkKV and tensors, not on tiers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragblend.engine.fusion.attention import PagedLayer, Rotation, positions_on_device
from ragblend.engine.fusion.host_to_device import HostToDeviceCopier, LayerCopies, is_page_locked
from ragblend.engine.fusion.plan import FusedKV, Placement
from ragblend.engine.store.format.kv import LayerKV, StoredLayer, concatenate_rows, dequantized, is_in_memory

if TYPE_CHECKING:
    from ragblend.engine.fusion.kernels import Pieces
    from ragblend.engine.transformers.layers import TransformersLayers

# Layers the reader may be ahead. Rules that measure deviation run far more tokens in the first layer than in later
# ones; a reader that may be a few layers ahead loads during that time what later layers would wait for.
DEPTH = 6


class ChunkGroup:
    """Chunks placed in one call, in prompt order. Seconds of reading are added to `read_s` by each chunk's position."""

    def __init__(self, placements: Sequence[Placement], device: torch.device, read_s: dict[int, float]) -> None:
        self.placements, self._read_s = placements, read_s
        self._copies: LayerCopies | None = None
        self._pieces: Pieces | None = None
        self.end = placements[-1].end
        self.rows = positions_on_device(
            np.concatenate([np.arange(each.start, each.end) for each in placements]), device
        )
        self.spans: list[tuple[slice, slice]] = []  # spans of adjacent chunks: in the prompt, and in `rows`
        taken = 0
        for placement in placements:
            start, first = placement.start, taken
            taken += placement.end - start
            if self.spans and self.spans[-1][0].stop == start:
                before, its_rows = self.spans.pop()
                start, first = before.start, its_rows.start
            self.spans.append((slice(start, placement.end), slice(first, taken)))

    def copy_ahead(self, copier: HostToDeviceCopier, num_layers: int) -> None:
        """Let `read` take the layers, all of them in page-locked memory, from copies that are queued ahead of it."""
        self._copies = LayerCopies(copier, [each.kv for each in self.placements], num_layers, DEPTH)

    def place_by_kernels(self, parts: Sequence[StoredLayer], target: PagedLayer, rotation: Rotation) -> None:
        """Place one layer of all chunks, given as stored on the device, by one launch of a kernel."""
        from ragblend.engine.fusion import kernels

        if self._pieces is None:
            self._pieces = kernels.Pieces([each.start for each in self.placements])
        kernels.place(target, parts, self._pieces, rotation)

    def read(
        self, layer: int, copier: HostToDeviceCopier | None, computed: Iterator[LayerKV] | None = None
    ) -> list[StoredLayer]:
        """Return one layer of each chunk, as stored, on the device. Raises DamagedEntryError.

        `computed` yields the layer of each chunk that is not in memory; those are not read.
        """
        stored, is_computed = [], [computed is not None and not is_in_memory(each.kv) for each in self.placements]
        if self._copies is not None:
            stored = self._copies.next_layer()
        else:
            for placement, skips in zip(self.placements, is_computed, strict=True):
                if not skips:
                    start_s = perf_counter()
                    stored.append(placement.kv.stored_layer(layer))
                    self._read_s[placement.start] += perf_counter() - start_s
            if copier is not None:
                stored = copier.copy_to_device(stored)  # eight-bit KV is copied as eight bits
        arrived = iter(stored)
        return [next(computed) if computed is not None and skips else next(arrived) for skips in is_computed]

    def read_through(self, layer: int) -> None:
        """Read one layer of all chunks, so that the store verifies and promotes the whole entries. Raises
        DamagedEntryError.
        """
        for placement in self.placements:
            start_s = perf_counter()
            placement.kv.stored_layer(layer)
            self._read_s[placement.start] += perf_counter() - start_s


class LayerEvent(NamedTuple):
    """Start and end of loading or fusing one layer, in `perf_counter` seconds."""

    layer: int
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """Load and fuse events of one request, one of each per layer."""

    load: tuple[LayerEvent, ...]
    fuse: tuple[LayerEvent, ...]


class LayerLoader:
    """Context manager that loads one request's stored KV. Leaving it stops the reader and joins its thread.

    `wait(layer)` returns when that layer of every placement is written. If the reader fails, `wait` raises the error
    (DamagedEntryError for a damaged entry) for the layers that were not read. `ready[layer]` is set once
    `wait(layer)` no longer blocks. `done` is set once the context can be left without waiting. `place(layer, keys,
    rows)` rotates keys to the positions `rows`. `write(layer, rows, keys, values)` writes placed keys and their values
    to adjacent rows.

    `together`: True places all chunks of a layer in one call of `place`, and writes adjacent chunks in one call. This
    needs one more copy and far fewer operations. Every call of `place` then gets the same `rows` tensor. False calls
    `place` for each chunk.

    `first_layer(token_ids)` computes the pre-RoPE keys and values of layer 0 [H, T, D], which depend on the token ids
    alone. If it is given, `wait(0)` calls it for the chunks that are not in memory, and the reader starts at layer 1.
    The reader still reads layer 0, as the last one, because the store verifies and promotes whole entries. Leaving the
    context waits for this read.

    `correctable` is the model and the FusedKV that `write` fills. Only `read_stored` and `apply_drift` need it, and a
    model that places stored KV by kernels, instead of `place` and `write`.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        num_layers: int,
        place: Callable[[int, Tensor, Tensor], Tensor],
        write: Callable[[int, slice, Tensor, Tensor], None],
        device: torch.device,
        *,
        together: bool = False,
        first_layer: Callable[[Tensor], LayerKV] | None = None,
        correctable: tuple[TransformersLayers, FusedKV] | None = None,
    ) -> None:
        self.read_s = dict.fromkeys((placement.start for placement in placements), 0.0)
        """Seconds of reading stored KV, by the first position of each placement. They are part of `load_s`."""
        groups = (placements,) if together else zip(placements)
        self._groups = [ChunkGroup(group, device, self.read_s) for group in groups if group]
        self._num_layers = num_layers
        self._place, self._write, self._correctable = place, write, correctable
        self._rows = torch.empty(0, dtype=torch.int64)  # all positions up to the last chunk, made by `apply_drift`
        self._device = device
        self._copier = HostToDeviceCopier(device) if device.type != "cpu" else None
        self._ahead = threading.Semaphore(DEPTH)
        self.ready: Sequence[threading.Event] = [threading.Event() for _ in range(num_layers)]
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._failed: frozenset[int] = frozenset()  # layers that were not read because of the error
        self._not_in_memory = [each.kv for each in placements if not is_in_memory(each.kv)]
        if self._copier is None or not self._copier.overlaps_compute:
            self._threaded = bool(self._not_in_memory) or any(not each.kv.header.is_lossless for each in placements)
        elif not self._not_in_memory and all(is_page_locked(each.kv.stored_layer(0)) for each in placements):
            self._threaded = False
            for group in self._groups:
                group.copy_ahead(self._copier, num_layers)
        else:
            self._threaded = True
        self._first_layer = first_layer if self._not_in_memory else None
        self._computed_layer = 0 if self._first_layer is not None else None
        self.num_computed = 0 if self._first_layer is None else sum(kv.header.num_tokens for kv in self._not_in_memory)
        """Tokens whose layer-0 keys and values are computed instead of read."""
        self._thread: threading.Thread | None = None
        self._num_waited = 0
        self._released_s = [0.0] * num_layers  # `perf_counter` seconds of the latest end of `wait` per layer
        self._read_through_s = 0.0
        self.events: list[LayerEvent] = []
        self.stall_s = 0.0
        self.done = threading.Event()
        for event in self.ready if not self._threaded else self.ready[: int(self._first_layer is not None)]:
            event.set()  # placed, or computed, by `wait`
        if not self._threaded:
            self.done.set()

    @property
    def load_s(self) -> float:
        """Return the seconds of loading: reading layers, computing layer 0, placing. It may overlap with fusing."""
        return sum(event.end_s - event.start_s for event in self.events) + self._read_through_s

    def __enter__(self) -> LayerLoader:
        if self._threaded:
            self._thread = threading.Thread(target=self._read_all, name="ragblend-loader", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_done = kind is None and self._num_waited == self._num_layers
        if not is_done:
            self.stop()
        if self._thread is not None:
            start_s = perf_counter()
            self._thread.join()
            self.stall_s += perf_counter() - start_s  # layer 0, if it was not read yet
        if is_done and self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the reader after its current read, without waiting for it."""
        self._stopped.set()
        self._ahead.release()

    def error_at(self, layer: int) -> BaseException | None:
        """Return the error that `wait` raises for a ready layer; None if it raises none."""
        return self._error if layer in self._failed else None

    def wait(self, layer: int) -> None:
        """Block until `layer` is placed; raise the reader's error. A second call for a layer returns at once."""
        start_s = self._released_s[layer] = perf_counter()
        if layer < self._num_waited:
            return
        if self._thread is None or layer == self._computed_layer:
            self._load(layer)
        else:
            self.ready[layer].wait()
            if self._error is not None and layer in self._failed:
                raise self._error
            self._ahead.release()
        self._num_waited = layer + 1
        self._released_s[layer] = perf_counter()
        self.stall_s += self._released_s[layer] - start_s

    def read_stored(self, layer: int, rows: Tensor) -> LayerKV:
        """Return the pre-RoPE keys and values [H, R, D] at `rows` [R] of a placed layer.

        See `LayerSource`.
        """
        assert self._correctable is not None
        model, fused = self._correctable
        keys = model.unrotate_keys(layer, fused.keys(layer)[:, rows], rows)
        return LayerKV(keys, fused.values(layer)[:, rows])

    def apply_drift(self, layer: int, drift: LayerKV | None, shares: Tensor | None = None) -> None:
        """Add `shares` [T, M] times `drift` [H, M, D] to the layer's keys and values. If `drift` is None, do nothing.

        T: tokens of the prompt. M: landmarks of the DriftCorrection. The pre-RoPE change of the keys is rotated first.
        """
        if drift is None:
            return
        assert self._correctable is not None
        assert shares is not None
        (model, fused), count = self._correctable, len(shares)
        if model.uses_kernels:
            from ragblend.engine.fusion import kernels

            kernels.add_drift(
                PagedLayer.from_contiguous(fused.layer(layer, count)),
                drift,
                shares,
                model.kernel_rotation(layer, count),
            )
            return
        if len(self._rows) != count:
            self._rows = positions_on_device(np.arange(count), shares.device)
        # Zero is added to rows without a share: that is faster than to gather and scatter nearly all rows.
        model.add_key_drift(layer, fused.keys(layer)[:, :count], shares @ drift.keys, self._rows)
        values = fused.values(layer)[:, :count]
        values += (shares @ drift.values).to(values.dtype)

    def timeline(self, ends_s: Sequence[float]) -> Timeline:
        """Return the events of all layers. `ends_s`: the end of fusing each layer, in `perf_counter` seconds."""
        spans = zip(self._released_s, ends_s, strict=True)
        return Timeline(tuple(sorted(self.events)), tuple(LayerEvent(layer, *span) for layer, span in enumerate(spans)))

    def _read_all(self) -> None:
        try:
            with torch.inference_mode(), self._copier.in_compute_order() if self._copier is not None else nullcontext():
                # The computed layer is the last one to read.
                for layer in sorted(range(self._num_layers), key=lambda layer: layer == self._computed_layer):
                    self._ahead.acquire()
                    if self._stopped.is_set():
                        return
                    if layer == self._computed_layer:
                        self._read_through(layer)
                    else:
                        self._load(layer)
                        self.ready[layer].set()
        except BaseException as error:  # raised to the caller by wait()
            self._failed = frozenset(layer for layer, event in enumerate(self.ready) if not event.is_set())
            self._error = error
            for event in self.ready:
                event.set()
        finally:
            self.done.set()

    def _load(self, layer: int) -> None:
        start_s = perf_counter()
        computed = self._compute_first_layer() if layer == self._computed_layer else None
        for group in self._groups:
            self._place_group(layer, group, group.read(layer, self._copier, computed))
        self.events.append(LayerEvent(layer, start_s, perf_counter()))

    def _place_group(self, layer: int, group: ChunkGroup, parts: Sequence[StoredLayer]) -> None:
        """Place one layer of the group's chunks, given as stored."""
        if self._correctable is not None and self._correctable[0].uses_kernels:
            model, fused = self._correctable
            pages = PagedLayer.from_contiguous(fused.layer(layer, group.end))
            group.place_by_kernels(parts, pages, model.kernel_rotation(layer, group.end))
            return
        keys, values = concatenate_rows(list(map(dequantized, parts)))
        keys = self._place(layer, keys, group.rows)
        for span, taken in group.spans:
            self._write(layer, span, keys[:, taken], values[:, taken])

    def _compute_first_layer(self) -> Iterator[LayerKV]:
        """Return layer 0 of each chunk that is not in memory, computed from its token ids."""
        assert self._first_layer is not None
        ids = torch.tensor([token for kv in self._not_in_memory for token in kv.header.token_ids], device=self._device)
        counts = [kv.header.num_tokens for kv in self._not_in_memory]
        keys, values = self._first_layer(ids)
        return map(LayerKV, torch.split(keys, counts, 1), torch.split(values, counts, 1))

    def _read_through(self, layer: int) -> None:
        start_s = perf_counter()
        for group in self._groups:
            group.read_through(layer)
        self._read_through_s = perf_counter() - start_s
