"""`benchmarks.asking` as a reader runs it, on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.asking import question_first, ways
from ragblend.engine.fusion.rules import RULES
from ragblend.prompt.prompt import Chunk, SegmentedPrompt

COMMAND = (sys.executable, "-m", "benchmarks.asking", "--model", "demo", "--data", "demo", "--part", "all")
ROOT = Path(__file__).parents[2]


def test_every_way_to_ask_is_measured_and_they_differ(tmp_path: Path) -> None:
    out = tmp_path / "asking.json"
    more = ("--questions", "2", "--chunk-tokens", "64", "--ratios", "0.3", "--out", str(out))
    subprocess.run([*COMMAND, *more], cwd=ROOT, check=True, capture_output=True, timeout=300)
    runs = {run["rule"]: run for run in json.loads(out.read_text())["runs"] if run["kind"] == "all"}
    found = {way: runs[f"ask {way}"] for way in ("end", "last", "behind", "again")}
    assert found["again"]["charged_budget_32"] > found["end"]["charged_budget_32"]
    assert len({run["answer_kl"] for run in found.values()}) > 1


def test_prompts_ask_first_and_nothing_is_left_changed() -> None:
    prompt = question_first(SegmentedPrompt([Chunk("one"), Chunk("two")], "what?", "be brief"))
    assert [turn.parts for turn in prompt.messages][1:] == [("what?\n\n", Chunk("one"), Chunk("two"))]
    before = set(RULES)
    with ways():
        assert {"ask end", "ask again"} <= set(RULES)
    assert set(RULES) == before
