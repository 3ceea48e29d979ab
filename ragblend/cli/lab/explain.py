"""`ragblend explain`: one prompt, token by token. Parse, retrieve, compare, print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragblend.cli.ask import ENGINE_SETTINGS, PLACE_SETTINGS, SEARCH_SETTINGS
from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import err, out, print_json, source_facts
from ragblend.cli.session import open_engine, open_settings_index, retrieve
from ragblend.config import Settings
from ragblend.errors import UsageError
from ragblend.redaction import redact


@with_settings(
    f"{ENGINE_SETTINGS} rule ratio {SEARCH_SETTINGS} max_tokens {PLACE_SETTINGS}",
    demo="Ask about the demo's corpus; nothing else is needed.",
)
def explain(
    settings: Settings,
    question: Annotated[str, typer.Argument(help="What to answer from the ingested documents.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write a web page, one FILE.html.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show what blending did to a prompt, token by token, and the answer beside full prefill's."""
    if settings.backend != "transformers":
        raise UsageError(
            f"explain compares the KV itself, which {redact(settings.backend)} keeps; use --backend transformers"
        )
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.lab.explain import explain as explain_prompt
    from ragblend.lab.explain_page import plot_explanation, summary_lines, write_html
    from ragblend.prompt.prompt import SegmentedPrompt

    with open_engine(settings) as engine, open_settings_index(settings, engine) as opened:
        assert isinstance(engine, TransformersEngine)
        hits = retrieve(opened, question, settings)
        prompt = SegmentedPrompt([hit.chunk for hit in hits], question, settings.system)
        explanation = explain_prompt(engine, prompt, **replace(settings, mode="blend", temperature=0.0).generation)
    for path, write in ((html, write_html), (png, plot_explanation)):
        if path is not None:
            write(explanation, path)
            err.print(f"{path} written", markup=False)
    if json_:
        print_json({**explanation.as_dict(), "question": question, "sources": [source_facts(hit) for hit in hits]})
        return
    for line in summary_lines(explanation):
        out.print(line, markup=False)
    if html is None and png is None:
        err.print("see every token: add --html explain.html or --png explain.png")
