"""Measures an engine's machine profile in at most three seconds, before its first request that may be blended.

`measure_briefly` times full prefill at several lengths, a pass of few rows, blends at two lengths, and the disk. Each
engine implements `TimedModel` over its own model and store. `ragblend profile` measures the same at more lengths and
more often (`lab.profile`). Depends on the disk tier and the rules, not on models or prompts.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from ragblend.config import trusted_setting
from ragblend.engine.fusion.rules import NO_PROBE_RULE, SelectionRule, find_rule
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import key_from_header
from ragblend.engine.store.format.kv import DTYPES, KVHeader, KVSpec, LayerKV, MemoryKV, convert_kv_dtype
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
_PLANNED_SHARE = 0.85  # of the time; the rest is for what takes longer than expected
_DISK_SHARE = 0.2  # of the time, left for the disk
_DISK_BYTES, _DISK_TOKENS = 8 << 20, (16, 256)  # of the entry that is written and read


class TimedModel(Protocol):
    """What is timed of an engine: prompts of `num_chunks` chunks of CHUNK_TOKENS random tokens and a question."""

    longest_tokens: int
    """Longest prompt that can be timed."""

    def num_tokens(self, num_chunks: int) -> int:
        """Return the number of tokens of the prompt."""

    def full_prefill_s(self, num_chunks: int) -> float:
        """Return the seconds of one full prefill."""

    def store_chunks(self, num_chunks: int) -> None:
        """Prefill the prompt's chunks, and keep their KV in memory for `blend_s`."""

    def blend_s(self, num_chunks: int, rule: str, ratio: float) -> float:
        """Return the seconds to blend the prompt from memory, once."""

    def agrees(self, is_true: bool) -> bool:
        """Return True if `is_true` on all ranks that run the model together."""


def measure_briefly(
    model: TimedModel,
    *,
    fingerprint: str,
    hardware: Mapping[str, Any],
    spec: KVSpec,
    kv_dtype: str,
    disk_dir: Path | None = None,
    seconds: float = MEASURE_S,
) -> MachineProfile | None:
    """Return the profile of `model` on this machine, measured within `seconds`.

    `spec`, `kv_dtype`: of the model's KV, and of stored KV. `disk_dir`: the folder of the entries, whose disk is read;
    None without one. If fewer than two lengths can be blended in this time, the paper's assumption takes the place of
    measured shares; only one pass of few rows always runs. Returns None for a model whose context is too short.
    """
    end_s = perf_counter() + _PLANNED_SHARE * seconds
    compute_end_s = end_s - (_DISK_SHARE * seconds if disk_dir is not None else 0.0)

    def has_time(needed_s: float) -> bool:
        return model.agrees(needed_s <= compute_end_s - perf_counter())

    def shortest_s(measure: Callable[[], float]) -> float:
        """Return the shortest of several times, of which the first warms up; of long ones, the first."""
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
        full_s[count] = shortest_s(partial(model.full_prefill_s, count))
    if not full_s:
        return None
    overhead_s, shares, no_probe_shares = full_s[0], LINEAR, LINEAR
    longest = max(full_s)
    if longest and has_time((_NUM_REST - 1) * full_s[longest]):
        model.store_chunks(longest)
        rules = find_rule("auto", len(spec.layers)), find_rule(NO_PROBE_RULE)
        overhead_s, shares, no_probe_shares = _measure_blends(model, full_s, rules, shortest_s, has_time)
    speeds = {}
    if disk_dir is not None:
        with suppress(OSError, RagblendError):  # if it cannot be written, requests measure their reads
            entry = convert_kv_dtype(_random_entry(spec), kv_dtype)
            speeds["disk"] = measure_disk_speed(disk_dir, [entry], end_s)
    return MachineProfile(
        fingerprint=fingerprint,
        hardware=hardware,
        num_layers=len(spec.layers),
        bytes_per_token=spec.bytes_per_token(kv_dtype),
        prefill_s=tuple((model.num_tokens(count), taken_s) for count, taken_s in full_s.items()),
        shares=shares,
        bytes_per_s=speeds,
        no_probe_shares=no_probe_shares,
        overhead_s=overhead_s,
    )


def _measure_blends(
    model: TimedModel,
    full_s: Mapping[int, float],
    rules: tuple[SelectionRule, SelectionRule],
    shortest_s: Callable[[Callable[[], float]], float],
    has_time: Callable[[float], bool],
) -> tuple[float, Curve, Curve]:
    """Return `overhead_s`, `shares` and `no_probe_shares` of a profile, from blends of the shortest and longest prompt.

    `full_s`: seconds of full prefill by number of chunks. `rules`: the default one, and one without a query probe.
    """
    (preferred, other), shortest, longest = rules, min(count for count in full_s if count), max(full_s)

    def blend_s(count: int, rule: SelectionRule) -> float:
        return shortest_s(partial(model.blend_s, count, rule.name, rule.ratio))

    short_s = blend_s(shortest, preferred)
    # One length does not show which part of the time grows with the prompt.
    if shortest == longest or not has_time(4 * short_s):  # for the three that follow
        return short_s, LINEAR, LINEAR
    long_s, other_s = blend_s(longest, preferred), blend_s(longest, other)
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


def profiles_itself(auto_profile: bool | None, *, is_demo: bool = False) -> bool:
    """Return True if engines measure the machine: `auto_profile`, else the user's setting, else all but the demo's.

    The demo's requests take some milliseconds in every mode, which is less than times differ from run to run.
    """
    value = trusted_setting("auto_profile") if auto_profile is None else auto_profile
    return not is_demo if value is None else bool(value)


def random_ids(count: int, vocab_size: int, seed: int = 0) -> Ids:
    """Return `count` random token ids."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab_size) for _ in range(count))


# -- tiers


def _random_entry(spec: KVSpec) -> MemoryKV:
    """Return an entry of about _DISK_BYTES."""
    least, most = _DISK_TOKENS
    ids = random_ids(min(most, max(least, _DISK_BYTES // spec.bytes_per_token("auto"))), 1 << 15)
    header = KVHeader("", "profile", (), ids, len(spec.layers), spec.dtype)
    dtype, count = DTYPES[spec.dtype], len(ids)
    layers = [
        LayerKV(torch.rand(heads, count, keys).to(dtype), torch.rand(heads, count, values).to(dtype))
        for heads, keys, values in spec.layers
    ]
    return MemoryKV(replace(header, key=key_from_header(header)), tuple(layers))


def measure_disk_speed(directory: Path, entries: Sequence[MemoryKV], end_s: float = math.inf) -> float:
    """Return the bytes per second that a DiskStore on the disk of `directory` reads without the page cache.

    `end_s`: when reading ends, by `perf_counter`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".profile-") as scratch:
        disk = DiskStore(scratch)
        for kv in entries:
            disk.put(kv)
        drop_page_cache(Path(scratch).rglob("*.safetensors"))
        return measure_read_speed(disk, [kv.header.key for kv in entries], end_s)


def measure_read_speed(tier: KVStore, keys: Sequence[str], end_s: float = math.inf) -> float:
    """Return the bytes per second of reading the entries, layer by layer as a request does, until `end_s`."""
    start_s = perf_counter()
    entries = [kv for key in keys if (kv := tier.get(key)) is not None]
    if len(entries) < len(keys):
        raise BackendUnreachableError(f"a chunk that was just written is not in {type(tier).__name__}; see the log")
    num_layers, num_read = entries[0].header.num_layers, 0
    while num_read < num_layers and (not num_read or perf_counter() < end_s):
        for kv in entries:
            kv.layer(num_read)
        num_read += 1
    return sum(kv.nbytes for kv in entries) * num_read / num_layers / (perf_counter() - start_s)
