"""`ragblend bench ttft | throughput | load | ingest | quality`: parse, run one benchmark, print.

JSON on stdout, the rest on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragblend.cli.options import (
    EmbedderOption,
    JsonOption,
    KOption,
    ModelOption,
    NeighbourKvOption,
    NeighboursOption,
    VllmOptions,
    json_object,
    split_names,
    split_numbers,
)
from ragblend.cli.printing import err, out, print_json, progress_bars
from ragblend.cli.session import one_thread, quiet_libraries, use_threads
from ragblend.errors import UsageError

bench_app = typer.Typer(help="Measure, side by side in one process.", no_args_is_help=True, rich_markup_mode=None)


@bench_app.command("ttft")
def bench_ttft(
    shape: Annotated[str | None, typer.Option("--shape", help="Random weights: llama-200m, llama-1b, ...")] = None,
    model: ModelOption = None,
    chunks: Annotated[int, typer.Option("--chunks", help="Per prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 512,
    question_tokens: Annotated[int, typer.Option("--question-tokens")] = 32,
    ratio: Annotated[float, typer.Option("--ratio")] = 0.15,
    modes: Annotated[str, typer.Option("--modes", help="Comma-separated.")] = "full,prefix,reuse,blend",
    rules: Annotated[
        str, typer.Option("--rules", help="Comma-separated: auto, ask, cacheblend, cacheblend_k, first_k, ...")
    ] = "cacheblend",
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; default is torch's choice.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs per mode and prompt.")] = 5,
    questions: Annotated[int, typer.Option("--questions", help="Prompts, chunks shuffled.")] = 1,
    tier: Annotated[str, typer.Option("--tier", help="memory or disk.")] = "memory",
    store: Annotated[Path | None, typer.Option("--store", help="Directory for --tier disk.")] = None,
    device: Annotated[str, typer.Option("--device")] = "cpu",
    backend: Annotated[str, typer.Option("--backend", help="transformers, or vllm in this process.")] = "transformers",
    vllm_options: VllmOptions = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a bar chart, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Time to first token in the four modes: lookup + load + fuse + first token, warm-up outside, medians."""
    use_threads(threads)
    quiet_libraries()
    from ragblend.bench.ttft import bench_ttft as run

    facts = run(
        shape=shape,
        model=model,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        modes=split_names(modes),
        rules=split_names(rules),
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        questions=questions,
        tier=tier,
        store=store,
        plot=plot,
        seed=seed,
        device=device,
        echo=(lambda line: err.print(line, markup=False)) if json_ else (lambda line: out.print(line, markup=False)),
        backend=backend,
        vllm_options=json_object(vllm_options, "--vllm-options"),
    )
    print_json(facts)


@bench_app.command("throughput")
def bench_throughput(
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights: llama-50m (the default), llama-200m, llama-1b, ...")
    ] = None,
    model: ModelOption = None,
    chunks: Annotated[int, typer.Option("--chunks", help="Per prompt.")] = 4,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 128,
    pool: Annotated[int, typer.Option("--pool", help="Stored chunks that prompts draw from.")] = 24,
    question_tokens: Annotated[int, typer.Option("--question-tokens")] = 32,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Length of each answer.")] = 8,
    requests: Annotated[int, typer.Option("--requests", help="Per rate and mode.")] = 16,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Requests per second, comma-separated; chosen from full prefill's.")
    ] = None,
    bound: Annotated[
        float | None, typer.Option("--bound", help="Mean TTFT to keep, seconds; twice an idle full prefill's.")
    ] = None,
    ratio: Annotated[float, typer.Option("--ratio")] = 0.15,
    modes: Annotated[str, typer.Option("--modes", help="Comma-separated.")] = "full,prefix,blend",
    rules: Annotated[str, typer.Option("--rules", help="Comma-separated: cacheblend, first_k, ...")] = "cacheblend",
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads; default is torch's choice.")] = None,
    memory_gib: Annotated[float, typer.Option("--memory-gib", help="Memory tier in front of the store.")] = 2.0,
    store: Annotated[Path | None, typer.Option("--store", help="Directory of the store; a temporary one.")] = None,
    backend: Annotated[str, typer.Option("--backend", help="vllm, in this process; there is no other.")] = "vllm",
    vllm_options: VllmOptions = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write TTFT over the rate, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Requests per second at equal TTFT: Poisson arrivals at rising rates, blend against full and prefix caching.

    The defaults take under ten minutes on one idle CPU core. A rate costs at least its requests' prefills, so a larger
    shape, or more and longer chunks, take longer in proportion; so do low rates.
    """
    if backend != "vllm":
        raise UsageError(f"backend is {backend!r}; throughput is measured on a serving engine: --backend vllm")
    use_threads(threads)
    quiet_libraries()
    from ragblend.bench.throughput import bench_throughput as run

    facts = run(
        shape=shape,
        model=model,
        num_chunks=chunks,
        chunk_tokens=chunk_tokens,
        pool=pool,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        num_requests=requests,
        rates=split_numbers(rates) if rates is not None else None,
        bound_s=bound,
        ratio=ratio,
        modes=split_names(modes),
        rules=split_names(rules),
        dtype=dtype,
        threads=threads,
        memory_gib=memory_gib,
        store=store,
        vllm_options=json_object(vllm_options, "--vllm-options"),
        seed=seed,
        plot=plot,
        echo=(lambda line: err.print(line, markup=False)) if json_ else (lambda line: out.print(line, markup=False)),
    )
    print_json(facts)


@bench_app.command("load")
def bench_load(
    shape: Annotated[str, typer.Option("--shape", help="Random weights: llama-200m, llama-50m, ...")] = "llama-200m",
    chunks: Annotated[int, typer.Option("--chunks", help="Per prompt, and what the memory tier holds.")] = 6,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 512,
    question_tokens: Annotated[int, typer.Option("--question-tokens")] = 32,
    ratio: Annotated[float, typer.Option("--ratio")] = 0.15,
    rule: Annotated[str, typer.Option("--rule", help="auto, cacheblend, first_k, ...")] = "auto",
    slowdowns: Annotated[
        str, typer.Option("--slowdowns", help="Throttled readers: T_load over T_recompute, comma-separated.")
    ] = "0.5,0.8,1,2",
    store_factor: Annotated[int, typer.Option("--store-factor", help="Store over the memory tier's budget.")] = 10,
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", help="Prompts, each of other chunks.")] = 5,
    store: Annotated[Path | None, typer.Option("--store", help="Directory of the store; a temporary one.")] = None,
    backend: Annotated[str, typer.Option("--backend", help="transformers, or vllm in this process.")] = "transformers",
    vllm_options: VllmOptions = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the layers' timeline, FILE.png.")] = None,
    json_: JsonOption = False,
) -> None:
    """Blend from disk against blend from memory, page cache dropped, on both sides of T_load = T_recompute."""
    use_threads(threads)
    quiet_libraries()
    from ragblend.bench.load import bench_load as run

    facts = run(
        shape=shape,
        num_chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratio=ratio,
        rule=rule,
        slowdowns=split_numbers(slowdowns),
        store_factor=store_factor,
        dtype=dtype,
        threads=threads,
        repeats=repeats,
        store=store,
        backend=backend,
        vllm_options=json_object(vllm_options, "--vllm-options") or {},
        seed=seed,
        plot=plot,
        echo=lambda line: (err if json_ else out).print(line, markup=False),
    )
    print_json(facts)


@bench_app.command("ingest")
def bench_ingest(
    shape: Annotated[str, typer.Option("--shape", help="Random weights.")] = "llama-200m",
    chunks: Annotated[int, typer.Option("--chunks")] = 8,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens")] = 512,
    repeats: Annotated[int, typer.Option("--repeats", help="Rounds of both, alternating.")] = 3,
    known: Annotated[int, typer.Option("--known", help="Known chunks of the second part; 0 for none.")] = 10_000,
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json_: JsonOption = False,
) -> None:
    """Ingestion to disk against the engine's own prefill of the same chunks; and a second run that knows them all."""
    use_threads(threads)
    quiet_libraries()
    from ragblend.bench.ingest import bench_ingest as run

    facts = run(
        shape=shape,
        num_chunks=chunks,
        num_known=known,
        chunk_tokens=chunk_tokens,
        repeats=repeats,
        dtype=dtype,
        threads=threads,
        seed=seed,
        echo=lambda line: (err if json_ else out).print(line, markup=False),
    )
    print_json(facts)


@bench_app.command("quality")
def bench_quality(
    model: ModelOption = None,
    num_questions: Annotated[
        int | None,
        typer.Option("--num-questions", "--questions", help="Equally many of each kind, 210; with --corpus 200."),
    ] = None,
    multi_hop: Annotated[
        int | None, typer.Option("--multi-hop", help="So many more whose evidence stands in several chunks, 1500.")
    ] = None,
    part: Annotated[
        str | None, typer.Option("--part", help="reported; selection, to choose rules by; any.", show_default=False)
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", help="Chunks per context.")] = 6,
    context_tokens: Annotated[int, typer.Option("--context-tokens", help="Prefix and chunks, about.")] = 256,
    rules: Annotated[str | None, typer.Option("--rules", help="Comma-separated: auto, cacheblend, ...")] = None,
    controls: Annotated[
        str | None, typer.Option("--controls", help="Rules that get a share of the questions: random, first_k, ...")
    ] = None,
    ratios: Annotated[str | None, typer.Option("--ratios", help="Comma-separated shares, 0 to 1.")] = None,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", "--budget", help="Charged budgets in a model of 32 layers, comma-separated shares."),
    ] = None,
    system_share: Annotated[float | None, typer.Option("--system-share", help="Stories with a system text.")] = None,
    off_share: Annotated[
        float | None, typer.Option("--off-share", help="Questions also answered from KV computed without the prefix.")
    ] = None,
    control_share: Annotated[
        float | None, typer.Option("--control-share", help="Questions that --controls get, and ratio 1.0.")
    ] = None,
    noise_share: Annotated[float | None, typer.Option("--noise-share", help="Questions prefilled in bfloat16.")] = None,
    order_share: Annotated[
        float | None, typer.Option("--order-share", help="Questions over several chunks asked in two chunk orders.")
    ] = None,
    lengths: Annotated[
        bool, typer.Option("--lengths/--no-lengths", help="Also contexts of 256 to 4096 tokens.")
    ] = False,
    length_questions: Annotated[int, typer.Option("--length-questions", help="In the shortest of them.")] = 210,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", help="Measure this corpus end to end instead, retrieval included.")
    ] = None,
    k: KOption = None,
    neighbours: NeighboursOption = None,
    chunk_size: Annotated[int, typer.Option("--chunk-size", help="Most tokens per chunk of the corpus.")] = 112,
    neighbour_kv: NeighbourKvOption = None,
    embedder: EmbedderOption = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="JSON file, data/results/quality[-corpus].json; - for stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Picture, docs/quality.png with matplotlib; - for none.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json_: JsonOption = False,
) -> None:
    """Quality against full prefill by rule, ratio and budget, on held-out stories; or of a corpus, end to end."""
    one_thread()
    quiet_libraries()
    from ragblend.bench.quality.study import bench_quality as run

    stories = {
        "model": model,
        "num_questions": num_questions,
        "num_multi_hop": multi_hop,
        "part": part,
        "num_chunks": chunks,
        "context_tokens": context_tokens,
        "rules": _names(rules),
        "controls": _names(controls),
        "ratios": _numbers(ratios),
        "budgets": _numbers(budgets),
        "system_share": system_share,
        "off_share": off_share,
        "control_share": control_share,
        "noise_share": noise_share,
        "order_share": order_share,
        "lengths": lengths,
        "length_questions": length_questions,
        "seed": seed,
    }
    end_to_end = {
        "corpus": corpus,
        "k": k,
        "neighbours": neighbours,
        "chunk_size": chunk_size,
        "neighbour_kv": neighbour_kv,
        "embedder": embedder,
    }
    print_facts = json_ or out_ == Path("-")
    with progress_bars() as progress:
        facts = run(
            stories,
            end_to_end,
            out=out_,
            plot=plot,
            echo=lambda line: (err if print_facts else out).print(line, markup=False),
            progress=progress,
        )
    if print_facts:
        print_json(facts)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(split_names(text))


def _numbers(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(split_numbers(text))
