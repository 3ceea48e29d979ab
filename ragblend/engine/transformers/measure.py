"""Measures an engine's machine profile in a few seconds, when it is loaded over a remote tier without a profile.

`ragblend profile` measures the same at more lengths, more often, and reads the disk as well (`lab.profile`). Read
`measure_briefly`. Depends on an engine with its model, not on tiers: those measure their reads themselves.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from time import perf_counter

import torch

from ragblend.engine.fusion.rules import NO_PROBE_RULE, find_rule
from ragblend.engine.generation import EngineRequest
from ragblend.engine.store.memory import MemoryStore
from ragblend.engine.transformers.engine import TransformersEngine
from ragblend.engine.tuning.calibration import RequestTuning
from ragblend.engine.tuning.loading_controller import LINEAR, Curve, MachineProfile
from ragblend.engine.tuning.machine import machine_facts
from ragblend.options import GenerationOptions, Mode
from ragblend.prompt.types import ChunkRun, MatchedPrompt

Ids = tuple[int, ...]

MEASURE_S = 3.0  # the time that `measure_briefly` plans for
QUESTION_TOKENS = 32
_CHUNK_TOKENS = 128
_COUNTS = (1, 2, 4, 8, 16)  # chunks of the prompts that are timed, as many as there is time for
_NO_LIMIT_BYTES = 1 << 50
_GROWTH = 3.0  # most that a prompt of twice the length takes, in times of the shorter one's
_NUM_REST = 6  # passes like the longest full prefill: its chunks, and blends with their warm-up


def measure_briefly(engine: TransformersEngine, seconds: float = MEASURE_S) -> MachineProfile | None:
    """Time the engine's model for about `seconds`: full prefill, and blends from memory by a rule with a probe and one
    without.

    For a model that is too slow to be blended in this time, the paper's assumption takes the place of measured shares.
    Returns None for a model whose context is too short.
    """
    start_s = perf_counter()
    chunks, prompts = random_prompts(_COUNTS, _CHUNK_TOKENS, engine.layers.config.vocab_size, engine.default_prefix_ids)
    with TransformersEngine(
        engine.layers,
        engine.renderer,
        MemoryStore(_NO_LIMIT_BYTES),
        name=engine.name,
        fingerprint=f"profile-{secrets.token_hex(8)}",  # unique, so that no chunk of a prompt is taken for one of these
        system=engine.system,
        on_miss="inline",
        check=False,
    ) as subject:
        full_s: dict[float, float] = {}
        longest: MatchedPrompt | None = None
        for prompt in prompts:
            left_s = seconds - (perf_counter() - start_s)
            expected_s = _GROWTH * max(full_s.values(), default=0.0)
            is_too_slow = longest is not None and expected_s * (1 + _NUM_REST) > left_s
            if prompt.num_tokens >= engine.context_length or is_too_slow:
                break
            if longest is None:
                time_prefill(subject, prompt, "full", "auto", 1.0)  # warm-up
            full_s[prompt.num_tokens] = time_prefill(subject, prompt, "full", "auto", 1.0)
            longest = prompt
        if longest is None:
            return None
        shares: Curve = LINEAR
        no_probe_shares: Curve = LINEAR
        if _NUM_REST * full_s[longest.num_tokens] < seconds - (perf_counter() - start_s):
            for chunk in chunks[: len(longest.runs)]:
                subject.precompute_ids(chunk)
            preferred, other = find_rule("auto", engine.layers.num_layers), find_rule(NO_PROBE_RULE)
            measured_shares = {}
            for name, ratio in ((preferred.name, preferred.ratio), (other.name, other.ratio), (other.name, 1.0)):
                times_s = [time_prefill(subject, longest, "blend", name, ratio) for _ in range(2)]
                measured_shares[name, ratio] = min(times_s) / full_s[longest.num_tokens]  # the first one warms up
            end = (1.0, measured_shares[other.name, 1.0])
            shares = (preferred.ratio, measured_shares[preferred.name, preferred.ratio]), end
            no_probe_shares = (other.ratio, measured_shares[other.name, other.ratio]), end
    return MachineProfile(
        fingerprint=engine.fingerprint,
        hardware=machine_facts(engine.layers.device),
        num_layers=engine.layers.num_layers,
        bytes_per_token=engine.bytes_per_token,
        prefill_s=tuple(full_s.items()),
        shares=shares,
        no_probe_shares=no_probe_shares,
    )


def random_prompts(
    counts: Sequence[int], chunk_tokens: int, vocab_size: int, prefix: Ids
) -> tuple[list[Ids], list[MatchedPrompt]]:
    """Return chunks of random ids, and for each number in `counts` a prompt of that many of them; ascending."""
    draw = random.Random(0)
    chunks = [_ids(draw, chunk_tokens, vocab_size) for _ in range(counts[-1])]
    question = _ids(draw, QUESTION_TOKENS, vocab_size)
    prompts = []
    for count in counts:
        ids, runs = [*prefix], list[ChunkRun]()
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


def _ids(draw: random.Random, count: int, vocabulary: int) -> Ids:
    return tuple(draw.randrange(vocabulary) for _ in range(count))
