"""Which entries leave a full tier: the least recently used, or those whose bytes save the least work.

Pure arithmetic over keys, bytes and counts: a `Ledger` is what a tier knows of its entries, the tiers do the removing.
`gdsf` is greedy-dual-size-frequency as in RAGCache (Jin et al. 2024): an entry's priority is clock + frequency x
recompute cost / bytes, and the clock rises to the priority of whatever leaves, so that entries nobody asks for any more
grow old.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, get_args

from ragblend.engine.store.kv import KVHeader
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
    """The order in which entries leave, of all and of each group, while they are used. Not safe between threads."""

    def __init__(self, policy: Policy = "lru") -> None:
        if policy not in get_args(Policy):
            raise UsageError(f"eviction is {policy!r}; choose one of {', '.join(get_args(Policy))}")
        self.policy = policy
        self._clock = 0.0
        self._ticks = 0
        self._known: dict[str, _Use] = {}
        self._heaps: dict[str, list[_Item]] = {}  # by group, with stale items, recognised by their tick
        self._num_items = 0

    def use(self, key: str, worth: float = 0.0, group: str = "", at_s: float | None = None) -> None:
        """Note a use. worth: recompute cost / bytes, which only gdsf looks at. at_s: when, for lru; None is now.

        Give `at_s` with every use of a ranking or with none: otherwise a use is as late as its turn.
        """
        self._ticks += 1
        known = self._known.get(key)
        num_uses = known.num_uses + 1 if known is not None else 1
        if self.policy == "gdsf":
            priority = self._clock + num_uses * worth
        else:
            priority = float(self._ticks) if at_s is None else at_s
        self._known[key] = use = _Use(priority, self._ticks, num_uses, group)
        heapq.heappush(self._heaps.setdefault(group, []), (use.priority, use.tick, key))
        self._num_items += 1
        if self._num_items > 2 * len(self._known) + 64:
            self._tidy()

    def _tidy(self) -> None:
        self._heaps = {}
        for key, use in self._known.items():
            self._heaps.setdefault(use.group, []).append((use.priority, use.tick, key))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._num_items = len(self._known)

    def evicted(self, key: str) -> None:
        """Note that an entry left for want of room: the clock rises to its priority."""
        if key in self._known:
            self._clock = max(self._clock, self._known[key].priority)
        self.forget(key)

    def forget(self, key: str) -> None:
        """Note that an entry was deleted."""
        self._known.pop(key, None)

    def used_s(self, key: str) -> float:
        """When a known entry was used last, for lru with times; otherwise its place in the order."""
        return self._known[key].priority

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[str]:
        """Keys, the first to leave first. What is taken from it and kept costs a heap step, nothing more."""
        return (key for _, _, key in heapq.merge(*map(self._items, list(self._heaps))))

    def of(self, group: str) -> Iterator[str]:
        """The keys of one group, in the same order."""
        return (key for _, _, key in self._items(group))

    def _items(self, group: str) -> Iterator[_Item]:
        heap, kept = self._heaps.get(group, []), []
        try:
            while heap:
                item = heapq.heappop(heap)
                _, tick, key = item
                if key in self._known and self._known[key].tick == tick:
                    kept.append(item)
                    yield item
                else:
                    self._num_items -= 1
        finally:
            for item in kept:
                heapq.heappush(heap, item)


class _Use(NamedTuple):
    priority: float
    tick: int  # of the last use
    num_uses: int
    group: str


_Item = tuple[float, int, str]  # priority, tick, key


class Held(NamedTuple):
    """An entry that a tier holds. cost: to prefill it again, see `recompute_cost`."""

    nbytes: int
    namespace: str
    cost: float = 0.0


class Ledger:
    """What a tier holds, in all and by namespace, and what is to leave: so that a `put` looks at no other entry.

    A budget of None is no limit. Not safe between threads.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        policy: Policy = "lru",
        quotas: int | Mapping[str, int] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.quotas = Quotas(quotas)
        self.ranking = Ranking(policy)
        self.used_bytes = 0
        self._held: dict[str, Held] = {}
        self._used: dict[str, int] = {}  # bytes by namespace

    def hold(self, key: str, held: Held, at_s: float | None = None) -> None:
        """Note an entry, new or in place of an older one, as used."""
        self._subtract(self._held.pop(key, None))
        self._held[key] = held
        self.used_bytes += held.nbytes
        self._used[held.namespace] = self._used.get(held.namespace, 0) + held.nbytes
        self.use(key, at_s)

    def use(self, key: str, at_s: float | None = None) -> None:
        """Note a use of an entry that is held."""
        held = self._held[key]
        self.ranking.use(key, held.cost / max(1, held.nbytes), held.namespace, at_s)

    def drop(self, key: str, *, evicted: bool = False) -> bool:
        """Note that an entry is gone; whether it was held. `evicted`: for want of room."""
        held = self._held.pop(key, None)
        self._subtract(held)
        if evicted:
            self.ranking.evicted(key)
        else:
            self.ranking.forget(key)
        return held is not None

    def _subtract(self, held: Held | None) -> None:
        if held is not None:
            self.used_bytes -= held.nbytes
            self._used[held.namespace] -= held.nbytes

    def used_of(self, namespace: str) -> int:
        """Bytes that a namespace holds."""
        return self._used.get(namespace, 0)

    def excess(self, key: str, new: Held, more_bytes: int = 0) -> tuple[int, int]:
        """By how many bytes `key` would exceed the budget, and its namespace its quota; 0 or less where it fits.

        more_bytes: what the budget holds beside the entries.
        """
        old = self._held.get(key, Held(0, ""))
        own_bytes = self.used_of(new.namespace) - (old.nbytes if old.namespace == new.namespace else 0)
        total_bytes = self.used_bytes - old.nbytes + more_bytes
        capacity, quota = self.capacity_bytes, self.quotas.of(new.namespace)
        return (
            0 if capacity is None else total_bytes + new.nbytes - capacity,
            0 if quota is None else own_bytes + new.nbytes - quota,
        )

    def to_leave(self, key: str, new: Held, pinned: AbstractSet[str], more_bytes: int = 0) -> list[str] | None:
        """Entries to remove so that `key` fits, first to leave first; None when pinned ones leave no room for it."""
        excess_bytes, over_bytes = self.excess(key, new, more_bytes)
        leaving = choose_victims(self._candidates, {*pinned, key}, excess_bytes, {new.namespace: over_bytes})
        freed = [self._held[each] for each in leaving]
        own_freed = sum(each.nbytes for each in freed if each.namespace == new.namespace)
        return leaving if sum(each.nbytes for each in freed) >= excess_bytes and own_freed >= over_bytes else None

    def _candidates(self, namespace: str | None) -> Iterator[Candidate]:
        """Entries that could leave, of all or of one namespace, the first to leave first."""
        for key in self.ranking if namespace is None else self.ranking.of(namespace):
            held = self._held[key]
            yield Candidate(key, held.nbytes, held.namespace)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Candidate(NamedTuple):
    """An entry that could leave."""

    key: str
    nbytes: int
    namespace: str


def choose_victims(
    candidates: Callable[[str | None], Iterable[Candidate]],
    spared: AbstractSet[str],
    excess_bytes: int,
    excess_by_namespace: Mapping[str, int],
) -> list[str]:
    """Keys to remove, first to leave first: each namespace over its quota pays with its own, then everybody.

    `candidates` yields entries in the order in which they leave: those of one namespace, of None all. Those in `spared`
    (pinned) stay, so that what is chosen may be less than the excess.
    """
    chosen: dict[str, None] = {}
    for namespace, over_bytes in excess_by_namespace.items():
        for entry in candidates(namespace) if over_bytes > 0 else ():
            if over_bytes <= 0:
                break
            if entry.key not in spared:
                chosen[entry.key] = None
                over_bytes -= entry.nbytes
                excess_bytes -= entry.nbytes
    for entry in candidates(None) if excess_bytes > 0 else ():
        if excess_bytes <= 0:
            break
        if entry.key not in spared and entry.key not in chosen:
            chosen[entry.key] = None
            excess_bytes -= entry.nbytes
    return list(chosen)
