"""`ragblend analyze` as a stranger types it: odd lines, one JSON object, no word of the texts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ragblend.demo import WEIGHTS
from ragblend.engine.tuning.loading_controller import MachineProfile

PASSAGES = [" ".join(f"{word}{number}" for word in ("lease", "signed", "office", "rent") * 15) for number in range(8)]


def request(number: int) -> dict[str, Any]:
    """Three passages in random order, and a question."""
    chosen = random.Random(number).sample(PASSAGES, 3)
    return {"messages": [{"role": "user", "content": "\n\n".join([*chosen, f"question {number}?"])}]}


def write_lines(name: str, values: Iterable[Any]) -> None:
    Path(name).write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with two logs."""
    monkeypatch.chdir(tmp_path)
    write_lines("a.jsonl", map(request, range(60)))
    write_lines("b.jsonl", map(request, range(60, 90)))
    return tmp_path


def test_logs_give_one_json_object(run):
    facts = run.facts("analyze", "a.jsonl", "b.jsonl", "--model", str(WEIGHTS))
    assert facts["schema_version"] == 1
    assert (facts["num_requests"], facts["tokens_are_estimated"]) == (90, False)
    assert sum(facts["shares"].values()) == pytest.approx(1)
    assert facts["shares"]["elsewhere"] > 0.4
    last = facts["curve"][-1]
    assert last["bytes"] == last["tokens"] * facts["kv_bytes_per_token"]
    assert last["lru"] == pytest.approx(facts["shares"]["elsewhere"])
    assert facts["verdict"].endswith("(only 90 requests: log more)")
    config = AutoConfig.from_pretrained(WEIGHTS)
    itemsize = 4 if "float32" in str(config.dtype) else 2
    expected = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * itemsize
    assert facts["kv_bytes_per_token"] == expected


def test_no_text_is_printed_unless_requested(run):
    Path("c.jsonl").write_text('{"messages": "lease\n', encoding="utf-8")
    for arguments in (("a.jsonl", "c.jsonl"), ("a.jsonl", "c.jsonl", "--json")):
        code, out, err = run("analyze", *arguments)
        assert code == 0
        assert not [word for word in ("lease", "signed", "office", "question") if word in out + err]
    assert "lease" in run("analyze", "a.jsonl", "--show-texts")[1]


def test_a_profile_gives_seconds(run):
    profile = MachineProfile(
        "f", {"ranks": 1}, num_layers=32, bytes_per_token=1 << 17, prefill_s=((100.0, 0.1), (1000.0, 1.5)),
        bytes_per_s={"disk": 2e9},
    )  # fmt: skip
    Path("profile.json").write_text(json.dumps({"schema_version": 1, **profile.as_dict()}), encoding="utf-8")
    facts = run.facts("analyze", "a.jsonl", "--profile", "profile.json")
    saving = facts["saving"]
    assert saving["unit"] == "seconds"
    assert saving["full"] > saving["prefix"] > saving["blend"] > 0
    assert facts["kv_bytes_per_token"] == 1 << 17
    assert facts["ratio"] == 0.05, "that of the rule of a deep model"
    assert " s " in run("analyze", "a.jsonl", "--profile", "profile.json")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("none.jsonl",), 3, "none.jsonl does not exist"),
        (("empty",), 2, "ragblend analyze empty/*"),
        (("other.jsonl",), 1, "no request in other.jsonl"),
        (("a.jsonl", "--ratio", "2"), 2, "choose 0 (full reuse)"),
        (("a.jsonl", "--profile", "none.json"), 3, "ragblend profile"),
        (("a.jsonl", "--profile", "other.jsonl"), 2, "machine profile"),
        (("a.jsonl", "--model", "nowhere/at-all"), 3, "nowhere/at-all"),
    ],
)
def test_errors_name_the_value_and_what_to_do(run, arguments, code, words):
    Path("empty").mkdir()
    Path("other.jsonl").write_text('{"level": "info"}\n', encoding="utf-8")
    ended, out, err = run("analyze", *arguments)
    assert (ended, out) == (code, "")
    assert words in err


def test_odd_requests_are_counted_like_any_other(run):
    odd: list[Any] = [
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "\ud83d lone surrogate"}]},
        {"messages": [{"role": "user", "content": "租约由谁签署？" * 40}]},
        {"messages": [{"role": "user", "content": "‏من وقع عقد الإيجار؟ " * 40}]},
        {"prompt": ""},
        {"prompt": [10, 11, 12]},
    ]
    write_lines("odd.jsonl", odd * 2)
    facts = run.facts("analyze", "odd.jsonl")
    assert facts["num_requests"] == 2 * (len(odd) - 1)
    assert (facts["num_skipped"], facts["num_media"]) == (2, 2)
    for arguments in ((), ("--model", str(WEIGHTS))):
        assert sum(run.facts("analyze", "odd.jsonl", *arguments)["shares"].values()) == pytest.approx(1)


def test_a_log_can_be_piped():
    log = "".join(json.dumps(request(number)) + "\n" for number in range(20))
    ended = subprocess.run(
        [sys.executable, "-m", "ragblend", "analyze", "-", "--json"],
        input=log.encode(), capture_output=True, check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin", "XDG_CONFIG_HOME": "/nonexistent"},
    )  # fmt: skip
    assert json.loads(ended.stdout)["num_requests"] == 20
