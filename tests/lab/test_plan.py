"""`ragblend plan` before there is a machine: sizes of the store, predicted times, and what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import INGEST, PLACE, CommandRunner
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, make_model
from transformers import LlamaConfig

from benchmarks.hardware_model import LLAMA_8B
from ragblend import load_engine
from ragblend.config import load_settings, write_user_setting
from ragblend.demo import WEIGHTS
from ragblend.demo.corpus import sample_corpus
from ragblend.engine.fusion.rules import RULES
from ragblend.engine.transformers.layers import TransformersLayers
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.errors import UsageError
from ragblend.lab.bench.common.shapes import find_shape
from ragblend.lab.hardware import (
    BY_KERNELS,
    BY_TORCH,
    GPUS,
    Hardware,
    Operations,
    blend_s,
    cpu,
    full_prefill_s,
    predict_profiles,
)
from ragblend.lab.model_sizes import KV_DTYPES, ModelSizes, read_model_sizes
from ragblend.lab.plan import PromptSpec, Storage, always, blended_s, pays_from_tokens, plan
from ragblend.options import ModelOptions

ROOT = Path(__file__).parents[2]


def save_config(folder: Path, shape: str) -> Path:
    """Write the config.json of a Llama shape, and nothing else."""
    sizes = find_shape(shape)
    LlamaConfig(
        num_hidden_layers=sizes.num_layers, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_kv_heads, head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size, max_position_embeddings=sizes.max_positions, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in a folder with the config of Llama 3.1 8B: llama/config.json."""
    monkeypatch.chdir(tmp_path)
    save_config(tmp_path / "llama", "llama-8b")
    return CommandRunner(capsys)


# -- sizes


def test_llama_8b_is_read_from_its_config(tmp_path):
    found = read_model_sizes(str(save_config(tmp_path, "llama-8b")), ModelOptions())
    assert found.num_weights == pytest.approx(8.03e9, rel=0.001)
    assert found.layer_weights == pytest.approx(LLAMA_8B.layer_weights, rel=0.001)  # norms are new
    known = replace(LLAMA_8B, num_weights=found.num_weights, layer_weights=found.layer_weights, context_length=131_072)
    assert found == known


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kv_of_every_family_has_the_engines_bytes(family, tmp_path):
    model_class, changes = FAMILIES[family]
    model = make_model(model_class, **changes)
    model.config.save_pretrained(tmp_path)
    layers = TransformersLayers(model)
    found = read_model_sizes(str(tmp_path), ModelOptions(dtype="float32"))
    assert found.kv_numbers == sum(heads * (keys + values) for heads, keys, values in layers.kv_shapes)
    assert found.kv_heads == sum(heads for heads, _, _ in layers.kv_shapes)
    assert 0 < found.layer_weights * found.layers < found.num_weights


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_per_token_are_those_of_a_store(kv_dtype):
    with load_engine("demo", kv_dtype=kv_dtype, device="cpu") as engine:
        found = read_model_sizes("demo", ModelOptions(), "cpu").stored_bytes_per_token(kv_dtype)
        assert found == engine.bytes_per_token


# -- predicted and measured times

L200M = find_shape("llama-200m")
SMALL = ModelSizes(
    L200M.num_layers,
    L200M.hidden_size * (2 * L200M.hidden_size + 2 * L200M.num_kv_heads * L200M.head_dim + 3 * L200M.intermediate_size),
    L200M.hidden_size, 2 * L200M.num_layers * L200M.num_kv_heads * L200M.head_dim,
    L200M.num_layers * L200M.num_kv_heads, itemsize=4,
)  # fmt: skip


def results(name: str) -> Any:
    return json.loads((ROOT / "data/results" / name).read_text())


def operations_of_the_measured_path() -> Operations:
    """Return the operations of the requests in gpu-h100.json, which are older than Triton's kernels.

    Its launches are 1.23 times as many, as those of full prefill, which is the same today.
    """
    launched = {
        each["case"]: each["per_layer"]
        for each in results("gpu-h100.json")["parts"]["launches"]["found"]
        if each["tokens"] == 4096
    }
    per_operation = launched["full"] / BY_TORCH.full
    return Operations(*(launched[case] / per_operation for case in ("full", "reuse", "cacheblend 15%", "ask 5%")))


H100_BEFORE_KERNELS = replace(GPUS["H100"], operations=operations_of_the_measured_path())


def measured_and_predicted() -> Iterator[tuple[int, list[tuple[float, float]]]]:
    """Yield tokens of a prompt, and measured and predicted seconds of full prefill, reuse, ask and cacheblend."""
    one_core = results("hardware-cpu.json")
    runs: list[tuple[ModelSizes, Hardware, dict[str, Any]]] = [
        (LLAMA_8B, H100_BEFORE_KERNELS, run) for run in results("gpu-h100.json")["parts"]["ttft"]["found"]
    ]
    runs += [(SMALL, cpu(1), {**run, "tokens": one_core["prompt_tokens"]}) for run in one_core["runs"]]
    for tokens in dict.fromkeys(run["tokens"] for _, _, run in runs):
        found = []
        for model, device, run in runs:
            if run["tokens"] != tokens or run["mode"] == "prefix":
                continue
            rule = RULES["ask" if run["rule"] == "none" else run["rule"]]
            full = run["mode"] == "full"
            predicted = (
                full_prefill_s(model, device, tokens)
                if full
                else blend_s(model, device, rule, tokens, 32, run["ratio"])
            )
            found.append((run["ttft_s"], predicted))
        yield tokens, found


def table() -> list[str]:
    """Return the rows of the table in benchmarks/RESULTS.md."""
    rows = []
    for tokens, pairs in measured_and_predicted():
        cells = (f"{predicted:.3g} / {measured:.3g}" for measured, predicted in pairs)
        rows.append(f"| {tokens:,}{' (CPU)' if tokens == 3120 else ''} | {' | '.join(cells)} |")
    return rows


def test_predictions_are_near_what_was_measured_and_the_page_has_both():
    for _, pairs in measured_and_predicted():
        assert len(pairs) == 4
        assert all(0.7 < predicted / measured < 1.3 for measured, predicted in pairs)
    page = (ROOT / "benchmarks/RESULTS.md").read_text()
    assert re.findall(r"^\| [\d,]+(?: \(CPU\))? \|(?: \S+ / \S+ \|){4}$", page, re.MULTILINE) == table()


def test_the_operations_are_those_that_were_counted():
    counted = results("operations.json")
    for operations, runs in ((BY_KERNELS, counted["runs"]), (BY_TORCH, counted["runs_without_kernels"])):
        per_layer = [round(runs[case]["per_layer"], 1) for case in ("full", "reuse", "cacheblend", "ask")]
        assert [*operations] == per_layer


def test_a_short_prompt_is_not_promised_what_was_not_kept():
    """Measured on an H100: at 4,096 tokens `ask` is no faster than full prefill; from the disk at 8,192, nothing is."""
    predicted = predict_profiles(LLAMA_8B, H100_BEFORE_KERNELS, RULES["ask"], 32, 0.05)
    need = PromptSpec(8, 508, 32, 0.05, probes_before_selection=True)
    assert blended_s(predicted(need.num_tokens), None, need) > predicted(need.num_tokens).full_prefill_s(4096)
    disk, longer = Storage("nvme", 1.9e9, 0.1), replace(need, num_chunks=16)
    assert blended_s(predicted(longer.num_tokens), disk, longer) > predicted(longer.num_tokens).full_prefill_s(8160)


# -- the length from which blending pays


@given(st.floats(0.0, 3.0), st.floats(0.01, 2.0), st.integers(1, 40), st.floats(0, 5))
def test_blending_pays_from_the_shortest_prompt_that_is_faster(host_s, load_per_s, chunk_tokens, latency_s):
    def profile_at(tokens: int) -> MachineProfile:
        full_s = tokens / 100 + 1e-6 * tokens**2
        shares = ((0.0, host_s / full_s), (1.0, host_s / full_s + 1))
        return MachineProfile("f", {}, 4, 1, ((tokens, full_s),), shares)

    storage = Storage("any", 100 / load_per_s, 0.0, latency_s)
    need = PromptSpec(1, chunk_tokens, 1, 0.0, probes_before_selection=True)
    found = pays_from_tokens(profile_at, storage, need, 1 + 50 * chunk_tokens)
    faster = [
        spec.num_tokens
        for count in range(1, 51)
        if blended_s(profile_at((spec := replace(need, num_chunks=count)).num_tokens), storage, spec)
        < profile_at(spec.num_tokens).full_prefill_s(spec.num_tokens)
    ]
    assert found == (min(faster) if faster else None)


def test_a_remote_tiers_chunks_arrive_after_its_latency_in_vllm_whole():
    profile = MachineProfile("f", {}, 10, 1000, ((1000.0, 1.0), (4000.0, 4.0)))
    need = PromptSpec(2, 500, 0, 0.5)  # 1 s of full prefill, half of it recomputed; 1 MB
    local, far = Storage("disk", 2e6, 1), Storage("redis", 2e6, 1, 0.25)

    def options(profile: MachineProfile) -> dict[str, Any]:
        return {option["storage"]: option for option in plan(always(profile), [local, far], need)["options"]}

    found, in_vllm = options(profile), options(replace(profile, hardware={"engine": "vllm"}))
    assert found["disk"]["ttft_s"] == pytest.approx(0.5 + 0.05)  # reading hides, all but one layer
    assert found["redis"]["ttft_s"] == pytest.approx(0.25 + 0.5 + 0.05)
    assert found["redis"]["load_s"] == pytest.approx(0.75)
    assert in_vllm["disk"] == found["disk"]
    assert in_vllm["redis"]["ttft_s"] == pytest.approx(0.25 + 0.5 + 0.5)
    assert in_vllm["redis"]["hidden_ratio"] == need.ratio


# -- the command


@pytest.mark.parametrize("model", ["llama", "llama/config.json", "org/llama"])
def test_a_config_alone_gives_a_plan(run, model, tmp_path, monkeypatch):
    if model == "org/llama":  # in Hugging Face's cache
        cached = tmp_path / "hub/models--org--llama"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text("f00d")
        save_config(cached / "snapshots/f00d", "llama-8b")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command = ("plan", "--model", model, "--gpu", "H100", "--corpus", "4GB", "--storage", "nvme:3.5:0.1")
    facts = run.facts(*command, "--memory", "131072000B")
    assert facts["bytes_per_token"] == {"auto": 1 << 17, "int8": 66_560, "fp8": 66_560}
    assert facts["corpus"]["kv_bytes"]["auto"] == 10**9 << 17
    assert facts["corpus"]["kv_bytes_neutral"]["int8"] == 2 * 10**9 * 66_560
    assert facts["gpu"]["weight_bytes"] == pytest.approx(16.06e9, rel=0.001)
    assert facts["host"]["tokens"] == 1000
    assert facts["predicted_for"] == "H100"
    (option,) = facts["options"]
    assert option["bytes_per_s"] == 1.9e9, "faster than the engine reads"
    assert facts["memory"]["pays_from_tokens"] < option["pays_from_tokens"]
    code, out, _ = run(*command)
    assert code == 0
    assert "PREDICTED from the data sheet of H100" in out
    assert "full prefill is faster than blending from each of these" in out
    shorter = run(*command, "--num-chunks", "2")[1]
    assert "full prefill of such a prompt is faster than blending, even from host memory" in shorter
    for kv_dtype in ("auto", "int8"):
        eight = run.facts(*command, "--kv-dtype", kv_dtype)["options"][0]
        assert eight["gb_per_1000_chunks"] == pytest.approx(facts["bytes_per_token"][kv_dtype] * 512e-6)


def test_a_cpu_a_size_alone_and_a_measured_profile(run, tmp_path):
    code, out, _ = run("plan", "--model", "llama", "--gpu", "cpu:64")
    assert (code, "float32 (as computed)" in out, "is the cheapest" in out) == (0, True, True)
    facts = run.facts("plan", "--model", "llama", "--corpus", "1GB")
    assert ("options" in facts, facts["corpus"]["tokens"]) == (False, 250_000_000)
    profile = MachineProfile("f", {}, 32, 1 << 17, ((1000.0, 1.0),), bytes_per_s={"disk": 5e9})
    Path("machine.json").write_text(json.dumps(profile.as_dict()))
    for more, sizes in (((), {"measured": 1 << 17}), (("--model", "llama"), {"auto": 1 << 17, "int8": 66_560})):
        facts = run.facts("plan", "--profile", "machine.json", "--storage", "disk::1", *more)
        assert (facts["predicted_for"], facts["options"][0]["bytes_per_s"]) == (None, 5e9)
        assert facts["bytes_per_token"].items() >= sizes.items()
        assert facts["full_s"] == pytest.approx(3.104)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "--model MODEL --gpu NAME predicts"),
        (("--model", "llama", "--gpu", "B200"), 2, "choose L4, A10, A100, H100, H200, cpu or cpu:CORES"),
        (("--model", "llama", "--gpu", "cpu:0"), 2, "cpu:CORES"),
        (("--model", "llama", "--gpu", "L4", "--dtype", "float32"), 2, "the weights have 32 GB"),
        (("--model", str(WEIGHTS), "--gpu", "L4", "--dtype", "float32"), 2, "--dtype bfloat16"),
        (("--model", "llama", "--gpu", "L4", "--profile", "machine.json"), 2, "give one of them"),
        (("--model", "llama", "--gpu", "L4", "--corpus", "much"), 2, "'much' is not a size"),
        (("--model", "llama", "--gpu", "L4", "--storage", "tape"), 2, "such as ssd:2.5:0.08"),
        (("--model", "llama", "--place", "nvme=kv"), 2, "add --gpu NAME or --profile FILE"),
        (("--model", "llama", "--gpu", "L4", "--place", "nvme"), 2, "write NAME=FOLDER or NAME=URL"),
        (("--model", "llama", "--gpu", "L4", "--storage", "s3", "--place", "nvme=kv"), 2, "for each of s3"),
        (
            ("--model", "llama", "--gpu", "L4", "--storage", "s3", "--storage", "nvme", "--place", "nvme=kv"),
            2,
            "s3 has no place",
        ),
        (("--model", "llama", "--gpu", "L4", "--place", "s3=ftp://there"), 2, "ftp://there cannot be opened"),
        (("--model", "llama", "--gpu", "L4", "--place", "redis=redis://:secret@there"), 2, "RAGBLEND_REMOTE"),
        (("--model", "none.json", "--gpu", "L4"), 3, "there is no config at none.json"),
        (("--model", "org/unknown", "--gpu", "L4"), 3, "save that file, and name it: --model config.json"),
    ],
)
def test_what_cannot_be_planned_is_said_with_the_next_thing_to_type(run, arguments, code, said, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = run("plan", *arguments)
    assert found[0] == code
    assert said in found[2]


# -- the chosen storage


@pytest.fixture
def placing(run, tmp_path, monkeypatch):
    """Run `plan --place` with a profile in which recompute hides reads from `near`, and in which `far` is slower."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = MachineProfile("f", {}, 32, 1 << 17, ((1000.0, 1.0),), bytes_per_s={"near": 5e9, "far": 1e6})
    Path("machine.json").write_text(json.dumps(profile.as_dict()))

    def place(near: str, far: str, far_speed: str = "") -> dict[str, Any]:
        plan = ("plan", "--profile", "machine.json", "--rule", "cacheblend")
        storages = ("--storage", "near::1", "--storage", f"far:{far_speed}:0.1")
        return run.facts(*plan, *storages, "--place", f"near={near}", "--place", f"far={far}")

    return place


def entries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def test_placed_kv_is_where_the_plan_puts_it(run, placing, tmp_path):
    far = (tmp_path / "far").as_uri()
    facts = placing("near/kv", far)
    file, near = tmp_path / "config/ragblend/config.toml", tmp_path / "near/kv"
    assert facts["chosen"] == "near"
    assert facts["placed"] == {"setting": "kv_dir", "value": str(near), "file": str(file), "overridden": False}
    sample_corpus().first_records(4).write(tmp_path / "docs")
    assert run(*INGEST, *PLACE)[0] == 0
    assert (len(entries(near)), len(entries(tmp_path / "s"))) == (len(entries(tmp_path)), 0)
    assert entries(near)
    assert placing("near/kv", far, "5")["placed"]["setting"] == "remote"
    assert run.facts("push", *PLACE)["num_sent"] == len(entries(near))


def test_a_users_other_settings_are_kept(placing, tmp_path, monkeypatch):
    file = tmp_path / "config/ragblend/config.toml"
    file.parent.mkdir(parents=True)
    file.write_text('# mine\nkv_dir = "/old"  # the old disk\nmax_tokens = 7')
    placing("near", "/far")
    assert file.read_text() == f'# mine\nkv_dir = "{tmp_path}/near"\nmax_tokens = 7'
    placing("near", (tmp_path / "far").as_uri(), "5")
    assert load_settings().remote == (tmp_path / "far").as_uri()
    monkeypatch.setenv("RAGBLEND_KV_DIR", "/other")
    assert placing("elsewhere", "/far")["placed"]["overridden"]
    file.write_text('kv_dir = """\n/a"""')
    with pytest.raises(UsageError, match="write this line into it: kv_dir = "):
        write_user_setting("kv_dir", "/b")
    assert file.read_text() == 'kv_dir = """\n/a"""'


def test_no_storage_that_hides_writes_nothing(run, placing, tmp_path):
    plan = ("plan", "--profile", "machine.json", "--rule", "cacheblend", "--storage", "far::1", "--place", "far=/far")
    assert run.facts(*plan)["placed"] is None
    assert "no setting was written" in run(*plan)[1]
    assert not (tmp_path / "config").exists()
