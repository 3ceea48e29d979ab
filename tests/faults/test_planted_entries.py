"""Entries that somebody planted in the disk tier, Redis or S3: with a key none is used, without one none does harm.

51 kinds in every tier, 10 more on disk (tests/forgery.py), each asked for at ratio 1.0 and 0.15 and in mode `prefix`,
as the prompt's first chunk: the one that is exact, and so never recomputed.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import FORGERIES, PLANTS, Victim, remove
from servers import point_s3_at, running_s3
from tiny_prompts import CHUNKS

from ragblend.engine.store.base import EntryCheck
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.format.kv import MemoryKV, load_into_memory
from ragblend.engine.store.format.signing import StoreKey
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.prompt.types import Prompt

pytestmark = pytest.mark.timeout(600)

OWN, FOREIGN = StoreKey(b"o" * 32), StoreKey(b"f" * 32)
TEXTS = tuple(chunk.text for chunk in CHUNKS)
LIE = "that is what the chunk answers and the other theory of that question is what the answer with the other chunk is"
MODES: tuple[tuple[str, float], ...] = (("blend", 1.0), ("blend", 0.15), ("prefix", 0.0))
BOMB_BYTES = 256 << 20  # a planted entry holds a few KB
WHOLE_AND_UNSIGNED = {
    "the truth, unsigned",
    "the truth, signed by another key",
    "a lie with redone checksums",
    "a lie in eight bits",
    "a lie, signed by another key",
    "a signature of zeros",
    "a signature that is no text",
    "another model's entry, its model edited",
    "another namespace's entry, its namespace edited",
    "made older than signatures",
    "other tensors and digests under a signature",
}
"""Kinds that are sound to whoever checks no signature."""


class Tier:
    """The tier that is written to, and the stores that a process opens over it."""

    def __init__(self, root: Path, url: str | None) -> None:
        self.root, self.url = root, url
        self._values = open_remote(url, timeout_s=60).values if url is not None else None
        self._opened: list[Any] = []

    def open(self, key: StoreKey | None) -> TieredStore:
        """What a process sees: memory over disk, over the remote one."""
        tiers: list[Any] = [MemoryStore(1 << 28), DiskStore(self.root, fsync=False, store_key=key)]
        if self.url is not None:
            tiers.append(self.remote(key))
        self._opened.append(TieredStore(*tiers))
        return self._opened[-1]

    def remote(self, key: StoreKey | None) -> RemoteStore:
        assert self._values is not None
        return RemoteStore(self._values, timeout_s=60, store_key=key)

    @property
    def name(self) -> str:
        return "disk" if self.url is None else self.url.partition("://")[0]

    def place(self, key: str) -> Path:
        path = self.root / "kv" / key[:2] / f"{key}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def plant(self, key: str, data: bytes) -> None:
        if self._values is None:
            self.place(key).write_bytes(data)
        else:
            self._values.put(key, data)

    def clear(self, key: str) -> None:
        """Nothing under that key, anywhere."""
        for store in self._opened:
            store.close()
        self._opened.clear()
        for path in self.place(key).parent.glob(f"{key}.*"):
            remove(path)
        if self._values is not None:
            self._values.delete(key)

    def verify(self, key: StoreKey | None, expecting: TieredStore) -> list[EntryCheck]:
        """What `verify` says with fresh eyes that know the model's shapes."""
        store = self.remote(key) if self.url else DiskStore(self.root, fsync=False, store_key=key)
        shapes = expecting.tiers[1]._requirements.specs
        for fingerprint, shape in shapes.items():
            store.set_expected_spec(fingerprint, shape)
        return list(store.verify())


@pytest.fixture(params=["disk", "redis", "s3"])
def tier(request, tmp_path, monkeypatch):
    if request.param == "disk":
        yield Tier(tmp_path / "kv", None)
    elif request.param == "redis":
        yield Tier(tmp_path / "kv", request.getfixturevalue("redis_server").url)
    else:
        import boto3

        with running_s3() as port:
            point_s3_at(port, monkeypatch)
            boto3.client("s3").create_bucket(Bucket="tests")
            yield Tier(tmp_path / "kv", "s3://tests/kv")


class Asker:
    """One prompt of three chunks, the first of which is planted; the others are stored as they should be."""

    def __init__(self, make_engine: Callable[..., Any]) -> None:
        self.make_engine = make_engine
        own = MemoryStore(1 << 28)
        engine = make_engine("llama", own)
        kvs = [self._kv(engine, own, text) for text in (*TEXTS, LIE)]
        true, lie = kvs[0], kvs[-1]
        length = true.header.num_tokens
        assert lie.header.num_tokens >= length, "the lie is as long as the truth"
        layers = tuple(type(layer)(*(each[:, :length].contiguous() for each in layer)) for layer in lie.layers)
        self.victim = Victim(true, MemoryKV(true.header, layers), kvs[1], OWN, FOREIGN)
        self.key, self.others = true.header.key, kvs[1:3]
        own.delete(self.key)
        self.missed = {mode: self.ask(own, *mode)[0] for mode in MODES}

    @staticmethod
    def _kv(engine: Any, store: MemoryStore, text: str) -> MemoryKV:
        engine.precompute(text)
        return load_into_memory(store.get(engine.key(text)))

    def ask(self, store: Any, mode: str, ratio: float) -> tuple[torch.Tensor, bool]:
        """The first logits, and whether the first chunk's KV was used."""
        engine = self.make_engine("llama", store)
        request = engine.request(Prompt(TEXTS, "what?"), mode=mode, recompute_ratio=ratio)
        prefilled = engine.prefill(request)
        return prefilled.logits, prefilled.report.chunks[0].hit


@pytest.fixture
def asker(tiny_engine):
    return Asker(tiny_engine)


def plants_for(tier: Tier, victim: Victim) -> dict[str, Callable[[], None]]:
    """Every kind that this tier can hold."""
    key = victim.true.header.key
    planted = {name: lambda make=make: tier.plant(key, make(victim)) for name, make in FORGERIES.items()}
    if tier.url is None:
        planted |= {name: lambda make=make: make(tier.place(key), victim) for name, make in PLANTS.items()}
    return planted


def held_near(tier: Tier, store: TieredStore, key: str) -> bool:
    """Whether a tier above the planted one holds the entry."""
    store.close()
    above = store.tiers[: 1 if tier.url is None else 2]
    return any(each.contains(key) for each in above)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("store_key", [OWN, None], ids=["with a key", "without a key"])
def test_a_planted_entry_is_used_only_if_whole_and_without_a_key(store_key, tier, asker, counted):
    """Without a key a lie of the right shape is believed: that is what the key is for. `verify` names all others."""
    kinds, used, num_unsigned = plants_for(tier, asker.victim), set(), 0
    assert len(kinds) >= 30
    before = peak_bytes()
    for name, plant in kinds.items():
        for mode, ratio in MODES:
            tier.clear(asker.key)
            store = tier.open(store_key)
            for kv in asker.others:
                store.put(kv)
            plant()
            logits, hit = asker.ask(store, mode, ratio)
            assert torch.isfinite(logits).all(), (name, mode)
            if hit:
                used.add(name)
            else:
                assert torch.equal(logits, asker.missed[mode, ratio]), (name, mode)
            assert store_key is None or not held_near(tier, store, asker.key), (name, mode)
            num_unsigned += store.counters.num_unsigned
        tier.clear(asker.key)
        plant()
        named = {result.key: result.reason for result in tier.verify(store_key, store) if not result.ok}
        assert bool(named.get(asker.key)) is (name not in used), name
    assert peak_bytes() - before < BOMB_BYTES
    assert used - {"a link to a lie"} == (WHOLE_AND_UNSIGNED if store_key is None else set())
    if store_key is not None:
        assert "a link to a lie" not in used
        assert num_unsigned > len(MODES) * 5, "entries without the signature are counted as that"
    counted(
        f"{tier.name}, {'without' if store_key is None else 'with'} a key: {len(kinds)} kinds of planted entries, "
        f"{len(kinds) * len(MODES)} requests: no exception, {len(used)} kinds used, the rest a miss and named by verify"
    )


def test_the_lie_of_these_tests_is_one(asker):
    """Believed, it changes what is answered in every mode, also at ratio 1.0."""
    for mode, ratio in MODES:
        store = MemoryStore(1 << 28)
        for kv in (*asker.others, asker.victim.lie):
            store.put(kv)
        logits, hit = asker.ask(store, mode, ratio)
        assert hit
        assert not torch.allclose(logits, asker.missed[mode, ratio], atol=1e-3), (mode, ratio)
