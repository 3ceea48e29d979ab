"""Two real servers over one Redis: what one forgets the other does, also when it was down; then an update of weights.

The tests are one story and run in order.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from harness import ask, ask_all, connector_worker, ingest, random_ids, report, tokens
from harness import engine as running_vllm
from safetensors.torch import load_file, save_file
from served import make_known, metrics, start_demo
from servers import HttpServer, RedisServer, running_redis, wait_until

from benchmarks.servers import free_port
from ragblend import Prompt, load_engine
from ragblend.demo import WEIGHTS
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.errors import RagblendError

pytestmark = pytest.mark.timeout(1200)
TEXTS = [f"{person} lives in Kinport. {person} works for Synon." for person in ("George Keller", "Ben Howard")]
WAIT_S = 120.0  # far more than the few seconds between two looks: this machine is busy


class Replica:
    """`ragblend serve demo` with a separate disk; it can be stopped, and started again on the same disk."""

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

    def counted(self, *names: str) -> dict[str, float]:
        found = metrics(self.url)
        return {name: found[f"vllm:ragblend_{name}_total"] for name in names}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    yield from running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def replicas(cache, tmp_path_factory):
    home = tmp_path_factory.mktemp("replicas")
    one, two = Replica(home / "one", cache), Replica(home / "two", cache)
    with ExitStack() as stack:
        for each in (one, two):
            stack.callback(each.stop)
            each.start()
        for each in (one, two):
            each.server.wait(900)
        yield one, two


@pytest.fixture
def clients():
    with ExitStack() as stack:

        def connect(replica: Replica, namespace: str = "") -> Any:
            return stack.enter_context(load_engine("demo", backend=replica.url, namespace=namespace))

        yield connect


def hits(engine: Any, text: str) -> int:
    answer = engine.generate(Prompt([text], "Where does George Keller live?"), max_tokens=4)
    return int(answer.report.num_chunk_hits)


def precomputed_key(engine: Any, replica: Replica, text: str) -> str:
    """The key under which a replica stores a text that it did not have."""
    before = replica.stored()
    assert engine.precompute(text)
    (key,) = replica.stored() - before
    return key


def test_the_default_limit_is_told(replicas):
    budget = httpx.get(f"{replicas[0].url}/v1/ragblend/store", timeout=60).json()["budget_bytes"]
    stat = os.statvfs(replicas[0].home)
    assert budget == pytest.approx(stat.f_bavail * stat.f_frsize / 2, rel=0.2)


def test_what_one_replica_forgets_leaves_the_disk_and_memory_of_the_other(replicas, clients, cache):
    one, two = replicas
    first, second = clients(one), clients(two)
    keys = [precomputed_key(first, one, text) for text in TEXTS]
    make_known(two.home / "kv", first.renderer, TEXTS)
    remote = open_remote(cache.url)
    wait_until(lambda: set(remote.keys()) == one.stored(), WAIT_S, "both are sent to Redis")
    assert [hits(second, text) for text in TEXTS] == [1, 1]
    assert two.stored() == one.stored()
    assert first.forget(TEXTS[0])
    assert keys[0] not in set(remote.keys())
    wait_until(lambda: two.stored() == {keys[1]}, WAIT_S, "the other has deleted it")
    assert [hits(second, text) for text in TEXTS] == [0, 1]
    remote.close()


def test_a_cleared_namespace_is_cleared_on_every_replica_and_no_other(replicas, clients, cache):
    one, two = replicas
    theirs, also, mine = clients(one, "theirs"), clients(two, "theirs"), clients(two)
    key = precomputed_key(theirs, one, TEXTS[1])
    make_known(two.home / "kv", also.renderer, TEXTS, "theirs")
    wait_until(lambda: open_remote(cache.url).contains(key), WAIT_S, "it is sent to Redis")
    assert hits(also, TEXTS[1]) == 1
    assert one.post("/v1/ragblend/store/clear", {"namespace": "theirs"})["num_removed"] == 1
    wait_until(lambda: key not in two.stored(), WAIT_S, "the other has deleted it")
    assert (hits(also, TEXTS[1]), hits(mine, TEXTS[1])) == (0, 1)


def test_a_replica_that_was_down_forgets_before_it_answers(replicas, clients):
    one, two = replicas
    (key,) = one.stored() & two.stored()
    two.stop()
    clients(one).forget(TEXTS[1])
    assert key in two.stored()
    two.start()
    two.server.wait(900)
    assert key not in two.stored()
    two.stop()


def test_after_an_update_of_the_weights_nothing_is_loaded_or_stored(replicas, clients, tmp_path):
    one, prompt = replicas[0], Prompt([TEXTS[0]], "Where does George Keller live?")
    engine = clients(one)
    # A test above deleted it, and a miss is precomputed in the background.
    wait_until(lambda: hits(engine, TEXTS[0]) == 1, WAIT_S, "it is stored again")
    stored, counted = one.stored(), one.counted("chunk_hits", "reused_tokens", "load_seconds", "ingested_chunks")
    before = engine.generate(prompt, mode="full", max_tokens=8)
    one.rpc("reload_weights", weights_path=str(other_weights(tmp_path / "new")))
    one.post("/reset_prefix_cache")
    # The scheduler learns of the update with the first request's step; the workers reject the jobs before that.
    modes = ("blend", "reuse", "prefix", "full")
    answers = {mode: engine.generate(prompt, mode=mode, max_tokens=8) for mode in modes}
    for mode, answer in answers.items():
        assert (answer.token_ids, answer.report.num_chunk_hits) == (answers["full"].token_ids, 0)
        assert ("weights were updated" in answer.report.refused_reason) == (mode in ("blend", "reuse"))
    assert answers["full"].token_ids != before.token_ids
    with pytest.raises(RagblendError, match=r"not stored: the model's weights were updated.* restart vLLM"):
        engine.precompute("This text is not stored.")
    one.rpc("reload_weights", weights_path=str(find_checkpoint("demo").path))
    one.post("/reset_prefix_cache")
    again = engine.generate(prompt, max_tokens=8)
    assert (again.token_ids, again.report.num_chunk_hits) == (before.token_ids, 0), "the first weights, until a restart"
    assert (one.stored(), one.counted(*counted)) == (stored, counted)
    said = (one.home / "log").read_text(errors="replace")
    assert said.count("the model's weights were updated") == 2  # once, and as why the document is not stored


def test_a_restart_reuses_again(replicas, clients):
    one = replicas[0]
    one.stop()
    one.start()
    one.server.wait(900)
    assert hits(clients(one), TEXTS[0]) == 1


def test_after_an_update_answers_are_those_of_vllm_alone(tmp_path, caplog):
    new, ids = other_weights(tmp_path / "new"), random_ids(60, 1)
    prompt = [*ids, *random_ids(6, 2)]
    update = {"kwargs": {"weights_path": str(new)}}
    with running_vllm(WEIGHTS, None) as llm:
        old = tokens(ask(llm, prompt))
        llm.collective_rpc("reload_weights", **update)
        llm.reset_prefix_cache()
        expected = tokens(ask(llm, prompt))
    assert expected != old
    asked: list[dict[str, Any]] = [{"mode": mode, "ratio": 0.5} for mode in ("blend", "blend", "full")]
    asked += [{"mode": "reuse"}, {"mode": "ingest", "span": [4, 40]}]
    with running_vllm(WEIGHTS, tmp_path / "kv", {"slice_tokens": 4, "prefix_ids": ids[:4]}) as llm:
        for start, end in ((4, 32), (32, 60)):
            ingest(llm, ids[:4], ids[start:end])
        assert report(ask(llm, prompt, asked[0]))["num_chunk_hits"] == 2
        stored = set(DiskStore(tmp_path / "kv").keys())
        worker, num_under_way = connector_worker(), []
        run_slice = worker.run_slice

        def updating(*args: Any) -> Any:
            finished = run_slice(*args)
            if worker._jobs and not num_under_way:
                num_under_way.append(len(worker._jobs))
                llm.collective_rpc("reload_weights", **update)
                llm.reset_prefix_cache()
            return finished

        worker.run_slice = updating
        for _ in range(2):
            answers = ask_all(llm, [(prompt, params) for params in asked if num_under_way or params["mode"] == "blend"])
            for answer in answers:
                assert tokens(answer) == expected
                assert (report(answer)["num_chunk_hits"], report(answer)["num_reused_tokens"]) == (0, 0)
        assert num_under_way == [2]
        assert set(DiskStore(tmp_path / "kv").keys()) == stored
    (line,) = (record for record in caplog.records if "weights were updated" in record.getMessage())
    assert line.levelname == "WARNING"


def other_weights(target: Path) -> Path:
    """The demo model with noise on its weights: another answer."""
    target.mkdir()
    torch.manual_seed(0)
    for path in WEIGHTS.iterdir():
        if path.suffix == ".safetensors":
            noisy = {name: each + 0.1 * torch.randn_like(each) for name, each in load_file(path).items()}
            save_file(noisy, target / path.name, metadata={"format": "pt"})
        elif path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    return target
