"""`ragblend profile` measures this machine; `ragblend plan` chooses a storage by measured or predicted times."""

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
from ragblend.config import Settings, load_settings, write_user_setting
from ragblend.engine.store.format.sizes import format_bytes
from ragblend.errors import UsageError
from ragblend.lab.tables import Column, format_table
from ragblend.option_fields import default_of
from ragblend.options import GenerationOptions
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
        measured = measure_machine(engine, effort, directory=root, remote=tier, on_progress=progress)
        path = write_profile(root, measured)
    print_result(measured.as_dict(), "\n".join([*profile_lines(measured), f"kept in {path}"]), json_)


@with_settings("model dtype kv_dtype")
def plan(
    settings: Settings,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Predict the times of this hardware from data sheets: L4, A10, A100, H100, H200, cpu, or cpu:CORES.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="FILE", help="Times of a machine, written by `ragblend profile --json`."),
    ] = None,
    corpus: Annotated[
        str | None, typer.Option("--corpus", metavar="SIZE", help="Bytes of the documents' plain text, such as 100GB.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Host memory for stored KV, such as 256GB.")
    ] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            help="NAME:GB_PER_S:USD_PER_GB_MONTH:LATENCY_MS, repeatable; disk::0.08 uses the measured speed. nvme, "
            "redis and s3 need no numbers. Default: these three.",
        ),
    ] = None,
    place: Annotated[
        list[str] | None,
        typer.Option(
            "--place",
            metavar="NAME=PLACE",
            help="Folder or remote tier's URL of a storage, repeatable. The chosen one becomes the user's kv_dir or "
            "remote.",
        ),
    ] = None,
    chunks: Annotated[int, typer.Option("--num-chunks", help="Chunks per prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Tokens of each chunk.")] = 512,
    recompute_ratio: Annotated[
        float | None, typer.Option("--ratio", help="Smallest recompute ratio with good answers. Default: the rule's.")
    ] = None,
    rule: Annotated[
        str, typer.Option("--rule", help="Selection rule. A rule with a query probe waits for most of the KV.")
    ] = default_of(GenerationOptions, "rule"),
    json_: JsonOption = False,
) -> None:
    """Plan the store: its size, what fits where, times and prices.

    With --gpu, the transformers engine's times are predicted from data sheets, and of the model only the config is
    read. With --profile they are measured ones. Prints the size of the store, the prompt length from which blending
    pays, and the cheapest storage that adds no delay. With --place, later commands and servers keep KV in that storage.
    """
    from ragblend.engine.fusion.rules import find_rule
    from ragblend.lab.hardware import find_hardware, predict_profiles
    from ragblend.lab.model_sizes import read_model_sizes
    from ragblend.lab.plan import (
        STORAGES,
        PromptSpec,
        always,
        describe_store,
        limit_to_engine,
        parse_places,
        parse_storage,
        read_profile,
    )
    from ragblend.lab.plan import plan as make_plan

    if gpu is not None and profile is not None:
        raise UsageError(f"--gpu {gpu} predicts times and --profile {profile} has measured ones; give one of them")
    measured = read_profile(profile) if profile is not None else None
    hardware = find_hardware(gpu) if gpu is not None else None
    sizes = None
    if settings.model is not None:
        is_gpu = hardware is None or hardware.is_gpu
        sizes = read_model_sizes(settings.model, settings.model_options, "cuda" if is_gpu else "cpu")
    named = storage or [each.partition("=")[0] for each in place or ()] or STORAGES
    storages = [parse_storage(text, measured.bytes_per_s if measured is not None else {}) for text in named]
    places = parse_places(place, [each.name for each in storages]) if place else {}
    if measured is not None:
        num_layers = measured.num_layers
    elif sizes is not None:
        num_layers = sizes.layers
    else:
        raise UsageError(
            "plan needs a model or a machine: --model MODEL --gpu NAME predicts from data sheets, --profile FILE has "
            "measured times (ragblend profile --model MODEL --json > FILE)"
        )
    selection_rule = find_rule(rule, num_layers)
    prompt = PromptSpec(
        chunks,
        chunk_tokens,
        ratio=selection_rule.ratio if recompute_ratio is None else recompute_ratio,
        probes_before_selection=selection_rule.probes_before_selection,
    )
    store = describe_store(sizes, measured, hardware, settings.kv_dtype, corpus, memory)
    facts: dict[str, Any] = {"model": settings.model, "predicted_for": None, **store}
    num_tokens = store["corpus"]["tokens"] if store["corpus"] is not None else 0
    if measured is not None:
        facts |= make_plan(always(measured), storages, prompt, num_corpus_tokens=num_tokens)
    elif sizes is not None and hardware is not None:
        profile_at = predict_profiles(
            sizes, hardware, selection_rule, prompt.question_tokens, prompt.ratio, settings.kv_dtype
        )
        storages = [limit_to_engine(each) for each in storages]
        facts |= make_plan(profile_at, storages, prompt, sizes.context_length, num_tokens)
        facts["predicted_for"] = hardware.name
    if places:
        if "options" not in facts:
            raise UsageError("--place follows the plan's choice, which needs times: add --gpu NAME or --profile FILE")
        facts["placed"] = _write_place(*places[facts["chosen"]]) if facts["chosen"] is not None else None
    print_result(facts, "\n".join(plan_lines(facts)), json_)


def _write_place(setting: str, value: str) -> dict[str, Any]:
    """Write the place of stored KV into the user's settings. Return what was written, as JSON values."""
    path = write_user_setting(setting, value)
    is_overridden = load_settings().tiers[setting] != value
    return {"setting": setting, "value": value, "file": str(path), "overridden": is_overridden}


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
    """Return the lines to print for a plan: sizes, what fits, and a table of the storages, cheapest first."""
    lines = [*_size_lines(plan), *_fit_lines(plan)]
    return [*lines, "", *_time_lines(plan), *_place_lines(plan)] if "options" in plan else lines


def _place_lines(plan: Mapping[str, Any]) -> list[str]:
    if "placed" not in plan:
        return []
    if (placed := plan["placed"]) is None:
        return ["no storage was chosen, so no setting was written"]
    setting, value = placed["setting"], placed["value"]
    fill = "ragblend push" if setting == "remote" else "ragblend ingest"
    lines = [
        f"{placed['file']} now sets {setting} = {value}: commands and ragblend serve use it from their next start, "
        f"Python with {setting}={value!r}; {fill} stores there what is stored already"
    ]
    if placed["overridden"]:
        lines.append(f"RAGBLEND_{setting.upper()} or ragblend.toml sets another {setting} here, which overrides it")
    return lines


def _size_lines(plan: Mapping[str, Any]) -> list[str]:
    corpus = plan["corpus"]
    columns: list[Column] = [
        ("KV stored in", "<22", "name"),
        ("per token", ">11", lambda row: format_bytes(row["nbytes"])),
    ]
    rows = [
        {"name": f"{plan['dtype']} (as computed)" if name == "auto" else name, "nbytes": nbytes, "dtype": name}
        for name, nbytes in plan["bytes_per_token"].items()
    ]
    lines = []
    if corpus is not None:
        lines.append(f"{_gb(corpus['text_bytes'])} of text are about {corpus['tokens']:,} tokens")
        columns += [
            ("corpus", ">12", lambda row: format_bytes(corpus["kv_bytes"][row["dtype"]])),
            ("with neutral variants", ">23", lambda row: format_bytes(corpus["kv_bytes_neutral"][row["dtype"]])),
        ]
    return [*lines, *format_table(columns, rows)]


def _fit_lines(plan: Mapping[str, Any]) -> list[str]:
    lines = []
    if (gpu := plan["gpu"]) is not None:
        lines.append(
            f"one {gpu['name']} has {_gb(gpu['bytes'])}: the weights take {_gb(gpu['weight_bytes'])}, and beside them "
            f"fits the KV of at most {gpu['tokens']:,} tokens of running requests"
        )
    if (host := plan["host"]) is not None:
        share = "" if host["corpus_share"] is None else f", {host['corpus_share']:.2%} of the corpus"
        lines.append(f"{_gb(host['bytes'])} of host memory hold the KV of {host['tokens']:,} tokens{share}")
    return lines


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"


def _time_lines(plan: Mapping[str, Any]) -> list[str]:
    need, memory, waits = plan["need"], plan["memory"], plan["need"]["probes_before_selection"]
    from_tokens = memory["pays_from_tokens"]
    pays = f"pays from {from_tokens:,} tokens" if from_tokens else "pays for no prompt that the model reads"
    columns = [
        *_COLUMNS,
        *([] if waits else [_HIDES]),
        *_COSTS,
        *([_CORPUS_USD] if plan["corpus"] is not None else []),
    ]
    return [
        f"PREDICTED from the data sheet of {plan['predicted_for']} for the transformers engine, not measured: "
        "ragblend profile measures"
        if plan["predicted_for"]
        else "measured",
        *_ingest_lines(plan),
        f"{need['num_chunks']} chunks x {need['chunk_tokens']} tokens, ratio {need['ratio']:.0%}: full prefill takes "
        f"{plan['full_s']:.3g} s; from host memory blending takes {memory['ttft_s']:.3g} s and {pays}",
        *format_table(columns, plan["options"]),
        *_LEGEND,
        _verdict(plan, waits),
    ]


def _ingest_lines(plan: Mapping[str, Any]) -> list[str]:
    if plan["corpus"] is None:
        return []
    from ragblend.lab.plan import NEUTRAL_PREFILL

    hours = plan["corpus"]["tokens"] / plan["ingested_tokens_per_s"] / 3600
    return [f"ingestion of the corpus: {hours:,.1f} hours, with neutral variants {NEUTRAL_PREFILL * hours:,.1f}"]


def _verdict(plan: Mapping[str, Any], waits: bool) -> str:
    if plan["chosen"] is not None:
        return f"{plan['chosen']} is the cheapest that adds no delay"
    if plan["memory"]["ttft_s"] >= plan["full_s"]:
        return "full prefill of such a prompt is faster than blending, even from host memory; longer prompts may gain"
    paying = next((option for option in plan["options"] if option["pays"]), None)
    ways = ["a faster one", "fewer bytes (--dtype, --kv-dtype)"]
    if waits:
        ways.append("a rule that does not wait for most KV (--rule cacheblend)")
    elif paying is not None:
        ways.append("a higher ratio (--ratio)")
    help = f"{', '.join(ways[:-1])} or {ways[-1]} would help"
    if paying is None:
        return f"full prefill is faster than blending from each of these storages; {help}"
    return (
        f"every storage adds delay; {paying['storage']} is the cheapest from which blending beats full prefill, "
        f"{plan['full_s'] / paying['ttft_s']:.1f}x; {help}"
    )


_COLUMNS: tuple[Column, ...] = (
    ("storage", "<10", "storage"), ("GB/s", ">6.3g", lambda option: option["bytes_per_s"] / 1e9),
    ("read s", ">9.3g", "load_s"), ("compute s", ">11.3g", "recompute_s"), ("TTFT s", ">9.3g", "ttft_s"),
    ("delays", ">8", lambda option: "yes" if option["adds_delay"] else "no"),
    ("pays from", ">11", lambda option: f"{option['pays_from_tokens']:,}" if option["pays_from_tokens"] else "never"),
)  # fmt: skip
_HIDES: Column = ("hides", ">7.0%", "hidden_ratio")
_COSTS: tuple[Column, ...] = (
    ("uses to repay", ">15", lambda option: option["reuses_to_repay"] or "never"),
    ("GB/1000", ">9.2f", "gb_per_1000_chunks"), ("USD/month", ">11.4f", "usd_per_1000_chunks_month"),
)  # fmt: skip
_CORPUS_USD: Column = ("corpus USD", ">13,.0f", "corpus_usd_month")
_LEGEND = (
    "GB/s: of the storage, but predicted at most what the engine reads; read: a prompt's KV; compute: recomputing and",
    "placing it; TTFT: until the first token; pays from: tokens of the shortest prompt that is faster than full",
    "prefill; uses to repay: uses of a chunk that save its prefill's time; GB/1000, USD/month: of 1,000 chunks; corpus",
    "USD: the corpus for a month (one variant of each chunk)",
)
