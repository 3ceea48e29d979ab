"""Commands that compute nothing do not load the model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import INGEST, PLACE

from ragblend.engine.transformers import model


@pytest.fixture
def loaded(run, monkeypatch):
    """The models whose weights were loaded since the latest ingestion."""
    assert run(*INGEST, *PLACE)[0] == 0
    names = list[str]()
    real = model.load_model
    monkeypatch.setattr(model, "load_model", lambda name, *options: names.append(name) or real(name, *options))
    return names


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (INGEST, 0),
        (("ingest", "docs", "--no-precompute"), 0),
        (("ingest", "missing"), 3),
        (("ingest", "empty"), 1),
        (("precompute",), 0),
        (("remove", "docs"), 0),
        (("stats",), 0),
        (("verify",), 0),
        (("verify", "--repair"), 0),
        (("gc", "--orphans"), 0),
        (("search", "Who?"), 0),
    ],
)
def test_a_command_that_computes_nothing_loads_no_model(arguments, code, run, loaded):
    Path("empty").mkdir()
    assert run(*arguments, *PLACE)[0] == code
    assert loaded == []


def test_the_model_is_loaded_once_for_all_missing_chunks(run, loaded):
    whole = run.facts("stats", *PLACE)
    entries = {path.name: path.read_bytes() for path in Path("s/kv").rglob("*.safetensors")}
    assert run("gc", "--max-size", "0", *PLACE)[0] == 0
    facts = run.facts(*INGEST, *PLACE)
    assert len(loaded) == 1
    assert (facts["num_new_kv"], facts["num_unchanged"]) == (whole["num_stored_kv"], 4)
    assert {path.name: path.read_bytes() for path in Path("s/kv").rglob("*.safetensors")} == entries
