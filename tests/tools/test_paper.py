"""The table of mechanisms in docs/paper.md: each row has a verdict, and names that exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ragblend.cli.app import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.partition("## Mechanisms")[2].splitlines()
    if line.startswith("| ") and not line.startswith("| what")
]
NAMED = re.compile(r"`([^`]+)`")
MIN_ROWS = 73  # mechanisms, parameters and baselines that an audit of the paper, LMCache and their readers has found


def test_the_table_has_a_row_for_each_audited_mechanism():
    assert len(ROWS) >= MIN_ROWS
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row[0])[:40])
def test_each_row_has_a_verdict_and_names_that_exist(row):
    _, place, verdict, shown = row
    kind, _, reason = verdict.partition(":")
    assert kind.split(";")[0] in ("same", "more", "differs", "absent")
    assert reason or kind not in ("differs", "absent"), "give the reason"
    (proof,) = NAMED.findall(shown)
    for name in [proof, *(each for each in NAMED.findall(place) if each.startswith("ragblend/"))]:
        assert exists(name), name


def exists(name: str) -> bool:
    """Return True for a file of the checkout, a module that `python -m` runs, or a command of `ragblend`."""
    if name.startswith("python -m "):
        return find_spec(name.split()[2]) is not None
    if name.startswith("ragblend "):
        return name.split()[1] in {command.name or command.callback.__name__ for command in app.registered_commands}
    return (ROOT / name).is_file()
