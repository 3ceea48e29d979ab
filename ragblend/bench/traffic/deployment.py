"""What is simulated: a machine's times, how vLLM batches, what the tiers hold, and how requests are answered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from ragblend.bench.traffic.saving import BY_THE_PAPER, Kind
from ragblend.engine.tuning.pipeline import Curve, Decision, MachineProfile, decide, interpolate
from ragblend.errors import UsageError

Router = Literal["round-robin", "least-queue", "session", "chunk"]
ROUTERS: tuple[Router, ...] = get_args(Router)
SimulatedMode = Literal["full", "prefix", "blend"]
SIMULATED_MODES: tuple[SimulatedMode, ...] = get_args(SimulatedMode)


class TierSizes(NamedTuple):
    """Bytes of each replica's memory and disk, and of the remote tier that all share; None where there is none."""

    memory: float = 2 << 30
    disk: float = math.inf
    remote: float | None = None


class Remote(NamedTuple):
    """The way to the remote tier, one for all replicas: what waits for it is sent in the order it was asked for."""

    bytes_per_s: float = 1e9
    latency_s: float = 0.001


class Batching(NamedTuple):
    """How vLLM is served: tokens of one step, requests at a time, and tokens of the paged KV."""

    batch_tokens: int = 2048
    max_seqs: int = 256
    paged_tokens: float = math.inf


BATCHING, TIER_SIZES, REMOTE = Batching(), TierSizes(), Remote()


@dataclass(frozen=True, slots=True)
class Deployment:
    """One kind of replica, and what all of them share. Knows no requests.

    decode_s: (requests in a step, seconds of the step). overhead_s: per request before it is in the engine's queue, in
    processes beside the engine. `adapts`: the ratio is the one that hides behind loading, `kind.ratio` at least, and
    a request that full prefill answers faster is prefilled, as engines do it that were given no ratio.
    """

    profile: MachineProfile
    mode: SimulatedMode = "blend"
    router: Router = "round-robin"
    kind: Kind = BY_THE_PAPER
    adapts: bool = False
    decode_s: Curve = ((1.0, 0.0),)
    overhead_s: float = 0.0
    batching: Batching = BATCHING
    sizes: TierSizes = TIER_SIZES
    remote: Remote = REMOTE
    ingested: bool = False  # every chunk is stored before the first request
    stores_misses: bool = True  # a chunk that is missing is precomputed behind the request, as clients have it done
    seed: int = 0

    def __post_init__(self) -> None:
        numbers: Mapping[str, float] = {
            "batch_tokens": self.batching.batch_tokens, "max_seqs": self.batching.max_seqs,
            "paged_tokens": self.batching.paged_tokens, "the remote tier's speed": self.remote.bytes_per_s,
        }  # fmt: skip
        for name, value in numbers.items():
            if not value > 0:
                raise UsageError(f"{name} is {value}; choose more than 0")
        seconds = {"overhead_s": self.overhead_s, "the remote tier's latency": self.remote.latency_s}
        sizes = {f"the {name} tier": value for name, value in self.sizes._asdict().items() if value is not None}
        for name, value in {**seconds, **sizes}.items():
            if not value >= 0:
                raise UsageError(f"{name} is {value}; choose 0 or more")
        if not self.decode_s or min(map(min, self.decode_s)) < 0:
            raise UsageError(f"a decoding step takes {self.decode_s}; choose 0 seconds or more (--decode)")

    def step_s(self, num_running: int) -> float:
        """Seconds of a step that decodes a token for each of so many requests."""
        return interpolate(self.decode_s, num_running) if num_running else 0.0

    def decision(self, num_tokens: int, num_stored: int, load_bytes: int) -> Decision:
        """Ratio, loading and computing of a prompt of which `num_stored` tokens are stored, `load_bytes` on disk."""
        profile, (ratio, asks_first, speed) = self.profile, self.kind
        if self.adapts:
            return decide(profile, ratio, num_tokens, num_stored, {"disk": load_bytes}, asks_first)
        load_s = load_bytes / speed if speed else 0.0
        full_s = profile.full_s(num_tokens)
        return Decision(ratio, "", load_s, profile.recompute_s(ratio, num_tokens, num_stored), full_s)

    def blend_s(self, decision: Decision) -> float:
        """Seconds of it, loading beside computing."""
        return self.profile.blend_s(decision.load_s, decision.recompute_s, self.kind.asks_first)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; what has no limit is null."""
        facts = asdict(self) | {"profile": self.profile.as_dict()}
        for name in ("kind", "batching", "sizes", "remote"):
            facts[name] = {key: _finite(value) for key, value in getattr(self, name)._asdict().items()}
        return facts


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value
