"""`ragblend ui` as it is typed: it says where the page is, serves it, and Ctrl-C ends it tidily."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx
from commands import run_command


def test_it_serves_until_ctrl_c_and_starts_with_nothing_there(tmp_path):
    command = [sys.executable, "-m", "ragblend", "ui", "--model", "demo", "--no-browser", "--port", "0"]
    environment = {**os.environ, "RAGBLEND_EMBEDDER": "hashing"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
            with httpx.Client(base_url=found[0], trust_env=False, timeout=60) as client:
                assert "<title>ragblend</title>" in client.get("/").text
                # Behind the model's loading, which is the first job.
                asked = client.post("/ask", json={"question": "Who is there?"})
                assert "drop some" in asked.text
                assert client.get("/state").json()["num_documents"] == 0
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_without_its_extra_the_install_command_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "ragblend.lab.ui.app", raising=False)
    assert run_command("ui", "--no-browser") == 1
    assert "pip install 'ragblend[ui]'" in " ".join(capsys.readouterr().err.split())


def test_an_address_that_others_can_reach_is_reported(monkeypatch):
    from ragblend.config import Settings
    from ragblend.lab.ui import app

    said: list[str] = []
    monkeypatch.setattr(app._Server, "run", lambda server, sockets: [each.close() for each in sockets])
    for host, words in (("127.0.0.1", 1), ("0.0.0.0", 2)):
        said.clear()
        app.serve(Settings(), lambda job: 1 / 0, lambda *_: (), host=host, port=0, browser=False, notify=said.append)
        assert len(said) == words
    assert "no password" in said[1]
