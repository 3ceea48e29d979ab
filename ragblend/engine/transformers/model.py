"""Find, check, fingerprint and load a transformers model: "demo", a Hugging Face id or a local path.

Knows transformers and the file layout of a checkpoint. Knows nothing about fusing.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.store.keys import default_digest_cache, digest_files, fingerprint
from ragblend.engine.store.kv import DTYPES, dtype_name
from ragblend.engine.transformers.adapters import adapter_mark, base_of, is_adapter, with_adapter
from ragblend.engine.transformers.gguf import (
    GgufReference,
    dequantised,
    parse_gguf_reference,
    reject_unread_rope,
    require_gguf,
    without_bar,
)
from ragblend.errors import CorruptError, NotFoundError, UnsupportedModelError, UsageError
from ragblend.files.places import user_path
from ragblend.files.reading import read_file
from ragblend.options import ModelOptions

log = logging.getLogger(__name__)

DEMO = "demo"
AS_IT_IS = ModelOptions()
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


# What transformers raises for a checkpoint that it cannot read, damaged files included.
UNREADABLE = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, OSError, ImportError, RuntimeError,
    struct.error,
)  # fmt: skip

# What `from_pretrained` may be told that leaves the KV as it is.
_IRRELEVANT_ARGUMENTS = frozenset(
    {"token", "force_download", "proxies", "max_memory", "offload_folder", "offload_buffers", "low_cpu_mem_usage"}
    | {"disable_mmap", "weights_only", "use_safetensors", "generation_config", "tqdm_class"}
)
_ARGUMENTS = _IRRELEVANT_ARGUMENTS | {"quantization_config"}  # the others may be fields of config.json
_REFUSED_ARGUMENTS = {
    "state_dict": "load it yourself and hand over the pair: load_engine((model, tokenizer))",
    "subfolder": "give the path of the folder itself, or a repo that has the model at its top",
    "adapter_kwargs": "name the adapter itself: adapter='DIRECTORY'",
    "config": "give its fields by name, such as model_kwargs={'sliding_window': None}",
    "tp_plan": "one model is on one device here; for several use backend='vllm' with tensor_parallel_size",
    "tp_size": "one model is on one device here; for several use backend='vllm' with tensor_parallel_size",
    "distributed_config": "one model is on one device here; for several use backend='vllm' with tensor_parallel_size",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its tokenizer, where it came from, if that is known, and its fingerprint."""

    model: Any
    tokenizer: Any
    name: str
    path: Path | None
    fingerprint: str


def load_model(model: str, options: ModelOptions = AS_IT_IS) -> LoadedModel:
    """Load `model` as `options` say. Remote code stays off unless `trust_remote_code`.

    Raises NotFoundError when it is neither "demo", nor a directory or GGUF, nor a model that Hugging Face can give us,
    UnsupportedModelError for architectures that are no causal decoder or need remote code, and UsageError for options
    that cannot work.
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
        kind = _dtype(options.dtype, config, place)
        if path.is_file():
            reject_unread_rope(path, config)
        was_quantised = is_quantised(config) or "quantization_config" in kwargs
        if device_map is None and was_quantised:
            device_map = {"": place}  # they are quantised where they are to stay, and some cannot be moved
        if options.attn_implementation is not None:
            kwargs["attn_implementation"] = options.attn_implementation
        with _no_bars(), without_bar() if path.is_file() else nullcontext():
            weights = AutoModelForCausalLM.from_pretrained(
                **source, **trust, config=config, dtype=kind, device_map=device_map,
                **(dequantised() if path.is_file() else {"use_safetensors": True}), **kwargs,
            )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(**_tokenizer_source(path, adapter), **trust)
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{model} cannot be loaded as a causal language model: {error}. ragblend needs safetensors weights, or a "
            "GGUF, of a decoder such as Llama, Mistral, Qwen2, Qwen3, Phi-3 or Gemma; see `ragblend doctor`"
        ) from error
    if path.is_file():  # both say what the file has, and the weights are plain by now
        weights.hf_quantizer = None
        vars(weights.config).pop("quantization_config", None)
    reject_split_model(weights, model)
    if device_map is None:
        weights = weights.to(place)
    how = dtype_name(kind) + _suffix(variant)
    if was_quantised and not is_quantised(weights.config):  # as FP8 is where there is no GPU
        how += "+dequantised"
    if adapter is not None:
        weights = with_adapter(weights, adapter)
        how += adapter_mark(adapter)
    name = f"{model_name(model)}+{options.adapter}" if options.adapter else model_name(model)
    return LoadedModel(weights.eval(), tokenizer, name, path, model_fingerprint(path, how, overrides))


def model_name(model: str) -> str:
    """What a model is called in messages and reports."""
    return DEMO if model == DEMO else str(model).rstrip("/")


def load_tokenizer(model: str, options: ModelOptions = AS_IT_IS) -> tuple[Any, Path]:
    """The tokenizer of `model` and the checkpoint's directory or GGUF, without its weights."""
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
    """Whether a config says that its weights are stored in few bits, and stay so when they are loaded."""
    return getattr(config, "quantization_config", None) is not None


def reject_split_model(model: Any, name: str) -> None:
    """Raise UsageError for a model whose layers are on several devices, or not in memory."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    places |= {str(parameter.device) for parameter in model.parameters()} if len(places) < 2 else set()
    kinds = {"cuda:" + place if place.isdecimal() else place for place in places}
    if len(kinds) > 1 or kinds & {"meta", "disk"}:
        raise UsageError(
            f"{name} is spread over {', '.join(sorted(kinds))}: its layers are run one at a time over KV on one "
            "device, so all of it has to be on that. Choose device='cuda' or 'cpu', a smaller dtype or quantised "
            "weights; or several GPUs by backend='vllm' with vllm_options={'tensor_parallel_size': 2}"
        )


def _checked_kwargs(options: ModelOptions) -> dict[str, Any]:
    """`model_kwargs`; raises UsageError for those that would not do what they say."""
    kwargs = dict(options.model_kwargs or {})
    kwargs.pop("gguf_file", None)  # `find_model` has it
    for name, fix in _REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise UsageError(f"model_kwargs has {name}, which ragblend cannot use: {fix}")
    if kwargs.pop("use_safetensors", True) is False:
        raise UsageError(
            "model_kwargs has use_safetensors=False: pickled weights can run code and are not read; convert them with "
            "save_pretrained, which writes safetensors"
        )
    return kwargs


def _device_of(options: ModelOptions) -> tuple[torch.device, Any]:
    """Where the model is to be, and the map by which transformers puts it there; None: it is moved there."""
    asked = options.device_map
    if isinstance(asked, Mapping):
        places = sorted({str(place) for place in asked.values()})
        if len(places) != 1:
            raise UsageError(
                f"device_map spreads the model over {', '.join(places) or 'nothing'}: its layers are run one at a time "
                "over KV on one device. Name one for all of it, {'': 'cuda:0'}; or, for several GPUs, backend='vllm'"
            )
        asked = places[0]
    if asked in ("auto", "balanced", "balanced_low_0", "sequential"):
        return find_device("auto"), asked
    named = ModelOptions.from_keywords(device=asked).device if asked is not None else options.device
    return find_device(f"cuda:{named}" if named.isdecimal() else named), None


def _base_and_adapter(path: Path, options: ModelOptions, weights: bool = True) -> tuple[Path, Path | None]:
    """The checkpoint of what was found in `path`, and the adapter that is to be put on it: `path` itself may be one."""
    if options.adapter is not None:
        found = user_path(options.adapter, "adapter")
        if not is_adapter(found):
            if found.exists() or options.adapter.startswith((".", "/", "~")) or options.adapter.count("/") != 1:
                raise NotFoundError(f"no adapter at {found}; give the directory that peft's save_pretrained wrote")
            found = find_model(options.adapter, weights, replace(options, revision=None))
        return path, found
    if not is_adapter(path):
        return path, None
    base = find_model(base_of(path), weights, replace(options, revision=None))
    if is_adapter(base):
        raise UnsupportedModelError(f"{path} is an adapter on {base}, which is one too; merge that into its base first")
    return base, path


def _tokenizer_source(path: Path, adapter: Path | None) -> dict[str, Any]:
    """Where the tokenizer is: an adapter may bring the one that it was trained with."""
    has_own = adapter is not None and (adapter / "tokenizer_config.json").is_file()
    return _source(adapter if has_own and adapter is not None else path)


def _source(path: Path) -> dict[str, Any]:
    """A checkpoint's directory, or a GGUF, as `from_pretrained` takes it."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": path}
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


def _suffix(variant: Mapping[str, Any]) -> str:
    """What tells a model that was loaded with such arguments from one that was loaded as it is."""
    if not variant:
        return ""
    shown = {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in variant.items()}
    return "+" + json.dumps(shown, sort_keys=True, default=str)


def inspect_model(path: Path, trust_remote_code: bool = False) -> str:
    """What kind of model is at `path`, in a few words; raises UnsupportedModelError for one that cannot be fused.

    Builds the layers without their weights, so it is quick for a model of any size.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ragblend.engine.transformers.families import reject_unsupported_model

    path = _base_and_adapter(path, AS_IT_IS, weights=False)[0]
    if path.is_file():
        require_gguf()
    try:
        config = AutoConfig.from_pretrained(**_source(path), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except UNREADABLE as error:
        raise UnsupportedModelError(
            f"{path.name} is no causal language model transformers can build: {error}"
        ) from error
    reject_unsupported_model(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    context = config.get_text_config().max_position_embeddings
    return f"{type(model).__name__}, {count / 1e6:.1f} M parameters, {context} tokens of context"


def find_model(model: str, weights: bool = True, options: ModelOptions = AS_IT_IS) -> Path:
    """Directory of a checkpoint: the embedded demo model, a local path, or a download of a Hugging Face id; or a GGUF:
    "file.gguf", "repo:file.gguf", "directory:file.gguf".

    Without `weights` only the tokenizer and the configuration are downloaded. `options`: revision, cache_dir,
    local_files_only, and a token in model_kwargs, for Hugging Face.
    """
    if model == DEMO:
        return _demo_checkpoint()
    path = user_path(model, "model")
    inside = (options.model_kwargs or {}).get("gguf_file")  # transformers' way to say it
    gguf = parse_gguf_reference(f"{model}:{inside}" if inside else model)
    if gguf is not None:
        return _find_gguf(model, gguf, options)
    is_path = path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and options.revision is not None:
        raise UsageError(f"revision is {options.revision!r}, and {model} is a path; it picks a version of a repo")
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(path):
            files = sorted(each.name for each in path.glob("*.gguf"))
            fix = f"name the GGUF: {path / files[0]}" if files else "point to the directory of save_pretrained"
            raise NotFoundError(f"{model} has no config.json; {fix}")
        return path
    if is_path:
        raise NotFoundError(
            f"no model directory at {model}; give a Hugging Face id, a local path, or use the embedded model: "
            "`model='demo'`"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.model", "*.jinja", "*.txt", *(["*.safetensors"] if weights else [])]
    with _from_hub(model, options):
        return Path(snapshot_download(model, allow_patterns=patterns, **_hub(options)))


def _find_gguf(model: str, named: GgufReference, options: ModelOptions) -> Path:
    """The file on this machine, downloaded if it is a repo's."""
    folder = Path(named.place).expanduser()
    path = folder / named.file if named.place else Path(named.file).expanduser()
    if path.is_file() or not named.place or folder.is_dir():
        if not path.is_file():
            raise NotFoundError(f"no GGUF at {path}; give a file, or one of a Hugging Face repo: ORG/REPO:{path.name}")
        if options.revision is not None:
            raise UsageError(f"revision is {options.revision!r}, and {path} is a path; it picks a version of a repo")
        return path
    from huggingface_hub import hf_hub_download

    with _from_hub(model, options):
        return Path(hf_hub_download(named.place, named.file, **_hub(options)))


def _hub(options: ModelOptions) -> dict[str, Any]:
    """What a download from Hugging Face is told."""
    return {
        "revision": options.revision,
        "cache_dir": options.cache_dir if options.cache_dir is None else user_path(options.cache_dir, "cache_dir"),
        "local_files_only": options.local_files_only,
        "token": (options.model_kwargs or {}).get("token"),
    }


@contextmanager
def _from_hub(model: str, options: ModelOptions) -> Iterator[None]:
    """Raise NotFoundError for whatever keeps a repo from being read."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        version = f", revision {options.revision!r}," if options.revision else ""
        place = options.cache_dir or "the cache of Hugging Face"
        if options.local_files_only:
            raise NotFoundError(
                f"model {model!r}{version} is not in {place}, and local_files_only forbids to download it; leave that "
                "out, or use the embedded model: `model='demo'`"
            ) from error
        raise NotFoundError(
            f"model {model!r}{version} is neither here nor on Hugging Face ({type(error).__name__}). "
            "Check the name and the network, or use the embedded model: `model='demo'`"
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
    if path.is_file():  # a GGUF has its config inside
        return fingerprint(digest_files([path], default_digest_cache()), {"gguf": True, **(overrides or {})}, dtype)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise UnsupportedModelError(f"{path} has no *.safetensors weights; convert them with save_pretrained")
    config = {**json.loads((path / "config.json").read_text(encoding="utf-8")), **(overrides or {})}
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
                f"device is {device!r}, and PyTorch {torch.__version__} cannot use CUDA here ({why}). Choose "
                "`device='cpu'` or `device='auto'`, or install PyTorch for CUDA: https://pytorch.org/get-started/locally"
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
