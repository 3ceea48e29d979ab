"""Tiny random models on disk, for vLLM engines. `make test-vllm` runs these tests; without vLLM they are left out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
sys.path.append(str(Path(__file__).parents[1]))  # the independent CacheBlend lives there

from harness import SIZES
from tiny_models import FAMILIES, make_model


@pytest.fixture(scope="session")
def stock() -> Callable[[str], Any]:
    """`stock(family)`: the transformers model that `checkpoint` saves, float32. Shared, untouched."""
    made: dict[str, Any] = {}

    def build(family: str) -> Any:
        if family not in made:
            config_class, model_class, changes = FAMILIES[family]
            made[family] = make_model(config_class, model_class, **{**SIZES, **changes})
            made[family].set_attn_implementation("eager")
        return made[family]

    return build


@pytest.fixture(scope="session")
def checkpoint(
    stock: Callable[[str], Any], make_tokenizer: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`checkpoint(family)`: its directory."""
    made: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            stock(family).save_pretrained(made[family])
            make_tokenizer().save_pretrained(made[family])
        return made[family]

    return build
