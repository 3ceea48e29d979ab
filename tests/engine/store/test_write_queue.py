"""Background writes: bounded in bytes, never in the caller's way, each one written or counted."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, tuples
from servers import wait_until
from tier_support import make_kv

from ragblend.engine.store import write_queue
from ragblend.engine.store.format.kv import MemoryKV
from ragblend.engine.store.write_queue import WriteQueue
from ragblend.errors import BackendUnreachableError, StoreFullError

pytestmark = pytest.mark.timeout(60)


class Gate:
    """A write that waits until it is opened, and notes what came through."""

    def __init__(self, fail: Callable[[], Exception | None] = lambda: None) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.written: list[str] = []
        self._fail = fail

    def __call__(self, kv: MemoryKV) -> None:
        self.entered.set()
        self.opened.wait()
        if (error := self._fail()) is not None:
            raise error
        self.written.append(kv.header.key)

    def let_through(self, queue: WriteQueue) -> list[str]:
        """Open it; what was written once the queue is empty."""
        self.opened.set()
        assert queue.flush(10)
        return self.written


def test_what_is_queued_is_written_once_in_order_and_seen_meanwhile():
    gate, kvs = Gate(), [make_kv(seed) for seed in range(3)]
    queue = WriteQueue(gate, 10_000, "test")
    assert all(queue.put(kv) for kv in kvs)
    gate.entered.wait()
    for _ in range(5):
        queue.put(kvs[1])
    assert [queue.peek(kv.header.key) for kv in kvs] == kvs
    assert queue.nbytes == sum(kv.nbytes for kv in kvs)
    assert not queue.flush(0.01)
    assert gate.let_through(queue) == [kv.header.key for kv in kvs]
    assert (queue.nbytes, queue.num_dropped, queue.peek(kvs[0].header.key)) == (0, 0, None)


def test_a_full_queue_drops_and_counts_without_waiting(caplog):
    gate = Gate()
    queue = WriteQueue(gate, 2 * make_kv().nbytes, "test")
    assert [queue.put(make_kv(seed)) for seed in range(10)] == [True, True, *[False] * 8]
    assert (queue.num_dropped, queue.nbytes) == (8, queue.capacity_bytes)
    assert "not written by test" in caplog.text
    assert len(gate.let_through(queue)) == 2


def test_what_a_target_refuses_is_not_owed():
    gate = Gate(lambda: StoreFullError("full"))
    queue = WriteQueue(gate, 10_000, "test")
    queue.put(make_kv())
    assert gate.let_through(queue) == []
    assert (queue.num_dropped, queue.nbytes) == (1, 0)


def test_a_chunk_that_never_arrives_does_not_block_the_queue(monkeypatch):
    monkeypatch.setattr(write_queue, "RETRY_S", 0.001)
    kvs, written = [make_kv(seed) for seed in range(4)], []

    def write(kv: MemoryKV) -> None:
        if kv is kvs[0]:
            raise BackendUnreachableError("takes too long")
        written.append(kv)

    queue = WriteQueue(write, 10_000, "test")
    for kv in kvs:
        queue.put(kv)
    assert not queue.flush(0.5)
    assert (written, queue.num_waiting, queue.peek(kvs[0].header.key)) == (kvs[1:], 1, kvs[0])
    assert not queue.close(0.05)
    assert (queue.num_waiting, queue.num_dropped, queue.nbytes) == (0, 1, 0)


def test_after_a_failure_the_target_is_left_alone_for_a_while(monkeypatch):
    monkeypatch.setattr(write_queue, "RETRY_S", 1000.0)
    calls: list[MemoryKV] = []

    def write(kv: MemoryKV) -> None:
        calls.append(kv)
        raise BackendUnreachableError("down")

    queue = WriteQueue(write, 10_000, "test")
    for seed in range(3):
        queue.put(make_kv(seed))
    assert not queue.flush(0.5)
    assert (len(calls), queue.num_waiting) == (1, 3)
    queue.close(0.0)


def test_what_finds_no_room_is_read_back_at_its_turn(caplog):
    """10 chunks, room for 2: each is written once, in order; one that is gone by then is counted."""
    gate, kvs = Gate(), [make_kv(seed) for seed in range(10)]
    stored = {kv.header.key: kv for kv in kvs if kv is not kvs[7]}
    queue = WriteQueue(gate, 2 * kvs[0].nbytes, "test", fix="; push it")
    queue.read_back = stored.get
    assert all(queue.put(kv) for kv in kvs)
    assert (queue.num_waiting, queue.nbytes, queue.peek(kvs[9].header.key)) == (10, queue.capacity_bytes, None)
    assert gate.let_through(queue) == list(stored)
    assert (queue.num_dropped, queue.nbytes) == (1, 0)
    assert "no longer stored here; push it" in caplog.text


def test_the_number_of_chunks_that_wait_is_bounded(monkeypatch):
    monkeypatch.setattr(write_queue, "MAX_WAITING", 3)
    gate, kvs = Gate(), [make_kv(seed) for seed in range(6)]
    queue = WriteQueue(gate, kvs[0].nbytes, "test")
    queue.read_back = {kv.header.key: kv for kv in kvs}.get
    queue.put(kvs[0])
    gate.entered.wait()
    assert [queue.put(kv) for kv in kvs[1:]] == [True, True, True, False, False]
    gate.let_through(queue)
    assert queue.num_dropped == 2


@settings(max_examples=60, deadline=None)
@given(
    operations=lists(tuples(booleans(), integers(0, 5)), max_size=25),
    failures=lists(booleans(), max_size=25),
    room=integers(0, 3),
)
def test_nothing_that_is_owed_is_lost(operations, failures, room):
    """Puts and deletes in any order over a target that fails at any moment: in the end both sides hold the same."""
    here: dict[str, MemoryKV] = {}
    there: dict[str, MemoryKV] = {}

    def write(kv: MemoryKV) -> None:
        if failures and failures.pop():
            raise BackendUnreachableError("down")
        there[kv.header.key] = kv

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_queue, "RETRY_S", 0.0)
        queue = WriteQueue(write, room * make_kv(0).nbytes, "test")
        queue.read_back = here.get
        for is_put, seed in operations:
            kv = make_kv(seed)
            if is_put:
                here[kv.header.key] = kv
                assert queue.put(kv)
            else:
                queue.discard(kv.header.key)
                there.pop(kv.header.key, None)
                here.pop(kv.header.key, None)
            assert queue.nbytes <= queue.capacity_bytes
        assert queue.flush(20)
    assert there.keys() == here.keys()
    assert (queue.num_dropped, queue.nbytes, queue.num_waiting) == (0, 0, 0)


def test_it_holds_back_while_told_to():
    held_back = threading.Event()
    gate = Gate()
    gate.opened.set()
    queue = WriteQueue(gate, 10_000, "test", lambda: 0.0 if held_back.is_set() else 0.05)
    queue.put(make_kv())
    assert not queue.flush(0.2)
    held_back.set()
    assert queue.flush(10)
    assert len(gate.written) == 1


def test_close_drains_the_queue_within_its_limit_and_counts_the_rest():
    gate = Gate()
    queue = WriteQueue(gate, 10_000, "test")
    for seed in range(3):
        queue.put(make_kv(seed))
    gate.entered.wait()
    assert not queue.close(0.05)
    assert queue.num_dropped == 2
    gate.opened.set()
    assert queue.close(10)
    queue.put(make_kv(9))
    assert queue.close(10)
    assert gate.written[-1] == make_kv(9).header.key


def test_discard_waits_for_the_write_under_way():
    gate, kv, other = Gate(), make_kv(1), make_kv(2)
    queue = WriteQueue(gate, 10_000, "test")
    queue.put(kv)
    queue.put(other)
    gate.entered.wait()
    queue.discard(other.header.key)
    threading.Timer(0.1, gate.opened.set).start()
    queue.discard(kv.header.key)
    assert gate.written == [kv.header.key]
    assert queue.flush(10)
    assert gate.written == [kv.header.key]


def test_its_thread_ends_when_there_is_nothing_to_do(monkeypatch):
    monkeypatch.setattr(write_queue, "IDLE_S", 0.05)
    gate = Gate()
    gate.opened.set()

    def has_ended() -> bool:
        return not any(thread.name == "test-idle" for thread in threading.enumerate())

    queue = WriteQueue(gate, 10_000, "test-idle")
    for seed in range(2):
        queue.put(make_kv(seed))
        assert queue.flush(10)
        wait_until(has_ended, 10, "the thread ends")
    assert len(gate.written) == 2


def test_an_ending_process_writes_its_queue_without_waiting_for_dead_targets():
    script = (
        "import sys, threading, time; sys.path.insert(0, sys.argv[1])\n"
        "from tier_support import make_kv\n"
        "from ragblend.engine.store import write_queue\n"
        "from ragblend.engine.store.write_queue import WriteQueue\n"
        "write_queue.EXIT_S = 1.0\n"
        "good = WriteQueue(lambda kv: time.sleep(0.05) or print('written', flush=True), 10_000, 'good')\n"
        "dead = WriteQueue(lambda kv: None, 10_000, 'dead', lambda: 60.0)\n"
        "def put():\n"
        "    for seed in range(3): good.put(make_kv(seed)); dead.put(make_kv(seed))\n"
        "putting = threading.Thread(target=put, daemon=True)\n"  # as a server's thread that stores documents
        "putting.start(); putting.join()\n"
    )
    support = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script, support], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.split() == ["written"] * 3, done.stderr
    assert done.returncode == 0
