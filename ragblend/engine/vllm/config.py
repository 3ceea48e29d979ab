"""What the connector is told: `kv_connector_extra_config`, and which tiers of the store follow from it.

Shared by vLLM's scheduler, its workers, its HTTP front end and `engine`, so it does not import vllm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragblend.config import read_environment
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.report import RatioChoice
from ragblend.engine.store.open import GIB, open_store
from ragblend.engine.store.quantize import KvDtype
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.vllm.params import check_ratio_choice
from ragblend.errors import UsageError

TIER_SETTINGS = ("memory_gib", "disk_gib", "remote", "remote_timeout_s", "kv_dtype")
"""Taken from `RAGBLEND_*` where `kv_connector_extra_config` leaves them out: a remote's URL may hold a password, and
everybody on the machine can read a command line."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """`kv_connector_extra_config`, checked at start."""

    store: str = "ragblend-data/kv"  # a directory that all of this vLLM's processes see
    memory_gib: float = 2.0  # of the memory tier, per worker
    disk_gib: float = 0.0  # this and the following as in `open_store`
    remote: str | None = None
    remote_timeout_s: float = 5.0
    kv_dtype: KvDtype = "auto"
    rule: str = "auto"  # for requests that name none, and those marked by separators
    ratio: RatioChoice = None  # for the same; None or "auto": what was calibrated, else the default
    namespace: str = ""  # for requests marked by separators
    prefix_ids: tuple[int, ...] = ()  # what chunks are ingested behind, unless a prompt's own prefix has been used
    separator_ids: tuple[int, ...] = ()  # marks chunks in the prompts of clients that send only text
    separator_end_ids: tuple[int, ...] = ()  # see vllm_params.spans_between
    slice_tokens: int = 0  # work between two engine steps, as a prefill of so many tokens; 0: max_num_batched_tokens
    max_runs: int = 0  # pseudo requests per attention call; 0: max_num_seqs, which backends size their buffers by
    self_check: bool = True

    def __post_init__(self) -> None:
        check_ratio_choice(self.ratio)
        find_rule(self.rule)
        for name in ("memory_gib", "disk_gib", "slice_tokens", "max_runs"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 0 or more")

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """From `kv_connector_extra_config`, then the environment. Raises UsageError for names it does not know."""
        unknown = sorted(set(extra) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"kv_connector_extra_config has {', '.join(unknown)}; known: {known}")
        lists = {name: tuple(value) for name, value in extra.items() if name.endswith("_ids")}
        return cls(**{**read_environment(os.environ, TIER_SETTINGS), **extra, **lists})

    @property
    def memory_bytes(self) -> int:
        """Bytes of one worker's memory tier."""
        return int(self.memory_gib * GIB)

    def open_local(self, *, memory: bool = False, fsync: bool = True) -> TieredStore:
        """The store on this machine: the disk tier, behind a memory tier if asked for."""
        return open_store(
            self.store,
            memory_gib=self.memory_gib if memory else 0.0,
            disk_gib=self.disk_gib,
            kv_dtype=self.kv_dtype,
            fsync=fsync,
        )

    def open_remote(self) -> RemoteStore | None:
        """The remote tier, if there is one; nothing is asked of it yet."""
        return None if self.remote is None else open_remote(self.remote, timeout_s=self.remote_timeout_s)

    def open_shared(self) -> TieredStore:
        """Disk and remote: what is stored for every process, as a client of this vLLM asks about it."""
        remote = self.open_remote()
        return TieredStore(*self.open_local().tiers, *([remote] if remote is not None else []), kv_dtype=self.kv_dtype)
