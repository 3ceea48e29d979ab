"""A server's documents in a process, without HTTP, for test_stress.py."""

from __future__ import annotations

import functools
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ragblend import load_engine
from ragblend.catalog import sent_documents
from ragblend.catalog.database import Catalog
from ragblend.catalog.ledger import Ledger
from ragblend.engine.api import Engine
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.remote.redis_values import RedisValues
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.store.tiered import TieredStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.errors import BackendUnreachableError
from ragblend.options import ContextPolicy
from ragblend.server import documents as server_documents

COLLECTION = "kb"
LEDGER_CLASSES = [each for each in Ledger.__mro__ if issubclass(each, Catalog) and each is not Catalog]
PAUSING = (*LEDGER_CLASSES, DiskStore, RedisValues, RemoteStore, TieredStore)
PAUSE_SHARE, LONGEST_PAUSE_S = 0.01, 0.4
LEASE_S = 4.0  # so that a killed server's documents are soon free


def pause_in(kind: type, rng: random.Random) -> None:
    """Let each public method of a class pause at random before and after it runs."""

    def pausing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            for when in ("before", "after"):
                if rng.random() < PAUSE_SHARE:
                    time.sleep(rng.uniform(0, LONGEST_PAUSE_S))
                if when == "before":
                    result = method(*args, **kwargs)
            return result

        return run

    for name, member in list(vars(kind).items()):
        if not name.startswith("_") and callable(member) and not isinstance(member, (type, staticmethod, classmethod)):
            setattr(kind, name, pausing(member))


def answer(request: dict[str, Any], documents: server_documents.DocumentIngester, engine: Callable[[], Engine]) -> Any:
    """Carry out one request of the test."""
    match request["do"]:
        case "add":
            body = {"chunks": request["texts"]}
            documents.add("", [sent_documents.SentDocument(COLLECTION, request["id"], request["version"], body, {})])
        case "remove":
            documents.remove("", COLLECTION, [request["id"]])
        case "summary":
            return documents.summary("", COLLECTION, None)
        case "match":
            return [text for text in request["texts"] if text in engine().known_chunks]
    return None


def serve(connection: Connection, folder: Path, catalog: str, remote: str, context: ContextPolicy, seed: str) -> None:
    """Answer the requests that come through `connection`, until it ends or SIGTERM arrives."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    torch.set_num_threads(1)
    sent_documents.LEASE_S = server_documents.LEASE_S = LEASE_S
    rng = random.Random(seed)
    for kind in PAUSING:
        pause_in(kind, rng)

    @functools.cache
    def engine(namespace: str = "") -> TransformersEngine:
        tiers = {"remote": remote, "catalog": catalog}
        return load_engine("demo", folder, namespace=namespace, context=context, on_miss="inline", **tiers)

    documents = server_documents.DocumentIngester(folder, engine, catalog=catalog)
    documents.start()
    try:
        while True:
            request = connection.recv()
            try:
                connection.send({"done": answer(request, documents, engine)})
            except BackendUnreachableError as error:
                connection.send({"unreachable": str(error)})
    except (EOFError, BrokenPipeError):
        return
    finally:
        documents.close()
        engine().close()
