"""A layer's KV as Triton's kernels read and write it: in pages of a paged cache, or contiguous."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ragblend.engine.store.format.kv import LayerKV


class PagedLayer(NamedTuple):
    """KV of one layer: pages of S tokens, keys [B, S, H, Dk] and values [B, S, H, Dv], rotated.

    `table`: page of each S tokens of the prompt; None: the prompt is page 0. A page may be outside of the tensors, if
    memory at this distance from both is a page.
    """

    keys: Tensor
    values: Tensor
    table: Tensor | None = None

    @classmethod
    def from_contiguous(cls, kv: LayerKV) -> PagedLayer:
        """Return the layer of keys and values [H, T, D]."""
        return cls(*(each.transpose(0, 1)[None] for each in kv))

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of this layer that every kernel takes."""
        keys, values, is_paged = self.keys, self.values, self.table is not None
        stride_of = {
            f"{name}_{part}": each.stride(dim)
            for name, each in (("k", keys), ("v", values))
            for dim, part in enumerate(("page", "slot", "head", "dim"))
        }
        table = self.table if self.table is not None else keys
        return {**stride_of, "KEYS": keys, "VALUES": values, "TABLE": table, "PAGE": keys.shape[1] if is_paged else 0}
