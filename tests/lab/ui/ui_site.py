"""The page's server on a free loopback port, over the embedded model and two records of the sample corpus."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from ragblend.cli.session import open_engine, open_settings_index, retrieve
from ragblend.config import Settings
from ragblend.demo.show import EMBEDDER
from ragblend.engine.api import Engine
from ragblend.index import ChunkIndex
from ragblend.lab.ui.app import _listen, make_app, server_config
from ragblend.lab.ui.job_queue import JobQueue, UiJob

QUESTION = "Check the files: What role does James Bell have?"
Events = list[tuple[str, dict[str, Any]]]


def settings_in(home: Path, **others: Any) -> Settings:
    """The demo's, with everything in `home`."""
    place = {"model": "demo", "store": str(home / "kv"), "embedder": EMBEDDER, "chunk_size": 112}
    return Settings(**{**place, "k": 2, "neighbours": 2, "order": "document", "max_tokens": 16, **others})


def open_for(settings: Settings) -> tuple[Engine, ChunkIndex]:
    """As `ragblend ui` does it."""
    engine = open_engine(settings, new_model=True)
    return engine, open_settings_index(settings, engine, create=True)


@dataclass
class Site:
    """A running server: its address, its desk, and a client that sends what browsers send from its own page."""

    url: str
    desk: JobQueue
    settings: Settings
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, headers={"origin": self.url}, timeout=120, trust_env=False)

    def events(self, path: str, body: dict[str, Any]) -> Events:
        """All events of a request."""
        with self.client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            return list(parsed(reply))

    def upload(self, name: str, data: bytes) -> httpx.Response:
        return self.client.post("/documents", params={"name": name}, content=data)

    def state(self) -> dict[str, Any]:
        return dict(self.client.get("/state").json())


def parsed(reply: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """A reply's events as they come."""
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def of(events: Events, name: str) -> list[dict[str, Any]]:
    """The facts of all events of that name."""
    return [facts for event, facts in events if event == name]


@contextmanager
def running(settings: Settings, open_: Any = None, find: Any = retrieve) -> Iterator[Site]:
    """A server, which is stopped as Ctrl-C does."""
    listening, desk = _listen("127.0.0.1", 0), JobQueue()

    def open_here(job: UiJob) -> tuple[Engine, ChunkIndex]:
        return open_for(settings)

    app = make_app(settings, open_ or open_here, find, desk)
    server = uvicorn.Server(server_config(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    site = Site(f"http://127.0.0.1:{listening.getsockname()[1]}", desk, settings)
    try:
        # The model is there a moment before its loading has left the queue, in which the first question would wait.
        while (state := site.state())["status"] == "loading" or state["now"] is not None:
            time.sleep(0.05)
        yield site
    finally:
        site.client.close()
        desk.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"
