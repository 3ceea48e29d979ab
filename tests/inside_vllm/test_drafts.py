"""Speculative decoding with drafts from the text: answers over blended KV are those without it, in fewer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def answers(store: Path, drafts: dict[str, Any]) -> dict[str, Any]:
    program = Path(__file__).with_name("drafted.py")
    command = [sys.executable, str(program), str(store), json.dumps(drafts)]
    shared_modules = os.environ | {"PYTHONPATH": str(program.parents[1])}  # tests/, where `tiny_models` is
    done = subprocess.run(command, env=shared_modules, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_answers_are_those_without_drafts_in_fewer_steps(tmp_path):
    plain, drafted = answers(tmp_path / "plain", {}), answers(tmp_path / "drafted", DRAFTS)
    full, reuse, *_, everything = plain["answers"]
    assert everything == full != reuse, "stale KV changes this answer, ratio 1.0 does not"
    assert drafted["answers"] == plain["answers"]
    assert drafted["num_steps"] < plain["num_steps"]
    for name in ("num_chunk_hits", "num_reused_tokens", "num_recomputed_tokens", "refused_reason"):
        assert [each[name] for each in drafted["reports"]] == [each[name] for each in plain["reports"]], name
    assert [each["num_chunk_hits"] for each in plain["reports"]] == [0, 4, 4, 4, 4]
