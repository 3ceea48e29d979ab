"""`deploy/compose.yaml` without containers: its commands, settings and nginx configuration, as processes.

Only addresses, directories and what a CPU needs are others. Nothing is installed.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.servers import Redis, ServerProcess, free_port
from ragblend.errors import NotFoundError

FILE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
REPLICAS = ("replica-0", "replica-1")
ON_CPU = ("--enforce-eager", "--max-model-len", "4096")  # what the embedded model is served with here
_ENTRYPOINT = json.loads(re.findall(r"^ENTRYPOINT (.+)$", (FILE.parent / "Dockerfile").read_text(), re.MULTILINE)[0])
_OF_CONTAINERS = {"RAGBLEND_STORE": "/kv", "RAGBLEND_CATALOG": "postgresql://ragblend:p@catalog/ragblend"}
_LEFT_OUT = ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_API_KEY", "RAGBLEND_API_KEY")


def find_nginx() -> str:
    """Return the path of nginx. Raises NotFoundError if it is not installed."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise NotFoundError("no nginx; install one: apt-get install nginx")
    return found


def read_plan(api_key: str) -> dict[str, Any]:
    """Return the compose file as Compose reads it, with the embedded model and `api_key` as its variables."""
    values = {"MODEL": "demo", "RAGBLEND_API_KEY": api_key, "POSTGRES_PASSWORD": "p"}

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"  # written as $$
        assert match[2] == "-" or values.get(match[1]), match[3]
        return values.get(match[1]) or match[3]

    text = re.sub(r"\$(?:\$|\{(\w+):([?-])([^}]*)\})", value, FILE.read_text(encoding="utf-8"))
    return dict(yaml.safe_load(text))


class ComposeReplica(ServerProcess):
    """One of the two servers, over the disk `home`/kv. `catalog`: URL of a PostgreSQL; None: a file on that disk."""

    def __init__(
        self, service: Mapping[str, Any], home: Path, cache: Redis, catalog: str | None, **environment: str
    ) -> None:
        home.mkdir()
        self.store, port = home / "kv", free_port()
        self.grace_s = float(service["stop_grace_period"].removesuffix("s"))
        command = [*_ENTRYPOINT, *service["command"], *ON_CPU]
        command[command.index("--host") + 1], command[command.index("--port") + 1] = "127.0.0.1", str(port)
        own = {name: str(value) for name, value in service["environment"].items()}
        for name, place in _OF_CONTAINERS.items():
            assert own[name] == place, f"{name} is {own[name]}"
        assert own.pop("RAGBLEND_STORE") in service["volumes"]
        own["RAGBLEND_REMOTE"] = replace_once(own["RAGBLEND_REMOTE"], "cache:6379", f"127.0.0.1:{cache.port}")
        own |= {"RAGBLEND_STORE": str(self.store), "RAGBLEND_CATALOG": catalog or ""}
        if catalog is None:
            del own["RAGBLEND_CATALOG"]
        passed_on = {name: each for name, each in os.environ.items() if name not in _LEFT_OUT}
        on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "PATH": search_path()}
        super().__init__(command, f"http://127.0.0.1:{port}", home, {**passed_on, **on_cpu, **own, **environment})

    def stop_as_compose(self) -> dict[str, Any]:
        """Send SIGTERM to the server alone, and SIGKILL after `stop_grace_period`. Return how it ended."""
        process = self._process
        assert process is not None
        start_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            exit_code = process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        seconds = round(time.monotonic() - start_s, 1)
        self.kill()
        return {"exit_code": exit_code, "seconds": seconds}


def start_nginx(site: str, urls: Mapping[str, str], home: Path) -> ServerProcess:
    """Start nginx with the configuration `site` and two worker processes, as many as a machine of two cores would have.

    urls: of the replicas, by their names in `site`.
    """
    port = free_port()
    for name, url in urls.items():
        site = replace_once(site, f"server {name}:8000 resolve ", f"server {url.removeprefix('http://')} ")
    site = replace_once(site, "listen 80;", f"listen 127.0.0.1:{port};")
    home.mkdir()
    user = f"user {pwd.getpwuid(0).pw_name};" if os.getuid() == 0 else ""  # the workers must reach `home`
    folders = " ".join(
        f"{name}_temp_path {home}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (home / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 2; pid {home}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off; {folders}\n{site}}}\n"
    )
    command = [find_nginx(), "-p", str(home), "-c", str(home / "nginx.conf"), "-e", "stderr"]
    server = ServerProcess(command, f"http://127.0.0.1:{port}", home, os.environ)
    server.start()
    return server


def replace_once(text: str, old: str, new: str) -> str:
    """Return `text` with `old`, which must be there once, as `new`."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


def search_path() -> str:
    """Return a PATH on which `ragblend` is that of this environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
