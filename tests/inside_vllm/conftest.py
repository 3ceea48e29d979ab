"""Tiny random models on disk, for vLLM engines. `make test-vllm` runs these tests; without vLLM they are left out."""

from __future__ import annotations

import gc
import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
sys.path.append(str(Path(__file__).parents[1]))  # the independent CacheBlend lives there

from harness import SIZES
from tiny_models import stock_models


@pytest.fixture(scope="session", autouse=True)
def _models_are_inspected_here():
    """To look at a model's class, vLLM starts a process that imports vLLM, 20 s for each class: it must not initialize
    CUDA in this one. On a CPU there is nothing to initialize, and an engine here loads the class afterwards anyway."""
    from vllm.model_executor.models import registry

    gc.collect()
    gc.freeze()  # as tests/conftest.py does: an engine that stops collects garbage, in a million objects of vLLM's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def stock():
    """`stock(family)`: the transformers model that `checkpoint` saves, float32. Shared, untouched."""
    return stock_models(**SIZES)


@pytest.fixture(scope="session")
def checkpoint(stock, make_tokenizer, tmp_path_factory):
    """`checkpoint(family)`: its directory."""

    @cache
    def build(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        stock(family).save_pretrained(path)
        make_tokenizer().save_pretrained(path)
        return path

    return build
