"""Forged entries in the store of a vLLM server with a store key: none is used, `verify` names them all.

The same kinds as tests/faults/test_planted_entries.py plants under transformers (tests/forgery.py), as the first chunk
of a prompt, over the disk tier of a running engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forgery import FORGERIES, PLANTS, Victim, remove
from harness import PREFIX, ask, engine, ingest, random_ids, report, tokens

from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.keys import chunk_key
from ragblend.engine.store.format.kv import MemoryKV, load_into_memory
from ragblend.engine.store.format.signing import KEY_VARIABLE, StoreKey

CHUNKS = [random_ids(40, seed) for seed in (2, 3, 4)]
LIE = random_ids(40, 9)
PROMPT = [*PREFIX, *(each for chunk in CHUNKS for each in chunk), 7, 8, 9]
ASKED: tuple[dict[str, Any], ...] = (
    {"mode": "blend", "ratio": 0.15, "rule": "cacheblend_k"},
    {"mode": "reuse"},
)  # mode `prefix` reads vLLM's own prefix cache, never the store
PASSPHRASE, OTHER_KEY = "correct horse battery staple", StoreKey.parse("another passphrase of some length")


class Server:
    """An engine whose store has a key, with three stored chunks, the first of which is the victim."""

    def __init__(self, llm: Any, root: Path) -> None:
        self.llm, self.root, self.own = llm, root, StoreKey.parse(PASSPHRASE)
        kvs = [self._stored(chunk) for chunk in (*CHUNKS, LIE)]
        self.key = kvs[0].header.key
        self.victim = Victim(kvs[0], MemoryKV(kvs[0].header, kvs[-1].layers), kvs[1], self.own, OTHER_KEY)
        self.clear()
        self.missed = [self.answer(params) for params in ASKED]

    @property
    def place(self) -> Path:
        return self.root / "kv" / self.key[:2] / f"{self.key}.safetensors"

    def disk(self) -> DiskStore:
        return DiskStore(self.root, fsync=False, store_key=self.own)

    def clear(self) -> None:
        for path in self.place.parent.glob(f"{self.key}.*"):
            remove(path)

    def answer(self, params: dict[str, Any]) -> tuple[int, list[int], list[dict[int, float]]]:
        """Chunks found, the answer's ids, and log-probabilities of its first five tokens' best candidates."""
        output = ask(self.llm, PROMPT, params, max_tokens=5)
        best = [{id: each.logprob for id, each in step.items()} for step in output.outputs[0].logprobs]
        return report(output)["num_chunk_hits"], tokens(output), best

    def _stored(self, chunk: list[int]) -> MemoryKV:
        ingest(self.llm, PREFIX, chunk)
        disk = self.disk()
        fingerprint = next(iter(disk.models()))
        found = disk.get(chunk_key(fingerprint, tuple(PREFIX), tuple(chunk), ""))
        assert found is not None
        return load_into_memory(found)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("planted") / "kv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, PASSPHRASE)
        with engine(checkpoint("llama"), root, {"memory_gib": 0}, enable_prefix_caching=False) as llm:
            yield Server(llm, root)


def planted(server: Server) -> dict[str, Callable[[], Any]]:
    kinds = {name: lambda make=make: server.place.write_bytes(make(server.victim)) for name, make in FORGERIES.items()}
    return kinds | {name: lambda make=make: make(server.place, server.victim) for name, make in PLANTS.items()}


def test_nothing_planted_is_used_and_verify_names_it(server):
    for name, plant in planted(server).items():
        for params, (hits, ids, best) in zip(ASKED, server.missed, strict=True):
            server.clear()
            plant()
            found, answered, numbers = server.answer(params)
            assert (found, answered) == (hits, ids), (name, params["mode"])
            for expected, step in zip(best, numbers, strict=True):
                assert step == pytest.approx(expected, abs=1e-4), (name, params["mode"])
        server.clear()
        plant()
        named = {result.key for result in server.disk().verify() if not result.ok}
        assert named == {server.key}, name
    server.clear()


def test_the_truth_would_have_been_used_and_the_lie_would_have_shown(server):
    server.clear()
    server.disk().put(server.victim.true)
    for params, (hits, *_) in zip(ASKED, server.missed, strict=True):
        assert server.answer(params)[0] == hits + 1, params["mode"]
    server.clear()
    server.disk().put(server.victim.lie)  # signed by the key itself, which a reader accepts
    for params, (_, _, best) in zip(ASKED, server.missed, strict=True):
        first = server.answer(params)[2][0]
        assert any(abs(first.get(id, -99.0) - number) > 1e-2 for id, number in best[0].items()), params["mode"]
    server.clear()
