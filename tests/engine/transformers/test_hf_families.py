"""The table of docs/models.md: every row is checked by the model's own class, with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tiny_models import FAMILIES, WINDOWED, make_model, make_multimodal_gemma3, make_multimodal_gemma4

from ragblend.engine.fusion.self_check import TOLERANCE, self_check
from ragblend.engine.transformers.families import reject_unsupported_model
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.transformers.positions import layer_windows
from ragblend.engine.vllm.support import TESTED_ARCHITECTURES
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
    "DeepSeek V2-Lite": "deepseek_v2_lite", "Gemma 4 with experts": "gemma4_moe",
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SCALED_QUERIES = {  # from position 32 on, so that queries of the short prompt of the gates are scaled
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
    "short_mscale": 1.2, "long_mscale": 1.4, "original_max_position_embeddings": 1024,
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
    "Qwen1.5-MoE, Qwen2-MoE": EXPERTS | {"num_experts": 4},
    "Ministral 3": {"rope_parameters": SCALED_QUERIES},
    "GLM-4.5, GLM-4.6": EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 2, "use_qk_norm": True},
    "MiniMax M2": EXPERTS | {"num_local_experts": 4, "rope_parameters": PARTIAL},
    "Granite MoE": FAMILIES["granite"][1] | {"num_local_experts": 4},
    "Hy3": EXPERTS | {"num_experts": 4},
    "Solar Open": EXPERTS | {"n_routed_experts": 4},
    "Phi-3.5-MoE": {"num_local_experts": 4, "lm_head_bias": True, "rope_parameters": LONG_ROPE},
    "VaultGemma": FAMILIES["gemma2"][1],
    "Mellum 2": PER_TYPE | EXPERTS | {"num_experts": 4},
    "Laguna": PER_TYPE | EXPERTS | {"num_experts": 4, "num_attention_heads_per_layer": [4, 2] * 3},
    "CWM": PER_TYPE,
    "HunYuan MoE": {"num_experts": 4, "moe_topk": 2},
    "Ernie 4.5 with experts": EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "EXAONE MoE": EXPERTS | PER_TYPE | {"num_experts": 4},
    "AFMoE": EXPERTS | PER_TYPE | {"num_experts": 4},
}  # fmt: skip
THAT_SEE = {
    "Gemma3ForConditionalGeneration": make_multimodal_gemma3,
    "Gemma4ForConditionalGeneration": make_multimodal_gemma4,
}
# A row with one of these words is refused by its layers' types, without weights.
BY_TYPE_ALONE = ("index", "recurrent", "convolutions", "blocks", "learned", "AltUp")


def tiny(row: Row) -> Any:
    """A random model of the row's class: as tests/tiny_models.py makes the family, or with few dimensions."""
    if row.class_name in THAT_SEE:
        return THAT_SEE[row.class_name]()
    model_class = getattr(transformers, row.class_name)
    if any(word in row.difference for word in BY_TYPE_ALONE):
        kinds = {"layer_types": ["conv"] * 32} if row.model == "LFM 2" else {}
        with torch.device("meta"):
            return model_class(model_class.config_class(**kinds))
    families = [name for name, (known, _) in FAMILIES.items() if known is model_class]
    name = BUILT_AS.get(row.model, families[0] if families else "")
    changes = FAMILIES[name][1] if row.model not in BUILT_WITH and name else BUILT_WITH.get(row.model, {})
    return make_model(model_class, **changes)


def load(model: Any) -> None:
    """As loading does: by its types, then by what it computes."""
    reject_unsupported_model(model)
    layers = TransformersLayers(model)
    self_check(layers, layers.config.vocab_size, "tiny")


@pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])
def test_the_class_is_supported_as_its_row_states(row, monkeypatch):
    monkeypatch.setitem(TOLERANCE, torch.float32, 1e-4)  # as the page says
    model = tiny(row)
    assert type(model).__name__ == row.class_name
    if row.state != "refused":
        load(model)
        assert any(layer_windows(model.config.get_text_config())) == (row.state == "windowed")
        return
    with pytest.raises(UnsupportedModelError) as error:
        load(model)
    state = "one state of all tokens"
    reasons = {
        "index": "with an index", "recurrent": state, "convolutions": state,
        "AltUp": "several hidden states per token",
    }  # fmt: skip
    assert all(reason in str(error.value) for word, reason in reasons.items() if word in row.difference)


@pytest.mark.parametrize("row", ROWS, ids=[row.model for row in ROWS])
def test_the_vllm_column_lists_what_the_connector_was_tested_with(row):
    """`check`: not tested; the check at start decides."""
    tested = row.class_name in TESTED_ARCHITECTURES and row.state != "refused"
    expected = {"exact": ("yes", "0.32"), "windowed": ("0.32", "short")}.get(row.state, ())
    assert row.vllm in (expected if tested else ("no", "check") if row.state != "refused" else ("no",))


def test_the_page_says_how_many_models_it_lists():
    served = [row for row in ROWS if row.state != "refused"]
    counts = len(served), len({row.class_name for row in served}), len(TESTED_ARCHITECTURES)
    assert "{} models of {} classes are exact or windowed, in vLLM {} classes were run".format(*counts) in " ".join(
        PAGE.read_text(encoding="utf-8").split()
    )


def test_every_family_that_the_tests_run_has_a_row():
    rows = {(row.class_name, row.state) for row in ROWS}
    for name, (model_class, _) in FAMILIES.items():
        assert (model_class.__name__, "windowed" if name in WINDOWED else "exact") in rows
    assert len(ROWS) > 40
