"""A model with an adapter is a separate model: it answers as peft runs it, and its KV is never the base's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_prompts import CHUNKS, PROMPT
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ragblend.cli.app import app
from ragblend.engine.load import load_engine
from ragblend.engine.transformers.adapters import describe_active_adapters
from ragblend.engine.transformers.loaded_model import loaded_model_fingerprint
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.errors import NotFoundError, RagblendError, StoreMismatchError, UnsupportedModelError, UsageError
from ragblend.llm import ChatBlend

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, Any] = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=[*ATTENTION, "down_proj"]),
    "dora": peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=ATTENTION, use_dora=True),
    "embedding": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["embed_tokens", "k_proj"]),
    "saved": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    "loha": peft.LoHaConfig(task_type="CAUSAL_LM", r=4, alpha=8, target_modules=ATTENTION),
    "ia3": peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trained(saved: Path, config: Any, seed: int = 0) -> Any:
    """A PeftModel whose adapter changes the model's logits."""
    model = peft.get_peft_model(load(saved), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.add_(0.15 * torch.randn(weight.shape, generator=generator))
                assert "base_layer" not in name
    return model.eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, saved):
    path = tmp_path_factory.mktemp("adapters") / "lora"
    trained(saved, KINDS["lora"]).save_pretrained(path)
    return path


def stored(engine: Any) -> list[bool]:
    return [engine.is_stored(chunk) for chunk in CHUNKS]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "lora" else pytest.mark.slow) for kind in KINDS]
)
def test_a_model_with_an_adapter_answers_as_peft_runs_it(kind, saved, tmp_path):
    model = trained(saved, KINDS[kind])
    model.save_pretrained(tmp_path)
    with load_engine(str(saved), adapter=tmp_path, on_miss="inline") as engine:
        ids = torch.tensor([engine.renderer.render(PROMPT)])
        list(engine.precompute_all(CHUNKS))
        full = engine.generate(PROMPT, mode="full", max_tokens=12).token_ids
        blended = engine.generate(PROMPT, recompute_ratio=1.0, max_tokens=12)
        found = engine.layers.full_prefill(ids[0])[0]
    with torch.inference_mode():
        torch.testing.assert_close(found, model(input_ids=ids).logits[0, -1], atol=1e-4, rtol=1e-4)
        plain = load(saved)(input_ids=ids).logits[0, -1]
    assert (found - plain).abs().max() > 0.1
    assert blended.token_ids == full
    assert blended.report.num_chunk_hits == 3


def test_kv_of_base_and_adapter_never_mix(saved, adapter, tmp_path):
    other = tmp_path / "other"
    trained(saved, KINDS["lora"], seed=1).save_pretrained(other)
    store = tmp_path / "kv"
    with load_engine(str(saved), store, on_miss="inline") as engine:
        list(engine.precompute_all(CHUNKS))
        assert stored(engine) == [True] * 3
    with pytest.raises(StoreMismatchError, match="holds KV of"):
        load_engine(str(saved), store, adapter=adapter)
    with (
        load_engine(str(saved), store, adapter=adapter, new_model=True, on_miss="inline") as first,
        load_engine(str(saved), store, adapter=other, new_model=True, on_miss="inline") as second,
        load_engine(str(saved), store, on_miss="inline") as plain,
    ):
        assert stored(first) == stored(second) == [False] * 3
        first.precompute(CHUNKS[0])
        assert (stored(first), stored(second), stored(plain)) == ([True, False, False], [False] * 3, [True] * 3)
        assert first.generate(PROMPT, max_tokens=2).report.num_chunk_hits == 1
        assert second.generate(PROMPT, max_tokens=2).report.num_chunk_hits == 0


def test_strength_counts_though_no_weight_changes(saved, adapter, tmp_path):
    stronger = Path(shutil.copytree(adapter, tmp_path / "stronger"))
    file = stronger / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_alpha": 32}))
    moved = Path(shutil.copytree(adapter, tmp_path / "moved"))
    (moved / "adapter_config.json").write_text(json.dumps(config | {"inference_mode": False, "peft_version": "9"}))
    marks = {}
    for path in (adapter, stronger, moved):
        with load_engine(str(saved), adapter=path) as engine:
            marks[path] = engine.fingerprint
    assert marks[adapter] == marks[moved] != marks[stronger]


def test_an_adapter_by_its_own_name_brings_its_base(saved, adapter, tmp_path):
    with load_engine(str(adapter)) as own, load_engine(str(saved), adapter=str(adapter)) as named:
        assert own.fingerprint == named.fingerprint
        assert (own.name, named.name) == (str(adapter), f"{saved}+{adapter}")
    chat = ChatBlend(model=str(saved), engine_options={"adapter": adapter}, max_tokens=2)
    assert chat.engine.fingerprint == named.fingerprint
    chat.engine.close()
    (tmp_path / "doc.txt").write_text("the theory of the chunk and the other question with that answer")
    where = ["--store", str(tmp_path / "kv"), "--model", str(adapter)]
    done = CliRunner().invoke(app, ["ingest", str(tmp_path / "doc.txt"), *where, "--embedder", "hashing"])
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM" in CliRunner().invoke(app, ["doctor", "--model", str(adapter)]).output


def test_a_peft_models_fingerprint_has_its_adapter_and_switching_it_fails(saved, adapter):
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = peft.PeftModel.from_pretrained(load(saved), str(adapter)).eval()
    again = peft.PeftModel.from_pretrained(load(saved), adapter)
    marks = [loaded_model_fingerprint(each) for each in (load(saved), model, again)]
    assert marks[0] != marks[1] == marks[2]
    with load_engine((model, tokenizer), on_miss="inline") as engine:
        assert engine.fingerprint == marks[1]
        answer = engine.generate(PROMPT, max_tokens=4)
        with model.disable_adapter():
            assert loaded_model_fingerprint(model) not in marks[1:]
            for mode in ("blend", "full"):
                with pytest.raises(RagblendError, match="adapters were changed after"):
                    engine.generate(PROMPT, mode=mode, max_tokens=4)
        assert engine.generate(PROMPT, max_tokens=4).token_ids == answer.token_ids
    merged = peft.PeftModel.from_pretrained(load(saved), str(adapter)).merge_and_unload()
    with load_engine((merged, tokenizer)) as engine:
        assert engine.fingerprint not in marks


def test_an_adapter_that_transformers_itself_loaded_counts(saved, adapter):
    model = load(saved)
    model.load_adapter(str(adapter))
    described = describe_active_adapters(model).splitlines()
    assert described
    assert all("_proj [" in line for line in described), "a line per layer, and none of the model"
    with load_engine((model, AutoTokenizer.from_pretrained(saved))) as engine, load_engine(str(saved)) as plain:
        assert engine.fingerprint != plain.fingerprint
        full, other = (each.generate(PROMPT, mode="full", max_tokens=8).token_ids for each in (engine, plain))
        assert full != other


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "adds tokens before"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "adds tokens before"),
        (
            peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj"], alora_invocation_tokens=[5, 6]),
            "starts at certain tokens of the prompt",
        ),
    ],
)
def test_adapters_that_work_on_the_prompt_are_refused(config, reason, saved, tmp_path):
    model = peft.get_peft_model(load(saved), config)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine(str(saved), adapter=tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine((model, AutoTokenizer.from_pretrained(saved)))


def test_a_folder_that_is_no_adapter_is_named(saved, adapter, tmp_path):
    with pytest.raises(NotFoundError, match=r"no adapter at .*gone; give the directory that peft's save_pretrained"):
        load_engine(str(saved), adapter=tmp_path / "gone")
    with pytest.raises(NotFoundError, match="no adapter at"):
        load_engine(str(saved), adapter=saved)
    broken = Path(shutil.copytree(adapter, tmp_path / "broken"))
    (broken / "adapter_model.safetensors").rename(broken / "adapter_model.bin")
    with pytest.raises(NotFoundError, match="pickled adapters are not read"):
        load_engine(str(saved), adapter=broken)
    homeless = Path(shutil.copytree(adapter, tmp_path / "homeless"))
    config = json.loads((homeless / "adapter_config.json").read_text())
    (homeless / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(NotFoundError, match="names no base model; pass model=BASE, adapter="):
        load_engine(str(homeless))
    with pytest.raises(UsageError, match="adapter_kwargs"):
        load_engine(str(saved), model_kwargs={"adapter_kwargs": {}})


def test_vllm_rejects_an_adapter_and_names_merging(adapter):
    with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
        find_checkpoint(str(adapter))
