"""Experimental: makes LMCache's own in-process blending start on unpatched vLLM, with `RAGBLEND_LMCACHE=1`.

LMCache's blender asks its VLLMModelTracker for the model, and nothing registers one there (LMCache/LMCache#4131). This
entry point of `vllm.general_plugins` does. Nothing else of ragblend has to do with it, and nothing depends on it; its
selection attends to later tokens, see docs/vllm.md. Of it all, the registration was run; the blending needs CUDA.
"""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "RAGBLEND_LMCACHE"


def register() -> None:
    """Wrap `Worker.load_model` so that LMCache learns of the model. Does nothing unless RAGBLEND_LMCACHE=1."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.load_model
    if getattr(original, "tells_lmcache", False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from lmcache.integration.vllm.utils import ENGINE_NAME
        from lmcache.v1.compute.models.utils import VLLMModelTracker

        result = original(self, *args, **kwargs)
        VLLMModelTracker.register_model(ENGINE_NAME, self.get_model())
        return result

    load_model.tells_lmcache = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


def launch_line(model: str) -> str:
    """How to start vLLM with LMCache's blending of `model`."""
    return (
        f"{VARIABLE}=1 PYTHONHASHSEED=0 LMCACHE_ENABLE_BLENDING=True LMCACHE_USE_LAYERWISE=True LMCACHE_LOCAL_CPU=True "
        'LMCACHE_CHUNK_SIZE=256 LMCACHE_BLEND_SPECIAL_STR=" # # " LMCACHE_BLEND_CHECK_LAYERS=1 '
        f"LMCACHE_BLEND_RECOMPUTE_RATIOS=0.15 vllm serve {model} --no-enable-prefix-caching --enforce-eager "
        """--attention-backend FLASH_ATTN --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", """
        """"kv_role": "kv_both", "kv_connector_extra_config": {"use_layerwise": true}}'"""
    )
