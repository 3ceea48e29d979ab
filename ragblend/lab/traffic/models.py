"""What a trace is counted with besides tokens: the bytes of a model's KV, a machine's profile. Loads no weights."""

from __future__ import annotations

import json
from pathlib import Path

from ragblend.config import Settings
from ragblend.engine.store.disk import MACHINES_DIR
from ragblend.engine.tuning.loading_controller import MachineProfile, machine_profile_from
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import user_path
from ragblend.files.reading import read_text


def kv_bytes_per_token(model: str, settings: Settings) -> int:
    """Bytes of one token's KV in all layers, of a model by its name or folder; in the settings' dtype.

    Multi-head latent attention keeps one latent and one rotary key per token instead of heads.
    """
    import torch
    from transformers import AutoConfig

    from ragblend.engine.transformers.model import find_model

    path = find_model(model, weights=False)
    if path.is_file():
        raise UsageError(f"{path.name} is a GGUF, which has no config beside it; give --kv-bytes-per-token")
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    text = config.get_text_config()
    own = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    named = own if settings.dtype == "auto" else settings.dtype
    kind = getattr(torch, str(named).removeprefix("torch."), None) or torch.bfloat16
    if getattr(text, "kv_lora_rank", None):
        return int(text.num_hidden_layers * (text.kv_lora_rank + text.qk_rope_head_dim) * kind.itemsize)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(text.num_hidden_layers * heads * head_dim * 2 * kind.itemsize)


def read_profile(place: str | Path) -> MachineProfile:
    """A machine profile from a file: what `ragblend profile --json` printed. Raises NotFoundError, UsageError."""
    path = user_path(place, "--profile")
    how = f"write it: ragblend profile --model MODEL --json > {path}"
    try:
        facts = json.loads(read_text(path, "--profile", how))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no machine profile ({error}); {how}") from error
    if not isinstance(facts, dict):
        raise UsageError(f"{path} is no machine profile but a JSON {type(facts).__name__}; {how}")
    return machine_profile_from(facts)


def profile_in_store(settings: Settings) -> MachineProfile | None:
    """What `ragblend profile` measured for the settings' model on this machine; None where it measured nothing."""
    if not (Path(settings.store) / MACHINES_DIR).is_dir():
        return None
    from ragblend.lab.profile import find_profile

    try:
        return find_profile(settings)
    except (RagblendError, OSError):
        return None
