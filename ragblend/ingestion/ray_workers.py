"""Workers on a Ray cluster, or on this machine's cores: each loads the model once and writes KV straight to the store.

Only texts go to them, and only vectors and sizes come back; KV never passes through Ray. Ray starts a worker that died
again and repeats what it was at; what it had stored by then is found stored. So nothing is lost, and nothing prefilled
twice beyond the batch that it was at. Each has two batches at most, one to work on and one behind it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Self

import numpy as np

from ragblend.catalog.known_chunks import KnownChunks
from ragblend.catalog.registry import ChunkRegistry
from ragblend.corpus.embedders import Embedder, FloatArray, load_embedder
from ragblend.engine.api import Engine
from ragblend.errors import BackendUnreachableError, RagblendError, StoreMismatchError, UsageError
from ragblend.files.places import user_path
from ragblend.ingestion.workers import prefill_here
from ragblend.options import is_url
from ragblend.prompt.types import Chunk
from ragblend.redaction import redact

BATCH_TOKENS, BATCH_CHUNKS = 8192, 64
"""What a worker is handed at a time, at most: seconds of work, and what is prefilled again when it dies."""
BATCHES_PER_WORKER = 2
RETRIES = 5  # of one batch: workers that die more often at the same place die of it
FLUSH_TIMEOUT_S = 60.0  # for the remote tier to take what a batch has stored
_OBJECT_STORE_BYTES = 256 << 20  # texts and vectors only


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How every worker opens the engine: `load_engine`'s arguments. Paths have to be the same everywhere."""

    model: str
    store: str
    options: Mapping[str, Any]


class RayWorkers:
    """Workers for `ingest` and `precompute_index`, on the cluster at `address`, or without one on this machine.

    count: workers, each with `num_cpus` cores and `num_gpus` GPUs of its own. On a cluster that scales, those that have
    no place yet join when they get one. `model`, `store` and `options` are what `load_engine` takes; `store` is a
    directory that all machines see, or one of each machine's with a `remote` behind it.

    Raises ImportError without Ray, UsageError for what cannot be shared out, BackendUnreachableError where no cluster
    answers.
    A context manager: at its end the workers end, and so does Ray if it was started here.
    """

    def __init__(
        self,
        model: str | Path,
        store: str | Path,
        *,
        count: int = 2,
        address: str | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        **options: Any,
    ) -> None:
        if count < 1:
            raise UsageError(f"{count} workers cannot do anything; choose 1 or more (`count`)")
        backend = str(options.get("backend", "transformers"))
        if is_url(backend):
            raise UsageError(f"the server at {redact(backend)} prefills itself; leave out the workers (`count`)")
        self._ray = _import_ray()
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            self._start_ray(address, ceil(count * num_cpus), num_gpus * count)
        found = user_path(model, "model")
        opening = EngineConfig(
            str(found.resolve()) if found.exists() else str(model),
            str(user_path(store, "store").resolve()),
            # What a worker holds in memory is never asked for again.
            {**options, "memory_gib": 0.0, "new_model": True},
        )
        kind = self._ray.remote(_Worker).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=RETRIES
        )
        self._count = count
        self._busy: dict[Any, Any] = {}  # worker by what it is at; the first call returns when it is there
        for _ in range(count):
            worker = kind.remote(opening)
            self._busy[worker.is_there.remote()] = worker
        self._starting = set(self._busy)
        self._free: deque[Any] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_ahead(self) -> int:
        """Batches of texts that are embedded at the same time."""
        return self._count * BATCHES_PER_WORKER

    def embed(self, texts: Sequence[str], embedder: str) -> Callable[[], FloatArray]:
        """Have a worker embed `texts`; what is returned waits for the [n, dim] unit rows."""
        return partial(self._result, self._submit("embed", list(texts), embedder))

    def prefill(self, chunks: Sequence[Chunk], engine: Engine) -> Iterator[int]:
        """Have the workers prefill `chunks`: the bytes stored of each, as they are done. Chunks behind others last."""
        made_by = (engine.fingerprint, engine.renderer.fingerprint)
        for is_behind in (False, True):
            coming: list[Any] = []
            for batch in _batches([chunk for chunk in chunks if bool(chunk.context_texts) == is_behind], engine):
                coming.append(self._submit("prefill", batch, *made_by))
                done, coming = self._ray.wait(coming, num_returns=len(coming), timeout=0)
                for each in done:
                    yield from self._result(each)
            while coming:
                done, coming = self._ray.wait(coming)
                for each in done:
                    yield from self._result(each)

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        for worker in {*self._busy.values(), *self._free}:
            self._ray.kill(worker)
        self._busy.clear()
        self._free.clear()
        if self._is_own:
            self._ray.shutdown()

    def _submit(self, method: str, *arguments: Any) -> Any:
        """Give a worker something to do once one has room for it; what it will return."""
        while not self._free:
            done, _ = self._ray.wait(list(self._busy))
            for each in done:
                worker, is_new = self._busy.pop(each), each in self._starting
                self._free.extend([worker] * (BATCHES_PER_WORKER if is_new else 1))
        worker = self._free.popleft()
        made = getattr(worker, method).remote(*arguments)
        self._busy[made] = worker
        return made

    def _result(self, coming: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return self._ray.get(coming)
        except RayTaskError as error:
            raise _unwrap_error(error) from None
        except RayActorError as error:
            raise RagblendError(
                f"a worker died {RETRIES + 1} times at the same batch, perhaps for want of memory: choose fewer "
                f"(`count`) or smaller chunks; what is stored stays, and the same command goes on. Ray says: {error}"
            ) from error

    def _start_ray(self, address: str | None, num_cpus: int, num_gpus: float) -> None:
        # Ray would tell its makers what is run, and where.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        here = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        if num_gpus:
            here["num_gpus"] = ceil(num_gpus)
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            self._ray.init(address=address or "local", **quiet, **({} if address else here))
        except ConnectionError as error:
            raise BackendUnreachableError(
                f"no Ray cluster at {redact(address or 'local')} ({error}); start one: ray start --head, or leave "
                "out `address` for workers on this machine"
            ) from error


class _Worker:
    """What runs in a process of Ray's."""

    def __init__(self, opening: EngineConfig) -> None:
        self._opening = opening
        self._engine: Engine | None = None
        self._embedders: dict[str, Embedder] = {}

    def is_there(self) -> int:
        """The process's id, as soon as there is one."""
        return os.getpid()

    def embed(self, texts: list[str], embedder: str) -> FloatArray:
        """[n, dim] unit rows."""
        if embedder not in self._embedders:
            self._embedders[embedder] = load_embedder(embedder)
        return np.asarray(self._embedders[embedder].embed(texts), np.float32)

    def prefill(self, chunks: list[Chunk], fingerprint: str, renderer: str) -> list[int]:
        """The bytes stored of each; when this returns they are in the shared store."""
        engine = self._opened()
        if (engine.fingerprint, engine.renderer.fingerprint) != (fingerprint, renderer):
            raise StoreMismatchError(
                f"{self._opening.model} on {os.uname().nodename} is not the model that ingests: other weights, dtype "
                "or tokenizer; copy the same folder to every machine and give `dtype`"
            )
        stored = list(prefill_here(chunks, engine))
        for tier in engine.store.remote_tiers:
            tier.flush(FLUSH_TIMEOUT_S)
        return stored

    def _opened(self) -> Engine:
        if self._engine is None:
            from ragblend.engine.base import LocalEngine
            from ragblend.engine.load import load_engine

            self._engine = load_engine(self._opening.model, self._opening.store, **self._opening.options)
            if isinstance(self._engine, LocalEngine):
                # The process that ingests keeps the token ids; its SQLite file does not work across machines.
                self._engine.known_chunks = KnownChunks(ChunkRegistry(), "", "")
        return self._engine


def _batches(chunks: Iterable[Chunk], engine: Engine) -> Iterator[list[Chunk]]:
    """Chunks for one call of a worker."""
    batch: list[Chunk] = []
    num_tokens = 0
    for chunk in chunks:
        counted = chunk.metadata.get("num_tokens")
        num_more = counted if isinstance(counted, int) else engine.renderer.count_tokens(chunk.text)
        if batch and (num_tokens + num_more > BATCH_TOKENS or len(batch) == BATCH_CHUNKS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(chunk)
        num_tokens += num_more
    if batch:
        yield batch


def _unwrap_error(error: Any) -> BaseException:
    """What went wrong in the worker, as it was raised there."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RagblendError | ImportError | OSError) else error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("workers need Ray: pip install 'ragblend[ray]'") from error
    return ray
