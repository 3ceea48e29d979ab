"""Find, check, fingerprint and load a transformers model: "demo", a Hugging Face id or a local path.

Knows transformers and the file layout of a checkpoint. Knows nothing about fusing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.store.keys import default_digest_cache, digest_files, fingerprint
from ragblend.engine.store.kv import DTYPES, dtype_name
from ragblend.errors import CorruptError, NotFoundError, UnsupportedModelError, UsageError
from ragblend.files.reading import read_file

log = logging.getLogger(__name__)

DEMO = "demo"
CHECKSUMS = "SHA256SUMS"
"""Of the embedded model's files, as `sha256sum --check` reads it."""
_REINSTALL = "install it again: pip install --force-reinstall --no-deps ragblend"

# What config.json may say that cannot change the KV that the weights compute. Whatever is not named here counts: a
# field that nobody has heard of yet may be the one that changes how attention is scaled.
IRRELEVANT_FIELDS = frozenset(
    {
        # how it was saved, and by what
        "_name_or_path", "name_or_path", "transformers_version", "transformers_weights", "unsloth_fixed",
        "unsloth_version", "torch_dtype", "dtype", "tokenizer_class", "processor_class", "pretraining_tp",
        # which kernel runs; the engine brings its own attention
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "use_cache", "torchscript",
        "gradient_checkpointing", "chunk_size_feed_forward",
        # training
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "residual_dropout",
        "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "embedding_dropout", "output_router_logits",
        "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        # what comes back from a forward
        "return_dict", "output_attentions", "output_hidden_states", "output_scores",
        # other heads, and how an answer ends
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "is_decoder",
        "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder",
        # sampling, from before it had a file of its own
        "temperature", "top_k", "top_p", "typical_p", "do_sample", "num_beams", "num_beam_groups", "max_length",
        "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "diversity_penalty", "early_stopping", "bad_words_ids",
        "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its tokenizer, where it came from and its fingerprint."""

    model: Any
    tokenizer: Any
    name: str
    path: Path
    fingerprint: str


def load_model(model: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False) -> LoadedModel:
    """Load `model` in `dtype` on `device`. Remote code stays off unless `trust_remote_code`.

    Raises NotFoundError when it is neither "demo", nor a directory, nor a model that Hugging Face can give us, and
    UnsupportedModelError for architectures that are no causal decoder or need remote code.
    """
    place = find_device(device)
    path = find_model(model)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        kind = _dtype(dtype, config, place)
        with _no_bars():
            weights = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=kind, trust_remote_code=trust_remote_code, use_safetensors=True
            )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"{model} cannot be loaded as a causal language model: {error}. ragblend needs safetensors weights of a "
            "decoder such as Llama, Mistral, Qwen2, Qwen3, Phi-3 or Gemma; see `ragblend doctor`"
        ) from error
    weights = weights.to(place).eval()
    name = DEMO if model == DEMO else str(model).rstrip("/")
    return LoadedModel(weights, tokenizer, name, path, model_fingerprint(path, dtype_name(kind)))


def load_tokenizer(model: str, trust_remote_code: bool = False) -> tuple[Any, Path]:
    """The tokenizer of `model` and the checkpoint's directory, without its weights."""
    path = find_model(model, weights=False)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code), path
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(f"the tokenizer of {model} cannot be loaded: {error}") from error


def inspect_model(path: Path, trust_remote_code: bool = False) -> str:
    """What kind of model is at `path`, in a few words; raises UnsupportedModelError for one that cannot be fused.

    Builds the layers without their weights, so it is quick for a model of any size.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ragblend.engine.hf.families import refuse_unsupported

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"{path.name} is no causal language model transformers can build: {error}"
        ) from error
    refuse_unsupported(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    context = config.get_text_config().max_position_embeddings
    return f"{type(model).__name__}, {count / 1e6:.1f} M parameters, {context} tokens of context"


def find_model(model: str, weights: bool = True) -> Path:
    """Directory of a checkpoint: the embedded demo model, a local path, or a download of a Hugging Face id.

    Without `weights` only the tokenizer and the configuration are downloaded.
    """
    if model == DEMO:
        return _demo_checkpoint()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NotFoundError(f"{model} has no config.json; point to the directory that save_pretrained wrote")
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise NotFoundError(f"no model directory at {model}; give a Hugging Face id, a local path or 'demo'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.model", "*.jinja", "*.txt"]
        return Path(snapshot_download(model, allow_patterns=[*patterns, "*.safetensors"] if weights else patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotFoundError(
            f"model {model!r} is neither here nor on Hugging Face ({type(error).__name__}). "
            "Check the name and the network, or use the embedded one: --model demo"
        ) from error


@cache
def _demo_checkpoint() -> Path:
    """The embedded model's directory, once its files are what `SHA256SUMS` beside them says."""
    path = Path(str(files("ragblend") / "demo" / "weights"))
    try:
        lines = read_file(path / CHECKSUMS).decode().splitlines()
        bad = [name for digest, name in map(str.split, lines) if sha256(read_file(path / name)).hexdigest() != digest]
    except (OSError, ValueError) as error:
        raise CorruptError(f"the embedded model cannot be read: {error}; {_REINSTALL}") from error
    if bad or not any(line.endswith(".safetensors") for line in lines):
        raise CorruptError(f"the embedded model is not the one that was shipped ({', '.join(bad)}); {_REINSTALL}")
    return path


def model_fingerprint(path: Path, dtype: str, overrides: Mapping[str, Any] | None = None) -> str:
    """Fingerprint of the checkpoint at `path` as it computes in `dtype`: weight bytes, architecture, RoPE, and the code
    of a model that brings its own. `overrides`: config fields that are not as the file has them."""
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise UnsupportedModelError(f"{path} has no *.safetensors weights; convert them with save_pretrained")
    config = {**json.loads((path / "config.json").read_text()), **(overrides or {})}
    code = sorted(path.glob("*.py")) if "auto_map" in config else []
    return fingerprint(digest_files([*weights, *code], default_digest_cache()), architecture(config), dtype)


def architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that may decide what KV the weights compute.

    As the file has them: transformers adds defaults of its own with every release, and a store outlives an upgrade.
    """
    return {name: value for name, value in config.items() if name not in IRRELEVANT_FIELDS and value is not None}


def choose_dtype(dtype: str, config: Any, device: str = "auto") -> torch.dtype:
    """The dtype a model computes in; "auto" is the checkpoint's own, or float32 on a CPU."""
    return _dtype(dtype, config, find_device(device))


def find_device(device: str) -> torch.device:
    """The device of that name, "auto" a GPU where there is one. Raises UsageError for what PyTorch cannot use here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        if place.type == "cuda" and not torch.cuda.is_available():
            why = "built without it" if torch.version.cuda is None else "it sees no GPU, or no driver for one"
            raise UsageError(
                f"device is {device!r}, and PyTorch {torch.__version__} cannot use CUDA here ({why}). Choose --device "
                "cpu or auto, or install PyTorch for CUDA: https://pytorch.org/get-started/locally"
            )
        if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"device is {device!r}; PyTorch sees {torch.cuda.device_count()} GPUs here, from cuda:0")
        torch.zeros(1, device=place).item()  # "meta", and kinds that this PyTorch only knows by name
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise UsageError(
            f"device is {device!r}, which PyTorch {torch.__version__} cannot use here; choose cpu, cuda or cuda:N"
        ) from error
    return place


def _dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype, or float32 on a CPU, where half precision is rarely faster and always coarser."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None) or torch.float32
    return own if own in DTYPES.values() else torch.bfloat16


@contextmanager
def _no_bars() -> Iterator[None]:
    """No "Loading weights" bar: a library's own output belongs to its caller."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
