"""What vLLM's scheduler knows about loading: whether reuse pays, at which ratio, and what to read before its turn.

Stored KV is read by the workers, maybe in other processes; what each request does is decided in the scheduler. So a
worker tells which chunks are in its memory tier (`MemoryTierTracker`), `LoadingController` follows
`pipeline.decide_reuse` with that, and `ReadAheadQueue` names chunks that the workers may read while their disk has
nothing to do. Knows chunks by key and stores; knows no requests, no prompts and no vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.tuning.loading_controller import MachineProfile, ReuseDecision, decide_reuse
from ragblend.engine.tuning.machine import serving_facts
from ragblend.engine.vllm.worker import StoredSpan

log = logging.getLogger(__name__)


class MemoryTierDelta(NamedTuple):
    """Keys that came into a worker's memory tier and that left it, since it last told."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class MemoryTierTracker:
    """What of `store` is in memory, as seen by the worker that owns it."""

    def __init__(self, store: TieredStore) -> None:
        self._memory = store.memory_tier
        self._reported: frozenset[str] = frozenset()
        self._seen = (0, 0)

    def take_delta(self, is_forced: bool) -> MemoryTierDelta | None:
        """What is new since the last call, at every engine step; None where nothing is, unless `is_asked`."""
        seen = (self._memory.counters.num_puts, self._memory.nbytes()) if self._memory is not None else (0, 0)
        if self._memory is None or seen == self._seen:
            return MemoryTierDelta() if is_forced else None
        held = frozenset(self._memory.keys())
        change = MemoryTierDelta(tuple(held - self._reported), tuple(self._reported - held))
        self._seen, self._reported = seen, held
        return change


class LoadingController:
    """The loading controller of one scheduler: `pipeline.decide_reuse`, by what was measured on this machine.

    `machine` None: nothing was, and every request gets the ratio it asked for. What the workers hold is known from
    their reports, which come with every step that changed something. While the engine rests, a prefetch changes it
    unseen: after a rest `is_current` is False until the workers, asked with the next step (`needs_refresh`), have told
    again.
    """

    def __init__(self, machine: MachineProfile | None) -> None:
        self.machine = machine
        self._held: set[str] = set()  # keys in the workers' memory
        self._live: set[str] = set()  # requests in the engine
        self._has_refused = False
        self.is_current = False

    @property
    def needs_refresh(self) -> bool:
        """Whether the workers are to tell what they hold even if nothing has changed."""
        return self.machine is not None and not self.is_current

    def on_request_added(self, request_id: str) -> None:
        """A request is in the engine, one of ours or not."""
        self.is_current = self.is_current and bool(self._live)
        self._live.add(request_id)

    def on_request_finished(self, request_id: str) -> None:
        """It is no more."""
        self._live.discard(request_id)

    def apply_delta(self, change: MemoryTierDelta) -> None:
        """Take a worker's report."""
        self._held.difference_update(change.removed)
        self._held.update(change.added)
        self.is_current = True

    def holds(self, key: str) -> bool:
        """Whether the chunk is in the workers' memory."""
        return key in self._held

    def decide(
        self,
        r_star: float,
        num_tokens: int,
        num_prefix: int,
        stored: Sequence[StoredSpan],
        probes_before_selection: bool = False,
    ) -> ReuseDecision:
        """The ratio that hides behind loading `stored`, or why full prefill of the prompt is the faster way.

        r_star: the least ratio that answers well. num_prefix: the prompt's first tokens, whose KV the workers keep.
        """
        assert self.machine is not None
        # What the remote tier had is on the disk by now, as for the transformers engine.
        to_load = sum(span.nbytes for span in stored if span.key not in self._held)
        num_stored = num_prefix + sum(span.end - span.start for span in stored)
        decision = decide_reuse(
            self.machine, r_star, num_tokens, num_stored, {"disk": to_load}, probes_before_selection
        )
        if decision.fallback_reason and not self._has_refused:
            log.warning("stored KV is not used: %s. A faster disk helps; ragblend plan", decision.fallback_reason)
            self._has_refused = True
        return decision


class ReadAheadQueue:
    """Chunks of requests that wait for their turn in vLLM's queue, to be read into the workers' memory meanwhile.

    Only while no other request is being fused: that one's own loading would have to share the disk. The oldest first,
    and never more for requests that still wait than the memory tier holds.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._limit = memory_bytes // 2
        self._waiting: dict[str, tuple[StoredSpan, ...]] = {}  # by request, oldest first
        self._passed: str | None = None  # the oldest one, once a step has left it waiting
        self._running: set[str] = set()
        self._read: dict[str, int] = {}  # bytes by request

    @property
    def is_busy(self) -> bool:
        """Whether the workers are at some request whose turn has come."""
        return bool(self._running)

    def on_request_queued(self, request_id: str, stored: Sequence[StoredSpan]) -> None:
        """A request needs the chunks `stored` once its turn comes."""
        if self._limit:
            self._waiting[request_id] = tuple(stored)

    def on_request_started(self, request_id: str) -> None:
        """Its turn has come: the workers read what it needs."""
        self.on_request_done(request_id)
        self._running.add(request_id)

    def on_request_done(self, request_id: str) -> None:
        """Remove a request from the queue: its context is filled, or it was left to vLLM or aborted."""
        self._waiting.pop(request_id, None)
        self._read.pop(request_id, None)
        self._running.discard(request_id)

    def take(self, loading: LoadingController) -> list[str]:
        """After each step's scheduling: what to read now, of the request that has waited for two of them."""
        if loading.needs_refresh:  # it may wait for the answer alone
            return []
        oldest = next(iter(self._waiting), None)
        is_due, self._passed = oldest == self._passed, oldest
        if oldest is None or not is_due or self._running or sum(self._read.values()) >= self._limit:
            return []
        found = {span.key: span.nbytes for span in self._waiting.pop(oldest) if not loading.holds(span.key)}
        if sum(found.values()) > self._limit:
            return []
        self._read[oldest] = sum(found.values())
        return list(found)


def machine_facts_of(vllm_config: Any) -> dict[str, Any]:
    """What decides how fast this vLLM computes here: the same in all of its processes."""
    from vllm.platforms import current_platform

    # Not asked of torch: that would open a CUDA context in the scheduler's process.
    gpu = str(current_platform.get_device_name()) if current_platform.is_cuda_alike() else None
    return serving_facts(gpu, int(vllm_config.parallel_config.world_size))
