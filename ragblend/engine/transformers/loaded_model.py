"""Models that the caller loaded by transformers, with their tokenizer: validation, and a fingerprint of the weights.

Depends on the methods of transformers' models and tokenizers, and on the files of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.store.format.keys import fingerprint
from ragblend.engine.store.format.kv import dtype_name
from ragblend.engine.transformers.adapters import describe_adapters, unwrap_peft_model
from ragblend.engine.transformers.checkpoints import architecture, model_fingerprint
from ragblend.engine.transformers.model import LoadedModel, reject_split_model
from ragblend.errors import RagblendError, UsageError
from ragblend.options import ModelOptions

_PIECE = 1 << 26  # bytes of a tensor per digest update


def unpack_loaded_model(model: object) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a transformers pipeline. A pair (model, tokenizer) is returned unchanged.

    Raises UsageError for any other object.
    """
    if hasattr(model, "model") and callable(getattr(model, "tokenizer", None)):
        model = (model.model, model.tokenizer)  # type: ignore[attr-defined]  # a pipeline of transformers
    if isinstance(model, tuple) and len(model) == 2 and hasattr(model[0], "config") and callable(model[1]):
        return model
    raise UsageError(
        f"model is a {type(model).__name__}; pass a name, a path, a pipeline, or a loaded model with its tokenizer: "
        "(AutoModelForCausalLM.from_pretrained(...), AutoTokenizer.from_pretrained(...))"
    )


def adopt_loaded_model(pair: tuple[Any, Any], options: ModelOptions) -> LoadedModel:
    """Return the LoadedModel of a model that is loaded already, with its device and dtype unchanged.

    Raises UsageError if an option differs from its default, or if the model's layers are on several devices.
    """
    model, tokenizer = unwrap_peft_model(pair[0]), pair[1]
    name = loaded_model_name(pair)
    if options.non_defaults:
        raise UsageError(
            f"{', '.join(options.non_defaults)} cannot be set for a model that is loaded already; pass it to "
            f"from_pretrained, or let ragblend load the model: model={name!r}"
        )
    reject_split_model(model, name)
    path = _directory(model)
    return LoadedModel(model, tokenizer, name, path, loaded_model_fingerprint(model))


def loaded_model_name(pair: tuple[Any, Any]) -> str:
    """Return the name or path that the model was loaded from, else the name of its class."""
    config = pair[0].config
    return str(getattr(config, "_name_or_path", "") or type(pair[0]).__name__).rstrip("/")


def loaded_model_fingerprint(model: Any) -> str:
    """Return the fingerprint of a model in memory. It covers weights (each byte), config, dtype and active adapters.

    If weights and config are still those of the directory that the model was loaded from, the result is the directory's
    fingerprint. Engines that load the directory then share stored KV with this model.
    """
    model = unwrap_peft_model(model)
    config_fields = architecture(model.config.to_diff_dict())
    dtype = dtype_name(next(parameter for parameter in model.parameters() if parameter.is_floating_point()).dtype)
    path, adapters = _directory(model), describe_adapters(model)
    if path is not None and not adapters and _is_as_saved(model, config_fields, path):
        return model_fingerprint(path, dtype)
    return fingerprint(
        state_digest(model.state_dict()), config_fields, f"{dtype}+adapters {adapters}" if adapters else dtype
    )


def state_digest(state: Mapping[str, Any]) -> str:
    """Return a digest of the tensors' names, dtypes, shapes and bytes. Takes about a second per GB."""
    digest = blake2b(digest_size=16)
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, Tensor):
            digest.update(repr((name, tensor)).encode())
            continue
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(content), _PIECE):
            digest.update(content[start : start + _PIECE].cpu().numpy().data)
    return digest.hexdigest()


def _directory(model: Any) -> Path | None:
    """Return the local directory that the model was loaded from; None if it is unknown or does not exist."""
    name = getattr(model.config, "_name_or_path", "")
    path = Path(name) if name else None
    return path if path is not None and (path / "config.json").is_file() else None


def _is_as_saved(model: Any, config_fields: Mapping[str, Any], path: Path) -> bool:
    """Return True if the model in memory equals the files in `path`, whose weights are cast to the model's dtype."""
    from safetensors import safe_open
    from transformers import AutoConfig

    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in config or architecture(AutoConfig.from_pretrained(path).to_diff_dict()) != config_fields:
            return False
        state, seen = model.state_dict(), set()
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 (no mapping)
                    there, here = stored.get_tensor(name), state.get(name)
                    if here is None or here.shape != there.shape or not torch.equal(there.to(here.dtype), here.cpu()):
                        return False
                    seen.add(name)
    except (OSError, ValueError, KeyError, RagblendError):
        return False
    places = {state[name].data_ptr() for name in seen}
    return all(name in seen or tensor.data_ptr() in places for name, tensor in state.items())  # the rest is tied
