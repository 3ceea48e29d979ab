"""`load_engine`: an engine from a model, a store and a backend. PyTorch and vLLM are imported only when it runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ragblend.config import Settings
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.open import open_store
from ragblend.errors import StoreMismatchError, UnsupportedModelError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.option_fields import default_of
from ragblend.option_keywords import LoadKeywords
from ragblend.options import BACKEND, MODEL_NAMES, TIER_NAMES, LoadOptions, ModelOptions, TierOptions, is_server_url
from ragblend.redaction import has_secret, redact_url

if TYPE_CHECKING:
    from ragblend.engine.api import DocumentEngine, Engine
    from ragblend.engine.store.metadata import StoreDefaults
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.vllm.client import VllmClient
    from ragblend.engine.vllm.engine import VllmEngine


@overload
def load_engine(
    model: str | Path | tuple[Any, Any] | None = None,
    store: str | Path | KVStore | None = None,
    *,
    backend: Literal["transformers"] = ...,
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
    backend: str = default_of(Settings, "backend"),
    **options: Unpack[LoadKeywords],
) -> Engine:
    """Return an engine: a model with its store, ready to precompute and answer.

    `model`: "demo", a Hugging Face id, a local path, or a pair (model, tokenizer) that transformers has loaded. In the
    pair's model, ragblend replaces the attention function. Your own calls of the model compute the same as before.
    None is the model that the store's latest ingestion used; over HTTP, the server's model.
    `store`: a directory, any KVStore, or None for memory only.

    `backend`: "transformers"; "vllm", with `vllm_options` for vLLM's engine arguments; or "http://HOST:PORT", a server
    that `ragblend serve` started. Over HTTP the server holds the KV, renders and tokenizes. Options that load the model
    or configure a tier are then set where the server starts, and raise UsageError here. Options that locate the
    tokenizer are allowed, because splitting documents needs it. `api_key`, `read_timeout_s` and `max_retries` are for
    HTTP.

    `options` are LoadOptions. ModelOptions load the model: dtype or torch_dtype, device or device_map,
    attn_implementation, revision, cache_dir, local_files_only, trust_remote_code, adapter, model_kwargs. TierOptions
    are arguments of `open_store`: budgets, remote tier and dtype of a store in a directory, not of a KVStore.

    `system` is the system text after which chunks are precomputed. None is the stored system text; "" is no system
    text. `context` is the context policy (see `store.keys`). None is the policy that the store's folder has recorded. A
    remote tier records no policy, so pass `context` for KV that another process puts there. Raises StoreMismatchError
    if all KV in the directory is of other models, unless `new_model` is True.

    `auto_profile`: if the store has no machine profile of the model, measure the machine for at most 3 seconds, before
    the first request that it may decide; vLLM measures when it starts. False: only use a profile that the store has.
    None: RAGBLEND_AUTO_PROFILE, else True. See `GenerationOptions.recompute_ratio`.

    `shadow`: of the requests answered from fused KV, the share for which full prefill also runs, after the answer.
    `engine.shadow` counts how often both results agree; each report's `shadow` has the comparison.

    `max_num_seqs`: most answers that are decoded together, each with its KV in memory. None is 8. For vLLM, put it into
    `vllm_options`.
    """
    arguments: dict[str, Any] = {**options}
    loading = {name: arguments.pop(name) for name in (*MODEL_NAMES, "torch_dtype") if name in arguments}
    asked = ModelOptions.from_keywords(**loading)
    settings = LoadOptions(**arguments)
    if isinstance(store, str | Path):
        store = expand_user_path(store, "store")
    elif store is not None and not is_server_url(backend) and not isinstance(store, KVStore):
        raise UsageError(f"store is {store!r}; choose the path of a folder, a KVStore, or None for memory only")
    BACKEND.validate("backend", backend)
    if settings.max_num_seqs is not None and backend != "transformers":
        raise UsageError(
            f"max_num_seqs is for an engine that decodes in this process, not for backend={redact_url(backend)!r}; set "
            "it where vLLM starts: vllm_options={'max_num_seqs': ...}, or `ragblend serve MODEL --max-num-seqs ...`"
        )
    pair: tuple[Any, Any] | None = None
    if model is None:
        if asked.trust_remote_code:
            raise UsageError("trust_remote_code runs code of the model, and no model is given; name it: `model=...`")
        model = None if is_server_url(backend) else find_store_model(store)
    elif not isinstance(model, str | Path):
        from ragblend.engine.transformers.loaded_model import loaded_model_name, unpack_loaded_model

        pair = unpack_loaded_model(model)
        model = loaded_model_name(pair)
        if backend != "transformers":
            raise UsageError(
                f"a loaded model runs in this process, but backend is {redact_url(backend)!r}; pass its name or path"
            )
    model = None if model is None else str(model)
    shared = {name: getattr(settings, name) for name in ("system", "namespace", "on_miss", "shadow", "context")}
    if (store is None or isinstance(store, Path)) and pair is None:
        remote = None if settings.remote is None or has_secret(settings.remote) else settings.remote
        shared["flags"] = _command_flags(
            model=model, store=store, backend=backend, remote=remote, namespace=settings.namespace, **asked.non_defaults
        )
    if isinstance(store, Path):
        store = store.absolute()
        if settings.system is None:
            shared["system"] = load_store_defaults(store).system
            settings = replace(settings, system=shared["system"])
    if is_server_url(backend):
        return _load_client(model, store, backend, asked, settings, shared)
    assert model is not None
    if backend == "vllm":
        return _load_vllm(model, store, asked, settings, shared)
    return _load_transformers(model, pair, store, asked, settings, shared)


def load_document_engine(model: str | None, store: str, **options: Any) -> DocumentEngine:
    """Return an engine that removes and ingests the documents of the folder `store`. It answers no prompts.

    `options` are arguments of `load_engine`; dtype, device, trust_remote_code and backend must be among them.

    If the store has KV of the model, and the fingerprint can be computed without the weights, the weights are loaded
    when the first chunk has to be prefilled. In all other cases, for example for a GGUF, an adapter or quantised
    weights, `load_engine` loads the engine at once.
    """
    from ragblend.engine.store.disk import DiskStore
    from ragblend.engine.transformers.model import load_tokenizer
    from ragblend.engine.vllm.launch import find_checkpoint
    from ragblend.engine.weightless import WeightlessEngine
    from ragblend.prompt.render import Renderer

    checkpoint, folder = None, expand_user_path(store, "store").absolute()
    arguments = dict(options)
    loading = ModelOptions(**{name: arguments.pop(name) for name in ("dtype", "device", "trust_remote_code")})
    if not is_server_url(arguments.pop("backend")) and model is not None:
        with suppress(UnsupportedModelError, OSError, ValueError, AttributeError):  # load_engine says what is wrong
            checkpoint = find_checkpoint(model, loading)
    spec = None if checkpoint is None else DiskStore(folder).model_specs().get(checkpoint.fingerprint)
    if checkpoint is None or spec is None:
        engine: DocumentEngine = load_engine(model, store, **{**options, "auto_profile": False})
        return engine
    settings = LoadOptions(**arguments)
    tiers = open_store(folder, **settings.tiers)
    return WeightlessEngine(
        Renderer(load_tokenizer(str(model), loading)[0]),
        tiers,
        partial(load_engine, model, store, **options),
        context_length=checkpoint.context_length,
        bytes_per_token=spec.bytes_per_token(tiers.kv_dtype),
        name=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        num_layers=checkpoint.num_layers,
        system=load_store_defaults(folder).system if settings.system is None else settings.system,
        namespace=settings.namespace,
        context=settings.context,
        on_miss="inline",
    )


def load_store_defaults(store: Any) -> StoreDefaults:
    """Return the defaults that the latest ingestion into the folder `store` wrote. Raises CorruptError if damaged."""
    from ragblend.engine.store.disk import DiskStore
    from ragblend.engine.store.metadata import StoreDefaults

    is_folder = isinstance(store, str | Path) and expand_user_path(store, "store").is_dir()
    return DiskStore(store).read_defaults() if is_folder else StoreDefaults()


def find_store_model(store: Any) -> str:
    """Return the name of the model that the latest ingestion into the folder `store` used.

    If none is recorded, return the only model whose KV is stored. Raises UsageError if there are several, or none.
    """
    from ragblend.engine.store.disk import DiskStore

    if named := load_store_defaults(store).model:
        return named
    names: list[str] = []
    if isinstance(store, str | Path) and expand_user_path(store, "store").is_dir():
        names = sorted({str(facts["model"]) for facts in DiskStore(store).models().values() if facts.get("model")})
    if len(names) == 1:
        return names[0]
    reason = f"{store} holds KV of {', '.join(names)}" if names else f"the store {store} names none"
    if store is None:
        reason = "no store is given that names one"
    raise UsageError(
        f"`model` is not given, and {reason}; give a Hugging Face id or a local path, or `model='demo'` for a trial"
    )


_FLAGS = {"model", "backend", "remote", "dtype", "device", "namespace", "trust_remote_code"}  # settings with a flag


def _command_flags(store: str | Path | None, **settings: Any) -> str:
    """Return the flags with which a ragblend command loads the same engine.

    Returns "" for KV in memory, which no command can read, and for settings without a flag.
    """
    if (store is None and not is_server_url(settings["backend"])) or not set(settings) <= _FLAGS:
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


def _changed_tiers(settings: LoadOptions) -> dict[str, Any]:
    """Return the options of tiers that differ from their defaults, by name."""
    return {
        name: getattr(settings, name)
        for name in sorted(TIER_NAMES)
        if getattr(settings, name) != getattr(TierOptions(), name)
    }


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
    from ragblend.engine.store.format.kv import KVSpec, dtype_name
    from ragblend.engine.transformers.checkpoints import DEMO
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.transformers.layers import TransformersLayers
    from ragblend.engine.transformers.loaded_model import adopt_loaded_model
    from ragblend.engine.transformers.measure import measure_engine
    from ragblend.engine.transformers.model import load_model
    from ragblend.engine.tuning.brief_profile import profiles_itself
    from ragblend.engine.tuning.machine import machine_facts, read_machine_profile
    from ragblend.prompt.render import Renderer

    if store is None or isinstance(store, Path):
        kv_store: KVStore = open_store(store, **settings.tiers)
    else:
        if changed := _changed_tiers(settings):
            urls = ("remote", "catalog")
            changes = [f"{name}={redact_url(value) if name in urls else value}" for name, value in changed.items()]
            raise UsageError(
                f"{', '.join(changes)} cannot be set here: store is a {type(store).__name__}, whose tiers and "
                "catalogue are set when it is made. Leave it out of arguments, environment and ragblend.toml, and make "
                f"the store with it: store=open_store(PATH, {', '.join(f'{name}=...' for name in changed)})"
            )
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
    engine = TransformersEngine(
        layers,
        Renderer(loaded.tokenizer),
        kv_store,
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        max_num_seqs=MAX_NUM_SEQS if settings.max_num_seqs is None else settings.max_num_seqs,
        machine=machine,
        **shared,
    )
    if machine is None and profiles_itself(settings.auto_profile, is_demo=loaded.name == DEMO):
        engine.measure_machine = measure_engine
    return engine


def _load_client(
    model: str | None,
    store: Path | KVStore | None,
    url: str,
    asked: ModelOptions,
    settings: LoadOptions,
    shared: dict[str, Any],
) -> VllmClient:
    """Return an engine over the server at `url`. `model` None is the server's model."""
    from ragblend.engine.vllm.client import Connection, VllmClient, request_server_facts
    from ragblend.prompt.render import Renderer

    more = ["vllm_options"] if settings.vllm_options else []
    _reject_loading_options(asked, f"set where the server starts, not with {redact_url(url)}", *more)
    if changed := _changed_tiers(settings):
        variables = " ".join(f"RAGBLEND_{name.upper()}=..." for name in changed)
        raise UsageError(
            f"{', '.join(changed)} cannot be set here: the store is that of the server at {redact_url(url)}. Start the "
            f"server with it ({variables} ragblend serve MODEL), and leave it out of this command's flags, environment "
            "and ragblend.toml"
        )
    if store is not None and not isinstance(store, Path):
        raise UsageError(
            f"store is a {type(store).__name__}, but with {redact_url(url)} the store is the server's; leave `store` "
            "out"
        )
    http = {name: getattr(settings, name) for name in ("api_key", "read_timeout_s", "max_retries")}
    opened = Connection(url, **{name: value for name, value in http.items() if value is not None})
    try:
        facts = request_server_facts(opened, model or "")
        if model not in (None, facts.model, facts.root):
            raise StoreMismatchError(
                f"the server at {redact_url(url)} runs {facts.model!r}, not {model!r}; pass `model={facts.model!r}`"
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

    from ragblend.engine.transformers.checkpoints import DEMO
    from ragblend.engine.transformers.model import load_tokenizer
    from ragblend.engine.tuning.brief_profile import profiles_itself
    from ragblend.engine.vllm.engine import VllmEngine
    from ragblend.engine.vllm.launch import find_checkpoint, require_vllm, transfer_config
    from ragblend.prompt.render import Renderer

    if asked.device != "auto":
        raise UsageError(
            f"device is {asked.device!r}, but vLLM uses the device it was built for; choose a device with its flags"
        )
    _reject_loading_options(replace(asked, dtype="auto"), "set by vllm_options, vLLM's own arguments, not with vLLM")
    if store is not None and not isinstance(store, Path):
        raise UsageError(
            f"store is a {type(store).__name__}, but vLLM's workers open the store themselves; pass a directory"
        )
    require_vllm()
    trust = asked.trust_remote_code
    checkpoint = find_checkpoint(model, asked)
    path = str(checkpoint.path)
    place = TemporaryDirectory(prefix="ragblend-kv-") if store is None else store.absolute()
    root = place if isinstance(place, Path) else Path(place.name)
    register_model(root, checkpoint.fingerprint, checkpoint.facts(), settings.new_model, settings.catalog)
    transfer = transfer_config(
        root,
        settings.tiers,
        model=path,
        system=settings.system,
        context=settings.context,
        trust_remote_code=trust,
        auto_profile=profiles_itself(settings.auto_profile, is_demo=model == DEMO),
    )
    tokenizer, _ = load_tokenizer(path, ModelOptions(trust_remote_code=trust))
    options = settings.vllm_options or {}
    return VllmEngine(
        checkpoint, Renderer(tokenizer), transfer, place, vllm_options=options, trust_remote_code=trust, **shared
    )


def register_model(
    path: Path, fingerprint: str, facts: Mapping[str, Any], new_model: bool, catalog: str | None
) -> None:
    """Record the model with this `fingerprint` in the store at `path`, and in its shared catalogue if it has one.

    `facts`: the model's name, and the dtype and shapes of its KV. `DiskStore.verify` compares entries with them. Raises
    StoreMismatchError if the store or the catalogue has other models only, unless `new_model` is True.
    """
    from ragblend.catalog.database import resolve_catalog
    from ragblend.catalog.ledger import register_shared_model
    from ragblend.engine.store.disk import DiskStore

    register_shared_model(resolve_catalog(path, catalog), fingerprint, str(facts["model"]), new_model=new_model)
    disk = DiskStore(path)
    models = disk.models()
    if "kv_shapes" in models.get(fingerprint, {}):
        return
    if models and not new_model and not disk.has_model(fingerprint):  # its metadata may be damaged, or of old format
        names = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
        raise StoreMismatchError(
            f"{path} holds KV of {names}, and none of the engine's model {facts['model']} ({facts['dtype']}). Use "
            f"another folder (`store`), or, if `ragblend ingest` filled this one, add the model's KV: "
            f"ragblend precompute --model {facts['model']} --store {path}"
        )
    disk.put_model(fingerprint, facts)
