"""The simulation's caches against simpler ones that do the same, and against the analysis of the same trace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples

from ragblend.bench.traffic.analysis import analyze
from ragblend.bench.traffic.caches import BlockCache, LruTier, Tiers
from ragblend.bench.traffic.curve import Uses, lru_hits
from ragblend.bench.traffic.demand import Demand, DemandedChunk, demand_of
from ragblend.bench.traffic.deployment import Deployment, TierSizes
from ragblend.bench.traffic.generate import KINDS, Traffic, generate
from ragblend.bench.traffic.hashes import BLOCK
from ragblend.bench.traffic.reading import entries_read
from ragblend.bench.traffic.requests import NO_MARKS
from ragblend.bench.traffic.simulation import run
from ragblend.bench.traffic.tokens import Estimate
from ragblend.engine.tuning.pipeline import MachineProfile

PROFILE = MachineProfile("f", {"ranks": 1}, 32, 1 << 10, ((100.0, 0.1),), bytes_per_s={"disk": 1e12})


@given(lists(tuples(integers(0, 6), integers(1, 9)), max_size=80), integers(0, 30))
def test_a_tier_finds_what_a_list_in_order_of_use_finds(uses: list[tuple[int, int]], capacity: int) -> None:
    tier, held, sizes = LruTier(capacity), [], {}
    for key, size in uses:
        nbytes = sizes.setdefault(key, size)
        assert tier.get(key) == (key in held)
        if key in held:
            held.remove(key)
        elif nbytes > capacity:
            continue
        held.append(key)
        while sum(map(sizes.__getitem__, held)) > capacity:
            held.pop(0)
        tier.put(key, nbytes)
        assert tier.used_bytes == sum(map(sizes.__getitem__, held)) <= capacity


@settings(deadline=None)
@given(lists(lists(integers(0, 11), max_size=4, unique=True), min_size=1, max_size=40), integers(1, 12))
def test_memory_hits_of_one_replica_are_those_of_stack_distances(chosen: list[list[int]], capacity: int) -> None:
    """Chunks of one size, all on disk, one request at a time: the second, independent LRU is `ragblend analyze`'s."""
    demands = [
        Demand(n, 0.0, 1000, 1, chunks=tuple(DemandedChunk(key, 100) for key in keys)) for n, keys in enumerate(chosen)
    ]
    sizes = TierSizes(memory=capacity * 100 * PROFILE.bytes_per_token)
    jobs, _ = run(demands, [1e4 * n for n in range(len(demands))], Deployment(PROFILE, ingested=True, sizes=sizes), 1)
    order = [key for keys in chosen for key in keys]
    uses = Uses(np.arange(12) * 100, np.full(12, 100), np.array(order, np.int64), np.arange(len(order)))
    assert sum(job.tokens_from["memory"] for job in jobs) == lru_hits(uses, [capacity * 100])[0]
    assert not any(job.tokens_from["missing"] for job in jobs)


@given(lists(integers(0, 5), max_size=60), integers(1, 60))
def test_the_prefix_cache_forgets_the_ends_of_what_was_used_longest_ago(order: list[int], capacity: int) -> None:
    """One prompt at a time, of ten blocks each, three of them the same in all: against a list in order of use."""
    cache, held = BlockCache(capacity), []
    for number in order:
        keys = [place if place < 3 else 100 * (number + 1) + place for place in range(10)]
        known = next((n for n, key in enumerate(keys) if key not in held), 10)
        assert cache.num_known(keys) == known
        if not cache.enter(keys, 12):
            assert capacity < 12
            continue
        assert cache.num_used == 12 <= capacity
        held = [key for key in held if key not in keys]
        held = held[max(0, len(held) + 12 - capacity) :]
        cache.leave(keys, 12)
        held += reversed(keys)
        assert cache.num_used == 0


def test_blocks_of_running_requests_are_shared_and_stay() -> None:
    cache = BlockCache(20)
    assert cache.enter([1, 2, 3], 8)
    assert cache.enter([1, 2, 4], 8)
    assert cache.num_used == 14
    assert not cache.enter([5], 7)
    assert cache.num_known([1, 2, 3, 5]) == 3
    cache.leave([1, 2, 3], 8, answer=[6])
    assert cache.num_used == 8
    assert cache.num_known([1, 2, 3, 6]) == 4, "what was answered, too"
    assert cache.enter([5], 12)
    assert cache.num_known([1, 2, 3]) == 2, "3 and 6 made room, 1 and 2 are in use"


def test_tiers_promote_and_write_through() -> None:
    tiers = Tiers(100, 200, LruTier())
    tiers.put(1, 80)
    assert tiers.find(1, 80) == "memory"
    tiers.put(2, 90)
    assert tiers.find(1, 80) == "disk"
    tiers.put(3, 90)
    tiers.put(4, 90)
    assert not tiers.is_near(1)
    assert tiers.fetch(1, 80)
    assert tiers.find(1, 80) == "disk"
    assert tiers.find(1, 80) == "memory"
    assert not tiers.fetch(9, 80)
    assert tiers.find(9, 80) is None


def demands_of(traffic: Traffic) -> list[Demand]:
    tokens = Estimate()
    made = generate(traffic, lambda text: len(tokens.ids(text)))
    with entries_read("generated", made, tokens, NO_MARKS) as logs:
        return demand_of(logs.spool, tokens, 32)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_one_replica_finds_the_prefixes_that_the_analysis_finds(kind: str, tmp_path) -> None:
    """A request at a time and room for everything: prefix caching reuses what `ragblend analyze` says it would."""
    import json

    traffic = replace(KINDS[kind], num_sessions=min(60, KINDS[kind].num_sessions), seed=3)
    demands = demands_of(traffic)
    jobs, _ = run(demands, [1e6 * n for n in range(len(demands))], Deployment(PROFILE, "prefix"), 1)
    tokens, path = Estimate(), tmp_path / "log.jsonl"
    made = generate(traffic, lambda text: len(tokens.ids(text)))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in made), encoding="utf-8")
    found = analyze([path], Estimate())
    assert sum(job.num_prefix for job in jobs) == found.num_prefix > 0


def test_turns_of_a_conversation_are_one_session_and_questions_are_many() -> None:
    sessions = demands_of(replace(KINDS["sessions"], num_sessions=12))
    assert len({each.session for each in sessions}) == 12
    assert {sum(each.session == other.session for other in sessions) for each in sessions} == {6}
    questions = demands_of(replace(KINDS["questions"], num_sessions=30))
    assert len({each.session for each in questions}) == 30


def test_chunks_are_those_marked_or_passages_that_come_again() -> None:
    marked = demands_of(Traffic(num_sessions=40, num_documents=8, marked=True))
    assert {chunk.num_tokens for each in marked for chunk in each.chunks} <= set(range(110, 131))
    assert all(len(each.chunks) == 4 for each in marked)
    plain = demands_of(Traffic(num_sessions=40, num_documents=8))
    assert {each.num_tokens for each in plain} == {each.num_tokens for each in marked}
    late = slice(30, None)  # by then, every document has come
    share = sum(each.num_chunk_tokens for each in plain[late]) / sum(each.num_chunk_tokens for each in marked[late])
    assert 1 <= share < 1.2, "the system text comes again, too"


def test_what_was_missing_is_there_the_next_time_unless_it_is_not_stored() -> None:
    demands = [Demand(n, 0.0, 1000, 1, chunks=(DemandedChunk(7, 300),)) for n in range(3)]
    hourly = [3600.0 * n for n in range(3)]
    for stores, expected in ((True, ["missing", "memory", "memory"]), (False, ["missing"] * 3)):
        jobs, replicas = run(demands, hourly, Deployment(PROFILE, stores_misses=stores, adapts=False), 1)
        assert [next(iter(job.tokens_from)) for job in jobs] == expected
        assert replicas[0].num_ingested == stores
    two = run(demands, hourly, Deployment(PROFILE), 2)[0]
    assert [next(iter(job.tokens_from)) for job in two] == ["missing", "missing", "memory"]
    shared = Deployment(PROFILE, sizes=TierSizes(remote=math.inf))
    assert [next(iter(job.tokens_from)) for job in run(demands, hourly, shared, 2)[0]] == [
        "missing",
        "remote",
        "memory",
    ]


def test_the_last_token_is_never_taken_from_the_prefix_cache() -> None:
    blocks = tuple(range(1, 5))
    demands = [Demand(n, 0.0, 4 * BLOCK, 1, blocks) for n in range(2)]
    jobs, _ = run(demands, [0.0, 3600.0], Deployment(PROFILE, "prefix"), 1)
    assert [job.num_prefix for job in jobs] == [0, 3 * BLOCK]
