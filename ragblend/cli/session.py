"""Functions that open a command's engine and index from its settings and retrieve a question's chunks.

Importing this module loads neither torch nor a framework.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from ragblend.cli.printing import progress_bars
from ragblend.config import Settings, load_settings
from ragblend.errors import CorruptError, EmptyCorpusError, NotFoundError, UsageError
from ragblend.options import LoadOptions, ModelOptions, TierOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragblend.engine.api import DocumentEngine, Engine
    from ragblend.index import ChunkIndex, SearchHit
    from ragblend.ingestion.ray_workers import RayWorkers


class WorkerCount(NamedTuple):
    """The value of `--workers`: the number of processes, and whether they run on a running Ray cluster."""

    number: int
    on_cluster: bool = False


def settings_from(arguments: dict[str, Any]) -> Settings:
    """Return settings from a command's arguments, the environment, ragblend.toml, and what the store remembers."""
    quiet_libraries()
    settings = load_settings(arguments)
    if settings.model is not None and settings.system is not None:
        return settings
    from ragblend.engine.load import find_store_model, load_store_defaults

    with suppress(CorruptError, UsageError):  # commands that need them raise an error later
        if settings.system is None:
            settings = replace(settings, system=load_store_defaults(settings.store).system)
        if settings.model is None and not settings.trust_remote_code:  # with it, the user must name the model
            settings = replace(settings, model=find_store_model(settings.store))
    return settings


def prepare_demo_settings(arguments: dict[str, Any]) -> Settings:
    """Ingest the demo's corpus and return the demo's settings. The `arguments` that are not None override these."""
    limit_torch_to_one_thread()
    quiet_libraries()
    from ragblend.demo.show import prepare_demo

    with progress_bars() as progress:
        prepared = prepare_demo(progress=progress)
    return settings_from({**prepared, **{name: value for name, value in arguments.items() if value is not None}})


def limit_torch_to_one_thread() -> None:
    """Limit torch to one thread, unless OMP_NUM_THREADS is set.

    The demo's model is so small that two threads wait for each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def set_num_threads(count: int | None) -> None:
    """Set the number of CPU threads in OMP_NUM_THREADS, which libraries read at import. None changes nothing."""
    if count is not None and count > 0:
        os.environ["OMP_NUM_THREADS"] = str(count)


def make_terminal_handler(verbose: bool) -> logging.Handler:
    """Return the handler that writes the log to stderr.

    Unless `verbose`, the handler drops other packages' debug, info and warning records, which address programmers.
    """
    handler = logging.StreamHandler()
    if not verbose:
        handler.addFilter(lambda record: record.name.partition(".")[0] == "ragblend" or record.levelno >= logging.ERROR)
    return handler


def quiet_libraries() -> None:
    """Disable progress bars and advice of libraries that have not been imported yet."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def open_engine(settings: Settings, *, new_model: bool = False) -> Engine:
    """Return the settings' engine. Without `new_model`, a missing store raises NotFoundError."""
    from ragblend.engine.load import load_engine

    if not new_model:
        _require_store(settings)
    engine: Engine = load_engine(settings.model, settings.store, new_model=new_model, **_engine_options(settings))
    return engine


def open_document_engine(settings: Settings, *, new_model: bool = False) -> Engine:
    """Return the settings' engine for ingesting and removing documents. It answers no prompts.

    It loads the model's weights when a chunk has to be prefilled. `new_model`: see `open_engine`.
    """
    from ragblend.engine.load import load_document_engine

    if not new_model:
        _require_store(settings)
    engine: Any = load_document_engine(settings.model, settings.store, new_model=new_model, **_engine_options(settings))
    return engine  # type: ignore[no-any-return]


def _require_store(settings: Settings) -> None:
    if not settings.is_served and not Path(settings.store).is_dir():
        raise NotFoundError(f"no store at {settings.store}; fill one: ragblend ingest DOCS --store {settings.store}")


def opening_title(settings: Settings, title: str = "loading the model") -> str:
    """Return the label of the progress lines of `open_engine`."""
    return "connecting to the server" if settings.is_served else title


def _engine_options(settings: Settings) -> dict[str, Any]:
    """Return the settings that are options of `load_engine`, except model and store."""
    options = {field.name for field in (*fields(LoadOptions), *fields(ModelOptions))}
    tiers = {field.name for field in fields(TierOptions)}
    names = [field.name for field in fields(Settings) if field.name in options - tiers]
    return {"backend": settings.backend, **{name: getattr(settings, name) for name in names}, **settings.tiers}


@contextmanager
def open_workers(settings: Settings, workers: WorkerCount | None) -> Iterator[RayWorkers | None]:
    """Yield as many Ray workers as `workers` says; None if `workers` is None."""
    if workers is None:
        yield None
        return
    from ragblend.engine.load import find_store_model
    from ragblend.ingestion.ray_workers import RayWorkers

    # Ray reports dead workers on stdout, which is reserved for results.
    with (
        redirect_stdout(sys.stderr),
        RayWorkers(
            settings.model or find_store_model(settings.store),
            settings.store,
            count=workers.number,
            address="auto" if workers.on_cluster else None,
            num_gpus=settings.gpus_per_worker,
            **_engine_options(settings),
        ) as opened,
    ):
        yield opened


def open_settings_index(settings: Settings, engine: DocumentEngine, *, create: bool = False) -> ChunkIndex:
    """Return the settings' index, checked against the engine's tokenizer.

    If the index is missing, `create=True` creates it. With `create=False`, a missing index raises NotFoundError.
    """
    from ragblend.precompute import open_engine_index

    index = open_engine_index(settings.store, engine, embedder_name(settings), settings.chunk_size, create=create)
    if engine.calibrations is not None:
        engine.calibrations.chunker = index.manifest.chunker  # selects this index's calibration
    return index


@contextmanager
def open_searched_index(settings: Settings, engine: Engine) -> Iterator[ChunkIndex]:
    """Open the index to search for a question: the settings' index, or a temporary one if no folder was ingested.

    The temporary index has the texts that frameworks and clients of a server have added in the engine's namespace.
    Raises NotFoundError if there are none.
    """
    from ragblend.catalog.ledger import open_ledger
    from ragblend.catalog.stored_documents import list_added
    from ragblend.precompute import open_engine_index
    from ragblend.prompt.types import Chunk

    try:
        index = open_settings_index(settings, engine)
    except NotFoundError:
        with open_ledger(engine.store, create=False) as ledger:
            added = list_added(ledger, engine.namespace, with_indexes=True)
            names = [each.key for each in added if each.num_chunks]
            texts_of = {f"{name.collection}/{name.id}": sorted(ledger.texts_of(name)) for name in names}
        if not texts_of:
            raise
        with TemporaryDirectory() as folder, open_engine_index(folder, engine, embedder_name(settings)) as made:
            for source, texts in texts_of.items():
                made.add_document(source, "", [Chunk(text, source) for text in texts])
            yield made
        return
    with index:
        yield index


def embedder_name(settings: Settings) -> str | None:
    """Return the name of the embedder that the index must have; None accepts the embedder that the index records."""
    return None if settings.embedder == "auto" else settings.embedder


def remote_facts(settings: Settings, local_keys: Sequence[str]) -> dict[str, Any] | None:
    """Return the remote tier's state and contents, and how many `local_keys` are missing there; None without a tier."""
    if settings.remote is None:
        return None
    from ragblend.engine.store.remote.tier import open_remote

    tier = open_remote(settings.remote, timeout_s=settings.remote_timeout_s)
    status = tier.status()
    sizes = dict(tier.values.sizes()) if status.reachable else {}
    tier.close()
    return {
        "url": status.url,
        "reachable": status.reachable,
        "latency_s": status.latency_s,
        "problem": status.problem,
        "num_stored_kv": len(sizes),
        "store_bytes": sum(sizes.values()),
        "num_missing": sum(key not in sizes for key in local_keys) if status.reachable else None,
    }


def retrieve(index: ChunkIndex, question: str, settings: Settings) -> Sequence[SearchHit]:
    """Return the chunks that a question retrieves. Raises UsageError for "", EmptyCorpusError for an empty index."""
    if not question.strip():
        raise UsageError("the question is empty; write a question")
    if not index.num_chunks:
        raise EmptyCorpusError(f"the store {settings.store} has no documents; add documents: ragblend ingest DOCS")
    order: Any = settings.order
    return index.search(question, settings.k, neighbours=settings.neighbours, order=order)
