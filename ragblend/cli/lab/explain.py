"""`ragblend explain`: parse the options, build or read one prompt, compare its tokens with full prefill's, print."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import JsonOption, with_settings
from ragblend.cli.printing import print_json, print_line, print_notice, source_facts, waiting_lines
from ragblend.cli.session import open_engine, open_searched_index, opening_title, retrieve
from ragblend.config import Settings
from ragblend.errors import NotFoundError, UsageError
from ragblend.files.output import check_output_path, write_output
from ragblend.redaction import redact_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.index import SearchHit
    from ragblend.prompt.types import Prompt


@with_settings(
    "model store rule recompute_ratio k max_tokens",
    demo="Ask about the demo's documents. Needs no other setting.",
)
def explain(
    settings: Settings,
    question: Annotated[str | None, typer.Argument(help="Question to answer from the ingested documents.")] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            metavar="FILE",
            help="A prompt as an application sent it, instead of QUESTION: JSON messages, an OpenAI request body or "
            "text; - for stdin. Shows why stored texts in it are not reused.",
        ),
    ] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a web page, FILE.html.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show the state of each prompt token after blending, and the difference to full prefill.

    Other settings of `ragblend ask`, such as `namespace`, have no flag here. Give them the values used at ingestion, in
    environment variables (such as RAGBLEND_NAMESPACE) or in ragblend.toml.
    """
    if settings.backend != "transformers":
        raise UsageError(
            f"explain compares KV, which {redact_url(settings.backend)} does not expose; set "
            "RAGBLEND_BACKEND=transformers"
        )
    if (question is None) == (prompt is None):
        raise UsageError("give either a QUESTION or --prompt FILE, the prompt that an application sent")
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.lab.explain import explain as explain_prompt
    from ragblend.lab.explain_page import explanation_lines, render_html
    from ragblend.lab.near_texts import LEAST_SHARE, NUM_WORDS
    from ragblend.lab.prompt_file import read_prompt

    page = check_output_path(html, "--html") if html is not None else None
    sent = read_prompt(prompt) if prompt is not None else None
    with waiting_lines(opening_title(settings)) as progress, open_engine(settings) as engine:
        progress.begin("comparing blended with full prefill")
        assert isinstance(engine, TransformersEngine)
        missed: list[dict[str, Any]] = []
        hits: Sequence[SearchHit] = []
        if sent is not None:
            asked, missed = _read_sent_prompt(engine, sent, settings)
        else:
            asked, hits = _retrieved_prompt(engine, question or "", settings)
        explanation = explain_prompt(engine, asked, **replace(settings, mode="blend", temperature=0.0).generation)
    if page is not None:
        write_output(page, render_html(explanation).encode(), "--html")
        print_notice(f"{page} written")
    if json_:
        facts = {**asdict(explanation), "sources": [source_facts(hit) for hit in hits]}
        facts["question"] = explanation.question if question is None else question
        print_json({**facts, "unmatched_texts": missed})
        return
    for line in explanation_lines(explanation):
        print_line(line)
    is_near = any(each["share"] >= LEAST_SHARE for each in missed)
    if sent is not None and not explanation.report.num_chunks and not is_near:
        run = f"{NUM_WORDS} words in a row in common with it"
        least = f"{LEAST_SHARE:.0%} of its words in parts of at least {run}" if missed else run
        print_line(f"\nno stored text is in this prompt, and none has {least}")
    for each in missed:
        label = "not reused" if is_near else "the nearest stored text"
        print_line(f"\n{label}: {each['name']}{_missed_part(each)}; {each['share']:.0%} of its words are in the prompt")
        print_line(f"  {each['reason']}")
    if html is None:
        print_notice("see every token: add --html explain.html")


def _retrieved_prompt(
    engine: TransformersEngine, question: str, settings: Settings
) -> tuple[Prompt, Sequence[SearchHit]]:
    """Return the prompt of a question and the chunks that the index retrieves for it."""
    from ragblend.prompt.types import Prompt

    with open_searched_index(settings, engine) as opened:
        hits = retrieve(opened, question, settings)
    return Prompt([hit.chunk for hit in hits], question, settings.system), hits


def _read_sent_prompt(
    engine: TransformersEngine, sent: Prompt, settings: Settings
) -> tuple[Prompt, list[dict[str, Any]]]:
    """Return the prompt with its stored chunks named, and the stored texts that are in it in another form."""
    from ragblend.index import open_index
    from ragblend.lab.prompt_file import find_missed_reuse, name_stored_chunks

    with ExitStack() as opened:
        index = None
        with suppress(NotFoundError):  # a store may have only documents of an application
            index = opened.enter_context(open_index(settings.store))
        return name_stored_chunks(engine, sent, index), find_missed_reuse(engine, sent, index)


def _missed_part(missed: Mapping[str, Any]) -> str:
    """Return which tokens of a stored text are not reused, and their beginning unless they are the whole text."""
    from ragblend.corpus.citations import quote_beginning

    num_missed, num_tokens = missed["num_missed_tokens"], missed["num_tokens"]
    if num_missed == num_tokens:
        return f", all {num_tokens} tokens"
    return f", {num_missed} of {num_tokens} tokens: {quote_beginning(missed['missed'])}"
