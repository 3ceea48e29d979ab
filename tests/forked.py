"""Fast runs of `ragblend` commands: one process imports all modules and forks a child per command.

A run with a kill, a full disk or a mutated file therefore takes a fraction of a second instead of an import.

    with Commands() as commands:
        done = commands.run("verify", "--store", "kv", cwd=place, kill=Kill(after=3, delay_s=0.002))

The child's changes of files are counted from 1 by Python's audit events. `Kill` names the change that triggers SIGKILL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self

CHILD = r"""
import atexit, fcntl, gc, json, os, resource, select, signal, sys, threading, time, traceback

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
gc.disable()
import torch
torch.set_num_threads(1)
import transformers, faiss, xxhash, safetensors, tokenizers
from ragblend.cli import app as cli, store as cli_store
from ragblend.operations import maintenance
from ragblend import precompute, llm, chains, vectorstores
from ragblend.ingestion import deletion as forgetting
from ragblend.llamaindex import query as llamaindex
from ragblend.engine.transformers import engine
from ragblend.engine.store.remote import tier as remote, object_values as remote_objects, redis_values as remote_redis
from ragblend.engine.vllm import launch as vllm_launch
from ragblend.demo import show
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime", "os.link", "sqlite3.connect"}


def watch(root, report):
    # Call `report` at every change of a file below `root`.
    root = os.path.realpath(root)

    def hook(event, args):
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, (str, bytes)) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in CHANGES:
            path = args[0]
        else:
            return
        path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if path.startswith("file://"):
            path = path[7:]
        if os.path.realpath(path).startswith(root):
            report()

    sys.addaudithook(hook)


def child(order, moments, out, err):
    os.chdir(order["cwd"])
    for number, target in ((1, out), (2, err)):
        os.dup2(target, number)
    if order["limit_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit_bytes"],) * 2)
    count = 0

    def report():
        nonlocal count
        count += 1
        os.write(moments, count.to_bytes(4, "little"))

    watch(order["cwd"], report)
    code = 0
    try:
        sys.argv = ["ragblend", *order["argv"]]
        cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def read_all(pipe):
    os.set_blocking(pipe, False)
    data = os.read(pipe, SAID_BYTES)
    os.close(pipe)
    return data.decode("utf-8", "replace")


def pipe():
    # A pipe instead of a file, because output must also arrive under a file-size limit of 0.
    ends = os.pipe()
    fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, SAID_BYTES)
    return ends


SAID_BYTES = 1 << 20
gc.freeze()  # children must not scan the imported objects, which would also copy their memory pages
gc.enable()
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    reader, writer = os.pipe()
    outs, errs = pipe(), pipe()
    start_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        child(order, writer, outs[1], errs[1])
    for end in (writer, outs[1], errs[1]):
        os.close(end)
    kill, until_s, killed, count = order["kill"], start_s + order["timeout_s"], False, 0
    due_s = start_s + kill["delay_s"] if kill and kill["after"] == 0 else None
    while True:
        now_s = time.monotonic()
        wait_s = until_s - now_s if due_s is None else min(due_s, until_s) - now_s
        if wait_s <= 0:
            os.kill(pid, signal.SIGKILL)
            killed = True
            break
        if not select.select([reader], [], [], wait_s)[0]:
            continue
        data = os.read(reader, 4)
        if not data:
            break
        count = int.from_bytes(data, "little")
        if kill and due_s is None and count >= kill["after"]:
            due_s = time.monotonic() + kill["delay_s"]
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    facts = {"code": code, "count": count, "killed": killed}
    print(json.dumps({**facts, "out": read_all(outs[0]), "err": read_all(errs[0])}), flush=True)
"""


class Kill(NamedTuple):
    """SIGKILL `delay_s` after the change of a file with the number `after`; 0: after the start."""

    after: int
    delay_s: float = 0.0


class Done(NamedTuple):
    """Result of a command. code: exit code, negative for a signal. count: number of changes of files."""

    code: int
    out: str
    err: str
    count: int

    @property
    def facts(self) -> dict[str, Any]:
        """Return the JSON object in the last line of stdout."""
        facts: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return facts

    @property
    def was_killed(self) -> bool:
        return self.code == -9


class Commands:
    """Process that runs commands in forked children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout.readline() == "ready\n"

    def run(
        self,
        *argv: str | Path,
        cwd: Path,
        kill: Kill | None = None,
        limit_bytes: int | None = None,
        timeout_s: float = 120.0,
    ) -> Done:
        """Run `ragblend ARGV` in the folder `cwd` until it ends or is killed.

        limit_bytes: file-size limit of the child; None: no limit. Fails if the command takes longer than `timeout_s`.
        """
        order = {
            "argv": [os.fspath(each) for each in argv],
            "cwd": str(cwd),
            "kill": kill._asdict() if kill else None,
            "limit_bytes": limit_bytes,
            "timeout_s": timeout_s,
        }
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        facts = json.loads(self._process.stdout.readline())
        if facts["killed"] and not kill:
            raise AssertionError(f"{argv} took longer than {timeout_s} s: {facts['out']}{facts['err']}")
        return Done(facts["code"], facts["out"], facts["err"], facts["count"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.kill()  # a normal exit would take seconds, because of a dozen imported libraries
        self._process.wait()
        self._process.stdin.close()
