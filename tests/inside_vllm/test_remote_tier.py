"""Replicas with separate disks and a shared Redis: the same chunks and answers, also when Redis fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from demo_texts import A, B
from harness import (
    PREFIX,
    SMALL,
    add,
    ask,
    ask_all,
    connector_scheduler,
    engine,
    free_blocks,
    ingest,
    make_known,
    random_ids,
    report,
    tokens,
    watch_counts,
)
from servers import RedisServer, TcpProxy, wait_until

from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore, open_remote
from ragblend.precompute import precompute_documents

pytestmark = pytest.mark.timeout(600)
CHUNKS = [random_ids(30 + 7 * index, 100 + index) for index in range(6)]
QUESTION = random_ids(6, 300)


@pytest.fixture(scope="module")
def first(redis_server, checkpoint, tmp_path_factory):
    """Return the answers of the replica that ingested the chunks, and its store's directory. Redis has all chunks."""
    store = tmp_path_factory.mktemp("first")
    with engine(checkpoint("llama"), store, {"remote": redis_server.url}, skip_tokenizer_init=True) as llm:
        for chunk in CHUNKS:
            assert ingest(llm, PREFIX, chunk)["refused_reason"] == ""
        blended = [tokens(ask(llm, *request)) for request in requests()]
        plain = [tokens(ask(llm, ids)) for ids, _ in requests()]
    remote = open_remote(redis_server.url)
    assert sorted(remote.keys()) == sorted(DiskStore(store).keys())  # written through, drained when it closed
    assert len(list(remote.keys())) == len(CHUNKS)
    return {"blended": blended, "plain": plain, "store": store}


@contextmanager
def replica(model: Path, store: Path, extra: dict[str, Any], **options: Any) -> Iterator[Any]:
    """An engine that knows the chunks, as one whose catalogue is shared, and has none of their KV."""
    make_known(store, model, CHUNKS)
    with engine(model, store, extra, **options) as llm:
        yield llm


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Twelve prompts over random chunks in random orders."""
    dice = random.Random(0)
    made = []
    for _ in range(12):
        ids = list(PREFIX)
        for chunk in dice.sample(CHUNKS, dice.randint(1, 5)):
            ids += chunk
        params = {"mode": "blend", "rule": "cacheblend_k", "ratio": dice.choice([0.1, 0.3])}
        made.append((ids + QUESTION, params))
    return made


def chunks_in(ids: list[int]) -> list[int]:
    """The numbers of the chunks that a prompt has."""
    return [
        number
        for number, chunk in enumerate(CHUNKS)
        if any(ids[at : at + len(chunk)] == chunk for at in range(len(ids)))
    ]


def watched_counters(llm: Any) -> dict[str, float]:
    """Return the later metrics of the scheduler's half."""
    counts: dict[str, float] = watch_counts(connector_scheduler(llm.llm_engine)).data
    return counts


@pytest.mark.parametrize("memory_gib", [0, 1])
def test_a_replica_with_an_empty_disk_answers_as_the_one_that_ingested(
    memory_gib, redis_server, first, checkpoint, tmp_path
):
    extra = {"remote": redis_server.url, "remote_timeout_s": 60, "memory_gib": memory_gib}
    with replica(checkpoint("llama"), tmp_path, extra, max_num_seqs=4, skip_tokenizer_init=True) as llm:
        free, counters = free_blocks(llm), watched_counters(llm)
        found = ask_all(llm, requests())  # together: they want the same chunks at the same time
        assert [tokens(output) for output in found] == first["blended"]
        assert all(report(output)["num_chunk_hits"] == report(output)["num_chunks"] for output in found)
        assert all(report(output)["stall_s"] > 0 for output in found)
        assert free_blocks(llm) == free
        asked = {number for ids, _ in requests() for number in chunks_in(ids)}
        assert len(list(DiskStore(tmp_path).keys())) == len(asked)
        assert counters["remote_hits"] == len(asked)
        again = ask_all(llm, requests())
        assert [tokens(output) for output in again] == first["blended"]
        assert counters["remote_hits"] == len(asked)  # now from the disk
        assert [tokens(ask(llm, ids)) for ids, _ in requests()] == first["plain"]  # nothing leaked into plain requests


def test_while_the_remote_is_silent_other_requests_go_on(redis_server, first, checkpoint, tmp_path):
    proxy = TcpProxy(redis_server.port)
    proxy.mode = "hang"
    extra = {"remote": f"redis://127.0.0.1:{proxy.port}/0", "remote_timeout_s": 600}
    with replica(checkpoint("llama"), tmp_path, extra, skip_tokenizer_init=True) as llm:
        core, free, counters = llm.llm_engine, free_blocks(llm), watched_counters(llm)
        known = connector_scheduler(core).scheduler.requests
        waiting, plain = requests()[0], requests()[1][0]
        add(llm, "waiting", *waiting)
        add(llm, "given up", *requests()[2])
        add(llm, "plain", plain, None)
        done = run_until(core, "plain")
        assert done == {"plain": first["plain"][1]}
        assert len(known) == 2
        core.abort_request(["given up"])
        proxy.close()  # every connection breaks, none can be made: down
        assert run_until(core, "waiting") == {"waiting": first["plain"][0]}
        assert counters["remote_failures"] > 0
        assert not counters.get("remote_hits")
        assert not known
        assert free_blocks(llm) == free


def test_a_slow_remote_is_given_up_at_its_time_limit(redis_server, first, checkpoint, tmp_path):
    proxy = TcpProxy(redis_server.port)
    proxy.mode = "hang"
    extra = {"remote": f"redis://127.0.0.1:{proxy.port}/0", "remote_timeout_s": 0.2}
    with replica(checkpoint("llama"), tmp_path, extra, skip_tokenizer_init=True) as llm:
        for index, request in enumerate(requests()[:6]):
            output = ask(llm, *request)
            assert tokens(output) == first["plain"][index]
            assert report(output)["num_chunk_hits"] == 0
        (remote,) = connector_scheduler(llm.llm_engine).scheduler.store.find_tiers(RemoteStore)
        assert not remote.breaker.is_closed  # and is not asked any more
    proxy.close()


def test_a_remote_that_lies_is_not_believed(redis_server, first, checkpoint, tmp_path):
    remote = open_remote(redis_server.url.replace("/0", "/3"))
    true = open_remote(redis_server.url)
    data = {key: true.values.get(key) for key in true.keys()}  # noqa: SIM118
    for key, other in zip(data, [*list(data)[1:], next(iter(data))], strict=True):
        remote.values.put(key, data[other])  # each under another's name
    extra = {"remote": remote.values.url, "remote_timeout_s": 60}
    with replica(checkpoint("llama"), tmp_path, extra, skip_tokenizer_init=True) as llm:
        counters = watched_counters(llm)
        output = ask(llm, *requests()[0])
        assert tokens(output) == first["plain"][0]
        assert report(output)["num_chunk_hits"] == 0
        assert counters["damaged_entries"] == len(chunks_in(requests()[0][0]))
        assert list(DiskStore(tmp_path).keys()) == []


def test_redis_killed_and_started_again_while_serving(first, checkpoint, tmp_path, tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("killed"))
    server.start()
    try:
        remote = open_remote(server.url)
        local = DiskStore(first["store"])
        for key in local.keys():  # noqa: SIM118
            remote.put(local.get(key))
        assert remote.flush(60)
        extra = {"remote": server.url, "remote_timeout_s": 60, "memory_gib": 0}
        with replica(checkpoint("llama"), tmp_path / "kv", extra, skip_tokenizer_init=True) as llm:
            several, one = requests()[0], single(CHUNKS[0])
            one_plain = tokens(ask(llm, one[0]))
            assert tokens(ask(llm, *several)) == first["blended"][0]
            had = {header.token_ids for key in DiskStore(tmp_path / "kv").keys()  # noqa: SIM118
                   if (header := DiskStore(tmp_path / "kv").header(key)) is not None}  # fmt: skip
            new = next(chunk for chunk in CHUNKS if tuple(chunk) not in had)
            server.kill()
            assert tokens(ask(llm, *several)) == first["blended"][0]  # from the disk
            lost = ask(llm, *single(new))
            assert report(lost)["num_chunk_hits"] == 0
            assert tokens(lost) == tokens(ask(llm, single(new)[0]))
            assert ingest(llm, PREFIX, random_ids(33, 7))["refused_reason"] == ""  # kept here, sent when it is back
            server.start()  # empty
            written = wait_for_keys(server)
            assert len(written) == 1
            assert tokens(ask(llm, one[0])) == one_plain
    finally:
        server.kill()


def single(chunk: list[int]) -> tuple[list[int], dict[str, Any]]:
    ids = [*PREFIX, *chunk, *QUESTION]
    return ids, {"mode": "reuse"}


def wait_for_keys(server: RedisServer) -> list[str]:
    remote = open_remote(server.url)
    wait_until(lambda: any(remote.keys()), 120, "something is written")
    return list(remote.keys())


def run_until(core: Any, name: str) -> dict[str, list[int]]:
    """Step until request `name` is done; the answers that came."""
    done: dict[str, list[int]] = {}
    while name not in done:
        done.update({output.request_id: tokens(output) for output in core.step() if output.finished})
    return done


TEXTS = [A, B]
ASKED = Prompt(TEXTS, "Where does George Keller live?")


def test_engines_of_both_kinds_share_one_remote(redis_server, tmp_path):
    remote = redis_server.url.replace("/0", "/4")
    tiers: dict[str, Any] = {"remote": remote, "remote_timeout_s": 60.0, "on_miss": "inline"}

    def vllm(store: str) -> Any:
        return load_engine("demo", tmp_path / store, backend="vllm", vllm_options=SMALL, **tiers)

    with vllm("one") as one:
        assert precompute_documents(TEXTS, one).num_new_kv == 2
        theirs = one.generate(ASKED, rule="cacheblend_k", max_tokens=8)
    with vllm("two") as two:
        assert all(two.is_stored(text) for text in TEXTS)
        assert precompute_documents(TEXTS, two).num_new_kv == 0
        ours = two.generate(ASKED, rule="cacheblend_k", max_tokens=8)
        assert (ours.token_ids, ours.report.num_chunk_hits) == (theirs.token_ids, 2)
        assert ours.report.num_recomputed_tokens == theirs.report.num_recomputed_tokens
    with load_engine("demo", tmp_path / "three", **tiers) as three:
        other = three.generate(ASKED, rule="cacheblend_k", max_tokens=8)
        assert (other.token_ids, other.report.num_chunk_hits) == (theirs.token_ids, 2)
    with vllm("two") as two:
        assert two.forget(TEXTS[0])
        assert not two.is_stored(TEXTS[0])
    assert len(list(open_remote(remote).keys())) == 1


def test_with_a_key_vllm_uses_only_what_it_signed(redis_server, first, checkpoint, tmp_path, monkeypatch):
    """Redis has every chunk, whole and right, and unsigned; what is computed in its place is signed."""
    monkeypatch.setenv("RAGBLEND_STORE_KEY", "correct horse battery staple")
    url = redis_server.url.replace("/0", "/4")
    unsigned, place = open_remote(redis_server.url, store_key=None), open_remote(url)
    for key in unsigned.keys():  # noqa: SIM118
        place.values.put(key, unsigned.values.get(key))
    extra = {"remote": url, "remote_timeout_s": 60}
    with replica(checkpoint("llama"), tmp_path, extra, skip_tokenizer_init=True) as llm:
        counters, (request, *_) = watched_counters(llm), requests()
        assert report(ask(llm, *request))["num_chunk_hits"] == 0
        assert counters["damaged_entries"] == len(chunks_in(request[0]))
        assert list(DiskStore(tmp_path, store_key=None).keys()) == [], "nothing was moved up"
        for chunk in CHUNKS:
            ingest(llm, PREFIX, chunk)
        output = ask(llm, *request)
        assert report(output)["num_chunk_hits"] == report(output)["num_chunks"]
        assert tokens(output) == first["blended"][0]
    assert not [each for each in DiskStore(tmp_path).verify() if not each.ok]
