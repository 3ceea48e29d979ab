"""Attention of scattered tokens: rotation of stored keys to their positions (RoPE), attention, and its weights.

Stored keys are pre-RoPE. They are rotated once, in float32, and cast once (Su et al. 2021). No rotation is undone, so
every fixed-frequency scaling (linear, Llama-3, YaRN) works unchanged with the model's own cosine and sine tables. The
query probe reads the attention weights of the question. Depends on tensors and RoPE settings, not on models, rules or
storage.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary

from ragblend.engine.store.format.kv import LayerKV
from ragblend.errors import UnsupportedModelError

# --- rotation of keys

FIXED_FREQUENCY = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
"""RoPE types whose frequencies do not depend on the prompt's length (longrope: up to its original length)."""


class RotaryLayout(NamedTuple):
    """How a layer rotates its keys by the angles of the model's rotary module."""

    adjacent: bool = False  # True: dimensions 2i and 2i + 1 are rotated together; False: i and i + R/2
    direction: int = 1  # -1: the other way round; 0: the layer has no RoPE

    def arrange(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for `rotate`, given a rotary module's [T, R], which contain each angle twice.

        Modules return the two copies of an angle adjacent to each other, or R/2 apart. Waits for the device.
        """
        if self == LLAMA_LAYOUT:
            return cos, sin
        if not self.direction:
            return cos[:, :0], sin[:, :0]  # partial rotary of no dimension
        halves = [each.chunk(2, dim=-1) for each in (cos, sin)]
        are_apart = all(torch.equal(*pair) for pair in halves)
        cos, sin = (pair[0] for pair in halves) if are_apart else (cos[:, 0::2], sin[:, 0::2])
        sin = sin * self.direction
        if self.adjacent:
            return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


LLAMA_LAYOUT = RotaryLayout()
ROTARY_LAYOUTS = (
    LLAMA_LAYOUT,
    RotaryLayout(adjacent=True),
    RotaryLayout(direction=0),
    RotaryLayout(direction=-1),
    RotaryLayout(adjacent=True, direction=-1),
)
"""The layouts that are tried for each layer of a model."""


class Rotation(NamedTuple):
    """Rotation of one layer's keys by position."""

    cos: Tensor  # [positions, R] float32, of the positions from 0 on; see `rotate`
    sin: Tensor
    adjacent: bool = False
    weight: Tensor | None = None  # [D], by which rotated keys are multiplied; None: by 1


def rotate(states: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> Tensor:
    """Return `states` [..., T, D] rotated by tables `cos`, `sin` [T, R], R <= D; same dtype, rotation in float32.

    Dimension i is paired with i + R/2, as in Llama, or if `adjacent`, 2i with 2i + 1, as in Cohere. Only the first R
    dimensions are rotated (partial rotary). Rotating by p and then by q equals rotating by p + q, if the tables contain
    no attention scaling. Equals transformers' `apply_rotary_pos_emb`.
    """
    rotary_dim = cos.shape[-1]
    turned, kept = states[..., :rotary_dim], states[..., rotary_dim:]
    if not rotary_dim:
        return kept
    turned = turned.float()
    first, second = (turned[..., each] for each in _paired(rotary_dim, adjacent))
    partners = (-second, first)
    partner = torch.stack(partners, dim=-1).flatten(-2) if adjacent else torch.cat(partners, dim=-1)
    turned = (turned * cos).add_(partner.mul_(sin)).to(states.dtype)
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def _paired(rotary_dim: int, adjacent: bool) -> tuple[slice, slice]:
    """Return the first and the second dimension of each pair that is rotated together."""
    half = rotary_dim // 2
    return (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if adjacent else (slice(half), slice(half, rotary_dim))


def inverse_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tables with which `rotate` undoes a rotation by `cos`, `sin` [T, R] and its attention scaling."""
    scaling = cos[..., :1].square() + sin[..., :1].square()  # 1 without attention scaling
    return cos / scaling, -sin / scaling


def add_rotated(states: Tensor, change: Tensor, cos: Tensor, sin: Tensor, adjacent: bool = False) -> None:
    """Add `change` [H, T, D] float32, rotated by `cos`, `sin` [T, R], to the rotated `states` [H, T, D], in place."""
    rotary_dim = cos.shape[-1]
    if states.dtype != change.dtype:
        states += rotate(change, cos, sin, adjacent).to(states.dtype)
        return
    first, second = _paired(rotary_dim, adjacent)
    states[..., :rotary_dim].addcmul_(change[..., :rotary_dim], cos)
    states[..., first].addcmul_(change[..., second], sin[:, first], value=-1)
    states[..., second].addcmul_(change[..., first], sin[:, second])
    if rotary_dim < states.shape[-1]:
        states[..., rotary_dim:] += change[..., rotary_dim:]


def rope_type_problem(rope_type: str) -> str:
    """Return the reason why a RoPE of this type cannot rotate stored keys to new positions; "" if it can."""
    if rope_type in FIXED_FREQUENCY:
        return ""
    return "changes its frequencies with the prompt's length" if rope_type == "dynamic" else "is not known to ragblend"


def max_placeable_tokens(rope_parameters: Mapping[str, Any], max_positions: int) -> int:
    """Return the length in tokens of the longest prompt in which stored keys can be placed.

    Up to this length, the model's RoPE frequencies are fixed. `max_positions`: most positions of the model. Raises
    UnsupportedModelError for RoPE types that are not in FIXED_FREQUENCY, such as dynamic NTK.

    >>> max_placeable_tokens({"rope_type": "yarn"}, 131072)
    131072
    """
    rope_type = rope_parameters.get("rope_type", "default")
    problem = rope_type_problem(rope_type)
    if problem:
        raise UnsupportedModelError(
            f"RoPE type {rope_type!r} {problem}, so stored keys cannot be placed. Choose a model with one of "
            f"{', '.join(FIXED_FREQUENCY)}, or set a fixed type in its config.json"
        )
    if rope_type == "longrope":
        return int(rope_parameters.get("original_max_position_embeddings") or max_positions)
    return max_positions


# --- attention

# Rows per attention call. Measured on CPU: one masked call over all rows costs nearly twice its share of full
# attention, because masked scores are computed, too; blocks whose keys end at the block's last row avoid most of them.
# On a GPU each call costs some kernel launches, which take longer than the work of a few rows.
BLOCK_ROWS = defaultdict(lambda: 512, cpu=64)

# Devices on which adjacent rows that fill more than one block are one call without a mask: torch's flash kernel skips
# the scores after a row, and computes the others faster than a kernel that reads a mask.
CAUSAL_KERNEL_DEVICES = frozenset({"cuda"})

# Devices on which Triton's kernels compute a blend, if Triton is there. Tests add "cpu", for Triton's interpreter.
KERNEL_DEVICES = frozenset({"cuda"})


def has_kernels(device: torch.device) -> bool:
    """Return True if `kernels` can be imported and runs on `device`."""
    return device.type in KERNEL_DEVICES and find_spec("triton") is not None


# Float32 scores per block, 16 MiB: a question of 100 tokens over 100 000 would take gigabytes at once. On a CPU 2 MiB,
# which stay in its cache from the product to the sum and take a third of the time.
BLOCK_SCORES = defaultdict(lambda: 1 << 22, cpu=1 << 19)


# A layer's forward pass is queued: the host should have queued the last layer while a GPU still computes the first.
# Reading a tensor of the device (`int`, `tolist`, a mask as an index) waits until all queued kernels have run. So row
# positions are copied to the host once per tensor, and not at all where their end suffices.
_KNOWN_POSITIONS = WeakTensorKeyDictionary()
_KNOWN_ENDS = WeakTensorKeyDictionary()


def positions_on_host(rows: Tensor) -> tuple[int, ...]:
    """Return the positions `rows` [R] int64 as a tuple of ints in host memory.

    The first call for a tensor waits for the device. Later calls return the cached result, so do not change the tensor.
    """
    positions: tuple[int, ...] | None = _KNOWN_POSITIONS.get(rows)  # type: ignore[no-untyped-call]
    if positions is None:
        positions = _KNOWN_POSITIONS[rows] = tuple(rows.tolist())
    return positions


def positions_on_device(positions: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return positions [R] int64 that the host knows as a tensor on `device`; `positions_on_host` needs no copy."""
    rows = torch.from_numpy(positions).to(device, non_blocking=True)
    _KNOWN_POSITIONS[rows] = tuple(positions.tolist())
    return rows


def positions_before(rows: Tensor, end: int) -> Tensor:
    """Return positions [R] that the device has computed, and of which the host knows that they are below `end`."""
    _KNOWN_ENDS[rows] = end
    return rows


def position_end(rows: Tensor) -> int:
    """Return a position that is above all of `rows` [R]; 0 if there are none. Waits for the device if none is known."""
    if rows not in _KNOWN_ENDS:
        _KNOWN_ENDS[rows] = max(positions_on_host(rows), default=-1) + 1
    end: int = _KNOWN_ENDS[rows]
    return end


def slice_positions(rows: Tensor, part: slice) -> Tensor:
    """Return `rows[part]`, of which the host knows what it knows of `rows`."""
    sliced = rows[part]
    if rows in _KNOWN_POSITIONS:
        _KNOWN_POSITIONS[sliced] = _KNOWN_POSITIONS[rows][part]
        return sliced
    return positions_before(sliced, position_end(rows))


class AttentionExtras(NamedTuple):
    """Sliding window, soft cap and sinks of a layer's attention (Gemma 2, gpt-oss). The scale is not part of it."""

    window: int | None = None  # a token attends to this number of tokens, itself included; None: to all before it
    softcap: float | None = None  # a score s counts as softcap * tanh(s / softcap)
    sinks: Tensor | None = None  # [Hq], a score per head that is part of the softmax and has no value


PLAIN = AttentionExtras()


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


class ProbeQueries(NamedTuple):
    """The question's queries at one layer.

    `states` [Hq, Q, D] (Hq query heads, Q tokens) are rotated to the positions `rows` [Q]. `scale` is the factor on the
    product of query and key.
    """

    states: Tensor
    rows: Tensor  # int64, ascending
    scale: float
    params: AttentionExtras = PLAIN
    host_rows: Sequence[int] = ()  # the same rows on the host; (): they are copied from the device
    pages: PagedLayer | None = None  # the layer's KV, if Triton's kernels compute the attention of these queries

    def slice_rows(self, part: slice) -> ProbeQueries:
        """Return the queries of the rows in `part`."""
        host_rows = (self.host_rows or positions_on_host(self.rows))[part]
        rows = slice_positions(self.rows, part) if self.pages is not None else self.rows[part]
        return self._replace(states=self.states[:, part], rows=rows, host_rows=host_rows)


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    scale: float | None,
    params: AttentionExtras = PLAIN,
    host_rows: Sequence[int] = (),
) -> Tensor:
    """Return the causal attention [1, Hq, R, D] of scattered rows: `query` [1, Hq, R, D] at positions `rows` [R].

    `rows` ascend. Query i attends to `keys` and `values` [1, H, T, D] at positions 0 .. rows[i] within its window; no
    other position is read. `host_rows` as in ProbeQueries.
    """
    host_rows = host_rows or positions_on_host(rows)
    outputs, block_rows = [], BLOCK_ROWS[rows.device.type]
    is_plain = params.window is None and params.softcap is None and params.sinks is None
    if rows.device.type in CAUSAL_KERNEL_DEVICES and is_plain and len(host_rows) > block_rows:
        end = host_rows[-1] + 1
        if end - host_rows[0] == len(host_rows):
            return _attend_causal(query, keys[:, :, :end], values[:, :, :end], scale)
    for start in range(0, len(host_rows), block_rows):
        part = slice(start, min(start + block_rows, len(host_rows)))
        first, last = host_rows[start], host_rows[part.stop - 1]
        begin, end = 0 if params.window is None else max(0, first + 1 - params.window), last + 1
        block, near_keys, near_values = query[:, :, part], keys[:, :, begin:end], values[:, :, begin:end]
        if params.softcap is not None or params.sinks is not None:  # no kernel supports them
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            queries = ProbeQueries(
                block[0], rows[part] - begin, factor, params, [row - begin for row in host_rows[part]]
            )
            outputs.append(_attend_eager(queries, near_keys[0], near_values[0])[None])
        else:
            mask = None  # one row attends to all of the keys
            if last > first:
                mask = _mask(query, rows[part, None], range(begin, end), first, params.window)
            outputs.append(_attend_masked(block, near_keys, near_values, mask, scale))
    return torch.cat(outputs, dim=2)


def _mask(like: Tensor, rows: Tensor, keys: range, first: int, window: int | None) -> Tensor:
    """Return the mask [R, T] to add to scores of `rows` [R, 1] over the positions `keys`: 0 where visible, else -inf.

    `first` is the least of the rows; `like` has the dtype and device.
    """
    mask = like.new_zeros(len(rows), len(keys))
    hidden = torch.arange(first + 1, keys.stop, device=rows.device) > rows  # keys up to `first` are visible to all
    mask[:, first + 1 - keys.start :].masked_fill_(hidden, -torch.inf)
    if window is not None:
        mask.masked_fill_(torch.arange(keys.start, keys.stop, device=rows.device) <= rows - window, -torch.inf)
    return mask


def _attend_masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention [1, Hq, R, D] under a mask [R, T], if any.

    Heads that share a KV head are computed as rows of one head. Their keys are then read once, and a GPU uses a fused
    kernel, which it has not for a mask with fewer KV heads than heads.
    """
    num_heads, groups = query.shape[1], query.shape[1] // keys.shape[1]
    grouped = query.reshape(1, keys.shape[1], groups * query.shape[2], query.shape[3])
    mask = mask if mask is None else mask.repeat(groups, 1)
    output = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(1, num_heads, query.shape[2], values.shape[3])


def _attend_causal(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Return the causal attention [1, Hq, R, D] of the last R of T positions over `keys`, `values` [1, H, T, D].

    Heads that share a KV head get a copy of it, because not every kernel without a mask supports shared heads.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (keys, values))
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)


def _attend_eager(queries: ProbeQueries, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention [Hq, Q, D] over keys and values [H, T, D], from explicit probabilities."""
    output = values.new_empty(queries.states.shape[0], len(queries.rows), values.shape[2])
    groups = queries.states.shape[0] // keys.shape[0]
    for heads, rows, weights in _weight_blocks(queries, keys):
        target = output[heads.start * groups : heads.stop * groups, rows]
        target.copy_((weights.to(values.dtype) @ values[heads]).reshape(target.shape))
    return output


def attention_mass(queries: ProbeQueries, keys: Tensor) -> Tensor:
    """Return the attention probability [T] float32 of each token, mean over heads and queries.

    `keys` [H, T, D] are rotated; Hq is a multiple of H. A query at row i attends to keys 0 .. i of the whole prompt,
    within its window. The sum is 1, less the probability of sinks.
    """
    mass = torch.zeros(keys.shape[1], dtype=torch.float32, device=keys.device)
    for _, _, weights in _weight_blocks(queries, keys):
        mass += weights.sum(dim=(0, 1))
    return mass / (queries.states.shape[0] * queries.states.shape[1])


def attend_with_weights(
    queries: ProbeQueries, keys: Tensor, values: Tensor, num_question_rows: int
) -> tuple[Tensor, Tensor]:
    """Return the attention output [Hq, Q, D] of all queries, and the attention mass of the question's queries.

    See `attend_rows` for the output, and `attention_mass` for the mass [T]. The question's queries are the last
    `num_question_rows`. `keys`, `values`: [H, T, D].
    """
    question = queries.slice_rows(slice(-num_question_rows, None))
    num_heads, num_queries, _ = question.states.shape
    early = len(queries.rows) - num_queries
    makes_weights = keys.dtype == torch.float32  # in other dtypes, only a fused kernel keeps the scores in float32
    plain = queries.slice_rows(slice(0, early)) if makes_weights else queries
    output = values.new_empty(num_heads, early + num_queries, values.shape[2])
    if len(plain.rows):
        states, rows, scale, params, host_rows, _ = plain
        attended = attend_rows(states[None], keys[None], values[None], rows, scale, params, host_rows)
        output[:, : len(rows)] = attended[0]
    if not makes_weights:
        return output, attention_mass(question, keys)
    mass = torch.zeros(keys.shape[1], dtype=torch.float32, device=keys.device)
    groups = num_heads // keys.shape[0]
    for heads, block, weights in _weight_blocks(question, keys):
        mass += weights.sum(dim=(0, 1))
        target = output[heads.start * groups : heads.stop * groups, early + block.start : early + block.stop]
        target.copy_((weights @ values[heads]).reshape(target.shape))
    return output, mass / (num_heads * num_queries)


def _weight_blocks(queries: ProbeQueries, keys: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (KV heads, rows, attention probabilities [h, B, T] float32) per block of KV heads and rows.

    Heads that share a KV head are concatenated in B. Sinks are part of the softmax, and are left out of the result.
    """
    window, softcap, sinks = queries.params
    host_rows = queries.host_rows or positions_on_host(queries.rows)
    num_rows, dim = queries.states.shape[1:]
    groups, length = queries.states.shape[0] // keys.shape[0], keys.shape[1]
    few_heads = max(1, BLOCK_SCORES[keys.device.type] // (groups * num_rows * length))
    few_rows = max(1, BLOCK_SCORES[keys.device.type] // (few_heads * groups * length))
    first = host_rows[0] + 1  # keys before it are visible to all rows
    positions = torch.arange(length, device=keys.device)
    for head, row in itertools.product(range(0, keys.shape[0], few_heads), range(0, num_rows, few_rows)):
        heads = slice(head, min(head + few_heads, keys.shape[0]))
        rows = slice(row, min(row + few_rows, num_rows))
        part = queries.states[heads.start * groups : heads.stop * groups, rows].reshape(heads.stop - head, -1, dim)
        row_positions = queries.rows[rows, None]
        scores = (part @ keys[heads].transpose(1, 2)).float().mul_(queries.scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores[..., first:].masked_fill_((positions[first:] > row_positions).repeat(groups, 1), -torch.inf)
        if window is not None:
            scores.masked_fill_((positions <= row_positions - window).repeat(groups, 1), -torch.inf)
        if sinks is not None:
            each = sinks[heads.start * groups : heads.stop * groups].float().view(heads.stop - head, groups, 1)
            each = each.expand(-1, -1, rows.stop - row).reshape(*part.shape[:2], 1)
            scores = torch.cat((scores, each), dim=-1)
        yield heads, rows, scores.softmax(-1)[..., :length]
