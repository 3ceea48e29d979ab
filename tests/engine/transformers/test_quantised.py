"""Weights in few bits, as far as a CPU runs them: bitsandbytes in 8 and 4 bits; FP8, which is dequantised there.

AWQ and GPTQ need kernels that are not here: they have to be refused with transformers' own reason.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from tiny_prompts import CHUNKS, PROMPT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.models.llama import LlamaForCausalLM

from ragblend.engine.fusion import self_check as self_check_module
from ragblend.engine.fusion.self_check import self_check
from ragblend.engine.load import load_engine
from ragblend.errors import UnsupportedModelError
from ragblend.llm import ChatBlend

BITS: dict[str, dict[str, Any]] = {
    "8 bit": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_tokenizer):
    path = tmp_path_factory.mktemp("models") / "wide"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
    make_model(LlamaForCausalLM, **sizes).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # 8 bit says at every product that it casts its input
    return path


def asked(bits: str) -> dict[str, Any]:
    return {"quantization_config": BitsAndBytesConfig(**BITS[bits])}


@pytest.mark.parametrize("bits", list(BITS))
def test_bitsandbytes_runs_on_a_cpu_and_finds_its_own_kv_alone(bits, saved, tmp_path):
    pytest.importorskip("bitsandbytes")
    with load_engine(str(saved), tmp_path) as plain:
        marks = {plain.fingerprint}
    with load_engine(str(saved), tmp_path, model_kwargs=asked(bits), new_model=True, on_miss="inline") as engine:
        assert "bitsandbytes" in str(type(engine.layers.model.model.layers[0].self_attn.k_proj))
        assert engine.fingerprint not in marks
        for chunk in CHUNKS:
            engine.precompute(chunk)
        answer = engine.generate(PROMPT, recompute_ratio=1.0, max_tokens=6)
        assert answer.report.num_chunk_hits == 3
    with load_engine(str(saved), tmp_path, model_kwargs=asked(bits), on_miss="inline") as again:
        assert again.fingerprint == engine.fingerprint
        assert again.generate(PROMPT, recompute_ratio=1.0, max_tokens=6).token_ids == answer.token_ids
    chat = ChatBlend(model=str(saved), store=tmp_path, engine_options={"model_kwargs": asked(bits)}, max_tokens=2)
    assert chat.engine.fingerprint == engine.fingerprint
    chat.engine.close()


def test_the_gates_allow_a_quantised_models_own_noise_and_log_it(saved, caplog):
    pytest.importorskip("bitsandbytes")
    with caplog.at_level("WARNING"), load_engine(str(saved), model_kwargs=asked("8 bit")) as engine:
        assert "depend on how many tokens run together" in caplog.text
        with pytest.raises(UnsupportedModelError, match=r"fails the exactness check of .*, allowed 0\.001"):
            self_check(engine.layers, 300, "strictly")  # as of weights that are not quantised
    caplog.clear()
    with caplog.at_level("WARNING"), load_engine(str(saved)):
        assert "depend on how many" not in caplog.text


def test_a_wrong_rotation_fails_the_gates_of_a_quantised_model_too(saved, monkeypatch):
    pytest.importorskip("bitsandbytes")
    with load_engine(str(saved), model_kwargs=asked("8 bit")) as engine:
        layers = engine.layers
        place = type(layers).place_keys

        def later(self: Any, layer: int, keys: Tensor, rows: Tensor) -> Tensor:
            return place(self, layer, keys, rows + 1)

        monkeypatch.setattr(type(layers), "place_keys", later)
        with pytest.raises(UnsupportedModelError, match=r"key placement \(RoPE\): relative error"):
            self_check(layers, 300, "broken", is_quantised=True)


def test_noise_is_nothing_where_nothing_is_quantised(saved):
    with load_engine(str(saved)) as engine, torch.inference_mode():
        noise = self_check_module._own_noise(engine.layers, 300)
        assert max(noise.values()) < 1e-5


def test_quantised_checkpoints_saved_or_loaded_are_fingerprinted_by_their_weights(saved, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_pretrained(saved, **asked("nf4"), dtype=torch.float32, device_map={"": "cpu"})
    tokenizer = AutoTokenizer.from_pretrained(saved)
    with load_engine((model, tokenizer)) as engine:
        first = engine.fingerprint
    again = AutoModelForCausalLM.from_pretrained(saved, **asked("nf4"), dtype=torch.float32, device_map={"": "cpu"})
    with load_engine((again, tokenizer)) as engine:
        assert engine.fingerprint == first
    model.save_pretrained(tmp_path / "nf4")
    tokenizer.save_pretrained(tmp_path / "nf4")
    with load_engine(str(tmp_path / "nf4"), on_miss="inline") as engine:
        assert "bitsandbytes" in str(type(engine.layers.model.model.layers[0].self_attn.k_proj))
        assert engine.generate(PROMPT, max_tokens=2).token_ids


def as_fp8(saved: Path, path: Path) -> Path:
    """The checkpoint in FP8 with one scale per block of 128 x 128, as DeepSeek's and Qwen's are."""
    shutil.copytree(saved, path)
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(saved / "model.safetensors").items():
        if "proj" not in name:
            weights[name] = weight
            continue
        blocks = [list(rows.split(128, dim=1)) for rows in weight.split(128)]
        scales = torch.tensor([[float(block.abs().max()) / 448 for block in row] for row in blocks])
        rows = [
            torch.cat([block / scale for block, scale in zip(*each, strict=True)], 1)
            for each in zip(blocks, scales, strict=True)
        ]
        weights[name] = torch.cat(rows).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    add_quantisation(path, quantised)
    return path


def add_quantisation(path: Path, quantised: dict[str, Any]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantised}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_fp8_weights_dequantised_on_a_cpu_have_another_fingerprint(saved, tmp_path):
    path = as_fp8(saved, tmp_path / "fp8")
    with load_engine(str(path), on_miss="inline") as engine, load_engine(str(saved)) as plain:
        weight = engine.layers.model.model.layers[0].self_attn.k_proj.weight
        assert weight.dtype == torch.float32
        original = plain.layers.model.model.layers[0].self_attn.k_proj.weight
        assert 0 < (weight - original).abs().max() < 0.1 * original.abs().max()
        for chunk in CHUNKS:
            engine.precompute(chunk)
        full = engine.generate(PROMPT, mode="full", max_tokens=8).token_ids
        blended = engine.generate(PROMPT, recompute_ratio=1.0, max_tokens=8)
        assert (blended.token_ids, blended.report.num_chunk_hits) == (full, 3)
        from ragblend.engine.transformers.checkpoints import model_fingerprint

        assert engine.fingerprint == model_fingerprint(path, "float32+dequantised")


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    ],
)
def test_awq_and_gptq_are_refused_without_their_kernels_and_with_the_reason(quantised, saved, tmp_path):
    path = Path(shutil.copytree(saved, tmp_path / "q"))
    add_quantisation(path, quantised)
    with pytest.raises(UnsupportedModelError, match=r"cannot be loaded .*(?i:gptq|awq)"):
        load_engine(str(path))
