"""Checks of the soak test: each answer against its reference, and the servers' counters against the clients' sums.

An attempt is one request to one replica. Its outcome is `complete`, `left` (the client disconnected), `cut` (the
replica died, or sent an invalid answer) or `refused` (no connection, or an error status). The clients cannot observe
how far the engine processed an incomplete attempt. A counter therefore has a smallest and a largest right value, which
are equal if all attempts were complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, NamedTuple

from benchmarks.soak.deployment import OF_READING, ReplicaRun
from benchmarks.soak.work import ANSWER_TOKENS, TENANTS, Question, References, Text, subsets
from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.params import VllmMode

Outcome = Literal["complete", "left", "cut", "refused"]
BLOCK_TOKENS = 16
"""Smallest block of vLLM's KV cache. Only whole blocks of a prompt are cached."""


@dataclass(slots=True)
class Attempt:
    """One request to one replica, with its outcome."""

    replica: str
    tenant: str
    mode: VllmMode
    ratio: float | None
    question: Question
    is_fresh: bool  # its chunk was made during the run, so there is no reference for its answer
    start_s: float
    end_s: float = 0.0
    outcome: Outcome = "refused"
    token_ids: list[int] = field(default_factory=list)
    report: BlendReport | None = None
    top_logprobs: list[dict[str, float]] = field(default_factory=list)  # if they were asked for

    @property
    def max_tokens(self) -> int:
        """Return the number of tokens of a complete answer."""
        return 1 if self.mode == "ingest" else ANSWER_TOKENS

    @property
    def looks_up(self) -> bool:
        """Return True if the engine looks up the chunks of the prompt."""
        return self.mode in ("blend", "reuse")


class Stored:
    """Times of all ingestions, by namespace and chunk, and all prompts: they determine which hits are right."""

    def __init__(self) -> None:
        self._sent_s: dict[tuple[str, int], float] = {}
        self._done_s: dict[tuple[str, int, str], float] = {}
        self._removed_s: dict[tuple[str, int], float] = {}
        self._begun: list[Attempt] = []

    def begin(self, attempt: Attempt) -> None:
        """Record that the prompt of `attempt` is about to be sent. vLLM may cache its KV from this time."""
        self._begun.append(attempt)

    def may_be_cached(self, attempt: Attempt, num_tokens: int) -> bool:
        """Return True if the namespace has sent another prompt that begins with the same tokens to the same replica."""
        ids = attempt.question.token_ids[:num_tokens]
        return any(
            each is not attempt
            and (each.tenant, each.replica) == (attempt.tenant, attempt.replica)
            and each.question.token_ids[:num_tokens] == ids
            for each in self._begun.copy()
        )

    def sent(self, tenant: str, text: Text, now_s: float) -> None:
        """Record that an ingestion is about to be sent. From this time the chunk may be a hit in the namespace."""
        self._sent_s.setdefault((tenant, text.number), now_s)

    def done(self, tenant: str, text: Text, replica: str, now_s: float) -> None:
        """Record that a replica has confirmed an ingestion. From this time the chunk must be a hit there."""
        self._done_s.setdefault((tenant, text.number, replica), now_s)

    def remove(self, tenant: str, text: Text, now_s: float) -> None:
        """Record that a replica is about to delete a document's chunk, which no other ingestion has sent."""
        self._removed_s[tenant, text.number] = now_s

    def confirm_removal(self, tenant: str, text: Text) -> None:
        """Record that the chunk is deleted. From this time it may not be a hit."""
        self._sent_s.pop((tenant, text.number), None)

    def may_hit(self, attempt: Attempt, text: Text) -> bool:
        """Return True if the chunk was sent to the attempt's namespace before the attempt ended."""
        return self._sent_s.get((attempt.tenant, text.number), float("inf")) < attempt.end_s

    def must_hit(self, attempt: Attempt, text: Text) -> bool:
        """Return True if the attempt's replica had confirmed the chunk before the attempt began, and keeps it."""
        if self._removed_s.get((attempt.tenant, text.number), float("inf")) < attempt.end_s:
            return False
        return self._done_s.get((attempt.tenant, text.number, attempt.replica), float("inf")) < attempt.start_s

    def is_only_elsewhere(self, attempt: Attempt, text: Text) -> bool:
        """Return True if another namespace has ingested the chunk, and the attempt's namespace has not."""
        sent = self.namespaces()
        return not self.may_hit(attempt, text) and any((tenant, text.number) in sent for tenant in TENANTS)

    def namespaces(self) -> set[tuple[str, int]]:
        """Return (namespace, text number) of every ingestion that was sent."""
        return set(self._sent_s.copy())


class Ledger:
    """All attempts and their problems. Each attempt is checked when it ends. Threads may share a ledger."""

    def __init__(self, references: References, stored: Stored) -> None:
        self.attempts: list[Attempt] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._references, self.stored = references, stored
        self._lock = Lock()

    def record(self, attempt: Attempt) -> None:
        """Check an attempt that has ended, and keep it."""
        problems = judge(attempt, self._references, self.stored)
        with self._lock:
            self.attempts.append(attempt)
            self.counts[f"attempts_{attempt.outcome}"] += 1
            self.counts.update(kind for kind, _ in problems)
            self.problems += [f"{kind}: {what}" for kind, what in problems]
            if attempt.outcome == "complete":
                self.counts[f"answered_{attempt.mode}{'_at_1' if attempt.ratio == 1.0 else ''}"] += 1
                self._count_coverage(attempt)

    def _count_coverage(self, attempt: Attempt) -> None:
        """Count the cases that the attempt covers: answers compared, hits, and chunks of other namespaces."""
        if attempt.mode == "ingest" or attempt.report is None:
            return
        self.counts["answers_compared"] += has_reference(attempt)
        if attempt.looks_up:
            num_hits, num_chunks = attempt.report.num_chunk_hits, len(attempt.question.texts)
            self.counts[f"found_{'all' if num_hits == num_chunks else 'some' if num_hits else 'none'}"] += 1
            anothers = sum(self.stored.is_only_elsewhere(attempt, text) for text in attempt.question.texts)
            self.counts["chunks_only_others_have"] += anothers

    def count(self, name: str) -> None:
        """Count something that clients did."""
        with self._lock:
            self.counts[name] += 1

    def count_retry(self) -> None:
        """Count a retry of a request."""
        self.count("retries")

    def attempts_at(self, replica: str) -> list[Attempt]:
        """Return the ended attempts at one replica."""
        with self._lock:
            return [each for each in self.attempts if each.replica == replica]

    def fail(self, kind: str, what: str) -> None:
        """Record a problem that is not part of an attempt."""
        with self._lock:
            self.counts[kind] += 1
            self.problems.append(f"{kind}: {what}")


def judge(attempt: Attempt, references: References, stored: Stored) -> list[tuple[str, str]]:
    """Return the problems of an attempt that has ended, as (kind, sentence)."""
    report, question = attempt.report, attempt.question
    where = f"{attempt.mode} prompt {question.number} of {attempt.tenant} at {attempt.replica}"
    if attempt.outcome != "complete":
        return _judge_incomplete(attempt, references, where)
    if report is None:
        return [("without_report", where)]
    problems: list[tuple[str, str]] = []
    if report.refused_reason or report.failed or report.num_damaged_entries:
        problems.append(("refused", f"{where}: {report.refused_reason}, {report.num_damaged_entries} damaged"))
    if len(attempt.token_ids) != attempt.max_tokens:
        problems.append(("wrong_answers", f"{where}: {len(attempt.token_ids)} of {attempt.max_tokens} tokens"))
    if attempt.mode == "ingest":
        return problems
    if len(report.chunks) != (len(question.texts) if attempt.looks_up else 0):
        return [*problems, ("wrong_reports", f"{where}: {len(report.chunks)} chunks")]
    hits = frozenset(position for position, chunk in enumerate(report.chunks) if chunk.hit)
    if report.num_chunk_hits != len(hits):
        problems.append(("wrong_reports", f"{where}: {report.num_chunk_hits} hits, {sorted(hits)}"))
    if not attempt.looks_up:
        return problems + _compare_answer(attempt, references, [frozenset()], where)
    num_cached, cached = report.num_prefix_tokens, cached_chunks(question, report)
    if cached and not stored.may_be_cached(attempt, num_cached):
        problems.append(("foreign_hits", f"{where}: {num_cached} tokens were never sent there"))
    if report.mode == "prefix":  # vLLM had the beginning of the prompt exactly, and got the rest
        return problems + _compare_answer(attempt, references, [frozenset()], where)
    for position, text in enumerate(question.texts):
        if position in cached:
            continue
        if position in hits and not stored.may_hit(attempt, text):
            problems.append(("foreign_hits", f"{where}: chunk {text.number} was never ingested there"))
        elif position not in hits and stored.must_hit(attempt, text):
            problems.append(("lost_chunks", f"{where}: chunk {text.number} is stored there and was not found"))
    # A cached chunk was a hit or a miss when its KV was blended.
    possible = [hits - cached | found for found in [frozenset[int](), *subsets(len(question.texts))] if found <= cached]
    return problems + _compare_answer(attempt, references, possible, where)


def cached_chunks(question: Question, report: BlendReport) -> frozenset[int]:
    """Return the positions of the chunks that begin in the part of the prompt that vLLM's prefix cache had."""
    return frozenset(
        position for position, (start, _) in enumerate(question.spans()) if start < report.num_prefix_tokens
    )


def has_reference(attempt: Attempt) -> bool:
    """Return True if the right answers of a complete attempt are known.

    They are not for a chunk made during the run, and if later chunks were blended behind cached ones.
    """
    report = attempt.report
    if attempt.is_fresh or report is None:
        return False
    if not attempt.looks_up or report.mode == "prefix" or not cached_chunks(attempt.question, report):
        return True
    return report.num_prefix_tokens >= attempt.question.spans()[-1][1] // BLOCK_TOKENS * BLOCK_TOKENS


def _judge_incomplete(attempt: Attempt, references: References, where: str) -> list[tuple[str, str]]:
    """Return a problem if the received tokens begin no right answer, for any set of hits.

    The hits of an incomplete attempt are unknown, because its report is missing.
    """
    if not attempt.token_ids or attempt.is_fresh or attempt.mode == "ingest":
        return []
    possible = [frozenset[int](), *(subsets(len(attempt.question.texts)) if attempt.looks_up else ())]
    if not _compare_answer(attempt, references, possible, where):
        return []
    return [("wrong_answers", f"{where}, cut short: {attempt.token_ids}")]


def _compare_answer(
    attempt: Attempt, references: References, possible: Sequence[frozenset[int]], where: str
) -> list[tuple[str, str]]:
    """Return a problem if the answer is the right one for none of the `possible` sets of hits."""
    assert attempt.mode != "ingest"
    if attempt.outcome == "complete" and not has_reference(attempt):
        return []
    right = [references.of(attempt.question, attempt.mode, attempt.ratio, hits) for hits in possible]
    if any(each.agrees(attempt.token_ids) for each in right):
        return []
    tokens = [list(each.token_ids) for each in right]
    return [("wrong_answers", f"{where}, hits {[*map(sorted, possible)]}: {attempt.token_ids}, not {tokens}")]


class Sum(NamedTuple):
    """Value of one counter in one run of a replica, with the smallest and largest right value."""

    replica: str
    counter: str
    counted: float
    smallest: float
    largest: float

    @property
    def is_right(self) -> bool:
        """Return True if the counted value is within the bounds."""
        return self.smallest <= self.counted <= self.largest


def sums(run: ReplicaRun, attempts: Iterable[Attempt]) -> list[Sum]:
    """Compare the counters of `run` with the attempts that ended before the counters were read."""
    assert run.read_s is not None
    seen = [each for each in attempts if each.start_s >= run.start_s and each.end_s <= run.read_s]
    complete = [each for each in seen if each.outcome == "complete"]
    begun = [each for each in seen if each.outcome in ("left", "cut")]
    certain = complete + [each for each in begun if each.token_ids]
    reports = [each.report for each in complete if each.report is not None]
    asked = [each for each in complete if not _has_stored_new_kv(each)]
    num_ingested = len(complete) - len(asked)
    hits = sum(_report(each).num_chunk_hits for each in asked)
    looked = sum(len(each.question.texts) for each in asked if each.looks_up)
    found = sum(_report(each).num_chunk_hits for each in asked if each.looks_up)
    max_lookups = sum(len(each.question.texts) for each in begun if each.looks_up or each.mode == "ingest")
    asked_texts = (text for each in begun if each.mode != "ingest" for text in each.question.texts)
    num_tokens = sum(len(text.token_ids) for text in asked_texts)
    got = sum(len(each.token_ids) for each in seen)
    reused = sum(report.num_reused_tokens for report in reports)
    recomputed = sum(report.num_recomputed_tokens for report in reports)
    bounds = {
        "ragblend_requests_total": (len(certain), len(complete) + len(begun)),
        "finished_length": (len(complete), len(complete) + len(begun)),
        "finished_abort": (0, len(begun)),
        "finished_stop": (0, 0),
        "finished_error": (0, 0),
        "generation_tokens_total": (got, got + sum(each.max_tokens - len(each.token_ids) for each in begun)),
        "ragblend_chunk_hits_total": (hits, hits + max_lookups),
        "ragblend_chunk_misses_total": (looked - found, looked - found + max_lookups),
        "ragblend_ingested_chunks_total": (num_ingested, num_ingested + _count(begun, "ingest")),
        "ragblend_reused_tokens_total": (reused, reused + num_tokens),
        "ragblend_recomputed_tokens_total": (recomputed, recomputed + num_tokens),
        "ragblend_refused_requests_total": (0, 0),
        "ragblend_damaged_entries_total": (0, 0),
    }
    return [
        Sum(run.name, name, run.counters.get(name, 0.0) - OF_READING.get(name, 0), *bound)
        for name, bound in bounds.items()
    ]


def _has_stored_new_kv(attempt: Attempt) -> bool:
    """Return True if an ingestion computed and stored KV. A chunk that is already stored is a hit instead."""
    return attempt.mode == "ingest" and _report(attempt).num_chunk_hits == 0


def is_stored(attempt: Attempt) -> bool:
    """Return True if an ingestion was answered without refusal."""
    return attempt.report is not None and not attempt.report.refused_reason


def _report(attempt: Attempt) -> BlendReport:
    return attempt.report if attempt.report is not None else BlendReport("full")


def _count(attempts: Sequence[Attempt], mode: VllmMode) -> int:
    return sum(each.mode == mode for each in attempts)
