"""Entry point of vLLM's plugin group `vllm.general_plugins`, run in every vLLM process: front end, engine, workers.

vLLM builds a connector after it has loaded the model and never shows it the model. So this remembers the model that
a worker loaded, until vLLM hands it over itself (vllm-project/vllm#37339: `register_model`). Nothing heavy is
imported, and without the connector nothing else happens, but for how ragblend's log lines look.
"""

from __future__ import annotations

import functools
import logging
import weakref
from threading import Event
from typing import Any

# At most one: a worker process has one model. Weak, so that it goes with its engine: vLLM's linear layers call torch
# when they are collected, and collected while a later engine in this process compiles they break what that one traces.
_loaded: list[weakref.ref[Any]] = []


weights_updated = Event()
"""Set once this process's model has got other weights than it was loaded with. vLLM's own ways to update weights set
it; code that writes into parameters by itself has to set it, in every worker."""


def register() -> None:
    """Wrap `Worker.load_model`, which the CPU and XPU workers inherit, and `Worker.determine_available_memory`.

    Calling it again changes nothing.
    """
    log_as_vllm()
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
        model.load_weights = _noting(model.load_weights)
        return result

    load_model.remembers_model = True  # type: ignore[attr-defined]
    Worker.load_model = load_model
    Worker.determine_available_memory = reserving_memory(Worker.determine_available_memory)
    # What may bring weights from elsewhere than `model.load_weights`.
    for name in ("reload_weights", "update_weights", "finish_weight_update"):
        if hasattr(Worker, name):
            setattr(Worker, name, _noting(getattr(Worker, name)))


def reserving_memory(measure: Any) -> Any:
    """Return `measure`, a worker's method that returns the bytes of its KV cache, less what blending allocates."""

    @functools.wraps(measure)
    def measuring(self: Any) -> int:
        from ragblend.engine.vllm.launch import CONNECTOR
        from ragblend.engine.vllm.paged import device_bytes

        available: int = measure(self)
        config, transfer = self.vllm_config, self.vllm_config.kv_transfer_config
        is_given = config.cache_config.kv_cache_memory_bytes is not None
        if is_given or transfer is None or transfer.kv_connector != CONNECTOR:
            return available
        return available - device_bytes(config)

    return measuring


def _noting(update: Any) -> Any:
    """`update`, which sets `weights_updated` when it has ended, well or not."""

    @functools.wraps(update)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return update(*args, **kwargs)
        finally:
            weights_updated.set()

    return noting


class _AsVllm(logging.Handler):
    """Hands records to vLLM's logger, however that is set up by then."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if not logging.getLogger().handlers and theirs.isEnabledFor(record.levelno):  # else the root logger has it
            theirs.handle(record)


def log_as_vllm() -> None:
    """Have this process's ragblend lines look as vLLM's do, with time, level and process, and go where they go.

    Where logging is set up already, by a program that has vLLM in it, it stays as it is.
    """
    ours = logging.getLogger("ragblend")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.addHandler(_AsVllm())
        ours.setLevel(logging.DEBUG)  # vLLM's own level decides


def loaded_model() -> Any | None:
    """The model this process loaded last; None where there is none, or the plugin did not run."""
    return _loaded[0]() if _loaded else None
