"""`RayWorkers`: processes on a Ray cluster, or on this machine's cores, that embed and prefill for an ingestion.

Each worker loads the model once and writes KV directly to the store. Workers receive texts and return vectors and
sizes; KV does not pass through Ray. Ray restarts a worker that died and repeats its batch. Chunks of the batch that are
stored already are not prefilled again. Each worker has at most two batches: the current one and the next.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Self

import numpy as np

from ragblend.catalog.ledger import Ledger
from ragblend.corpus.embedders import Embedder, FloatArray, load_embedder
from ragblend.engine.api import Engine
from ragblend.engine.matching import KnownChunks
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.errors import BackendUnreachableError, RagblendError, StoreMismatchError, UsageError
from ragblend.files.places import expand_user_path
from ragblend.ingestion.prefill import num_chunk_tokens, prefill_here
from ragblend.options import is_server_url
from ragblend.prompt.types import Chunk
from ragblend.redaction import redact_url

BATCH_TOKENS, BATCH_CHUNKS = 8192, 64
"""Limits of a batch. A batch takes seconds, and at most one is prefilled again after a worker died."""
BATCHES_PER_WORKER = 2
RETRIES = 5  # of one batch; if workers die more often, the batch is the cause
FLUSH_TIMEOUT_S = 60.0  # for sending the KV of a batch to the remote tier
_OBJECT_STORE_BYTES = 256 << 20  # texts and vectors only


class RayWorkers:
    """Workers for `ingest` and `precompute_index` on the Ray cluster at `address`; None: on this machine.

    count: number of workers. Each reserves `num_cpus` cores and `num_gpus` GPUs. If the cluster has too little free
    capacity, some workers start later. `model`, `store` and `options` are the arguments of `load_engine`. `store` is a
    directory that all machines share. It may also be a local directory of each machine if `remote` is given. A context
    manager: at its end the workers stop, and so does Ray if this object started it.

    Raises ImportError without Ray, UsageError if `count` is below 1 or `backend` is the URL of a server,
    BackendUnreachableError if no cluster answers at `address`.
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
            raise UsageError(f"the number of workers is {count}; choose 1 or more (`count`)")
        backend = str(options.get("backend", "transformers"))
        if is_server_url(backend):
            raise UsageError(
                f"the server at {redact_url(backend)} prefills in its own process; leave out the workers (`count`)"
            )
        self._ray = _import_ray()
        self._is_own = not self._ray.is_initialized()
        if self._is_own:
            self._start_ray(address, ceil(count * num_cpus), num_gpus * count)
        path = expand_user_path(model, "model")
        model = str(path.resolve()) if path.exists() else str(model)
        store = str(expand_user_path(store, "store").resolve())
        # A worker never reads KV that it stored, so it needs no memory tier.
        options |= {"memory_gib": 0.0, "new_model": True}
        kind = self._ray.remote(_Worker).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=-1, max_task_retries=RETRIES
        )
        self._count = count
        self._busy: dict[Any, Any] = {}  # worker by its pending call; the first call returns when it has started
        for _ in range(count):
            worker = kind.remote(model, store, options)
            self._busy[worker.is_there.remote()] = worker
        self._starting = set(self._busy)
        self._free: deque[Any] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_waiting_batches(self) -> int:
        """Largest number of batches of texts that wait for embedding."""
        return self._count * BATCHES_PER_WORKER

    def embed(self, texts: Sequence[str], embedder: str) -> Callable[[], FloatArray]:
        """Start to embed `texts` in a worker. Return a function that waits, then returns the unit vectors [n, dim]."""
        return partial(self._result, self._submit("embed", list(texts), embedder))

    def prefill(self, chunks: Sequence[Chunk], engine: Engine) -> Iterator[int]:
        """Prefill `chunks` in the workers (see `Prefill`). Yield the number of bytes stored for each, in the order of
        completion.
        """
        made_by = (engine.fingerprint, engine.renderer.fingerprint)
        coming: list[Any] = []
        for batch in _batches(chunks, engine):
            coming.append(self._submit("prefill", batch, *made_by))
            done, coming = self._ray.wait(coming, num_returns=len(coming), timeout=0)
            for each in done:
                yield from self._result(each)
        while coming:
            done, coming = self._ray.wait(coming)
            for each in done:
                yield from self._result(each)

    def close(self) -> None:
        """Stop the workers, and Ray if this object started it."""
        for worker in {*self._busy.values(), *self._free}:
            self._ray.kill(worker)
        self._busy.clear()
        self._free.clear()
        if self._is_own:
            self._ray.shutdown()

    def _submit(self, method: str, *arguments: Any) -> Any:
        """Wait for a worker with capacity, call `method` on it and return the pending result."""
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
                f"a worker died {RETRIES + 1} times at the same batch, perhaps because memory was full: choose fewer "
                "workers (`count`) or smaller chunks. Stored chunks are kept, and the same command continues. Ray's "
                f"message: {error}"
            ) from error

    def _start_ray(self, address: str | None, num_cpus: int, num_gpus: float) -> None:
        # Otherwise Ray sends usage statistics to its developers.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        here = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        if num_gpus:
            here["num_gpus"] = ceil(num_gpus)
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            self._ray.init(address=address or "local", **quiet, **({} if address else here))
        except ConnectionError as error:
            raise BackendUnreachableError(
                f"no Ray cluster answers at {redact_url(address or 'local')} ({error}); start one: ray start --head, "
                "or leave out `address` for workers on this machine"
            ) from error


class _Worker:
    """Ray actor: one process that embeds and prefills.

    The arguments are those of `load_engine`. Paths must be valid on all machines.
    """

    def __init__(self, model: str, store: str, options: Mapping[str, Any]) -> None:
        self._model, self._store, self._options = model, store, options
        self._engine: Engine | None = None
        self._embedders: dict[str, Embedder] = {}

    def is_there(self) -> int:
        """Return the process id. Ray completes this call when the process has started."""
        return os.getpid()

    def embed(self, texts: list[str], embedder: str) -> FloatArray:
        """Return unit rows [n, dim] float32."""
        if embedder not in self._embedders:
            self._embedders[embedder] = load_embedder(embedder)
        return np.asarray(self._embedders[embedder].embed(texts), np.float32)

    def prefill(self, chunks: list[Chunk], fingerprint: str, renderer: str) -> list[int]:
        """Prefill chunks and send them to the remote tiers. Return the stored bytes of each chunk.

        Raises StoreMismatchError if this machine's model or tokenizer has another fingerprint.
        """
        engine = self._opened()
        if (engine.fingerprint, engine.renderer.fingerprint) != (fingerprint, renderer):
            raise StoreMismatchError(
                f"{self._model} on {os.uname().nodename} has other weights, another dtype or another tokenizer "
                "than the model that ingests; copy the same folder to every machine and set `dtype`"
            )
        stored = list(prefill_here(chunks, engine))
        for tier in engine.store.find_tiers(RemoteStore):
            tier.flush(FLUSH_TIMEOUT_S)
        return stored

    def _opened(self) -> Engine:
        if self._engine is None:
            from ragblend.engine.base import LocalEngine
            from ragblend.engine.load import load_engine

            self._engine = load_engine(self._model, self._store, **self._options)
            if isinstance(self._engine, LocalEngine):
                # Only the ingesting process writes token ids: its SQLite file does not work across machines.
                self._engine.known_chunks = KnownChunks(Ledger(), "", "")
        return self._engine


def _batches(chunks: Iterable[Chunk], engine: Engine) -> Iterator[list[Chunk]]:
    """Yield the chunks in batches of at most `BATCH_TOKENS` and `BATCH_CHUNKS`."""
    batch: list[Chunk] = []
    num_tokens = 0
    for chunk in chunks:
        num_more = num_chunk_tokens(chunk, engine)
        if batch and (num_tokens + num_more > BATCH_TOKENS or len(batch) == BATCH_CHUNKS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(chunk)
        num_tokens += num_more
    if batch:
        yield batch


def _unwrap_error(error: Any) -> BaseException:
    """Return the error that the worker raised, if callers may handle it; else Ray's error."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RagblendError | ImportError | OSError) else error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError("workers need Ray: pip install 'ragblend[ray]'") from error
    return ray
