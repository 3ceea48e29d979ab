"""What a store key costs: put, get and verify of one chunk's KV on disk, with a key and without.

    python -m benchmarks.signing --out data/results/store-signing.json

KV is random, of the shape of `llama-200m` in float32 by default. Reads come from the page cache, so a disk hides
nothing; `--dir` says where. Pairs are measured in turn and the median of each is kept.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ragblend.bench.common.hardware import hardware_card
from ragblend.engine.store.chunk_file import Demands, decode_chunk, encode_chunk
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.keys import chunk_key
from ragblend.engine.store.kv import DTYPES, KVHeader, LayerKV, MemoryKV, in_memory
from ragblend.engine.store.signing import StoreKey


def random_chunk(num_tokens: int, num_layers: int, heads: int, dim: int, dtype: str) -> MemoryKV:
    """A chunk's KV of that shape."""
    ids = tuple(range(num_tokens))
    layers = tuple(
        LayerKV(*(torch.randn(heads, num_tokens, dim).to(DTYPES[dtype]) for _ in range(2))) for _ in range(num_layers)
    )
    return MemoryKV(KVHeader(chunk_key("model", (1,), ids), "model", (1,), ids, num_layers, dtype), layers)


def measure(kv: MemoryKV, directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Median seconds of every operation, with a key and without."""
    stores = {
        signed: DiskStore(
            directory / str(signed), fsync=False, store_key=StoreKey(secrets.token_bytes(32)) if signed else None
        )
        for signed in (False, True)
    }
    name, times = kv.header.key, dict[tuple[str, bool], list[float]]()

    def timed(what: str, signed: bool, work: Callable[..., Any], *given: Any) -> Any:
        start_s = perf_counter()
        result = work(*given)
        times.setdefault((what, signed), []).append(perf_counter() - start_s)
        return result

    for _ in range(repeats + 1):
        for signed, store in stores.items():
            timed("put", signed, store.put, kv)
            found = timed("get", signed, store.get, name)
            timed("read", signed, in_memory, found)
            data = timed("encode", signed, encode_chunk, kv, store.store_key)
            timed("decode", signed, decode_chunk, data, name, Demands(store.store_key))
    return [
        {
            "operation": what,
            "signed": signed,
            "median_s": median(found[1:]),
            "gb_per_s": kv.nbytes / median(found[1:]) / 1e9,
        }
        for (what, signed), found in times.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description="What a store key costs.")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--dir", type=Path, help="where the store is; a temporary folder else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kv = random_chunk(options.tokens, options.layers, options.heads, options.dim, options.dtype)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        runs = measure(kv, Path(directory), options.repeats)
    facts = {
        "schema_version": 1,
        "command": f"python -m benchmarks.signing --tokens {options.tokens} --layers {options.layers} "
        f"--heads {options.heads} --dim {options.dim} --dtype {options.dtype} --repeats {options.repeats}",
        "hardware": hardware_card(),
        "chunk_bytes": kv.nbytes,
        "runs": runs,
    }
    print(f"one chunk of {options.tokens} tokens, {kv.nbytes / 2**20:.1f} MiB of KV")
    for run in runs:
        kind = "signed" if run["signed"] else "plain"
        print(f"{run['operation']:<8}{kind:<8}{run['median_s'] * 1e3:8.2f} ms  {run['gb_per_s']:6.2f} GB/s")
    if options.out is not None:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
