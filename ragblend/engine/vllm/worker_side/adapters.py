"""LoRA adapters in vLLM's layers: blending runs the layers with the base model's weights.

vLLM replaces the linear layers of a model by layers that add, for each row of a batch, the product of the row's
adapter. A mapping, set before each engine step, says which row has which adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_adapters(manager: Any, num_rows: int) -> Iterator[None]:
    """Map all rows to no adapter inside the block, and restore the mapping afterwards.

    `manager`: vLLM's LoRA manager of the model; None without LoRA. `num_rows`: the most rows of a call in the block.
    The engine step has run its layers, but its logits are computed after the block, by the step's own mapping.
    """
    if manager is None:
        yield
        return
    from vllm.lora.layers import LoRAMapping

    mapping = manager._last_mapping  # None before the first step
    manager.set_adapter_mapping(LoRAMapping((0,) * num_rows, (0,), is_prefill=True))
    try:
        yield
    finally:
        if mapping is not None:
            manager.set_adapter_mapping(mapping)
