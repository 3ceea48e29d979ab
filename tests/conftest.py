"""Shared fixtures: tiny random models of every supported family, a byte-level tokenizer, and engines made of them.

Models are built once per session; `tiny_model` and `stock_model` hand out copies and originals, see there. Nothing
here touches the network.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Whoever runs the tests may have settings and a store key of his own.
os.environ.update(XDG_CONFIG_HOME="/nonexistent")
os.environ.pop("RAGBLEND_STORE_KEY", None)
os.environ.pop("RAGBLEND_STORE_KEY_FILE", None)

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.deepseek_v2 import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.gemma import GemmaConfig, GemmaForCausalLM
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gemma3 import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)
from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.granite import GraniteConfig, GraniteForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.olmo import OlmoConfig, OlmoForCausalLM
from transformers.models.phi3 import Phi3Config, Phi3ForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.siglip import SiglipVisionConfig
from transformers.utils import logging as transformers_logging

from ragblend.engine.store.tiered import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.prompt.formats import prompt_format
from ragblend.prompt.segmenter import Segmenter

torch.set_num_threads(1)
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
# A deadline fails slow machines, not wrong code.
settings.register_profile("ragblend", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("ragblend"), max_examples=15)  # `make test-fast`
settings.load_profile("ragblend")

# Left out by `make test-fast`: servers, killed processes, whole corpora, commands. Elsewhere a test is marked itself.
SLOW = (
    "faults", "ingestion", "integration", "bench", "benchmarks", "tools", "cli", "ui", "upkeep", "test_notebooks.py",
    "test_limits.py", "engine/store/test_disk.py", "engine/store/test_kv_dtypes.py", "engine/store/test_remote.py",
    "engine/store/test_remote_bounds.py", "engine/store/test_write_queue.py", "engine/beside_vllm/test_vllm_client.py",
    "engine/beside_vllm/test_vllm_remote.py",
)  # fmt: skip

VOCABULARY = 300
COUNTED = "counted"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands in SLOW."""
    here = Path(__file__).parent
    for item in items:
        place = item.path.relative_to(here) if item.path.is_relative_to(here) else item.path
        if any(place == Path(name) or Path(name) in place.parents for name in SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`counted(text)`: what a fault test did and how often, for the list at the end of the run."""
    return lambda text: record_property(COUNTED, text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The faults that were survived. A test that fails has a report of its own."""
    passed = terminalreporter.stats.get("passed", [])
    lines = [text for report in passed for name, text in report.user_properties if name == COUNTED]
    if lines:
        terminalreporter.section("faults survived")
        for line in lines:
            terminalreporter.line(str(line))


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3_scaling": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3}),
    "yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _YARN}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "phi3_mha": (Phi3Config, Phi3ForCausalLM, {"num_key_value_heads": 4}),
    "phi3_partial": (Phi3Config, Phi3ForCausalLM, {"rope_parameters": _PARTIAL}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "olmo": (OlmoConfig, OlmoForCausalLM, {"clip_qkv": 0.6}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
}

_LATENT_SIZES = {  # every width another, so that none stands for one that it is not
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
}
_DEEPSEEK_YARN = {
    **_YARN,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}  # of real models both are equal, so tables are not scaled
LATENT: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v2": (  # V2's; V2-Lite projects queries in one step, and has no groups of experts
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        _LATENT_SIZES
        | {"q_lora_rank": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v2_lite": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        _LATENT_SIZES | {"q_lora_rank": None, "first_k_dense_replace": 1, "attention_bias": True},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        _LATENT_SIZES
        | {"q_lora_rank": 32, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": _DEEPSEEK_YARN},
    ),
    "deepseek_v3_halves": (  # weights whose rotary dimensions are not neighbours
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        _LATENT_SIZES | {"q_lora_rank": 32, "first_k_dense_replace": 6, "rope_interleave": False},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, _LATENT_SIZES | {"q_lora_rank": 32}),
}
FAMILIES |= LATENT

WINDOWED: dict[str, tuple[type, type, dict[str, Any]]] = {
    # Windows of half the prompts that the tests fuse, and soft caps at which scores bend.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "sliding_window": 50,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 52, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"sliding_window": 51, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 53}),
    "qwen2_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 54, "max_window_layers": 3},
    ),
    "qwen3_window": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 55, "max_window_layers": 0},
    ),
    "phi3_window": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 56}),
}
FAMILIES |= WINDOWED


def make_model(config_class: type, model_class: type, seed: int = 0, **changes: Any) -> Any:
    """A random model, 6 layers, hidden 64, 4 heads of 16: weights large enough that attention is far from uniform."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.06,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **changes})).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 1:  # norms: all ones would hide a norm that is skipped or doubled
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(2)
    return model


def make_gemma3_that_sees() -> Any:
    """The family "gemma3" within the class that reads images too, with an eye of one layer."""
    config_class, model_class, changes = FAMILIES["gemma3"]
    text = make_model(config_class, model_class, **changes)
    eye = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(
        text_config=text.config, vision_config=eye, image_token_index=VOCABULARY - 1, mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    return model


@pytest.fixture(scope="session", name="make_model")
def _make_model() -> Callable[..., Any]:
    """`make_model(config_class, model_class, **config)`, for architectures outside FAMILIES."""
    return make_model


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Every supported family in turn; `pytest.mark.parametrize("family", ...)` narrows it."""
    return str(request.param)


@pytest.fixture(scope="session")
def stock_model() -> Callable[[str], Any]:
    """`stock_model(family)`: the model as transformers made it, eager attention, never touched by ragblend. Shared."""
    made: dict[str, Any] = {}

    def build(family: str) -> Any:
        if family not in made:
            config_class, model_class, changes = FAMILIES[family]
            made[family] = make_model(config_class, model_class, **changes)
            made[family].set_attn_implementation("eager")
        return made[family]

    return build


@pytest.fixture(scope="session")
def tiny_model(stock_model: Callable[[str], Any]) -> Callable[[str], Any]:
    """`tiny_model(family)`: a copy of its own, to be wrapped or broken."""
    return lambda family: copy.deepcopy(stock_model(family))


@pytest.fixture(scope="session")
def tiny_layers(tiny_model: Callable[[str], Any]) -> Callable[[str], TransformersLayers]:
    """`tiny_layers(family)`: TransformersLayers over a copy. Shared: they keep no state between calls."""
    made: dict[str, TransformersLayers] = {}

    def build(family: str) -> TransformersLayers:
        if family not in made:
            made[family] = TransformersLayers(tiny_model(family))
        return made[family]

    return build


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`make_tokenizer(chat_template=None, specials=(), added=())`: byte-level BPE with merges, at most 300 ids.

    `specials` are more control tokens, `added` ordinary added tokens. BOS comes first when special tokens are added.
    """
    text = "the theory of the other chunk and the question: what is that? answer the question with the chunk. "

    def build(
        chat_template: str | None = None, specials: tuple[str, ...] = (), added: tuple[str, ...] = ()
    ) -> PreTrainedTokenizerFast:
        control = ["<pad>", "<s>", "</s>", "<doc>", "<q>", "<a>", *specials]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(added),
            special_tokens=control,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator([text] * 4, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=["<doc>", "<q>", "<a>", *specials],
            clean_up_tokenization_spaces=False,
        )
        fast.add_tokens(list(added))
        fast.chat_template = chat_template
        assert len(fast) <= VOCABULARY
        return fast

    return build


@pytest.fixture(scope="session")
def make_spaced_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`make_spaced_tokenizer(chat_template=None, specials=())`: Llama 2's and Mistral's kind, which puts a space
    in front of whatever it is given and spells unknown letters in bytes."""

    def build(chat_template: str | None = None, specials: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
        words = ["<pad>", "<s>", "</s>", "<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aehtosn"]
        merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "n")]
        vocabulary = {word: index for index, word in enumerate([*words, *(a + b for a, b in merges)])}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            additional_special_tokens=list(specials),
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = chat_template
        assert len(fast) <= VOCABULARY
        return fast

    return build


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """The tiny tokenizer without a chat template. Shared."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def segmenter(tokenizer: PreTrainedTokenizerFast) -> Segmenter:
    """The tiny tokenizer's segmenter, in the plain format."""
    return Segmenter(tokenizer, prompt_format(tokenizer))


CHATML = "{% for m in messages %}<|im|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}<|im|>assistant\n"


@pytest.fixture(scope="session")
def chat_segmenter(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> Segmenter:
    """The tiny tokenizer's segmenter with a chat template, as the models have that people chat with."""
    tokenizer = make_tokenizer(CHATML, specials=("<|im|>", "<|end|>"))
    return Segmenter(tokenizer, prompt_format(tokenizer))


@pytest.fixture
def tiny_engine(
    tiny_layers: Callable[[str], TransformersLayers], segmenter: Segmenter
) -> Iterator[Callable[..., TransformersEngine]]:
    """`tiny_engine(family="llama", store=None, **options)`: an engine; a fresh MemoryStore unless one is given."""
    made: list[TransformersEngine] = []

    def build(family: str = "llama", store: Any = None, **options: Any) -> TransformersEngine:
        store = MemoryStore(1 << 28) if store is None else store
        options = {"name": f"tiny {family}", "fingerprint": f"tiny-{family}", "check": False, **options}
        options.setdefault("on_miss", "inline")
        own_segmenter = options.pop("segmenter", segmenter)
        made.append(TransformersEngine(tiny_layers(family), own_segmenter, store, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
