"""Numbers that commands and reports print: the same in the first and in later runs, and the same for one thing."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
from commands import INGEST
from demo_texts import A, B

from ragblend import load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.vllm.client import Connection
from ragblend.precompute import precompute_documents


def test_kv_caches_and_chunks_are_counted_apart_by_every_command(run, tmp_path):
    place, remote = ("--store", "both"), ("--remote", f"file://{tmp_path}/remote")
    first = run(*INGEST, "--context", "neutral", *place)
    num_chunks = int(re.search(r"(\d+) chunks,", first[1])[1])
    num_kv = int(re.search(r"(\d+) KV caches prefilled", first[1])[1])
    assert num_kv == 2 * num_chunks > 0
    assert "0 already stored; a chunk has two: alone, and after a neutral text" in first[1]
    assert f"to prefill: {num_kv} KV caches," in first[2]
    second = run(*INGEST, *place)[1]
    assert f", {num_chunks} chunks," in second
    assert "\n0 KV caches prefilled in " in second
    assert f"{num_kv} already stored; a chunk has two" in second
    assert re.search(r"store both: .*", first[1])[0] == re.search(r"store both: .*", second)[0]
    assert f"\n{num_kv} KV caches, " in run("stats", *place)[1]
    assert run("verify", *place)[1] == f"{num_kv} KV caches checked, 0 damaged, 0 without a chunk\n"
    assert run("push", *place, *remote)[1].startswith(f"{num_kv} KV caches sent, 0 were there,")
    assert run("push", *place, *remote)[1].startswith(f"0 KV caches sent, {num_kv} were there,")
    assert f"/remote: {num_kv} KV caches, " in run("stats", *place, *remote)[1]


def test_verify_counts_orphans_in_a_store_without_an_index(run):
    with load_engine("demo", "texts") as engine:
        precompute_documents([A], engine)
    assert run("verify", "--store", "texts")[1] == "1 KV cache checked, 0 damaged, 0 without a chunk\n"


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_each_report_has_the_size_of_the_store(is_on_disk, tmp_path):
    with load_engine("demo", tmp_path if is_on_disk else None) as engine:
        first, again = (precompute_documents([A, B], engine) for _ in range(2))
        held = engine.store.find_tier(DiskStore) or engine.store
        assert again.store_bytes == first.store_bytes == held.nbytes() >= first.new_kv_bytes > 0


def test_stats_of_a_served_folder_are_the_servers(run, monkeypatch):
    assert run(*INGEST, "--no-precompute", "--store", "sent")[0] == 0
    shutil.rmtree("sent/models")
    out = run("stats", "--store", "sent")[1]
    assert "4 documents" in out
    assert "\nno KV is here; that of a server: ragblend stats --backend URL\n" in out
    counts = {"num_stored": 4, "num_pending": 1, "num_failed": 0, "num_waiting": 1, "num_chunks": 9, "num_tokens": 800}
    counts |= {"num_known_kv": 4, "num_new_kv": 14, "new_kv_bytes": 70}
    paths = list[str]()

    def request_json(server: Connection, method: str, path: str) -> dict[str, Any]:
        paths.append(path)
        return {"collections": {"kb": counts, "notes": counts}}

    monkeypatch.setattr(Connection, "request_json", request_json)
    monkeypatch.setenv("RAGBLEND_NAMESPACE", "a&b")
    code, out, _ = run("stats", "--backend", "http://server:8000", "--store", "nowhere")
    assert (code, paths) == (0, ["/v1/ragblend/documents?namespace=a%26b"])
    assert out.splitlines() == [
        "server http://server:8000: 8 documents, 2 pending, 0 failed; 18 chunks, 1600 tokens, 36 KV caches",
        "collection kb: 4 documents, 1 pending, 0 failed; 9 chunks, 800 tokens, 18 KV caches",
        "collection notes: 4 documents, 1 pending, 0 failed; 9 chunks, 800 tokens, 18 KV caches",
    ]
