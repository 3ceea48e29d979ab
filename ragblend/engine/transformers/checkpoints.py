"""Checkpoints: finding a model's files, or downloading them, and the fingerprint of their weights and config.

Depends on the file layout of a checkpoint and on Hugging Face, not on transformers' models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from ragblend.engine.store.format.keys import default_digest_cache, digest_files, fingerprint
from ragblend.engine.transformers.adapters import is_adapter
from ragblend.engine.transformers.gguf import parse_gguf_reference
from ragblend.errors import CorruptError, NotFoundError, UnsupportedModelError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.files.reading import read_file
from ragblend.options import ModelOptions

DEMO = "demo"
AS_IT_IS = ModelOptions()
CHECKSUMS = "SHA256SUMS"
"""File with the checksums of the embedded model's files, in the format of `sha256sum --check`."""
_REINSTALL = "install it again: pip install --force-reinstall --no-deps ragblend"

# Fields of config.json that cannot change the KV. All other fields count, because a field of a later transformers may
# change how attention is scaled.
IRRELEVANT_FIELDS = frozenset(
    {
        # saving
        "_name_or_path", "name_or_path", "transformers_version", "transformers_weights", "unsloth_fixed",
        "unsloth_version", "torch_dtype", "dtype", "tokenizer_class", "processor_class", "pretraining_tp",
        # the attention kernel, which the engine replaces
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "use_cache", "torchscript",
        "gradient_checkpointing", "chunk_size_feed_forward",
        # training
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "residual_dropout",
        "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "embedding_dropout", "output_router_logits",
        "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        # outputs of a forward
        "return_dict", "output_attentions", "output_hidden_states", "output_scores",
        # other heads, and how an answer ends
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "is_decoder",
        "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder",
        # sampling, before generation_config.json existed
        "temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams", "num_beam_groups", "max_length",
        "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "diversity_penalty", "early_stopping", "bad_words_ids",
        "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip


def find_model(model: str, weights: bool = True, options: ModelOptions = AS_IT_IS) -> Path:
    """Return the path of a checkpoint's directory, or of a GGUF file. A model on Hugging Face is downloaded.

    `model` is "demo", a local path, a Hugging Face id, or a GGUF: "file.gguf", "repo:file.gguf", "directory:file.gguf".
    Without `weights`, only the tokenizer and configuration of a checkpoint are downloaded. A download uses these
    `options`: revision, cache_dir, local_files_only, and the token in model_kwargs. Raises NotFoundError for a missing
    model, UsageError if `model` is a path and `options` have a revision.
    """
    if model == DEMO:
        return _demo_checkpoint()
    path = expand_user_path(model, "model")
    inside = (options.model_kwargs or {}).get("gguf_file")  # transformers' argument for a GGUF
    gguf = parse_gguf_reference(f"{model}:{inside}" if inside else model)
    if gguf is not None:
        return _find_gguf(model, *gguf, options)
    is_path = path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and options.revision is not None:
        raise UsageError(f"revision is {options.revision!r}, but {model} is a path; it is for Hugging Face ids only")
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(path):
            files = sorted(each.name for each in path.glob("*.gguf"))
            fix = f"name the GGUF: {path / files[0]}" if files else "name the directory that save_pretrained wrote"
            raise NotFoundError(f"{model} has no config.json; {fix}")
        return path
    if is_path:
        raise NotFoundError(
            f"no model directory at {model}; pass a Hugging Face id, a local path, or use the embedded model: "
            "`model='demo'`"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.model", "*.jinja", "*.txt", *(["*.safetensors"] if weights else [])]
    with _from_hub(model, options):
        return Path(snapshot_download(model, allow_patterns=patterns, **_hub(options)))


def _find_gguf(model: str, place: str, file: str, options: ModelOptions) -> Path:
    """Return the local file, downloaded if it is a repo's."""
    folder = Path(place).expanduser()
    path = folder / file if place else Path(file).expanduser()
    if path.is_file() or not place or folder.is_dir():
        if not path.is_file():
            raise NotFoundError(f"no GGUF at {path}; pass a file, or one of a Hugging Face repo: ORG/REPO:{path.name}")
        if options.revision is not None:
            raise UsageError(f"revision is {options.revision!r}, but {path} is a path; it is for Hugging Face ids only")
        return path
    from huggingface_hub import hf_hub_download

    with _from_hub(model, options):
        return Path(hf_hub_download(place, file, **_hub(options)))


def _hub(options: ModelOptions) -> dict[str, Any]:
    """Return the arguments of a download from Hugging Face."""
    return {
        "revision": options.revision,
        "cache_dir": options.cache_dir
        if options.cache_dir is None
        else expand_user_path(options.cache_dir, "cache_dir"),
        "local_files_only": options.local_files_only,
        "token": (options.model_kwargs or {}).get("token"),
    }


@contextmanager
def _from_hub(model: str, options: ModelOptions) -> Iterator[None]:
    """Raise NotFoundError for errors of reading a repo."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        version = f", revision {options.revision!r}," if options.revision else ""
        place = options.cache_dir or "the cache of Hugging Face"
        if options.local_files_only:
            raise NotFoundError(
                f"model {model!r}{version} is not in {place}, and local_files_only forbids a download; leave that out, "
                "or use the embedded model: `model='demo'`"
            ) from error
        raise NotFoundError(
            f"model {model!r}{version} is neither a local path nor on Hugging Face ({type(error).__name__}). "
            "Check the name and the network, or use the embedded model: `model='demo'`"
        ) from error


@cache
def _demo_checkpoint() -> Path:
    """Return the embedded model's directory. Raises CorruptError unless its files match their `SHA256SUMS`."""
    path = Path(str(files("ragblend") / "demo" / "weights"))
    try:
        lines = read_file(path / CHECKSUMS).decode().splitlines()
        bad = [name for digest, name in map(str.split, lines) if sha256(read_file(path / name)).hexdigest() != digest]
    except (OSError, ValueError) as error:
        raise CorruptError(f"the embedded model cannot be read: {error}; {_REINSTALL}") from error
    if bad or not any(line.endswith(".safetensors") for line in lines):
        raise CorruptError(f"files of the embedded model were changed ({', '.join(bad)}); {_REINSTALL}")
    return path


def model_fingerprint(path: Path, dtype: str, overrides: Mapping[str, Any] | None = None) -> str:
    """Return the fingerprint of a model: the checkpoint at `path`, run in `dtype`.

    It covers weight bytes, architecture, RoPE, and the model's own code, if any. `overrides`: config fields whose
    values differ from those in the file. Raises UnsupportedModelError if a directory has no safetensors weights.
    """
    if path.is_file():  # a GGUF has its config inside
        return fingerprint(digest_files([path], default_digest_cache()), {"gguf": True, **(overrides or {})}, dtype)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise UnsupportedModelError(f"{path} has no *.safetensors weights; convert them with save_pretrained")
    config = {**json.loads((path / "config.json").read_text(encoding="utf-8")), **(overrides or {})}
    code = sorted(path.glob("*.py")) if "auto_map" in config else []
    return fingerprint(digest_files([*weights, *code], default_digest_cache()), architecture(config), dtype)


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that may change the KV.

    `config` is the file's content, or `to_diff_dict()` of a loaded config. It must not have the defaults that
    transformers adds. They differ between releases of transformers, but the fingerprint must be the same in all.
    """
    return {name: value for name, value in config.items() if name not in IRRELEVANT_FIELDS and value is not None}
