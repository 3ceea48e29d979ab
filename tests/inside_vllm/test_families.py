"""Architectures in vLLM, by tiny random models: the check at start passes, ratio 1.0 is vLLM's own prefill, and ratios
between are the independent CacheBlend's. Those of test_blend.py have the whole matrix there."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from continued import Continued, assert_continues
from harness import SIZES, ask, assert_same_answer, connector_worker, engine, ingest, recorded_selections, report
from refined import assert_full_prefill_follows, assert_refined_as_by_transformers, recorded_refinements
from test_blend import (
    CHUNKS,
    PREFIX,
    STEPS,
    TOLERANCE,
    blend_params,
    patchy_prompt,
    plain_prompt,
)
from tiny_models import FAMILIES, make_model

from ragblend.engine.vllm.support import TESTED_ARCHITECTURES
from ragblend.engine.vllm.worker_side.decoder import TransformersDecoder
from ragblend.errors import UnsupportedModelError

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
GRANITE = FAMILIES["granite"][1]
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "granite_moe": ("GraniteMoe", GRANITE | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"num_experts": 4}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4Moe", EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 2, "use_qk_norm": True}),
    "ministral3": ("Ministral3", {"sliding_window": None}),
    "seed_oss": ("SeedOss", {}),
    "arcee": ("Arcee", {}),
    "helium": ("Helium", {}),
    "jais2": ("Jais2", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "solar_open": ("SolarOpen", EXPERTS | {"n_routed_experts": 4}),
}
LATENT_SIZES = {  # vLLM's kernel on a CPU takes no others for latent and shared key
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "attention_bias": False,
}
LATENT: dict[str, dict[str, Any]] = {  # with what vLLM reads of the config, but transformers does not
    "deepseek_v2": {},
    "deepseek_v2_lite": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
}
LATENT_OPTIONS = {
    "attention_backend": "CPU_MLA",  # a processor with AMX would have another one
    # vLLM's kernel on a CPU takes the distance between heads for that between tokens, and so rotates wrongly in MLA.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
NATIVE = ("granite", "cohere2", "gemma", "exaone4", "glm4", "cohere", "gpt_oss")
BY_TRANSFORMERS = (
    "smollm3", "olmo2", "olmo3", "glm", "olmo", "nanochat", "seed_oss", "arcee", "helium", "jais2", "flex_olmo",
    "solar_open",
)  # fmt: skip
"""Families whose layers are transformers' inside vLLM."""

pytestmark = pytest.mark.timeout(300)  # an engine starts in the first test of each family
WITHOUT_REFERENCE = (
    "olmo", "glm4_moe", "ministral3", "arcee", "helium", "jais2", "ernie4_5", "ernie4_5_moe", "flex_olmo", "solar_open",
)  # fmt: skip
"""Families that tests/reference.py does not compute. Ratio 1.0 and the check at start remain."""
GLOBAL = {"cohere2": (2, 5), "exaone4": (2, 5), "olmo3": (2, 5), "gpt_oss": (1, 3, 5)}


@pytest.fixture(scope="module", params=dict.fromkeys([*BY_TRANSFORMERS, *NATIVE, *LATENT, *OTHERS]))
def family(request):
    return str(request.param)


def make_family(family: str, **others: Any) -> Any:
    """Return the family's stock model, with vLLM's windows: Cohere 2 sees one token more there than in transformers.

    `others`: further fields of the config.
    """
    kind, changes = OTHERS.get(family, (None, {}))
    model_class, changes = FAMILIES[family] if kind is None else (getattr(transformers, f"{kind}ForCausalLM"), changes)
    if family.startswith("cohere"):  # vLLM always uses the embeddings as the head
        changes = {**changes, "tie_word_embeddings": True}
    if family in LATENT:
        changes = {**changes, **LATENT_SIZES, **LATENT[family]}
    model = make_model(model_class, **{**SIZES, **changes, **others})
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def stock_of_family(family):
    return make_family(family)


@pytest.fixture(scope="module")
def served(family, stock_of_family, make_tokenizer, tmp_path_factory):
    """The family's engine with the chunks stored."""
    path = tmp_path_factory.mktemp(family)
    stock_of_family.save_pretrained(path / "model")
    make_tokenizer().save_pretrained(path / "model")
    with engine(path / "model", path / "kv", **(LATENT_OPTIONS if family in LATENT else {})) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        yield llm


def test_ratio_one_is_vllms_own_prefill_and_reuse_is_not(family, served, stock_of_family):
    assert type(stock_of_family).__name__ in TESTED_ARCHITECTURES
    decoder = connector_worker().layers._decoder
    assert isinstance(decoder, TransformersDecoder) == (family in BY_TRANSFORMERS)
    prompt = plain_prompt()
    full, blended = ask(served, prompt.ids), ask(served, prompt.ids, blend_params(1.0))
    assert report(blended)["num_chunk_hits"] == len(CHUNKS)
    assert_same_answer(blended, full, TOLERANCE)
    stale = ask(served, prompt.ids, blend_params(0.0))
    mine, theirs = (output.outputs[0].logprobs[0] for output in (stale, full))
    assert max(abs(mine[each].logprob - theirs[each].logprob) for each in mine.keys() & theirs.keys()) > 0.005


@pytest.mark.parametrize(
    ("rule", "make_prompt", "ratio"),
    [("cacheblend", patchy_prompt, 0.5), ("cacheblend_k", plain_prompt, 0.15), ("ask", plain_prompt, 0.15)],
)
def test_ratios_between_are_the_independent_cacheblends(family, rule, make_prompt, ratio, served, stock_of_family):
    if family in WITHOUT_REFERENCE:
        pytest.skip("tests/reference.py does not compute this family")
    reference = Continued(stock_of_family)
    if family == "cohere2":  # vLLM's window there has one token more
        reference.windows = [each and each + 1 for each in reference.windows]
    prompt = make_prompt()
    with recorded_selections() as selections:
        output = ask(served, prompt.ids, blend_params(ratio, rule), STEPS)
    expected = reference.blended(
        prompt.parts, ratio, rule, selections[-1], prompt.question_start, GLOBAL.get(family, ())
    )
    assert report(output)["rule"] == rule
    assert selections[-1] == expected.selected
    assert_continues(output, reference, TOLERANCE)


def test_refinement_computes_the_kv_of_the_transformers_engine(family, served, stock_of_family):
    ids = plain_prompt().ids
    with recorded_refinements() as refinements:
        answer = ask(served, ids, blend_params(0.1, "ask") | {"refine_ratio": 0.3})
    (recorded,) = refinements
    assert report(answer)["num_refined_tokens"] > 0
    if family == "cohere2":  # vLLM's window there has one token more
        stock_of_family = make_family(family, sliding_window=stock_of_family.config.sliding_window + 1)
    if family != "ernie4_5_moe":  # vLLM's full prefill of this model is not that of transformers either
        assert_refined_as_by_transformers(stock_of_family, recorded)
    answer = ask(served, ids, blend_params(0.1, "ask") | {"refine_ratio": 1.0})
    assert_full_prefill_follows(served, ids, answer, TOLERANCE)


REJECTED: dict[str, tuple[type, dict[str, Any], str]] = {
    "absolute positions": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 64, "n_layer": 2, "n_head": 4},
        r"no decoder layers and norm.*Serve it without the ragblend connector, or with backend='transformers'",
    ),
    "keys normed after RoPE": (
        *FAMILIES["hunyuan"],
        r"fails the exactness check of.*docs/models\.md.*serve it without the ragblend connector",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_class_that_fails_is_rejected_with_what_to_do(name, make_tokenizer, tmp_path):
    model_class, changes, found = REJECTED[name]
    make_model(model_class, **{**SIZES, **changes}).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with (
        pytest.raises(UnsupportedModelError, match=found),
        engine(tmp_path / "model", tmp_path / "kv", skip_tokenizer_init=True),
    ):
        pass
