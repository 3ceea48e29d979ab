"""Loading decisions of vLLM's scheduler: whether reuse is faster, its recompute ratio, and which chunks to read ahead.

Workers read the stored KV, possibly in other processes, but the scheduler decides about requests. So a worker reports
the contents of its memory tier (`MemoryTierTracker`). `LoadingController` passes them to
`loading_controller.decide_reuse`. `ReadAheadQueue` selects chunks that the workers read while their disk is idle.
Depends on stores and keys, not on prompts or vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.tuning.loading_controller import MachineProfile, ReuseDecision, decide_reuse
from ragblend.engine.tuning.machine import vllm_machine_facts
from ragblend.engine.vllm.worker import StoredSpan

log = logging.getLogger(__name__)


class MemoryTierDelta(NamedTuple):
    """Keys added to and removed from a worker's memory tier since its last report."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class MemoryTierTracker:
    """Tracks the keys in a worker's memory tier, and reports changes."""

    def __init__(self, store: TieredStore) -> None:
        self._memory = store.memory_tier
        self._reported: frozenset[str] = frozenset()
        self._seen = (0, 0)

    def take_delta(self, is_forced: bool) -> MemoryTierDelta | None:
        """Return which keys were added and removed since the last call.

        Without changes, return None, or an empty MemoryTierDelta if `is_forced`.
        """
        seen = (self._memory.counters.num_puts, self._memory.nbytes()) if self._memory is not None else (0, 0)
        if self._memory is None or seen == self._seen:
            return MemoryTierDelta() if is_forced else None
        held = frozenset(self._memory.keys())
        change = MemoryTierDelta(tuple(held - self._reported), tuple(self._reported - held))
        self._seen, self._reported = seen, held
        return change


class LoadingController:
    """Decides for each request of a scheduler whether to reuse stored KV, and at what ratio.

    It uses the machine profile `machine`, and which keys the workers have in memory. Without a profile (None), every
    request keeps its own ratio. Workers report changes of their memory tier at each engine step. An idle engine has no
    steps, so a prefetch may change the tier without a report. `is_current` is then False until the next report, and
    `needs_refresh` makes the workers send one.
    """

    def __init__(self, machine: MachineProfile | None) -> None:
        self.machine = machine
        self._held: set[str] = set()  # keys in the workers' memory
        self._live: set[str] = set()  # requests in the engine
        self._has_refused = False
        self.is_current = False

    @property
    def needs_refresh(self) -> bool:
        """True if the workers must report their memory tier even without changes."""
        return self.machine is not None and not self.is_current

    def on_request_added(self, request_id: str) -> None:
        """Record that a request has entered the engine, with or without ragblend's parameters."""
        self.is_current = self.is_current and bool(self._live)
        self._live.add(request_id)

    def on_request_finished(self, request_id: str) -> None:
        """Record that a request has left the engine."""
        self._live.discard(request_id)

    def apply_delta(self, change: MemoryTierDelta) -> None:
        """Apply a worker's report."""
        self._held.difference_update(change.removed)
        self._held.update(change.added)
        self.is_current = True

    def is_in_memory(self, key: str) -> bool:
        """Return True if the entry is in the workers' memory tier."""
        return key in self._held

    def decide(
        self,
        r_star: float,
        num_tokens: int,
        num_prefix: int,
        stored: Sequence[StoredSpan],
        probes_before_selection: bool = False,
    ) -> ReuseDecision:
        """Return the ratio whose recompute is hidden behind loading `stored`, or the reason why full prefill is faster.

        r_star: the lowest ratio with good answers. num_prefix: number of tokens of the prefix, whose KV the workers
        hold in memory. Requires a machine profile.
        """
        assert self.machine is not None
        # Entries of the remote tier have been fetched to the disk already.
        to_load = sum(span.nbytes for span in stored if span.key not in self._held)
        num_stored = num_prefix + sum(span.end - span.start for span in stored)
        decision = decide_reuse(
            self.machine, r_star, num_tokens, num_stored, {"disk": to_load}, probes_before_selection
        )
        if decision.fallback_reason and not self._has_refused:
            log.warning(
                "stored KV is not used: %s. A faster disk would help; compare: ragblend plan", decision.fallback_reason
            )
            self._has_refused = True
        return decision


class ReadAheadQueue:
    """Selects chunks of waiting requests for the workers to read from disk into memory.

    Chunks are selected only while no request is being fused, because both would use the disk. The oldest request comes
    first. The chunks read for waiting requests take at most half of `memory_bytes`, the size of a worker's memory tier.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._limit = memory_bytes // 2
        self._waiting: dict[str, tuple[StoredSpan, ...]] = {}  # by request, oldest first
        self._passed: str | None = None  # the oldest request at the last step
        self._running: set[str] = set()
        self._read: dict[str, int] = {}  # bytes read ahead, by request

    @property
    def are_workers_busy(self) -> bool:
        """True while the workers fill the context of a running request, so that nothing is read ahead."""
        return bool(self._running)

    def on_request_queued(self, request_id: str, stored: Sequence[StoredSpan]) -> None:
        """Add a waiting request, which will need the chunks `stored`."""
        if self._limit:
            self._waiting[request_id] = tuple(stored)

    def on_request_started(self, request_id: str) -> None:
        """Move a request to the running ones. Its workers read its chunks now, so nothing is read ahead for it."""
        self.remove_request(request_id)
        self._running.add(request_id)

    def remove_request(self, request_id: str) -> None:
        """Remove a request: its context is filled, it was aborted, or vLLM computes it without the connector."""
        self._waiting.pop(request_id, None)
        self._read.pop(request_id, None)
        self._running.discard(request_id)

    def take_keys(self, loading: LoadingController) -> list[str]:
        """Return the keys of the entries to read ahead in this step; [] for none.

        They are those of the oldest waiting request, once it has waited for two steps.
        """
        if loading.needs_refresh:  # the request may only wait for the workers' report
            return []
        oldest = next(iter(self._waiting), None)
        is_due, self._passed = oldest == self._passed, oldest
        if oldest is None or not is_due or self._running or sum(self._read.values()) >= self._limit:
            return []
        found = {span.key: span.nbytes for span in self._waiting.pop(oldest) if not loading.is_in_memory(span.key)}
        if sum(found.values()) > self._limit:
            return []
        self._read[oldest] = sum(found.values())
        return list(found)


def machine_facts_of(vllm_config: Any) -> dict[str, Any]:
    """Return the facts about hardware and settings that identify this vLLM's machine profile."""
    from vllm.platforms import current_platform

    # torch.cuda would open a CUDA context in the scheduler's process.
    gpu = str(current_platform.get_device_name()) if current_platform.is_cuda_alike() else None
    return vllm_machine_facts(gpu, int(vllm_config.parallel_config.world_size))
