"""`ragblend simulate` as a stranger types it: logs or generated traffic, a table, one JSON object, errors that help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from ragblend.engine.tuning.pipeline import MachineProfile, machine_profile_from

PROFILE = MachineProfile(
    "f", {"ranks": 1}, num_layers=32, bytes_per_token=1 << 17, prefill_s=((100.0, 0.01), (1000.0, 0.1)),
    shares=((0.0, 0.1), (0.15, 0.25), (1.0, 1.1)), bytes_per_s={"disk": 2e9, "remote": 1e9},
)  # fmt: skip
GENERATED = ("--traffic", "questions", "--sessions", "40", "--profile", "profile.json")
TABLE = """\
40 requests of generated questions, 3.34 per second; 578 tokens (estimated), 480 in chunks, 60 answered; least-queue

mode    replicas  served/s   TTFT s      p95      p99  queue s  busy  prefix  chunks found
full           1      3.34   0.0637   0.0703    0.115  0.00401   74%    0.0%
full           2     3.342   0.0578   0.0652   0.0963  0.00169   47%    0.0%
blend          1     3.348   0.0523   0.0712    0.089  0.00453   80%    3.3%  memory 28%, disk 2%, missing 71%
blend          2     3.341   0.0514   0.0857   0.0961  0.00923   50%    3.0%  memory 21%, remote 9%, missing 70%
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(json.dumps({"schema_version": 1, **PROFILE.as_dict()}), encoding="utf-8")
    entries = [
        {"timestamp": 1e9 + 2 * n, "request": {"messages": [{"role": "user", "content": f"question {n} " * 50}]}}
        for n in range(20)
    ]
    Path("log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command("simulate", *arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def found_in(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    facts: dict[str, Any] = json.loads(out)
    return facts


def test_the_table_of_a_seed_is_always_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rate", "4", "--replicas", "1,2", "--modes", "full,blend", "--router", "least-queue")
    more = ("--decode", "1:0.004,8:0.01", "--memory-gib", "1", "--remote-tier", "0")
    code, out, err = run(capsys, *GENERATED, *arguments, *more)
    assert (code, out) == (0, TABLE), err
    assert run(capsys, *GENERATED, *arguments, *more)[1] == TABLE
    assert run(capsys, *GENERATED, *arguments, *more, "--seed", "1")[1] != TABLE


def test_a_log_is_replayed_at_its_own_times_or_faster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = found_in(capsys, "log.jsonl", "--profile", "profile.json", "--replicas", "1", "--output-tokens", "7")
    assert (facts["schema_version"], facts["num_requests"], facts["output_tokens"]) == (1, 20, 7)
    assert [each["mode"] for each in facts["runs"]] == ["full", "prefix", "blend"]
    assert facts["runs"][0]["arriving"] == pytest.approx(0.5)
    assert machine_profile_from(facts["deployment"]["profile"]) == PROFILE
    faster = found_in(capsys, "log.jsonl", "--profile", "profile.json", "--speedup", "100", "--modes", "full")
    assert faster["runs"][0]["arriving"] == pytest.approx(50)
    assert faster["runs"][0]["ttft_s"] > facts["runs"][0]["ttft_s"]
    assert "decoding takes no time here" in run(capsys, "log.jsonl", "--profile", "profile.json")[1]


def test_a_thousand_replicas_and_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = found_in(capsys, *GENERATED, "--replicas", "1,1000", "--ingested", "--plot", "out/simulate.png")
    assert [each["num_replicas"] for each in facts["runs"]] == [1, 1000] * 3
    assert facts["runs"][-1]["chunk_hits"] == {"disk": 1.0}
    assert facts["runs"][-1]["queue_mean_s"] == 0
    assert Path("out/simulate.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("log.jsonl",), 2, "ragblend profile"),
        ((), 2, "give either logs"),
        (("log.jsonl", *GENERATED), 2, "give either logs"),
        (("none.jsonl", "--profile", "profile.json"), 3, "there is no none.jsonl"),
        (("untimed.jsonl", "--profile", "profile.json"), 2, "--rate 2"),
        (("--traffic", "chats", "--profile", "profile.json"), 2, "--traffic is 'chats'"),
        ((*GENERATED, "--replicas", "1,0"), 2, "--replicas is '1,0'"),
        ((*GENERATED, "--router", "random"), 2, "round-robin, least-queue, session, chunk"),
        ((*GENERATED, "--modes", "reuse"), 2, "full, prefix, blend"),
        ((*GENERATED, "--modes", ","), 2, "give one or more of full"),
        ((*GENERATED, "--rate", "0"), 2, "rate is 0.0"),
        ((*GENERATED, "--decode", "1:x"), 2, "REQUESTS:SECONDS"),
        ((*GENERATED, "--decode", "-1"), 2, "choose 0 or more"),
        ((*GENERATED, "--ratio", "2"), 2, "choose 0 (full reuse)"),
        ((*GENERATED, "--disk", "-1"), 2, "--disk is -1.0"),
        ((*GENERATED, "--on-miss", "drop"), 2, "store, inline"),
        ((*GENERATED, "--paged-tokens", "100"), 2, "than the 100 of the paged KV"),
        ((*GENERATED, "--remote-gb-per-s", "0"), 2, "the remote tier's speed is 0.0"),
    ],
)
def test_errors_name_the_value_and_the_next_thing_to_type(
    folder: Path, arguments: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("untimed.jsonl").write_text(json.dumps({"prompt": "Who signed the lease?"}) + "\n", encoding="utf-8")
    ended, out, err = run(capsys, *arguments)
    assert (ended, out) == (code, "")
    assert words in err


def test_without_simpy_the_install_line_is_said(folder: Path) -> None:
    code = "import sys; sys.modules['simpy'] = None; from ragblend.cli.app import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "simulate", *GENERATED], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin", "XDG_CONFIG_HOME": "/nonexistent"},
    )  # fmt: skip
    assert ended.returncode == 1
    assert "pip install 'ragblend[simulate]'" in ended.stderr
