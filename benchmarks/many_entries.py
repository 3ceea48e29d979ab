"""Time per entry of each store operation with ten thousand to a million entries, on disk and in Redis.

    python -m benchmarks.many_entries --place disk --out data/results/many-entries-disk.json

Entries are small (KV of 8 tokens, 2 layers, 1 head of 16 in bfloat16: 1 KiB, and a header), so that the store's own
work is timed and not the copying of bytes. One store grows to each of the counts and is measured there. `put` on disk
uses fsync, as by default; the entries between the counts are written without. Redis runs on this machine. Page cache
and directories are warm, because they were just written. Read `Place` first.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.results import write_result
from benchmarks.servers import Redis
from ragblend.cli.printing import print_notice
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import KVHeader, LayerKV, MemoryKV, load_into_memory
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.lab.bench.common.hardware import hardware_card, hardware_lines, peak_rss_bytes, reset_peak_rss

COUNTS = (10_000, 100_000, 1_000_000)
LAYERS, HEADS, TOKENS, DIM = 2, 1, 8, 16
SAMPLE = 2_000
"""Number of entries that are read and looked up one at a time at every count; a quarter as many are written."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one place at one number of entries.

    us_each: microseconds per entry by operation; the median for operations on single entries. peak_rss_mib: growth of
    peak memory by operation over all entries.
    """

    place: Literal["disk", "redis"]
    num_entries: int
    nbytes: int
    us_each: dict[str, float] = field(default_factory=dict)
    peak_rss_mib: dict[str, float] = field(default_factory=dict)


def entry(number: int, values: Sequence[LayerKV]) -> MemoryKV:
    """Return an entry with token ids that are unique to `number`, and with `values` as KV."""
    ids = (number >> 16, number & 0xFFFF, *range(TOKENS - 2))
    return MemoryKV(KVHeader(chunk_key("model", (1,), ids), "model", (1,), ids, LAYERS, "bfloat16"), tuple(values))


class Place:
    """A store, and the timed operations. `filler`: a faster writer to the same store, or None."""

    def __init__(
        self, name: Literal["disk", "redis"], store: DiskStore | RemoteStore, filler: DiskStore | None
    ) -> None:
        self.name, self.store, self._filler = name, store, filler
        self._values = [LayerKV(*(torch.randn(HEADS, TOKENS, DIM).bfloat16() for _ in range(2))) for _ in range(LAYERS)]
        self._keys: list[str] = []  # of all stored entries
        self._number = 0  # of the next entry: numbers of deleted entries are not used again
        self._draw = random.Random(0)

    def grow(self, count: int) -> float:
        """Fill the store up to `count` entries. Return the seconds per added entry."""
        start_s, before = perf_counter(), len(self._keys)
        while len(self._keys) < count:
            self._put(self._filler or self.store)
        return (perf_counter() - start_s) / max(1, count - before)

    def measure(self) -> Run:
        """Time every operation at the store's current count."""
        run = Run(self.name, len(self._keys), self.store.nbytes())
        known, absent = self._draw.sample(self._keys, SAMPLE), [f"{at:032x}" for at in range(SAMPLE)]
        run.us_each["put"] = 1e6 * median(self._seconds(lambda: self._put(self.store)) for _ in range(SAMPLE // 4))
        run.us_each["get"] = 1e6 * median(self._seconds(lambda key=key: self._read(key)) for key in known)  # type: ignore[misc]
        run.us_each["miss"] = 1e6 * median(self._seconds(lambda key=key: self.store.get(key)) for key in absent)  # type: ignore[misc]
        start_s = perf_counter()
        if self.store.contains_many([*known, *absent]) != [True] * SAMPLE + [False] * SAMPLE:
            raise SystemExit("contains_many returned a wrong result")
        run.us_each["contains_many"] = 1e6 * (perf_counter() - start_s) / (2 * SAMPLE)
        walks: dict[str, Callable[[], Any]] = {
            "keys": self._count_keys,
            "stats": self.store.nbytes,
            "verify": self._verify,
        }
        if isinstance(self.store, DiskStore):
            walks["gc"] = self._gc
        for name, walk in walks.items():
            reset_peak_rss()
            count, before_bytes = len(self._keys), peak_rss_bytes()
            run.us_each[name] = 1e6 * self._seconds(walk) / count
            run.peak_rss_mib[name] = (peak_rss_bytes() - before_bytes) / 2**20
        return run

    def _put(self, store: DiskStore | RemoteStore) -> None:
        kv = entry(self._number, self._values)
        self._number += 1
        store.put_and_wait(kv) if isinstance(store, RemoteStore) else store.put(
            kv
        )  # `put` of a remote tier only appends to a queue
        self._keys.append(kv.header.key)

    def _read(self, key: str) -> None:
        found = self.store.get(key)
        if found is None:
            raise SystemExit(f"entry {key} is missing")
        load_into_memory(found)

    def _count_keys(self) -> None:
        if (found := len(list(self.store.keys()))) != len(self._keys):
            raise SystemExit(f"the store lists {found} keys, but has {len(self._keys)} entries")

    def _verify(self) -> None:
        if bad := [each for each in self.store.verify() if not each.ok]:
            raise SystemExit(f"{len(bad)} entries are damaged; the first: {bad[0]}")

    def _gc(self) -> None:
        """Evict one entry in a hundred."""
        assert isinstance(self.store, DiskStore)
        evicted = set(self.store.gc(max_bytes=self.store.nbytes() * 99 // 100).evicted)
        self._keys = [key for key in self._keys if key not in evicted]

    @staticmethod
    def _seconds(work: Callable[[], Any]) -> float:
        start_s = perf_counter()
        work()
        return perf_counter() - start_s


@contextmanager
def redis_server(home: Path) -> Iterator[str]:
    """Run a Redis or Valkey without persistence; yield its URL."""
    server = Redis(home)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


def main(
    counts: Annotated[list[int], typer.Option("--count", min=SAMPLE, help="Entries; repeat for more.")] = list(COUNTS),  # noqa: B006
    places: Annotated[list[str], typer.Option("--place", help="disk or redis; repeat for both.")] = ["disk", "redis"],  # noqa: B006
    home: Annotated[Path | None, typer.Option("--dir", help="Folder for a temporary folder with the store.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file of the result. Default: none.")] = None,
) -> None:
    """Measure each place at each number of entries. Print JSON to stdout, and write it to `out`."""
    torch.set_num_threads(1)
    runs = list[dict[str, Any]]()
    card = hardware_card()
    print_notice("\n".join(hardware_lines(card)))
    shown = "".join(f" --count {count}" for count in counts) + "".join(f" --place {place}" for place in places)
    facts = {"command": f"python -m benchmarks.many_entries{shown}", "hardware": card, "runs": runs}
    for name in places:
        with tempfile.TemporaryDirectory(dir=home) as folder, redis_server(Path(folder)) as url:
            if name == "disk":
                disk = DiskStore(folder, store_key=None)
                place = Place("disk", disk, DiskStore(folder, fsync=False, store_key=None))
            else:
                place = Place("redis", open_remote(url, store_key=None), None)
            for count in sorted(counts):
                filled_s = place.grow(count)
                run = place.measure()
                run.us_each["fill"] = 1e6 * filled_s
                numbers = "  ".join(f"{what} {each:.0f}" for what, each in run.us_each.items())
                print_notice(f"{run.place} {run.num_entries:>9,}: {numbers} us each; {run.nbytes / 2**20:.0f} MiB")
                runs.append(asdict(run))
                if out is not None:  # after each count, because the next one may take half an hour
                    write_result(facts, out)
            if isinstance(place.store, RemoteStore):
                place.store.close()
    write_result(facts, None)


if __name__ == "__main__":
    typer.run(main)
