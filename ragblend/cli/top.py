"""`ragblend top`: what running vLLM servers do, in a terminal, until Ctrl-C."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ragblend.cli.options import JsonOption
from ragblend.cli.printing import err, out, print_json
from ragblend.errors import BackendUnreachableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ragblend.upkeep.top import Look, Now, Spread

LEAST_EVERY_S = 0.2
CELL = 16  # letters: four of them stand in 80 columns


def top(
    url: Annotated[list[str] | None, typer.Argument(help="Servers to sum up; default http://localhost:8000.")] = None,
    every: Annotated[float, typer.Option("--every", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look: totals since the servers began.")] = False,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="RAGBLEND_API_KEY", help="Where /metrics needs one.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Watch running vLLM servers: requests, time to first token by mode, chunks found, tokens reused, store, errors."""
    from ragblend.upkeep.top import between, look

    urls = url or ["http://localhost:8000"]
    if every < LEAST_EVERY_S:
        raise UsageError(f"--every is {every:g} s; choose {LEAST_EVERY_S:g} or more")
    first = look(urls, api_key)
    if once or not (json_ or out.is_terminal):
        now = between(None, first)
        if json_:
            print_json({"servers": urls, **now.as_dict()})
        else:
            out.print(view(urls, now))
        return
    with suppress(KeyboardInterrupt):  # which is how one leaves
        if json_:
            for now in _watch(urls, api_key, every, first, lambda error: err.print(f"{error}", markup=False)):
                print_json({"servers": urls, **now.as_dict()})
            return
        with Live(view(urls, between(None, first)), console=out, screen=True, auto_refresh=False) as live:

            def tell(error: Exception) -> None:
                live.update(Text(f"{error}", style="red"), refresh=True)

            for now in _watch(urls, api_key, every, first, tell):
                live.update(view(urls, now), refresh=True)


def _watch(
    urls: Sequence[str], api_key: str | None, every: float, before: Look, tell: Callable[[Exception], None]
) -> Iterator[Now]:
    """What happens from look to look, without end. A server that is away, as one that starts anew is, ends nothing."""
    from ragblend.upkeep.top import between, look

    while True:
        time.sleep(every)
        try:
            after = look(urls, api_key)
        except BackendUnreachableError as error:
            tell(error)
            continue
        yield between(before, after)
        before = after


def view(urls: Sequence[str], now: Now) -> Group:
    """The page."""
    total = now.seconds is None
    per = "" if total else "/s"
    head = Text.assemble(
        (", ".join(urls), "bold"),
        f"  {', '.join(now.models)}  ",
        ("since they began" if total else f"over {now.seconds:.1f} s", "dim"),
    )
    lines = [head, Text()]

    def row(name: str, *cells: tuple[str, str]) -> None:
        line = Text(f"{name:<15}", style="bold", no_wrap=True, overflow="ellipsis")
        for what, value in cells:
            cell = Text.assemble((value, "not bold"), (f" {what}", "not bold dim"))
            cell.pad_right(max(2, CELL - len(cell)))
            line.append_text(cell)
        lines.append(line)

    def rate(value: float) -> str:
        return f"{_number(value)}{per}"

    row(
        "requests",
        ("running", str(now.running)),
        ("waiting", str(now.waiting)),
        ("to fill", str(now.to_fill)),
        ("finished", rate(now.finished_s)),
    )
    row("  of ragblend", ("asked", rate(now.asked_s)), ("refused", rate(now.refused_s)))
    for mode, spread in now.ttft.items():
        row("first token" if mode == "any" else f"  {mode}", *_cells(spread))
    for part, spread in now.parts.items():
        row(f"  {part}", *_cells(spread))
    row(
        "chunks",
        ("found", "-" if now.found is None else f"{now.found:.1%}"),
        ("hits", rate(now.chunk_hits_s)),
        ("missed", rate(now.chunk_misses_s)),
        ("ingested", rate(now.ingested_s)),
    )
    row(
        "tokens",
        ("reused", rate(now.reused_tokens_s)),
        ("recomputed", rate(now.recomputed_tokens_s)),
    )
    row("  of all", ("in prompts", rate(now.prompt_tokens_s)), ("generated", rate(now.generated_tokens_s)))
    for name, tier in now.tiers.items():
        from ragblend.engine.store.tiered import format_bytes

        row(
            f"store, {name}",
            ("held", format_bytes(int(tier.nbytes))),
            ("hits", rate(tier.hits_s)),
            ("evicted", rate(tier.evictions_s)),
        )
    row(
        "remote",
        ("hits", rate(now.remote_hits_s)),
        ("failures", rate(now.remote_failures_s)),
        ("not sent", rate(now.remote_dropped_s)),
    )
    row("damaged", ("entries since they began", str(now.damaged)))
    return Group(*lines)


def _cells(spread: Spread) -> list[tuple[str, str]]:
    times = [("median", spread.median), ("95th", spread.p95)]
    return [(what, "-" if value is None else f"{value:.3g} s") for what, value in times] + [
        ("requests", str(spread.count))
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
