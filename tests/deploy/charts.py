"""The chart as helm renders it. Without helm, tests that ask for it are skipped with what gets it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.deploy.fetch import find_tool

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "ragblend"
EVERYTHING = CHART / "ci" / "everything-on.yaml"
RELEASE, NAMESPACE = "answers", "rag"


def tool(name: str) -> str:
    """Where the program is; skips the test where it is not."""
    found = find_tool(name)
    if found is None:
        pytest.skip(f"no {name}; get it with: make deploy-check")
    return found


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """What `helm` says to `words`."""
    return subprocess.run([tool("helm"), *map(str, words)], capture_output=True, text=True, timeout=60)


def rendered(*settings: str, values: Path | None = None) -> list[dict[str, Any]]:
    """The objects of a release with `values`, and then `settings` as in --set."""
    more = [word for setting in settings for word in ("--set", setting)] + (["-f", str(values)] if values else [])
    done = helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *more)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each is not None]


def the(kind: str, objects: list[dict[str, Any]], name: str = "") -> Any:
    """The one object of that kind, or of those the one whose name ends so."""
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return found


def container(objects: list[dict[str, Any]], kind: str = "StatefulSet") -> dict[str, Any]:
    """The container of the server, or of another workload."""
    (found,) = the(kind, objects)["spec"]["template"]["spec"]["containers"]
    return dict(found)
