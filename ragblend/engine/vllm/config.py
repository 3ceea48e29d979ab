"""Configuration of the connector (`kv_connector_extra_config`), and the stores that it configures.

Shared by vLLM's scheduler, its workers, its HTTP front end and `engine`, so it does not import vllm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.config import Settings, read_environment, trusted_setting
from ragblend.engine.deletions import record_entries_on_put
from ragblend.engine.fusion.check_layers import validate_selection
from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.store.open import open_store
from ragblend.engine.store.tiered import TieredStore
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.option_fields import at_least, check_options, copy_option, option
from ragblend.options import (
    SELECTION_NAMES,
    TIER_NAMES,
    ContextPolicy,
    Deviation,
    GenerationOptions,
    LoadOptions,
    Mode,
    RatioChoice,
    SelectionOptions,
    TierOptions,
)
from ragblend.redaction import hide_address, printable


@dataclass(frozen=True, slots=True)
class ConnectorConfig(TierOptions):
    """Configuration of the connector: the fields of vLLM's `kv_connector_extra_config`.

    `memory_gib` is the size of each worker's memory tier. `mode`, `rule`, `ratio` and `refine_ratio` apply to requests
    that do not set them, SelectionOptions' fields to requests that set no rule, no ratio and none of these fields.
    Invalid values raise UsageError.
    """

    store: str = copy_option(Settings, "store")  # a directory that all processes of this vLLM can access
    mode: Mode = copy_option(GenerationOptions, "mode")  # "prefix": requests without parameters are left to vLLM
    rule: str = copy_option(GenerationOptions, "rule")
    ratio: RatioChoice = copy_option(GenerationOptions, "recompute_ratio")
    refine_ratio: float | None = copy_option(GenerationOptions, "refine_ratio")
    check_layers: Sequence[int] | None = copy_option(SelectionOptions, "check_layers")
    recompute_ratios: Sequence[float] | None = copy_option(SelectionOptions, "recompute_ratios")
    deviation: Deviation | None = copy_option(SelectionOptions, "deviation")
    deviation_thresholds: Sequence[float] | None = copy_option(SelectionOptions, "deviation_thresholds")
    blend_min_tokens: int | None = copy_option(SelectionOptions, "blend_min_tokens")
    prefix_ids: tuple[int, ...] = ()  # the prefix after which chunks are ingested
    context: ContextPolicy | None = copy_option(Settings, "context")  # None: the store's own
    slice_tokens: int = option(
        0, "Work between two engine steps, in tokens of an equal prefill. 0: max_num_batched_tokens.", at_least(0)
    )
    auto_profile: bool | None = copy_option(LoadOptions, "auto_profile")
    keys: str = ""  # path of the API keys file; with one, only requests that its gate has checked reuse KV

    def __post_init__(self) -> None:
        check_options(self)
        validate_selection(find_rule(self.rule), self.selection)
        object.__setattr__(self, "store", str(expand_user_path(self.store, "store")))

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Return the configuration in `extra`, vLLM's `kv_connector_extra_config`.

        TierOptions that are not in `extra` are read from RAGBLEND_* variables. Raises UsageError for unknown names and
        invalid values.
        """
        unknown = sorted(set(extra) - set(cls.__dataclass_fields__))
        if unknown:
            names = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"kv_connector_extra_config has {', '.join(unknown)}; known: {names}")
        lists = {"prefix_ids": tuple(extra.get("prefix_ids", ()))}
        # A remote tier's URL may contain a password, and every user of the machine can read a command line. So tiers
        # may also come from `RAGBLEND_*` variables.
        return cls(**{**read_environment(os.environ, TIER_NAMES), **extra, **lists})

    @property
    def selection(self) -> SelectionOptions:
        """Return the fields of SelectionOptions."""
        return SelectionOptions(**{name: getattr(self, name) for name in SELECTION_NAMES})

    def message_for_clients(self, error: BaseException) -> str:
        """Return an error's message, `printable`, without the store's paths on this machine.

        The addresses of the remote tier and the catalogue are removed, too. For an error that is not a RagblendError,
        the message names only the error's type.
        """
        if not isinstance(error, RagblendError):
            return f"{type(error).__name__}; see the server's log"
        text = str(error)
        for place in filter(None, (self.kv_dir, self.store)):
            for store in {str(Path(place).resolve()), str(Path(place).absolute()), place}:
                text = text.replace(store, "STORE")
        if self.remote is not None:
            text = hide_address(text, self.remote, "REMOTE")
        if (catalog := self.catalog or trusted_setting("catalog")) is not None:
            text = hide_address(text, catalog, "CATALOG")
        return printable(text)

    def open_tiers(self, *, memory: bool = False, fsync: bool = True) -> TieredStore:
        """Open the store: the disk tier, a remote tier if one is configured and, if `memory`, a memory tier."""
        tiers = {**self.tiers, "memory_gib": self.memory_gib if memory else 0.0}
        store = open_store(self.store, fsync=fsync, **tiers)
        record_entries_on_put(store)
        return store
