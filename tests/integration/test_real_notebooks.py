"""The notebooks on a real language model, executed without saving (tests/test_notebooks.py has the others)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        not (ROOT / "models" / "smollm2" / "config.json").exists(), reason="no real model here: make real-model"
    ),
]


def test_every_notebook_on_the_real_model_runs_top_to_bottom():
    command = [sys.executable, str(ROOT / "notebooks" / "run.py"), "--check", "--part", "real"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert len(done.stdout.splitlines()) == 3, "04, 06 and 07"
