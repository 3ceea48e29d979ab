"""`ragblend serve` up to the moment it becomes vLLM: the command, its flags, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from ragblend.config import Settings
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.vllm import launch as vllm_launch
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.launch import CONNECTOR_MODULE, cpu_paged_kv_bytes, plugin_problem
from ragblend.errors import BackendUnreachableError, RagblendError, UsageError
from ragblend.operations.serve import ServerCommand, build_server_command, serve


def launch(*flags: str, **options: Any) -> ServerCommand:
    settings = {name: options.pop(name) for name in [*options] if name in Settings.__dataclass_fields__}
    return build_server_command(Settings(**{"model": "demo", **settings}), flags, **options, check=False)


def value(command: tuple[str, ...], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def extra(command: tuple[str, ...]) -> dict[str, Any]:
    transfer = json.loads(value(command, "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == CONNECTOR_MODULE
    assert transfer["kv_load_failure_policy"] == "recompute"
    return dict(transfer["kv_connector_extra_config"])


def test_the_demo_model_is_served_on_loopback_over_an_absolute_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = launch(store="kv")
    command = made.command
    assert command[:4] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
    assert (Path(command[4]) / "config.json").is_file()
    assert value(command, "--host") == "127.0.0.1"
    assert value(command, "--served-model-name") == "demo"
    assert value(command, "--dtype") == "float32"
    config = extra(command)
    assert config["store"] == str(tmp_path / "kv")  # vLLM's processes may have another working directory
    assert (config["mode"], config["prefix_ids"]) == ("blend", [1, 3])


def test_reused_tokens_are_counted_and_cpu_blocks_are_small_by_default(tmp_path):
    command = launch(store=str(tmp_path)).command
    assert command.count("--enable-prompt-tokens-details") == 1
    assert value(command, "--block-size") == "32"
    command = launch("--no-enable-prompt-tokens-details", "--block-size=64", store=str(tmp_path)).command
    assert not {"--enable-prompt-tokens-details", "--block-size"} & set(command)


@pytest.mark.parametrize(("flags", "count"), [((), "1"), (("--api-server-count", "3"), "3"), (("--headless",), None)])
def test_one_front_end_unless_a_flag_sets_another_number(tmp_path, flags, count):
    command = launch(*flags, store=str(tmp_path)).command
    assert ("--api-server-count" in command) == (count is not None)
    assert count is None or value(command, "--api-server-count") == count


def test_vllms_revision_chooses_the_checkpoint(tmp_path, monkeypatch):
    asked: list[Any] = []
    demo = vllm_launch.find_checkpoint("demo")
    monkeypatch.setattr("ragblend.operations.serve.find_checkpoint", lambda *call: asked.append(call) or demo)
    for flags in (("--revision", "v2"), ("--revision=v2",)):
        command = launch(*flags, "--max-model-len", "512", model="org/tiny", store=str(tmp_path)).command
        assert command[-2:] == ("--max-model-len", "512")
        assert not [word for word in command if word.startswith("--revision")]  # vLLM ignores it for a path
    assert [(model, options.revision) for model, options in asked] == [("org/tiny", "v2")] * 2


def broken_stores(root: Path) -> dict[str, Path]:
    """Stores that no server can use."""
    file, note, folder = root / "file", root / "note", root / "locked"
    file.write_text("no folder")
    (note / "models").mkdir(parents=True)
    (note / "context.json").write_text("{}")
    folder.mkdir()
    return {"a file": file, "below a file": file / "kv", "a damaged note": note, "not ours to write": folder}


@pytest.mark.parametrize("kind", ["a file", "below a file", "a damaged note", "not ours to write"])
def test_a_dry_run_refuses_the_store_that_serve_refuses(tmp_path, monkeypatch, kind):
    store, access = broken_stores(tmp_path)[kind], os.access
    # Root may write everywhere, so the check is replaced.
    monkeypatch.setattr("os.access", lambda place, *mode: access(place, *mode) and place != tmp_path / "locked")
    monkeypatch.setattr("ragblend.operations.serve.require_vllm", lambda: None)
    monkeypatch.setattr("os.execvpe", lambda *call: pytest.fail(f"started {call}"))
    before, errors = sorted(tmp_path.rglob("*")), []
    for start in (serve, build_server_command):  # the second is all that --dry-run does
        with pytest.raises(RagblendError) as error:
            start(Settings(model="demo", store=str(store)))
        errors.append(str(error.value))
    assert str(store) in errors[0]
    assert errors[0] == errors[1]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flags", [(), ("--max-model-len", "512"), ("--uds=/tmp/socket",)])
def test_a_port_in_use_is_an_error_before_the_model_loads(tmp_path, monkeypatch, flags):
    monkeypatch.setattr("ragblend.operations.serve.require_vllm", lambda: None)
    monkeypatch.setattr("os.execvpe", lambda *call: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reason = "started" if "--uds=/tmp/socket" in flags else f"127.0.0.1:{port}: the port is in use; choose"
        with pytest.raises((UsageError, pytest.fail.Exception), match=reason):
            serve(Settings(model="demo", store=str(tmp_path)), flags, port=port)
    with pytest.raises(UsageError, match=r"no server can listen at no\.such\.host:1"):
        serve(Settings(model="demo", store=str(tmp_path)), host="no.such.host", port=1)


@pytest.mark.parametrize(("flags", "seconds"), [((), "30"), (("--shutdown-timeout", "5"), "5")])
def test_open_streams_end_after_half_a_minute_unless_a_flag_says_otherwise(tmp_path, flags, seconds):
    assert value(launch(*flags, store=str(tmp_path)).command, "--shutdown-timeout") == seconds


def test_a_store_of_another_model_is_named(tmp_path, caplog):
    store, checkpoint = DiskStore(tmp_path), vllm_launch.find_checkpoint("demo")
    store.put_model("another", {**checkpoint.facts(), "model": "org/tiny"})
    launch(store=str(tmp_path))
    assert f"{tmp_path} has KV of org/tiny (float32), but none of demo (float32)" in caplog.text
    caplog.clear()
    store.put_model(checkpoint.fingerprint, checkpoint.facts())
    launch(store=str(tmp_path))
    assert not caplog.text


def test_options_reach_the_connector_and_vllms_flags_reach_vllm(tmp_path):
    command = launch(
        "--max-model-len", "512", "--served-model-name", "mine",
        store=str(tmp_path), mode="prefix", recompute_ratio=0.3, rule="random", system="Be brief.", host="0.0.0.0",
        port=9001,
    ).command  # fmt: skip
    config = extra(command)
    assert (config["mode"], config["ratio"], config["rule"]) == ("prefix", 0.3, "random")
    assert (value(command, "--host"), value(command, "--port")) == ("0.0.0.0", "9001")
    assert command[-4:] == ("--max-model-len", "512", "--served-model-name", "mine")
    assert value(command, "--served-model-name") == "mine"


def test_vllm_does_not_take_all_memory_of_a_machine_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_launch, "has_cuda", lambda: False)
    assert int(value(launch(store=str(tmp_path)).command, "--kv-cache-memory-bytes")) == 256 << 20
    assert launch("--gpu-memory-utilization=0.5", store=str(tmp_path)).command.count("--kv-cache-memory-bytes") == 0
    checkpoint = vllm_launch.find_checkpoint("demo")
    assert checkpoint.bytes_per_token == 5 * 2 * 4 * 32 * 4
    monkeypatch.setattr(vllm_launch, "has_cuda", lambda: True)
    assert cpu_paged_kv_bytes(checkpoint) is None


@pytest.mark.parametrize(
    ("has_cuda", "flags", "adds"),
    [
        (False, (), True),
        (False, ("--max-model-len", "512"), True),
        (True, (), False),
        (False, ("--enforce-eager",), False),
        (False, ("--no_enforce_eager",), False),
        (False, ("-O3",), False),
        (False, ("-O", "3"), False),
        (False, ("--optimization-level=3",), False),
        (False, ("--compilation-config", '{"mode": 3}'), False),
        (False, ("-cc.mode=3",), False),
    ],
)
def test_without_a_gpu_vllm_compiles_only_if_a_flag_requests_it(tmp_path, monkeypatch, has_cuda, flags, adds):
    monkeypatch.setattr(vllm_launch, "has_cuda", lambda: has_cuda)
    command = launch(*flags, store=str(tmp_path)).command
    assert command.count("--enforce-eager") == adds + flags.count("--enforce-eager")
    assert command[len(command) - len(flags) :] == flags


@pytest.mark.parametrize("line", ["enforce_eager: false", "compilation-config: {mode: 3}"])
def test_without_a_gpu_a_config_file_of_vllm_may_request_compilation(tmp_path, monkeypatch, line):
    monkeypatch.setattr(vllm_launch, "has_cuda", lambda: False)
    file = tmp_path / "vllm.yaml"
    file.write_text(f"served-model-name: mine\n{line}\n")
    command = launch(f"--config={file}", store=str(tmp_path / "store")).command
    assert "--enforce-eager" not in command
    assert "--served-model-name" not in command
    file.write_text("{")
    assert "--enforce-eager" in launch("--config", str(file), store=str(tmp_path / "store")).command


def test_the_api_key_is_neither_in_the_command_nor_shown(tmp_path):
    made = launch(store=str(tmp_path), api_key="secret-key")
    assert made.environment["VLLM_API_KEY"] == "secret-key"
    assert "secret-key" not in " ".join(made.command)
    assert "secret-key" not in made.display_command()
    assert "VLLM_API_KEY=***" in made.display_command()


def test_tiers_reach_the_connector_and_a_remotes_password_reaches_no_command_line(tmp_path, monkeypatch):
    url, catalog = "redis://:pass-word@cache:6379/0", "postgresql://me:pass-word@db/kv"
    made = launch(store=str(tmp_path), disk_gib=3.0, kv_dtype="int8", remote=url, catalog=catalog)
    config = extra(made.command)
    assert (config["disk_gib"], config["kv_dtype"]) == (3.0, "int8")
    assert "pass-word" not in " ".join(made.command)
    assert "pass-word" not in made.display_command()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    read = ConnectorConfig.from_extra_config(config)  # as vLLM's processes read it
    assert (read.remote, read.catalog) == (url, catalog)
    error = BackendUnreachableError("the catalogue postgresql://***@db/kv does not answer")
    assert read.message_for_clients(error) == "the catalogue CATALOG does not answer"
    without = launch(store=str(tmp_path))
    assert ConnectorConfig.from_extra_config(extra(without.command)).remote is None


@pytest.mark.parametrize(
    ("flags", "options", "named"),
    [
        ((), {"model": "--max-model-len"}, "write the model first"),
        ((), {"recompute_ratio": 1.5}, "1.5"),
        ((), {"rule": "best"}, "best"),
        ((), {"port": 0}, "port"),
        ((), {"remote": "cache:6379"}, "cache:6379"),
        ((), {"mode": "none"}, "mode is 'none'"),
        (("--kv-transfer-config", "{}"), {}, "--kv-transfer-config"),
        (("--dtype=half",), {}, "--dtype"),
    ],
)
def test_what_cannot_be_served_is_a_usage_error(tmp_path, flags, options, named):
    with pytest.raises(UsageError, match=named):
        launch(*flags, store=str(tmp_path), **options)


def test_a_plugin_kept_out_is_named_with_the_way_in():
    assert "VLLM_PLUGINS=a,ragblend" in plugin_problem({"VLLM_PLUGINS": "a"})
    assert "VLLM_PLUGINS=ragblend" in plugin_problem({"VLLM_PLUGINS": ""})
    assert plugin_problem({"VLLM_PLUGINS": "a, ragblend"}) == plugin_problem({})


@pytest.mark.parametrize("version", [(0, 0), (0, 27)])
def test_without_a_fitting_vllm_nothing_starts(tmp_path, monkeypatch, version):
    monkeypatch.setattr("ragblend.engine.vllm.support.vllm_version", lambda: version)
    with pytest.raises(RagblendError, match=r"pip install 'ragblend\[vllm\]'"):
        build_server_command(Settings(model="demo", store=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_splits_its_own_flags_from_vllms(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ragblend.operations.serve.require_vllm", lambda: None)
    arguments = ["serve", "demo", "--store", str(tmp_path), "--max-model-len", "512", "--port", "8001", "-tp", "2"]
    assert run_command(*arguments, "--enforce-eager", "--ratio", "0.5", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("--port 8001 --max-model-len 512 -tp 2 --enforce-eager")
    assert '"ratio":0.5' in shown
    assert extra(launch(store=str(tmp_path), recompute_ratio="auto").command)["ratio"] == "auto"
