"""Loading decisions of vLLM's scheduler: whether reuse is faster than full prefill, and its recompute ratio.

Workers read the stored KV, possibly in other processes, but the scheduler decides about requests. So a worker reports
the contents of its memory tier (`MemoryTierTracker`). `LoadingController` passes them to
`loading_controller.decide_reuse`. Depends on stores and keys, not on prompts or vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.tuning.loading_controller import MachineProfile, ReuseDecision, decide_reuse
from ragblend.engine.tuning.machine import vllm_machine_facts
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

    def __init__(self, machine: MachineProfile | None) -> None:
        self.machine = machine
        self._held: set[str] = set()  # keys in the workers' memory
        self._has_refused = False

    def apply_delta(self, change: MemoryTierDelta) -> None:
        """Apply a worker's report of its memory tier."""
        self._held.difference_update(change.removed)
        self._held.update(change.added)

    def decide(
        self,
        r_star: float,
        num_tokens: int,
        num_prefix: int,
        stored: Sequence[ChunkRun],
        probes_before_selection: bool = False,
    ) -> ReuseDecision:
        """Return the ratio at which to reuse `stored`, or the reason for full prefill if that is faster.

        The ratio is the largest whose recompute takes no longer than loading `stored`, but at least `r_star`, which is
        close enough to full prefill. `num_prefix`: number of tokens of the prefix, whose KV the workers have in memory.
        Requires a machine profile.
        """
        assert self.machine is not None
        # Entries of the remote tier have been fetched to the disk already.
        variants = [run.variant for run in stored if run.variant is not None]
        to_load = sum(variant.nbytes for variant in variants if variant.key not in self._held)
        num_stored = num_prefix + sum(run.num_tokens for run in stored)
        decision = decide_reuse(
            self.machine, r_star, num_tokens, num_stored, {"disk": to_load}, probes_before_selection
        )
        if decision.fallback_reason and not self._has_refused:
            log.warning(
                "stored KV is not used: %s. A faster disk would help; compare: ragblend plan", decision.fallback_reason
            )
            self._has_refused = True
        return decision


def machine_facts_of(vllm_config: Any) -> dict[str, Any]:
    """Return the facts about hardware and settings that identify this vLLM's machine profile."""
    from vllm.platforms import current_platform

    # torch.cuda would open a CUDA context in the scheduler's process.
    gpu = str(current_platform.get_device_name()) if current_platform.is_cuda_alike() else None
    return vllm_machine_facts(gpu, int(vllm_config.parallel_config.world_size))
