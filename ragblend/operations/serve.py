"""`ragblend serve`: starts vLLM's OpenAI-compatible server with the ragblend connector.

Converts settings to vLLM's flags and replaces this process by vLLM.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ragblend.catalog.database import resolve_catalog
from ragblend.catalog.ledger import register_shared_model
from ragblend.config import Settings
from ragblend.engine.load import find_store_model, register_model
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.transformers.checkpoints import DEMO
from ragblend.engine.tuning.brief_profile import profiles_itself
from ragblend.engine.vllm.launch import (
    LOOPBACK,
    Checkpoint,
    find_checkpoint,
    require_vllm,
    server_command,
    split_flag,
    transfer_config,
    vllm_environment,
)
from ragblend.errors import StoreNotWritableError, UsageError
from ragblend.redaction import hide_secrets, redact_command
from ragblend.server.api_keys import read_keys

log = logging.getLogger(__name__)

API_KEY = "VLLM_API_KEY"
RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command line and environment of the server that `ragblend serve` starts."""

    command: tuple[str, ...]
    environment: Mapping[str, str]  # with the secrets, which a command line would show to other users
    store: Path
    checkpoint: Checkpoint

    def display_command(self) -> str:
        """Return the command as text in which API keys, passwords and tokens are hidden, also those in vLLM's flags."""
        settings = [f"{name}={value}" for name, value in hide_secrets(self.environment).items()]
        command = redact_command(list(self.command))
        return shlex.join(["env", *settings, *command] if settings else command)


def build_server_command(
    settings: Settings,
    flags: Sequence[str] = (),
    *,
    host: str = LOOPBACK,
    port: int = 8000,
    api_key: str | None = None,
    keys: Path | None = None,
    check: bool = True,
) -> ServerCommand:
    """Return the server's command. vLLM's own `flags` are appended. `keys`: the file of the tenants' API keys.

    Downloads the model if it is not local, and writes no other file. Raises RagblendError if the store cannot be
    served, and with `check` also if vLLM is missing or has an unsupported version.
    """
    if (settings.model or "").startswith("-"):
        raise UsageError(
            f"the model is {settings.model!r}, a flag; write the model first: ragblend serve MODEL --store DIR ..."
        )
    if not 0 < port < 65536:
        raise UsageError(f"port is {port}; choose 1 to 65535")
    if check:
        require_vllm()
    if keys is not None:
        _check_keys(keys, api_key)
    tiers = dict(settings.tiers)
    if settings.remote is not None:
        open_remote(settings.remote)  # reports an invalid URL here, not in one of vLLM's processes
    urls = {name: str(tiers.pop(name)) for name in ("remote", "catalog") if tiers[name] is not None}
    model = settings.model or find_store_model(settings.store)
    # vLLM gets the directory of the revision. For a directory it would ignore --revision.
    revision, flags = split_flag(flags, "--revision")
    checkpoint = find_checkpoint(model, replace(settings.model_options, device="auto", revision=revision))
    transfer = transfer_config(
        settings.store,
        tiers,
        model=str(checkpoint.path),
        mode=settings.mode,
        rule=settings.rule,
        recompute_ratio=settings.recompute_ratio,
        refine_ratio=settings.refine_ratio,
        selection=settings.selection,
        system=settings.system,
        context=settings.context,
        trust_remote_code=settings.trust_remote_code,
        auto_profile=profiles_itself(settings.auto_profile, is_demo=model == DEMO),
        keys=keys,
    )
    store = Path(transfer["kv_connector_extra_config"]["store"])
    _check_store(store, checkpoint)
    own_flags = ["--host", host, "--port", str(port)]
    own_flags += ["--trust-remote-code"] if settings.trust_remote_code else []
    command = server_command(sys.executable, checkpoint, transfer, [*own_flags, *flags])
    added = vllm_environment()
    # Secrets are not flags, because every user of the machine can read the command line.
    if api_key:
        added[API_KEY] = api_key
    added.update({f"RAGBLEND_{name.upper()}": url for name, url in urls.items()})  # the connector reads them there
    return ServerCommand(tuple(command), added, store, checkpoint)


def _check_store(path: Path, checkpoint: Checkpoint) -> None:
    """Raise RagblendError for a store that cannot be served: a read-only one without this model's metadata, or one
    whose ingestion context is damaged. Writes nothing.
    """
    place = next(each for each in (path, *path.parents) if os.path.lexists(each))
    is_writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    models: Mapping[str, Mapping[str, Any]] = {}
    if path.is_dir():
        disk = DiskStore(path)
        disk.read_context_policy()
        models = disk.models()
    model_record = models.get(checkpoint.fingerprint)
    if not is_writable and (model_record is None or "kv_shapes" not in model_record):
        why = "this user cannot write there" if place.is_dir() else "it is no directory"
        raise StoreNotWritableError(
            f"the store {path} cannot be written: {place}: {why}. Check its owner and mount, or choose another `store`"
        )
    if models and model_record is None:
        names = ", ".join(f"{other.get('model')} ({other.get('dtype')})" for other in models.values())
        log.warning(
            "the store %s has KV of %s, but none of %s (%s), so no request finds stored KV before its documents are "
            "ingested again: ragblend ingest DOCS --backend http://HOST:PORT --model %s; or choose another `store`",
            path, names, checkpoint.name, checkpoint.dtype, checkpoint.name,
        )  # fmt: skip


def _check_keys(path: Path, api_key: str | None) -> None:
    """Raise UsageError if another setting than the tenants' `keys` would also give access to the server."""
    read_keys(path)
    if api_key or os.environ.get(API_KEY):
        raise UsageError(
            f"`keys` and `api_key` (RAGBLEND_API_KEY, {API_KEY}) are both given; write the key into {path}, and unset "
            "`api_key`"
        )
    if os.environ.get(RESPONSES_STORE, "0") not in ("", "0"):
        raise UsageError(
            f"with {RESPONSES_STORE} vLLM shows one key's responses to another; unset it, or leave out `keys`"
        )


def _check_port(host: str, port: int) -> None:
    """Raise UsageError if no server can listen there. vLLM listens only after it has loaded the model."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except (OSError, OverflowError) as error:
        reason = "the port is in use" if getattr(error, "errno", 0) == errno.EADDRINUSE else str(error)
        raise UsageError(f"no server can listen at {host}:{port}: {reason}; choose another --port or --host") from None


def serve(settings: Settings, flags: Sequence[str] = (), **options: Any) -> NoReturn:
    """Replace this process by the server that `build_server_command` describes. Never returns.

    Raises RagblendError if the server cannot be started.
    """
    launch = build_server_command(settings, flags, **options)
    if not {"--headless", "--uds"}.intersection(flag.partition("=")[0] for flag in flags):
        _check_port(options.get("host", LOOPBACK), options.get("port", 8000))
    catalog, checkpoint = resolve_catalog(launch.store, settings.catalog), launch.checkpoint
    register_shared_model(catalog, checkpoint.fingerprint, checkpoint.name, new_model=False)
    register_model(launch.store, checkpoint.fingerprint, checkpoint.facts(), True, settings.catalog)
    os.execvpe(launch.command[0], list(launch.command), {**os.environ, **launch.environment})
