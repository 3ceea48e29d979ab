"""GGUF files: their names, the arguments that transformers needs, and the settings that it does not read.

transformers reads weights, config, tokenizer and chat template from the file, and dequantizes the weights. The result
is an ordinary model of the chosen dtype. Depends on the first bytes of the format, not on tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragblend.errors import UnsupportedModelError

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_HEAD_BYTES = 1 << 26  # metadata and the table of tensors precede the tensors


def parse_gguf_reference(model: str) -> tuple[str, str] | None:
    """Split the name of a GGUF, "LOCATION:FILE", into its two parts. Return None if `model` names no GGUF.

    LOCATION is a directory or a Hugging Face repository. The path of a local file gives ("", path). Raises
    UnsupportedModelError for a file that is one of several parts.

    >>> parse_gguf_reference("org/repo:model-Q4_K_M.gguf"), parse_gguf_reference("org/repo")
    (('org/repo', 'model-Q4_K_M.gguf'), None)
    >>> parse_gguf_reference("models/mine.gguf")
    ('', 'models/mine.gguf')
    """
    if not model.lower().endswith(".gguf"):
        return None
    if _SHARD.search(model):
        raise UnsupportedModelError(
            f"{model} is one of several parts, which transformers does not read; merge the parts: "
            "llama-gguf-split --merge FIRST_PART.gguf WHOLE.gguf"
        )
    place, colon, file = model.rpartition(":")
    is_file = not colon or Path(model).expanduser().exists()
    return ("", model) if is_file else (place, file)


def require_gguf() -> None:
    """Raise ImportError if transformers lacks a package for reading a GGUF. The message has the install command."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ImportError(f"a GGUF needs {' and '.join(missing)}: pip install 'ragblend[gguf]'")


def dequantize_keywords() -> dict[str, Any]:
    """Return the keyword arguments with which transformers dequantizes all weights of a GGUF.

    Without them, newer versions of transformers keep some weights quantized. Older versions dequantize always and have
    no such argument, so the result is {}.
    """
    try:
        from transformers import GgufConfig
    except ImportError:  # older versions always dequantize
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def reject_ignored_rope_scaling(path: Path, config: Any) -> None:
    """Raise UnsupportedModelError if the GGUF file `path` has a RoPE scaling that is missing in `config`.

    `config`: the config with which transformers loads the file.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = _rope_scaling(path)
    if scaling and parameters.get("rope_type", "default") == "default":
        raise UnsupportedModelError(
            f"{path.name} has a scaled RoPE ({scaling}), which transformers does not read from a GGUF, so every answer "
            "would be slightly wrong. Copy the setting from config.json of the original model, "
            "model_kwargs={'rope_parameters': {'rope_type': ..., 'rope_theta': ..., 'factor': ...}}, or use that model"
        )


def _rope_scaling(path: Path) -> str:
    """Return the file's setting that scales its RoPE; "" if it has none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"rope_freqs.weight", 0, _HEAD_BYTES) >= 0:
            return "rope_freqs.weight"
        key = b".rope.scaling.type"
        place = content.find(key, 0, _HEAD_BYTES)
        if place < 0:
            return ""
        kind, length = struct.unpack_from("<IQ", content, place + len(key))
        start = place + len(key) + 12
        text = content[start : start + min(length, 32)].decode(errors="replace") if kind == 8 else ""  # 8: a string
        return "" if text in ("", "none") else f"rope.scaling.type {text}"


@contextmanager
def hide_dequantize_progress() -> Iterator[None]:
    """Hide the progress bar that transformers shows while it dequantizes."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar: Any = reader.tqdm
    reader.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
