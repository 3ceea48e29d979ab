"""What running servers do now, from their `/metrics`: `ragblend top`. Works on what Prometheus' own parser reads.

Counters say what happened since a server began; two looks say what happened between them. Read `between` first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ragblend.errors import BackendUnreachableError, UsageError
from ragblend.redaction import redacted

TIMEOUT_S = 5.0
_OURS = "vllm:ragblend_"
_IS_SOURCE = ("engine", "model_name")  # labels that tell servers and engines apart, over which everything is summed


@dataclass(frozen=True, slots=True)
class Look:
    """All samples of vLLM and ragblend of one or more servers, summed over these, and when that was."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]  # by name and labels
    models: tuple[str, ...]
    at_s: float  # of a clock that only goes forward

    def value(self, name: str, **labels: str) -> float:
        """Of that series, summed over labels that are not given; 0.0 where nobody has it: it counts from its first
        event."""
        wanted = set(labels.items())
        return sum(value for (known, found), value in self.samples.items() if known == name and wanted <= found)

    def labelled(self, name: str, label: str) -> list[str]:
        """The values that `label` has in that series, sorted."""
        return sorted(
            {dict(labels)[label] for known, labels in self.samples if known == name and label in dict(labels)}
        )

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram's: how many were at most so long, by that."""
        wanted, counts = set(labels.items()), defaultdict[float, float](float)
        for (known, found), value in self.samples.items():
            if known == f"{name}_bucket" and wanted <= found:
                counts[float(dict(found)["le"])] += value
        return counts


def look(urls: Sequence[str], api_key: str | None = None) -> Look:
    """What the servers' `/metrics` say. Raises BackendUnreachableError, or UsageError where it is no vLLM's."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
    models = set[str]()
    for url in urls:
        for family in text_string_to_metric_families(_metrics(url, api_key)):
            for sample in family.samples:
                if sample.name.startswith("vllm:"):
                    models |= {sample.labels["model_name"]} if "model_name" in sample.labels else set()
                    labels = frozenset((key, text) for key, text in sample.labels.items() if key not in _IS_SOURCE)
                    samples[sample.name, labels] += sample.value
        if not any(name.startswith("vllm:") for name, _ in samples):
            raise UsageError(f"{redacted(url)} has metrics, but none of vLLM's; give the address of a vLLM server")
    return Look(samples, tuple(sorted(models)), monotonic())


def _metrics(url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    shown = redacted(url)
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", headers=headers, timeout=TIMEOUT_S)
        answer.raise_for_status()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        remedy = "give a key that may: --api-key" if status in (401, 403) else "is it a vLLM server's address?"
        raise BackendUnreachableError(f"{shown}/metrics answers {status}; {remedy}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        told = str(error).rstrip(".") or type(error).__name__
        raise BackendUnreachableError(f"{shown}/metrics does not answer: {told}; is the server running?") from error
    return answer.text


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a duration: how often, and quantiles in seconds (see `quantile`). None: no event."""

    count: int
    median: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class TierNow:
    """A tier of the store: bytes it holds, and what it did, per second."""

    nbytes: float
    hits_s: float
    evictions_s: float


@dataclass(frozen=True, slots=True)
class Now:
    """What the servers do. Names that end in `_s` are per second, over `seconds`; of a first look, which has no second
    one to compare with, they are totals since the servers began, and `seconds` is None."""

    models: tuple[str, ...]
    seconds: float | None
    waiting: int
    running: int
    to_fill: int  # requests whose context is still to be filled
    finished_s: float
    asked_s: float  # requests that asked for ragblend
    refused_s: float  # of them, answered by ordinary prefill
    chunk_hits_s: float
    chunk_misses_s: float
    ingested_s: float
    reused_tokens_s: float
    recomputed_tokens_s: float
    prompt_tokens_s: float
    generated_tokens_s: float
    remote_hits_s: float
    remote_failures_s: float
    remote_dropped_s: float
    damaged: int  # entries, since the servers began
    ttft: dict[str, Spread] = field(default_factory=dict)  # by mode, "any" for all requests
    parts: dict[str, Spread] = field(default_factory=dict)  # load, fuse, stall of those that asked
    tiers: dict[str, TierNow] = field(default_factory=dict)

    @property
    def found(self) -> float | None:
        """Share of the chunks looked for that were stored; None where none was looked for."""
        looked = self.chunk_hits_s + self.chunk_misses_s
        return self.chunk_hits_s / looked if looked else None

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "found": self.found}


def between(before: Look | None, after: Look) -> Now:
    """What happened between two looks, and how things stand at the second; without a first, since the beginning."""
    seconds = None if before is None else max(1e-9, after.at_s - before.at_s)

    def since(name: str, **labels: str) -> float:
        # A server that began anew counts from nothing: what it has counted is what has happened.
        old, new = 0.0 if before is None else before.value(name, **labels), after.value(name, **labels)
        return new - old if new >= old else new

    def rate(name: str, **labels: str) -> float:
        return since(name, **labels) / (seconds or 1.0)

    def spread(name: str, **labels: str) -> Spread:
        old, new = {} if before is None else before.buckets(name, **labels), after.buckets(name, **labels)
        if any(count < old.get(end, 0.0) for end, count in new.items()):
            old = {}
        counts = sorted((end, count - old.get(end, 0.0)) for end, count in new.items())
        return Spread(int(counts[-1][1]) if counts else 0, quantile(counts, 0.5), quantile(counts, 0.95))

    ttft = f"{_OURS}request_ttft_seconds"
    tiers = after.labelled(f"{_OURS}store_bytes", "tier") + after.labelled(f"{_OURS}tier_hits_total", "tier")
    return Now(
        models=after.models,
        seconds=seconds,
        waiting=int(after.value("vllm:num_requests_waiting")),
        running=int(after.value("vllm:num_requests_running")),
        to_fill=int(after.value(f"{_OURS}blend_queue")),
        finished_s=rate("vllm:request_success_total"),
        asked_s=rate(f"{_OURS}requests_total"),
        refused_s=rate(f"{_OURS}refused_requests_total"),
        chunk_hits_s=rate(f"{_OURS}chunk_hits_total"),
        chunk_misses_s=rate(f"{_OURS}chunk_misses_total"),
        ingested_s=rate(f"{_OURS}ingested_chunks_total"),
        reused_tokens_s=rate(f"{_OURS}reused_tokens_total"),
        recomputed_tokens_s=rate(f"{_OURS}recomputed_tokens_total"),
        prompt_tokens_s=rate("vllm:prompt_tokens_total"),
        generated_tokens_s=rate("vllm:generation_tokens_total"),
        remote_hits_s=rate(f"{_OURS}remote_hits_total"),
        remote_failures_s=rate(f"{_OURS}remote_failures_total"),
        remote_dropped_s=rate(f"{_OURS}remote_dropped_writes_total"),
        damaged=int(after.value(f"{_OURS}damaged_entries_total")),
        ttft={
            "any": spread("vllm:time_to_first_token_seconds"),
            **{mode: spread(ttft, mode=mode) for mode in after.labelled(f"{ttft}_count", "mode")},
        },
        parts={part: spread(f"{_OURS}request_{part}_seconds") for part in ("load", "fuse", "stall")},
        tiers={
            tier: TierNow(
                after.value(f"{_OURS}store_bytes", tier=tier),
                rate(f"{_OURS}tier_hits_total", tier=tier),
                rate(f"{_OURS}tier_evictions_total", tier=tier),
            )
            for tier in dict.fromkeys(tiers)
        },
    )


def quantile(counts: Iterable[tuple[float, float]], share: float) -> float | None:
    """Of a histogram's cumulative counts by upper end, ascending; None where nothing was counted.

    Linear within a bucket, the last finite end beyond it: as Prometheus' `histogram_quantile` has it.

    >>> counts = [(0.1, 0.0), (0.5, 10.0), (1.0, 20.0), (math.inf, 21.0)]
    >>> quantile(counts, 0.5), round(quantile(counts, 0.25), 2), quantile(counts, 0.99), quantile([], 0.5)
    (0.525, 0.31, 1.0, None)
    """
    known = list(counts)
    if not known or known[-1][1] <= 0:
        return None
    rank, start, below = share * known[-1][1], 0.0, 0.0
    for end, count in known:
        if count >= rank:
            if math.isinf(end) or count == below:
                return start
            return start + (end - start) * (rank - below) / (count - below)
        start, below = end, count
    return start
