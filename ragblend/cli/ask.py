"""`ragblend ask | chat | search`: parse the arguments, retrieve chunks, answer, print."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ragblend.cli.options import SELECTION, JsonOption, ShowSources, with_settings
from ragblend.cli.printing import (
    print_json,
    print_line,
    print_notice,
    print_sources,
    source_facts,
    wait_and_print_shadow,
    waiting_lines,
)
from ragblend.cli.session import embedder_name, open_engine, open_searched_index, opening_title, retrieve
from ragblend.config import Settings

ENGINE_SETTINGS = "model backend store remote"
_UNFLAGGED = (
    f"device dtype embedder namespace neighbours order refine_ratio shadow temperature trust_remote_code {SELECTION}"
)


@with_settings(f"{ENGINE_SETTINGS} mode rule recompute_ratio k max_tokens system", unflagged=_UNFLAGGED)
def ask(
    settings: Settings,
    question: Annotated[str, typer.Argument(help="Question to answer from the ingested documents.")],
    show_sources: ShowSources = False,
    json_: JsonOption = False,
) -> None:
    """Answer a question from the fused KV caches of the chunks that it retrieves.

    On a terminal the answer is printed as it is generated, otherwise when it is complete.
    """
    from ragblend.prompt.types import Prompt

    streams = not json_ and sys.stdout.isatty()
    with (
        waiting_lines(opening_title(settings)) as progress,
        open_engine(settings) as engine,
        open_searched_index(settings, engine) as opened,
    ):
        progress.begin("answering")
        hits = retrieve(opened, question, settings)
        stream = engine.stream(Prompt([hit.chunk for hit in hits], question, settings.system), **settings.generation)
        for piece in stream:
            if streams:
                print(piece, end="", flush=True)
        answer = stream.result
        if not json_:
            print_line("" if streams else answer.text)
        wait_and_print_shadow(engine, settings)
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
    print_notice(answer.report.summary())


@with_settings(
    f"{ENGINE_SETTINGS} k max_tokens system",
    unflagged=f"{_UNFLAGGED} mode recompute_ratio rule",
    demo="Chat about the demo's documents. Needs no other setting.",
)
def chat(
    settings: Settings,
    show_sources: ShowSources = False,
    condense: Annotated[
        bool | None,
        typer.Option(
            "--condense/--no-condense",
            help="Let the model rewrite a follow-up into a self-contained question, and search for that. "
            "Default: on, except for the embedded model, which cannot rewrite questions.",
        ),
    ] = None,
) -> None:
    """Ask one question after another. The KV of earlier turns is kept unchanged; new chunks are blended after it.

    A follow-up may refer to earlier turns, so the model first rewrites it into the question to search for.
    """
    from ragblend.engine.transformers.checkpoints import DEMO
    from ragblend.frameworks.conversation import ChatSession

    with open_engine(settings) as engine, open_searched_index(settings, engine) as opened:
        session = ChatSession(engine, system=settings.system)
        condenses = engine.name != DEMO if condense is None else condense
        print_notice("Ask a question; an empty line or Ctrl-D ends the chat.")
        if not condenses and condense is None:
            print_notice("The embedded model cannot rewrite questions: follow-ups are searched for as they are typed.")
        while True:
            try:
                question = input("> ").strip() if sys.stdin.isatty() else sys.stdin.readline().strip()
            except EOFError:
                break
            if not question:
                break
            query = session.condense(question) if condenses else question
            if condenses and session.has_answers:
                print_notice(f"searching for: {query}")
            hits = retrieve(opened, query, settings)
            stream = session.stream([hit.chunk for hit in hits], question, **settings.generation)
            for piece in stream:
                print(piece, end="", flush=True)
            print(flush=True)
            if show_sources:
                print_sources(hits)
            print_notice(stream.result.report.summary())
        wait_and_print_shadow(engine, settings)


@with_settings("store k neighbours", unflagged="embedder order")
def search(
    settings: Settings,
    question: Annotated[str, typer.Argument(help="Question to search for.")],
    json_: JsonOption = False,
) -> None:
    """Print the chunks that a question retrieves, without an answer."""
    from ragblend.index import open_index

    with open_index(settings.store, embedder_name(settings)) as opened:
        hits = retrieve(opened, question, settings)
    if json_:
        print_json({"question": question, "sources": [source_facts(hit) for hit in hits]})
    else:
        print_sources(hits)
