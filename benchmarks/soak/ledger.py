"""What the clients saw, held against what is right, and their sums, held against the servers' counters.

An attempt is one request to one replica. It is `complete`, `left` (the client hung up), `cut` (the replica died, or
said something broken) or `refused` (nobody was there). Of those that are not complete nobody knows how far the engine
came, so a counter has a smallest and a largest right value, and they are equal where everything was complete.
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


@dataclass(slots=True)
class Attempt:
    """One request to one replica, and what came of it."""

    replica: str
    tenant: str
    mode: VllmMode
    ratio: float | None
    question: Question
    is_fresh: bool  # of chunks that were made up on the way: there is no right answer to hold it against
    start_s: float
    end_s: float = 0.0
    outcome: Outcome = "refused"
    token_ids: list[int] = field(default_factory=list)
    report: BlendReport | None = None

    @property
    def max_tokens(self) -> int:
        """Tokens of a complete answer."""
        return 1 if self.mode == "ingest" else ANSWER_TOKENS

    @property
    def looks_up(self) -> bool:
        """Whether its chunks are looked for."""
        return self.mode in ("blend", "reuse")


class Stored:
    """Which chunk was ingested when, by namespace: what could be found, and what must be."""

    def __init__(self) -> None:
        self._sent_s: dict[tuple[str, int], float] = {}
        self._done_s: dict[tuple[str, int, str], float] = {}

    def sent(self, tenant: str, text: Text, now_s: float) -> None:
        """Its ingestion is about to be asked for. From now on it may be found in that namespace."""
        self._sent_s.setdefault((tenant, text.number), now_s)

    def done(self, tenant: str, text: Text, replica: str, now_s: float) -> None:
        """A replica has said that it is stored. From now on it must be found there."""
        self._done_s.setdefault((tenant, text.number, replica), now_s)

    def may_hit(self, attempt: Attempt, text: Text) -> bool:
        """Whether it can have been found."""
        return self._sent_s.get((attempt.tenant, text.number), float("inf")) < attempt.end_s

    def must_hit(self, attempt: Attempt, text: Text) -> bool:
        """Whether it is on the replica's own disk for sure."""
        return self._done_s.get((attempt.tenant, text.number, attempt.replica), float("inf")) < attempt.start_s

    def is_anothers(self, attempt: Attempt, text: Text) -> bool:
        """Whether another namespace has it, and the attempt's own cannot have."""
        sent = self.namespaces()
        return not self.may_hit(attempt, text) and any((tenant, text.number) in sent for tenant in TENANTS)

    def namespaces(self) -> set[tuple[str, int]]:
        """Everything that was ever asked to be ingested."""
        return set(self._sent_s.copy())


class Ledger:
    """Every attempt, judged when it ends. Safe to share between threads."""

    def __init__(self, references: References, stored: Stored) -> None:
        self.attempts: list[Attempt] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._references, self.stored = references, stored
        self._lock = Lock()

    def note(self, attempt: Attempt) -> None:
        """Judge an attempt that is over, and keep it."""
        problems = judge(attempt, self._references, self.stored)
        with self._lock:
            self.attempts.append(attempt)
            self.counts[f"attempts_{attempt.outcome}"] += 1
            self.counts.update(kind for kind, _ in problems)
            self.problems += [f"{kind}: {what}" for kind, what in problems]
            if attempt.outcome == "complete":
                self.counts[f"answered_{attempt.mode}{'_at_1' if attempt.ratio == 1.0 else ''}"] += 1
                self._note_variety(attempt)

    def _note_variety(self, attempt: Attempt) -> None:
        """How much there was to go wrong."""
        if attempt.mode == "ingest" or attempt.report is None:
            return
        self.counts["answers_compared"] += not attempt.is_fresh
        if attempt.looks_up:
            num_hits, num_chunks = attempt.report.num_chunk_hits, len(attempt.question.texts)
            self.counts[f"found_{'all' if num_hits == num_chunks else 'some' if num_hits else 'none'}"] += 1
            anothers = sum(self.stored.is_anothers(attempt, text) for text in attempt.question.texts)
            self.counts["chunks_only_others_have"] += anothers

    def retried(self) -> None:
        """A request goes to the other replica."""
        with self._lock:
            self.counts["retries"] += 1

    def of(self, replica: str) -> list[Attempt]:
        """Attempts at one replica that are over."""
        with self._lock:
            return [each for each in self.attempts if each.replica == replica]

    def fail(self, kind: str, what: str) -> None:
        """Note something that is wrong besides answers."""
        with self._lock:
            self.counts[kind] += 1
            self.problems.append(f"{kind}: {what}")


def judge(attempt: Attempt, references: References, stored: Stored) -> list[tuple[str, str]]:
    """What is wrong with an attempt that is over: kinds and words."""
    report, question = attempt.report, attempt.question
    where = f"{attempt.mode} prompt {question.number} of {attempt.tenant} at {attempt.replica}"
    if attempt.outcome != "complete":
        return _left_right(attempt, references, where)
    if report is None:
        return [("without_report", where)]
    problems: list[tuple[str, str]] = []
    if report.refused_reason or report.failed or report.num_damaged_entries:
        problems.append(("refused", f"{where}: {report.refused_reason}, {report.num_damaged_entries} damaged"))
    if len(attempt.token_ids) != attempt.max_tokens:
        problems.append(("wrong_answers", f"{where}: {len(attempt.token_ids)} of {attempt.max_tokens} tokens"))
    if attempt.mode == "ingest":
        return problems
    if len(report.chunks) != len(question.texts):
        return [*problems, ("wrong_reports", f"{where}: {len(report.chunks)} chunks")]
    hits = frozenset(position for position, chunk in enumerate(report.chunks) if chunk.hit)
    if report.num_chunk_hits != len(hits) or (hits and not attempt.looks_up):
        problems.append(("wrong_reports", f"{where}: {report.num_chunk_hits} hits, {sorted(hits)}"))
    for position, text in enumerate(question.texts):
        if position in hits and not stored.may_hit(attempt, text):
            problems.append(("foreign_hits", f"{where}: chunk {text.number} was never ingested there"))
        elif attempt.looks_up and position not in hits and stored.must_hit(attempt, text):
            problems.append(("lost_chunks", f"{where}: chunk {text.number} is stored there and was not found"))
    return problems if attempt.is_fresh else problems + _compared(attempt, references, hits, where)


def _left_right(attempt: Attempt, references: References, where: str) -> list[tuple[str, str]]:
    """What came before the client hung up must be the beginning of a right answer, whichever chunks were hits."""
    if not attempt.token_ids or attempt.is_fresh or attempt.mode == "ingest":
        return []
    possible = [frozenset[int](), *(subsets(len(attempt.question.texts)) if attempt.looks_up else ())]
    if any(not _compared(attempt, references, hits, where) for hits in possible):
        return []
    return [("wrong_answers", f"{where}, cut short: {attempt.token_ids}")]


def _compared(attempt: Attempt, references: References, hits: frozenset[int], where: str) -> list[tuple[str, str]]:
    assert attempt.mode != "ingest"
    right = references.of(attempt.question, attempt.mode, attempt.ratio, hits)
    if right.agrees(attempt.token_ids):
        return []
    return [("wrong_answers", f"{where}, hits {sorted(hits)}: {attempt.token_ids}, not {list(right.token_ids)}")]


class Sum(NamedTuple):
    """A counter of one life of a replica beside what its clients saw."""

    replica: str
    counter: str
    counted: float
    smallest: float
    largest: float

    @property
    def is_right(self) -> bool:
        """Whether it adds up."""
        return self.smallest <= self.counted <= self.largest


def sums(life: ReplicaRun, attempts: Iterable[Attempt]) -> list[Sum]:
    """Counters of `life` when they were read, which was with nothing under way, beside what clients saw until then."""
    assert life.read_s is not None
    seen = [each for each in attempts if each.start_s >= life.start_s and each.end_s <= life.read_s]
    complete = [each for each in seen if each.outcome == "complete"]
    begun = [each for each in seen if each.outcome in ("left", "cut")]
    certain = complete + [each for each in begun if each.token_ids]
    reports = [each.report for each in complete if each.report is not None]
    asked = [each for each in complete if not _is_new(each)]
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
        Sum(life.name, name, life.counters.get(name, 0.0) - OF_READING.get(name, 0), *bound)
        for name, bound in bounds.items()
    ]


def _is_new(attempt: Attempt) -> bool:
    """Whether it had a chunk computed and stored; one that is stored already is found instead."""
    return attempt.mode == "ingest" and _report(attempt).num_chunk_hits == 0


def is_stored(attempt: Attempt) -> bool:
    """Whether an ingestion was answered, and with success."""
    return attempt.report is not None and not attempt.report.refused_reason


def _report(attempt: Attempt) -> BlendReport:
    return attempt.report if attempt.report is not None else BlendReport("full")


def _count(attempts: Sequence[Attempt], mode: VllmMode) -> int:
    return sum(each.mode == mode for each in attempts)
