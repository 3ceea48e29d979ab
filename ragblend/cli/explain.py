"""`ragblend explain`: answer a question and show what became of every token. Parse, explain, write, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragblend.cli.support import (
    BackendOption,
    DeviceOption,
    DtypeOption,
    EmbedderOption,
    IndexOption,
    JsonOption,
    KOption,
    MaxTokensOption,
    ModelOption,
    NamespaceOption,
    NeighboursOption,
    OrderOption,
    RatioOption,
    RemoteCodeOption,
    RemoteOption,
    RuleOption,
    StoreOption,
    SystemOption,
    err,
    generation_options,
    open_engine,
    open_index_of,
    out,
    print_json,
    retrieve,
    settings_for_demo,
    settings_from,
    source_facts,
)
from ragblend.errors import UsageError
from ragblend.redaction import redacted


def explain(
    question: Annotated[str, typer.Argument(help="What to answer from the ingested documents.")],
    model: ModelOption = None,
    backend: BackendOption = None,
    index: IndexOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    rule: RuleOption = None,
    ratio: RatioOption = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    order: OrderOption = None,
    max_tokens: MaxTokensOption = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a web page, one FILE.html.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture, FILE.png.")] = None,
    embedder: EmbedderOption = None,
    system: SystemOption = None,
    namespace: NamespaceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = None,
    demo: Annotated[bool, typer.Option("--demo", help="Ask about the demo's corpus; nothing else is needed.")] = False,
    json_: JsonOption = False,
) -> None:
    """Show what blending did to a prompt, token by token, and the answer beside full prefill's."""
    settings = settings_for_demo(locals()) if demo else settings_from(locals())
    if settings.backend != "transformers":
        raise UsageError(
            f"explain compares the KV itself, which {redacted(settings.backend)} keeps; use --backend transformers"
        )
    from ragblend.engine.hf.engine import TransformersEngine
    from ragblend.prompt.prompt import SegmentedPrompt
    from ragblend.upkeep.explain_page import plot_explanation, summary_lines, write_html

    with open_engine(settings) as engine, open_index_of(settings, engine) as opened:
        assert isinstance(engine, TransformersEngine)
        hits = retrieve(opened, question, settings)
        options = generation_options(settings, temperature=0.0)
        prompt = SegmentedPrompt([hit.chunk for hit in hits], question, settings.system)
        explanation = engine.explain(prompt, **{**options, "mode": "blend"})
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
