"""Clients of the soak test: draw requests from a mix, send them, disconnect at random, and retry at the other replica.

Each client is a thread with its own random generator, so the seed determines the requests, but not their timing. Read
`Client.run` first.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.soak.deployment import Replica, key_of
from benchmarks.soak.ledger import Attempt, Ledger, Outcome, is_stored
from benchmarks.soak.work import (
    ANSWER_TOKENS,
    MARGIN,
    TENANTS,
    Question,
    Reference,
    Text,
    Work,
    exclude_tokens,
    request_body,
)
from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.client import sse_events
from ragblend.engine.vllm.params import VllmMode, report_from_params, vllm_filters_and_penalties
from ragblend.errors import RagblendError
from ragblend.options import GenerationOptions
from ragblend.prompt.types import Prompt

MIX: dict[tuple[VllmMode, float | None, bool], float] = {
    # (mode, ratio or None for the server's default, True for chunks made during the run): share of the requests
    ("ingest", None, False): 0.10,
    ("ingest", None, True): 0.04,
    ("blend", None, True): 0.02,
    ("blend", None, False): 0.40,
    ("blend", 1.0, False): 0.10,
    ("reuse", None, False): 0.20,
    ("prefix", None, False): 0.08,
    ("full", None, False): 0.06,
}
DISCONNECT_SHARE, STREAM_SHARE = 0.08, 0.5  # shares of the requests
DOCUMENT_SHARE = 0.02  # of the requests: a document is sent, asked about, deleted, and asked about again
TIMEOUT_S = 120.0  # for a request that it does not mean to leave
STORED_S = 300.0  # for a document, over a restart of its replica
DOCUMENTS = "/v1/ragblend/documents"
RETRY_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it is sent.

    after_s: disconnect after this many seconds without data. after_events: disconnect after this many streamed tokens.
    None: wait for the whole answer.
    """

    tenant: str
    mode: VllmMode
    ratio: float | None
    question: Question
    is_fresh: bool
    stream: bool
    after_s: float | None = None
    after_events: int | None = None


class RequestGate:
    """Counter of requests that limits their number and time. While it is closed, no request can begin."""

    def __init__(self, num_requests: int, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s
        self._num_left, self._lock = num_requests, threading.Condition()
        self.num_begun = self.num_done = self._num_active = 0
        self._is_closed, self.hold_at = False, num_requests

    def enter(self) -> bool:
        """Wait until a request may begin. Return False if all requests were made, or the time limit has passed."""
        with self._lock:
            self._lock.wait_for(lambda: not self._num_left or not (self._is_closed or self.num_begun >= self.hold_at))
            if not self._num_left or time.monotonic() > self._end_s:
                self._num_left = 0
                self._lock.notify_all()
                return False
            self._num_left -= 1
            self.num_begun += 1
            self._num_active += 1
            return True

    def leave(self) -> None:
        """Record the end of a request."""
        with self._lock:
            self._num_active -= 1
            self.num_done += 1
            self._lock.notify_all()

    def close(self) -> None:
        """Block new requests, and wait until all begun requests have ended."""
        with self._lock:
            self._is_closed = True
            self._lock.wait_for(lambda: not self._num_active)

    def open(self, hold_at: int) -> None:
        """Allow requests to begin, up to number `hold_at`."""
        with self._lock:
            self._is_closed, self.hold_at = False, hold_at
            self._lock.notify_all()

    def wait_for(self, num_done: int) -> None:
        """Wait until `num_done` requests have ended, or no more will come."""
        with self._lock:
            self._lock.wait_for(lambda: self.num_done >= num_done or not (self._num_left or self._num_active))


class Client(threading.Thread):
    """Thread that sends requests in turn. `error`: the exception that ended the thread, or None."""

    def __init__(
        self,
        number: int,
        seed: int,
        work: Work,
        replicas: Sequence[Replica],
        ledger: Ledger,
        gate: RequestGate,
        fresh: deque[Text],
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.random = random.Random(f"{seed} {number}")
        self.work, self.replicas, self.ledger, self._gate = work, replicas, ledger, gate
        self._fresh = fresh
        self.error: BaseException | None = None

    def run(self) -> None:
        """Send requests until the gate allows no more. Each goes to a random replica first."""
        try:
            with httpx.Client(timeout=TIMEOUT_S) as http:
                while self._gate.enter():
                    try:
                        if self.random.random() < DOCUMENT_SHARE:
                            DocumentLife(self, http).run()
                        else:
                            self._request_until_answered(http, self._plan_request())
                    finally:
                        self._gate.leave()
        except BaseException as error:  # the main thread raises it
            self.error = error

    def _request_until_answered(self, http: httpx.Client, planned: PlannedRequest) -> None:
        first = self.random.randrange(len(self.replicas))
        end_s = time.monotonic() + TIMEOUT_S
        for number in range(1000):
            replica = self.replicas[(first + number) % len(self.replicas)]
            attempt = self.send(http, planned, replica)
            self.ledger.record(attempt)
            if attempt.outcome in ("complete", "left"):
                return
            self.ledger.count_retry()
            if number >= len(self.replicas):
                if time.monotonic() > end_s:
                    break
                time.sleep(RETRY_PAUSE_S)
        self.ledger.fail(
            "unanswered", f"{planned.mode} of {planned.tenant}: neither replica answered in {TIMEOUT_S:g} s"
        )

    # -- drawing requests

    def _plan_request(self) -> PlannedRequest:
        draw = self.random
        ((mode, ratio, is_fresh),) = draw.choices(list(MIX), list(MIX.values()))
        tenant, stream = draw.choice(TENANTS), draw.random() < STREAM_SHARE
        if mode == "ingest":
            own = [text for text in self.work.texts if tenant in text.owners]
            text = self.work.make_text() if is_fresh else draw.choice(own)
            for replica in self.replicas if is_fresh else ():
                replica.register_texts([text], self.work.tokenizer)
            question = self.alone(text)
        elif is_fresh and self._fresh:
            question = self.alone(draw.choice(list(self._fresh)))
        else:
            is_fresh, question = False, draw.choice(self.work.questions)
        after_s = after_events = None
        if draw.random() < DISCONNECT_SHARE:
            if stream and draw.random() < 0.5:
                after_events = draw.randint(1, ANSWER_TOKENS - 1)
            else:
                after_s = draw.uniform(0.001, 1.0) ** 2
        return PlannedRequest(tenant, mode, ratio, question, is_fresh, stream, after_s, after_events)

    def alone(self, text: Text) -> Question:
        """Return a prompt of one chunk, at the position at which ingestion computes it."""
        ids = (*self.work.prefix_ids, *text.token_ids, text.token_ids[-1])
        return Question(-text.number, Prompt([], "?"), ids, (text,))

    # -- sending requests

    def send(self, http: httpx.Client, planned: PlannedRequest, replica: Replica, **more: Any) -> Attempt:
        """Send a request, with more fields, to a replica. Return the attempt, which is not recorded yet."""
        attempt = Attempt(
            replica.name,
            planned.tenant,
            planned.mode,
            planned.ratio,
            planned.question,
            planned.is_fresh,
            time.monotonic(),
        )
        self.ledger.stored.begin(attempt)
        if planned.mode == "ingest":
            self.ledger.stored.sent(planned.tenant, planned.question.texts[0], attempt.start_s)
        sent = request_body(
            planned.question,
            mode=planned.mode,
            ratio=planned.ratio,
            stream=planned.stream,
            more={**self._answer_options(attempt), **more},
        )
        timeout = httpx.Timeout(TIMEOUT_S, read=planned.after_s or TIMEOUT_S)
        headers = {"Authorization": f"Bearer {key_of(planned.tenant)}"}
        try:
            with http.stream(
                "POST", f"{replica.url}/v1/completions", json=sent, headers=headers, timeout=timeout
            ) as response:
                if response.status_code == 200:
                    attempt.outcome = self._read_answer(response, planned, attempt)
                else:
                    self._record_refusal(response, planned, attempt)
        except httpx.ReadTimeout:
            attempt.outcome = "left"
            if planned.after_s is None:
                self.ledger.fail(
                    "unanswered", f"{planned.mode} of {planned.tenant}: {replica.name} sent nothing for {TIMEOUT_S:g} s"
                )
        except httpx.ConnectError:
            attempt.outcome = "refused"
        except (httpx.TransportError, RagblendError):
            attempt.outcome = "cut"
        attempt.end_s = time.monotonic()
        if attempt.outcome == "complete" and planned.mode == "ingest" and is_stored(attempt):
            text = planned.question.texts[0]
            self.ledger.stored.done(planned.tenant, text, replica.name, attempt.end_s)
            if planned.is_fresh:
                self._fresh.append(text)
        return attempt

    def _answer_options(self, attempt: Attempt) -> dict[str, Any]:
        if attempt.mode == "ingest":
            return {"model": "demo", "max_tokens": 1}
        options = GenerationOptions(logit_bias=exclude_tokens(self.work.stop_ids))
        return {"model": "demo", "max_tokens": ANSWER_TOKENS, **vllm_filters_and_penalties(options)}

    def _record_refusal(self, response: httpx.Response, planned: PlannedRequest, attempt: Attempt) -> None:
        attempt.outcome = "refused"
        if response.status_code not in (502, 503, 504):
            response.read()
            status = f"{response.status_code} {response.text[:300]}"
            self.ledger.fail("errors", f"{planned.mode} of {planned.tenant} at {attempt.replica}: {status}")

    def _read_answer(self, response: httpx.Response, planned: PlannedRequest, attempt: Attempt) -> Outcome:
        """Read the answer's tokens and report into `attempt`. Return the outcome."""
        if not planned.stream:
            response_body = json.loads(response.read())
            (choice,) = response_body["choices"]
            attempt.token_ids = list(choice["token_ids"])
            attempt.top_logprobs = (choice.get("logprobs") or {}).get("top_logprobs") or []
            attempt.report = report_from_params(response_body.get("kv_transfer_params"))
            return "complete"
        for event in sse_events(response.iter_lines()):
            if "error" in event:
                raise RagblendError(str(event["error"]))
            attempt.token_ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            attempt.report = report_from_params(event.get("kv_transfer_params")) or attempt.report
            if planned.after_events is not None and len(attempt.token_ids) >= planned.after_events:
                return "left"
        return "complete"


class DocumentLife:
    """One document of one replica, from its POST to the answer after its deletion.

    Fails the run if the document is not stored, if a prompt finds it after its deletion, or if an answer differs from
    that of vLLM alone (mode `full`) before its first uncertain token. Calls are repeated while the replica is down, and
    after status 503, which a replica also answers while it cannot delete from the remote tier.
    """

    def __init__(self, client: Client, http: httpx.Client) -> None:
        self._client, self._http, self._ledger = client, http, client.ledger
        self._tenant, self._replica = client.random.choice(TENANTS), client.random.choice(client.replicas)
        self._text = client.work.make_text(shuffled=True)
        self._question = client.alone(self._text)
        self._id = f"text-{self._text.number}"

    def run(self) -> None:
        """Send the document, ask about it, delete it, and ask again."""
        stored, start_s, replica_run = self._ledger.stored, time.monotonic(), self._replica.runs[-1]
        stored.sent(self._tenant, self._text, start_s)
        body = {"collection": "kb", "documents": [{"id": self._id, "chunks": [self._text.text]}]}
        if self._call("POST", DOCUMENTS, json=body) is None or not self._wait_stored():
            return
        is_same_run = self._replica.runs[-1] is replica_run
        self._ledger.record(
            Attempt(
                *(self._replica.name, self._tenant, "ingest", None, self._question, True),
                start_s=start_s if is_same_run else self._replica.runs[-1].start_s,
                end_s=time.monotonic(),
                outcome="complete" if is_same_run else "cut",  # stored before the restart, or after it
                token_ids=[0] if is_same_run else [],
                report=BlendReport("full"),
            )
        )
        stored.done(self._tenant, self._text, self._replica.name, time.monotonic())
        right, found = self._certain(), self._ask("blend", "blend")
        stored.remove(self._tenant, self._text, time.monotonic())
        if self._call("DELETE", DOCUMENTS, json={"collection": "kb", "ids": [self._id]}) is None:
            return
        stored.confirm_removal(self._tenant, self._text)
        after = self._ask("blend", "prefix")  # no chunk of the prompt is known any more
        self._ledger.count("documents_deleted")
        for when, tokens in (("stored", found), ("deleted", after)):
            if tokens is not None and right is not None:
                self._ledger.count("answers_compared")
                if not Reference(right).agrees(tokens):
                    self._ledger.fail("wrong_answers", f"{self._id}, {when}: {tokens}, not {right}")

    def _wait_stored(self) -> bool:
        end_s = time.monotonic() + STORED_S
        while time.monotonic() < end_s:
            answer = self._call("GET", f"{DOCUMENTS}/{self._id}", params={"collection": "kb"})
            status = "" if answer is None else answer.json()["status"]
            if status in ("stored", "failed", ""):
                if status != "stored":
                    self._ledger.fail("lost_documents", f"{self._id} is {status or 'unknown'}")
                return status == "stored"
            time.sleep(0.2)
        self._ledger.fail("lost_documents", f"{self._id} is not stored after {STORED_S:g} s")
        return False

    def _ask(self, mode: VllmMode, expected: VllmMode) -> list[int] | None:
        """Ask in a mode. The report must be one of mode `expected`. Return the answer's tokens, if it is complete."""
        planned = PlannedRequest(self._tenant, mode, None, self._question, is_fresh=True, stream=False)
        attempt = self._client.send(self._http, planned, self._replica)
        attempt.mode = expected
        self._ledger.record(attempt)
        return attempt.token_ids if attempt.outcome == "complete" else None

    def _certain(self) -> tuple[int, ...] | None:
        """Return the tokens of vLLM's own answer before the first one that another one nearly equals."""
        planned = PlannedRequest(self._tenant, "full", None, self._question, is_fresh=True, stream=False)
        more = {"logprobs": 5, "return_tokens_as_token_ids": True}
        attempt = self._client.send(self._http, planned, self._replica, **more)
        self._ledger.record(attempt)
        if attempt.outcome != "complete":
            return None
        certain, stops = list[int](), {f"token_id:{each}" for each in self._client.work.stop_ids}
        for token, top in zip(attempt.token_ids, attempt.top_logprobs, strict=True):
            first, second, *_ = sorted((logprob for name, logprob in top.items() if name not in stops), reverse=True)
            if first - second < MARGIN:
                break
            certain.append(token)
        return tuple(certain)

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Call until the replica answers. Return None after another status than 2xx and 503, which is an error."""
        end_s, headers = time.monotonic() + STORED_S, {"Authorization": f"Bearer {key_of(self._tenant)}"}
        while time.monotonic() < end_s:
            with suppress(httpx.TransportError):
                answer = self._http.request(method, f"{self._replica.url}{path}", headers=headers, **options)
                if answer.is_success:
                    return answer
                if answer.status_code != 503:
                    self._ledger.fail("errors", f"{method} {path}: {answer.status_code} {answer.text[:300]}")
                    return None
            self._ledger.count_retry()
            time.sleep(RETRY_PAUSE_S)
        self._ledger.fail("unanswered", f"{method} {path}: {self._replica.name} did not answer in {STORED_S:g} s")
        return None
