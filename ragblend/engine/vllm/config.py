"""What the connector is told: `kv_connector_extra_config`, and which tiers of the store follow from it.

Shared by vLLM's scheduler, its workers, its HTTP front end and `engine`, so it does not import vllm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.config import Settings, read_environment, trusted_setting
from ragblend.engine.base import record_entries
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.store.open import GIB, open_store
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import TieredStore
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import user_path
from ragblend.files.store_folder import DEFAULT_STORE
from ragblend.option_fields import at_least, check_options, copy_option, option
from ragblend.options import TIER_NAMES, ContextPolicy, GenerationOptions, Mode, RatioChoice, TierOptions
from ragblend.redaction import redact


@dataclass(frozen=True, slots=True)
class ConnectorConfig(TierOptions):
    """`kv_connector_extra_config`, checked at start. The memory tier is each worker's own."""

    store: str = DEFAULT_STORE  # a directory that all of this vLLM's processes see
    mode: Mode = copy_option(GenerationOptions, "mode")  # for requests that name none; "prefix": they are vLLM's alone
    rule: str = copy_option(GenerationOptions, "rule")  # for requests that name none
    ratio: RatioChoice = copy_option(GenerationOptions, "recompute_ratio")  # for the same
    namespace: str = ""  # for the same
    prefix_ids: tuple[int, ...] = ()  # what chunks are ingested behind, unless a prompt's own prefix has been used
    prefix: str = ""  # names those ids in the store (`DiskStore.put_prefix`), where a command line would be long
    context: ContextPolicy | None = copy_option(Settings, "context")  # None: what the store remembers
    slice_tokens: int = option(
        0, "Work between two engine steps, as a prefill of so many tokens; 0: max_num_batched_tokens.", at_least(0)
    )
    max_runs: int = option(  # backends size their buffers by max_num_seqs
        0, "Pseudo requests per attention call; 0: max_num_seqs.", at_least(0)
    )
    self_check: bool = True
    keys: str = ""  # the API keys' file; then requests without a key's namespace are left to vLLM

    def __post_init__(self) -> None:
        check_options(self)
        find_rule(self.rule)
        object.__setattr__(self, "store", str(user_path(self.store, "store")))

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """From `kv_connector_extra_config`, then the environment. Raises UsageError for names it does not know."""
        unknown = sorted(set(extra) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"kv_connector_extra_config has {', '.join(unknown)}; known: {known}")
        lists = {"prefix_ids": tuple(extra.get("prefix_ids", ()))}
        # Tiers that are left out are taken from `RAGBLEND_*`: a remote's URL may hold a password, and everybody on the
        # machine can read a command line.
        return cls(**{**read_environment(os.environ, TIER_NAMES), **extra, **lists})

    def for_clients(self, error: BaseException) -> str:
        """An error in words that may leave the server: places of this machine and of the remote tier left out."""
        if not isinstance(error, RagblendError):
            return f"{type(error).__name__}; the server's log says more"
        text = str(error)
        for place in filter(None, (self.kv_dir, self.store)):
            for store in {str(Path(place).resolve()), str(Path(place).absolute()), place}:
                text = text.replace(store, "STORE")
        if self.remote is not None:
            text = redact(text, echo_of=self.remote).replace(redact(self.remote), "REMOTE")
        if (catalog := self.catalog or trusted_setting("catalog")) is not None:
            text = redact(text, echo_of=catalog).replace(redact(catalog), "CATALOG")
        return text

    @property
    def memory_bytes(self) -> int:
        """Bytes of one worker's memory tier."""
        return int(self.memory_gib * GIB)

    def open_local(self, *, memory: bool = False, fsync: bool = True) -> TieredStore:
        """The store on this machine: the disk tier, behind a memory tier if asked for."""
        tiers = {**self.tiers, "memory_gib": self.memory_gib if memory else 0.0, "remote": None}
        store = open_store(self.store, fsync=fsync, **tiers)  # type: ignore[arg-type]
        record_entries(store)
        return store

    def open_remote(self) -> RemoteStore | None:
        """The remote tier, if there is one; nothing is asked of it yet."""
        return None if self.remote is None else open_remote(self.remote, timeout_s=self.remote_timeout_s)

    def open_shared(self) -> TieredStore:
        """Disk and remote: what is stored for every process, as a client of this vLLM asks about it."""
        remote = self.open_remote()
        return TieredStore(*self.open_local().tiers, *([remote] if remote is not None else []), kv_dtype=self.kv_dtype)
