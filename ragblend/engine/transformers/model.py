"""Loading of a transformers model: "demo", a Hugging Face id or a local path; its arguments, device and dtype.

Depends on transformers, and on `checkpoints` for the files of a model; not on fusing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.store.format.kv import DTYPES, dtype_name
from ragblend.engine.transformers.adapters import adapter_digest, base_model_name, is_adapter, with_adapter
from ragblend.engine.transformers.checkpoints import AS_IT_IS, find_model, model_fingerprint
from ragblend.engine.transformers.gguf import (
    dequantize_keywords,
    hide_dequantize_progress,
    reject_ignored_rope_scaling,
    require_gguf,
)
from ragblend.errors import NotFoundError, UnsupportedModelError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.options import ModelOptions

# Errors of transformers for a checkpoint that it cannot read, damaged files included.
UNREADABLE = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, OSError, ImportError, RuntimeError,
    struct.error,
)  # fmt: skip

# Arguments of `from_pretrained` that do not change the KV.
_IRRELEVANT_ARGUMENTS = frozenset(
    {"token", "force_download", "proxies", "max_memory", "offload_folder", "offload_buffers", "low_cpu_mem_usage"}
    | {"disable_mmap", "weights_only", "use_safetensors", "generation_config", "tqdm_class"}
)
_ARGUMENTS = _IRRELEVANT_ARGUMENTS | {"quantization_config"}  # the others may be fields of config.json
_REFUSED_ARGUMENTS = {
    "state_dict": "load the model yourself and pass it with its tokenizer: load_engine((model, tokenizer))",
    "subfolder": "pass the path of the folder itself, or a repo that has the model at its top",
    "adapter_kwargs": "pass the adapter itself: adapter='DIRECTORY'",
    "config": "pass its fields by name, such as model_kwargs={'sliding_window': None}",
    "tp_plan": "one model is on one device here; for several use backend='vllm' with tensor_parallel_size",
    "tp_size": "one model is on one device here; for several use backend='vllm' with tensor_parallel_size",
    "distributed_config": "one model is on one device here; for several use backend='vllm' with tensor_parallel_size",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model in memory, its tokenizer, its directory or file (None if unknown), and its fingerprint."""

    model: Any
    tokenizer: Any
    name: str
    path: Path | None
    fingerprint: str


def load_model(model: str, options: ModelOptions = AS_IT_IS) -> LoadedModel:
    """Load `model` with `options`. Its remote code runs only with `trust_remote_code`.

    Raises NotFoundError if no checkpoint of this name is found (see `find_model`), UnsupportedModelError for a model
    that is no causal decoder or needs remote code, and UsageError for invalid options.
    """
    kwargs = _checked_kwargs(options)
    place, device_map = _device_of(options)
    path, adapter = _base_and_adapter(find_model(model, options=options), options)
    if path.is_file():
        require_gguf()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = _source(path)
    trust: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    try:
        fields = {name: value for name, value in kwargs.items() if name not in _ARGUMENTS}
        config, unused = AutoConfig.from_pretrained(**source, **trust, **fields, return_unused_kwargs=True)
        overrides = {name: value for name, value in fields.items() if name not in unused}
        kwargs = {name: value for name, value in kwargs.items() if name not in overrides}
        variant = {name: value for name, value in kwargs.items() if name not in _IRRELEVANT_ARGUMENTS}
        kind = choose_dtype(options.dtype, config, place)
        if path.is_file():
            reject_ignored_rope_scaling(path, config)
        was_quantised = is_quantised(config) or "quantization_config" in kwargs
        if device_map is None and was_quantised:
            device_map = {"": place}  # quantised on their final device, because some cannot be moved
        if options.attn_implementation is not None:
            kwargs["attn_implementation"] = options.attn_implementation
        with _no_bars(), hide_dequantize_progress() if path.is_file() else nullcontext():
            weights = AutoModelForCausalLM.from_pretrained(
                **source,
                **trust,
                config=config,
                dtype=kind,
                device_map=device_map,
                **(dequantize_keywords() if path.is_file() else {"use_safetensors": True}),
                **kwargs,
            )
        tokenizer = AutoTokenizer.from_pretrained(**_tokenizer_source(path, adapter), **trust)
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{model} cannot be loaded as a causal language model: {error}. ragblend needs safetensors weights, or a "
            "GGUF, of a decoder such as Llama, Mistral, Qwen2, Qwen3, Phi-3 or Gemma; see `ragblend doctor`"
        ) from error
    if path.is_file():  # both describe the file, whose weights are dequantised now
        weights.hf_quantizer = None
        vars(weights.config).pop("quantization_config", None)
    reject_split_model(weights, model)
    if device_map is None:
        weights = weights.to(place)
    how = dtype_name(kind) + _suffix(variant)
    if was_quantised and not is_quantised(weights.config):  # FP8 without a GPU, for example
        how += "+dequantised"
    if adapter is not None:
        weights = with_adapter(weights, adapter)
        how += adapter_digest(adapter)
    name = f"{model_name(model)}+{options.adapter}" if options.adapter else model_name(model)
    return LoadedModel(weights.eval(), tokenizer, name, path, model_fingerprint(path, how, overrides))


def model_name(model: str) -> str:
    """Return the name or path `model` as messages and reports show it, without a slash at its end."""
    return str(model).rstrip("/")


def load_tokenizer(model: str, options: ModelOptions = AS_IT_IS) -> tuple[Any, Path]:
    """Return the tokenizer of `model` and the path of its checkpoint. The weights are not loaded."""
    path, adapter = _base_and_adapter(find_model(model, weights=False, options=options), options, weights=False)
    if path.is_file():
        require_gguf()
    from transformers import AutoTokenizer

    source = _tokenizer_source(path, adapter)
    try:
        return AutoTokenizer.from_pretrained(**source, trust_remote_code=options.trust_remote_code), path
    except UNREADABLE as error:
        raise UnsupportedModelError(f"the tokenizer of {model} cannot be loaded: {error}") from error


def is_quantised(config: Any) -> bool:
    """Return True if the model's weights are stored in few bits and stay quantised when they are loaded."""
    return getattr(config, "quantization_config", None) is not None


def reject_split_model(model: Any, name: str) -> None:
    """Raise UsageError for a model whose layers are on several devices, or not in memory."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    places |= {str(parameter.device) for parameter in model.parameters()} if len(places) < 2 else set()
    kinds = {"cuda:" + place if place.isdecimal() else place for place in places}
    if len(kinds) > 1 or kinds & {"meta", "disk"}:
        raise UsageError(
            f"{name} is spread over {', '.join(sorted(kinds))}, but its layers run one at a time over KV on one "
            "device, so the whole model must be on that device. Choose device='cuda' or 'cpu', a smaller dtype or "
            "quantised weights; or several GPUs by backend='vllm' with vllm_options={'tensor_parallel_size': 2}"
        )


def _checked_kwargs(options: ModelOptions) -> dict[str, Any]:
    """Return a copy of `model_kwargs`. Raises UsageError for arguments that would have no effect or a wrong one."""
    kwargs = dict(options.model_kwargs or {})
    kwargs.pop("gguf_file", None)  # `find_model` has it
    for name, fix in _REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise UsageError(f"model_kwargs has {name}, which ragblend cannot use: {fix}")
    if kwargs.pop("use_safetensors", True) is False:
        raise UsageError(
            "model_kwargs has use_safetensors=False, but pickled weights can run code and are not read; convert them "
            "with save_pretrained, which writes safetensors"
        )
    return kwargs


def _device_of(options: ModelOptions) -> tuple[torch.device, Any]:
    """Return the model's device, and the device map for transformers; None if the model is moved after loading."""
    asked = options.device_map
    if isinstance(asked, Mapping):
        places = sorted({str(place) for place in asked.values()})
        if len(places) != 1:
            raise UsageError(
                f"device_map spreads the model over {', '.join(places) or 'nothing'}, but its layers run one at a time "
                "over KV on one device. Name one device, {'': 'cuda:0'}; or, for several GPUs, use backend='vllm'"
            )
        asked = places[0]
    if asked in ("auto", "balanced", "balanced_low_0", "sequential"):
        return find_device("auto"), asked
    named = ModelOptions.from_keywords(device=asked).device if asked is not None else options.device
    return find_device(f"cuda:{named}" if named.isdecimal() else named), None


def _base_and_adapter(path: Path, options: ModelOptions, weights: bool = True) -> tuple[Path, Path | None]:
    """Return the checkpoint for `path` and its adapter, if any. `path` itself may be an adapter."""
    if options.adapter is not None:
        adapter = expand_user_path(options.adapter, "adapter")
        if not is_adapter(adapter):
            if adapter.exists() or options.adapter.startswith((".", "/", "~")) or options.adapter.count("/") != 1:
                raise NotFoundError(f"no adapter at {adapter}; give the directory that peft's save_pretrained wrote")
            adapter = find_model(options.adapter, weights, replace(options, revision=None))
        return path, adapter
    if not is_adapter(path):
        return path, None
    base = find_model(base_model_name(path), weights, replace(options, revision=None))
    if is_adapter(base):
        raise UnsupportedModelError(
            f"{path} is an adapter on {base}, which is also an adapter; merge {base} into its base model first"
        )
    return base, path


def _tokenizer_source(path: Path, adapter: Path | None) -> dict[str, Any]:
    """Return the tokenizer's directory as `from_pretrained` arguments: an adapter may contain a tokenizer."""
    has_own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return _source(adapter if has_own and adapter is not None else path)


def _source(path: Path) -> dict[str, Any]:
    """Return the `from_pretrained` arguments of a checkpoint's directory, a config's JSON file or a GGUF."""
    if path.is_dir() or path.suffix == ".json":
        return {"pretrained_model_name_or_path": path}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


def _suffix(variant: Mapping[str, Any]) -> str:
    """Return the fingerprint's part for `from_pretrained` arguments that change the KV; "" without any."""
    if not variant:
        return ""
    values = {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in variant.items()}
    return "+" + json.dumps(values, sort_keys=True, default=str)


def outline_fusable_model(path: Path, trust_remote_code: bool = False) -> Any:
    """Return the model at `path` without its weights, so quickly for a model of any size.

    `path`: a checkpoint's directory, of which the config is enough, a config's JSON file, or a GGUF. Raises
    UnsupportedModelError if the model cannot be fused.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ragblend.engine.transformers.families import reject_unsupported_model

    path = _base_and_adapter(path, AS_IT_IS, weights=False)[0]
    if path.suffix.lower() == ".gguf":
        require_gguf()
    try:
        config = AutoConfig.from_pretrained(**_source(path), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path.name} is no causal language model that transformers can load: {error}"
        ) from error
    reject_unsupported_model(model)
    return model


def summarize_fusable_model(path: Path, trust_remote_code: bool = False) -> str:
    """Return class, size and context length of the model at `path`, as `outline_fusable_model` finds it."""
    model = outline_fusable_model(path, trust_remote_code)
    count = sum(parameter.numel() for parameter in model.parameters())
    context = model.config.get_text_config().max_position_embeddings
    return f"{type(model).__name__}, {count / 1e6:.1f} M parameters, {context} tokens of context"


def find_device(device: str) -> torch.device:
    """Return the device of that name; "auto" is a GPU if there is one. Raises UsageError if PyTorch cannot use it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        if place.type == "cuda" and not torch.cuda.is_available():
            why = "it was built without CUDA" if torch.version.cuda is None else "it finds no GPU or no driver"
            raise UsageError(
                f"device is {device!r}, but PyTorch {torch.__version__} cannot use CUDA here ({why}). Choose "
                "`device='cpu'` or `device='auto'`, or install PyTorch for CUDA: https://pytorch.org/get-started/locally"
            )
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device is {device!r}, but PyTorch finds {torch.cuda.device_count()} GPUs, from cuda:0")
        torch.zeros(1, device=place).item()  # fails for "meta" and for devices without a backend in this PyTorch
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise UsageError(
            f"device is {device!r}, but PyTorch {torch.__version__} cannot use it here; choose cpu, cuda or cuda:N"
        ) from error
    return place


def choose_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype that a model computes in.

    "auto" is the checkpoint's dtype, or float32 on a CPU, where half precision is no faster.
    """
    if dtype in DTYPES:
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    config_dtype = getattr(config, "dtype", None) or torch.float32
    return config_dtype if config_dtype in DTYPES.values() else torch.bfloat16


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide transformers' "Loading weights" bar, because a library must not print."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
