"""Settings of a vLLM that blends: connector, dtype, KV memory and environment, for a server and in this process.

Depends on the names of vLLM's flags, and on the transformers engine to find checkpoints. Does not import vLLM.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ragblend.engine.store.format.kv import KVSpec, dtype_name
from ragblend.engine.transformers.adapters import is_adapter
from ragblend.engine.transformers.checkpoints import AS_IT_IS, find_model, model_fingerprint
from ragblend.engine.transformers.model import choose_dtype, find_device, load_tokenizer, model_name
from ragblend.engine.transformers.positions import rope_parameters
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.support import (
    FAILING_ARCHITECTURES,
    FP8_CACHES,
    draft_note,
    latent_kv_shape,
    require_supported_version,
    unsupported_reasons,
    untested_architecture_note,
)
from ragblend.errors import RagblendError, UnsupportedModelError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.options import ContextPolicy, Mode, ModelOptions, RatioChoice, SelectionOptions
from ragblend.prompt.render import Renderer

CONNECTOR = "BlendConnector"
CONNECTOR_MODULE = "ragblend.engine.vllm.connector"
PLUGIN = "ragblend"
PLUGIN_GROUP = "vllm.general_plugins"
EXTENSION = "ragblend.engine.vllm.plugin.BlendWorkerExtension"
MIDDLEWARE = "ragblend.server.api.RoutesMiddleware"
CLI_MODULE = "vllm.entrypoints.cli.main"
"""Module of vLLM's command line."""
LOOPBACK = "127.0.0.1"
BLOCK_SIZE_ON_CPU = 32
"""Tokens of a block of vLLM's cache on a CPU, as fast as vLLM's 128. A later prompt finds whole blocks only."""
SHUTDOWN_TIMEOUT_S = 30
"""Longest time after SIGTERM for open answers of `ragblend serve`, unless `--shutdown-timeout` sets another one."""

_MIB = 1 << 20
_RECURRENT_FIELDS = ("mamba_", "ssm_", "conv_L_cache", "time_step_", "lru_width")  # of configs with recurrent layers
_PARALLEL_SIZES = {  # vLLM's names, and the short forms of their flags
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
}
_CONTEXTS_ON_CPU = 4  # prompts of the longest length that fit into vLLM's paged KV on a CPU by default
_MEMORY_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override")
_COMPILATION_FLAG = re.compile(r"--(no-)?enforce-eager$|(--compilation-config|-cc)(\.|$)|--optimization-level$|-O")


class Checkpoint(NamedTuple):
    """Model on this machine, with the dtype in which it runs."""

    name: str
    path: Path
    dtype: str
    fingerprint: str
    bytes_per_token: int  # of one token's KV in all layers, in `dtype`
    context_length: int  # in tokens
    num_layers: int
    kv_shape: tuple[int, int, int]  # of each layer's stored KV: (H, D of keys, D of values)

    def stored_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the number of bytes of stored KV per token, all layers, in a store with this `kv_dtype`."""
        return self.kv_spec.bytes_per_token(kv_dtype)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the checkpoint that a store records: its name, and dtype and shapes of its KV."""
        return {"model": self.name, **self.kv_spec.as_facts()}

    @property
    def kv_spec(self) -> KVSpec:
        """Dtype and shapes of the model's KV."""
        return KVSpec.from_kv_shapes(self.dtype, [self.kv_shape] * self.num_layers)


def find_checkpoint(model: str, options: ModelOptions = AS_IT_IS) -> Checkpoint:
    """Return the checkpoint of `model`, in the dtype that the transformers engine would choose.

    vLLM and the transformers engine can therefore share a store. A Hugging Face id is downloaded. The weights are not
    loaded, but read once for the fingerprint, which is cached.
    """
    path, config = _load_config(model, options)
    kind = choose_dtype(options.dtype, config, find_device(options.device))
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape = (int(heads), int(head_dim), int(head_dim))
    if _is_latent(text):
        shape = latent_kv_shape(text)
    return Checkpoint(
        model_name(model),
        path,
        dtype_name(kind),
        model_fingerprint(path, dtype_name(kind)),
        KVSpec.from_kv_shapes(dtype_name(kind), [shape] * int(text.num_hidden_layers)).bytes_per_token("auto"),
        int(text.max_position_embeddings),
        int(text.num_hidden_layers),
        shape,
    )


class ServingForecast(NamedTuple):
    """Whether vLLM would blend a model with given flags: `reasons` why not, else how (`notes`)."""

    architecture: str
    is_tested: bool  # else the exactness check at start decides
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        if self.reasons:
            return f"{self.architecture} would be rejected: {'; '.join(self.reasons)}"
        how = "tested exact" if self.is_tested else "not tested in vLLM, the exactness check at start decides"
        return "; ".join([f"{self.architecture} would be served: {how}", *self.notes])


def forecast_serving(model: str, flags: Sequence[str] = (), options: ModelOptions = AS_IT_IS) -> ServingForecast:
    """Return whether vLLM would blend `model` with its own `flags`, from the model's config alone.

    `model`: a Hugging Face id, a directory, or the path of a config.json. Weights are not downloaded, and vLLM need not
    be installed. Raises UsageError for a flag's invalid value, UnsupportedModelError for a GGUF file or an adapter.
    """
    if Path(model).name == "config.json":
        model = str(Path(model).parent)
    _, config = _load_config(model, options, weights=False)
    text, named = config.get_text_config(), {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if "--disable-sliding-window" in named:
        text.sliding_window = None
    drafts = _json_flag(flags, "--speculative-config")
    method = str(drafts.get("method") or "draft_model") if drafts else ""
    described = SimpleNamespace(
        hf_config=config,
        hf_text_config=text,
        dtype=choose_dtype(options.dtype, config, find_device("auto")),
        max_model_len=_int_flag(flags, "--max-model-len", int(getattr(text, "max_position_embeddings", 0))),
        use_mla=_is_latent(text),
        is_hybrid=any(name.startswith(_RECURRENT_FIELDS) for name in text.to_dict()),
        is_moe=any("experts" in name and value for name, value in text.to_dict().items()),
    )
    vllm_config = SimpleNamespace(
        model_config=described,
        parallel_config=SimpleNamespace(**{name: _parallel_size(flags, name) for name in _PARALLEL_SIZES}),
        cache_config=SimpleNamespace(cache_dtype=split_flag(flags, "--kv-cache-dtype")[0] or "auto"),
        speculative_config=SimpleNamespace(method=method) if method else None,
    )
    architecture = ", ".join(getattr(config, "architectures", None) or ["a model of unknown class"])
    reasons = unsupported_reasons(vllm_config)
    if not any(rope for rope in rope_parameters(text).values()):
        reasons.append("its config has no RoPE, so stored keys cannot be moved")
    if reason := FAILING_ARCHITECTURES.get(architecture):
        reasons.append(reason)
    notes = {
        "requests with an adapter are left to vLLM": "--enable-lora" in named,
        "requests with images or other media are left to vLLM": text is not config,
        "stored KV is rounded to the cache's eight bits": vllm_config.cache_config.cache_dtype in FP8_CACHES,
        draft_note(vllm_config): bool(draft_note(vllm_config)),
    }
    return ServingForecast(
        architecture,
        not untested_architecture_note(config),
        tuple(reasons),
        tuple(note for note, applies in notes.items() if applies),
    )


def _is_latent(config: Any) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None


def _int_flag(flags: Sequence[str], name: str, default: int) -> int:
    value = split_flag(flags, name)[0]
    if value is None:
        return default
    if not value.isdecimal():
        raise UsageError(f"{name} is {value!r}; give a number")
    return int(value)


def _parallel_size(flags: Sequence[str], name: str) -> int:
    return _int_flag(flags, f"--{name.replace('_', '-')}", _int_flag(flags, _PARALLEL_SIZES[name], 1))


def _json_flag(flags: Sequence[str], name: str) -> dict[str, Any]:
    value = split_flag(flags, name)[0]
    try:
        values = json.loads(value or "{}")
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UsageError(f'{name} is {value!r}; give a JSON object, such as \'{{"method": "ngram"}}\'')
    return values


def _load_config(model: str, options: ModelOptions, weights: bool = True) -> tuple[Path, Any]:
    """Find the files of `model`, and return their directory and the config.

    Raises UnsupportedModelError for formats that vLLM reads in another way than the transformers engine.
    """
    from transformers import AutoConfig

    path = find_model(model, weights=weights, options=options)
    if path.is_file():
        raise UnsupportedModelError(
            f"{path.name} is a GGUF file, which only backend='transformers' reads: vLLM's own reader is experimental "
            "and dequantises in another way, so that stored KV would not fit. For vLLM use the original model, or save "
            "this one as safetensors with save_pretrained"
        )
    if is_adapter(path):
        raise UnsupportedModelError(
            f"{path.name} is an adapter, which only backend='transformers' runs: vLLM applies adapters per request, "
            "but stored KV belongs to one model. Merge it into its base (peft's merge_and_unload) and save the result"
        )
    return path, AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)


def require_vllm() -> None:
    """Raise RagblendError unless a supported vLLM is installed that loads ragblend's plugin."""
    require_supported_version()
    problem = plugin_problem()
    if problem:
        raise RagblendError(problem)


def plugin_problem(environment: Mapping[str, str] | None = None) -> str:
    """Return why vLLM would not load ragblend's plugin, and how to fix it; "" if it would.

    `environment`: the environment variables of vLLM's process. The default is this process's variables.
    """
    named = (os.environ if environment is None else environment).get("VLLM_PLUGINS")
    if named is not None and PLUGIN not in [name.strip() for name in named.split(",")]:
        return (
            f"VLLM_PLUGINS is {named!r}, which excludes ragblend's plugin; "
            f"unset it, or: export VLLM_PLUGINS={','.join(filter(None, [named, PLUGIN]))}"
        )
    if not any(point.name == PLUGIN for point in entry_points(group=PLUGIN_GROUP)):
        return (
            "vLLM cannot find ragblend's plugin, because the installation is older than the code and lacks its entry "
            "point; install again: pip install --force-reinstall --no-deps ragblend, or pip install -e . in a checkout"
        )
    return ""


def transfer_config(
    store: str | Path,
    tiers: Mapping[str, Any] | None = None,
    *,
    model: str,
    mode: Mode | None = None,
    rule: str | None = None,
    recompute_ratio: RatioChoice = None,
    refine_ratio: float | None = None,
    selection: Mapping[str, Any] | None = None,
    system: str | None = None,
    context: ContextPolicy | None = None,
    trust_remote_code: bool = False,
    auto_profile: bool | None = None,
    keys: Path | None = None,
) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config` for the connector over the store directory `store`.

    `tiers`: options of `open_store`; the connector reads missing ones from its environment. `mode`, `rule`,
    `recompute_ratio` and `refine_ratio` are the defaults of requests, and so are the fields of SelectionOptions in
    `selection`. `system`: the system prompt after which chunks were ingested. `context`: their context policy; None for
    the store's own. `keys`: the file of API keys that `RoutesMiddleware` requires from clients. Raises UsageError for
    an invalid value.
    """
    extra: dict[str, Any] = {"store": str(expand_user_path(store, "store").resolve()), **(tiers or {})}
    tokenizer, _ = load_tokenizer(model, ModelOptions(trust_remote_code=trust_remote_code))
    extra["prefix_ids"] = list(Renderer(tokenizer).prefix_ids(system, pins_date=True))
    if keys is not None:
        # Not resolved: the server reads it again, and Kubernetes changes a secret by changing a link.
        extra["keys"] = str(expand_user_path(keys, "--api-keys-file").absolute())
    chosen = {"mode": mode, "rule": rule, "ratio": recompute_ratio, "refine_ratio": refine_ratio, "context": context}
    chosen["auto_profile"] = auto_profile
    extra |= {name: value for name, value in chosen.items() if value is not None}
    extra |= SelectionOptions(**(selection or {})).selection
    ConnectorConfig.from_extra_config(extra)  # reports an invalid value here, not in one of vLLM's processes
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def cpu_paged_kv_bytes(checkpoint: Checkpoint, max_model_len: int | None = None) -> int | None:
    """Return the size in bytes of vLLM's paged KV on a CPU; None if vLLM chooses the size, as on a GPU.

    On a CPU vLLM would otherwise allocate nearly all memory of the machine.
    """
    if has_cuda() or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return None
    length = max_model_len or checkpoint.context_length
    return max(256 * _MIB, _CONTEXTS_ON_CPU * length * checkpoint.bytes_per_token)


def has_cuda() -> bool:
    """Return True if this machine has a CUDA GPU."""
    import torch

    return bool(torch.cuda.is_available())


def server_command(
    python: str, checkpoint: Checkpoint, transfer: Mapping[str, Any], flags: Sequence[str] = ()
) -> list[str]:
    """Return the command that starts vLLM's OpenAI-compatible server with the connector.

    `flags` are vLLM's own and override ragblend's. Raises UsageError for flags that ragblend must set itself.
    """
    given_flags = {flag.partition("=")[0].replace("_", "-") for flag in flags if flag.startswith("-")}
    given_flags |= _flags_of_config_file(split_flag(flags, "--config")[0])
    for ours in ("--model", "--kv-transfer-config", "--dtype"):
        if ours in given_flags:
            raise UsageError(f"{ours} is one of vLLM's flags that ragblend serve sets itself; leave it out")
    command = [python, "-m", CLI_MODULE, "serve", str(checkpoint.path)]
    if not given_flags & {"--api-server-count", "-asc", "--headless"}:
        # The default is one server process per data-parallel engine, each with separate counters.
        command += ["--api-server-count", "1"]
    command += ["--dtype", checkpoint.dtype]
    command += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    # Without this flag, vLLM warns at every start that it disables the manager for a connector that fills one group.
    command += ["--middleware", MIDDLEWARE, "--disable-hybrid-kv-cache-manager"]
    if "--shutdown-timeout" not in given_flags:
        command += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]  # without one, an open stream keeps vLLM running
    if "--worker-extension-cls" not in given_flags:
        command += ["--worker-extension-cls", EXTENSION]
    if not given_flags & {"--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"}:
        command += ["--enable-prompt-tokens-details"]  # OpenAI's `usage` then has the number of reused tokens
    if "--served-model-name" not in given_flags:
        command += ["--served-model-name", checkpoint.name]
    if not given_flags.intersection(_MEMORY_FLAGS):
        length = split_flag(flags, "--max-model-len")[0] or ""
        size = cpu_paged_kv_bytes(checkpoint, int(length) if length.isdecimal() else None)
        command += ["--kv-cache-memory-bytes", str(size)] if size is not None else []
    if not has_cuda() and "--block-size" not in given_flags:
        command += ["--block-size", str(BLOCK_SIZE_ON_CPU)]
    if not has_cuda() and not any(map(_COMPILATION_FLAG.match, given_flags)):
        command += ["--enforce-eager"]  # on a CPU, compiling takes minutes before the server answers
    return [*command, *flags]


def _flags_of_config_file(path: str | None) -> set[str]:
    """Return the names of the flags in the YAML file of vLLM's `--config`. vLLM reports a file that cannot be read."""
    import yaml

    values: object = {}
    if path is not None:
        with suppress(OSError, ValueError, yaml.YAMLError):
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    return {f"--{name}".replace("_", "-") for name in values} if isinstance(values, dict) else set()


def split_flag(flags: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Return the value of vLLM's flag `name` (None if `flags` lack it), and the other flags.

    >>> split_flag(["--max_model_len", "512", "--revision=v2", "-tp", "2"], "--revision")
    ('v2', ['--max_model_len', '512', '-tp', '2'])
    """
    for position, flag in enumerate(flags):
        flag_name, has_value, value = flag.partition("=")
        if flag_name.replace("_", "-") == name:
            end = position + (1 if has_value else 2)
            return value if has_value else "".join(flags[position + 1 : end]), [*flags[:position], *flags[end:]]
    return None, list(flags)


def vllm_environment() -> dict[str, str]:
    """Return the variables to add to the environment of a vLLM that ragblend starts. Variables that are already set are
    left out."""
    wanted = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1"}
    return {name: value for name, value in wanted.items() if name not in os.environ}
