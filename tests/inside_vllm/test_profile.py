"""`ragblend profile --backend vllm` for real, and what it leaves: a profile that only vLLM follows. vLLM's own brief
measurement at its start."""

import json
from itertools import pairwise

from commands import run_command
from harness import SMALL, connector_scheduler

from ragblend import Prompt, load_engine
from ragblend.engine.tuning.loading_controller import machine_profile_from
from ragblend.engine.tuning.machine import machine_facts, read_machine_profile, vllm_machine_facts
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.engine.vllm.worker_side import measure


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


CHUNKS = [f"{name} Keller lives in Kinport. Julia Bishop works for Synon. " * 4 for name in ("George", "Tom", "Ben")]
PROMPT = Prompt(CHUNKS, "Where does George Keller live?")


def test_vllm_measures_at_its_first_start_and_keeps_the_profile(tmp_path, monkeypatch):
    options = {"backend": "vllm", "vllm_options": SMALL, "on_miss": "inline", "auto_profile": True}
    with load_engine("demo", tmp_path, on_miss="inline") as reference:
        expected = reference.generate(PROMPT, mode="full", max_tokens=8)
    with load_engine("demo", tmp_path, **options) as engine:
        kept = read_machine_profile(tmp_path, engine.fingerprint, engine.hardware)
        assert kept is not None
        assert kept.bytes_per_s["disk"] > 0
        assert len(kept.prefill_s) > 1
        assert kept.num_layers == engine.num_layers
        assert connector_scheduler(engine._loop._engine).scheduler.loading.machine == kept
        assert list(engine.store.keys()) == []
        for chunk in CHUNKS:
            engine.precompute(chunk)
        assert engine.generate(PROMPT, mode="full", max_tokens=8).token_ids == expected.token_ids
        report = engine.generate(PROMPT, max_tokens=1).report
        assert report.decision or report.refused_reason
        assert engine.reset_prefix_cache()
        named = engine.generate(PROMPT, recompute_ratio=1.0, max_tokens=8)
        assert (named.report.num_chunk_hits, named.token_ids) == (3, expected.token_ids)
    monkeypatch.setattr(measure, "measure_briefly", None)  # a call would fail
    with load_engine("demo", tmp_path, **options) as engine:
        assert connector_scheduler(engine._loop._engine).scheduler.loading.machine == kept


def test_a_measurement_that_fails_does_not_stop_vllm(tmp_path, monkeypatch, caplog):
    def fail(*args, **options):
        raise RuntimeError("no blocks left")

    monkeypatch.setattr(measure, "measure_briefly", fail)
    options = {"backend": "vllm", "vllm_options": SMALL, "on_miss": "inline", "auto_profile": True}
    with load_engine("demo", tmp_path, **options) as engine:
        assert "was not measured" in caplog.text
        engine.precompute(CHUNKS[0])
        report = engine.generate(Prompt(CHUNKS[:1], "Where?"), max_tokens=1).report
        assert (report.num_chunk_hits, report.decision) == (1, "")
