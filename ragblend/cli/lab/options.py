"""Options that several lab commands share."""

from __future__ import annotations

from typing import Annotated

import typer

PlotOption = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Write a picture, FILE.png.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default is torch's choice.")]
