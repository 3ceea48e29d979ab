"""What rounding stored KV does to the first token, question by question, against what rounding everything does.

Each question is answered from KV as computed, in eight bits and in four, from engines over one model in float32; the
yardstick is the bf16 noise floor of the same question: KL(full prefill in float32 || in bfloat16). Differences are
paired, their intervals 95 % bootstrap over the questions. Knows stores and engines, nothing of files' times.
Read `measure_answers` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import torch

from benchmarks import int4
from benchmarks.demo_quality.runs import FULL, Configuration, Item, answer, is_exact, request_for
from ragblend.bench.quality.measures import Answer, kl
from ragblend.engine.hf.engine import TransformersEngine
from ragblend.engine.store.base import KVStore
from ragblend.engine.store.chunk_file import encode_chunk
from ragblend.engine.store.kv import LayerKV, MemoryKV, in_memory, stored_as
from ragblend.engine.store.tiered import MemoryStore
from ragblend.intervals import mean_interval

AUTO = "auto"  # as computed
NUM_RESAMPLES = 10_000
STORE_BYTES = 256 << 20  # questions come story by story, so a few stories' KV is enough


class Subject(NamedTuple):
    """A model and questions to it. `rounded` has the weights of `base`, which computes in float32, and computes in
    bfloat16. Both have stores in memory."""

    base: TransformersEngine
    rounded: TransformersEngine
    items: Sequence[Item]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AnswersRun:
    """One storage dtype in one mode: means over the questions, in nats. `low` and `high` bound a 95 % interval.

    `noise_floor` is KL(full prefill in float32 || in bfloat16). `kl_increase` is the first token's KL from full prefill
    less that of the same mode from KV as computed in float32. `..._over_floor` is the interval of the mean, question by
    question, of that figure less the floor: below 0 throughout, the figure is below the floor.
    """

    model: str
    head_dim: int
    chunk_tokens: float  # mean over the first question's chunks; the bytes are theirs too
    dtype: str  # computed in
    kv_dtype: str  # stored as; "auto" as computed, "int4/32" measured only
    mode: str
    rule: str
    ratio: float
    num_samples: int
    bytes_per_token: float  # of the chunks' files, where the model computes in bfloat16
    byte_share: float  # of the files' bytes as computed in bfloat16
    first_token_kl: float  # KL(full || this)
    noise_floor: float
    noise_floor_low: float
    noise_floor_high: float
    kl_increase: float
    kl_increase_low: float
    kl_increase_high: float
    kl_increase_over_floor_low: float
    kl_increase_over_floor_high: float
    kl_to_as_computed: float  # KL(the same from KV as computed || this)
    kl_to_as_computed_low: float
    kl_to_as_computed_high: float
    kl_to_as_computed_over_floor_low: float
    kl_to_as_computed_over_floor_high: float
    top1_agreement: float  # of the first token, with full prefill
    same_answer: float  # share of answers that are those from KV as computed, to the letter
    exact_match: float | None  # None where no answer is right


class _Sample(NamedTuple):
    """One question, from one store in one mode. See AnswersRun."""

    kl: float
    kl_increase: float
    kl_to_as_computed: float
    top1_agrees: bool
    same_answer: bool
    exact: bool


def measure_answers(
    subject: Subject, configurations: Sequence[Configuration], stored: Sequence[str]
) -> list[AnswersRun]:
    """Every question from every store in every configuration, beside full prefill in float32 and in bfloat16.

    stored: names of `as_stored`, AUTO first."""
    base, rounded = subject.base, subject.rounded
    engines = {("float32", kv_dtype): over(base, MemoryStore(STORE_BYTES)) for kv_dtype in stored}
    engines["bfloat16", AUTO] = rounded
    floor, samples = list[float](), dict[tuple[Configuration, str, str], list[_Sample]]()
    for item in subject.items:
        request = request_for(base, item.prompt)
        request = replace(request, options=replace(request.options, max_tokens=subject.max_tokens))
        full = answer(base, request, FULL)
        floor.append(kl(full.log_probs, answer(rounded, request, FULL).log_probs))
        for kv in _computed(base, item):
            for kv_dtype in stored:
                engines["float32", kv_dtype].store.put(as_stored(kv, kv_dtype))
        for chunk in item.prompt.chunks:
            rounded.precompute(chunk)
        for configuration in configurations:
            answers = {case: answer(engine, request, configuration) for case, engine in engines.items()}
            for case, found in answers.items():
                sample = _sample(item, full, answers["float32", AUTO], found)
                samples.setdefault((configuration, *case), []).append(sample)
    return [_run(subject, case, taken, floor) for case, taken in samples.items()]


def as_stored(kv: MemoryKV, kv_dtype: str) -> MemoryKV:
    """The chunk as a store of `kv_dtype` holds it; as it would be read again for the names in `int4.GROUPS`."""
    return int4.rounded(kv, int4.GROUPS[kv_dtype]) if kv_dtype in int4.GROUPS else stored_as(kv, kv_dtype)


def file_bytes(kv: MemoryKV, kv_dtype: str) -> int:
    """Bytes of the chunk's file, header included; of four bits, what they would be."""
    if kv_dtype in int4.GROUPS:
        return len(encode_chunk(kv)) - kv.nbytes + int4.packed_bytes(kv, int4.GROUPS[kv_dtype])
    return len(encode_chunk(stored_as(kv, kv_dtype)))


def in_dtype(kv: MemoryKV, name: str, dtype: torch.dtype) -> MemoryKV:
    """The chunk as if it had been computed in `dtype`, which headers call `name`."""
    layers = (LayerKV(*(tensor.to(dtype) for tensor in kv.layer(index))) for index in range(kv.header.num_layers))
    return MemoryKV(replace(kv.header, dtype=name), tuple(layers))


def over(base: TransformersEngine, store: KVStore) -> TransformersEngine:
    """The same model over another store."""
    return TransformersEngine(
        base.layers,
        base.segmenter,
        store,
        name=base.name,
        fingerprint=base.fingerprint,
        on_miss="inline",
        check=False,
    )


def _computed(engine: TransformersEngine, item: Item) -> list[MemoryKV]:
    """The KV of the question's chunks, which the engine's store has from now on."""
    found = []
    for chunk in item.prompt.chunks:
        engine.precompute(chunk)
        kv = engine.store.get(engine.key(chunk))
        assert kv is not None
        found.append(in_memory(kv))
    return found


def _sample(item: Item, full: Answer, plain: Answer, found: Answer) -> _Sample:
    far = kl(full.log_probs, found.log_probs)
    return _Sample(
        far,
        far - kl(full.log_probs, plain.log_probs),
        kl(plain.log_probs, found.log_probs),
        bool(full.log_probs.argmax() == found.log_probs.argmax()),
        (found.text, found.ended) == (plain.text, plain.ended),
        is_exact(found, item),
    )


def _run(
    subject: Subject, case: tuple[Configuration, str, str], samples: Sequence[_Sample], floor: Sequence[float]
) -> AnswersRun:
    configuration, dtype, kv_dtype = case
    computed = [in_dtype(kv, "bfloat16", torch.bfloat16) for kv in _computed(subject.base, subject.items[0])]
    num_tokens = sum(kv.header.num_tokens for kv in computed)
    whole, packed = (sum(file_bytes(kv, name) for kv in computed) for name in (AUTO, kv_dtype))
    increases = [sample.kl_increase for sample in samples]
    shifts = [sample.kl_to_as_computed for sample in samples]
    return AnswersRun(
        model=subject.base.name,
        head_dim=computed[0].layer(0).keys.shape[-1],
        chunk_tokens=num_tokens / len(computed),
        dtype=dtype,
        kv_dtype=kv_dtype,
        mode=configuration.mode,
        rule=configuration.rule,
        ratio=configuration.ratio,
        num_samples=len(samples),
        bytes_per_token=packed / num_tokens,
        byte_share=packed / whole,
        first_token_kl=fmean(sample.kl for sample in samples),
        **_mean("noise_floor", floor),
        **_mean("kl_increase", increases),
        **_over("kl_increase", increases, floor),
        **_mean("kl_to_as_computed", shifts),
        **_over("kl_to_as_computed", shifts, floor),
        top1_agreement=fmean(sample.top1_agrees for sample in samples),
        same_answer=fmean(sample.same_answer for sample in samples),
        exact_match=fmean(sample.exact for sample in samples) if subject.items[0].answer else None,
    )


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    low, high = mean_interval(values, num_resamples=NUM_RESAMPLES)
    return {name: fmean(values), f"{name}_low": low, f"{name}_high": high}


def _over(name: str, values: Sequence[float], floor: Sequence[float]) -> dict[str, float]:
    differences = [value - limit for value, limit in zip(values, floor, strict=True)]
    low, high = mean_interval(differences, num_resamples=NUM_RESAMPLES)
    return {f"{name}_over_floor_low": low, f"{name}_over_floor_high": high}


# -- the table


def show_answers(runs: Sequence[AnswersRun], echo: Callable[[str], None]) -> None:
    """The floor, then a line per run; whether a figure is above or below the floor, or the interval leaves it open."""
    first = runs[0]
    echo(
        f"{first.model}, head dimension {first.head_dim}: {first.num_samples} questions, chunks of "
        f"{first.chunk_tokens:.0f} tokens; KL of the first token in nats (95 % interval)"
    )
    echo(f"bf16 noise floor {_interval(first.noise_floor, first.noise_floor_low, first.noise_floor_high)}")
    echo(
        f"{'mode':<7}{'computed':<10}{'stored':<9}{'share':>6}{'KL':>10}  {'increase':<32}{'floor':<7}"
        f"{'from as computed':<32}{'floor':<7}{'top-1':>6}{'same':>7}{'exact':>7}"
    )
    for run in runs:
        increase = _interval(run.kl_increase, run.kl_increase_low, run.kl_increase_high)
        shift = _interval(run.kl_to_as_computed, run.kl_to_as_computed_low, run.kl_to_as_computed_high)
        exact = "-" if run.exact_match is None else f"{run.exact_match:.3f}"
        echo(
            f"{run.mode:<7}{run.dtype:<10}{run.kv_dtype:<9}{run.byte_share:>6.3f}{run.first_token_kl:>10.2e}  "
            f"{increase:<32}{_against(run.kl_increase_over_floor_low, run.kl_increase_over_floor_high):<7}"
            f"{shift:<32}{_against(run.kl_to_as_computed_over_floor_low, run.kl_to_as_computed_over_floor_high):<7}"
            f"{run.top1_agreement:>6.3f}{run.same_answer:>7.3f}{exact:>7}"
        )
    echo("")


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.1e} ({low:.1e} to {high:.1e})"


def _against(low: float, high: float) -> str:
    """
    >>> _against(-2e-4, -1e-4), _against(1e-4, 2e-4), _against(-1e-4, 2e-4)
    ('below', 'above', 'open')
    """
    return "below" if high < 0 else "above" if low > 0 else "open"
