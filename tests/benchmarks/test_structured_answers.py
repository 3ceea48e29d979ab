"""The benchmark of schemas: what it counts as valid, and a small run of it as users start it."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.structured import SCHEMA, is_valid, main, prompts

ANSWER = {
    "answer": "Kinport",
    "confidence": "low",
    "where": {"name": "Kinport", "kind": "city", "known": True},
    "sources": [{"passage": 1}],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"confidence": "none"},
        {"where": {"name": "Kinport", "kind": "city"}},
        {"sources": []},
        {"sources": [{"passage": 4}]},
        {"answer": "x" * 25},
        {"more": 1},
    ],
)
def test_what_the_schema_does_not_allow_is_not_valid(changed):
    assert is_valid(json.dumps(ANSWER))
    assert not is_valid(json.dumps(ANSWER | changed))
    assert not is_valid(json.dumps(ANSWER)[:-1])


def test_no_two_prompts_are_the_same():
    assert len(set(prompts(200))) == 200


def test_a_run_says_how_many_answers_are_valid_and_what_masks_cost(tmp_path):
    app, out = typer.Typer(), tmp_path / "out.json"
    app.command()(main)
    result = CliRunner().invoke(app, ["--model", "demo", "--answers", "2", "--compared", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["schema"] == SCHEMA
    (run,) = found["runs"]
    assert (run["num_valid"], run["num_finished"], run["num_compared"]) == (2, 2, 1)
    assert 0 < run["mask_share"] < 1
    assert run["held_to_free"] < 1  # most tokens are forced, and share a step
