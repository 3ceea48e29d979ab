"""Finding, fingerprinting and loading a model; one store per model unless new_model is given."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from ragblend.engine.load import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.transformers.checkpoints import find_model, model_fingerprint
from ragblend.engine.transformers.model import load_model
from ragblend.errors import NotFoundError, StoreMismatchError, UnsupportedModelError, UsageError
from ragblend.lab.bench.common.shapes import SHAPES
from ragblend.lab.bench.common.workloads import random_model
from ragblend.options import ModelOptions
from ragblend.prompt.types import Prompt

PROMPT = Prompt(["Kim Lee works at Oston.", "Oston is a city, and so is Mirton."], "Where does Kim Lee work?")


@pytest.fixture
def copied(saved, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def fingerprint(path: Path, dtype: str = "float32") -> str:
    return model_fingerprint(path, dtype)


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# --- finding ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "no model directory at {name}.*'demo'"),
        ("/no/such/model", "no model directory at {name}.*'demo'"),
        ("~/no-such-model", "no model directory at {name}.*'demo'"),
        ("a/b/c", "no model directory at {name}.*'demo'"),
        ("{saved}/config.json", "no model directory"),
        ("{saved}/..", r"has no config\.json"),
        ("org/no-such-model-here", "model '{name}' is neither a local path nor on Hugging Face.*`model='demo'`"),
        ("no such model", "model '{name}' is neither a local path nor on Hugging Face.*`model='demo'`"),
    ],
)
def test_a_name_that_is_no_model_is_an_error_with_the_fix(name, said, saved):
    with pytest.raises(NotFoundError, match=said.format(name=name)):
        find_model(name.format(saved=saved))


# --- fingerprint ---


def test_the_fingerprint_survives_a_move_and_new_timestamps(saved, copied):
    before = fingerprint(copied)
    for file in copied.iterdir():
        os.utime(file, (1, 1))
    assert fingerprint(copied) == before == fingerprint(saved)


def test_one_changed_weight_byte_changes_the_fingerprint(copied):
    before = fingerprint(copied)
    (weights,) = copied.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copied) != before


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 1},
        {"attention_multiplier": 0.3},
        {"norm_topk_prob": True},
        # None of these is a field that ragblend has heard of.
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 224},
        {"new_field_of_next_year": 1},
        {"text_config": {"rope_local_base_freq": 5000.0}},
    ],
)
def test_what_changes_the_kv_changes_the_fingerprint(change, copied):
    before = fingerprint(copied)
    change_config(copied, **change)
    assert fingerprint(copied) != before


def test_what_does_not_change_the_kv_leaves_the_fingerprint(copied):
    before = fingerprint(copied)
    irrelevant = {"use_cache": False, "eos_token_id": 7, "temperature": 0.3, "_name_or_path": "elsewhere"}
    change_config(copied, transformers_version="9.9.9", **irrelevant)
    (copied / "README.md").write_text("words")
    (copied / "script.py").write_text("no code runs this")
    assert fingerprint(copied) == before


def test_a_custom_models_code_is_part_of_its_fingerprint(copied):
    change_config(copied, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (copied / "modeling_own.py").write_text("scale = 1")
    before = fingerprint(copied)
    (copied / "modeling_own.py").write_text("scale = 2")
    assert fingerprint(copied) != before


def test_two_shards_swapped_change_the_fingerprint(copied):
    (weights,) = copied.glob("*.safetensors")
    weights.rename(copied / "model-1.safetensors")
    (copied / "model-2.safetensors").write_bytes(b"other")
    before = fingerprint(copied)
    (copied / "model-1.safetensors").rename(copied / "swap")
    (copied / "model-2.safetensors").rename(copied / "model-1.safetensors")
    (copied / "swap").rename(copied / "model-2.safetensors")
    assert fingerprint(copied) != before


def test_a_checkpoint_without_safetensors_is_refused(copied):
    for weights in copied.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        fingerprint(copied)


# --- loading ---


def test_a_models_dtype_is_part_of_its_fingerprint(saved):
    loaded, half = load_model(str(saved)), load_model(str(saved), ModelOptions(dtype="bfloat16"))
    assert (loaded.name, loaded.path) == (str(saved), saved)
    assert [next(each.model.parameters()).dtype for each in (loaded, half)] == [torch.float32, torch.bfloat16]
    assert loaded.fingerprint == fingerprint(saved) != fingerprint(saved, "bfloat16") == half.fingerprint


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none_is_refused_with_the_fix(device, monkeypatch):
    with pytest.raises(
        UsageError, match=rf"device is .{device}.*cannot use CUDA here.*`device='cpu'` or `device='auto'`"
    ):
        load_model("demo", ModelOptions(device=device))
    with pytest.raises(UsageError, match="cannot use CUDA here"):
        random_model(SHAPES["llama-50m"], device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_their_number():
    with pytest.raises(UsageError, match=f"PyTorch finds {torch.cuda.device_count()} GPUs"):
        load_model("demo", ModelOptions(device="cuda:99"))


# --- how it is loaded ---


def test_transformers_names_for_one_thing_are_one_option(saved):
    for options in (
        {"dtype": torch.bfloat16},
        {"torch_dtype": "bfloat16"},
        {"torch_dtype": torch.bfloat16, "dtype": "bfloat16"},
        {"model_kwargs": {"torch_dtype": torch.bfloat16}},
    ):
        assert ModelOptions.from_keywords(**options) == ModelOptions(dtype="bfloat16")
    for device, name in ((-1, "cpu"), (torch.device("cpu"), "cpu"), (1, "cuda:1")):
        assert ModelOptions.from_keywords(device=device).device == name
    with load_engine(str(saved), torch_dtype=torch.bfloat16) as engine:
        assert engine.layers.dtype == torch.bfloat16
        assert engine.fingerprint == fingerprint(saved, "bfloat16")


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"": torch.device("cpu")}, "auto"])
def test_a_device_map_that_names_one_place_is_that_place(device_map, saved):
    if device_map == "auto":
        pytest.importorskip("accelerate")
    with load_engine(str(saved), device_map=device_map, on_miss="inline") as engine:
        assert engine.fingerprint == fingerprint(saved)
        assert engine.generate(PROMPT, max_tokens=2).token_ids


SPLIT = {"model.embed_tokens": "cpu", "model.layers": "disk", "lm_head": "cpu"}
SERVER = {"backend": "http://127.0.0.1:1", "dtype": "float32", "attn_implementation": "eager"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(
            ({"device": each}, f"device is '{each}'.*choose cpu, cuda or cuda:N")
            for each in ("x", "cuda:x", "meta", "")
        ),
        ({"dtype": "float32", "torch_dtype": torch.bfloat16}, "dtype is given twice, as 'float32' and as 'bfloat16'"),
        ({"dtype": "float8"}, "dtype is 'float8'; choose one of auto"),
        ({"device_map": SPLIT}, "spreads the model over cpu, disk, but its layers run one at a time"),
        ({"device_map": "auto", "device": "cpu"}, "both set the device; remove one"),
        ({"revision": "v2"}, "revision is 'v2', but .* is a path"),
        ({"model_kwargs": {"state_dict": {}}}, "state_dict, which ragblend cannot use.*pass it with its tokenizer"),
        ({"model_kwargs": {"use_safetensors": False}}, "pickled weights can run code"),
        ({"model_kwargs": {"subfolder": "x"}}, "pass the path of the folder itself"),
        ({"model_kwargs": {"tp_plan": "auto"}}, "tensor_parallel_size"),
        ({"model_kwargs": {"no_such_argument": 1}}, "no_such_argument"),
        (SERVER, "attn_implementation, dtype are set where the server starts, not with http"),
        (
            {"backend": "vllm", "device_map": "auto", "dtype": "float32"},
            "device_map is set by vllm_options, vLLM's own arguments, not with vLLM",
        ),
    ],
)
def test_options_without_effect_are_refused_with_the_reason(options, reason, saved):
    with pytest.raises((UsageError, UnsupportedModelError), match=reason):
        load_engine(str(saved), **options)


def test_a_model_that_transformers_itself_has_split_is_refused(saved, tmp_path):
    pytest.importorskip("accelerate")
    layers = {f"model.layers.{index}": "disk" if index else "cpu" for index in range(6)}
    ends = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=layers | ends, offload_folder=tmp_path / "off")
    with pytest.raises(UsageError, match="is spread over cpu, disk, but its layers"):
        load_engine((model, AutoTokenizer.from_pretrained(saved)))


def test_config_fields_in_model_kwargs_count_and_a_token_does_not(saved):
    plain = load_model(str(saved))
    scaled = load_model(str(saved), ModelOptions(model_kwargs={"rms_norm_eps": 0.01, "token": "hf_secret"}))
    assert scaled.model.config.rms_norm_eps == 0.01
    assert scaled.fingerprint == model_fingerprint(saved, "float32", {"rms_norm_eps": 0.01}) != plain.fingerprint
    assert load_model(str(saved), ModelOptions(model_kwargs={"token": "hf_secret"})).fingerprint == plain.fingerprint


def test_a_window_longer_than_all_prompts_can_be_switched_off(copied):
    change_config(copied, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    windowed = load_model(str(copied))
    with load_engine(str(copied), model_kwargs={"sliding_window": None}) as engine:
        assert engine.generate(PROMPT, max_tokens=1).token_ids
        assert set(engine.layers._windows) == {None}
        assert engine.fingerprint != windowed.fingerprint, "its KV is another"


@pytest.fixture
def hub(saved, tmp_path):
    """A cache of Hugging Face as a download leaves it, with two versions of one repo."""
    cache, repo = tmp_path / "hub", tmp_path / "hub" / "models--org--tiny"
    for number, revision in enumerate(("main", "v2")):
        commit = f"{number}" * 40
        snapshot = shutil.copytree(saved, repo / "snapshots" / commit)
        change_config(snapshot, rms_norm_eps=10.0 ** -(number + 3))
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    return cache


def test_revision_cache_dir_and_local_files_only_choose_what_is_loaded(hub, tmp_path):
    names = {"cache_dir": hub, "local_files_only": True}
    with load_engine("org/tiny", **names) as first, load_engine("org/tiny", revision="v2", **names) as second:
        assert (first.name, second.name) == ("org/tiny", "org/tiny")
        assert first.layers.config.rms_norm_eps == 1e-3
        assert second.layers.config.rms_norm_eps == 1e-4
        assert first.fingerprint != second.fingerprint
    with pytest.raises(NotFoundError, match=r"'org/tiny', revision 'v3', is not in .*local_files_only forbids"):
        load_engine("org/tiny", revision="v3", **names)
    with pytest.raises(NotFoundError, match="local_files_only forbids"):
        load_engine("org/tiny", cache_dir=tmp_path / "empty", local_files_only=True)


@pytest.mark.parametrize("change", [{"model_type": "no_such_type"}, {"model_type": "clip"}])
def test_a_checkpoint_that_is_no_causal_decoder_is_refused(change, copied):
    change_config(copied, **change)
    with pytest.raises(UnsupportedModelError, match="causal language model"):
        load_model(str(copied))


def test_a_model_that_cannot_be_fused_is_refused_by_load_engine(tmp_path, make_tokenizer):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path / "gpt2")
    make_tokenizer().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no decoder of RoPE attention"):
        load_engine(str(tmp_path / "gpt2"))


# --- one store per model ---


def test_a_store_of_another_model_is_refused_unless_new_model_is_given(saved, tmp_path):
    store = tmp_path / "kv"
    with load_engine("demo", store, on_miss="inline") as engine:
        engine.precompute("x")
        demo = engine.fingerprint
    with pytest.raises(StoreMismatchError, match=r"holds KV of demo \(float32\).*--store"):
        load_engine(str(saved), store)
    with load_engine(str(saved), store, new_model=True, on_miss="inline") as engine:
        assert not engine.is_stored("x")
        assert set(DiskStore(store).models()) == {demo, engine.fingerprint}
    load_engine(str(saved), store).close()  # the store lists it now


def test_a_store_of_another_dtype_is_rejected_and_stays_unchanged(saved, tmp_path):
    load_engine(str(saved), tmp_path / "kv").close()
    with pytest.raises(StoreMismatchError, match="bfloat16"):
        load_engine(str(saved), tmp_path / "kv", dtype="bfloat16")
    assert len(DiskStore(tmp_path / "kv").models()) == 1
