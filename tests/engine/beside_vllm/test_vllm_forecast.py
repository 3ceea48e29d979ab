"""`ragblend doctor --model`: what vLLM would do with a model and flags, from the model's config alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from ragblend.cli.app import app
from ragblend.engine.vllm.launch import forecast_serving
from ragblend.errors import UsageError

DRAFTS = '{"method": "eagle", "model": "ORG/HEAD", "num_speculative_tokens": 3}'


@pytest.fixture
def config_of(tmp_path):
    """Function `config_of(name, **changes)`: folder with the default config of a class of transformers, no weights."""

    def build(name: str, **changes: Any) -> Path:
        config = getattr(transformers, name).config_class(**changes)
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        return Path(tmp_path)

    return build


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "LlamaForCausalLM would be served: tested exact"),
        (("--enable-lora",), "requests with an adapter are left to vLLM"),
        (("--kv-cache-dtype", "fp8"), "rounded to the cache's eight bits"),
        (("--speculative-config", DRAFTS), "drafts by eagle lack the KV of blended tokens"),
        (("--speculative-config", '{"method": "ngram"}'), "would be served: tested exact"),
        (("--kv-cache-dtype=nvfp4",), "would be rejected: the KV cache is nvfp4"),
        (("--pipeline-parallel-size", "2"), "would be rejected: pipeline_parallel_size is 2"),
        (("-pp", "2", "--enable-lora"), "would be rejected: pipeline_parallel_size is 2"),
    ],
)
def test_flags_change_the_forecast(config_of, flags, words):
    forecast = forecast_serving(str(config_of("LlamaForCausalLM")), flags)
    assert words in str(forecast)
    assert bool(forecast.reasons) == ("rejected" in words)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("HYV3ForCausalLM", {}, "HYV3ForCausalLM would be served: not tested in vLLM, the exactness check"),
        ("Gemma3ForConditionalGeneration", {}, "tested exact; requests with images or other media are left to vLLM"),
        ("Qwen3VLForConditionalGeneration", {}, "tested exact; requests with images or other media are left to vLLM"),
        (
            "MistralForCausalLM",
            {"sliding_window": 4096},
            "its layers attend to 4096 tokens.*--disable-sliding-window",
        ),
        ("DeepseekV3ForCausalLM", {}, "DeepseekV3ForCausalLM would be served: tested exact"),
        ("DeepseekV32ForCausalLM", {}, "rejected: its attention is MLA with an index"),
        ("HunYuanDenseV1ForCausalLM", {}, "rejected: its keys are normed after RoPE"),
        ("Gemma4ForCausalLM", {}, "rejected: .*heads of two sizes"),
        ("GPT2LMHeadModel", {}, "rejected: its config has no RoPE"),
        ("Mamba2ForCausalLM", {}, "rejected: it has recurrent"),
        ("JambaForCausalLM", {}, "rejected: it has recurrent"),
        ("Qwen3NextForCausalLM", {}, "rejected: .*linear_attention"),
    ],
)
def test_each_class_gets_its_forecast(config_of, name, changes, words):

    assert re.search(words, str(forecast_serving(str(config_of(name, **changes) / "config.json"))))


def test_the_flag_that_a_rejection_names_is_enough(config_of):
    path = str(config_of("MistralForCausalLM", sliding_window=4096))
    assert not forecast_serving(path, ["--disable-sliding-window"]).reasons


@pytest.mark.parametrize("flags", [("--speculative-config", "ngram"), ("-pp", "two")])
def test_a_flags_invalid_value_is_an_error_that_names_it(config_of, flags):
    with pytest.raises(UsageError, match=f"{flags[0]} is '{flags[1]}'"):
        forecast_serving(str(config_of("LlamaForCausalLM")), flags)


def test_doctor_fails_for_flags_that_vllm_would_not_blend(config_of, tmp_path):
    path = str(config_of("LlamaForCausalLM"))
    found = {}
    for flags in ((), ("--enable-lora",), ("--pipeline-parallel-size", "2")):
        command = ["doctor", "--model", path, "--store", str(tmp_path / "kv"), "--json", *flags]
        result = CliRunner().invoke(app, command)
        (check,) = [each for each in json.loads(result.stdout)["checks"] if each["name"] == "vllm model"]
        found[flags[:1]] = (result.exit_code, check["ok"], "left to vLLM" in check["finding"])
    assert found[()][1:] == (True, False)
    assert found[("--enable-lora",)][1:] == (True, True)
    assert found[("--pipeline-parallel-size",)][:2] == (1, False)
