"""A model that the caller has loaded: it answers as its folder does, and shares KV with its like alone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_prompts import CHUNKS, PROMPT
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ragblend.engine.load import load_engine
from ragblend.engine.transformers.loaded_model import loaded_model_fingerprint
from ragblend.errors import UsageError
from ragblend.llamaindex import BlendLLM as LlamaIndexLLM
from ragblend.llm import BlendLLM, ChatBlend


def load(saved: Path, **options: Any) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(saved, **{"dtype": torch.float32, **options})
    return model, AutoTokenizer.from_pretrained(saved)


def change(model: Any, by: float = 1e-3) -> None:
    with torch.no_grad():
        model.model.layers[3].self_attn.k_proj.weight[0, 0] += by


def test_a_loaded_pair_answers_as_its_folder_and_finds_the_folders_kv(saved, tmp_path):
    with load_engine(str(saved), tmp_path, on_miss="inline") as engine:
        list(engine.precompute_all(CHUNKS))
        expected = engine.generate(PROMPT, max_tokens=12)
    with load_engine(load(saved), tmp_path, on_miss="inline") as engine:
        found = engine.generate(PROMPT, max_tokens=12)
        assert engine.name == str(saved)
    assert found.report.num_chunk_hits == 3
    assert found.token_ids == expected.token_ids


def test_two_loadings_share_kv_and_one_changed_weight_does_not(saved):
    (first, _), (second, _), (other, _) = load(saved), load(saved), load(saved)
    assert loaded_model_fingerprint(first) == loaded_model_fingerprint(second)
    change(other)
    assert loaded_model_fingerprint(other) != loaded_model_fingerprint(first)
    again = load(saved)[0]
    change(again)
    assert loaded_model_fingerprint(again) == loaded_model_fingerprint(other)


def test_a_loaded_models_fingerprint_depends_on_weights_config_and_dtype(tiny_model):
    first, second = tiny_model("llama"), tiny_model("llama")
    assert loaded_model_fingerprint(first) == loaded_model_fingerprint(second)
    change(second, 1e-6)
    assert loaded_model_fingerprint(first) != loaded_model_fingerprint(second)
    third = tiny_model("llama")
    third.config.rms_norm_eps *= 2
    assert loaded_model_fingerprint(first) != loaded_model_fingerprint(third)
    assert loaded_model_fingerprint(tiny_model("llama").to(torch.bfloat16)) != loaded_model_fingerprint(first)


def test_the_loaded_config_counts_and_not_the_files(saved):
    plain, scaled = load(saved)[0], load(saved, rms_norm_eps=0.1)[0]
    assert loaded_model_fingerprint(plain) != loaded_model_fingerprint(scaled)


def test_what_cannot_be_set_any_more_is_refused(saved):
    with pytest.raises(UsageError, match=r"dtype, attn_implementation cannot be set for a model that is loaded"):
        load_engine(load(saved), dtype="bfloat16", attn_implementation="eager")
    with pytest.raises(UsageError, match="a loaded model runs in this process, but backend is 'vllm'; pass its name"):
        load_engine(load(saved), backend="vllm")


@pytest.mark.parametrize("given", [(1, 2), ("a", "b"), 3, ["model", "tokenizer"]])
def test_what_is_no_pair_is_refused_with_how_to_make_one(given):
    with pytest.raises(UsageError, match=r"pass a name, a path, a pipeline, or a loaded model with its tokenizer"):
        load_engine(given)
    with pytest.raises((UsageError, ValueError), match="loaded model with its tokenizer"):
        ChatBlend(model=given)


def test_a_model_that_is_not_in_memory_is_refused(saved):
    model, tokenizer = load(saved)
    with pytest.raises(UsageError, match=r"is spread over meta.*one device.*tensor_parallel_size"):
        load_engine((model.to("meta"), tokenizer))


def test_a_models_own_forward_keeps_its_own_attention(saved):
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counted", counted)
    model, tokenizer = load(saved, attn_implementation="counted")
    with load_engine((model, tokenizer), on_miss="inline") as engine:
        calls.clear()
        engine.generate(PROMPT, recompute_ratio=0.5, max_tokens=2)
        assert not calls  # scattered rows need ours
        full = engine.generate(PROMPT, mode="full", max_tokens=1)
        assert len(calls) == model.config.num_hidden_layers
        model(torch.tensor([[1, 2, 3]]))
        assert len(calls) == 2 * model.config.num_hidden_layers
    with load_engine(load(saved, attn_implementation="eager")) as engine:
        assert engine.generate(PROMPT, mode="full", max_tokens=1).token_ids == full.token_ids


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM, LlamaIndexLLM])
def test_the_frameworks_models_take_a_pair_and_share_its_engine(kind, saved, tmp_path):
    pair = load(saved)
    model = kind(model=pair, store=str(tmp_path), max_tokens=4)
    assert (model.model, model.model_dump()["model"]) == (str(saved), str(saved))
    assert kind(model=pair, store=str(tmp_path)).engine is model.engine
    assert copy.deepcopy(model).engine is model.engine
    assert model.engine.layers.model is pair[0]
    with pytest.raises(TypeError, match=r"the model of this .* is an object"):
        pickle.dumps(model)
    answer = model.complete("what is that?") if kind is LlamaIndexLLM else model.invoke("what is that?")
    assert str(getattr(answer, "content", answer))
    model.engine.close()


def test_a_chat_model_made_of_a_string_model_runs_the_same_pair(saved):
    model = BlendLLM(model=load(saved))
    assert model.as_chat().engine is model.engine
