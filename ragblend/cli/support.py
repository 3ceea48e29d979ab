"""What the commands of `cli` share: their options, settings, engine and index, and how results are printed.

Results go to stdout as text or as one JSON object with `schema_version`, progress to stderr. Importing this loads
neither torch nor a framework: `ragblend --help` answers at once.
"""

from __future__ import annotations

import json
import os
import shlex
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ragblend.config import Settings, load_settings
from ragblend.errors import EmptyCorpusError, NotFoundError, UsageError
from ragblend.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ragblend.engine.api import Engine
    from ragblend.engine.store.base import KVStore
    from ragblend.index import ChunkIndex, SearchHit

SCHEMA_VERSION = 1
SAY_EVERY_S = 30.0  # between two lines of progress, where stderr is no terminal

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)


# -- options

ModelOption = Annotated[str | None, typer.Option("--model", help="'demo', a Hugging Face id or a local path.")]
DocumentArgument = Annotated[str, typer.Argument(help="A file, a folder, or a record (data.jsonl#3).")]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="transformers, vllm, or a server's http://HOST:PORT (ragblend serve).")
]
IndexOption = Annotated[str | None, typer.Option("--index", help="Directory of the index.")]
StoreOption = Annotated[str | None, typer.Option("--store", help="Directory of the KV store.")]
RemoteOption = Annotated[
    str | None, typer.Option("--remote", help="Shared tier: redis://HOST:6379/0, s3://BUCKET/PREFIX or an fsspec URL.")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
KvDtypeOption = Annotated[
    str | None, typer.Option("--kv-dtype", help="How new KV is stored: auto (as computed), int8 or fp8.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System text that chunks are precomputed behind.")]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Tenant; never reads another's KV.")]
EmbedderOption = Annotated[str | None, typer.Option("--embedder", help="minilm, hashing, a Hugging Face id or a path.")]
RemoteCodeOption = Annotated[bool | None, typer.Option("--trust-remote-code", help="Run code of the model's repo.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KOption = Annotated[int | None, typer.Option("-k", help="Chunks retrieved per question.")]
NeighboursOption = Annotated[int | None, typer.Option("--neighbours", help="Chunks added around each hit.")]
NeighbourKvOption = Annotated[
    bool | None,
    typer.Option(
        "--neighbour-kv/--no-neighbour-kv",
        help="Also keep each chunk's KV as computed behind the chunk before it: twice the store, closer to full "
        "prefill where `ask --neighbours` brings both.",
    ),
]
OrderOption = Annotated[str | None, typer.Option("--order", help="Chunks by 'score' or in 'document' order.")]
ModeOption = Annotated[str | None, typer.Option("--mode", help="blend, full, prefix or reuse.")]
RuleOption = Annotated[str | None, typer.Option("--rule", help="Which tokens to recompute: auto, cacheblend, ...")]


def parse_ratio(text: str) -> float | str:
    """A share, or "auto"; raises UsageError for anything else."""
    try:
        return text if text == "auto" else float(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no share; choose 0 (full reuse) to 1 (recompute all), or auto") from error


RatioOption = Annotated[
    Any,
    typer.Option(
        "--ratio",
        parser=parse_ratio,
        metavar="SHARE|auto",
        help="Share of chunk tokens to recompute, 0 to 1; auto: as calibrated.",
    ),
]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
VllmOptions = Annotated[
    str | None,
    typer.Option("--vllm-options", help="vLLM's own engine arguments, as JSON: '{\"enforce_eager\": false}'."),
]
ShadowOption = Annotated[
    float | None,
    typer.Option("--shadow", help="Run full prefill beside this share of the requests, after the answer; 0 to 1."),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]


# -- settings, engine, index


def settings_from(arguments: dict[str, Any]) -> Settings:
    """Settings from a command's arguments, the environment and ragblend.toml."""
    quiet_libraries()
    return load_settings({name: value for name, value in arguments.items() if name in Settings.__dataclass_fields__})


def settings_for_demo(arguments: dict[str, Any]) -> Settings:
    """Settings from a command's arguments and, where these say nothing, the demo's: its corpus is ingested first."""
    one_thread()
    quiet_libraries()
    from ragblend.demo.show import demo_settings

    with progress_bars() as progress:
        prepared = demo_settings(progress=progress)
    return settings_from({**prepared, **{name: value for name, value in arguments.items() if value is not None}})


def one_thread() -> None:
    """The embedded model is too small to share: on a busy machine two threads wait for each other at every step."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def use_threads(count: int | None) -> None:
    """Tell every library that computes, before it is imported, how many CPU threads to use; None leaves it alone."""
    if count is not None and count > 0:
        os.environ["OMP_NUM_THREADS"] = str(count)


def quiet_libraries() -> None:
    """Keep libraries' bars and advice out of the way before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def open_engine(settings: Settings, *, new_model: bool = False) -> Engine:
    """The engine that the settings name. Raises NotFoundError without a store, unless `new_model` may start one."""
    from ragblend.engine.load import load_engine

    if not new_model and not settings.is_served and not Path(settings.store).is_dir():
        raise NotFoundError(f"no store at {settings.store}; fill one: ragblend ingest DOCS --store {settings.store}")
    return load_engine(
        settings.model,
        settings.store,
        backend=settings.backend,
        dtype=settings.dtype,
        device=settings.device,
        system=settings.system,
        namespace=settings.namespace,
        shadow=settings.shadow,
        new_model=new_model,
        trust_remote_code=settings.trust_remote_code,
        **tier_options(settings),
    )


def tier_options(settings: Settings) -> dict[str, Any]:
    """What `load_engine` and `open_store` take of the settings."""
    names = ("memory_gib", "disk_gib", "remote", "remote_timeout_s", "kv_dtype")
    return {name: getattr(settings, name) for name in names}


def open_index_of(settings: Settings, engine: Engine) -> ChunkIndex:
    """The index that the settings name, checked against the engine's tokenizer."""
    from ragblend.engine.base import EngineBase
    from ragblend.precompute import open_engine_index

    index = open_engine_index(settings.index, engine, embedder_name(settings), create=False)
    if isinstance(engine, EngineBase) and settings.index != Settings().index:
        engine.notices.flags += f" --index {shlex.quote(settings.index)}"
    calibrations = getattr(engine, "calibrations", None)
    if calibrations is not None:
        calibrations.chunker = index.manifest.chunker  # of several calibrations the one of this index
    return index


def embedder_name(settings: Settings) -> str | None:
    """The embedder to insist on; None for the index's own."""
    return None if settings.embedder == "auto" else settings.embedder


def remote_facts(settings: Settings, local_keys: Sequence[str]) -> dict[str, Any] | None:
    """Whether the remote tier answers, what it holds, and how many of the local keys it lacks; None without one."""
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
        "num_stored_chunks": len(sizes),
        "store_bytes": sum(sizes.values()),
        "num_missing": sum(key not in sizes for key in local_keys) if status.reachable else None,
    }


def wait_for_remote(engine: Engine, progress: Callable[[str, int, int | None], None]) -> None:
    """Until the remote tier has everything that was stored, or stops answering. Closing alone waits a few seconds."""
    from ragblend.engine.store.remote.tier import RemoteStore

    tiers: Sequence[KVStore] = getattr(engine.store, "tiers", ())
    for tier in tiers:
        if isinstance(tier, RemoteStore):
            total = tier.num_waiting
            while not tier.flush(0.2) and tier.breaker.is_closed:
                progress("send", total - tier.num_waiting, total)


def remote_line(facts: dict[str, Any]) -> str:
    """The same for people."""
    from ragblend.engine.store.tiered import format_bytes

    if not facts["reachable"]:
        return f"remote {facts['url']}: not reachable; answers go on without it"
    held, ping_ms = format_bytes(facts["store_bytes"]), facts["latency_s"] * 1e3
    text = f"remote {facts['url']}: KV of {facts['num_stored_chunks']} chunks, {held}; answers in {ping_ms:.1f} ms"
    lacks = f"\n  it lacks {facts['num_missing']} of the chunks here; send them: ragblend push --remote {facts['url']}"
    return text + (lacks if facts["num_missing"] else "")


# -- questions


def retrieve(index: ChunkIndex, question: str, settings: Settings) -> Sequence[SearchHit]:
    """The chunks a question retrieves; a clear error for an empty question or an empty index."""
    if not question.strip():
        raise UsageError("the question is empty; write what you want to know")
    if not index.num_chunks:
        raise EmptyCorpusError(f"the index {settings.index} is empty; add documents: ragblend ingest DOCS")
    order: Any = settings.order
    return index.search(question, settings.k, neighbours=settings.neighbours, order=order)


def generation_options(settings: Settings, temperature: float) -> dict[str, Any]:
    """The settings that `generate` and `stream` take."""
    return {
        "mode": settings.mode,
        "rule": settings.rule,
        "recompute_ratio": settings.ratio,
        "max_tokens": settings.max_tokens,
        "temperature": temperature,
    }


def answer_question(
    engine: Engine,
    hits: Sequence[SearchHit],
    question: str,
    settings: Settings,
    temperature: float,
    show: bool,
) -> Any:
    """Answer from the retrieved chunks; with `show`, each piece is printed as it is made."""
    from ragblend.prompt.prompt import SegmentedPrompt

    prompt = SegmentedPrompt([hit.chunk for hit in hits], question, settings.system)
    stream = engine.stream(prompt, **generation_options(settings, temperature))
    for piece in stream:
        if show:
            print(piece, end="", flush=True)
    if show:
        print(flush=True)
    return stream.result


def print_shadow(engine: Engine, settings: Settings) -> None:
    """Wait for full prefill beside the requests that were chosen, and say how often it agreed. Nothing if it is off."""
    if settings.shadow:
        engine.flush_shadow()
        err.print(engine.shadow.summary(), markup=False)


# -- printing


def source_facts(hit: SearchHit) -> dict[str, Any]:
    """One retrieved chunk, as `--json` shows it."""
    chunk = hit.chunk
    return {
        "source": chunk.source,
        "start": chunk.start,
        "end": chunk.end,
        "score": round(hit.score, 4),
        "text": chunk.text,
    }


def print_sources(hits: Sequence[SearchHit]) -> None:
    """The retrieved chunks, one line each."""
    from ragblend.corpus.folders import shown

    for number, hit in enumerate(hits, start=1):
        chunk = hit.chunk
        text = " ".join(chunk.text.split())
        text = text if len(text) <= 160 else text[:157] + "..."
        place = f"{shown(chunk.source)}:{chunk.start}-{chunk.end}"
        out.print(f"[{number}] {place} ({hit.score:.2f}) {text}", markup=False)


def print_ingest(report: Any, settings: Settings, json_: bool) -> None:
    """What an ingestion did and cost."""
    from ragblend.corpus.folders import shown
    from ragblend.engine.store.tiered import format_bytes

    per_token = f"{format_bytes(report.bytes_per_token)} per token"
    where = f"store {settings.store}: {format_bytes(report.store_bytes)}"
    if settings.is_served:
        where = f"store of {redacted(settings.backend)}: {format_bytes(report.new_kv_bytes)} more"
    skipped = [f"{shown(path)} {reason.partition(';')[0]}" for path, reason in report.skipped]
    lines = [
        f"{report.num_documents} documents ({report.num_unchanged} unchanged), {report.num_chunks} chunks, "
        f"{report.num_tokens} tokens",
        *([f"gone: {listed(map(shown, report.removed))}"] if report.removed else []),
        *([f"{report.num_removed_kv} KV caches of what is changed or gone removed"] if report.num_removed_kv else []),
        f"{report.num_new_kv} chunks prefilled in {report.prefill_s:.1f} s, {report.num_known_kv} already stored"
        + (f", {report.num_rewritten_kv} of them rewritten" if report.num_rewritten_kv else ""),
        f"{where}, {per_token}",
        *([f"{len(report.skipped)} files are no documents: {listed(skipped)}"] if skipped else []),
        *([f"left out by .gitignore: {listed(map(shown, report.ignored))}"] if report.ignored else []),
        *(f"not read: {shown(failure.path)}: {failure.reason}" for failure in report.failures),
    ]
    print_result(report.as_dict(), "\n".join(lines), json_)


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first few names, and how many there are more.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more (--json lists all)'
    """
    every = list(names)
    more = f" and {len(every) - most} more (--json lists all)" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def count_of(items: Sequence[Any], what: str) -> str:
    """How many there are of something.

    >>> count_of(["a"], "document"), count_of([], "document")
    ('1 document', '0 documents')
    """
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"


def print_result(facts: dict[str, Any], text: str, json_: bool) -> None:
    """The same facts as one JSON object or as text."""
    if json_:
        print_json(facts)
    else:
        out.print(text, markup=False)


def print_json(facts: dict[str, Any]) -> None:
    """One JSON object on one line of stdout, its schema version first."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **facts}, default=str))


def split_names(text: str) -> list[str]:
    """The names in a comma-separated option."""
    return [name.strip() for name in text.split(",") if name.strip()]


def split_numbers(text: str) -> list[float]:
    """The numbers in a comma-separated option."""
    try:
        return [float(name) for name in split_names(text)]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of numbers; write them like 0,0.15,1") from error


def split_counts(text: str) -> list[int]:
    """The whole numbers in a comma-separated option."""
    numbers = split_numbers(text)
    if any(number % 1 for number in numbers):
        raise UsageError(f"{text!r} is not a list of whole numbers; write them like 3,6,9")
    return [int(number) for number in numbers]


class _RateColumn(ProgressColumn):
    """How many are done per second."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s")


def progress_lines(say: Callable[[str], None], every_s: float = SAY_EVERY_S) -> Callable[[str, int, int | None], None]:
    """A progress callback that says, now and then, how far a stage is, how fast it goes and how long it will take."""
    starts: dict[str, tuple[float, int]] = {}  # when a stage was seen first, and how far it was
    said_s = monotonic()

    def tell(stage: str, done: int, total: int | None) -> None:
        nonlocal said_s
        now_s = monotonic()
        start_s, first = starts.setdefault(stage, (now_s, done))
        if now_s - said_s < every_s or done <= first or now_s == start_s:
            return
        said_s = now_s
        rate = (done - first) / (now_s - start_s)
        left = "" if total is None else f" of {total}, {(total - done) / rate:.0f} s left"
        say(f"{stage}: {done}{left}, {rate:.3g}/s")

    return tell


@contextmanager
def progress_bars() -> Iterator[Any]:
    """A progress callback that draws bars with rate and time left on stderr, or lines where that is no terminal."""
    if not err.is_terminal:
        yield progress_lines(err.print)
        return
    columns = (
        TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield tell


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """An option's JSON object; None is an empty one. Raises UsageError for anything else."""
    try:
        values = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{option} is {text}; give an object, such as '{{\"enforce_eager\": false}}'")
    return values
