"""Decoder of a model that vLLM loaded: its layers and attention, and calls of them as the model itself makes them.

Embeddings, a layer's arguments, whether it has RoPE, and the final norm's arguments are taken from what the model does
in its own forward pass, so most architectures need no code here. `self_check` decides which of them are served.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.fusion.attention import ROTARY_LAYOUTS, RotaryLayout, Rotation, rotate
from ragblend.engine.transformers.positions import RotaryTables, rope_parameters
from ragblend.engine.vllm.support import FIX_HINT, reject_unsupported_attention
from ragblend.engine.vllm.worker_side.latent import is_latent, rotate_shared_keys, split_pairs
from ragblend.errors import UnsupportedModelError

_TRIED_POSITIONS = (1, 7, 30)  # at which the rotation of a layer is found
_LAYOUT_TOLERANCE = 0.05  # relative error that rounding to eight bits of a number's digits may cause


class StopLayerError(Exception):
    """Ends a layer's forward pass once its keys and values are computed."""


def stop_layer() -> None:
    """Raise StopLayerError."""
    raise StopLayerError


class VllmDecoder:
    """Decoder of a model that vLLM implements itself.

    The states of R rows are [R, 1 or 2, hidden size], see `worker_side.layers`. Raises UnsupportedModelError for a
    model without decoder layers of one attention each, and for attention that the connector cannot call.
    """

    captures_in_pass = True  # `capture` works in a pass that also attends

    def __init__(self, model: Any) -> None:
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        self._decoder = getattr(model, "model", model)
        self.layers = list(getattr(self._decoder, "layers", ()))
        if not self.layers or not hasattr(self._decoder, "norm"):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no decoder layers and norm at `.model`, as decoders with RoPE have. "
                f"{FIX_HINT}"
            )
        self.attention: list[Any] = []
        for index, layer in enumerate(self.layers):
            attentions = [module for module in layer.modules() if isinstance(module, Attention | MLAAttention)]
            if len(attentions) != 1:
                raise UnsupportedModelError(
                    f"layer {index} of {type(model).__name__} is a {type(layer).__name__} with {len(attentions)} "
                    f"modules of attention, but one is needed. {FIX_HINT}"
                )
            if not hasattr(attentions[0].impl, "do_kv_cache_update"):
                raise UnsupportedModelError(
                    f"vLLM's attention backend {type(attentions[0].impl).__name__} has no do_kv_cache_update; choose "
                    "another one, such as --attention-backend FLASH_ATTN"
                )
            reject_unsupported_attention(attentions[0].impl)
            self.attention.append(attentions[0])
        self._signature = inspect.signature(type(self.layers[0]).forward)
        self._takes_residual = "residual" in self._signature.parameters
        self._norm_takes_residual = False  # `forward` sets it
        self.device: torch.device = next(model.parameters()).device

    @property
    def kv_share(self) -> float:
        """Share of a layer's parameters that is computed to get keys and values."""
        names = ("qkv_proj", "k_proj", "v_proj", "fused_qkv_a_proj", "kv_a_proj_with_mqa")
        parts = [part for name, part in self.layers[0].named_modules() if name.rpartition(".")[2] in names]
        return sum(map(_num_weights, parts)) / _num_weights(self.layers[0])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [R, 1, hidden size] of token ids [R], as the model passes them to its first layer."""
        if not len(token_ids):
            return self.embed(token_ids.new_zeros(1))[:0]
        first, kept = self.layers[0], list[Tensor]()

        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept.append(self._signature.bind(first, *args, **kwargs).arguments["hidden_states"])
            raise StopLayerError

        hook = first.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with suppress(StopLayerError):
                self._run_model(token_ids, torch.zeros_like(token_ids))
        finally:
            hook.remove()
        return kept[0].reshape(len(token_ids), 1, -1)

    def run_layer(self, layer: int, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run a layer on copies of `hidden`, because the layer may write into its arguments."""
        parts = [part.clone(memory_format=torch.contiguous_format) for part in torch.unbind(hidden, 1)]
        residual = {"residual": parts[1] if len(parts) > 1 else None} if self._takes_residual else {}
        output = self.layers[layer](positions=positions, hidden_states=parts[0], **residual)
        return torch.stack(output if isinstance(output, tuple) else (output,), dim=1)

    def rotate_keys(self, layer: int, keys: Tensor, rows: Tensor) -> None:
        """Rotate the contiguous tensor `keys` [R, H, D] in place to positions `rows` [R]. Without RoPE, do nothing."""
        if not self._has_rope[layer]:
            return
        if is_latent(self.attention[layer]):
            rotate_shared_keys(keys, rows, self._rotary[layer])
            return
        flat, rotary = keys.view(len(keys), -1), self._rotary[layer]
        # M-RoPE, which is plain RoPE for positions [R], requires both of its arguments.
        other = keys[:, 0].clone() if hasattr(rotary, "mrope_section") else None
        rotated, _ = rotary(rows, flat, other)
        if rotated.data_ptr() != flat.data_ptr():  # the module decides whether it works in place
            flat.copy_(rotated)

    def key_rotation(self, layer: int, end: int) -> Rotation | None:
        """Return the rotation of `rotate_keys` to any position before `end`; None if its tables are unknown."""
        if not self._has_rope[layer]:
            nothing = torch.empty(0, 0, dtype=torch.float32, device=self.device)
            return Rotation(nothing, nothing)
        found = self._rotary_layouts[id(self._rotary[layer])]
        if found is None:
            return None
        tables, layout = found
        return Rotation(*tables.of_all(end, "", layout), layout.adjacent)

    @contextmanager
    def capture(self, layer: int, then: Callable[[], None]) -> Iterator[list[Tensor]]:
        """Yield a list that receives the layer's keys (after QK-norm, before RoPE) and values, [R, H * D] each.

        `then` is called before the layer writes KV and attends.
        """
        kept: list[Tensor] = []
        latent, rotary = is_latent(self.attention[layer]), self._rotary[layer]

        def before_rotary(_module: Any, args: tuple[Any, ...]) -> None:
            if not kept:  # `then` may call the rotary module, too
                # A copy, because the rotary kernels work in place.
                kept.append(split_pairs(args[2], rotary) if latent else args[2].clone())

        def before_attention(_module: Any, args: tuple[Any, ...]) -> None:
            keys, values = args[2:0:-1] if latent else args[1:3]
            if not kept:  # without RoPE
                kept.append(keys.clone())
            kept.append(values.clone())
            then()

        hooks = [self.attention[layer].register_forward_pre_hook(before_attention)]
        if rotary is not None:
            hooks.append(rotary.register_forward_pre_hook(before_rotary))
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the normed output [R, hidden size] of the model's own uncompiled forward pass."""

        def note(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._norm_takes_residual = len(args) + len(kwargs) > 1

        hook = self._decoder.norm.register_forward_pre_hook(note, with_kwargs=True)
        try:
            return self._run_model(token_ids, positions)
        finally:
            hook.remove()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the final norm [R, hidden size] of the last layer's output.

        Needs a call of `forward` before it, whose arguments of the norm it repeats.
        """
        parts = [part.contiguous() for part in torch.unbind(hidden, 1)]
        output = self._decoder.norm(*parts if self._norm_takes_residual else parts[:1])
        normed: Tensor = output[0] if isinstance(output, tuple) else output
        return normed

    def _run_model(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        output: Any = self._decoder.forward(token_ids, positions, None)
        normed: Tensor = output[0] if isinstance(output, tuple) else output  # with EAGLE 3, more states follow
        return normed

    @cached_property
    def _rotary(self) -> list[Any]:
        """The rotary module of each layer; None for a layer without one."""
        return [
            next((module.rotary_emb for module in layer.modules() if hasattr(module, "rotary_emb")), None)
            for layer in self.layers
        ]

    @cached_property
    @torch.inference_mode()
    def _has_rope(self) -> tuple[bool, ...]:
        """Whether each layer calls its rotary module; found by running the layers up to their attention."""
        position, has_rope = torch.zeros(1, dtype=torch.int64, device=self.device), []
        hidden = self.embed(position)
        for layer, rotary in enumerate(self._rotary):
            calls: list[bool] = []
            if rotary is not None:
                hook = rotary.register_forward_pre_hook(lambda *_, calls=calls: calls.append(True))
                with self.capture(layer, stop_layer), suppress(StopLayerError):
                    self.run_layer(layer, position, hidden)
                hook.remove()
            has_rope.append(bool(calls))
        return tuple(has_rope)

    @cached_property
    @torch.inference_mode()
    def _rotary_layouts(self) -> dict[int, tuple[RotaryTables, RotaryLayout] | None]:
        """The tables of each rotary module, by its id, and their layout; None if they are unknown."""
        layer_of = {id(rotary): layer for layer, rotary in enumerate(self._rotary) if self._has_rope[layer]}
        return {key: self._find_rotary_layout(layer) for key, layer in layer_of.items()}

    def _find_rotary_layout(self, layer: int) -> tuple[RotaryTables, RotaryLayout] | None:
        rotary, attention = self._rotary[layer], self.attention[layer]
        cache = getattr(rotary, "cos_sin_cache", None)
        if not isinstance(cache, Tensor) or is_latent(attention):
            return None
        tables = RotaryTables(_angles_of(rotary), len(cache), self.device)
        rows = torch.tensor(_TRIED_POSITIONS, device=self.device)
        shape = len(rows), attention.num_kv_heads, attention.head_size
        keys = torch.randn(shape, generator=torch.Generator().manual_seed(layer)).to(self.embed(rows[:1]))
        rotated = keys.clone()
        self.rotate_keys(layer, rotated, rows)

        def error(layout: RotaryLayout) -> float:
            cos, sin = tables.of_all(max(_TRIED_POSITIONS) + 1, "", layout)
            ours = rotate(keys.transpose(0, 1), cos[rows], sin[rows], layout.adjacent).transpose(0, 1)
            return float((ours.float() - rotated.float()).norm() / rotated.float().norm())

        layout = min(ROTARY_LAYOUTS, key=error)
        return (tables, layout) if error(layout) <= _LAYOUT_TOLERANCE else None


def _angles_of(rotary: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that calls vLLM's `rotary` module as transformers' ones are called: for cosine and sine."""

    def angles(_like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary.cos_sin_cache[position_ids].float().chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    return angles


class TransformersDecoder(VllmDecoder):
    """Decoder of vLLM's Transformers backend: transformers' layers around vLLM's attention.

    Their keys before RoPE are those of a pass with an angle of 0.
    """

    captures_in_pass = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if not hasattr(self._decoder, "rotary_emb"):
            raise UnsupportedModelError(f"{type(self._decoder).__name__} has no module `rotary_emb`. {FIX_HINT}")
        config = self._decoder.config
        ropes = rope_parameters(config)
        self._kinds = list(config.layer_types) if "" not in ropes else [""] * len(self.layers)
        self._unrotated = False
        self._latest: tuple[Any, str, tuple[Tensor, Tensor]] | None = None  # rows, kind of layer, tables
        self._rotary_tables = RotaryTables(self._decoder.rotary_emb, config.max_position_embeddings, self.device)

    def run_layer(self, layer: int, positions: Tensor, hidden: Tensor) -> Tensor:
        """Run a layer, with keys and queries that are not rotated inside `capture`."""
        cos, sin = self._tables(positions, self._kinds[layer])
        if self._unrotated:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        output = self.layers[layer](
            hidden[:, 0].clone(memory_format=torch.contiguous_format)[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=(cos[None].to(hidden.dtype), sin[None].to(hidden.dtype)),
            use_cache=False,
        )
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states[0][:, None]

    def rotate_keys(self, layer: int, keys: Tensor, rows: Tensor) -> None:
        """Rotate the contiguous tensor `keys` [R, H, D] in place to positions `rows` [R]. Without RoPE, do nothing."""
        layout = self._layouts[layer]
        if layout.direction:
            cos, sin = layout.arrange(*self._tables(rows, self._kinds[layer]))
            keys.copy_(rotate(keys.transpose(0, 1), cos, sin, layout.adjacent).transpose(0, 1))

    def key_rotation(self, layer: int, end: int) -> Rotation:
        """Return the rotation that `rotate_keys` makes, to any position before `end`."""
        layout = self._layouts[layer]
        return Rotation(*self._rotary_tables.of_all(end, self._kinds[layer], layout), layout.adjacent)

    @contextmanager
    def capture(self, layer: int, then: Callable[[], None]) -> Iterator[list[Tensor]]:
        """Yield a list that receives keys before RoPE and values, [R, H * D] each, of a pass that `then` ends."""
        self._unrotated = True
        try:
            with self._attention_inputs(layer, then) as kept:
                yield kept
        finally:
            self._unrotated = False

    @contextmanager
    def _attention_inputs(self, layer: int, then: Callable[[], None]) -> Iterator[list[Tensor]]:
        """Yield a list that receives the keys and values, [R, H * D] each, with which the layer attends."""
        attention, kept = self.attention[layer], list[Tensor]()

        def attend(_query: Tensor, key: Tensor, value: Tensor, *_: Any) -> None:
            kept.extend((key.clone(), value.clone()))
            then()

        attention.forward = attend  # the backend calls this method, without hooks
        try:
            yield kept
        finally:
            del attention.forward

    def _run_model(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        output: Tensor = self._decoder.forward(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=False
        )[0]
        return output[0]

    def _tables(self, rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Return the rotary module's cosine and sine [R, D] in float32 for positions `rows` [R]."""
        if self._latest is None or self._latest[0] is not rows or self._latest[1] != kind:
            dummy = torch.empty(0, dtype=torch.float32, device=self.device)
            which = {"layer_type": kind} if kind else {}
            cos, sin = self._decoder.rotary_emb(dummy, position_ids=rows[None], **which)
            self._latest = rows, kind, (cos[0], sin[0])
        return self._latest[2]

    @cached_property
    @torch.inference_mode()
    def _layouts(self) -> tuple[RotaryLayout, ...]:
        """How each layer rotates its keys: the layout whose result is nearest to what the layer itself computes."""
        return tuple(self._find_layout(layer) for layer in range(len(self.layers)))

    def _find_layout(self, layer: int) -> RotaryLayout:
        rows = torch.tensor(_TRIED_POSITIONS, device=self.device)
        like = self.embed(torch.zeros_like(rows))
        hidden = torch.randn(like.shape, generator=torch.Generator().manual_seed(layer)).to(like)
        with self.capture(layer, stop_layer) as before, suppress(StopLayerError):
            self.run_layer(layer, rows, hidden)
        with self._attention_inputs(layer, stop_layer) as after, suppress(StopLayerError):
            self.run_layer(layer, rows, hidden)
        tables = self._tables(rows, self._kinds[layer])
        keys, rotated = (each[0].view(len(rows), -1, self.attention[layer].head_size) for each in (before, after))

        def error(layout: RotaryLayout) -> float:
            ours = rotate(keys.transpose(0, 1), *layout.arrange(*tables), layout.adjacent)
            return float((ours.transpose(0, 1).float() - rotated.float()).norm())

        return min(ROTARY_LAYOUTS, key=error)


def find_decoder(model: Any) -> VllmDecoder:
    """Return the decoder of vLLM's `model`. Raises UnsupportedModelError if it cannot be run a layer at a time.

    Of a multimodal model it is the language model's, which runs prompts of text alone.
    """
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    is_transformers = type(model).__module__.startswith("vllm.model_executor.models.transformers")
    return TransformersDecoder(model) if is_transformers else VllmDecoder(model)


def _num_weights(module: Any) -> int:
    """Return the number of weights of `module`.

    It is computed from sizes, because on a CPU vLLM moves the weights of linear layers out of their parameters.
    """
    count = 0
    for part in module.modules():
        if hasattr(part, "base_layer"):  # a LoRA layer around a linear one, which is counted itself
            continue
        inputs = getattr(part, "input_size_per_partition", getattr(part, "input_size", 0))
        outputs = getattr(part, "output_size_per_partition", getattr(part, "output_size", 0))
        count += max(int(inputs * outputs), sum(parameter.numel() for parameter in part.parameters(recurse=False)))
    return count
