"""Entry point of vLLM's plugin group `vllm.general_plugins`, run in every vLLM process, and the mixin of its workers.

vLLM does not pass the model to a connector (vllm-project/vllm#37339 would). So the plugin keeps a reference to the
model that a worker loads. It also detects weight updates, reserves memory for blending, and formats ragblend's log
lines as vLLM's. It imports no large module. In a vLLM without the connector, it changes only these log lines and,
on a CPU, what seeded requests do (`keep_seeds_on_cpu`).
"""

from __future__ import annotations

import copy
import functools
import logging
import time
import weakref
from threading import Event
from typing import Any

from ragblend.redaction import printable

AUDIT_LOGGER = "ragblend.audit"
"""Name of the logger of changes of documents. Each of its records is passed on, whole."""
_WINDOW_S, _MOST = 60.0, 5

# At most one, because a worker process has one model. The reference is weak, so that the model is freed with its
# engine. vLLM's linear layers call torch when they are freed, which breaks a later engine that compiles at that time.
_loaded: list[weakref.ref[Any]] = []


weights_updated = Event()
"""Event that is set once the weights of this process's model may have changed since loading. vLLM's own methods
for weight updates set it. Other code that changes parameters must set it in every worker."""


def register() -> None:
    """Prepare vLLM in this process for ragblend: wrap methods of its Worker, and pass log records to its logger.

    The wrapper of `load_model` keeps a reference to the model. The wrapper of `determine_available_memory` reserves
    memory for blending. The wrappers of weight updates set `weights_updated`. vLLM's CPU and XPU workers inherit the
    wrappers. Repeated calls do nothing. On a CPU, seeded requests keep vLLM running; see `keep_seeds_on_cpu`.
    """
    use_vllm_logger()
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.load_model
    if getattr(original, "remembers_model", False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        model = self.get_model()
        _loaded[:] = [weakref.ref(model)]
        weights_updated.clear()
        model.load_weights = _setting_weights_updated(model.load_weights)
        return result

    load_model.remembers_model = True  # type: ignore[attr-defined]
    Worker.load_model = load_model
    Worker.determine_available_memory = reserve_blend_memory(Worker.determine_available_memory)
    # Methods that may change weights without `model.load_weights`.
    for name in ("reload_weights", "update_weights", "finish_weight_update"):
        if hasattr(Worker, name):
            setattr(Worker, name, _setting_weights_updated(getattr(Worker, name)))
    keep_seeds_on_cpu()


def keep_seeds_on_cpu() -> None:
    """Have vLLM on a CPU compute the prompt of a seeded request in several steps, as it does on a GPU.

    After each step but the last, vLLM discards the sampled token and resets the request's random generator by its
    offset. A generator on a CPU has no offset, and the error ends the engine, for all clients. The wrappers reset the
    generator's state instead, so a seed gives the same tokens however the prompt is divided.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner, "_sample") or not hasattr(GPUModelRunner, "_bookkeeping_sync"):
        return  # these methods are private to vLLM; tests/inside_vllm/test_seeds.py fails if one has another name
    sample, finish = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def discarded(runner: Any) -> dict[int, Any]:
        """Return the generators whose next token is discarded, by the request's row."""
        if runner.device.type != "cpu" or not runner.input_batch.generators:
            return {}
        mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        return {row: each for row, each in runner.input_batch.generators.items() if row < len(mask) and mask[row]}

    @functools.wraps(sample)
    def sampling(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(each, each.get_state()) for each in discarded(self).values()]
        result = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return result

    @functools.wraps(finish)
    def finishing(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch, hidden = self.input_batch, discarded(self)
        generators = batch.generators
        batch.generators = {row: each for row, each in generators.items() if row not in hidden}
        try:
            return finish(self, *args, **kwargs)
        finally:
            batch.generators = generators

    GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync = sampling, finishing


def reserve_blend_memory(measure: Any) -> Any:
    """Return a wrapper of a worker's method `measure`, which returns the bytes available for the paged KV cache.

    The wrapper subtracts the bytes that blending allocates, if the connector is configured and `kv_cache_memory_bytes`
    is not set.
    """

    @functools.wraps(measure)
    def measuring(self: Any) -> int:
        from ragblend.engine.vllm.launch import CONNECTOR
        from ragblend.engine.vllm.worker_side.paged import blend_device_bytes

        available: int = measure(self)
        config, transfer = self.vllm_config, self.vllm_config.kv_transfer_config
        is_given = config.cache_config.kv_cache_memory_bytes is not None
        if is_given or transfer is None or transfer.kv_connector != CONNECTOR:
            return available
        return available - blend_device_bytes(config)

    return measuring


def _setting_weights_updated(update: Any) -> Any:
    """Return a wrapper of `update` that sets `weights_updated` afterwards, also after an error."""

    @functools.wraps(update)
    def updating(*args: Any, **kwargs: Any) -> Any:
        try:
            return update(*args, **kwargs)
        finally:
            weights_updated.set()

    return updating


class BlendWorkerExtension:
    """Mixin that vLLM adds to its worker class (`--worker-extension-cls`). Front ends call it by `collective_rpc`.

    A stop string ends a request in vLLM's front end, which then drops the connector's report; the workers still have
    it.
    """

    def ragblend_report(self, request_id: str) -> dict[str, Any] | None:
        """Return the report on a request whose context this worker filled, as JSON values; None for other requests."""
        connector = _connector()
        return connector.report_for(request_id) if hasattr(connector, "report_for") else None

    def ragblend_keys_in_memory(self, keys: list[str]) -> list[str]:
        """Return those of `keys` whose entry is in this worker's memory tier."""
        connector = _connector()
        return list(connector.keys_in_memory(keys)) if hasattr(connector, "keys_in_memory") else []

    def ragblend_prefetch(self, keys: list[str]) -> None:
        """Load the entries of `keys` into this worker's memory tier, in the background. Returns at once."""
        connector = _connector()
        if hasattr(connector, "prefetch"):
            connector.prefetch(keys)


def _connector() -> Any:
    """Return the connector of this worker process; None without one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


class _VllmLogHandler(logging.Handler):
    """Handler that passes records to vLLM's logger, with the handlers that it has at that time.

    Messages are made `printable`, except those of AUDIT_LOGGER, which are JSON. Of the records that one statement logs
    within `_WINDOW_S`, only the first `_MOST` are passed on, because a full disk or a client can cause a record for
    each document or request.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # by statement: begin of the window, its records

    def emit(self, record: logging.LogRecord) -> None:
        vllm_logger = logging.getLogger("vllm")
        # With handlers, the root logger receives the record itself.
        if logging.getLogger().handlers or not vllm_logger.isEnabledFor(record.levelno):
            return
        if record.name == AUDIT_LOGGER:
            vllm_logger.handle(record)
            return
        statement = record.pathname, record.lineno
        start_s, count = self._windows.get(statement, (record.created, 0))
        text = record.getMessage()
        if record.created - start_s > _WINDOW_S:
            if count > _MOST:
                text += f" ({count - _MOST} more like it since {time.strftime('%H:%M:%S', time.localtime(start_s))})"
            start_s, count = record.created, 0
        self._windows[statement] = start_s, count + 1
        if count < _MOST:
            copied = copy.copy(record)  # other handlers of the logger get the record itself
            copied.msg, copied.args = printable(text), None
            vllm_logger.handle(copied)


def use_vllm_logger() -> None:
    """Send ragblend's log records of this process to vLLM's logger, in its format: time, level and process.

    Does nothing if the program has configured logging for ragblend or for the root logger.
    """
    ours = logging.getLogger("ragblend")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.addHandler(_VllmLogHandler())
        ours.setLevel(logging.DEBUG)  # vLLM's level decides


def loaded_model() -> Any | None:
    """Return the model that this worker process loaded last; None without a model, or if the plugin did not run."""
    return _loaded[0]() if _loaded else None
