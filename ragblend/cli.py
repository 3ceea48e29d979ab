"""The command line: `ragblend demo`, `ingest`, `ask`, `chat`, ... Results on stdout, progress and log on stderr.

Each command parses, calls one function of the package and prints. `--json` prints the same facts as one JSON object.
Exit codes: 0 ok, 1 failure, 2 usage, 3 missing, 4 corrupt, 5 backend unreachable, 6 partial ingest, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ragblend.config import Settings, load_settings
from ragblend.errors import EmptyCorpusError, RagblendError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ragblend.engine.transformers_engine import TransformersEngine
    from ragblend.index import ChunkIndex, SearchHit

SCHEMA_VERSION = 1
EXIT_CORRUPT, EXIT_PARTIAL, EXIT_INTERRUPTED = 4, 6, 130

app = typer.Typer(
    help="Prefill every RAG chunk once, keep its KV cache, and fuse the retrieved chunks' caches at query time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure, side by side in one process.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

err = Console(stderr=True, highlight=False)
out = Console(highlight=False, soft_wrap=True)

ModelOption = Annotated[str | None, typer.Option("--model", help="'demo', a Hugging Face id or a local path.")]
IndexOption = Annotated[str | None, typer.Option("--index", help="Directory of the index.")]
StoreOption = Annotated[str | None, typer.Option("--store", help="Directory of the KV store.")]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
SystemOption = Annotated[str | None, typer.Option("--system", help="System text that chunks are precomputed behind.")]
NamespaceOption = Annotated[str | None, typer.Option("--namespace", help="Tenant; never reads another's KV.")]
EmbedderOption = Annotated[str | None, typer.Option("--embedder", help="minilm, hashing, a Hugging Face id or a path.")]
RemoteCodeOption = Annotated[bool | None, typer.Option("--trust-remote-code", help="Run code of the model's repo.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KOption = Annotated[int | None, typer.Option("-k", help="Chunks retrieved per question.")]
NeighboursOption = Annotated[int | None, typer.Option("--neighbours", help="Chunks added around each hit.")]
OrderOption = Annotated[str | None, typer.Option("--order", help="Chunks by 'score' or in 'document' order.")]
ModeOption = Annotated[str | None, typer.Option("--mode", help="blend, full, prefix or reuse.")]
RuleOption = Annotated[str | None, typer.Option("--rule", help="Which tokens to recompute; see `bench quality`.")]
RatioOption = Annotated[float | None, typer.Option("--ratio", help="Share of chunk tokens to recompute, 0 to 1.")]
MaxTokensOption = Annotated[int | None, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]


# -- commands


@app.command()
def ingest(
    paths: Annotated[list[str], typer.Argument(help="Files or folders: txt, md, html, csv, json, jsonl, pdf.")],
    model: ModelOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    chunk_size: Annotated[int | None, typer.Option("--chunk-size", help="Most tokens per chunk.")] = None,
    glob: Annotated[str, typer.Option("--glob", help="Only files in folders that match.")] = "*",
    precompute: Annotated[bool, typer.Option("--precompute/--no-precompute", help="Also prefill the chunks.")] = True,
    embedder: EmbedderOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Chunk, embed, index and precompute documents. Run it again after an interruption: it goes on where it was."""
    settings = _settings(locals())
    from ragblend.precompute import ingest as run

    with _engine(settings, new_model=True) as engine, _progress() as progress:
        report = run(
            list(paths),
            engine,
            settings.index,
            chunk_size=settings.chunk_size,
            glob=glob,
            precompute=precompute,
            embedder=_embedder(settings),
            progress=progress,
        )
    _print_ingest(report, settings, json_)
    if report.failures:
        raise typer.Exit(EXIT_PARTIAL)


@app.command()
def precompute(
    model: ModelOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Fill the store with the KV of every indexed chunk, for a new model, dtype or system text."""
    settings = _settings(locals())
    from ragblend.precompute import disk_bytes, precompute_chunks

    with _engine(settings, new_model=True) as engine, _open_index(settings, engine) as opened, _progress() as progress:
        report = precompute_chunks(list(opened.chunks()), engine, progress)
        report.num_chunks, report.num_documents = opened.num_chunks, opened.num_documents
        report.store_bytes = disk_bytes(engine)
    _print_ingest(report, settings, json_)


@app.command()
def remove(
    document: Annotated[str, typer.Argument(help="A source as `stats` lists it.")],
    model: ModelOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    json_: JsonOption = False,
) -> None:
    """Forget a document: its chunks in the index, and their KV unless another document shares the text."""
    settings = _settings(locals())
    from ragblend.precompute import remove_document

    with _engine(settings) as engine, _open_index(settings, engine) as opened:
        num_chunks, num_kv = remove_document(document, engine, opened)
    facts = {"document": document, "num_chunks": num_chunks, "num_kv": num_kv}
    _result(facts, f"{document}: {num_chunks} chunks and {num_kv} KV caches removed", json_)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to answer from the ingested documents.")],
    model: ModelOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    mode: ModeOption = None,
    rule: RuleOption = None,
    ratio: RatioOption = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    order: OrderOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the answer as it is made.")] = False,
    show_sources: Annotated[bool, typer.Option("--show-sources", help="Print the retrieved chunks.")] = False,
    embedder: EmbedderOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Answer a question from the fused KV caches of the chunks it retrieves."""
    settings = _settings(locals())
    with _engine(settings) as engine, _open_index(settings, engine) as opened:
        hits = _search(opened, question, settings)
        answer = _answer(engine, hits, question, settings, temperature, stream and not json_)
    if json_:
        _json(
            {
                "question": question,
                "answer": answer.text,
                "sources": [_source(hit) for hit in hits],
                "mode": answer.report.mode,
                "finish_reason": answer.finish_reason,
                "report": answer.report.as_dict(),
            }
        )
        return
    if not stream:
        out.print(escape(answer.text))
    if show_sources:
        _print_sources(hits)
    err.print(answer.report.summary())


@app.command()
def chat(
    model: ModelOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    mode: ModeOption = None,
    rule: RuleOption = None,
    ratio: RatioOption = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    order: OrderOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    show_sources: Annotated[bool, typer.Option("--show-sources", help="Print the retrieved chunks.")] = False,
    embedder: EmbedderOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
) -> None:
    """Ask one question after another. Earlier turns stay as exact prefix; new chunks are blended behind them."""
    settings = _settings(locals())
    from ragblend.chat import ChatSession

    with _engine(settings) as engine, _open_index(settings, engine) as opened:
        session = ChatSession(engine, system=settings.system)
        err.print("Ask a question; an empty line or Ctrl-D ends the chat.")
        while True:
            try:
                question = input("> ").strip() if sys.stdin.isatty() else sys.stdin.readline().strip()
            except EOFError:
                break
            if not question:
                break
            hits = _search(opened, question, settings)
            stream = session.stream([hit.chunk for hit in hits], question, **_generation(settings, temperature))
            for piece in stream:
                print(piece, end="", flush=True)
            print(flush=True)
            if show_sources:
                _print_sources(hits)
            err.print(stream.result.report.summary())


@app.command()
def search(
    question: Annotated[str, typer.Argument(help="What to look for.")],
    index: IndexOption = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    order: OrderOption = None,
    embedder: EmbedderOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the chunks a question retrieves, without answering it."""
    settings = _settings(locals())
    from ragblend.index import open_index

    with open_index(settings.index, _embedder(settings)) as opened:
        hits = _search(opened, question, settings)
    if json_:
        _json({"question": question, "sources": [_source(hit) for hit in hits]})
    else:
        _print_sources(hits)


@app.command()
def stats(index: IndexOption = None, store: StoreOption = None, json_: JsonOption = False) -> None:
    """What the index and the store hold and cost."""
    settings = _settings(locals())
    from ragblend.engine.disk import DiskStore
    from ragblend.engine.store import format_bytes
    from ragblend.index import open_index

    disk = DiskStore(settings.store, create=False)
    entries = list(disk.entries())
    num_tokens = sum(entry.header.num_tokens for entry in entries)
    nbytes = sum(entry.nbytes for entry in entries)
    with open_index(settings.index) as opened:
        manifest, sources = opened.manifest, opened.sources()
        num_documents, num_chunks = opened.num_documents, opened.num_chunks
    facts = {
        "index": settings.index,
        "store": settings.store,
        "num_documents": num_documents,
        "num_chunks": num_chunks,
        "embedder": manifest.embedder,
        "tokenizer": manifest.tokenizer,
        "chunk_size": manifest.chunk_size,
        "num_stored_chunks": len(entries),
        "num_stored_tokens": num_tokens,
        "store_bytes": nbytes,
        "bytes_per_token": round(nbytes / num_tokens) if num_tokens else 0,
        "models": disk.models(),
        "sources": sources,
    }
    held = ", ".join(f"{model.get('model')} ({model.get('dtype')})" for model in disk.models().values()) or "no model"
    lines = [
        f"index {settings.index}: {num_documents} documents, {num_chunks} chunks of at most {manifest.chunk_size} "
        f"tokens of {manifest.tokenizer}, embedded by {manifest.embedder}",
        f"store {settings.store}: KV of {len(entries)} chunks, {num_tokens} tokens, {format_bytes(nbytes)}, for {held}",
        *(f"  {source}" for source in sources[:20]),
        *([f"  ... and {len(sources) - 20} more (--json lists all)"] if len(sources) > 20 else []),
    ]
    _result(facts, "\n".join(lines), json_)


@app.command()
def verify(
    model: ModelOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Drop damaged entries and prefill them again.")] = False,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    json_: JsonOption = False,
) -> None:
    """Read and check every stored byte. Exits 4 when anything is damaged and not repaired."""
    settings = _settings(locals())
    from ragblend.maintenance import verify_store

    report = verify_store(settings.store, settings.index)
    if repair and (report.damaged or report.index_problems):
        from ragblend.maintenance import repair_store

        with _engine(settings) as engine, _open_index(settings, engine) as opened, _progress() as progress:
            report.num_repaired = repair_store(report, engine, opened, progress)
    lines = [f"{report.checked} entries checked, {len(report.damaged)} damaged, {report.orphans} without a chunk"]
    lines += [f"  {key}: {reason}" for key, reason in report.damaged.items()]
    lines += [f"  index: {problem}" for problem in report.index_problems]
    if repair:
        lines.append(f"{report.num_repaired} recomputed")
    elif report.is_bad:
        lines.append("Damaged entries are never used for an answer. Drop and recompute them: ragblend verify --repair")
    _result(report.as_dict(), "\n".join(lines), json_)
    if report.is_bad and not repair:
        raise typer.Exit(EXIT_CORRUPT)


@app.command()
def gc(
    index: IndexOption = None,
    store: StoreOption = None,
    max_size: Annotated[str | None, typer.Option("--max-size", help="Keep at most this much, e.g. 20GiB.")] = None,
    orphans: Annotated[bool, typer.Option("--orphans", help="Also drop KV of chunks no longer indexed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json_: JsonOption = False,
) -> None:
    """Remove leftovers and damaged files, then the least recently used KV beyond --max-size."""
    settings = _settings(locals())
    from ragblend.engine.store import format_bytes, parse_bytes
    from ragblend.maintenance import collect_garbage

    max_bytes = parse_bytes(max_size) if max_size is not None else None
    result = collect_garbage(settings.store, settings.index if orphans else None, max_bytes, dry_run)
    verb = "would be freed" if dry_run else "freed"
    kept = format_bytes(result.kept_bytes)
    text = f"{len(result.evicted)} entries, {format_bytes(result.freed_bytes)} {verb}; {kept} kept"
    _result({**result._asdict(), "dry_run": dry_run}, text, json_)


@app.command()
def doctor(
    model: ModelOption = None, index: IndexOption = None, store: StoreOption = None, json_: JsonOption = False
) -> None:
    """Check this machine: versions, model, embedder, disk; say what is missing and how to mend it."""
    settings = _settings(locals())
    from ragblend.maintenance import examine

    checks = examine(settings)
    lines = [f"{'ok ' if check.ok else 'NO '} {check.name}: {check.finding}" for check in checks]
    lines += [f"     mend: {check.remedy}" for check in checks if not check.ok and check.remedy]
    _result({"checks": [check._asdict() for check in checks]}, "\n".join(lines), json_)
    if not all(check.ok or check.optional for check in checks):
        raise typer.Exit(1)


@app.command()
def demo(
    question: Annotated[
        str | None, typer.Option("--question", help="Ask this instead of the prepared questions.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where the demo keeps its index and store.")] = Path(
        "ragblend-data/demo"
    ),
    json_: JsonOption = False,
) -> None:
    """Ingest a small corpus with the embedded model, then answer questions in all four modes side by side."""
    _quiet()
    from ragblend.demo.show import run_demo

    with _progress() as progress:
        facts = run_demo(directory, question, progress=progress, echo=None if json_ else lambda line: out.print(line))
    if json_:
        _json(facts)


@bench_app.command("ttft")
def bench_ttft(
    shape: Annotated[str | None, typer.Option("--shape", help="Random weights: llama-200m, llama-1b, ...")] = None,
    model: ModelOption = None,
    chunks: Annotated[int, typer.Option("--chunks")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 512,
    question_tokens: Annotated[int, typer.Option("--question-tokens")] = 32,
    ratio: Annotated[float, typer.Option("--ratio")] = 0.15,
    modes: Annotated[str, typer.Option("--modes", help="Comma-separated.")] = "full,prefix,reuse,blend",
    rules: Annotated[str, typer.Option("--rules", help="Comma-separated.")] = "cacheblend",
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; default is torch's choice.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs per mode and prompt.")] = 5,
    questions: Annotated[int, typer.Option("--questions", help="Prompts, chunks shuffled.")] = 1,
    tier: Annotated[str, typer.Option("--tier", help="memory or disk.")] = "memory",
    store: Annotated[Path | None, typer.Option("--store", help="Directory for --tier disk.")] = None,
    device: Annotated[str, typer.Option("--device")] = "cpu",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a bar chart, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Time to first token in the four modes: lookup + load + fuse + first token, warm-up outside, medians."""
    _quiet()
    from ragblend.bench.ttft import bench_ttft as run

    facts = run(
        shape=shape,
        model=model,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        modes=_names(modes),
        rules=_names(rules),
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        questions=questions,
        tier=tier,
        store=store,
        plot=plot,
        seed=seed,
        device=device,
        echo=(lambda line: err.print(line, markup=False)) if json_ else (lambda line: out.print(line, markup=False)),
    )
    _json(facts)


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Set up logging; `--version` prints and exits."""
    if version:
        from ragblend import __version__

        print(__version__)
        raise typer.Exit
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")


# -- what commands share


def _settings(arguments: dict[str, Any]) -> Settings:
    """Settings from a command's arguments, the environment and ragblend.toml."""
    _quiet()
    return load_settings({name: value for name, value in arguments.items() if name in Settings.__dataclass_fields__})


def _quiet() -> None:
    """Keep libraries' bars and advice out of the way before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _engine(settings: Settings, *, new_model: bool = False) -> TransformersEngine:
    from ragblend.engine import load_engine
    from ragblend.errors import NotFoundError

    if not new_model and not Path(settings.store).is_dir():
        raise NotFoundError(f"no store at {settings.store}; fill one: ragblend ingest DOCS --store {settings.store}")
    return load_engine(
        settings.model,
        settings.store,
        dtype=settings.dtype,
        device=settings.device,
        system=settings.system,
        namespace=settings.namespace,
        memory_gib=settings.memory_gib,
        new_model=new_model,
        trust_remote_code=settings.trust_remote_code,
    )


def _open_index(settings: Settings, engine: TransformersEngine) -> ChunkIndex:
    from ragblend.precompute import open_engine_index

    return open_engine_index(settings.index, engine, _embedder(settings), create=False)


def _embedder(settings: Settings) -> str | None:
    return None if settings.embedder == "auto" else settings.embedder


def _search(index: ChunkIndex, question: str, settings: Settings) -> Sequence[SearchHit]:
    if not question.strip():
        raise UsageError("the question is empty; write what you want to know")
    if not index.num_chunks:
        raise EmptyCorpusError(f"the index {settings.index} is empty; add documents: ragblend ingest DOCS")
    order: Any = settings.order
    return index.search(question, settings.k, neighbours=settings.neighbours, order=order)


def _generation(settings: Settings, temperature: float) -> dict[str, Any]:
    return {
        "mode": settings.mode,
        "rule": settings.rule,
        "recompute_ratio": settings.ratio,
        "max_tokens": settings.max_tokens,
        "temperature": temperature,
    }


def _answer(
    engine: TransformersEngine,
    hits: Sequence[SearchHit],
    question: str,
    settings: Settings,
    temperature: float,
    show: bool,
) -> Any:
    from ragblend.segments import SegmentedPrompt

    prompt = SegmentedPrompt([hit.chunk for hit in hits], question, settings.system)
    stream = engine.stream(prompt, **_generation(settings, temperature))
    for piece in stream:
        if show:
            print(piece, end="", flush=True)
    if show:
        print(flush=True)
    return stream.result


def _source(hit: SearchHit) -> dict[str, Any]:
    chunk = hit.chunk
    return {
        "source": chunk.source,
        "start": chunk.start,
        "end": chunk.end,
        "score": round(hit.score, 4),
        "text": chunk.text,
    }


def _print_sources(hits: Sequence[SearchHit]) -> None:
    for number, hit in enumerate(hits, start=1):
        chunk = hit.chunk
        text = " ".join(chunk.text.split())
        shown = text if len(text) <= 160 else text[:157] + "..."
        out.print(f"[{number}] {chunk.source}:{chunk.start}-{chunk.end} ({hit.score:.2f}) {shown}", markup=False)


def _print_ingest(report: Any, settings: Settings, json_: bool) -> None:
    from ragblend.engine.store import format_bytes

    lines = [
        f"{report.num_documents} documents ({report.num_unchanged} unchanged), {report.num_chunks} chunks, "
        f"{report.num_tokens} tokens",
        f"{report.num_new_kv} chunks prefilled in {report.prefill_s:.1f} s, {report.num_known_kv} already stored",
        f"store {settings.store}: {format_bytes(report.store_bytes)}, {format_bytes(report.bytes_per_token)} per token",
        *(f"not read: {failure.path}: {failure.reason}" for failure in report.failures),
    ]
    _result(report.as_dict(), "\n".join(lines), json_)


def _result(facts: dict[str, Any], text: str, json_: bool) -> None:
    if json_:
        _json(facts)
    else:
        out.print(text, markup=False)


def _json(facts: dict[str, Any]) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **facts}, default=str))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress callback that draws bars on stderr, or does nothing where that is no terminal."""
    if not err.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield tell


def main() -> None:
    """Entry point: run a command; print an error as one line and exit with its code."""
    try:
        app()
    except RagblendError as error:
        err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on where this one stopped")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing left to say, and nothing may be said on closing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
