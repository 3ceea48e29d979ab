"""Engine with vLLM in this process: `load_engine(..., backend="vllm")`.

A separate thread runs vLLM's synchronous engine; requests from any thread join its batch. Read `_EngineLoop.run` first.
Depends on the arguments and outputs of vLLM's engine. The connector blends.
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from ragblend.engine.loop import run_call
from ragblend.engine.report import BlendReport
from ragblend.engine.vllm.base_engine import OutputDelta, VllmEngineBase, VllmRequest
from ragblend.engine.vllm.config import ConnectorConfig
from ragblend.engine.vllm.launch import (
    BLOCK_SIZE_ON_CPU,
    EXTENSION,
    Checkpoint,
    cpu_paged_kv_bytes,
    has_cuda,
    vllm_environment,
)
from ragblend.engine.vllm.params import (
    PARAMS_KEY,
    report_from_params,
    vllm_filters_and_penalties,
    vllm_structured_outputs,
)
from ragblend.engine.vllm.scheduler_side.loading import machine_facts_of
from ragblend.engine.vllm.support import model_fingerprint
from ragblend.errors import EngineClosedError, RagblendError, UsageError
from ragblend.prompt.render import Renderer
from ragblend.prompt.types import Part
from ragblend.redaction import has_secret

log = logging.getLogger(__name__)

T = TypeVar("T")

_YIELD_S = 0.0005  # sleep after a step without a token, which lets loading and fetching threads run
_OURS = ("model", "revision", "dtype", "kv_transfer_config", "served_model_name")


class VllmEngine(VllmEngineBase):
    """Engine over a vLLM in this process. `vllm_options` are vLLM's own engine arguments, such as `max_model_len`.

    `transfer`: vLLM's KV transfer configuration (`transfer_config`). `store`: the store directory named in `transfer`;
    a temporary directory is deleted with the engine. Use the engine as a context manager, or `close()` it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        renderer: Renderer,
        transfer: Mapping[str, Any],
        store: Path | tempfile.TemporaryDirectory[str],
        *,
        vllm_options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        self._temporary = None if isinstance(store, Path) else store
        shared = ConnectorConfig.from_extra_config(transfer["kv_connector_extra_config"]).open_tiers()
        engine = start_vllm(checkpoint, transfer, vllm_options or {}, trust_remote_code)
        self.vllm_config = engine.vllm_config
        self.hardware = machine_facts_of(engine.vllm_config)
        super().__init__(
            renderer,
            shared,
            name=checkpoint.name,
            # As in the connector, because vllm_options may change the model (hf_overrides, quantization).
            fingerprint=model_fingerprint(engine.model_config),
            context_length=int(engine.model_config.max_model_len),
            bytes_per_token=checkpoint.stored_bytes_per_token(shared.kv_dtype),
            stop_ids=renderer.stop_ids() | _generation_stops(engine),
            num_layers=checkpoint.num_layers,
            **options,
        )
        self._loop = _EngineLoop(engine)

    def run_request(self, request: VllmRequest) -> Generator[OutputDelta]:
        """Add `request` to vLLM's batch and yield outputs as they arrive. Closing the generator aborts the request."""
        answers: queue.SimpleQueue[OutputDelta | BaseException] = queue.SimpleQueue()
        request_id = f"ragblend-{uuid4().hex}"
        finished = False
        try:
            self._loop.submit(partial(self._loop.add, request_id, request, sorted(self.stop_ids), answers)).result()
            while not finished:
                answer = answers.get()
                if isinstance(answer, BaseException):
                    finished = True
                    raise answer
                finished = answer.finish_reason is not None
                yield answer
        finally:
            if not finished:
                with suppress(RagblendError):  # the loop has ended, so the request has ended, too
                    self._loop.submit(partial(self._loop.abort, request_id))

    def prefetch(self, chunks: Sequence[Part]) -> None:
        """Load the KV of a later request's chunks into the workers' memory tier, in the background. Returns at once."""
        self._loop.submit(partial(self._loop.prefetch, self.likely_keys(chunks)))

    def reset_prefix_cache(self) -> bool:
        """Clear vLLM's prefix cache. Return False, without clearing it, while a request uses it."""
        return self._loop.submit(self._loop.reset_prefix_cache).result()

    def close(self) -> None:
        """Finish background work and shut vLLM down."""
        if not self.is_usable:
            return
        super().close()
        self._loop.close()
        self.store.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def start_vllm(
    checkpoint: Checkpoint, transfer: Mapping[str, Any], options: Mapping[str, Any], trust_remote_code: bool = False
) -> Any:
    """Start a vLLM LLMEngine over `checkpoint`, with the connector that `transfer` configures.

    Raises UsageError for options that ragblend sets itself or that vLLM does not have.
    """
    taken = [name for name in _OURS if name in options]
    if taken:
        raise UsageError(
            f"vllm_options contains {taken[0]}, which ragblend sets itself; leave it out, or pass it to load_engine "
            "(model, revision, dtype)"
        )
    # In one process, the engine starts in seconds and needs no guarded __main__. The user's own setting has priority.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.update(vllm_environment())
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    # vLLM logs its configuration, so a URL with a password is passed to the connector in the environment.
    extra = dict(transfer["kv_connector_extra_config"])
    secret = [name for name in ("remote", "catalog") if has_secret(extra.get(name) or "")]
    hidden = {f"RAGBLEND_{name.upper()}": extra.pop(name) for name in secret}
    transfer = {**transfer, "kv_connector_extra_config": extra}
    arguments = {
        "model": str(checkpoint.path),
        "served_model_name": checkpoint.name,
        "dtype": checkpoint.dtype,
        "trust_remote_code": trust_remote_code,
        "disable_log_stats": True,
        "disable_hybrid_kv_cache_manager": True,  # see launch.server_command
        "kv_transfer_config": KVTransferConfig(**transfer),
        "worker_extension_cls": EXTENSION,
        **options,
    }
    if not has_cuda():
        arguments.setdefault("block_size", BLOCK_SIZE_ON_CPU)
    if not has_cuda() and not {"compilation_config", "optimization_level"} & set(options):
        arguments.setdefault("enforce_eager", True)  # on a CPU, compiling takes longer than most sessions
    memory = cpu_paged_kv_bytes(checkpoint, options.get("max_model_len"))
    if memory is not None and not {"gpu_memory_utilization", "num_gpu_blocks_override"} & set(options):
        arguments.setdefault("kv_cache_memory_bytes", memory)
    try:
        engine_args = EngineArgs(**arguments)
    except TypeError as error:
        raise UsageError(f"this vLLM does not have all of vllm_options: {error}") from error
    with _environment(hidden):
        return LLMEngine.from_engine_args(engine_args)


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started inside the context."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def stop_vllm(engine: Any) -> None:
    """Shut `engine` down. If it ran in this process, another engine can be started here afterwards."""
    engine.engine_core.shutdown()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def sampling_params(request: VllmRequest, stop_ids: list[int]) -> Any:
    """Return vLLM's SamplingParams for a request. Each output then has only the step's new tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    options, structure = request.options, request.options.structured_outputs
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        **vllm_filters_and_penalties(options),
        max_tokens=options.max_tokens,
        stop_token_ids=stop_ids,
        structured_outputs=StructuredOutputsParams(**vllm_structured_outputs(structure))
        if structure is not None
        else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": request.params.as_dict()},
    )


def _generation_stops(engine: Any) -> frozenset[int]:
    """Return the end tokens in the model's generation config."""
    config = engine.model_config.try_get_generation_config() or {}
    ends = config.get("eos_token_id")
    return frozenset(ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else [])


class _EngineLoop:
    """Thread that owns vLLM's engine. It adds requests, runs engine steps, and delivers the output tokens."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._answers: dict[str, queue.SimpleQueue[OutputDelta | BaseException]] = {}
        self._may_stop: set[str] = set()  # requests with stop strings, which may end before vLLM returns the report
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # guards that no task is queued once the loop has ended
        self._thread = threading.Thread(target=self.run, name="ragblend-vllm", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call to run between two engine steps. The future has an error if the thread ends before it.

        Raises RagblendError if the engine has stopped.
        """
        future: Future[T] = Future()
        with self._lock:
            if not self._thread.is_alive() or self._failure is not None:
                if self._failure is None or isinstance(self._failure, EngineClosedError):
                    raise EngineClosedError("the vLLM engine is closed; load it again")
                raise RagblendError(f"the vLLM engine has stopped ({self._failure}); load it again")
            self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """End the thread and vLLM. Unfinished requests end with EngineClosedError."""
        self._tasks.put(None)
        self._thread.join()

    def run(self) -> None:
        """Until closed, add new requests, run one engine step and deliver its outputs, again and again."""
        try:
            while self._run_queued_tasks():
                outputs = self._engine.step()
                for output in outputs:
                    self._deliver(output)
                if not outputs:
                    time.sleep(_YIELD_S)
            failure: BaseException = EngineClosedError("the vLLM engine was closed during an answer")
        except BaseException as error:
            failure = RagblendError(f"vLLM failed: {type(error).__name__}: {error}; load the engine again")
            failure.__cause__ = error
        with self._lock:
            self._failure = failure
        while not self._tasks.empty():
            if (task := self._tasks.get()) is not None:
                task[0].set_exception(failure)
        for answers in self._answers.values():
            answers.put(failure)
        stop_vllm(self._engine)
        self._engine = None

    def _run_queued_tasks(self) -> bool:
        """Run the queued tasks; while vLLM is idle, wait for one. Return False if the engine is to be closed."""
        while not (self._engine.has_unfinished_requests() and self._tasks.empty()):
            task = self._tasks.get()
            if task is None:
                return False
            run_call(*task)
        return True

    # -- tasks

    def add(
        self,
        request_id: str,
        request: VllmRequest,
        stop_ids: list[int],
        answers: queue.SimpleQueue[OutputDelta | BaseException],
    ) -> None:
        """Add a request to vLLM. `answers` receives its tokens. Raises RagblendError if vLLM rejects the request."""
        try:
            params = sampling_params(request, stop_ids)
            self._engine.add_request(request_id, {"prompt_token_ids": request.token_ids}, params)
        except Exception as error:
            raise RagblendError(f"vLLM rejects the request: {error}") from error
        self._answers[request_id] = answers
        if request.options.stop_strings:
            self._may_stop.add(request_id)

    def abort(self, request_id: str) -> None:
        """Abort a request. Does nothing if it has ended."""
        self._may_stop.discard(request_id)
        if self._answers.pop(request_id, None) is not None:
            self._engine.abort_request([request_id])

    def reset_prefix_cache(self) -> bool:
        """Clear vLLM's prefix cache. Return True if it was cleared."""
        return bool(self._engine.reset_prefix_cache())

    def prefetch(self, keys: list[str]) -> None:
        """Let every worker load the entries of `keys` into its memory tier."""
        try:
            self._engine.collective_rpc("ragblend_prefetch", args=(keys,))
        except Exception as error:  # e.g. the user's own worker_extension_cls; the request then reads them itself
            log.debug("nothing was prefetched: %s", error)

    # -- outputs

    def _deliver(self, output: Any) -> None:
        may_stop = output.request_id in self._may_stop
        self._may_stop.discard(output.request_id)
        answers = self._answers.get(output.request_id)
        if answers is None:
            return  # the request was aborted
        delta = OutputDelta.from_vllm(output)
        if delta.report is None and may_stop:
            delta.report = self._early_report(output.request_id)
        answers.put(delta)
        if output.finished:
            del self._answers[output.request_id]

    def _early_report(self, request_id: str) -> BlendReport | None:
        """Return the workers' report on a request that is still running; None if there is none."""
        try:
            return report_from_params(
                {PARAMS_KEY: self._engine.collective_rpc("ragblend_report", args=(request_id,))[0]}
            )
        except Exception as error:  # e.g. the user's own worker_extension_cls; the report then lacks its counts
            log.debug("no report on %s: %s", request_id, error)
            return None
