"""Settings: flags > environment > ragblend.toml > defaults, and a bad value is named where it was set."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import blocks

from ragblend.config import USER_FILE, Settings, load_settings, user_folder
from ragblend.errors import UsageError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path_factory):
    for field in fields(Settings):
        monkeypatch.delenv(f"RAGBLEND_{field.name.upper()}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


def write(directory: Path, text: str) -> Path:
    (directory / "ragblend.toml").write_text(text)
    return directory


def write_own(text: str) -> None:
    """The user's own configuration file."""
    user_folder().mkdir(parents=True, exist_ok=True)
    (user_folder() / USER_FILE).write_text(text)


def test_the_file_in_the_docs_has_the_defaults_but_for_the_model(tmp_path, caplog):
    (example,) = (block.text for block in blocks("toml") if block.page == "docs/cli.md")
    assert load_settings(directory=write(tmp_path, example)) == Settings(model="Qwen/Qwen3-8B")
    assert not caplog.records, "no line of it is ignored"


def test_flags_beat_the_environment_which_beats_the_file(tmp_path, monkeypatch):
    write(tmp_path, 'k = 1\nchunk_size = 100\nmodel = "file"\n')
    monkeypatch.setenv("RAGBLEND_K", "2")
    monkeypatch.setenv("RAGBLEND_CHUNK_SIZE", "200")
    settings = load_settings({"k": 3}, tmp_path)
    assert (settings.k, settings.chunk_size, settings.model) == (3, 200, "file")
    assert settings.max_tokens == Settings().max_tokens


def test_a_flag_of_none_is_unset_but_zero_and_false_are_values(tmp_path):
    write_own("k = 4\nneighbours = 2\ntrust_remote_code = true\nrecompute_ratio = 0.4\n")
    settings = load_settings({"k": None, "neighbours": 0, "trust_remote_code": False, "recompute_ratio": 0.0}, tmp_path)
    assert (settings.k, settings.neighbours, settings.trust_remote_code, settings.recompute_ratio) == (4, 0, False, 0.0)


def test_the_working_directory_is_where_the_file_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, "k = 9\n"))
    assert load_settings().k == 9


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(("trust_remote_code", text, True) for text in ("1", "true", "YES")),
        *(("trust_remote_code", text, False) for text in ("0", "False", "no")),
        *(("recompute_ratio", "0.25", 0.25), ("recompute_ratio", "auto", "auto"), ("memory_gib", "3", 3.0)),
        *(("check_layers", "1,8", [1, 8]), ("recompute_ratios", "0.2, 0.1", [0.2, 0.1]), ("deviation", "kv", "kv")),
    ],
)
def test_values_of_every_type_are_read_from_the_environment(name, text, expected, monkeypatch, tmp_path):
    monkeypatch.setenv(f"RAGBLEND_{name.upper()}", text)
    found = getattr(load_settings(directory=tmp_path), name)
    assert (found, type(found)) == (expected, type(expected))


def test_settings_of_answers_reach_each_answer_under_the_names_of_its_options():
    settings = {"mode": "blend", "rule": "ask", "refine_ratio": 0.3, "max_tokens": 5, "temperature": 0.5}
    found = Settings(recompute_ratio=0.1, **settings).generation
    assert {name: found[name] for name in settings} == settings
    assert found["recompute_ratio"] == 0.1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("K", "six"),
        ("RECOMPUTE_RATIO", "half"),
        ("TRUST_REMOTE_CODE", "perhaps"),
        ("MEMORY_GIB", ""),
        ("CHUNK_SIZE", "1.5"),
        ("CHECK_LAYERS", "1,two"),
    ],
)
def test_a_value_the_environment_cannot_mean_is_named_with_its_variable(variable, value, monkeypatch, tmp_path):
    monkeypatch.setenv(f"RAGBLEND_{variable}", value)
    with pytest.raises(UsageError, match=rf"RAGBLEND_{variable} sets {variable.lower()} to '{value}'"):
        load_settings(directory=tmp_path)


@pytest.mark.parametrize(
    "line",
    ['k = "six"', "k = 2.5", "k = true", "k = [1]", "recompute_ratio = {a = 1}", 'trust_remote_code = "perhaps"'],
)
def test_a_value_of_the_wrong_type_is_rejected_with_its_files_path(line, tmp_path):
    with pytest.raises(UsageError, match=rf"ragblend\.toml sets {line.split()[0]} to"):
        load_settings(directory=write(tmp_path, line))


def test_an_unknown_key_in_the_file_is_named_with_the_known_ones(tmp_path):
    with pytest.raises(UsageError, match=r"ragblend\.toml sets chunksize, topk; known settings: .*chunk_size"):
        load_settings(directory=write(tmp_path, "topk = 3\nchunksize = 5\nk = 2\n"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recompute_ratio": 1.5}, "recompute_ratio is 1.5"),
        ({"recompute_ratio": -0.1}, "recompute_ratio is -0.1"),
        ({"recompute_ratio": float("nan")}, "recompute_ratio is nan"),
        ({"recompute_ratio": "all"}, "recompute_ratio is 'all'.*or 'auto'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"k": 0}, "k is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"neighbours": -1}, "neighbours is -1"),
        ({"memory_gib": -0.5}, "memory_gib is -0.5"),
        ({"disk_gib": -1.0}, "disk_gib is -1.0; choose 0 .no limit. or more GiB, or 'auto'"),
        ({"disk_gib": math.inf}, "disk_gib is inf; choose 0"),
        ({"remote_timeout_s": 0.0}, "remote_timeout_s is 0.0"),
        ({"max_file_mib": -1}, "max_file_mib is -1"),
        ({"mode": "fast"}, "mode is 'fast'.*blend, full, prefix, reuse"),
        ({"order": "random"}, "order is 'random'.*score, document"),
        ({"dtype": "int8"}, "dtype is 'int8'.*bfloat16"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'.*int8, fp8"),
    ],
)
def test_a_value_outside_its_range_is_named_with_the_choices(values, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        Settings(**values)
    with pytest.raises(UsageError, match=message):
        load_settings(values, tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        *({"recompute_ratio": 0.0}, {"recompute_ratio": 1.0}, {"memory_gib": 0.0}, {"k": 1}, {"mode": "reuse"}),
        *({"disk_gib": 0.0}, {"disk_gib": "auto"}),
    ],
)
def test_the_ends_of_each_range_are_allowed(values):
    assert all(getattr(Settings(**values), name) == value for name, value in values.items())


def test_the_floor_of_jinja2_is_what_transformers_demands_for_chat_templates():
    """transformers names jinja2 in an extra only, which we do not install: chat templates would fail at run time."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (ours,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "jinja2")
    theirs = (each for each in map(Requirement, requires("transformers") or ()) if each.name == "jinja2")
    assert {str(each.specifier) for each in theirs} == {str(ours.specifier)}


# --- what a folder's file may not say ---


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("trust_remote_code = true", "trust_remote_code"),
        ('remote = "redis://elsewhere:6379/0"', "remote"),
        ('backend = "https://elsewhere"', "backend"),
        ('store_key_file = "known.key"', "store_key_file"),
        ('embedder = "./embedder"', "embedder"),
        ('embedder = "inside"', "embedder"),
        ('store = "../other/kv"', "store"),
        ('store = "link/kv"', "store"),
        ('store = "~/kv"', "store"),
        ('store = "~root/kv"', "store"),
        ('kv_dir = "/home/another/kv"', "kv_dir"),
    ],
)
def test_a_folders_file_cannot_run_code_or_reach_outside(line, name, tmp_path, caplog):
    folder = tmp_path / "project"
    (folder / "inside").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path, target_is_directory=True)
    settings = load_settings(directory=write(folder, f"k = 7\n{line}\n"))
    assert getattr(settings, name) == getattr(Settings(), name)
    assert settings.k == 7, "the rest of the file counts"
    assert f"ragblend.toml sets {name}, which is ignored" in caplog.text
    assert f"RAGBLEND_{name.upper()}" in caplog.text


def test_the_users_file_the_environment_and_flags_accept_the_same_settings(tmp_path, monkeypatch, caplog):
    write(tmp_path, 'remote = "redis://evil"\ncatalog = "postgresql://evil/db"\ntrust_remote_code = true\nk = 2\n')
    write_own('remote = "redis://mine"\nk = 1\nstore = "/mnt/kv"\n')
    assert (load_settings(directory=tmp_path).remote, load_settings(directory=tmp_path).k) == ("redis://mine", 2)
    assert load_settings(directory=tmp_path).store == "/mnt/kv"
    assert load_settings(directory=tmp_path).catalog is None
    assert not load_settings(directory=tmp_path).trust_remote_code
    monkeypatch.setenv("RAGBLEND_REMOTE", "redis://environment")
    assert load_settings(directory=tmp_path).remote == "redis://environment"
    assert load_settings({"remote": "redis://flag"}, tmp_path).remote == "redis://flag"


def test_a_folder_cannot_choose_the_model_whose_code_may_run(tmp_path, caplog):
    write(tmp_path, 'model = "./theirs"\n')
    assert load_settings(directory=tmp_path).model == "./theirs", "its weights run no code"
    assert load_settings({"trust_remote_code": True}, tmp_path).model is None
    assert "the model whose code runs" in caplog.text
    assert load_settings({"trust_remote_code": True, "model": "./theirs"}, tmp_path).model == "./theirs"


def test_a_folder_sets_no_budget_of_a_store_elsewhere(tmp_path):
    write(tmp_path, "disk_gib = 0.001\n")
    assert load_settings(directory=tmp_path).disk_gib == 0.001
    outside = load_settings({"store": "/mnt/kv"}, tmp_path)
    assert outside.disk_gib == "auto"


@pytest.mark.parametrize("text", ["", "k = " + "[" * 100_000, "k = \n"], ids=["loop", "brackets", "no value"])
def test_a_settings_file_that_is_a_loop_or_invalid_is_an_error(text, tmp_path):
    """tests/cli/test_files.py has folders, pipes and bytes that are no text."""
    path = tmp_path / "ragblend.toml"
    if text:
        path.write_text(text)
    else:
        path.symlink_to(path)
    with pytest.raises(UsageError, match=r"ragblend\.toml (cannot be read|is not valid TOML)"):
        load_settings(directory=tmp_path)
