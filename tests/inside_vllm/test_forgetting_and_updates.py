"""Two real servers over one Redis: what one forgets the other does, also when it was down; and new weights in place.

The tests are one story and run in order.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from served import start_demo
from servers import HttpServer, RedisServer, free_port, running_redis

from ragblend import SegmentedPrompt, load_engine
from ragblend.demo import WEIGHTS
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.vllm.launch import find_checkpoint

pytestmark = pytest.mark.timeout(1200)
TEXTS = [f"{person} lives in Kinport. {person} works for Synon." for person in ("George Keller", "Ben Howard")]
WAIT_S = 120.0  # far more than the few seconds between two looks: this machine is busy


class Replica:
    """`ragblend serve demo` with a disk of its own; it can be stopped, and started again on the same disk."""

    def __init__(self, home: Path, cache: RedisServer) -> None:
        home.mkdir()
        self.home, self.store, self.port = home, home / "kv", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.own = {"RAGBLEND_REMOTE": cache.url, "VLLM_SERVER_DEV_MODE": "1"}
        self.server: HttpServer | None = None

    def start(self) -> None:
        self.server = start_demo(self.home, "--max-model-len", "2048", port=self.port, **self.own)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def stored(self) -> set[str]:
        return set(DiskStore(self.store).keys())

    def post(self, path: str, body: Any = None) -> Any:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120).raise_for_status().json()

    def rpc(self, method: str, **kwargs: str) -> None:
        httpx.post(
            f"{self.url}/collective_rpc", json={"method": method, "kwargs": kwargs}, timeout=300
        ).raise_for_status()

    def memory_bytes(self) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(r'vllm:ragblend_store_bytes\{[^}]*tier="memory"[^}]*\} (\S+)', text)
        return float(found[0]) if found else -1.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def replicas(cache: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Replica]]:
    home = tmp_path_factory.mktemp("replicas")
    one, two = Replica(home / "one", cache), Replica(home / "two", cache)
    with ExitStack() as stack:
        for each in (one, two):
            stack.callback(each.stop)
            each.start()
        for each in (one, two):
            assert each.server is not None
            each.server.wait(900)
        yield one, two


@pytest.fixture
def clients(replicas: tuple[Replica, Replica], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:

        def connect(replica: Replica, namespace: str = "") -> Any:
            folder = tmp_path / f"texts-{time.monotonic_ns()}"
            return stack.enter_context(load_engine("demo", folder, backend=replica.url, namespace=namespace))

        yield connect


def hits(engine: Any, text: str) -> int:
    answer = engine.generate(SegmentedPrompt([text], "Where does George Keller live?"), max_tokens=4)
    return int(answer.report.num_chunk_hits)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_the_default_limit_is_told(replicas: tuple[Replica, Replica]) -> None:
    budget = httpx.get(f"{replicas[0].url}/v1/ragblend/store", timeout=60).json()["budget_bytes"]
    stat = os.statvfs(replicas[0].home)
    assert budget == pytest.approx(stat.f_bavail * stat.f_frsize / 2, rel=0.2)


def test_what_one_replica_forgets_leaves_the_disk_and_memory_of_the_other(
    replicas: tuple[Replica, Replica], clients: Callable[..., Any], cache: RedisServer
) -> None:
    one, two = replicas
    first, second = clients(one), clients(two)
    for text in TEXTS:
        first.precompute(text)
    remote = open_remote(cache.url)
    until(lambda: set(remote.keys()) == one.stored())
    assert [hits(second, text) for text in TEXTS] == [1, 1]
    assert two.stored() == one.stored()
    assert first.forget(TEXTS[0])
    assert first.key(TEXTS[0]) not in set(remote.keys())
    until(lambda: two.stored() == {first.key(TEXTS[1])})
    assert [hits(second, text) for text in TEXTS] == [0, 1]
    remote.close()


def test_a_cleared_namespace_is_cleared_on_every_replica_and_no_other(
    replicas: tuple[Replica, Replica], clients: Callable[..., Any], cache: RedisServer
) -> None:
    one, two = replicas
    theirs, also, mine = clients(one, "theirs"), clients(two, "theirs"), clients(two)
    theirs.precompute(TEXTS[1])
    until(lambda: open_remote(cache.url).contains(theirs.key(TEXTS[1])))
    assert hits(also, TEXTS[1]) == 1
    assert one.post("/v1/ragblend/store/clear", {"namespace": "theirs"})["num_removed"] == 1
    until(lambda: theirs.key(TEXTS[1]) not in two.stored())
    assert (hits(also, TEXTS[1]), hits(mine, TEXTS[1])) == (0, 1)


def test_a_replica_that_was_down_forgets_before_it_answers(
    replicas: tuple[Replica, Replica], clients: Callable[..., Any]
) -> None:
    one, two = replicas
    key = clients(one).key(TEXTS[1])
    assert key in two.stored()
    two.stop()
    clients(one).forget(TEXTS[1])
    assert key in two.stored()
    two.start()
    assert two.server is not None
    two.server.wait(900)
    assert key not in two.stored()
    two.stop()


def test_kv_of_old_weights_is_not_used_once_others_were_loaded_in_place(
    replicas: tuple[Replica, Replica], clients: Callable[..., Any], tmp_path: Path
) -> None:
    one, text = replicas[0], TEXTS[0]
    before = clients(one)
    # What the first test forgot may reach this replica's worker with this step only, and take what the other replica
    # has stored since; a miss is precomputed in the background.
    until(lambda: hits(before, text) == 1)
    new = other_weights(tmp_path / "new")
    one.rpc("reload_weights", weights_path=str(new))
    assert hits(before, text) == 0, "looked up for the old weights, and computed with the new ones"
    after = clients(one)
    assert after.fingerprint == find_checkpoint(str(new), "float32").fingerprint != before.fingerprint
    assert not after.is_stored(text)
    full = after.generate(SegmentedPrompt([text], "Where does George Keller live?"), mode="full", max_tokens=4)
    after.precompute(text)
    assert {before.key(text), after.key(text)} <= one.stored()
    again = after.generate(SegmentedPrompt([text], "Where does George Keller live?"), recompute_ratio=1.0, max_tokens=4)
    assert (again.text, again.report.num_chunk_hits) == (full.text, 1)


def test_weights_that_nobody_can_name_have_a_store_of_their_own(
    replicas: tuple[Replica, Replica], clients: Callable[..., Any], cache: RedisServer
) -> None:
    one, text = replicas[0], TEXTS[0]
    known = clients(one).fingerprint
    one.rpc("ragblend_weights_updated")
    engine = clients(one)
    assert engine.fingerprint not in (known, find_checkpoint("demo").fingerprint)
    assert not engine.is_stored(text)
    engine.precompute(text)
    assert hits(engine, text) == 1
    assert not open_remote(cache.url).contains(engine.key(text)), "nobody else could use it"


def test_the_first_weights_again_have_their_kv_again_and_a_reset_drops_memory_alone(
    replicas: tuple[Replica, Replica], clients: Callable[..., Any]
) -> None:
    one, text = replicas[0], TEXTS[0]
    first = find_checkpoint("demo")
    one.rpc("reload_weights", weights_path=str(first.path))
    engine = clients(one)
    assert engine.fingerprint == first.fingerprint
    hits(engine, text)  # the scheduler hears of it with this one's step
    assert hits(engine, text) == 1
    until(lambda: one.memory_bytes() > 0)
    stored = one.stored()
    assert one.post("/reset_prefix_cache?reset_external=true") == {"success": True}
    engine.generate(SegmentedPrompt([], "Who lives in Kinport?"), max_tokens=2)
    until(lambda: one.memory_bytes() == 0)
    assert one.stored() == stored
    assert hits(engine, text) == 1


def other_weights(target: Path) -> Path:
    """The demo model with noise on its weights."""
    target.mkdir()
    torch.manual_seed(0)
    for path in WEIGHTS.iterdir():
        if path.suffix == ".safetensors":
            noisy = {name: each + 0.05 * torch.randn_like(each) for name, each in load_file(path).items()}
            save_file(noisy, target / path.name, metadata={"format": "pt"})
        elif path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target
