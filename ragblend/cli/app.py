"""The command line: `ragblend demo`, `ingest`, `ask`, `chat`, ... Results go to stdout, progress and the log to stderr.

Each command parses its arguments, calls one function of the package and prints the result. `--json` prints it as one
JSON object. Exit codes: 0 success, 1 failure, 2 usage error, 3 not found, 4 corrupt, 5 backend unreachable, 6 partial
ingest, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.cli.ask import ask, chat, search
from ragblend.cli.documents import documents, ingest, precompute, remove
from ragblend.cli.groups import HELP_WIDTH, SectionedHelpGroup, examples_epilog, set_help_layout
from ragblend.cli.interrupt import EXIT_INTERRUPTED, handle_interrupt
from ragblend.cli.lab.analyze import analyze
from ragblend.cli.lab.bench import bench_app
from ragblend.cli.lab.calibrate import calibrate
from ragblend.cli.lab.explain import explain
from ragblend.cli.lab.plan import plan, profile
from ragblend.cli.lab.ui import ui
from ragblend.cli.options import SELECTION, JsonOption, how_to_set_without_flag, with_settings
from ragblend.cli.printing import (
    FlagFormatter,
    escape_unprintable,
    print_error,
    print_json,
    print_line,
    print_notice,
    print_result,
    progress_bars,
)
from ragblend.cli.session import limit_torch_to_one_thread, make_terminal_handler, quiet_libraries
from ragblend.cli.store import gc, init_key, push, sign, stats, verify
from ragblend.config import Settings, arguments_to_flags
from ragblend.errors import RagblendError, UsageError
from ragblend.files.places import expand_user_path

app = typer.Typer(
    help="Prefill every RAG chunk once, keep its KV cache, and fuse the chunks' caches at query time.",
    cls=SectionedHelpGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@with_settings("model backend store remote")
def doctor(settings: Settings, ctx: typer.Context, json_: JsonOption = False) -> None:
    """Check this machine: versions, model, embedder, disk, remote tier and vLLM. Prints how to fix what is missing.

    Flags not listed here are vLLM's, such as --enable-lora: would vLLM blend the model with them?
    """
    from ragblend.operations.doctor import run_diagnostics

    checks = [
        check._replace(finding=arguments_to_flags(check.finding), fix=arguments_to_flags(check.fix))
        for check in run_diagnostics(settings, ctx.args)
    ]
    marks = ["ok " if check.ok else "-  " if check.optional else "NO " for check in checks]
    lines = [f"{mark} {check.name}: {check.finding}" for mark, check in zip(marks, checks, strict=True)]
    for words, optional in (("to fix", False), ("if you need it", True)):
        missing = [check for check in checks if not check.ok and check.optional is optional and check.fix]
        lines += [f"{words}, {check.name}: {check.fix}" for check in missing]
    facts = [
        {"remedy" if name == "fix" else name: value for name, value in check._asdict().items()} for check in checks
    ]
    print_result({"checks": facts}, "\n".join(lines), json_)
    if not all(check.ok or check.optional for check in checks):
        raise typer.Exit(1)


@with_settings(
    "store remote mode rule recompute_ratio system context dtype trust_remote_code",
    unflagged=f"kv_dtype refine_ratio {SELECTION}",
)
def serve(
    settings: Settings,
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="'demo', a Hugging Face id or a local path.")],  # sets `settings.model`
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="RAGBLEND_API_KEY", help="Key that clients must send.")
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            "--api-keys-file",
            metavar="FILE",
            envvar="RAGBLEND_API_KEYS_FILE",
            help="TOML or JSON file of API keys with their namespaces and rights.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and do not run it.")] = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with chunk KV from a store. Flags not listed here are passed to vLLM."""
    from ragblend.operations.serve import build_server_command
    from ragblend.operations.serve import serve as run

    unflagged = serve.unflagged  # type: ignore[attr-defined]  # vLLM would reject these flags without a reason
    for argument in ctx.args:
        if hint := how_to_set_without_flag(argument, unflagged):
            raise UsageError(f"ragblend serve has no {argument.partition('=')[0]}; {hint}")
    keys_file = None if keys is None else expand_user_path(keys, "--api-keys-file")
    options: dict[str, Any] = {"host": host, "port": port, "api_key": api_key, "keys": keys_file}
    if dry_run:
        print(build_server_command(settings, ctx.args, **options).display_command())
        return
    print_notice(
        f"starting vLLM with {settings.model} and the store {settings.store}; clients: --backend http://{host}:{port}"
    )
    run(settings, ctx.args, **options)


def demo(
    question: Annotated[
        str | None, typer.Option("--question", help="Ask this question instead of the prepared ones.")
    ] = None,
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Folder of the demo's corpus, index and store.")
    ] = "ragblend-data/demo",
    json_: JsonOption = False,
) -> None:
    """Ingest a small corpus and answer questions in all four modes. Uses the small model that the package contains."""
    limit_torch_to_one_thread()
    quiet_libraries()
    from ragblend.demo.show import run_demo

    with progress_bars() as progress:
        facts = run_demo(directory, question, progress=progress, echo=None if json_ else print_line)
    if json_:
        print_json(facts)


VLLM_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # flags that are not listed are vLLM's
for _command in (
    demo,
    ui,
    doctor,
    ingest,
    precompute,
    documents,
    remove,
    ask,
    chat,
    search,
    explain,
    serve,
    stats,
    verify,
    gc,
    push,
    init_key,
    sign,
    calibrate,
    profile,
    plan,
    analyze,
):  # in the order of GROUPS
    app.command(context_settings=VLLM_FLAGS if _command in (doctor, serve) else None)(_command)
app.add_typer(bench_app, name="bench", epilog=examples_epilog("bench"))
set_help_layout(app)
set_help_layout(bench_app, "bench ")


def _print_version(wanted: bool) -> None:
    if wanted:
        from ragblend import __version__

        print(__version__)
        raise typer.Exit


@app.callback(context_settings={"max_content_width": HELP_WIDTH})
def root(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr at level INFO.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Set up logging."""
    handler = make_terminal_handler(verbose)
    handler.setFormatter(FlagFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def main() -> None:
    """Run a command. An error is printed as one line; the exit code is the error's."""
    escape_unprintable()
    try:
        with handle_interrupt(sys.argv[1:]):
            app()
    except RagblendError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ImportError as error:
        if "pip install" not in str(error):  # every other ImportError is a bug
            raise
        print_error(error)
        sys.exit(RagblendError.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # stdout's reader has gone (`| head`); without this, flushing stdout at exit would fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        from ragblend.files.directory import DISK_FULL_ERRNOS, make_write_error

        if error.errno not in DISK_FULL_ERRNOS:
            raise
        print_error(make_write_error(error, Path(error.filename or ".")))
        sys.exit(RagblendError.exit_code)


if __name__ == "__main__":
    main()
