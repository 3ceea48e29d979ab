"""Measures the machine profile of a model for the loading controller: `ragblend profile`.

Measures full prefill at several lengths, blending at several ratios from memory, and the read speed of each tier, on
either engine. The chunks are random token ids and are deleted afterwards. Read `measure_machine`.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from ragblend.config import Settings
from ragblend.engine.fusion.rules import DEFAULT_RATIO, NO_PROBE_RULE
from ragblend.engine.load import find_store_model, load_engine
from ragblend.engine.store.format.kv import MemoryKV, load_into_memory
from ragblend.engine.store.open import GIB
from ragblend.engine.store.remote.tier import RemoteStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.transformers.measure import random_prompts, time_prefill
from ragblend.engine.tuning.brief_profile import QUESTION_TOKENS, measure_disk_speed, measure_read_speed
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.engine.tuning.machine import machine_facts
from ragblend.engine.vllm.base_engine import VllmRequest
from ragblend.engine.vllm.engine import VllmEngine
from ragblend.engine.vllm.launch import find_checkpoint
from ragblend.engine.vllm.params import BlendParams
from ragblend.errors import BackendUnreachableError, RagblendError, UsageError
from ragblend.ingestion.report import Progress, ignore_progress
from ragblend.lab.engines import with_own_store
from ragblend.option_fields import copy_option
from ragblend.options import GenerationOptions, Mode
from ragblend.prompt.types import MatchedPrompt

RATIOS = (0.0, DEFAULT_RATIO, 0.5, 1.0)
_REMOTE_TIMEOUT_S = 60.0
_PREFIX_TOKENS = 1024  # context length reserved for the system text


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """The workload: prompts of up to `num_chunks` chunks of `chunk_tokens` tokens, each timed `repeats` times."""

    num_chunks: int = 6
    chunk_tokens: int = 512
    repeats: int = 3
    ratios: tuple[float, ...] = RATIOS
    rule: str = copy_option(GenerationOptions, "rule")

    def __post_init__(self) -> None:
        for name in ("num_chunks", "chunk_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; choose 1 or more")

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """The numbers of chunks in the prompts that are timed: one, half, and all."""
        return tuple(sorted({1, (self.num_chunks + 1) // 2, self.num_chunks}))


def measure_machine(
    engine: TransformersEngine | VllmEngine,
    effort: ProfileConfig = ProfileConfig(),
    *,
    directory: Path | None = None,
    remote: RemoteStore | None = None,
    on_progress: Progress = ignore_progress,
) -> MachineProfile:
    """Time the model of `engine`, the disk of `directory`, and `remote`. A tier that is None is not measured.

    A VllmEngine needs a memory tier that holds the chunks, see `open_vllm_for_profile`. Results are medians. The modes
    take turns, so a machine that gets slower affects all of them. Raises UsageError for prompts beyond the model's
    context length, BackendUnreachableError for a remote tier that does not store or return the chunks.
    """
    if isinstance(engine, VllmEngine):
        vocab_size, hardware = engine.vllm_config.model_config.get_vocab_size(), engine.hardware
        num_layers = engine.vllm_config.model_config.hf_text_config.num_hidden_layers
    else:
        vocab_size, hardware = engine.layers.config.vocab_size, machine_facts(engine.layers.device)
        num_layers = engine.layers.num_layers
    prefix = engine.default_prefix_ids
    chunks, prompts = random_prompts(effort.chunk_counts, effort.chunk_tokens, int(vocab_size), prefix)
    longest = prompts[-1]
    if longest.num_tokens >= engine.context_length:
        raise UsageError(
            f"{effort.num_chunks} chunks of {effort.chunk_tokens} tokens make prompts of {longest.num_tokens}, "
            f"{engine.name} reads {engine.context_length}; choose fewer or shorter ones (--num-chunks, --chunk-tokens)"
        )
    with nullcontext(engine) if isinstance(engine, VllmEngine) else _with_own_store(engine) as subject:
        keys = [subject.key_of_ids(chunk) for chunk in chunks]
        try:
            for number, chunk in enumerate(chunks):
                on_progress("precompute", number, len(chunks))
                subject.known_chunks.add([f"chunk {number}"], lambda _, chunk=chunk: chunk)  # type: ignore[misc]
                subject.precompute_ids(chunk)
            full_s, blend_s, no_probe_s = _measure_times(subject, prompts, effort, on_progress)
            stored = [load_into_memory(kv) for key in keys if (kv := subject.store.get(key)) is not None]
        finally:
            for key in keys:
                subject.store.delete(key)
    speeds: dict[str, float] = {}
    if directory is not None:
        speeds["disk"] = statistics.median(measure_disk_speed(directory, stored) for _ in range(effort.repeats))
    if remote is not None:
        speeds["remote"] = measure_remote_speed(remote, stored)
    return MachineProfile(
        fingerprint=engine.fingerprint,
        hardware=hardware,
        num_layers=int(num_layers),
        bytes_per_token=engine.bytes_per_token,
        prefill_s=tuple(full_s.items()),
        shares=tuple((ratio, seconds / full_s[longest.num_tokens]) for ratio, seconds in blend_s.items()),
        bytes_per_s=speeds,
        no_probe_shares=tuple((ratio, seconds / full_s[longest.num_tokens]) for ratio, seconds in no_probe_s.items()),
    )


def _measure_times(
    engine: TransformersEngine | VllmEngine,
    prompts: Sequence[MatchedPrompt],
    effort: ProfileConfig,
    on_progress: Progress,
) -> tuple[dict[float, float], dict[float, float], dict[float, float]]:
    """Return median seconds of full prefill by prompt tokens, and of blending the longest prompt by ratio: by the rule
    of `effort`, and by NO_PROBE_RULE."""
    longest, rules = prompts[-1], (effort.rule, NO_PROBE_RULE)
    _measure_prefill_s(engine, longest, "full", effort.rule, 1.0)  # warm-up
    for rule in rules:
        _measure_prefill_s(engine, longest, "blend", rule, DEFAULT_RATIO)
    full: list[list[float]] = []
    blend: dict[str, list[list[float]]] = {rule: [] for rule in rules}
    for number in range(effort.repeats):
        on_progress("time prefill", number, effort.repeats)
        full.append([_measure_prefill_s(engine, prompt, "full", effort.rule, 1.0) for prompt in prompts])
        for rule, taken in blend.items():
            taken.append([_measure_prefill_s(engine, longest, "blend", rule, ratio) for ratio in effort.ratios])
    full_s, *blend_s = (
        map(statistics.median, zip(*taken, strict=True)) for taken in (full, *(blend[rule] for rule in rules))
    )
    lengths = (prompt.num_tokens for prompt in prompts)
    by_ratio = [dict(zip(effort.ratios, seconds, strict=True)) for seconds in blend_s]
    return dict(zip(lengths, full_s, strict=True)), by_ratio[0], by_ratio[1]


def _with_own_store(engine: TransformersEngine) -> TransformersEngine:
    # The fingerprint is unique, so that measured chunks are never confused with a model's.
    return with_own_store(engine, system=engine.system, fingerprint=f"profile-{secrets.token_hex(8)}")


def _measure_prefill_s(
    engine: TransformersEngine | VllmEngine, prompt: MatchedPrompt, mode: Mode, rule: str, ratio: float
) -> float:
    """Return the seconds until the prompt's first logits; in vLLM, until its first token is sampled."""
    if isinstance(engine, TransformersEngine):
        return time_prefill(engine, prompt, mode, rule, ratio)
    options = GenerationOptions(mode, rule, ratio, max_tokens=1)
    request = VllmRequest(prompt.token_ids, BlendParams.from_options(options, engine.namespace), options)
    num_hits = 0
    engine.reset_prefix_cache()  # it keeps what a blend of this prompt left
    start_s = perf_counter()
    for delta in engine.run_request(request):
        num_hits = delta.report.num_chunk_hits if delta.report is not None else num_hits
    seconds = perf_counter() - start_s
    if mode == "blend" and num_hits < len(prompt.runs):
        raise RagblendError(
            f"vLLM blended {num_hits} of {len(prompt.runs)} chunks, so the time is not comparable; see vLLM's log"
        )
    return seconds


@contextmanager
def open_vllm_for_profile(
    settings: Settings, effort: ProfileConfig, vllm_options: Mapping[str, Any] | None = None
) -> Iterator[VllmEngine]:
    """Open vLLM in this process over an empty temporary store, whose memory tier can hold the measured chunks.

    The temporary store is in the folder `settings.store`. `vllm_options`: vLLM's engine arguments. The default of
    `max_model_len` is the length of the longest prompt plus 1024 tokens for the system text, but at most the model's
    context length.
    """
    model = settings.model or find_store_model(settings.store)
    checkpoint = find_checkpoint(model, replace(settings.model_options, device="auto"))
    num_tokens = effort.num_chunks * effort.chunk_tokens
    length = min(checkpoint.context_length, num_tokens + QUESTION_TOKENS + _PREFIX_TOKENS)
    directory = Path(settings.store)
    directory.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix=".profile-") as scratch,
        load_engine(
            model,
            scratch,
            backend="vllm",
            dtype=settings.dtype,
            device=settings.device,
            system=settings.system,
            on_miss="inline",
            auto_profile=False,
            trust_remote_code=settings.trust_remote_code,
            vllm_options={"max_model_len": length, **(vllm_options or {})},
            memory_gib=1 + 2 * num_tokens * checkpoint.bytes_per_token / GIB,
        ) as engine,
    ):
        assert isinstance(engine, VllmEngine)
        yield engine


def measure_remote_speed(remote: RemoteStore, chunks: Sequence[MemoryKV]) -> float:
    """Store `chunks` in `remote`, fetch them in parallel, and delete them. Return the bytes per second of the fetch.

    The speed is measured once, because fetched chunks are cached for a moment. Raises BackendUnreachableError if
    `remote` does not store or return the chunks.
    """
    keys = [kv.header.key for kv in chunks]
    for kv in chunks:
        remote.put(kv)
    try:
        if not remote.flush(_REMOTE_TIMEOUT_S):
            raise BackendUnreachableError(
                f"{remote.values.url} did not take {len(keys)} chunks in {_REMOTE_TIMEOUT_S:.0f} s"
            )
        start_s = perf_counter()
        remote.start_fetches(keys)
        measure_read_speed(remote, keys)
        return sum(kv.nbytes for kv in chunks) / (perf_counter() - start_s)
    finally:
        for key in keys:
            remote.delete(key)
