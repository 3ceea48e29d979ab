"""Layers are fused exactly, or the model is rejected at load, by name, with the fix."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from reference import as_held
from tiny_models import LATENT, ROTATIONS, WINDOWED, make_model
from transformers import DynamicCache

from ragblend.engine.fusion.attention import LLAMA_LAYOUT, RotaryLayout
from ragblend.engine.fusion.plan import FusedKV
from ragblend.engine.fusion.self_check import TOLERANCE, self_check
from ragblend.engine.transformers.families import reject_unsupported_model
from ragblend.engine.transformers.layers import TransformersLayers, cache_argument_name
from ragblend.engine.transformers.positions import MAX_CACHED_TABLES, layer_windows
from ragblend.errors import UnsupportedModelError
from ragblend.lab.bench.common.shapes import DecoderShape
from ragblend.lab.bench.common.workloads import random_model


def load(model: Any, name: str = "tiny") -> TransformersLayers:
    """What loading does: refuse by layer type, then check exactness."""
    layers = TransformersLayers(model)
    self_check(layers, layers.config.vocab_size, name)
    return layers


def decoder(name: str) -> Any:
    """The class of transformers for the decoders that are called `name`."""
    return getattr(transformers, f"{name}ForCausalLM")


SIZES = {
    "vocab_size": 300,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "named", "changes"),
    [
        ("Llama4", "chunked_attention", SIZES),
        ("Gemma3n", "several hidden states per token", {}),
        ("Gemma3", "use_bidirectional_attention", SIZES | {"use_bidirectional_attention": True}),
        ("DeepseekV32", r"multi-head latent attention \(MLA\) with an index.*separate keys", SIZES),
        ("Mamba", "one state of all tokens so far", {}),
    ],
)
def test_what_cannot_be_fused_is_refused_by_its_layers(name, named, changes):
    """One of each kind; test_hf_families.py has every class of docs/models.md."""
    model = decoder(name)
    with torch.device("meta"):  # types alone are looked at, so the weights need no memory
        tiny = model(model.config_class(**changes))
    with pytest.raises(UnsupportedModelError, match=rf"{model.__name__}.*{named}.*attention with RoPE.*Llama"):
        reject_unsupported_model(tiny)


def test_a_setting_that_the_model_does_not_follow_is_found(tiny_model):
    """A soft cap in the config of a model that has none: its own logits are not capped."""
    model = tiny_model("llama")
    model.config.final_logit_softcapping = 1.0
    with pytest.raises(UnsupportedModelError, match=r"fails the exactness check of ratio 1\.0"):
        load(model)


@pytest.mark.parametrize("window", [2048, 4096])
def test_a_window_that_no_prompt_outgrows_is_none(window):
    layers = load(make_model(decoder("Mistral"), sliding_window=window))
    assert layers.context_length == 2048
    assert layer_windows(layers.config) == (None,) * 6
    assert layers.global_layers == ()


def test_the_check_is_made_with_windows_that_its_prompt_outgrows(tiny_model, monkeypatch):
    """Windows are thousands of tokens, and the prompt of the check is short. It leaves them as they were."""
    model = tiny_model("mistral_window")
    model.config.sliding_window = 1024
    load(model)
    assert (model.config.sliding_window, layer_windows(model.config)) == (1024, (1024,) * 6)
    monkeypatch.setattr("ragblend.engine.transformers.layers.layer_windows", lambda config: (1024, None) * 3)
    with pytest.raises(UnsupportedModelError, match="fails the exactness check"):
        load(model)


@pytest.mark.parametrize("changed", ["full_attention", "sliding_attention"])
def test_dynamic_ntk_rope_in_one_type_of_layer_is_refused(changed):
    model, changes = WINDOWED["gemma3"]
    tiny = make_model(model, **changes)
    tiny.config.rope_parameters[changed]["rope_type"] = "dynamic"
    with pytest.raises(UnsupportedModelError, match=r"RoPE type 'dynamic'.*yarn"):
        reject_unsupported_model(tiny)


def test_longrope_is_used_up_to_its_original_length():
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256, **factors}
    layers = load(make_model(decoder("Phi3"), rope_parameters=rope, original_max_position_embeddings=256))
    assert layers.context_length == 256


# --- the exactness check ---

ADJACENT, NO_ROPE = RotaryLayout(adjacent=True), RotaryLayout(direction=0)


def test_every_supported_family_passes_the_check(family, tiny_model):
    load(tiny_model(family))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "phi3", "gemma", "yarn", "qwen3_moe", *LATENT, *ROTATIONS, *WINDOWED]
)
def test_half_precision_passes_the_check(family, dtype, tiny_model):
    load(tiny_model(family).to(dtype))


SMALL_WINDOW = {"sliding_window": 30}
RELATIVES = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "olmoe": ("Olmoe", {}),  # QK-norm over all heads at once
    "arcee": ("Arcee", {}),
    "llama4": ("Llama4", {"layer_types": ["full_attention"] * 6}),  # layers of another signature
    "mixtral_window": ("Mixtral", SMALL_WINDOW | {"num_local_experts": 4}),
    "ministral": ("Ministral", SMALL_WINDOW),
    "starcoder2": ("Starcoder2", SMALL_WINDOW),
    "qwen3_moe_window": (
        "Qwen3Moe",
        SMALL_WINDOW | {"use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}
REFUSED = ("llama4",)


@pytest.mark.parametrize("name", RELATIVES)
def test_an_architecture_is_either_refused_or_exact(name):
    """Never a third thing: a model that loads gives the logits of a copy that ragblend has not touched."""
    kind, changes = RELATIVES[name]
    stock = make_model(decoder(kind), **changes)
    stock.set_attn_implementation("eager")
    ids = torch.randint(3, 300, (80,), generator=torch.Generator().manual_seed(0))
    try:
        layers = load(make_model(decoder(kind), **changes))
    except UnsupportedModelError:
        assert name in REFUSED
        return
    assert name not in REFUSED
    fused, hidden, rows = FusedKV.allocate(layers.kv_shapes, 80, layers.like), layers.embed(ids), torch.arange(80)
    with torch.inference_mode():
        for layer in range(layers.num_layers):
            hidden = layers.run_layer(layer, hidden, rows, fused)
        torch.testing.assert_close(layers.logits(hidden), stock(ids[None]).logits[0], atol=1e-4, rtol=0)


def sabotage_rope_of_one_layer(model: Any) -> None:
    """Layer 3 turns twice as fast as the tables say."""
    attention = model.model.layers[3].self_attn
    forward = attention.forward

    def other_frequencies(*args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return forward(*args, position_embeddings=(2 * cos * cos - 1, 2 * sin * cos), **kwargs)

    attention.forward = other_frequencies


def sabotage_values(model: Any) -> None:
    """Values depend on how many tokens run together, as in a layer that mixes tokens outside attention."""
    projection = model.model.layers[2].self_attn.v_proj
    forward = projection.forward
    projection.forward = lambda hidden: forward(hidden) + forward(hidden).mean(dim=-2, keepdim=True)


def sabotage_embedding(model: Any) -> None:
    """A position within the call comes in beside RoPE, as learned position embeddings would."""
    decoder = model.model.layers[0]
    run = decoder.forward
    decoder.forward = lambda hidden, **kwargs: run(
        hidden + 0.3 * torch.arange(hidden.shape[1])[None, :, None].to(hidden), **kwargs
    )


def sabotage_with_nan(model: Any) -> None:
    model.model.layers[4].self_attn.k_proj.weight.data[:] = torch.nan


@pytest.mark.parametrize(
    "sabotage", [sabotage_rope_of_one_layer, sabotage_values, sabotage_embedding, sabotage_with_nan]
)
def test_a_sabotaged_model_fails_the_check(sabotage, tiny_model):
    model = tiny_model("llama")
    load(model)
    sabotage(model)
    with pytest.raises(UnsupportedModelError, match=r"tiny fails the exactness check of.*docs/models\.md"):
        load(model)


OTHER_LAYOUTS = {
    "smollm3": [LLAMA_LAYOUT, NO_ROPE, LLAMA_LAYOUT, LLAMA_LAYOUT, NO_ROPE, LLAMA_LAYOUT],
    "cohere": [ADJACENT] * 6,
    "cohere2": [ADJACENT, ADJACENT, NO_ROPE] * 2,
    "exaone4": [LLAMA_LAYOUT, LLAMA_LAYOUT, NO_ROPE] * 2,
    "glm": [ADJACENT] * 6,
    "glm4": [ADJACENT] * 6,
    "nanochat": [RotaryLayout(direction=-1)] * 6,
}


def test_how_each_layer_rotates_its_keys_is_found(family, tiny_layers):
    """What is stored and placed for the other families is as it was before there were layouts."""
    layers = tiny_layers(family)
    assert list(layers._layouts) == OTHER_LAYOUTS.get(family, [LLAMA_LAYOUT] * layers.num_layers)


@pytest.mark.parametrize("sabotage", [None, sabotage_rope_of_one_layer, sabotage_values])
def test_half_precision_is_allowed_its_own_rounding_and_nothing_else(sabotage, monkeypatch, caplog):
    """As 32 layers of bfloat16 on a GPU, whose rounding exceeds what is tolerated of every model."""
    monkeypatch.setitem(TOLERANCE, torch.bfloat16, 8e-3)
    model = random_model(DecoderShape("llama", 6, 512, 1408, 8, 2, 64, 300, 4096), torch.bfloat16)
    load(model)
    assert "depend on how many tokens run together" in caplog.text
    if sabotage is None:
        return
    sabotage(model)
    with pytest.raises(UnsupportedModelError, match="tiny fails the exactness check of"):
        load(model)


def test_a_wrong_rotation_is_named(tiny_model, monkeypatch):
    layers = TransformersLayers(tiny_model("llama"))
    monkeypatch.setattr(layers, "place_keys", lambda layer, keys, rows: keys)
    with pytest.raises(UnsupportedModelError, match=r"fails the exactness check of key placement \(RoPE\)"):
        self_check(layers, 300, "tiny")


@pytest.mark.parametrize(("too_many", "found"), [(3, "fails the exactness check"), (0, "scattered rows over exact KV")])
def test_a_wrong_mask_is_found(too_many, found, tiny_model, monkeypatch):
    """One that shows later tokens; and the bottom-right one that attention kernels build by themselves, exact at ratios
    0 and 1 and wrong between them."""

    def bottom_right(query, keys, values, rows, scale, params, positions=()):
        num_rows, end = query.shape[2], int(rows[-1]) + 1
        mask = torch.ones(num_rows, end, dtype=torch.bool).tril(end - num_rows + too_many)
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=scale, enable_gqa=True
        )

    monkeypatch.setattr("ragblend.engine.transformers.model_attention.attend_rows", bottom_right)
    with pytest.raises(UnsupportedModelError, match=found):
        load(tiny_model("llama"))


# --- properties of a LayerwiseModel ---


@pytest.mark.parametrize(("family", "made"), [("llama", 2 * 64 * 32), ("deepseek_v3", 64 * (24 + 8))])
def test_kv_share_is_the_parameter_share_of_keys_and_values(family, made, tiny_layers):
    layer = tiny_layers(family).model.model.layers[0]
    assert tiny_layers(family).kv_share == pytest.approx(made / sum(p.numel() for p in layer.parameters()))


def test_rows_are_rotated_the_same_with_and_without_cached_tables(tiny_layers):
    layers, fresh = tiny_layers("llama"), tiny_layers("llama")
    generator = torch.Generator().manual_seed(0)
    many = [torch.arange(start, start + 4) for start in (0, 7, 100, 300, 700)]  # more than are kept
    keys = torch.randn(2, 4, 16, generator=generator)
    for rows in (*many, *many, many[0], many[0]):
        assert torch.equal(layers.place_keys(1, keys, rows), fresh.place_keys(1, keys, rows.clone()))
        assert len(layers._rotary._cached) <= MAX_CACHED_TABLES


def test_full_prefill_is_the_stock_models(family, stock_model, tiny_layers):
    ids = torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits, kv = tiny_layers(family).full_prefill(ids)
        model, cache = stock_model(family), DynamicCache(config=stock_model(family).config)
        expected = model(ids[None], **{cache_argument_name(model): cache})
    torch.testing.assert_close(logits, expected.logits[0, -1], atol=1e-4, rtol=0)
    made = [layer for layer in cache.layers if layer.keys is not None]  # Gemma 4 has layers without KV
    for layer, other in zip(kv, made, strict=True):
        assert layer.keys.shape[1] == 70
        keys, values = as_held(stock_model(family), other.keys[0], other.values[0])
        last = slice(70 - keys.shape[1], 70)  # transformers keeps a window; ours keeps all rows
        torch.testing.assert_close(layer.keys[:, last], keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(layer.values[:, last], values, atol=1e-4, rtol=0)


def forward_with(own: type, name: str, calls: set[tuple[str, str]]) -> Any:
    """`own`'s forward with `name` for its KV cache. Adds (class, name used) to `calls`, but for a model's own calls."""
    accepted = "cache" if "cache" in inspect.signature(own.forward).parameters else "past_key_values"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        (used,) = kwargs.keys() & {"cache", "past_key_values"}
        if "blend_window" in kwargs or hasattr(own, "generate"):
            calls.add((own.__name__, used))
        return own.forward(self, *args, **{accepted: kwargs.pop(used)}, **kwargs)

    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("hidden_states", name)]
    forward.__signature__ = inspect.Signature(parameters)
    return forward


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_argument_has_the_name_that_the_models_class_expects(name, tiny_model):
    """transformers 5.24 renamed the argument; code that comes with a checkpoint may have either name."""
    model, calls = tiny_model("llama"), set()
    for module in (model, *model.model.layers):
        own = type(module)
        module.__class__ = type(own.__name__, (own,), {"forward": forward_with(own, name, calls)})
    load(model)
    assert calls == {("LlamaForCausalLM", name), ("LlamaDecoderLayer", name)}


@pytest.mark.parametrize("loaded_later", ["llama", "gpt_oss", "gemma2"])
def test_a_model_keeps_its_own_eager_attention_after_another_is_loaded(loaded_later, stock_model, tiny_model):
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1))
    families = ("llama", "gpt_oss", "deepseek_v2")
    layers = {family: TransformersLayers(tiny_model(family)) for family in families}
    TransformersLayers(tiny_model(loaded_later))
    for family in families:
        with torch.inference_mode():
            logits, _ = layers[family].full_prefill(ids)
            expected = stock_model(family)(ids[None]).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_logits_of_some_tokens_equal_those_of_all(stock_model, tiny_layers):
    """Gemma 4's layers without own KV run only tokens whose logits are kept, the last ones."""
    ids = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = stock_model("gemma4")(ids).logits[:, -5:]
        found = tiny_layers("gemma4").model(ids, logits_to_keep=5).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_layers_that_use_the_kv_of_others_have_none(tiny_layers):
    """Of eight layers of Gemma 4, six make KV, in heads of two sizes; reuse and blending run through those alone."""
    layers = tiny_layers("gemma4")
    assert layers.num_layers == 6
    assert layers.kv_shapes == [(2, 16, 16), (2, 16, 16), (2, 32, 32)] * 2
    assert layers.global_layers == (2, 5)
    assert tiny_layers("gemma4_moe").kv_shapes == [(2, 16, 16), (2, 16, 16), (1, 24, 24)] * 2


@pytest.mark.parametrize("layers", [(0,), range(8)], ids=["the first", "all"])
def test_layers_without_kv_anywhere_but_behind_all_others_are_refused(layers, tiny_model):
    model = tiny_model("gemma4")
    for layer in layers:
        model.model.layers[layer].self_attn.is_kv_shared_layer = True
    with pytest.raises(UnsupportedModelError, match="KV of another model, or has a layer that makes KV after"):
        reject_unsupported_model(model)


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_wrapping_a_model_leaves_its_generate_as_it_was(family, stock_model, tiny_layers):
    ids = torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(2))
    ids[0, :7] = 0
    arguments = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "do_sample": False}
    expected = stock_model(family).generate(ids, **arguments)
    assert tiny_layers(family).model.generate(ids, **arguments).tolist() == expected.tolist()
