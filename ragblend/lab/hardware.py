"""Predicted times of a model on hardware that has not been measured: data sheet rates, and the host's time.

A layer takes as long as the slower of its arithmetic and its memory traffic (the roofline model: Williams, Waterman,
Patterson, CACM 2009), part by part, at the share of the data sheet's rates that was reached where it was measured.
The host, which starts each operation, works at the same time, but no GPU has shown yet how much of its time that hides.
So it is added to the GPU's for a blended request. `ragblend plan` and `benchmarks.hardware_model` share these costs.
Read `predict_profile` first; benchmarks/RESULTS.md compares it with measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragblend.engine.fusion.rules import CHECK_LAYER, PROBE_DEPTHS, SelectionRule
from ragblend.engine.tuning.loading_controller import MachineProfile
from ragblend.errors import UsageError
from ragblend.lab.model_sizes import ModelSizes
from ragblend.option_fields import default_of
from ragblend.options import TierOptions

PROBED_SHARE = PROBE_DEPTHS[1]  # share of the layers that the question runs through before tokens are selected
ATTENTION_TILE = 128  # queries that share one reading of the keys in a full prefill
TILE_ROWS = 64  # recomputed rows that share one reading of the keys


class Operations(NamedTuple):
    """Operations that the host starts for each layer: full prefill, full reuse, and rules that measure deviations or
    run a query probe (data/results/operations.json)."""

    full: float
    reuse: float
    deviation: float
    probe: float


BY_KERNELS = Operations(38.0, 38.1, 37.1, 69.9)
"""Of a blend with Triton's kernels, as on a GPU. No GPU has timed it."""
BY_TORCH = Operations(38.0, 51.1, 57.1, 125.6)
"""Of a blend by torch alone, as on a CPU."""
MATCH_S = 3.4e-6
"""Seconds of the tokenizer and of matching for each token of a prompt (TTFT - stall_s - fuse_s there)."""
READ_BYTES_PER_S = 1.9e9
"""What the engine reads from a disk at most, checksums included: from files in the page cache (there, `loading`)."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device by its data sheet, and what was reached of it where that was measured."""

    name: str
    flops: float  # dense operations per second, in bfloat16 on a GPU and float32 on a CPU
    memory: float  # bytes per second of the device's memory
    bus: float  # bytes per second from the host's memory, one way
    nbytes: int | None  # size of the device's memory; None for a CPU, whose memory is the host's
    share: float = 0.5  # of the rates, that full prefill reaches (gpu-h100.json, 4,096 to 32,768 tokens)
    operation_s: float = 26e-6  # of the host (there: 21 microseconds for each of 47 launches of 38 operations)
    loaded: float = 54e9  # bytes per second of stored KV from the memory tier to its place (there: `copies`)
    operations: Operations = BY_KERNELS

    @property
    def is_gpu(self) -> bool:
        """Return True for a GPU."""
        return self.nbytes is not None


GPUS = {
    gpu.name: gpu
    for gpu in (
        Hardware("L4", 121e12, 0.3e12, 32e9, 24 * 10**9, loaded=27e9),
        Hardware("A10", 125e12, 0.6e12, 32e9, 24 * 10**9, loaded=27e9),
        Hardware("A100", 312e12, 2.039e12, 32e9, 80 * 10**9, loaded=27e9),
        Hardware("H100", 989e12, 3.35e12, 64e9, 80 * 10**9),
        Hardware("H200", 989e12, 4.8e12, 64e9, 141 * 10**9),
    )
}
"""NVIDIA's data sheets of L4, A10, A100 80GB SXM, H100 SXM and H200 SXM: bfloat16 tensor operations without sparsity,
memory bandwidth and size. The bus is PCIe 4.0 or 5.0 x16, one way; its reached share is the H100's."""

CPU_CORES = 16


def cpu(num_cores: int = CPU_CORES) -> Hardware:
    """Return a server CPU with `num_cores` cores.

    Of one core: 64 float32 operations per cycle (AVX-512, two FMA units) at 2.6 GHz, and its part of eight channels of
    DDR5-4800 that 32 cores share. The reached share and the speed of placing KV are those of one thread in
    data/results/hardware-cpu.json. It is assumed that cores add up.
    """
    memory = 9.6e9 * num_cores
    return Hardware(
        f"CPU with {num_cores} cores", 166e9 * num_cores, memory, memory, None, 0.72, 6e-6, 1.7e9 * num_cores, BY_TORCH
    )


def find_hardware(name: str) -> Hardware:
    """Return the hardware of that name: a GPU, "cpu", or "cpu:CORES". Raises UsageError for another name."""
    kind, colon, cores = name.partition(":")
    if kind.lower() == "cpu" and (not colon or (cores.isdecimal() and int(cores) > 0)):
        return cpu(int(cores or CPU_CORES))
    if name.upper() not in GPUS:
        raise UsageError(
            f"no data sheet of {name!r} is known; choose {', '.join(GPUS)}, cpu or cpu:CORES, or measure the machine: "
            "ragblend profile"
        )
    return GPUS[name.upper()]


# -- costs of one layer


class Cost(NamedTuple):
    """Number of operations, and of bytes read or written in the device's memory."""

    flops: float
    memory_bytes: float

    def seconds(self, device: Hardware, share: float) -> float:
        """Return the larger of the seconds for the operations and for the memory traffic, at a share of the rates."""
        return max(self.flops / device.flops, self.memory_bytes / device.memory) / share


def seconds(costs: Sequence[Cost], device: Hardware, share: float) -> float:
    """Return the seconds of parts that run in sequence."""
    return sum(cost.seconds(device, share) for cost in costs)


def full(model: ModelSizes, tokens: int) -> list[Cost]:
    """Return the cost of one layer of full prefill: its matrices, and its attention."""
    read = sum(min(start + ATTENTION_TILE, tokens) for start in range(0, tokens, ATTENTION_TILE))
    return [
        Cost(model.linear_flops(tokens), model.layer_weights * model.itemsize),
        Cost(model.attention_flops(tokens * (tokens + 1) / 2), read * model.kv_bytes),
    ]


def recomputed(model: ModelSizes, rows: Sequence[int], num_read: int) -> list[Cost]:
    """Return the cost of one layer over the tokens at the positions `rows`, whose attention reads the KV of `num_read`
    tokens."""
    return [
        Cost(model.linear_flops(len(rows)), model.layer_weights * model.itemsize),
        Cost(model.attention_flops(sum(rows) + len(rows)), num_read * model.kv_bytes),
    ]


def asked(model: ModelSizes, tokens: int, question: int) -> list[Cost]:
    """Return the cost of one layer over the question alone, which reads the prompt's KV once."""
    return [
        Cost(model.linear_flops(question), model.layer_weights * model.itemsize),
        Cost(model.attention_flops(question * tokens), tokens * model.kv_bytes),
    ]


def placed(model: ModelSizes, tokens: int) -> Cost:
    """Return the cost of placing the stored KV of one layer: it is read and written again."""
    return Cost(0.0, 2.0 * tokens * model.kv_bytes)


def kv_reads_by_tile(positions: Sequence[int]) -> int:
    """Return the number of tokens whose KV is read if every TILE_ROWS of the ascending positions share one reading.

    >>> kv_reads_by_tile([9, 19, 20, 21])
    22
    """
    last = len(positions) - 1
    return sum(positions[min(start + TILE_ROWS - 1, last)] + 1 for start in range(0, len(positions), TILE_ROWS))


def host_s(model: ModelSizes, device: Hardware, operations: float, stored_tokens: int) -> float:
    """Return the seconds of the host: starting the operations of all layers, and bringing stored KV to the device."""
    return model.layers * (operations * device.operation_s + stored_tokens * model.kv_bytes / device.loaded)


# -- one prompt


def full_prefill_s(model: ModelSizes, device: Hardware, tokens: int) -> float:
    """Return the predicted seconds of full prefill, tokenizer included. The GPU computes while the host starts more."""
    kernels_s = model.layers * seconds(full(model, tokens), device, device.share)
    return MATCH_S * tokens + max(kernels_s, host_s(model, device, device.operations.full, 0))


def blend_s(
    model: ModelSizes, device: Hardware, rule: SelectionRule, tokens: int, question: int, ratio: float
) -> float:
    """Return the predicted seconds of blending a prompt whose tokens are stored in the memory tier, but the question's.

    `ratio`: share of the stored tokens that is recomputed; 0 is full reuse, without the rule.
    """
    stored = tokens - question
    num_rows = round(ratio * stored)
    rows = [index * stored // num_rows for index in range(num_rows)]
    question_s = seconds(asked(model, tokens, question), device, device.share)
    layer_s = question_s + placed(model, stored).seconds(device, device.share)
    if num_rows:
        layer_s += seconds(recomputed(model, rows, kv_reads_by_tile(rows)), device, device.share)
    kernels_s, operations = model.layers * layer_s, device.operations.reuse
    if num_rows and rule.probes_before_selection:
        operations = device.operations.probe
        kernels_s += PROBED_SHARE * model.layers * question_s
    elif num_rows:
        operations = device.operations.deviation
        if rule.deviation is not None:  # all tokens run through the layers before the check layer
            kernels_s += CHECK_LAYER * seconds(full(model, tokens), device, device.share)
    return MATCH_S * tokens + kernels_s + host_s(model, device, operations, stored)


def predict_profiles(
    model: ModelSizes,
    device: Hardware,
    rule: SelectionRule,
    question: int,
    ratio: float,
    kv_dtype: str = default_of(TierOptions, "kv_dtype"),
) -> Callable[[int], MachineProfile]:
    """Return a function from a prompt's tokens to the profile that is predicted for it, see `predict_profile`."""
    return lambda tokens: predict_profile(model, device, rule, tokens, question, ratio, kv_dtype)


def predict_profile(
    model: ModelSizes,
    device: Hardware,
    rule: SelectionRule,
    tokens: int,
    question: int,
    ratio: float,
    kv_dtype: str = default_of(TierOptions, "kv_dtype"),
) -> MachineProfile:
    """Return what `ragblend profile` may measure with this model and device, for prompts of `tokens` tokens.

    Its times contain the tokenizer's, as TTFT does. The shares hold at `tokens` and no other length, because the host's
    time does not depend on it. Raises UsageError for a GPU and a model in float32, whose rates the data sheets lack.
    """
    if device.is_gpu and model.itemsize > 2:
        raise UsageError(
            f"the model computes in {model.dtype}, and {device.name}'s rates are those of bfloat16; choose "
            "`dtype='bfloat16'`"
        )
    lengths = sorted({*(length for power in range(7, 21) if (length := 1 << power) < tokens), tokens})
    full_s = full_prefill_s(model, device, tokens)
    return MachineProfile(
        fingerprint="predicted",
        hardware={"predicted": device.name},
        num_layers=model.layers,
        bytes_per_token=model.stored_bytes_per_token(kv_dtype),
        prefill_s=tuple((length, full_prefill_s(model, device, length)) for length in lengths),
        shares=tuple(
            (each, blend_s(model, device, rule, tokens, question, each) / full_s)
            for each in sorted({0.0, 0.05, ratio, 0.15, 0.3, 0.5, 1.0})
        ),
    )
