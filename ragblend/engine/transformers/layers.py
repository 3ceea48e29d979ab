"""A transformers decoder as a LayerwiseModel: its own layers, run one at a time over any subset of tokens.

The extension point is `Cache.update`: a cache whose `update` scatters the fresh rows into the fused KV and returns the
whole layer turns any standard decoder layer into a partial-prefill layer. `model_attention` computes the attention over
scattered rows. Norms, projections, QK-norm, GQA and MLP are the model's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from ragblend.engine.fusion.attention import ROTARY_LAYOUTS, RotaryLayout, Rotation, has_kernels, position_end
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.fusion.protocols import FreshRowsCallback, PromptKVBuffer, QueryProbeHook
from ragblend.engine.store.format.kv import LayerKV
from ragblend.engine.transformers.adapters import describe_active_adapters
from ragblend.engine.transformers.batched_decode import (
    BatchedDecodeCache,
    FewRowsCpuMatmul,
    assign_rows,
)
from ragblend.engine.transformers.families import (
    family_of,
    kv_source_layers,
    text_decoder,
)
from ragblend.engine.transformers.model_attention import PackedCache, RowCache, wrap_attention
from ragblend.engine.transformers.positions import (
    KeyRotation,
    RotaryTables,
    context_length,
    layer_windows,
    rope_parameters,
)
from ragblend.errors import RagblendError

_TRIED_POSITIONS = (1, 7, 30)  # at which the rotation of a layer is found


class _StopError(Exception):
    """Ends a layer's forward pass once its keys are computed."""


class _KeysCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Cache that keeps the keys and values of a layer as `kv`, and ends the layer's forward pass."""

    kv: LayerKV

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Set `kv` from [1, H, R, D]. Raises _StopError."""
        self.kv = LayerKV(key_states[0], value_states[0])
        raise _StopError


class TransformersLayers:
    """LayerwiseModel of a transformers causal LM: its layers run one at a time, over any subset of the prompt's tokens.

    Raises UnsupportedModelError for a model with a layer whose results would not be exact. In shapes: R rows (tokens),
    H KV heads, D head size.
    """

    def __init__(self, model: Any) -> None:
        self._family = family_of(model)
        wrap_attention(model)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self._decoder = text_decoder(model)
        self._layers = list(self._decoder.layers)
        self._kv_sources = kv_source_layers(self._layers)
        self.num_layers = len(set(self._kv_sources))
        """Layers that make KV. Those after them attend to it, so only tokens whose logits are read run through them."""
        embedding = self._decoder.embed_tokens.weight
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype  # dtype of the computation and of the KV
        self.like = torch.empty(0, dtype=self.dtype, device=self.device)
        """An empty tensor of the KV's dtype and device."""
        self._model_cache_argument = cache_argument_name(model)
        self._layer_cache_argument = cache_argument_name(self._layers[0])
        self._adapters = describe_active_adapters(model) if getattr(model, "peft_config", None) else ""
        ropes = rope_parameters(self.config)
        self._kinds = list(self.config.layer_types) if "" not in ropes else [""] * len(self._layers)
        self.context_length = context_length(self.config)
        self._rotary = RotaryTables(
            self._decoder.rotary_emb, self.context_length, self.device, half_tables=self._family.half_tables
        )
        self._windows = layer_windows(self.config)
        seeing_all = tuple(layer for layer in range(self.num_layers) if self._windows[layer] is None)
        self.global_layers = seeing_all if len(seeing_all) < self.num_layers else ()
        """Layers without an attention window, if other layers have one; else ()."""
        self.kv_shapes = [self._family.kv_shape(layer.self_attn) for layer in self._layers[: self.num_layers]]
        self.uses_kernels = has_kernels(self.device)
        """True if Triton's kernels place stored KV and compute the attention of scattered rows."""
        self._layer_input_size: int = getattr(self.config, "hidden_size_per_layer_input", None) or 0
        kv_modules = self._family.stored_kv_projections(self._layers[0].self_attn)
        self.kv_share = _num_parameters(*kv_modules) / _num_parameters(self._layers[0])
        """Share of one layer's parameters that makes K and V: the cost of projecting a token's KV, in token-layers."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [R, hidden size] of token ids [R].

        Some models (Gemma 4) also have an input vector for each token and layer. The vectors of all layers are then
        appended to the token's embedding. `run_layer` uses the vector of its layer, and does not return this vector.
        """
        if self._adapters:
            self._check_adapters()
        hidden: Tensor = self._decoder.embed_tokens(token_ids) * self._family.embedding_multiplier
        if self._family.norms_embeddings:
            hidden = self._decoder.norm(hidden)
        if not self._layer_input_size:
            return hidden
        of_tokens = self._decoder.get_per_layer_inputs(token_ids[None], None)
        inputs = self._decoder.project_per_layer_inputs(hidden[None], of_tokens)  # [1, R, layers, size]
        return torch.cat((hidden, inputs[0].flatten(1)), dim=1)

    def _check_adapters(self) -> None:
        """Raise RagblendError if the model's adapters have changed since loading. Stored KV would not fit the model."""
        if describe_active_adapters(self.model) != self._adapters:
            raise RagblendError(
                "the model's adapters were changed after its engine was loaded, so the stored KV does not fit the "
                "model; switch back (set_adapter), or load an engine for each: load_engine((model, tokenizer), ...)"
            )

    def project_kv(self, layer: int, hidden: Tensor) -> LayerKV:
        """Return a layer's pre-RoPE keys (after QK-norm) and values [H, R, D]. The layer's attention does not run."""
        block = self._layers[layer]
        hidden = hidden[:, : self.config.hidden_size]
        norm = getattr(block, "input_layernorm", None)  # None: attention's output is normed instead (OLMo 2)
        normed = hidden if norm is None else norm(hidden)
        keys, values = self._family.keys_and_values(block.self_attn, normed)
        return LayerKV(keys.transpose(0, 1), values.transpose(0, 1))

    def place_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Return the pre-RoPE `keys` [H, R, D] rotated to positions `rows` [R]. The rotation is computed in float32."""
        return self._rotation(layer, rows).rotate(keys)

    def unrotate_keys(self, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
        """Undo `place_keys`: return the pre-RoPE form [H, R, D] of `keys` at positions `rows` [R]."""
        return self._rotation(layer, rows).undo(keys)

    def expand_kv(self, layer: int, stored: LayerKV) -> LayerKV:
        """Return the keys and values [heads, T, D] that a layer's attention computes with, given its stored KV.

        The keys in `stored` are rotated.
        """
        return self._family.expand_kv(self._layers[layer].self_attn, stored)

    def add_key_drift(self, layer: int, keys: Tensor, drift: Tensor, rows: Tensor) -> None:
        """Add `drift` [H, R, D] float32, a change of pre-RoPE keys, to rotated `keys` [H, R, D] in place.

        `rows` [R]: positions of the keys. The drift is rotated to these positions before it is added.
        """
        self._rotation(layer, rows).add(keys, drift)

    def run_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer, hook: FreshRowsCallback | None = None
    ) -> Tensor:
        """Run one decoder layer over the tokens at positions `rows` [R], and return its output [R, hidden size].

        The tokens' keys and values are written to `fused`. Before that, `hook` receives the pre-RoPE keys and the
        values of `rows[hook.row_indices]`. In some models, the last layers make no KV and read the KV of earlier
        layers. The call for the last layer that makes KV then also runs the layers that make none.
        """
        rotation = self.kernel_rotation(layer, position_end(rows)) if self.uses_kernels else None
        cache = RowCache(fused, partial(self._rotation, layer), rows, self._family, hook, rotation)
        for index in range(layer, layer + 1 if layer < self.num_layers - 1 else len(self._layers)):
            hidden = self._run(index, hidden, rows, cache, blend_rows=rows, blend_kernels=self.uses_kernels)
        return hidden

    def run_probe_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, fused: PromptKVBuffer, probe_hook: QueryProbeHook | None
    ) -> Tensor:
        """Run one decoder layer for a query probe, and return its output [R, hidden size].

        It differs from `run_layer` in two ways. `probe_hook` receives the queries, keys and values of the attention; if
        it returns a tensor, this is the attention's output. Layers that make no KV do not run.
        """
        rotation = self.kernel_rotation(layer, position_end(rows)) if self.uses_kernels else None
        cache = RowCache(fused, partial(self._rotation, layer), rows, self._family, None, rotation)
        how = {"blend_rows": rows, "blend_kernels": self.uses_kernels, "blend_probe_hook": probe_hook}
        return self._run(layer, hidden, rows, cache, **how)

    def _run(self, layer: int, hidden: Tensor, rows: Tensor, cache: Cache, **how: Any) -> Tensor:
        """Return the decoder layer's output [R, hidden size] over `rows`; `how` are arguments of `_attention`."""
        rotary = self._rotary.of_rows(rows, self._kinds[layer])
        embeddings: Any = rotary.embeddings.get(hidden.dtype)
        if embeddings is None:  # layers of one kind share them
            width = rotary.cos.shape[1] // 2 if self._family.half_tables else rotary.cos.shape[1]
            cos, sin = rotary.cos[None, :, :width], rotary.sin[None, :, :width]
            is_complex = self._family.complex_tables
            embeddings = torch.complex(cos, sin) if is_complex else (cos.to(hidden.dtype), sin.to(hidden.dtype))
            rotary.embeddings[hidden.dtype] = embeddings
        if self._family.shares_kv:
            source, kind = self._kv_sources[layer], self._layers[layer].self_attn.layer_type
            how["shared_kv_states"] = {} if source == layer else {kind: cache.read(source)}
        later_inputs = hidden[:, self.config.hidden_size + self._layer_input_size :]
        if self._layer_input_size:
            how["per_layer_input"] = hidden[None, :, self.config.hidden_size :][..., : self._layer_input_size]
            hidden = hidden[:, : self.config.hidden_size]
        output = self._layers[layer](
            hidden[None],
            attention_mask=None,
            position_ids=rows[None],
            use_cache=True,
            position_embeddings=embeddings,
            blend_window=self._windows[layer],
            **{self._layer_cache_argument: cache},
            **how,
        )
        hidden = (output[0] if isinstance(output, tuple) else output)[0]
        return torch.cat((hidden, later_inputs), dim=1) if later_inputs.shape[1] else hidden

    def run_packed_layer(
        self, layer: int, hidden: Tensor, rows: Tensor, spans: tuple[slice, ...], prefix: PromptKVBuffer
    ) -> tuple[Tensor, LayerKV]:
        """Run one layer over several chunks in one sequence. Each chunk runs as if it directly followed `prefix`.

        `spans`: the rows of `hidden` [R, hidden size] that belong to each chunk. `rows` [R]: the rows' positions. The
        first position of every chunk is the prefix's length. Return the output [R, hidden size], and the chunks'
        pre-RoPE keys and values [H, R, D]. `prefix` is not changed.
        """
        length = prefix.length
        prefix_kv = LayerKV(prefix.keys(layer)[:, :length], prefix.values(layer)[:, :length])
        cache = PackedCache(self.expand_kv(layer, prefix_kv), spans, self._family)
        with self._pre_rope_keys(layer) as keys:
            hidden = self._run(layer, hidden, rows, cache, blend_sequences=cache)
        return hidden, LayerKV(keys[0], cache.values)

    @contextmanager
    def _pre_rope_keys(self, layer: int) -> Iterator[list[Tensor]]:
        """Yield a list that receives the pre-RoPE keys [H, R, D] of each pass of the layer inside the block."""
        attention, keys = self._layers[layer].self_attn, list[Tensor]()

        def keep(_module: Any, _args: Any, output: Tensor) -> None:
            pre_rope = self._family.keys_from_module_output(attention, output[0])  # without the batch dimension
            keys.append(pre_rope.transpose(0, 1))

        hook = getattr(attention, self._family.key_module).register_forward_hook(keep)
        try:
            yield keys
        finally:
            hook.remove()

    def run_decode_batch(self, token_ids: Sequence[Sequence[int]], fused: Sequence[FusedKV]) -> Tensor:
        """Run the next tokens of B prompts through all layers. Return the logits [B, vocabulary] of their last tokens.

        `token_ids`: one or more tokens of each prompt, whose KV is appended to the prompt's FusedKV.
        """
        places = assign_rows([len(ids) for ids in token_ids], fused, self.device)
        batch = BatchedDecodeCache(places, self._family, self.expand_kv)
        rows = torch.cat([each.rows for each in places])
        # Several tokens of one prompt are multiplied as in a prefill, so that their KV has the same bits.
        with FewRowsCpuMatmul() if len(places) > 1 else nullcontext():
            hidden = self.embed(torch.tensor([one for ids in token_ids for one in ids], device=self.device))
            for layer in range(len(self._layers)):
                hidden = self._run(layer, hidden, rows, batch, blend_sequences=batch)
            logits = self.logits(hidden[[each.span.stop - 1 for each in places]])
        for each in places:
            each.fused.length = each.prompt_span.stop
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocabulary] in float32, from the final norm and the head."""
        logits: Tensor = self.model.lm_head(self._decoder.norm(hidden)) / self._family.logits_scaling
        softcap = self._family.logits_softcap
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        return logits.float()

    def full_prefill(self, token_ids: Tensor, cuts: Sequence[int] = ()) -> tuple[Tensor, list[LayerKV]]:
        """Run the model's own forward pass over token ids [T].

        Return the last token's logits [vocabulary], and the rotated keys and values of each layer. `cuts`: indices at
        which the ids are cut. A forward pass then runs for each piece, with the KV of the pieces before it.
        """
        if self._adapters:
            self._check_adapters()
        # A cache made without the config: one made with it deletes the tokens that have left a layer's window.
        cache, logits = DynamicCache(), torch.empty(0)
        with_cache = {self._model_cache_argument: cache}
        for piece in token_ids.tensor_split(list(cuts)):
            output = self.model(input_ids=piece[None], use_cache=True, logits_to_keep=1, **with_cache)
            logits = output.logits[0, -1].float()
        return logits, [self._family.to_stored(LayerKV(layer.keys[0], layer.values[0])) for layer in cache.layers]

    @contextmanager
    def self_check_mode(self, window: int) -> Iterator[None]:
        """Change the model for the self-check, whose prompt is short, until the `with` block ends.

        Attention windows are reduced to `window` tokens, because longer ones would have no effect in a short prompt. In
        half precision, every token uses all experts, because rounding could otherwise change the choice of experts.
        """
        config_window, windows = getattr(self.config, "sliding_window", None), self._windows
        routers = [each for each in self.model.modules() if hasattr(each, "top_k") and hasattr(each, "num_experts")]
        routers = [] if self.dtype == torch.float32 else routers
        chosen = [(router.top_k, getattr(router, "topk_group", None)) for router in routers]
        num_chosen = getattr(self.config, "top_k_experts", None)  # read by Gemma 4's routers
        if num_chosen and self.dtype != torch.float32:
            self.config.top_k_experts = self.config.num_experts
        if any(windows):
            self.config.sliding_window = window  # transformers makes its masks from it
            self._windows = tuple(window if each is not None else None for each in windows)
        for router in routers:
            router.top_k = router.num_experts
            if hasattr(router, "topk_group"):  # number of used groups of experts (DeepSeek V2 and V3)
                router.topk_group = router.num_group
        try:
            yield
        finally:
            if any(windows):
                self.config.sliding_window, self._windows = config_window, windows
            if num_chosen:
                self.config.top_k_experts = num_chosen
            for router, (count, groups) in zip(routers, chosen, strict=True):
                router.top_k = count
                if hasattr(router, "topk_group"):
                    router.topk_group = groups

    def kernel_rotation(self, layer: int, end: int) -> Rotation:
        """Return the rotation of a layer's keys to any position before `end`, as `kernels` take it."""
        layout, weight = self._layouts[layer], self._family.rotated_key_weight(self._layers[layer].self_attn)
        return Rotation(*self._rotary.of_all(end, self._kinds[layer], layout), layout.adjacent, weight)

    def _rotation(self, layer: int, rows: Tensor) -> KeyRotation:
        """Return the rotation of a layer's keys to the positions `rows` [R], in any order."""
        tables = self._rotary.of_rows(rows, self._kinds[layer], self._layouts[layer])
        return KeyRotation(tables, self._family.rotated_key_weight(self._layers[layer].self_attn))

    @cached_property
    def _layouts(self) -> tuple[RotaryLayout, ...]:
        """How each layer rotates its keys: the layout whose result is nearest to what the layer itself computes.

        Found once, by the first call, which the self-check at load makes. The self-check rejects a model with a layer
        that rotates in none of these ways.
        """
        return tuple(self._find_layout(layer) for layer in range(self.num_layers))

    @torch.inference_mode()
    def _find_layout(self, layer: int) -> RotaryLayout:
        like = self.embed(torch.zeros(len(_TRIED_POSITIONS), dtype=torch.int64, device=self.device))
        hidden = torch.randn(like.shape, generator=torch.Generator().manual_seed(layer)).to(like)
        rows, cache = torch.tensor(_TRIED_POSITIONS, device=self.device), _KeysCache(layers=[])
        with self._pre_rope_keys(layer) as keys, suppress(_StopError):
            self._run(layer, hidden, rows, cache, blend_rows=rows)
        expected = self._family.to_stored(cache.kv).keys.float()
        tables = self._rotary.of_rows(rows, self._kinds[layer])
        weight = self._family.rotated_key_weight(self._layers[layer].self_attn)

        def error(layout: RotaryLayout) -> float:
            rotation = KeyRotation(tables.arrange(layout), weight)
            return float((rotation.rotate(keys[0]).float() - expected).norm())

        return min(ROTARY_LAYOUTS, key=error)


def cache_argument_name(module: nn.Module) -> str:
    """Return the name of the KV cache argument of `module`'s forward method: "cache" or "past_key_values".

    It is `past_key_values` before transformers 5.24, and in modelling code that comes with a checkpoint. Later releases
    name it `cache`, and 5.40 removes the old name. The class's `forward` is inspected, because a module's own `forward`
    may be a wrapper that accepts every argument.
    """
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"


def _num_parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
