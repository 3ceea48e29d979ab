"""Loading decisions of vLLM's scheduler: which chunks are fetched and loaded, or full prefill, and rule and ratio.

Workers read the stored KV, possibly in other processes, but the scheduler decides about requests. So a worker reports
the contents of its memory tier (`MemoryTierTracker`). `LoadingController` passes them to
`loading_controller.decide_reuse`. Depends on stores and keys, not on prompts or vLLM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragblend.engine.fusion.rules import find_rule
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.tuning.loading_controller import (
    LoadableChunk,
    MachineProfile,
    ReuseDecision,
    RuleChoice,
    decide_reuse,
    tier_speeds,
)
from ragblend.engine.tuning.machine import vllm_machine_facts
from ragblend.engine.vllm.scheduler_side.lookup import MissingVariants
from ragblend.prompt.types import ChunkRun

log = logging.getLogger(__name__)


class MemoryTierDelta(NamedTuple):
    """Keys added to and removed from a worker's memory tier since its last report."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class MemoryTierTracker:
    """Tracks the keys in a worker's memory tier, and reports changes."""

    def __init__(self, store: TieredStore) -> None:
        self._memory = store.find_tier(MemoryStore)
        self._reported: frozenset[str] = frozenset()
        self._seen = (0, 0)

    def take_delta(self) -> MemoryTierDelta | None:
        """Return which keys were added and removed since the last call; None without changes."""
        if self._memory is None:
            return None
        seen = (self._memory.counters.num_puts, self._memory.nbytes())
        if seen == self._seen:
            return None
        keys = frozenset(self._memory.keys())
        change = MemoryTierDelta(tuple(keys - self._reported), tuple(self._reported - keys))
        self._seen, self._reported = seen, keys
        return change


class LoadingController:
    """Decides for each request of a scheduler whether to reuse stored KV, and at what ratio.

    The decision depends on the machine profile `machine`, and on the keys in the workers' memory tiers, which the
    workers report at each engine step. Without a profile (None), every request keeps its own ratio.
    """

    def __init__(self, machine: MachineProfile | None, store: TieredStore | None = None) -> None:
        self.machine = machine
        self._store = store  # its remote tier measures the scheduler's fetches
        self._held: set[str] = set()  # keys in the workers' memory
        self._has_refused = False
        self._prefetches: list[str] = []  # keys of chunks that were too slow to load

    def apply_delta(self, change: MemoryTierDelta) -> None:
        """Apply a worker's report of its memory tier."""
        self._held.difference_update(change.removed)
        self._held.update(change.added)

    def stored_chunks(self, stored: Sequence[ChunkRun]) -> list[LoadableChunk]:
        """Return the runs with a variant on this machine, as chunks in the workers' memory or on the disk."""
        return [
            LoadableChunk("memory" if run.variant.key in self._held else "disk", run.num_tokens, run.variant.nbytes)
            for run in stored
            if run.variant is not None
        ]

    def prefetch_unused(self, stored: Sequence[ChunkRun], decision: ReuseDecision) -> None:
        """Queue those of the `stored` runs that `decision` does not use and workers do not have in memory."""
        unused = (run.variant for at, run in enumerate(stored) if at not in decision.used)
        self._prefetches += [each.key for each in unused if each is not None and each.key not in self._held]

    def take_prefetches(self) -> list[str]:
        """Return the queued keys, which workers load into memory for later requests."""
        keys, self._prefetches = self._prefetches, []
        return keys

    def fetchable_chunks(self, runs: Sequence[ChunkRun], missing: Sequence[MissingVariants]) -> list[LoadableChunk]:
        """Return the runs as chunks on the disk, or in the remote tier if this machine has no variant of them."""
        assert self.machine is not None
        nbytes = self.machine.bytes_per_token
        return [
            LoadableChunk("disk" if each.is_local else "remote", run.num_tokens, run.num_tokens * nbytes)
            for run, each in zip(runs, missing, strict=True)
        ]

    def decide(
        self, tunings: Sequence[RequestTuning], num_tokens: int, num_prefix: int, chunks: Sequence[LoadableChunk]
    ) -> ReuseDecision:
        """Return the decision of `decide_reuse` on a request.

        `tunings`: of the rules that it may choose. `num_prefix`: number of tokens of the prefix, whose KV the workers
        have in memory. Requires a machine profile. Chunks of the remote tier are fetched whole, onto the disk, before
        workers read them.
        """
        assert self.machine is not None
        speeds = tier_speeds(self.machine, self._store.read_speeds if self._store is not None else {})
        if "remote" in speeds:
            speeds["remote"] = speeds["remote"]._replace(range_bytes=math.inf)
        rules = [
            RuleChoice(each.rule, each.recompute_ratio, find_rule(each.rule).probes_before_selection)
            for each in tunings
        ]
        decision = decide_reuse(self.machine, rules, num_tokens, num_prefix, chunks, speeds)
        if decision.fallback_reason and not self._has_refused:
            log.warning(
                "stored KV is not used: %s. A faster tier would help; compare: ragblend plan", decision.fallback_reason
            )
            self._has_refused = True
        return decision


def machine_facts_of(vllm_config: Any) -> dict[str, Any]:
    """Return the facts about hardware and settings that identify this vLLM's machine profile."""
    from vllm.platforms import current_platform

    # torch.cuda would open a CUDA context in the scheduler's process.
    gpu = str(current_platform.get_device_name()) if current_platform.is_cuda_alike() else None
    return vllm_machine_facts(gpu, int(vllm_config.parallel_config.world_size))
