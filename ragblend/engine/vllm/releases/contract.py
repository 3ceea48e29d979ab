"""What ragblend uses of vLLM, and its comparison with the installed release.

`find_differences` reads ragblend's own files for the names that they import and the keywords that they pass, so that
nothing has to be listed but attributes. Tests make the same comparison with a release that cannot be installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"

ATTRIBUTES = {
    ("vllm.v1.request", "Request"): (
        "request_id", "prompt_token_ids", "prompt_embeds", "cache_salt", "block_hashes", "update_block_hashes",
        "kv_transfer_params", "skip_reading_prefix_cache", "num_preemptions", "num_output_tokens", "arrival_time",
        "mm_features", "lora_request", "sampling_params", "prefill_stats", "num_tokens", "num_computed_tokens",
        "output_token_ids", "max_tokens",
    ),
    ("vllm.v1.metrics.stats", "PrefillStats"): ("set", "num_prompt_tokens", "num_local_cached_tokens"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"): ("get_computed_blocks", "get_blocks"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ("get_block_ids", "blocks"),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"): ("block_id", "ref_cnt"),
    ("vllm.v1.core.sched.output", "SchedulerOutput"): ("total_num_scheduled_tokens", "num_scheduled_tokens"),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ("num_blocks", "kv_cache_groups"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ("kv_cache_spec", "layer_names"),
    ("vllm.v1.kv_cache_interface", "KVCacheSpec"): ("block_size", "copy_with_new_block_size"),
    ("vllm.v1.outputs", "KVConnectorOutput"): ("kv_connector_worker_meta",),
    ("vllm.v1.worker.gpu_worker", "Worker"): ("load_model", "get_model", "reload_weights"),
    ("vllm.v1.attention.backend", "AttentionBackend"): ("get_builder_cls",),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder"): ("build",),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl"): ("do_kv_cache_update", "scale", "sinks"),
    ("vllm.v1.attention.backends.triton_attn", "TritonAttentionImpl"): ("do_kv_cache_update", "scale", "sinks"),
    ("vllm.model_executor.layers.attention.attention", "Attention"): (
        "impl", "kv_cache", "layer_name", "head_size", "head_size_v", "num_heads", "num_kv_heads", "sliding_window",
        "get_attn_backend",
    ),
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention"): (
        "impl", "kv_cache", "kv_cache_dtype", "layer_name", "num_heads", "kv_lora_rank", "qk_rope_head_dim",
        "qk_nope_head_dim", "v_head_dim", "_v_up_proj", "get_attn_backend",
    ),
    ("vllm.model_executor.layers.attention.mla_attention", "MLACommonPrefillMetadata"): ("prefill_backend",),
    ("vllm.v1.attention.backends.mla.prefill.base", "MLAPrefillBackend"): ("prepare_metadata",),
    ("vllm.model_executor.models.llama", "LlamaAttention"): ("rotary_emb", "qkv_proj", "total_num_kv_heads"),
    ("vllm.lora.model_manager", "LoRAModelManager"): ("set_adapter_mapping", "_last_mapping", "model"),
    ("vllm.config.vllm", "VllmConfig"): ("model_config", "cache_config", "parallel_config", "scheduler_config"),
    ("vllm.v1.engine.async_llm", "AsyncLLM"): ("generate", "collective_rpc", "errored", "output_processor"),
    ("vllm.v1.engine.output_processor", "OutputProcessor"): ("get_num_unfinished_requests",),
}  # fmt: skip
"""Attributes that connector, layers and server read of objects that vLLM hands them, by module and class."""


def trees() -> Iterator[ast.Module]:
    """Yield the parsed files of ragblend that use vLLM."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def imports() -> Iterator[tuple[str, str, ast.Module]]:
    """Yield module, name and importing file of each `from vllm... import ...` in ragblend."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                yield from ((node.module, alias.name, tree) for alias in node.names)


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """Yield module, name and keywords of each call of something imported from vLLM."""
    for module, name, tree in imports():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield module, name, {keyword.arg for keyword in node.keywords if keyword.arg}


def connector_methods() -> dict[str, list[str]]:
    """Return the positional parameters of each method of BlendConnector, by the method's name."""
    tree = ast.parse((PACKAGE / "connector.py").read_text(encoding="utf-8"))
    classes = (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == "BlendConnector")
    methods = (each for each in next(classes).body if isinstance(each, ast.FunctionDef))
    return {each.name: [part.arg for part in each.args.posonlyargs + each.args.args] for each in methods}


def find_differences() -> list[str]:
    """Return the names that ragblend uses and the installed vLLM lacks or declares otherwise; [] if there are none."""
    differences = dict.fromkeys(f"{module}.{name}" for module, name, _ in imports() if _load(module, name) is None)
    for module, name, keywords in calls():
        target = _load(module, name)
        if target is not None:
            differences |= dict.fromkeys(
                f"{module}.{name}({each}=)" for each in sorted(_unknown_keywords(target, keywords))
            )
    for (module, name), attributes in ATTRIBUTES.items():
        if not _exists(module):
            differences[module] = None
        elif (target := _load(module, name)) is not None:  # a backend of another platform may not load
            names = _attributes(target)
            differences |= dict.fromkeys(f"{module}.{name}.{each}" for each in attributes if each not in names)
    return [*differences, *_connector_differences()]


def _connector_differences() -> Iterator[str]:
    """Yield the methods of vLLM's base class of connectors that differ from ragblend's."""
    base, ours = _load(CONNECTOR_BASE, "KVConnectorBase_V1"), connector_methods()
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if name in ours and name != "__init__":
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            expected = [each.name for each in inspect.signature(method).parameters.values() if each.kind in kinds]
            if ours[name][: len(expected)] != expected:
                yield f"KVConnectorBase_V1.{name}({', '.join(expected)})"
        elif getattr(method, "__isabstractmethod__", False):
            yield f"KVConnectorBase_V1.{name}"


def _exists(module: str) -> bool:
    """Return True if there is a module of this name, whether it loads here or not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _load(module: str, name: str) -> Any:
    """Return what `from module import name` gives; None if there is none, or if it does not load here."""
    try:
        loaded = importlib.import_module(module)
        return getattr(loaded, name) if hasattr(loaded, name) else importlib.import_module(f"{module}.{name}")
    except (ImportError, AttributeError, RuntimeError, OSError):
        return None


def _unknown_keywords(target: Any, keywords: set[str]) -> set[str]:
    """Return the `keywords` that a function, or a class's constructor, does not accept."""
    parameters = inspect.signature(target).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return set()
    return keywords - {each.name for each in parameters}


def _attributes(target: type) -> set[str]:
    """Return the methods, fields and `self.x` of a class and of its bases in vLLM."""
    names = set(dir(target))
    for kind in target.__mro__:
        if kind.__module__.split(".")[0] != "vllm":
            continue
        names |= set(getattr(kind, "__annotations__", {}))
        for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names
