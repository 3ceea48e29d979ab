"""What depends on positions: attention windows, a model's rotary tables, and the rotation of a layer's keys by them.

Depends on transformers' configs and the forward method of its rotary modules, not on layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import (
    LLAMA_LAYOUT,
    RotaryLayout,
    add_rotated,
    inverse_tables,
    max_placeable_tokens,
    position_end,
    rotate,
)

# Cached rotations per kind of layers: of the rows that the loader places, of those that run before and after the check,
# and of those that are measured for drift correction. They stay from one request to the next; each is as large as its
# rows of the model's own tables.
MAX_CACHED_TABLES = 5

WINDOWED = "sliding_attention"
"""transformers' name for a layer with an attention window."""


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Return a config's RoPE settings by layer type. If it has one setting for all types, the only key is ""."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    by_type = {kind: dict(each) for kind, each in parameters.items() if isinstance(each, Mapping)}
    return by_type or {"": parameters}


def context_length(config: Any) -> int:
    """Return the largest number of tokens, of prompt and answer together, that blending supports for this model.

    For the RoPE type "longrope" this is the original length, because longer prompts use other RoPE frequencies. Raises
    UnsupportedModelError for an unsupported RoPE type.
    """
    longest = config.max_position_embeddings
    return min(max_placeable_tokens(each, longest) for each in rope_parameters(config).values())


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the attention window of every layer, in tokens; None for a layer without a window.

    The attending token is counted, too.
    """
    window = getattr(config, "sliding_window", None)
    count: int = config.num_hidden_layers
    if not window or window >= context_length(config):
        return (None,) * count
    kinds = getattr(config, "layer_types", None) or (WINDOWED,) * count
    return tuple(window if kind == WINDOWED else None for kind in kinds)


@dataclass(frozen=True, eq=False)
class RowTables:
    """Cosine and sine of some rows' rotation."""

    rows: Tensor  # positions [R]
    kind: str  # type of the layers that rotate by these angles; "" if all layers do
    layout: RotaryLayout
    end: int  # position after the highest of the rows
    cos: Tensor  # [R, rotary dimensions] float32
    sin: Tensor
    embeddings: dict[torch.dtype, Any] = field(default_factory=dict, init=False)  # as layers take them, by dtype

    def arrange(self, layout: RotaryLayout) -> RowTables:
        """Return these tables, which must be the rotary module's own, for another layout."""
        cos, sin = layout.arrange(self.cos, self.sin)
        return replace(self, layout=layout, cos=cos, sin=sin)

    @cached_property
    def inverse(self) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [R, rotary dimensions] of the inverse rotation; computed once, if needed."""
        return inverse_tables(self.cos, self.sin)


class KeyRotation(NamedTuple):
    """Rotation of one layer's keys to the positions of some rows."""

    tables: RowTables
    weight: Tensor | None  # [D], by which the layer multiplies rotated keys (see `AttentionFamily.rotated_key_weight`)

    def rotate(self, keys: Tensor) -> Tensor:
        """Return the pre-RoPE `keys` [H, R, D] rotated. The rotation is computed in float32."""
        rotated = rotate(keys, self.tables.cos, self.tables.sin, self.tables.layout.adjacent)
        return rotated if self.weight is None else rotated * self.weight

    def undo(self, keys: Tensor, row_indices: Tensor | slice = slice(None)) -> Tensor:
        """Return the pre-RoPE form [H, N, D] of rotated `keys` of the rows `row_indices`."""
        cos, sin = self.tables.inverse
        keys = keys if self.weight is None else keys / self.weight
        return rotate(keys, cos[row_indices], sin[row_indices], self.tables.layout.adjacent)

    def add(self, keys: Tensor, change: Tensor) -> None:
        """Add `change` [H, R, D] float32, a change of pre-RoPE keys, to rotated `keys` [H, R, D] in place."""
        if self.weight is not None:
            keys += self.rotate(change).to(keys.dtype)
        else:
            add_rotated(keys, change, self.tables.cos, self.tables.sin, self.tables.layout.adjacent)


class RotaryTables:
    """Tables of a model's rotary `module`, in float32 and with its attention scaling. The latest results are cached."""

    def __init__(self, module: Any, context_length: int, device: torch.device, *, half_tables: bool = False) -> None:
        self._module, self._context_length, self._device = module, context_length, device
        self._half_tables = half_tables  # True if `module` returns each angle once, for both dimensions that it rotates
        self._tables: dict[tuple[str, RotaryLayout], tuple[Tensor, Tensor]] = {}
        self._cached: tuple[RowTables, ...] = ()  # of the rows that were run or placed last, latest first

    def of_rows(self, rows: Tensor, kind: str, layout: RotaryLayout = LLAMA_LAYOUT) -> RowTables:
        """Return the tables of `rows` [R], in any order, for layers of this `kind`; "" if the model has one kind.

        They are those of the rotary module, unless `layout` differs from that of Llama. Layers of one kind share the
        cached result for a tensor.
        """
        cached = self._cached  # the loader's thread replaces it too; a lost update costs one gathering
        for each in cached:
            if each.rows is rows and each.kind == kind and each.layout == layout:
                return each
        end = position_end(rows)
        whole = self._tables.get((kind, layout))
        cos, sin = whole if whole is not None and len(whole[0]) >= end else self._make_tables(end, kind, layout)
        tables = RowTables(rows, kind, layout, end, cos[rows], sin[rows])
        self._cached = (tables, *cached[: MAX_CACHED_TABLES * len(self._tables) - 1])
        return tables

    def of_all(self, end: int, kind: str, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
        """Return the tables of the first `end` positions or more, [positions, R] each."""
        cached = self._tables.get((kind, layout))
        return cached if cached is not None and len(cached[0]) >= end else self._make_tables(end, kind, layout)

    def _make_tables(self, length: int, kind: str, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
        """Return the model's cosine and sine tables [length or more, R], arranged for `layout`."""
        # Doubling makes this rare, although each decoded token needs one more position.
        size = min(max(2 * length, 512), max(self._context_length, length))
        positions = torch.arange(size, device=self._device)[None]
        dummy = torch.empty(0, dtype=torch.float32, device=self._device)
        which = {"layer_type": kind} if kind else {}
        tables = self._module(dummy, position_ids=positions, **which)
        # Some modules return each angle as one complex number.
        cos, sin = (part[0] for part in ((tables.real, tables.imag) if isinstance(tables, Tensor) else tables))
        if self._half_tables:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        self._tables[kind, layout] = layout.arrange(cos, sin)
        return self._tables[kind, layout]
