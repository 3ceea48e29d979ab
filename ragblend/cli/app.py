"""The command line: `ragblend demo`, `ingest`, `ask`, `chat`, ... Results on stdout, progress and log on stderr.

Each command parses, calls one function of the package and prints. `--json` prints the same facts as one JSON object.
Exit codes: 0 ok, 1 failure, 2 usage, 3 missing, 4 corrupt, 5 backend unreachable, 6 partial ingest, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ragblend.cli.bench import bench_app
from ragblend.cli.calibrate import calibrate_app
from ragblend.cli.explain import explain
from ragblend.cli.plan import register as register_plan
from ragblend.cli.store import gc, pin, push, stats, unpin, verify
from ragblend.cli.support import (
    BackendOption,
    DeviceOption,
    DocumentArgument,
    DtypeOption,
    EmbedderOption,
    IndexOption,
    JsonOption,
    KOption,
    KvDtypeOption,
    MaxTokensOption,
    ModelOption,
    ModeOption,
    NamespaceOption,
    NeighbourKvOption,
    NeighboursOption,
    OrderOption,
    RatioOption,
    RemoteCodeOption,
    RemoteOption,
    RuleOption,
    ShadowOption,
    StoreOption,
    SystemOption,
    TemperatureOption,
    answer_question,
    count_of,
    embedder_name,
    err,
    generation_options,
    one_thread,
    open_engine,
    open_index_of,
    out,
    print_ingest,
    print_json,
    print_result,
    print_shadow,
    print_sources,
    progress_bars,
    quiet_libraries,
    retrieve,
    settings_for_demo,
    settings_from,
    source_facts,
    tier_options,
    wait_for_remote,
)
from ragblend.cli.trust import init_key, sign
from ragblend.errors import RagblendError

EXIT_PARTIAL, EXIT_INTERRUPTED = 6, 130

app = typer.Typer(
    help="Prefill every RAG chunk once, keep its KV cache, and fuse the retrieved chunks' caches at query time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def ingest(
    paths: Annotated[list[str], typer.Argument(help="Files or folders: txt, md, html, csv, json, jsonl, pdf.")],
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    chunk_size: Annotated[
        int | None, typer.Option("--chunk-size", help="Most tokens per chunk; else the index's own, 512 in a new one.")
    ] = None,
    glob: Annotated[str, typer.Option("--glob", help="Only files in folders that match.")] = "*",
    keep_missing: Annotated[
        bool, typer.Option("--keep-missing", help="Drop nothing: keep documents whose files or records are gone.")
    ] = False,
    precompute: Annotated[bool, typer.Option("--precompute/--no-precompute", help="Also prefill the chunks.")] = True,
    neighbour_kv: NeighbourKvOption = None,
    embedder: EmbedderOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Chunk, embed, index and precompute documents. Run it again after an interruption: it goes on where it was.

    Run again later, it follows: edited documents are replaced, those whose file or record is gone are dropped.
    """
    settings = settings_from(locals())
    from ragblend.precompute import ingest as run

    with open_engine(settings, new_model=True) as engine, progress_bars() as progress:
        report = run(
            list(paths),
            engine,
            settings.index,
            chunk_size=settings.chunk_size,
            glob=glob,
            precompute=precompute,
            keep_missing=keep_missing,
            neighbour_kv=settings.neighbour_kv,
            max_file_mib=settings.max_file_mib,
            embedder=embedder_name(settings),
            progress=progress,
            say=err.print,
        )
        wait_for_remote(engine, progress)
    print_ingest(report, settings, json_)
    if report.failures:
        raise typer.Exit(EXIT_PARTIAL)


@app.command()
def precompute(
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    neighbour_kv: NeighbourKvOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Fill the store with the KV of every indexed chunk, for a new model, dtype or system text.

    --kv-dtype rewrites what is stored otherwise: from auto to int8 or fp8 without prefilling, back by prefilling.
    """
    settings = settings_from(locals())
    from ragblend.precompute import disk_bytes, precompute_chunks, with_neighbours

    with (
        open_engine(settings, new_model=True) as engine,
        open_index_of(settings, engine) as opened,
        progress_bars() as progress,
    ):
        chunks, rewrite = list(opened.chunks()), kv_dtype is not None
        chunks = with_neighbours(chunks) if settings.neighbour_kv else chunks
        report = precompute_chunks(chunks, engine, progress, say=err.print, rewrite=rewrite)
        report.num_chunks, report.num_documents = opened.num_chunks, opened.num_documents
        report.store_bytes = disk_bytes(engine)
        wait_for_remote(engine, progress)
    print_ingest(report, settings, json_)


@app.command()
def remove(
    document: DocumentArgument,
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    json_: JsonOption = False,
) -> None:
    """Forget documents: chunks, pins, and KV and texts that no other document has. What is still there comes back with
    the next `ingest` of its folder. Killed, or with the remote tier down (exit 5), the same command does the rest."""
    settings = settings_from(locals())
    from ragblend.precompute import find_documents, remove_documents

    with open_engine(settings) as engine, open_index_of(settings, engine) as opened:
        sources = find_documents(document, opened, gone=True)
        num_chunks, num_kv = remove_documents(sources, engine, opened)
    facts = {"document": document, "sources": sources, "num_chunks": num_chunks, "num_kv": num_kv}
    text = f"{document}: {count_of(sources, 'document')}, {num_chunks} chunks and {num_kv} KV caches removed"
    print_result(facts, text, json_)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to answer from the ingested documents.")],
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    mode: ModeOption = None,
    rule: RuleOption = None,
    ratio: RatioOption = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    order: OrderOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    shadow: ShadowOption = None,
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
    settings = settings_from(locals())
    with open_engine(settings) as engine, open_index_of(settings, engine) as opened:
        hits = retrieve(opened, question, settings)
        answer = answer_question(engine, hits, question, settings, temperature, stream and not json_)
        if not stream and not json_:
            out.print(escape(answer.text))
        print_shadow(engine, settings)
    if json_:
        print_json(
            {
                "question": question,
                "answer": answer.text,
                "sources": [source_facts(hit) for hit in hits],
                "mode": answer.report.mode,
                "finish_reason": answer.finish_reason,
                "report": answer.report.as_dict(),
            }
        )
        return
    if show_sources:
        print_sources(hits)
    err.print(answer.report.summary())


@app.command()
def chat(
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    mode: ModeOption = None,
    rule: RuleOption = None,
    ratio: RatioOption = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    order: OrderOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    shadow: ShadowOption = None,
    show_sources: Annotated[bool, typer.Option("--show-sources", help="Print the retrieved chunks.")] = False,
    embedder: EmbedderOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    demo: Annotated[bool, typer.Option("--demo", help="Chat about the demo's corpus; nothing else is needed.")] = False,
    condense: Annotated[
        bool | None,
        typer.Option(
            "--condense/--no-condense",
            help="Have the model rewrite a follow-up into a question that stands alone, and search for that. "
            "On, but for the embedded model, which cannot.",
        ),
    ] = None,
) -> None:
    """Ask one question after another. Earlier turns stay as exact prefix; new chunks are blended behind them.

    What a follow-up refers to is in the turns before it, so the model is asked first what to search for.
    """
    settings = settings_for_demo(locals()) if demo else settings_from(locals())
    from ragblend.engine.hf.model import DEMO
    from ragblend.frameworks.conversation import ChatSession

    with open_engine(settings) as engine, open_index_of(settings, engine) as opened:
        session = ChatSession(engine, system=settings.system)
        condenses = engine.name != DEMO if condense is None else condense
        err.print("Ask a question; an empty line or Ctrl-D ends the chat.")
        if not condenses and condense is None:
            err.print("The embedded model cannot rephrase: follow-ups are searched for as they are typed.")
        while True:
            try:
                question = input("> ").strip() if sys.stdin.isatty() else sys.stdin.readline().strip()
            except EOFError:
                break
            if not question:
                break
            query = session.condense(question) if condenses else question
            if condenses and session.has_answers:
                err.print(f"searching for: {query}", markup=False)
            hits = retrieve(opened, query, settings)
            stream = session.stream([hit.chunk for hit in hits], question, **generation_options(settings, temperature))
            for piece in stream:
                print(piece, end="", flush=True)
            print(flush=True)
            if show_sources:
                print_sources(hits)
            err.print(stream.result.report.summary())
        print_shadow(engine, settings)


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
    settings = settings_from(locals())
    from ragblend.index import open_index

    with open_index(settings.index, embedder_name(settings)) as opened:
        hits = retrieve(opened, question, settings)
    if json_:
        print_json({"question": question, "sources": [source_facts(hit) for hit in hits]})
    else:
        print_sources(hits)


@app.command()
def doctor(
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    json_: JsonOption = False,
) -> None:
    """Check this machine: versions, model, embedder, disk, remote tier, vLLM; say what is missing, how to mend it."""
    settings = settings_from(locals())
    from ragblend.upkeep.doctor import examine

    checks = examine(settings)
    lines = [f"{'ok ' if check.ok else 'NO '} {check.name}: {check.finding}" for check in checks]
    lines += [f"     mend: {check.remedy}" for check in checks if not check.ok and check.remedy]
    print_result({"checks": [check._asdict() for check in checks]}, "\n".join(lines), json_)
    if not all(check.ok or check.optional for check in checks):
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="'demo', a Hugging Face id or a local path.")],
    store: StoreOption = None,
    remote: RemoteOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="RAGBLEND_API_KEY", help="Clients must send it.")
    ] = None,
    rule: RuleOption = None,
    ratio: RatioOption = None,
    separator: Annotated[
        str | None, typer.Option("--separator", help="Text that plain clients put around chunks in their prompts.")
    ] = None,
    separator_end: Annotated[
        str | None, typer.Option("--separator-end", help="Ends the last chunk, where --separator opens each.")
    ] = None,
    system: SystemOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    trust_remote_code: RemoteCodeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command that would run.")] = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with chunk KV from a store. Further flags go to vLLM as they are."""
    settings = settings_from(locals())
    from ragblend.upkeep.serve import ServeOptions, prepare
    from ragblend.upkeep.serve import serve as run

    options = ServeOptions(
        model=model,
        store=settings.store,
        host=host,
        port=port,
        api_key=api_key,
        dtype=settings.dtype,
        ratio=settings.ratio,
        rule=rule,
        separator=separator,
        separator_end=separator_end,
        system=settings.system,
        tiers=tier_options(settings),
        trust_remote_code=settings.trust_remote_code,
    )
    if dry_run:
        print(prepare(options, context.args).shown())
        return
    err.print(f"starting vLLM with {model} and the store {settings.store}; clients: --backend http://{host}:{port}")
    run(options, context.args)


@app.command()
def demo(
    question: Annotated[
        str | None, typer.Option("--question", help="Ask this instead of the prepared questions.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where the demo keeps its corpus, index and store.")] = Path(
        "ragblend-data/demo"
    ),
    json_: JsonOption = False,
) -> None:
    """Ingest a small corpus with the embedded model, then answer questions in all four modes side by side."""
    one_thread()
    quiet_libraries()
    from ragblend.demo.show import run_demo

    with progress_bars() as progress:
        facts = run_demo(directory, question, progress=progress, echo=None if json_ else lambda line: out.print(line))
    if json_:
        print_json(facts)


for _command in (explain, push, pin, unpin, stats, verify, gc, init_key, sign):
    app.command()(_command)
app.add_typer(calibrate_app)
register_plan(app)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from ragblend import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Set up logging."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")


def main() -> None:
    """Entry point: run a command; print an error as one line and exit with its code."""
    try:
        app()
    except RagblendError as error:
        err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(error.exit_code)
    except ImportError as error:
        if "pip install" not in str(error):  # an extra that is not installed says how to install it; the rest is a bug
            raise
        err.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
        sys.exit(RagblendError.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted; the same command goes on where this one stopped")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing left to say, and nothing may be said on closing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        from ragblend.files.directory import FULL, refusal

        if error.errno not in FULL:
            raise
        err.print(f"error: {refusal(error, Path(error.filename or '.'))}", markup=False, style="red", soft_wrap=True)
        sys.exit(RagblendError.exit_code)


if __name__ == "__main__":
    main()
