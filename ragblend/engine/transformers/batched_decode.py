"""One decode step of several prompts: every weight is read once for all of them, every prompt attends to its own KV.

The rows of all prompts pass a layer's norms, projections and MLP as one matrix. Attention runs per prompt, over that
prompt's keys and values in place, without padding or copies. Depends on the model's layers and tensors, not on
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from ragblend.engine.fusion.attention import PLAIN, AttentionExtras, attend_rows
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.store.kv import LayerKV
from ragblend.engine.transformers.families import LatentAttention

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


class BatchedDecodeCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Transformers cache of a batch of `sequences`. It writes each prompt's rows into that prompt's own KV.

    `attend_batch` reads the KV of the current layer from `kv`. For a model with multi-head latent attention (`latent`),
    the stored KV is the latent; `expand_kv` makes the keys and values for attention from it.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceRows],
        latent: LatentAttention | None = None,
        expand_kv: Callable[[int, LayerKV], LayerKV] | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.sequences = sequences
        self._latent, self._expand_kv = latent, expand_kv
        self.kv: list[tuple[Tensor, Tensor]] = []  # of the layer that runs, [1, H, end, D] each

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values [1, H, R, D] of all prompts' rows, and return them unchanged.

        Other caches return the keys and values of all tokens. Here, `attend_batch` reads those from `kv`.
        """
        fresh = LayerKV(key_states[0], value_states[0])
        if self._latent is not None:
            fresh = self._latent.to_stored(fresh)
        for span, there, _, fused in self.sequences:
            fused.write(layer_idx, there, fresh.keys[:, span], fresh.values[:, span])
        self.read(layer_idx)
        return key_states, value_states

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Set `kv` to each prompt's keys and values of `layer`; `attend_batch` reads them from there.

        Returns the keys and values of the first prompt alone, because transformers expects those of one sequence.
        """
        self.kv = []
        for _, there, _, fused in self.sequences:
            whole = LayerKV(fused.keys(layer)[:, : there.stop], fused.values(layer)[:, : there.stop])
            if self._expand_kv is not None:
                whole = self._expand_kv(layer, whole)
            self.kv.append((whole.keys[None], whole.values[None]))
        return self.kv[0]


def attend_batch(
    query: Tensor, batch: BatchedDecodeCache, scale: float | None, params: AttentionExtras = PLAIN
) -> Tensor:
    """Return the causal attention [1, Hq, R, D] of several prompts' rows, each over its own prompt's KV.

    `query` is [1, Hq, R, D].
    """
    outputs = []
    for each, (keys, values) in zip(batch.sequences, batch.kv, strict=True):
        positions = range(each.prompt_span.start, each.prompt_span.stop)
        outputs.append(attend_rows(query[:, :, each.span], keys, values, each.rows, scale, params, positions))
    return torch.cat(outputs, dim=2)


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
