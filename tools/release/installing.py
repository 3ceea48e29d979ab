"""Installation test of the distributions, in a new environment, with an empty working folder and an empty HOME.

Read `try_wheel` first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import ragblend
from tools.release.contents import ROOT

QUESTION = "What role does James Bell have?"  # of the demo's corpus
GOLD = "trainer"
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"))


def try_wheel(python: str, sdist: Path, wheel: Path) -> str:
    """Install and use the wheel, then install the sdist, under the interpreter `python`. Return the result as one line.

    Raises CalledProcessError or AssertionError if a step failed.
    """
    found = shutil.which(python)
    if found is None:
        raise FileNotFoundError(f"no interpreter {python!r} on PATH; name another one, or give its path")
    with tempfile.TemporaryDirectory() as folder:
        venv, empty = Path(folder) / "venv", Path(folder) / "empty"
        empty.mkdir()
        _run([found, "-m", "venv", str(venv)])
        mine = str(venv / "bin" / "python")
        # PyTorch first, as in the Makefile, so that pip takes the version in constraints.txt and not the newest one.
        _run([mine, *PIP, "torch"])
        _run([mine, *PIP, str(wheel)])
        _run([mine, "-m", "pip", "check"])
        used = _use(venv, empty)
        _run([mine, *PIP, "--no-deps", "--force-reinstall", str(sdist)])
        _check_version(venv, empty)
        return used


def _use(venv: Path, empty: Path) -> str:
    import_alone = "import sys, ragblend; assert 'torch' not in sys.modules; print(sys.version.split()[0])"
    python = _run([str(venv / "bin" / "python"), "-c", import_alone], empty).strip()
    _check_version(venv, empty)
    result = json.loads(_run([str(venv / "bin" / "ragblend"), "demo", "--question", QUESTION, "--json"], empty))
    answers = {mode: each["answer"] for mode, each in result["questions"][0]["modes"].items()}
    assert answers["full"] == answers["blend"] == GOLD, f"the demo answers {answers}, not {GOLD!r}"
    torch = _run([str(venv / "bin" / "python"), "-c", "import torch; print(torch.__version__)"], empty).strip()
    return f"Python {python}, PyTorch {torch}: installs, imports, answers"


def _check_version(venv: Path, empty: Path) -> None:
    version = _run([str(venv / "bin" / "ragblend"), "--version"], empty).strip()
    expected = ragblend.__version__
    assert version == expected, f"ragblend --version prints {version}, but the source has {expected}"


def _run(command: list[str], home: Path | None = None) -> str:
    """Return the command's stdout. home: working folder and HOME, instead of this user's; None: unchanged."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAGBLEND_"))}
    if home is not None:
        environment |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout
