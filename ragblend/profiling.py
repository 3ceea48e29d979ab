"""Measure what the loading controller needs to know of a model on this machine: `ragblend profile`.

Full prefill at several lengths, blending at several ratios from memory, and what each tier reads. Read
`measure_machine`. The chunks are random token ids, and nothing of them stays in the store.
"""

from __future__ import annotations

import random
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from ragblend.config import Settings
from ragblend.engine.controller import MachineProfile
from ragblend.engine.decoding import Sampling
from ragblend.engine.disk import DiskStore
from ragblend.engine.generation import Request
from ragblend.engine.kv import ChunkKV, MemoryKV, in_memory
from ragblend.engine.machine import drop_page_cache, machine_facts, profile_path, read_profile
from ragblend.engine.protocols import KVStore
from ragblend.engine.remote import RemoteStore
from ragblend.engine.report import Mode
from ragblend.engine.selection import DEFAULT_RATIO
from ragblend.engine.store import MemoryStore
from ragblend.engine.transformers_engine import TransformersEngine
from ragblend.errors import BackendUnreachableError, NotFoundError, UsageError
from ragblend.segments import Segment, TokenizedPrompt

Tell = Callable[[str], None]

RATIOS = (0.0, DEFAULT_RATIO, 0.5, 1.0)
QUESTION_TOKENS = 32

_REMOTE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Effort:
    """What to measure on: prompts of up to `num_chunks` chunks of `chunk_tokens` tokens, each timed `repeats` times."""

    num_chunks: int = 6
    chunk_tokens: int = 512
    repeats: int = 3
    ratios: tuple[float, ...] = RATIOS
    rule: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Chunks per prompt at which full prefill is timed: one, half of them, all."""
        return tuple(sorted({1, (self.num_chunks + 1) // 2, self.num_chunks}))


def measure_machine(
    engine: TransformersEngine,
    effort: Effort = Effort(),
    *,
    directory: Path | None = None,
    remote: RemoteStore | None = None,
    tell: Tell = lambda line: None,
) -> MachineProfile:
    """Time `engine`'s model, the disk that holds `directory` and `remote`; tiers that are not given are left out.

    Medians; modes take turns, so that a machine that gets slower slows them alike. Raises UsageError for prompts
    beyond the model's context, BackendUnreachableError for a remote that does not take or give the chunks.
    """
    works = {count: _Work(engine, effort, count) for count in effort.lengths}
    longest = works[effort.num_chunks]
    num_tokens = longest.prompt.num_tokens
    if num_tokens >= engine.context_length:
        raise UsageError(
            f"{effort.num_chunks} chunks of {effort.chunk_tokens} tokens make prompts of {num_tokens}, {engine.name} "
            f"reads {engine.context_length}; choose fewer or shorter ones (--chunks, --chunk-tokens)"
        )
    tell(f"precomputing {effort.num_chunks} chunks of {effort.chunk_tokens} tokens")
    longest.precompute()
    tell("timing full prefill and blending")
    full_s, blend_s = _times(list(works.values()), effort)
    speeds: dict[str, float] = {}
    if directory is not None:
        tell(f"reading from the disk of {directory}")
        speeds["disk"] = statistics.median(disk_speed(directory, longest.stored) for _ in range(effort.repeats))
    if remote is not None:
        tell(f"reading from {remote.values.url}")
        speeds["remote"] = remote_speed(remote, longest.stored)
    return MachineProfile(
        fingerprint=engine.fingerprint,
        hardware=machine_facts(engine.layers.device),
        num_layers=engine.layers.num_layers,
        bytes_per_token=engine.bytes_per_token,
        prefill_s=tuple(full_s.items()),
        shares=tuple((ratio, seconds / full_s[num_tokens]) for ratio, seconds in blend_s.items()),
        bytes_per_s=speeds,
    )


def _times(works: Sequence[_Work], effort: Effort) -> tuple[dict[float, float], dict[float, float]]:
    """Median seconds of full prefill by prompt tokens, and of blending the longest prompt, the last, by ratio."""
    longest = works[-1]
    longest.prefill_s("full")  # warm-up
    longest.prefill_s("blend", DEFAULT_RATIO)
    full: dict[float, list[float]] = {work.prompt.num_tokens: [] for work in works}
    blend: dict[float, list[float]] = {ratio: [] for ratio in effort.ratios}
    for _ in range(effort.repeats):
        for work in works:
            full[work.prompt.num_tokens].append(work.prefill_s("full"))
        for ratio in effort.ratios:
            blend[ratio].append(longest.prefill_s("blend", ratio))
    return _medians(full), _medians(blend)


class _Work:
    """One prompt of random chunks, for an engine that shares the model but keeps its KV in a memory tier of its own."""

    def __init__(self, engine: TransformersEngine, effort: Effort, num_chunks: int) -> None:
        draw, vocabulary = random.Random(0), engine.layers.config.vocab_size
        self.chunks = [_ids(draw, effort.chunk_tokens, vocabulary) for _ in range(num_chunks)]
        prefix = engine.default_prefix_ids
        segments = [Segment("prefix", prefix, 0)] if prefix else []
        for chunk in (*self.chunks, _ids(draw, QUESTION_TOKENS, vocabulary)):
            start = segments[-1].end if segments else 0
            segments.append(Segment("chunk", chunk, start))
        question = segments.pop()
        self.prompt = TokenizedPrompt((*segments, Segment("suffix", question.token_ids, question.start)))
        self._rule = effort.rule
        self._engine = TransformersEngine(
            engine.layers,
            engine.segmenter,
            MemoryStore(1 << 50),
            name=engine.name,
            fingerprint=f"profile-{secrets.token_hex(8)}",  # so that no store takes it for anything else
            system=engine.system,
            on_miss="inline",
            check=False,
        )

    def precompute(self) -> None:
        for chunk in self.chunks:
            self._engine.precompute_ids(chunk)

    @property
    def stored(self) -> list[MemoryKV]:
        """The chunks' KV."""
        store = self._engine.store
        return [in_memory(kv) for key in store.keys() if (kv := store.get(key)) is not None]  # noqa: SIM118

    def prefill_s(self, mode: Mode, ratio: float = 0.0) -> float:
        """Seconds until the prompt's first logits."""
        request = Request(self.prompt, mode, self._rule, ratio, None, 1, Sampling(), (), None)
        start_s = perf_counter()
        prefilled = self._engine.prefill(request)
        if prefilled.logits.device.type == "cuda":
            torch.cuda.synchronize(prefilled.logits.device)
        return perf_counter() - start_s


def disk_speed(directory: Path, chunks: Sequence[MemoryKV]) -> float:
    """Bytes per second that a DiskStore on the disk of `directory` reads, none of it from the page cache."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".profile-") as scratch:
        disk = DiskStore(scratch)
        for kv in chunks:
            disk.put(kv)
        drop_page_cache(Path(scratch).rglob("*.safetensors"))
        return read_speed(disk, [kv.header.key for kv in chunks])


def remote_speed(remote: RemoteStore, chunks: Sequence[MemoryKV]) -> float:
    """Bytes per second that `remote` sends, a request's chunks side by side; they are deleted there again.

    Measured once: what has just arrived is kept for a moment.
    """
    keys = [kv.header.key for kv in chunks]
    for kv in chunks:
        remote.put(kv)
    try:
        if not remote.flush(_REMOTE_TIMEOUT_S):
            raise BackendUnreachableError(
                f"{remote.values.url} did not take {len(keys)} chunks in {_REMOTE_TIMEOUT_S:.0f} s"
            )
        start_s = perf_counter()
        remote.fetch_ahead(keys)
        read_speed(remote, keys)
        return sum(kv.nbytes for kv in chunks) / (perf_counter() - start_s)
    finally:
        for key in keys:
            remote.delete(key)


def read_speed(tier: KVStore, keys: Sequence[str]) -> float:
    """Bytes per second from asking for the keys until every layer of all has been read, as a request reads them."""
    start_s = perf_counter()
    found: list[ChunkKV] = []
    for key in keys:
        kv = tier.get(key)
        if kv is None:
            raise BackendUnreachableError(f"a chunk that was just written is not in {type(tier).__name__}; see the log")
        found.append(kv)
    for layer in range(found[0].header.num_layers):
        for kv in found:
            kv.layer(layer)
    return sum(kv.nbytes for kv in found) / (perf_counter() - start_s)


def find_profile(settings: Settings) -> MachineProfile:
    """What `ragblend profile` measured for the settings' model and store on this machine. Loads no weights.

    Raises NotFoundError, with the command to type, where nothing was measured.
    """
    from transformers import AutoConfig

    from ragblend.engine.kv import dtype_name
    from ragblend.engine.transformers_model import choose_dtype, find_model, model_fingerprint

    path = find_model(settings.model)
    config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    dtype = dtype_name(choose_dtype(settings.dtype, config, settings.device))
    fingerprint = model_fingerprint(path, config, dtype)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = machine_facts(device)
    found = read_profile(Path(settings.store), fingerprint, hardware)
    if found is None:
        where = profile_path(Path(settings.store), fingerprint, hardware)
        raise NotFoundError(
            f"nothing was measured for {settings.model} ({dtype}) on this machine: no {where}. Measure it: "
            f"ragblend profile --model {settings.model} --store {settings.store}"
        )
    return found


def _medians(samples: dict[float, list[float]]) -> dict[float, float]:
    return {key: statistics.median(taken) for key, taken in samples.items()}


def _ids(draw: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocabulary) for _ in range(count))
