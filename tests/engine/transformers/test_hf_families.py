"""The table of docs/models.md: every row is checked by the model's own class, with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tiny_models import FAMILIES, WINDOWED, make_gemma3_that_sees, make_model

from ragblend.engine.fusion.self_check import self_check
from ragblend.engine.transformers.families import layer_windows, reject_unsupported_model
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.vllm.support import ARCHITECTURES
from ragblend.errors import UnsupportedModelError

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


class Row(NamedTuple):
    model: str
    class_name: str
    state: str
    vllm: str
    difference: str


ROWS = [
    Row(*(cell.strip().strip("`") for cell in line.strip("|").split("|")))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \w.*\| `\w+` \|", line)
]
BUILT_AS = {  # of the families in tiny_models, where a class is several rows
    "Llama 2 and 3.x": "llama3_scaling", "Mistral v0.2 and later": "mistral", "Mistral v0.1": "mistral_window",
    "Qwen2 with windows": "qwen2_window", "Qwen3 with windows": "qwen3_window", "Phi-3-mini-4k": "phi3_window",
    "DeepSeek V2-Lite": "deepseek_v2_lite",
}  # fmt: skip
PER_TYPE = {"sliding_window": 30, "layer_types": ["sliding_attention", "full_attention"] * 3}
BUILT_WITH: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Mixtral with windows": {"num_local_experts": 4, "sliding_window": 30},
    "Qwen3-MoE with windows": {
        "use_sliding_window": True, "sliding_window": 30, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "StarCoder2": {"sliding_window": 30},
    "Ministral": PER_TYPE,
    "Cohere 2": PER_TYPE,
    "OLMo 3": PER_TYPE,
    "EXAONE 4": PER_TYPE,
}  # fmt: skip
BY_TYPE_ALONE = ("index", "recurrent", "convolutions", "blocks", "learned")  # refused without looking at weights


def tiny(row: Row) -> Any:
    """A random model of the row's class: as tests/tiny_models.py makes the family, or with few dimensions."""
    if row.class_name == "Gemma3ForConditionalGeneration":
        return make_gemma3_that_sees()
    model_class = getattr(transformers, row.class_name)
    if any(word in row.difference for word in BY_TYPE_ALONE):
        kinds = {"layer_types": ["conv"] * 32} if row.model == "LFM 2" else {}
        with torch.device("meta"):
            return model_class(model_class.config_class(**kinds))
    families = [name for name, (_, known, _) in FAMILIES.items() if known is model_class]
    name = BUILT_AS.get(row.model, families[0] if families else "")
    changes = FAMILIES[name][2] if row.model not in BUILT_WITH and name else BUILT_WITH.get(row.model, {})
    return make_model(model_class.config_class, model_class, **changes)


def load(model: Any) -> None:
    """As loading does: by its types, then by what it computes."""
    reject_unsupported_model(model)
    layers = TransformersLayers(model)
    self_check(layers, layers.config.vocab_size, "tiny")


@pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])
def test_the_class_is_what_its_row_says(row):
    model = tiny(row)
    assert type(model).__name__ == row.class_name
    if row.state != "refused":
        load(model)
        assert any(layer_windows(model.config.get_text_config())) == (row.state == "windowed")
        return
    with pytest.raises(UnsupportedModelError) as error:
        load(model)
    state = "one state of everything"
    reasons = {"index": "with an index", "recurrent": state, "convolutions": state}
    assert all(reason in str(error.value) for word, reason in reasons.items() if word in row.difference)


@pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])
def test_the_vllm_column_says_what_the_connector_accepts(row):
    known = row.class_name in ARCHITECTURES and row.state != "refused"
    expected = {"exact": ("yes",), "windowed": ("0.32", "short")}.get(row.state, ()) if known else ("no",)
    assert row.vllm in expected


def test_every_family_that_the_tests_run_has_a_row():
    rows = {(row.class_name, row.state) for row in ROWS}
    for name, (_, model_class, _) in FAMILIES.items():
        assert (model_class.__name__, "windowed" if name in WINDOWED else "exact") in rows
    assert len(ROWS) > 40
