"""Shared engines: one for all framework models of this process with the same model, store and options."""

from __future__ import annotations

import atexit
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from ragblend.files.places import expand_user_path
from ragblend.options import MODEL_NAMES, ModelOptions

if TYPE_CHECKING:
    from ragblend.engine.api import Engine

_ENGINES: WeakValueDictionary[tuple[Any, ...], Engine] = WeakValueDictionary()
_ENGINES_LOCK = threading.Lock()
_CLOSE_AT_EXIT: WeakSet[Any] = WeakSet()


def share_engine(model: Any, store: Any = None, **options: Any) -> Engine:
    """Return the engine of `load_engine(model, store, **options)`; equal arguments give the same engine.

    An engine is shared while it is still in use. If `store` is an object and not a path, the engine is not shared. The
    caller passes the engine to `close_at_exit`.
    """
    from ragblend.engine.load import load_engine

    loading = {name: options.pop(name) for name in (*MODEL_NAMES, "torch_dtype") if name in options}
    options |= ModelOptions.from_keywords(**loading).non_defaults

    if store is not None and not isinstance(store, str | Path):
        unshared: Engine = load_engine(model, store, **options)
        return unshared
    set_options = sorted((name, value) for name, value in options.items() if value is not None)
    key = (model, absolute_store(store), repr(set_options))
    with _ENGINES_LOCK:
        engine = _ENGINES.get(key)
        if engine is None or not engine.is_usable:
            engine = _ENGINES[key] = load_engine(model, store, **options)
        return engine


def absolute_store(store: Any) -> Any:
    """Return the absolute path of a store that is a path; return any other store unchanged."""
    return str(expand_user_path(store, "store").resolve()) if isinstance(store, str | Path) else store


def close_at_exit(engine: Any) -> None:
    """Close `engine` when the interpreter exits, if it is still in use then."""
    _CLOSE_AT_EXIT.add(engine)


@atexit.register
def _close_engines() -> None:
    """Close the engines, so that background precomputation ends before the interpreter exits."""
    for engine in list(_CLOSE_AT_EXIT):
        engine.close()
