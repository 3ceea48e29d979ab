"""What the chart in deploy/ would run, run: its command and settings, its probes, its metrics, and how a pod stops.

Only the model, addresses and directories are others. One server; the tests are one story and run in order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo_texts import QUESTION, A
from served import environment
from servers import HttpServer, RedisServer, running_redis, wait_until

from benchmarks.servers import free_port
from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.options import GenerationOptions

sys.path.append(str(Path(__file__).parents[1] / "deploy"))
from charts import CHART, container, rendered
from metric_names import expressions, metrics_in

pytestmark = pytest.mark.timeout(1200)
KEY = "a-key-for-tests"
ON_CPU = ("--enforce-eager", "--max-model-len=2048", f"--kv-cache-memory-bytes={64 << 20}")
SAMPLES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket",)}  # of a metric, by its kind


class Pod:
    """The server of a rendered chart, as a process of this machine."""

    def __init__(self, home: Path, cache: RedisServer) -> None:
        flags = ",".join(ON_CPU)
        self.spec = container(
            rendered("model=demo", "gpusPerReplica=0", f"vllmArgs={{{flags}}}", f"remote.url={cache.url}")
        )
        self.store, port = home / "kv", free_port()
        places = {"/kv": str(self.store), "/cache": str(home / "cache"), "/home/ragblend": str(home)}
        own = {each["name"]: each["value"] for each in self.spec["env"]}
        for name, value in own.items():
            own[name] = next((value.replace(old, new) for old, new in places.items() if value.startswith(old)), value)
        command = [*self.spec["command"], *self.spec["args"]]
        command[command.index("--host=0.0.0.0")] = "--host=127.0.0.1"
        command[command.index("--port=8000")] = f"--port={port}"
        own |= {"RAGBLEND_API_KEY": KEY, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        self.server = HttpServer(command, f"http://127.0.0.1:{port}", home, environment(**own))
        self.url = self.server.url

    def probe(self, name: str) -> httpx.Response:
        """Ask as the kubelet does: without a key."""
        return httpx.get(f"{self.url}{self.spec[name]['httpGet']['path']}", timeout=30)

    def metrics(self) -> set[str]:
        """Every name that is there to be asked for, counted yet or not."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        named = {match[1] for line in lines if (match := re.match(r"(vllm:\w+)[{ ]", line))}
        # A series with its own label appears with its first event; its type and help are exported before.
        kinds = [match.groups() for line in lines if (match := re.match(r"# TYPE (vllm:\w+) (\w+)", line))]
        return named | {name + end for name, kind in kinds for end in SAMPLES[kind]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    yield from running_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def pod(cache, tmp_path_factory):
    pod = Pod(tmp_path_factory.mktemp("pod"), cache)
    try:
        pod.server.wait(900)
        yield pod
    finally:
        pod.server.stop()


@pytest.fixture(scope="module")
def engine(pod):
    with load_engine("demo", backend=pod.url, api_key=KEY) as engine:
        yield engine


def test_the_chart_s_command_starts_a_server_that_passes_its_probes(pod):
    assert [pod.probe(name).status_code for name in ("startupProbe", "livenessProbe", "readinessProbe")] == [200] * 3
    parts = dict.fromkeys(("engine", "store", "remote", "catalog"), "ok")
    assert pod.probe("readinessProbe").json() == {"ready": True, **parts}


def test_it_ingests_and_answers_from_the_volume_that_the_chart_mounts(pod, engine):
    engine.precompute(A)
    answer = engine.generate(Prompt([A], QUESTION), max_tokens=8)
    assert (answer.text, answer.report.num_chunk_hits) == ("Kinport", 1)
    assert list(pod.store.glob("*/*"))


def test_who_runs_it_sees_and_clears_what_is_stored(pod, engine):
    def ask(method: str, path: str, body: Any = None, **query: str) -> Any:
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{pod.url}/v1/ragblend/store{path}"
        answer = httpx.request(method, url, json=body, params=query, headers=headers, timeout=60)
        return answer.json() if answer.status_code == 200 else answer.status_code

    theirs = "Arthur Archer lives in Calville."
    with load_engine("demo", backend=pod.url, api_key=KEY, namespace="theirs") as other:
        other.precompute(theirs)
        state = ask("GET", "")
        assert {name: held["num_kv"] for name, held in state["namespaces"].items()} == {"": 1, "theirs": 1}
        assert state["nbytes"] == sum(held["nbytes"] for held in state["namespaces"].values()) > 0
        assert state["budget_bytes"] == 180 << 30
        assert state["remote"]["reachable"]
        first = ask("GET", "/chunks", limit="1")
        second = ask("GET", "/chunks", limit="1", after=first["next"])
        assert second["next"] is None
        keys = {each["chunks"][0]["key"] for each in (first, second)}
        assert keys == set(DiskStore(pod.store).keys())
        assert ask("POST", "/clear", {"namespace": "theirs"}) == {"num_removed": 1, "num_unread": 0}
        assert not other.is_stored(theirs)
        assert engine.is_stored(A)
        assert [each["namespace"] for each in ask("GET", "/chunks")["chunks"]] == [""]
    assert ask("GET", "/chunks", limit="0") == ask("POST", "/clear", {}) == 400
    assert httpx.get(f"{pod.url}/v1/ragblend/store", timeout=60).status_code == 401


def test_every_metric_that_dashboard_rules_autoscaling_and_operators_page_name_is_there(pod):
    asked = [query for name in ("dashboard.json", "rules.yaml") for query in expressions(CHART / "monitoring" / name)]
    (scaled,) = [each for each in rendered("autoscaling.enabled=true") if each["kind"] == "ScaledObject"]
    asked.append(scaled["spec"]["triggers"][0]["metadata"]["query"])
    asked.append((CHART.parents[2] / "docs" / "operators.md").read_text())
    names = metrics_in(asked)
    assert len(names) >= 15
    assert names <= pod.metrics()


def test_a_missing_store_makes_the_pod_unready_but_no_missing_cache(pod, cache):
    cache.kill()
    # Probes share answers that are some seconds old.
    wait_until(lambda: pod.probe("readinessProbe").json()["remote"] == "unreachable", 60, "the cache is missed")
    assert pod.probe("readinessProbe").status_code == 200
    away = pod.store.with_name("away")
    pod.store.rename(away)
    wait_until(lambda: pod.probe("readinessProbe").status_code == 503, 60, "the store is missed")
    assert pod.probe("readinessProbe").json()["store"] == "missing"
    assert pod.probe("livenessProbe").status_code == 200  # a restart would not repair it
    if pod.store.exists():
        pod.store.rmdir()
    away.rename(pod.store)
    wait_until(lambda: pod.probe("readinessProbe").status_code == 200, 60, "the pod is ready again")


def test_on_sigterm_answers_under_way_end_and_new_ones_are_sent_elsewhere(pod, engine):
    prompt = Prompt([A], QUESTION)
    body = engine.request_body(prompt, GenerationOptions(max_tokens=1500)) | {"ignore_eos": True}
    events: list[str] = []
    has_begun = threading.Event()

    def listen() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream(
            "POST", f"{pod.url}/v1/chat/completions", json=body, headers=headers, timeout=300
        ) as response:
            for line in filter(None, response.iter_lines()):
                events.append(line)
                has_begun.set()

    listener = threading.Thread(target=listen)
    listener.start()
    assert has_begun.wait(60)
    os.kill(pod.server._process.pid, signal.SIGTERM)
    refused = []
    while not refused and listener.is_alive():
        answer = httpx.post(f"{pod.url}/v1/completions", json={"model": "demo", "prompt": "Hi"}, timeout=60)
        refused = [answer] if answer.status_code == 503 else []
    assert refused
    assert refused[0].headers["retry-after"]
    assert pod.probe("readinessProbe").json()["engine"] == "stopping"
    assert pod.probe("readinessProbe").status_code == 503
    assert pod.probe("livenessProbe").status_code == 200  # killing it would cut the answers off
    listener.join(300)
    assert events[-1] == "data: [DONE]"
    facts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [fact["usage"]["completion_tokens"] for fact in facts if fact.get("usage")] == [1500]
    assert '"num_chunk_hits": 1' in events[-2]
    assert pod.server._process.wait(120) == 0
