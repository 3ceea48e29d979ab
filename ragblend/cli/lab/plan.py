"""`ragblend profile` measures this machine; `ragblend plan` chooses a storage with the profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.cli.options import JsonOption, ThreadsOption, VllmOptions, json_object, with_settings
from ragblend.cli.printing import print_result, progress_bars
from ragblend.cli.session import open_engine, set_num_threads
from ragblend.config import Settings
from ragblend.errors import UsageError
from ragblend.lab.tables import Column, format_table
from ragblend.redaction import redact_url

if TYPE_CHECKING:
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.engine.tuning.loading_controller import MachineProfile
    from ragblend.engine.vllm.engine import VllmEngine
    from ragblend.lab.profile import ProfileConfig


@with_settings("model store remote backend dtype")
def profile(
    settings: Settings,
    chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks of the longest prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of each chunk.")] = 512,
    repeats: Annotated[int, typer.Option("--repeats", help="Measurements per time; the median counts.")] = 3,
    vllm_options: VllmOptions = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Measure the speed of the model, the store's disk and the remote tier, if one is set. Later requests choose their
    recompute ratio, or full prefill, by these speeds.

    `--backend vllm` measures in vLLM, as `ragblend serve` runs it; each backend uses its own times. Set other settings
    through RAGBLEND_NAME or in ragblend.toml.
    """
    set_num_threads(threads)
    if settings.is_served:
        raise UsageError(
            f"backend is {redact_url(settings.backend)!r}, but a profile describes this machine; run ragblend profile "
            "on the server's machine, where its store is: --backend vllm, or transformers"
        )
    if settings.backend == "vllm" and threads is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else vLLM chooses and binds the threads
    from ragblend.engine.store.remote.tier import open_remote
    from ragblend.engine.tuning.machine import write_profile
    from ragblend.lab.profile import ProfileConfig, measure_machine

    effort = ProfileConfig(chunks, chunk_tokens, repeats)
    tier = open_remote(settings.remote, timeout_s=settings.remote_timeout_s) if settings.remote else None
    with (
        closing(tier) if tier is not None else nullcontext(),
        progress_bars() as progress,
        _open_to_measure(settings, effort, json_object(vllm_options, "--vllm-options")) as engine,
    ):
        root = Path(settings.store)
        found = measure_machine(engine, effort, directory=root, remote=tier, on_progress=progress)
        path = write_profile(root, found)
    print_result(found.as_dict(), "\n".join([*profile_lines(found), f"kept in {path}"]), json_)


def plan(
    storage: Annotated[
        list[str],
        typer.Option(
            "--storage", help="NAME:GB_PER_S:USD_PER_GB_MONTH, repeatable; disk::0.08 uses the measured speed."
        ),
    ],
    profile: Annotated[
        str, typer.Option("--profile", metavar="FILE", help="Times of a machine, written by `ragblend profile --json`.")
    ],
    chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks per prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of each chunk.")] = 512,
    ratio: Annotated[
        float | None, typer.Option("--ratio", help="Smallest recompute ratio with good answers. Default: the rule's.")
    ] = None,
    rule: Annotated[
        str, typer.Option("--rule", help="Selection rule. A rule with a query probe waits for most of the KV.")
    ] = "auto",
    usd_per_hour: Annotated[
        float | None,
        typer.Option("--usd-per-hour", help="Price of the machine that prefills, for the break-even."),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Choose the cheapest storage that adds no delay. Prints the monthly cost of 1,000 chunks, and how many uses of a
    chunk repay its prefill.
    """
    from ragblend.engine.fusion.rules import find_rule
    from ragblend.lab.plan import PromptSpec, parse_storage, read_profile
    from ragblend.lab.plan import plan as make_plan

    measured = read_profile(profile)
    known = find_rule(rule, measured.num_layers)
    need = PromptSpec(
        chunks,
        chunk_tokens,
        ratio=known.ratio if ratio is None else ratio,
        usd_per_hour=usd_per_hour,
        probes_before_selection=known.probes_before_selection,
    )
    made = make_plan(measured, [parse_storage(text, measured.bytes_per_s) for text in storage], need)
    print_result(made, "\n".join(plan_lines(made)), json_)


def _open_to_measure(
    settings: Settings, effort: ProfileConfig, vllm_options: dict[str, Any]
) -> AbstractContextManager[TransformersEngine | VllmEngine]:
    """Return the engine that is measured. Raises UsageError if vLLM options are given for another backend."""
    from ragblend.engine.transformers.engine import TransformersEngine
    from ragblend.lab.profile import open_vllm_for_profile

    if settings.backend == "vllm":
        return open_vllm_for_profile(settings, effort, vllm_options)
    if vllm_options:
        raise UsageError("--vllm-options needs --backend vllm")
    engine = open_engine(settings, new_model=True)
    assert isinstance(engine, TransformersEngine)
    return engine


def profile_lines(profile: MachineProfile) -> list[str]:
    """Return the lines to print for a profile."""
    times = ", ".join(f"{tokens:.0f} tokens {seconds:.3g} s" for tokens, seconds in profile.prefill_s)
    shares = ", ".join(f"{ratio:.0%} {share:.1%}" for ratio, share in profile.shares)
    tiers = ", ".join(f"{name} {speed / 1e9:.3g} GB/s" for name, speed in profile.bytes_per_s.items())
    return [f"full prefill: {times}", f"blending, of that time: {shares}", f"reading: {tiers or 'not measured'}"]


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the lines to print for a plan: a table of the storages, cheapest first, and the chosen one."""
    need, cheapest = plan["need"], plan["chosen"]
    lines = [
        f"{need['num_chunks']} chunks x {need['chunk_tokens']} tokens, ratio {need['ratio']:.0%}; full prefill takes "
        f"{plan['full_s']:.3g} s",
        *format_table((*_COLUMNS, *([_USES_PER_MONTH] if need["usd_per_hour"] else []), _NOTE), plan["options"]),
    ]
    if cheapest is None:
        ways = ["a faster one", "a higher ratio"]
        ways += ["a rule that does not wait for most KV (--rule cacheblend)"] if need["probes_before_selection"] else []
        return [*lines, f"every storage adds delay: {', '.join(ways)} or fewer bytes (--dtype) would help"]
    return [*lines, f"{cheapest} is the cheapest that adds no delay"]


_COLUMNS: tuple[Column, ...] = (
    ("storage", "<12", "storage"), ("load s", ">8.3f", "load_s"), ("recompute s", ">12.3f", "recompute_s"),
    ("TTFT s", ">8.3f", "ttft_s"), ("delay", ">7", lambda option: "yes" if option["adds_delay"] else "no"),
    ("hides", ">7.0%", "hidden_ratio"), ("GB/1000", ">9.2f", "gb_per_1000_chunks"),
    ("USD/month", ">11.4f", "usd_per_1000_chunks_month"),
    ("uses to repay", ">15", lambda option: option["reuses_to_repay"] or "never"),
)  # fmt: skip
_USES_PER_MONTH: Column = ("  uses/month", ">12.3g", "reuses_per_month")
_NOTE: Column = ("", "<24", lambda option: "" if option["pays"] else "  full prefill is faster")
