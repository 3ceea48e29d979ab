"""Entry point of vLLM's plugin group `vllm.general_plugins`, run in every vLLM process: front end, engine, workers.

vLLM builds a connector after it has loaded the model and never shows it the model. So this remembers the model that
a worker loaded, until vLLM hands it over itself (vllm-project/vllm#37339: `register_model`). Nothing heavy is
imported, and without the connector nothing else happens, but for how ragblend's log lines look.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, NamedTuple

# At most one: a worker process has one model. Weak, so that it goes with its engine: vLLM's linear layers call torch
# when they are collected, and collected while a later engine in this process compiles they break what that one traces.
_loaded: list[weakref.ref[Any]] = []


class WeightUpdates(NamedTuple):
    """How often this process's model got other weights since it was loaded, and where the last came from: a folder, ""
    for the folder it was loaded from, None where nobody can say."""

    number: int = 0
    path: str | None = None


_updates = [WeightUpdates()]


def weights_updated(path: str | None = None) -> None:
    """Note that the model has got other weights. vLLM's own ways are noticed; code that writes into parameters by
    itself calls this, in every worker."""
    _updates[0] = WeightUpdates(_updates[0].number + 1, path)


def weight_updates() -> WeightUpdates:
    """What is noted so far."""
    return _updates[0]


def register() -> None:
    """Wrap `Worker.load_model`, which the CPU and XPU workers inherit. Calling it again changes nothing."""
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
        model.load_weights = _noting(model.load_weights)
        return result

    load_model.remembers_model = True  # type: ignore[attr-defined]
    Worker.load_model = load_model
    # What brings weights from elsewhere than `model.load_weights`, or knows the folder that they come from.
    for name in ("reload_weights", "update_weights", "finish_weight_update"):
        if hasattr(Worker, name):
            setattr(Worker, name, _noting(getattr(Worker, name), _folder if name == "reload_weights" else None))


def _noting(update: Any, folder: Any = None) -> Any:
    """`update`, noted when it has ended, well or not."""

    @functools.wraps(update)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return update(*args, **kwargs)
        finally:
            weights_updated(folder(*args, **kwargs) if folder is not None else None)

    return noting


def _folder(
    worker: Any, weights_iterator: Any = None, weights_path: str | None = None, *rest: Any, **more: Any
) -> str | None:
    """Where `reload_weights` reads, as vLLM's worker has its arguments."""
    return (weights_path or "") if weights_iterator is None else None


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
