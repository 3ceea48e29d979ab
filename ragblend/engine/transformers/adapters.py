"""Adapters of peft (LoRA and its relatives): their files, loading, and part of a model's fingerprint.

An adapter's layers run unmerged, as in peft, so a model with an adapter has a separate fingerprint and separate KV.
Adapters that change the prompt instead of layers are rejected. Depends on peft and its file layout.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ragblend.errors import NotFoundError, UnsupportedModelError
from ragblend.files.reading import read_file

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_OF_LAYERS = frozenset(
    {"LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "LN_TUNING", "TRAINABLE_TOKENS", "MISS", "SHIRA"}
)

# Fields of adapter_config.json about training and files, which do not change the computation.
_IRRELEVANT_FIELDS = frozenset(
    {"peft_version", "inference_mode", "base_model_name_or_path", "revision", "task_type", "lora_dropout"}
    | {"init_lora_weights", "auto_mapping", "runtime_config", "loftq_config", "eva_config", "corda_config"}
    | {"lora_ga_config"}
)


def is_adapter(path: Path) -> bool:
    """Return True if the directory `path` has `adapter_config.json`, by which transformers also finds an adapter."""
    return (path / ADAPTER_CONFIG).is_file()


def base_model_name(path: Path) -> str:
    """Return the name of the adapter's base model, from the config in `path`. Raises NotFoundError if it has none."""
    base = _config(path).get("base_model_name_or_path")
    if not base:
        raise NotFoundError(f"{path / ADAPTER_CONFIG} names no base model; pass model=BASE, adapter={str(path)!r}")
    return str(base)


def with_adapter(model: Any, path: Path) -> Any:
    """Load the adapter in the directory `path` into the layers of `model`, and return the model.

    Raises ImportError with the install command if peft is missing. Raises NotFoundError if the adapter has no
    safetensors weights, UnsupportedModelError if it changes more than the layers.
    """
    reject_unsupported_adapter(_config(path), str(path))
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise NotFoundError(
            f"{path} has no {ADAPTER_WEIGHTS}, and pickled adapters are not read because they can run code; save the "
            "adapter again with save_pretrained, which writes safetensors"
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("an adapter needs peft: pip install 'ragblend[lora]'") from error
    return PeftModel.from_pretrained(model, str(path)).get_base_model()


def adapter_digest(path: Path) -> str:
    """Return a text that identifies the adapter in `path`, as a part of a model's fingerprint.

    Two texts are equal if and only if the weights and the config fields that may affect the computation are equal.
    """
    digest = blake2b(read_file(path / ADAPTER_WEIGHTS), digest_size=16)
    digest.update(_relevant(_config(path)).encode())
    return f"+adapter {digest.hexdigest()}"


def unwrap_peft_model(model: Any) -> Any:
    """Return the transformers model inside a PeftModel; any other model unchanged.

    Raises UnsupportedModelError for an adapter that changes more than layers.
    """
    configs = getattr(model, "peft_config", None)
    for name, config in (configs or {}).items():
        reject_unsupported_adapter(config.to_dict(), f"the adapter {name!r}")
    return model.get_base_model() if configs and hasattr(model, "get_base_model") else model


def describe_adapters(model: Any) -> str:
    """Return a model's adapter configs, active adapters and scalings as text; "" for a model without adapters.

    The text is part of a loaded model's fingerprint, because configs, active adapters and scalings change the KV. A
    digest of the model's tensors does not cover them.
    """
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""
    lines = [f"{name} {_relevant(config.to_dict())}" for name, config in sorted(configs.items())]
    return "\n".join([*lines, describe_active_adapters(model)])


def describe_active_adapters(model: Any) -> str:
    """Return the active adapters of `model` and their scalings as text, one line per module with an adapter."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    # A transformers model has a method of that name, whose text would contain the whole model.
    layers = (
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "active_adapters") and not callable(module.active_adapters)
    )
    return "\n".join(f"{name} {[getattr(layer, each, None) for each in names]}" for name, layer in layers)


def reject_unsupported_adapter(config: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModelError for an adapter that changes more than the computation in the layers.

    An example is an adapter that adds tokens. config: the adapter's config. name: the adapter's name, for the error.
    """
    kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    why = "" if kind in _OF_LAYERS else "may change more than a layer's computation of a token"
    if kind in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT"):
        why = "adds tokens before or inside the prompt, without which chunks are stored"
    elif kind in ("XLORA", "CARTRIDGE") or config.get("arrow_config"):
        why = "mixes adapters by the prompt, so that a chunk's KV depends on more than the tokens before it"
    elif config.get("alora_invocation_tokens"):
        why = "starts at certain tokens of the prompt, so that a chunk's KV depends on their positions"
    if why:
        raise UnsupportedModelError(f"{name} is of type {kind}, which {why}. Use LoRA or a relative of it")


def _config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_file(path / ADAPTER_CONFIG)))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise NotFoundError(f"{path} holds no adapter: {ADAPTER_CONFIG} cannot be read ({error})") from error


def _relevant(config: dict[str, Any]) -> str:
    fields = {name: value for name, value in config.items() if name not in _IRRELEVANT_FIELDS and value is not None}
    return json.dumps(fields, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
