"""The clients: each draws requests from a mix of its own, sends them, sometimes hangs up, and tries the other replica.

A client is a thread with a random generator of its own, so what is asked follows from the seed; when it is answered
does not. Read `Client.run` first.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.soak.deployment import Replica, key_of
from benchmarks.soak.ledger import Attempt, Ledger, Outcome, is_stored
from benchmarks.soak.work import ANSWER_TOKENS, TENANTS, Question, Text, Work, body, exclude_tokens
from ragblend.engine.vllm.client import sse_events
from ragblend.engine.vllm.params import VllmMode, report_from_params, vllm_filters_and_penalties
from ragblend.errors import RagblendError
from ragblend.options import GenerationOptions
from ragblend.prompt.types import Prompt

MIX: dict[tuple[VllmMode, float | None, bool], float] = {
    # mode, ratio (None: the server's), whether of chunks made up on the way: share of the requests
    ("ingest", None, False): 0.10,
    ("ingest", None, True): 0.04,
    ("blend", None, True): 0.02,
    ("blend", None, False): 0.40,
    ("blend", 1.0, False): 0.10,
    ("reuse", None, False): 0.20,
    ("prefix", None, False): 0.08,
    ("full", None, False): 0.06,
}
LEAVES, STREAMS = 0.08, 0.5  # shares of the requests: the client hangs up, the answer is streamed
PATIENCE_S = 120.0  # for a request that it does not mean to leave
RETRY_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request before it is sent. It is left after `after_s` of silence, or after `after_events` of a stream."""

    tenant: str
    mode: VllmMode
    ratio: float | None
    question: Question
    is_fresh: bool
    stream: bool
    after_s: float | None = None
    after_events: int | None = None


class Turnstile:
    """Counts requests, up to a number or for some time, and lets nobody begin one while it is shut."""

    def __init__(self, num_requests: int, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s
        self._left, self._lock = num_requests, threading.Condition()
        self.num_begun = self.num_done = self._under_way = 0
        self._is_shut, self.hold_at = False, num_requests

    def enter(self) -> bool:
        """Begin a request; False when all were made, or the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: not self._left or not (self._is_shut or self.num_begun >= self.hold_at))
            if not self._left or time.monotonic() > self._end_s:
                self._left = 0
                self._lock.notify_all()
                return False
            self._left -= 1
            self.num_begun += 1
            self._under_way += 1
            return True

    def leave(self) -> None:
        """It is over."""
        with self._lock:
            self._under_way -= 1
            self.num_done += 1
            self._lock.notify_all()

    def shut(self) -> None:
        """Let nobody in, and wait until nobody is."""
        with self._lock:
            self._is_shut = True
            self._lock.wait_for(lambda: not self._under_way)

    def open(self, hold_at: int) -> None:
        """Let clients go on, to request number `hold_at`."""
        with self._lock:
            self._is_shut, self.hold_at = False, hold_at
            self._lock.notify_all()

    def wait_for(self, num_done: int) -> None:
        """Until so many are over, or all that there will be."""
        with self._lock:
            self._lock.wait_for(lambda: self.num_done >= num_done or not (self._left or self._under_way))


class Client(threading.Thread):
    """One of the clients. `error` is what ended it, if that was not the last request."""

    def __init__(
        self,
        number: int,
        seed: int,
        work: Work,
        replicas: Sequence[Replica],
        ledger: Ledger,
        turnstile: Turnstile,
        fresh: deque[Text],
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._dice = random.Random(f"{seed} {number}")
        self._work, self._replicas, self._ledger, self._turnstile = work, replicas, ledger, turnstile
        self._fresh = fresh
        self.error: BaseException | None = None

    def run(self) -> None:
        """Request after request, each at a replica drawn by chance, and at the other one if that is not there."""
        try:
            with httpx.Client(timeout=PATIENCE_S) as http:
                while self._turnstile.enter():
                    try:
                        self._serve(http, self._wish())
                    finally:
                        self._turnstile.leave()
        except BaseException as error:  # told by the main thread
            self.error = error

    def _serve(self, http: httpx.Client, wish: PlannedRequest) -> None:
        first = self._dice.randrange(len(self._replicas))
        end_s = time.monotonic() + PATIENCE_S
        for number in range(1000):
            replica = self._replicas[(first + number) % len(self._replicas)]
            attempt = self._try(http, wish, replica)
            self._ledger.note(attempt)
            if attempt.outcome in ("complete", "left"):
                return
            self._ledger.retried()
            if number >= len(self._replicas):
                if time.monotonic() > end_s:
                    break
                time.sleep(RETRY_PAUSE_S)
        self._ledger.fail("unanswered", f"{wish.mode} of {wish.tenant}: neither replica answered in {PATIENCE_S:g} s")

    # -- what is asked

    def _wish(self) -> PlannedRequest:
        dice = self._dice
        ((mode, ratio, is_fresh),) = dice.choices(list(MIX), list(MIX.values()))
        tenant, stream = dice.choice(TENANTS), dice.random() < STREAMS
        if mode == "ingest":
            own = [text for text in self._work.texts if tenant in text.owners]
            text = self._work.fresh() if is_fresh else dice.choice(own)
            for replica in self._replicas if is_fresh else ():
                replica.make_known([text], self._work.tokenizer)
            question = self._alone(text)
        elif is_fresh and self._fresh:
            question = self._alone(dice.choice(list(self._fresh)))
        else:
            is_fresh, question = False, dice.choice(self._work.questions)
        after_s = after_events = None
        if dice.random() < LEAVES:
            if stream and dice.random() < 0.5:
                after_events = dice.randint(1, ANSWER_TOKENS - 1)
            else:
                after_s = dice.uniform(0.001, 1.0) ** 2
        return PlannedRequest(tenant, mode, ratio, question, is_fresh, stream, after_s, after_events)

    def _alone(self, text: Text) -> Question:
        """A prompt of one chunk, which stands where it is ingested."""
        ids = (*self._work.prefix_ids, *text.token_ids, text.token_ids[-1])
        return Question(-text.number, Prompt([], "?"), ids, (text,))

    # -- asking

    def _try(self, http: httpx.Client, wish: PlannedRequest, replica: Replica) -> Attempt:
        attempt = Attempt(
            replica.name, wish.tenant, wish.mode, wish.ratio, wish.question, wish.is_fresh, time.monotonic()
        )
        if wish.mode == "ingest":
            self._ledger.stored.sent(wish.tenant, wish.question.texts[0], attempt.start_s)
        sent = body(wish.question, mode=wish.mode, ratio=wish.ratio, stream=wish.stream, more=self._more(attempt))
        timeout = httpx.Timeout(PATIENCE_S, read=wish.after_s or PATIENCE_S)
        headers = {"Authorization": f"Bearer {key_of(wish.tenant)}"}
        try:
            with http.stream(
                "POST", f"{replica.url}/v1/completions", json=sent, headers=headers, timeout=timeout
            ) as response:
                if response.status_code == 200:
                    attempt.outcome = self._read(response, wish, attempt)
                else:
                    self._refused(response, wish, attempt)
        except httpx.ReadTimeout:
            attempt.outcome = "left"
            if wish.after_s is None:
                self._ledger.fail("unanswered", f"{wish.mode} of {wish.tenant} at {replica.name}: {PATIENCE_S:g} s")
        except httpx.ConnectError:
            attempt.outcome = "refused"
        except (httpx.TransportError, RagblendError):
            attempt.outcome = "cut"
        attempt.end_s = time.monotonic()
        if attempt.outcome == "complete" and wish.mode == "ingest" and is_stored(attempt):
            text = wish.question.texts[0]
            self._ledger.stored.done(wish.tenant, text, replica.name, attempt.end_s)
            if wish.is_fresh:
                self._fresh.append(text)
        return attempt

    def _more(self, attempt: Attempt) -> dict[str, Any]:
        if attempt.mode == "ingest":
            return {"model": "demo", "max_tokens": 1}
        options = GenerationOptions(logit_bias=exclude_tokens(self._work.stop_ids))
        return {"model": "demo", "max_tokens": ANSWER_TOKENS, **vllm_filters_and_penalties(options)}

    def _refused(self, response: httpx.Response, wish: PlannedRequest, attempt: Attempt) -> None:
        attempt.outcome = "refused"
        if response.status_code not in (502, 503, 504):
            response.read()
            said = f"{response.status_code} {response.text[:300]}"
            self._ledger.fail("errors", f"{wish.mode} of {wish.tenant} at {attempt.replica}: {said}")

    def _read(self, response: httpx.Response, wish: PlannedRequest, attempt: Attempt) -> Outcome:
        """What was said, into `attempt`; how it ended."""
        if not wish.stream:
            response_body = json.loads(response.read())
            attempt.token_ids = list(response_body["choices"][0]["token_ids"])
            attempt.report = report_from_params(response_body.get("kv_transfer_params"))
            return "complete"
        for event in sse_events(response.iter_lines()):
            if "error" in event:
                raise RagblendError(str(event["error"]))
            attempt.token_ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            attempt.report = report_from_params(event.get("kv_transfer_params")) or attempt.report
            if wish.after_events is not None and len(attempt.token_ids) >= wish.after_events:
                return "left"
        return "complete"
