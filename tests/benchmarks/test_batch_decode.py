"""`benchmarks.batch_decode`: every size beside one after another, the same answers, and a file of what was found."""

import json
import math

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.batch_decode import main

app = typer.Typer()
app.command()(main)


def test_every_size_is_measured_and_gives_the_answers_of_one_after_another(tmp_path):
    out = tmp_path / "found.json"
    options = (
        "--subjects tiny --sizes 2,5 --num-chunks 2 --chunk-tokens 12 --question-tokens 4 --answer-tokens 6 --repeats 2"
    )
    ran = CliRunner().invoke(app, [*options.split(), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    facts = json.loads(out.read_text())
    assert json.loads(ran.stdout.splitlines()[-1]) == facts
    assert facts["hardware"]["cpu"]
    assert (facts["config"]["answer_tokens"], facts["config"]["num_chunks"]) == (6, 2)
    assert [(run["model"], run["max_num_seqs"]) for run in facts["runs"]] == [("tiny", 2), ("tiny", 5)]
    for run in facts["runs"]:
        assert run["num_same_answers"] == run["max_num_seqs"]
        assert run["step_s"] > 0
        # So few tokens take less time than a busy machine adds: a speedup is a number here, and no more.
        assert all(math.isfinite(run[name]) for name in run if name.endswith("speedup"))


def test_lists_of_counts():
    from benchmarks.results import split_counts
    from ragblend.errors import UsageError

    assert split_counts("3, 6,12") == [3, 6, 12]
    for wrong in ("3.5", "a"):
        with pytest.raises(UsageError):
            split_counts(wrong)
