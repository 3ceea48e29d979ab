"""Saved models that the tests of this folder share, and a separate cache of digests for each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def own_digest_cache(tmp_path_factory, monkeypatch):
    """Store digests of weights in a new folder, apart from other tests and from the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory, tiny_model, make_tokenizer):
    """Function `saved_model(family, **config)`: folder of the saved model. Shared; a test must only change a copy."""
    root = tmp_path_factory.mktemp("models")

    def save(family: str, **config: Any) -> Path:
        path = root / "-".join([family, *(f"{name}-{value}" for name, value in config.items())])
        if not path.is_dir():
            model = tiny_model(family)
            for name, value in config.items():
                setattr(model.config, name, value)
            model.save_pretrained(path)
            make_tokenizer().save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="session")
def saved(saved_model):
    """Folder of a tiny Llama."""
    return saved_model("llama")
