"""Rolling restarts of the two replicas of `deploy/compose.yaml` under prompts and ingestion: nothing is lost.

    python -m benchmarks.soak.rolling --restarts 20 --out data/results/rolling.json

The compose file's commands, settings and nginx run as processes of this machine (`compose`), with a PostgreSQL and a
Redis. Clients of the openai package, with its default retries, ask through nginx, every second one as a stream. Another
one sends documents through nginx, so that some wait at all times. The replicas are stopped and started in turn as
`docker compose up --force-recreate --no-deps` does it: SIGTERM, SIGKILL after `stop_grace_period`, the same disk, and
the next one when the health check passes. The run fails unless:

- every prompt is answered, and every document that is sent is accepted;
- each answer is the one that the same prompt had before the first restart, in mode `full` by vLLM alone and in the
  default mode with all chunks stored. Compared are the tokens before the first uncertain one (`work.MARGIN`);
- in the end every accepted document is stored, none has failed, and a prompt with it finds its chunk.

Read `Rolling.run` first.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import typer

from benchmarks.postgres import run_postgres
from benchmarks.results import write_both
from benchmarks.servers import Redis
from benchmarks.soak.compose import REPLICAS, ComposeReplica, read_plan, start_nginx
from benchmarks.soak.work import ANSWER_TOKENS, MARGIN
from ragblend.cli.printing import print_notice
from ragblend.errors import BackendUnreachableError, RagblendError
from ragblend.lab.bench.ttft_vllm import vllm_hardware_card

KEY = "key-of-a-rolling-restart"
HEADERS = {"Authorization": f"Bearer {KEY}"}
DOCUMENTS = "/v1/ragblend/documents"
READY_S, STORED_S = 300.0, 900.0
NUM_ASKED, CHUNKS_PER_PROMPT = 24, 3  # documents that are stored before the first restart, and are asked about
MAX_PENDING, BATCH = 30, 5  # documents that are sent later
NUM_CHECKED = 300  # documents that are asked about in the end
ON_SHARED_CORES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # docs/vllm.md: engine and worker in one process
PAUSE_S = 0.2  # of each client between two prompts
WORDS = """George Keller Julia Bishop Arthur Archer Ben Howard Tom Ashby Lisa Carter Kinport Wesstad Calville Easton
Synon sells knives drones clocks lives works office company firm town harbour flute"""


def text_of(number: int) -> str:
    """Return the only chunk of document `number`."""
    return f"{number} {' '.join(random.Random(number).sample(WORDS.split(), 20))}."


class Rolling:
    """One run. `counts` are what the clients saw, `problems` what must not happen, `restarts` how each stop ended."""

    def __init__(self, home: Path, stack: ExitStack, clients: int, seed: int) -> None:
        self._home, self._stack, self._num_clients, self._seed = home, stack, clients, seed
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.restarts: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self._references: dict[tuple[int, str], list[str]] = {}
        self._ended, self._lock = threading.Event(), threading.Lock()

    def run(self, restarts: int, minutes: float) -> None:
        """Start the deployment, restart its replicas under load, and check what is stored in the end.

        No restart begins after `minutes`.
        """
        end_s = time.monotonic() + 60 * minutes
        self._start()
        self._send(range(NUM_ASKED))
        self._wait_stored()
        for number in range(NUM_ASKED):
            for mode in ("full", "blend"):
                self._references[number, mode] = self._certain(number, mode)
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self._num_clients)]
        threads.append(threading.Thread(target=self._ingest))
        for thread in threads:
            thread.start()
        try:
            for number in range(restarts):
                if time.monotonic() < end_s:
                    self._restart(REPLICAS[number % 2])
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()
        self._wait_stored()
        self._check_documents()

    def _start(self) -> None:
        plan, stack = read_plan(KEY), self._stack
        database = stack.enter_context(run_postgres())
        cache = Redis(self._home)
        stack.callback(cache.kill)
        cache.start(*plan["services"]["cache"]["command"][1:])
        self._replicas: dict[str, ComposeReplica] = {}
        for name in REPLICAS:
            replica = ComposeReplica(plan["services"][name], self._home / name, cache, database.url, **ON_SHARED_CORES)
            stack.callback(replica.kill)
            replica.start()
            self._replicas[name] = replica
        for replica in self._replicas.values():
            replica.wait()
        urls = {name: replica.url for name, replica in self._replicas.items()}
        balancer = start_nginx(plan["configs"]["nginx"]["content"], urls, self._home / "balancer")
        stack.callback(balancer.stop)
        balancer.wait()
        self._url = balancer.url

    def _restart(self, name: str) -> None:
        replica = self._replicas[name]
        pending = self._counts_of_documents()["num_waiting"]
        found = replica.stop_as_compose()
        replica.start()
        start_s = time.monotonic()
        while not _is_ready(replica.url):
            if time.monotonic() > start_s + READY_S:
                raise BackendUnreachableError(f"{name} is not ready {READY_S:g} s after its start")
            time.sleep(0.5)
        found |= {"replica": name, "pending": pending, "ready_s": round(time.monotonic() - start_s, 1)}
        self.restarts.append(found)
        if found["exit_code"] != 0:
            self.problems.append(f"{name} ended with {found['exit_code']} after {found['seconds']} s")
        print_notice(f"restart {len(self.restarts)}: {found}; {self.counts['answers']} answers")

    # -- prompts

    def _client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self._url}/v1", api_key=KEY)

    def _ask(self, number: int) -> None:
        draw, client = random.Random(f"{self._seed} {number}"), self._client()
        while not self._ended.is_set():
            prompt, mode = draw.randrange(NUM_ASKED), draw.choice(("full", "blend", "exact"))
            start_s = time.monotonic()
            try:
                tokens, num_hits = self._answer(client, prompt, mode, stream=draw.random() < 0.5)
            except Exception as error:  # the client has given up
                self._fail("failed_answers", f"prompt {prompt} in mode {mode}: {error!r}")
                continue
            with self._lock:
                self.seconds.append(time.monotonic() - start_s)
            self._judge(prompt, mode, tokens, num_hits)
            time.sleep(PAUSE_S)

    def _judge(self, prompt: int, mode: str, tokens: list[str], num_hits: int) -> None:
        right = self._references[prompt, "blend" if mode == "blend" else "full"]
        is_comparable = mode != "blend" or num_hits == CHUNKS_PER_PROMPT
        with self._lock:
            self.counts["answers"] += 1
            self.counts["answers_compared"] += is_comparable
            self.counts["chunks_asked"] += CHUNKS_PER_PROMPT if mode != "full" else 0
            self.counts["chunks_hit"] += num_hits
        if is_comparable and tokens[: len(right)] != right:
            self._fail("wrong_answers", f"prompt {prompt} in mode {mode}: {tokens}, not {right}")

    def _answer(self, client: Any, prompt: int, mode: str, *, stream: bool) -> tuple[list[str], int]:
        """Return the tokens of an answer, and the number of chunks that were hits."""
        request = _request(prompt, mode)
        if not stream:
            answer = client.completions.create(**request)
            return list(answer.choices[0].logprobs.tokens), _num_hits(answer.model_extra)
        tokens, num_hits = list[str](), 0
        for event in client.completions.create(**request, stream=True):
            num_hits = max(num_hits, _num_hits(event.model_extra))
            for choice in event.choices:
                tokens += choice.logprobs.tokens if choice.logprobs is not None else ()
        return tokens, num_hits

    def _certain(self, prompt: int, mode: str) -> list[str]:
        """Return the tokens of an answer before the first one that another one nearly equals."""
        answer = self._client().completions.create(**_request(prompt, mode))
        if mode == "blend" and _num_hits(answer.model_extra) != CHUNKS_PER_PROMPT:
            raise RagblendError(f"{_num_hits(answer.model_extra)} of {CHUNKS_PER_PROMPT} chunks are stored")
        found, logprobs = list[str](), answer.choices[0].logprobs
        for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
            first, second, *_ = sorted(top.values(), reverse=True)
            if first - second < MARGIN:
                break
            found.append(token)
        return found

    # -- documents

    def _ingest(self) -> None:
        while not self._ended.is_set():
            try:
                if self._counts_of_documents()["num_waiting"] < MAX_PENDING:
                    self._send(range(1000 + len(self.sent), 1000 + len(self.sent) + BATCH))
            except Exception as error:  # the client has given up
                self._fail("refused_documents", repr(error))
            time.sleep(0.5)

    def _send(self, numbers: range) -> None:
        documents = [{"id": str(number), "chunks": [text_of(number)]} for number in numbers]
        body = {"collection": "kb", "documents": documents}
        self._client().post(DOCUMENTS.removeprefix("/v1"), body=body, cast_to=object)
        self.sent += numbers

    def _counts_of_documents(self) -> dict[str, int]:
        answer = self._client().get(f"{DOCUMENTS.removeprefix('/v1')}?collection=kb", cast_to=object)
        return dict(answer["collections"].get("kb", {"num_stored": 0, "num_waiting": 0, "num_failed": 0}))

    def _wait_stored(self) -> None:
        end_s = time.monotonic() + STORED_S
        while self._counts_of_documents()["num_waiting"] and time.monotonic() < end_s:
            time.sleep(1.0)

    def _check_documents(self) -> None:
        counts = self._counts_of_documents()
        self.counts.update({f"documents_{name.removeprefix('num_')}": count for name, count in counts.items()})
        lost = len(self.sent) - sum(counts[name] for name in ("num_stored", "num_waiting", "num_failed"))
        for kind, count in (("failed", counts["num_failed"]), ("pending", counts["num_waiting"]), ("lost", lost)):
            if count:
                self._fail(f"documents_{kind}", f"{count} of {len(self.sent)} documents are {kind}")
        client = self._client()
        for number in random.Random(self._seed).sample(self.sent, min(len(self.sent), NUM_CHECKED)):
            answer = client.completions.create(**_request(number, "blend", num_chunks=1))
            if _num_hits(answer.model_extra) != 1:
                self._fail("documents_not_found", f"document {number} is stored, and a prompt does not find it")

    def _fail(self, kind: str, what: str) -> None:
        with self._lock:
            self.counts[kind] += 1
            self.problems.append(f"{kind}: {what}")

    def facts(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        kinds = (
            "failed_answers", "wrong_answers", "refused_documents", "documents_failed", "documents_pending",
            "documents_lost", "documents_not_found",
        )  # fmt: skip
        return {
            "command": "benchmarks.soak.rolling",
            "hardware": vllm_hardware_card(),
            "config": {"restarts": len(self.restarts), "clients": self._num_clients, "seed": self._seed},
            "num_documents": len(self.sent),
            "median_s": round(median(self.seconds), 3),
            "max_s": round(max(self.seconds), 3),
            "counts": {name: count for name, count in sorted(self.counts.items()) if name not in kinds},
            "wrong": {kind: self.counts[kind] for kind in kinds},
            "restarts": self.restarts,
            "problems": self.problems[:50],
        }


def _request(prompt: int, mode: str, num_chunks: int = CHUNKS_PER_PROMPT) -> dict[str, Any]:
    """Return the arguments of the openai package for a prompt over documents. Mode `exact`: blend at ratio 1.0."""
    numbers = [prompt] if num_chunks == 1 else [(prompt + step) % NUM_ASKED for step in range(num_chunks)]
    text = f"<s>{''.join(f'<doc> {text_of(number)}' for number in numbers)}<q> What does the firm sell?<a>"
    params = {"mode": "blend", "ratio": 1.0} if mode == "exact" else {"mode": mode}
    return {
        "model": "demo",
        "prompt": text,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "extra_body": {"add_special_tokens": False, "kv_transfer_params": {"ragblend": params}},
    }


def _num_hits(extra: dict[str, Any] | None) -> int:
    params = (extra or {}).get("kv_transfer_params") or {}
    return int((params.get("ragblend") or {}).get("num_chunk_hits", 0))


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ragblend/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def main(restarts: int = 20, clients: int = 4, seed: int = 0, minutes: float = 120.0, out: Path | None = None) -> None:
    """Run the restarts. Print JSON to stdout, and write it to `out`. The exit code is 1 if something was lost."""
    with tempfile.TemporaryDirectory(prefix="ragblend-rolling-") as home, ExitStack() as stack:
        run = Rolling(Path(home), stack, clients, seed)
        run.run(restarts, minutes)
        facts = run.facts()
    write_both(facts, out)
    if facts["problems"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
