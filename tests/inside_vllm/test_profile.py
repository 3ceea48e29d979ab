"""`ragblend profile --backend vllm` for real, and what it leaves: a profile that only vLLM follows."""

import json
from itertools import pairwise

from commands import run_command

from ragblend.engine.tuning.loading_controller import machine_profile_from
from ragblend.engine.tuning.machine import machine_facts, read_machine_profile, vllm_machine_facts
from ragblend.engine.vllm.launch import find_checkpoint


def test_vllm_is_profiled_and_planned_with(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = tmp_path / "kv"
    place = ("--model", "demo", "--store", str(store), "--backend", "vllm", "--threads", "1", "--json")
    options = ("--vllm-options", json.dumps({"kv_cache_memory_bytes": 64 << 20}))
    assert run_command("profile", "--num-chunks", "4", "--chunk-tokens", "60", "--repeats", "1", *options, *place) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    checkpoint = find_checkpoint("demo")
    assert found["hardware"] == vllm_machine_facts(None)
    assert found["fingerprint"] == checkpoint.fingerprint
    assert (found["num_layers"], found["bytes_per_token"]) == (checkpoint.num_layers, checkpoint.bytes_per_token)
    lengths = [tokens for tokens, _ in found["prefill_s"]]
    assert [after - before for before, after in pairwise(lengths)] == [60, 120]
    assert [ratio for ratio, _ in found["shares"]] == [0.0, 0.15, 0.5, 1.0]
    assert found["bytes_per_s"]["disk"] > 0
    assert not list(store.rglob("*.safetensors"))  # nor anything else of what was measured on
    assert [path.name for path in store.iterdir()] == ["machines"]

    kept = read_machine_profile(store, checkpoint.fingerprint, vllm_machine_facts(None))
    assert kept is not None
    assert kept == machine_profile_from(found)
    assert read_machine_profile(store, checkpoint.fingerprint, machine_facts()) is None
    (tmp_path / "machine.json").write_text(json.dumps(found))
    assert run_command("plan", "--storage", "disk::0.08", "--profile", str(tmp_path / "machine.json"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["options"][0]["storage"] == "disk"
