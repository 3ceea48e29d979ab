"""Adapters of peft (LoRA and its relatives): found, put on a model, and told apart.

An adapter's layers run as peft runs them, unmerged, so a model with one has weights of its own, and KV of its own. What
works on the prompt instead of on layers is refused. Knows peft by name, and its files.
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

# What an adapter_config.json says of training and of files, and not of what is computed.
_IRRELEVANT_FIELDS = frozenset(
    {"peft_version", "inference_mode", "base_model_name_or_path", "revision", "task_type", "lora_dropout"}
    | {"init_lora_weights", "auto_mapping", "runtime_config", "loftq_config", "eva_config", "corda_config"}
    | {"lora_ga_config"}
)


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter. transformers puts one on its base model wherever it finds that file."""
    return (path / ADAPTER_CONFIG).is_file()


def base_of(path: Path) -> str:
    """The model that the adapter in `path` was trained on, as it says."""
    base = _config(path).get("base_model_name_or_path")
    if not base:
        raise NotFoundError(f"{path / ADAPTER_CONFIG} names no base model; say it: model=BASE, adapter={str(path)!r}")
    return str(base)


def with_adapter(model: Any, path: Path) -> Any:
    """`model` with the adapter in `path` in its layers. Raises ImportError naming the extra, UnsupportedModelError for
    what is not a change of layers."""
    reject_unsupported_adapter(_config(path), str(path))
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise NotFoundError(
            f"{path} has no {ADAPTER_WEIGHTS}; pickled adapters can run code and are not read: save it again with "
            "save_pretrained, which writes safetensors"
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("an adapter needs peft: pip install 'ragblend[lora]'") from error
    return PeftModel.from_pretrained(model, str(path)).get_base_model()


def adapter_mark(path: Path) -> str:
    """What a fingerprint says of the adapter in `path`: equal exactly when weights and config are."""
    digest = blake2b(read_file(path / ADAPTER_WEIGHTS), digest_size=16)
    digest.update(_relevant(_config(path)).encode())
    return f"+adapter {digest.hexdigest()}"


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PeftModel; another one as it is."""
    configs = getattr(model, "peft_config", None)
    for name, config in (configs or {}).items():
        reject_unsupported_adapter(config.to_dict(), f"the adapter {name!r}")
    return model.get_base_model() if configs and hasattr(model, "get_base_model") else model


def adapters_of(model: Any) -> str:
    """Everything about a model's adapters that its tensors do not say: which are active, and how strong; "" without."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return ""
    said = [f"{name} {_relevant(config.to_dict())}" for name, config in sorted(configs.items())]
    return "\n".join([*said, active_adapters(model)])


def active_adapters(model: Any) -> str:
    """Which adapters each layer runs at the moment, and how strong."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    layers = ((name, module) for name, module in model.named_modules() if hasattr(module, "active_adapters"))
    return "\n".join(f"{name} {[getattr(layer, each, None) for each in names]}" for name, layer in layers)


def reject_unsupported_adapter(config: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModelError for an adapter that does more than change what a layer computes of a token."""
    kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    why = "" if kind in _OF_LAYERS else "is not known to change no more than what a layer computes of a token"
    if kind in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT"):
        why = "puts tokens of its own before or into the prompt, which no stored chunk has seen"
    elif kind in ("XLORA", "CARTRIDGE") or config.get("arrow_config"):
        why = "mixes adapters by the prompt, so that a chunk's KV depends on more than the tokens before it"
    elif config.get("alora_invocation_tokens"):
        why = "starts at certain tokens of the prompt, so that a chunk's KV depends on where they stand"
    if why:
        raise UnsupportedModelError(f"{name} is of type {kind}, which {why}. Use LoRA or a relative of it")


def _config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_file(path / ADAPTER_CONFIG)))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise NotFoundError(f"{path} holds no adapter: {ADAPTER_CONFIG} cannot be read ({error})") from error


def _relevant(config: dict[str, Any]) -> str:
    said = {name: value for name, value in config.items() if name not in _IRRELEVANT_FIELDS and value is not None}
    return json.dumps(said, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
