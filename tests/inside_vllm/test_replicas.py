"""deploy/compose.yaml without containers: its commands, settings and nginx configuration, as processes of this machine.

Only addresses and directories are others, and nothing is installed. The tests are one story and run in order.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, OpenAI
from served import make_known, metrics
from servers import RedisServer, wait_until

from benchmarks.servers import ServerProcess
from benchmarks.soak.compose import (
    FILE,
    REPLICAS,
    ComposeReplica,
    find_nginx,
    read_plan,
    replace_once,
    search_path,
    start_nginx,
)
from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import open_remote
from ragblend.errors import BackendUnreachableError, NotFoundError
from ragblend.options import GenerationOptions

pytestmark = pytest.mark.timeout(1200)  # two servers start at once, on one core perhaps
KEY = "a-key-for-tests"
HOMES = {
    "George Keller": "Kinport", "Julia Bishop": "Wesstad", "Arthur Archer": "Calville", "Ben Howard": "Kinport",
    "Tom Ashby": "Wesstad", "Lisa Carter": "Calville", "Paul Fisher": "Kinport", "Anna Mason": "Wesstad",
    "Mark Turner": "Calville", "Ruth Palmer": "Kinport", "Henry Baker": "Wesstad", "Clara Porter": "Calville",
}  # fmt: skip
TEXTS = {person: f"{person} lives in {home}. {person} works for Synon." for person, home in HOMES.items()}


@dataclass
class Deployment:
    """What `docker compose up` would have started."""

    services: dict[str, Any]
    cache: RedisServer
    replicas: dict[str, ComposeReplica]
    balancer: ServerProcess
    home: Path

    def metrics(self, replica: str) -> dict[str, float]:
        """A replica's own counters."""
        return metrics(self.replicas[replica].url)

    def keys(self, replica: str) -> set[str]:
        """The chunks on a replica's own disk."""
        return set(DiskStore(self.home / replica / "kv").keys())


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    try:
        find_nginx()
    except NotFoundError as error:
        pytest.skip(str(error))
    home = tmp_path_factory.mktemp("compose")
    cache = RedisServer(home)
    plan = read_plan(KEY)
    services = plan["services"]
    with ExitStack() as stack:
        stack.callback(cache.kill)
        cache.start(*services["cache"]["command"][1:])
        replicas = {}
        for name in REPLICAS:  # both at once: importing vLLM takes long
            replicas[name] = ComposeReplica(services[name], home / name, cache, catalog=None)  # no PostgreSQL here
            stack.callback(replicas[name].stop)
            replicas[name].start()
        urls = {name: replica.url for name, replica in replicas.items()}
        balancer = start_nginx(plan["configs"]["nginx"]["content"], urls, home / "balancer")
        stack.callback(balancer.stop)
        for server in replicas.values():
            server.wait(900)
        balancer.wait()
        yield Deployment(services, cache, replicas, balancer, home)


@pytest.fixture(scope="module")
def engine(deployment):
    """Our client, through the balancer."""
    with load_engine("demo", backend=deployment.balancer.url, api_key=KEY, on_miss="inline") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the transformers engine in this process, over a separate store, for the reference answers."""
    with load_engine("demo", tmp_path_factory.mktemp("alone"), on_miss="inline") as alone:
        for text in TEXTS.values():
            alone.precompute(text)
        yield alone


def prompts(count: int, seed: int) -> list[Prompt]:
    """Questions about one of several chunks, in random orders."""
    dice, made = random.Random(seed), []
    for _ in range(count):
        people = dice.sample(list(HOMES), dice.randint(3, 6))
        made.append(Prompt([TEXTS[person] for person in people], f"Where does {dice.choice(people)} live?"))
    return made


def ask(engine: Any, prompt: Prompt) -> Any:
    return engine.generate(prompt, max_tokens=8)


def assert_same(answer: Any, alone: Any) -> None:
    assert (answer.text, answer.token_ids) == (alone.text, alone.token_ids)
    assert answer.report.num_chunk_hits == answer.report.num_chunks == alone.report.num_chunk_hits
    assert answer.report.num_recomputed_tokens == alone.report.num_recomputed_tokens


def test_the_commands_at_the_top_ingest_through_the_balancer(deployment, engine):
    documents = deployment.home / "docs"
    documents.mkdir()
    for person, text in TEXTS.items():
        (documents / f"{person}.txt").write_text(text)
    commands = re.findall(r"^#   (.+)$", FILE.read_text(), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["export", "docker", "ragblend"]
    script = replace_once("\n".join([commands[0], commands[2]]), "http://localhost:8000", deployment.balancer.url)
    script = replace_once(replace_once(script, "MODEL=Qwen/Qwen3-8B", "MODEL=demo"), "KEY=change-me", f"KEY={KEY}")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAGBLEND_")} | {
        "PATH": search_path()
    }
    done = subprocess.run(["bash", "-c", script], cwd=deployment.home, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [deployment.keys(replica) for replica in REPLICAS]
    assert not all(found)  # the replica that got the request has stored them
    assert len(found[0] | found[1]) == len(TEXTS)
    for replica in REPLICAS:  # which find what they were sent themselves
        make_known(deployment.home / replica / "kv", engine.renderer, [*TEXTS.values()])
    counted = [deployment.metrics(replica)["vllm:ragblend_ingested_chunks_total"] for replica in REPLICAS]
    assert counted == [len(keys) for keys in found]


def test_every_replica_finds_every_chunk_and_answers_as_one_engine_alone(deployment, engine, expected):
    remote = open_remote(deployment.cache.url)
    wait_until(lambda: len(list(remote.keys())) >= len(TEXTS), 60, "all are sent to the cache, in the background")
    before = [deployment.metrics(replica) for replica in REPLICAS]
    asked = prompts(24, 0)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: ask(engine, prompt), asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert_same(answer, ask(expected, prompt))
    after = [deployment.metrics(replica) for replica in REPLICAS]
    grown = {name: [b[name] - a[name] for a, b in zip(before, after, strict=True)] for name in before[0]}
    assert all(grown["vllm:ragblend_requests_total"])
    assert sum(grown["vllm:ragblend_requests_total"]) == len(asked)
    assert sum(grown["vllm:ragblend_chunk_hits_total"]) == sum(answer.report.num_chunks for answer in answers)
    assert sum(grown["vllm:ragblend_chunk_misses_total"]) == 0
    assert any(grown["vllm:ragblend_remote_hits_total"])  # what the other one had ingested
    assert sum(grown["vllm:ragblend_ingested_chunks_total"]) == 0


def test_streams_come_through_as_they_are_made_and_so_does_hanging_up(deployment, engine, expected):
    for prompt in prompts(4, 1):
        stream = engine.stream(prompt, max_tokens=8)
        pieces = list(stream)
        assert "".join(pieces).strip() == ask(expected, prompt).text
        assert stream.result.report.num_chunk_hits == len(prompt.chunks)
    limit = 3000  # seconds of work, of which the client that hangs up after its first piece wants none
    body = engine.request_body(prompts(1, 2)[0], GenerationOptions(max_tokens=limit)) | {"ignore_eos": True}
    before = num_generated(deployment)
    headers, url = {"Authorization": f"Bearer {KEY}"}, f"{deployment.balancer.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data: {")
    assert 0 < settled(lambda: num_generated(deployment)) - before < limit


def settled(value: Callable[[], float], still_s: float = 3.0, timeout_s: float = 120.0) -> float:
    """`value()` once it has not changed for `still_s`: counters come a little later than tokens."""
    end_s, last, since_s = time.monotonic() + timeout_s, value(), time.monotonic()
    while time.monotonic() < min(end_s, since_s + still_s):
        time.sleep(0.2)
        if (now := value()) != last:
            last, since_s = now, time.monotonic()
    return last


def num_generated(deployment: Deployment) -> float:
    return sum(deployment.metrics(replica)["vllm:generation_tokens_total"] for replica in REPLICAS)


def test_the_balancer_shows_only_what_the_key_guards(deployment):
    url, replica = deployment.balancer.url, deployment.replicas["replica-0"].url
    prompt = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    assert httpx.post(f"{replica}/invocations", json=prompt, timeout=60).status_code == 200  # vLLM's own, without a key
    assert httpx.get(f"{replica}/metrics", timeout=60).status_code == 200
    for shut in (
        "/invocations",
        "/metrics",
        "/metrics/",
        "//invocations",
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "/docs",
    ):
        assert status(url, shut) == status(url, shut, prompt) == 404, shut
    assert status(url, "/metrics/../v1/models") == 401  # neither side reads it as /metrics
    for wrong in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.post(f"{url}/v1/completions", json=prompt, headers=wrong, timeout=60).status_code == 401
        assert httpx.get(f"{url}/v1/ragblend", headers=wrong, timeout=60).status_code == 401
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def status(url: str, path: str, body: Any = None) -> int:
    """Of an answer without a key, to a path that is sent as it is written."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
    return connection.getresponse().status


def test_the_health_checks_pass(deployment):
    if shutil.which("curl") is None or shutil.which("redis-cli") is None:
        pytest.skip("no curl or redis-cli")
    for name, server in deployment.replicas.items():
        kind, *check = deployment.services[name]["healthcheck"]["test"]
        check[-1] = replace_once(check[-1], "http://localhost:8000", server.url)
        assert kind == "CMD"
        assert subprocess.run(check, capture_output=True).returncode == 0
    kind, tool, *words = deployment.services["cache"]["healthcheck"]["test"]
    assert (kind, tool) == ("CMD", "valkey-cli")
    check = ["redis-cli", "-p", str(deployment.cache.port), *words]
    assert subprocess.run(check, capture_output=True, text=True).stdout == "PONG\n"


def test_without_the_cache_replicas_answer_from_what_they_have(deployment, engine, expected):
    for server in deployment.replicas.values():  # the balancer alone may have kept a chunk from one of them
        with load_engine("demo", backend=server.url, api_key=KEY, on_miss="inline") as direct:
            for person, text in TEXTS.items():
                ask(direct, Prompt([text], f"Where does {person} live?"))
    # Entries from the remote tier are written in the background.
    wait_until(lambda: all(len(deployment.keys(name)) >= len(TEXTS) for name in REPLICAS), 60, "each disk has all")
    deployment.cache.kill()
    for prompt in prompts(6, 3):
        assert_same(ask(engine, prompt), ask(expected, prompt))
    new = "Emma Cooper lives in Kinport. Emma Cooper works for Synon."
    engine.precompute(new)
    answers = [ask(engine, Prompt([new], "Where does Emma Cooper live?")) for _ in range(4)]
    assert {answer.text for answer in answers} == {"Kinport"}
    assert {answer.report.num_chunk_hits for answer in answers} == {0, 1}  # a hit where it was ingested


def test_when_a_replica_is_killed_the_other_goes_on(deployment, engine, expected):
    def outcome(prompt: Prompt) -> Any:
        try:
            return ask(engine, prompt)
        except BackendUnreachableError as error:  # it died in the middle of this answer
            return error

    asked = prompts(16, 4)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(outcome, prompt) for prompt in asked]
        answers[3].result()
        deployment.replicas["replica-1"].kill()
        outcomes = [answer.result() for answer in answers]
    lost = [found for found in outcomes if isinstance(found, BackendUnreachableError)]
    assert len(lost) <= 4  # those under way
    for prompt, found in zip(asked, outcomes, strict=True):
        if found not in lost:
            assert_same(found, ask(expected, prompt))
    before = deployment.metrics("replica-0")["vllm:ragblend_requests_total"]
    for prompt in prompts(6, 5):
        assert_same(ask(engine, prompt), ask(expected, prompt))
    assert deployment.metrics("replica-0")["vllm:ragblend_requests_total"] == before + 6
    assert httpx.get(f"{deployment.balancer.url}/health", timeout=60).status_code == 200
