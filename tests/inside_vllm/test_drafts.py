"""Speculative decoding: answers over blended KV are those without drafts; drafts by a model are accepted less often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PREFIX, SIZES, ask, engine, ingest, random_ids, report, tokens
from safetensors.torch import load_file, save_file
from test_families import EXPERTS
from tiny_models import FAMILIES, make_model
from transformers import Glm4MoeForCausalLM

CHUNKS, QUESTION = [random_ids(n, n) for n in (61, 40)], random_ids(9, 4)
WAYS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "reuse"},
    {"mode": "blend", "rule": "ask", "ratio": 0.3},
    {"mode": "blend", "rule": "cacheblend", "ratio": 1.0},
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def answers(store: Path, drafts: dict[str, Any]) -> dict[str, Any]:
    program = Path(__file__).with_name("drafted.py")
    command = [sys.executable, str(program), str(store), json.dumps(drafts)]
    shared_modules = os.environ | {"PYTHONPATH": str(program.parents[1])}  # tests/, where `tiny_models` is
    done = subprocess.run(command, env=shared_modules, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_answers_are_those_without_drafts_in_fewer_steps(tmp_path):
    plain, drafted = answers(tmp_path / "plain", {}), answers(tmp_path / "drafted", DRAFTS)
    full, reuse, *_, everything = plain["answers"]
    assert everything == full != reuse, "stale KV changes this answer, ratio 1.0 does not"
    assert drafted["answers"] == plain["answers"]
    assert drafted["num_steps"] < plain["num_steps"]
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "refused_reason"):
        assert [each[name] for each in drafted["reports"]] == [each[name] for each in plain["reports"]], name
    assert [each["num_chunk_hits"] for each in plain["reports"]] == [0, 4, 4, 4, 4]


def save_eagle(path: Path) -> None:
    """Save a random EAGLE head for the tiny Llama: one layer over the target's states and embeddings."""
    model, hidden = make_model(FAMILIES["llama"][0], **{**SIZES, "num_hidden_layers": 1}), SIZES["hidden_size"]
    names = {name: name.removeprefix("model.") for name in model.state_dict()}
    left_out = ("lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight")
    weights = {names[name]: each for name, each in model.state_dict().items() if names[name] not in left_out}
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(0)) * 0.1
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_diff_dict(), "architectures": ["EagleLlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))


def save_mtp(path: Path) -> None:
    """Save a random GLM-4.5 of four layers, whose checkpoint has one more layer that drafts (MTP)."""
    sizes = {**EXPERTS, **SIZES, "n_routed_experts": 4, "first_k_dense_replace": 2, "use_qk_norm": True}
    model = make_model(Glm4MoeForCausalLM, **{**sizes, "num_hidden_layers": 5})
    model.save_pretrained(path)
    config, hidden = json.loads((path / "config.json").read_text()), SIZES["hidden_size"]
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}))
    weights, last = load_file(path / "model.safetensors"), "model.layers.4"
    parts = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    random = torch.Generator().manual_seed(0)
    weights |= {f"{last}.{name}.weight": 0.1 * torch.randn(shape, generator=random) for name, shape in parts.items()}
    weights[f"{last}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{last}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def answered(model: Path, store: Path, drafts: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """Answers in each of WAYS, and the engine's steps that each took."""
    options = {"speculative_config": drafts} if drafts else {}
    with engine(model, store, **options) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        core, counts = llm.llm_engine.engine_core, list[int]()
        step = core.get_output

        def counting() -> Any:
            counts[-1] += 1
            return step()

        core.get_output = counting
        found = []
        for way in WAYS:
            counts.append(0)
            ids = [*PREFIX, *CHUNKS[0], *CHUNKS[1], *QUESTION]
            found.append(ask(llm, ids, way, max_tokens=32, logprobs=None))
    return found, counts


@pytest.fixture(scope="module")
def undrafted(checkpoint, tmp_path_factory):
    return answered(checkpoint("llama"), tmp_path_factory.mktemp("kv"), {})


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_drafts_by_a_model_change_no_answer_but_lose_acceptance(method, undrafted, checkpoint, tmp_path):
    draft = checkpoint("llama")  # its drafts are all accepted, if it has the KV of all tokens
    if method == "eagle":
        draft = tmp_path / "eagle"
        draft.mkdir()
        save_eagle(draft)
    drafts = {"method": method, "model": str(draft), "num_speculative_tokens": 3}
    answers, steps = answered(checkpoint("llama"), tmp_path / "kv", drafts)
    expected, plain_steps = undrafted
    assert [tokens(each) for each in answers] == [tokens(each) for each in expected]
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "refused_reason"):
        assert [report(each)[name] for each in answers] == [report(each)[name] for each in expected], name
    if method == "draft_model":
        full, *blended = steps
        assert full < plain_steps[0] / 2
        assert min(blended) > full, "the draft model has not seen the blended tokens"


def test_drafts_by_the_models_own_layer_change_no_answer(make_tokenizer, tmp_path):
    save_mtp(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    expected, _ = answered(tmp_path / "model", tmp_path / "plain", {})
    answers, _ = answered(tmp_path / "model", tmp_path / "kv", {"method": "mtp", "num_speculative_tokens": 1})
    assert [tokens(each) for each in answers] == [tokens(each) for each in expected]
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "refused_reason"):
        assert [report(each)[name] for each in answers] == [report(each)[name] for each in expected], name
