"""A machine profile: measured on the real model, kept with the store, followed by requests, read by `ragblend plan`."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from commands import run_command
from servers import wait_until

from ragblend import Prompt, load_engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import MemoryStore, TieredStore
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.engine.tuning.machine import (
    drop_page_cache,
    machine_facts,
    profile_path,
    read_machine_profile,
    write_profile,
)
from ragblend.errors import StoreNotWritableError, UsageError
from ragblend.lab.profile import ProfileConfig, measure_machine
from tests.tier_support import DictValues, make_kv

EFFORT = ProfileConfig(num_chunks=3, chunk_tokens=40, repeats=1, ratios=(0.0, 0.5, 1.0))
CHUNKS = ("the theory of the other chunk " * 8, "another chunk: that is the question " * 8)
PROMPT = Prompt(CHUNKS, "what is that?")
ONE = Prompt((" ".join(CHUNKS),), "what is that?")


def profile(fingerprint: str = "tiny-llama", disk: float = 1e9, **changes: Any) -> MachineProfile:
    """1 ms of prefill per token, straight shares, 6 layers of 4 KV dimensions."""
    facts: dict[str, Any] = {"num_layers": 6, "bytes_per_token": 1536, "prefill_s": ((1000.0, 1.0),)}
    return MachineProfile(fingerprint, machine_facts(), **{**facts, **changes}, bytes_per_s={"disk": disk})


@pytest.fixture
def on_disk(tiny_engine, tmp_path):
    """`on_disk(bytes_per_s)`: an engine over a disk store with PROMPT's chunks, with a profile of that speed."""

    def build(disk: float) -> Any:
        engine = tiny_engine(store=TieredStore(MemoryStore(1 << 26), DiskStore(tmp_path / "kv", fsync=False)))
        for chunk in (*CHUNKS, *ONE.chunks):
            engine.precompute(chunk)
        for key in engine.store.keys():  # noqa: SIM118
            engine.store.tiers[0].delete(key)
        engine.machine = profile(disk=disk)
        return engine

    return build


def test_measuring_finds_times_that_grow_and_leaves_nothing_behind(tmp_path):
    with load_engine("demo", tmp_path / "kv") as engine:
        values = DictValues()
        remote = RemoteStore(values)
        found = measure_machine(engine, EFFORT, directory=tmp_path / "kv", remote=remote)
        remote.close()
        prefix = len(engine.default_prefix_ids)
        assert [tokens for tokens, _ in found.prefill_s] == [prefix + 1 + 40 * count + 32 for count in (1, 2, 3)]
        assert [ratio for ratio, _ in found.shares] == [0.0, 0.5, 1.0]
        assert 0 < found.shares[0][1] <= found.shares[2][1] < 5
        assert set(found.bytes_per_s) == {"disk", "remote"}
        assert found.fingerprint == engine.fingerprint
        assert found.bytes_per_token == engine.bytes_per_token
        assert list(engine.store.keys()) == []
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    assert values.data == {}


def test_prompts_beyond_the_context_are_refused_before_anything_is_computed(tmp_path):
    with load_engine("demo") as engine, pytest.raises(UsageError, match="--chunk-tokens"):
        measure_machine(engine, ProfileConfig(num_chunks=100, chunk_tokens=1000))


def test_a_profile_is_kept_per_model_and_machine(tmp_path):
    mine = profile()
    path = write_profile(tmp_path, mine)
    assert path == profile_path(tmp_path, mine.fingerprint, mine.hardware)
    assert read_machine_profile(tmp_path, mine.fingerprint, mine.hardware) == mine
    assert read_machine_profile(tmp_path, "other", mine.hardware) is None
    assert read_machine_profile(tmp_path, mine.fingerprint, {**mine.hardware, "threads": 99}) is None
    write_profile(tmp_path, replace(mine, num_layers=7))
    again = read_machine_profile(tmp_path, mine.fingerprint, mine.hardware)
    assert again.num_layers == 7
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"profile_version": 99}', "\udc80"])
def test_an_unreadable_profile_is_a_warning_not_an_error(tmp_path, content, caplog):
    mine = profile()
    path = write_profile(tmp_path, mine)
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert read_machine_profile(tmp_path, mine.fingerprint, mine.hardware) is None
    assert "is not used" in caplog.text


def test_a_store_that_takes_no_profile_is_an_error(tmp_path):
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(StoreNotWritableError, match="`store`"):
        write_profile(tmp_path / "kv", profile())


def test_the_ratio_rises_to_what_hides_behind_loading(on_disk):
    """Prefill takes 1 ms per token, loading 0.8 ms per chunk token; fresh tokens are computed during loading anyway."""
    engine = on_disk(1536 * 1000 / 0.8)
    found = engine.prefill(engine.request(ONE, rule="cacheblend")).report
    num_chunk = sum(chunk.num_tokens for chunk in found.chunks)
    num_stored = num_chunk + found.num_prefix_tokens
    num_fresh = len(engine.renderer.render(ONE)) - num_stored
    behind = 1 - 1 / engine.layers.num_layers  # layer 1's loading hides nothing
    expected = (0.8 * behind * num_chunk - num_fresh) / num_stored
    assert found.recompute_ratio == pytest.approx(expected)
    assert expected > 0.2
    assert found.refused_reason == ""
    explicit = engine.prefill(engine.request(ONE, rule="cacheblend", recompute_ratio=0.15)).report
    assert explicit.recompute_ratio == 0.15
    from_memory = engine.prefill(engine.request(ONE, rule="cacheblend")).report
    assert from_memory.recompute_ratio == 0.15


def test_full_prefill_replaces_slower_reuse_and_one_warning_reports_it(on_disk, caplog):
    engine = on_disk(1536 * 1000 / 2)  # loading takes twice as long as prefill
    memory = engine.store.tiers[0]
    with caplog.at_level(logging.WARNING):
        found = []
        for _ in range(2):
            found.append(engine.prefill(engine.request(ONE)))
            wait_until(lambda: memory.contains(engine.key(ONE.chunks[0])), 30, "later requests find it in memory")
            assert engine.prefill(engine.request(ONE)).report.mode == "blend"
            memory.delete(engine.key(ONE.chunks[0]))
        full = engine.prefill(engine.request(ONE, mode="full"))
    for prefilled in found:
        assert prefilled.report.mode == "full"
        assert "full prefill of" in prefilled.report.refused_reason
        assert torch.equal(prefilled.logits, full.logits)
    assert caplog.text.count("stored KV is not used") == 1
    assert full.report.refused_reason == ""
    assert engine.generate(ONE, max_tokens=2).report.as_dict()["refused_reason"]
    wait_until(lambda: memory.contains(engine.key(ONE.chunks[0])), 30, "it is in memory")
    asked = engine.prefill(engine.request(ONE, recompute_ratio=0.15)).report
    assert (asked.mode, asked.refused_reason) == ("blend", "")
    reuse = engine.prefill(engine.request(ONE, mode="reuse")).report
    assert (reuse.mode, [chunk.hit for chunk in reuse.chunks]) == ("reuse", [True])


def test_the_page_cache_of_files_can_be_dropped(tmp_path):
    disk = DiskStore(tmp_path)
    disk.put(make_kv())
    assert drop_page_cache(tmp_path.rglob("*.safetensors")) == (sys.platform == "linux")
    found = disk.get(make_kv().header.key)
    assert torch.equal(found.layer(0).keys, make_kv().layer(0).keys)


def test_profile_then_plan_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "machine.json"
    sizes = ("--num-chunks", "6", "--chunk-tokens", "256")  # long enough that blending pays beyond any noise
    assert run_command("plan", "--storage", "ssd:2:0.1", "--profile", str(file)) == 3
    assert "ragblend profile --model MODEL --json" in capsys.readouterr().err
    place = ("--model", "demo", "--store", str(tmp_path / "kv"))
    assert run_command("profile", *sizes, "--repeats", "1", *place, "--json") == 0
    file.write_text(capsys.readouterr().out)
    measured = json.loads(file.read_text())
    assert measured["profile_version"] == 3
    storages = ("--storage", "disk::0.08", "--storage", "ram:50:3", "--storage", "tape:0.0000001:0.001")
    command = ("plan", "--profile", str(file), *sizes)
    assert run_command(*command, *storages, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    by_name = {option["storage"]: option for option in plan["options"]}
    assert plan["schema_version"] == 1
    assert [option["storage"] for option in plan["options"]] == ["tape", "disk", "ram"]
    assert by_name["tape"]["adds_delay"]
    assert not by_name["ram"]["adds_delay"]
    assert plan["chosen"] in ("disk", "ram")
    nbytes = 6 * 256 * measured["bytes_per_token"]
    assert by_name["disk"]["load_s"] == pytest.approx(nbytes / measured["bytes_per_s"]["disk"])
    assert run_command(*command, *storages) == 0
    assert f"{plan['chosen']} is the cheapest that adds no delay" in capsys.readouterr().out
    assert run_command(*command, "--storage", "ssd") == 2


def test_an_engine_finds_the_profile_of_its_store(tmp_path):
    with load_engine("demo", tmp_path / "kv") as engine:
        assert engine.machine is None
        made = profile(engine.fingerprint, bytes_per_token=engine.bytes_per_token)
    write_profile(tmp_path / "kv", made)
    with load_engine("demo", tmp_path / "kv") as engine:
        assert engine.machine == made
    with load_engine("demo") as engine:
        assert engine.machine is None


def test_a_server_is_measured_where_it_runs(tmp_path, capsys):
    place = ("--model", "demo", "--store", str(tmp_path / "kv"))
    assert run_command("profile", *place, "--backend", "http://localhost:9") == 2
    assert "on the server's machine" in capsys.readouterr().err
    assert run_command("profile", *place, "--vllm-options", '{"max_model_len": 512}') == 2
    assert "--backend vllm" in capsys.readouterr().err
