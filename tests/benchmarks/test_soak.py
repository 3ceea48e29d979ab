"""The judge of `benchmarks.soak`: it finds wrong answers, hits of other namespaces, lost chunks and wrong counters."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak.deployment import OF_READING, ReplicaRun, counters_in
from benchmarks.soak.ledger import Attempt, Ledger, Stored, has_reference, judge, sums
from benchmarks.soak.memory import Sample, growth
from benchmarks.soak.work import Question, Reference, References, Text
from ragblend.engine.report import BlendReport, ChunkReport
from ragblend.prompt.types import Prompt

TEXTS = (Text(0, (5, 6), ("acme", "globex")), Text(1, (7, 8), ("globex",)))
QUESTION = Question(0, Prompt([], "?"), (1, 5, 6, 7, 8, 9), TEXTS)
FULL, BLENDED = tuple(range(10, 18)), tuple(range(20, 28))
REFERENCES = References(
    {
        (0, "full", frozenset()): Reference(FULL),
        (0, "blend", frozenset({0})): Reference(BLENDED),
        (0, "blend", frozenset({1})): Reference(FULL[:3]),
        (0, "blend", frozenset({0, 1})): Reference(FULL[:1]),
    },
    5.0,
)


def report(*hits: int, mode: Any = "blend", **more: Any) -> BlendReport:
    is_matched = hits or mode not in ("full", "prefix")
    chunks = [ChunkReport("", 2, hit=position in hits) for position in range(2)] if is_matched else []
    return BlendReport(mode, num_chunks=len(chunks), num_chunk_hits=len(hits), chunks=chunks, **more)


def attempt(*hits: int, tokens: tuple[int, ...] = BLENDED, mode: Any = "blend", **more: Any) -> Attempt:
    values = {"ratio": None, "is_fresh": False, "end_s": 20.0, "outcome": "complete", **more}
    found = values.pop("report", report(*hits, mode=mode))
    start_s = values.pop("start_s", 10.0)
    return Attempt(
        "replica-0", "acme", mode, question=QUESTION, start_s=start_s, token_ids=list(tokens), report=found, **values
    )


def stored(*ingested: tuple[str, int, float, float]) -> Stored:
    found = Stored()
    for tenant, number, sent_s, done_s in ingested:
        found.sent(tenant, TEXTS[number], sent_s)
        found.done(tenant, TEXTS[number], "replica-0", done_s)
    return found


def cached(tenant: str, token_ids: tuple[int, ...]) -> Stored:
    found = stored()
    found.begin(replace(attempt(), tenant=tenant, question=replace(QUESTION, token_ids=token_ids)))
    return found


FIRST = stored(("acme", 0, 1.0, 2.0))
LEFT = report(0, mode="prefix", num_prefix_tokens=3)
"""vLLM had three tokens exactly in its prefix cache, and got the rest of the prompt."""
RESUMED = report(0, 1, num_prefix_tokens=5)
"""vLLM had blended KV of both chunks in its prefix cache."""


def kinds(found: Attempt, chunks: Stored = FIRST) -> list[str]:
    return [kind for kind, _ in judge(found, REFERENCES, chunks)]


@pytest.mark.parametrize(
    ("found", "chunks", "problems"),
    [
        (attempt(0), FIRST, []),
        (attempt(tokens=FULL, mode="full"), FIRST, []),
        (attempt(0, tokens=FULL, ratio=1.0), FIRST, []),
        (attempt(0, ratio=1.0), FIRST, ["wrong_answers"]),  # at ratio 1.0 it must be full prefill's
        (attempt(0, tokens=FULL), FIRST, ["wrong_answers"]),  # full prefill's, though a chunk was reused
        (attempt(tokens=BLENDED), stored(), ["wrong_answers"]),  # reuse's, though nothing was a hit
        (attempt(tokens=FULL), stored(), []),
        (attempt(0, tokens=BLENDED[:7]), FIRST, ["wrong_answers"]),  # too short
        # A hit of what was never ingested in that namespace, or sent after the answer had come.
        (attempt(0, 1, tokens=FULL), stored(("acme", 0, 1, 2), ("globex", 1, 1, 2)), ["foreign_hits"]),
        (attempt(0), stored(("acme", 0, 20.5, 21.0)), ["foreign_hits"]),
        # A miss of what the replica stores, but neither of what was not there yet nor of the other replica's.
        (attempt(tokens=FULL), FIRST, ["lost_chunks"]),
        (attempt(tokens=FULL), stored(("acme", 0, 1.0, 10.5)), []),
        (replace(attempt(tokens=FULL), replica="replica-1"), FIRST, []),
        (attempt(tokens=FULL, mode="prefix"), FIRST, []),
        # What vLLM has exactly comes from a prompt of the same namespace, and the answer is full prefill's.
        (attempt(tokens=FULL, report=LEFT), cached("acme", (1, 5, 6, 4)), []),
        (attempt(tokens=BLENDED, report=LEFT), cached("acme", (1, 5, 6, 4)), ["wrong_answers"]),
        (attempt(tokens=FULL, report=LEFT), cached("globex", (1, 5, 6, 4)), ["foreign_hits"]),
        (attempt(tokens=FULL, report=LEFT), cached("acme", (1, 5, 7, 4)), ["foreign_hits"]),
        # A chunk whose blended KV an earlier prompt of the namespace left was a hit or a miss of that one.
        (attempt(0, 1, report=RESUMED), cached("acme", QUESTION.token_ids), []),
        (attempt(0, 1, tokens=(99,) * 8, report=RESUMED), cached("acme", QUESTION.token_ids), ["wrong_answers"]),
        (attempt(0, 1, report=RESUMED), cached("globex", QUESTION.token_ids), ["foreign_hits"]),
        # Reports that cannot be.
        (attempt(0, report=None), FIRST, ["without_report"]),
        (attempt(0, report=report(0, refused_reason="no")), FIRST, ["refused"]),
        (attempt(0, report=replace(report(0), num_chunk_hits=2)), FIRST, ["wrong_reports"]),
        (attempt(0, tokens=FULL, mode="full"), FIRST, ["wrong_reports"]),
        # Tokens that arrive before a client disconnects are the beginning of a right answer.
        *(
            (attempt(tokens=tokens, outcome="left", report=None), FIRST, problems)
            for tokens, problems in [
                ((), []), (BLENDED[:3], []), (FULL[:2], []), ((11,), ["wrong_answers"]), ((20, 11), ["wrong_answers"]),
            ]
        ),
    ],
)  # fmt: skip
def test_an_attempt_has_the_problems_that_it_should_have(found, chunks, problems):
    assert kinds(found, chunks) == problems


@pytest.mark.parametrize(
    ("num_cached", "mode", "is_known"),
    [(1, "blend", True), (48, "blend", False), (80, "blend", True), (48, "prefix", True)],
)
def test_chunks_blended_behind_cached_ones_have_no_reference(num_cached, mode, is_known):
    texts = tuple(Text(number, tuple(range(100 * number, 100 * number + 40)), ("acme",)) for number in (1, 2))
    question = Question(0, Prompt([], "?"), (1, *texts[0].token_ids, *texts[1].token_ids, 9), texts)
    found = replace(attempt(report=report(0, 1, mode=mode, num_prefix_tokens=num_cached)), question=question)
    assert has_reference(found) is is_known
    assert not has_reference(replace(found, is_fresh=True))


@pytest.mark.parametrize("position", range(8))
def test_one_other_token_is_a_wrong_answer(position):
    assert kinds(attempt(0, tokens=(*BLENDED[:position], 99, *BLENDED[position + 1 :]))) == ["wrong_answers"]


def life(attempts: list[Attempt], **off: float) -> Any:
    found = ReplicaRun("replica-0 1", 0.0, read_s=100.0)
    for each in sums(found, attempts):
        found.counters[each.counter] = each.smallest + OF_READING.get(each.counter, 0) + off.get(each.counter, 0.0)
    return found


SEEN = [
    attempt(0, report=report(0, num_reused_tokens=2, num_recomputed_tokens=1)),
    attempt(tokens=FULL, mode="full"),
    attempt(tokens=(1,), mode="ingest"),
    attempt(tokens=(1,), mode="ingest", report=report(0, mode="full")),  # it was there already
]


@pytest.mark.parametrize("counter", [each.counter for each in sums(ReplicaRun("x", 0.0, read_s=100.0), SEEN)])
def test_a_counter_that_is_one_off_does_not_add_up(counter):
    assert all(each.is_right for each in sums(life(SEEN), SEEN))
    for off in (1.0, -1.0):
        wrong = [each.counter for each in sums(life(SEEN, **{counter: off}), SEEN) if not each.is_right]
        assert wrong == [counter]


def test_sums_are_of_what_was_answered():
    found = {each.counter: each.smallest for each in sums(ReplicaRun("x", 0.0, read_s=100.0), SEEN)}
    assert found["ragblend_requests_total"] == found["finished_length"] == 4
    assert (found["ragblend_chunk_hits_total"], found["ragblend_chunk_misses_total"]) == (2, 1)
    assert found["ragblend_ingested_chunks_total"] == 1
    assert (found["ragblend_reused_tokens_total"], found["ragblend_recomputed_tokens_total"]) == (2, 1)
    assert found["generation_tokens_total"] == 18


def test_only_what_was_left_leaves_room_in_a_counter():
    left = attempt(tokens=(), outcome="left", report=None)
    begun = attempt(tokens=BLENDED[:3], outcome="left", report=None)
    refused = attempt(tokens=(), outcome="refused", report=None)
    bounds = {
        each.counter: each[3:] for each in sums(ReplicaRun("x", 0.0, read_s=100.0), [*SEEN, left, begun, refused])
    }
    assert bounds["ragblend_requests_total"] == (5, 6)
    assert bounds["finished_length"] == (4, 6)
    assert bounds["ragblend_chunk_hits_total"] == (2, 6)
    assert bounds["generation_tokens_total"] == (21, 21 + 8 + 5)


def test_attempts_of_another_life_do_not_count():
    lives = [ReplicaRun("x", 0.0, read_s=15.0), ReplicaRun("x", 21.0, read_s=100.0)]
    assert all(each.largest == 0 for one in lives for each in sums(one, SEEN))


@given(st.floats(0.5, 50), st.integers(0, 2**32))
def test_growth_beyond_the_noise_is_seen(slope, seed):
    dice = random.Random(seed)
    samples = [Sample(n * 10, int((500 + slope * n / 100 + dice.gauss(0, 0.2)) * 2**20)) for n in range(1000)]
    found = growth("engine", samples)
    assert found.slope == pytest.approx(slope, abs=0.1)
    assert found.is_flat is False


def test_memory_that_is_taken_while_warming_up_is_no_growth():
    dice = random.Random(0)
    samples = [Sample(n, int((500 + min(n, 300) + dice.gauss(0, 0.2)) * 2**20)) for n in range(1000)]
    found = growth("engine", samples)
    assert found.is_flat
    assert found.slope == pytest.approx(0, abs=0.2)
    assert found.first_mib < 505
    assert found.warm_mib > 790


def test_too_few_samples_have_no_slope():
    assert growth("engine", [Sample(0, 1 << 20), Sample(10, 2 << 20)]).is_flat is None


def test_a_ledger_counts_what_it_is_told():
    ledger = Ledger(REFERENCES, FIRST)
    for each in (attempt(0), attempt(0, tokens=FULL), attempt(tokens=(), outcome="cut", report=None)):
        ledger.record(each)
    ledger.count_retry()
    ledger.fail("errors", "500")
    counts = ledger.counts
    assert (counts["answered_blend"], counts["answers_compared"], counts["found_some"]) == (2, 2, 2)
    assert (counts["wrong_answers"], counts["attempts_cut"], counts["retries"], counts["errors"]) == (1, 1, 1, 1)
    assert [problem.partition(":")[0] for problem in ledger.problems] == ["wrong_answers", "errors"]


def test_series_are_summed_over_their_labels():
    text = 'vllm:hits_total{tier="disk"} 2.0\nvllm:hits_total{tier="memory"} 3.0\nvllm:hits_created{tier="disk"} 1e9\n'
    assert counters_in(text) == {"hits_total": 5.0}


def test_a_deleted_chunk_may_miss_after_its_deletion_but_never_hit():
    chunks = stored(("acme", 0, 1.0, 2.0))
    chunks.remove("acme", TEXTS[0], 9.0)
    assert not chunks.must_hit(attempt(0), TEXTS[0])
    assert kinds(attempt(0), chunks) == []
    chunks.confirm_removal("acme", TEXTS[0])
    assert kinds(attempt(0), chunks) == ["foreign_hits"]
    assert chunks.namespaces() == set()
