"""`ragblend ui`: a page on this machine to drop documents on and ask questions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragblend.cli.options import with_settings
from ragblend.cli.printing import print_message
from ragblend.cli.session import open_engine, open_settings_index, retrieve
from ragblend.config import Settings

if TYPE_CHECKING:
    from ragblend.engine.api import Engine
    from ragblend.index import ChunkIndex
    from ragblend.lab.ui.job_queue import UiJob


@with_settings(
    "model backend store rule recompute_ratio k max_tokens",
    demo="Open on the demo's documents, with example questions. Needs no other setting.",
)
def ui(
    settings: Settings,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. Other machines can reach every address except the default."),
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for any free port.")
    ] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Open a page to drop documents, ask, and compare the four modes' answers and tokens.

    Set other settings of `ragblend ingest` and `ragblend ask` through RAGBLEND_NAME or in ragblend.toml.
    """
    from ragblend.lab.ui.app import serve

    def open_both(job: UiJob) -> tuple[Engine, ChunkIndex]:
        engine = open_engine(settings, new_model=True)
        try:
            index = open_settings_index(settings, engine, create=True)
        except BaseException:
            engine.close()
            raise
        return engine, index

    serve(settings, open_both, retrieve, host=host, port=port, browser=browser, notify=print_message)
