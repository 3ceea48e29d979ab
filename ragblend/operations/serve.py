"""`ragblend serve`: vLLM's own OpenAI-compatible server with the ragblend connector, as one command.

Knows which settings become which vLLM flags. The process is then vLLM's; nothing of this module runs beside it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from ragblend.config import Settings
from ragblend.engine.load import register_model
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.vllm.api_keys import read_keys
from ragblend.engine.vllm.launch import (
    LOOPBACK,
    environment,
    find_checkpoint,
    require_vllm,
    server_command,
    split_flag,
    transfer_config,
)
from ragblend.errors import UsageError
from ragblend.redaction import hide_secrets, redact_command

API_KEY = "VLLM_API_KEY"
RESPONSES_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `ragblend serve` itself takes; everything else goes to vLLM as it is."""

    settings: Settings = field(default_factory=Settings)
    host: str = LOOPBACK
    port: int = 8000
    api_key: str | None = None
    separator: str | None = None
    separator_end: str | None = None
    keys: Path | None = None

    def __post_init__(self) -> None:
        if self.settings.model.startswith("-"):
            raise UsageError(
                f"the model is {self.settings.model!r}; put it first: ragblend serve MODEL --store DIR ..."
            )
        if not 0 < self.port < 65536:
            raise UsageError(f"port is {self.port}; choose 1 to 65535")
        if self.separator_end is not None and self.separator is None:
            raise UsageError("--separator-end needs --separator, the mark that opens a chunk")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server about to start: its command, and what is added to its environment: secrets, which commands show."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    url: str

    def display_command(self) -> str:
        """The command for people: without API key, passwords and tokens, also those in vLLM's own flags."""
        settings = [f"{name}={value}" for name, value in hide_secrets(self.environment).items()]
        command = redact_command(list(self.command))
        return shlex.join(["env", *settings, *command] if settings else command)


def build_server_command(options: ServeOptions, flags: Sequence[str] = (), *, check: bool = True) -> ServerCommand:
    """The server's command for `options`, with vLLM's own `flags` at its end.

    Downloads the model where it is not here. Raises RagblendError where vLLM is missing or out of range, unless
    `check` is off.
    """
    if check:
        require_vllm()
    if options.keys is not None:
        _check_keys(options.keys, options.api_key)
    settings = options.settings
    tiers = dict(settings.tiers)
    if settings.remote is not None:
        open_remote(settings.remote)  # a URL that is none is refused here, not in a process of vLLM's
        del tiers["remote"]  # it travels in the environment
    # vLLM gets the revision's directory, and would ignore a revision of that.
    revision, flags = split_flag(flags, "--revision")
    checkpoint = find_checkpoint(settings.model, replace(settings.model_options, device="auto", revision=revision))
    transfer = transfer_config(
        settings.store,
        tiers,
        model=str(checkpoint.path),
        rule=settings.rule,
        ratio=settings.ratio,
        separator=options.separator,
        separator_end=options.separator_end,
        system=settings.system,
        context=settings.context,
        trust_remote_code=settings.trust_remote_code,
        keys=options.keys,
    )
    own = ["--host", options.host, "--port", str(options.port)]
    own += ["--trust-remote-code"] if settings.trust_remote_code else []
    command = server_command(sys.executable, checkpoint, transfer, [*own, *flags])
    added = environment()
    # Not as flags: everybody on the machine can read those.
    if options.api_key:
        added[API_KEY] = options.api_key
    if settings.remote is not None:
        added["RAGBLEND_REMOTE"] = settings.remote  # where the connector looks for what it is not told
    host = LOOPBACK if options.host in ("0.0.0.0", "::") else options.host
    return ServerCommand(tuple(command), added, f"http://{f'[{host}]' if ':' in host else host}:{options.port}")


def _check_keys(path: Path, api_key: str | None) -> None:
    """Raise UsageError where tenants' keys would not be all that a request is judged by."""
    read_keys(path)
    if api_key or os.environ.get(API_KEY):
        raise UsageError(
            f"--api-keys-file and --api-key (RAGBLEND_API_KEY, {API_KEY}) are both given; write the key into "
            f"{path}, unset those"
        )
    if os.environ.get(RESPONSES_STORE, "0") not in ("", "0"):
        raise UsageError(
            f"with {RESPONSES_STORE} vLLM shows one key's responses to another; unset it, or no --api-keys-file"
        )


def serve(options: ServeOptions, flags: Sequence[str] = ()) -> NoReturn:
    """Become the server. Returns only by raising."""
    launch, settings = build_server_command(options, flags), options.settings
    checkpoint = find_checkpoint(settings.model, settings.dtype, settings.trust_remote_code)
    register_model(Path(settings.store), checkpoint.fingerprint, checkpoint.facts(), new_model=True)
    os.execvpe(launch.command[0], list(launch.command), {**os.environ, **launch.environment})
