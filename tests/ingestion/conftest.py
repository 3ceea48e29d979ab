"""Engines of the demo model over stores in the test's folder, and a deep random model."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import make_model
from transformers import LlamaForCausalLM

from ragblend import load_engine
from ragblend.engine.fusion.rules import DEEP_MODEL_LAYERS
from ragblend.engine.transformers.engine import TransformersEngine


@pytest.fixture
def opened(tmp_path):
    """Function `opened(store="kv", **options)`: an engine over that folder in tmp_path. Closes all at the end."""
    made: list[TransformersEngine] = []

    def open_one(store: str = "kv", **options: Any) -> TransformersEngine:
        made.append(load_engine("demo", tmp_path / store, **options))
        return made[-1]

    yield open_one
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory, make_tokenizer):
    """Folder of a random model with the smallest number of layers that counts as deep."""
    path = tmp_path_factory.mktemp("deep")
    options = {"num_hidden_layers": DEEP_MODEL_LAYERS, "max_position_embeddings": 4096}
    make_model(LlamaForCausalLM, **options).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)
