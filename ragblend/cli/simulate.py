"""`ragblend simulate`: replay logs on a model of N replicas, and say what throughput and TTFT they would have."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ragblend.cli.analyze import profile_of, tokens_of
from ragblend.cli.options import JsonOption, split_counts, split_names, takes
from ragblend.cli.printing import count_of, err, listed, print_result, progress_bars
from ragblend.config import Settings
from ragblend.errors import UsageError

if TYPE_CHECKING:
    from ragblend.bench.traffic.demand import Demand
    from ragblend.bench.traffic.deployment import Deployment, Remote, TierSizes
    from ragblend.bench.traffic.reading import LogsRead
    from ragblend.bench.traffic.requests import Marks
    from ragblend.bench.traffic.simulation import SimulatedRun
    from ragblend.bench.traffic.tokens import Tokens
    from ragblend.engine.tuning.pipeline import Curve, MachineProfile

T = TypeVar("T", int, float)


@takes("store backend dtype device trust_remote_code memory_gib")
def simulate(
    settings: Settings,
    trace: Annotated[list[str] | None, typer.Argument(help="Logs of requests: files, folders, or - for stdin.")] = None,
    traffic: Annotated[
        str | None, typer.Option("--traffic", help="Generated traffic instead: sessions, questions or agents.")
    ] = None,
    sessions: Annotated[int, typer.Option("--sessions", help="With --traffic, how many conversations.")] = 1000,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Its tokenizer; a local folder. Without it tokens are estimated."),
    ] = None,
    separator: Annotated[
        str | None, typer.Option("--separator", help="Text that stands around chunks in the prompts.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Times: a file of `ragblend profile --json`; else the model's in the store."),
    ] = None,
    decode: Annotated[
        str,
        typer.Option("--decode", help="Seconds of a decoding step, by the requests in it: 1:0.012,32:0.02."),
    ] = "0",
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Of answers that were not logged.")] = 128,
    replicas: Annotated[str, typer.Option("--replicas", help="How many, comma-separated.")] = "1,2,4,8",
    modes: Annotated[str, typer.Option("--modes", help="Of full, prefix, blend.")] = "full,prefix,blend",
    router: Annotated[
        str, typer.Option("--router", help="round-robin, least-queue, session or chunk.")
    ] = "round-robin",
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests per second, Poisson, instead of the log's times.")
    ] = None,
    speedup: Annotated[float, typer.Option("--speedup", help="Requests come so many times as fast.")] = 1.0,
    rule: Annotated[str, typer.Option("--rule", help="What blending recomputes by.")] = "auto",
    ratio: Annotated[
        float | None,
        typer.Option("--ratio", help="The share that it recomputes; without it what hides behind loading."),
    ] = None,
    disk: Annotated[float, typer.Option("--disk", help="Each replica's disk tier, GiB; 0: no limit.")] = 0.0,
    remote: Annotated[
        float | None,
        typer.Option("--remote-tier", help="The tier that all share, GiB; 0: no limit; else there is none."),
    ] = None,
    remote_gb_per_s: Annotated[
        float | None, typer.Option("--remote-gb-per-s", help="What it sends, to all; else the profile's, or 1.")
    ] = None,
    remote_latency_ms: Annotated[float, typer.Option("--remote-latency-ms", help="Of each fetch.")] = 1.0,
    paged_tokens: Annotated[
        int, typer.Option("--paged-tokens", help="Tokens of a replica's paged KV; 0: no limit.")
    ] = 0,
    max_seqs: Annotated[int, typer.Option("--max-seqs", help="vLLM's --max-num-seqs.")] = 256,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", help="vLLM's --max-num-batched-tokens.")] = 2048,
    overhead_ms: Annotated[
        float, typer.Option("--overhead-ms", help="Per request, before it is in the engine's queue.")
    ] = 0.0,
    ingested: Annotated[
        bool, typer.Option("--ingested", help="Every chunk is stored before the first request.")
    ] = False,
    on_miss: Annotated[
        str, typer.Option("--on-miss", help="store: a missing chunk is precomputed afterwards; inline: it is not.")
    ] = "store",
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, traffic and ties.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw TTFT, throughput and hits, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Tell from logged requests what throughput and TTFT so many replicas would have, in each mode."""
    if plot is not None:
        from ragblend.bench.common.plots import require_matplotlib

        require_matplotlib()
    require_simpy()
    if (traffic is None) == (not trace):
        raise UsageError("give either logs of requests or --traffic questions, which is generated")
    counts = split_counts(replicas)
    if not counts or min(counts) < 1:
        raise UsageError(f"--replicas is {replicas!r}; give one or more counts, such as 1,2,4")
    named = model or (settings.model if settings.model != Settings().model else None)
    measured = profile_of(profile, named, settings)
    if measured is None:
        raise UsageError(
            "a simulation needs this machine's times; measure them: ragblend profile --model MODEL --json > FILE, then "
            "--profile FILE"
        )
    paged = _at_least("--paged-tokens", paged_tokens, 0) or math.inf
    base = _deployment(measured, router, rule, ratio, decode)
    base = replace(
        base,
        batching=base.batching._replace(batch_tokens=batch_tokens, max_seqs=max_seqs, paged_tokens=paged),
        sizes=_sizes(settings.memory_gib, disk, remote),
        remote=_remote(measured, remote_gb_per_s, remote_latency_ms),
        overhead_s=overhead_ms / 1e3, ingested=ingested, stores_misses=_stores(on_miss), seed=seed,
    )  # fmt: skip
    chosen = [_one_of("--modes", each, _modes()) for each in split_names(modes)]
    if not chosen:
        raise UsageError(f"--modes is {modes!r}; give one or more of {', '.join(_modes())}")
    from ragblend.bench.traffic.demand import demand_of
    from ragblend.bench.traffic.simulation import arrivals
    from ragblend.bench.traffic.simulation import simulate as run

    tokens = tokens_of(named, settings)
    with progress_bars() as progress:
        with _logs(trace or [], traffic, sessions, seed, tokens, _marks(separator, settings), progress) as logs:
            demands = demand_of(logs.spool, tokens, _at_least("--output-tokens", output_tokens, 1))
        arrivals_s = arrivals(demands, rate, speedup, seed)
        runs: list[SimulatedRun] = []
        for mode in chosen:
            for count in counts:
                progress("simulate", len(runs), len(chosen) * len(counts))
                runs.append(run(demands, arrivals_s, replace(base, mode=mode), count))
    facts = facts_of(logs, demands, tokens, base, runs)
    if plot is not None:
        from ragblend.bench.traffic.plot import plot_simulation

        plot_simulation(facts, plot)
        err.print(f"plot in {plot}")
    print_result(facts, "\n".join(lines_of(facts, runs)), json_)


def facts_of(
    logs: LogsRead, demands: list[Demand], tokens: Tokens, base: Deployment, runs: list[SimulatedRun]
) -> dict[str, Any]:
    """The JSON object: what was replayed, on what, and what came out."""
    return {
        "traces": list(logs.traces),
        "num_requests": len(demands),
        "num_broken": logs.broken.count,
        "broken": logs.broken.places,
        "num_other": logs.num_other,
        "tokens_by": tokens.name,
        "tokens_are_estimated": tokens.is_estimate,
        "prompt_tokens": sum(each.num_tokens for each in demands) / len(demands),
        "chunk_tokens": sum(each.num_chunk_tokens for each in demands) / len(demands),
        "output_tokens": sum(each.num_output for each in demands) / len(demands),
        "deployment": {name: value for name, value in base.as_dict().items() if name != "mode"},
        "runs": [each.as_dict() for each in runs],
    }


def require_simpy() -> None:
    """Raise ImportError with the install line unless simpy is there."""
    try:
        import simpy  # noqa: F401
    except ImportError as error:
        raise ImportError("ragblend simulate needs simpy: pip install 'ragblend[simulate]'") from error


# -- what is given


def _deployment(profile: MachineProfile, router: str, rule: str, ratio: float | None, decode: str) -> Deployment:
    """Times, rule and router; the rest is the default's."""
    from ragblend.bench.traffic.deployment import ROUTERS, Deployment
    from ragblend.bench.traffic.saving import Kind
    from ragblend.engine.fusion.rules import find_rule

    known = find_rule(rule, profile.num_layers)
    least = known.ratio if ratio is None else ratio
    if not 0 <= least <= 1:
        raise UsageError(f"ratio is {least}; choose 0 to 1")
    kind = Kind(least, known.asks_first, profile.bytes_per_s.get("disk"))
    chosen = _one_of("--router", router, ROUTERS)
    return Deployment(profile, router=chosen, kind=kind, adapts=ratio is None, decode_s=decode_curve(decode))


def decode_curve(text: str) -> Curve:
    """Seconds of a decoding step by the requests in it; one number is for any.

    >>> decode_curve("1:0.01,8:0.02"), decode_curve("0.01")
    (((1.0, 0.01), (8.0, 0.02)), ((1.0, 0.01),))
    """
    from ragblend.engine.tuning.pipeline import ascending

    try:
        pairs = [each.split(":") if ":" in each else ["1", each] for each in text.split(",")]
        points = [(float(requests), float(seconds)) for requests, seconds in pairs]
    except ValueError as error:
        raise UsageError(
            f"--decode is {text!r}; write REQUESTS:SECONDS of a step, such as 1:0.012,32:0.02, or 0.012 for any"
        ) from error
    if not all(math.isfinite(number) and number >= 0 for point in points for number in point):
        raise UsageError(f"--decode is {text!r}; choose 0 or more")
    return ascending(points)


def _sizes(memory_gib: float, disk_gib: float, remote_gib: float | None) -> TierSizes:
    from ragblend.bench.traffic.deployment import TierSizes
    from ragblend.engine.store.open import GIB

    def limit(flag: str, gib: float) -> float:
        return _at_least(flag, gib, 0) * GIB or math.inf

    remote = None if remote_gib is None else limit("--remote-tier", remote_gib)
    return TierSizes(memory_gib * GIB, limit("--disk", disk_gib), remote)


def _remote(profile: MachineProfile, gb_per_s: float | None, latency_ms: float) -> Remote:
    from ragblend.bench.traffic.deployment import Remote
    from ragblend.engine.tuning.pipeline import GB

    speed = profile.bytes_per_s.get("remote", Remote().bytes_per_s) if gb_per_s is None else gb_per_s * GB
    return Remote(speed, latency_ms / 1e3)


def _modes() -> tuple[str, ...]:
    from ragblend.bench.traffic.deployment import SIMULATED_MODES

    return SIMULATED_MODES


def _stores(on_miss: str) -> bool:
    return bool(_one_of("--on-miss", on_miss, ("store", "inline")) == "store")


def _one_of(flag: str, value: str, names: tuple[str, ...]) -> Any:
    if value not in names:
        raise UsageError(f"{flag} is {value!r}; choose one of {', '.join(names)}")
    return value


def _at_least(flag: str, value: T, least: int) -> T:
    if not value >= least:
        raise UsageError(f"{flag} is {value}; choose {least} or more")
    return value


def _marks(separator: str | None, settings: Settings) -> Marks:
    from ragblend.cli.analyze import marks_of

    return marks_of(separator, settings)


def _logs(
    trace: list[str], traffic: str | None, sessions: int, seed: int, tokens: Tokens, marks: Marks, progress: Any
) -> AbstractContextManager[LogsRead]:
    """The logs, or generated traffic, whose chunks are marked."""
    from ragblend.bench.traffic.generate import KINDS, generate
    from ragblend.bench.traffic.reading import entries_read, logs_read

    if traffic is None:
        return logs_read(trace, tokens, marks, progress)
    kind = KINDS[_one_of("--traffic", traffic, tuple(KINDS))]
    made = generate(
        replace(kind, num_sessions=_at_least("--sessions", sessions, 1), seed=seed, marked=True),
        lambda text: len(tokens.ids(text)),
    )
    return entries_read(f"generated {traffic}", made, tokens, marks)


# -- printing


def lines_of(facts: dict[str, Any], runs: list[SimulatedRun]) -> list[str]:
    """What was found, for people."""
    by = "estimated" if facts["tokens_are_estimated"] else f"by {facts['tokens_by']}"
    arriving = "all at once" if runs[0].arriving is None else f"{runs[0].arriving:.3g} per second"
    traces = facts["traces"]
    source = traces[0] if len(traces) == 1 else count_of(traces, "file")
    lines = [
        f"{facts['num_requests']} requests of {source}, {arriving}; "
        f"{facts['prompt_tokens']:.0f} tokens ({by}), {facts['chunk_tokens']:.0f} in chunks, "
        f"{facts['output_tokens']:.0f} answered; {runs[0].router}",
    ]
    if facts["num_broken"]:
        lines.append(f"{facts['num_broken']} broken: {listed(facts['broken'])}")
    lines += [
        "",
        f"{'mode':<7}{'replicas':>9}{'served/s':>10}{'TTFT s':>9}{'p95':>9}{'p99':>9}{'queue s':>9}{'busy':>6}"
        f"{'prefix':>8}  chunks found",
    ]
    for run in runs:
        found = ", ".join(f"{tier} {share:.0%}" for tier, share in run.chunk_hits.items())
        line = (
            f"{run.mode:<7}{run.num_replicas:>9}{run.throughput:>10.4g}{run.ttft_s:>9.3g}{run.ttft_p95_s:>9.3g}"
            f"{run.ttft_p99_s:>9.3g}{run.queue_mean_s:>9.3g}{run.busy:>6.0%}{run.prefix_hits:>8.1%}  {found}"
        )
        lines.append(line.rstrip() + (f"; {run.num_refused} prefilled, which is faster" if run.num_refused else ""))
    if not any(seconds for _, seconds in facts["deployment"]["decode_s"]):
        lines += ["", "decoding takes no time here; say what a step takes: --decode 1:0.012,32:0.02"]
    return lines
