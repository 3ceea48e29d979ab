"""Types of options as keyword arguments, for type checkers.

Generated from the dataclasses in `options` by `python -m tools.option_keywords`. Change the options there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ragblend.options import ContextPolicy, Deviation, DiskBudget, KvDtype, Mode, RatioChoice


class TierKeywords(TypedDict, total=False):
    """Types of TierOptions."""

    memory_gib: float
    disk_gib: DiskBudget
    kv_dir: str | None
    remote: str | None
    remote_timeout_s: float
    catalog: str | None
    kv_dtype: KvDtype


class ModelKeywords(TypedDict, total=False):
    """Types of the keyword arguments of `ModelOptions.from_keywords`."""

    dtype: Any
    device: Any
    device_map: str | int | Mapping[str, Any] | None
    attn_implementation: str | None
    revision: str | None
    cache_dir: Any
    local_files_only: bool
    trust_remote_code: bool
    adapter: Any
    model_kwargs: Mapping[str, Any] | None
    torch_dtype: Any


class LoadKeywords(TierKeywords, ModelKeywords, total=False):
    """Types of LoadOptions and ModelOptions."""

    system: str | None
    namespace: str
    on_miss: str
    shadow: float
    context: ContextPolicy | None
    auto_profile: bool | None
    new_model: bool
    max_num_seqs: int | None
    vllm_options: Mapping[str, Any] | None
    api_key: str | None
    read_timeout_s: float | None
    max_retries: int | None


class GenerationKeywords(TypedDict, total=False):
    """Types of GenerationOptions."""

    check_layers: Sequence[int] | None
    recompute_ratios: Sequence[float] | None
    deviation: Deviation | None
    deviation_thresholds: Sequence[float] | None
    blend_min_tokens: int | None
    mode: Mode
    rule: str
    recompute_ratio: RatioChoice
    refine_ratio: float | None
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: Sequence[str] | None
    structured_outputs: Mapping[str, Any] | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: bool
    top_logprobs: int | None
