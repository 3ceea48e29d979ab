"""`load_engine` puts model, store and backend together; nothing heavy is imported before it is called."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ragblend.engine.store.open import open_store
from ragblend.errors import StoreMismatchError, UsageError
from ragblend.files.places import user_path
from ragblend.files.store_folder import open_folder
from ragblend.options import (
    MODEL_NAMES,
    TIER_NAMES,
    LoadKeywords,
    LoadOptions,
    ModelOptions,
    TierOptions,
    is_url,
)
from ragblend.redaction import has_secret, redact

if TYPE_CHECKING:
    from ragblend.engine.api import Engine
    from ragblend.engine.store.base import KVStore
    from ragblend.engine.store.metadata import StoreDefaults
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.vllm.client import VllmClient
    from ragblend.engine.vllm.engine import VllmEngine


@overload
def load_engine(
    model: str | Path | tuple[Any, Any] | None = None,
    store: str | Path | KVStore | None = None,
    *,
    backend: Literal["transformers"] = "transformers",
    **options: Unpack[LoadKeywords],
) -> TransformersEngine: ...


@overload
def load_engine(
    model: str | Path | tuple[Any, Any] | None = None,
    store: str | Path | KVStore | None = None,
    *,
    backend: str,
    **options: Unpack[LoadKeywords],
) -> Engine: ...


def load_engine(
    model: str | Path | tuple[Any, Any] | None = None,
    store: str | Path | KVStore | None = None,
    *,
    backend: str = "transformers",
    **options: Unpack[LoadKeywords],
) -> Engine:
    """Return a model with its store, ready to precompute and answer.

    `model`: "demo", a Hugging Face id, a local path, or a pair (model, tokenizer) that transformers has loaded, whose
    attention is then ours, with its own inside for its own forward. None is the model that the store remembers, or the
    server's.
    `store`: a directory, any KVStore, or None for memory only.

    `backend`: "transformers"; "vllm", with `vllm_options` for vLLM's own engine arguments; or "http://HOST:PORT", a
    server that `ragblend serve` started. Over HTTP the KV is the server's, and it renders and tokenizes prompts; what
    loads the model or is a tier's is set where the server starts (UsageError here), save where the tokenizer is found,
    which cutting documents needs. `api_key`, `timeout` (seconds) and `max_retries` are for HTTP.

    `options` are LoadOptions. How the model is loaded: ModelOptions (dtype or torch_dtype, device or device_map,
    attn_implementation, revision, cache_dir, local_files_only, trust_remote_code, adapter, model_kwargs). The store's
    tiers: TierOptions, the budgets, remote and dtype of `open_store`; a KVStore that is passed has its own.

    `system` is the system text that chunks are precomputed behind; None is the one that the store remembers, "" none.
    A directory that so far holds only other models' KV is rejected with StoreMismatchError, unless `new_model` says
    that this one is to be added. `context`: what the store's chunks were computed behind besides the prefix; None is
    what the store remembers, so it is given where the KV is in a remote tier that another process fills.

    `shadow`: full prefill also runs, after the answer, for this share of the requests answered from fused KV;
    `engine.shadow` counts how often they agree, each report's `shadow` has what was found.

    `max_num_seqs`: answers whose tokens are decoded together at most, each with its KV in memory; None is 8, and 1 is
    one after another. With vLLM it is one of `vllm_options`.
    """
    given: dict[str, Any] = {**options}
    loading = {name: given.pop(name) for name in (*MODEL_NAMES, "torch_dtype") if name in given}
    asked = ModelOptions.from_keywords(**loading)
    settings = LoadOptions(**given)
    if isinstance(store, str | Path):
        store = user_path(store, "store")
    elif store is not None and not is_url(backend) and not (hasattr(store, "get") and hasattr(store, "put")):
        raise UsageError(f"store is {store!r}; choose the path of a folder, a KVStore, or None for memory only")
    if backend not in ("transformers", "vllm") and not is_url(backend):
        raise UsageError(
            f"backend is {redact(backend)!r}; choose 'transformers', 'vllm' or a server's http://HOST:PORT"
        )
    if settings.max_num_seqs is not None and backend != "transformers":
        raise UsageError(
            f"max_num_seqs is for an engine that decodes in this process, not for backend={redact(backend)!r}; vLLM "
            "takes it where it starts: vllm_options={'max_num_seqs': ...}, or `ragblend serve MODEL --max-num-seqs ...`"
        )
    pair: tuple[Any, Any] | None = None
    if model is None:
        if asked.trust_remote_code:
            raise UsageError("trust_remote_code runs code of the model, so name the model: `model=...`")
        model = None if is_url(backend) else remembered_model(store)
    elif not isinstance(model, str | Path):
        from ragblend.engine.transformers.loaded_model import pair_name, validate_loaded_model

        pair = validate_loaded_model(model)
        model = pair_name(pair)
        if backend != "transformers":
            raise UsageError(f"a loaded model is run here; with backend={redact(backend)!r} give its name or path")
    model = None if model is None else str(model)
    shared = {name: getattr(settings, name) for name in ("system", "namespace", "on_miss", "shadow", "context")}
    if (store is None or isinstance(store, Path)) and pair is None:
        remote = None if settings.remote is None or has_secret(settings.remote) else settings.remote
        shared["flags"] = _command_flags(
            model=model, store=store, backend=backend, remote=remote, namespace=settings.namespace, **asked.non_defaults
        )
    if isinstance(store, Path):
        store = open_folder(store)
        if settings.system is None:
            shared["system"] = remembered_defaults(store).system
            settings = replace(settings, system=shared["system"])
    if is_url(backend):
        return _load_client(model, store, backend, asked, settings, shared)
    assert model is not None
    if backend == "vllm":
        return _load_vllm(model, store, asked, settings, shared)
    return _load_transformers(model, pair, store, asked, settings, shared)


def remembered_defaults(store: Any) -> StoreDefaults:
    """Return what the latest ingestion into the folder `store` named. Raises CorruptError for a damaged note."""
    from ragblend.engine.store.disk import DiskStore
    from ragblend.engine.store.metadata import StoreDefaults

    is_folder = isinstance(store, str | Path) and user_path(store, "store").is_dir()
    return DiskStore(store).read_defaults() if is_folder else StoreDefaults()


def remembered_model(store: Any) -> str:
    """Return the name of the model that the latest ingestion into the folder `store` used, else of the one whose KV it
    holds.

    Raises UsageError if there is none, or several.
    """
    from ragblend.engine.store.disk import DiskStore

    if named := remembered_defaults(store).model:
        return named
    names: list[str] = []
    if isinstance(store, str | Path) and user_path(store, "store").is_dir():
        names = sorted({str(facts["model"]) for facts in DiskStore(store).models().values() if facts.get("model")})
    if len(names) == 1:
        return names[0]
    held = f"{store} holds KV of {', '.join(names)}" if names else f"the store {store} remembers none"
    if store is None:
        held = "no store is given that remembers one"
    raise UsageError(
        f"`model` is not given, and {held}; give a Hugging Face id or a local path, or `model='demo'` for a trial"
    )


_FLAGS = {"model", "backend", "remote", "dtype", "device", "namespace", "trust_remote_code"}  # those of commands


def _command_flags(store: str | Path | None, **settings: Any) -> str:
    """Return the flags by which a command of ours opens the same engine; "" for KV in memory, which no command sees,
    and for a model that no flags describe.
    """
    if (store is None and not is_url(settings["backend"])) or not set(settings) <= _FLAGS:
        return ""
    defaults = {"backend": "transformers"}
    words: list[str] = []
    for name, value in {**settings, "store": store}.items():
        if value and value != defaults.get(name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def _reject_loading_options(asked: ModelOptions, reason: str, *more: str) -> None:
    """Raise UsageError for options that load weights, where this process loads none; finding them is allowed."""
    names = {*asked.non_defaults, *more} - {"revision", "cache_dir", "local_files_only", "trust_remote_code"}
    if names:
        raise UsageError(f"{', '.join(sorted(names))} {'are' if len(names) > 1 else 'is'} {reason}")


def _load_transformers(
    model: str,
    pair: tuple[Any, Any] | None,
    store: Path | KVStore | None,
    asked: ModelOptions,
    settings: LoadOptions,
    shared: dict[str, Any],
) -> TransformersEngine:
    """Return an engine that runs the model in this process."""
    from ragblend.engine.loop import MAX_NUM_SEQS
    from ragblend.engine.store.kv import KVSpec, dtype_name
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.transformers.layers import TransformersLayers
    from ragblend.engine.transformers.loaded_model import adopt_loaded_model
    from ragblend.engine.transformers.model import load_model
    from ragblend.engine.tuning.machine import machine_facts, read_machine_profile
    from ragblend.prompt.render import Renderer

    if store is None or isinstance(store, Path):
        kv_store: KVStore = open_store(store, **settings.tiers)
    elif settings.remote is not None:
        raise UsageError("a remote tier goes into the store that you pass: TieredStore(your_store, open_remote(URL))")
    elif settings.catalog is not None:
        raise UsageError("a catalogue goes into the store that you pass: DiskStore(DIR, catalog=URL)")
    elif settings.kv_dtype != "auto":
        raise UsageError(f"the store that you pass has its dtype: TieredStore(..., kv_dtype={settings.kv_dtype!r})")
    else:
        kv_store = store
    loaded = load_model(model, asked) if pair is None else adopt_loaded_model(pair, asked)
    layers = TransformersLayers(loaded.model)
    machine = None
    if isinstance(store, Path):
        shape = KVSpec.from_kv_shapes(dtype_name(layers.dtype), layers.kv_shapes)
        register_model(
            store, loaded.fingerprint, {"model": loaded.name, **shape.as_facts()}, settings.new_model, settings.catalog
        )
        machine = read_machine_profile(store, loaded.fingerprint, machine_facts(layers.device))
    return TransformersEngine(
        layers,
        Renderer(loaded.tokenizer),
        kv_store,
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        max_num_seqs=MAX_NUM_SEQS if settings.max_num_seqs is None else settings.max_num_seqs,
        machine=machine,
        **shared,
    )


def _load_client(
    model: str | None,
    store: Path | KVStore | None,
    url: str,
    asked: ModelOptions,
    settings: LoadOptions,
    shared: dict[str, Any],
) -> VllmClient:
    """Return an engine over the server at `url`; `model` None is the server's."""
    from ragblend.engine.vllm.client import Connection, VllmClient, server_facts
    from ragblend.prompt.render import Renderer

    more = ["vllm_options"] if settings.vllm_options else []
    _reject_loading_options(asked, f"set where the server starts, not with {redact(url)}", *more)
    changed = sorted(name for name in TIER_NAMES if getattr(settings, name) != getattr(TierOptions(), name))
    if changed:
        variables = " ".join(f"RAGBLEND_{name.upper()}=..." for name in changed)
        raise UsageError(
            f"{', '.join(changed)} cannot be set here: the store is that of the server at {redact(url)}. Start that "
            f"one with it ({variables} ragblend serve MODEL), and leave it out of this command's flags, environment "
            "and ragblend.toml"
        )
    if store is not None and not isinstance(store, Path):
        raise UsageError(
            f"store is a {type(store).__name__}; with {redact(url)} the store is the server's, leave it out"
        )
    http = {name: getattr(settings, name) for name in ("api_key", "timeout", "max_retries")}
    opened = Connection(url, **{name: value for name, value in http.items() if value is not None})
    try:
        facts = server_facts(opened, model or "")
        if model not in (None, facts.model, facts.root):
            raise StoreMismatchError(
                f"the server at {redact(url)} runs {facts.model!r}, not {model!r}; choose it: `model={facts.model!r}`"
            )
        # The server's folder of the model, if this machine has it as well, else its name.
        place = facts.model if Path(facts.root).is_absolute() and not Path(facts.root).exists() else facts.root

        def load_renderer() -> Renderer:
            from ragblend.engine.transformers.model import load_tokenizer

            return Renderer(load_tokenizer(model or place, asked)[0])

        return VllmClient(opened, facts, load_renderer, name=model or place, **shared)
    except BaseException:
        opened.close()
        raise


def _load_vllm(
    model: str, store: Path | KVStore | None, asked: ModelOptions, settings: LoadOptions, shared: dict[str, Any]
) -> VllmEngine:
    """Return an engine with vLLM in this process."""
    from tempfile import TemporaryDirectory

    from ragblend.engine.transformers.model import load_tokenizer
    from ragblend.engine.vllm.engine import VllmEngine
    from ragblend.engine.vllm.launch import find_checkpoint, require_vllm, transfer_config
    from ragblend.prompt.render import Renderer

    if asked.device != "auto":
        raise UsageError(
            f"device is {asked.device!r}; vLLM takes the device it was built for, choose one with its flags"
        )
    _reject_loading_options(replace(asked, dtype="auto"), "set by vllm_options, vLLM's own arguments, not with vLLM")
    if store is not None and not isinstance(store, Path):
        raise UsageError(
            f"store is a {type(store).__name__}; vLLM's workers open the store themselves, give a directory"
        )
    require_vllm()
    trust = asked.trust_remote_code
    checkpoint = find_checkpoint(model, asked)
    found = str(checkpoint.path)
    place = TemporaryDirectory(prefix="ragblend-kv-") if store is None else store.absolute()
    root = place if isinstance(place, Path) else Path(place.name)
    register_model(root, checkpoint.fingerprint, checkpoint.facts(), settings.new_model, settings.catalog)
    transfer = transfer_config(
        root, settings.tiers, model=found, system=settings.system, context=settings.context, trust_remote_code=trust
    )
    tokenizer, _ = load_tokenizer(found, ModelOptions(trust_remote_code=trust))
    options = settings.vllm_options or {}
    return VllmEngine(
        checkpoint, Renderer(tokenizer), transfer, place, vllm_options=options, trust_remote_code=trust, **shared
    )


def register_model(
    path: Path, fingerprint: str, facts: Mapping[str, Any], new_model: bool, catalog: str | None = None
) -> None:
    """Note in the store at `path` whose KV it holds, and what that looks like, which `verify` needs to know; and in its
    catalogue, where other stores have it as well.

    A store that holds only other models' KV is refused, unless `new_model`.
    """
    from ragblend.catalog.database import find_catalog
    from ragblend.catalog.registry import register_shared_model
    from ragblend.engine.store.disk import DiskStore

    register_shared_model(find_catalog(path, catalog), fingerprint, str(facts["model"]), new_model=new_model)
    disk = DiskStore(path)
    models = disk.models()
    if "kv_shapes" in models.get(fingerprint, {}):
        return
    if models and not new_model and not disk.has_model(fingerprint):  # its note may be damaged, or an older one
        held = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
        raise StoreMismatchError(
            f"{path} holds KV of {held}, the engine runs {facts['model']} ({facts['dtype']}), which would find nothing "
            f"there. Use another folder (`store`), or, if `ragblend ingest` filled this one, add the model's KV: "
            f"ragblend precompute --model {facts['model']} --store {path}"
        )
    disk.put_model(fingerprint, facts)
