"""`benchmarks.compare_peers`, on the embedded model: what other projects are given is what ragblend was measured on."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.compare_peers import TIMES_ASKED, topics
from ragblend.prompt.types import Prompt

ROOT = Path(__file__).parents[2]


def test_topics_are_asked_in_turn_over_other_passages_in_another_order():
    asked = [("one?", Prompt(list("abcdefgh"), "one?")), ("two?", Prompt(list("ijklmnop"), "two?"))]
    found = topics(asked, 6)
    assert [number for number, _, _ in found] == [0, 1] * TIMES_ASKED
    assert found == topics(asked, 6), "drawn by a seed"
    chosen = ["".join(chunk if isinstance(chunk, str) else chunk.text for chunk in each.chunks) for _, _, each in found]
    assert all(len(set(each)) == 6 for each in chosen)
    assert len(set(chosen)) == len(chosen)
    assert all(set(each) <= set("abcdefgh") for each in chosen[::2])


def test_prompts_are_written_whole_and_ragblend_is_measured_on_them(tmp_path):
    command = [sys.executable, "-m", "benchmarks.compare_peers", "--model", "demo", "--data", "demo"]
    sizes = ["--questions", "2", "--topics", "1", "--chunk-tokens", "64", "--passages", "3"]
    files = ["--prompts", str(tmp_path / "prompts.json"), "--out", str(tmp_path / "found.json")]
    subprocess.run([*command, *sizes, *files], cwd=ROOT, check=True, capture_output=True, timeout=300)
    prompts = json.loads((tmp_path / "prompts.json").read_text())
    assert len(prompts["moved"]) == 2
    assert len(prompts["topics"]) == TIMES_ASKED
    assert {len(each["texts"]) for each in prompts["topics"]} == {3}
    for each in prompts["moved"] + prompts["topics"]:
        assert len(each["segments"]) == len(each["texts"]) + 2, "prefix, chunks, suffix"
    found = json.loads((tmp_path / "found.json").read_text())
    by_rule = {(run["rule"], run["context"]): run for run in found["runs"]}
    assert {run["num_questions"] for run in found["runs"]} == {2}
    assert by_rule["none", "none"]["first_token_kl"] > 0
    assert found["hardware"]["threads"] == 1
