"""Refusals with a reason, from configuration objects that look like vLLM's. Needs no vLLM."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragblend.engine.vllm.launch import CONNECTOR, find_checkpoint, forecast_serving
from ragblend.engine.vllm.plugin import reserve_blend_memory
from ragblend.engine.vllm.support import (
    draft_note,
    kernel_blocks_per_block,
    model_fingerprint,
    reject_kv_groups,
    reject_unsupported_attention,
    reject_unsupported_config,
    require_supported_version,
    unsupported_reasons,
)
from ragblend.errors import RagblendError, UnsupportedModelError
from ragblend.options import ModelOptions
from ragblend.server.api import ServerResources


def config(hf: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **rest: Any) -> Any:
    """A configuration that is served, but for what is given."""
    hf_config = SimpleNamespace(
        **{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "rope_parameters": {}, **(hf or {})}
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{
                "hf_config": hf_config,
                "hf_text_config": hf_config,
                "dtype": torch.bfloat16,
                "model": "m",
                "max_model_len": 4096,
                **(model or {}),
            }
        ),
        parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, **rest.pop("parallel", {})}),
        cache_config=SimpleNamespace(cache_dtype=rest.pop("cache_dtype", "auto")),
        **rest,
    )


MIXED = {
    "architectures": ["Gemma3ForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
}


@pytest.mark.parametrize("found", [(0, 0), (0, 27)])
def test_other_versions_are_refused_with_the_range(found):
    for supported in ((0, 28), (0, 30), (0, 33)):
        require_supported_version(supported)
    with pytest.raises(RagblendError, match=r"0\.28 <= vllm < 0\.34"):
        require_supported_version(found)


def test_what_is_supported_is_not_refused():
    assert unsupported_reasons(config()) == []
    assert unsupported_reasons(config(cache_dtype="bfloat16")) == []
    # The check at start decides about architectures, with the model itself.
    assert unsupported_reasons(config({"architectures": ["SomeNewForCausalLM"]})) == []
    for method, loses in (("ngram", False), ("suffix", False), ("eagle3", True), ("mtp", True), ("draft_model", True)):
        drafting = config(speculative_config=SimpleNamespace(method=method))
        assert unsupported_reasons(drafting) == []
        assert (f"drafts by {method} lack the KV" in draft_note(drafting)) == loses
    for cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert unsupported_reasons(config(cache_dtype=cache_dtype)) == []
    # Adapters and images concern requests, which are left to vLLM.
    assert unsupported_reasons(config(lora_config=object())) == []
    assert unsupported_reasons(config(model={"is_multimodal_model": True})) == []
    assert unsupported_reasons(config({"rope_parameters": {"mrope_section": [16, 24, 24]}})) == []
    assert unsupported_reasons(config({"sliding_window": 4096, "use_sliding_window": False})) == []
    assert unsupported_reasons(config(model={"is_moe": True})) == []
    assert unsupported_reasons(config(parallel={"data_parallel_size": 2})) == []
    assert unsupported_reasons(config({"rope_parameters": {"rope_type": "llama3"}})) == []
    # as vLLM rewrites DeepSeek's "yarn"
    assert unsupported_reasons(config({"rope_parameters": {"rope_type": "deepseek_yarn"}}, {"use_mla": True})) == []
    by_type = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear"}}
    assert unsupported_reasons(config({**MIXED, "rope_parameters": by_type})) == []
    # --disable-sliding-window leaves the layers' types, and takes the window away
    assert unsupported_reasons(config({**MIXED, "sliding_window": None})) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config({"sliding_window": 512}), "512 tokens only.*--disable-sliding-window"),
        (config({**MIXED, "layer_types": ["sliding_attention"] * 2}), "512 tokens only.*--disable-sliding-window"),
        (config({"layer_types": ["full_attention", "chunked_attention"]}), "chunked_attention"),
        (config({"rope_parameters": {"rope_type": "dynamic"}}), "'dynamic' changes its frequencies"),
        (config({"rope_parameters": {"rope_type": "invented"}}), "'invented' is not known"),
        (
            config({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}),
            "--max-model-len 2048",
        ),
        (config({"index_topk": 2048}, {"use_mla": True}), "MLA with an index, whose keys ragblend does not store"),
        (config(model={"use_mla": True}, cache_dtype="fp8"), r"the KV cache is fp8, but latents \(MLA\) are placed"),
        (config(model={"is_hybrid": True}), "recurrent"),
        (config(parallel={"pipeline_parallel_size": 2}), "pipeline_parallel_size is 2"),
        (config(parallel={"decode_context_parallel_size": 2}), "decode_context_parallel_size"),
        (
            config(model={"is_moe": True}, parallel={"data_parallel_size": 2}),
            "data_parallel_size is 2 and it has experts",
        ),
        (config(cache_dtype="int8_per_token_head"), "int8_per_token_head.*fp8_e5m2.*--kv-cache-dtype"),
        (config(cache_dtype="float16"), "the KV cache is float16 and the model bfloat16"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(refused, reason):
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        reject_unsupported_config(refused)
    assert "Serve it without" in str(error.value)


@pytest.mark.parametrize(("found", "is_refused"), [((0, 0), False), ((0, 31), True), ((0, 32), False)])
def test_some_layers_with_a_window_need_a_vllm_that_tells_them_apart(monkeypatch, found, is_refused):
    monkeypatch.setattr("ragblend.engine.vllm.support.vllm_version", lambda: found)
    assert any("vllm#51756" in reason for reason in unsupported_reasons(config(MIXED))) == is_refused


@pytest.mark.parametrize(("found", "is_refused"), [((0, 0), False), ((0, 31), True), ((0, 32), False)])
def test_latents_need_the_first_release_in_which_they_were_tested(monkeypatch, found, is_refused):
    monkeypatch.setattr("ragblend.engine.vllm.support.vllm_version", lambda: found)
    assert bool(unsupported_reasons(config(model={"use_mla": True}))) == is_refused


def test_every_reason_is_named():
    both = config({"sliding_window": 512}, parallel={"pipeline_parallel_size": 2})
    assert len(unsupported_reasons(both)) == 2


def test_attention_that_ours_cannot_follow_is_refused():
    plain = {"scale": 0.5, "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None}
    reject_unsupported_attention(SimpleNamespace(**plain))
    reject_unsupported_attention(SimpleNamespace(scale=0.5))
    reject_unsupported_attention(SimpleNamespace(**{**plain, "logits_soft_cap": 30.0, "sinks": torch.ones(4)}))
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        reject_unsupported_attention(SimpleNamespace(**{**plain, "alibi_slopes": torch.ones(4)}))


def test_a_backend_that_plans_calls_together_is_rejected_with_the_flag():
    class FlashInferImpl:
        alibi_slopes = None

    class FlashInferMLAImpl(FlashInferImpl):
        kv_lora_rank = 512  # it plans nothing

    with pytest.raises(UnsupportedModelError, match=r"FlashInfer.*--attention-backend FLASH_ATTN"):
        reject_unsupported_attention(FlashInferImpl())
    reject_unsupported_attention(FlashInferMLAImpl())


@pytest.mark.parametrize(("shape", "ratio"), [((10, 2, 64, 32), 1), ((20, 2, 32, 32), 2), ((2, 40, 2, 16, 32), 4)])
def test_the_shape_of_the_paged_cache_gives_the_kernels_blocks(shape, ratio):
    assert kernel_blocks_per_block(shape, num_blocks=10, block_size=64) == ratio
    with pytest.raises(UnsupportedModelError, match=r"\(25, 2, 64\).* 10 blocks of 64 tokens.*--block-size"):
        kernel_blocks_per_block((25, 2, 64), num_blocks=10, block_size=64)


def test_more_than_one_kind_of_cache_is_refused():
    class FullAttentionSpec:
        sliding_window = None

    class MambaSpec:
        pass

    def groups(*specs: Any) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])

    reject_kv_groups(groups(FullAttentionSpec()))
    for refused in (groups(FullAttentionSpec(), MambaSpec()), groups(MambaSpec()), groups()):
        with pytest.raises(UnsupportedModelError, match="one KV cache of full attention"):
            reject_kv_groups(refused)


REPO = "someone/tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of Hugging Face, without network, that holds two revisions of one repo; the folder of their snapshots."""
    repo = tmp_path / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    for number, (revision, architecture) in enumerate((("main", "LlamaForCausalLM"), ("v2", "SomeNewForCausalLM"))):
        commit = f"{number}" * 40
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
        config = {"model_type": "llama", "architectures": [architecture], "vocab_size": 32, **sizes}
        (snapshot / "config.json").write_text(json.dumps(config))
        (snapshot / "model.safetensors").write_bytes(f"weights of {revision}".encode())
        (repo / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repo / "snapshots"


def served(model: str, **facts: Any) -> Any:
    """vLLM's ModelConfig, as far as a fingerprint depends on it."""
    hf_config = SimpleNamespace(num_hidden_layers=2)
    defaults = {"hf_overrides": {}, "quantization": None, "revision": None, "hf_config": hf_config}
    return SimpleNamespace(model=model, dtype=torch.float32, **{**defaults, "trust_remote_code": False, **facts})


def test_two_revisions_of_a_model_share_no_kv(hub):
    of_main, of_v2 = (model_fingerprint(served(REPO, revision=revision)) for revision in (None, "v2"))
    assert of_main != of_v2
    for revision, fingerprint in ((None, of_main), ("main", of_main), ("v2", of_v2)):
        options = ModelOptions(dtype="float32", revision=revision)
        assert find_checkpoint(REPO, options).fingerprint == fingerprint
        forecast = forecast_serving(REPO, options=options)
        assert (forecast.reasons, forecast.is_tested) == ((), revision != "v2")
    # vLLM ignores the revision of a directory.
    assert model_fingerprint(served(str(hub / ("1" * 40)), revision="v2")) == of_v2
    # A config from elsewhere may compute other KV with the same weights.
    assert model_fingerprint(served(str(hub / ("0" * 40)), hf_config_path=str(hub / ("1" * 40)))) != of_main


def test_a_server_reports_the_fingerprint_of_its_revision(hub, tmp_path):
    model = served(REPO, revision="v2", max_model_len=64, get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 32)
    model.hf_text_config = model.hf_config
    transfer = SimpleNamespace(kv_connector_extra_config={"store": str(tmp_path / "kv")})
    facts = ServerResources(SimpleNamespace(model_config=model, kv_transfer_config=transfer)).model_facts()
    assert facts["fingerprint"] == model_fingerprint(model) != model_fingerprint(served(REPO))
    assert facts["model"] == REPO


@pytest.mark.parametrize(
    ("connector", "given", "reserved"),
    [(CONNECTOR, None, 8 * 4096 * 2 * 8 * 128 * 2), (CONNECTOR, 1, 0), ("Other", None, 0)],
)
def test_vllms_gpu_kv_cache_leaves_memory_for_the_layers_of_a_blend(connector, given, reserved):
    served = config(
        model={"get_num_kv_heads": lambda parallel: 8, "get_head_size": lambda: 128},
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
    )
    served.cache_config.kv_cache_memory_bytes = given
    measure = reserve_blend_memory(lambda worker: 10 << 30)
    assert measure(SimpleNamespace(vllm_config=served)) == (10 << 30) - reserved


def test_latents_leave_room_for_the_workspace_that_expands_them():
    latents = {"use_mla": True, "get_head_size": lambda: 576}
    served = config(model=latents, kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR))
    served.cache_config.kv_cache_memory_bytes = None
    measure = reserve_blend_memory(lambda worker: 10 << 30)
    assert measure(SimpleNamespace(vllm_config=served)) == (10 << 30) - (8 * 4096 + (64 << 10)) * 576 * 2
