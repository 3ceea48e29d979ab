"""`ragblend explain`: compare one prompt's tokens. Parse the options, retrieve, compare, print."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import print_json, print_line, print_notice, source_facts, waiting_lines
from ragblend.cli.session import open_engine, open_searched_index, retrieve
from ragblend.config import Settings
from ragblend.errors import UsageError
from ragblend.files.output import check_output
from ragblend.redaction import redact


@with_settings(
    "model store rule ratio k max_tokens",
    demo="Ask about the demo's documents. Needs no other setting.",
)
def explain(
    settings: Settings,
    question: Annotated[str, typer.Argument(help="Question to answer from the ingested documents.")],
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a web page, one FILE.html.")] = None,
    png: Annotated[str | None, typer.Option("--png", metavar="FILE", help="Write a picture, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show the state of each prompt token after blending, and the difference to full prefill.

    Set other settings of `ragblend ask` through RAGBLEND_NAME or in ragblend.toml, with the values of the ingestion.
    """
    if settings.backend != "transformers":
        raise UsageError(
            f"explain compares KV, which {redact(settings.backend)} does not expose; set RAGBLEND_BACKEND=transformers"
        )
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.lab.explain import explain as explain_prompt
    from ragblend.lab.explain_page import plot_explanation, summary_lines, write_html
    from ragblend.lab.plots import check_plot
    from ragblend.prompt.types import Prompt

    page, picture = check_output(html, "--html") if html is not None else None, check_plot(png, "--png")
    with (
        waiting_lines("comparing"),
        open_engine(settings) as engine,
        open_searched_index(settings, engine) as opened,
    ):
        assert isinstance(engine, TransformersEngine)
        hits = retrieve(opened, question, settings)
        prompt = Prompt([hit.chunk for hit in hits], question, settings.system)
        explanation = explain_prompt(engine, prompt, **replace(settings, mode="blend", temperature=0.0).generation)
    for path, write in ((page, write_html), (picture, plot_explanation)):
        if path is not None:
            write(explanation, path)
            print_notice(f"{path} written")
    if json_:
        print_json({**explanation.as_dict(), "question": question, "sources": [source_facts(hit) for hit in hits]})
        return
    for line in summary_lines(explanation):
        print_line(line)
    if html is None and png is None:
        print_notice("see every token: add --html explain.html or --png explain.png")
