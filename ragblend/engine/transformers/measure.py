"""Times a transformers engine's model: for `brief_profile.measure_briefly`, and for `ragblend profile`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from time import perf_counter

import torch

from ragblend.engine.generation import EngineRequest
from ragblend.engine.store.disk import DiskStore
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.brief_profile import (
    CHUNK_TOKENS,
    COUNTS,
    MEASURE_S,
    QUESTION_TOKENS,
    Ids,
    keep_profile,
    measure_briefly,
    random_ids,
)
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.engine.tuning.machine import machine_facts
from ragblend.options import GenerationOptions, Mode
from ragblend.prompt.types import ChunkRun, MatchedPrompt

log = logging.getLogger(__name__)

_NO_LIMIT_BYTES = 1 << 50


def measure_engine(engine: TransformersEngine, seconds: float = MEASURE_S) -> MachineProfile | None:
    """Measure the engine's machine within `seconds`, and keep the profile in its store. Runs on the loop's thread.

    Returns None, with a warning, if the model cannot be measured: requests are then blended as if none were slower.
    """
    disk = engine.store.find_tier(DiskStore)
    try:
        with _subject(engine) as subject:
            profile = measure_briefly(
                _TimedEngine(subject),
                fingerprint=engine.fingerprint,
                hardware=machine_facts(engine.layers.device),
                spec=engine.shape,
                kv_dtype=engine.store.kv_dtype,
                disk_dir=None if disk is None else disk.kv_dir,
                seconds=seconds,
            )
    except Exception as error:  # of any class, such as a full GPU: the request that waits needs no profile
        log.warning("%s was not measured, so slow blends are not avoided: %s", engine.name, error)
        return None
    if disk is not None and profile is not None:
        keep_profile(disk.root, profile)
    return profile


def _subject(engine: TransformersEngine) -> TransformersEngine:
    """Return an engine over the same model with its own empty store and no system text."""
    return TransformersEngine(
        engine.layers,
        engine.renderer,
        MemoryStore(_NO_LIMIT_BYTES),
        name=engine.name,
        fingerprint=f"profile-{secrets.token_hex(8)}",  # unique, so that no chunk of a prompt is taken for one of these
        system="",
        on_miss="inline",
        check=False,
    )


class _TimedEngine:
    """`TimedModel` of an engine that nothing else uses."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self.longest_tokens = engine.context_length
        made = random_prompts(COUNTS, CHUNK_TOKENS, engine.layers.config.vocab_size, engine.default_prefix_ids)
        self._chunks, self._prompts = made[0], dict(zip(COUNTS, made[1], strict=True))

    def num_tokens(self, num_chunks: int) -> int:
        return self._prompts[num_chunks].num_tokens

    def full_prefill_s(self, num_chunks: int) -> float:
        return time_prefill(self._engine, self._prompts[num_chunks], "full", "auto", 1.0)

    def store_chunks(self, num_chunks: int) -> None:
        for chunk in self._chunks[:num_chunks]:
            self._engine.precompute_ids(chunk)

    def blend_s(self, num_chunks: int, rule: str, ratio: float) -> float:
        return time_prefill(self._engine, self._prompts[num_chunks], "blend", rule, ratio)

    def agrees(self, is_true: bool) -> bool:
        return is_true


def random_prompts(
    counts: Sequence[int], chunk_tokens: int, vocab_size: int, prefix: Ids
) -> tuple[list[Ids], list[MatchedPrompt]]:
    """Return chunks of random ids, and for each number in `counts` a prompt of that many of them; ascending.

    A token is between `prefix` and the first chunk. Otherwise the KV of that chunk would be exact, and a blend would
    not recompute its tokens.
    """
    chunks = [random_ids(chunk_tokens, vocab_size, number + 1) for number in range(counts[-1])]
    question = random_ids(QUESTION_TOKENS, vocab_size)
    prompts = []
    for count in counts:
        ids, runs = [*prefix, *question[:1]], list[ChunkRun]()
        for chunk in chunks[:count]:
            runs.append(ChunkRun(chunk, 0, len(ids), len(ids) + len(chunk)))
            ids += chunk
        prompts.append(MatchedPrompt([*ids, *question], tuple(runs), prefix))
    return chunks, prompts


def time_prefill(engine: TransformersEngine, prompt: MatchedPrompt, mode: Mode, rule: str, ratio: float) -> float:
    """Return the seconds until the prompt's first logits."""
    options = GenerationOptions(mode, rule, ratio, max_tokens=1)
    start_s = perf_counter()
    prefilled = engine.prefill(EngineRequest(prompt, mode, RequestTuning(rule, ratio), options))
    if prefilled.logits.device.type == "cuda":
        torch.cuda.synchronize(prefilled.logits.device)
    return perf_counter() - start_s
