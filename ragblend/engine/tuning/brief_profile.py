"""Measures an engine's machine profile in at most three seconds, before its first request that may be blended.

`measure_briefly` times full prefill at several lengths, a pass of few rows, blends at two lengths, and the disk. Each
engine implements `TimedModel` over its own model and store. `ragblend profile` measures the same at more lengths and
more often (`lab.profile`). Depends on times, not on models, stores or prompts.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from ragblend.config import trusted_setting
from ragblend.engine.fusion.rules import NO_PROBE_RULE, SelectionRule, find_rule
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import MemoryKV
from ragblend.engine.tuning.loading_controller import LINEAR, Curve, MachineProfile
from ragblend.engine.tuning.machine import drop_page_cache, write_profile
from ragblend.errors import BackendUnreachableError, RagblendError

Ids = tuple[int, ...]

MEASURE_S = 3.0
"""Seconds that a measurement may take."""
QUESTION_TOKENS = 32
CHUNK_TOKENS = 128
COUNTS = (0, 1, 2, 4, 8, 16, 32)
"""Chunks of the prompts that are timed, as many as there is time for. Without a chunk, it is a pass of few rows."""
_GROWTH = 3.0  # most that a prompt of twice the length takes, in times of the shorter one's
_NUM_REST = 7  # passes like the longest full prefill: its repetition, its chunks, and blends with their warm-up
_REPEATS = 3
_REPEAT_BELOW_S = 0.25  # shorter times are the shortest of _REPEATS
_DISK_SHARE = 0.15  # of the measurement's time, left for the disk
_MOST_DISK_CHUNKS = 4


class TimedModel(Protocol):
    """What is timed of an engine: prompts of `num_chunks` chunks of CHUNK_TOKENS random tokens and a question."""

    num_layers: int
    longest_tokens: int
    """Longest prompt that can be timed."""

    def num_tokens(self, num_chunks: int) -> int:
        """Return the number of tokens of the prompt."""

    def full_prefill_s(self, num_chunks: int) -> float:
        """Return the seconds of one full prefill."""

    def store_chunks(self, num_chunks: int) -> Sequence[MemoryKV]:
        """Prefill the prompt's chunks and keep them in memory for `blend_s`. Return their KV."""

    def blend_s(self, num_chunks: int, rule: str, ratio: float) -> float:
        """Return the seconds to blend the prompt from memory, once."""

    def agrees(self, is_true: bool) -> bool:
        """Return True if `is_true` on all ranks that run the model together."""


def measure_briefly(
    model: TimedModel,
    *,
    fingerprint: str,
    hardware: dict[str, Any],
    bytes_per_token: int,
    disk_dir: Path | None = None,
    seconds: float = MEASURE_S,
) -> MachineProfile | None:
    """Return the profile of `model` on this machine, measured within `seconds`.

    For a model that is too slow to be blended in this time, the paper's assumption takes the place of measured shares.
    `disk_dir`: the folder of the entries, whose disk is read; None without one. Returns None for a model whose context
    is too short.
    """
    end_s = perf_counter() + seconds
    compute_end_s = end_s - (_DISK_SHARE * seconds if disk_dir is not None else 0.0)

    def has_time(needed_s: float) -> bool:
        return model.agrees(needed_s <= compute_end_s - perf_counter())

    def measured(measure: Callable[[], float]) -> float:
        """Return the shortest of several times; of long ones, the first."""
        taken_s = measure()
        for _ in range(_REPEATS - 1):
            if not has_time(_NUM_REST * taken_s if taken_s <= _REPEAT_BELOW_S else math.inf):
                break
            taken_s = min(taken_s, measure())
        return taken_s

    full_s: dict[int, float] = {}  # by number of chunks
    for count in COUNTS:
        expected_s = _GROWTH * max(full_s.values(), default=0.0)
        if model.num_tokens(count) >= model.longest_tokens or not has_time(expected_s * (1 + _NUM_REST)):
            break
        if not full_s:
            model.full_prefill_s(count)  # warm-up
        full_s[count] = measured(partial(model.full_prefill_s, count))
    if not full_s:
        return None
    overhead_s, shares, no_probe_shares = full_s[0], LINEAR, LINEAR
    stored: Sequence[MemoryKV] = ()
    longest = max(full_s)
    if longest and has_time((_NUM_REST - 1) * full_s[longest]):
        stored = model.store_chunks(longest)
        overhead_s, shares, no_probe_shares = _measure_blends(model, full_s, measured)
    speeds = {}
    if disk_dir is not None and stored:
        with suppress(OSError, RagblendError):  # if it cannot be written, requests measure their reads
            speeds["disk"] = measure_disk_speed(disk_dir, stored[:_MOST_DISK_CHUNKS], end_s - perf_counter())
    return MachineProfile(
        fingerprint=fingerprint,
        hardware=hardware,
        num_layers=model.num_layers,
        bytes_per_token=bytes_per_token,
        prefill_s=tuple((model.num_tokens(count), taken_s) for count, taken_s in full_s.items()),
        shares=shares,
        bytes_per_s=speeds,
        no_probe_shares=no_probe_shares,
        overhead_s=overhead_s,
    )


def _measure_blends(
    model: TimedModel, full_s: Mapping[int, float], measured: Callable[[Callable[[], float]], float]
) -> tuple[float, Curve, Curve]:
    """Return `overhead_s`, `shares` and `no_probe_shares` of a profile, from blends of the shortest and longest prompt.

    `full_s`: seconds of full prefill by number of chunks. `measured` returns the shortest of several times.
    """
    preferred, other = find_rule("auto", model.num_layers), find_rule(NO_PROBE_RULE)
    shortest, longest = min(count for count in full_s if count), max(full_s)

    def blend_s(count: int, rule: SelectionRule) -> float:
        measure = partial(model.blend_s, count, rule.name, rule.ratio)
        measure()  # warm-up
        return measured(measure)

    short_s, long_s, other_s = blend_s(shortest, preferred), blend_s(longest, preferred), blend_s(longest, other)
    whole_s = model.blend_s(longest, other.name, 1.0)
    overhead_s = min(full_s[0], short_s, long_s)  # a pass of few rows
    if (more_s := full_s[longest] - full_s[shortest]) > 0:
        overhead_s = min(long_s, max(0.0, short_s - max(0.0, long_s - short_s) / more_s * full_s[shortest]))

    def share(taken_s: float) -> float:
        return max(0.0, taken_s - overhead_s) / full_s[longest]

    end = (1.0, share(whole_s))
    return overhead_s, ((preferred.ratio, share(long_s)), end), ((other.ratio, share(other_s)), end)


def keep_profile(root: Path, profile: MachineProfile) -> None:
    """Write the profile into the store at `root`. Does nothing if the store cannot be written."""
    with suppress(RagblendError):
        write_profile(root, profile)


def profiles_itself(auto_profile: bool | None) -> bool:
    """Return True if engines measure the machine: `auto_profile`, else the user's setting, else True."""
    value = trusted_setting("auto_profile") if auto_profile is None else auto_profile
    return value is None or bool(value)


def random_ids(count: int, vocab_size: int, seed: int = 0) -> Ids:
    """Return `count` random token ids."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab_size) for _ in range(count))


# -- tiers


def measure_disk_speed(directory: Path, chunks: Sequence[MemoryKV], seconds: float | None = None) -> float:
    """Return the bytes per second that a DiskStore on the disk of `directory` reads without the page cache.

    `seconds`: the time that writing may take, after which the other chunks are left out. None: no limit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end_s = None if seconds is None else perf_counter() + seconds / 2
    keys = []
    with tempfile.TemporaryDirectory(dir=directory, prefix=".profile-") as scratch:
        disk = DiskStore(scratch)
        for kv in chunks:
            if keys and end_s is not None and perf_counter() > end_s:
                break
            disk.put(kv)
            keys.append(kv.header.key)
        drop_page_cache(Path(scratch).rglob("*.safetensors"))
        return measure_read_speed(disk, keys)


def measure_read_speed(tier: KVStore, keys: Sequence[str]) -> float:
    """Return the bytes per second of reading every layer of the entries, layer by layer as a request does."""
    start_s = perf_counter()
    entries = [kv for key in keys if (kv := tier.get(key)) is not None]
    if len(entries) < len(keys):
        raise BackendUnreachableError(f"a chunk that was just written is not in {type(tier).__name__}; see the log")
    for layer in range(entries[0].header.num_layers):
        for kv in entries:
            kv.layer(layer)
    return sum(kv.nbytes for kv in entries) / (perf_counter() - start_s)
