"""The plain forward pass is Llama's, and the shipped model answers questions it has not seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragblend.demo import WEIGHTS
from tools.demo_model.cases import Case, Setting, make_cases
from tools.demo_model.evaluate import full_logits, is_exact, reuse_logits
from tools.demo_model.export import PROMPT_FORMAT, export
from tools.demo_model.model import DemoModel, ModelConfig, load_shipped, mimetic_init, num_parameters, rope
from tools.demo_model.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def shipped() -> Any:
    return AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases(TOKENIZER, 4, Setting(6, 200), seed=11)


def ids_of(case: Case) -> list[int]:
    return [token for segment in case.segments for token in segment] + case.suffix


def test_an_export_computes_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DemoModel(ModelConfig(vocab_size=2560, num_layers=2))
    mimetic_init(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    export(model, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.randint(0, 2000, (2, 40))
    with torch.no_grad():
        hidden, _ = model(ids, *rope(model.config, torch.arange(40)[None]))
        torch.testing.assert_close(model.logits(hidden), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_full_reuse_of_one_chunk_behind_its_prefix_is_exact(cases: list[Case]) -> None:
    model = load_shipped(WEIGHTS)
    case = cases[0]._replace(segments=cases[0].segments[:2])
    torch.testing.assert_close(reuse_logits(model, case), full_logits(model, case), atol=2e-3, rtol=1e-3)


def test_held_out_questions_are_answered_with_full_prefill(shipped: Any, cases: list[Case]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    right = 0
    asked = [case for case in cases if case.question.kind != "comparison"]
    for case in asked:
        ids = torch.tensor([ids_of(case)])
        out = shipped.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        right += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip() == case.question.answer
    assert right >= 0.75 * len(asked)


def test_greedy_match_is_what_generate_gives(shipped: Any, cases: list[Case]) -> None:
    model = load_shipped(WEIGHTS)
    for case in cases[::5]:
        ids = torch.tensor([ids_of(case)])
        out = shipped.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(case.answer))
        assert (out[0, ids.shape[1] :].tolist() == case.answer) == is_exact(full_logits(model, case), case)


def test_limits_of_the_wheel() -> None:
    assert num_parameters(load_shipped(WEIGHTS)) <= 15_000_000
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 32 * 2**20


def test_the_prompt_format_is_declared() -> None:
    assert json.loads((WEIGHTS / "ragblend.json").read_text()) == PROMPT_FORMAT


def test_the_chat_template_writes_the_same_prompt(cases: list[Case]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    case = cases[0]
    chunks = [TOKENIZER.decode(segment[1:]).strip() for segment in case.segments[1:]]
    parts = [{"type": "text", "text": text} for text in [*chunks, case.question.text]]
    answered = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert tokenizer.encode(answered, add_special_tokens=False) == ids_of(case)
    paragraphs = [{"role": "user", "content": "\n\n".join([*chunks, case.question.text])}]
    assert tokenizer.apply_chat_template(paragraphs, tokenize=False) == answered
    system = [{"role": "system", "content": "Be short."}, *paragraphs]
    assert tokenizer.apply_chat_template(system, tokenize=False).startswith("<s><sys> Be short.<doc>")
