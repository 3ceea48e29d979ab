"""A pytest plugin, `-p v2_runner`, that runs vLLM's Model Runner V2, the default on GPUs, on its CPU build.

The runner's kernels are written in Triton, which has no backend for CPUs on any index: they are interpreted. vLLM looks
for an active backend when it is imported, so one that compiles nothing is registered before that. Engines have to be in
this process.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        """Return True: vLLM takes Triton for usable where one backend's driver is."""
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton.backends.backends["cpu"] = _Backend
