"""Which entries leave a full tier: the least recently used, or those whose bytes save the least work.

Pure arithmetic over keys, bytes and counts; the tiers do the removing. `gdsf` is greedy-dual-size-frequency as in
RAGCache (Jin et al. 2024): an entry's priority is clock + frequency x recompute cost / bytes, and the clock rises to
the priority of whatever leaves, so that entries nobody asks for any more grow old.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, get_args

from ragblend.engine.kv import KVHeader
from ragblend.errors import UsageError

Policy = Literal["lru", "gdsf"]

_ATTENTION_TOKENS = 16_384
"""Context at which a token's attention costs as much as the rest of its layer: 6 x hidden size, about 2,700 wide."""


def recompute_cost(header: KVHeader) -> float:
    """Work to prefill a chunk behind its prefix again, in tokens of a short prompt: attention makes long ones dearer.

    >>> recompute_cost(KVHeader("k", "m", (), tuple(range(512)), 1, "float32"))
    520.0
    """
    mean_context = len(header.prefix_ids) + header.num_tokens / 2
    return header.num_tokens * (1 + mean_context / _ATTENTION_TOKENS)


class Quotas:
    """Bytes each namespace may hold: one number for all, or by namespace (those not named are free)."""

    def __init__(self, quotas: int | Mapping[str, int] | None) -> None:
        self._all = quotas if isinstance(quotas, int) else None
        self._by_namespace = dict(quotas) if isinstance(quotas, Mapping) else {}
        for namespace, nbytes in {"": self._all or 0, **self._by_namespace}.items():
            if nbytes < 0:
                raise UsageError(f"the quota of namespace {namespace!r} is {nbytes} bytes; choose 0 or more")

    def __bool__(self) -> bool:
        return self._all is not None or bool(self._by_namespace)

    def of(self, namespace: str) -> int | None:
        """Bytes that `namespace` may hold; None when it has no quota."""
        return self._by_namespace.get(namespace, self._all)


class Ranking:
    """The order in which entries leave, kept while they are used. Not safe between threads."""

    def __init__(self, policy: Policy = "lru") -> None:
        if policy not in get_args(Policy):
            raise UsageError(f"eviction is {policy!r}; choose one of {', '.join(get_args(Policy))}")
        self.policy = policy
        self._clock = 0.0
        self._ticks = 0
        self._known: dict[str, tuple[float, int, int]] = {}  # priority, tick of the last use, number of uses
        self._heap: list[tuple[float, int, str]] = []  # with stale items, recognised by their tick

    def use(self, key: str, worth: float = 0.0) -> None:
        """Note a use. worth: recompute cost / bytes, which only gdsf looks at."""
        self._ticks += 1
        num_uses = self._known[key][2] + 1 if key in self._known else 1
        priority = self._clock + num_uses * worth if self.policy == "gdsf" else float(self._ticks)
        self._known[key] = priority, self._ticks, num_uses
        heapq.heappush(self._heap, (priority, self._ticks, key))
        if len(self._heap) > 2 * len(self._known) + 64:
            self._heap = [(priority, tick, key) for key, (priority, tick, _) in self._known.items()]
            heapq.heapify(self._heap)

    def evicted(self, key: str) -> None:
        """Note that an entry left for want of room: the clock rises to its priority."""
        if key in self._known:
            self._clock = max(self._clock, self._known[key][0])
        self.forget(key)

    def forget(self, key: str) -> None:
        """Note that an entry was deleted."""
        self._known.pop(key, None)

    def rank(self, key: str) -> tuple[float, int]:
        """Sorts entries by when they leave; one that was never used here ranks as at the clock's start."""
        priority, tick, _ = self._known.get(key, (0.0, 0, 0))
        return priority, tick

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[str]:
        """Keys, the first to leave first. What is taken from it and kept costs a heap step, nothing more."""
        kept = []
        try:
            while self._heap:
                item = heapq.heappop(self._heap)
                _, tick, key = item
                if key in self._known and self._known[key][1] == tick:
                    kept.append(item)
                    yield key
        finally:
            for item in kept:
                heapq.heappush(self._heap, item)


class Candidate(NamedTuple):
    """An entry that could leave."""

    key: str
    nbytes: int
    namespace: str


def choose_victims(
    candidates: Callable[[], Iterable[Candidate]],
    spared: AbstractSet[str],
    excess_bytes: int,
    excess_by_namespace: Mapping[str, int],
) -> list[str]:
    """Keys to remove, first to leave first: each namespace over its quota pays with its own, then everybody.

    `candidates` yields entries in the order in which they leave. Those in `spared` (pinned) stay, so that what is
    chosen may be less than the excess.
    """
    chosen: dict[str, None] = {}
    for namespace, over_bytes in excess_by_namespace.items():
        for entry in candidates() if over_bytes > 0 else ():
            if over_bytes <= 0:
                break
            if entry.namespace == namespace and entry.key not in spared:
                chosen[entry.key] = None
                over_bytes -= entry.nbytes
                excess_bytes -= entry.nbytes
    for entry in candidates() if excess_bytes > 0 else ():
        if excess_bytes <= 0:
            break
        if entry.key not in spared and entry.key not in chosen:
            chosen[entry.key] = None
            excess_bytes -= entry.nbytes
    return list(chosen)
