"""`load_engine` puts model, store and backend together; nothing heavy is imported before it is called."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ragblend.errors import StoreMismatchError, UsageError
from ragblend.files.places import user_path
from ragblend.redaction import has_secret, redact

if TYPE_CHECKING:
    from ragblend.engine.api import Engine
    from ragblend.engine.store.base import KVStore
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.vllm.client import VllmClient
    from ragblend.engine.vllm.engine import VllmEngine
from ragblend.engine.store.open import open_store
from ragblend.options import (
    TIER_NAMES,
    ContextPolicy,
    LoadKeywords,
    ModelOptions,
    TierKeywords,
    TierOptions,
    is_url,
)


@overload
def load_engine(
    model: str | Path | tuple[Any, Any] = "demo",
    store: str | Path | KVStore | None = None,
    *,
    backend: Literal["transformers"] = "transformers",
    system: str | None = None,
    namespace: str = "",
    on_miss: str = "store",
    shadow: float = 0.0,
    context: ContextPolicy | None = None,
    new_model: bool = False,
    max_num_seqs: int | None = None,
    **loading: Unpack[LoadKeywords],
) -> TransformersEngine: ...


@overload
def load_engine(
    model: str | Path | tuple[Any, Any] = "demo",
    store: str | Path | KVStore | None = None,
    *,
    backend: str,
    system: str | None = None,
    namespace: str = "",
    on_miss: str = "store",
    shadow: float = 0.0,
    context: ContextPolicy | None = None,
    new_model: bool = False,
    max_num_seqs: int | None = None,
    vllm_options: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    timeout: float | None = None,
    max_retries: int | None = None,
    **loading: Unpack[LoadKeywords],
) -> Engine: ...


def load_engine(
    model: str | Path | tuple[Any, Any] = "demo",
    store: str | Path | KVStore | None = None,
    *,
    backend: str = "transformers",
    system: str | None = None,
    namespace: str = "",
    on_miss: str = "store",
    shadow: float = 0.0,
    context: ContextPolicy | None = None,
    new_model: bool = False,
    max_num_seqs: int | None = None,
    vllm_options: Mapping[str, Any] | None = None,
    api_key: str | None = None,
    timeout: float | None = None,
    max_retries: int | None = None,
    **loading: Unpack[LoadKeywords],
) -> Engine:
    """A model with its store, ready to precompute and answer.

    `model`: "demo", a Hugging Face id, a local path, or a pair (model, tokenizer) that transformers has loaded, whose
    attention is then ours, with its own inside for its own forward. `store`: a directory, any KVStore, or None for
    memory only. `loading`: ModelOptions (dtype or torch_dtype, device or device_map, attn_implementation, revision,
    cache_dir, local_files_only, trust_remote_code, model_kwargs), and TierOptions, the budgets, remote and dtype of
    `open_store`; a KVStore that is passed has its own.
    `system` is the system text that chunks are precomputed behind. A directory that so far holds only other models'
    KV is refused with StoreMismatchError, unless `new_model` says that this one is to be added. `context`: what the
    store's chunks were computed behind besides the prefix; None is what it remembers, so it is said where the KV is
    in a remote tier that somebody else fills.

    `shadow`: full prefill also runs, after the answer, for this share of the requests answered from fused KV;
    `engine.shadow` counts how often they agree, each report's `shadow` says what was found.

    `max_num_seqs`: answers whose tokens are decoded together at most, each with its KV in memory; None is 8, and 1 is
    one after another. With vLLM it is one of `vllm_options`.

    `backend`: "transformers"; "vllm", with `vllm_options` for vLLM's own engine arguments; or "http://HOST:PORT", a
    server that `ragblend serve` started. Over HTTP the KV is the server's: `store` only remembers the chunks' texts,
    and what loads the model or is a tier's is set where the server starts (UsageError here), save where the tokenizer
    is found. `api_key`, `timeout` (seconds) and `max_retries` are for HTTP.
    """
    tiers: TierKeywords = {name: value for name, value in loading.items() if name in TIER_NAMES}  # type: ignore[assignment]
    asked = ModelOptions.from_keywords(**{name: value for name, value in loading.items() if name not in tiers})
    if isinstance(store, str | Path):
        store = user_path(store, "store")
    pair: tuple[Any, Any] | None = None
    if isinstance(model, str | Path):
        model = str(model)
    else:
        from ragblend.engine.transformers.loaded_model import pair_name, validate_loaded_model

        pair = validate_loaded_model(model)
        model = pair_name(pair)
        if backend != "transformers":
            raise UsageError(f"a loaded model is run here; with backend={redact(backend)!r} give its name or path")
    options: dict[str, Any] = {"system": system, "namespace": namespace, "on_miss": on_miss, "shadow": shadow}
    options["context"] = context
    if max_num_seqs is not None and backend != "transformers":
        raise UsageError(
            f"max_num_seqs is for an engine that decodes in this process, not for backend={redact(backend)!r}; vLLM "
            "takes it where it starts: vllm_options={'max_num_seqs': ...}, or `ragblend serve MODEL --max-num-seqs ...`"
        )
    if (store is None or isinstance(store, str | Path)) and pair is None:
        options["flags"] = _command_flags(
            model=model, store=store, backend=backend, remote=_without_password(tiers.get("remote")),
            namespace=namespace, **asked.non_defaults,
        )  # fmt: skip
    if is_url(backend):
        _reject_loading_options(asked, "set where the server starts, not", f"with {redact(backend)}", vllm_options)
        _reject_tier_settings(tiers, redact(backend))
        http: dict[str, Any] = {"api_key": api_key, "timeout": timeout, "max_retries": max_retries}
        given = {name: value for name, value in http.items() if value is not None}
        return _load_client(model, store, backend, given, options, asked)
    if not (store is None or isinstance(store, str | Path) or (hasattr(store, "get") and hasattr(store, "put"))):
        raise UsageError(f"store is {store!r}; choose the path of a folder, a KVStore, or None for memory only")
    if backend == "vllm":
        if asked.device != "auto":
            raise UsageError(
                f"device is {asked.device!r}; vLLM takes the device it was built for, choose one with its flags"
            )
        _reject_loading_options(
            replace(asked, dtype="auto"), "set by vllm_options, vLLM's own arguments, not", "with vLLM"
        )
        return _load_vllm(model, store, asked, vllm_options or {}, TierOptions(**tiers).tiers, options, new_model)
    if backend != "transformers":
        raise UsageError(
            f"backend is {redact(backend)!r}; choose 'transformers', 'vllm' or a server's http://HOST:PORT"
        )
    from ragblend.engine.loop import MAX_NUM_SEQS
    from ragblend.engine.store.kv import KVSpec, dtype_name
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.transformers.layers import TransformersLayers
    from ragblend.engine.transformers.loaded_model import adopt_loaded_model
    from ragblend.engine.transformers.model import load_model
    from ragblend.engine.tuning.machine import machine_facts, read_machine_profile
    from ragblend.prompt.render import Renderer

    if store is None or isinstance(store, str | Path):
        kv_store: KVStore = open_store(store, **tiers)
    elif tiers.get("remote") is not None:
        raise UsageError("a remote tier goes into the store that you pass: TieredStore(your_store, open_remote(URL))")
    elif tiers.get("kv_dtype", "auto") != "auto":
        raise UsageError(f"the store that you pass has its dtype: TieredStore(..., kv_dtype={tiers['kv_dtype']!r})")
    else:
        kv_store = store
    loaded = load_model(model, asked) if pair is None else adopt_loaded_model(pair, asked)
    layers = TransformersLayers(loaded.model)
    if isinstance(store, str | Path):
        shape = KVSpec.from_kv_shapes(dtype_name(layers.dtype), layers.kv_shapes)
        register_model(Path(store), loaded.fingerprint, {"model": loaded.name, **shape.as_facts()}, new_model)
    renderer = Renderer(loaded.tokenizer)
    return TransformersEngine(
        layers,
        renderer,
        kv_store,
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        **options,
        max_num_seqs=MAX_NUM_SEQS if max_num_seqs is None else max_num_seqs,
        machine=read_machine_profile(Path(store), loaded.fingerprint, machine_facts(layers.device))
        if isinstance(store, str | Path)
        else None,
    )


_FLAGS = {"model", "backend", "remote", "dtype", "device", "namespace", "trust_remote_code"}  # those of commands


def _command_flags(store: str | Path | None, **settings: Any) -> str:
    """The flags by which a command of ours opens the same engine; "" for KV in memory, which no command sees, and for
    a model that no flags describe."""
    if (store is None and not is_url(settings["backend"])) or not set(settings) <= _FLAGS:
        return ""
    defaults = {"backend": "transformers"}
    words: list[str] = []
    for name, value in {**settings, "store": store}.items():
        if value and value != defaults.get(name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def _without_password(url: str | None) -> str | None:
    """The URL, for a log; None where it holds a password, which the environment has then."""
    return None if url is None or has_secret(url) else url


def _reject_loading_options(asked: ModelOptions, where: str, how: str, more: Mapping[str, Any] | None = None) -> None:
    """Raise UsageError for what says how weights are loaded, where they are not loaded here; finding them is."""
    names = [*set(asked.non_defaults) - {"revision", "cache_dir", "local_files_only", "trust_remote_code"}]
    names += ["vllm_options"] if more else []
    if names:
        raise UsageError(f"{', '.join(sorted(names))} {'are' if len(names) > 1 else 'is'} {where} {how}")


def _reject_tier_settings(tiers: TierKeywords, url: str) -> None:
    """Raise UsageError for settings of a store that is not opened here: with `url` it is the server's."""
    changed = sorted(name for name, value in tiers.items() if value != getattr(TierOptions(), name))
    if changed:
        settings = " ".join(f"RAGBLEND_{name.upper()}=..." for name in changed)
        raise UsageError(
            f"{', '.join(changed)} cannot be set here: the store is that of the server at {url}. Start that one with "
            f"it ({settings} ragblend serve MODEL), and leave it out of this command's flags, environment and "
            "ragblend.toml"
        )


def _load_client(
    model: str,
    store: str | Path | KVStore | None,
    url: str,
    connection: dict[str, Any],
    options: dict[str, Any],
    model_options: ModelOptions,
) -> VllmClient:
    """An engine over the server at `url`, with `model`'s tokenizer from this machine."""
    from ragblend.engine.transformers.model import load_tokenizer
    from ragblend.engine.vllm.client import Connection, VllmClient, server_facts
    from ragblend.prompt.render import Renderer

    if store is not None and not isinstance(store, str | Path):
        raise UsageError(
            f"store is a {type(store).__name__}; with {redact(url)} the store is the server's, give a directory"
        )
    opened = Connection(url, **connection)
    try:
        facts = server_facts(opened, model)
        tokenizer, _ = load_tokenizer(model, model_options)
        if model not in (facts.model, facts.root):
            raise StoreMismatchError(
                f"the server at {redact(url)} runs {facts.model!r}, not {model!r}; choose it: `model={facts.model!r}`"
            )
        renderer = Renderer(tokenizer)
        root = Path(store).absolute() if store is not None else None
        return VllmClient(opened, facts, renderer, name=model, root=root, **options)
    except BaseException:
        opened.close()
        raise


def _load_vllm(
    model: str,
    store: str | Path | KVStore | None,
    model_options: ModelOptions,
    vllm_options: Mapping[str, Any],
    tiers: Mapping[str, Any],
    options: dict[str, Any],
    new_model: bool,
) -> VllmEngine:
    """An engine with vLLM in this process."""
    from tempfile import TemporaryDirectory

    from ragblend.engine.transformers.model import load_tokenizer
    from ragblend.engine.vllm.engine import VllmEngine
    from ragblend.engine.vllm.launch import find_checkpoint, require_vllm, transfer_config
    from ragblend.prompt.render import Renderer

    if store is not None and not isinstance(store, str | Path):
        raise UsageError(
            f"store is a {type(store).__name__}; vLLM's workers open the store themselves, give a directory"
        )
    require_vllm()
    trust = model_options.trust_remote_code
    checkpoint = find_checkpoint(model, model_options)
    found = str(checkpoint.path)
    place = TemporaryDirectory(prefix="ragblend-kv-") if store is None else Path(store).absolute()
    root = place if isinstance(place, Path) else Path(place.name)
    register_model(root, checkpoint.fingerprint, checkpoint.facts(), new_model)
    transfer = transfer_config(
        root, tiers, model=found, system=options["system"], context=options["context"], trust_remote_code=trust,
    )  # fmt: skip
    tokenizer, _ = load_tokenizer(found, ModelOptions(trust_remote_code=trust))
    renderer = Renderer(tokenizer)
    return VllmEngine(
        checkpoint, renderer, transfer, place,
        vllm_options=vllm_options, trust_remote_code=trust, **options,
    )  # fmt: skip


def register_model(path: Path, fingerprint: str, facts: Mapping[str, Any], new_model: bool) -> None:
    """Note in the store at `path` whose KV it holds, and what that looks like, which `verify` needs to know.

    A store that holds only other models' KV is refused, unless `new_model`.
    """
    from ragblend.engine.store.disk import DiskStore

    disk = DiskStore(path)
    models = disk.models()
    if "kv_shapes" in models.get(fingerprint, {}):
        return
    if models and not new_model and not disk.has_model(fingerprint):  # its note may be damaged, or an older one
        held = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
        raise StoreMismatchError(
            f"{path} holds KV of {held}, the engine runs {facts['model']} ({facts['dtype']}), which would find nothing "
            f"there. Add it: ragblend precompute --model {facts['model']} --store {path}; or use another `store`"
        )
    disk.put_model(fingerprint, facts)
