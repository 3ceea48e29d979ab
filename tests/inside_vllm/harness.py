"""vLLM engines in this process, one at a time, and how the tests talk to them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import pytest
import torch
from tiny_models import VOCABULARY

from ragblend.catalog.ledger import Ledger
from ragblend.engine.transformers.model import load_tokenizer
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.engine.vllm.engine import stop_vllm
from ragblend.engine.vllm.launch import Checkpoint
from ragblend.files.store_folder import CATALOG_FILE
from ragblend.prompt.render import Renderer

SMALL = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}  # vLLM's options of an engine for tests
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 160, "num_hidden_layers": 6}


def machine(checkpoint: Checkpoint, load_share: float, hardware: dict[str, Any]) -> MachineProfile:
    """A machine that prefills in 1 ms per token, and whose disk takes `load_share` of that to read a token's KV."""
    speed = checkpoint.bytes_per_token * 1000 / load_share
    prefill_s = ((1000.0, 1.0),)
    return MachineProfile(
        checkpoint.fingerprint,
        hardware,
        checkpoint.num_layers,
        checkpoint.bytes_per_token,
        prefill_s,
        bytes_per_s={"disk": speed},
    )


def random_ids(count: int, seed: int) -> list[int]:
    """Ids without the control tokens."""
    return torch.randint(6, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX = random_ids(5, 1)


@contextmanager
def engine(model: Path, store: Path | None, extra: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """vLLM's `LLM` over a checkpoint, with the connector unless `store` is None. Everything is torn down afterwards.

    Chunks are stored behind PREFIX, and requests that name no mode are vLLM's, unless `extra` says otherwise.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if store is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="BlendConnector",
            kv_connector_module_path="ragblend.engine.vllm.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": str(store), "mode": "prefix", "prefix_ids": PREFIX, **(extra or {})},
        )
    defaults = {
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "distributed_executor_backend": "uni",
        "seed": 0,
        "disable_log_stats": True,
    }
    llm = LLM(str(model), **{**defaults, **options})
    try:
        yield llm
    finally:
        stop_vllm(llm.llm_engine)


def ask(
    llm: Any,
    ids: list[int],
    params: dict[str, Any] | None = None,
    max_tokens: int = 8,
    logprobs: int | None = 20,
    *,
    forgets: bool = True,
) -> Any:
    """Return the RequestOutput of one greedy answer. `forgets`: clear vLLM's prefix cache first."""
    return ask_all(llm, [(ids, params)], max_tokens, logprobs, forgets=forgets)[0]


def ask_all(
    llm: Any,
    prompts: list[tuple[list[int], dict[str, Any] | None]],
    max_tokens: int = 8,
    logprobs: int | None = 20,
    *,
    forgets: bool = True,
) -> list[Any]:
    """Greedy answers to prompts that are all given at once."""
    if forgets:
        llm.reset_prefix_cache()
    sampling = [greedy(params, max_tokens, logprobs) for _, params in prompts]
    return llm.generate([{"prompt_token_ids": ids} for ids, _ in prompts], sampling, use_tqdm=False)


def add(llm: Any, name: str, ids: list[int], params: dict[str, Any] | None, max_tokens: int = 8) -> None:
    """Queue a prompt for a greedy answer, which later steps of the engine compute."""
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, greedy(params, max_tokens))


def greedy(params: dict[str, Any] | None, max_tokens: int, logprobs: int | None = None) -> Any:
    """vLLM's SamplingParams of a greedy answer of `max_tokens` tokens, with ragblend's parameters."""
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"ragblend": params}} if params is not None else None
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, extra_args=extra)


def tokens(output: Any) -> list[int]:
    """The answer's ids."""
    return list(output.outputs[0].token_ids)


def report(output: Any) -> dict[str, Any]:
    """The connector's report."""
    return dict(output.kv_transfer_params["ragblend"])


def assert_same_answer(found: Any, expected: Any, tolerance: float) -> None:
    """The same tokens, and log-probabilities that differ by at most `tolerance`."""
    assert tokens(found) == tokens(expected)
    for mine, theirs in zip(found.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
        for token in mine.keys() & theirs.keys():
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=tolerance)


def ingest(llm: Any, prefix: list[int], chunk: list[int], namespace: str = "") -> dict[str, Any]:
    """Have a chunk computed behind `prefix` and stored, and known, so that it is found in prompts."""
    params = {"mode": "ingest", "span": [len(prefix), len(prefix) + len(chunk)], "namespace": namespace}
    config = llm.llm_engine.vllm_config
    store = config.kv_transfer_config.kv_connector_extra_config["store"]
    make_known(Path(store), Path(config.model_config.model), [chunk], namespace)
    return report(ask(llm, [*prefix, *chunk, 7], params, max_tokens=1, logprobs=None))


def make_known(store: Path, model: Path, chunks: list[list[int]], namespace: str = "") -> Renderer:
    """Record token ids as ingestion does, by the tokenizer's fingerprint."""
    renderer = Renderer(load_tokenizer(str(model))[0])
    with Ledger(store / CATALOG_FILE) as ledger:
        ledger.add_ids(((f"text {ids}", ids) for ids in chunks), renderer.fingerprint, namespace)
    return renderer


def free_blocks(llm: Any) -> int:
    """Blocks that no request holds."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def watch_counts(half: Any) -> Any:
    """Return a `BlendStats` that sums the later metrics of a half of the connector, which vLLM takes at each step."""
    from ragblend.engine.vllm.metrics import BlendStats

    take, total = half.get_kv_connector_stats, BlendStats()

    def watching() -> Any:
        stats = take()
        total.merge(stats.data if stats is not None else {})
        return stats

    half.get_kv_connector_stats = watching
    return total


def connector_scheduler(llm_engine: Any) -> Any:
    """The connector in the scheduler of a vLLM engine in this process."""
    return llm_engine.engine_core.engine_core.scheduler.connector


def connector_worker() -> Any:
    """The connector's worker half in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


@contextmanager
def recorded_selections() -> Iterator[list[list[int]]]:
    """Positions that each blend recomputed through the last layer, in order of the blends."""
    from ragblend.engine.vllm.worker_side import worker as vllm_worker

    selections: list[list[int]] = []
    note_fused = vllm_worker.record_fusion

    def recording(report: Any, runs: Any, plan: Any, result: Any, num_known: int) -> None:
        selections.append(result.recomputed.tolist())
        note_fused(report, runs, plan, result, num_known)

    vllm_worker.record_fusion = recording
    try:
        yield selections
    finally:
        vllm_worker.record_fusion = note_fused
