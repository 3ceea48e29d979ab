"""One decode step of one or several prompts: every weight is read once for all, every prompt attends to its own KV.

The rows of all prompts pass a layer's norms, projections and MLP as one matrix. Attention runs per prompt, over that
prompt's keys and values in place, without padding or copies. Depends on the model's layers and tensors, not on
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.families import AttentionFamily

FEW_ROWS = range(6, 17)
"""Numbers of rows for which a transposed float32 product is faster on a CPU: by a third at 8 rows. MKL repacks the
weights from four rows on, which is worth its time from about 16 rows on."""


class SequenceRows(NamedTuple):
    """The new tokens (rows) of one prompt in a batch."""

    span: slice  # indices of the rows in the batch
    prompt_span: slice  # positions of the rows in the prompt
    rows: Tensor  # the same positions, [R]
    fused: FusedKV  # KV of the prompt


def assign_rows(counts: Sequence[int], fused: Sequence[FusedKV], device: torch.device) -> tuple[SequenceRows, ...]:
    """Return the rows of each prompt in a batch. Prompt i has `counts[i]` new tokens and the KV `fused[i]` before them.

    The batch has the rows of the first prompt, then those of the second, and so on. device: for the tensors `rows`.
    """
    places, begin = [], 0
    for count, each in zip(counts, fused, strict=True):
        there = slice(each.length, each.length + count)
        rows = torch.arange(there.start, there.stop, device=device)
        places.append(SequenceRows(slice(begin, begin + count), there, rows, each))
        begin += count
    return tuple(places)


class SequenceAttention(NamedTuple):
    """Rows of one sequence in a pass over several sequences, and the keys and values that they attend to."""

    span: slice  # indices of the rows in the pass
    rows: Tensor  # positions of the rows in their sequence, [R]
    positions: range  # the same positions on the host
    keys: Tensor  # rotated keys of the sequence up to its last row, [1, H, T, D]
    values: Tensor


class BatchedDecodeCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Transformers cache of a batch of prompts. It writes each prompt's rows into that prompt's own KV.

    `expand_kv` makes the keys and values for attention from a layer's KV as `family` stores it.
    """

    def __init__(
        self,
        prompts: Sequence[SequenceRows],
        family: AttentionFamily,
        expand_kv: Callable[[int, LayerKV], LayerKV],
    ) -> None:
        super().__init__(layers=[])
        self._prompts, self._family, self._expand_kv = prompts, family, expand_kv
        self._attention: list[SequenceAttention] = []  # of the layer that runs

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values [1, H, R, D] of all prompts' rows, and return them unchanged.

        Other caches return the keys and values of all tokens. Here, attention gets those from `sequences`.
        """
        fresh = self._family.to_stored(LayerKV(key_states[0], value_states[0]))
        for span, there, _, fused in self._prompts:
            fused.write(layer_idx, there, fresh.keys[:, span], fresh.values[:, span])
        self.read(layer_idx)
        return key_states, value_states

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Make `sequences` yield each prompt's keys and values of `layer`.

        Returns the keys and values of the first prompt alone, because transformers expects those of one sequence.
        """
        self._attention = []
        for span, there, rows, fused in self._prompts:
            stored = LayerKV(fused.keys(layer)[:, : there.stop], fused.values(layer)[:, : there.stop])
            keys, values = self._expand_kv(layer, stored)
            positions = range(there.start, there.stop)
            self._attention.append(SequenceAttention(span, rows, positions, keys[None], values[None]))
        return self._attention[0].keys, self._attention[0].values

    def sequences(self, keys: Tensor, values: Tensor) -> Iterator[SequenceAttention]:
        """Yield each prompt's rows with its KV, which has the rows' own `keys` and `values` already."""
        yield from self._attention


class FewRowsCpuMatmul(TorchFunctionMode):
    """Torch function mode that multiplies few rows (FEW_ROWS) by a float32 CPU weight as `weight @ rows.T`.

    For few rows, this is faster than `nn.functional.linear`. The results differ by float rounding only.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return `func(*args, **kwargs)`; `linear` of few rows is computed transposed."""
        if func is not nn.functional.linear or kwargs or not _is_few(args[0], args[1]):
            return func(*args, **(kwargs or {}))
        rows, weight = args[0], args[1]
        # Row by row in memory again: attention has no kernel for queries that are not.
        product = (weight @ rows.reshape(-1, rows.shape[-1]).t()).t().contiguous()
        bias = args[2] if len(args) > 2 else None
        product = product if bias is None else product + bias
        return product.reshape(*rows.shape[:-1], weight.shape[0])


def _is_few(rows: Tensor, weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # quantised weights have other classes, without this product
    plain = plain and rows.dtype == weight.dtype == torch.float32 and rows.device.type == "cpu"
    return plain and rows.numel() // rows.shape[-1] in FEW_ROWS
